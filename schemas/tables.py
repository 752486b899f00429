"""Column definitions for a trace's Parquet tables: meaning, unit, alignment and meaning of NULL."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pyarrow as pa

from .layout import ENGINE_WEIGHTS, EVAL_SCORES, EVAL_SEQUENCES, METRICS, SCORES, SEQUENCES

TOKENS = pa.list_(pa.int32())
FLOATS = pa.list_(pa.float32())
FLAGS = pa.list_(pa.bool_())
REWARDS = pa.map_(pa.string(), pa.float64())

PER_RESPONSE_TOKEN = "one element per response token"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """Definition of one table column."""

    name: str
    type: pa.DataType
    doc: str
    """Description of the column's values."""
    unit: str = ""
    """Unit of the column's values; empty if they have none."""
    alignment: str = "one value per row"
    """Description of what each value or list element belongs to, such as a row or a token."""
    null: str = "not recorded"
    """Meaning of NULL in the column; empty for a required column, which is never NULL. Other columns may be missing
    from files written by older releases and are then read as NULL."""
    keyword: str = ""
    """Keyword argument of Recorder.add_sequences that supplies the values, if it differs from the column's name."""
    is_made: bool = False
    """True if the recorder fills in the values: neither a keyword nor an imported file supplies them."""
    is_sampling: bool = False
    """True if the column is a sampler setting, whose differences are reported when runs are compared."""
    is_name: bool = False
    """True if the column holds identifiers: integers are accepted and converted to text."""
    takes_flags: bool = False
    """True if booleans are accepted as 1 and 0, for rewards that are pass/fail checks."""
    repeats: bool = False
    """True if many rows share the same text, so that Parquet uses dictionary encoding for the column."""

    @property
    def field(self) -> pa.Field:
        return pa.field(self.name, self.type, nullable=bool(self.null))


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Definition of one table in the trace."""

    name: str
    doc: str
    columns: tuple[Column, ...]
    schema: pa.Schema = field(init=False, repr=False, compare=False)
    optional: frozenset[str] = field(init=False, repr=False, compare=False)
    """Names of the columns that may be missing from a file."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "schema", pa.schema([column.field for column in self.columns]))
        object.__setattr__(self, "optional", frozenset(column.name for column in self.columns if column.null))

    def completed(self, batch: pa.RecordBatch) -> pa.RecordBatch | None:
        """Return a batch with NULL in each column that is missing because an older release wrote the file.

        Returns None if the batch does not belong to this table.
        """
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
    name="step",
    type=pa.int64(),
    doc="training step that first used the sequence, as numbered in the framework's logs (the first is 1)",
    null="",
)
_SEQ_ID = Column(
    name="seq_id",
    type=pa.string(),
    doc="name of the sequence; (step, seq_id, attempt) is unique in the trace",
    null="",
    keyword="seq_ids",
    is_name=True,
)
_ATTEMPT = Column(
    name="attempt",
    type=pa.int32(),
    doc="training attempt that wrote the row, from 1: a run resumed from a checkpoint repeats some steps. Views "
    "show the newest attempt of each step",
    null="not recorded in training, or written by an older release",
    is_made=True,
)
_WRITER = Column(
    name="writer",
    type=pa.string(),
    doc="name of the process that recorded the row: a file in writers/",
    null="",
    is_made=True,
    repeats=True,
)


def _setting(name: str, type: pa.DataType, doc: str, unit: str = "") -> Column:
    return Column(name=name, type=type, doc=doc, unit=unit, is_sampling=True)


SEQUENCES_TABLE = Table(
    name=SEQUENCES,
    doc="One row per sequence: a sampled prompt and response.",
    columns=(
        _STEP,
        _SEQ_ID,
        Column(
            name="group_id",
            type=pa.string(),
            doc="sequences with the same group_id and step share a prompt and a baseline",
            keyword="group_ids",
            is_name=True,
            repeats=True,
        ),
        Column(
            name="policy_version",
            type=pa.int64(),
            doc="number of optimizer updates in the sampling weights",
            unit="updates",
        ),
        Column(name="prompt_ids", type=TOKENS, doc="token ids of the prompt", alignment="one element per prompt token"),
        Column(
            name="response_ids", type=TOKENS, doc="token ids of the response", alignment=PER_RESPONSE_TOKEN, null=""
        ),
        Column(
            name="response_mask",
            type=FLAGS,
            doc="true if the token counts in the loss; false for tool output and masked parts",
            alignment=PER_RESPONSE_TOKEN,
            null="every response token counts",
        ),
        Column(name="num_prompt_tokens", type=pa.int32(), doc="length of prompt_ids", unit="tokens", is_made=True),
        Column(
            name="num_response_tokens",
            type=pa.int32(),
            doc="length of response_ids",
            unit="tokens",
            null="",
            is_made=True,
        ),
        Column(
            name="reward",
            type=pa.float64(),
            doc="weighted sum of the reward functions, before subtracting a baseline",
            takes_flags=True,
        ),
        Column(
            name="rewards",
            type=REWARDS,
            doc="value of each reward function; NaN if it returned none",
            alignment="one entry per reward function",
        ),
        Column(
            name="advantage",
            type=pa.float64(),
            doc="advantage, if one value applies to the whole response",
            takes_flags=True,
        ),
        Column(
            name="advantages",
            type=FLOATS,
            doc="advantage of each token, if it differs by token",
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
            name="finish_reason",
            type=pa.string(),
            doc="reason why sampling ended: `stop` (an end token or stop string), `length` (max_tokens), or the "
            "engine's own term",
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
            name="pass",
            type=pa.string(),
            doc="`rollout` (returned by the engine), `train` (trainer, at the sampling weights), "
            "`current` (inside the loss), `reference` (of the KL term), or `replay/<arm>`",
            null="",
            repeats=True,
        ),
        Column(name="step", type=pa.int64(), doc="the step of the sequence that was scored", null=""),
        Column(name="seq_id", type=pa.string(), doc="the sequence that was scored", null=""),
        Column(
            name="iteration",
            type=pa.int32(),
            doc="number of earlier uses of the sequence in the loss; 0 for all passes but `current`",
            null="",
        ),
        Column(
            name="policy_version",
            type=pa.int64(),
            doc="number of optimizer updates in the scoring weights",
            unit="updates",
        ),
        Column(name="contract", type=pa.string(), doc="hash of the pass's contract: a file in passes/", repeats=True),
        Column(
            name="logprobs",
            type=FLOATS,
            doc="log-probability of each sampled token, as the framework computed it; an element is NULL if the pass "
            "has no logprob for the token (tool output, masked parts)",
            unit="nats",
            alignment=PER_RESPONSE_TOKEN,
        ),
        Column(
            name="entropy",
            type=FLOATS,
            doc="entropy of the token's distribution",
            unit="nats",
            alignment=PER_RESPONSE_TOKEN,
        ),
        Column(
            name="top2_gap",
            type=FLOATS,
            doc="logprob of the most probable token minus that of the second most probable",
            unit="nats",
            alignment=PER_RESPONSE_TOKEN,
        ),
        Column(
            name="forward_id",
            type=pa.int64(),
            doc="rows with the same (writer, pass, forward_id) shared a forward",
        ),
        Column(name="forward_row", type=pa.int32(), doc="index of the row in its forward, from 0"),
        Column(name="forward_rows", type=pa.int32(), doc="number of rows in the forward", unit="rows"),
        Column(
            name="pad_left",
            type=pa.int32(),
            doc="number of padding tokens before the prompt in the forward",
            unit="tokens",
        ),
        Column(
            name="pad_right",
            type=pa.int32(),
            doc="number of padding tokens after the response in the forward; its width is pad_left + prompt + response "
            "+ pad_right, summed over packed rows",
            unit="tokens",
        ),
        Column(
            name="dense",
            type=pa.string(),
            doc="Zarr group below dense/ that holds this row's distributions",
            null="none were captured",
            repeats=True,
        ),
        Column(
            name="dense_start",
            type=pa.int64(),
            doc="index of this sequence's first row in the group's arrays, which have one row per response token",
            unit="rows",
            null="none were captured",
        ),
        Column(
            name="routing",
            type=pa.string(),
            doc="Zarr group below dense/ with the routers' expert choices for this row's tokens",
            null="not recorded, or no mixture of experts",
        ),
        Column(
            name="routing_start",
            type=pa.int64(),
            doc="index of this sequence's first row in the group's arrays, which have one row per prompt token, then "
            "per response token",
            unit="rows",
            null="not recorded, or no mixture of experts",
        ),
        _ATTEMPT,
        _WRITER,
    ),
)

METRICS_TABLE = Table(
    name=METRICS,
    doc="One row per (step, name): a value logged by the trainer. Hyperparameters are named `hyperparameter/...`, at step 0 or the step from which a new value applies.",
    columns=(
        Column(name="step", type=pa.int64(), doc="step at which the framework logged the value", null=""),
        Column(name="name", type=pa.string(), doc="name, as logged by the framework", null="", repeats=True),
        Column(
            name="value", type=pa.float64(), doc="the value; may be NaN", null="the value is not a number: see text"
        ),
        Column(
            name="text",
            type=pa.string(),
            doc="the value, if it is not a number",
            null="the value is a number or None",
        ),
        Column(name="logged_at", type=pa.timestamp("us", tz="UTC"), doc="when it was recorded"),
        _ATTEMPT,
        _WRITER,
    ),
)

ENGINE_WEIGHTS_TABLE = Table(
    name=ENGINE_WEIGHTS,
    doc="One row per (step, tensor): digests of the trainer's tensor at the time when the engine began sampling for "
    "the step, and of the engine's. Digests have 64 bits and are computed in `dtype`; equal bits give equal "
    "digests.",
    columns=(
        Column(name="step", type=pa.int64(), doc="step for which the engine sampled", null=""),
        Column(
            name="policy_version",
            type=pa.int64(),
            doc="number of optimizer updates in the trainer's weights",
            unit="updates",
            null="",
        ),
        Column(
            name="tensor",
            type=pa.string(),
            doc="name under which the engine receives the tensor",
            null="",
            repeats=True,
        ),
        Column(
            name="dtype",
            type=pa.string(),
            doc="the engine's compute dtype; all tensors are rounded to it before hashing",
            null="the tensor's own dtype: the engine is in another process",
            repeats=True,
        ),
        Column(
            name="trainer",
            type=pa.uint64(),
            doc="digest of the trainer's tensor, adapters merged",
            null="not read, or the trainer has no tensor of this name",
        ),
        Column(
            name="unmerged",
            type=pa.uint64(),
            doc="digest of the trainer's tensor without its adapter",
            null="no adapter changes the tensor",
        ),
        Column(
            name="given",
            type=pa.uint64(),
            doc="digest of the tensor last sent to the engine since the previous step",
            null="none was sent",
        ),
        Column(
            name="held",
            type=pa.uint64(),
            doc="digest of the engine's tensor, split from fused parameters",
            null="not read, or not found among the engine's parameters",
        ),
        Column(
            name="cast",
            type=pa.string(),
            doc="dtype that, applied to the trainer's tensor, yields the engine's; `N values` if each row of the engine's "
            "tensor is the trainer's rounded to at most N distinct values",
            null="no such dtype, or the engine has the trainer's tensor from some step",
        ),
        _ATTEMPT,
        _WRITER,
    ),
)

_EVAL_STEP = replace(
    _STEP, doc="number of optimizer updates in the evaluated weights: global_step (0 before the first)"
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
    doc="One row per (pass, step, evaluation sequence), with the columns of `scores`; `contract` is NULL: the pass's training "
    "contract applies.",
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
"""Sequence columns that Recorder.add_sequences and imports accept, by name."""
SAMPLING = tuple(column.name for column in SEQUENCES_TABLE.columns if column.is_sampling)
"""Names of the columns with sampler settings."""
TOKEN_SCORES = tuple(column.name for column in SCORES_TABLE.columns if column.type == FLOATS)
"""Names of the score columns with one value per response token, which Recorder.add_scores accepts."""
