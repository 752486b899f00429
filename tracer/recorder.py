"""Record a trace from a training loop.

Shapes: B sequences, P padded prompt width, T padded response width, N tokens from several sequences, L layers with a
router, S experts selected per token.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np

from ..schemas.capture import Capture
from ..schemas.documents import CLOSED, CONTRACT_KEYS, DTYPES, Contract, Manifest, now
from ..schemas.errors import InvalidRecord, TraceExists, warn
from ..schemas.layout import EVAL_SPLIT, HYPERPARAMETER, METRICS, ROUTING, SPLITS, TRAIN_SPLIT
from ..schemas.lazy import checked
from ..schemas.loss import Loss
from ..schemas.passes import ROLLOUT, check_pass, check_pass_name
from ..schemas.tables import GIVEN, PER_RESPONSE_TOKEN, REWARDS, TOKEN_SCORES, Column
from ..schemas.version import __version__
from . import environment
from .batch import Batch, SequenceNames, padding_of
from .create import join_trace, new_trace
from .dense import Distribution, Hidden, bits, check_num_rows
from .liveness import PROCESS, is_of_this_start, is_this_process, liveness, next_attempt, states_of_rank
from .optimizer import optimizer_statistics
from .patience import MAX_WAIT_S, Patience
from .ragged import Padding, Ragged, flatten, is_padded, num_rows, shown
from .routing import Routing, check_routing
from .rows import (
    ALIGN,
    Forward,
    aligned,
    check_logprobs,
    check_whole,
    is_per_token,
    metric_columns,
    of_rows,
    reward_array,
    rounding_tolerance,
    with_holes,
)
from .scalars import check_metrics, listed, names, per_row, step_number
from .staging import Staged, local_part, to_numpy
from .store import Store
from .whole_file import alone
from .worker import run_within
from .writer import QUEUE_BYTES, Part, TraceWriter

ATTEMPT_SESSION = "recorder"
"""Session name for attempts that `tim-trace record` did not start."""

_STAGED = {name: column for name, column in GIVEN.items() if name not in ("step", "seq_id")}

_Arrays = dict[str, tuple[np.ndarray, str]]
"""Maps each array's name to the array's bits and dtype."""


class Recorder:
    """Records a training loop's per-token logprobs, from the inference engine, the trainer and any other pass.

    Use it as a context manager. Leaving the block seals the trace. Methods return immediately, and a background thread
    does the writing. Callers wait only while the queue is full (`queue_bytes`), and no data is dropped. Device tensors
    are copied on a separate stream. Inconsistent values raise InvalidRecord, in a later call if they are on a device.
    If the disk is full or does not respond for `max_wait` seconds, recording stops and training continues.

    The standard passes are `rollout` (the inference engine), `train` (the trainer, before the update), `current` (the
    trainer when it computes the loss, once per inner iteration) and `reference`. Other passes need `add_contract`
    first.

    >>> import tempfile
    >>> with Recorder(tempfile.mkdtemp()) as recorder:
    ...     batch = recorder.add_sequences(step=1, prompt_ids=[[5, 6]], response_ids=[[7, 8, 9]], reward=[1.0])
    ...     recorder.add_scores("rollout", batch, logprobs=[[-0.5, -0.1, -2.0]])
    ...     recorder.add_scores("train", batch, logprobs=[[-0.5, -0.1, -2.1]])
    ...     recorder.add_metrics(1, {"loss": 0.25})
    """

    @checked
    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        capture: str = "logprobs",
        capture_fraction: float = 1.0,
        force: bool = False,
        join: bool | None = None,
        resume: bool = False,
        queue_bytes: int = QUEUE_BYTES,
        max_wait: float = MAX_WAIT_S,
    ):
        """Open a trace for recording.

        `capture` and `capture_fraction` decide which sequences `captures` selects. `force` replaces an existing trace.
        `resume` adds to an existing trace, finished or not, when a run continues from a checkpoint.

        With `join`, several processes write one trace. Each opens the same path, and the first one creates it. This is
        the default if torchrun's WORLD_SIZE is above 1.

        Rows recorded after a resume, or by a process that replaces a dead one, belong to a new attempt. Views show the
        newest attempt at each step.

        Raises TraceExists if neither `force` nor `resume` is set and the path already contains files (with `join`:
        files other than an unfinished trace), or if another process is recording this rank. Raises StorageStalled if
        the file system does not respond.
        """
        self.capture = Capture.parse(capture, capture_fraction)
        manifest = Manifest(
            run_id=str(uuid.uuid4()), created_at=now(), created_by=__version__, source="recorder",
            command=environment.program(), capture=str(self.capture), capture_fraction=capture_fraction,
        )  # fmt: skip
        if join is None:
            join = int(os.environ.get("WORLD_SIZE") or 1) > 1

        def open_writer() -> TraceWriter:
            with contextlib.ExitStack() as stack:
                if resume or (join and not force):
                    folder = join_trace(path, manifest)
                    stack.enter_context(alone(folder))
                    if not resume:
                        _refuse_taken(folder, path)
                else:
                    folder = stack.enter_context(new_trace(path, manifest, force=force))
                attempt = next_attempt(Store(folder), ATTEMPT_SESSION, resumes=resume)
                return TraceWriter(folder, queue_bytes=queue_bytes, attempt=attempt, max_wait_s=max_wait)

        self._start(run_within(Patience(path, max_wait), open_writer, late=TraceWriter.close))

    @classmethod
    def of_writer(cls, writer: TraceWriter, capture: Capture, *, ordered: bool = True) -> Recorder:
        """Return a lenient recorder for data from a framework or a file.

        It records some invalid values instead of raising an exception, so that they can be found in the trace. Logprobs
        above 0 are kept, non-numeric metrics become text, and calls after `close` are ignored. If `ordered` is False,
        steps may decrease.
        """
        recorder = cls.__new__(cls)
        recorder.capture = capture
        recorder._start(writer, checks_logprobs=False, ordered=ordered)
        return recorder

    def _start(self, writer: TraceWriter, *, checks_logprobs: bool = True, ordered: bool = True) -> None:
        self.writer, self.folder = writer, writer.folder
        self._contracts: dict[str, tuple[Contract, str]] = {}
        self._checks_logprobs, self._ordered = checks_logprobs, ordered
        self._names = {split: SequenceNames() for split in SPLITS}
        self._metric_step: int | None = None
        self._warned: set[str] = set()
        self._kinds: dict[str, dict[str, Any]] = {}
        """Shape and dtype of one token's values, for each Zarr group and array name."""

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def waited_s(self) -> float:
        """Seconds that calls have waited for the disk, including a wait in progress."""
        return self.writer.patience.waited_s

    @checked
    def flush(self, *, sync: bool = False, weights: bool = True) -> bool:
        """Block until everything added so far would survive `kill -9` or, with `sync`, a power failure.

        Without this call, rows reach the operating system about a second after `add_*` returns. `sync` calls fsync on
        every file and takes milliseconds to seconds. If `weights` is False, weight versions may still be queued.

        If recording has stopped, prints a message on stderr and returns False. Raises InvalidRecord for invalid device
        tensors in earlier calls.
        """
        return self.writer.flush(sync=sync, weights=weights)

    @checked
    def close(self, *, at_exit: bool = False) -> bool:
        """Write and seal everything queued. Raises InvalidRecord for invalid device tensors in earlier calls.

        Set `at_exit` while the interpreter is shutting down. Returns False if recording has stopped.
        """
        is_whole = self.writer.close(at_exit=at_exit)
        if "weights" in self._warned and (lacking := self._lacking_for_replay()):
            self._warn_once("replay", f"a replay of these weights will fail without a call to {lacking}")
        self.writer.raise_invalid()
        return is_whole

    def captures(self, step: int, seq_ids: Sequence[str]) -> np.ndarray:
        """Return a [B] mask of sequences selected for capture. The selection is the same in every process and run."""
        step, seq_ids = step_number(step), names(seq_ids, f"step {step}, seq_ids")
        if not self.capture.dense:
            return np.zeros(len(seq_ids), bool)
        return np.array([self.capture.selects(step, seq_id) for seq_id in seq_ids], bool)

    @checked
    def add_contract(self, pass_name: str, contract: Contract) -> str:
        """Record a pass's contract (dtype, kernels and other settings that affect its logprobs), and return its hash.

        The contract applies to scores added later. Passes with non-standard names must be declared this way. `dtype` is
        the compute dtype as named in torch; bf16, fp16, fp32 and fp64 are accepted too. For `train`, add `"torch":
        torch_settings()` and `"versions": numeric_versions()` (of `tim_trace.tracer.environment`), so that `replay` can
        restore and compare the settings.
        """
        known = self._contracts.get(pass_name)
        if known is not None and known[0] is contract:
            return known[1]
        check_pass_name(pass_name)
        dtype = str(contract.get("dtype"))
        named = {**contract, "dtype": DTYPES[dtype]} if dtype in DTYPES else contract
        for key in contract if self._checks_logprobs else ():
            near = get_close_matches(str(key), CONTRACT_KEYS, 1, 0.8)
            if near and key not in CONTRACT_KEYS:
                self._warn_once(f"contract {key}", f"contract of {pass_name!r}: did you mean {near[0]!r} by {key!r}?")
        digest = self.writer.contract(pass_name, named)
        self._contracts[pass_name] = (contract, digest)
        return digest

    def save_tokenizer(self, tokenizer: Any) -> None:
        """Save a transformers tokenizer, so that tokens can be shown as text. Only the first tokenizer is saved."""
        _check_has("tokenizer", tokenizer, "save_pretrained", "transformers tokenizer")
        self.writer.save_tokenizer(tokenizer)

    @checked
    def describe(self, *, model: Mapping[str, Any] | None = None, tokenizer: Mapping[str, Any] | None = None) -> None:
        """Describe the trained model (a replay needs its `class` and `config`) and its tokenizer."""
        state = self.writer.state
        state.model = state.model if model is None else dict(model)
        state.tokenizer = state.tokenizer if tokenizer is None else dict(tokenizer)
        self.writer.submit(self.writer.save_state, 0)

    def add_sequences(
        self,
        *,
        step: int,
        response_ids: Any,
        prompt_ids: Any = None,
        response_attention_mask: Any = None,
        prompt_attention_mask: Any = None,
        response_mask: Any = None,
        seq_ids: Sequence[Any] | None = None,
        group_ids: Sequence[Any] | None = None,
        policy_version: Any = None,
        reward: Any = None,
        rewards: Mapping[str, Any] | None = None,
        advantage: Any = None,
        temperature: Any = None,
        top_p: Any = None,
        top_k: Any = None,
        min_p: Any = None,
        repetition_penalty: Any = None,
        max_tokens: Any = None,
        finish_reason: Any = None,
        split: str = TRAIN_SPLIT,
    ) -> Batch:
        """Record sampled sequences and return them as a batch for `add_scores`.

        `response_ids` [B, T] and `prompt_ids` [B, P] are padded tensors or arrays, or B lists. Attention masks are
        nonzero at tokens, with padding on either side. Without a mask, every cell counts as a token, and apparent
        padding raises a warning. `response_mask`, aligned with `response_ids`, is nonzero at tokens that are part of
        the loss. `advantage` is one value, one value per sequence [B], or one per token, aligned with `response_ids`.
        `rewards` maps each reward function to [B] values. All other arguments are one value or [B] values. None means
        not recorded.

        `step` is a non-negative integer and must not decrease. `seq_ids` must be unique within a step and are generated
        by default. Evaluation samples have the split "eval". They appear only in the views `eval_sequences` and
        `eval_scores`, not in the run's statistics.

        If a value is invalid, nothing is recorded and InvalidRecord is raised. For device tensors, a later call raises
        the error.
        """
        passed = dict(locals())  # save the keyword arguments before any is reassigned
        given = {name: passed[column.keyword or name] for name, column in _STAGED.items()}
        step = step_number(step)
        if not isinstance(split, str) or split not in SPLITS:
            raise InvalidRecord(f"step {step}, split: got {shown(split)}; pass {' or '.join(map(repr, SPLITS))}")
        given["response_ids"] = local_part(response_ids, f"step {step}, response_ids")
        rows = num_rows(given["response_ids"], f"step {step}, response_ids")
        if not rows:
            raise InvalidRecord(f"step {step}: response_ids is empty. Skip this call for a step without sequences")
        if rewards is not None and not (isinstance(rewards, Mapping) and all(isinstance(k, str) for k in rewards)):
            raise InvalidRecord(
                f"step {step}, rewards: got {shown(rewards)}; pass a dict that maps each reward function to [B] "
                f"values, or pass their sum as reward="
            )
        given["rewards"] = None if rewards is None else list(rewards.values())
        given["advantage" if is_per_token(advantage) else "advantages"] = None
        staged = Staged(
            f"step {step}",
            response_attention_mask=response_attention_mask,
            prompt_attention_mask=prompt_attention_mask,
            **given,
        )
        named = self._names[split]
        before = replace(named)
        own = None if seq_ids is None else names(seq_ids, f"step {step}, seq_ids")
        if self._ordered and named.step is not None and step < named.step:
            raise InvalidRecord(f"got sequences of step {step} after step {named.step}: {_STEP_DECREASES}")
        if own is not None and len(own) != rows:
            raise InvalidRecord(f"step {step}: got {len(own)} seq_ids for {rows} responses; pass one per response")
        seq_ids = [f"{self.writer.name}-{named.count + row}" for row in range(rows)] if own is None else own
        known = named.add(step, seq_ids, ordered=self._ordered)
        batch = Batch(
            step, seq_ids, policy_version, self.folder, attempt=self.writer.state.attempt, split=split,
            is_named=own is not None,
        )  # fmt: skip
        reward_names = names(list(rewards or {}), f"step {step}, rewards")

        def refused(error: Exception) -> None:
            known.difference_update(seq_ids)
            batch.refusal = str(error)

        try:
            self._submit(
                staged,
                lambda: self._sequence_columns(batch, staged.values(), reward_names),
                lambda columns: self._append_sequences(batch, columns),
                refused,
            )
        except BaseException:
            self._names[split] = before
            raise
        return batch

    def add_scores(
        self,
        pass_name: str,
        batch: Batch,
        *,
        logprobs: Any,
        entropy: Any = None,
        top2_gap: Any = None,
        rows: Any = None,
        attention_mask: Any = None,
        scored_mask: Any = None,
        policy_version: Any = None,
        forward: Forward | None = None,
        distribution: Distribution | None = None,
        captured_rows: Any = None,
        routing: Routing | None = None,
    ) -> None:
        """Record one pass's scores for each response token in a batch, or in some of its rows.

        `logprobs` (nats), `entropy` and `top2_gap` are aligned with the batch's `response_ids`: padded the same way,
        padded differently with their own `attention_mask`, or as lists. `scored_mask`, aligned the same way, is nonzero
        where the pass has a value. Other tokens become NULL. `rows` lists the scored rows' indices in the batch.

        `policy_version` is the number of optimizer updates applied to the weights that computed the scores. It defaults
        to the sequences' `policy_version` for `rollout`, and to None for other passes. If None, staleness cannot be
        computed, and `replay` reports that it uses the weights that sampled the sequences.

        `forward`, a `tim_trace.tracer.rows.Forward`, says which rows shared a forward pass, and their padding, so that
        `replay` can repeat it. Without it, `replay` runs one row per forward pass.
        `distribution` holds captured distributions [N, ...], one for each response token in `captured_rows`.

        `routing` is Routing(expert_ids=[N, L, S], expert_weights=[N, L, S]), a mixture-of-experts model's router
        choices. Prompt tokens precede response tokens in each row, without padding. Layers are ordered as in the
        contract's `moe_layers`, and slots as in the model.

        If a value is invalid, nothing is recorded and InvalidRecord is raised. For device tensors, a later call raises
        the error.
        """
        given = {name: value for name, value in locals().items() if name in TOKEN_SCORES}
        check_pass(pass_name, self._contracts.keys())
        if not isinstance(batch, Batch):
            raise InvalidRecord(f"batch: got {shown(batch)}; pass the batch that add_sequences returned")
        self._raise_earlier()
        batch.check(self.folder)
        what = f"step {batch.step}, pass {pass_name!r}"
        kinds: dict[str, Any] = {"forward": Forward, "distribution": Distribution, "routing": Routing}
        for (name, kind), value in zip(kinds.items(), (forward, distribution, routing), strict=True):
            if value is not None and not isinstance(value, kind):
                wanted = " or ".join(part.__name__ for part in getattr(kind, "__args__", (kind,)))
                raise InvalidRecord(f"{what}, {name}: got {shown(value)}; pass a {wanted}")
        chosen = batch.rows(rows)
        given["logprobs"] = logprobs = local_part(logprobs, f"{what}, logprobs")
        found = num_rows(logprobs, f"{what}, logprobs")
        if found != len(chosen):
            raise InvalidRecord(
                f"{what}: got {found} rows of logprobs for {len(chosen)} sequences; pass rows= to score only some of "
                "them"
            )
        check_whole(logprobs, f"{what}, logprobs")
        if forward is not None:
            forward.check(len(chosen), f"{what}, forward")
        captured = batch.captured_rows(captured_rows, chosen) if distribution is not None else np.empty(0, np.int64)
        if policy_version is None and pass_name == ROLLOUT:  # a rollout is scored by the weights that sampled it
            policy_version = of_rows(batch.policy_version, chosen, len(batch))
        if isinstance(distribution, Hidden) and policy_version is None:
            raise InvalidRecord(
                f"{what}, distribution: pass policy_version, because the weights of that version are needed to compute "
                "logits from hidden states"
            )
        staged = Staged(
            what, **given, attention_mask=attention_mask, scored_mask=scored_mask, policy_version=policy_version,
            distribution=None if distribution is None else list(distribution.arrays.values()),
            routing=None if routing is None else list(routing.arrays.values()),
        )  # fmt: skip
        iteration = batch.next_iteration(pass_name, chosen)
        staged.wait |= not batch.is_resolved
        # A contract describes training. It does not apply to evaluation, where dropout is off and settings may differ.
        has_contract = pass_name in self._contracts and batch.split == TRAIN_SPLIT
        contract = self._contracts[pass_name][1] if has_contract else None
        tolerance = rounding_tolerance(logprobs)
        arrays = [] if distribution is None else list(distribution.arrays)
        routed = [] if routing is None else list(routing.arrays)

        def prepare() -> tuple[dict[str, Any], _Arrays, np.ndarray, _Arrays]:
            values = staged.values()
            scores = self._score_columns(pass_name, batch, chosen, values, tolerance)
            scores |= {"contract": contract, "iteration": iteration} | ({} if forward is None else forward.columns)
            dense = {name: bits(value) for name, value in zip(arrays, values["distribution"] or [], strict=True)}
            check_num_rows(dense, int(batch.lengths(captured).sum()), what)
            self._check_kinds(pass_name, dense, f"{what}, distribution")
            chosen_experts = dict(zip(routed, values["routing"] or [], strict=True))
            return scores, dense, captured, self._routing(pass_name, batch, chosen, chosen_experts)

        self._submit(
            staged,
            prepare,
            lambda prepared: self._append_scores(batch, chosen, *prepared),
            lambda _: batch.take_back(pass_name, chosen),
        )

    def add_weights(self, version: int, tensors: Mapping[str, Any]) -> None:
        """Save a policy version's weights bit for bit. `version` is the number of optimizer updates applied to them.

        Warns if `describe` or `add_contract` has not been called, because a replay needs both. `close` warns again if
        one is still missing.

        Tensors may be on any device. If they are DTensors, each process saves its shard. The caller may modify the
        tensors once the call returns. Each version is saved only once.

        Raises InvalidRecord for an unsupported dtype.
        """
        version = step_number(version, "version")
        if not isinstance(tensors, Mapping):
            raise InvalidRecord(
                f"version {version}: got {shown(tensors)}; pass a state_dict, which maps names to tensors"
            )
        for name, tensor in tensors.items():
            _check_has(f"version {version}, {name}", tensor, "detach", "torch tensor")
        if self._checks_logprobs and not environment.rank() and (lacking := self._lacking_for_replay()):
            self._warn_once("weights", f"a replay of these weights also needs {lacking}")
        self.writer.keep_weights(version, tensors)

    def _lacking_for_replay(self) -> str:
        calls = {
            'describe(model={"class": ..., "config": ...})': self.writer.state.model,
            'add_contract("train", {"engine": ..., "dtype": ...})': self._contracts,
        }
        return " and ".join(call for call, made in calls.items() if not made)

    def add_metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """Record logged values. Numbers and one-element tensors are stored as numbers, None as NULL, others as text.

        Raises InvalidRecord if the step decreases, or if a value is a dict, a list or an array with several elements.
        """
        step = step_number(step)
        if self._ordered and self._metric_step is not None and step < self._metric_step:
            raise InvalidRecord(f"got metrics of step {step} after step {self._metric_step}: {_STEP_DECREASES}")
        if self._checks_logprobs:
            check_metrics(values, f"metrics of step {step}")
        self._add_metrics(step, values)
        self._metric_step = step

    def add_hyperparameters(self, values: Mapping[str, Any], *, step: int = 0) -> None:
        """Record the run's settings as metrics under `hyperparameter/`, at step 0 by default. Non-numbers become text.

        If a setting changes during the run, record it again with the first step at which the new value applies, so
        that `attribute` can consider it as a cause.

        Raises InvalidRecord if the step decreases.
        """
        if not isinstance(values, Mapping):
            raise InvalidRecord(f"hyperparameters: got {shown(values)}; pass a dict of values by name")
        step = step_number(step)
        named = {f"{HYPERPARAMETER}{name}": "None" if value is None else value for name, value in values.items()}
        if step > 0:
            self.add_metrics(step, named)
        else:
            self._add_metrics(0, named)

    def add_loss(self, loss: Loss) -> None:
        """Record how the loss is computed, so that `objective` and `gradient` can recompute it.

        >>> import tempfile
        >>> with Recorder(tempfile.mkdtemp()) as recorder:
        ...     recorder.add_loss(Loss(kind="ppo_clip", clip_low=0.2, clip_high=0.28, aggregation="token_mean"))
        """
        if not isinstance(loss, Loss):
            raise InvalidRecord(f"loss: got {shown(loss)}; pass a tim_trace.Loss")
        self.add_hyperparameters(loss.hyperparameters)

    def add_optimizer(self, step: int, optimizer: Any) -> None:
        """Record the size of this step's update relative to the weights, and the optimizer's mean second moment.

        Call this after `optimizer.step()` of torch's Adam, AdamW or SGD with momentum. The optimizer's state is only
        read. The metrics are used by `dynamics` and listed in tracer.optimizer.optimizer_statistics.

        Raises InvalidRecord if the step decreases.
        """
        _check_has(f"step {step}, optimizer", optimizer, "param_groups", "torch optimizer")
        self.add_metrics(step, self.writer.part(Part.OPTIMIZER, optimizer_statistics, optimizer) or {})

    def _add_metrics(self, step: int, values: Mapping[str, Any]) -> None:
        if not values:
            return
        staged = Staged(f"metrics of step {step}", values=list(values.values()))
        keys, logged_at = list(values), datetime.now(UTC)

        def prepare() -> Any:
            return metric_columns(step, dict(zip(keys, staged.values()["values"], strict=True)), logged_at)

        self._submit(staged, prepare, lambda columns: self.writer.append(METRICS, columns, len(keys)))

    def _sequence_columns(self, batch: Batch, values: dict[str, Any], reward_names: list[str]) -> dict[str, Any]:
        rows, where = len(batch), f"step {batch.step}"
        masks = {side: (values[f"{side}_attention_mask"], values[f"{side}_ids"]) for side in ("response", "prompt")}
        warn = self._warn_once if self._checks_logprobs else None
        padding, prompt_padding = (padding_of(*given, side, where, warn) for side, given in masks.items())
        response_ids = flatten(values["response_ids"], np.int32, padding, f"{where}, response_ids")
        lengths, remedy = response_ids.lengths, ALIGN
        if padding is None and is_padded(values["response_ids"]):
            batch.width_without_mask = int(lengths[0])
            remedy = _unmasked(batch)

        prompt_ids = values["prompt_ids"]
        if prompt_ids is not None:
            prompt_ids = flatten(prompt_ids, np.int32, prompt_padding, f"{where}, prompt_ids")
            if len(prompt_ids) != rows:
                raise InvalidRecord(
                    f"{where}: got {len(prompt_ids)} prompts for {rows} responses; pass one per response"
                )

        def prepared(column: Column) -> Any:
            name, value = column.name, values[column.name]
            what = f"{where}, {column.keyword or name}"
            if value is None:
                return None
            if column.alignment == PER_RESPONSE_TOKEN:
                dtype = column.type.value_type.to_pandas_dtype()
                return aligned(value, dtype, padding, lengths, batch.label, batch.step, name, remedy)
            if column.type == REWARDS:
                named = zip(reward_names, value, strict=True)
                return {name: reward_array(value, rows, f"{what}[{name!r}]") for name, value in named} or None
            if column.is_name:
                return listed(names(value, what, optional=True), rows, what)
            return per_row(value, rows, column.type, what, flags=column.takes_flags)

        ids = {"prompt_ids": prompt_ids, "response_ids": response_ids}
        columns = {name: ids[name] if name in ids else prepared(column) for name, column in _STAGED.items()}
        columns |= {f"num_{name.replace('ids', 'tokens')}": of.lengths for name, of in ids.items() if of is not None}
        batch.resolve(lengths, padding, None if prompt_ids is None else prompt_ids.lengths)
        return columns

    def _score_columns(
        self, pass_name: str, batch: Batch, chosen: np.ndarray, values: dict[str, Any], tolerance: float
    ) -> dict[str, Any]:
        step, lengths = batch.step, batch.lengths(chosen)
        own = values["attention_mask"]
        if own is not None and not is_padded(values["logprobs"]):
            raise InvalidRecord(
                f"step {step}, pass {pass_name!r}, attention_mask: logprobs are lists, which have no padding. Pass "
                "logprobs as a tensor or array [B, T] with the mask, or lists without it"
            )
        padding = batch.padding(chosen)
        if own is not None:
            padding = Padding.of(own, f"step {step}, pass {pass_name!r}, attention_mask")
        remedy = ALIGN if batch.width_without_mask is None else _unmasked(batch)

        def label(row: int) -> str:
            return batch.label(chosen[row])

        def per_token(name: str, dtype: Any = np.float32) -> Ragged | None:
            if values[name] is None:
                return None
            what = f"{name} of pass {pass_name!r}"
            return aligned(values[name], dtype, padding, lengths, label, step, what, remedy)

        scored = per_token("scored_mask", bool)
        scores = {name: with_holes(per_token(name), scored) for name in TOKEN_SCORES}
        if (logprobs := scores["logprobs"]) is not None:
            if self._checks_logprobs:
                check_logprobs(logprobs, tolerance, label, step, pass_name)
            self._warn_rounded(pass_name, values["logprobs"])
        what = f"step {step}, policy_version"
        version = per_row(values["policy_version"], len(chosen), _STAGED["policy_version"].type, what)
        return {"pass": pass_name, "policy_version": version, **scores}

    def _routing(self, pass_name: str, batch: Batch, chosen: np.ndarray, given: dict[str, Any]) -> _Arrays:
        if not given:
            return {}
        what = f"step {batch.step}, routing of pass {pass_name!r}"
        lengths = batch.whole_lengths(chosen)
        if lengths is None:
            raise InvalidRecord(
                f"{what}: the sequences have no prompt_ids. Routing covers prompt tokens too, so pass prompt_ids to "
                "add_sequences"
            )
        check_routing(Routing(**given), int(lengths.sum()), what)
        # Copy the arrays, since the caller may change them before they are written.
        stored = {name: bits(values) for name, values in given.items()}
        arrays = {name: (np.array(values), dtype) for name, (values, dtype) in stored.items()}
        self._check_kinds(f"{ROUTING}/{pass_name}", arrays, what)
        return arrays

    def _check_kinds(self, group: str, arrays: _Arrays, what: str) -> None:
        kinds = {name: (values.shape[1:], dtype) for name, (values, dtype) in arrays.items() if len(values)}
        known = self._kinds.setdefault(group, kinds) if kinds else kinds
        if known != kinds:
            raise InvalidRecord(
                f"{what}: the arrays have the shapes and dtypes {kinds}, but had {known} in earlier batches. "
                "Shapes and dtypes must not change within a pass"
            )

    def _append(self, table: str, batch: Batch, seq_ids: list[str], columns: dict[str, Any]) -> None:
        known = {"step": batch.step, "seq_id": seq_ids, "attempt": batch.attempt}
        self.writer.append(table, columns | known, len(seq_ids))

    def _append_sequences(self, batch: Batch, columns: dict[str, Any]) -> None:
        self._append(SPLITS[batch.split][0], batch, batch.seq_ids, columns)
        if batch.split == EVAL_SPLIT:
            self.writer.state.num_eval_sequences += len(batch)
            return
        self.writer.state.num_sequences += len(batch)
        self.writer.state.num_tokens += int(columns["response_ids"].lengths.sum())

    def _append_scores(
        self, batch: Batch, chosen: np.ndarray, scores: dict[str, Any], dense: _Arrays, captured: np.ndarray,
        experts: _Arrays,
    ) -> None:  # fmt: skip
        if experts:
            lengths = batch.whole_lengths(chosen)
            assert lengths is not None
            group, start = self.writer.segments.append_dense(f"{ROUTING}/{scores['pass']}", experts)
            scores |= {"routing": group, "routing_start": start + np.cumsum(lengths) - lengths}
        if dense:
            tokens = batch.lengths(captured)
            group, start = self.writer.segments.append_dense(scores["pass"], dense)
            starts = dict(zip(captured.tolist(), (start + np.cumsum(tokens) - tokens).tolist(), strict=True))
            scores["dense"] = [group if row in starts else None for row in chosen.tolist()]
            scores["dense_start"] = [starts.get(row) for row in chosen.tolist()]
        self._append(SPLITS[batch.split][1], batch, [batch.seq_ids[row] for row in chosen], scores)

    def _submit(
        self,
        staged: Staged,
        prepare: Callable[[], Any],
        append: Callable[[Any], None],
        refused: Callable[[Exception], None] = lambda _: None,
    ) -> None:
        def checked() -> Any:
            try:
                return prepare()
            except Exception as error:
                refused(error)
                raise

        try:
            self._raise_earlier()
            if staged.wait:
                staged.start()
                self.writer.submit(lambda: append(checked()), staged.num_bytes, ready=staged.wait_for_device)
            else:
                prepared = prepare()
                self.writer.submit(lambda: append(prepared), staged.num_bytes)
        except Exception as error:
            refused(error)
            raise

    def _raise_earlier(self) -> None:
        try:
            self.writer.raise_invalid()
        except InvalidRecord as error:
            raise InvalidRecord(f"{error} (from an earlier call; this call recorded nothing, so repeat it)") from error
        if self._checks_logprobs and self.writer.state.state == CLOSED:
            raise InvalidRecord(f"{self.folder}: the recorder is closed. Open a new one")

    def _warn_once(self, key: str, sentence: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            warn(sentence)

    def _warn_rounded(self, pass_name: str, logprobs: Any) -> None:
        if str(getattr(logprobs, "dtype", "")).removeprefix("torch.") != "float64" or pass_name in self._warned:
            return
        exact = to_numpy(logprobs)
        with np.errstate(invalid="ignore", over="ignore"):  # infinities are recorded as they are
            change = np.abs(np.nan_to_num(exact - exact.astype(np.float32), posinf=0.0, neginf=0.0)).max(initial=0.0)
        if change > 0.0:
            self._warn_once(
                pass_name,
                f"float64 logprobs of pass {pass_name!r} are stored as float32 (rounding error up to "
                f"{change:.1e} nats)",
            )


_STEP_DECREASES = "steps must not decrease. Open a new recorder for a resumed run"


def _unmasked(batch: Batch) -> str:
    return (
        f"response_ids were {batch.width_without_mask} wide without response_attention_mask, so every cell counts as a "
        f"token. Pass that mask to add_sequences, or lists without padding"
    )


def _check_has(what: str, value: Any, attribute: str, wanted: str) -> None:
    if not hasattr(value, attribute):
        raise InvalidRecord(f"{what}: got {shown(value)}; pass a {wanted}")


def _refuse_taken(folder: Path, path: Any) -> None:
    """Raise TraceExists if this rank's writer was closed normally, or is still running in another process.

    A rank that was restarted after a crash may continue. If a recent heartbeat is the only sign of another process,
    this function warns instead.
    """
    store, rank = Store(folder), environment.rank()
    of_rank = [state for state in states_of_rank(store, rank) if is_of_this_start(state, ATTEMPT_SESSION)]
    if any(state.state == CLOSED for state in of_rank):
        raise TraceExists(
            f"{path} contains a finished trace (the writer for rank {rank} is closed). Choose another folder, replace "
            "it with force=True, or continue it with resume=True"
        )
    for state in of_rank:
        found = liveness(state, store)
        if rank is None or is_this_process(state) or not found.is_alive:
            continue
        who = f"{path}: process {state.pid} on {state.host} is recording rank {rank} of this trace"
        if found.how == PROCESS:
            raise TraceExists(f"{who}. Give each process its own RANK, choose another folder, or end that process")
        sentence = (
            f"{who}, or was {found.silent_s or 0.0:.0f} s ago (last heartbeat). This process records a new attempt"
        )
        warn(sentence)
