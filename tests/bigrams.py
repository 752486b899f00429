"""Traces of a language model that is a table: the logits of a token are a row, chosen by the token before.

What a pass gives is computed from such a table, so that a fault is planted by computing with it.
"""

from dataclasses import dataclass, field

import numpy as np
from tim_trace.tracer.recorder import Recorder

VOCABULARY = 60
PROMPT = 4


def table(seed=0, sharpness=2.5):
    """[V, V] float32 logits."""
    return (np.random.default_rng(seed).normal(size=(VOCABULARY, VOCABULARY)) * sharpness).astype(np.float32)


def moved(logits, seed, size):
    """The table after an update."""
    change = np.random.default_rng(seed).normal(size=logits.shape) * size
    return (logits + change).astype(np.float32)


def bfloat16(values):
    """Rounded to bfloat16, as float32."""
    bits = np.asarray(values, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def log_softmax(logits):
    """[..., V] in float64."""
    wide = np.asarray(logits, np.float64)
    wide = wide - wide.max(axis=-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


def top_p(rows, mass):
    """Logits of what nucleus sampling keeps; the others are far below."""
    chances = np.exp(rows - rows.max(axis=-1, keepdims=True))
    chances /= chances.sum(axis=-1, keepdims=True)
    order = np.argsort(-chances, axis=-1)
    ranked = np.take_along_axis(chances, order, axis=-1)
    kept = np.cumsum(ranked, axis=-1) - ranked < mass
    mask = np.zeros_like(kept)
    np.put_along_axis(mask, order, kept, axis=-1)
    return np.where(mask, rows, -1e9)


@dataclass
class Step:
    """Sequences that were sampled at one step."""

    prompts: list
    responses: list
    groups: list
    logits: np.ndarray

    def scored(self, logits=None, process=lambda rows: rows):
        """The logprobs of every response under a table, whose rows are processed first: one array a sequence."""
        scores = log_softmax(process(self.logits if logits is None else logits))
        out = []
        for prompt, response in zip(self.prompts, self.responses, strict=True):
            before = np.concatenate([prompt[-1:], response[:-1]]).astype(int)
            out.append(scores[before, response].astype(np.float32))
        return out

    def entropies(self):
        """Entropy of the distribution of every token: one array a sequence."""
        scores = log_softmax(self.logits)
        entropy = -(np.exp(scores) * scores).sum(axis=-1)
        rows = zip(self.prompts, self.responses, strict=True)
        return [entropy[np.concatenate([p[-1:], r[:-1]]).astype(int)].astype(np.float32) for p, r in rows]


def sample(logits, seed, *, groups=8, in_group=4, longest=60, process=lambda rows: rows):
    """Draw responses from a table, in groups that share a prompt."""
    draw = np.random.default_rng(seed)
    chances = np.exp(log_softmax(process(logits)))
    prompts, responses, names = [], [], []
    for group in range(groups):
        prompt = draw.integers(0, VOCABULARY, PROMPT)
        for _ in range(in_group):
            tokens = [int(prompt[-1])]
            for _ in range(int(draw.integers(longest // 3, longest))):
                tokens.append(int(draw.choice(VOCABULARY, p=chances[tokens[-1]])))
            prompts.append(prompt)
            responses.append(np.array(tokens[1:]))
            names.append(f"prompt-{group}")
    return Step(prompts, responses, names, logits)


@dataclass
class Recording:
    """What a fault does to the steps of a run, and what the run says of itself."""

    rollout: object = lambda step, number: step.scored()
    train: object = lambda step, number: step.scored()
    weights: object = lambda number: table()
    process: object = lambda rows: rows
    """What sampling does to the logits."""
    contracts: dict = field(default_factory=dict)
    sequences: object = lambda step, number: {}
    """More columns of the sequences."""
    entropy: bool = True
    steps: int = 4
    options: dict = field(default_factory=dict)
    """Of `sample`."""

    def write(self, path):
        """Record the run and return its path."""
        with Recorder(path) as recorder:
            for name, contract in self.contracts.items():
                recorder.add_contract(name, contract)
            for number in range(1, self.steps + 1):
                step = sample(self.weights(number), 100 + number, process=self.process, **self.options)
                more = self.sequences(step, number)
                batch = recorder.add_sequences(
                    step=number,
                    prompt_ids=[prompt.tolist() for prompt in step.prompts],
                    response_ids=[response.tolist() for response in step.responses],
                    group_ids=step.groups,
                    **more,
                )
                recorder.add_scores("rollout", batch, **_scores(self.rollout(step, number)))
                train = _scores(self.train(step, number))
                recorder.add_scores("train", batch, **train, entropy=step.entropies() if self.entropy else None)
        return path


def _scores(values):
    """Logprobs, whose NaN are holes."""
    holes = any(np.isnan(row).any() for row in values)
    return {
        "logprobs": [np.nan_to_num(row, nan=0.0) if holes else row for row in values],
        "scored_mask": [~np.isnan(row) for row in values] if holes else None,
    }


FP32 = {"engine": "trl", "model": {"dtypes": {"float32": 1}, "class": "tests.Table"}}
VLLM_FP32 = {"engine": "vllm", "config": {"model_config": {"dtype": "torch.float32"}}}
VLLM_BF16 = {"engine": "vllm", "config": {"model_config": {"dtype": "torch.bfloat16"}}}
BOTH_FP32 = {"train": FP32, "rollout": VLLM_FP32}


def in_float32(step, number):
    """The same table, summed in float32: an engine that rounds."""
    wide = step.logits - step.logits.max(axis=-1, keepdims=True)
    scores = wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True, dtype=np.float32))
    rows = zip(step.prompts, step.responses, strict=True)
    return [scores[np.concatenate([p[-1:], r[:-1]]).astype(int), r] for p, r in rows]


def in_bfloat16(step, number):
    """The logits rounded to bfloat16."""
    return step.scored(bfloat16(step.logits))


HOT = Recording(
    rollout=lambda step, number: step.scored(),
    train=lambda step, number: step.scored(step.logits / 0.9),
    sequences=lambda step, number: {"temperature": 0.9},
)
"""The engine divides its logits by the sampling temperature and returns raw logprobs; the trainer divides too."""
