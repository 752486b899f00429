from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ...schemas.errors import ImportFailed
from .columns import ROWS_AT_ONCE, RowBatch, explained
from .fields import Fields, Values
from .format import DumpFolder, Format, Reading, read_rows
from .masked_lines import NEMO_RL, PRIME_RL
from .megatron import MEGATRON
from .metrics import SCALARS
from .responses import NEMO_GYM, SGLANG, TGI, VLLM
from .rollout_bank import MEGATRON_RL
from .skyrl import SKYRL
from .slime_dumps import MILES, SLIME
from .verl import VERL

OPEN_INSTRUCT = Format(
    name="open-instruct",
    writes="`--save_traces`",
    files="<run>_rollouts_<shard>.jsonl",
    columns={
        "step": ("step",),
        "prompt_ids": ("prompt_tokens",),
        "response_ids": ("response_tokens",),
        "rollout_logprobs": ("logprobs",),
        "reward": ("reward",),
        "advantage": ("advantage",),
        "finish_reason": ("finish_reason",),
        "group_id": ("prompt_idx",),
    },
    alignment="logprobs are aligned with response_tokens",
    pattern=r"[^/]*_rollouts_\d+\.jsonl",
    needs=("step", "response_ids"),
    lacks={
        "rollout": "the lines have no logprobs",
        "train": "open-instruct writes only engine logprobs. Record the trainer's with tim_trace.Recorder",
    },
    lines=True,
)


AREAL = Format(
    name="areal",
    writes="the workflow's dump_dir",
    files="rollout/<version>/<task>.jsonl",
    columns={"group_id": ("task_id",), "policy_version": ("tail_version", "head_version"), "reward": ("reward",)},
    alignment="text only, no token ids or logprobs. The version in the folder name is the step",
    pattern=r"(\d+)/[^/]+\.jsonl",
    keys=frozenset({"head_version", "tail_version"}),
    lacks=dict.fromkeys(
        ("rollout", "train"),
        "AReaL dumps only text. Record each batch's input_ids, logprobs and prox_logp with tim_trace.Recorder, or write "
        "them to Parquet",
    ),
    lines=True,
)


_TEXTS = ("step", "prompt", "completion", "entropy")


def _swift_rows(fields: Fields, name: str, number: int) -> Iterator[dict[str, Any]]:
    for place, record in enumerate(_swift_records(fields.record, fields.where)):
        row = fields.of(record, fields.where)
        cells = {**row.cells("step", "advantage"), "rewards": row.numbers(_TEXTS)}
        yield {"seq_id": f"{number}.{place}", **cells, **row.added_cells(cells)}


def _swift_records(record: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    lists = {name: value for name, value in record.items() if isinstance(value, list)}
    if not lists:
        return [dict(record)]
    lengths = {len(value) for value in lists.values()}
    if len(lengths) != 1:
        raise ImportFailed(
            f"{where}: the columns are lists of different lengths: {', '.join(map(str, sorted(lengths)))}"
        )
    return [
        {name: value[place] if name in lists else value for name, value in record.items()}
        for place in range(lengths.pop())
    ]


MS_SWIFT = Format(
    name="ms-swift",
    writes="`--log_completions true`",
    files="completions.jsonl",
    columns={"step": ("step",), "advantage": ("advantages",), "prompt": ("prompt",), "completion": ("completion",)},
    alignment="text only, no token ids or logprobs. Numeric columns not listed here are reward functions",
    pattern=r"completions\.jsonl",
    keys=frozenset({"step", "prompt", "completion"}),
    rows=_swift_rows,
    lacks=dict.fromkeys(
        ("rollout", "train"),
        "log_completions writes text and rewards but no token ids or logprobs. Record the batches with "
        "tim_trace.Recorder, or write them to Parquet",
    ),
    lines=True,
)


_NOT_REWARDS = ("step", "prompt", "completion")


def _trl_records(mapped: Collection[str], path: Path, _first: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (row number, row). Unmapped text columns are not read: they can be large, and no trace stores them."""
    with explained(str(path), "Parquet"), path.open("rb") as file:
        parquet = pq.ParquetFile(file)
        tests = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)
        kept = [
            field.name
            for field in parquet.schema_arrow
            if field.name in mapped or any(test(field.type) for test in tests)
        ]
        batches = parquet.iter_batches(batch_size=ROWS_AT_ONCE, columns=kept)
        yield from enumerate((record for batch in batches for record in batch.to_pylist()), start=1)


def _read_trl(reading: Reading) -> Iterator[RowBatch]:
    mapped = [name for column in reading.added for name in reading.columns[column]]
    return read_rows(reading, _trl_rows, records=partial(_trl_records, mapped), unit="row")


def _trl_rows(fields: Fields, name: str, number: int) -> list[dict[str, Any]]:
    cells = fields.cells("step", "advantage")
    return [{"seq_id": str(number - 1), **cells, "rewards": fields.numbers(_NOT_REWARDS)}]


TRL = Format(
    name="trl",
    writes="`log_completions=True`",
    files="completions/completions_<step>.parquet",
    columns={"step": ("step",), "advantage": ("advantage",), "prompt": ("prompt",), "completion": ("completion",)},
    alignment="text only, no token ids or logprobs. Numeric columns not listed here are reward functions",
    pattern=r"completions_(\d+)\.parquet",
    read=_read_trl,
    lacks=dict.fromkeys(
        ("rollout", "train"),
        "log_completions writes text and rewards but no token ids or logprobs. Record the run: tim-trace record -o "
        "RUN -- python train.py",
    ),
)


def _torchtitan_rows(fields: Fields, name: str, number: int) -> Iterator[dict[str, Any]]:
    """Yield a rollout as one row: the first prompt, then every turn's sampled tokens and the tokens between turns."""
    turns = fields.record.get("turns")
    if fields.record.get("is_validation") is True:
        return
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns) or not turns:
        raise ImportFailed(f"{fields.where} has no list of turns")
    each = [fields.of(turn, f"{fields.where}, turn {place}") for place, turn in enumerate(turns)]
    version = max((v for turn in each if (v := turn.integer("policy_version")) is not None), default=None)
    cells = fields.cells("step", "reward", "advantage", "group_id", "finish_reason")
    if cells["step"] is None:
        cells["step"] = version
    if cells["step"] is None:
        raise ImportFailed(f"{fields.where} has neither a step nor a policy version")
    yield {**cells, "policy_version": version, **_joined_turns(each)}


def _joined_turns(turns: list[Fields]) -> dict[str, Any]:
    prompts, responses = ([turn.ids(column) for turn in turns] for column in ("prompt_ids", "response_ids"))
    prompt = prompts[0]
    if prompt is None or any(sampled is None for sampled in responses):
        return {}
    whole, values, known, mask = prompt, [np.zeros(0)], [np.zeros(0, bool)], [np.zeros(0, bool)]
    for place, (turn, before, sampled) in enumerate(zip(turns, prompts, responses, strict=True)):
        logprobs = turn.values("rollout_logprobs")
        assert sampled is not None
        if before is None or len(before) < len(whole) or not np.array_equal(before[: len(whole)], whole):
            raise ImportFailed(
                f"{turn.where}: the prompt does not begin with the previous turns' tokens, so turn {place} was "
                "re-tokenized"
            )
        if logprobs is not None and len(logprobs) != len(sampled):
            raise ImportFailed(
                f"{turn.where}: {len(logprobs)} logprobs for {len(sampled)} tokens, expected one per token"
            )
        between = len(before) - len(whole)
        whole = np.concatenate([before, sampled])
        values += [np.zeros(between), np.zeros(len(sampled)) if logprobs is None else logprobs.values]
        known += [np.zeros(between, bool), np.zeros(len(sampled), bool) if logprobs is None else logprobs.known]
        mask += [np.zeros(between, bool), np.ones(len(sampled), bool)]
    scores = Values(np.concatenate(values), np.concatenate(known))
    return {
        "prompt_ids": prompt,
        "response_ids": whole[len(prompt) :],
        "response_mask": np.concatenate(mask),
        "rollout_logprobs": scores if scores.known.any() else None,
    }


TORCHTITAN = Format(
    name="torchtitan",
    writes="RolloutSampleRecorder in experiments/rl",
    files="rollout_samples.jsonl",
    columns={
        "step": ("step", "max_policy_version"),
        "prompt_ids": ("prompt_token_ids",),
        "response_ids": ("completion_token_ids",),
        "rollout_logprobs": ("completion_logprobs",),
        "policy_version": ("max_policy_version", "policy_version"),
        "reward": ("reward",),
        "advantage": ("advantage",),
        "group_id": ("group_id",),
        "finish_reason": ("status",),
    },
    alignment="completion_logprobs are aligned with a turn's completion_token_ids. Tokens between turns are masked "
    "and have no logprobs. The newest policy version is used as the step. Validation rollouts are skipped",
    pattern=r"rollout_samples\.jsonl",
    rows=_torchtitan_rows,
    lacks={
        "rollout": "the turns lack token ids or completion_logprobs. Enable them in RolloutSampleRecorder",
        "train": "RolloutSampleRecorder writes only engine logprobs. Record the trainer's with tim_trace.Recorder",
    },
    lines=True,
)


FORMATS: dict[str, Format] = {
    format.name: format
    for format in (
        VERL, SLIME, MILES, SKYRL, PRIME_RL, NEMO_RL, MEGATRON_RL, MEGATRON, VLLM, SGLANG, TGI, NEMO_GYM, TRL, AREAL,
        OPEN_INSTRUCT, TORCHTITAN, MS_SWIFT, SCALARS,
    )
}  # fmt: skip


def recognised(folder: DumpFolder) -> str | None:
    found = [name for name, format in FORMATS.items() if format.is_in(folder)]
    if len(found) > 1 and SCALARS.name in found:  # a run's folder often has scalars beside dumps
        found.remove(SCALARS.name)
    if len(found) > 1:
        commands = " or ".join(f"tim-trace import {name} {shlex.quote(folder.url)} -o RUN" for name in found)
        raise ImportFailed(f"{folder.url} contains files from {' and '.join(found)}. Choose one: {commands}")
    return found[0] if found else None
