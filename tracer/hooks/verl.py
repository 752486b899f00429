"""Record verl's PPO trainers on the driver. Engines and workers record in their own processes."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...schemas.documents import Contract
from ...schemas.layout import PASSES
from ...schemas.passes import REFERENCE, ROLLOUT, TRAIN
from ..snapshot import read_contract
from ..store import Store
from ..weights.identity import tokenizer_identity
from ..writer import Part
from . import verl_batches
from .patches import Original, Patches, Points, arguments, version_sentence
from .session import Session
from .verl_batches import FORWARD_KEYS, UPDATE_KEY, Row
from .verl_contract import configured_contract, configured_rollout, policy_loss, sampling

_POINTS = {
    "fit": ("fit", "which training run each step belongs to"),
    "_compute_advantage": (
        "compute_advantage",
        "sequences, rewards, advantages, and the rollout, train and reference logprobs",
    ),
    "_update_actor": ("update_actor", "current logprobs"),
}
_OLDER_POINTS = {
    "fit": _POINTS["fit"],
    "_compute_old_log_prob": ("compute_older_logprobs", "which rows shared a forward pass for the train logprobs"),
    "_compute_ref_log_prob": ("compute_older_logprobs", "which rows shared a forward pass for the reference logprobs"),
    "_update_actor": ("update_older_actor", "sequences, rewards, advantages and every pass"),
}
_LOGGED = {"log": ("log", "logged metrics")}

_SYNC = "verl.trainer.main_ppo_sync"
"""Module with its own trainer, used as an entry point in verl 0.8."""

_WORKERS = "verl.workers.engine_workers"
_NOT_HOOKED = (
    "verl's workers in {} are not hooked, so current logprobs, weights, training settings and the rows of each forward "
    "pass are not recorded; {}"
)
_LEGACY = "set trainer.use_legacy_worker_impl=disable, or use verl 0.8 or newer"
_OWN_WORKERS = f"derive them from {_WORKERS}.ActorRolloutRefWorker"
_NO_DISTRIBUTIONS = "verl's passes are recorded as sampled-token logprobs, without distributions (--capture {})"


def install(session: Session, module: Any) -> Patches:
    return _hooked(session, module.PPOTrainer, module.Tracking, _POINTS)


def install_older(session: Session, module: Any) -> Patches:
    from verl.utils import tracking

    return _hooked(session, module.RayPPOTrainer, tracking.Tracking, _OLDER_POINTS)


def _hooked(session: Session, trainer: type, tracking: type, points: Points) -> Patches:
    import verl

    session.hooks["verl"] = verl.__version__
    hooks, patches = TrainerHooks(session), Patches()
    missing = patches.wrap_points(trainer, hooks, points) | patches.wrap_points(tracking, hooks, _LOGGED)
    hooks.sentence = version_sentence("verl", verl.__version__, missing)
    return patches


def install_main(session: Session, module: Any) -> Patches:
    """Pass the task runner of the hooked entry module to `run_ppo`, because `python -m` runs a second copy of the
    module that is not hooked."""
    patches = Patches()

    def run_ppo(original: Original, *args: Any, **kwargs: Any) -> Any:
        spec = getattr(sys.modules["__main__"], "__spec__", None)
        if spec is not None and spec.name == _SYNC and "task_runner_class" in kwargs:
            with session.guard("verl's trainer"):
                kwargs["task_runner_class"] = importlib.import_module(_SYNC).TaskRunner
        return original(*args, **kwargs)

    patches.wrap(module, "run_ppo", run_ppo)
    return patches


class TrainerHooks:
    def __init__(self, session: Session):
        self.session = session
        self._is_fitting = False
        self._flushes = False
        """True if Ray may kill this process when training ends, so records are flushed early."""
        self._is_last = False
        self._contracts: dict[str, Contract] = {}
        self.sentence: str | None = None

    def fit(self, original: Original, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        self._begin(trainer)
        try:
            return original(trainer, *args, **kwargs)
        finally:
            self._is_fitting = False
            with self.session.guard("the end of training"):
                self.session.recorder.flush()  # after this, Ray may kill this process at any time

    def _begin(self, trainer: Any) -> None:
        self.session.begin_training()
        self._contracts = {}
        with self.session.guard("the run's settings"):
            self._describe(trainer)
        self._is_fitting = True

    def compute_advantage(self, original: Original, trainer: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.session.is_recording:
            return original(trainer, batch, *args, **kwargs)
        data: Any = None
        with self.session.guard("verl's batch"):
            data = verl_batches.fetch(batch, (*verl_batches.SCORED, *FORWARD_KEYS.values()))
        result = original(trainer, batch, *args, **kwargs)
        with self.session.guard("verl's batch"):
            if data is not None:
                rows, estimated = verl_batches.rows_of(batch), verl_batches.fetch(batch, verl_batches.ESTIMATED)
                source = {name: estimated for name in verl_batches.ESTIMATED}
                self._record(trainer, rows, lambda name: verl_batches.column(source.get(name, data), name, rows))
        return result

    def update_actor(self, original: Original, trainer: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.session.is_recording:
            return original(trainer, batch, *args, **kwargs)
        with self.session.guard("current logprobs"):
            batch.extra_info[UPDATE_KEY] = _next_update(trainer) | {
                "left_out": sorted({*batch.keys} - {row.key for row in verl_batches.rows_of(batch)})
            }
        try:
            return original(trainer, batch, *args, **kwargs)
        finally:
            batch.extra_info.pop(UPDATE_KEY, None)

    def compute_older_logprobs(self, original: Original, trainer: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Copy the columns that describe forward passes from the workers' output to the batch with the logprobs."""
        columns: dict[str, Any] = {}
        patches = Patches()

        def scored(original: Original, *args: Any, **kwargs: Any) -> Any:
            output = original(*args, **kwargs)
            with self.session.guard("verl's batch"):
                if hasattr(output, "keys"):
                    columns.update({name: output[name] for name in FORWARD_KEYS.values() if name in output.keys()})  # noqa: SIM118
            return output

        for group in ("actor_rollout_wg", "ref_policy_wg"):
            for name in ("compute_log_prob", "compute_ref_log_prob"):
                patches.wrap(getattr(trainer, group, None), name, scored)
        try:
            result = original(trainer, batch, *args, **kwargs)
        finally:
            patches.restore()
        with self.session.guard("verl's batch"):
            for name, column in columns.items():
                (result[0] if isinstance(result, tuple) else result).batch[name] = column
        return result

    def update_older_actor(self, original: Original, trainer: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.session.is_recording:
            return original(trainer, batch, *args, **kwargs)
        # Under Ray, the async trainers' own `fit` cannot be hooked, so recording begins at the first update.
        if not self._is_fitting:
            self._flushes = True
            self._begin(trainer)
        with self.session.guard("verl's batch"):
            # Only RayPPOTrainer itself always samples with the previous step's weights. Subclasses may use older ones.
            is_in_step = type(trainer).__name__ == "RayPPOTrainer"
            rows = verl_batches.rows_of_padded(batch, int(trainer.global_steps) - 1 if is_in_step else None)
            self._record(trainer, rows, lambda name: verl_batches.padded_column(batch, name))
            told = _next_update(trainer)
            verl_batches.ride_along(batch, told | {"keys": [row.key for row in rows]})
            self._is_last = self._flushes and told["is_last"]
        try:
            return original(trainer, batch, *args, **kwargs)
        finally:
            with self.session.guard("verl's batch"):
                verl_batches.get_off(batch)

    def log(self, original: Original, tracking: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(tracking, *args, **kwargs)
        if self._is_fitting and self.session.is_recording:
            self.session.record(Part.METRICS, self._add_metrics, original, tracking, *args, **kwargs)
            if self._flushes:
                with self.session.guard("the data recorded so far"):
                    self.session.recorder.flush(weights=False)
            if self._is_last:
                self.session.seal()
        return result

    def _add_metrics(self, original: Original, *args: Any, **kwargs: Any) -> None:
        call = arguments(original, *args, **kwargs)
        self.session.recorder.add_metrics(int(call["step"]), verl_batches.flat(call["data"]))

    def _describe(self, trainer: Any) -> None:
        from omegaconf import OmegaConf

        recorder, config = self.session.recorder, trainer.config
        if self.sentence:
            self.session.note(self.sentence)
        self._tell_of_workers(trainer)
        recorder.describe(tokenizer=tokenizer_identity(trainer.tokenizer))
        recorder.save_tokenizer(trainer.tokenizer)
        recorder.add_hyperparameters(verl_batches.flat(OmegaConf.to_container(config, resolve=True)))
        loss, others = policy_loss(config)
        if loss is not None:
            recorder.add_loss(loss)
            recorder.add_hyperparameters(others)
        if self.session.capture.dense:
            self.session.note(_NO_DISTRIBUTIONS.format(self.session.order.capture))

    def _tell_of_workers(self, trainer: Any) -> None:
        if modules := _workers_not_hooked(trainer):
            way_out = _LEGACY if hasattr(trainer, "use_legacy_worker_impl") else _OWN_WORKERS
            self.session.note(_NOT_HOOKED.format(" and ".join(modules), way_out))

    def _record(self, trainer: Any, rows: Sequence[Row], values: Callable[[str], list[np.ndarray] | None]) -> None:
        """Record a step's rows. `values(name)` returns a column as one array per row, or None if it is missing."""
        recorder, config, progress = self.session.recorder, trainer.config, verl_batches.progress_of(trainer)
        if not rows:
            return
        responses = values("responses") or []
        masks = values("response_mask") or [np.ones(len(ids), bool) for ids in responses]
        advantages = values("advantages")
        shared = None if advantages is None else verl_batches.one_a_row(advantages, masks)
        recorded = recorder.add_sequences(
            step=progress.step, seq_ids=[row.key for row in rows], group_ids=[row.group_id for row in rows],
            policy_version=[progress.sampled_by(row.oldest_weights) for row in rows], prompt_ids=values("prompts"),
            response_ids=responses, response_mask=[mask.astype(bool) for mask in masks],
            reward=verl_batches.sums(values("rm_scores")), advantage=advantages if shared is None else shared,
            **(asked := sampling(config)) | {"top_k": max(asked["top_k"], 0)},
            max_tokens=config.data.max_response_length,
            finish_reason=verl_batches.finish_reasons(
                responses, [trainer.tokenizer.eos_token_id], config.data.max_response_length
            ),
        )  # fmt: skip
        passes = {ROLLOUT: "rollout_log_probs", TRAIN: "old_log_probs", REFERENCE: "ref_log_prob"}
        if _bypasses(config):
            # In bypass mode, `old_log_probs` is a copy of the rollout's logprobs, because the trainer computes its own
            # logprobs only in the loss.
            del passes[TRAIN]
        for pass_name, name in passes.items():
            logprobs = values(name)
            if logprobs is None:
                continue
            recorder.add_contract(pass_name, self._contract(pass_name, config))
            recorder.add_scores(
                pass_name,
                recorded,
                logprobs=logprobs,
                entropy=values("entropy") if pass_name == TRAIN else None,
                # Tool output was not sampled, so it has no logprobs. Mask the 0.0 that verl fills in.
                scored_mask=[mask.astype(bool) for mask in masks] if pass_name == ROLLOUT else None,
                policy_version={ROLLOUT: None, TRAIN: progress.old_version, REFERENCE: None}[pass_name],
                forward=verl_batches.forward_of(values(FORWARD_KEYS[pass_name])) if pass_name in FORWARD_KEYS else None,
            )

    def _contract(self, pass_name: str, config: Any) -> Contract:
        if pass_name not in self._contracts:
            folder = self.session.recorder.folder
            if pass_name == ROLLOUT:
                found = _declared_contract(folder, ROLLOUT, lambda contract: _is_training(contract, sampling(config)))
                self._contracts[pass_name] = found or configured_rollout(config)
            else:
                found = _declared_contract(folder, pass_name, lambda contract: contract.get("engine") == "verl")
                self._contracts[pass_name] = found or configured_contract(config)
        return self._contracts[pass_name]


def _is_training(contract: Contract, asked: dict[str, Any]) -> bool:
    given = contract.get("sampling") or {}
    same = all(given.get(name) == asked[name] for name in ("temperature", "top_p"))
    return same and max(given.get("top_k") or 0, 0) == max(asked.get("top_k") or 0, 0)


def _workers_not_hooked(trainer: Any) -> list[str]:
    found = set()
    for role, worker in (getattr(trainer, "role_worker_mapping", None) or {}).items():
        if str(getattr(role, "name", role)).startswith("Actor"):
            metadata = getattr(worker, "__ray_metadata__", None)
            cls = worker if metadata is None else metadata.modified_class
            if all(parent.__module__ != _WORKERS for parent in cls.__mro__):
                found.add(cls.__module__)
    return sorted(found)


def _next_update(trainer: Any) -> dict[str, Any]:
    progress = verl_batches.progress_of(trainer)
    return {
        "step": progress.step,
        "policy_version": progress.version,
        "is_train": _bypasses(trainer.config),
        "is_last": progress.is_last,
    }


def _bypasses(config: Any) -> bool:
    correction = config.algorithm.get("rollout_correction")
    return bool(correction and correction.get("bypass_mode", False))


def _declared_contract(folder: Path, pass_name: str, accepts: Callable[[Contract], bool]) -> Contract | None:
    paths = sorted((folder / PASSES / pass_name).glob("*.json"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    store = Store(folder)
    contracts = (read_contract(store, pass_name, path.stem) for path in paths)
    return next((contract for contract in contracts if accepts(contract)), None)
