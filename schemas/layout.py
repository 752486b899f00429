from __future__ import annotations

import re
from dataclasses import dataclass

FORMAT_VERSION = 2
"""Version of the trace format. Version 1 had no checksums. It was never released and cannot be read."""

MANIFEST = "trace.json"
SEQUENCES, SCORES, METRICS = "sequences", "scores", "metrics"
EVAL_SEQUENCES, EVAL_SCORES = "eval_sequences", "eval_scores"
PASSES, DENSE, SUMS, WRITERS, JOURNAL = "passes", "dense", "sums", "writers", "journal"
TOKENIZER, WEIGHTS, ENGINE_WEIGHTS = "tokenizer", "weights", "engine_weights"
INDEX = "index"
LOCATE = "locate"
TABLES = (SEQUENCES, SCORES, METRICS, ENGINE_WEIGHTS, EVAL_SEQUENCES, EVAL_SCORES)
FOLDERS = (*TABLES, PASSES, DENSE, SUMS, WEIGHTS, WRITERS, JOURNAL, TOKENIZER, INDEX, LOCATE)

TRAIN_SPLIT, EVAL_SPLIT = "train", "eval"
SPLITS = {TRAIN_SPLIT: (SEQUENCES, SCORES), EVAL_SPLIT: (EVAL_SEQUENCES, EVAL_SCORES)}

HYPERPARAMETER = "hyperparameter/"
ROUTING = "_routing"
"""Prefix for Zarr groups with router choices. Pass names never start with an underscore, so they cannot clash."""
TEMPORARY_PREFIX = ".tmp-"
RESERVE_PREFIX = f"{TEMPORARY_PREFIX}reserve-"
REPLACED_PREFIX = f"{TEMPORARY_PREFIX}replaced-"
"""Prefix for folders that hold a complete old trace while a new one replaces it."""
REPLACING_PREFIX = f"{TEMPORARY_PREFIX}replacing-"
"""Prefix for folders that an old trace is being moved into. Some of its files may not have been moved yet."""
BUILT_PREFIX = f"{TEMPORARY_PREFIX}new-"
"""Prefix for folders in which a trace is written before its files are moved to their final place."""
WHOLE_TRACES = (REPLACED_PREFIX, REPLACING_PREFIX, BUILT_PREFIX)

_SEGMENT = re.compile(r"(?P<writer>[A-Za-z0-9_.-]+)-(?P<number>\d{6})")


@dataclass(frozen=True, slots=True, order=True)
class Segment:
    """One writer's batch of records, kept in a journal and later sealed as Parquet and Zarr files."""

    writer: str
    number: int

    @property
    def name(self) -> str:
        return f"{self.writer}-{self.number:06d}"

    @classmethod
    def parse(cls, name: str) -> Segment | None:
        match = _SEGMENT.fullmatch(name)
        return cls(match["writer"], int(match["number"])) if match else None

    def journal(self, table: str) -> str:
        return f"{JOURNAL}/{self.name}.{table}.arrows"

    def parquet(self, table: str) -> str:
        return f"{table}/{self.name}.parquet"

    @property
    def dense(self) -> str:
        return f"{DENSE}/{self.name}"


_HEX16, _HEX32 = "[0-9a-f]{16}", "[0-9a-f]{32}"
_WRITER = r"[A-Za-z0-9_.-]+"
_SEGMENT_NAME = rf"{_WRITER}-\d{{6}}"
PASS_NAME = r"[A-Za-z0-9][A-Za-z0-9_.+=-]*(?:/[A-Za-z0-9][A-Za-z0-9_.+=-]*)*"
_ZARR = r"(?:[A-Za-z0-9_.+=-]+/)*(?:zarr\.json|c(?:/\d+)+)"
_TOKENIZER_NAMES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "vocab.txt", "spiece.model", "tokenizer.model", "sentencepiece.bpe.model", "chat_template.jinja", "processor_config.json",
    "preprocessor_config.json",
)  # fmt: skip
_TEMPORARY = re.compile(rf"\.tmp-(?:{_HEX32}-.+|reserve-{_WRITER}|(?:replaced|replacing|new)-{_HEX32})")
_OWN = re.compile(
    "|".join((
        re.escape(MANIFEST),
        rf"(?:{'|'.join(TABLES)})/{_SEGMENT_NAME}\.parquet",
        rf"{PASSES}/{PASS_NAME}/[0-9a-f]{{64}}\.json",
        rf"{DENSE}/{_SEGMENT_NAME}/{_ZARR}",
        rf"{WEIGHTS}/{_SEGMENT_NAME}/{_ZARR}",
        rf"{WEIGHTS}/{_SEGMENT_NAME}\.\d+\.json",
        rf"{SUMS}/[a-z_]+-[0-9a-f]+\.parquet",
        rf"{WRITERS}/{_WRITER}\.json",
        rf"{JOURNAL}/{_SEGMENT_NAME}\.[a-z_]+\.arrows",
        rf"{INDEX}/{_HEX32}\.(?:msgpack\.zst|json\.gz)",
        rf"{LOCATE}/{_HEX16}\.json",
        rf"{TOKENIZER}/(?:{'|'.join(map(re.escape, _TOKENIZER_NAMES))})",
    ))
)  # fmt: skip


_TOKENIZER_KINDS = (".json", ".jsonl", ".txt", ".model", ".jinja", ".tiktoken", ".vocab", ".bpe", ".spm")
_OF_MODELS = re.compile(
    r"(config|generation_config|adapter_config)\.json|(model|pytorch_model|adapter_model)\b.*\.json", re.I
)


def is_tokenizer(name: str) -> bool:
    """Return True for tokenizer file names, but not for code, weights or model configs.

    >>> is_tokenizer("vocab.json"), is_tokenizer("config.json"), is_tokenizer("modeling_x.py")
    (True, False, False)
    """
    return name.lower().endswith(_TOKENIZER_KINDS) and _OF_MODELS.fullmatch(name) is None


def is_temporary(name: str) -> bool:
    return _TEMPORARY.fullmatch(name) is not None


def is_own(relative: str) -> bool:
    """Return True if this path within a trace belongs to a file that tim-trace writes. Unusually named tokenizer files
    are not recognized.

    >>> is_own("scores/p7-0a1b-000003.parquet"), is_own("checkpoints/model.pt")
    (True, False)
    """
    return _OWN.fullmatch(relative) is not None or any(is_temporary(part) for part in relative.split("/"))
