from __future__ import annotations

import math
import os
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec
import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...schemas.documents import Contract, contract_hash
from ...schemas.errors import InvalidOption, TimTraceError
from ...schemas.layout import MANIFEST
from ...schemas.passes import TRAIN
from ...tracer.hooks.models import described
from ...tracer.progress import Progress, no_progress, unheard
from ...tracer.recorder import Recorder
from ...tracer.rows import Forward
from ...tracer.store import first_line
from ...tracer.weights.attach import load_folder
from ..arm_option import EXACT, HF, VLLM
from ..arms import Arm, arm_text, parse_arm
from ..backends.model import to_torch
from ..loaded import LoadedModel, Scorer, device_here, scorer_of
from ..recorded import RecordedRow, RecordedRun
from .batches import Batch, Drawer, Layout, Sequence_, mutated, probes, shrunk
from .results import CERTIFIED, COUNTEREXAMPLE, UNDECIDED, Certificate, Counterexample, Coverage, ranges

AGAINST = "against"
_LAYOUTS: dict[str, tuple[Layout, ...]] = {
    HF: ((("padding", "right"),), (("padding", "packed"),), (("mode", "decode"),), (("mode", "chunked:3"),),
         (("mode", "chunked:16"),), (("threads", 1),), (("threads", 2),)),
    VLLM: ((("mode", "decode"),), (("batch_tokens", 32),), (("prefix_caching", "on"),), (("prefix_caching", "off"),)),
}  # fmt: skip
_LAYOUTS[EXACT] = (*_LAYOUTS[HF], (("padding", "left"), ("mode", "chunked:7")))
_MOST_KEPT, _MOST_TRIALS = 400, 400
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
    """Search for a batch in which two executions give different bits, or certify that a thorough search found none.

    `trace` is a run with weights or a Hugging Face model folder. The claim is that `arm` (default: as recorded) gives
    every sequence the same logprobs, bit for bit, in every batch of up to `max_batch` sequences with prompts and
    responses of up to `max_length` tokens (default: 256, or what the model's positions allow), as it gives the sequence
    alone. With `against`, both arms run each batch, and their bits are compared. Options that an arm sets are fixed.
    The search varies padding side, cached decoding, chunks and threads if the arm does not set them (for vLLM:
    decoding, chunks and the prefix cache).

    The search tries every row count and length, paddings, orders, duplicates, shared prefixes and token ids, then
    random changes of batches that reached new operator calls, for at most `minutes`. A batch that differs is shrunk and
    written as the trace `output`/counterexample, replacing an earlier one. The result has the command that shows the
    difference. Otherwise `output` gets `certificate.json`. The verdict is `undecided` if time runs out before every
    planned batch was tried.

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
        a, b = search.settings
        made = Certificate(
            verdict=COUNTEREXAMPLE if example else CERTIFIED if search.is_complete else UNDECIDED,
            of=os.fspath(trace), arm=search.a.text, against=search.b.text if search.b else None, max_batch=max_batch,
            max_length=search.draw.max_length, seed=seed, seconds=monotonic() - begun, covered=search.coverage(),
            not_covered=search.not_covered(), counterexample=example, settings=(a, b),
            settings_hash=contract_hash({"a": a, "b": b}),
        )  # fmt: skip
    if made.is_certified:
        Path(output).mkdir(parents=True, exist_ok=True)
        made = replace(made, file=str(Path(output) / CERTIFICATE))
        Path(str(made.file)).write_bytes(msgspec.json.format(msgspec.json.encode(made), indent=1) + b"\n")
    return made


def _as_trace(path: Path, folder: Path) -> Path:
    """Return a trace's path. A Hugging Face model folder becomes a trace with one sequence."""
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
    """Collects operator calls: name, dtype, and for each dimension its power of two and divisibility by 16."""

    def __init__(self, found: set[Any]):
        super().__init__()
        self.found, self.order = found, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            sizes = tuple((size.bit_length(), size % 16 == 0) for size in result.shape)
            self.found.add((function, result.dtype, sizes))
            self.order = hash((self.order, function))
        return result


class _Execution:
    def __init__(self, run: RecordedRun, text: str | None, contract: Contract, version: int, most: int):
        self.given = arm = parse_arm(text or "")
        if arm.engine == VLLM and arm.max_model_len is None:
            arm = replace(arm, max_model_len=2 * most + 1, name="")
        self.run, self.arm, self.text = run, arm, text or ""
        self.named = {part.partition("=")[0].strip().replace("-", "_") for part in (text or "").split(",")}
        self._contract, self._version = contract, version
        self.loaded = LoadedModel(run.weights)
        self._scorers: dict[Layout, Scorer] = {}

    def arm_of(self, layout: Layout) -> Arm:
        return replace(self.arm, **dict(layout), name="") if layout else self.arm

    def shown_arm(self, layout: Layout) -> Arm:
        """Return the arm for a replay. A replay chooses vLLM's maximum length itself."""
        return replace(self.given, **dict(layout), name="")

    def scorer(self, layout: Layout = ()) -> Scorer:
        if layout not in self._scorers:
            self._scorers[layout] = scorer_of(self.run, self.arm_of(layout), self._contract, device_here())
        return self._scorers[layout]

    def score(self, batch: Batch, *, empties: bool = False) -> list[np.ndarray]:
        """Return each row's logprobs [T] float32. If `empties`, vLLM's prefix cache is emptied first."""
        scorer = self.scorer(batch.layout)
        rows = [
            RecordedRow(
                seq_id=str(place), prompt_ids=np.array(prompt, np.int32), response_ids=np.array(response, np.int32),
                logprobs=np.zeros(len(response), np.float32), scored=np.ones(len(response), bool),
                policy_version=self._version, contract="", writer="", forward_id=0, forward_row=place,
                pad_left=batch.before - len(prompt), pad_right=batch.after - len(response),
            )
            for place, (prompt, response) in enumerate(batch.rows)
        ]  # fmt: skip
        if empties and self.arm.engine == VLLM:
            self.loaded.ready(scorer, self._version, None)
            scorer.forget()  # type: ignore[union-attr]
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
        if max_length is not None and 2 * max_length >= positions:
            raise InvalidOption(
                f"got {max_length}, but the model has {positions:,} positions for prompt and response; pass at most "
                f"{(positions - 1) // 2}", option="max_length",
            )  # fmt: skip
        max_length = max_length or max(min(DEFAULT_LENGTH, (positions - 1) // 2), 1)
        self.contract, self.version = run.train_contract(rows[0].contract), rows[0].policy_version
        self.a = _Execution(run, arm, self.contract, self.version, max_length)
        self.b: _Execution | None = None
        if against is not None or against_factory is not None:
            other = RecordedRun(path, model_factory=against_factory, weights_from=weights_from)
            self.b = _Execution(other, against, self.contract, self.version, max_length)
            if self.a.arm == self.b.arm and model_factory == against_factory:
                self.b.loaded = self.a.loaded
        self.draw = Drawer(int(config["vocab_size"]), max_batch, max_length, np.random.default_rng(seed))
        self._unsupported: dict[Layout, str] = {}
        self.layouts = [(), *self._open_layouts()]
        self._alone: dict[Sequence_, np.ndarray] = {}
        self._known: list[Sequence_] = []
        self._tried: dict[str, set[Any]] = {name: set() for name in ("rows", "prompts", "responses", "widths", "ids")}
        self._seen: set[Layout] = set()
        self._calls: set[Any] = set()
        self.num_batches = self.num_tokens = self.num_planned = 0
        self.is_complete = False
        self._before: Batch | None = None
        self._found: _Bits | None = None
        """Logprobs of the smallest batch so far that differed."""
        self.settings: tuple[Contract, Contract] = ({}, {})

    def _open_layouts(self) -> Iterator[Layout]:
        sides = [self.a, *([self.b] if self.b else [])]
        named = set().union(*(side.named for side in sides))
        engines = {side.arm.engine for side in sides}
        if VLLM in engines and len(engines) > 1:
            return  # vLLM makes its own batches
        for layout in _LAYOUTS[HF if HF in engines else self.a.arm.engine]:
            if not named & {name for name, _ in layout} and self._builds(sides, layout):
                yield layout

    def _builds(self, sides: Sequence[_Execution], layout: Layout) -> bool:
        try:
            for side in sides:
                side.scorer(layout)
        except TimTraceError as error:
            self._unsupported[layout] = first_line(error)
            return False
        return True

    def run(self, seconds: float, advance: Any) -> tuple[Batch, ...] | None:
        """Return the smallest batch that differs, preceded by the batch that must run before it if any, or None."""
        is_vllm, last, until = self.a.arm.engine == VLLM, monotonic(), math.inf
        planned, kept = self._planned(is_vllm), list[Batch]()
        while (now := monotonic()) < until:
            advance(int(now) - int(last))
            last = now
            if (batch := next(planned, None)) is None:
                self.is_complete = True
                start = kept[int(self.draw.random.integers(0, len(kept)))]
                batch = mutated(start, self.draw, self.layouts[-1:] if is_vllm else self.layouts, self._known)
            if batch.layout in self._unsupported:
                continue
            is_new, differs = self._try(batch)
            until = min(until, monotonic() + seconds)  # loading the models does not count
            if is_new and len(kept) < _MOST_KEPT:
                kept.append(batch)
            if differs:
                return self._shrink(batch)
            self._before = batch
        return None

    def _planned(self, is_vllm: bool) -> Iterator[Batch]:
        """Yield the planned batches. vLLM restarts for each layout, so it runs all batches of a layout in one go."""
        if is_vllm:
            unpadded = (replace(batch, pad_left=0, pad_right=0) for batch in probes(self.draw))
            first = list(dict.fromkeys(islice(unpadded, 600)))
            self.num_planned = len(first) * len(self.layouts)
            for layout in self.layouts:
                yield from (replace(batch, layout=layout) for batch in first)
            return
        others = cycle(self.layouts[1:] or [()])
        planned = list(probes(self.draw))
        self.num_planned = len(planned) * (2 if self.layouts[1:] else 1)
        for batch in planned:
            yield batch
            if self.layouts[1:]:
                yield replace(batch, layout=next(others))

    def _try(self, batch: Batch) -> tuple[bool, bool]:
        """Return whether the batch reached new operator calls, and whether its bits differ."""
        size = len(self._calls)
        shape = (len(batch.rows), batch.width, batch.layout)
        is_new = shape not in self._tried["widths"]
        is_watched = is_new and self.a.arm.engine != VLLM and self.num_batches % 4 == 0
        calls = _Calls(self._calls) if is_watched else nullcontext()
        try:
            bits = self._bits(batch, calls)
            if isinstance(calls, _Calls):
                self._calls.add(calls.order)
        except TimTraceError as error:
            if not batch.layout:
                raise
            self._unsupported[batch.layout] = first_line(error)
            self.layouts = [layout for layout in self.layouts if layout != batch.layout]
            return False, False
        if not self.num_batches:  # while vLLM's engine runs with the arm's own layout
            self.settings = self.a.scorer().made_by(), (self.b or self.a).scorer().made_by()
        self._note(batch, shape)
        if differs := _first_different(bits) is not None:
            self._found = bits
        return len(self._calls) > size or is_new, differs

    def _bits(self, batch: Batch, within: AbstractContextManager[Any] | None = None) -> _Bits:
        """Run the batch under both executions, the first one in the block `within`."""
        with within or nullcontext():
            a = self.a.score(batch, empties=self.b is not None)
        return a, self._expected(batch)

    def _expected(self, batch: Batch) -> list[np.ndarray]:
        if self.b is not None:
            return self.b.score(batch, empties=True)
        for row in batch.rows:
            if row not in self._alone:
                self._alone[row] = self.a.score(
                    Batch((row,), batch.layout if self.a.arm.engine == VLLM else ()), empties=True
                )[0]
                self._known.append(row)
        return [self._alone[row] for row in batch.rows]

    def _bits_after(self, batches: Sequence[Batch]) -> _Bits:
        """Run the batches in order, and return the last one's logprobs."""
        for batch in batches[:-1]:
            self.a.score(batch)
        return self._bits(batches[-1])

    def _differs(self, batches: Sequence[Batch]) -> bool:
        bits = self._bits_after(batches)
        if differs := _first_different(bits) is not None:
            self._found = bits
        return differs

    def _shrink(self, batch: Batch) -> tuple[Batch, ...]:
        before = self._before
        if self._differs([batch]):
            return (shrunk(batch, lambda small: self._differs([small]), _MOST_TRIALS),)
        if before is not None and self._differs([before, batch]):
            batch = shrunk(batch, lambda small: self._differs([before, small]), _MOST_TRIALS // 2)
            return shrunk(before, lambda small: self._differs([small, batch]), _MOST_TRIALS // 2), batch
        return (batch,) if before is None else (before, batch)

    def _note(self, batch: Batch, shape: Any) -> None:
        self.num_batches += 1
        self.num_tokens += sum(len(response) for _, response in batch.rows)
        self._seen.add(batch.layout)
        self._tried["rows"].add(len(batch.rows))
        self._tried["widths"].add(shape)
        for prompt, response in batch.rows:
            self._tried["prompts"].add(len(prompt))
            self._tried["responses"].add(len(response))
            self._tried["ids"].update(prompt, response)

    def coverage(self) -> Coverage:
        return Coverage(
            num_batches=self.num_batches, num_planned=self.num_planned, num_sequences=len(self._known), num_tokens=self.num_tokens,
            row_counts=tuple(sorted(self._tried["rows"])), prompt_lengths=tuple(sorted(self._tried["prompts"])),
            response_lengths=tuple(sorted(self._tried["responses"])),
            widths=tuple(sorted({width for _, width, _ in self._tried["widths"]})),
            layouts=tuple(sorted(_text(layout) for layout in self._seen)),
            vocabulary=len(self._tried["ids"]) / self.draw.vocab_size, num_calls=len(self._calls),
        )  # fmt: skip

    def not_covered(self) -> tuple[str, ...]:
        found = [f"{_text(layout)}: {why}" for layout, why in self._unsupported.items()]
        for name, most, tried in (
            ("row_counts", self.draw.max_batch, self._tried["rows"]),
            ("prompt_lengths", self.draw.max_length, self._tried["prompts"]),
            ("response_lengths", self.draw.max_length, self._tried["responses"]),
        ):
            if left := sorted({*range(1, most + 1)} - tried):
                found.append(f"{name}: {ranges(left)}")
        left_layouts = [_text(layout) for layout in self.layouts if layout not in self._seen]
        return (*found, *(f"layout: {text}" for text in left_layouts))

    def close(self) -> None:
        for side in (self.a, self.b):
            if side is not None:
                side.loaded.close()

    def write(self, batches: Sequence[Batch], output: Any) -> Counterexample:
        """Write a trace with the batches and return what differs in the last one."""
        folder = Path(output) / COUNTEREXAMPLE
        batch, run = batches[-1], self.a.run
        bits, repeats = self._bits_after(batches), True
        if _first_different(bits) is None and self._found is not None:
            bits, repeats = self._found, False
        a, b = bits
        row, token = _first_different(bits) or (0, 0)
        own = self.a.shown_arm(batch.layout)
        recorded_execution = _Execution(run, None, self.contract, self.version, 1)
        with closing(recorded_execution.loaded):
            plain = [recorded_execution.score(replace(one, layout=())) for one in batches]
        with Recorder(folder, force=True) as recorder:
            recorder.describe(model=run.model)
            recorder.add_contract(TRAIN, self.contract)
            recorder.add_contract(
                AGAINST, (self.b or self.a).scorer(batch.layout if self.b else ()).made_by() | {"source": "certify"}
            )
            recorder.add_weights(
                self.version, {name: to_torch(tensor) for name, tensor in run.weights.load(self.version).items()}
            )
            rows = [one for each in batches for one in each.rows]
            recorded = recorder.add_sequences(
                step=1, prompt_ids=[list(prompt) for prompt, _ in rows], response_ids=[list(response) for _, response in rows],
                policy_version=self.version,
            )  # fmt: skip
            recorder.add_scores(
                TRAIN, recorded, logprobs=[values for each in plain for values in each], forward=_forward(batches),
                policy_version=self.version,
            )  # fmt: skip
            places = np.arange(len(rows) - len(batch.rows), len(rows))
            recorder.add_scores(AGAINST, recorded, logprobs=b, rows=places, policy_version=self.version)
        differs = [one.view(np.uint32) != other.view(np.uint32) for one, other in zip(a, b, strict=True)]
        d = [np.abs(one.astype(np.float64) - other)[at] for one, other, at in zip(a, b, differs, strict=True)]
        factory = f" --model-factory {run.model_factory}" if run.model_factory else ""
        words = "" if own.is_identity else f" --arm {arm_text(own.changes)}"
        command = (
            f"tim-trace replay {shlex.quote(str(folder))}{words}{factory} && "
            f"tim-trace stats {shlex.quote(str(folder))} --pair replay/{own.name}:{AGAINST}"
        )
        return Counterexample(
            folder=str(folder), replay=command, layout=_text(batch.layout), prompt_lengths=tuple(len(row[0]) for row in batch.rows),
            response_lengths=tuple(len(row[1]) for row in batch.rows), pad_left=batch.pad_left, pad_right=batch.pad_right,
            row=row, token=token, value=float(a[row][token]), other=float(b[row][token]),
            num_different=int(sum(at.sum() for at in differs)), max_abs_d=float(np.nanmax(np.concatenate([*d, [0.0]]))),
            needs_history=len(batches) > 1, repeats=repeats,
        )  # fmt: skip


def _text(layout: Layout) -> str:
    return ",".join(f"{name.replace('_', '-')}={value}" for name, value in layout)


def _first_different(bits: _Bits) -> tuple[int, int] | None:
    """Return the first row and token with different bits."""
    for place, (one, other) in enumerate(zip(*bits, strict=True)):
        if (at := np.flatnonzero(one.view(np.uint32) != other.view(np.uint32))).size:
            return place, int(at[0])
    return None


def _forward(batches: Sequence[Batch]) -> Forward:
    sizes = [len(batch.rows) for batch in batches]
    rows = [(batch, row) for batch in batches for row in batch.rows]
    return Forward(
        ids=np.repeat(np.arange(len(sizes)), sizes), places=np.concatenate([np.arange(size) for size in sizes]),
        rows=np.repeat(sizes, sizes), pad_left=np.array([batch.before - len(own[0]) for batch, own in rows]),
        pad_right=np.array([batch.after - len(own[1]) for batch, own in rows]),
    )  # fmt: skip
