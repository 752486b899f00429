"""Map column names in imported files to the trace's column names."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from ...schemas.errors import ImportFailed
from .rowbatch import listed_names, shown_name


def parse_map(texts: Iterable[str]) -> dict[str, str]:
    """Parse strings `theirs=ours` into the `map` of `import_parquet`. Raises ImportFailed.

    >>> parse_map(["completion_ids=response_ids"])
    {'completion_ids': 'response_ids'}
    """
    found: dict[str, str] = {}
    for text in texts:
        theirs, equals, ours = text.rpartition("=")
        if not equals or not theirs:
            raise ImportFailed(f"got {text!r}; give theirs=ours, for example completion_ids=response_ids", option="map")
        if found.setdefault(theirs, ours) != ours:
            raise ImportFailed(
                f"{theirs!r} is mapped to both {found[theirs]!r} and {ours!r}; map it once", option="map"
            )
    return found


def check_map(given: Mapping[str, str], files: Mapping[str, Sequence[str]], known: Collection[str], where: str) -> None:
    """Raise ImportFailed unless each name in a map is a column in the files and maps to a trace column or ""."""
    there = list(dict.fromkeys(name for names in files.values() for name in names))
    for theirs, ours in given.items():
        if theirs not in there:
            raise ImportFailed(f"{where} has no column {theirs!r}; it has {listed_names(there)}", option="map")
        if ours and ours not in known:
            raise ImportFailed(
                f"{theirs!r} cannot become {ours!r}; the columns of a trace are {', '.join(known)}", option="map"
            )


def names_of(file: str, columns: Sequence[str], given: Mapping[str, str], known: Collection[str]) -> dict[str, str]:
    """Return the columns to import from a file: file's name -> trace's name.

    Raises ImportFailed if two map to the same column.
    """
    names: dict[str, str] = {}
    owner: dict[str, str] = {}
    for theirs in columns:
        ours = given.get(theirs, theirs)
        if ours not in known:
            continue
        if theirs in names:
            raise ImportFailed(f"{file}: has two columns {theirs!r}; rename one")
        if ours in owner:
            spare = theirs if theirs == ours else owner[ours]
            raise ImportFailed(
                f"{file}: the columns {shown_name(owner[ours])} and {shown_name(theirs)} both become {ours!r}; leave one "
                f"out with {spare}="
            )
        owner[ours], names[theirs] = theirs, ours
    return names
