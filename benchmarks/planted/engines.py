"""Models that sample token by token with a cache, and that score whole sequences at once.

Shapes: B sequences, P prompt tokens, T response tokens, H hidden units, V vocabulary, L layers.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from heads import PLAIN, Head, Sampling
from language import EOS, PAD
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.pytorch_utils import Conv1D

State = dict[str, Tensor]
"""Parameter name -> float32 tensor."""

_HEAD_CHUNK = 1024
"""Tokens whose logits are held at once."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Side:
    """One of the two that score: weights, numerics, and what is wrong with it."""

    config: Any
    state: State
    dtype: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    attention: str = "sdpa"
    shards: int = 1
    """Parts that each matrix product inside the layers is cut in, as tensor parallelism does; their sum is rounded."""
    input_bits: int | None = None
    """Mantissa bits that matrix products inside the layers take of their inputs: 10 is TF32; None is all."""
    rows: int = 64
    """Sequences of a forward, when whole sequences are scored."""
    head: Head = PLAIN
    prefix: tuple[State, int] | None = None
    """Weights that computed the keys and values of the first so many prompt tokens; None is its own."""
    swap: tuple[State, Tensor] | None = None
    """Weights that take over, and [B] the response token from which on they do."""
    positions: Callable[[Tensor], Tensor] | None = None
    """Position -> the position that the model is told."""
    window: int | None = None
    """Tokens that attention sees back; None is all."""
    cache: Callable[[Tensor, int], Tensor] | None = None
    """(keys or values [B, heads, length, D] after a step, its first new position) -> what the cache holds then."""
    experts: Tensor | None = None
    """[B, P + T - 1, L, S] experts that the routers are told to choose; None is their own choice."""
    router: Callable[[Tensor], Tensor] | None = None
    """What the routers of a mixture of experts see of the hidden states; None is all of it."""


@dataclass(slots=True)
class Decoded:
    """What an engine sampled, or what it thinks of tokens that it was given."""

    ids: Tensor
    """[B, T] int64, PAD after the end token."""
    lengths: Tensor
    """[B] response tokens, the end token among them."""
    logprobs: Tensor
    """[B, T] float32 nats, 0.0 after the end token."""
    experts: Tensor | None = None
    """[B, P + T - 1, L, S] chosen experts of every token that went through the model; None without routers."""


_skeletons: dict[tuple[int, str], Any] = {}


def build(side: Side, state: State | None = None) -> Any:
    """A transformers model with a side's weights, numerics and routers."""
    key = (id(side.config), side.attention)
    if key not in _skeletons:
        config = copy.deepcopy(side.config)
        _skeletons[key] = AutoModelForCausalLM.from_config(config, attn_implementation=side.attention).eval()
    model = copy.deepcopy(_skeletons[key])
    model.load_state_dict(state or side.state, strict=False)
    exact = {name: buffer.clone() for name, buffer in model.named_buffers() if "inv_freq" in name}
    model.to(side.dtype)
    for name, buffer in exact.items():
        model.get_submodule(name.rpartition(".")[0]).register_buffer(name.rpartition(".")[2], buffer, persistent=False)
    if side.shards > 1 or side.input_bits is not None:
        _change_products(model, side)
    if side.router is not None:
        for router in _routers(model):
            router.register_forward_pre_hook(lambda _, given: (side.router(given[0]), *given[1:]))
    return model


def _change_products(model: Any, side: Side) -> None:
    """Let the matrix products inside the layers run in parts, or on rounded inputs."""
    for name, module in model.base_model.named_modules():
        if isinstance(module, (torch.nn.Linear, Conv1D)) and "router" not in name:
            module.forward = partial(_product, module, side.shards, side.input_bits)


def _product(module: Any, shards: int, bits: int | None, hidden: Tensor) -> Tensor:
    weight = module.weight if isinstance(module, Conv1D) else module.weight.T
    if bits is not None:
        hidden, weight = fewer_bits(hidden, bits), fewer_bits(weight, bits)
    parts = zip(hidden.chunk(shards, -1), weight.chunk(shards, 0), strict=True)
    out = sum(part @ rows for part, rows in parts)
    return out if module.bias is None else out + module.bias


def fewer_bits(values: Tensor, bits: int) -> Tensor:
    """Round to a mantissa of so many bits: 7 is bfloat16's, 10 is TF32's."""
    fraction, exponent = torch.frexp(values.float())
    return torch.ldexp((fraction * 2 ** (bits + 1)).round() / 2 ** (bits + 1), exponent).to(values.dtype)


def _routers(model: Any) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]


@contextlib.contextmanager
def _choices(model: Any) -> Iterator[list[list[Tensor]]]:
    """Collect what each router chooses: one list a layer, one [tokens, S] a forward."""
    routers = _routers(model)
    seen: list[list[Tensor]] = [[] for _ in routers]
    hooks = [
        router.register_forward_hook(lambda _, __, out, kept=kept: kept.append(out[2]))
        for router, kept in zip(routers, seen, strict=True)
    ]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def _told(router: Any, chosen: Callable[[], Tensor]) -> Iterator[None]:
    """Let a router choose what it is told, with its own weights for those."""

    def choose(_: Any, __: Any, out: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        logits, scores, _own = out
        experts = chosen()
        weights = logits.float().softmax(-1).gather(-1, experts)
        if getattr(router, "norm_topk_prob", True):
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights.to(scores.dtype), experts

    hook = router.register_forward_hook(choose)
    try:
        yield
    finally:
        hook.remove()


def _forward(model: Any, side: Side, ids: Tensor, start: int, cache: DynamicCache | None) -> Tensor:
    """Last hidden states [B, n, H] of n tokens that begin at an absolute position."""
    positions = torch.arange(start, start + ids.shape[1])
    told = positions if side.positions is None else side.positions(positions)
    options: dict[str, Any] = {}
    if side.window is not None:
        options["attention_mask"] = _window_mask(positions, start + ids.shape[1], side.window, len(ids), side.dtype)
    precision = contextlib.nullcontext() if side.autocast is None else torch.autocast("cpu", dtype=side.autocast)
    with precision:
        return model.base_model(
            input_ids=ids,
            position_ids=told.expand(len(ids), -1),
            past_key_values=cache,
            use_cache=cache is not None,
            **options,
        ).last_hidden_state


def _window_mask(positions: Tensor, length: int, window: int, rows: int, dtype: torch.dtype) -> Any:
    back = positions[:, None] - torch.arange(length)[None]
    seen = (back >= 0) & (back < window)
    mask = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
    return mask.expand(rows, 1, -1, -1)


def _logits(model: Any, side: Side, hidden: Tensor) -> Tensor:
    """[N, H] -> [N, V] float32, in the side's numerics."""
    cap = getattr(model.config, "final_logit_softcapping", None)
    weight = model.get_output_embeddings().weight
    if side.autocast is not None and side.head.matmul is None:
        hidden, weight = hidden.to(side.autocast), weight.to(side.autocast)
    elif side.head.matmul is None:
        hidden = hidden.to(weight.dtype)
    return side.head.logits(hidden, weight, cap)


@torch.no_grad()
def decode(
    side: Side,
    prompts_BP: Tensor,
    max_tokens: int,
    *,
    sampling: Sampling | None = None,
    generator: torch.Generator | None = None,
    forced_BT: Tensor | None = None,
    lengths_B: Tensor | None = None,
    injected_BT: Tensor | None = None,
) -> Decoded:
    """Sample responses token by token with a cache, or score given ones by the same steps.

    `injected_BT` puts in tokens that others wrote, such as a tool's output, where it is not -1.

    The steps run until the longest response ends, all rows in one batch, so that forcing an engine's own tokens gives
    its own log-probabilities bit for bit.
    """
    forced = forced_BT is not None
    steps = forced_BT.shape[1] if forced else max_tokens
    engine = _Engine(side, prompts_BP)
    done = torch.zeros(len(prompts_BP), dtype=torch.bool)
    hidden = engine.prefill()
    vocabulary = engine.vocabulary
    ids, logprobs = [], []
    for step in range(steps):
        logits = engine.logits(hidden)
        scores = side.head.log_softmax(logits)
        if forced:
            token = forced_BT[:, step]
        else:
            drawn = sampling.process(logits[:, :vocabulary]).softmax(-1)
            token = _drawn(drawn, generator)
            if injected_BT is not None:
                token = torch.where(injected_BT[:, step] >= 0, injected_BT[:, step], token)
            token = token.masked_fill(done, PAD)
        ids.append(token)
        logprobs.append(
            scores.gather(-1, token[:, None])[:, 0].masked_fill(done if not forced else step >= lengths_B, 0.0)
        )
        done = done | (token == EOS)
        if not forced and bool(done.all()):
            break
        if step + 1 < steps:
            hidden = engine.step(token, step)
    tokens = torch.stack(ids, 1)
    ended = (tokens == EOS).int()
    found = torch.where(ended.any(1), ended.argmax(1) + 1, tokens.shape[1])
    return Decoded(tokens, lengths_B if forced else found, torch.stack(logprobs, 1), engine.experts())


def _drawn(probs: Tensor, generator: torch.Generator | None) -> Tensor:
    """One token [B] of each row of probabilities [B, V], by inverting the cumulative distribution."""
    mass = probs.double().cumsum(-1)
    place = torch.rand(len(probs), 1, generator=generator, dtype=torch.float64) * mass[:, -1:]
    return torch.searchsorted(mass, place, right=True)[:, 0].clamp(max=probs.shape[-1] - 1)


class _Engine:
    """A model with its cache, or two that share one while weights are swapped."""

    def __init__(self, side: Side, prompts_BP: Tensor):
        self.side, self.prompts = side, prompts_BP
        self.model = build(side)
        self.later = None if side.swap is None else build(side, side.swap[0])
        self.vocabulary = self.model.config.vocab_size
        self.position = prompts_BP.shape[1]
        self._stack = contextlib.ExitStack()
        self._seen = self._stack.enter_context(_choices(self.model))
        self._cache = DynamicCache()
        self._tell_routers()
        self._took: Tensor | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        """[B, H] -> [B, V], each row by the weights that it has reached."""
        logits = _logits(self.model, self.side, hidden)
        if self._took is None:
            return logits
        return torch.where(self._took[:, None], _logits(self.later, self.side, hidden), logits)

    def prefill(self) -> Tensor:
        """Last hidden states [B, H] of the prompts."""
        side, start = self.side, 0
        if side.prefix is not None:
            state, start = side.prefix
            start = min(start, self.prompts.shape[1] - 1)
            _forward(build(side, state), side, self.prompts[:, :start], 0, self._cache)
        return self._run(self.prompts[:, start:], start, step=0)

    def step(self, token: Tensor, step: int) -> Tensor:
        """Last hidden states [B, H] after one more token."""
        hidden = self._run(token[:, None], self.position, step=step + 1)
        self.position += 1
        return hidden

    def _run(self, ids: Tensor, start: int, step: int) -> Tensor:
        self._span = (start, start + ids.shape[1])
        if self.later is None:
            hidden = _forward(self.model, self.side, ids, start, self._cache)[:, -1]
        else:
            hidden = self._run_both(ids, start, step)
        if self.side.cache is not None:
            for layer in self._cache.layers:
                layer.keys, layer.values = self.side.cache(layer.keys, start), self.side.cache(layer.values, start)
        return hidden

    def _run_both(self, ids: Tensor, start: int, step: int) -> Tensor:
        """Each row by the weights that it has reached, into one cache."""
        other = copy.deepcopy(self._cache)
        first = _forward(self.model, self.side, ids, start, self._cache)[:, -1]
        second = _forward(self.later, self.side, ids, start, other)[:, -1]
        took = step >= self.side.swap[1]
        for mine, its in zip(self._cache.layers, other.layers, strict=True):
            rows = took[:, None, None, None]
            mine.keys, mine.values = torch.where(rows, its.keys, mine.keys), torch.where(rows, its.values, mine.values)
        self._took = took
        return torch.where(took[:, None], second, first)

    def _tell_routers(self) -> None:
        if self.side.experts is None:
            return
        for layer, router in enumerate(_routers(self.model)):
            self._stack.enter_context(_told(router, lambda layer=layer: self._chosen(layer)))

    def _chosen(self, layer: int) -> Tensor:
        """[B * n, S] the experts that the tokens now in the model are to have."""
        start, end = self._span
        return self.side.experts[:, start:end, layer].flatten(0, 1).clamp(min=0)

    def experts(self) -> Tensor | None:
        """[B, tokens, L, S] what the routers chose."""
        self._stack.close()
        rows = len(self.prompts)
        layers = [torch.cat([part.view(rows, -1, part.shape[-1]) for part in parts], 1) for parts in self._seen]
        return torch.stack(layers, 2) if layers else None


@dataclass(slots=True)
class Scored:
    """What a trainer thinks of whole sequences."""

    logprobs: Tensor
    """[B, T] float32 nats, 0.0 beyond a response."""
    entropy: Tensor
    """[B, T] float32 nats, of the same distribution."""
    experts: Tensor | None = None
    """[B, P + T - 1, L, S] chosen experts; None without routers."""


@torch.no_grad()
def score(side: Side, prompts_BP: Tensor, ids_BT: Tensor, lengths_B: Tensor) -> Scored:
    """Score responses by forwards over whole sequences, `side.rows` at a time."""
    model = build(side)
    width = prompts_BP.shape[1]
    logprobs, entropy = torch.zeros(ids_BT.shape), torch.zeros(ids_BT.shape)
    experts = []
    for rows in torch.arange(len(ids_BT)).split(side.rows):
        longest = int(lengths_B[rows].max())
        whole = torch.cat([prompts_BP[rows], ids_BT[rows, :longest]], 1)
        with _choices(model) as seen:
            hidden = _forward(model, side, whole[:, :-1], 0, None)[:, width - 1 :]
        counted = torch.arange(longest)[None] < lengths_B[rows, None]
        values = [
            _token_scores(_logits(model, side, part), token, side.head)
            for part, token in zip(
                hidden[counted].split(_HEAD_CHUNK), ids_BT[rows, :longest][counted].split(_HEAD_CHUNK), strict=True
            )
        ]
        at = torch.zeros(ids_BT.shape, dtype=torch.bool)
        at[rows[:, None], torch.arange(longest)] = counted
        logprobs[at] = torch.cat([value[0] for value in values])
        entropy[at] = torch.cat([value[1] for value in values])
        if seen:
            experts.append(
                _padded([part[0].view(len(rows), -1, part[0].shape[-1]) for part in seen], ids_BT.shape[1] + width - 1)
            )
    return Scored(logprobs, entropy, torch.cat(experts) if experts else None)


def _token_scores(logits: Tensor, token: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    scores = head.log_softmax(logits)
    probs = scores.exp()
    return scores.gather(-1, token[:, None])[:, 0], -(probs * scores.masked_fill(probs == 0, 0.0)).sum(-1)


def _padded(layers: list[Tensor], tokens: int) -> Tensor:
    """Layers [B, t, S] -> [B, tokens, L, S], -1 beyond."""
    chosen = torch.stack(layers, 2)
    return torch.nn.functional.pad(chosen, (0, 0, 0, 0, 0, tokens - chosen.shape[1]), value=-1)
