"""Kill a piece of work just before one of its changes to the disk, and tell what is left; again and again.

usage: deaths.py WORK FOLDER SEED COUNT. COUNT places are drawn, or all are taken with 0. Prints the changes that the whole
work makes, and then a JSON object a death. Everything runs in forks of this process, which does nothing itself: a library's
threads do not survive a fork.
"""

import json
import os
import random
import shutil
import signal
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from builders import add_step, make_batch, make_trace
from tim_trace.analysis.info import info
from tim_trace.analysis.report.report import report
from tim_trace.analysis.stats import stats
from tim_trace.analysis.trace.sums import summarize
from tim_trace.analysis.verify import verify
from tim_trace.schemas.errors import TimTraceError
from tim_trace.tracer.importers.neutral import import_parquet
from tim_trace.tracer.launch import record
from tim_trace.tracer.recorder import Recorder
from tim_trace.tracer.seal import adopt
from tim_trace.tracer.weights.writer import WeightWriter

CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.utime", "shutil.rmtree", "subprocess.Popen")
"""What Python announces before it does it, besides files that it opens for writing."""

OLD_STEPS, NEW_STEPS = 3, 5
WORK, FOLDER, SEED, COUNT = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
RUN = FOLDER / "run"


def rows_file():
    path = FOLDER / "rows.jsonl"
    if not path.exists():
        lines = [
            {
                "step": step,
                "response_ids": batch["response_ids"][row],
                "prompt_ids": batch["prompt_ids"][row],
                "rollout_logprobs": batch["rollout"][row].tolist(),
                "train_logprobs": batch["train"][row].tolist(),
            }
            for step in range(1, NEW_STEPS + 1)
            for batch in [make_batch(seed=100 + step)]
            for row in range(4)
        ]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def old_trace():
    make_trace(RUN, steps=OLD_STEPS)
    summarize(RUN)


def killed_trace():
    """A trace whose writer died with three segments, one of them sealed."""
    if os.fork() == 0:  # here, too, so that no thread is left
        recorder = Recorder(RUN)
        for step in range(1, OLD_STEPS + 1):
            add_step(recorder, step, make_batch(seed=step), seq_ids=[f"{step}-{row}" for row in range(4)])
            recorder.add_metrics(step, {"loss": 0.5 * step, "learning_rate": 1e-6})
            recorder.flush()
            if step == 1:
                recorder.writer.submit(recorder.writer.segments.seal, 0)
        recorder.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    os.wait()


def record_again(force):
    with Recorder(RUN, force=force) as recorder:
        for step in range(1, NEW_STEPS + 1):
            add_step(recorder, step, make_batch(seed=100 + step), seq_ids=[f"{step}-{row}" for row in range(4)])
            recorder.flush()


def keep_weights():
    import torch

    RUN.mkdir()
    with Recorder(RUN) as recorder:
        tensors = {"a": torch.zeros(40, 8), "b": torch.ones(8, dtype=torch.bfloat16)}
        writer = WeightWriter(
            recorder.folder, recorder.writer.name, recorder.writer.account, versions_a_keyframe=2, most_a_keyframe=2
        )
        recorder.writer._weights = writer
        for version in range(4):
            tensors["a"][version, version] += 1 + version
            writer.snapshot(version, tensors)
            add_step(recorder, version + 1, make_batch(seed=version))
            recorder.flush()


WORKS = {
    "import": (old_trace, lambda: import_parquet(rows_file(), output=RUN, force=True)),
    "first-import": (rows_file, lambda: import_parquet(rows_file(), output=RUN)),
    "record": (old_trace, lambda: record([sys.executable, "-S", "-c", ""], output=RUN, force=True)),
    "recorder": (old_trace, lambda: record_again(force=True)),
    "adopt": (killed_trace, lambda: adopt(RUN)),
    "sums": (lambda: make_trace(RUN, steps=OLD_STEPS), lambda: summarize(RUN)),
    "report": (old_trace, lambda: report([str(RUN)], output=str(FOLDER / "page.html"), force=True)),
    "verify": (old_trace, lambda: verify(str(RUN))),
    "weights": (lambda: None, keep_weights),
}


def die_before(number):
    """Have this process killed before its change of that number, from 0; return the list of those that it made."""
    me, made = os.getpid(), []

    def watch(event, arguments):
        is_write = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if os.getpid() == me and (event in CHANGES or is_write):
            if len(made) == number:
                os.kill(me, signal.SIGKILL)
            made.append([event, str(arguments[0])])

    sys.addaudithook(watch)
    return made


def look(path):
    """What a reader is told of a trace."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = info(str(path))
        except TimTraceError as error:
            return {"error": str(error)}
        told = {
            "steps": found.num_steps, "sequences": found.num_sequences, "damaged": found.damaged, "ignored": found.ignored,
            "state": found.state, "source": found.source,
        }  # fmt: skip
        if WORK == "sums":
            told["mean_abs_d"] = stats(str(path)).dicts()[0]["mean_abs_d"]
        whole = verify(str(path))
        return told | {"is_whole": whole.is_whole, "verify": whole.damaged}


def inspect():
    told = {"there": look(RUN), "aside": [look(path) for path in sorted(RUN.glob(".tmp-replaced-*"))]}
    # What the next command makes of it: it puts back what was moved, and refuses.
    try:
        import_parquet(rows_file(), output=RUN)
        told["next"] = "imported"
    except TimTraceError as error:
        told["next"] = str(error)
    told["then"] = look(RUN) if "error" in told["there"] else told["there"]
    told["temporaries"] = sorted(path.name for path in RUN.glob(".tmp-new-*"))
    if WORK == "report":
        page = FOLDER / "page.html"
        told["page"] = page.read_text(encoding="utf-8")[-30:] if page.exists() else None
    return told


def in_child(work):
    """Do something in a fork, and return how it ended and what it told."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        code = 1
        try:
            with os.fdopen(writing, "w") as out:
                json.dump(work(), out, default=str)
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as file:
        told = file.read()
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), told


def attempt(number):
    made = die_before(number)
    WORKS[WORK][1]()
    return made


def main():
    prepared = FOLDER / "prepared"
    code, _ = in_child(lambda: WORKS[WORK][0]() and None)
    assert code == 0
    if RUN.exists():
        RUN.rename(prepared)
    changes, numbers = [], [None]
    while numbers:
        number = numbers.pop()
        shutil.rmtree(RUN, ignore_errors=True)
        if prepared.exists():
            shutil.copytree(prepared, RUN)
        code, made = in_child(lambda number=number: attempt(number))
        found, told = in_child(inspect)
        assert found == 0, told
        if number is None:
            assert code == 0
            changes = json.loads(made)
            numbers = list(range(len(changes)))
            numbers = random.Random(SEED).sample(numbers, min(COUNT, len(numbers))) if COUNT else numbers
            print(json.dumps({"changes": changes} | json.loads(told)), flush=True)
        else:  # threads may have made the changes in another order, and fewer of them
            assert code in (0, -signal.SIGKILL)
            print(
                json.dumps({"number": number, "before": changes[number], "code": code} | json.loads(told)), flush=True
            )


if __name__ == "__main__":
    main()
