"""Other people's names of columns, and the trace's."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from ...schemas.errors import ImportFailed
from .rowbatch import listed_names, shown_name


def parse_map(texts: Iterable[str]) -> dict[str, str]:
    """Read `theirs=ours`, one a text, as `import_parquet` takes it. Raises ImportFailed.

    >>> parse_map(["completion_ids=response_ids"])
    {'completion_ids': 'response_ids'}
    """
    found: dict[str, str] = {}
    for text in texts:
        theirs, equals, ours = text.rpartition("=")
        if not equals or not theirs:
            raise ImportFailed(f"got {text!r}; give theirs=ours, as completion_ids=response_ids", option="map")
        if found.setdefault(theirs, ours) != ours:
            raise ImportFailed(
                f"{theirs!r} becomes both {found[theirs]!r} and {ours!r}; a column has one name", option="map"
            )
    return found


def check_map(given: Mapping[str, str], files: Mapping[str, Sequence[str]], known: Collection[str], where: str) -> None:
    """Raise ImportFailed unless each name is a column of the files and becomes one of the trace's, or nothing."""
    there = list(dict.fromkeys(name for names in files.values() for name in names))
    for theirs, ours in given.items():
        if theirs not in there:
            raise ImportFailed(f"{where} has no column {theirs!r}; it has {listed_names(there)}", option="map")
        if ours and ours not in known:
            raise ImportFailed(f"{theirs!r} cannot become {ours!r}; a trace takes {', '.join(known)}", option="map")


def names_of(file: str, columns: Sequence[str], given: Mapping[str, str], known: Collection[str]) -> dict[str, str]:
    """Columns of a file that are imported, theirs -> ours. Raises ImportFailed where two become one."""
    names: dict[str, str] = {}
    owner: dict[str, str] = {}
    for theirs in columns:
        ours = given.get(theirs, theirs)
        if ours not in known:
            continue
        if theirs in names:
            raise ImportFailed(f"{file}: has two columns {theirs!r}; give each a name of its own")
        if ours in owner:
            spare = theirs if theirs == ours else owner[ours]
            raise ImportFailed(
                f"{file}: the columns {shown_name(owner[ours])} and {shown_name(theirs)} both become {ours!r}; map one "
                f"to nothing, as {spare}="
            )
        owner[ours], names[theirs] = theirs, ours
    return names
