"""Tasks and a policy for a small RL trainer: a feed-forward network over a window of the last few tokens.

A task draws prompts and knows the one right response of each. The policy embeds the last tokens, has one hidden layer of tanh
and gives the logits of the next token; its backward pass is written by hand. Everything is numpy in float64.
"""

from dataclasses import dataclass

import numpy as np

PAD, EOS, SEP = 0, 1, 2
FIRST = 3
"""The first token that is not special."""


@dataclass(frozen=True)
class Task:
    """A task; `prompts` gives prompts padded on the left and right responses padded on the right."""

    name: str
    vocabulary: int
    window: int
    max_tokens: int

    def prompts(self, draw, count, kind="usual", *, held_out=False):
        """Draw `count` prompts of a `kind`; of the usual kind, a fifth of all prompts is held out of the training."""
        prompts, answers = self.examples(draw, 12 * count, kind)
        if kind == "usual":
            is_held_out = (prompts @ (7 + 2 * np.arange(prompts.shape[1]))) % 5 == 0
            keep = np.flatnonzero(is_held_out == held_out)[:count]
        else:
            keep = np.arange(count)
        return prompts[keep], answers[keep]

    def examples(self, draw, count, kind):
        raise NotImplementedError

    def tool_output(self, called, answers, position):
        """Tokens that a tool, and not the policy, puts at this position of the responses; None for none."""


class Brackets(Task):
    """Close the open brackets of three types, the last one first."""

    def examples(self, draw, count, kind):
        low, high = {"usual": (2, 4), "shifted": (3, 4)}[kind]
        opened = draw.integers(0, 3, (count, high))
        opened[np.arange(high) < high - draw.integers(low, high + 1, count)[:, None]] = -1
        prompts = np.where(opened < 0, PAD, FIRST + opened)
        closed = opened[:, ::-1]
        return with_separator(prompts), with_end(np.where(closed < 0, PAD, FIRST + 3 + closed))


class Parity(Task):
    """Give the parity of the bits up to each bit."""

    def examples(self, draw, count, kind):
        bits = draw.integers(0, 2, (count, {"usual": 6, "hard": 8}[kind]))
        return with_separator(FIRST + bits), with_end(FIRST + np.cumsum(bits, axis=1) % 2)


class Addition(Task):
    """Add two numbers of two digits of base 4, low digits first."""

    def examples(self, draw, count, kind):
        numbers = draw.integers(0, 16, (count, 2))
        places = 4 ** np.arange(3)
        split = FIRST + numbers[:, :, None] // places[:-1] % 4
        plus = np.full((count, 1), FIRST + 4)
        total = FIRST + numbers.sum(axis=1)[:, None] // places % 4
        return with_separator(np.hstack([split[:, 0], plus, split[:, 1]])), with_end(total)


class Sorting(Task):
    """Sort three letters of six."""

    def examples(self, draw, count, kind):
        letters = draw.integers(0, 6, (count, {"usual": 3, "hard": 5}[kind]))
        return with_separator(FIRST + letters), with_end(FIRST + np.sort(letters, axis=1))


class Lookup(Task):
    """Call a tool with the key that a star marks, and repeat what the tool gives: only the tool knows the values."""

    KEYS, STAR, VALUES = 6, FIRST + 6, FIRST + 7

    def examples(self, draw, count, kind):
        keys = FIRST + draw.integers(0, self.KEYS, (count, 3))
        place = draw.integers(0, 3, count)
        prompts = np.empty((count, 4), dtype=int)
        for row in range(count):
            prompts[row] = np.insert(keys[row], place[row], self.STAR)
        called = keys[np.arange(count), place]
        values = self.VALUES + draw.integers(0, self.KEYS, count)
        return with_separator(prompts), with_end(np.stack([called, values, values], axis=1))

    def tool_output(self, called, answers, position):
        return np.where(called == answers[:, 0], answers[:, 1], SEP) if position == 1 else None


def with_separator(prompts):
    return np.hstack([prompts, np.full((len(prompts), 1), SEP)])


def with_end(responses):
    """Append an end token to each row, whose padding is on the right."""
    ended = np.hstack([responses, np.full((len(responses), 1), PAD)])
    ended[np.arange(len(ended)), (responses != PAD).sum(axis=1)] = EOS
    return ended


TASKS = {
    task.name: task
    for task in (
        Brackets("brackets", vocabulary=9, window=10, max_tokens=8),
        Parity("parity", vocabulary=8, window=8, max_tokens=10),
        Addition("addition", vocabulary=10, window=9, max_tokens=7),
        Sorting("sorting", vocabulary=12, window=7, max_tokens=7),
        Lookup("lookup", vocabulary=16, window=8, max_tokens=6),
    )
}


def score(responses, answers):
    """Half a point for the share of right tokens and half for the whole response, in 0..1; both are padded with PAD."""
    width = max(responses.shape[1], answers.shape[1])
    responses, answers = (np.pad(ids, ((0, 0), (0, width - ids.shape[1]))) for ids in (responses, answers))
    length = np.maximum((responses != PAD).sum(axis=1), (answers != PAD).sum(axis=1))
    right = ((responses == answers) & (answers != PAD)).sum(axis=1)
    return 0.5 * right / length + 0.5 * (right == length)


def new_weights(draw, task, embedding=8, hidden=64):
    inputs = task.window * embedding
    return {
        "embedding": draw.normal(0, 1, (task.vocabulary, embedding)),
        "hidden": draw.normal(0, inputs**-0.5, (inputs, hidden)),
        "hidden_bias": np.zeros(hidden),
        "head": draw.normal(0, 0.5 * hidden**-0.5, (hidden, task.vocabulary)),
        "head_bias": np.zeros(task.vocabulary),
    }


def log_softmax(logits):
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def forward(weights, windows, dropped=None):
    """Give the logits of the token after each window, which is never PAD, and what `backward` needs."""
    inputs = weights["embedding"][windows].reshape(len(windows), -1)
    hidden = np.tanh(inputs @ weights["hidden"] + weights["hidden_bias"])
    if dropped is not None:
        hidden = hidden * dropped
    logits = hidden @ weights["head"] + weights["head_bias"]
    logits[:, PAD] = -1e9
    return logits, (windows, inputs, hidden, dropped)


def backward(weights, cache, logits_gradient):
    """Give the gradient of every weight from that of the logits."""
    windows, inputs, hidden, dropped = cache
    kept = 1.0 if dropped is None else dropped
    tanh = hidden if dropped is None else np.divide(hidden, dropped, out=np.zeros_like(hidden), where=dropped != 0)
    before = (logits_gradient @ weights["head"].T) * kept * (1 - tanh**2)
    by_token = (before @ weights["hidden"].T).reshape(windows.size, -1)
    one_hot = np.zeros((windows.size, len(weights["embedding"])))
    one_hot[np.arange(windows.size), windows.ravel()] = 1
    return {
        "embedding": one_hot.T @ by_token,
        "hidden": inputs.T @ before,
        "hidden_bias": before.sum(axis=0),
        "head": hidden.T @ logits_gradient,
        "head_bias": logits_gradient.sum(axis=0),
    }


def response_windows(prompts, responses, window):
    """The window before each token of the responses, row after row, [N, window], and the tokens, [N]."""
    text = np.hstack([np.full((len(prompts), window), PAD), prompts, responses])
    windows = np.lib.stride_tricks.sliding_window_view(text, window, axis=1)
    is_token = responses != PAD
    return windows[:, prompts.shape[1] : prompts.shape[1] + responses.shape[1]][is_token], responses[is_token]


def cut_probabilities(logprobs, top_k):
    """Renormalise over the `top_k` most probable tokens."""
    smallest_kept = np.sort(logprobs, axis=1)[:, -top_k, None]
    return log_softmax(np.where(logprobs >= smallest_kept, logprobs, -np.inf))


def sample(
    weights,
    task,
    prompts,
    answers,
    uniforms,
    *,
    max_tokens,
    temperature=1.0,
    top_k=0,
    noise=None,
    tool_works=True,
):
    """Sample responses, one token a position, and give (responses, logprobs, is_own), each [B, max_tokens].

    `uniforms` [B, positions] decide the tokens. `noise(size=shape)` is added to the logits, as an inexact cache would.
    `is_own` is False where a tool wrote the token.
    """
    count = len(prompts)
    text = np.hstack([np.full((count, task.window), PAD), prompts])
    responses = np.full((count, max_tokens), PAD)
    logprobs = np.zeros((count, max_tokens))
    is_own = np.ones((count, max_tokens), dtype=bool)
    running = np.ones(count, dtype=bool)
    for position in range(max_tokens):
        logits, _ = forward(weights, text[:, -task.window :])
        if noise is not None:
            logits = logits + noise(size=logits.shape)
        distribution = log_softmax(logits / temperature)
        if top_k:
            distribution = cut_probabilities(distribution, top_k)
        below = np.cumsum(np.exp(distribution), axis=1)
        tokens = (below < uniforms[:, position, None] * below[:, -1:]).sum(axis=1)
        taken = distribution[np.arange(count), tokens]
        written = task.tool_output(responses[:, 0], answers, position)
        if written is not None:
            tokens = written if tool_works else np.full(count, SEP)
            is_own[:, position] = False
            taken = np.zeros(count)
        responses[:, position] = np.where(running, tokens, PAD)
        logprobs[:, position] = np.where(running, taken, 0.0)
        text = np.hstack([text, responses[:, position, None]])
        running &= tokens != EOS
    return responses, logprobs, is_own
