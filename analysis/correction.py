from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace

import duckdb
import pyarrow as pa

from .correction_zones import FUNCTION, Bounds, register
from .trace.database import Database
from .trace.macros import MacroFile, sql_file

_INFINITY = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """A correction rule: the weights of tokens and the conditions for rejecting sequences.

    With d = logprob(a) - logprob(b), the ratio rho is exp(d) for a token and exp(sum d) for a sequence. All bounds
    apply to d or rho, even if a framework bounds the inverse ratio.
    """

    name: str
    rule: str
    """Weight and bounds, as the paper or framework writes them."""
    bound_on: str
    """Ratio that the paper or framework bounds, e.g. a/b or b/a. Empty if there is no bound."""
    kept: str
    """Condition on rho = exp(d) for keeping a token or sequence."""
    level: str = "none"
    """Ratio that sets the weight: `token`, `sequence`, or `none` for a constant weight of 1."""
    low: float = 0.0
    """Ratios below this get weight 0."""
    high: float = _INFINITY
    """Ratios above this get weight `high` if `truncates`, else 0."""
    truncates: bool = False
    sum_low: float = -_INFINITY
    """Minimum sum(d) in a kept sequence (nats), with each d clamped to +-20."""
    sum_high: float = _INFINITY
    mean_low: float = -_INFINITY
    """Minimum mean d in a kept sequence (nats)."""
    mean_high: float = _INFINITY
    k3_high: float = _INFINITY
    """Maximum mean(exp(d) - 1 - d) in a kept sequence (nats)."""
    k2_high: float = _INFINITY
    """Maximum d^2 / 2 of any token in a kept sequence (nats)."""
    token_low: float = 0.0
    """Minimum token ratio in a kept sequence."""


def published(
    a: str = "train", b: str = "rollout", *, token_threshold: float = 2.0, sequence_threshold: float = 2.0,
    icepop: tuple[float, float] = (0.5, 5.0), geometric: tuple[float, float] = (0.999, 1.002), veto: float = 1e-4,
) -> list[Correction]:  # fmt: skip
    """Return the published corrections. The arguments do not affect the thresholds in verl's presets."""
    ratio = f"{a}/{b}"
    token, sequence, low, high = token_threshold, sequence_threshold, *icepop
    return [
        Correction(name="none", rule="w = 1", bound_on="", kept="all"),
        Correction(name="token-is", rule="w = rho_t", bound_on="", kept="all", level="token"),
        Correction(name="sequence-is", rule="w = rho_seq", bound_on="", kept="all", level="sequence"),
        _tis("token-tis", "token", token, ratio),
        replace(_masked("token-mis", "rho_t", f"rho_t <= {token:g}", ratio), level="token", high=token),
        _tis("sequence-tis", "sequence", sequence, ratio),
        replace(_masked("sequence-mis", "rho_seq", f"rho_seq <= {sequence:g}", ratio), level="sequence", high=sequence),
        _icepop("icepop", low, high, ratio),
        _geometric("geometric", "1", *geometric, ratio),
        replace(_geometric("nemo-rl/seq-mask-tis", "rho_t", 0.999, 1.002, ratio), level="token"),
        Correction(
            name="veto", rule=f"w = 1, or 0 for a sequence with any rho_t < {veto:g}", bound_on=ratio,
            kept=f"min rho_t >= {veto:g}", token_low=veto,
        ),
        Correction(
            name="trm-max", rule="w = 1 where max k2 <= 0.05, else 0; k2 = d^2 / 2", bound_on=ratio,
            kept="max (ln rho_t)^2 / 2 <= 0.05", k2_high=0.05,
        ),
        Correction(
            name="trm-avg", rule="w = 1 where mean k3 <= 0.001, else 0; k3 = exp(d) - 1 - d", bound_on=ratio,
            kept="mean (rho_t - 1 - ln rho_t) <= 0.001", k3_high=0.001,
        ),
        Correction(
            name="trm", rule="w = 1 where max k2 <= 0.1 and mean k3 <= 0.002, else 0", bound_on=ratio,
            kept="max (ln rho_t)^2 / 2 <= 0.1 and mean (rho_t - 1 - ln rho_t) <= 0.002", k2_high=0.1, k3_high=0.002,
        ),
        *_presets_of_verl(a, b),
    ]  # fmt: skip


def define(connection: duckdb.DuckDBPyConnection, corrections: Iterable[Correction], zones: str | None = None) -> None:
    rules = list(corrections)
    columns = [field.name for field in fields(Correction)]
    values = pa.Table.from_pylist([{"place": place} | asdict(rule) for place, rule in enumerate(rules)])
    connection.register("rules", values)
    connection.execute(f"CREATE OR REPLACE TABLE correction_rules AS SELECT place, {', '.join(columns)} FROM rules")
    connection.unregister("rules")
    register(connection, token_bounds(rules))
    connection.execute(sql_file("corrections").format(sequence_class=_sequence_class(rules)))
    if zones is not None:
        connection.execute(f"CREATE OR REPLACE MACRO correction_zones(a, b) AS TABLE {zones}")


MACROS = MacroFile[Database](
    name="corrections", sql=sql_file("corrections"), functions=("correction_rules", FUNCTION),
    define=lambda database: define(database.connection.raw, published()),
)  # fmt: skip


def token_bounds(rules: Iterable[Correction]) -> Bounds:
    of_tokens = [rule for rule in rules if rule.level == "token"]
    lows = {rule.low for rule in of_tokens if math.isfinite(rule.low)}
    return tuple(sorted(lows)), tuple(sorted({rule.high for rule in of_tokens if math.isfinite(rule.high)}))


def _sequence_class(rules: list[Correction]) -> str:
    weighed = [rule for rule in rules if rule.level == "sequence"]
    bounds: dict[str, tuple[list[float], list[float]]] = {
        "seq_ratio": ([rule.low for rule in weighed], [rule.high for rule in weighed]),
        "sum_c": ([rule.sum_low for rule in rules], [rule.sum_high for rule in rules]),
        "mean_c": ([rule.mean_low for rule in rules], [rule.mean_high for rule in rules]),
        "mean_k3": ([], [rule.k3_high for rule in rules]),
        "max_k2": ([], [rule.k2_high for rule in rules]),
        "min_ratio": ([rule.token_low for rule in rules], []),
    }
    number = "0"
    for name, (lows, highs) in bounds.items():
        number = f"({number}) * {len(lows) + len(highs) + 1} + {_passed(name, lows, highs)}"
    return f"coalesce({number}, 0)::BIGINT"


def _passed(value: str, lows: list[float], highs: list[float]) -> str:
    passed = [f"({value} >= {low!r}::DOUBLE)::INTEGER" for low in sorted(set(lows)) if math.isfinite(low)]
    passed += [f"({value} > {high!r}::DOUBLE)::INTEGER" for high in sorted(set(highs)) if math.isfinite(high)]
    return " + ".join(passed) or "0"


def _tis(name: str, level: str, threshold: float, ratio: str) -> Correction:
    rho = "rho_t" if level == "token" else "rho_seq"
    return Correction(
        name=name, rule=f"w = min({rho}, {threshold:g})", bound_on=ratio, kept="all", level=level, high=threshold,
        truncates=True,
    )  # fmt: skip


def _masked(name: str, weight: str, kept: str, ratio: str) -> Correction:
    return Correction(name=name, rule=f"w = {weight} where {kept}, else 0", bound_on=ratio, kept=kept)


def _geometric(name: str, weight: str, low: float, high: float, ratio: str) -> Correction:
    masked = _masked(name, weight, _between("rho_geo", low, high), ratio)
    return replace(masked, mean_low=math.log(low), mean_high=math.log(high))


def _icepop(name: str, low: float, high: float, ratio: str) -> Correction:
    return replace(_masked(name, "rho_t", _between("rho_t", low, high), ratio), level="token", low=low, high=high)


def _between(value: str, low: float, high: float) -> str:
    return f"{low:g} <= {value} <= {high:g}"


def _presets_of_verl(a: str, b: str) -> list[Correction]:
    """Return verl 0.9.0's RolloutCorrectionConfig presets. verl's k1 is -d, so bounds on it are bounds on 1 / rho."""
    ratio = f"{a}/{b}"
    kinds = {
        "geo-rs": Correction(
            name="geo-rs", rule="ln 0.999 <= seq_mean_k1 <= ln 1.001, k1 = -d", bound_on=f"{b}/{a}",
            kept=f"{1 / 1.001:.6f} <= rho_geo <= {1 / 0.999:.6f}", mean_low=-math.log(1.001), mean_high=-math.log(0.999),
        ),
        "k3-rs": Correction(
            name="k3-rs", rule="seq_mean_k3 <= 0.01", bound_on=ratio, kept="mean (rho_t - 1 - ln rho_t) <= 0.01",
            k3_high=0.01,
        ),
        "rs": Correction(
            name="rs", rule="ln 0.5 <= seq_sum_k1 <= ln 2, k1 = -d", bound_on=f"{b}/{a}", kept="0.5 <= rho_seq <= 2",
            sum_low=-math.log(2.0), sum_high=-math.log(0.5),
        ),
    }  # fmt: skip
    weights = {
        "": Correction(name="", rule="w = 1", bound_on="", kept="all"),
        "-token-tis": _tis("", "token", 2.0, ratio),
        "-seq-tis": _tis("", "sequence", 2.0, ratio),
    }

    def preset(name: str, kind: str, weight: str) -> Correction:
        cut, weighing = kinds[kind], weights[weight]
        on = cut.bound_on if not weight or cut.bound_on == ratio else f"w: {ratio}; cut: {cut.bound_on}"
        return replace(
            cut, name=f"verl/{name}", rule=f"{weighing.rule} where {cut.rule}, else 0", bound_on=on,
            level=weighing.level, high=weighing.high, truncates=weighing.truncates,
        )  # fmt: skip

    return [
        _tis("verl/token-is", "token", 2.0, ratio),
        _tis("verl/seq-is", "sequence", 2.0, ratio),
        _icepop("verl/token-icepop", 0.5, 5.0, ratio),
        preset("seq-is-rs", "rs", "-seq-tis"),
        *(preset(f"{kind}{weight}", kind, weight) for kind in ("geo-rs", "k3-rs") for weight in weights),
    ]
