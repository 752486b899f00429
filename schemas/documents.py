"""JSON documents in a trace: trace.json, writers/<id>.json and passes/<pass>/<hash>.json."""

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
from .layout import FORMAT_VERSION

CHECKSUM = "checksum"
"""Field that holds the XXH3-128 of all other fields, serialized with sorted keys and no spaces."""
MAX_BYTES = 64 << 20
MAX_DEPTH = 64
"""Maximum nesting depth, so that recursive readers do not overflow the stack."""
_MAX_INTEGER = 1 << 64

Record = TypeVar("Record")


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")


def to_document(values: Mapping[str, object]) -> str:
    content = {name: plain(value) for name, value in values.items()}
    text = json.dumps({**content, CHECKSUM: whole_hash(_canonical(content).encode())})
    return msgspec.json.format(text, indent=1) + "\n"  # 10 times faster than json's own indentation


def read_object(content: bytes, where: str, what: str) -> dict[str, Any]:
    """Parse a document without verifying its checksum. Raises DamagedTrace."""
    try:
        values = json.loads(content.decode(), parse_int=_integer)  # json would also accept UTF-16 bytes
        _check(values, content)
    except (ValueError, TypeError, RecursionError) as error:
        raise DamagedTrace(f"{where} is not {what} ({_first_line(error)}). Restore it from a backup") from error
    return dict(values)


def _check(document: object, content: bytes) -> None:
    if not isinstance(document, dict):
        raise TypeError(f"its type is {type(document).__name__}")
    if content.count(b"{") + content.count(b"[") <= MAX_DEPTH and b"\\u" not in content:
        return  # too few brackets and no escapes, so the slow traversal would find nothing
    _check_value(document, 1)


def _check_value(value: object, depth: int) -> None:
    if isinstance(value, str):
        value.encode()  # raises UnicodeEncodeError for a lone surrogate
    elif isinstance(value, (dict, list)):
        if depth > MAX_DEPTH:
            raise ValueError(f"nesting exceeds {MAX_DEPTH} levels")
        for item in value if isinstance(value, list) else (*value, *value.values()):
            _check_value(item, depth + 1)


def _integer(text: str) -> int:
    if abs(value := int(text)) > _MAX_INTEGER:
        raise ValueError("an integer does not fit in 64 bits")
    return value


def read_document(content: bytes, where: str, what: str, *, needs_checksum: bool = True) -> dict[str, Any]:
    """Verify a document's checksum and return the other fields. Raises DamagedTrace."""
    values = read_object(content, where, what)
    checksum = values.pop(CHECKSUM, None)
    if checksum is None and not needs_checksum:
        return values
    if checksum != whole_hash(_canonical(values).encode()):
        lacks = "its checksum is missing" if checksum is None else "its content does not match its checksum"
        raise DamagedTrace(
            f"{where}: {lacks}, so this file ({what}) was changed or damaged after it was written. "
            "Restore it from a backup"
        )
    return values


def _canonical(values: Mapping[str, object]) -> str:
    try:
        return json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except ValueError:
        return canonical_json(values)


def as_record(values: Mapping[str, object], kind: type[Record], where: str, what: str) -> Record:
    """Convert fields to a dataclass, ignoring unknown ones. Raises DamagedTrace if fields are missing or mistyped."""
    try:
        return msgspec.convert(values, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise DamagedTrace(f"{where} is not {what} ({_first_line(error)}). Restore it from a backup") from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


FORMAT = "tim-trace"

_WHAT = "a trace manifest"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """trace.json, the file that makes a folder a trace. Never modified after creation."""

    run_id: str
    """Any unique text, such as a UUID."""
    created_at: str
    """Time in ISO 8601, UTC."""
    created_by: str
    """tim-trace's version, or the name and version of the program that wrote the trace."""
    source: str
    """`record`, `recorder` (the Python API), `import <format>`, or any text chosen by another program."""
    command: tuple[str, ...] = ()
    """The recorded command, one word per element."""
    capture: str = "logprobs"
    """`logprobs`, `topk:K` or `logits`."""
    capture_fraction: float = 1.0
    """Fraction of sequences (0 to 1) whose distributions were captured."""
    weights_from: str | None = None
    """Hugging Face checkpoint folder to read weights from, if any."""
    format_version: int = FORMAT_VERSION
    checksums: bool = True
    """False if files may lack checksums. Damage in such files cannot be detected."""

    @property
    def is_import(self) -> bool:
        return self.source.startswith("import ")

    def to_json(self) -> str:
        return to_document({"format": FORMAT, **asdict(self)})


def parse_manifest(content: bytes, where: str) -> Manifest:
    """Parse trace.json. Raises DamagedTrace and NewerTrace."""
    found = read_object(content, where, _WHAT)
    version = found.get("format_version")
    if found.get("format") != FORMAT or type(version) is not int or version < FORMAT_VERSION:
        raise DamagedTrace(
            f"{where} is not {_WHAT}. Pass the folder written by `tim-trace record -o` or `tim-trace import`"
        )
    if version > FORMAT_VERSION:
        raise NewerTrace(
            f"{where}: trace format {version} is too new for this tim-trace, which reads formats up to {FORMAT_VERSION}. "
            "Upgrade tim-trace with: pip install --upgrade tim-trace"
        )
    values = read_document(content, where, _WHAT, needs_checksum=found.get("checksums") is not False)
    return as_record(values, Manifest, where, _WHAT)


# --- writers/<id>.json: one process's files, environment and exit state

OPEN, CLOSED, FAILED = "open", "closed", "failed"
COMPACTION = "compact"
"""Name prefix for writers that merge other writers' files."""
LAUNCHER = "record"
"""Writer name for `tim-trace record` itself. An id is appended if the name is taken."""


@dataclass(slots=True, kw_only=True)
class WriterState:
    """One writer: its process, its files and whether it finished."""

    writer: str
    """Name of this document without `.json`, and prefix of all the writer's file names."""
    run_id: str = ""
    """As in trace.json."""
    state: str = OPEN
    """`open` while the writer may still write, `closed` after its last record, `failed` if it stopped early."""
    error: str | None = None
    """Why recording stopped early."""
    host: str = ""
    boot_id: str | None = None
    """Boot id of the machine when the writer started. If it has changed since then, the process has ended."""
    pid_namespace: str | None = None
    pid: int = 0
    process_start: int | None = None
    """Process start time in clock ticks since boot. Together with `pid`, it identifies the process."""
    rank: int | None = None
    opened_at: str = ""
    closed_at: str | None = None
    """When the writer closed. None if it is still open or its process was killed."""
    attempt: int | None = None
    """Training attempt, counted from 1 and incremented when a run is resumed. None outside training."""
    attempt_key: str | None = None
    """Key shared by all writers in an attempt. For `tim-trace record` itself, the prefix of these keys."""
    files: dict[str, SealedFile] = field(default_factory=dict)
    """Finished files, keyed by path in the trace."""
    replaced: tuple[str, ...] = ()
    """Other writers' files that were merged into this writer's files but are not yet deleted. Readers ignore them."""
    journals: tuple[str, ...] = ()
    """Journals with rows that are not in Parquet files yet."""
    torn_journals: dict[str, int] = field(default_factory=dict)
    """Size (bytes) of the incomplete last record in each journal that was sealed after its process died."""
    sources: dict[str, SealedFile] = field(default_factory=dict)
    """Imported files, keyed by path in the imported folder. `num_rows` is the number of lines read."""
    import_options: dict[str, str] = field(default_factory=dict)
    """Options that later imports into the same trace must repeat."""
    attached_from: str | None = None
    is_removed: bool = False
    """True while this writer's files are being deleted. Readers ignore them."""
    program: tuple[str, ...] = ()
    exit_code: int | None = None
    """Exit code of the recorded command. Set only for `tim-trace record` itself."""
    hooks: dict[str, str] = field(default_factory=dict)
    """Version of each recorded framework, by name."""
    not_recorded: tuple[str, ...] = ()
    """One sentence for each kind of data that could not be recorded, with the reason."""
    num_sequences: int = 0
    num_tokens: int = 0
    num_eval_sequences: int = 0
    spent_s: float = 0.0
    """Time that hooks spent in the recorded program's own thread, including waits (seconds)."""
    cpu_s: float | None = None
    """CPU seconds used by hooks and writer threads. None until the process ends."""
    waited_s: float = 0.0
    """Time that the recorded program waited for the file system (seconds)."""
    model: dict[str, Any] = field(default_factory=dict)
    """Description of the trained model, such as its class and config (see `Recorder.describe`)."""
    tokenizer: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of installed packages, by name."""

    @property
    def is_launcher(self) -> bool:
        return self.writer == LAUNCHER or self.writer.startswith(f"{LAUNCHER}-")

    def to_json(self) -> str:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in ("files", "sources"):
            values[name] = {path: asdict(file) for path, file in values[name].items()}
        return to_document(values)


def command_exit_code(states: Iterable[WriterState]) -> int | None:
    """Return the first non-zero exit code in the newest recording, None if a node is still running, else 0."""
    launched = sorted((state for state in states if state.is_launcher), key=lambda state: state.opened_at)
    codes = [
        state.exit_code
        for state in launched
        if state is launched[-1] or (state.attempt_key is not None and state.attempt_key == launched[-1].attempt_key)
    ]
    return next((code for code in codes if code), None if None in codes or not codes else 0)


def parse_writer_state(content: bytes, where: str, *, needs_checksum: bool = True) -> WriterState:
    what = "a writer's state"
    return as_record(read_document(content, where, what, needs_checksum=needs_checksum), WriterState, where, what)


# --- Contracts: the settings that determine a pass's logprobs

Contract = dict[str, Any]

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
"""Short names of dtypes -> names in torch."""

CONTRACT_KEYS = (
    "engine",
    "dtype",
    "model",
    "config",
    "torch",
    "versions",
    "temperature",
    "packing",
    "moe_layers",
    "mode",
)
"""Settings that tim-trace reads from a contract, and `mode`, which is no misspelt `model`. All others are recorded and
compared, too."""

PREFIX_TREE = "prefix_tree"
"""Value of `packing` for TRL's TreeRow, a prefix tree of the samples in a forward pass."""
PACKED_ROWS = "rows"
"""Value of `packing` for rows concatenated without padding (verl's use_remove_padding)."""


def canonical_json(value: object) -> str:
    return json.dumps(plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def contract_hash(contract: Contract) -> str:
    return sha256(canonical_json(contract).encode()).hexdigest()


def engine_dtype(contract: Contract) -> str | None:
    """Return the engine's compute dtype as named in torch, or None if the contract does not state it."""
    found: object = contract
    for name in ("config", "model_config", "dtype"):
        found = found.get(name) if isinstance(found, dict) else None
    return found.removeprefix("torch.") if isinstance(found, str) else None


def plain(value: object) -> object:
    """Convert a value to JSON types, falling back to `str`."""
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
"""Settings in a contract that do not affect logprobs."""


def differences(recorded: Mapping[str, object], now: Mapping[str, object]) -> Iterator[str]:
    """Yield one sentence per changed setting, and one for all settings that were not recorded."""
    found = list(_different(recorded, now))
    yield from (f"{name}: recorded {before}, now {after}" for name, before, after in found if before is not None)
    if num := sum(before is None for _, before, _ in found):
        yield "one setting was not recorded" if num == 1 else f"{num} settings were not recorded"


def _different(
    recorded: Mapping[str, object], now: Mapping[str, object], path: str = ""
) -> Iterator[tuple[str, object, object]]:
    for name in sorted({*recorded, *now} - _NOT_NUMERIC):
        before, after = recorded.get(name), now.get(name)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from _different(before, after, f"{path}{name}.")
        elif before != after:
            yield f"{path}{name}", before, after
