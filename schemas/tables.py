"""Columns of a trace's Parquet tables: meaning, unit, alignment and meaning of NULL."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field, replace

import pyarrow as pa

from .layout import ENGINE_WEIGHTS, EVAL_SCORES, EVAL_SEQUENCES, METRICS, SCORES, SEQUENCES

TOKENS = pa.list_(pa.int32())
FLOATS = pa.list_(pa.float32())
FLAGS = pa.list_(pa.bool_())
REWARDS = pa.map_(pa.string(), pa.float64())

PER_RESPONSE_TOKEN = "one element per response token"


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    type: pa.DataType
    doc: str
    _: KW_ONLY
    unit: str = ""
    """Empty if the values have no unit."""
    alignment: str = "one value per row"
    """What each value or list element belongs to, such as a row or a token."""
    null: str = "not recorded"
    """Meaning of NULL; empty for a required column. Files from older releases may lack any column that is not required.
    """
    keyword: str = ""
    """Keyword of Recorder.add_sequences for this column, if it differs from the column's name."""
    is_made: bool = False
    """True if the recorder fills in the column. It is not a keyword of Recorder.add_sequences, and imports do not read
    it."""
    is_sampling: bool = False
    """True for a sampler setting; `compare` reports runs that differ in one."""
    is_name: bool = False
    """True for identifiers, for which integers are accepted and stored as text."""
    takes_flags: bool = False
    """True if booleans are accepted as 1 and 0, for rewards that are pass/fail checks."""
    repeats: bool = False
    """True if many rows have the same text, so that Parquet dictionary-encodes the column."""

    @property
    def field(self) -> pa.Field:
        return pa.field(self.name, self.type, nullable=bool(self.null))


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    name: str
    doc: str
    columns: tuple[Column, ...]
    schema: pa.Schema = field(init=False, repr=False, compare=False)
    optional: frozenset[str] = field(init=False, repr=False, compare=False)
    """Columns that may be missing from a file."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "schema", pa.schema([column.field for column in self.columns]))
        object.__setattr__(self, "optional", frozenset(column.name for column in self.columns if column.null))

    def completed(self, batch: pa.RecordBatch) -> pa.RecordBatch | None:
        """Return the batch with NULLs for columns that older releases lacked; None if the batch belongs to another
        table."""
        schema, names = self.schema, set(batch.schema.names)
        if not set(schema.names) - names <= self.optional or not names <= set(schema.names):
            return None
        arrays = [
            batch[field.name] if field.name in names else pa.nulls(batch.num_rows, field.type) for field in schema
        ]
        if any(not array.type.equals(field.type) for array, field in zip(arrays, schema, strict=True)):
            return None
        return pa.RecordBatch.from_arrays(arrays, schema=schema)


_STEP = Column(
    "step",
    pa.int64(),
    "training step that first used the sequence, as numbered in the framework's logs (the first is 1)",
    null="",
)
_SEQ_ID = Column(
    "seq_id", pa.string(), "name of the sequence; (step, seq_id, attempt) is unique in the trace", null="",
    keyword="seq_ids", is_name=True,
)  # fmt: skip
_ATTEMPT = Column(
    "attempt",
    pa.int32(),
    "training attempt that wrote the row, from 1. A run resumed from a checkpoint repeats some steps; views show "
    "only the newest attempt of each step",
    null="not recorded in training, or written by an older release",
    is_made=True,
)
_WRITER = Column(
    "writer", pa.string(), "name of the process that recorded the row, which has a file in writers/", null="",
    is_made=True, repeats=True,
)  # fmt: skip


def _setting(name: str, type: pa.DataType, doc: str, unit: str = "") -> Column:
    return Column(name, type, doc, unit=unit, is_sampling=True)


def _score(name: str, doc: str) -> Column:
    return Column(name, FLOATS, doc, unit="nats", alignment=PER_RESPONSE_TOKEN)


def _digest(name: str, doc: str, null: str) -> Column:
    return Column(name, pa.uint64(), doc, null=null)


SEQUENCES_TABLE = Table(
    name=SEQUENCES,
    doc="One row per sequence: a sampled prompt and response.",
    columns=(
        _STEP,
        _SEQ_ID,
        Column(
            "group_id",
            pa.string(),
            "sequences with the same group_id and step share a prompt and a baseline",
            keyword="group_ids",
            is_name=True,
            repeats=True,
        ),
        Column(
            "policy_version",
            pa.int64(),
            "number of optimizer updates already applied to the sampling weights",
            unit="updates",
        ),
        Column("prompt_ids", TOKENS, "token ids of the prompt", alignment="one element per prompt token"),
        Column("response_ids", TOKENS, "token ids of the response", alignment=PER_RESPONSE_TOKEN, null=""),
        Column(
            "response_mask",
            FLAGS,
            "true if the token contributes to the loss; false for tool output and other masked tokens",
            alignment=PER_RESPONSE_TOKEN,
            null="every response token contributes to the loss",
        ),
        Column("num_prompt_tokens", pa.int32(), "length of prompt_ids", unit="tokens", is_made=True),
        Column("num_response_tokens", pa.int32(), "length of response_ids", unit="tokens", null="", is_made=True),
        Column(
            "reward",
            pa.float64(),
            "weighted sum of the reward functions, before subtracting a baseline",
            takes_flags=True,
        ),
        Column(
            "rewards",
            REWARDS,
            "value of each reward function; NaN if the function returned none",
            alignment="one entry per reward function",
        ),
        Column("advantage", pa.float64(), "advantage, if one value applies to the whole response", takes_flags=True),
        Column(
            "advantages",
            FLOATS,
            "advantage of each token, if it differs by token",
            alignment=PER_RESPONSE_TOKEN,
            null="the same for every token: see advantage",
            keyword="advantage",
        ),
        _setting("temperature", pa.float64(), "sampling temperature; neutral: 1.0"),
        _setting("top_p", pa.float64(), "nucleus sampling mass; neutral: 1.0"),
        _setting("top_k", pa.int32(), "number of most probable tokens sampled from; neutral: 0 (all)"),
        _setting("min_p", pa.float64(), "minimum probability relative to the most probable token; neutral: 0.0"),
        _setting("repetition_penalty", pa.float64(), "divisor of the logits of repeated tokens; neutral: 1.0"),
        _setting("max_tokens", pa.int32(), "maximum number of response tokens", "tokens"),
        Column(
            "finish_reason",
            pa.string(),
            "reason why sampling ended: `stop` (an end token or stop string), `length` (max_tokens), or the engine's own term",
            repeats=True,
        ),
        _ATTEMPT,
        _WRITER,
    ),
)

SCORES_TABLE = Table(
    name=SCORES,
    doc="One row per (pass, step, sequence, iteration): the scores of one pass for each token of one sequence.",
    columns=(
        Column(
            "pass",
            pa.string(),
            "`rollout` (returned by the engine), `train` (computed by the trainer with the sampling weights), "
            "`current` (computed in the loss), `reference` (reference model of the KL term), or `replay/<arm>`",
            null="",
            repeats=True,
        ),
        Column("step", pa.int64(), "the step of the sequence that was scored", null=""),
        Column("seq_id", pa.string(), "the sequence that was scored", null=""),
        Column(
            "iteration",
            pa.int32(),
            "number of times the sequence was already used in the loss; 0 for all passes except `current`",
            null="",
        ),
        Column(
            "policy_version",
            pa.int64(),
            "number of optimizer updates already applied to the scoring weights",
            unit="updates",
        ),
        Column("contract", pa.string(), "hash of the pass's contract, which is stored in passes/", repeats=True),
        _score(
            "logprobs",
            "log-probability of each sampled token, as the framework computed it; an element is NULL if the pass has no logprob for the token (tool output, masked parts)",
        ),
        _score("entropy", "entropy of the token's distribution"),
        _score("top2_gap", "logprob of the most probable token minus that of the second most probable"),
        Column("forward_id", pa.int64(), "rows with the same (writer, pass, forward_id) shared a forward pass"),
        Column("forward_row", pa.int32(), "index of the row in its forward pass, from 0"),
        Column("forward_rows", pa.int32(), "number of rows in the forward pass", unit="rows"),
        Column("pad_left", pa.int32(), "number of padding tokens before the prompt in the forward pass", unit="tokens"),
        Column(
            "pad_right",
            pa.int32(),
            "number of padding tokens after the response in the forward pass, whose width is pad_left + prompt + "
            "response + pad_right (summed over its rows if they are packed)",
            unit="tokens",
        ),
        Column(
            "dense",
            pa.string(),
            "Zarr group below dense/ that holds this row's distributions",
            null="none were captured",
            repeats=True,
        ),
        Column(
            "dense_start",
            pa.int64(),
            "index of this sequence's first row in the group's arrays, which have one row per response token",
            unit="rows",
            null="none were captured",
        ),
        Column(
            "routing",
            pa.string(),
            "Zarr group below dense/ with the routers' expert choices for this row's tokens",
            null="not recorded, or no mixture of experts",
        ),
        Column(
            "routing_start",
            pa.int64(),
            "index of this sequence's first row in the group's arrays, which have one row per prompt token, then per response token",
            unit="rows",
            null="not recorded, or no mixture of experts",
        ),
        _ATTEMPT,
        _WRITER,
    ),
)

METRICS_TABLE = Table(
    name=METRICS,
    doc="One row per (step, name): a value logged by the trainer. Hyperparameters are named "
    "`hyperparameter/...` and are recorded at step 0, or at the step at which they change.",
    columns=(
        Column("step", pa.int64(), "step at which the framework logged the value", null=""),
        Column("name", pa.string(), "name, as logged by the framework", null="", repeats=True),
        Column("value", pa.float64(), "the value; may be NaN", null="the value is not a number: see text"),
        Column("text", pa.string(), "the value, if it is not a number", null="the value is a number or None"),
        Column("logged_at", pa.timestamp("us", tz="UTC"), "when the value was recorded"),
        _ATTEMPT,
        _WRITER,
    ),
)

ENGINE_WEIGHTS_TABLE = Table(
    name=ENGINE_WEIGHTS,
    doc="One row per (step, tensor): digests of the tensor in the trainer and in the engine when the engine began "
    "sampling for the step. Digests are 64-bit and computed in `dtype`; identical bits give identical digests.",
    columns=(
        Column("step", pa.int64(), "step for which the engine sampled", null=""),
        Column(
            "policy_version",
            pa.int64(),
            "number of optimizer updates already applied to the trainer's weights",
            unit="updates",
            null="",
        ),
        Column("tensor", pa.string(), "name under which the engine receives the tensor", null="", repeats=True),
        Column(
            "dtype",
            pa.string(),
            "the engine's compute dtype; all tensors are rounded to it before hashing",
            null="each tensor was hashed in its own dtype, because the engine runs in another process",
            repeats=True,
        ),
        _digest(
            "trainer",
            "digest of the trainer's tensor, with adapters merged",
            "not read, or the trainer has no tensor of this name",
        ),
        _digest("unmerged", "digest of the trainer's tensor without its adapter", "no adapter changes the tensor"),
        _digest("given", "digest of the tensor last sent to the engine since the previous step", "none was sent"),
        _digest(
            "held",
            "digest of the engine's tensor; fused parameters are split first",
            "not read, or not found among the engine's parameters",
        ),
        Column(
            "cast",
            pa.string(),
            "dtype that the trainer's tensor was rounded to on its way to the engine; `N values` if each row of the "
            "engine's tensor is the trainer's row rounded to at most N distinct values",
            null="no such dtype, or the engine's tensor is identical to the trainer's at some step",
        ),
        _ATTEMPT,
        _WRITER,
    ),
)

_EVAL_STEP = replace(
    _STEP,
    doc="number of optimizer updates already applied to the evaluated weights, i.e. global_step (0 before the first)",
)

EVAL_SEQUENCES_TABLE = replace(
    SEQUENCES_TABLE,
    name=EVAL_SEQUENCES,
    doc="One row per evaluation sequence, with the columns of `sequences`. Statistics of a run exclude them.",
    columns=(_EVAL_STEP, *SEQUENCES_TABLE.columns[1:]),
)

EVAL_SCORES_TABLE = replace(
    SCORES_TABLE,
    name=EVAL_SCORES,
    doc="One row per (pass, step, evaluation sequence), with the columns of `scores`; `contract` is NULL, because "
    "the contract of the same pass in training applies.",
)

TABLES = {
    table.name: table
    for table in (
        SEQUENCES_TABLE,
        SCORES_TABLE,
        METRICS_TABLE,
        ENGINE_WEIGHTS_TABLE,
        EVAL_SEQUENCES_TABLE,
        EVAL_SCORES_TABLE,
    )
}

GIVEN = {column.name: column for column in SEQUENCES_TABLE.columns if not column.is_made}
"""Sequence columns that Recorder.add_sequences and imports accept."""
SAMPLING = tuple(column.name for column in SEQUENCES_TABLE.columns if column.is_sampling)
TOKEN_SCORES = tuple(column.name for column in SCORES_TABLE.columns if column.type == FLOATS)
"""Score columns with one value per response token, which Recorder.add_scores accepts."""
