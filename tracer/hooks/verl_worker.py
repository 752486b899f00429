"""Record logprobs and contracts in verl's workers.

Shapes: B rows in one worker's update, T padded response width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from importlib.metadata import version
from itertools import count
from typing import Any

import numpy as np

from ...schemas.documents import Contract
from ...schemas.passes import CURRENT, REFERENCE, TRAIN
from ..batch import Batch
from ..writer import Part
from .models import KeptWeights
from .patches import Original, Patches, arguments
from .session import Session
from .trl_batches import right_padded
from .verl_batches import FORWARD_KEYS, ROW_KEY, UPDATE_KEY, Forwards, attended_tokens
from .verl_contract import FSDP, model_identity, scoring_contract
from .verl_engine_weights import VerlEngineWeights

_COMPOSITION = "how verl grouped rows into forward passes"


@dataclass(slots=True, kw_only=True)
class Update:
    batch: Batch
    lengths: np.ndarray
    places: dict[int, int]
    """Maps a row in verl's batch to its row in `batch`, which has no padding rows."""
    policy_version: int
    is_last: bool
    is_train: bool
    """True if the `train` pass is taken from the loss, because verl does not score the batch beforehand."""
    num_mini_batches: int = 0
    engine: Any = None
    """verl's training engine, or None if another process records the same rows."""
    train_scored: set[int] = field(default_factory=set)


def install(session: Session, module: Any) -> Patches:
    session.hooks["verl"] = version("verl")
    hooks, patches = _hooks_of(session), Patches()
    owners: dict[str, list[tuple[str, str, Callable[..., Any]]]] = {
        "verl.utils.transferqueue_utils": [("", "_meta_to_realdata", hooks.fetch)],
        "verl.workers.utils.losses": [("", "ppo_loss", hooks.loss)],
        "verl.workers.engine.utils": [("", "prepare_micro_batches", hooks.micro_batches)],
        "verl.workers.engine_workers": [
            ("TrainingWorker", "train_mini_batch", hooks.update),
            ("TrainingWorker", "train_batch", hooks.mini_batch),
            ("TrainingWorker", "infer_batch", hooks.infer),
            ("ActorRolloutRefWorker", "compute_log_prob", partial(hooks.score, TRAIN)),
            ("ActorRolloutRefWorker", "compute_ref_log_prob", partial(hooks.score, REFERENCE)),
            ("ActorRolloutRefWorker", "update_weights", hooks.account.transfer),
        ],
        "verl.workers.engine.fsdp.transformer_impl": [("FSDPEngine", "get_per_tensor_param", hooks.account.export)],
        "verl.workers.rollout.vllm_rollout.vllm_rollout": [("ServerAdapter", "update_weights", hooks.account.give)],
    }
    for owner, name, wrapper in owners[module.__name__]:
        target = getattr(module, owner, None) if owner else module
        if target is None or not patches.wrap(target, name, wrapper):
            shown = ".".join(filter(None, (owner, name)))
            session.tell(f"some current logprobs, contracts or weights are not recorded: verl has no {shown}")
    return patches


class WorkerHooks:
    def __init__(self, session: Session):
        self.session = session
        self.account = VerlEngineWeights(session)
        self._update: Update | None = None
        self._is_training = False
        self._declared: set[str] = set()
        self._scoring: str | None = None
        self._contract: Contract | None = None
        self._weights = KeptWeights(session)
        self._forwards: Forwards | None = None
        self._attended: dict[str, int] = {}
        self._numbers = count()

    def fetch(self, original: Original, meta: Any, *args: Any, **kwargs: Any) -> Any:
        data = original(meta, *args, **kwargs)
        told = (getattr(meta, "extra_info", None) or {}).get(UPDATE_KEY)
        if told is not None:
            data.pop(UPDATE_KEY, None)
            if self.session.is_recording:
                with self.session.guard("current logprobs"):
                    self._update = self._begin(meta, data, told)
        return data

    def update(self, original: Original, worker: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        told = plain(data.get(UPDATE_KEY, None)) if hasattr(data, "batch_size") else None
        if told is not None:  # verl's older trainer passes rows instead of keys
            data.pop(UPDATE_KEY)
            if self.session.is_recording:
                with self.session.guard("current logprobs"):
                    self._update = self._begin_padded(data, told)
        update = self._update
        if update is not None:
            self.account.tell_of(update.batch.step, update.policy_version)
            if worker.engine.is_mp_src_rank_with_outputs():
                update.engine = worker.engine
                self._listen(worker.engine)
        try:
            return original(worker, data, *args, **kwargs)
        finally:
            self._update = None
            self._forwards = None
            if update is not None and update.is_last:
                self.session.seal()  # Ray may kill workers at any time
            elif update is not None:
                with self.session.guard("current logprobs"):
                    self.session.recorder.flush(weights=False)

    def mini_batch(self, original: Original, worker: Any, *args: Any, **kwargs: Any) -> Any:
        if self._update is not None and not self._update.num_mini_batches:
            # With param_offload, the weights may not be on the device earlier, so record them here.
            self.session.record(Part.WEIGHTS, self._keep_weights, worker.engine, self._update.policy_version)
        try:
            return original(worker, *args, **kwargs)
        finally:
            if self._update is not None:
                self._update.num_mini_batches += 1

    def loss(self, original: Original, *args: Any, **kwargs: Any) -> Any:
        if self._update is not None and self._update.engine is not None:
            with self.session.guard("current logprobs"):
                self._record(self._update, arguments(original, *args, **kwargs))
        return original(*args, **kwargs)

    def score(self, pass_name: str, original: Original, worker: Any, *args: Any, **kwargs: Any) -> Any:
        self._scoring = pass_name
        try:
            return original(worker, *args, **kwargs)
        finally:
            self._scoring = None

    def infer(self, original: Original, worker: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        asked = {name: data.get(name, None) for name in ("temperature", "no_lora_adapter")}
        is_heard = self._scoring is not None and self.session.is_recording and Forwards.are_known(worker.engine)
        if is_heard and hasattr(data, "batch_size"):
            with self.session.guard(_COMPOSITION, otherwise=self._cannot_listen):
                data[ROW_KEY] = _arange(data.batch_size[0])
                self._listen(worker.engine)
        try:
            output = original(worker, data, *args, **kwargs)
        finally:
            forwards, self._forwards = self._forwards, None
            if is_heard:
                data.pop(ROW_KEY, None)
        if self._scoring is not None and output is not None and self.session.is_recording:
            # With its adapter disabled, the actor is the reference model.
            pass_name = REFERENCE if plain(asked["no_lora_adapter"]) else self._scoring
            with self.session.guard("the trainer's contract"):
                self._declare(worker.engine, pass_name, plain(asked["temperature"]), output["log_probs"].dtype)
            if forwards is not None:
                with self.session.guard(_COMPOSITION, otherwise=self._cannot_listen):
                    column = forwards.column(output.batch_size[0])
                    if column is not None:
                        # The driver records this pass's scores, so send it the forward-pass numbers.
                        output[FORWARD_KEYS[pass_name]] = column
        return output

    def micro_batches(self, original: Original, data: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(data, *args, **kwargs)
        if self._forwards is not None:
            with self.session.guard(_COMPOSITION, otherwise=self._cannot_listen):
                is_packed = bool(plain(data.get("use_remove_padding", True)))
                self._forwards.add(made[0], is_packed=is_packed)
                attended = {} if is_packed else attended_tokens(made[0][0]["loss_mask"])
                if attended and attended != self._attended:
                    self.session.tell(
                        f"in verl {version('verl')}, attention sees only the first {attended['attended_tokens']} "
                        "tokens of a padded row; set actor_rollout_ref.model.use_remove_padding=True"
                    )
                self._attended = attended
        return made

    def _listen(self, engine: Any) -> None:
        if Forwards.are_known(engine):
            self._forwards = Forwards(engine, self._numbers)

    def _cannot_listen(self, error: Exception) -> None:
        self._forwards = None
        self.session.note(f"{_COMPOSITION} is not recorded: {type(error).__name__}: {error}")

    def _begin(self, meta: Any, data: Any, told: dict[str, Any]) -> Update:
        if not hasattr(meta, "keys"):
            from verl.utils.transferqueue_utils import batch_meta2kv_batch_meta

            meta = batch_meta2kv_batch_meta(meta)
        rows = [(index, key) for index, key in enumerate(meta.keys) if key not in set(told["left_out"])]
        lengths = np.array([len(ids) for ids in data["responses"].unbind()], np.int64)
        return self._update_of(data, told, rows, lengths)

    def _begin_padded(self, data: Any, told: dict[str, Any]) -> Update:
        rows = [(index, told["keys"][row]) for index, row in enumerate(data[ROW_KEY].tolist())]
        width = data["responses"].shape[1]
        lengths = data["attention_mask"][:, -width:].sum(dim=1).cpu().numpy().astype(np.int64)
        return self._update_of(data, told, rows, lengths)

    def _update_of(self, data: Any, told: dict[str, Any], rows: list[tuple[int, str]], lengths: np.ndarray) -> Update:
        """Return the update that `told` describes. `rows` lists pairs (index in `data`, key). `lengths` [B] are
        response lengths in tokens."""
        self._begin_training()
        data[ROW_KEY] = _arange(len(lengths))
        recorder = self.session.recorder
        batch = Batch(
            told["step"], [key for _, key in rows], folder=recorder.folder, attempt=recorder.writer.state.attempt
        )
        batch.resolve(lengths[[index for index, _ in rows]], None)
        return Update(
            batch=batch, lengths=lengths, places={index: place for place, (index, _) in enumerate(rows)},
            policy_version=told["policy_version"], is_train=told["is_train"], is_last=told["is_last"],
        )  # fmt: skip

    def _keep_weights(self, engine: Any, version: int) -> None:
        strategy = getattr(engine.engine_config, "strategy", None)
        if strategy in FSDP:
            self._weights.keep(version, engine.module, is_first=engine.get_data_parallel_rank() == 0)
        elif self.session.order.weights != "none":
            self.session.note(
                f"weights are not recorded: verl's strategy {strategy} uses its own tensor names and shards. To "
                "replay, let verl save the weights (hf_model in actor.checkpoint.save_contents), and attach each version "
                "after the run: tim-trace weights RUN --attach VERSION CHECKPOINTS/global_step_N/actor/huggingface"
            )

    def _begin_training(self) -> None:
        if not self._is_training:
            self._is_training = True
            self.session.begin_training()

    def _record(self, update: Update, call: dict[str, Any]) -> None:
        from verl.workers.utils.padding import no_padding_2_padding

        data, output = call["data"], call["model_output"]
        if ROW_KEY not in data.keys():  # noqa: SIM118 - TensorDict supports `in` only on keys()
            return
        numbers = data[ROW_KEY].cpu().numpy()
        kept = [place for place, number in enumerate(numbers) if int(number) in update.places]
        if not kept:
            return
        rows = np.array([update.places[int(numbers[place])] for place in kept])
        logprobs_BT = no_padding_2_padding(output["log_probs"].detach(), data)[kept]
        entropy = output.get("entropy")
        entropy_BT = None if entropy is None else no_padding_2_padding(entropy.detach(), data)[kept]
        recorder = self.session.recorder
        is_first = update.is_train and not update.train_scored & set(rows.tolist())
        update.train_scored |= set(rows.tolist())
        if self._contract is None:
            self._contract = scoring_contract(
                update.engine, source="loss", grad=True, temperature=plain(data.get("temperature", None)),
                dtype=output["log_probs"].dtype,
            ) | self._attended  # fmt: skip
            if update.is_train and not update.engine.get_data_parallel_rank():
                recorder.describe(model=model_identity(update.engine))  # no earlier pass has described this engine
        for pass_name in (CURRENT, TRAIN) if is_first else (CURRENT,):
            recorder.add_contract(pass_name, self._contract)
            recorder.add_scores(
                pass_name,
                update.batch,
                rows=rows,
                logprobs=logprobs_BT,
                entropy=entropy_BT,
                attention_mask=right_padded(logprobs_BT.shape[1], update.lengths[numbers[kept]]),
                # Only the first mini-batch has a policy version, because versions count whole updates, but weights
                # change with each mini-batch.
                policy_version=update.policy_version if update.num_mini_batches == 0 else None,
                forward=None if self._forwards is None else self._forwards.of(numbers[kept].tolist()),
            )

    def _declare(self, engine: Any, pass_name: str, temperature: Any, dtype: Any) -> None:
        """Record the settings of a pass whose scores the driver records. Only one process does this, once per pass."""
        if pass_name in self._declared:
            return
        self._declared.add(pass_name)
        if engine.get_data_parallel_rank() or not engine.is_mp_src_rank_with_outputs():
            return
        self._begin_training()
        recorder = self.session.recorder
        contract = scoring_contract(engine, source="recomputed", grad=False, temperature=temperature, dtype=dtype)
        recorder.add_contract(pass_name, contract | self._attended)
        if pass_name == TRAIN:
            recorder.describe(model=model_identity(engine))
        self.session.seal()


_hooks_of = lru_cache(maxsize=1)(WorkerHooks)


def _arange(length: int) -> Any:
    import torch

    return torch.arange(length)


def plain(value: Any) -> Any:
    return getattr(value, "data", value)
