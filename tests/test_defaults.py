"""The defaults of every verb on the demo's own trace, shortened."""

import json
import sys

import pytest
from builders import ROOT, run
from shared import made_once
from tim_trace import cli
from verbs import WORDS, answer

EXAMPLE = ROOT / "examples" / "grpo_addition.py"
STEPS = 10


def test_no_verb_is_forgotten():
    assert set(WORDS) == set(cli.main.commands)


@pytest.fixture(scope="module")
def demo():
    """The demo, recorded with weights and its engine, of few steps: it takes its time to begin."""

    def make(folder):
        command = [sys.executable, EXAMPLE, "--steps", STEPS]
        done = run(sys.executable, "-m", "tim_trace", "record", "-o", folder / "run", "--", *command, cwd=folder)
        assert done.code == 0, done.stderr[-3000:]

    return made_once((EXAMPLE.name, STEPS, "recorded"), make) / "run"


@pytest.mark.engine
@pytest.mark.parametrize("verb", WORDS)
def test_a_verb_s_defaults_work_on_the_demo(demo, tmp_path, monkeypatch, verb):
    row = {"step": 1, "prompt_ids": [1], "response_ids": [2, 3], "rollout_logprobs": [-0.5, -1.0]}
    (tmp_path / "dump.jsonl").write_text(json.dumps(row) + "\n")
    monkeypatch.chdir(tmp_path)
    answer(verb, run=demo, new=tmp_path / "new", dump=tmp_path / "dump.jsonl")


@pytest.mark.engine
def test_locate_puts_operators_of_the_demo_s_trainer_into_float64(demo):
    done = answer("locate", "--steps", str(STEPS), "--json", run=demo)
    takers = {each["taker"] for each in json.loads(done.stdout)["patches"]}
    assert takers == {"a", "b"}
