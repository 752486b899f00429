"""A token policy with one mixture-of-experts layer, in numpy: forward, backward, two optimizers, and four small tasks.

The policy reads one-hot features of the prompt and of the tokens so far; a hidden layer, `NUM_EXPERTS` experts of which
a router chooses `active` a token, and a linear head give the logits of the next token. Weights are a dict of
float32 arrays.

A task draws prompts of one `level`: `original` is what a run trains on, `shifted` differs a little, `hard` is harder or
other. Its verifier judges answers: tuples of tokens, without the 0 that ends a response and pads.

Shape suffixes: N tokens, B rows, D features, H hidden units, E experts, F units of an expert, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import cache
from itertools import groupby, permutations

import numpy as np

HIDDEN, NUM_EXPERTS, EXPERT_UNITS = 64, 4, 48
END = 0

Weights = dict[str, np.ndarray]
Answer = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a task's tokens become features: the policy sees each prompt slot and each earlier response slot."""

    num_tokens: int
    """V: the vocabulary; token 0 ends a response, and pads."""
    prompt_slots: int
    response_slots: int

    @property
    def width(self) -> int:
        """D: one-hot slots, the last token once more, and the position."""
        return self.num_tokens * (self.prompt_slots + self.response_slots + 1) + self.response_slots

    def features(self, prompts: np.ndarray, responses: np.ndarray, position: int) -> np.ndarray:
        """[B, D] features for the token at `position`, of prompts [B, P] and the responses [B, T] before it."""
        num_rows, eye = len(prompts), np.eye(self.num_tokens, dtype=np.float32)
        before = np.zeros((num_rows, self.response_slots, self.num_tokens), np.float32)
        before[:, :position] = eye[responses[:, :position]]
        last = before[:, position - 1] if position else np.zeros((num_rows, self.num_tokens), np.float32)
        place = np.zeros((num_rows, self.response_slots), np.float32)
        place[:, position] = 1.0
        asked = eye[prompts].reshape(num_rows, self.num_tokens * self.prompt_slots)
        return np.concatenate([asked, before.reshape(num_rows, self.num_tokens * self.response_slots), last, place], 1)


def new_weights(layout: Layout, draw: np.random.Generator) -> Weights:
    """Random weights of the usual scale, 1 / sqrt(inputs)."""

    def matrix(*shape: int) -> np.ndarray:
        return (draw.normal(size=shape) / np.sqrt(shape[-2])).astype(np.float32)

    return {
        "embed": (draw.normal(size=(layout.width, HIDDEN)) * 0.2).astype(np.float32),
        "embed_bias": np.zeros(HIDDEN, np.float32),
        "router": matrix(HIDDEN, NUM_EXPERTS),
        "experts_up": matrix(NUM_EXPERTS, HIDDEN, EXPERT_UNITS),
        "experts_down": matrix(NUM_EXPERTS, EXPERT_UNITS, HIDDEN),
        "head": matrix(HIDDEN, layout.num_tokens),
        "head_bias": np.zeros(layout.num_tokens, np.float32),
    }


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """A forward pass, with what its backward needs."""

    x_ND: np.ndarray
    keep_NH: np.ndarray | float
    """Dropout's factor; 1.0 without dropout."""
    tanh_NH: np.ndarray
    hidden_NH: np.ndarray
    router_NE: np.ndarray
    """The router's probabilities over all experts."""
    gates_NE: np.ndarray
    """Shares of the chosen experts, 0 elsewhere."""
    up_ENF: np.ndarray
    down_ENH: np.ndarray
    out_NH: np.ndarray
    logits_NV: np.ndarray


def forward(
    weights: Weights,
    x_ND: np.ndarray,
    *,
    active: int = 2,
    keep_NH: np.ndarray | float = 1.0,
    noise: np.ndarray | float = 0.0,
) -> Forward:
    """Compute logits. `noise` [N, H] is added to the hidden layer, as a defective cache would."""
    tanh_NH = np.tanh(x_ND @ weights["embed"] + weights["embed_bias"])
    hidden_NH = tanh_NH * keep_NH + noise
    scores_NE = hidden_NH @ weights["router"]
    threshold = np.sort(scores_NE, 1)[:, [-active]]
    gates_NE = softmax(np.where(scores_NE >= threshold, scores_NE, -np.inf))
    up_ENF = hidden_NH @ weights["experts_up"]
    down_ENH = np.maximum(up_ENF, 0) @ weights["experts_down"]
    out_NH = hidden_NH + np.einsum("ne,enh->nh", gates_NE, down_ENH)
    return Forward(
        x_ND=x_ND,
        keep_NH=keep_NH,
        tanh_NH=tanh_NH,
        hidden_NH=hidden_NH,
        router_NE=softmax(scores_NE),
        gates_NE=gates_NE,
        up_ENF=up_ENF,
        down_ENH=down_ENH,
        out_NH=out_NH,
        logits_NV=out_NH @ weights["head"] + weights["head_bias"],
    )


def balance_loss(made: Forward) -> float:
    """The Switch Transformer's load-balancing loss (arXiv 2101.03961, equation 4): 1.0 for balanced experts."""
    share_E = (made.gates_NE > 0).mean(0) / max((made.gates_NE > 0).mean(0).sum(), 1e-9)
    return float(NUM_EXPERTS * (share_E * made.router_NE.mean(0)).sum())


def backward(weights: Weights, made: Forward, dlogits_NV: np.ndarray, *, balance: float = 0.0) -> Weights:
    """Gradients of the weights, for the gradient of the logits and `balance` times `balance_loss`."""
    dout_NH = dlogits_NV @ weights["head"].T
    ddown_ENH = made.gates_NE.T[:, :, None] * dout_NH
    dup_ENF = (ddown_ENH @ weights["experts_down"].transpose(0, 2, 1)) * (made.up_ENF > 0)
    dgates_NE = np.einsum("nh,enh->ne", dout_NH, made.down_ENH)
    drouter_NE = made.gates_NE * (dgates_NE - (made.gates_NE * dgates_NE).sum(1, keepdims=True))
    if balance:
        share_E = (made.gates_NE > 0).mean(0)
        slope_E = balance * NUM_EXPERTS * share_E / share_E.sum() / len(made.router_NE)
        drouter_NE = drouter_NE + made.router_NE * (slope_E - (made.router_NE * slope_E).sum(1, keepdims=True))
    dhidden_NH = (
        dout_NH + (dup_ENF @ weights["experts_up"].transpose(0, 2, 1)).sum(0) + drouter_NE @ weights["router"].T
    )
    dembed_NH = dhidden_NH * made.keep_NH * (1 - made.tanh_NH**2)
    return {
        "embed": made.x_ND.T @ dembed_NH,
        "embed_bias": dembed_NH.sum(0),
        "router": made.hidden_NH.T @ drouter_NE,
        "experts_up": made.hidden_NH.T @ dup_ENF,
        "experts_down": np.maximum(made.up_ENF, 0).transpose(0, 2, 1) @ ddown_ENH,
        "head": made.out_NH.T @ dlogits_NV,
        "head_bias": dlogits_NV.sum(0),
    }


def round_weights(weights: Weights, bits: int) -> Weights:
    """Weights with mantissas of `bits` bits (bfloat16 has 8), as an engine of lower precision holds them."""

    def rounded(tensor: np.ndarray) -> np.ndarray:
        mantissa, exponent = np.frexp(tensor)
        return np.ldexp(np.round(mantissa * 2.0**bits) / 2.0**bits, exponent).astype(np.float32)

    return {name: rounded(tensor) for name, tensor in weights.items()}


def quantize_weights(weights: Weights, bits: int) -> Weights:
    """Weights on a symmetric grid of `bits` bits, from the largest magnitude of each tensor."""

    def quantized(tensor: np.ndarray) -> np.ndarray:
        unit = max(float(np.abs(tensor).max()), 1e-12) / (2 ** (bits - 1) - 1)
        return (np.round(tensor / unit) * unit).astype(np.float32)

    return {name: quantized(tensor) for name, tensor in weights.items()}


@dataclass(slots=True, kw_only=True)
class Optimizer:
    """AdamW, or SGD with momentum; both decay weights apart from the gradient, and change them in place."""

    kind: str
    """`adamw` or `sgd`."""
    first: Weights
    second: Weights
    num_updates: int = 0

    @classmethod
    def of(cls, kind: str, weights: Weights) -> Optimizer:
        zeros = {name: np.zeros_like(tensor) for name, tensor in weights.items()}
        return cls(kind=kind, first=zeros, second={name: np.zeros_like(tensor) for name, tensor in weights.items()})

    def update(
        self,
        weights: Weights,
        gradients: Weights,
        *,
        learning_rate: float,
        beta1: float,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        """Make one update; of `sgd`, `beta1` is the momentum."""
        self.num_updates += 1
        for name, gradient in gradients.items():
            first, second = self.first[name], self.second[name]
            if self.kind == "sgd":
                first[...] = beta1 * first + gradient
                change = first
            else:
                first[...] = beta1 * first + (1 - beta1) * gradient
                second[...] = beta2 * second + (1 - beta2) * gradient**2
                corrected = second / (1 - beta2**self.num_updates)
                change = first / (1 - beta1**self.num_updates) / (np.sqrt(corrected) + epsilon)
            weights[name] -= learning_rate * (change + weight_decay * weights[name])


class BaseConversion:
    """Nine binary digits as three octal ones. The first token asks for the most (1) or least (2) significant first."""

    name, layout, base_target = "octal", Layout(num_tokens=9, prompt_slots=10, response_slots=7), 0.3

    def draw_prompt(self, draw: np.random.Generator, level: str) -> Answer:
        bits = draw.random(9) < (0.65 if level == "shifted" else 0.5)
        return (2 if level == "hard" else 1, *(bits + 1).tolist())

    def demonstrate(self, prompt: Answer, draw: np.random.Generator) -> Answer:
        bits = [token - 1 for token in prompt[1:]]
        digits = [4 * bits[i] + 2 * bits[i + 1] + bits[i + 2] + 1 for i in range(0, 9, 3)]
        return tuple(digits if prompt[0] == 1 else digits[::-1])

    def is_correct(self, prompt: Answer, answer: Answer) -> bool:
        return answer == self.demonstrate(prompt, np.random.default_rng(0))


class RunLengthDecoding:
    """Three pairs of symbol (1 to 4) and count (5 to 8 say 1 to 4), to be written out."""

    name, layout, base_target = "rle", Layout(num_tokens=9, prompt_slots=6, response_slots=14), 0.3

    def draw_prompt(self, draw: np.random.Generator, level: str) -> Answer:
        symbols = [int(draw.integers(1, 5))]
        while len(symbols) < 3:
            symbol = int(draw.integers(1, 5))
            symbols += [symbol] if symbol != symbols[-1] else []
        counts = {"original": [1, 2, 3], "shifted": [1, 2, 3, 3], "hard": [3, 4, 4]}[level]
        return tuple(token for symbol in symbols for token in (symbol, int(draw.choice(counts)) + 4))

    def demonstrate(self, prompt: Answer, draw: np.random.Generator) -> Answer:
        return tuple(symbol for symbol, count in zip(prompt[::2], prompt[1::2], strict=True) for _ in range(count - 4))

    def is_correct(self, prompt: Answer, answer: Answer) -> bool:
        runs = [token for symbol, run in groupby(answer) for token in (symbol, len(list(run)) + 4)]
        return tuple(runs) == prompt


class BoardMoves:
    """A way over a board of 4 by 4 cells, by moves 1 to 4, from a start to a goal past two blocked cells."""

    name, layout, base_target = "board", Layout(num_tokens=17, prompt_slots=4, response_slots=9), 0.4

    def draw_prompt(self, draw: np.random.Generator, level: str) -> Answer:
        low, high = {"original": (1, 3), "shifted": (2, 3), "hard": (4, 6)}[level]
        while True:
            prompt = tuple((draw.permutation(16)[:4] + 1).tolist())
            way = shortest_way(prompt)
            if way is not None and low <= len(way) <= high:
                return prompt

    def demonstrate(self, prompt: Answer, draw: np.random.Generator) -> Answer:
        return shortest_way(prompt) or ()

    def is_correct(self, prompt: Answer, answer: Answer) -> bool:
        start, goal, *blocked = prompt
        cell: int | None = start
        for move in answer:
            cell = neighbour(cell, move) if cell is not None else None
            if cell is None or cell in blocked:
                return False
        return cell == goal


def neighbour(cell: int, move: int) -> int | None:
    """The cell (1 to 16) that a move leads to; None beyond the edge, and for a token that is no move."""
    row, column = divmod(cell - 1, 4)
    row, column = row + {1: -1, 2: 1}.get(move, 0), column + {3: -1, 4: 1}.get(move, 0)
    inside = 0 <= row < 4 and 0 <= column < 4 and 1 <= move <= 4
    return 4 * row + column + 1 if inside else None


@cache
def shortest_way(prompt: Answer) -> Answer | None:
    """The shortest moves from start to goal, by breadth-first search."""
    start, goal, *blocked = prompt
    ways: dict[int, Answer] = {start: ()}
    queue = deque([start])
    while queue:
        cell = queue.popleft()
        for move in (1, 2, 3, 4):
            after = neighbour(cell, move)
            if after is not None and after not in blocked and after not in ways:
                ways[after] = (*ways[cell], move)
                queue.append(after)
    return ways.get(goal)


class Scheduling:
    """An order of five jobs (1 to 5) that satisfies pairs `before, after`: three, or four in hard prompts."""

    name, layout, base_target = "schedule", Layout(num_tokens=6, prompt_slots=8, response_slots=8), 0.4

    def draw_prompt(self, draw: np.random.Generator, level: str) -> Answer:
        order = draw.permutation(5) + 1
        num_pairs = {"original": 3, "shifted": 3 - int(draw.random() < 0.3), "hard": 4}[level]
        chosen = draw.permutation(10)[:num_pairs]
        pairs = [(int(order[i]), int(order[j])) for i in range(5) for j in range(i + 1, 5)]
        tokens = [token for index in chosen for token in pairs[index]]
        return tuple(tokens + [0] * (8 - len(tokens)))

    def demonstrate(self, prompt: Answer, draw: np.random.Generator) -> Answer:
        orders = valid_orders(prompt)
        return orders[int(draw.integers(len(orders)))]

    def is_correct(self, prompt: Answer, answer: Answer) -> bool:
        return answer in valid_orders(prompt)


@cache
def valid_orders(prompt: Answer) -> tuple[Answer, ...]:
    """All orders of the five jobs that satisfy a prompt's pairs."""
    pairs = [pair for pair in zip(prompt[::2], prompt[1::2], strict=True) if pair != (0, 0)]
    orders = permutations(range(1, 6))
    return tuple(order for order in orders if all(order.index(a) < order.index(b) for a, b in pairs))


Task = BaseConversion | RunLengthDecoding | BoardMoves | Scheduling
TASKS: dict[str, Task] = {
    task.name: task for task in (BaseConversion(), RunLengthDecoding(), BoardMoves(), Scheduling())
}
