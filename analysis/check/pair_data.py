"""Input of the detectors: sampled tokens that no finding explains yet, contracts, and sums over the run.

Shapes: N sampled tokens in S sequences, K kept tokens, i.e. tokens not explained by an earlier finding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from typing import Any, TypeVar

import numpy as np

from ...schemas.contract import Contract
from ...schemas.steps import ALL_STEPS
from ..engine_weights import EngineVerdict
from ..info import AttemptInfo
from .sample import PairSums, Sample

Value = TypeVar("Value")

MIN_REST = 0.02
"""Minimum 1 - p for a token to be informative, with p its probability: below it, a change in the logits hardly affects
the logprob."""
LEAST_REST = 1e-3
"""Minimum 1 - p assumed when converting d into a change in a token's logit."""
TOKEN_SHRINKAGE = 10.0
"""Shrinkage towards the overall mean when averaging per token id, as a pseudo-count of tokens."""


@dataclass(kw_only=True)
class PairData:
    """All data available to a detector."""

    trace: str
    steps: str = ALL_STEPS
    """The `steps` option as given."""
    condition: str = ""
    """The `steps` option as an SQL condition; empty for all steps."""
    sample: Sample
    sums: PairSums
    contracts: dict[str, Contract]
    """Contract hash -> contract."""
    passes: list[str]
    """Names of all passes in the trace that have logprobs."""
    has_weights: bool
    is_import: bool
    """True if the trace was imported from another tool's files."""
    model: dict[str, Any]
    """Recorded description of the trained model."""
    attempts: tuple[AttemptInfo, ...] = ()
    """Training attempts; empty if there was only one."""
    engine: EngineVerdict = field(default_factory=EngineVerdict)
    """Comparison of the engine's weights with the trainer's, by digest."""
    first: tuple[int, float] | None = None
    """First step of the run and the rms of d there, nats; None if that step is among the selected ones."""
    keep: np.ndarray
    """[N] bool: True for compared tokens that no earlier finding explains."""

    def without(self, explained: np.ndarray) -> PairData:
        """Return the data without the tokens marked in `explained`, [N] bool, which a finding explains."""
        return replace(self, keep=self.keep & ~explained)

    def within(self, inside: np.ndarray) -> PairData:
        """Return the data of the kept tokens marked in `inside`, [K] bool, alone."""
        return self.without(self.marked(~inside))

    def marked(self, tokens: np.ndarray) -> np.ndarray:
        """Return [N] bool for a mark of the kept tokens, [K] bool."""
        marks = np.zeros(len(self.keep), bool)
        marks[np.flatnonzero(self.keep)[tokens]] = True
        return marks

    def corrected(self, tokens: np.ndarray, right: np.ndarray) -> PairData:
        """Return the data with pass b changed so that d is `right`, [N] nats, at `tokens`, [N] bool. Tokens for which
        `right` is NaN are left out, and so are other tokens whose d is as large as it was at `tokens`: they are
        misplaced, too.
        """
        values = np.where(tokens, self.sample.a.logprobs - right, self.sample.b.logprobs)
        was = float(np.median(np.abs(self.sample.d[tokens & self.keep])))
        away = self.keep & ~tokens & (np.abs(np.nan_to_num(self.sample.d)) > was / 4)
        values[np.isin(self.sample.seq, self.sample.seq[away]) & ~tokens] = np.nan
        side = replace(self.sample.b, logprobs=values, entropy=None)
        return replace(self, sample=replace(self.sample, b=side), keep=self.keep & np.isfinite(values))

    @cached_property
    def a(self) -> np.ndarray:
        """[K] logprobs of the kept tokens, pass a."""
        return np.asarray(self.sample.a.logprobs[self.keep])

    @cached_property
    def b(self) -> np.ndarray:
        """[K] logprobs of the kept tokens, pass b."""
        return np.asarray(self.sample.b.logprobs[self.keep])

    @cached_property
    def d(self) -> np.ndarray:
        """[K] logprob difference a - b of the kept tokens, nats."""
        return np.asarray(self.sample.d[self.keep])

    @cached_property
    def seq(self) -> np.ndarray:
        """[K] index of each token's sequence."""
        return np.asarray(self.sample.seq[self.keep])

    @cached_property
    def position(self) -> np.ndarray:
        """[K] position of each token in its response, starting at 0."""
        return np.asarray(self.sample.position[self.keep])

    @cached_property
    def updates_behind(self) -> np.ndarray:
        """[S] number of updates by which the weights of pass b lag behind those of pass a, from the recorded policy
        versions; 0 if unknown."""
        return np.asarray((self.sample.a.versions - self.sample.b.versions).filled(0))

    @cached_property
    def entropy(self) -> np.ndarray | None:
        """[K] entropy of the distribution that each token was sampled from, nats, taken from pass a if recorded there,
        else from pass b; None if neither recorded it."""
        for side in (self.sample.a, self.sample.b):
            if side.entropy is not None and np.isfinite(side.entropy[self.keep]).all():
                return np.asarray(side.entropy[self.keep])
        return None

    @cached_property
    def rest(self) -> np.ndarray:
        """[K] 1 - p, with p the larger of the two passes' probabilities: the factor by which changing a token's logit
        changes its logprob (arXiv 2512.23087)."""
        return np.asarray(-np.expm1(np.minimum(np.maximum(self.a, self.b), 0.0)))

    @cached_property
    def scale(self) -> np.ndarray:
        """[K] d / (change in the token's logit that would explain d). It is 1 - p if d is small (arXiv 2512.23087), and
        otherwise between the two sides' 1 - p, each at least LEAST_REST, because the change is then the difference of
        the log-odds.
        """
        rest = [np.maximum(-np.expm1(np.minimum(values, 0.0)), LEAST_REST) for values in (self.a, self.b)]
        moved = self.d - np.log(rest[0] / rest[1])
        with np.errstate(divide="ignore", invalid="ignore"):
            scale = np.where(np.abs(moved) > 1e-4, self.d / moved, np.minimum(*rest))
        return np.asarray(np.clip(scale, np.minimum(*rest), np.maximum(*rest)))

    @cached_property
    def noise(self) -> np.ndarray:
        """[K] |d| / scale, nats: the change in the token's logit that would explain d; NaN if 1 - p is too small."""
        return np.where(self.rest > MIN_REST, np.abs(self.d) / self.scale, np.nan)

    @cached_property
    def level(self) -> np.ndarray:
        """[K] logarithm of `noise`, which is first raised to at least 2 % of its median, so that tokens with d near 0
        do not dominate."""
        floor = 0.02 * np.nanmedian(self.noise) if np.isfinite(self.noise).any() else 0.0
        return np.log(self.noise + max(float(floor), 1e-9))

    @cached_property
    def level_beyond_tokens(self) -> np.ndarray:
        """[K] `level` minus the (shrunken) mean level for the same token id. What remains depends on the position or on
        the part of the data, not on the token."""
        there = np.isfinite(self.level)
        _, place = np.unique(self.sample.tokens[self.keep][there], return_inverse=True)
        centred = self.level[there] - self.level[there].mean() if there.any() else self.level[there]
        usual = np.bincount(place, centred) / (np.bincount(place) + TOKEN_SHRINKAGE)
        out = np.full(len(there), np.nan)
        out[there] = self.level[there] - usual[place]
        return out

    @cached_property
    def memo(self) -> dict[Any, Any]:
        """Function results cached by `once`."""
        return {}

    @property
    def num_kept(self) -> int:
        return int(self.keep.sum())

    def rms(self, where: np.ndarray | None = None) -> float:
        """Return the root mean square of d over the kept tokens, or over those in `where`, nats."""
        d = self.d if where is None else self.d[where]
        return float(np.sqrt(np.mean(d * d))) if len(d) else 0.0

    @property
    def names(self) -> dict[str, str]:
        """Pass names, under the keys `a` and `b`."""
        return {"a": self.sample.a.name, "b": self.sample.b.name}

    def contract(self, side: str) -> Contract:
        """Return the most frequent contract of the kept sequences in pass `a` or `b`, of several the first; empty if none is
        recorded."""
        names = getattr(self.sample, side).contracts
        counts = Counter(names[row] for row in np.unique(self.seq) if names[row])
        return self.contracts.get(max(counts, key=lambda name: counts[name]), {}) if counts else {}


def once(work: Callable[[PairData], Value]) -> Callable[[PairData], Value]:
    """Decorate a function of PairData so that its result is cached for each PairData."""

    @wraps(work)
    def known(data: PairData) -> Value:
        if known not in data.memo:
            data.memo[known] = work(data)
        result: Value = data.memo[known]
        return result

    return known


def declared(contract: Contract, *path: str) -> Any:
    """Return the value at a nested path in a contract; None if missing."""
    value: Any = contract
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def named(contract: Contract, *names: str) -> dict[str, Any]:
    """Return the settings of a contract whose name, at any depth, is among `names`: name -> value."""
    found: dict[str, Any] = {}
    for name, value in contract.items():
        found |= named(value, *names) if isinstance(value, dict) else {name: value} if name in names else {}
    return found
