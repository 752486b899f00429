"""Record TRL's AsyncGRPO trainers, which pack queued samples into rows and use the engine's logprobs as old logprobs.

Shapes: S samples per row, T tokens in the longest response, M loss terms.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import numpy as np

from ...schemas.layout import TRAIN_SPLIT
from ...schemas.loss import Loss
from ...schemas.passes import CURRENT, ROLLOUT, TRAIN
from ..batch import Batch
from ..rows import Forward
from ..writer import Part
from .patches import Original
from .session import Session
from .trl_batches import ROW_KEY, PackedRow, PackedSample, of_bytes, right_padded, to_bytes, why_ended
from .trl_contract import packed_contract, sampling_columns, uses_server, worker_contract
from .trl_release import end_tokens, name_of
from .trl_state import TrainerState
from .trl_trainer import TrainerHooks

_REWARDS = "rewards/"


class SampleQueue:
    def __init__(self, session: Session, queue: Any):
        self._session = session
        self._queue = queue
        self._versions: dict[int, int] = {}
        self.num_packed = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    def get(self, *args: Any, **kwargs: Any) -> Any:
        sample = self._queue.get(*args, **kwargs)
        with self._session.guard("a sample's weight version"):
            # The trainer forwards only each sample's token array, so use the array's id() as the key.
            key = id(sample.input_ids)
            self._versions[key] = int(sample.model_version)
            weakref.finalize(sample.input_ids, self._versions.pop, key, None).atexit = False
        return sample

    def version(self, input_ids: Any) -> int | None:
        return self._versions.get(id(input_ids))


class AsyncTrainerHooks(TrainerHooks):
    def __init__(self, session: Session):
        super().__init__(session)
        self._steps: weakref.WeakKeyDictionary[Any, dict[int, int]] = weakref.WeakKeyDictionary()
        """For each trainer, maps a weight version to the number of optimizer updates it includes."""

    def train(self, original: Original, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        self.session.is_sampled_for_trainer = True
        try:
            return super().train(original, trainer, *args, **kwargs)
        finally:
            self.session.is_sampled_for_trainer = False

    def dataloader(self, original: Original, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        loader = original(trainer, *args, **kwargs)
        with self.session.guard("queued samples"):
            dataset = getattr(trainer, "_rollout_dataset", None)
            if dataset is not None:
                dataset.queue = SampleQueue(self.session, dataset.queue)
                collator = loader.collate_fn
                collator.torch_call = partial(self._collate, trainer, dataset.queue, collator.torch_call)
        return loader

    def _collate(self, trainer: Any, queue: SampleQueue, original: Original, examples: Any) -> Any:
        batch = original(examples)
        if self.session.is_recording:
            with self.session.guard("the packed samples"):
                (rows,) = examples
                batch[ROW_KEY] = to_bytes([self._samples(trainer, queue, row.samples) for row in rows])
        return batch

    def _samples(self, trainer: Any, queue: SampleQueue, examples: Any) -> list[PackedSample]:
        steps = self._steps.get(trainer, {})
        found = []
        for example in examples:
            queue.num_packed += 1
            version = queue.version(example["input_ids"])
            metrics = example["metrics"]
            names = [name for name in metrics if name == "reward" or name.startswith(_REWARDS)]
            found.append(
                PackedSample(
                    name=str(queue.num_packed),
                    group=str(example["group_id"]),
                    policy_version=None if version is None else steps.get(version),
                    advantage=float(example["advantage"]),
                    rewards={name.removeprefix(_REWARDS): float(metrics[name]) for name in names},
                    ids=np.asarray(example["input_ids"], np.int32),
                    mask=np.asarray(example["completion_mask"], np.uint8),
                )
            )
        return found

    def sync_weights(self, original: Original, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        # If TRL sends only an adapter file, there are no tensors to compare.
        is_heard = not getattr(trainer, "_lora_sync", False)
        if is_heard:
            self.session.engine_weights.hold(trainer)
        result = original(trainer, *args, **kwargs)
        updates = int(trainer.state.global_step)
        self._steps.setdefault(trainer, {})[int(trainer.model_version)] = updates
        if is_heard and trainer.is_world_process_zero():
            self.session.engine_weights.tell(updates + 1)
        state = self._state(trainer)
        if not state.described and self.session.is_recording:
            state.described = True
            with self.session.guard("the trainer"):
                self._describe(trainer)
        return result

    def send_weights(self, original: Original, trainer: Any) -> Any:
        account = self.session.engine_weights
        return account.heard(account.gathered(original(trainer)))

    def compute_loss(self, original: Original, trainer: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        packed = inputs.pop(ROW_KEY, None)
        if not self.session.is_recording:
            return original(trainer, model, inputs, *args, **kwargs)
        if packed is None:
            self.session.note(
                f"samples are not recorded for {name_of(type(trainer))}: its batches are not packed from a queue as in "
                "TRL 1.16's AsyncGRPOTrainer"
            )
            return original(trainer, model, inputs, *args, **kwargs)
        state = self._state(trainer)
        self.session.record(Part.WEIGHTS, self._keep_weights, trainer, state)
        outputs: list[Any] = []
        with model.register_forward_hook(lambda _module, _inputs, output: outputs.append(output)):
            result = original(trainer, model, inputs, *args, **kwargs)
        with self.session.guard("a packed row"):
            self._record_row(trainer, state, of_bytes(packed[0]), inputs, outputs)
        return result

    def _declare_rollouts(self, trainer: Any) -> None:
        if not trainer.is_world_process_zero():
            return
        clip = {"clip_low": trainer.epsilon_low, "clip_high": trainer.epsilon_high}
        self.session.recorder.add_loss(Loss(**clip, denominator=ROLLOUT, aggregation="micro_token_mean"))
        server = self._server_info(trainer) if uses_server(trainer) else None
        self.session.recorder.add_contract(ROLLOUT, worker_contract(trainer, server))

    def _record_row(self, trainer: Any, state: TrainerState, row: PackedRow, inputs: Any, found: list[Any]) -> None:
        state.refresh_contracts()
        batch = self._add_samples(trainer, row)
        terms = len(row.terms[0])
        self._add_terms(state, ROLLOUT, batch, row, logprobs=inputs["old_log_probs"][0, :terms])
        if len(found) != 1 or getattr(found[0], "log_probs", None) is None:
            self.session.note(
                f"current and train logprobs are not recorded for {name_of(type(trainer))}: its loss does not "
                "compute them in a single forward pass"
            )
            return
        outputs, index = found[0], inputs["token_index"][0, :terms]
        logprobs, entropy = (values.detach().flatten()[index] for values in (outputs.log_probs, outputs.entropy))
        contract = self.session.record(Part.CONTRACTS, state.contract, TRAIN, partial(packed_contract, trainer))
        for pass_name in (CURRENT, TRAIN):
            if contract is not None:
                self.session.recorder.add_contract(pass_name, contract)
            self._add_terms(
                state, pass_name, batch, row, logprobs=logprobs, entropy=entropy, version=int(trainer.state.global_step)
            )

    def _add_samples(self, trainer: Any, row: PackedRow) -> Batch:
        samples = row.samples
        names = sorted({name for sample in samples for name in sample.rewards if name != "reward"})
        rewards = {name: [sample.rewards.get(name, np.nan) for sample in samples] for name in names}
        batch: Batch = self.session.recorder.add_sequences(
            step=int(trainer.state.global_step) + 1, seq_ids=[sample.name for sample in samples],
            group_ids=[sample.group for sample in samples],
            policy_version=[sample.policy_version for sample in samples],
            prompt_ids=[sample.ids[: sample.first] for sample in samples],
            response_ids=[sample.ids[sample.first :] for sample in samples],
            response_mask=[sample.mask[sample.first :] for sample in samples],
            advantage=[sample.advantage for sample in samples],
            reward=[sample.rewards.get("reward") for sample in samples], rewards=rewards or None,
            **sampling_columns(trainer),
            finish_reason=why_ended(end_tokens(trainer), [int(sample.ids[-1]) for sample in samples]),
        )  # fmt: skip
        return batch

    def _add_terms(
        self, state: TrainerState, pass_name: str, batch: Batch, row: PackedRow, *, logprobs: Any,
        entropy: Any = None, version: int | None = None,
    ) -> None:  # fmt: skip
        count = len(row.samples)
        forward = None
        if version is not None:
            ids, none = np.full(count, state.next_forwards(TRAIN_SPLIT, pass_name, 1)), np.zeros(count, np.int32)
            forward = Forward(
                ids=ids, places=np.arange(count), rows=np.full(count, count), pad_left=none, pad_right=none
            )
        self.session.recorder.add_scores(
            pass_name, batch, logprobs=_spread(logprobs, row),
            entropy=None if entropy is None else _spread(entropy, row),
            attention_mask=right_padded(row.scored.shape[1], row.lengths), scored_mask=row.scored,
            policy_version=version, forward=forward,
        )  # fmt: skip


def _spread(values_M: Any, row: PackedRow) -> Any:
    import torch

    values_ST = values_M.new_zeros(row.scored.shape)
    values_ST[tuple(torch.from_numpy(places).to(values_M.device) for places in row.terms)] = values_M
    return values_ST
