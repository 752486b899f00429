"""Columns in a trace's Parquet tables: meaning, unit, alignment and meaning of NULL."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field, replace
from functools import partial

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
    alignment: str = "one value per row"
    """How values align with rows or tokens, e.g. `one value per row`."""
    null: str = "not recorded"
    """What NULL means. Empty for required columns. An optional column may be missing from older files."""
    keyword: str = ""
    """Recorder.add_sequences keyword, if it differs from the column name."""
    is_made: bool = False
    """True if the recorder fills in the column. Callers and imports cannot set it."""
    is_sampling: bool = False
    """True for a sampler setting. `compare` reports sampler settings that differ between two runs."""
    is_name: bool = False
    """True for identifiers. Integers are accepted and stored as text."""
    takes_flags: bool = False
    """True if booleans are accepted and stored as 1 and 0 (for pass/fail rewards)."""
    repeats: bool = False
    """True if many rows share the same text. Parquet dictionary-encodes such a column."""

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

    def __post_init__(self) -> None:
        object.__setattr__(self, "schema", pa.schema([column.field for column in self.columns]))
        object.__setattr__(self, "optional", frozenset(column.name for column in self.columns if column.null))

    def completed(self, batch: pa.RecordBatch) -> pa.RecordBatch | None:
        """Return the batch with NULL in columns added by later releases, or None if other columns differ."""
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
    "training step that first used the sequence, numbered as in the framework's logs (from 1)",
    null="",
)
_SEQ_ID = Column(
    "seq_id", pa.string(), "sequence name. (step, seq_id, attempt) is unique in a trace", null="",
    keyword="seq_ids", is_name=True,
)  # fmt: skip
_ATTEMPT = Column(
    "attempt",
    pa.int32(),
    "training attempt that wrote the row, from 1. A run resumed from a checkpoint repeats some steps. Views show "
    "only the newest attempt at each step",
    null="the row was recorded outside training or by an older release",
    is_made=True,
)
_WRITER = Column(
    "writer", pa.string(), "process that recorded the row (see writers/)", null="",
    is_made=True, repeats=True,
)  # fmt: skip


_setting = partial(Column, is_sampling=True)
_policy_version = partial(Column, "policy_version", pa.int64(), unit="updates")


def _score(name: str, doc: str) -> Column:
    return Column(name, FLOATS, doc, unit="nats", alignment=PER_RESPONSE_TOKEN)


def _digest(name: str, doc: str, null: str) -> Column:
    return Column(name, pa.uint64(), doc, null=null)


def _places(name: str, of: str, rows: str, null: str, *, repeats: bool) -> tuple[Column, Column]:
    start = f"index of the sequence's first row in the Zarr group's arrays ({rows})"
    return (
        Column(name, pa.string(), f"Zarr group in dense/ for this row's {of}", null=null, repeats=repeats),
        Column(f"{name}_start", pa.int64(), start, unit="rows", null=null),
    )


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
        _policy_version("optimizer updates applied to the weights that sampled the response"),
        Column("prompt_ids", TOKENS, "prompt token ids", alignment="one element per prompt token"),
        Column("response_ids", TOKENS, "response token ids, -1 if unknown", alignment=PER_RESPONSE_TOKEN, null=""),
        Column(
            "response_mask",
            FLAGS,
            "true if the token contributes to the loss, false if masked (e.g. tool output)",
            alignment=PER_RESPONSE_TOKEN,
            null="every response token contributes to the loss",
        ),
        Column("num_prompt_tokens", pa.int32(), "length of prompt_ids", unit="tokens", is_made=True),
        Column("num_response_tokens", pa.int32(), "length of response_ids", unit="tokens", null="", is_made=True),
        Column(
            "reward",
            pa.float64(),
            "weighted sum of all reward functions, before subtracting a baseline",
            takes_flags=True,
        ),
        Column(
            "rewards",
            REWARDS,
            "each reward function's value, or NaN if it returned none",
            alignment="one entry per reward function",
        ),
        Column("advantage", pa.float64(), "advantage, if one value applies to the whole response", takes_flags=True),
        Column(
            "advantages",
            FLOATS,
            "per-token advantage, if it differs by token",
            alignment=PER_RESPONSE_TOKEN,
            null="every token has the same advantage (see `advantage`)",
            keyword="advantage",
        ),
        _setting("temperature", pa.float64(), "sampling temperature (neutral: 1.0)"),
        _setting("top_p", pa.float64(), "nucleus sampling mass (neutral: 1.0)"),
        _setting("top_k", pa.int32(), "number of most probable tokens to sample from (neutral: 0, meaning all)"),
        _setting("min_p", pa.float64(), "minimum probability relative to the most probable token (neutral: 0.0)"),
        _setting("repetition_penalty", pa.float64(), "divisor for repeated tokens' logits (neutral: 1.0)"),
        _setting("max_tokens", pa.int32(), "maximum response length", unit="tokens"),
        Column(
            "finish_reason",
            pa.string(),
            "why sampling ended: `stop` (end token or stop string), `length` (max_tokens), or the engine's own term",
            repeats=True,
        ),
        _ATTEMPT,
        _WRITER,
    ),
)

SCORES_TABLE = Table(
    name=SCORES,
    doc="One row per (pass, step, sequence, iteration): one pass's scores for a sequence's tokens.",
    columns=(
        Column(
            "pass",
            pa.string(),
            "`rollout` (returned by the engine), `train` (computed by the trainer with the sampling weights), "
            "`current` (computed in the loss), `reference` (the KL term's reference model), or `replay/<arm>`",
            null="",
            repeats=True,
        ),
        Column("step", pa.int64(), "the scored sequence's step", null=""),
        Column("seq_id", pa.string(), "the scored sequence", null=""),
        Column(
            "iteration",
            pa.int32(),
            "number of times the sequence had already been used in the loss (always 0 except in `current`)",
            null="",
        ),
        _policy_version("optimizer updates applied to the weights that scored the response"),
        Column("contract", pa.string(), "hash of the pass's contract in passes/", repeats=True),
        _score(
            "logprobs",
            "the framework's logprobs for the sampled tokens, NULL for tokens without one (tool output, masked)",
        ),
        _score("entropy", "entropy over the vocabulary"),
        _score("top2_gap", "most probable token's logprob minus the runner-up's"),
        Column("forward_id", pa.int64(), "rows with the same (writer, pass, forward_id) shared a forward pass"),
        Column("forward_row", pa.int32(), "row index in the forward pass, from 0"),
        Column("forward_rows", pa.int32(), "rows in the forward pass", unit="rows"),
        Column("pad_left", pa.int32(), "padding before the prompt in the forward pass", unit="tokens"),
        Column(
            "pad_right",
            pa.int32(),
            "padding after the response in the forward pass. The forward pass's width is pad_left + prompt + response "
            "+ pad_right, summed over packed rows",
            unit="tokens",
        ),
        *_places("dense", "distributions", "one row per response token", "no distributions captured", repeats=True),
        *_places(
            "routing",
            "expert choices",
            "one row per prompt token, then one per response token",
            "not recorded, or the model is not a mixture of experts",
            repeats=False,
        ),
        _ATTEMPT,
        _WRITER,
    ),
)

METRICS_TABLE = Table(
    name=METRICS,
    doc="One row per (step, name): a value logged by the trainer. Hyperparameters are named "
    "`hyperparameter/...` and recorded at step 0 and whenever they change.",
    columns=(
        Column("step", pa.int64(), "step at which the framework logged the value", null=""),
        Column("name", pa.string(), "name used by the framework", null="", repeats=True),
        Column("value", pa.float64(), "the value, possibly NaN", null="the value is not a number (see `text`)"),
        Column("text", pa.string(), "the value, if it is not a number", null="the value is a number or None"),
        Column("logged_at", pa.timestamp("us", tz="UTC"), "when the value was recorded"),
        _ATTEMPT,
        _WRITER,
    ),
)

ENGINE_WEIGHTS_TABLE = Table(
    name=ENGINE_WEIGHTS,
    doc="One row per (step, tensor): digests of the trainer's and the engine's copies when the engine began "
    "sampling. Digests are 64-bit and computed in `dtype`. Identical bits give identical digests.",
    columns=(
        Column("step", pa.int64(), "step for which the engine sampled", null=""),
        _policy_version("optimizer updates already applied to the trainer's weights", null=""),
        Column("tensor", pa.string(), "tensor name in the engine's weight updates", null="", repeats=True),
        Column(
            "dtype",
            pa.string(),
            "the engine's compute dtype. Tensors are rounded to it before hashing",
            null="each tensor was hashed in its own dtype, because the engine runs in another process",
            repeats=True,
        ),
        _digest("trainer", "digest of the trainer's tensor with adapters merged", "not read, or not in the trainer"),
        _digest("unmerged", "digest of the trainer's tensor without its adapter", "no adapter changes the tensor"),
        _digest("given", "digest of the last tensor sent to the engine since the previous step", "nothing was sent"),
        _digest(
            "held",
            "digest of the engine's tensor (fused parameters are split first)",
            "the tensor was not read, or not found among the engine's parameters",
        ),
        Column(
            "cast",
            pa.string(),
            "dtype to which the trainer's tensor was rounded on the way to the engine, or `N values` if rows were "
            "rounded to at most N distinct values",
            null="no dtype explains the difference, or the two tensors were identical at some step",
        ),
        _ATTEMPT,
        _WRITER,
    ),
)

_EVAL_STEP = replace(_STEP, doc="optimizer updates already applied to the evaluated weights, i.e. global_step")

EVAL_SEQUENCES_TABLE = replace(
    SEQUENCES_TABLE,
    name=EVAL_SEQUENCES,
    doc="One row per evaluation sequence. Same columns as `sequences`. Not included in run statistics.",
    columns=(_EVAL_STEP, *SEQUENCES_TABLE.columns[1:]),
)

EVAL_SCORES_TABLE = replace(
    SCORES_TABLE,
    name=EVAL_SCORES,
    doc="One row per (pass, step, evaluation sequence). Same columns as `scores`. `contract` is NULL, because "
    "contracts apply only to training.",
)

_ALL = SEQUENCES_TABLE, SCORES_TABLE, METRICS_TABLE, ENGINE_WEIGHTS_TABLE, EVAL_SEQUENCES_TABLE, EVAL_SCORES_TABLE
TABLES = {table.name: table for table in _ALL}

_RESPONSE, _TOP_K, _VOCABULARY = "[response tokens]", "[response tokens, K]", "[response tokens, vocabulary]"
PER_TOKEN = "[prompt and response tokens, layers, slots]"
_array = partial(Column, null="")

ARRAYS = {
    column.name: column
    for column in (
        _array("topk_ids", pa.list_(TOKENS), "tokens, most probable first", alignment=_TOP_K, keyword="token_ids"),
        _array("topk_logprobs", pa.list_(FLOATS), "logprobs of topk_ids (nats)", alignment=_TOP_K, keyword="logprobs"),
        _array("tail_logprob", FLOATS, "logprob of all other tokens", alignment=_RESPONSE, null="computed from the top K"),
        _array("logits", pa.list_(FLOATS), "logits before temperature", alignment=_VOCABULARY),
        _array("vocabulary_logprobs", pa.list_(FLOATS), "instead of logits", alignment=_VOCABULARY, keyword="logits"),
        _array("expert_ids", pa.list_(pa.list_(pa.list_(pa.int16()))), "selected experts; -1: none", alignment=PER_TOKEN),
        Column("expert_weights", pa.list_(pa.list_(FLOATS)), "factor of each expert's output", alignment=PER_TOKEN),
    )
}  # fmt: skip
"""Arrays in dense/ with a pass's per-token values.

`alignment` is the shape of one sequence's array. `keyword` is the field of TopK, Logits or Routing that holds the
values, if its name differs from the array's. `null` is empty for required values.
"""

GIVEN = {column.name: column for column in SEQUENCES_TABLE.columns if not column.is_made}
SAMPLING = tuple(column.name for column in SEQUENCES_TABLE.columns if column.is_sampling)
TOKEN_SCORES = tuple(column.name for column in SCORES_TABLE.columns if column.type == FLOATS)
