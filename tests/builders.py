"""Traces with known content, and commands as a user runs them."""

import json
import os
import socket
import subprocess
import sys
from atexit import register
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from resource import RLIM_INFINITY
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
from click.testing import CliRunner
from forged import reseal, rewrite_table
from fuzz_runner import Runner
from shared import one_at_a_time
from tim_trace import cli
from tim_trace.schemas.documents import contract_hash
from tim_trace.tracer.recorder import Recorder

ROOT = Path(__file__).parent.parent
PROGRAMS = ROOT / "tests" / "programs"


def _command():
    """The command `tim-trace`; where the package is linked rather than installed, as on a borrowed GPU, one that is made here."""
    installed = Path(sys.executable).parent / "tim-trace"
    if installed.exists():
        return installed
    folder = TemporaryDirectory(prefix="tim-trace-command-")
    register(folder.cleanup)
    made = Path(folder.name) / "tim-trace"
    made.write_text(f"#!{sys.executable}\nfrom tim_trace.cli import main\n\nmain()\n")
    made.chmod(0o755)
    return made


TIM_TRACE = _command()


@dataclass
class Finished:
    """A command that ended."""

    code: int
    stdout: str
    stderr: str

    def json(self):
        """What `--json` printed: of a table its rows."""
        found = json.loads(self.stdout)
        return found["rows"] if set(found) == {"json_version", "damaged", "rows"} else found


def uses_vllm(words):
    """Whether a command may start an engine of vLLM."""
    return any(
        "vllm" in word or word.endswith(("generate.py", "grpo_addition.py", "grpo_smollm2.py")) for word in words
    )


def free_port():
    """A port that nothing listens on: a trainer that was killed may hold that of the one before."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run(*arguments, env=None, cwd=None, stdin=None, timeout=600):
    """Run a command to its end."""
    words = [str(argument) for argument in arguments]
    with one_at_a_time() if uses_vllm(words) else nullcontext():
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            env=os.environ | {"MASTER_PORT": str(free_port())} | (env or {}),
            cwd=cwd,
            input=stdin,
            timeout=timeout,
            check=False,
        )
    return Finished(done.returncode, done.stdout, done.stderr)


READING = {
    "attribute", "check", "compare", "corrections", "diagnose", "dynamics", "export", "gate", "import", "info", "objective", "query", "report",
    "sql", "stats", "verify", "weights",
}  # fmt: skip
REPLAYING = {"gradient", "replay", "triangulate"}


def tim_trace(*arguments, **options):
    """Run tim-trace as a user does, without waiting again for Python and what a verb imports where that is no matter.

    A forked child of a process that has imported it all runs verbs that start no process and no engine of vLLM; `locate` runs in
    this process, which has imported torch where a test asks for it.
    """
    words = [str(argument) for argument in arguments]
    if not options.keys() - {"cwd", "stdin"} and not uses_vllm(words):
        if words[0] in READING:
            return forked(reader(), words, **options)
        if words[0] in REPLAYING:
            return forked(replayer(), words, **options)
        if words[0] == "locate" and not options:
            return in_process(words)
    return run(TIM_TRACE, *words, **options)


def in_process(words):
    """Run a verb here; an exception that is no exit is raised."""
    done = CliRunner().invoke(cli.main, words, catch_exceptions=False)
    return Finished(done.exit_code, done.stdout, done.stderr)


def forked(runner, words, cwd=None, stdin=None):
    """Run a verb with the environment and the folder that this process has now."""
    ended = runner.run(words, cwd or Path.cwd(), 600, env=dict(os.environ), stdin=stdin or "")
    assert ended.code is not None, f"{words}: still running after 600 s"
    return Finished(ended.code, ended.stdout, ended.stderr)


@cache
def reader():
    verbs = [f"tim_trace.analysis.{name}" for name in ("diagnosis.diagnose", "report.report", "stats", "verify")]
    return warm_runner(*verbs, "pyarrow.parquet", "rich.table", "zarr")


@cache
def replayer():
    verbs = [f"tim_trace.{name}" for name in ("replay.engine", "replay.gradients.engine", "analysis.triangulate")]
    return warm_runner(*verbs, "transformers.models.qwen3.modeling_qwen3", "trl.trainer.grpo_trainer")


def warm_runner(*modules):
    folder = TemporaryDirectory(prefix="tim-trace-runner-")
    runner = Runner(folder.name, modules=modules, address_space=RLIM_INFINITY)
    register(folder.cleanup)
    register(runner.close)
    return runner


def make_batch(rows=4, seed=0, longest=6):
    """Random prompts, responses and logprobs of two passes, as lists; train lies a little off rollout."""
    draw = np.random.default_rng(seed)
    lengths = draw.integers(1, longest + 1, rows)
    rollout = [(-draw.exponential(1.0, n)).astype(np.float32) for n in lengths]
    train = [np.minimum(r + draw.normal(0, 0.05, len(r)).astype(np.float32), 0) for r in rollout]
    return {
        "prompt_ids": [draw.integers(0, 50, draw.integers(1, 4)).tolist() for _ in range(rows)],
        "response_ids": [draw.integers(0, 50, n).tolist() for n in lengths],
        "rollout": rollout,
        "train": train,
        "reward": draw.normal(size=rows),
        "advantage": draw.normal(size=rows),
    }


def add_step(recorder, step, batch, passes=("rollout", "train"), **sequence_options):
    """Record one step of a batch made by `make_batch`."""
    added = recorder.add_sequences(
        step=step,
        prompt_ids=batch["prompt_ids"],
        response_ids=batch["response_ids"],
        reward=batch["reward"],
        advantage=batch["advantage"],
        policy_version=step - 1,
        **sequence_options,
    )
    for name in passes:
        recorder.add_scores(name, added, logprobs=batch[name])
    return added


def make_trace(path, steps=3, rows=4, passes=("rollout", "train"), first=1):
    """Write a small trace and return what is in it, a batch a step."""
    batches = {step: make_batch(rows, seed=step) for step in range(first, first + steps)}
    with Recorder(path) as recorder:
        recorder.add_contract("rollout", {"engine": "vllm", "dtype": "bfloat16"})
        recorder.add_contract("train", {"engine": "trl", "dtype": "float32"})
        for step, batch in batches.items():
            add_step(recorder, step, batch, passes, seq_ids=[f"{step}-{row}" for row in range(rows)])
            recorder.add_metrics(step, {"loss": 0.5 * step, "learning_rate": 1e-6})
    return batches


def change_contract(path, pass_name, change):
    """Give a pass the contract that `change` makes of its own."""
    names = {}
    for file in (path / "passes" / pass_name).iterdir():
        content = json.loads(file.read_text())
        content["contract"] = change(content["contract"])
        names[file.stem] = contract_hash(content["contract"])
        file.unlink()
        file.with_stem(names[file.stem]).write_text(json.dumps(content))

    def renamed(table):
        place = table.column_names.index("contract")
        hashes = [names.get(name, name) for name in table["contract"].to_pylist()]
        return table.set_column(place, table.schema.field(place), pa.array(hashes, table.schema.field(place).type))

    for file in (path / "scores").iterdir():
        rewrite_table(file, renamed)
    for file in (path / "writers").iterdir():
        text = file.read_text()
        for before, after in names.items():
            text = text.replace(f"passes/{pass_name}/{before}.json", f"passes/{pass_name}/{after}.json")
        file.write_text(text)
    reseal(path)
