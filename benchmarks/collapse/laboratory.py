"""One run of the benchmark suite: an RL loop that records itself, with the faults that are switched on.

Shapes: B rows, P prompt tokens, T response tokens, V vocabulary.
"""

from __future__ import annotations

import copy
import json
import random
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from engine import Engine, Rollout
from learner import ALGORITHMS, GROUP, Learner, Update, advantages
from models import taught
from switches import Switches
from tasks import TASKS, VOCABULARY, reward
from tim_trace.tracer.recorder import Recorder
from torch import Tensor

NUM_PROMPTS = 256
"""Number of prompts, which a run repeats."""
_GROUPS = 8
_EVALUATED = 64
EVALUATED_EVERY = 10
EVALUATION = "eval/reward"
"""True evaluation of a run: share of correct places in answers of the trainer's weights to separate prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that determines a run; two runs with the same plan are bit-identical."""

    task: str
    architecture: str = "qwen3"
    algorithm: str = "reinforce"
    rate: float = 1e-3
    steps: int = 300
    seed: int = 0
    switches: Switches = field(default_factory=Switches)

    @property
    def name(self) -> str:
        said = "+".join(f"{name}={value}" for name, value in self.switches.said.items()) or "sound"
        words = (self.task, self.architecture, self.algorithm, f"{self.rate:g}", f"s{self.seed}", said)
        return "-".join(words).replace(" ", "").replace("(", "").replace(")", "").replace(",", "_")

    def twin(self, **changes: Any) -> Plan:
        """Return the same run with other switches."""
        return replace(self, switches=replace(self.switches, **changes))


def perform(plan: Plan, folder: Path, models: Path, weights_every: int = 0) -> list[float]:
    """Run a plan, record it as `folder`/trace with `plan.json` next to it, and return the evaluations, before the run
    and every ten steps.

    `weights_every` is the number of steps between two recorded versions of the weights; 0 records none.
    """
    folder.mkdir(parents=True, exist_ok=True)
    task = TASKS[plan.task]
    model = taught(plan.architecture, task, plan.seed, models)
    run = _Run(plan, model, weights_every)
    with Recorder(folder / "trace") as recorder:
        name = f"{type(model).__module__}.{type(model).__qualname__}"
        recorder.describe(model={"class": name, "config": model.config.to_dict()})
        for scored in ("train", "current"):
            recorder.add_contract(scored, {"engine": "laboratory", "model": {"attention": "eager"}})
        recorder.add_loss(run.learner.algorithm.loss)
        recorder.add_hyperparameters(run.hyperparameters)
        run.evaluate(0, recorder)
        for step in range(1, plan.steps + 1):
            run.step(step, recorder)
            if step % EVALUATED_EVERY == 0:
                run.evaluate(step, recorder)
    said = asdict(plan) | {"evaluations": run.evaluations}
    (folder / "plan.json").write_text(json.dumps(said, indent=1))
    return run.evaluations


def _keep(recorder: Recorder, learner: Learner) -> None:
    recorder.add_weights(learner.version, learner.model.state_dict())


class _Run:
    """The state of a run."""

    def __init__(self, plan: Plan, model: Any, weights_every: int):
        self.plan, self.task = plan, TASKS[plan.task]
        self.switches = plan.switches
        self.weights_every = weights_every
        self.engine = Engine(copy.deepcopy(model), plan.switches, plan.seed)
        self.learner = Learner(model, ALGORITHMS[plan.algorithm], plan.switches, plan.rate)
        chance = random.Random(1000 + plan.seed)
        self.prompts = [self.task.prompt(chance) for _ in range(NUM_PROMPTS)]
        order = list(range(NUM_PROMPTS))
        chance.shuffle(order)
        self.noisy = set(order[: round(self.switches.noisy_reward * NUM_PROMPTS)])
        self.inverted = set(order[: round(self.switches.inverted_reward * NUM_PROMPTS)])
        self.evaluated = [self.task.prompt(chance) for _ in range(_EVALUATED)]
        self.chance = chance
        self.evaluations: list[float] = []

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """Return the trainer's settings."""
        return {
            "learning_rate": self.learner.rate,
            "adam_beta1": self.switches.betas[0],
            "adam_beta2": self.switches.betas[1],
            "adam_epsilon": self.switches.epsilon,
            "max_grad_norm": 1.0,
            "num_generations": GROUP,
            "temperature": 1.0,
            "max_completion_length": self.task.max_tokens,
            "algorithm": self.plan.algorithm,
            "seed": self.plan.seed,
        }

    def step(self, step: int, recorder: Recorder) -> None:
        """Sample, score, learn, and record everything."""
        progress = (step - 1) / self.plan.steps
        is_wrong = progress >= self.switches.begins
        rate = self.learner.set_rate(progress)
        indices = [self.chance.randrange(NUM_PROMPTS) for _ in range(_GROUPS)]
        prompt_BP = torch.tensor([self.prompts[i][0] for i in indices]).repeat_interleave(GROUP, 0)
        self.engine.synchronise(self.learner.model, self.learner.version, is_wrong=is_wrong)
        rollout = self.engine.generate(
            prompt_BP, self.task.max_tokens, self._noise(step, len(prompt_BP)), is_wrong=is_wrong
        )
        version = self.learner.version
        reward_B = self._rewards(rollout, indices, is_wrong=is_wrong)
        shift = self.switches.pairing if is_wrong else 0
        if not self.switches.pairs_advantages:
            reward_B = reward_B.roll(shift)
        advantage_B = advantages(reward_B, self.learner.algorithm)
        if self.switches.pairs_advantages:
            advantage_B = advantage_B.roll(shift)
        train_BT = self.learner.score(prompt_BP, rollout)
        if self.switches.exact:
            pair = (
                scores[rollout.mask].nan_to_num() for scores in (train_BT, rollout.logprobs)
            )  # a run may end in NaN
            assert torch.equal(*pair), "the exact engine is not exact"
        keeps = self.weights_every and step % self.weights_every == 0
        updates = self.learner.learn(
            prompt_BP, rollout, train_BT, advantage_B, before=partial(_keep, recorder, self.learner) if keeps else None
        )
        self._record(recorder, step, indices, prompt_BP, rollout, reward_B, advantage_B, train_BT, updates, version)
        metrics = {
            "learning_rate": rate,
            "grad_norm": updates[-1].grad_norm,
            "loss": sum(update.loss for update in updates) / len(updates),
            "entropy": sum(update.entropy for update in updates) / len(updates),
        }
        recorder.add_metrics(step, metrics)
        recorder.add_optimizer(step, self.learner.optimizer)

    def evaluate(self, step: int, recorder: Recorder) -> None:
        """Log an evaluation of the weights; step 0 is before any update."""
        self.evaluations.append(self._evaluate())
        recorder.add_metrics(step, {EVALUATION: self.evaluations[-1]})

    def _noise(self, salt: int, rows: int) -> Tensor:
        """Return [T, B, V] Gumbel noise, always the same for one seed and step."""
        generator = torch.Generator().manual_seed(100_000 * (1 + self.plan.seed) + salt)
        uniform_TBV = torch.rand(self.task.max_tokens, rows, VOCABULARY, generator=generator)
        return -(-uniform_TBV.clamp(1e-20).log()).log()

    def _rewards(self, rollout: Rollout, indices: list[int], *, is_wrong: bool) -> Tensor:
        """Return the [B] rewards, right or wrong."""
        rewards = []
        for row, (ids, mask) in enumerate(zip(rollout.ids.tolist(), rollout.mask.tolist(), strict=True)):
            index = indices[row // GROUP]
            response = ids[: sum(mask)]
            value = reward(response, self.prompts[index][1])
            if is_wrong and index in self.inverted:
                value = 1.0 - value
            if is_wrong and index in self.noisy:
                value = self.chance.random()
            if is_wrong:
                value += self.switches.length_reward * len(response) / self.task.max_tokens
            rewards.append(value)
        return torch.tensor(rewards)

    def _evaluate(self) -> float:
        """Return the mean reward of answers sampled with the trainer's weights."""
        prompt_BP = torch.tensor([prompt for prompt, _ in self.evaluated])
        sound = Engine(self.learner.model, Switches(), 0)
        rollout = sound.generate(prompt_BP, self.task.max_tokens, self._noise(0, _EVALUATED), is_wrong=False)
        pairs = zip(rollout.ids.tolist(), rollout.mask.sum(1).tolist(), self.evaluated, strict=True)
        return sum(reward(ids[:length], answer) for ids, length, (_, answer) in pairs) / _EVALUATED

    def _record(
        self,
        recorder: Recorder,
        step: int,
        indices: list[int],
        prompt_BP: Tensor,
        rollout: Rollout,
        reward_B: Tensor,
        advantage_B: Tensor,
        train_BT: Tensor,
        updates: list[Update],
        version: int,
    ) -> None:
        mask = rollout.mask.numpy()
        sampled_by = rollout.version if self.switches.declares_stale else version
        batch = recorder.add_sequences(
            step=step,
            prompt_ids=prompt_BP.numpy(),
            response_ids=rollout.ids.numpy(),
            response_attention_mask=mask,
            group_ids=[f"prompt-{indices[row // GROUP]}" for row in range(len(prompt_BP))],
            policy_version=sampled_by,
            reward=reward_B.numpy(),
            advantage=advantage_B.numpy(),
            temperature=1.0,
            max_tokens=self.task.max_tokens,
        )
        recorder.add_scores("rollout", batch, logprobs=rollout.logprobs.numpy())
        recorder.add_scores("train", batch, logprobs=train_BT.numpy(), policy_version=version)
        if len(updates) > 1:
            for number, update in enumerate(updates):
                recorder.add_scores(
                    "current", batch, rows=update.rows.numpy(), logprobs=update.logprobs.numpy(),
                    policy_version=version + number,
                )  # fmt: skip
