from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import pyarrow as pa

from ..schemas.errors import InvalidOption, NothingToCompare, warn
from ..schemas.steps import ALL_STEPS
from ..tracer.cluster import connected
from ..tracer.progress import Progress, no_progress
from .correction import MACROS, Correction, define, published, token_bounds
from .correction_zones import KEYS, TYPES, Bounds, zones_of_rows
from .rows import Rows
from .trace.chunks import Chunk, run_chunks
from .trace.columns import parse_pair, tell_sampled, why_nothing
from .trace.database import Database
from .trace.macros import quoted, quoted_pair
from .trace.source import Pair, Traces
from .trace.tokens import spread
from .views import open_database

_COLUMNS = ", ".join(TYPES)

BY = {"run": "correction_runs", "step": "correction_steps", "length": "correction_lengths"}


def corrections(
    traces: Traces | Database,
    *,
    pair: str = "train:rollout",
    by: str = "run",
    steps: str = ALL_STEPS,
    token_threshold: float = 2.0,
    sequence_threshold: float = 2.0,
    icepop: str = "0.5_5.0",
    geometric: str = "0.999_1.002",
    veto: float = 1e-4,
    ray: str | None = None,
    progress: Progress = no_progress,
) -> Rows:
    """Show which recorded tokens each mismatch correction would have masked or clipped, and at what cost.

    Returns one row per correction and run, per correction and step, or (`by="length"`) per correction and sequence
    length quartile (tokens). `steps` (3:80, -10:, 2:200:2) selects steps in each run.

    With d = logprob(a) - logprob(b), a token's ratio is rho_t = exp(d). A sequence's ratios are rho_seq = exp(sum d)
    and rho_geo = exp(mean d). Exponents are clamped to +-20 nats. `kept` is the condition on rho for keeping a token or
    sequence. `bound_on` is the ratio that the paper or framework bounds.

    - A token is cut (masked) if its weight is 0, and truncated (clipped) if its weight is lowered to a bound. A
      sequence is touched if any token in it is cut. The `_positive` and `_negative` columns cover only tokens with an
      advantage above or below 0, and are NULL if there are none.
    - ess_token, ess_sequence: (sum w)^2 / (n sum w^2), where n is the number of tokens or sequences. ess_verl:
      1 / mean((w / mean w)^2) over all tokens, as verl 0.9.0 logs it, with the weights before rejection.
    - mass_cut_*: the sum of rho over cut tokens or sequences, divided by the sum over all tokens or sequences. This
      share of pass a's probability is lost, which is the bias that masking causes (richardli.xyz/rl-collapse: the bias
      of Seq-MIS is -E_a[f 1(rho > C)]).
    - bias_*: mean |rho - w|, the largest possible error in a function's mean if the function's values lie in [-1, 1],
      because E_a[f] - E_b[w f] = E_b[(rho - w) f]. With w = 1, bias_* is twice the total variation. variance_*: mean
      w^2, an upper bound on a single weighted sample's variance. If token ratios set the weight, the per-sequence
      columns are NULL. If sequence ratios set it, the per-token columns are NULL.

    `ray` is the address of a Ray cluster to spread the tokens over: `auto`, `host:port`, or `local` to start one here.

    Raises NothingToCompare if the passes share no token, InvalidOption, TraceNotFound, NewerTrace or DamagedTrace.
    """
    names = parse_pair(pair)
    if by not in BY:
        raise InvalidOption(f"got {by!r}; use {', '.join(BY)}", option="by")
    rules = _rules(names, token_threshold, sequence_threshold, icepop, geometric, veto)
    database = open_database(traces, steps, ray)
    tell_sampled(database, names)
    with connected(database.ray), _zones_read(database, names, rules, progress):
        rows = database.ask(f"SELECT * FROM {BY[by]}({quoted_pair(names)})")
    if not len(rows):
        raise NothingToCompare(why_nothing(database, names))
    _warn_of_advantages(database)
    return rows


def sentence(rows: Rows) -> str:
    """Describe the first run: the error without a correction, and which corrections change no token."""
    plain, *rules = (row for row in rows.dicts() if row["run"] == rows.dicts()[0]["run"])
    idle = sum(not (row["share_tokens_cut"] or row["share_tokens_truncated"]) for row in rules)
    error = f"without a correction, the mean of a function between -1 and 1 is off by up to {plain['bias_token']:.3g}"
    return f"{error}; {idle} of {len(rules)} corrections change no token"


def _rules(
    names: Pair, token_threshold: float, sequence_threshold: float, icepop: str, geometric: str, veto: float
) -> list[Correction]:
    for option, value in (("token-threshold", token_threshold), ("sequence-threshold", sequence_threshold)):
        if not value > 0:
            raise InvalidOption(f"got {value}; pass a ratio above 0, e.g. 2", option=option)
    if not veto >= 0:
        raise InvalidOption(f"got {veto}; pass a ratio of at least 0, e.g. 1e-4", option="veto")
    return published(
        *names, token_threshold=token_threshold, sequence_threshold=sequence_threshold, icepop=_bounds("icepop", icepop),
        geometric=_bounds("geometric", geometric), veto=veto,
    )  # fmt: skip


def _bounds(option: str, text: str) -> tuple[float, float]:
    low, _, high = text.partition("_")
    try:
        bounds = float(low), float(high)
    except ValueError:
        bounds = (0.0, 0.0)
    if not 0 < bounds[0] <= bounds[1]:
        raise InvalidOption(f"got {text!r}; write two ratios above 0 as low_high, e.g. 0.5_5.0", option=option)
    return bounds


@contextmanager
def _zones_read(database: Database, pair: Pair, rules: Sequence[Correction], progress: Progress) -> Iterator[None]:
    connection = database.connection
    bounds = token_bounds(rules)
    chunks = [chunk for source in database.sources for chunk in run_chunks(database, source.run)]
    units = [(pair, chunk, bounds) for chunk in chunks]
    connection.execute("SET threads = 1")  # a single thread preserves row order
    columns = ", ".join(f"{name} {kind}" for name, kind in {"sequence": "BIGINT", **TYPES}.items())
    connection.execute(f"CREATE OR REPLACE TEMP TABLE read_zones (run VARCHAR, step BIGINT, {columns})")
    num_sequences = 0
    with progress("reading tokens", sum(chunk.num_tokens for chunk in chunks)) as advance:
        for chunk, rows in zip(chunks, spread(database, _of_chunk, units), strict=True):
            connection.execute("SET threads = 1")
            columns = f"{quoted(chunk.run)}, step, sequence + {num_sequences}, {_COLUMNS}"
            with connection.registered("zones_of_chunk", rows):
                connection.execute(f"INSERT INTO read_zones SELECT {columns} FROM zones_of_chunk")
            num_sequences += rows["sequence"][-1].as_py() if rows.num_rows else 0
            advance(chunk.num_tokens)
    database.define_named(MACROS.names)
    define(connection.raw, rules, zones="SELECT * FROM read_zones")
    try:
        yield
    finally:
        define(connection.raw, rules)
        connection.execute("DROP TABLE read_zones")


def _of_chunk(database: Database, unit: tuple[Pair, Chunk, Bounds]) -> Iterator[pa.Table]:
    pair, chunk, bounds = unit
    query = f"""SELECT * FROM pair_lists(
        {quoted_pair(pair)}, [{quoted(chunk.run)}], {chunk.first_step}, {chunk.last_step}
    )"""
    batches = list(database.connection.mapped_batches(query, partial(zones_of_rows, bounds)))
    with database.connection.registered("zones_of_sequences", pa.Table.from_batches(batches)):
        yield database.connection.sql(
            f"""SELECT step, dense_rank() OVER (ORDER BY {", ".join(KEYS)}) AS sequence, {_COLUMNS}
                FROM zones_of_sequences ORDER BY sequence, sign, zone"""
        ).to_arrow_table()


def _warn_of_advantages(database: Database) -> None:
    query = "SELECT count(*), count(*) FILTER (advantage IS NULL AND advantages IS NULL) FROM sequences"
    ((num_sequences, lacking),) = database.connection.execute(query).fetchall()
    if lacking:
        told = (
            "no advantages recorded, so the _positive and _negative columns are NULL; record "
            "them with Recorder.add_sequences(advantage=...) or import them"
            if lacking == num_sequences
            else f"{lacking:,} of {num_sequences:,} sequences have no advantage and are left out of the _positive "
            "and _negative columns"
        )
        warn(told)
