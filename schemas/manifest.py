"""trace.json: which format a folder holds, and which run it is."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from .documents import as_record, read_document, read_object, to_document
from .errors import DamagedTrace, NewerTrace

FORMAT = "tim-trace"
FORMAT_VERSION = 2
"""1: no checksums. 2: every writer accounts for its files, every file has checksums, and rows name their attempt."""
CHECKED_SINCE = 2

_WHAT = "the trace.json of a trace"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The one file that makes a folder a trace; written once and never changed."""

    run_id: str
    """Names the run wherever the folder goes; a UUID."""
    created_at: str
    """When recording began, ISO 8601 in UTC."""
    created_by: str
    """The tim-trace version that wrote it."""
    source: str
    """`record`, `recorder` (the Python API), or `import <format>`."""
    command: tuple[str, ...] = ()
    """The recorded command and its arguments; empty when there was none."""
    capture: str = "logprobs"
    """What is kept of each distribution: `logprobs`, `topk:K` or `logits`."""
    capture_fraction: float = 1.0
    """Share of the sequences for which it is kept."""
    weights_from: str | None = None
    """Folder of the Hugging Face checkpoints that the run saves, where weights are read from there; else None."""
    format_version: int = FORMAT_VERSION

    @property
    def is_import(self) -> bool:
        """Whether it was made of another tool's files."""
        return self.source.startswith("import ")

    @property
    def is_checked(self) -> bool:
        """Whether every file of the trace has checksums."""
        return self.format_version >= CHECKED_SINCE

    def to_json(self) -> str:
        return to_document({"format": FORMAT, **asdict(self)})


def parse_manifest(content: bytes, where: str) -> Manifest:
    """Read trace.json; `where` is named in errors. Raises DamagedTrace and NewerTrace."""
    found = read_object(content, where, _WHAT)
    version = found.get("format_version")
    if found.get("format") != FORMAT or type(version) is not int or version < 1:
        raise DamagedTrace(
            f"{where}: this is not {_WHAT}; name the folder that `tim-trace record -o` or `tim-trace import` wrote"
        )
    if version > FORMAT_VERSION:
        raise NewerTrace(
            f"{where}: trace format {version}, this tim-trace reads up to {FORMAT_VERSION}; "
            "upgrade it with: pip install --upgrade tim-trace"
        )
    values = read_document(content, where, _WHAT, needs_checksum=version >= CHECKED_SINCE)
    return as_record(values, Manifest, where, _WHAT)
