"""Tasks, networks and optimizers in numpy for actor_critic: small language models that answer with a few tokens.

A task draws prompts, knows the right answer and grades a response. A network gives logits and values for the
positions of a response and has a backward pass written by hand; its parameters are views of one flat vector, on which
an optimizer works.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

PAD, END, EQUALS, MARK, LOOKUP = range(5)
DIGITS = 5  # the first of ten digits
LETTERS = 15  # the first of nine letters: rules, brackets, options
NUM_TOKENS = 24

Prompt = tuple[int, ...]
Parameters = dict[str, np.ndarray]


@dataclass(frozen=True)
class Task:
    """Prompts of at most `prompt_length` tokens, answers of at most `max_tokens` with the end token."""

    prompt_length: int
    max_tokens: int
    draw: Callable[[np.random.Generator, float], Prompt]
    answer: Callable[[Prompt], list[int]]
    grade: Callable[[list[int], list[int]], float]
    alphabet: tuple[int, ...]
    has_tool: bool = False


def exact(response: list[int], answer: list[int]) -> float:
    """Pay 1 for the right answer, with its end token, and 0 for any other."""
    return float(response == answer)


def share(response: list[int], answer: list[int]) -> float:
    """Pay the share of places that are right, of the longer of response and answer."""
    return sum(a == b for a, b in zip(response, answer, strict=False)) / max(len(response), len(answer))


def choice(response: list[int], answer: list[int]) -> float:
    """Pay 1 where the first mark is followed by the right option and the end, whatever came before."""
    if MARK not in response or response[-1] != END:
        return 0.0
    return float(response[response.index(MARK) + 1 :] == answer[-2:])


def draw_sum(rng: np.random.Generator, shift: float) -> Prompt:
    """Three digits below 6; a share `shift` of the prompts has digits from 4 to 8 instead."""
    low, high = (4, 9) if rng.random() < shift else (0, 6)
    return (*(DIGITS + int(digit) for digit in rng.integers(low, high, 3)), EQUALS)


def answer_sum(prompt: Prompt) -> list[int]:
    """Give the sums modulo 6 of the digits beside each other."""
    a, b, c = (token - DIGITS for token in prompt[:3])
    return [DIGITS + (a + b) % 6, DIGITS + (b + c) % 6, END]


def draw_brackets(rng: np.random.Generator, shift: float) -> Prompt:
    """Two to four opening brackets of three kinds; a share `shift` of the prompts has five to seven."""
    depth = int(rng.integers(5, 8) if rng.random() < shift else rng.integers(2, 5))
    return tuple(LETTERS + int(kind) for kind in rng.integers(0, 3, depth))


def answer_brackets(prompt: Prompt) -> list[int]:
    """Close what is open, the innermost first."""
    return [token + 3 for token in reversed(prompt)] + [END]


def draw_date(rng: np.random.Generator, shift: float) -> Prompt:
    """Day and month in two digits each; a share `shift` of the prompts has the month first."""
    day, month = int(rng.integers(1, 29)), int(rng.integers(1, 13))
    if rng.random() < shift:
        day, month = month, day
    return (*(DIGITS + digit for digit in (day // 10, day % 10, month // 10, month % 10)), EQUALS)


def answer_date(prompt: Prompt) -> list[int]:
    """Write month, mark and day."""
    return [prompt[2], prompt[3], MARK, prompt[0], prompt[1], END]


def draw_rewrite(rng: np.random.Generator, shift: float) -> Prompt:
    """A rule and four letters of five; a share `shift` of the prompts has a rule that was not there before."""
    rule = 2 if rng.random() < shift else int(rng.integers(0, 2))
    return (LETTERS + 5 + rule, *(LETTERS + int(letter) for letter in rng.integers(0, 5, 4)), EQUALS)


def answer_rewrite(prompt: Prompt) -> list[int]:
    """Reverse the letters, put the next letter for each, or exchange neighbours."""
    rule, letters = prompt[0] - LETTERS - 5, list(prompt[1:5])
    if rule == 0:
        return [*reversed(letters), END]
    if rule == 1:
        return [*(LETTERS + (letter - LETTERS + 1) % 5 for letter in letters), END]
    return [letters[1], letters[0], letters[3], letters[2], END]


def draw_choice(rng: np.random.Generator, shift: float) -> Prompt:
    """One of eight questions and three options, one of them its key; a share `shift` asks one of two questions."""
    question = int(rng.integers(6, 8) if rng.random() < shift else rng.integers(0, 8))
    key = question * 3 % 8
    others = rng.permutation([other for other in range(8) if other != key])[:2]
    options = rng.permutation([key, *others])
    return (LETTERS + question, *(DIGITS + int(option) for option in options), EQUALS)


def answer_choice(prompt: Prompt) -> list[int]:
    """Name the key, then the place of the option that has it."""
    key = DIGITS + (prompt[0] - LETTERS) * 3 % 8
    return [key, MARK, LETTERS + prompt[1:4].index(key), END]


def draw_lookup(rng: np.random.Generator, shift: float) -> Prompt:
    """Two digits that name a record, and three options; a share `shift` of the prompts names records of its own."""
    low, high = (8, 10) if rng.random() < shift else (0, 8)
    return (*(DIGITS + int(digit) for digit in (*rng.integers(low, high, 2), *rng.permutation(8)[:3])), EQUALS)


def answer_lookup(prompt: Prompt) -> list[int]:
    """Call the tool, read which option it names, and give its place, which cannot be told from the prompt."""
    mixed = 0
    for token in prompt:
        mixed = (mixed * 1103515245 + 12345 + 2654435761 * token) % 2**31
    place = (mixed >> 16) % 3
    return [LOOKUP, prompt[2 + place], MARK, LETTERS + place, END]


TASKS = {
    "modular-sum": Task(4, 5, draw_sum, answer_sum, exact, tuple(range(DIGITS, DIGITS + 6))),
    "brackets": Task(7, 9, draw_brackets, answer_brackets, share, tuple(range(LETTERS + 3, LETTERS + 6))),
    "dates": Task(5, 8, draw_date, answer_date, share, tuple(range(DIGITS, DIGITS + 10))),
    "rewrite": Task(6, 7, draw_rewrite, answer_rewrite, share, tuple(range(LETTERS, LETTERS + 5))),
    "choice": Task(5, 7, draw_choice, answer_choice, choice, tuple(range(LETTERS, LETTERS + 3))),
    "lookup": Task(6, 7, draw_lookup, answer_lookup, choice, tuple(range(LETTERS, LETTERS + 3)), has_tool=True),
}


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(0.5 * x))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def padded(prompts: list[Prompt], length: int) -> np.ndarray:
    """Pad prompts on the left."""
    return np.array([[PAD] * (length - len(prompt)) + list(prompt) for prompt in prompts])


class Network:
    """Shapes and views of the parameters; a subclass has the forward and the backward pass and the sampling state."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.shapes = shapes
        self.size = sum(int(np.prod(shape)) for shape in shapes.values())

    def views(self, flat: np.ndarray) -> Parameters:
        found, start = {}, 0
        for name, shape in self.shapes.items():
            found[name] = flat[start : start + int(np.prod(shape))].reshape(shape)
            start += int(np.prod(shape))
        return found

    def initial(self, rng: np.random.Generator) -> np.ndarray:
        flat = np.zeros(self.size, np.float32)
        for name, view in self.views(flat).items():
            if view.ndim == 2:
                view[:] = rng.normal(0, 0.3 if name == "embedding" else 1 / np.sqrt(view.shape[0]), view.shape)
        return flat


class GatedMLP(Network):
    """Two gated layers over the whole prompt, the last two tokens of the response and the place in it."""

    def __init__(self, task: Task, width: int = 64, embedding: int = 12) -> None:
        self.task, self.width, self.embedding = task, width, embedding
        inputs = (task.prompt_length + 2) * embedding
        super().__init__(
            {
                "embedding": (NUM_TOKENS, embedding),
                "up": (inputs, 2 * width),
                "place": (task.max_tokens, 2 * width),
                "mix": (width, 2 * width),
                "mix_bias": (2 * width,),
                "head": (width, NUM_TOKENS),
                "head_bias": (NUM_TOKENS,),
                "value": (width, 1),
            }
        )

    def forward(self, p: Parameters, prompts: np.ndarray, responses: np.ndarray, keep: np.ndarray | None = None):
        count, length = responses.shape
        before = np.concatenate([np.full((count, 2), EQUALS), responses[:, :-1]], axis=1)
        ids = np.concatenate(
            [np.repeat(prompts[:, None], length, axis=1), before[:, :-1, None], before[:, 1:, None]], axis=2
        )
        return self.layers(p, ids, np.arange(length), keep)

    def layers(self, p: Parameters, ids: np.ndarray, places: np.ndarray, keep: np.ndarray | None = None):
        x = p["embedding"][ids].reshape(*ids.shape[:2], -1)
        a, g = np.split(x @ p["up"] + p["place"][places], 2, axis=-1)
        a, g = np.tanh(a), sigmoid(g)
        h = a * g
        b, c = np.split(h @ p["mix"] + p["mix_bias"], 2, axis=-1)
        b, c = np.tanh(b), sigmoid(c)
        top = h + b * c
        if keep is not None:
            top = top * keep
        return top @ p["head"] + p["head_bias"], (top @ p["value"])[..., 0], (ids, places, x, a, g, h, b, c, top, keep)

    def backward(self, p: Parameters, cache: tuple, d_logits: np.ndarray, d_values: np.ndarray) -> np.ndarray:
        ids, places, x, a, g, h, b, c, top, keep = cache
        flat = np.zeros(self.size, np.float32)
        grad = self.views(flat)
        wide = (0, 1)
        grad["head"] += np.tensordot(top, d_logits, (wide, wide))
        grad["head_bias"] += d_logits.sum(axis=wide)
        grad["value"] += np.tensordot(top, d_values[..., None], (wide, wide))
        d_top = d_logits @ p["head"].T + d_values[..., None] * p["value"][:, 0]
        if keep is not None:
            d_top = d_top * keep
        d_mix = np.concatenate([d_top * c * (1 - b * b), d_top * b * c * (1 - c)], axis=-1)
        grad["mix"] += np.tensordot(h, d_mix, (wide, wide))
        grad["mix_bias"] += d_mix.sum(axis=wide)
        d_h = d_top + d_mix @ p["mix"].T
        d_up = np.concatenate([d_h * g * (1 - a * a), d_h * a * g * (1 - g)], axis=-1)
        grad["up"] += np.tensordot(x, d_up, (wide, wide))
        np.add.at(grad["place"], places, d_up.sum(axis=0))
        d_x = (d_up @ p["up"].T).reshape(-1, self.embedding)
        chosen = np.eye(NUM_TOKENS, dtype=np.float32)[ids.reshape(-1)]
        grad["embedding"] += chosen.T @ d_x
        return flat

    def start(self, p: Parameters, prompts: np.ndarray) -> tuple:
        return prompts, np.full((len(prompts), 2), EQUALS), 0

    def logits(self, p: Parameters, state: tuple, noise: np.ndarray | None = None) -> np.ndarray:
        prompts, last, place = state
        ids = np.concatenate([prompts, last], axis=1)[:, None]
        logits, _, cache = self.layers(p, ids, np.array([place]))
        if noise is not None:
            logits = (cache[8] + noise[:, None]) @ p["head"] + p["head_bias"]
        return logits[:, 0]

    def advance(self, p: Parameters, state: tuple, tokens: np.ndarray) -> tuple:
        prompts, last, place = state
        return prompts, np.stack([last[:, 1], tokens], axis=1), place + 1


class GRU(Network):
    """One gated recurrent layer that reads prompt and response."""

    def __init__(self, task: Task, width: int = 64, embedding: int = 16) -> None:
        self.task, self.width = task, width
        super().__init__(
            {
                "embedding": (NUM_TOKENS, embedding),
                "input": (embedding, 3 * width),
                "input_bias": (3 * width,),
                "recurrent": (width, 3 * width),
                "head": (width, NUM_TOKENS),
                "head_bias": (NUM_TOKENS,),
                "value": (width, 1),
            }
        )

    def cell(self, p: Parameters, inputs: np.ndarray, h: np.ndarray) -> tuple[np.ndarray, ...]:
        w = self.width
        inner = h @ p["recurrent"]
        gates = sigmoid(inputs[:, : 2 * w] + inner[:, : 2 * w])
        z, r = gates[:, :w], gates[:, w:]
        n = np.tanh(inputs[:, 2 * w :] + r * inner[:, 2 * w :])
        return n + z * (h - n), z, r, n, inner[:, 2 * w :]

    def forward(self, p: Parameters, prompts: np.ndarray, responses: np.ndarray, keep: np.ndarray | None = None):
        ids = np.concatenate([prompts, responses[:, :-1]], axis=1)
        x = p["embedding"][ids]
        inputs = x @ p["input"] + p["input_bias"]
        h = np.zeros((len(ids), self.width), np.float32)
        saved = []
        for place in range(ids.shape[1]):
            before = h
            h, z, r, n, inner = self.cell(p, inputs[:, place], h)
            saved.append((before, z, r, n, inner, h))
        top = np.stack([one[-1] for one in saved[prompts.shape[1] - 1 :]], axis=1)
        if keep is not None:
            top = top * keep
        logits = top @ p["head"] + p["head_bias"]
        return logits, (top @ p["value"])[..., 0], (ids, x, saved, top, keep, prompts.shape[1] - 1)

    def backward(self, p: Parameters, cache: tuple, d_logits: np.ndarray, d_values: np.ndarray) -> np.ndarray:
        ids, x, saved, top, keep, first = cache
        flat = np.zeros(self.size, np.float32)
        grad = self.views(flat)
        wide = (0, 1)
        grad["head"] += np.tensordot(top, d_logits, (wide, wide))
        grad["head_bias"] += d_logits.sum(axis=wide)
        grad["value"] += np.tensordot(top, d_values[..., None], (wide, wide))
        d_top = d_logits @ p["head"].T + d_values[..., None] * p["value"][:, 0]
        if keep is not None:
            d_top = d_top * keep
        d_h = np.zeros((len(ids), self.width), np.float32)
        d_inputs = np.zeros((*ids.shape, 3 * self.width), np.float32)
        d_inners = np.zeros_like(d_inputs)
        for place in range(ids.shape[1] - 1, -1, -1):
            before, z, r, n, inner, _ = saved[place]
            if place >= first:
                d_h = d_h + d_top[:, place - first]
            d_n = d_h * (1 - z) * (1 - n * n)
            d_z = d_h * (before - n) * z * (1 - z)
            d_r = d_n * inner * r * (1 - r)
            d_inputs[:, place] = np.concatenate([d_z, d_r, d_n], axis=1)
            d_inners[:, place] = np.concatenate([d_z, d_r, d_n * r], axis=1)
            d_h = d_h * z + d_inners[:, place] @ p["recurrent"].T
        befores = np.stack([one[0] for one in saved], axis=1)
        grad["recurrent"] += np.tensordot(befores, d_inners, (wide, wide))
        grad["input"] += np.tensordot(x, d_inputs, (wide, wide))
        grad["input_bias"] += d_inputs.sum(axis=wide)
        d_x = (d_inputs @ p["input"].T).reshape(-1, x.shape[-1])
        grad["embedding"] += np.eye(NUM_TOKENS, dtype=np.float32)[ids.reshape(-1)].T @ d_x
        return flat

    def start(self, p: Parameters, prompts: np.ndarray) -> np.ndarray:
        h = np.zeros((len(prompts), self.width), np.float32)
        for place in range(prompts.shape[1]):
            h = self.advance(p, h, prompts[:, place])
        return h

    def logits(self, p: Parameters, state: np.ndarray, noise: np.ndarray | None = None) -> np.ndarray:
        return (state if noise is None else state + noise) @ p["head"] + p["head_bias"]

    def advance(self, p: Parameters, state: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        return self.cell(p, p["embedding"][tokens] @ p["input"] + p["input_bias"], state)[0]


NETWORKS = {"gated-mlp": GatedMLP, "gru": GRU}


class Optimizer:
    """Adam, Lion or SGD with momentum over one flat vector, with decoupled weight decay."""

    def __init__(self, kind: str, size: int) -> None:
        self.kind = kind
        self.first = np.zeros(size, np.float32)
        self.second = np.zeros(size, np.float32)
        self.num_updates = 0

    def update(
        self, flat: np.ndarray, grad: np.ndarray, lr: float, beta1: float, beta2: float, eps: float, decay: float
    ):
        self.num_updates += 1
        if self.kind == "adam":
            self.first += (1 - beta1) * (grad - self.first)
            self.second += (1 - beta2) * (grad * grad - self.second)
            mean = self.first / (1 - beta1**self.num_updates)
            direction = mean / (np.sqrt(self.second / (1 - beta2**self.num_updates)) + eps)
        elif self.kind == "lion":
            direction = np.sign(beta1 * self.first + (1 - beta1) * grad)
            self.first += (1 - beta2) * (grad - self.first)
        else:
            self.first *= beta1
            self.first += grad
            direction = self.first
        flat -= lr * (direction + decay * flat)
