"""Compute the bias of the objective token by token; analysis.objective sums the same bias over tokens.

Shapes: T tokens in one sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ...schemas.errors import InvalidRecord
from ...schemas.loss import TOKEN, Loss, read_loss
from ..objective.loss_terms import terms_of
from ..objective.pass_roles import ADVANTAGE, MISMATCH, PassRoles, choose_sides
from ..objective.sequence_sums import compared
from ..statistics.estimators import Array
from ..trace.database import Database
from ..trace.hyperparameters import read_hyperparameters
from ..trace.ragged import Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Bias:
    """The run's loss, and the bias that the mismatch causes in the loss."""

    sides: PassRoles | None
    """Roles of the passes that the loss uses; None if the bias cannot be computed."""
    told: str
    """Sentence that names the loss, or explains why there is no bias."""

    @property
    def passes(self) -> tuple[str, ...]:
        """Return the names of the passes needed to compute the bias."""
        return () if self.sides is None else (self.sides.train, self.sides.rollout, self.sides.current)

    def of(
        self,
        logprobs: Mapping[str, Array],
        recorded_T: np.ndarray,
        mask_T: np.ndarray,
        advantage: float | None,
        advantages_T: Array | None,
    ) -> Array | None:
        """Return the [T] bias as the loss applied it, with NaN for tokens that the loss does not count; None if it cannot be
        computed.

        `logprobs` are [T] over the whole response for each of `passes` that scored it; `recorded_T` marks tokens with a value
        in all of them.
        """
        sides = self.sides
        if sides is None or not {*self.passes} <= logprobs.keys() or (advantage is None and advantages_T is None):
            return None
        own = np.nan if advantage is None else advantage
        tokens = Tokens(
            logprobs={
                name: logprobs[scored].astype(np.float64)
                for name, scored in zip(("train", "rollout", "now"), self.passes, strict=True)
            },
            counted_T=mask_T & recorded_T, advantage_T=None if advantages_T is None else advantages_T.astype(np.float64),
            advantage_N=np.array([own], np.float64), lengths_N=np.array([len(mask_T)]),
        )  # fmt: skip
        with np.errstate(all="ignore"):
            _, parts = compared(tokens)
            applied_T = terms_of(sides.loss, parts).applied(sides.loss)
        return np.asarray(applied_T if parts.known_T is None else np.where(parts.known_T, applied_T, np.nan))


def read_bias(database: Database, run: str) -> Bias:
    """Read which loss the run used. A sequence-level loss has no per-token bias."""
    try:
        loss = read_loss(read_hyperparameters(database, run))
    except (InvalidRecord, ValueError) as error:
        return Bias(sides=None, told=f"No bias: the recorded loss cannot be read ({error}).")
    if loss is None:
        return Bias(sides=None, told="No bias: no known loss was recorded.")
    if loss.level != TOKEN:
        return Bias(sides=None, told=f"No per-token bias: the loss uses sequence-level ratios ({loss.level}).")
    sides = choose_sides(database, loss)
    if sides is None or MISMATCH not in sides.known:
        return Bias(sides=None, told="No bias: one side of the mismatch was not recorded.")
    if ADVANTAGE not in sides.known:
        return Bias(sides=None, told="No bias: no advantages were recorded.")
    return Bias(sides=sides, told=_told(sides, sides.loss))


def _told(sides: PassRoles, loss: Loss) -> str:
    correction = "without correction" if loss.correction == "none" else f"with correction {loss.correction}"
    return (
        f"Bias under the recorded loss: {loss.kind} {correction}, trained from the logprobs of {sides.train}, sampled with "
        f"{sides.rollout}, current logprobs from {sides.current} at the first inner iteration."
    )
