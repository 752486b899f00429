from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from urllib.parse import quote

import pyarrow as pa

from ...schemas.errors import DamagedTrace, InvalidOption
from ...schemas.layout import SCORES, SEQUENCES, SUMS
from ...schemas.sums import KINDS, OF_RUNS
from ...schemas.tables import Table
from ...tracer.parquet_file import read_footer
from ...tracer.snapshot import Examined, Snapshot, TableFile, newest_attempts, take_snapshot
from ...tracer.store import Store, first_line
from ...tracer.verified_file import VerifiedFile

MADE_OF = b"tim-trace made of"
_EDITION = 2
"""Version of the stored sums. Sums of other versions are recomputed, because before version 2, they could belong to a
different run."""

Traces = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

Pair = tuple[str, str]
"""Two passes (a, b): d = logprob(a) - logprob(b)."""

RUN_OF_FOLDER = "tim_trace_run"


@dataclass(slots=True, kw_only=True)
class Source(Snapshot):
    run: str
    newest: dict[int, int] = field(default_factory=dict)
    """Last attempt at each training step. Empty if the run was never resumed."""
    sums: dict[str, dict[Pair, VerifiedFile]] = field(default_factory=dict)
    outdated_sums: dict[tuple[str, Pair], list[str]] = field(default_factory=dict)
    covered: set[Pair] = field(default_factory=set)
    """Pairs with stored sums for every readable row."""
    run_covered: set[Pair] = field(default_factory=set)
    """Pairs in `covered` that also have stored sums over the whole run."""

    def unreadable(self, file: TableFile, error: Exception) -> DamagedTrace:
        return DamagedTrace(
            f"{self.store.shown(file.relative)} cannot be read ({first_line(error)}). Restore the file from a backup"
        )

    @property
    def segments(self) -> list[str]:
        return [entry.relative for table in (SEQUENCES, SCORES) for entry in self.files[table]]

    @property
    def passes(self) -> list[dict[str, str | None]]:
        rows: list[dict[str, str | None]] = []
        for name, digest, contract in self.contracts:
            text = json.dumps(contract, sort_keys=True)
            rows.append({"run": self.run, "pass": name, "contract": digest, "contract_json": text})
            rows[-1] |= {key: None if contract.get(key) is None else str(contract[key]) for key in ("engine", "device")}
        return rows


def run_folder(run: str) -> str:
    """Return the name of a run's folder, from which DuckDB reads the run's name. A `_` precedes the run's name, because
    DuckDB would read some names as NULL."""
    return f"{RUN_OF_FOLDER}=_{quote(run, safe='')}"


def open_source(url: str, *, examined: Examined | None = None) -> Source:
    snapshot = take_snapshot(Store(url), examined=examined)
    parts = {part.name: getattr(snapshot, part.name) for part in fields(snapshot)}
    source = Source(run=snapshot.store.name, newest=newest_attempts(snapshot), **parts)
    find_sums(source)
    return source


def open_sources(traces: Traces) -> list[Source]:
    """Open traces. If several runs have the same name, a number is added to the later ones."""
    sources: list[Source] = []
    names: set[str] = set()
    for url in [traces] if isinstance(traces, (str, os.PathLike)) else traces:
        source = open_source(os.fspath(url))
        name, number = source.run, 1
        while source.run in names:
            number += 1
            source.run = f"{name}-{number}"
        names.add(source.run)
        sources.append(source)
    if not sources:
        raise InvalidOption("no trace given; pass at least one folder", option="traces")
    return sources


def find_sums(source: Source) -> None:
    source.sums, source.outdated_sums = {}, {}
    current = set(source.segments)
    best: dict[tuple[str, Pair], tuple[int, VerifiedFile]] = {}
    for name, num_bytes in source.store.files(SUMS).items():
        try:
            found = _read_made_of(source, f"{SUMS}/{name}", num_bytes)
        except (DamagedTrace, FileNotFoundError) as error:
            source.ignored.append(f"{error}; the file is ignored and its sums are computed again")
            continue
        if found is None:
            continue
        kind, pair, covers, read = found
        # If steps were trained again, several segments contain the same sequences, so use only sums over all segments.
        fits = covers == current if source.newest else covers <= current
        known = best.get((kind, pair))
        if fits and (known is None or len(covers) >= known[0]):
            best[kind, pair] = (len(covers), read)
            worse = None if known is None else known[1]
        else:
            worse = read
        if worse is not None:
            source.outdated_sums.setdefault((kind, pair), []).append(worse.relative)
    unsealed = any(table in source.journals for table in (SEQUENCES, SCORES))
    complete: dict[str, set[Pair]] = {kind: set() for kind in KINDS}
    for (kind, pair), (count, file) in best.items():
        source.sums.setdefault(kind, {})[pair] = file
        if count == len(current) and not unsealed:
            complete[kind].add(pair)
    source.covered = set.intersection(*(complete[kind] for kind, spec in KINDS.items() if spec not in OF_RUNS))
    source.run_covered = source.covered.intersection(*(complete[spec.name] for spec in OF_RUNS))


def sums_schema(source: Source, pair: Pair, spec: Table) -> pa.Schema:
    made_of = {"edition": _EDITION, "kind": spec.name, "pair": list(pair), "covers": sorted(source.segments)}
    return spec.schema.with_metadata({MADE_OF: json.dumps(made_of).encode()})


def _read_made_of(snapshot: Snapshot, relative: str, num_bytes: int) -> tuple[str, Pair, set[str], VerifiedFile] | None:
    store = snapshot.store
    indexed = snapshot.index.footer(relative, num_bytes, relative.removesuffix(".parquet").rpartition("-")[2])
    footer = indexed or read_footer(store, relative, num_bytes)
    where = store.shown(relative)
    try:
        content = json.loads(footer.metadata[MADE_OF])
        kind, (a, b), covers = content["kind"], content["pair"], set(content["covers"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedTrace(f"{where} does not record which files its sums were computed from") from error
    if relative != sums_file(kind, footer.hash) or kind not in KINDS:
        raise DamagedTrace(f"{where}: the content does not match the checksum in the file name")
    if not footer.schema.equals(KINDS[kind].schema) or content.get("edition") != _EDITION:
        return None
    keeps_tail = indexed is not None or not store.is_local
    return kind, (a, b), covers, footer.verified(store, relative, keeps_tail=keeps_tail)


def sums_file(kind: str, footer_hash: str) -> str:
    return f"{SUMS}/{kind}-{footer_hash}.parquet"
