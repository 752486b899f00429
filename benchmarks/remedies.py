"""Score `triangulate --predict`: does what a remedy leaves lie in the predicted interval, at steps that were not used?

    python benchmarks/remedies.py record llama runs/remedies/llama [--dtype bfloat16] [--steps 64]
    python benchmarks/remedies.py predict runs/remedies/llama --steps 1:64:8 [--remedies ...] -o runs/remedies/llama-8.json
    python benchmarks/remedies.py score runs/remedies/*.json

`record` trains a tiny random model of an architecture as examples/grpo_addition.py does, with vLLM in bfloat16. `predict`
writes the predictions to a file. Only then, `score` replays the remedies at the other steps and compares.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
ARCHITECTURES = {
    "llama": "Llama", "qwen2": "Qwen2", "mistral": "Mistral", "olmo2": "Olmo2", "granite": "Granite", "phi3": "Phi3",
    "gemma": "Gemma",
}  # fmt: skip
REMEDIES = (
    "dtype=fp16", "rollout:dtype=fp16", "rollout:dtype=fp32", "train:dtype=bf16", "train:dtype=fp32", "dtype=fp32",
    "train:lm-head=fp32", "engine=exact",
)  # fmt: skip


def train(architecture: str, dtype: str, steps: int, model: str) -> None:
    """Run examples/grpo_addition.py with another architecture and trainer dtype."""
    sys.path.insert(0, str(EXAMPLES))
    import grpo_addition
    import torch
    import transformers

    name = ARCHITECTURES[architecture]
    own = getattr(transformers, f"{name}ForCausalLM")

    class InDtype(own):
        @classmethod
        def from_pretrained(cls, folder: str, **options: Any) -> Any:
            return own.from_pretrained(folder, **options | {"dtype": getattr(torch, dtype)})

    grpo_addition.Qwen3Config = getattr(transformers, f"{name}Config")
    grpo_addition.Qwen3ForCausalLM = InDtype
    InDtype.__name__ = own.__name__
    # vLLM has no Olmo2 of its own: it decorates transformers' class, and calls of the trainer's instance read this.
    getattr(transformers, f"{name}Model").do_not_compile = True
    sys.argv = ["grpo_addition.py", "--steps", str(steps), "--model", model]
    grpo_addition.main()


def record(given: argparse.Namespace) -> None:
    """Record `train` in a process of its own."""
    command = [sys.executable, __file__, "train", given.architecture, f"{given.trace}-model"]
    command += ["--dtype", given.dtype, "--steps", given.steps or "64"]
    subprocess.run(["tim-trace", "record", "-o", given.trace, "--force", "--", *command], check=True)


def predict(given: argparse.Namespace) -> None:
    """Write the predictions of all remedies from the given steps."""
    from tim_trace.analysis import triangulate

    found = triangulate(given.trace, steps=given.steps, predict=given.remedies or REMEDIES)
    rows = [asdict(each) for each in found.predictions]
    given.output.write_text(json.dumps({"trace": given.trace, "steps": found.steps, "predictions": rows}, indent=1))


def score(given: argparse.Namespace) -> None:
    """Replay the remedies at the other steps, and print how often the intervals hold, per metric and remedy."""
    rows = [row for path in given.files for row in scored(json.loads(path.read_text()))]
    rows = [
        row for row in rows if row["value"] is None or row["value"] != row["recorded"]
    ]  # a remedy that changes nothing
    print(f"{'':<20} predictions  told  zero  held of told  median width  held of all intervals")
    for key in ("all", "metric", "remedy", "file"):
        for value in dict.fromkeys(row.get(key) for row in rows):
            own = [row for row in rows if row.get(key) == value]
            told = [row for row in own if row["code"] is None]
            bounds = [row for row in own if row["high"] is not None]
            widths = [(row["high"] - row["low"]) / row["value"] for row in told if row["value"]]
            zero = sum(row["value"] == row["high"] for row in told)
            print(
                f"{value or 'all':<20} {len(own):>11} {len(told):>5} {zero:>5} {_share(told):>13} "
                f"{np.median(widths) if widths else np.nan:>13.2f} {_share(bounds):>22}"
            )


def _share(rows: list[dict[str, Any]]) -> str:
    held = sum(row["low"] <= row["actual"] <= row["high"] for row in rows)
    return f"{held}/{len(rows)} {held / len(rows):.0%}" if rows else "none"


def scored(file: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a file's predictions with what the remedy left at the other steps, as `actual`."""
    from tim_trace.analysis.objective.pass_roles import choose_loss, choose_sides
    from tim_trace.analysis.prediction import Sums, parse_remedies, read_sums, replay_missing, size_of
    from tim_trace.analysis.views import open_database
    from tim_trace.replay.recorded import RecordedRun
    from tim_trace.tracer.progress import no_progress

    run = RecordedRun(file["trace"])
    others = [step for step in run.steps("train") if step not in file["steps"]]
    left: dict[str, Sums] = {}
    texts = list(dict.fromkeys(row["remedy"] for row in file["predictions"] if row["high"] is not None))
    for remedy in parse_remedies(run, others, texts, None):
        replay_missing(run, remedy.arms, others, no_progress)
        database = open_database([file["trace"]], steps=", ".join(map(str, others)))
        sides = choose_sides(database, choose_loss(database, None)[0])
        left[remedy.text] = read_sums(database, remedy.pairs[2], sides, no_progress)
    rows = []
    for row in file["predictions"]:
        more = {"all": "all", "file": f"{Path(file['trace']).name}, {len(file['steps'])} steps"}
        if row["high"] is not None:
            size = float(size_of(row["metric"], left[row["remedy"]])[0])
            more["actual"] = 1 - size if row["metric"] == "ess_token" else size
        rows.append(row | more)
    return rows


def main() -> None:
    """Run a command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands: dict[str, Callable[[Any], None]] = {"record": record, "predict": predict, "score": score}
    parser.add_argument("command", choices=[*commands, "train"])
    parser.add_argument("arguments", nargs="+")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--steps")
    parser.add_argument("--remedies", nargs="*")
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    if given.command == "score":
        given.files = [Path(path) for path in given.arguments]
    elif given.command == "predict":
        (given.trace,) = given.arguments
    else:
        given.architecture, given.trace = given.arguments
    if given.command == "train":
        train(given.architecture, given.dtype, int(given.steps), given.trace)
    else:
        commands[given.command](given)


if __name__ == "__main__":
    main()
