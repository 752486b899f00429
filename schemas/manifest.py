"""trace.json: which format a folder holds, and which run it is."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from .errors import DamagedTrace, NewerTrace

FORMAT = "tim-trace"
FORMAT_VERSION = 1


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

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=2) + "\n"


def parse_manifest(text: str, where: str) -> Manifest:
    """Read trace.json; `where` is named in the error when it cannot be read."""
    try:
        content: dict[str, Any] = json.loads(text)
        version = {FORMAT: int(content["format_version"])}[content.pop("format")]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedTrace(
            f"{where}: this is not the trace.json of a trace; name the folder that `tim-trace record -o` or "
            "`tim-trace import` wrote"
        ) from error
    if version > FORMAT_VERSION:
        raise NewerTrace(
            f"{where}: trace format {version}, this tim-trace reads up to {FORMAT_VERSION}; "
            "upgrade it with: pip install --upgrade tim-trace"
        )
    known = set(Manifest.__dataclass_fields__)
    try:
        return Manifest(**{key: _tupled(value) for key, value in content.items() if key in known})
    except TypeError as error:
        raise DamagedTrace(f"{where}: {error}; the file lacks what every trace.json holds") from error


def _tupled(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
