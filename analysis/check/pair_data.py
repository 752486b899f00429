"""Prepare the detectors' input: unexplained tokens, contracts, sums, and the precision of both passes.

Shapes: N sampled tokens in S sequences, K kept tokens (unexplained so far).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ...schemas.documents import Contract, engine_dtype
from ...schemas.steps import ALL_STEPS
from ..engine_weights import EngineVerdict
from ..trace.columns import AttemptInfo
from .sample import PairSums, Sample

Value = TypeVar("Value")

FEW_TOKENS = 500
"""Minimum number of tokens for a full check. With fewer, only gross faults can be detected."""
MIN_REST = 0.02
"""Minimum 1 - p of an informative token. At lower values, logit changes barely affect the logprob."""


def _kept(read: Callable[[Sample], np.ndarray]) -> cached_property[np.ndarray]:
    return cached_property(lambda data: np.asarray(read(data.sample)[data.keep]))


@dataclass(kw_only=True)
class PairData:
    trace: str
    steps: str = ALL_STEPS
    condition: str = ""
    """The `steps` option as an SQL condition. Empty for all steps."""
    sample: Sample
    sums: PairSums
    contracts: dict[str, Contract] = field(default_factory=dict)
    settings: dict[str, float | str] = field(default_factory=dict)
    """Recorded hyperparameters."""
    passes: list[str] = field(default_factory=list)
    has_weights: bool = False
    is_import: bool = False
    is_recorder: bool = False
    """True if the training code wrote the trace with tim_trace.Recorder."""
    model: dict[str, Any] = field(default_factory=dict)
    attempts: tuple[AttemptInfo, ...] = ()
    engine: EngineVerdict = field(default_factory=EngineVerdict)
    first: tuple[int, float] | None = None
    """The run's first step and its rms d (nats). None if `steps` includes that step."""
    reference: Callable[[], np.ndarray] | None = None
    """Reads the reference's logprobs, [N] nats, NaN where missing. None if there is no reference pass."""
    keep: np.ndarray
    """[N] bool: compared tokens that no earlier finding explains."""
    memo: dict[Any, Any] = field(default_factory=dict, init=False)

    def without(self, explained: np.ndarray) -> PairData:
        """Drop the tokens in `explained`, [N] bool."""
        return replace(self, keep=self.keep & ~explained)

    def within(self, inside: np.ndarray) -> PairData:
        """Keep only the tokens in `inside`, [K] bool."""
        return self.without(self.marked(~inside))

    def marked(self, tokens: np.ndarray) -> np.ndarray:
        """Turn a mask over kept tokens [K] into a mask over sampled tokens [N]."""
        marks = self.keep.copy()
        marks[self.keep] = tokens
        return marks

    def spread_out(self, values: np.ndarray) -> np.ndarray:
        """Turn values of kept tokens [K] into values of sampled tokens [N], NaN elsewhere."""
        out = np.full(len(self.keep), np.nan)
        out[self.keep] = values
        return out

    def corrected(self, tokens: np.ndarray, right: np.ndarray) -> PairData:
        """Correct pass b so that d is `right` ([N] nats) at `tokens` ([N] bool). Drop tokens where `right` is NaN. If
        other tokens of a row also have a large d, the whole row is probably misplaced, so keep only its `tokens`."""
        values = np.where(tokens, self.sample.a.logprobs - right, self.sample.b.logprobs)
        was = float(np.median(np.abs(self.sample.d[tokens & self.keep])))
        away = self.keep & ~tokens & (np.abs(np.nan_to_num(self.sample.d)) > was / 4)
        values[np.isin(self.sample.seq, self.sample.seq[away]) & ~tokens] = np.nan
        side = replace(self.sample.b, logprobs=values, entropy=None)
        return replace(self, sample=replace(self.sample, b=side), keep=self.keep & np.isfinite(values))

    a = _kept(lambda sample: sample.a.logprobs)
    b = _kept(lambda sample: sample.b.logprobs)
    d = _kept(lambda sample: sample.d)
    """[K] a - b (nats)."""
    seq = _kept(lambda sample: sample.seq)
    """[K] index of each token's sequence."""
    position = _kept(lambda sample: sample.position)
    """[K] position in the response, from 0."""

    @cached_property
    def updates_behind(self) -> np.ndarray:
        """Number of optimizer updates by which pass b's policy version lags behind pass a's, [S]. 0 if unknown."""
        return np.asarray((self.sample.a.versions - self.sample.b.versions).filled(0))

    @cached_property
    def entropy(self) -> np.ndarray | None:
        """Entropy of each token's distribution (nats), [K], from the first pass that has it at all kept tokens, or None."""
        known = [side.entropy[self.keep] for side in (self.sample.a, self.sample.b) if side.entropy is not None]
        return next((entropy for entropy in known if np.isfinite(entropy).all()), None)

    @cached_property
    def rest(self) -> np.ndarray:
        """[K] 1 - the larger probability of the token: its logprob's change per logit change (arXiv 2512.23087)."""
        return np.asarray(-np.expm1(np.minimum(np.maximum(self.a, self.b), 0.0)))

    @cached_property
    def scale(self) -> np.ndarray:
        """[K] d divided by the logit change that explains d (the difference in log-odds). It lies between the two
        passes' values of 1 - p, where values below 0.001 count as 0.001."""
        rest = [np.maximum(-np.expm1(np.minimum(values, 0.0)), 1e-3) for values in (self.a, self.b)]
        moved = self.d - np.log(rest[0] / rest[1])
        with np.errstate(divide="ignore", invalid="ignore"):
            scale = np.where(np.abs(moved) > 1e-4, self.d / moved, np.minimum(*rest))
        return np.asarray(np.clip(scale, np.minimum(*rest), np.maximum(*rest)))

    @cached_property
    def noise(self) -> np.ndarray:
        """[K] |d| / scale (nats): the logit change that would explain d. NaN where `rest` is at most MIN_REST."""
        return np.where(self.rest > MIN_REST, np.abs(self.d) / self.scale, np.nan)

    @cached_property
    def level_beyond_tokens(self) -> np.ndarray:
        """[K] log of `noise`, minus its mean over all tokens with the same id. What remains is the effect of location.
        Each id's mean is shrunk towards the overall mean, as if the id had ten more tokens there."""
        there = np.isfinite(self.noise)
        known = self.noise[there]
        level = np.log(known + max(0.02 * float(np.median(known)) if len(known) else 0.0, 1e-9))
        _, place = np.unique(self.sample.tokens[self.keep][there], return_inverse=True)
        centred = level - level.mean() if len(level) else level
        out = np.full(len(there), np.nan)
        out[there] = level - (np.bincount(place, centred) / (np.bincount(place) + 10.0))[place]
        return out

    @property
    def num_kept(self) -> int:
        return int(self.keep.sum())

    def rms(self, where: np.ndarray | None = None) -> float:
        return rms(self.d if where is None else self.d[where])

    @property
    def names(self) -> dict[str, str]:
        return {"a": self.sample.a.name, "b": self.sample.b.name}

    @property
    def config(self) -> dict[str, Any]:
        """The recorded model config. Empty if it is unknown, or not a mapping."""
        config = self.model.get("config")
        return config if isinstance(config, dict) else {}

    def contract(self, side: str) -> Contract:
        """Return the kept sequences' most frequent contract in pass `a` or `b`. Empty if none is recorded."""
        names = getattr(self.sample, side).contracts
        counts = Counter(names[row] for row in np.unique(self.seq) if names[row])
        return self.contracts.get(max(counts, key=lambda name: counts[name]), {}) if counts else {}


def rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(values * values))) if len(values) else 0.0


def once(work: Callable[[PairData], Value]) -> Callable[[PairData], Value]:
    @wraps(work)
    def known(data: PairData) -> Value:
        if known not in data.memo:
            data.memo[known] = work(data)
        result: Value = data.memo[known]
        return result

    return known


def declared(contract: Contract, *path: str) -> Any:
    value: Any = contract
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def named(contract: Contract, *names: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in contract.items():
        found |= named(value, *names) if isinstance(value, dict) else {name: value} if name in names else {}
    return found


# --- Precision of the passes and expected rounding

UNIT_ROUNDOFF = {"bfloat16": 2.0**-9, "float16": 2.0**-12, "tf32": 2.0**-12, "float32": 2.0**-13, "float64": 2.0**-13}
"""dtype -> relative error per rounding. TensorFloat-32 has as many mantissa bits as float16. float32 engines and trainers
differ by more than its rounding, because kernels round matmul inputs (0.0019 nats rms at 8 billion parameters)."""
NOISE_FACTOR = 20.0
"""Usual maximum of the rms logit error, in units of the roundoff times `spread`, because large logits have large errors.
Measured: 0.3 to 10 on an H100 (models with up to 130 million parameters, six attention kernels and batch shapes), 11 for
SmolLM2-135M in vLLM, and up to 16 for very sharp policies."""
HALF_ULP = {"float8_e5m2": 3, "float8": 4, "bfloat16": 8, "float16": 11}
"""dtype -> significant bits. float8 is e4m3."""
MAX_EXCESS = 2.5
"""Maximum rms logit error that can still be rounding, as a multiple of `allowed_noise`. Below it, the classifier decides.
99% of 576 held-out healthy runs with tiny, often very sharp models stay below. The largest reaches 3.5."""
FLOOR_NATS = 1e-5
"""Minimum scale assumed for d (nats). float32 logprobs of less than 16 nats in magnitude have errors around 1e-6."""


class Precision(NamedTuple):
    declared: str | None
    logits: str | None
    """dtype that the logits were rounded to."""
    values: str | None
    """dtype that the logprobs were rounded to."""
    has_tf32: bool = False
    """True if the contract allows TensorFloat-32 in float32 matmuls."""
    is_stored: bool = False
    """True if the logprobs were rounded in the imported file, so that they do not reveal the engine's precision."""

    @property
    def rounded(self) -> str | None:
        return None if self.values == "float32" else self.values

    @property
    def coarsest(self) -> str | None:
        """Coarsest declared or inferred dtype: even with float32 logits, layers before the head can be coarser."""
        seen = [self.declared] if self.declared else []
        seen += ["tf32"] if self.has_tf32 and self.declared == "float32" else []
        seen += [dtype for dtype in (self.logits, self.values) if dtype in HALF_ULP and not self.is_stored]
        return max(seen, key=lambda dtype: UNIT_ROUNDOFF.get(dtype, 0.0)) if seen else None


@once
def precisions(data: PairData) -> tuple[Precision, Precision]:
    first, second = context_pairs(data)
    recorded = data.sample.settings["temperature"]
    recorded = recorded[np.isfinite(recorded)]
    tried = [float(np.median(recorded))] if len(recorded) else np.round(np.arange(0.3, 1.51, 0.01), 2)
    temperatures, found = sorted({1.0, *tried}), []
    for side, values in (("a", data.a), ("b", data.b)):
        contract = data.contract(side)
        has_tf32 = bool(declared(contract, "torch", "cuda_matmul_allow_tf32") or declared(contract, "allow_tf32"))
        rounded = value_precision(values)
        is_stored = rounded is not None and declared(contract, "stored_as") == rounded
        logits = None if is_stored else _logit_precision(values[first] - values[second], temperatures)
        found.append(Precision(dtype_of(contract), logits, rounded, has_tf32, is_stored))
    return found[0], found[1]


def coarsest(data: PairData) -> dict[str, str | None]:
    return {f"dtype_{side}": each.coarsest for side, each in zip("ab", precisions(data), strict=True)}


def dtype_of(contract: Contract) -> str | None:
    """Return the pass's compute dtype in torch's notation, or None if the contract does not state one."""
    autocast = (str(each).removeprefix("torch.") for each in named(contract, "autocast_dtype", "autocast").values())
    dtypes = declared(contract, "model", "dtypes")
    found = (
        engine_dtype(contract), declared(contract, "model", "built_in"),
        next((dtype for dtype in autocast if dtype in UNIT_ROUNDOFF), None),
        max(dtypes, key=lambda name: dtypes[name]) if isinstance(dtypes, dict) and dtypes else None,
        declared(contract, "dtype"),
    )  # fmt: skip
    return next((str(dtype).removeprefix("torch.") for dtype in found if dtype is not None), None)


def value_precision(logprobs: np.ndarray) -> str | None:
    """Return the precision to which at least 95% of logprobs [K] were rounded: a dtype in HALF_ULP, `float32`, or a
    grid such as `3 decimals`, `steps of 0.01` or `probabilities in steps of 1/255`. None if too few values are
    informative. If both a dtype and a grid fit, the dtype wins unless the grid has less than half as many points."""
    size = np.abs(logprobs[np.isfinite(logprobs) & (logprobs > -60)]).astype(np.float32)
    telling = size[size > 1e-3]
    values, counts = np.unique(telling, return_counts=True)
    if len(values) < 8:
        return "0 decimals" if len(telling) > 100 and np.all(telling == np.round(telling)) else None
    bits = telling.view(np.uint32)
    lowest = (bits & (~bits + np.uint32(1))).astype(float)
    significant = np.quantile(24 - np.minimum(np.log2(lowest), 23), 0.95, method="higher")
    # Values near 0 are distinct as floats but all become 0 on a grid, so sizes below 0.001 count as 0.001.
    low, high = np.quantile(np.maximum(size, 1e-3), [0.05, 0.95])
    possible = {dtype: 2.0 ** (num - 1) * np.log2(high / low) for dtype, num in HALF_ULP.items() if significant <= num}
    steps = {f"{decimals} decimals": 10.0**-decimals for decimals in range(5)}
    repeated = values[counts > 1].astype(float)
    if len(repeated) >= 8 and (least := np.diff(repeated).min()) > 1e-4:
        step = f"{repeated[-1] / np.round(repeated / least).max():.6g}"
        steps[f"steps of {step}"] = float(step)
    grids = [(name, telling / step, 0.0, 2 * (high - low) / step) for name, step in steps.items()]
    for parts in (100, 127, 128, 255, 256, 1_000):  # number of equal steps from 0 to 1
        scaled = np.exp(-telling.astype(float)) * parts
        grids.append((f"probabilities in steps of 1/{parts}", scaled, 1e-5, float(parts)))
    for name, scaled, error, num_points in grids:
        if np.mean(np.abs(scaled - np.round(scaled)) < 1e-6 * np.maximum(scaled, 1) + error) >= 0.95:
            possible[name] = num_points
    return min(possible, key=lambda name: possible[name], default="float32")


@once
def allowed_noise(data: PairData) -> float:
    """Return the largest rms logit error that rounding explains (nats)."""
    # Assume bfloat16 for an unknown dtype: float16 logits do not reveal the dtype of the layers before the head.
    dtypes = [str(dtype) for side in precisions(data) for dtype in (side.declared, side.coarsest)]
    return NOISE_FACTOR * max(UNIT_ROUNDOFF.get(dtype, UNIT_ROUNDOFF["bfloat16"]) for dtype in dtypes) * spread(data)


@once
def spread(data: PairData) -> float:
    """Return the smaller of the two passes' `width`s (nats), or 1 if that is larger."""
    compared = data.sample.compared
    sides = (data.sample.a, data.sample.b) if compared.any() else ()
    return max(min((width(side.logprobs[compared]) for side in sides), default=0.0), 1.0)


def width(logprobs: np.ndarray) -> float:
    """Return sqrt(sd^2 + max(mean, 0)^2) of the sampled tokens' log-odds (nats)."""
    odds = log_odds(logprobs)
    return float(np.hypot(np.std(odds), max(np.mean(odds), 0.0)))


def log_odds(logprobs: np.ndarray) -> np.ndarray:
    """Return log(p / (1 - p)) [K], which is capped at about 14 for nearly certain tokens."""
    return np.asarray(logprobs - np.log(np.maximum(-np.expm1(np.minimum(logprobs, 0.0)), 1e-6)))


@once
def value_rounding(data: PairData) -> np.ndarray:
    """Return the largest error in d (nats), [K], that rounding the recorded logprobs of both passes can cause."""
    pairs = zip((data.a, data.b), precisions(data), strict=True)
    halves = [half_ulp(values, side.rounded) for values, side in pairs if side.rounded is not None]
    return np.asarray(sum(halves, np.zeros(data.num_kept)) + 1e-6 * (1 + np.abs(data.a) + np.abs(data.b)))


def half_ulp(values: np.ndarray, precision: str) -> np.ndarray:
    """Return half the spacing of numbers that `precision`, a `value_precision`, can represent around `values` [K]."""
    if precision in HALF_ULP:
        # Below the smallest normal number, the spacing is constant, so smaller exponents are raised to its exponent.
        least = {"float8_e5m2": -13, "float8": -5, "float16": -13}.get(precision, -126)
        return np.asarray(np.ldexp(1.0, np.maximum(np.frexp(values)[1], least) - HALF_ULP[precision] - 1))
    *_, last = precision.split()
    if "/" in last:
        step = np.round(np.exp(values) * int(last[2:]))
        # The smallest stored probability may stand for any smaller one, so its error is set to 8 nats.
        return np.asarray(np.where(step > 1, -np.log1p(-0.5 / np.maximum(step, 2)), 8.0))
    return np.full(len(values), 0.5 * (10.0 ** -int(precision.split()[0]) if last == "decimals" else float(last)))


@once
def logit_error(data: PairData) -> np.ndarray:
    """Return the logit error that would explain d, plus the rounding error of the recorded logprobs, [K] (nats)."""
    return np.asarray(np.abs(data.d) / data.scale + value_rounding(data))


@once
def levels(data: PairData) -> np.ndarray:
    noise = logit_error(data)
    return np.asarray(np.log(noise + np.median(noise) / 4)) if len(noise) else noise


def level(data: PairData) -> float:
    """Return the rms logit change that explains d (nats), weighted by (1 - p)^2 and clipped at the 99th percentile."""
    known = np.isfinite(data.noise)
    noise, rest = data.noise[known], data.rest[known]
    if not len(noise):
        return 0.0
    return float(np.sqrt(np.sum((np.minimum(noise, np.quantile(noise, 0.99)) * rest) ** 2) / np.sum(rest**2)))


def _logit_precision(difference: np.ndarray, temperatures: list[float]) -> str | None:
    """Infer the logits' dtype from logprob differences within one context, which equal the logits' differences. None if
    there are too few. bfloat16 logits above 1 are multiples of 2^-7, and a temperature divides this spacing."""
    # Small differences are always near a grid point, and the rounding errors of large ones are too large.
    difference = np.unique(difference[(np.abs(difference) > 0.02) & (np.abs(difference) < 30)])
    if len(difference) < 6:
        return None
    # Steps per nat for logits above 1 (bfloat16) or 1/4 (float16), and the tolerance for the logprob's own error.
    for dtype, steps, tolerance in (("bfloat16", 2.0**7, 0.02), ("float16", 2.0**12, 0.08)):
        for temperature in temperatures:
            scaled = difference * temperature * steps
            share = min(float(np.mean(np.abs(scaled - np.round(scaled)) < tolerance)), 1 - 1e-9)
            # Chernoff bound on the probability that `share` of the differences are on the grid by chance.
            chance = 2 * tolerance
            divergence = share * np.log(share / chance) if share else 0.0
            divergence += (1 - share) * np.log((1 - share) / (1 - chance))
            if share > 0.35 and len(temperatures) * np.exp(-len(difference) * divergence) < 1e-6:
                return dtype
    return "float32"


def neighbours(order: np.ndarray, *same: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the pairs of consecutive tokens in `order` that have equal values in each of the arrays `same`."""
    one, two = order[:-1], order[1:]
    equal = np.logical_and.reduce([each[one] == each[two] for each in same])
    return one[equal], two[equal]


@once
def context_pairs(data: PairData) -> tuple[np.ndarray, np.ndarray]:
    keys, tokens, steps = data.sample.prefix_keys[data.keep], data.sample.tokens[data.keep], data.sample.steps[data.seq]
    one, two = neighbours(np.lexsort((tokens, keys, steps)), keys, steps)
    differ = tokens[one] != tokens[two]
    return one[differ], two[differ]


def is_mixture(data: PairData) -> bool | None:
    paths = (("model", "class"), ("model_class",), ("model", "experts"), ("model", "moe_layers"))
    texts = [str(declared(data.contract(side), *path) or "") for side in "ab" for path in paths]
    counted = [
        data.config.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    ]
    if any(counted) or any("moe" in text.lower() or "mixtral" in text.lower() for text in texts):
        return True
    return False if data.config or any(texts[:2]) else None
