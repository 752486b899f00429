"""What the detectors look at: the sample, what is left of it once a fault is explained, contracts and sums of the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, wraps
from typing import Any, TypeVar

import numpy as np

from ...schemas.contract import Contract
from ...schemas.steps import ALL_STEPS
from ..advice import NOTHING, Advice
from ..engine_weights import EngineVerdict
from ..info import AttemptInfo
from .finding import Finding, Number
from .sample import Sample
from .sums import PairSums
from .thresholds import MIN_REST, TOKEN_SHRINKAGE

Result = TypeVar("Result")


@dataclass(kw_only=True)
class PairData:
    """Everything that a detector may ask."""

    trace: str
    steps: str = ALL_STEPS
    """Which steps are looked at, as they were asked for."""
    condition: str = ""
    """The same as a condition in SQL; empty for all of them."""
    sample: Sample
    sums: PairSums
    contracts: dict[str, Contract]
    """Hash -> contract."""
    passes: list[str]
    """Every pass of the trace that has logprobs."""
    has_weights: bool
    is_import: bool
    """Whether the trace was made of another tool's files."""
    model: dict[str, Any]
    """Identity of the trained model, as the recording describes it."""
    attempts: tuple[AttemptInfo, ...] = ()
    """Attempts at training, where there are several."""
    engine: EngineVerdict = field(default_factory=EngineVerdict)
    """What digests say of the weights that the engine sampled with."""
    keep: np.ndarray
    """[N] bool: the compared tokens that no earlier finding explains."""

    def without(self, explained: np.ndarray) -> PairData:
        """The same less tokens that a finding explains, [N] bool."""
        changed = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return PairData(**changed | {"keep": self.keep & ~explained})

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
        """[K] nats."""
        return np.asarray(self.sample.d[self.keep])

    @cached_property
    def seq(self) -> np.ndarray:
        """[K] number of the sequence."""
        return np.asarray(self.sample.seq[self.keep])

    @cached_property
    def position(self) -> np.ndarray:
        """[K] place in the response."""
        return np.asarray(self.sample.position[self.keep])

    @cached_property
    def updates_behind(self) -> np.ndarray:
        """[S] updates that pass b's weights are behind pass a's, as recorded policy versions say; 0 where they do not."""
        return np.asarray((self.sample.a.versions - self.sample.b.versions).filled(0))

    @cached_property
    def entropy(self) -> np.ndarray | None:
        """[K] entropy of what each token was drawn from, nats, as pass a or else b has it; None where none was recorded."""
        for side in (self.sample.a, self.sample.b):
            if side.entropy is not None and np.isfinite(side.entropy[self.keep]).all():
                return np.asarray(side.entropy[self.keep])
        return None

    @cached_property
    def rest(self) -> np.ndarray:
        """[K] 1 - p, with p the larger of both: what a change of the logits acts on (arXiv 2512.23087)."""
        return np.asarray(-np.expm1(np.minimum(np.maximum(self.a, self.b), 0.0)))

    @cached_property
    def noise(self) -> np.ndarray:
        """[K] |d| / (1 - p): the change of the logits that would explain d; NaN where p leaves nothing to see."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(self.rest > MIN_REST, np.abs(self.d) / self.rest, np.nan)

    @cached_property
    def level(self) -> np.ndarray:
        """[K] logarithm of `noise`, so that levels can be held against each other; what is far below the median is one."""
        floor = 0.02 * np.nanmedian(self.noise) if np.isfinite(self.noise).any() else 0.0
        return np.log(self.noise + max(float(floor), 1e-9))

    @cached_property
    def level_beyond_tokens(self) -> np.ndarray:
        """[K] `level` less what is usual for the token's id: what a place or a part of the data adds to it."""
        there = np.isfinite(self.level)
        _, place = np.unique(self.sample.tokens[self.keep][there], return_inverse=True)
        centred = self.level[there] - self.level[there].mean() if there.any() else self.level[there]
        usual = np.bincount(place, centred) / (np.bincount(place) + TOKEN_SHRINKAGE)
        out = np.full(len(there), np.nan)
        out[there] = self.level[there] - usual[place]
        return out

    def explained_by(self, affected: np.ndarray) -> float:
        """Share of the variance of the tokens' level that dividing them in two, [K] bool, explains."""
        there = np.isfinite(self.level_beyond_tokens)
        part = affected[there]
        if not part.any() or part.all():
            return 0.0
        y = self.level_beyond_tokens[there]
        y = y - y.mean()
        between = sum(y[side].sum() ** 2 / side.sum() for side in (part, ~part))
        return float(between / max(y @ y, 1e-30))

    @cached_property
    def memo(self) -> dict[Any, Any]:
        """What is worked out once: see `once`."""
        return {}

    @property
    def num_kept(self) -> int:
        return int(self.keep.sum())

    def rms(self, where: np.ndarray | None = None) -> float:
        """Root mean square of d over kept tokens, nats."""
        d = self.d if where is None else self.d[where]
        return float(np.sqrt(np.mean(d * d))) if len(d) else 0.0

    def finding(
        self,
        code: str,
        signal: str,
        affected: np.ndarray | None = None,
        *,
        weight: float = 1.0,
        is_expected: bool = False,
        next: Advice = NOTHING,
        numbers: Mapping[str, Number],
    ) -> Finding:
        """A finding about some of the kept tokens, [K] bool, or about all of them."""
        share = 1.0 if affected is None else float(affected.mean())
        return Finding(
            code=code,
            signal=signal,
            effect=self.rms(affected),
            share=share,
            weight=weight,
            is_expected=is_expected,
            next=next,
            numbers=dict(numbers),
        )

    @property
    def names(self) -> dict[str, str]:
        """The passes' names, as `a` and `b` of a finding's numbers."""
        return {"a": self.sample.a.name, "b": self.sample.b.name}

    def contract(self, side: str) -> Contract:
        """The contract of most rows of pass `a` or `b`; empty where there is none."""
        hashes = [name for name in getattr(self.sample, side).contracts if name]
        return self.contracts.get(max(set(hashes), key=hashes.count), {}) if hashes else {}


def once(work: Callable[[PairData], Result]) -> Callable[[PairData], Result]:
    """Compute something once for a PairData, however many detectors ask for it."""

    @wraps(work)
    def known(data: PairData) -> Result:
        if known not in data.memo:
            data.memo[known] = work(data)
        result: Result = data.memo[known]
        return result

    return known


def declared(contract: Contract, *path: str) -> Any:
    """A value deep in a contract; None where it does not say."""
    value: Any = contract
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value
