"""Hooks for TRL trainers that generate samples themselves between losses: GRPO, RLOO and subclasses."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np

from ...schemas.layout import EVAL_SPLIT, TRAIN_SPLIT
from ...schemas.passes import CURRENT, ROLLOUT, TRAIN
from ..batch import Batch
from ..optimizer import optimizer_statistics, underlying
from ..weights.identity import tokenizer_identity
from ..weights.layout import is_sharded, replicated
from ..writer import Part
from . import trl_batches, trl_contract
from .engine_call import EngineCall
from .models import trained_model
from .patches import Original, arguments
from .session import Session
from .trl_release import NUM_GENERATIONS, find, lost, name_of, own_loss, unknown_output
from .trl_state import Generation, Loss, Recorded, Scoring, TrainerState, TrainRows
from .trl_taps import HeadTap, routing_tap, tell_of_routing

OPTIMIZER_STEPS = 5  # optimizer statistics are recorded at step 1 and at steps divisible by 5


def _sends_weights(trainer: Any) -> bool:
    is_server = getattr(trainer, "use_vllm", False) and getattr(trainer, "vllm_mode", None) == "server"
    return bool(is_server and trainer.is_world_process_zero())


class TrainerHooks:
    def __init__(self, session: Session):
        self.session = session
        self._states: weakref.WeakKeyDictionary[Any, TrainerState] = weakref.WeakKeyDictionary()

    def train(self, original: Original, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        self.session.begin_training()
        self._states.pop(trainer, None)  # drop weights and contracts cached in the previous run
        return original(trainer, *args, **kwargs)

    def generate_and_score(self, original: Original, trainer: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(trainer, "use_vllm", False):
            self.session.engine_weights.hold(trainer)
        if not self.session.is_recording:
            return original(trainer, inputs, *args, **kwargs)
        state = self._state(trainer)
        split = TRAIN_SPLIT if trainer.model.training else EVAL_SPLIT
        if split == TRAIN_SPLIT:
            self.session.record(Part.WEIGHTS, self._keep_weights, trainer, state, adapted=False)
        with self.session.guard("the generation batch"):
            state.generation = self._begin(trainer, split, len(inputs))
            self.session.generation = state.generation
        try:
            output = original(trainer, inputs, *args, **kwargs)
            problem = unknown_output(type(trainer), output)
            if problem is not None:
                self.session.note(problem)
                return output
            with self.session.guard("the generation batch"):
                if state.generation is not None:
                    self._record_generation(trainer, state, state.generation, output)
            return output
        finally:
            state.generation = self.session.generation = None

    def generate(self, original: Original, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(trainer, *args, **kwargs)
        state = self._state(trainer)
        generation = state.generation
        if generation is not None and generation.split == TRAIN_SPLIT:
            if _sends_weights(trainer):
                self.session.engine_weights.tell(generation.step)
            # To generate, TRL merges and then unmerges the adapter, which rounds the base weights. Record the weights
            # after that, because scoring uses the rounded ones.
            self.session.record(Part.WEIGHTS, self._keep_weights, trainer, state, adapted=True)
        if generation is not None:
            with self.session.guard("prompt and response lengths"):
                prompts, responses = (np.array([len(ids) for ids in side], np.int64) for side in result[:2])
                generation.rows = TrainRows(generation.captured, prompts, responses)
                generation.last_tokens = [ids[-1] if len(ids) else None for ids in result[1]]
                generation.returned = result
        return result

    def calculate_rewards(self, original: Original, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        rewards_per_func = original(trainer, *args, **kwargs)
        generation = self._state(trainer).generation
        if generation is not None:
            # Copy the tensor, because the trainer may modify it later.
            generation.rewards_per_func = self.session.record(Part.REWARDS, lambda: rewards_per_func.detach().clone())
        return rewards_per_func

    def score(self, original: Original, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        state = self._state(trainer)
        phase = state.loss or state.generation
        if phase is None or not self.session.is_recording:
            return original(trainer, *args, **kwargs)
        call: dict[str, Any] = {}
        tap = routers = None
        with self.session.guard("a pass"):
            call = trl_batches.scoring_call(original, trainer, *args, **kwargs)
            rows = self._train_rows(trainer, state, call)
            tap = self.session.record(Part.DISTRIBUTIONS, self._tap, trainer, rows, call)
            routers = self.session.record(Part.ROUTING, routing_tap, self.session, trainer, rows, call)
        with nullcontext() if tap is None else tap.listening(), routers or nullcontext():
            result = original(trainer, *args, **kwargs)
        with self.session.guard("a pass"):
            scoring = trl_batches.scoring_of(trainer, call, result)
            if tap is not None:
                scoring.distribution = self.session.record(Part.DISTRIBUTIONS, tap.distribution)
                scoring.captured_rows = tap.rows.tolist()
            if routers is not None:
                scoring.routing = self.session.record(Part.ROUTING, routers.routing)
            phase.scorings.append(scoring)
        return result

    def compute_loss(self, original: Original, trainer: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        state = self._state(trainer)
        if self.session.is_recording:
            if trainer.model.training:
                self.session.record(Part.WEIGHTS, self._keep_weights, trainer, state)
            with self.session.guard("the loss"):
                state.loss = trl_batches.loss_of(state.recorded, inputs)
        try:
            result = original(trainer, model, inputs, *args, **kwargs)
            if state.loss is not None:
                with self.session.guard("current logprobs"):
                    self._record_loss(trainer, state, state.loss)
                self._tell_of_scorings(trainer, state.loss)
            return result
        finally:
            state.loss = None

    def step_end(self, original: Original, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        if trainer.state.global_step > 0 and trainer.is_world_process_zero() and self.session.is_recording:
            values = self.session.record(Part.METRICS, self._at_step_end, original, trainer, *args, **kwargs) or {}
            values |= self.session.record(Part.OPTIMIZER, self._optimizer_statistics, trainer) or {}
            self.session.record(Part.METRICS, self._add_metrics, trainer, values, only_new=True)
        return original(trainer, *args, **kwargs)

    def log(self, original: Original, trainer: Any, logs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        result = original(trainer, logs, *args, **kwargs)
        if trainer.is_world_process_zero() and self.session.is_recording:
            # Callbacks may have removed entries from `logs`, so read them from the trainer's log history.
            history = trainer.state.log_history
            values = dict(history[-1] if history else logs)
            values.pop("step", None)
            self.session.record(Part.METRICS, self._add_metrics, trainer, values)
        return result

    def _tell_of_scorings(self, trainer: Any, loss: Loss) -> None:
        if not loss.scorings and loss.recorded.batch.split == TRAIN_SPLIT:
            lost = "current" if loss.recorded.train_scored[loss.rows].all() else "current and train"
            self.session.note(
                f"{lost} logprobs are not recorded for {name_of(type(trainer))}: its loss does not call "
                "_get_per_token_logps_and_entropies"
            )

    def _at_step_end(self, original: Original, trainer: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        call = arguments(original, trainer, *args, **kwargs)
        rate, norm = call.get("learning_rate"), call.get("grad_norm")
        if is_sharded(norm) and (norm := replicated(norm)) is None:
            self.session.note(
                "grad_norm is recorded only for logged steps, because at other steps each process knows only its own "
                "shard's norm (FSDP2)"
            )
        return {"learning_rate": trainer._get_learning_rate() if rate is None else rate, "grad_norm": norm}

    def _optimizer_statistics(self, trainer: Any) -> dict[str, Any]:
        step = int(trainer.state.global_step)
        if step > 1 and step % OPTIMIZER_STEPS:
            return {}
        optimizer = underlying(trainer.optimizer)
        return {} if optimizer is None else optimizer_statistics(optimizer)

    def _add_metrics(self, trainer: Any, values: dict[str, Any], *, only_new: bool = False) -> None:
        """Record new and changed metrics. With `only_new`, skip changed metrics, because comparing them may
        synchronize with the GPU."""
        state, step = self._state(trainer), int(trainer.state.global_step)
        if state.told_step != step:
            state.told_step, state.told = step, {}
        recorded_each_step = {"learning_rate", "grad_norm"} & set(state.told)
        known = set(state.told) if only_new else recorded_each_step
        fresh = {
            name: value
            for name, value in values.items()
            if value is not None and name not in known and (only_new or state.told.get(name) != value)
        }
        state.told |= fresh
        self.session.recorder.add_metrics(step, fresh)

    def _state(self, trainer: Any) -> TrainerState:
        state = self._states.get(trainer)
        if state is None:
            state = self._states[trainer] = TrainerState(self.session)
        return state

    def _keep_weights(self, trainer: Any, state: TrainerState, *, adapted: bool | None = None) -> None:
        model = trained_model(trainer)
        if adapted in (None, bool(getattr(model, "peft_config", None))):
            is_first = trainer.accelerator.process_index == 0
            state.weights.keep(int(trainer.state.global_step), model, is_first=is_first)

    def _begin(self, trainer: Any, split: str, rows: int) -> Generation:
        state = self._state(trainer)
        if not state.described:
            self._describe(trainer)
            state.described = True
        state.refresh_contracts()
        version = int(trainer.state.global_step)
        first = trainer.accelerator.process_index * rows
        step = version if split == EVAL_SPLIT else version + 1
        batch = state.name_of_generation(split, step)
        seq_ids = [f"{batch}-{first + row}" for row in range(rows)]
        num_generations = find(trainer, NUM_GENERATIONS) or 1
        if split == EVAL_SPLIT:
            num_generations = getattr(trainer, "num_generations_eval", num_generations)
        group_ids = [f"{batch}-{(first + row) // num_generations}" for row in range(rows)]
        return Generation(
            split=split, step=step, policy_version=version, seq_ids=seq_ids, group_ids=group_ids,
            captured=np.zeros(rows, bool) if split == EVAL_SPLIT else self.session.recorder.captures(step, seq_ids),
        )  # fmt: skip

    def _describe(self, trainer: Any) -> None:
        self.session.record(Part.CONTRACTS, self._identify, trainer)
        self.session.record(Part.ROUTING, tell_of_routing, self.session, trainer)
        self.session.record(Part.TEXTS, self._save_texts, trainer)
        self.session.record(Part.CONTRACTS, self._declare_rollouts, trainer)

    def _identify(self, trainer: Any) -> None:
        self.session.recorder.describe(
            model=trl_contract.model_identity(trainer), tokenizer=tokenizer_identity(trainer.processing_class)
        )
        for note in lost(trainer):
            self.session.note(note)
        if sentence := own_loss(type(trainer)):
            self.session.note(sentence)

    def _save_texts(self, trainer: Any) -> None:
        if trainer.is_world_process_zero():
            self.session.recorder.save_tokenizer(trainer.processing_class)
            self.session.recorder.add_hyperparameters(trainer.args.to_dict())

    def _declare_rollouts(self, trainer: Any) -> None:
        recorder = self.session.recorder
        if not getattr(trainer, "use_vllm", False):
            recorder.add_contract(ROLLOUT, trl_contract.generation_contract(trainer))
        elif _sends_weights(trainer):
            recorder.add_contract(ROLLOUT, trl_contract.server_contract(trainer, self._server_info(trainer)))

    def _server_info(self, trainer: Any) -> Any:
        try:
            return trl_contract.server_info(trainer)
        except (OSError, ValueError, KeyError) as error:
            self.session.note(
                f"the vLLM server's configuration is not recorded, because the server did not return it ({error})"
            )

    def _train_rows(self, trainer: Any, state: TrainerState, call: dict[str, Any]) -> TrainRows | None:
        if call["model"] is getattr(trainer, "ref_model", None):
            return None
        if state.loss is not None:
            recorded, rows = state.loss.recorded, state.loss.rows
            if recorded.batch.split == EVAL_SPLIT or state.loss.scorings or recorded.train_scored[rows].any():
                return None
            return recorded.generated.take(rows)
        generation = state.generation
        assert generation is not None
        has_train = any(not scoring.is_reference for scoring in generation.scorings)
        return None if generation.split == EVAL_SPLIT or has_train else generation.rows

    def _tap(self, trainer: Any, rows: TrainRows | None, call: dict[str, Any]) -> HeadTap | None:
        if rows is None or not rows.captured.any():
            return None
        problem = HeadTap.problem(trainer, call["model"])
        if problem:
            self.session.note(problem)
            return None
        return HeadTap(self.session, trainer, call, np.flatnonzero(rows.captured), rows.response_lengths)

    def _record_generation(
        self, trainer: Any, state: TrainerState, generation: Generation, output: dict[str, Any]
    ) -> None:
        recorder = self.session.recorder
        generated = generation.rows
        assert generated is not None
        response_ids = output["completion_ids"]
        rows, width = response_ids.shape
        response_mask = output["completion_mask"]
        if "tool_mask" in output:
            response_mask = response_mask * output["tool_mask"]
        call = trl_batches.engine_call_of(generation)
        batch = recorder.add_sequences(
            split=generation.split, step=generation.step, seq_ids=generation.seq_ids, group_ids=generation.group_ids,
            policy_version=generation.policy_version, prompt_ids=output["prompt_ids"],
            prompt_attention_mask=trl_batches.left_padded(output["prompt_ids"].shape[1], generated.prompt_lengths),
            response_attention_mask=trl_batches.right_padded(width, generated.response_lengths),
            response_ids=response_ids, response_mask=response_mask, advantage=output["advantages"],
            finish_reason=trl_batches.finish_reasons(trainer, call, generation),
            **trl_batches.local_rewards(trainer, generation, rows), **trl_contract.sampling_columns(trainer),
        )  # fmt: skip
        recorded = Recorded(
            batch=batch, generated=generated, prompt_width=output["prompt_ids"].shape[1], response_width=width,
            train_scored=np.zeros(rows, bool),
            masks_attention=bool(getattr(trainer, "mask_truncated_completions", False)),
        )  # fmt: skip
        self._record_rollout(trainer, generation, batch, call, output)
        self._record_passes(trainer, state, generation, recorded, output)
        output[trl_batches.ROW_KEY] = trl_batches.row_keys(state.keep(recorded), rows)

    def _record_rollout(
        self, trainer: Any, generation: Generation, batch: Batch, call: EngineCall | None, output: dict[str, Any]
    ) -> None:
        logprobs, tool_mask = output.get("sampling_per_token_logps"), output.get("tool_mask")
        if logprobs is None and call is not None:
            # RLOO discards the logprobs, so take them from the engine call, but only if every row has them.
            logprobs, tool_mask = call.logprobs(), None
            logprobs = None if any(values is None for values in logprobs) else logprobs
        if logprobs is None:
            logprobs = trl_batches.server_logprobs(generation)
        if logprobs is None:
            if getattr(trainer, "use_vllm", False):
                self.session.note(
                    f"rollout logprobs are not recorded for {name_of(type(trainer))}: it does not keep them, and no "
                    "single vLLM call returned exactly one process's rows with logprobs (because of several turns, "
                    "tensor parallelism, or a server that returns no logprobs)"
                )
            return
        captured = call.captured() if call is not None and self.session.capture.dense else []
        self.session.recorder.add_scores(
            ROLLOUT,
            batch,
            logprobs=logprobs,
            # Tool output was not sampled, so it has no logprobs. Mask the 0.0 that the trainer fills in.
            scored_mask=tool_mask,
            policy_version=generation.policy_version,
            distribution=call.distribution(captured) if call is not None and captured else None,
            captured_rows=captured,
        )

    def _record_passes(
        self, trainer: Any, state: TrainerState, generation: Generation, recorded: Recorded, output: dict[str, Any]
    ) -> None:
        for pass_name, scoring in trl_batches.named_passes(generation.scorings, output):
            if pass_name == TRAIN:
                recorded.train_scored[:] = True
                read = partial(trl_contract.scoring_contract, trainer, source="recomputed", grad=False)
            else:
                read = partial(trl_contract.reference_contract, trainer)
            contract = self.session.record(Part.CONTRACTS, state.contract, pass_name, read)
            self._add_scores(
                state, recorded, pass_name, contract, scoring,
                rows=np.arange(len(recorded.batch)),
                scored_mask=output["completion_mask"] if recorded.masks_attention else None,
                policy_version=generation.policy_version if pass_name == TRAIN else None,
            )  # fmt: skip

    def _record_loss(self, trainer: Any, state: TrainerState, loss: Loss) -> None:
        for scoring in loss.scorings[:1]:
            read = partial(trl_contract.scoring_contract, trainer, source="loss", grad=True)
            contract = self.session.record(Part.CONTRACTS, state.contract, CURRENT, read)
            version = int(trainer.state.global_step)
            # Without a separate forward pass, the first logprobs computed in the loss serve as the `train` pass.
            has_train = loss.recorded.train_scored[loss.rows].any()
            made = [TRAIN] if loss.recorded.batch.split == EVAL_SPLIT else [CURRENT, TRAIN]
            for pass_name in made[:-1] if has_train else made:
                self._add_scores(
                    state, loss.recorded, pass_name, contract, scoring,
                    rows=loss.rows, scored_mask=loss.scored_mask, policy_version=version,
                )  # fmt: skip
            loss.recorded.train_scored[loss.rows] = True

    def _add_scores(
        self, state: TrainerState, recorded: Recorded, pass_name: str, contract: dict[str, Any] | None,
        scoring: Scoring, *, rows: np.ndarray, scored_mask: Any, policy_version: int | None,
    ) -> None:  # fmt: skip
        recorder = self.session.recorder
        split = recorded.batch.split
        if split == TRAIN_SPLIT and contract is not None:
            recorder.add_contract(pass_name, contract)
        first = state.next_forwards(split, pass_name, -(-len(rows) // scoring.rows_a_forward))
        forward = recorded.forward(rows, scoring.rows_a_forward, first)
        recorder.add_scores(
            pass_name, recorded.batch, rows=rows, logprobs=scoring.logprobs, entropy=scoring.entropy,
            scored_mask=scored_mask, policy_version=policy_version, forward=forward,
            distribution=scoring.distribution if pass_name == TRAIN else None,
            captured_rows=rows[scoring.captured_rows], routing=scoring.routing if pass_name == TRAIN else None,
        )  # fmt: skip
