"""Run vLLM as one of the two executions, and record its operators under transformers' names.

vLLM may run a sequence's tokens all at once, in chunks, or one by one. The recorded values are joined in order. The
values of fused projections are split.

Shapes: W tokens in a forward pass, T tokens in a sequence (prompt and response).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from ...schemas.errors import CannotReplay, option
from ...schemas.modules import has_experts
from ...tracer.hooks.patches import replaced
from ...tracer.weights.reader import Tensor
from ..backends.vllm import FORCED
from ..backends.vllm_mixture import check_mixture, held_by, in_order, is_mixture, mixtures, names_of
from ..recorded import RecordedRow
from ..vllm_scorer import VllmScorer
from .execution import Execution
from .names import core_name
from .taps import Call, RowTaps, hidden_of, hooked

_HEAD = ("lm_head", "logits_processor")
"""Modules that vLLM runs after the forward pass, only for tokens whose logprobs it returns."""
_FUSED = ("act_fn",)
"""Modules that vLLM fuses with other code. Their outputs are observed as the next operator's inputs."""
_ROTARY = "rotary_emb"
_ATTENTION = "attn"

Span = tuple[str, slice, int]
"""(sequence id, slice of the forward pass's tokens, position of the slice's first token in the sequence)."""


class _EagerScorer(VllmScorer):
    def _arguments(self) -> dict[str, Any]:
        return super()._arguments() | {"enforce_eager": True, "enable_prefix_caching": False}


class VllmExecution(Execution):
    """A vLLM engine with one step's weights. It runs without compilation, CUDA graphs or a prefix cache."""

    scorer_of = _EagerScorer  # type: ignore[assignment]
    scorer: _EagerScorer  # type: ignore[assignment]
    is_other_code = False
    rounds_scores = True
    coarsest = None
    is_adapted = False
    head = "lm_head"

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        if self.run.model_factory is not None:
            raise CannotReplay(f"arm {self.arm.name}: vLLM builds its own model; omit this side's model factory")
        if has_experts(self.run.model["config"]):
            check_mixture(self.run.model, self.arm.name)
        super().load(tensors)
        names(self.model)

    @property
    def model(self) -> Any:
        return self.built.llm.apply_model(lambda model: model)[0]

    @property
    def numerics(self) -> Any:
        """Precision of vLLM's head: the projection runs in the engine's dtype, and the log-softmax in float32."""
        return SimpleNamespace(temperature=self.scorer.numerics.temperature, projection_dtype=None)

    @property
    def engine_arguments(self) -> dict[str, Any]:
        return self.scorer._arguments()

    @property
    def weight_dtypes(self) -> dict[str, Any]:
        return {name: tensor.dtype for name, tensor in self.held(with_experts=False)}

    def held(self, *, with_experts: bool = True) -> Iterator[tuple[str, Any]]:
        """Yield the weights under transformers' names. Fused weights are split and padding is removed."""
        model = self.model
        parts = dict(names(model))
        modules = dict(model.named_modules())
        for name, module in modules.items():
            if with_experts and is_mixture(module):
                yield from held_by(name, module)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            module, _, leaf = name.rpartition(".")
            if is_mixture(modules[module.rpartition(".")[0]]):
                continue
            whose, value = parts.get(module, [module]), parameter.detach()
            if len(whose) > 1:
                sizes = modules[module].output_partition_sizes
                yield from zip((f"{each}.{leaf}" for each in whose), value.split(sizes), strict=True)
            elif module.rpartition(".")[2] in ("embed_tokens", "lm_head"):
                yield name, value[: model.config.vocab_size]
            else:
                yield name, value

    def listen(
        self, rows: Sequence[RecordedRow], of: list[RecordedRow], wanted: Callable[[str], bool]
    ) -> tuple[dict[str, np.ndarray], dict[str, RowTaps]]:
        taps = _EngineTaps(self.model, wanted)
        runner = self.built.llm.collective_rpc(lambda worker: worker.model_runner)[0]
        batch = _Batch(runner, rows, self.scorer.decodes)

        def before(_name: str, _module: Any, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            taps.spans = batch.spans(kwargs["positions"])

        # When decoding, vLLM does not run the last token through the model, so append another token to each row.
        asked = list(rows)
        if self.scorer.decodes:
            asked = [replace(row, response_ids=np.append(row.response_ids, row.response_ids[-1:])) for row in rows]
        with hooked({"": self.model}, before), taps.heard():
            scored = self.scorer.score(self.scorer.together(asked, of))
        logprobs = {
            row.seq_id: np.asarray(values, np.float64)[: len(row.response_ids)]
            for row, values in zip(rows, scored.logprobs, strict=True)
        }
        return logprobs, taps.found(rows)


class _Batch:
    def __init__(self, runner: Any, rows: Sequence[RecordedRow], decodes: bool):
        self._runner, self._decodes = runner, decodes
        self._waiting: dict[tuple[int, ...], list[str]] = defaultdict(list)
        """Sequences that vLLM has not started, keyed by their tokens."""
        for row in rows:
            self._waiting[(*row.prompt_ids.tolist(), *row.response_ids.tolist())].append(row.seq_id)
        self._known: dict[str, str] = {}

    def spans(self, positions_W: Any) -> list[Span]:
        from vllm.forward_context import get_forward_context

        metadata = get_forward_context().attn_metadata
        metadata = next(iter(metadata.values())) if isinstance(metadata, dict) else metadata
        if metadata is None:
            return []
        starts = metadata.query_start_loc.tolist()
        return [
            (self._sequence(request), slice(start, end), int(positions_W[start]))
            for request, start, end in zip(self._runner.input_batch.req_ids, starts, starts[1:], strict=False)
            if end > start
        ]

    def _sequence(self, request: str) -> str:
        if request not in self._known:
            state = self._runner.requests[request]
            ids = list(state.prompt_token_ids)
            if self._decodes:
                params = state.sampling_params
                ids += (params.extra_args or {}).get(FORCED) or params.trace_decode_token_ids
                ids = ids[:-1]
            self._known[request] = self._waiting[tuple(ids)].pop(0)
        return self._known[request]


def names(model: Any) -> dict[str, list[str]]:
    """Map each vLLM module to the transformers operators it implements. Raises CannotReplay for an unknown module."""
    packed = getattr(model, "packed_modules_mapping", None) or {}
    found: dict[str, list[str]] = {}
    of_experts = mixtures(model)
    gates = {f"{name.rpartition('.')[0]}.gate" for name in of_experts}
    for name, module in model.named_modules():
        layer, _, last = name.rpartition(".")
        if name in of_experts:
            found[name] = names_of(name, module)
            continue
        if name in gates or name.startswith(tuple(f"{each}." for each in of_experts)):
            continue
        if not name or f".{_ATTENTION}." in name or last in (*_HEAD, *_FUSED) or f"{_ROTARY}." in name:
            continue
        if last == _ATTENTION:
            found[name] = [core_name(layer)]
        elif last == _ROTARY:
            found[name] = [f"model.{_ROTARY}"]
        elif last in packed and hasattr(module, "output_partition_sizes"):
            found[name] = [f"{layer}.{each}" for each in packed[last]]
        elif any(True for _ in module.parameters(recurse=False)):  # transformers has a module of the same name
            found[name] = [name]
        elif not any(True for _ in module.children()):
            raise CannotReplay(
                f"engine vllm: {name} ({type(module).__name__}) has no known counterpart in transformers; "
                f"compare arms with {option('engine', 'hf')}"
            )
    return found


class _EngineTaps:
    def __init__(self, model: Any, wanted: Callable[[str], bool]):
        self._modules, self._wanted = dict(model.named_modules()), wanted
        self._names = names(model)
        self.spans: list[Span] = []
        self._pieces: dict[str, dict[str, list[tuple[int, Call]]]] = defaultdict(lambda: defaultdict(list))
        """Calls by sequence and operator, each with the position of its first token."""

    @contextmanager
    def heard(self) -> Iterator[None]:
        hooks = {_ATTENTION: self._attention, _ROTARY: self._rotary}
        with ExitStack() as stack:
            for name, module in self._modules.items():
                if is_mixture(module):
                    stack.enter_context(self._mixture(name, module))
                elif name in self._names:
                    stack.enter_context(
                        hooked({name: module}, after=hooks.get(name.rpartition(".")[2], self._operator))
                    )
            yield

    def found(self, rows: Sequence[RecordedRow]) -> dict[str, RowTaps]:
        found = {}
        for row in rows:
            calls = {name: _joined(pieces) for name, pieces in self._pieces.pop(row.seq_id, {}).items() if pieces}
            found[row.seq_id] = RowTaps(calls=calls)
        return found

    def _keep(self, name: str, takes: Sequence[Any], gives: Sequence[Any], *, adds: bool = False) -> None:
        if not self._wanted(name):
            return
        for seq_id, where, first in self.spans:
            # Clone the tensors, because vLLM reuses their memory.
            took, gave = (
                tuple(None if value is None else value[where].clone() for value in of) for of in (takes, gives)
            )
            self._pieces[seq_id][name].append((first, Call(took, gave, adds)))

    @contextmanager
    def _mixture(self, name: str, module: Any) -> Iterator[None]:
        gate, experts = self._names[name]
        router = module.router
        original = router.select_experts
        ordered: list[tuple[Any, Any]] = []

        def select(hidden_states: Any, router_logits: Any, *args: Any, **words: Any) -> Any:
            given = original(hidden_states, router_logits, *args, **words)
            ordered.append(in_order(*given))
            self._keep(gate, [hidden_states], [router_logits, *ordered[-1]])
            return given

        def computed(_name: str, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: Any) -> None:
            weights, ids = ordered.pop()
            self._keep(experts, [hidden_of(args, kwargs), ids, weights], [given])

        with replaced(router, "select_experts", select), hooked({"": module}, after=computed):
            yield

    def _attention(self, name: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: Any) -> None:
        (core,) = self._names[name]
        states = [*args, *(kwargs[word] for word in ("query", "key", "value") if word in kwargs)][:3]
        self._keep(core, [state.reshape(len(state), -1, module.head_size) for state in states], [given])

    def _rotary(self, name: str, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], _given: Any) -> None:
        (rotary,) = self._names[name]
        is_kept = not self.spans or any(
            first == place for seq_id, _, first in self.spans for place, _ in self._pieces[seq_id][rotary]
        )
        if not is_kept:  # recorded once, since all layers share one rotary module
            self._keep(rotary, [None, args[0] if args else kwargs["positions"]], [None, None])

    def _operator(self, name: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: Any) -> None:
        theirs = self._names[name]
        taken = args[0] if args else next(iter(kwargs.values()))
        outputs = [part for part in (given if isinstance(given, tuple) else (given,)) if part is not None]
        adds = len(args) + len(kwargs) > 1 and len(outputs) > 1
        if adds:
            taken = outputs[1]  # a norm that adds the residual first also returns the sum
        parts = outputs[0].split(module.output_partition_sizes, dim=-1) if len(theirs) > 1 else [outputs[0]]
        for each, part in zip(theirs, parts, strict=True):
            self._keep(each, [taken], [part], adds=adds)


def _joined(pieces: Sequence[tuple[int, Call]]) -> Call:
    """Join a sequence's consecutive calls. Tokens that vLLM dropped and recomputed are included only once."""

    def whole(values: list[tuple[int, Any]]) -> Any:
        kept: list[Any] = []
        length = 0
        for first, value in values:
            if value is None:
                return None
            while kept and length > first:
                length -= len(kept[-1])
                kept.pop()
            kept.append(value)
            length += len(value)
        return torch.cat(kept) if len(kept) > 1 else kept[0]

    takes, gives = (
        tuple(whole([(first, getattr(call, of)[slot]) for first, call in pieces])
              for slot in range(len(getattr(pieces[0][1], of))))
        for of in ("takes", "gives")
    )  # fmt: skip
    return Call(takes, gives, adds=pieces[0][1].adds)
