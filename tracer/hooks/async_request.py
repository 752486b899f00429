"""One request of vLLM's serving engine, put together out of the outputs that its caller was given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...schemas.capture import Capture
from .engine_call import EngineCall
from .vllm_contract import Conditions
from .vllm_logprobs import DELTA, Requested, cut_down

ABORT, ERROR = "abort", "error"
"""vLLM's words for a request that its caller, or an error, ended."""


@dataclass(slots=True, kw_only=True)
class GivenCompletion:
    """One completion, as far as the caller was given it. An output that is not a delta replaces what came before."""

    index: int
    num_tokens: int = 0
    tokens: Any = ()
    """At least `num_tokens` token ids; vLLM's own list may grow on."""
    positions: Any = None
    """The engine's logprobs, as many; None without any."""
    finish_reason: str | None = None

    @property
    def token_ids(self) -> Sequence[int]:
        return list(self.tokens[: self.num_tokens])

    @property
    def logprobs(self) -> Any:
        return None if self.positions is None else self.positions[: self.num_tokens]

    def add(self, completion: Any, logprobs: Any) -> None:
        """Add the tokens of a delta and the logprobs that the engine gave for them."""
        self.tokens = [*self.tokens] if self.num_tokens == 0 else self.tokens
        self.tokens.extend(completion.token_ids)
        if logprobs is not None:
            self.positions = [] if self.positions is None else self.positions
            self.positions.extend(logprobs)
        self.num_tokens = len(self.tokens)

    def replace(self, completion: Any, logprobs: Any) -> None:
        """Take all tokens so far, and the logprobs that the engine gave for them."""
        self.tokens, self.positions, self.num_tokens = completion.token_ids, logprobs, len(completion.token_ids)


class AsyncRequest:
    """A request on its way."""

    def __init__(self, *, name: str, step: int, requested: Requested, conditions: Conditions):
        self.name = name
        self.step = step
        self.conditions = conditions
        self.requested = requested
        self.prompt_token_ids: Sequence[int] | None = None
        self._is_delta = requested.params.output_kind.name == DELTA
        self._completions: dict[int, GivenCompletion] = {}

    def give(self, output: Any) -> list[tuple[Any, Any]]:
        """Leave an output what the caller asked for; return its completions, each with what the engine gave of it."""
        return [(completion, cut_down(completion, self.requested)) for completion in output.outputs]

    def take(self, output: Any, given: Sequence[tuple[Any, Any]]) -> None:
        """Add what an output told."""
        self.prompt_token_ids = output.prompt_token_ids
        for completion, logprobs in given:
            held = self._completions.setdefault(completion.index, GivenCompletion(index=completion.index))
            (held.add if self._is_delta else held.replace)(completion, logprobs)
            held.finish_reason = completion.finish_reason

    def end(self, reason: str) -> None:
        """End the completions that are not finished, for this reason."""
        for held in self._completions.values():
            held.finish_reason = held.finish_reason or reason

    def is_refused(self, reason: str) -> bool:
        """Whether the engine never took the request."""
        return reason == ERROR and self.prompt_token_ids is None

    @property
    def outputs(self) -> list[GivenCompletion]:
        """The completions that have a token, or ended without one by themselves."""
        held = (self._completions[index] for index in sorted(self._completions))
        return [each for each in held if each.num_tokens or each.finish_reason not in (ABORT, ERROR)]

    @property
    def num_lost(self) -> int:
        """Completions of which the caller was given no token."""
        return int(self.requested.params.n) - len(self.outputs)

    def call(self, capture: Capture) -> EngineCall:
        """The request as a call of the engine that returned these completions."""
        return EngineCall(outputs=[self], requested=[self.requested], given=None, capture=capture)
