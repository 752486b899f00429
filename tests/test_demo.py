"""The demo's two trainings: the sound one goes on learning, and the one whose engine goes wrong on the way falls."""

import re
import sys
from statistics import mean

import pytest
from builders import ROOT, run
from shared import made_once

pytestmark = [pytest.mark.engine, pytest.mark.slow]

EXAMPLE = ROOT / "examples" / "grpo_addition.py"


def rewards(*options):
    """The mean rewards that the example logs, each of ten steps."""

    def make(folder):
        done = run(sys.executable, EXAMPLE, "--steps", 160, *options, cwd=folder)
        assert done.code == 0, done.stderr[-3000:]
        (folder / "printed").write_text(done.stdout)

    printed = (made_once((EXAMPLE.name, *options), make) / "printed").read_text()
    return [float(reward) for reward in re.findall(r"'reward': '([^']+)'", printed)]


def test_the_reward_falls_where_the_engine_goes_wrong_and_does_not_without():
    sound, broken = rewards(), rewards("--coarse-from", "121")
    assert len(sound) == len(broken) == 16
    assert broken[:12] == sound[:12]
    assert mean(sound[14:]) > 0.8 * max(sound[:12])
    assert mean(broken[14:]) < 0.6 * mean(sound[14:])
