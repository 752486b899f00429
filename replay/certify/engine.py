from __future__ import annotations

import math
import os
import shlex
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec
import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...schemas.documents import Contract
from ...schemas.errors import InvalidOption, TimTraceError
from ...schemas.layout import MANIFEST
from ...schemas.passes import TRAIN
from ...tracer.progress import Progress, no_progress, unheard
from ...tracer.recorder import Recorder
from ...tracer.store import first_line
from ...tracer.weights.attach import load_folder
from ...tracer.weights.identity import described
from ..arm_option import EXACT, HF, VLLM
from ..arm_pass import forward_of
from ..arms import parse_arm
from ..backends.model import to_torch
from ..loaded import LoadedModel, Scorer, device_here, scorer_of
from ..recorded import RecordedRow, RecordedRun
from ..vllm_scorer import VllmScorer
from .batches import Batch, Drawer, Sequence_, mutated, probes, shrunk
from .results import CERTIFIED, COUNTEREXAMPLE, UNDECIDED, Certificate, Counterexample, Coverage, hash_of, ranges

AGAINST = "against"
_LAYOUTS = {
    HF: ("padding=right", "padding=packed", "mode=decode", "mode=chunked:3", "mode=chunked:16", "threads=1", "threads=2"),
    VLLM: ("mode=decode", "mode=decode,preempt=2", "batch-tokens=32", "mode=decode,preempt=5,batch-tokens=32",
           "prefix-caching=on", "prefix-caching=off"),
}  # fmt: skip
"""Options to search, by engine. Options that an arm sets are not searched. With `batch-tokens=32`, vLLM recomputes a
preempted request in chunks while other requests decode."""
_LAYOUTS[EXACT] = (*_LAYOUTS[HF], "padding=left,mode=chunked:7")
_MOST_KEPT, _MOST_TRIALS, _NUM_VLLM = 400, 400, 600
CERTIFICATE = "certificate.json"
DEFAULT_LENGTH = 256

_Bits = tuple[list[np.ndarray], list[np.ndarray]]
"""Both executions' logprobs of each row, [T] float32."""


def certify(
    trace: str | os.PathLike[str],
    *,
    arm: str | None = None,
    against: str | None = None,
    max_batch: int = 64,
    max_length: int | None = None,
    minutes: float = 5.0,
    seed: int = 0,
    model_factory: str | None = None,
    against_factory: str | None = None,
    weights_from: str | os.PathLike[str] | None = None,
    output: str | os.PathLike[str] = "certify",
    progress: Progress = no_progress,
) -> Certificate:
    """Search for a batch on which two executions differ bitwise, or certify that a thorough search found none.

    `trace` is a run with weights or a Hugging Face model folder. The search runs `arm` (default: as recorded) on
    batches of up to `max_batch` sequences, with prompts and responses of up to `max_length` tokens (default: 256, or
    less if the model has too few positions). Each sequence's logprobs must match, bit for bit, those of the sequence
    alone or, with `against`, those of that arm on the same batch. Options that an arm sets are fixed. The search varies
    padding side, cached decoding, chunks and threads if the arm does not set them (for vLLM: decoding, preemption,
    chunks and the prefix cache).

    The search tries every row count and length, paddings, orders, duplicates, shared prefixes and token ids, then
    random changes to batches that reached new operator calls, for at most `minutes`. A batch that differs is shrunk and
    written as the trace `output`/counterexample, replacing an earlier one. The result contains the command that
    reproduces the difference. A certificate is written to `output`/certificate.json. The verdict is `undecided` if time
    runs out before every planned batch has been tried.

    `model_factory` and `against_factory` name functions (module:function) that build the two executions' models.

    Raises CannotReplay, WeightsMissing, DamagedTrace, InvalidOption, TraceNotFound.
    """
    for name, value, least in (("max_batch", max_batch, 1), ("max_length", max_length, 1), ("minutes", minutes, 0)):
        if value is not None and value < least:
            raise InvalidOption(f"got {value}; pass {least} or more", option=name)
    begun = monotonic()
    with tempfile.TemporaryDirectory(prefix="tim-trace-certify-") as folder:
        path = _as_trace(Path(trace), Path(folder) / "run")
        search = _Search(path, arm, against, max_batch, max_length, seed, model_factory, against_factory, weights_from)
        with closing(search), progress("searching", int(minutes * 60)) as advance:
            found = search.run(minutes * 60, advance)
            example = None if found is None else search.write(found, output)
        made = Certificate(
            verdict=COUNTEREXAMPLE if example else CERTIFIED if search.is_complete else UNDECIDED,
            of=os.fspath(trace), arm=search.a.text, against=search.b.text if search.b else None, max_batch=max_batch,
            max_length=search.draw.max_length, seed=seed, seconds=monotonic() - begun, covered=search.coverage(),
            not_covered=search.not_covered(), counterexample=example, settings=search.settings,
            settings_hash=hash_of(search.settings),
        )  # fmt: skip
    if made.is_certified:
        Path(output).mkdir(parents=True, exist_ok=True)
        made = replace(made, file=str(Path(output) / CERTIFICATE))
        Path(str(made.file)).write_bytes(msgspec.json.format(msgspec.json.encode(made), indent=1) + b"\n")
    return made


def _as_trace(path: Path, folder: Path) -> Path:
    """Return `path`, or for a Hugging Face model folder, write a one-sequence trace to `folder` and return that."""
    if (path / MANIFEST).exists() or not (path / "config.json").exists():
        return path
    model, _ = load_folder(path)
    with Recorder(folder) as recorder:
        identity = described(model, str(path), model.config.to_dict())
        recorder.describe(model=identity)
        attention = getattr(model.config, "_attn_implementation", None) or "eager"
        recorder.add_contract(
            TRAIN, {"engine": "transformers", "model": {"dtypes": identity["dtypes"], "attention": attention}}
        )
        recorder.add_weights(0, model.state_dict())
        batch = recorder.add_sequences(step=0, prompt_ids=[[0]], response_ids=[[0]], policy_version=0)
        recorder.add_scores(TRAIN, batch, logprobs=[[-1.0]])
    return folder


class _Calls(TorchDispatchMode):  # type: ignore[misc]  # torch declares no types for it
    """Collects operator calls: operator, output dtype, and each output size's bit length and divisibility by 16."""

    def __init__(self, found: set[Any]):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            sizes = tuple((size.bit_length(), size % 16 == 0) for size in result.shape)
            self.found.add((function, result.dtype, sizes))
        return result


class _Execution:
    def __init__(self, run: RecordedRun, text: str | None, contract: Contract, version: int, max_tokens: int):
        self.run, self.text, self.arm = run, text or "", parse_arm(text or "")
        self._contract, self._version, self._max_tokens = contract, version, max_tokens
        self.loaded = LoadedModel(run.weights)
        self._scorers: dict[str, Scorer] = {}

    def text_of(self, layout: str) -> str:
        return ",".join(filter(None, (self.text, layout)))

    def scorer(self, layout: str = "") -> Scorer:
        if layout not in self._scorers:
            arm = parse_arm(self.text_of(layout))
            if arm.engine == VLLM and arm.max_model_len is None:
                arm = replace(arm, max_model_len=self._max_tokens + 1, name="")
            self._scorers[layout] = scorer_of(self.run, arm, self._contract, device_here())
        return self._scorers[layout]

    def score(self, batch: Batch, *, empties: bool = False) -> list[np.ndarray]:
        """Return each row's logprobs as float32 [T]. With `empties`, empty vLLM's prefix cache first."""
        scorer = self.scorer(batch.layout)
        rows = [
            RecordedRow(
                seq_id=str(place), prompt_ids=np.array(prompt, np.int32), response_ids=np.array(response, np.int32),
                logprobs=np.zeros(len(response), np.float32), scored=np.ones(len(response), bool),
                policy_version=self._version, contract="", writer="", forward_id=0, forward_row=place,
                pad_left=left, pad_right=right,
            )
            for place, ((prompt, response), left, right) in enumerate(zip(batch.rows, *batch.padding(), strict=True))
        ]  # fmt: skip
        if empties and isinstance(scorer, VllmScorer):
            self.loaded.ready(scorer, self._version, None)
            scorer.forget()
        scored = self.loaded.score(scorer, rows, unheard)
        found = {row.seq_id: values for row, values in zip(scored.rows, scored.logprobs, strict=True)}
        return [np.asarray(found[str(place)], np.float32) for place in range(len(rows))]


class _Search:
    def __init__(
        self, path: Path, arm: str | None, against: str | None, max_batch: int, max_length: int | None, seed: int,
        model_factory: str | None, against_factory: str | None, weights_from: Any,
    ):  # fmt: skip
        run = RecordedRun(path, model_factory=model_factory, weights_from=weights_from)
        rows = run.step(run.steps(run.replayed_pass)[-1])
        config = run.model["config"].get("text_config") or run.model["config"]
        positions = int(config.get("max_position_embeddings") or config.get("n_positions") or 1 << 20)
        most = (positions - 1) // 2
        if max_length is not None and max_length > most:
            raise InvalidOption(
                f"got {max_length}, but the model has {positions:,} positions for prompt and response; pass at most {most}",
                option="max_length",
            )
        max_length = max_length or max(min(DEFAULT_LENGTH, most), 1)
        self.contract, self.version = run.train_contract(rows[0].contract), rows[0].policy_version
        self.a = _Execution(run, arm, self.contract, self.version, 2 * max_length)
        self.b: _Execution | None = None
        if against is not None or against_factory is not None:
            other = RecordedRun(path, model_factory=against_factory, weights_from=weights_from)
            self.b = _Execution(other, against, self.contract, self.version, 2 * max_length)
            if self.a.arm == self.b.arm and model_factory == against_factory:
                self.b.loaded = self.a.loaded
        self._sides = [self.a] if self.b is None else [self.a, self.b]
        self.is_vllm = self.a.arm.engine == VLLM
        self.draw = Drawer(int(config["vocab_size"]), max_batch, max_length, np.random.default_rng(seed))
        self._unsupported: dict[str, str] = {}
        self.layouts = ["", *self._open_layouts()]
        self._alone: dict[Sequence_, np.ndarray] = {}
        self._tried: dict[str, set[Any]] = defaultdict(set)
        self._ids, self._rows, self._shapes, self._calls = (set[Any]() for _ in range(4))
        self.num_batches = self.num_tokens = self.num_planned = 0
        self.is_complete = False
        self._found: _Bits | None = None
        """Both executions' logprobs of the smallest differing batch so far."""
        self.settings: tuple[Contract, Contract] = ({}, {})

    def _open_layouts(self) -> Iterator[str]:
        """Yield the layouts that do not override an arm's options. Options that every arm already sets are dropped."""
        words = [set(side.text.replace(" ", "").split(",")) for side in self._sides]
        named = {word.partition("=")[0].replace("_", "-") for word in set.union(*words)}
        engines = {side.arm.engine for side in self._sides}
        if VLLM in engines and len(engines) > 1:
            return  # vLLM makes its own batches
        for searched in _LAYOUTS[HF if HF in engines else self.a.arm.engine]:
            options = [word for word in searched.split(",") if word not in set.intersection(*words)]
            layout = ",".join(options)
            if options and named.isdisjoint(word.partition("=")[0] for word in options):
                try:
                    for side in self._sides:
                        side.scorer(layout)
                    yield layout
                except TimTraceError as error:
                    self._unsupported[layout] = first_line(error)

    def run(self, seconds: float, advance: Any) -> tuple[Batch, ...] | None:
        """Return the smallest differing batch (and before it, one that must run first), or None if none differs."""
        last, until, before = monotonic(), math.inf, None
        planned, kept = iter(self._planned()), list[Batch]()
        while (now := monotonic()) < until:
            advance(int(now) - int(last))
            last = now
            if (batch := next(planned, None)) is None:
                self.is_complete = True
                layouts = self.layouts[-1:] if self.is_vllm else self.layouts
                batch = mutated(kept[self.draw.below(len(kept))], self.draw, layouts)
            if batch.layout in self._unsupported:
                continue
            is_new, differs = self._try(batch)
            until = min(until, monotonic() + seconds)  # loading the models does not count
            if is_new and len(kept) < _MOST_KEPT:
                kept.append(batch)
            if differs:
                return self._shrink(batch, before)
            before = batch
        return None

    def _planned(self) -> list[Batch]:
        """Return the planned batches. vLLM restarts for some layouts, so all batches of a layout run together."""
        planned = list(probes(self.draw))
        if self.is_vllm:
            first = list(dict.fromkeys(replace(batch, pad_left=0, pad_right=0) for batch in planned))[:_NUM_VLLM]
            planned = [replace(batch, layout=layout) for layout in self.layouts for batch in first]
        elif self.layouts[1:]:
            others = cycle(self.layouts[1:])
            planned = [one for batch in planned for one in (batch, replace(batch, layout=next(others)))]
        self.num_planned = len(planned)
        return planned

    def _try(self, batch: Batch) -> tuple[bool, bool]:
        """Return whether the batch reached new operator calls or has a new shape, and whether its logprobs differ."""
        num_calls, shape = len(self._calls), (len(batch.rows), batch.width, batch.layout)
        is_new = shape not in self._shapes
        is_watched = is_new and not self.is_vllm and self.num_batches % 4 == 0
        try:
            with _Calls(self._calls) if is_watched else nullcontext():
                differs = self._differs([batch])
        except TimTraceError as error:
            if not batch.layout:
                raise
            self._unsupported[batch.layout] = first_line(error)
            self.layouts.remove(batch.layout)
            return False, False
        if not self.num_batches:  # the first batch has no layout, so these are the arm's own settings
            self.settings = self.a.scorer().made_by(), self._sides[-1].scorer().made_by()
        self._shapes.add(shape)
        self.num_batches += 1
        self.num_tokens += sum(len(response) for _, response in batch.rows)
        prompts, responses = zip(*batch.rows, strict=True)
        self._tried["row_counts"].add(len(batch.rows))
        self._tried["prompt_lengths"].update(map(len, prompts))
        self._tried["response_lengths"].update(map(len, responses))
        self._tried["widths"].add(batch.width)
        self._tried["layouts"].add(batch.layout)
        self._rows.update(map(hash, batch.rows))
        self._ids.update(*prompts, *responses)
        return is_new or len(self._calls) > num_calls, differs

    def _differs(self, batches: Sequence[Batch]) -> bool:
        """Run the batches in order, and return whether the last one's logprobs differ."""
        for batch in batches[:-1]:
            self.a.score(batch)
        bits = self.a.score(batches[-1], empties=self.b is not None), self._expected(batches[-1])
        if differs := bool(_different(bits)):
            self._found = bits
        return differs

    def _expected(self, batch: Batch) -> list[np.ndarray]:
        if self.b is not None:
            return self.b.score(batch, empties=True)
        # Keep the layout, because vLLM would restart for a different one. Only preemption can change without a restart.
        words = batch.layout.split(",") if self.is_vllm else []
        layout = ",".join(word for word in words if not word.startswith("preempt="))
        for row in batch.rows:
            if row not in self._alone:
                (self._alone[row],) = self.a.score(Batch((row,), layout), empties=True)
        return [self._alone[row] for row in batch.rows]

    def _shrink(self, batch: Batch, before: Batch | None) -> tuple[Batch, ...]:
        if self._differs([batch]):
            return (shrunk(batch, lambda small: self._differs([small]), _MOST_TRIALS),)
        if before is not None and self._differs([before, batch]):
            batch = shrunk(batch, lambda small: self._differs([before, small]), _MOST_TRIALS // 2)
            return shrunk(before, lambda small: self._differs([small, batch]), _MOST_TRIALS // 2), batch
        return (batch,) if before is None else (before, batch)

    def coverage(self) -> Coverage:
        return Coverage(
            num_batches=self.num_batches, num_planned=self.num_planned, num_sequences=len(self._rows),
            num_tokens=self.num_tokens, vocabulary=len(self._ids) / self.draw.vocab_size, num_calls=len(self._calls),
            **{name: tuple(sorted(values)) for name, values in self._tried.items()},
        )  # fmt: skip

    def not_covered(self) -> tuple[str, ...]:
        found = [f"{layout}: {why}" for layout, why in self._unsupported.items()]
        longest = self.draw.max_length
        bounds = {"row_counts": self.draw.max_batch, "prompt_lengths": longest, "response_lengths": longest}
        for name, most in bounds.items():
            if left := sorted({*range(1, most + 1)} - self._tried[name]):
                found.append(f"{name}: {ranges(left)}")
        return (*found, *(f"layout: {one}" for one in self.layouts if one not in self._tried["layouts"]))

    def close(self) -> None:
        for side in self._sides:
            side.loaded.close()

    def write(self, batches: Sequence[Batch], output: Any) -> Counterexample:
        """Write a trace with the batches, and return the counterexample (the last batch)."""
        folder, batch, run = Path(output) / COUNTEREXAMPLE, batches[-1], self.a.run
        repeats = self._differs(batches)
        assert self._found is not None
        a, b = self._found
        recorded_execution = _Execution(run, None, self.contract, self.version, 1)
        with closing(recorded_execution.loaded):
            plain = [recorded_execution.score(replace(one, layout="")) for one in batches]
        rows = [row for each in batches for row in each.rows]
        with Recorder(folder, force=True) as recorder:
            recorder.describe(model=run.model)
            recorder.add_contract(TRAIN, self.contract)
            made_by = self.b.scorer(batch.layout).made_by() if self.b else self.settings[1]
            recorder.add_contract(AGAINST, made_by | {"source": "certify"})
            tensors = run.weights.load(self.version)
            recorder.add_weights(self.version, {name: to_torch(tensor) for name, tensor in tensors.items()})
            recorded = recorder.add_sequences(
                step=1, prompt_ids=[list(prompt) for prompt, _ in rows], response_ids=[list(response) for _, response in rows],
                policy_version=self.version,
            )  # fmt: skip
            recorder.add_scores(
                TRAIN, recorded, logprobs=[values for each in plain for values in each],
                forward=forward_of([each.padding() for each in batches]),
                policy_version=self.version,
            )  # fmt: skip
            places = np.arange(len(rows) - len(batch.rows), len(rows))
            recorder.add_scores(AGAINST, recorded, logprobs=b, rows=places, policy_version=self.version)
        at = _different((a, b))
        row, token = next(iter(at), (0, 0))
        text = self.a.text_of(batch.layout)
        words = f" --arm {shlex.quote(text)}" if text else ""
        factory = f" --model-factory {run.model_factory}" if run.model_factory else ""
        command = (
            f"tim-trace replay {shlex.quote(str(folder))}{words}{factory} && "
            f"tim-trace stats {shlex.quote(str(folder))} --pair replay/{parse_arm(text).name}:{AGAINST}"
        )
        return Counterexample(
            folder=str(folder), replay=command, layout=batch.layout, prompt_lengths=tuple(len(row[0]) for row in batch.rows),
            response_lengths=tuple(len(row[1]) for row in batch.rows), pad_left=batch.pad_left, pad_right=batch.pad_right,
            row=row, token=token, value=float(a[row][token]), other=float(b[row][token]), num_different=len(at),
            max_abs_d=float(np.nanmax([0.0, *(abs(float(a[row][token]) - float(b[row][token])) for row, token in at)])),
            needs_history=len(batches) > 1, repeats=repeats,
        )  # fmt: skip


def _different(bits: _Bits) -> list[tuple[int, int]]:
    """Return the (row, token) indices where the bits differ."""
    pairs = enumerate(zip(*bits, strict=True))
    return [(row, int(at)) for row, (a, b) in pairs for at in np.flatnonzero(a.view(np.uint32) != b.view(np.uint32))]
