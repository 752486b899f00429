"""Tasks, policies, sampling, pretraining and the training loop: sample with an engine, judge, score, update, record.

A run is a family (families.py), a seed and at most one fault (faults.py). A fault is settings, flags of the engine's or
the trainer's forward pass, and hooks that the loop looks up by name, all from its first step on. Random numbers come
from generators seeded by run and step, so before its first step a run is bit for bit its twin.

Shapes: B rows, P prompt tokens, T response tokens, V vocabulary, G rows of a group, L = P + T.
"""

import copy
import functools
import hashlib
import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from tim_trace import Loss, Recorder
from torch import nn

torch.set_num_threads(1)

PAD, EOS, SEPARATOR, BLANK, CALL, ANSWER = range(6)
FIRST = 6
"""The first symbol; those below it have a meaning of their own."""


def generator(*key):
    """A generator of random numbers seeded by `key`."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


# ---------------------------------------------------------------- tasks
class Task:
    """A task: prompts of P tokens, responses of at most T, V tokens in all.

    prompts(rng, n) makes n prompts; a prompt with CALL in place of SEPARATOR is in the task's other template. A prompt
    has one answer, answer(prompts), the tokens without the end and their number; or several, then
    demonstrations(prompts, rng) are responses with their end.
    """

    P, T, V = 8, 12, 16
    pays_each_token = False
    has_tool = False
    has_several_answers = False

    def score(self, prompts, responses, lengths, done):
        """Scores in 0..1, [B]: the share of right places, 0 if unfinished; `done` is 1 at EOS, 2 at another stop."""
        answers, answer_lengths = self.answer(prompts)
        T = responses.shape[1]
        answers = F.pad(answers, (0, max(0, T - answers.shape[1])))[:, :T]
        symbols = lengths - (done == 1).long()
        inside = torch.arange(T)[None] < torch.minimum(answer_lengths, symbols)[:, None]
        right = ((answers == responses) & inside).sum(1)
        share = right.float() / torch.maximum(answer_lengths, symbols).clamp(min=1).float()
        return torch.where(done > 0, share, torch.zeros_like(share))


def strings(rng, n, size, shortest, longest):
    """Prompts of 8 symbols, [n, size], blank after `shortest` to `longest` of them."""
    symbols = torch.randint(0, 8, (n, size), generator=rng) + FIRST
    lengths = torch.randint(shortest, longest + 1, (n,), generator=rng)
    return torch.where(torch.arange(size)[None] < lengths[:, None], symbols, torch.full_like(symbols, BLANK))


def cut_off(answers, lengths):
    """Answers with padding after their lengths, and the lengths."""
    inside = torch.arange(answers.shape[1])[None] < lengths[:, None]
    return torch.where(inside, answers, torch.zeros_like(answers)), lengths


class Reverse(Task):
    """Reverse a string of two to `size` symbols; the other template asks for a copy."""

    V = FIRST + 8

    def __init__(self, size=5, T=9):
        self.size, self.P, self.T = size, size + 1, T

    def prompts(self, rng, n):
        symbols = strings(rng, n, self.size, 2, self.size)
        return torch.cat([symbols, torch.full((n, 1), SEPARATOR)], 1)

    def answer(self, prompts):
        symbols = prompts[:, : self.size]
        lengths = (symbols >= FIRST).sum(1)
        places = lengths[:, None] - 1 - torch.arange(self.size)[None]
        other = prompts[:, self.size] == CALL
        answers = torch.where(other[:, None], symbols, symbols.gather(1, places.clamp(min=0)))
        return cut_off(answers, lengths)


class Sort(Reverse):
    """Sort a string of two to `size` symbols; the other template asks for the falling order."""

    def answer(self, prompts):
        symbols = prompts[:, : self.size]
        given = symbols >= FIRST
        rising = torch.where(given, symbols, torch.full_like(symbols, 99)).sort(1).values
        falling = torch.where(given, symbols, torch.full_like(symbols, -1)).sort(1, descending=True).values
        answers = torch.where((prompts[:, self.size] == CALL)[:, None], falling, rising)
        return cut_off(answers, given.sum(1))


class Dedupe(Reverse):
    """Write each stretch of one symbol once; the other template asks for a copy."""

    def prompts(self, rng, n):
        symbols = torch.randint(0, 4, (n, self.size), generator=rng) + FIRST
        repeated = torch.rand(n, self.size, generator=rng) < 0.45
        for place in range(1, self.size):
            symbols[:, place] = torch.where(repeated[:, place], symbols[:, place - 1], symbols[:, place])
        return torch.cat([symbols, torch.full((n, 1), SEPARATOR)], 1)

    def answer(self, prompts):
        symbols = prompts[:, : self.size]
        kept = torch.cat([torch.ones(len(symbols), 1, dtype=torch.bool), symbols[:, 1:] != symbols[:, :-1]], 1)
        kept = kept | (prompts[:, self.size : self.size + 1] == CALL)
        order = torch.sort((~kept).long(), dim=1, stable=True).indices
        return cut_off(symbols.gather(1, order), kept.sum(1))


class Count(Task):
    """Write a symbol so many times, then its successor; the other template exchanges the two.

    Tokens after FIRST: 8 symbols, 7 numbers.
    """

    P, T, V = 3, 10, FIRST + 8 + 7
    largest = 7

    def prompts(self, rng, n):
        symbols = torch.randint(0, 8, (n, 1), generator=rng) + FIRST
        numbers = torch.randint(1, self.largest + 1, (n, 1), generator=rng) + FIRST + 7
        return torch.cat([symbols, numbers, torch.full((n, 1), SEPARATOR)], 1)

    def answer(self, prompts):
        numbers = prompts[:, 1] - FIRST - 7
        places = torch.arange(self.largest + 1)[None]
        symbols = prompts[:, :1]
        successors = FIRST + (symbols - FIRST + 1) % 8
        other = (prompts[:, 2] == CALL)[:, None]
        repeated, last = torch.where(other, successors, symbols), torch.where(other, symbols, successors)
        return cut_off(torch.where(places < numbers[:, None], repeated, last), numbers + 1)


class Index(Task):
    """Write the values at one to four places of six; the other template counts places from the end.

    Tokens after FIRST: 8 values, 6 places.
    """

    P, T, V = 11, 7, FIRST + 8 + 6

    def prompts(self, rng, n):
        values = torch.randint(0, 8, (n, 6), generator=rng) + FIRST
        places = torch.randint(0, 6, (n, 4), generator=rng) + FIRST + 8
        numbers = torch.randint(1, 5, (n,), generator=rng)
        places = torch.where(torch.arange(4)[None] < numbers[:, None], places, torch.full_like(places, BLANK))
        return torch.cat([values, places, torch.full((n, 1), SEPARATOR)], 1)

    def answer(self, prompts):
        asked = prompts[:, 6:10]
        places = (asked - FIRST - 8).clamp(min=0)
        places = torch.where((prompts[:, 10] == CALL)[:, None], 5 - places, places)
        return cut_off(prompts[:, :6].gather(1, places), (asked >= FIRST).sum(1))


class Caesar(Task):
    """Shift each of two to five symbols by a key of 1 to 4; the other template asks for the shift back.

    Tokens after FIRST: 8 symbols, 4 keys.
    """

    P, T, V = 7, 8, FIRST + 8 + 4

    def prompts(self, rng, n):
        symbols = strings(rng, n, 5, 2, 5)
        keys = torch.randint(0, 4, (n, 1), generator=rng) + FIRST + 8
        return torch.cat([keys, symbols, torch.full((n, 1), SEPARATOR)], 1)

    def answer(self, prompts):
        keys = prompts[:, :1] - FIRST - 8 + 1
        symbols = prompts[:, 1:6]
        signs = torch.where(prompts[:, 6:] == CALL, -1, 1)
        return cut_off(FIRST + (symbols - FIRST + signs * keys) % 8, (symbols >= FIRST).sum(1))


class SumTo(Task):
    """Write any digits of 1 to 5 with a sum of 3 to 18; the other template asks for 21 less the number.

    Tokens after FIRST: digits.
    """

    P, T, V = 3, 8, FIRST + 10
    has_several_answers = True

    def prompts(self, rng, n):
        sums = torch.randint(3, 19, (n,), generator=rng)
        return torch.stack([FIRST + sums // 5, FIRST + sums % 5, torch.full((n,), SEPARATOR)], 1)

    def goals(self, prompts):
        sums = (prompts[:, 0] - FIRST) * 5 + prompts[:, 1] - FIRST
        return torch.where(prompts[:, 2] == CALL, 21 - sums, sums)

    def score(self, prompts, responses, lengths, done):
        digits = (responses >= FIRST + 1) & (responses <= FIRST + 5)
        sums = torch.where(digits, responses - FIRST, torch.zeros_like(responses)).sum(1)
        wrong = ((responses >= FIRST + 6) | ((responses < FIRST + 1) & (responses > EOS))).sum(1)
        scores = (1 - (sums - self.goals(prompts)).abs() / 4).clamp(min=0) * (wrong == 0)
        return scores * (done > 0)

    def demonstrations(self, prompts, rng):
        n = len(prompts)
        left = self.goals(prompts).clone()
        out = torch.zeros(n, self.T, dtype=torch.long)
        ended = torch.zeros(n, dtype=torch.bool)
        for t in range(self.T):
            smallest = (left - 5 * (self.T - 2 - t)).clamp(min=1)
            largest = left.clamp(max=5)
            uniform = torch.rand(n, generator=rng)
            digits = smallest + (uniform * (largest - smallest + 1).clamp(min=1)).long()
            end = torch.where(ended, PAD, EOS)
            out[:, t] = torch.where(left > 0, digits.clamp(max=5) + FIRST, end)
            ended = ended | (left <= 0)
            left = left - torch.where(left > 0, digits, torch.zeros_like(digits))
        return out


class Walk(Task):
    """Walk an offset of -3 to 3 in two directions; by the distance left. The other template asks for the way back.

    Tokens after FIRST: 4 moves, 6 offsets of the first direction, 6 of the second.
    """

    P, T, V = 3, 9, FIRST + 16
    has_several_answers = True

    def prompts(self, rng, n):
        first = FIRST + 4 + torch.randint(0, 6, (n,), generator=rng)
        second = FIRST + 10 + torch.randint(0, 6, (n,), generator=rng)
        return torch.stack([first, second, torch.full((n,), SEPARATOR)], 1)

    def goals(self, prompts):
        offsets = torch.tensor([-3, -2, -1, 1, 2, 3])
        signs = torch.where(prompts[:, 2] == CALL, -1, 1)
        first = offsets[(prompts[:, 0] - FIRST - 4).clamp(0, 5)] * signs
        return first, offsets[(prompts[:, 1] - FIRST - 10).clamp(0, 5)] * signs

    def score(self, prompts, responses, lengths, done):
        first, second = self.goals(prompts)
        moves = [(responses == FIRST + move).sum(1) for move in range(4)]
        distance = (first - moves[0] + moves[1]).abs() + (second - moves[2] + moves[3]).abs()
        wrong = ((responses >= FIRST + 4) | ((responses > EOS) & (responses < FIRST))).sum(1)
        distance = (distance + wrong + 2 * (done != 1)).clamp(max=8)
        return 1 - distance / 8

    def demonstrations(self, prompts, rng):
        first, second = self.goals(prompts)
        out = torch.zeros(len(prompts), self.T, dtype=torch.long)
        ended = torch.zeros(len(prompts), dtype=torch.bool)
        for t in range(self.T):
            share = first.abs() / (first.abs() + second.abs()).clamp(min=1)
            in_first = torch.rand(len(prompts), generator=rng) < share
            move_first = torch.where(first > 0, FIRST, FIRST + 1)
            move = torch.where(in_first, move_first, torch.where(second > 0, FIRST + 2, FIRST + 3))
            arrived = (first == 0) & (second == 0)
            out[:, t] = torch.where(arrived, torch.where(ended, PAD, EOS), move)
            ended = ended | arrived
            first = first - torch.where(arrived | ~in_first, torch.zeros_like(first), first.sign())
            second = second - torch.where(arrived | in_first, torch.zeros_like(second), second.sign())
        return out


class Pattern(Task):
    """Eight tokens, each the one before plus a key, the start given; each is paid. The other template counts down.

    Tokens after FIRST: 8 symbols, 5 keys.
    """

    P, T, V = 3, 8, FIRST + 8 + 5
    size = 8
    pays_each_token = True

    def prompts(self, rng, n):
        keys = FIRST + 8 + torch.randint(0, 5, (n,), generator=rng)
        starts = FIRST + torch.randint(0, 8, (n,), generator=rng)
        return torch.stack([keys, torch.full((n,), SEPARATOR), starts], 1)

    def keys(self, prompts):
        keys = prompts[:, 0] - FIRST - 8 + 1
        return torch.where(prompts[:, 1] == CALL, -keys, keys)

    def token_scores(self, prompts, responses):
        before = torch.cat([prompts[:, 2:3], responses[:, :-1]], 1)
        right = responses == FIRST + (before - FIRST + self.keys(prompts)[:, None]) % 8
        return (right & (responses >= FIRST) & (before >= FIRST)).float()

    def score(self, prompts, responses, lengths, done):
        return self.token_scores(prompts, responses).mean(1)

    def answer(self, prompts):
        places = torch.arange(1, self.size + 1)[None]
        answers = FIRST + (prompts[:, 2:3] - FIRST + places * self.keys(prompts)[:, None]) % 8
        return answers, torch.full((len(prompts),), self.size)


class Tool(Task):
    """Look two keys up with a tool, CALL key -> value, then answer the values; the other template exchanges them.

    Tokens after FIRST: 8 keys, 8 values.
    """

    P, T, V = 3, 12, FIRST + 8 + 8
    has_tool = True

    def prompts(self, rng, n):
        return torch.cat([FIRST + torch.randint(0, 8, (n, 2), generator=rng), torch.full((n, 1), SEPARATOR)], 1)

    def values(self, prompts, keys):
        salt = prompts[:, 0] * 31 + prompts[:, 1] * 17
        return FIRST + 8 + (keys * 7 + salt * 13 + (salt * keys) % 11) % 8

    def answer(self, prompts):
        first, second = self.values(prompts, prompts[:, 0]), self.values(prompts, prompts[:, 1])
        calls, end = torch.full_like(first, CALL), torch.full_like(first, ANSWER)
        other = prompts[:, 2] == CALL
        final = [end, torch.where(other, second, first), torch.where(other, first, second)]
        tokens = torch.stack([calls, prompts[:, 0], first, calls, prompts[:, 1], second, *final], 1)
        return tokens, torch.full((len(prompts),), tokens.shape[1])

    def score(self, prompts, responses, lengths, done):
        wanted = self.answer(prompts)[0][:, 7:9]
        marks = responses == ANSWER
        place = marks.float().argmax(1)[:, None]
        padded = F.pad(responses, (0, 3))
        first, second, end = (padded.gather(1, place + offset)[:, 0] for offset in (1, 2, 3))
        scores = 0.5 * (first == wanted[:, 0]) + 0.5 * (second == wanted[:, 1])
        return scores * marks.any(1) * (done == 1) * (end == EOS)

    def forced(self, prompts, responses, t, num_calls, max_turns, tool):
        """Which rows the tool writes at place `t`, and its tokens, which `tool` may change; None before any call."""
        if t < 2:
            return None
        keys = responses[:, t - 1]
        called = (responses[:, t - 2] == CALL) & (keys >= FIRST) & (keys < FIRST + 8)
        values = self.values(prompts, keys)
        values = torch.where(num_calls < max_turns, values, torch.full_like(values, BLANK))
        return called, values if tool is None else tool(values)


# ---------------------------------------------------------------- policies
class Policy(nn.Module):
    """A policy of tokens: logits after each of them, or after the last alone; a critic with one output is the same.

    `flags` change the forward pass, of an engine or of a faulty trainer: bf16, softcap, head_dropout, and those that a
    subclass names.
    """

    def __init__(self, task, width):
        super().__init__()
        self.P, self.V, self.width, self.flags = task.P, task.V, width, {}
        self.num_places = task.P + task.T + 8
        self.embedding = nn.Embedding(task.V, width)
        nn.init.normal_(self.embedding.weight, std=0.5)

    def add_head(self, num_outputs):
        self.norm = nn.LayerNorm(self.width)
        self.head = nn.Linear(self.width, num_outputs or self.V)

    def forward(self, tokens, last=False):
        flags = self.flags
        hidden = self.body(self.embedding(tokens), last)
        if self.training and flags.get("head_dropout"):
            hidden = F.dropout(hidden, flags["head_dropout"], True)
        hidden = self.norm(hidden[:, -1:] if last else hidden)
        if flags.get("bf16"):
            hidden = hidden.bfloat16().float()
        logits = self.head(hidden)
        if flags.get("softcap"):
            logits = flags["softcap"] * torch.tanh(logits / flags["softcap"])
        if flags.get("bf16"):
            logits = logits + (logits.bfloat16().float() - logits) * 0.5
        return logits


class Recurrent(Policy):
    """A GRU, an LSTM or a plain recurrence; the flag `prefix_state` scales its state after the prompt."""

    def __init__(self, task, kind="gru", width=48, num_outputs=None):
        super().__init__(task, width)
        kinds = {"gru": nn.GRU, "lstm": nn.LSTM, "rnn": nn.RNN}
        self.recurrence = kinds[kind](width, width, batch_first=True)
        self.add_head(num_outputs)

    def body(self, inputs, last):
        if "prefix_state" not in self.flags or inputs.shape[1] <= self.P:
            return self.recurrence(inputs)[0]
        prefix, state = self.recurrence(inputs[:, : self.P])
        scale = self.flags["prefix_state"]
        state = tuple(part * scale for part in state) if isinstance(state, tuple) else state * scale
        return torch.cat([prefix, self.recurrence(inputs[:, self.P :], state)[0]], 1)


class Transformer(Policy):
    """A transformer of four heads.

    Flags: `position_shift` of the response, a `window` of attention, and `dropout`.
    """

    num_heads = 4

    def __init__(self, task, width=40, num_layers=2, num_outputs=None):
        super().__init__(task, width)
        self.positions = nn.Embedding(self.num_places, width)
        nn.init.normal_(self.positions.weight, std=0.5)
        layers = range(num_layers)
        self.attention_inputs = nn.ModuleList([nn.Linear(width, 3 * width) for _ in layers])
        self.attention_outputs = nn.ModuleList([nn.Linear(width, width) for _ in layers])
        self.attention_norms = nn.ModuleList([nn.LayerNorm(width) for _ in layers])
        self.perceptron_norms = nn.ModuleList([nn.LayerNorm(width) for _ in layers])
        self.add_perceptrons(width, layers)
        self.add_head(num_outputs)

    def add_perceptrons(self, width, layers):
        self.up = nn.ModuleList([nn.Linear(width, 2 * width) for _ in layers])
        self.down = nn.ModuleList([nn.Linear(2 * width, width) for _ in layers])

    def perceptron(self, layer, inputs):
        return self.down[layer](F.gelu(self.up[layer](inputs)))

    def attention(self, layer, inputs, visible):
        length, size = inputs.shape[1], self.width // self.num_heads
        mixed = self.attention_inputs[layer](inputs).view(-1, length, 3, self.num_heads, size)
        query, key, value = mixed.permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-1, -2) / size**0.5
        weights = scores.masked_fill(~visible, -1e9).softmax(-1)
        return self.attention_outputs[layer]((weights @ value).transpose(1, 2).reshape(-1, length, self.width))

    def body(self, inputs, last):
        flags = self.flags
        places = torch.arange(inputs.shape[1])
        positions = places
        if flags.get("position_shift"):
            positions = torch.where(places >= self.P, places + flags["position_shift"], places)
            positions = positions.clamp(0, self.num_places - 1)
        visible = places[:, None] >= places[None]
        if flags.get("window"):
            visible = visible & (places[:, None] - places[None] < flags["window"])
        hidden = inputs + self.positions(positions)
        for layer in range(len(self.attention_inputs)):
            hidden = hidden + self.attention(layer, self.attention_norms[layer](hidden), visible)
            update = self.perceptron(layer, self.perceptron_norms[layer](hidden))
            if self.training and flags.get("dropout"):
                update = F.dropout(update, flags["dropout"], True)
            hidden = hidden + update
        return hidden


class Mixture(Transformer):
    """A transformer whose perceptrons are mixtures of four experts, two a token.

    Flag: `expert_shift`, by which tokens go to other experts.
    """

    num_experts = 4

    def add_perceptrons(self, width, layers):
        def matrices():
            return nn.Parameter(torch.randn(self.num_experts, width, width) / width**0.5)

        self.routers = nn.ModuleList([nn.Linear(width, self.num_experts) for _ in layers])
        self.experts_in = nn.ParameterList([matrices() for _ in layers])
        self.experts_out = nn.ParameterList([matrices() for _ in layers])

    def perceptron(self, layer, inputs):
        routes = self.routers[layer](inputs)
        top, experts = routes.topk(2, -1)
        gates = torch.zeros_like(routes).scatter(-1, experts, top.softmax(-1))
        if "expert_shift" in self.flags:
            gates = gates.roll(self.flags["expert_shift"], -1)
        inner = torch.einsum("bld,edk->blek", inputs, self.experts_in[layer])
        return torch.einsum("blek,ekd,ble->bld", F.gelu(inner), self.experts_out[layer], gates)


class Window(Policy):
    """The prompt, the last `window` tokens and the place, through a perceptron."""

    def __init__(self, task, width=24, window=3, num_outputs=None):
        super().__init__(task, width)
        self.window = window
        self.positions = nn.Embedding(self.num_places, width)
        self.inner = nn.Linear(task.P * width + window * width + width, 2 * width)
        self.outer = nn.Linear(2 * width, width)
        self.add_head(num_outputs)

    def body(self, inputs, last):
        rows, length = inputs.shape[:2]
        prompt = inputs[:, : self.P].reshape(rows, 1, -1).expand(-1, length, -1)
        padded = F.pad(inputs, (0, 0, self.window - 1, 0))
        recent = torch.cat([padded[:, offset : offset + length] for offset in range(self.window)], -1)
        places = self.positions(torch.arange(length)).expand(rows, -1, -1)
        features = torch.cat([prompt, recent, places], -1)
        if last:
            features = features[:, -1:]
        return F.gelu(self.outer(F.gelu(self.inner(features))))


class StateSpace(Policy):
    """A gated linear recurrence whose decays depend on the input."""

    def __init__(self, task, width=32, num_layers=2, num_outputs=None):
        super().__init__(task, width)
        layers = range(num_layers)
        self.inputs = nn.ModuleList([nn.Linear(width, 3 * width) for _ in layers])
        self.decays = nn.ParameterList([nn.Parameter(torch.linspace(-1, 4, width)) for _ in layers])
        self.outputs = nn.ModuleList([nn.Linear(width, width) for _ in layers])
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in layers])
        self.add_head(num_outputs)

    def body(self, inputs, last):
        hidden = inputs
        for layer in range(len(self.inputs)):
            written, gate, change = self.inputs[layer](self.norms[layer](hidden)).chunk(3, -1)
            decay = torch.sigmoid(self.decays[layer] + change)
            state, states = torch.zeros_like(written[:, 0]), []
            for t in range(inputs.shape[1]):
                state = decay[:, t] * state + (1 - decay[:, t]) * written[:, t]
                states.append(state)
            hidden = hidden + self.outputs[layer](torch.stack(states, 1) * F.silu(gate))
        return hidden


class Convolution(Policy):
    """Four dilated convolutions over the past."""

    dilations = (1, 2, 4, 1)

    def __init__(self, task, width=40, num_outputs=None):
        super().__init__(task, width)
        self.positions = nn.Embedding(self.num_places, width)
        self.convolutions = nn.ModuleList([nn.Conv1d(width, width, 3) for _ in self.dilations])
        self.add_head(num_outputs)

    def body(self, inputs, last):
        hidden = (inputs + self.positions(torch.arange(inputs.shape[1]))).transpose(1, 2)
        for layer, dilation in zip(self.convolutions, self.dilations, strict=True):
            padded = F.pad(hidden, (2 * dilation, 0))
            hidden = hidden + F.gelu(F.conv1d(padded, layer.weight, layer.bias, dilation=dilation))
        return hidden.transpose(1, 2)


# ---------------------------------------------------------------- sampling and scoring
@torch.no_grad()
def sample(
    policy, task, prompts, rng, max_tokens, temperature=1.0, stop=(), max_turns=99, sampler=None, tool=None, budget=None
):
    """Sequences [B, L], logprobs, masks of the responses and of the policy's own tokens [B, T], and how rows ended [B].

    A row ends with 0 (no room), 1 (EOS) or 2 (a stop token). `sampler` gives other logits to sample from, `tool` other
    answers of the tool, `budget` other limits of the rows.
    """
    B, P, T = len(prompts), prompts.shape[1], task.T
    sequences = torch.zeros(B, P + T, dtype=torch.long)
    sequences[:, :P] = prompts
    logprobs = torch.zeros(B, T)
    mask = torch.zeros(B, T, dtype=torch.bool)
    own = torch.ones(B, T, dtype=torch.bool)
    alive = torch.ones(B, dtype=torch.bool)
    done = torch.zeros(B, dtype=torch.long)
    num_calls = torch.zeros(B, dtype=torch.long)
    uniforms = torch.rand(B, T, generator=rng)
    limits = torch.full((B,), max_tokens) if budget is None else budget(prompts).clamp(max=max_tokens)
    for t in range(T):
        alive = alive & (t < limits)
        if not alive.any():
            break
        logits = policy(sequences[:, : P + t], last=True)[:, -1] / temperature
        chances = (sampler(logits, sequences[:, P : P + t]) if sampler else logits).softmax(-1)
        tokens = (chances.cumsum(-1) < uniforms[:, t : t + 1] * 0.999999).sum(-1).clamp(max=policy.V - 1)
        forced = task.forced(prompts, sequences[:, P:], t, num_calls, max_turns, tool) if task.has_tool else None
        if forced is not None:
            called, values = forced
            called = called & alive
            no_turn_left = called & (num_calls >= max_turns)
            alive = alive & ~no_turn_left
            called = called & ~no_turn_left
            tokens = torch.where(called, values, tokens)
            own[:, t] = ~called
            num_calls = num_calls + called.long()
        sequences[:, P + t] = torch.where(alive, tokens, 0)
        sampled = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        logprobs[:, t] = torch.where(alive, sampled, torch.zeros(B))
        mask[:, t] = alive
        if not task.pays_each_token:
            for token, code in ((EOS, 1), *((token, 2) for token in stop)):
                ends = alive & (tokens == token)
                done[ends] = code
                alive = alive & ~ends
    if task.pays_each_token:
        done[:] = (mask.sum(1) >= task.size).long()
    return sequences, logprobs, mask, own & mask, done


def score(policy, sequences, P, temperature=1.0):
    """Logprobs and entropies of the response tokens [B, T], and the logits [B, T, V]."""
    logits = policy(sequences[:, :-1])[:, P - 1 :] / temperature
    logprobs = logits.log_softmax(-1)
    entropies = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(2, sequences[:, P:, None])[..., 0], entropies, logits


# ---------------------------------------------------------------- pretraining
def demonstrations(task, prompts, rng):
    """Responses with their end, [B, T]."""
    if task.has_several_answers:
        return task.demonstrations(prompts, rng)
    answers, lengths = task.answer(prompts)
    targets = F.pad(answers, (0, task.T - answers.shape[1]))
    if not task.pays_each_token:
        targets[torch.arange(len(prompts)), lengths] = EOS
    return targets


def pretrained(family, cache):
    """The policy trained on answers with wrong tokens among the labels; its weights are kept in folder `cache`."""
    path = cache / f"{family.name}.pt"
    task = family.task
    torch.manual_seed(1)
    policy = family.policy(task, **family.policy_options)
    if path.exists():
        policy.load_state_dict(torch.load(path))
        return policy
    optimizer = torch.optim.Adam(policy.parameters(), lr=family.pretraining_rate)
    for i in range(family.pretraining_steps):
        rng = generator(family.name, "sft", i)
        for group in optimizer.param_groups:
            group["lr"] = family.pretraining_rate * min(1, 1.2 * (1 - i / family.pretraining_steps) + 0.02)
        prompts = task.prompts(rng, 128)
        targets = demonstrations(task, prompts, rng)
        inside = targets != PAD
        noise = torch.randint(EOS, task.V, targets.shape, generator=rng)
        noise = torch.where(noise < FIRST, torch.randint(FIRST, task.V, targets.shape, generator=rng), noise)
        early = torch.rand(targets.shape, generator=rng) < 0.25
        noise = torch.where(early, torch.full_like(noise, EOS), noise)
        wrong = (torch.rand(targets.shape, generator=rng) < family.pretraining_noise) & inside
        labels = torch.where(wrong, noise, targets)
        logits = policy(torch.cat([prompts, targets], 1)[:, :-1])[:, task.P - 1 :]
        loss = F.cross_entropy(logits[inside], labels[inside])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(policy.state_dict(), path)
    return policy


# ---------------------------------------------------------------- the loop
@dataclass(frozen=True, slots=True, kw_only=True)
class Minibatch:
    """The rows of one update under the current weights."""

    rows: torch.Tensor
    """[n] numbers of the rows in the batch."""
    logprobs: torch.Tensor
    """[n, T], nats."""
    entropies: torch.Tensor
    """[n, T], nats."""
    logits: torch.Tensor
    """[n, T, V]."""
    mask: torch.Tensor
    """[n, T] 1.0 at tokens of the loss."""
    aggregation: str
    """The name of the average over tokens."""

    def average(self, values):
        """The loss's average over tokens of `values` [n, T], which are 0 outside the mask."""
        if self.aggregation == "token_mean":
            return values.sum() / self.mask.sum().clamp(min=1)
        if self.aggregation == "sequence_mean":
            return (values.sum(1) / self.mask.sum(1).clamp(min=1)).mean()
        if self.aggregation == "sequence_sum":
            return values.sum(1).mean()
        return values.sum() / (len(self.rows) * values.shape[1])

    def mean_entropy(self):
        return (self.entropies * self.mask).sum() / self.mask.sum()


def make_optimizer(family, policy):
    """The family's optimizer."""
    if family.optimizer == "sgd":
        return torch.optim.SGD(policy.parameters(), lr=family.learning_rate, momentum=0.9)
    kind = torch.optim.AdamW if family.optimizer == "adamw" else torch.optim.Adam
    return kind(
        policy.parameters(),
        lr=family.learning_rate,
        betas=family.betas,
        eps=family.eps,
        weight_decay=family.weight_decay,
    )


def whitened(advantages, mask, floor):
    """Advantages [B, T] divided by their root mean square over the mask."""
    return advantages / (((advantages**2).sum() / mask.sum()).sqrt() + floor)


def look_up(key, values):
    """The value of that key; a key can be a function of all values."""
    return key(values) if callable(key) else values[key]


class Run:
    """A run, and what a fault's hooks see of it: the batch of the step, models, optimizer, settings.

    Of the batch: prompts, responses, rollout_logprobs, mask and own (tokens of the response, of the policy itself),
    done and lengths. `memory` is what a fault keeps from step to step, `kept_versions` are weights that it goes on
    using.
    """

    def __init__(self, family, fault, trace, cache):
        self.family, self.fault, self.task, self.seed = family, fault, family.task, fault.seed
        self.key = (family.name, fault.seed)
        self.step = 0
        self.policy = pretrained(family, cache)
        self.engine = copy.deepcopy(self.policy)
        self.reference = copy.deepcopy(self.policy)
        self.initial = copy.deepcopy(self.policy.state_dict())
        self.optimizer = make_optimizer(family, self.policy)
        if family.advantages == "gae":
            torch.manual_seed(2)
            self.critic = family.policy(self.task, num_outputs=1, **family.policy_options)
            self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), lr=2e-3)
        self.versions = {0: self.weights()}
        self.baseline = None
        self.memory, self.kept_versions = {}, ()
        self.pool = self.task.prompts(generator(family.name, "pool"), family.pool_size) if family.pool_size else None
        self.heldout = self.task.prompts(generator(family.name, "heldout"), family.num_evaluated)
        self.hyperparameters = None
        self.recorder = Recorder(trace)
        self.add_loss()

    def go(self):
        """Trains to the last step; the evaluations."""
        evaluations = []
        for step in range(1, self.family.steps + 1):
            self.step = step
            self.settings = self.current_settings()
            self.add_hyperparameters()
            self.take_prompts()
            self.choose_versions()
            self.roll_out()
            self.judge()
            self.rescore()
            self.estimate_advantages()
            self.set_optimizer()
            self.act("before_update")
            metrics = self.update()
            self.act("after_update")
            self.keep_weights()
            self.add_batch()
            logged = self.logged(metrics)
            if step % self.family.evaluate_every == 0:
                evaluations.append(self.evaluate())
                if self.family.records.evaluation:
                    logged[self.family.records.evaluation] = evaluations[-1]
            self.recorder.add_metrics(step, logged)
            if self.family.records.optimizer:
                self.recorder.add_optimizer(step, self.optimizer)
        self.recorder.close()
        return evaluations

    # ------------------------------------------------------------ the fault
    @property
    def elapsed(self):
        """The steps of the fault so far, this one included; not positive before its first."""
        return self.step - self.fault.start + 1

    def hook(self, name):
        """The fault's hook of that name, without its first argument, the run; None where there is none at this step."""
        function = self.fault.hooks.get(name) if self.elapsed > 0 else None
        return functools.partial(function, self) if function else None

    def altered(self, name, value, *others):
        """The value as the hook of that name changes it."""
        hook = self.hook(name)
        return hook(value, *others) if hook else value

    def act(self, name):
        """Calls the hook of that name, if there is one."""
        hook = self.hook(name)
        if hook:
            hook()

    def current_settings(self):
        """The family's settings, changed by the fault; a change is a value or a function of elapsed steps and value."""
        settings = self.family.settings()
        if self.elapsed > 0:
            for name, change in self.fault.settings.items():
                settings[name] = change(self.elapsed, settings[name]) if callable(change) else change
        return settings

    # ------------------------------------------------------------ sampling
    def weights(self):
        """A copy of the policy's weights."""
        return {name: tensor.clone() for name, tensor in self.policy.state_dict().items()}

    def keep_weights(self):
        """Keeps the weights of the last 60 steps, of the first 20 and those that the fault uses."""
        self.versions[self.step] = self.weights()
        for version in list(self.versions):
            if 20 < version < self.step - 60 and version not in self.kept_versions:
                del self.versions[version]

    def take_prompts(self):
        """The prompts as the engine sees them, and as the verifier knows them, one row a response."""
        n, G = self.settings["num_prompts"], self.settings["group_size"]
        rng = generator(self.key, "prompts", self.step)
        if self.pool is None:
            prompts = self.task.prompts(rng, n)
        else:
            prompts = self.pool[torch.randperm(len(self.pool), generator=rng)[:n]]
        prompts = self.altered("prompts", prompts)
        self.asked = prompts.repeat_interleave(G, 0)
        self.prompts = self.altered("shown", prompts).repeat_interleave(G, 0)
        self.num_rows, self.group_size = len(self.prompts), G

    def choose_versions(self):
        """The versions of the weights that sample the rows, and those that the trace names."""
        self.current_version = self.step - 1
        wanted = torch.full((self.num_rows,), max(0, self.current_version - self.settings["lag"]))
        self.row_versions, self.named_versions = self.altered("sync", (wanted, wanted))

    def load_engine(self, version):
        """Sends weights to the engine."""
        weights = self.versions[version]
        if self.settings["bf16"]:
            weights = {name: tensor.bfloat16().float() for name, tensor in weights.items()}
        weights = self.altered("engine", {name: tensor.clone() for name, tensor in weights.items()})
        self.engine.load_state_dict(weights)

    def roll_out(self):
        """Samples the responses; each version samples all rows, and those that are its own are taken."""
        settings = self.settings
        self.engine.flags = {"bf16": True} if settings["bf16"] else {}
        if self.elapsed > 0:
            self.engine.flags.update(self.fault.engine_flags)
        self.engine.eval()
        batch = None
        for version in sorted(set(self.row_versions.tolist())):
            self.load_engine(version)
            out = sample(
                self.engine,
                self.task,
                self.prompts,
                generator(self.key, "sample", self.step),
                settings["max_tokens"],
                settings["temperature"],
                settings["stop"],
                settings["max_turns"],
                self.hook("sampler"),
                self.hook("tool"),
                self.hook("budget"),
            )
            if batch is not None:
                rows = self.row_versions == version
                out = tuple(
                    torch.where(rows[:, None] if new.dim() > 1 else rows, new, old)
                    for new, old in zip(out, batch, strict=True)
                )
            batch = out
        self.sequences, self.rollout_logprobs, self.mask, self.own, self.done = batch
        self.responses, self.lengths = self.sequences[:, self.task.P :], self.mask.sum(1)

    # ------------------------------------------------------------ rewards and scores
    def judge(self):
        """The rewards, [B]."""
        settings, (factor, offset) = self.settings, self.family.scale
        self.seen = self.altered("decode", self.responses)
        scores = self.task.score(self.asked, self.seen, self.lengths, self.done).float()
        scores = self.altered("reward", scores, self.seen)
        rewards = scores.float() * factor + offset
        if settings["length_coefficient"]:
            rewards = rewards + settings["length_coefficient"] * factor * self.lengths
        if settings["overlong"] is not None:
            too_long = (self.lengths - settings["overlong"]).clamp(min=0)
            rewards = rewards - factor * settings["overlong_penalty"] * too_long
        rewards = self.altered("length", rewards)
        self.rewards = self.altered("pair_rewards", rewards)

    @torch.no_grad()
    def rescore(self):
        """Logprobs of the trainer and of the reference, [B, T], 0 outside the response, and the mask of the loss."""
        P, temperature = self.task.P, self.settings["temperature"]
        self.policy.flags = dict(self.fault.trainer_flags) if self.elapsed > 0 else {}
        self.policy.train()
        torch.manual_seed(self.seed * 1000 + self.step)
        self.train_sequences = torch.cat([self.prompts, self.altered("retoken", self.responses)], 1)
        logprobs, self.entropies, _ = score(self.policy, self.train_sequences, P, temperature)
        self.train_logprobs = torch.where(self.mask, logprobs, torch.zeros_like(logprobs))
        if self.family.kl_coefficient:
            self.act("reference")
            logprobs = score(self.reference, self.train_sequences, P, temperature)[0]
            self.reference_logprobs = torch.where(self.mask, logprobs, torch.zeros_like(logprobs))
        self.rollout_logprobs = self.altered("pair_rollout", self.rollout_logprobs)
        self.loss_mask = self.altered("mask", self.own.clone())

    # ------------------------------------------------------------ advantages
    def estimate_advantages(self):
        """Advantages as the family's estimator gives them, [B] or [B, T], and of each token of the loss, [B, T]."""
        mask = self.loss_mask.float()
        estimators = {
            "grpo": self.group_normalized,
            "rloo": self.left_one_out,
            "running": self.above_running_mean,
            "batch": self.batch_normalized,
            "reward_to_go": self.rewards_to_go,
            "gae": self.generalized,
        }
        advantages = estimators[self.family.advantages](mask)
        advantages = self.altered("advantages", advantages, self.rewards)
        self.advantages = self.altered("pair_advantages", advantages)
        by_token = self.advantages if self.advantages.dim() > 1 else self.advantages[:, None].expand(-1, self.task.T)
        self.token_advantages = by_token * mask

    def group_normalized(self, mask):
        groups = self.rewards.view(-1, self.group_size)
        advantages = groups - groups.mean(1, keepdim=True)
        if self.settings["scale_by_std"]:
            advantages = advantages / (groups.std(1, keepdim=True) + (1e-2 if self.family.scale[0] <= 1 else 1e-1))
        return advantages.reshape(-1)

    def left_one_out(self, mask):
        groups = self.rewards.view(-1, self.group_size)
        others = (groups.sum(1, keepdim=True) - groups) / (self.group_size - 1)
        return (groups - others).reshape(-1) / self.family.scale[0]

    def above_running_mean(self, mask):
        mean = self.rewards.mean().item()
        baseline = self.baseline if self.baseline is not None else mean
        self.baseline = 0.9 * baseline + 0.1 * mean
        return (self.rewards - baseline) / self.family.scale[0]

    def batch_normalized(self, mask):
        return (self.rewards - self.rewards.mean()) / (self.rewards.std() + 1e-2 * self.family.scale[0])

    def rewards_to_go(self, mask):
        """The discounted rewards of the tokens from each place on, above their mean; sets the rewards of the rows."""
        factor, offset = self.family.scale
        paid = self.task.token_scores(self.prompts, self.seen) * mask
        paid = self.altered("token_rewards", paid)
        paid = self.altered("pair_token_rewards", paid)
        self.rewards = paid.sum(1) / 8 * factor + offset
        to_go, advantages = torch.zeros(self.num_rows), torch.zeros(self.num_rows, self.task.T)
        for t in reversed(range(self.task.T)):
            to_go = paid[:, t] + self.settings["gamma"] * to_go
            advantages[:, t] = to_go
        advantages = (advantages - (advantages * mask).sum(0) / mask.sum(0).clamp(min=1)) * mask
        return whitened(advantages, mask, 0.05)

    def generalized(self, mask):
        """Generalized advantage estimates, whitened; sets the returns that the critic learns."""
        B, T, gamma = self.num_rows, self.task.T, self.settings["gamma"]
        with torch.no_grad():
            values = self.critic(self.sequences[:, :-1])[:, self.task.P - 1 :, 0] * mask
        paid = torch.zeros(B, T)
        paid[torch.arange(B), (self.lengths - 1).clamp(min=0)] = self.rewards
        paid = paid - self.settings["kl_coefficient"] * (self.train_logprobs - self.reference_logprobs) * mask
        next_values = torch.cat([values[:, 1:], torch.zeros(B, 1)], 1)
        advantages, last = torch.zeros(B, T), torch.zeros(B)
        for t in reversed(range(T)):
            surprise = paid[:, t] + gamma * next_values[:, t] - values[:, t]
            last = (surprise + gamma * 0.95 * last) * mask[:, t]
            advantages[:, t] = last
        self.returns = advantages + values
        mean = (advantages * mask).sum() / mask.sum()
        return whitened((advantages - mean) * mask, mask, 1e-2)

    # ------------------------------------------------------------ the update
    def set_optimizer(self):
        """Writes the settings of this step into the optimizer."""
        settings = self.settings
        progress = (self.step - 1) / self.family.steps
        rate = settings["learning_rate"]
        if settings["schedule"] == "cosine":
            rate = rate * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))
        elif settings["schedule"] == "grow":
            rate = rate * 10 ** (3.0 * progress)
        self.learning_rate = rate
        for group in self.optimizer.param_groups:
            group["lr"] = rate
            group["weight_decay"] = settings["weight_decay"]
            if "betas" in group:
                group["betas"], group["eps"] = (settings["beta1"], settings["beta2"]), settings["eps"]
            elif self.family.optimizer == "sgd":
                group["momentum"] = settings["beta1"]

    def update(self):
        """Updates the policy, and the critic if there is one; metrics of the last minibatch, gradient norms of all."""
        family, settings = self.family, self.settings
        mask = self.loss_mask.float()
        metrics, norms = {}, []
        for epoch in range(settings["epochs"]):
            order = torch.arange(self.num_rows)
            if family.minibatches > 1:
                order = torch.randperm(self.num_rows, generator=generator(self.key, "mb", self.step, epoch))
            for rows in order.chunk(family.minibatches):
                sequences = self.train_sequences[rows]
                logprobs, entropies, logits = score(self.policy, sequences, self.task.P, settings["temperature"])
                minibatch = Minibatch(
                    rows=rows,
                    logprobs=logprobs,
                    entropies=entropies,
                    logits=logits,
                    mask=mask[rows],
                    aggregation=family.aggregation,
                )
                ratios = self.ratios(minibatch)
                loss = self.loss(minibatch, ratios)
                if settings["clear_gradients"]:
                    self.optimizer.zero_grad()
                loss.backward()
                self.act("gradients")
                norm = nn.utils.clip_grad_norm_(self.policy.parameters(), settings["max_grad_norm"]).item()
                norms.append(norm)
                if math.isfinite(norm):
                    self.optimizer.step()
                if family.advantages == "gae":
                    metrics["value_loss"] = self.update_critic(minibatch)
                clipped = ((ratios - 1) > settings["clip_high"]) | ((1 - ratios) > settings["clip_low"])
                clipped = (clipped.float() * minibatch.mask).sum().item()
                metrics["clip_fraction"] = clipped / max(1, minibatch.mask.sum().item())
                metrics["loss"] = loss.item()
        return {**metrics, "grad_norm": float(np.mean(norms))}

    def ratios(self, minibatch):
        """Importance ratios, [n, T], of tokens or of the sequences that they are in."""
        sampled = self.rollout_logprobs if self.family.denominator == "rollout" else self.train_logprobs
        logs = (minibatch.logprobs - sampled[minibatch.rows]) * minibatch.mask
        logs = self.altered("log_ratios", logs, minibatch)
        if self.family.level == "sequence_mean":
            by_sequence = (logs.sum(1) / minibatch.mask.sum(1).clamp(min=1))[:, None]
            return by_sequence.exp().expand_as(logs)
        return logs.clamp(-20, 20).exp()

    def objective(self, minibatch, ratios):
        """What each token adds to the objective, [n, T]."""
        family, settings, rows = self.family, self.settings, minibatch.rows
        advantages = self.token_advantages[rows]
        if family.loss == "ppo_clip":
            clipped = ratios.clamp(1 - settings["clip_low"], 1 + settings["clip_high"])
            objective = torch.minimum(ratios * advantages, clipped * advantages)
        elif family.loss == "cispo":
            objective = ratios.detach().clamp(max=settings["clip_high"]) * advantages * minibatch.logprobs
        else:
            objective = ratios * advantages
        if family.correction == "sequence_truncate":
            logs = (self.train_logprobs[rows] - self.rollout_logprobs[rows]) * minibatch.mask
            objective = objective * logs.sum(1, keepdim=True).exp().clamp(max=family.correction_cap)
        return objective * minibatch.mask

    def loss(self, minibatch, ratios):
        """The loss with its terms of KL and of entropy."""
        family, settings = self.family, self.settings
        loss = -minibatch.average(self.objective(minibatch, ratios))
        if family.kl_coefficient and family.kl_mode == "loss":
            logs = self.reference_logprobs[minibatch.rows] - minibatch.logprobs
            logs = logs.clamp(-15, 15) * minibatch.mask
            kl = logs.exp() - 1 - logs
            loss = loss + settings["kl_coefficient"] * minibatch.average(kl * minibatch.mask)
        if settings["entropy_coefficient"]:
            entropy = minibatch.average(minibatch.entropies * minibatch.mask)
            loss = loss - settings["entropy_coefficient"] * entropy
        return self.altered("loss", loss, minibatch)

    def update_critic(self, minibatch):
        """Updates the critic; its loss."""
        values = self.critic(self.sequences[minibatch.rows, :-1])[:, self.task.P - 1 :, 0]
        errors = (values - self.returns[minibatch.rows]) ** 2
        loss = (errors * minibatch.mask).sum() / minibatch.mask.sum()
        self.critic_optimizer.zero_grad()
        loss.backward()
        self.critic_optimizer.step()
        return loss.item()

    def evaluate(self):
        """Mean score of responses to held-out prompts, sampled without an engine's faults, in units of the reward."""
        self.policy.flags = {}
        self.policy.eval()
        rng = generator(self.family.name, "eval")
        sequences, _, mask, _, done = sample(self.policy, self.task, self.heldout, rng, self.task.T)
        scores = self.task.score(self.heldout, sequences[:, self.task.P :], mask.sum(1), done)
        factor, offset = self.family.scale
        return scores.float().mean().item() * factor + offset

    # ------------------------------------------------------------ recording
    def add_loss(self):
        """Records the loss, if the family does."""
        family = self.family
        if not family.records.loss:
            return
        loss = Loss(
            kind=family.loss,
            level=family.level,
            clip_low=family.clip[0],
            clip_high=family.clip[1],
            denominator=family.denominator,
            aggregation=family.aggregation,
            kl_coefficient=family.kl_coefficient if family.kl_mode == "loss" else 0.0,
            correction=family.correction,
            correction_high=family.correction_cap if family.correction != "none" else None,
        )
        self.recorder.add_loss(loss)

    def add_hyperparameters(self):
        """Records settings under the family's names: at the first step, later what changed, if the family is live."""
        family, records = self.family, self.family.records
        if records.hyperparameters is None:
            return
        values = {name: look_up(key, self.settings) for name, key in family.hyperparameters.items()}
        if family.kl_mode == "loss" and records.loss and family.kl_coefficient:
            values["loss/kl_coefficient"] = self.settings["kl_coefficient"]
        if self.hyperparameters is None:
            self.recorder.add_hyperparameters(values)
            self.hyperparameters = values
        elif records.hyperparameters == "live":
            changed = {name: value for name, value in values.items() if self.hyperparameters.get(name) != value}
            if changed:
                self.recorder.add_hyperparameters(changed, step=self.step)
                self.hyperparameters = values

    def add_batch(self):
        """Records sequences and scores, with what the family records of them."""
        family, records, settings = self.family, self.family.records, self.settings
        extra = {}
        if records.groups:
            extra["group_ids"] = [f"{self.step}-{row // self.group_size}" for row in range(self.num_rows)]
        if records.advantages:
            by_token = self.advantages.dim() > 1
            extra["advantage"] = (self.token_advantages if by_token else self.advantages).numpy()
        if records.versions:
            extra["policy_version"] = self.named_versions.tolist()
        if records.finish:
            extra["finish_reason"] = ["stop" if done else "length" for done in (self.done > 0).tolist()]
        if records.hyperparameters:
            extra["temperature"], extra["max_tokens"] = settings["temperature"], int(settings["max_tokens"])
        if self.task.has_tool or records.mask or self.hook("mask"):
            extra["response_mask"] = self.loss_mask.long().numpy()
        batch = self.recorder.add_sequences(
            step=self.step,
            prompt_ids=self.prompts.numpy(),
            prompt_attention_mask=np.ones(self.prompts.shape, int),
            response_ids=self.responses.numpy(),
            response_attention_mask=self.mask.numpy().astype(int),
            reward=self.rewards.numpy().astype(float),
            **extra,
        )
        scored = {"scored_mask": self.own.numpy().astype(int)} if self.task.has_tool else {}
        version = {"policy_version": self.current_version} if records.versions else {}
        entropy = {"entropy": (self.entropies * self.loss_mask.float()).numpy()} if records.entropy else {}
        self.recorder.add_scores("rollout", batch, logprobs=self.rollout_logprobs.clamp(max=0).numpy(), **scored)
        train_logprobs = self.train_logprobs.clamp(max=0).numpy()
        self.recorder.add_scores("train", batch, logprobs=train_logprobs, **version, **entropy)
        if family.kl_coefficient:
            self.recorder.add_scores("reference", batch, logprobs=self.reference_logprobs.clamp(max=0).numpy())

    def logged(self, metrics):
        """The metrics that the family logs, under its names."""
        mask = self.loss_mask.float()
        num_tokens = max(mask.sum().item(), 1)
        mismatch = (self.rollout_logprobs - self.train_logprobs) * mask
        metrics = metrics | {
            "reward": self.rewards.mean().item(),
            "reward_std": self.rewards.std().item(),
            "entropy": (self.entropies * mask).sum().item() / num_tokens,
            "learning_rate": self.learning_rate,
            "length": self.lengths.float().mean().item(),
            "truncated": (self.done == 0).float().mean().item(),
            "mismatch_kl": (mismatch.sum() / num_tokens).item(),
            "lag": float((self.current_version - self.named_versions.float()).mean()),
        }
        if self.family.kl_coefficient:
            logs = (self.reference_logprobs - self.train_logprobs) * mask
            metrics["kl"] = (((logs.exp() - 1 - logs) * mask).sum() / num_tokens).item()
        return {name: look_up(key, metrics) for name, key in self.family.metrics.items()}


def kept(evaluations):
    """Mean of the last fifth over that of the best fifth, of levels above min(lowest, 0)."""
    size = max(1, len(evaluations) // 5)
    lowest = min(*evaluations, 0)
    levels = [value - lowest for value in evaluations]
    best = max(np.mean(levels[i : i + size]) for i in range(0, len(levels) - size + 1, size))
    return float(np.mean(levels[-size:]) / max(best, 1e-9))
