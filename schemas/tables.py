"""The columns of a trace's Parquet tables, each with its meaning, unit, alignment and neutral value."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pyarrow as pa

from .layout import ENGINE_WEIGHTS, EVAL_SCORES, EVAL_SEQUENCES, METRICS, SCORES, SEQUENCES

TOKENS = pa.list_(pa.int32())
FLOATS = pa.list_(pa.float32())
FLAGS = pa.list_(pa.bool_())
REWARDS = pa.map_(pa.string(), pa.float64())

PER_RESPONSE_TOKEN = "one element a response token"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of a table."""

    name: str
    type: pa.DataType
    doc: str
    """What the value says."""
    unit: str = ""
    """Unit of the value; empty where it has none."""
    alignment: str = "one value a row"
    """What the elements of a list stand for."""
    null: str = "not recorded"
    """What NULL says; empty where the column is never NULL, and so in every file. A file may lack any other column, being
    of a release before that: it is read as NULL."""
    keyword: str = ""
    """Keyword of Recorder.add_sequences that gives the values, where that is not the column's name."""
    is_made: bool = False
    """Whether the recorder makes the values: no keyword gives them, and no file to import."""
    is_sampling: bool = False
    """Whether it is a setting of the sampler, which two runs are compared by."""
    is_name: bool = False
    """Whether the text is a name: an integer becomes its digits."""
    takes_flags: bool = False
    """Whether True and False count as 1 and 0: a reward is often a check that passed."""
    repeats: bool = False
    """Whether many rows have the same text, so that Parquet keeps each text once."""

    @property
    def field(self) -> pa.Field:
        return pa.field(self.name, self.type, nullable=bool(self.null))


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table of the trace."""

    name: str
    doc: str
    columns: tuple[Column, ...]
    schema: pa.Schema = field(init=False, repr=False, compare=False)
    optional: frozenset[str] = field(init=False, repr=False, compare=False)
    """Columns that a file may lack."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "schema", pa.schema([column.field for column in self.columns]))
        object.__setattr__(self, "optional", frozenset(column.name for column in self.columns if column.null))

    def completed(self, batch: pa.RecordBatch) -> pa.RecordBatch | None:
        """A batch with NULL in the columns that its writer, being of an earlier release, did not know.

        None for a batch of another table.
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
    doc="training step that first trained on the sequence, as the framework numbers it in its logs (the first is 1)",
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
    doc="attempt at training that made the row, from 1: a run that resumes from a checkpoint makes some steps again. Views "
    "show a step's newest attempt",
    null="not recorded in training, or by a release that did not say",
    is_made=True,
)
_WRITER = Column(
    name="writer",
    type=pa.string(),
    doc="the process that recorded the row: a file in writers/",
    null="",
    is_made=True,
    repeats=True,
)


def _setting(name: str, type: pa.DataType, doc: str, unit: str = "") -> Column:
    return Column(name=name, type=type, doc=doc, unit=unit, is_sampling=True)


SEQUENCES_TABLE = Table(
    name=SEQUENCES,
    doc="One row a sequence: a sampled prompt and response.",
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
            doc="optimizer updates that the sampling weights had seen",
            unit="updates",
        ),
        Column(name="prompt_ids", type=TOKENS, doc="token ids of the prompt", alignment="one element a prompt token"),
        Column(
            name="response_ids", type=TOKENS, doc="token ids of the response", alignment=PER_RESPONSE_TOKEN, null=""
        ),
        Column(
            name="response_mask",
            type=FLAGS,
            doc="true where the token counts in the loss, false for tool output and masked parts",
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
            doc="the weighted sum of the reward functions, before baselines",
            takes_flags=True,
        ),
        Column(
            name="rewards",
            type=REWARDS,
            doc="each reward function's own value; NaN where the function gave none",
            alignment="one entry a reward function",
        ),
        Column(
            name="advantage",
            type=pa.float64(),
            doc="the advantage, where one value serves the whole response",
            takes_flags=True,
        ),
        Column(
            name="advantages",
            type=FLOATS,
            doc="the advantage of each token, where it differs by token",
            alignment=PER_RESPONSE_TOKEN,
            null="the same for every token: see advantage",
            keyword="advantage",
        ),
        _setting("temperature", pa.float64(), "sampling temperature; neutral: 1.0"),
        _setting("top_p", pa.float64(), "nucleus mass that sampling kept; neutral: 1.0"),
        _setting("top_k", pa.int32(), "most probable tokens that sampling kept; neutral: 0 (all)"),
        _setting("min_p", pa.float64(), "lowest share of the top probability that sampling kept; neutral: 0.0"),
        _setting("repetition_penalty", pa.float64(), "divisor of the logits of repeated tokens; neutral: 1.0"),
        _setting("max_tokens", pa.int32(), "most tokens that sampling could give", "tokens"),
        Column(
            name="finish_reason",
            type=pa.string(),
            doc="why sampling ended: `stop` (an end token or stop string), `length` (max_tokens), or the engine's own word",
            repeats=True,
        ),
        _ATTEMPT,
        _WRITER,
    ),
)

SCORES_TABLE = Table(
    name=SCORES,
    doc="One row a (pass, step, sequence, iteration): what one pass gave each token of one sequence.",
    columns=(
        Column(
            name="pass",
            type=pa.string(),
            doc="`rollout` (what the engine returned), `train` (the trainer's own at the sampling weights), "
            "`current` (inside the loss), `reference` (of the KL term), or `replay/<arm>`",
            null="",
            repeats=True,
        ),
        Column(name="step", type=pa.int64(), doc="the step of the sequence that was scored", null=""),
        Column(name="seq_id", type=pa.string(), doc="the sequence that was scored", null=""),
        Column(
            name="iteration",
            type=pa.int32(),
            doc="how often the loss had used this sequence before; 0 for every pass but `current`",
            null="",
        ),
        Column(
            name="policy_version",
            type=pa.int64(),
            doc="optimizer updates that the scoring weights had seen",
            unit="updates",
        ),
        Column(name="contract", type=pa.string(), doc="hash of the pass's contract: a file in passes/", repeats=True),
        Column(
            name="logprobs",
            type=FLOATS,
            doc="log-probability of each taken token, as the framework held it; an element is NULL where the pass "
            "gave the token none (tool output, masked parts)",
            unit="nats",
            alignment=PER_RESPONSE_TOKEN,
        ),
        Column(
            name="entropy",
            type=FLOATS,
            doc="entropy of the distribution that the token was drawn from",
            unit="nats",
            alignment=PER_RESPONSE_TOKEN,
        ),
        Column(
            name="top2_gap",
            type=FLOATS,
            doc="logprob of the most probable token minus that of the second",
            unit="nats",
            alignment=PER_RESPONSE_TOKEN,
        ),
        Column(
            name="forward_id",
            type=pa.int64(),
            doc="rows with the same (writer, pass, forward_id) went through the model together",
        ),
        Column(name="forward_row", type=pa.int32(), doc="the row's place in that forward, from 0"),
        Column(name="forward_rows", type=pa.int32(), doc="rows of that forward", unit="rows"),
        Column(name="pad_left", type=pa.int32(), doc="padding before the prompt in that forward", unit="tokens"),
        Column(
            name="pad_right",
            type=pa.int32(),
            doc="padding after the response in that forward; the width is pad_left + prompt + response + pad_right, and of packed "
            "rows their sum",
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
            doc="first row of this sequence in that group's arrays; its response tokens follow each other",
            unit="rows",
            null="none were captured",
        ),
        Column(
            name="routing",
            type=pa.string(),
            doc="Zarr group below dense/ that holds what the model's routers chose for this row's tokens",
            null="not recorded, or no mixture of experts",
        ),
        Column(
            name="routing_start",
            type=pa.int64(),
            doc="first row of this sequence in that group's arrays; its prompt's tokens and then its response's follow "
            "each other",
            unit="rows",
            null="not recorded, or no mixture of experts",
        ),
        _ATTEMPT,
        _WRITER,
    ),
)

METRICS_TABLE = Table(
    name=METRICS,
    doc="One row a (step, name): what the trainer logged. Hyperparameters have names under `hyperparameter/` and step 0, or the step from which a new value holds.",
    columns=(
        Column(name="step", type=pa.int64(), doc="the step that the framework logged the value at", null=""),
        Column(name="name", type=pa.string(), doc="the framework's own name", null="", repeats=True),
        Column(
            name="value", type=pa.float64(), doc="the value; NaN is a value", null="the value is not a number: see text"
        ),
        Column(
            name="text",
            type=pa.string(),
            doc="the value, where it is not a number",
            null="the value is a number, or was None",
        ),
        Column(name="logged_at", type=pa.timestamp("us", tz="UTC"), doc="when it was recorded"),
        _ATTEMPT,
        _WRITER,
    ),
)

ENGINE_WEIGHTS_TABLE = Table(
    name=ENGINE_WEIGHTS,
    doc="One row a (step, tensor): what the trainer held when the engine began to sample for the step, and what the engine was given. "
    "Digests have 64 bits, are taken in `dtype`, and are equal where the bits are.",
    columns=(
        Column(name="step", type=pa.int64(), doc="the step that the engine sampled for", null=""),
        Column(name="policy_version", type=pa.int64(), doc="optimizer updates of the trainer", unit="updates", null=""),
        Column(
            name="tensor", type=pa.string(), doc="the name under which the engine is given it", null="", repeats=True
        ),
        Column(
            name="dtype",
            type=pa.string(),
            doc="dtype that the engine computes in, to which every side is rounded before its digest is taken",
            null="that of the tensor: the engine is in another process",
            repeats=True,
        ),
        Column(
            name="trainer",
            type=pa.uint64(),
            doc="digest of the trainer's tensor, adapters merged",
            null="not read, or the trainer has none of this name",
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
            doc="digest of what the engine was given last, since the step before",
            null="it was given none",
        ),
        Column(
            name="held",
            type=pa.uint64(),
            doc="digest of what the engine holds, cut out of the tensors that it fuses",
            null="not read, or in no known place of the engine's parameters",
        ),
        Column(
            name="cast",
            type=pa.string(),
            doc="dtype through which the trainer's tensor gives what the engine has; `N values` where each row of the engine's "
            "rounds the trainer's to N different values at most",
            null="none, or the engine has what the trainer had at some step",
        ),
        _ATTEMPT,
        _WRITER,
    ),
)

_EVAL_STEP = replace(
    _STEP, doc="optimizer updates that the evaluated weights had seen: global_step (0 before the first)"
)

EVAL_SEQUENCES_TABLE = replace(
    SEQUENCES_TABLE,
    name=EVAL_SEQUENCES,
    doc="One row a sequence that was sampled to evaluate, with the columns of `sequences`. No figure of a run is over them.",
    columns=(_EVAL_STEP, *SEQUENCES_TABLE.columns[1:]),
)

EVAL_SCORES_TABLE = replace(
    SCORES_TABLE,
    name=EVAL_SCORES,
    doc="One row a (pass, step, sequence) of these, with the columns of `scores`; `contract` is NULL: a pass's contract is that "
    "of training.",
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
"""Columns of a sequence that Recorder.add_sequences takes, and files to import."""
SAMPLING = tuple(column.name for column in SEQUENCES_TABLE.columns if column.is_sampling)
"""Settings of the sampler."""
TOKEN_SCORES = tuple(column.name for column in SCORES_TABLE.columns if column.type == FLOATS)
"""Columns with a value of each response token, which Recorder.add_scores takes."""
