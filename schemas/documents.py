"""The JSON documents of a trace: trace.json (format version and identity of the run), writers/<id>.json, and the
contracts of passes.

Each document has a checksum, and the type of every field is checked when it is read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any, TypeVar

import msgspec

from .checksums import SealedFile, whole_hash
from .errors import DamagedTrace, NewerTrace

CHECKSUM = "checksum"
"""Name of the checksum field, which holds the XXH3-128 of the other fields, as JSON with sorted keys and no spaces."""
MAX_BYTES = 64 << 20
MAX_DEPTH = 64
"""Maximum nesting depth of a document, so that recursive readers do not overflow the stack."""
_MAX_INTEGER = 1 << 64

Record = TypeVar("Record")


def now() -> str:
    """Return the current UTC time in ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def to_document(values: Mapping[str, Any]) -> str:
    """Return `values` as JSON with a checksum."""
    content = plain(values)
    text = json.dumps({**content, CHECKSUM: whole_hash(_canonical(content).encode())})
    return msgspec.json.format(text, indent=1) + "\n"  # 10 times faster than json's own indentation


def read_object(content: bytes, where: str, what: str) -> dict[str, Any]:
    """Parse a document without verifying its checksum. Raises DamagedTrace, with `where` and `what` in the message."""
    try:
        values = json.loads(content.decode(), parse_int=_integer)  # json would also accept UTF-16 bytes
        _check(values, content)
    except (ValueError, TypeError, RecursionError) as error:
        raise DamagedTrace(f"{where}: not {what} ({_first_line(error)}); restore it from a backup") from error
    return dict(values)


def _check(document: Any, content: bytes) -> None:
    """Raise ValueError or TypeError for values that readers cannot process. `content` is the text of the document."""
    if not isinstance(document, dict):
        raise TypeError(f"it is of type {type(document).__name__}")
    if content.count(b"{") + content.count(b"[") <= MAX_DEPTH and b"\\u" not in content:
        return  # no value can be invalid, and visiting all of them would take longer than parsing
    waiting: list[tuple[int, Any]] = [(1, document)]
    while waiting:
        depth, value = waiting.pop()
        if isinstance(value, str):
            value.encode()  # raises for a lone surrogate, which cannot be printed
        elif isinstance(value, (dict, list)):
            if depth > MAX_DEPTH:
                raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")
            inside = value if isinstance(value, list) else (*value, *value.values())
            waiting += [(depth + 1, item) for item in inside]


def _integer(text: str) -> int:
    value = int(text)
    if abs(value) > _MAX_INTEGER:
        raise ValueError("it contains an integer beyond 64 bits")
    return value


def read_document(content: bytes, where: str, what: str) -> dict[str, Any]:
    """Verify a document's checksum and return the other fields. Raises DamagedTrace."""
    values = read_object(content, where, what)
    checksum = values.pop(CHECKSUM, None)
    if checksum != whole_hash(_canonical(values).encode()):
        lacks = "its checksum is missing" if checksum is None else "its content does not match its checksum"
        raise DamagedTrace(
            f"{where}: {lacks}, so {what} was changed or damaged after it was written; restore it from a backup"
        )
    return values


def _canonical(values: dict[str, Any]) -> str:
    """Return the same text as `canonical_json`, but faster if all numbers are finite."""
    try:
        return json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except ValueError:
        return canonical_json(values)


def as_record(values: Mapping[str, Any], kind: type[Record], where: str, what: str) -> Record:
    """Convert fields to a dataclass, ignoring unknown ones. Raises DamagedTrace for missing or mistyped fields."""
    try:
        return msgspec.convert(values, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise DamagedTrace(f"{where}: not {what} ({_first_line(error)}); restore it from a backup") from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


FORMAT = "tim-trace"
FORMAT_VERSION = 2
"""Version 1, which had no checksums, was never released and cannot be read."""

_WHAT = "the manifest of a trace"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """trace.json, the file that makes a folder a trace. It is written once and never changed."""

    run_id: str
    """UUID of the run, which stays the same if the trace folder is moved."""
    created_at: str
    """Start of the recording, ISO 8601 in UTC."""
    created_by: str
    """tim-trace version that created the trace."""
    source: str
    """How the trace was created: `record`, `recorder` (the Python API), or `import <format>`."""
    command: tuple[str, ...] = ()
    """The recorded command and its arguments; empty if there was none."""
    capture: str = "logprobs"
    """`logprobs`, `topk:K` or `logits`: see `Capture`."""
    capture_fraction: float = 1.0
    """Share of sequences, from 0 to 1, whose token distributions are kept."""
    weights_from: str | None = None
    """Folder of the run's Hugging Face checkpoints, if weights are read from there; else None."""
    format_version: int = FORMAT_VERSION

    @property
    def is_import(self) -> bool:
        return self.source.startswith("import ")

    def to_json(self) -> str:
        return to_document({"format": FORMAT, **asdict(self)})


def parse_manifest(content: bytes, where: str) -> Manifest:
    """Parse trace.json; `where` names the file in error messages. Raises DamagedTrace and NewerTrace."""
    found = read_object(content, where, _WHAT)
    version = found.get("format_version")
    if found.get("format") != FORMAT or type(version) is not int or version < FORMAT_VERSION:
        raise DamagedTrace(
            f"{where}: not {_WHAT}; pass the folder written by `tim-trace record -o` or `tim-trace import`"
        )
    if version > FORMAT_VERSION:
        raise NewerTrace(
            f"{where}: trace format {version} is newer than this tim-trace, which reads up to {FORMAT_VERSION}; "
            "upgrade it with: pip install --upgrade tim-trace"
        )
    return as_record(read_document(content, where, _WHAT), Manifest, where, _WHAT)


# --- writers/<id>.json: files, environment and exit state of one process

OPEN, CLOSED, FAILED = "open", "closed", "failed"
COMPACTION = "compact"
"""Name prefix of writers that merge other writers' files."""
LAUNCHER = "record"
"""Writer name of `tim-trace record` itself, which records the exit code; an id is appended if the name is taken."""


@dataclass(slots=True, kw_only=True)
class WriterState:
    """One writer: its process, its files and whether it finished."""

    writer: str
    """Name of the writer, which is also the prefix of its file names."""
    run_id: str = ""
    state: str = OPEN
    """`open` while it may still write, `closed` after its last record, `failed` if it stopped early."""
    error: str | None = None
    host: str = ""
    boot_id: str | None = None
    """Id of the machine's current boot; None if the system does not provide one."""
    pid_namespace: str | None = None
    """PID namespace of `pid`; None if the system does not provide one."""
    pid: int = 0
    process_start: int | None = None
    """Start of the process, in clock ticks since boot. Together with the pid, it identifies the process."""
    rank: int | None = None
    """Rank in the process group; None without a process group."""
    opened_at: str = ""
    """ISO 8601 in UTC."""
    closed_at: str | None = None
    """ISO 8601 in UTC; None while the writer is open or if its process was killed."""
    attempt: int | None = None
    """Training attempt, from 1; resuming a run begins a new one. None outside training."""
    attempt_key: str | None = None
    """Key shared by all writers of an attempt. For `tim-trace record` itself, the prefix shared by the keys of all its
    attempts."""
    files: dict[str, SealedFile] = field(default_factory=dict)
    """Sealed files, by path in the trace."""
    replaced: tuple[str, ...] = ()
    """Other writers' files that were merged into this writer's. Readers ignore them until they are removed."""
    journals: tuple[str, ...] = ()
    """Paths of journals that are not sealed yet."""
    torn_journals: dict[str, int] = field(default_factory=dict)
    """For each journal that was sealed after its process died: size in bytes of the incomplete record at the end."""
    sources: dict[str, SealedFile] = field(default_factory=dict)
    """The imported files as they were during the import, by path in the imported folder; `num_rows` is the number of
    lines that were read."""
    import_options: dict[str, str] = field(default_factory=dict)
    """Options that later imports into the same trace must repeat."""
    attached_from: str | None = None
    """Folder from which this writer attached weights; None for other writers."""
    is_removed: bool = False
    """True while the writer's files are being removed; readers ignore them."""
    program: tuple[str, ...] = ()
    exit_code: int | None = None
    """Exit code of the recorded command; None except for `tim-trace record` itself."""
    hooks: dict[str, str] = field(default_factory=dict)
    """Versions of the hooked libraries."""
    not_recorded: tuple[str, ...] = ()
    """What could not be recorded and why, one sentence each."""
    num_sequences: int = 0
    num_tokens: int = 0
    """Number of response tokens in these sequences."""
    num_eval_sequences: int = 0
    """Number of evaluation sequences, which num_sequences and num_tokens do not include."""
    spent_s: float = 0.0
    """Time that hooks added to the recorded program's thread, in seconds, including time spent waiting."""
    cpu_s: float | None = None
    """CPU seconds of this process's hooks and writer threads; None until the process ends."""
    waited_s: float = 0.0
    """Time that the recorded program spent waiting for the disk, in seconds."""
    model: dict[str, Any] = field(default_factory=dict)
    """The trained model: name, class, config, number of parameters, dtypes."""
    tokenizer: dict[str, Any] = field(default_factory=dict)
    """The tokenizer: name, class, vocabulary size, hash."""
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of all installed libraries."""

    @property
    def is_launcher(self) -> bool:
        """True for `tim-trace record` itself, which records only the command's exit code."""
        return self.writer == LAUNCHER or self.writer.startswith(f"{LAUNCHER}-")

    def to_json(self) -> str:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in ("files", "sources"):
            values[name] = {path: asdict(file) for path, file in values[name].items()}
        return to_document(values)


def command_exit_code(states: Iterable[WriterState]) -> int | None:
    """Return the first non-zero exit code among the nodes of the newest recording. If there is none, return None while
    a node is still running, else 0."""
    launched = sorted((state for state in states if state.is_launcher), key=lambda state: state.opened_at)
    codes = [
        state.exit_code
        for state in launched
        if state is launched[-1] or (state.attempt_key is not None and state.attempt_key == launched[-1].attempt_key)
    ]
    return next((code for code in codes if code), None if None in codes or not codes else 0)


def parse_writer_state(content: bytes, where: str) -> WriterState:
    what = "a writer's state"
    return as_record(read_document(content, where, what), WriterState, where, what)


# --- Contracts: all settings that determine a pass's numbers, as JSON identified by a hash

Contract = dict[str, Any]

PREFIX_TREE = "prefix_tree"
"""Value of `packing` for TRL's TreeRow, where the samples in a forward pass form a tree of shared prefixes."""
PACKED_ROWS = "rows"
"""Value of `packing` for rows that are concatenated without padding, as with verl's use_remove_padding."""


def canonical_json(value: Any) -> str:
    """Return `value` as JSON with sorted keys and no spaces."""
    return json.dumps(plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def contract_hash(contract: Contract) -> str:
    """Return the SHA-256 of a contract's canonical JSON, 64 hexadecimal digits.

    >>> contract_hash({"dtype": "float32", "engine": "trl"}) == contract_hash({"engine": "trl", "dtype": "float32"})
    True
    """
    return sha256(canonical_json(contract).encode()).hexdigest()


def engine_dtype(contract: Contract) -> str | None:
    """Return a recorded engine's compute dtype, named as in torch; None if the contract does not state one."""
    found: Any = contract
    for name in ("config", "model_config", "dtype"):
        found = found.get(name) if isinstance(found, dict) else None
    return found.removeprefix("torch.") if isinstance(found, str) else None


def plain(value: Any) -> Any:
    """Convert a value to JSON types; anything that JSON cannot represent becomes its `str`."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, (dict, Mapping)):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(item) for item in value), key=str)
    return str(value)


_NOT_NUMERIC = {"source", "arm", "attention_kernels", "built_in", "head", "sample"}
"""Fields that describe a pass but do not affect its numbers."""


def differences(recorded: Mapping[str, Any], now: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Yield `field: recorded X, now Y` for each field that differs."""
    for name in sorted({*recorded, *now} - _NOT_NUMERIC):
        before, after = recorded.get(name), now.get(name)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from differences(before, after, f"{path}{name}.")
        elif before != after:
            yield f"{path}{name}: recorded {before}, now {after}"
