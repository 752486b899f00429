"""Result of one engine call. Its tokens and logprobs are read only when needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...schemas.capture import Capture
from ...schemas.passes import ROLLOUT
from ...schemas.tables import SAMPLING
from ..dense import Logits, TopK
from .vllm_logprobs import Requested, distribution, gathered, sampled_logprobs


@dataclass(slots=True, kw_only=True)
class EngineCall:
    """Completions returned by one engine call, grouped by prompt.

    Shapes: B completions, N response tokens in the selected completions together.
    """

    outputs: Sequence[Any]
    """vLLM's RequestOutputs, in prompt order."""
    requested: Sequence[Requested]
    """The caller's own logprob and output options, one entry per prompt."""
    given: list[Any] | None
    """[B] each completion's logprobs as the engine returned them; None if the caller received the same logprobs."""
    capture: Capture

    @property
    def completions(self) -> list[Any]:
        return [completion for output in self.outputs for completion in output.outputs]

    @property
    def prompt_of(self) -> list[int]:
        """[B] index of the prompt that each completion belongs to."""
        return [index for index, output in enumerate(self.outputs) for _ in output.outputs]

    @property
    def lengths(self) -> list[int]:
        """[B] number of response tokens in each completion."""
        return [len(completion.token_ids) for completion in self.completions]

    @property
    def finish_reasons(self) -> list[str | None]:
        """[B] finish reasons reported by vLLM."""
        return [completion.finish_reason for completion in self.completions]

    @property
    def engine_logprobs(self) -> list[Any]:
        """[B] logprobs in vLLM's own containers; None for a completion without logprobs."""
        return [completion.logprobs for completion in self.completions] if self.given is None else self.given

    def logprobs(self) -> list[list[float] | None]:
        """Return the sampled tokens' logprobs, one list per completion; None for a completion without logprobs."""
        return [
            None if given is None else sampled_logprobs(given, completion.token_ids)
            for completion, given in zip(self.completions, self.engine_logprobs, strict=True)
        ]

    def captured(self) -> list[int]:
        """Return the indices of completions whose distributions were requested and returned."""
        asked = [self.requested[prompt].captured for prompt in self.prompt_of]
        return [row for row, keep in enumerate(asked) if keep and self.engine_logprobs[row]]

    def distribution(self, rows: Sequence[int]) -> TopK | Logits | None:
        """Return the distributions of the given completions, concatenated."""
        given = self.engine_logprobs
        parts: list[dict[str, np.ndarray] | None] = [distribution(given[row], self.capture) for row in rows]
        return gathered(parts)

    def record(self, recorder: Any, *, step: int, names: Sequence[str]) -> None:
        """Record the completions as sequences of a step with the rollout pass. `names` holds one name per prompt."""
        prompts = self.prompt_of
        params = [self.requested[prompt].params for prompt in prompts]
        batch = recorder.add_sequences(
            step=step,
            seq_ids=[f"{names[prompt]}-{done.index}" for prompt, done in zip(prompts, self.completions, strict=True)],
            group_ids=[names[prompt] for prompt in prompts],
            prompt_ids=[list(self.outputs[prompt].prompt_token_ids or []) for prompt in prompts],
            response_ids=[list(done.token_ids) for done in self.completions],
            finish_reason=self.finish_reasons,
            **{name: [getattr(one, name) for one in params] for name in SAMPLING},
        )
        logprobs = self.logprobs()
        scored = [row for row, values in enumerate(logprobs) if values is not None]
        if scored:
            captured = self.captured()
            recorder.add_scores(
                ROLLOUT,
                batch,
                rows=scored,
                logprobs=[logprobs[row] for row in scored],
                distribution=self.distribution(captured),
                captured_rows=captured,
            )
