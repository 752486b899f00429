"""Read and write trace.json, which holds the format version and the run's identity."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from .documents import as_record, read_document, read_object, to_document
from .errors import DamagedTrace, NewerTrace

FORMAT = "tim-trace"
FORMAT_VERSION = 2
"""Version 1 has no checksums. Since version 2, writers list their files and checksums, and rows have an `attempt`."""
CHECKED_SINCE = 2

_WHAT = "the trace.json of a trace"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The file that makes a folder a trace; written once and never changed."""

    run_id: str
    """UUID of the run; unchanged when the trace folder is moved."""
    created_at: str
    """Time when recording began, ISO 8601 in UTC."""
    created_by: str
    """Version of tim-trace that created the trace."""
    source: str
    """How the trace was created: `record`, `recorder` (the Python API), or `import <format>`."""
    command: tuple[str, ...] = ()
    """The recorded command and its arguments; empty if no command was recorded."""
    capture: str = "logprobs"
    """Recording level for token distributions: `logprobs`, `topk:K` or `logits`."""
    capture_fraction: float = 1.0
    """Share of sequences, from 0 to 1, whose token distributions are kept."""
    weights_from: str | None = None
    """Folder with the run's Hugging Face checkpoints if weights are read from checkpoints; else None."""
    format_version: int = FORMAT_VERSION

    @property
    def is_import(self) -> bool:
        """True if the trace was imported from another tool's files."""
        return self.source.startswith("import ")

    @property
    def is_checked(self) -> bool:
        """True if every file of the trace has checksums."""
        return self.format_version >= CHECKED_SINCE

    def to_json(self) -> str:
        return to_document({"format": FORMAT, **asdict(self)})


def parse_manifest(content: bytes, where: str) -> Manifest:
    """Parse trace.json. `where` names the file in error messages. Raises DamagedTrace and NewerTrace."""
    found = read_object(content, where, _WHAT)
    version = found.get("format_version")
    if found.get("format") != FORMAT or type(version) is not int or version < 1:
        raise DamagedTrace(
            f"{where}: not {_WHAT}; pass the folder written by `tim-trace record -o` or `tim-trace import`"
        )
    if version > FORMAT_VERSION:
        raise NewerTrace(
            f"{where}: trace format {version} is newer than this tim-trace, which reads up to {FORMAT_VERSION}; "
            "upgrade it with: pip install --upgrade tim-trace"
        )
    values = read_document(content, where, _WHAT, needs_checksum=version >= CHECKED_SINCE)
    return as_record(values, Manifest, where, _WHAT)
