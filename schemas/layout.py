"""Where each thing lies in a trace's folder."""

from __future__ import annotations

import re
from dataclasses import dataclass

MANIFEST = "trace.json"
SEQUENCES, SCORES, METRICS = "sequences", "scores", "metrics"
PASSES, DENSE, SUMS, WRITERS, JOURNAL = "passes", "dense", "sums", "writers", "journal"
TOKENIZER, WEIGHTS = "tokenizer", "weights"
FOLDERS = (SEQUENCES, SCORES, METRICS, PASSES, DENSE, SUMS, WEIGHTS, WRITERS, JOURNAL, TOKENIZER)
TABLES = (SEQUENCES, SCORES, METRICS)

ROUTING = "_routing"
"""Before the pass in the name of a Zarr group of router choices; no pass begins with an underscore."""
TEMPORARY_PREFIX = ".tmp-"
"""Files and folders under this prefix are not finished; readers pass over them."""

_SEGMENT = re.compile(r"(?P<writer>[A-Za-z0-9_.-]+)-(?P<number>\d{6})")


@dataclass(frozen=True, slots=True, order=True)
class Segment:
    """A writer's run of records that is sealed as a whole: one journal first, Parquet and Zarr afterwards."""

    writer: str
    number: int

    @property
    def name(self) -> str:
        return f"{self.writer}-{self.number:06d}"

    @classmethod
    def parse(cls, name: str) -> Segment | None:
        """Read `<writer>-<number>`, or None for a name that no writer gives."""
        match = _SEGMENT.fullmatch(name)
        return cls(match["writer"], int(match["number"])) if match else None

    def journal(self, table: str) -> str:
        """Path of this segment's journal for a table, relative to the trace."""
        return f"{JOURNAL}/{self.name}.{table}.arrows"

    def parquet(self, table: str) -> str:
        """Path of this segment's sealed file for a table, relative to the trace."""
        return f"{table}/{self.name}.parquet"

    @property
    def dense(self) -> str:
        """Path of this segment's Zarr group, relative to the trace."""
        return f"{DENSE}/{self.name}"
