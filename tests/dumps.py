"""Dumps as the frameworks write them, field by field, of samples whose numbers are known."""

import hashlib
import json
import pickle
import sys
import types
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from io import BytesIO

import msgspec
import numpy as np
import torch


@dataclass
class Sample:
    """What each side thought of one response."""

    index: int
    prompt: np.ndarray
    response: np.ndarray
    mask: np.ndarray
    """Whether a token counts; the first does, as the frameworks' responses begin with a sampled token."""
    rollout: np.ndarray
    train: np.ndarray
    reference: np.ndarray
    entropy: np.ndarray
    advantage: float
    reward: float

    @property
    def tokens(self):
        return np.concatenate([self.prompt, self.response])


def make_samples(step, num=6, masked=True):
    draw = np.random.default_rng(step)
    found = []
    for index in range(num):
        length = int(draw.integers(2, 9))
        mask = draw.random(length) < 0.8 if masked else np.ones(length, bool)
        mask[0] = True
        rollout = -draw.exponential(1.0, length).astype(np.float32) - np.float32(0.01)
        train = rollout + draw.normal(0, 0.1, length).astype(np.float32)
        found.append(
            Sample(
                index=100 * step + index,
                prompt=draw.integers(3, 150_000, int(draw.integers(1, 6))),
                response=draw.integers(3, 150_000, length),
                mask=mask,
                rollout=rollout,
                train=train,
                reference=rollout - np.float32(0.5),
                entropy=draw.exponential(1.0, length).astype(np.float32),
                advantage=float(np.float32(draw.normal())),
                reward=float(draw.integers(0, 2)),
            )
        )
    return found


def expected(samples):
    """What `stats` says of samples: over the tokens that count, from the arrays."""
    d = np.concatenate([(s.train.astype(np.float64) - s.rollout.astype(np.float64))[s.mask] for s in samples])
    return {
        "num_tokens": len(d),
        "mean_abs_d": np.abs(d).mean(),
        "rms_d": np.sqrt((d**2).mean()),
        "max_abs_d": np.abs(d).max(),
        "k3": (np.expm1(d) - d).mean(),
    }


def left(rows, width, fill=0):
    return np.stack([np.concatenate([np.full(width - len(row), fill, np.asarray(row).dtype), row]) for row in rows])


def right(rows, width, fill=0):
    return np.stack([np.concatenate([row, np.full(width - len(row), fill, np.asarray(row).dtype)]) for row in rows])


@contextmanager
def classes_of(**modules):
    """Modules with these names, so that pickles can name what is in them: `a__b=dict(C=class)` makes a.b.C."""
    names = []
    for name, members in modules.items():
        name = name.replace("__", ".")
        module = types.ModuleType(name)
        for key, member in members.items():
            member.__module__, member.__qualname__ = name, key
            setattr(module, key, member)
        parts = name.split(".")
        for end in range(1, len(parts)):
            above = ".".join(parts[:end])
            if above not in sys.modules:
                sys.modules[above] = types.ModuleType(above)
                names.append(above)
        before = sys.modules.get(name)
        assert before is None, name
        sys.modules[name] = module
        names.append(name)
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


# verl


class DataProto:
    """State: tensors as bytes of torch.save, other columns, meta_info."""

    def __init__(self, *state):
        self._state = state

    def __getstate__(self):
        return self._state


def _rebuild_tensordict_files_consolidated(metadata, storage):
    raise AssertionError


class Consolidated:
    """A TensorDict that is pickled as one storage and a table of its leaves."""

    def __init__(self, tensors):
        self._tensors = tensors

    def __reduce__(self):
        leaves, content = {}, b""
        for name, tensor in self._tensors.items():
            own = tensor.contiguous().view(torch.uint8).numpy().tobytes()
            padding = -len(own) % 8
            leaves[name] = (
                str(tensor.dtype),
                list(tensor.shape),
                len(content),
                len(content) + len(own) + padding,
                padding,
            )
            content += own + b"\0" * padding
        metadata = {"cls": "TensorDict", "non_tensors": {}, "leaves": leaves, "cls_metadata": {"batch_size": [1]}}
        return _rebuild_tensordict_files_consolidated, (
            metadata,
            torch.frombuffer(bytearray(content), dtype=torch.uint8),
        )


def verl_tensors(samples, *, train=True):
    """The columns of a batch: prompts left-padded, responses right-padded."""
    prompt_width, width = (max(len(getattr(s, name)) for s in samples) for name in ("prompt", "response"))
    there = right([np.ones(len(s.response), np.int64) for s in samples], width)
    prompt_there = left([np.ones(len(s.prompt), np.int64) for s in samples], prompt_width)
    tensors = {
        "prompts": left([s.prompt for s in samples], prompt_width),
        "responses": right([s.response for s in samples], width),
        "attention_mask": np.concatenate([prompt_there, there], axis=1),
        "response_mask": right([s.mask.astype(np.int64) for s in samples], width),
        "rollout_log_probs": right([np.where(s.mask, s.rollout, 0).astype(np.float32) for s in samples], width),
        "token_level_scores": right(
            [np.r_[np.zeros(len(s.response) - 1), s.reward].astype(np.float32) for s in samples], width
        ),
    }
    if train:
        tensors["old_log_probs"] = right([s.train for s in samples], width)
        tensors["advantages"] = right([s.mask * np.float32(s.advantage) for s in samples], width).astype(np.float32)
    return {name: torch.from_numpy(value) for name, value in tensors.items()}


def write_verl(folder, steps, *, method="consolidated", train=True):
    """skip.rollout.dump_dir: <step>/gen_batch.dp beside meta.json."""
    for step, samples in steps.items():
        place = folder / str(step)
        place.mkdir(parents=True)
        tensors = verl_tensors(samples, train=train)
        others = {"uid": np.array([f"g{i // 2}" for i in range(len(samples))], dtype=object)}
        with classes_of(
            verl__protocol={"DataProto": DataProto},
            tensordict___reductions={"_rebuild_tensordict_files_consolidated": _rebuild_tensordict_files_consolidated},
        ):
            if method == "numpy":
                encoded = {
                    name: (str(t.dtype).removeprefix("torch."), t.shape, t.flatten().view(torch.uint8).numpy())
                    for name, t in tensors.items()
                }
                batch = ((len(samples),), None, encoded)
            else:
                buffer = BytesIO()
                torch.save(Consolidated(tensors) if method == "consolidated" else tensors, buffer)
                batch = buffer.getvalue()
            content = pickle.dumps(DataProto(batch, others, {"temperature": 0.7}))
        (place / "gen_batch.dp").write_bytes(content)
        (place / "meta.json").write_text(json.dumps({"global_steps": step}))


# slime and miles


def rollout_sample(s, **more):
    """Sample.to_dict(): lists of the response's length, 0.0 where the mask is 0."""
    return {
        "group_index": s.index // 2, "index": s.index, "prompt": "text", "tokens": s.tokens.tolist(), "response": "text",
        "response_length": len(s.response), "label": None, "reward": s.reward, "loss_mask": s.mask.astype(int).tolist(),
        "weight_versions": ["3", "4"], "rollout_log_probs": np.where(s.mask, s.rollout, 0.0).astype(np.float64).tolist(),
        "rollout_routed_experts": None, "remove_sample": False, "status": "completed", "metadata": {}, **more,
    }  # fmt: skip


def write_rollouts(folder, steps, **more):
    (folder / "rollout_data").mkdir(parents=True, exist_ok=True)
    for step, samples in steps.items():
        record = {"rollout_id": step, "samples": [rollout_sample(s) for s in samples], **more}
        torch.save(record, folder / "rollout_data" / f"{step}.pt")


def write_slime_train(folder, steps, *, shards=2):
    """Format version 2: one file, every data-parallel shard, samples in the rollout's order."""
    (folder / "train_data").mkdir(parents=True, exist_ok=True)
    for step, samples in steps.items():
        rows = [
            {
                "data_parallel_rank": place % shards, "sample_index": s.index, "rollout_position": place,
                "tokens": torch.from_numpy(s.tokens), "response_lengths": len(s.response), "total_lengths": len(s.tokens),
                "loss_masks": torch.from_numpy(s.mask.astype(np.int32)),
                "rollout_log_probs": torch.from_numpy(np.where(s.mask, s.rollout, 0).astype(np.float32)),
                "log_probs": torch.from_numpy(s.train), "ref_log_probs": torch.from_numpy(s.reference),
                "entropy": torch.from_numpy(s.entropy), "advantages": torch.full((len(s.response),), s.advantage),
            }
            for place, s in enumerate(samples)
        ]  # fmt: skip
        layout = [
            {"rank": rank, "data_parallel_rank": rank, "sample_indices": [s.index for s in samples[rank::shards]]}
            for rank in range(shards)
        ]
        record = {"format_version": 2, "rollout_id": step, "rank": 0, "samples": rows, "dp_shards": layout}
        record["raw_reward"] = [s.reward for s in samples]
        torch.save(record, folder / "train_data" / f"{step}.pt")


def context_part(values, total, rank, size, width=None):
    """A rank's zig-zag share of a response, by walking every position: what a reader must put together again."""
    chunk = -(-(width or total) // (2 * size))
    first = total - len(values) - 1
    owners = [position // chunk for position in range(first, total - 1)]
    kept = [place for place, owner in enumerate(owners) if owner == rank]
    kept += [place for place, owner in enumerate(owners) if owner == 2 * size - 1 - rank]
    return torch.from_numpy(np.ascontiguousarray(values[kept]))


def write_miles_train(folder, steps, *, data=2, context=2, tensor=2, padded=False):
    """One file per rank: tensor-parallel ranks hold the same data, context-parallel ranks different tokens."""
    (folder / "train_data").mkdir(parents=True, exist_ok=True)
    for step, samples in steps.items():
        rank, width = 0, max(len(s.tokens) for s in samples) + 3 if padded else None
        for data_rank in range(data):
            own = samples[data_rank::data]
            for context_rank in range(context):
                for _ in range(tensor):

                    def part(values, s, context_rank=context_rank, width=width):
                        return context_part(values, len(s.tokens), context_rank, context, width)

                    rows = {
                        "tokens": [torch.from_numpy(s.tokens) for s in own], "response_lengths": [len(s.response) for s in own],
                        "total_lengths": [len(s.tokens) for s in own], "sample_indices": [s.index for s in own],
                        "rewards": [s.reward - 0.5 for s in own], "raw_reward": [s.reward for s in samples],
                        "loss_masks": [torch.from_numpy(s.mask.astype(np.int32)) for s in own],
                        "log_probs": [part(s.train, s) for s in own], "entropy": [part(s.entropy, s) for s in own],
                        "rollout_log_probs": [part(np.where(s.mask, s.rollout, 0).astype(np.float32), s) for s in own],
                        "advantages": [part(np.full(len(s.response), s.advantage, np.float32), s) for s in own],
                    }  # fmt: skip
                    rows |= {"max_seq_lens": [width] * len(own)} if padded else {}
                    record = {
                        "rollout_id": step, "rank": rank, "rollout_data": rows, "cp_rank": context_rank, "cp_size": context,
                        "qkv_format": "bshd" if padded else "thd",
                    }  # fmt: skip
                    torch.save(record, folder / "train_data" / f"{step}_{rank}.pt")
                    rank += 1


def write_slime_ranks(folder, steps):
    """One file per rank, as slime wrote them before format version 2 and miles before it told the ranks' layout."""
    write_miles_train(folder, steps, context=1)
    for path in (folder / "train_data").glob("*_*.pt"):
        record = torch.load(path, weights_only=True)
        torch.save({name: record[name] for name in ("rollout_id", "rank", "rollout_data")}, path)


# SkyRL


class TrainingInputBatch(dict):
    """Pickled as a call that names its class and gives its state."""

    def __reduce__(self):
        return _rebuild_tensor_batch, (type(self), dict(self))


def _rebuild_tensor_batch(kind, state):
    raise AssertionError


def skyrl_tensor(value):
    if value.dtype == torch.bfloat16:
        buffer = BytesIO()
        torch.save(value, buffer)
        return {"format": "torch", "data": buffer.getvalue()}
    array = value.numpy()
    return {"format": "numpy", "data": array.tobytes(), "shape": array.shape, "dtype": str(array.dtype)}


def write_skyrl(folder, steps, *, left_padded=True, bfloat16=False):
    """dumped_data/global_step_<N>_training_input.pkl; logprobs are [B, T] for the last T tokens, -9999 where there is none."""
    (folder / "dumped_data").mkdir(parents=True, exist_ok=True)
    for step, samples in steps.items():
        width = max(len(s.response) for s in samples)
        prompt_width = max(len(s.prompt) for s in samples)
        pad = left if left_padded else right
        if left_padded:
            sequences = left([s.tokens for s in samples], prompt_width + width)
            attention = left([np.ones(len(s.tokens), np.int64) for s in samples], prompt_width + width)
        else:
            sequences = np.concatenate(
                [left([s.prompt for s in samples], prompt_width), right([s.response for s in samples], width)], 1
            )
            attention = np.concatenate(
                [left([np.ones(len(s.prompt), np.int64) for s in samples], prompt_width),
                 right([np.ones(len(s.response), np.int64) for s in samples], width)], 1,
            )  # fmt: skip
        tensors = {
            "sequences": sequences, "attention_mask": attention,
            "response_mask": pad([np.ones(len(s.response), np.int64) for s in samples], width),
            "loss_mask": pad([s.mask.astype(np.int64) for s in samples], width),
            "action_log_probs": pad([s.train for s in samples], width),
            "rollout_logprobs": pad([np.where(s.mask, s.rollout, -9999).astype(np.float32) for s in samples], width),
            "advantages": pad([s.mask * np.float32(s.advantage) for s in samples], width).astype(np.float32),
        }  # fmt: skip
        given = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in tensors.items()}
        if bfloat16:
            given["action_log_probs"] = given["action_log_probs"].bfloat16()
        batch = TrainingInputBatch(
            batch_dict={name: skyrl_tensor(value) for name, value in given.items()} | {"values": None},
            batch_size=len(samples), device=torch.device("cpu"), metadata={"response_length": width},
        )  # fmt: skip
        members = {"TrainingInputBatch": TrainingInputBatch, "_rebuild_tensor_batch": _rebuild_tensor_batch}
        with classes_of(skyrl__backends__skyrl_train__training_batch=members):
            content = pickle.dumps(batch)
        (folder / "dumped_data" / f"global_step_{step}_training_input.pkl").write_bytes(content)


# JSON lines


def write_lines(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def _shifted(s, values, prompt_value):
    return [prompt_value] * len(s.prompt) + [float(value) for value in values]


def _joined(rows):
    return [value for row in rows for value in row]


def prime_rl_record(s, step, row, *, pack=None):
    """A line of a token export: prompt positions have inference logprobs of 0.0, and other columns hold nulls."""
    whole = [s] if pack is None else [s, pack]
    vocabulary = -float(np.log(150_000))
    length = sum(len(x.tokens) for x in whole)
    return {
        "schema_version": 1, "step": step, "rank": 0, "micro_step": 0, "micro_sequence_idx": row, "export_sequence_idx": row,
        "env_name": "math", "token_ids": _joined(x.tokens.tolist() for x in whole),
        "position_ids": _joined(list(range(len(x.tokens))) for x in whole),
        "loss_mask": _joined([False] * len(x.prompt) + x.mask.tolist() for x in whole),
        "advantages": _joined([x.advantage] * len(x.tokens) for x in whole),
        "rewards": _joined([x.reward] * len(x.tokens) for x in whole),
        "inference_logprobs": _joined(_shifted(x, np.where(x.mask, x.rollout, 0), 0.0) for x in whole),
        "trainer_logprobs": _joined([vocabulary, *_shifted(x, x.train, -1.0)[1:]] for x in whole),
        "entropy": _joined(_shifted(x, x.entropy, 1.0) for x in whole), "mismatch_kl": [None] * length,
    }  # fmt: skip


def write_prime_rl(folder, steps, *, stable=True, ranks=2, packed=False):
    for step, samples in steps.items():
        place = folder / "token_exports" / f"step_{step}"
        for rank in range(ranks):
            own = samples[rank::ranks]
            if packed:
                pairs = [(own[i], own[i + 1] if i + 1 < len(own) else None) for i in range(0, len(own), 2)]
            else:
                pairs = [(s, None) for s in own]
            records = [prime_rl_record(s, step, row, pack=other) for row, (s, other) in enumerate(pairs)]
            write_lines(place / f"rank_{rank}.jsonl", records)
        if stable:
            (place / "STABLE").touch()


class EncodedTensor(msgspec.Struct, array_like=True, gc=False):
    """The structs of prime-rl 559b447, src/prime_rl/transports/rollouts/types.py."""

    dtype: str
    shape: list[int]
    data: bytes


class RoutedExperts(msgspec.Struct, array_like=True, gc=False, omit_defaults=True):
    data: bytes
    shape: list[int]
    dtype: str


class MicroBatch(msgspec.Struct, array_like=True, gc=False, omit_defaults=True):
    input_ids: list[int]
    loss_mask: list[bool]
    advantages: list[float]
    inference_logprobs: list[float]
    position_ids: list[int]
    sequence_lengths: list[int]
    temperatures: list[float]
    env_names: list[str]
    seq_lens: list[int]
    ref_logprobs: list[float] | None = None
    routed_experts: RoutedExperts | None = None
    mm_kwargs: dict[str, EncodedTensor] | None = None
    mm_token_type_ids: list[int] | None = None
    rl_weights: list[float] | None = None
    ce_weights: list[float] | None = None
    ref_kl_weights: list[float] | None = None


def micro_batch(samples, *, pad=4, experts=None):
    """Samples packed into one micro-batch, padded by `pad` (trainer/batch.py: prepare_sample, _materialize_bin,
    pad_micro_batch). Tokens outside the mask have a temperature that does not matter."""
    lengths, num = [len(s.tokens) for s in samples], pad + sum(len(s.tokens) for s in samples)
    choices = (
        None if experts is None else np.concatenate([experts(s) for s in samples] + [np.zeros((pad, 2, 2), np.uint8)])
    )
    return MicroBatch(
        input_ids=_joined(s.tokens.tolist() for s in samples) + [1] * pad,
        loss_mask=_joined([False] * len(s.prompt) + s.mask.tolist() for s in samples) + [False] * pad,
        advantages=_joined([s.advantage] * len(s.tokens) for s in samples) + [0.0] * pad,
        inference_logprobs=_joined(_shifted(s, np.where(s.mask, s.rollout, 0), 0.0) for s in samples) + [0.0] * pad,
        position_ids=_joined(list(range(n)) for n in lengths) + list(range(pad)),
        sequence_lengths=[*lengths[:-1], lengths[-1] + pad], seq_lens=[*lengths[:-1], lengths[-1] + pad],
        temperatures=_joined([0.0] * len(s.prompt) + np.where(s.mask, 0.75, 0).tolist() for s in samples) + [1.0] * pad,
        env_names=["math"] * (num - pad) + [""] * pad,
        ref_logprobs=_joined(_shifted(s, np.where(s.mask, s.reference, 0), 0.0) for s in samples) + [0.0] * pad,
        routed_experts=None if choices is None else RoutedExperts(choices.tobytes(), list(choices.shape), "uint8"),
        rl_weights=[1.0] * num if experts else None,
    )  # fmt: skip


def write_micro_batches(folder, steps, *, ranks=2, **options):
    """rollouts/step_<N>/rank_<r>.bin (transports/rollouts/filesystem.py), the last one with a batch that fills it up."""
    for step, samples in steps.items():
        place = folder / "rollouts" / f"step_{step}"
        place.mkdir(parents=True, exist_ok=True)
        for rank in range(ranks):
            own = samples[rank::ranks]
            batches = [micro_batch(own[at : at + 2], **options) for at in range(0, len(own), 2)]
            dummy = micro_batch(own[:1], **options)
            dummy.loss_mask, dummy.advantages = [False] * len(dummy.input_ids), [0.0] * len(dummy.input_ids)
            (place / f"rank_{rank}.bin").write_bytes(msgspec.msgpack.Encoder().encode([*batches, dummy]))


def episode_record(samples, step, **trace):
    """An episode as verifiers 0.4.1.dev86 writes it (v1/episode.py: to_record), of what prime-rl's reader uses. Each
    sample is a branch after a prompt of its own."""
    nodes = []
    for s in samples:
        user = {
            "semantic_parents": [],
            "message": {"role": "user", "content": "q"},
            "sampled": False,
            "is_content": [],
            "logprobs": [],
        }
        nodes.append(user | {"token_ids": s.prompt.tolist(), "mask": [False] * len(s.prompt)})
        per_token = {
            "logprobs": s.rollout,
            "advantages": np.full(len(s.mask), s.advantage),
            "trainer_logprobs": s.train,
            "entropies": s.entropy,
        }
        nodes.append(
            {
                "parent": len(nodes) - 1,
                "semantic_parents": [],
                "message": {"role": "assistant", "content": "a"},
                "sampled": True,
                "token_ids": s.response.tolist(),
                "mask": s.mask.tolist(),
                "is_content": [],
                **{name: [round(float(value), 4) for value in values[s.mask]] for name, values in per_token.items()},
            }
        )
    calls = [
        {"node": 2 * n + 1, "sampling": {"temperature": 0.75}, "finish_reason": "stop"} for n in range(len(samples))
    ]
    own = {
        "version": 1, "id": "t", "agent": {"config": {}, "name": "agent", "trainable": True}, "nodes": nodes, "calls": calls,
        "rewards": {"correct": {"score": samples[0].reward, "weight": 2.0}, "format": {"score": 0.5, "weight": 1.0}},
    }  # fmt: skip
    return {
        "id": "e", "env": {"id": "math"}, "task": {"type": "T", "data": {}}, "group": {"id": "g"}, "ok": True, "errors": [],
        "run": {"type": "train", "id": "r", "work": {"type": "train", "step": step - 1, "policy": {"start": step - 2, "end": step - 1}}},
        "traces": [own | trace],
    }  # fmt: skip


def write_traces(folder, steps):
    """rollouts/step_<N>/<kind>/<subset>/traces.jsonl (monitors/file.py): all episodes, and those that are trained on."""
    for step, samples in steps.items():
        records = [episode_record([s], step) for s in samples]
        for kind, subset in (("train", "effective"), ("train", "all"), ("eval", "effective")):
            write_lines(folder / "rollouts" / f"step_{step}" / kind / subset / "traces.jsonl", records)


def bank_turns(samples):
    """A rollout's turns (tokens, logprobs, mask), each with all tokens before it. Only sampled tokens have logprobs."""
    turns, before = [], []
    for s in samples:
        before = [*before, *s.tokens.tolist()]
        masked = [False] * (len(before) - len(s.response)) + s.mask.tolist()
        turns.append((before, s.rollout[s.mask], masked))
    return turns


def write_rollout_bank(folder, steps, *, size=2, turns=1, more=None):
    """A rollout bank of Megatron-LM d98e8a6 (megatron/rl/rollout_bank.py: append, _encode, _checksum), with `size`
    rollouts a group. The iteration before a step collects its groups."""
    generation = folder / "generations" / "generation-0123"
    for step, samples in steps.items():
        place = generation / f"gen-{step - 1:06d}"
        place.mkdir(parents=True)
        content = {"tok": b"", "lp": b"", "mask": b""}
        lines = []
        for number, at in enumerate(range(0, len(samples), size * turns)):
            group = samples[at : at + size * turns]
            rollouts = [bank_turns(group[first : first + turns]) for first in range(0, len(group), turns)]
            kept = {
                "reward": group[0].reward, "env_id": "math", "problem_id": "p", "completion_ids": ["c"], "generation_cap": None,
                "rollout_status": "ok", "failure_reason": None, **(more or {}),
            }  # fmt: skip
            record = {
                "format_version": 2, "uid": f"gen-{step - 1:06d}/{number}", "collection_iter": step - 1,
                "member_type": "TokenRollout", "kind": "token",
                "group": {"rollouts": [kept] * len(rollouts), "batch_id": step, "index_in_batch": number},
            }  # fmt: skip
            slices = []
            for index, (key, dtype) in enumerate((("tok", np.int32), ("lp", np.float16), ("mask", np.uint8))):
                flat = [value for turn in rollouts for part in turn for value in part[index]]
                slices.append(np.asarray(flat, dtype).tobytes())
                lengths = [[len(part[index]) for part in turn] for turn in rollouts]
                record[key] = {"offset": len(content[key]), "bytes": len(slices[-1]), "lengths": lengths}
                content[key] += slices[-1]
            lines.append(sealed_record(record, slices))
        empty = {
            "format_version": 2,
            "uid": "x/0",
            "collection_iter": 0,
            "member_type": "Rollout",
            "kind": "inline",
            "group": {},
        }
        write_lines(place / "ledger.log", [*lines, sealed_record(empty, [])])
        for key, name in (("tok", "tokens.bin"), ("lp", "logprobs.bin"), ("mask", "masks.bin")):
            (place / name).write_bytes(content[key])
    (generation / "consumed.log").write_text('{"uid":"gen-000000/0","iter":1}\n')
    manifest = {
        "format_version": 2, "active_generation": generation.name, "timeline": "t", "trained_through": 0, "compacted_at": 0,
        "segments": [f"gen-{step - 1:06d}" for step in steps],
    }  # fmt: skip
    (folder / "MANIFEST.json").write_text(json.dumps(manifest))


def sealed_record(record, slices):
    digest = hashlib.blake2b(digest_size=16)
    for part in (json.dumps(record, sort_keys=True, separators=(",", ":")).encode(), *slices):
        digest.update(part)
    return record | {"checksum": digest.hexdigest()}


def _padded(row, *, width):
    return [*row, *[0] * (width - len(row))]


def write_nemo_rl(folder, steps, *, prev=True):
    """train_data_step<N>.jsonl: every value but idx is a list of one element, padded on the right."""
    for step, samples in steps.items():
        width = max(len(s.tokens) for s in samples)
        pad = partial(_padded, width=width)
        records = [
            {
                "content": ["text"], "rewards": [s.reward], "input_lengths": [len(s.tokens)], "token_ids": [pad(s.tokens.tolist())],
                "token_loss_mask": [pad([0] * len(s.prompt) + s.mask.astype(int).tolist())], "sample_loss_mask": [1.0],
                "advantages": [pad([s.advantage] * len(s.tokens))],
                "generation_logprobs": [pad(_shifted(s, np.where(s.mask, s.rollout, 0), 0.0))],
                "prev_logprobs": [pad(_shifted(s, s.train, -1.0) if prev else [0.0] * len(s.tokens))], "idx": row,
            }
            for row, s in enumerate(samples)
        ]  # fmt: skip
        write_lines(folder / f"train_data_step{step}.jsonl", records)


WRITERS = {
    "verl": write_verl,
    "slime": lambda folder, steps: (write_rollouts(folder, steps), write_slime_train(folder, steps)),
    "miles": lambda folder, steps: (
        write_rollouts(folder, steps, metadata={}),
        write_miles_train(folder, steps),
    ),
    "skyrl": write_skyrl,
    "prime-rl": write_prime_rl,
    "nemo-rl": write_nemo_rl,
}
"""Formats with both sides, and what writes them."""


def make_steps(*steps, **options):
    return {step: make_samples(step, **options) for step in steps}


# one side, or text


def write_vllm(folder, steps):
    (samples,) = steps.values()
    choices = [
        {"token_ids": s.response.tolist(), "logprobs": {"token_logprobs": s.rollout.tolist()}, "finish_reason": "stop"}
        for s in samples
    ]
    write_lines(folder / "saved.jsonl", [{"choices": [choice]} for choice in choices])


def write_sglang(folder, steps):
    (samples,) = steps.values()
    triples = [
        [[float(lp), int(token), None] for token, lp in zip(s.response, s.rollout, strict=True)] for s in samples
    ]
    write_lines(folder / "saved.jsonl", [{"meta_info": {"output_token_logprobs": each}} for each in triples])


def golden_request(prompt, logprobs, tokens, **more):
    """A request as Megatron-LM's examples/inference/utils.py writes it."""
    num_prompt = len(logprobs) - len(tokens)
    return {
        "input_prompt": prompt, "generated_text": "x", "generated_tokens": tokens, "latency": 2.5, "ttft": 0.1,
        "step_count": len(tokens), "top_n_logprobs": None, "prompt_top_n_logprobs": None,
        "prompt_logprobs": logprobs[:num_prompt], "generated_logprobs": logprobs[num_prompt:], "logprobs": logprobs, **more,
    }  # fmt: skip


def write_golden(folder, case, *requests, platform="h100", family="gpt"):
    path = folder / family / case / f"golden_values_dev_dgx_{platform}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    found = {str(place): request for place, request in enumerate(requests)}
    path.write_text(json.dumps({**found, "throughput": [1.5], "lifetime_prefill_token_count": 3}, indent=1))
    return path


def write_megatron(folder, steps):
    (samples,) = steps.values()
    for case in ("gpt_dynamic_inference_tp1_pp1_583m", "gpt_dynamic_inference_tp2_pp1_583m"):
        requests = [
            golden_request(f"p{s.index}", [-0.5, *s.rollout.astype(float).tolist()], s.response.tolist())
            for s in samples
        ]
        write_golden(folder, case, *requests)


def gym_rollout(sample, **more):
    """A rollout with two turns, with the fields of NeMo-Gym's openai_utils.py."""
    half = len(sample.response) // 2 or 1

    def turn(before, part):
        return {
            "id": "m", "role": "assistant", "type": "message", "status": "completed", "content": [],
            "prompt_token_ids": [*sample.prompt.tolist(), *sample.response[:before].tolist()],
            "generation_token_ids": sample.response[part].tolist(),
            "generation_log_probs": sample.rollout[part].astype(float).tolist(),
        }  # fmt: skip

    tool = {"type": "function_call_output", "call_id": "c", "output": "4"}
    output = [turn(0, slice(0, half)), tool, turn(half, slice(half, None))]
    return {
        "responses_create_params": {"input": [], "temperature": 0.7}, "response": {"id": "r", "object": "response", "output": output},
        "reward": sample.reward, "_ng_task_index": 3, "_ng_rollout_index": sample.index, **more,
    }  # fmt: skip


def write_nemo_gym(folder, steps):
    (samples,) = steps.values()
    write_lines(folder / "rollouts.jsonl", [gym_rollout(s) for s in samples])


def write_open_instruct(folder, steps):
    keys = {"prompt_tokens": "prompt", "response_tokens": "response", "logprobs": "rollout"}
    records = [
        {"step": step, "reward": s.reward, **{key: getattr(s, name).tolist() for key, name in keys.items()}}
        for step, samples in steps.items()
        for s in samples
    ]
    write_lines(folder / "run_rollouts_000000.jsonl", records)


def write_torchtitan(folder, steps):
    turns = [
        {
            "max_policy_version": 1,
            "prompt_token_ids": [1, 2],
            "completion_token_ids": [3],
            "completion_logprobs": [-1.0],
        },
        {
            "max_policy_version": 1,
            "prompt_token_ids": [1, 2, 3, 4],
            "completion_token_ids": [5],
            "completion_logprobs": [-1.0],
        },
    ]
    write_lines(
        folder / "rollout_samples.jsonl", [{"group_id": "g", "status": "done", "reward": 1.0, "turns": turns}] * 2
    )


def write_verl_text(folder, steps):
    write_lines(folder / "1.jsonl", [{"input": "a", "output": "b", "score": 1.0, "step": 1, "uid": "g"}] * 3)


ONE_SIDED = {
    "megatron-rl": write_rollout_bank, "megatron-lm": write_megatron, "vllm": write_vllm, "sglang": write_sglang, "nemo-gym": write_nemo_gym,
    "open-instruct": write_open_instruct, "torchtitan": write_torchtitan,
}  # fmt: skip
"""The other formats, and what writes them."""
