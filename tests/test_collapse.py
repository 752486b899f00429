"""The laboratory of collapses: its engine is exact where it says so, twins share all but a switch, and runs record themselves."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

LABORATORY = Path(__file__).parent.parent / "benchmarks" / "collapse"


@pytest.fixture(scope="module")
def laboratory():
    """The modules of benchmarks/collapse, with models that are taught a little only."""
    sys.path.insert(0, str(LABORATORY))
    import causes
    import laboratory as trainer
    import models
    import switches

    models._RIGHT_ENOUGH = 0.2
    yield {"causes": causes, "trainer": trainer, "switches": switches}
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
    from tim_trace.analysis.database import connect

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
    from tim_trace.analysis.attribution.rollouts import read_rollouts, relation
    from tim_trace.analysis.database import Database

    moved, sound = (read_rollouts(Database(str(made[name] / "trace"))) for name in ("moved", "sound"))
    assert relation(sound, "reward", "advantage").by_group == pytest.approx(1.0, abs=1e-3)
    assert relation(moved, "reward", "advantage").by_group < 0.7


def test_truth_is_held_against_the_twin(laboratory, made):
    folder = made["sound"].parent
    for name, cause in (("sound", "sound"), ("coarse", "quantised")):
        plan = json.loads((folder / name / "plan.json").read_text())
        plan["evaluations"] = [0.8] * 10 + ([0.8] * 10 if name == "sound" else [0.3] * 10)
        (folder / name / "plan.json").write_text(json.dumps(plan))
        (folder / name / "label.json").write_text(json.dumps({"cause": cause, "twin": "sound"}))
    from truth import truths

    found = {truth.folder.name: truth.expected for truth in truths(folder)}
    assert found == {"coarse": "mismatch", "sound": "none"}


def test_every_run_of_a_split_has_its_twin(laboratory):
    members = laboratory["causes"].members(laboratory["causes"].SPLITS["heldout"], 6)
    names = {member.plan.name for member in members}
    assert all(member.twin in names for member in members)
    assert len(names) == len(members) == 6 * (1 + len(laboratory["causes"].CAUSES))
