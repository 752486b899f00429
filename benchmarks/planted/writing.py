"""Write simulated steps as a real trace, with the data that a framework would record, and their label."""

from __future__ import annotations

import json
import random
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from contracts import NONE, rollout_contract, train_contract
from faults.fault import Fault
from faults.weights import replica_of
from scenarios import Scenario
from simulation import ended
from step import RecordedStep
from tim_trace.tracer.importers.neutral import import_parquet
from tim_trace.tracer.recorder import Recorder

DETECTABLE = 2.0
"""Rms of d on the affected tokens, relative to the noise, above which a fault counts as detectable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """Data that a framework records besides the log-probabilities."""

    level: str
    """How much the contracts say."""
    entropy: bool
    rewards: bool
    versions: bool
    settings: bool
    """If True, sequences record their temperature and truncation."""
    groups: bool
    finish: bool
    """If True, sequences record why they ended."""
    imported: bool
    """If True, the trace is imported from a Parquet file."""
    first_step: int
    first_version: int
    """Added to the version numbers, as in a resumed run."""


def write(
    folder: Path,
    scenario: Scenario,
    fault: Fault,
    steps: list[RecordedStep],
    recording: Recording,
    split: str,
    seed: int,
) -> None:
    """Write `folder/trace` and `folder/label.json`."""
    folder.mkdir(parents=True)
    imported = recording.imported or any(
        bool((_known(step, name) > 1e-3).any()) for step in steps for name in ("rollout", "train")
    )
    (_import if imported else _record)(folder / "trace", scenario, fault, steps, recording)
    label = {
        "code": fault.code, "variant": fault.variant, "strength": fault.strength, "split": split, "seed": seed,
        "architecture": scenario.model.recipe.architecture, "model": scenario.model.recipe.name,
        "numerics": scenario.numerics,
        "temperature": scenario.sampling.temperature, "steps": len(steps),
        "recording": asdict(recording) | {"imported": imported}, **measure(steps, fault.code),
    }  # fmt: skip
    (folder / "label.json").write_text(json.dumps(label, indent=1))


def _known(step: RecordedStep, name: str) -> torch.Tensor:
    return getattr(step, name)[getattr(step, f"{name}_known")]


def measure(steps: list[RecordedStep], code: str) -> dict[str, Any]:
    """Return the noise floor, and the fault's effect relative to it.

    noise_rms: rms of d, nats, over the counted tokens, of the same trace without the fault. d_rms: rms of d with the
    fault over the counted tokens that it affects; infinite if a value is missing or not finite. effect_rms: rms of the
        change in d that the fault causes there. detectable: d_rms > 2 noise_rms; a copy is, if the noise is not 0.
    """
    clean, faulty, reached, missing = [], [], [], []
    for step in steps:
        counted = step.counted & step.tokens
        clean.append((step.clean_train - step.clean_rollout)[counted])
        faulty.append((step.train - step.rollout)[counted])
        reached.append(step.affected[counted])
        missing.append(~(step.rollout_known & step.train_known)[counted])
    noise, d, hit = torch.cat(clean).double(), torch.cat(faulty).double(), torch.cat(reached)
    lost = bool((hit & (torch.cat(missing) | ~d.isfinite())).any())
    change = (d - noise)[hit & d.isfinite()]
    noise_rms, d_rms = _rms(noise), float("inf") if lost else _rms(d[hit])
    return {
        "tokens": len(d), "affected_share": float(hit.double().mean()) if len(hit) else 0.0, "noise_rms": noise_rms,
        "d_rms": "inf" if lost else d_rms, "effect_rms": _rms(change),
        "detectable": bool(noise_rms > 0) if code == "copies" else d_rms > DETECTABLE * noise_rms,
    }  # fmt: skip


def _rms(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt()) if len(values) else 0.0


def _rows(step: RecordedStep, scenario: Scenario, fault: Fault, recording: Recording) -> dict[str, Any]:
    """Return the per-sequence columns that both ways of writing share."""
    belief = fault.belief
    version = step.version + recording.first_version
    rows: dict[str, Any] = {}
    if recording.groups:
        rows["group_ids"] = step.groups
    if recording.finish:
        rows["finish_reason"] = ["stop" if done else "length" for done in ended(step)]
    if recording.rewards:
        rows |= {"reward": step.rewards.astype(np.float64), "advantage": step.advantages.astype(np.float64)}
    if recording.versions and belief.get("policy_version", 0) is not None:
        rows["policy_version"] = np.full(len(step.ids), version - belief.get("sampling_version_behind", 0))
    if recording.settings:
        sampling = scenario.sampling
        rows |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
    return rows


def _record(path: Path, scenario: Scenario, fault: Fault, steps: list[RecordedStep], recording: Recording) -> None:
    replicas = fault.belief.get("replicas", 1)
    recorded_replicas = range(replicas) if recording.level != NONE else range(1)
    with Recorder(path) as recorder:
        for step in steps:
            number = recording.first_step + step.index
            tokens = step.tokens.numpy()
            batch = recorder.add_sequences(
                step=number,
                prompt_ids=step.prompts.numpy(),
                response_ids=step.ids.numpy(),
                response_attention_mask=tokens,
                response_mask=None if bool(step.counted[step.tokens].all()) else step.counted.numpy(),
                min_p=scenario.sampling.min_p or None,
                max_tokens=scenario.max_tokens if recording.settings else None,
                **_rows(step, scenario, fault, recording),
            )
            for replica in recorded_replicas:
                mine = np.flatnonzero(replica_of(len(step.ids), len(recorded_replicas)) == replica)
                contract = rollout_contract(scenario, fault.belief, recording.level, replica if replicas > 1 else None)
                if contract is not None:
                    recorder.add_contract("rollout", contract)
                recorder.add_scores(
                    "rollout", batch, rows=mine, logprobs=step.rollout.numpy()[mine],
                    scored_mask=step.rollout_known.numpy()[mine],
                )  # fmt: skip
            contract = train_contract(scenario, fault.belief, recording.level)
            if contract is not None:
                recorder.add_contract("train", contract)
            behind = "sampling_version_behind" in fault.belief and recording.versions
            recorder.add_scores(
                "train", batch, logprobs=step.train.numpy(), scored_mask=step.train_known.numpy(),
                entropy=step.entropy.numpy() if recording.entropy else None,
                policy_version=np.full(len(step.ids), step.version + recording.first_version) if behind else None,
            )  # fmt: skip
            if recording.rewards:
                metrics = {"reward": float(step.rewards.mean()), "num_tokens": int(step.lengths.sum())}
                recorder.add_metrics(number, metrics)


def _import(path: Path, scenario: Scenario, fault: Fault, steps: list[RecordedStep], recording: Recording) -> None:
    """Write through a Parquet table, like a dump from elsewhere."""
    parts = [_table(step, scenario, fault, recording) for step in steps]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "dump.parquet"
        pq.write_table(pa.concat_tables(parts, promote_options="default"), file)
        import_parquet(file, output=path)


def _table(step: RecordedStep, scenario: Scenario, fault: Fault, recording: Recording) -> pa.Table:
    rows = _rows(step, scenario, fault, recording)
    count = len(step.ids)
    lengths = step.lengths.tolist()

    def lists(values: torch.Tensor, known: torch.Tensor | None = None) -> list[list[Any]]:
        out = [row[:n] for row, n in zip(values.tolist(), lengths, strict=True)]
        if known is None:
            return out
        return [
            [v if k else None for v, k in zip(row, kept, strict=False)]
            for row, kept in zip(out, known.tolist(), strict=True)
        ]

    columns: dict[str, Any] = {
        "step": [recording.first_step + step.index] * count,
        "group_id": rows.pop("group_ids", [None] * count),
        "prompt_ids": step.prompts.tolist(),
        "response_ids": lists(step.ids),
        "rollout_logprobs": pa.array(lists(step.rollout, step.rollout_known), pa.list_(pa.float32())),
        "train_logprobs": pa.array(lists(step.train, step.train_known), pa.list_(pa.float32())),
    }
    if not bool(step.counted[step.tokens].all()):
        columns["response_mask"] = lists(step.counted)
    if recording.entropy:
        columns["entropy"] = pa.array(lists(step.entropy), pa.list_(pa.float32()))
    for name, value in rows.items():
        columns[name] = [value] * count if isinstance(value, (int, float)) else list(value)
    return pa.table(columns)


def chosen_recording(code: str, fault: Fault, chance: random.Random) -> Recording:
    """Return how much this trace's framework recorded."""
    level = chance.choices(("full", "partial", NONE), (4, 3, 3))[0]
    needs_contracts = code in ("copies", "equal") or "replicas" in fault.belief
    if needs_contracts and level == NONE:
        level = chance.choice(("full", "partial"))
    resumed = chance.random() < 0.25
    return Recording(
        level=level, entropy=chance.random() < 0.5, rewards=chance.random() < 0.85, versions=chance.random() < 0.75,
        settings=chance.random() < 0.7, groups=chance.random() < 0.9 or code == "subset", finish=chance.random() < 0.7,
        imported=level == NONE and code != "placeholders" and chance.random() < 0.4,
        first_step=chance.randrange(2, 400) if resumed else 1, first_version=chance.randrange(1, 400) if resumed else 0,
    )  # fmt: skip
