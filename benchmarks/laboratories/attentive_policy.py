"""The policy, the sampling engine and the tasks of the laboratory in attentive.py.

The policy is a causal transformer of one layer in numpy: embeddings of the token, of the token before it and of the
position, attention with two heads, an MLP, and a head; its backward is written out. The engine samples from a copy
of the weights with a key-value cache, in code of its own. Every task is solvable by one layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Weights = dict[str, Array]

END, BEGIN, QUERY, TOOL_ERROR, FIRST_SYMBOL = 0, 1, 2, 3, 4
WIDTH, HEADS, HIDDEN, POSITIONS = 48, 2, 96, 48


@dataclass(frozen=True)
class Prompt:
    """A prompt, the answer that the verifier knows, and what the tool would answer to a call."""

    ids: tuple[int, ...]
    answer: tuple[int, ...]
    tool: int | None = None


@dataclass
class Rollouts:
    """Responses as the engine sampled them: lists of one row a sequence."""

    responses: list[list[int]]
    logprobs: list[list[float]]
    counts: list[list[bool]]  # false for tokens that a tool wrote
    finished: list[bool]


@dataclass(frozen=True)
class Sampling:
    """How the engine turns logits into tokens, and what it does to its cache."""

    temperature: float = 1.0
    top_p: float = 1.0
    cache_noise: float = 0.0
    max_tokens: int = 8
    tool_works: bool = True


def make_weights(vocabulary: int, rng: np.random.Generator) -> Weights:
    """Weights at random, of float32."""
    shapes = {
        "token": (vocabulary, WIDTH),
        "previous": (vocabulary, WIDTH),
        "position": (POSITIONS, WIDTH),
        "query": (WIDTH, WIDTH),
        "key": (WIDTH, WIDTH),
        "value": (WIDTH, WIDTH),
        "mixer": (WIDTH, WIDTH),
        "up": (WIDTH, HIDDEN),
        "up_bias": (HIDDEN,),
        "down": (HIDDEN, WIDTH),
        "head": (WIDTH, vocabulary),
        "head_bias": (vocabulary,),
    }
    scales = {"token": 0.5, "previous": 0.5, "position": 0.3, "up_bias": 0.0, "head_bias": 0.0, "down": 0.05}
    return {
        name: (rng.normal(size=shape) * scales.get(name, WIDTH**-0.5)).astype(np.float32)
        for name, shape in shapes.items()
    }


def round_weights(weights: Weights, bits: int) -> Weights:
    """The weights with `bits` bits of mantissa: 7 is bfloat16's precision."""
    rounded = {}
    for name, tensor in weights.items():
        mantissa, exponent = np.frexp(tensor)
        rounded[name] = np.ldexp(np.round(mantissa * 2.0 ** (bits + 1)) / 2.0 ** (bits + 1), exponent).astype(
            np.float32
        )
    return rounded


def log_softmax(logits: Array) -> Array:
    """Logprobs over the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    logprobs: Array = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return logprobs


def split_heads(states: Array) -> Array:
    """[B, T, WIDTH] to [B, HEADS, T, WIDTH / HEADS]."""
    return states.reshape(*states.shape[:2], HEADS, -1).transpose(0, 2, 1, 3)


def merge_heads(states: Array) -> Array:
    """The inverse of split_heads."""
    return states.transpose(0, 2, 1, 3).reshape(states.shape[0], states.shape[2], WIDTH)


@dataclass
class Activations:
    """What the forward keeps for the backward."""

    tokens: Array
    before: Array
    embedded: Array
    query: Array
    key: Array
    value: Array
    attention: Array
    mixed: Array
    attended: Array
    hidden: Array
    kept: Array | float
    final: Array
    logits: Array


def forward(
    weights: Weights, tokens: Array, dropout: float = 0.0, rng: np.random.Generator | None = None
) -> Activations:
    """Logits [B, T, V] of the token that follows each position; `dropout` is of the MLP's hidden units."""
    before = np.concatenate([np.full((len(tokens), 1), BEGIN), tokens[:, :-1]], axis=1)
    length = tokens.shape[1]
    embedded = weights["token"][tokens] + weights["previous"][before] + weights["position"][:length]
    query, key, value = (split_heads(embedded @ weights[name]) for name in ("query", "key", "value"))
    scores = query @ key.transpose(0, 1, 3, 2) * np.float32((WIDTH / HEADS) ** -0.5)
    scores += np.triu(np.full((length, length), -1e9, np.float32), 1)
    attention = np.exp(scores - scores.max(axis=-1, keepdims=True))
    attention /= attention.sum(axis=-1, keepdims=True)
    mixed = merge_heads(attention @ value)
    attended = embedded + mixed @ weights["mixer"]
    hidden = np.maximum(attended @ weights["up"] + weights["up_bias"], 0)
    kept: Array | float = 1.0
    if dropout and rng is not None:
        kept = ((rng.random(hidden.shape) >= dropout) / (1 - dropout)).astype(np.float32)
    final = attended + (hidden * kept) @ weights["down"]
    logits = final @ weights["head"] + weights["head_bias"]
    return Activations(
        tokens, before, embedded, query, key, value, attention, mixed, attended, hidden, kept, final, logits
    )


def backward(weights: Weights, made: Activations, of_logits: Array) -> Weights:
    """The gradient of every weight, of the gradient of the logits [B, T, V]."""

    def outer(inputs: Array, outputs: Array) -> Array:
        return inputs.reshape(-1, inputs.shape[-1]).T @ outputs.reshape(-1, outputs.shape[-1])

    gradient = {"head": outer(made.final, of_logits), "head_bias": of_logits.sum((0, 1))}
    of_final = of_logits @ weights["head"].T
    gradient["down"] = outer(made.hidden * made.kept, of_final)
    of_hidden = of_final @ weights["down"].T * made.kept * (made.hidden > 0)
    gradient["up"], gradient["up_bias"] = outer(made.attended, of_hidden), of_hidden.sum((0, 1))
    of_attended = of_final + of_hidden @ weights["up"].T
    gradient["mixer"] = outer(made.mixed, of_attended)
    of_heads = split_heads(of_attended @ weights["mixer"].T)
    of_value = made.attention.transpose(0, 1, 3, 2) @ of_heads
    of_attention = of_heads @ made.value.transpose(0, 1, 3, 2)
    of_scores = made.attention * (of_attention - (of_attention * made.attention).sum(-1, keepdims=True))
    of_scores *= np.float32((WIDTH / HEADS) ** -0.5)
    parts = {"query": of_scores @ made.key, "key": of_scores.transpose(0, 1, 3, 2) @ made.query, "value": of_value}
    of_embedded = of_attended
    for name, of_heads in parts.items():
        merged = merge_heads(of_heads)
        gradient[name] = outer(made.embedded, merged)
        of_embedded = of_embedded + merged @ weights[name].T
    one_hot = np.eye(len(weights["token"]), dtype=np.float32)
    gradient["token"] = outer(one_hot[made.tokens], of_embedded)
    gradient["previous"] = outer(one_hot[made.before], of_embedded)
    gradient["position"] = np.zeros_like(weights["position"])
    gradient["position"][: of_embedded.shape[1]] = of_embedded.sum(0)
    return gradient


def pack(prompts: Sequence[Prompt], responses: Sequence[Sequence[int]]) -> tuple[Array, Array, Array]:
    """Rows of prompt and response padded on the right; and row and column of the state before each response token."""
    rows = [[*prompt.ids, *response] for prompt, response in zip(prompts, responses, strict=True)]
    tokens = np.full((len(rows), max(map(len, rows))), END)
    for row, ids in enumerate(rows):
        tokens[row, : len(ids)] = ids
    lengths = [len(response) for response in responses]
    row_of = np.repeat(np.arange(len(rows)), lengths)
    column_of = np.concatenate([len(p.ids) - 1 + np.arange(n) for p, n in zip(prompts, lengths, strict=True)])
    return tokens, row_of, column_of.astype(int)


def sample(weights: Weights, prompts: Sequence[Prompt], sampling: Sampling, rng: np.random.Generator) -> Rollouts:
    """Sample one response a prompt, token by token with a cache; logprobs are of the distribution sampled from."""
    count, longest = len(prompts), max(len(prompt.ids) for prompt in prompts)
    capacity = longest + sampling.max_tokens
    lengths = np.array([len(prompt.ids) for prompt in prompts])
    tokens, _, _ = pack(prompts, [[]] * count)
    tokens = np.concatenate([tokens, np.full((count, sampling.max_tokens), END)], axis=1)
    keys, values = (np.zeros((count, capacity, WIDTH), np.float32) for _ in range(2))

    def embed(rows: Array, columns: Array) -> Array:
        before = np.where(columns > 0, tokens[rows, np.maximum(columns - 1, 0)], BEGIN)
        states = weights["token"][tokens[rows, columns]] + weights["previous"][before] + weights["position"][columns]
        for cache, name in ((keys, "key"), (values, "value")):
            noise = sampling.cache_noise * rng.standard_normal(states.shape) if sampling.cache_noise else 0.0
            cache[rows, columns] = states @ weights[name] + noise
        return np.asarray(states)

    rows, columns = np.nonzero(np.arange(longest)[None] < lengths[:, None] - 1)
    embed(rows, columns)
    made = Rollouts([[] for _ in prompts], [[] for _ in prompts], [[] for _ in prompts], [False] * count)
    active = np.arange(count)
    for index in range(sampling.max_tokens):
        states = embed(active, lengths[active] - 1)
        query = (states @ weights["query"]).reshape(len(active), HEADS, -1)
        key, value = (cache[active].reshape(len(active), capacity, HEADS, -1) for cache in (keys, values))
        scores = np.einsum("bhd,bthd->bht", query, key) * np.float32((WIDTH / HEADS) ** -0.5)
        scores[np.broadcast_to(np.arange(capacity) >= lengths[active, None, None], scores.shape)] = -np.inf
        attention = np.exp(scores - scores.max(axis=-1, keepdims=True))
        attention /= attention.sum(axis=-1, keepdims=True)
        mixed = np.einsum("bht,bthd->bhd", attention, value).reshape(len(active), WIDTH)
        states = states + mixed @ weights["mixer"]
        states = states + np.maximum(states @ weights["up"] + weights["up_bias"], 0) @ weights["down"]
        logprobs = log_softmax((states @ weights["head"] + weights["head_bias"]) / sampling.temperature)
        if sampling.top_p < 1:
            logprobs = log_softmax(np.where(outside_nucleus(logprobs, sampling.top_p), -np.inf, logprobs))
        chosen = (np.cumsum(np.exp(logprobs), axis=-1) < rng.random((len(active), 1))).sum(axis=-1)
        chosen = np.where(chosen < logprobs.shape[-1], chosen, logprobs.argmax(axis=-1))
        for place, row in enumerate(active.tolist()):
            tool = prompts[row].tool
            token = int(chosen[place])
            written = tool is not None and index == 1
            if tool is not None and written:
                token = tool if sampling.tool_works else TOOL_ERROR
            tokens[row, lengths[row]] = token
            made.responses[row].append(token)
            made.logprobs[row].append(0.0 if written else float(logprobs[place, token]))
            made.counts[row].append(not written)
            made.finished[row] = token == END
        lengths[active] += 1
        active = np.array([row for row in active if not made.finished[row]], dtype=int)
        if not len(active):
            break
    return made


def outside_nucleus(logprobs: Array, top_p: float) -> Array:
    """Which tokens lie outside the smallest set that holds `top_p` of the probability."""
    order = np.argsort(-logprobs, axis=-1)
    ordered = np.take_along_axis(np.exp(logprobs), order, axis=-1)
    outside = np.zeros(logprobs.shape, bool)
    np.put_along_axis(outside, order, np.cumsum(ordered, axis=-1) - ordered >= top_p, axis=-1)
    return outside


@dataclass(frozen=True)
class Task:
    """Prompts of one kind, as they were for the base policy (`usual`) and as they may become.

    links: pairs of symbols and a first one; the answer follows them to the end.
    count: letters, then two of them; the answer says for both how often they came.
    largest: distinct numbers, then how many; the answer is so many of the largest in falling order.
    tool: distinct numbers; the answer calls a tool with the largest and repeats what the tool wrote.
    """

    name: str
    vocabulary: int

    def draw(self, rng: np.random.Generator, count: int, distribution: str = "usual") -> list[Prompt]:
        """Draw prompts; `distribution` is usual, longer, rare (symbols that the usual ones lack) or mixed (a tenth)."""
        if distribution == "mixed":
            return [self.draw(rng, 1, "longer" if rng.random() < 0.1 else "usual")[0] for _ in range(count)]
        return [getattr(self, f"_{self.name}")(rng, distribution) for _ in range(count)]

    def _symbols(self, first: int, distribution: str) -> Array:
        usual = first + (self.vocabulary - first) * 2 // 3
        return np.arange(usual, self.vocabulary) if distribution == "rare" else np.arange(first, usual)

    def _links(self, rng: np.random.Generator, distribution: str) -> Prompt:
        steps = int(rng.integers(2, 4)) + 3 * (distribution == "longer")
        others = 2 + 3 * (distribution == "longer")
        symbols = rng.permutation(self._symbols(FIRST_SYMBOL, distribution)).tolist()
        path = symbols[: steps + 1]
        rest = symbols[steps + 1 :]
        pairs = [*zip(path, [*path[1:], END], strict=True)]
        pairs += [(rest[i % len(rest)], rest[(i + 1) % len(rest)]) for i in range(others)]
        shuffled = [token for place in rng.permutation(len(pairs)) for token in pairs[place]]
        return Prompt((BEGIN, *shuffled, QUERY, path[0]), (*path[1:], END))

    def _count(self, rng: np.random.Generator, distribution: str) -> Prompt:
        kinds = rng.permutation(self._symbols(FIRST_SYMBOL + 10, distribution))[:3]
        letters = rng.choice(kinds, 9 if distribution == "longer" else 6)
        asked = rng.permutation(kinds)[:2]
        said = [token for kind in asked for token in (kind, FIRST_SYMBOL + int((letters == kind).sum()))]
        return Prompt(tuple(map(int, (BEGIN, *letters, QUERY, *asked))), (*map(int, said), END))

    def _largest(self, rng: np.random.Generator, distribution: str) -> Prompt:
        among = self._symbols(FIRST_SYMBOL, distribution) if distribution != "longer" else None
        numbers = rng.permutation(among if among is not None else np.arange(FIRST_SYMBOL, self.vocabulary))
        numbers = numbers[: 10 if distribution == "longer" else 5].tolist()
        many = int(rng.integers(2, 4))
        return Prompt((BEGIN, *numbers, QUERY, FIRST_SYMBOL + many), (*sorted(numbers, reverse=True)[:many], END))

    def _tool(self, rng: np.random.Generator, distribution: str) -> Prompt:
        numbers = rng.permutation(self._symbols(FIRST_SYMBOL, distribution))[:5].tolist()
        written = int(rng.integers(FIRST_SYMBOL, self.vocabulary))
        return Prompt((BEGIN, *numbers, QUERY), (max(numbers), written, END), written)


def credit(prompt: Prompt, response: Sequence[int], counts: Sequence[bool], finished: bool, *, exact: bool) -> float:
    """The true reward, 0 to 1: the share of places that are right, or whether all are; nothing without an end."""
    if not finished:
        return 0.0
    said = [token for token, own in zip(response, counts, strict=True) if own]
    right = sum(a == b for a, b in zip(said, prompt.answer, strict=False)) / max(len(said), len(prompt.answer))
    return float(right == 1) if exact else right


def demonstration(
    prompt: Prompt, vocabulary: int, noise: float, rng: np.random.Generator
) -> tuple[list[int], list[bool]]:
    """A response to learn from, and which of its tokens count: the answer, each token wrong with probability `noise`.

    A third as often each, it lacks its last token or goes on with another one.
    """
    said = [
        int(rng.integers(FIRST_SYMBOL, vocabulary)) if rng.random() < noise else token for token in prompt.answer[:-1]
    ]
    ending = rng.random()
    if ending < noise / 3:
        said = said[:-1] if len(said) > 2 else said
    elif ending < noise * 2 / 3:
        said.append(int(rng.integers(FIRST_SYMBOL, vocabulary)))
    said.append(END)
    if prompt.tool is None:
        return said, [True] * len(said)
    return [said[0], prompt.tool, *said[1:]], [True, False] + [True] * (len(said) - 1)


def scatter(shape: tuple[int, ...], rows: Array, columns: Array, values: Array) -> Array:
    """The gradient of all logits, of those at the states before response tokens."""
    spread = np.zeros(shape, np.float32)
    spread[rows, columns] = values
    return spread
