"""The laboratory of collapses: its engine is exact where it says so, twins share all but a switch, and runs record themselves."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

LABORATORY = Path(__file__).parent.parent / "benchmarks" / "collapse"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def laboratory():
    """The modules of benchmarks/collapse, with models that are taught a little only."""
    sys.path.insert(0, str(LABORATORY))
    import causes
    import laboratory as trainer
    import models
    import switches
    import torch

    models._RIGHT_ENOUGH = 0.2
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # the models are too small for more
    yield {"causes": causes, "trainer": trainer, "switches": switches}
    torch.set_num_threads(before)
    sys.path.remove(str(LABORATORY))


@pytest.fixture(scope="module")
def made(laboratory, tmp_path_factory):
    """Name -> folder of short runs of one seed."""
    folder = tmp_path_factory.mktemp("laboratory")
    Plan, Switches = laboratory["trainer"].Plan, laboratory["switches"].Switches
    wanted = {
        "sound": Switches(),
        "exact": Switches(exact=True),
        "coarse": Switches(weight_bits=3),
        "later": Switches(inverted_reward=1.0, begins=0.5),
        "stale": Switches(stale=2),
        "moved": Switches(pairing=1, pairs_advantages=True),
    }
    for name, switches in wanted.items():
        plan = Plan(task="sum", algorithm="grpo", rate=2e-4, steps=10, switches=switches)
        laboratory["trainer"].perform(plan, folder / name, folder / "models")
    return {name: folder / name for name in wanted}


def asked(folder, query):
    from tim_trace.analysis.views import connect

    return connect(str(folder / "trace")).execute(query).fetchall()


GAP = "SELECT max(abs(d)), avg(abs(d)), count(*) FROM pair('train', 'rollout') WHERE mask"
REWARDS = "SELECT step, reward FROM sequences ORDER BY step, seq_id"
IDS = "SELECT step, response_ids FROM sequences ORDER BY step, seq_id"


def test_the_exact_engine_has_no_mismatch(made):
    largest, _, count = asked(made["exact"], GAP)[0]
    assert (largest, count > 1000) == (0.0, True)


def test_a_cached_engine_rounds_and_a_coarse_one_does_more(made):
    sound, coarse = (asked(made[name], GAP)[0][1] for name in ("sound", "coarse"))
    assert 0 < sound < 1e-5
    assert coarse > 0.05


def test_twins_are_the_same_until_the_switch_is_thrown(made):
    own, sound = (asked(made[name], REWARDS) for name in ("later", "sound"))
    assert [row for row in own if row[0] <= 5] == [row for row in sound if row[0] <= 5]
    at_six = [np.array([reward for step, reward in rows if step == 6]) for rows in (own, sound)]
    assert at_six[0] == pytest.approx(1 - at_six[1])
    assert asked(made["later"], IDS)[: 6 * 64] == asked(made["sound"], IDS)[: 6 * 64]


def test_a_stale_engine_says_which_version_sampled(made):
    rows = asked(
        made["stale"], "SELECT step, min(policy_version), max(policy_version) FROM sequences GROUP BY 1 ORDER BY 1"
    )
    assert rows == [(step, max(0, 2 * (step - 1 - 2)), max(0, 2 * (step - 1 - 2))) for step in range(1, 11)]
    assert asked(made["stale"], GAP + " AND step <= 1")[0][0] < 1e-4


def test_advantages_can_lie_in_the_wrong_rows_while_rewards_do_not(made):
    from tim_trace.analysis.facts.relations import relation
    from tim_trace.analysis.facts.rollouts import read_rollouts
    from tim_trace.analysis.views import open_database

    moved, sound = (read_rollouts(open_database(str(made[name] / "trace"))) for name in ("moved", "sound"))
    assert relation(sound, "reward", "advantage").by_group == pytest.approx(1.0, abs=1e-3)
    assert relation(moved, "reward", "advantage").by_group < 0.7


def test_truth_is_held_against_the_twin(laboratory, made):
    folder = made["sound"].parent
    for name, cause, detail in (("sound", "sound", "sound"), ("coarse", "mismatch", "quantised")):
        plan = json.loads((folder / name / "plan.json").read_text())
        plan["evaluations"] = [0.8] * 10 + ([0.8] * 10 if name == "sound" else [0.3] * 10)
        (folder / name / "plan.json").write_text(json.dumps(plan))
        (folder / name / "label.json").write_text(json.dumps({"cause": cause, "detail": detail, "twin": "sound"}))
    from truth import truths

    found = {truth.folder.name: truth.expected for truth in truths(folder)}
    assert found == {"coarse": "mismatch", "sound": "none"}


def test_every_run_of_a_split_has_its_twin(laboratory):
    members = laboratory["causes"].members("heldout", 6)
    names = {member.name for member in members}
    assert all(member.label["twin"] in names for member in members)
    assert len(names) == len(members) == 6 * (1 + len(laboratory["causes"].CAUSES))


def test_the_cosine_ends_near_a_tenth_and_length_decay_acts_on_a_surge_alone(laboratory):
    from schedules import Schedule

    cosine, decay = Schedule("cosine"), Schedule("length_decay")
    assert (cosine.factor(0.0), cosine.factor(0.5), cosine.factor(1.0)) == pytest.approx((1.0, 0.55, 0.1))
    factors = []
    for length in [8.0] * 30 + [20.0] * 200:
        factors.append(decay.factor(0.0))
        decay.observe(length)
    assert set(factors[:33]) == {1.0}
    assert sorted(set(factors), reverse=True) == [1.0, 0.5, 0.25, 0.125]  # surge at 33: every 59 steps, of 230


def test_an_engine_in_fp16_rounds_less_than_one_in_bf16(laboratory):
    import torch
    from engine import Engine
    from models import build

    torch.manual_seed(0)
    model = build("llama")
    rows = {}
    for dtype in (None, "fp16", "bf16"):
        engine = Engine(model, laboratory["switches"].Switches(engine_dtype=dtype), 0)
        rows[dtype] = engine.generate(torch.arange(4, 12).view(2, 4), 3, torch.zeros(3, 2, 16), is_wrong=True).logprobs
    fp16, bf16 = (float((rows[dtype] - rows[None]).abs().mean()) for dtype in ("fp16", "bf16"))
    assert 0 < 2 * fp16 < bf16


def test_a_remedy_that_would_be_the_sound_twin_is_none(laboratory):
    from remedy import REMEDIES

    of_cache = {"cache": "int2", "engine_dtype": "bf16", "weight_bits": None}
    names = {remedy.name for remedy in REMEDIES if remedy.kind == "precision" and remedy.applies(of_cache)}
    assert names == {
        "KV cache: int4 for int2", "KV cache: fp8 for int2", "engine: fp16 for bf16", "engine: float32 for bf16",
    }  # fmt: skip


def test_more_bits_are_foretold_to_take_more_of_the_gap_away(laboratory, made, monkeypatch, tmp_path):
    import foretold
    from remedy import REMEDIES

    monkeypatch.setattr(foretold, "WEIGHTS_EVERY", 2)
    coarse = laboratory["switches"].Switches(weight_bits=3)
    plan = laboratory["trainer"].Plan(task="sum", algorithm="grpo", rate=2e-4, steps=2, switches=coarse)
    laboratory["trainer"].perform(plan, tmp_path, made["sound"].parent / "models", weights_every=2)
    said = json.loads((tmp_path / "plan.json").read_text())
    found = {}
    for remedy in REMEDIES:
        if remedy.name.startswith("weights"):
            found[remedy.name[9]] = foretold.foretold(str(tmp_path / "trace"), str(tmp_path / "trace"), remedy, said)
    assert 0 < found["4"].by_replay < found["8"].by_replay < 1
    assert found["4"].by_objective < found["8"].by_objective < 1


def test_equal_values_share_a_rank(laboratory, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # importing it sets this
    from remedies import _ranks

    assert _ranks(np.array([3.0, 1.0, 3.0, 2.0])).tolist() == [3.5, 1.0, 3.5, 2.0]
