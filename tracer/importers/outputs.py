"""Suggest what to do with a framework's output folder that contains no dump: set the option that writes a dump, or
import the logged scalars.

The patterns match files that every run writes: verl 1dda039 (trainer/ppo/ray_trainer.py), slime 624b824
(rollout/data_source.py), SkyRL a956457 (train/trainer.py), prime-rl 559b447 (utils/pathing.py), NeMo-RL 7ea279a
(utils/checkpoint.py, algorithms/grpo.py), OpenRLHF 3c3be62 (trainer/ray/ppo_actor.py), TRL (transformers' Trainer).
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping

from .format import DumpFolder, Format

_LEFT = {
    "skyrl": r"global_step_\d+/(?:policy/.+|trainer_state\.pt)|latest_ckpt_global_step\.txt|dumped_evals/.+",
    "verl": r"global_step_\d+/(?:(?:actor|critic)/.+|data\.pt)|main_ppo\.log",
    "slime": r"rollout/global_dataset_state_dict_\d+\.pt",
    "prime-rl": r"configs/(?:rl|trainer|orchestrator)\.toml|broadcasts/step_\d+/.+",
    "nemo-rl": r"step_\d+/training_info\.json|val_data_step\d+\.jsonl",
    "OpenRLHF": r"_(?:actor|critic)/(?:latest|global_step\d+/.+)",
    "trl": r"training_args\.bin|trainer_state\.json",
}
"""Patterns for paths that each framework writes. SkyRL comes before verl, because both write data.pt."""
_CURVES = r"[^/]*\.(?:log|out)|[^/]*(?:metrics|history)[^/]*\.(?:jsonl|csv)"
_CAN_RECORD = ("verl", "trl")


def how_to_dump(folder: DumpFolder, formats: Mapping[str, Format]) -> str | None:
    """Return instructions for making the folder's framework write a dump, or None if the framework is unknown."""
    name = next((name for name, pattern in _LEFT.items() if next(folder.matching(f"(?:{pattern})"), None)), None)
    if name is None:
        return None
    record = ", or record the run: tim-trace record -o RUN -- python train.py" if name in _CAN_RECORD else ""
    if name not in formats:
        return f"{name} writes no tokens. Record its batches with tim_trace.Recorder{record}"
    return f"{name} writes {formats[name].files} with {formats[name].writes.replace('`', '')}{record}"


def curves_in(folder: DumpFolder) -> str:
    """Return a sentence with the command that imports the folder's logged scalars, or "" if it has none."""
    name = next((name for name, _ in folder.matching(f"(?:{_CURVES})")), None)
    path = "" if name is None else shlex.quote(os.path.join(folder.url, name))
    return f". To import its curves (no tokens): tim-trace import metrics {path} -o RUN" if path else ""
