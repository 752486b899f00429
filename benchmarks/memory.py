"""Measure the memory of recording and replaying."""

import subprocess
import sys
import tempfile

import numpy as np
from comparison import Comparison
from peak import Peak, can_reset
from replaying import record_steps, small_model
from steps import make_step, record
from tim_trace.replay.engine import replay
from tim_trace.tracer.recorder import Recorder

WORDS, LENGTH, PROMPT = 150_000, 8_192, 16


def compare():
    """Measure the peak memory added by recording 20 million tokens and by replaying a large vocabulary."""
    if not can_reset():
        print("  skipped: on this system a process cannot reset its peak memory")
        return
    yield Comparison(
        what="recording 20 steps of a million tokens", values=_gained("recording"), unit=" MB", at_most=512
    )
    yield Comparison(
        what=f"replaying a sequence of {LENGTH:,} tokens out of {WORDS:,}, over the model's own bytes",
        values=_gained("replaying"),
        unit=" MB",
        at_most=1000,
    )


def _gained(what):
    command = [sys.executable, __file__, what]
    return [float(subprocess.run(command, check=True, capture_output=True).stdout.split()[-1]) for _ in range(3)]


def main(what):
    with tempfile.TemporaryDirectory() as folder:
        print(_recording(f"{folder}/trace") if what == "recording" else _replaying(f"{folder}/trace"))


def _recording(trace):
    step = make_step(0)
    peak = Peak()
    with Recorder(trace) as recorder:
        for number in range(1, 21):
            record(recorder, number, step)
    return peak.gained()


def _replaying(trace):
    model = small_model(vocab_size=WORDS, hidden_size=256, intermediate_size=512, num_hidden_layers=2)
    record_steps(trace, model, [[np.random.default_rng(0).integers(0, WORDS, LENGTH)]], PROMPT, 1)
    own = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()) / 2**20
    del model
    peak = Peak()
    replay(trace)
    return peak.gained() - own


if __name__ == "__main__":
    main(sys.argv[1])
