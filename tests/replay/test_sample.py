"""Replaying a random share of the groups."""

import json

import numpy as np
import pytest
from builders import tim_trace
from grouped import record_groups
from hypothesis import given
from hypothesis import strategies as st
from tim_trace.analysis.check.check import check
from tim_trace.analysis.info import info
from tim_trace.analysis.views import connect
from tim_trace.replay.engine import replay
from tim_trace.replay.sample import SEED, parse_sample, places
from tim_trace.schemas.errors import InvalidOption, SampleWarning

pytestmark = pytest.mark.engine


@pytest.fixture
def trace(tmp_path):
    return record_groups(tmp_path / "run")


def scores(trace, name):
    query = f"SELECT step, seq_id, logprobs FROM scores WHERE pass = 'replay/{name}' ORDER BY ALL"
    return {(step, seq_id): values for step, seq_id, values in connect(trace).execute(query).fetchall()}


def groups_of(trace, name):
    query = f"""SELECT step, group_id, count(*) FROM scores JOIN sequences USING (step, seq_id)
                WHERE pass = 'replay/{name}' GROUP BY ALL ORDER BY ALL"""
    return connect(trace).execute(query).fetchall()


@pytest.mark.slow
def test_a_sample_has_whole_groups_of_every_step_and_the_bits_of_the_whole(trace, tmp_path):
    arms = ["dtype=bf16", "batch-size=1", "padding=packed", "engine=exact"]
    whole = record_groups(tmp_path / "whole")
    replay(whole, arm=arms)
    results = replay(trace, sample=0.34, arm=arms)
    assert results.sample.num_groups == 18
    for name in ("as-recorded", "bf16", "batch-size-1", "exact"):
        found, all_of_them = scores(trace, name), scores(whole, name)
        assert 0 < len(found) < len(all_of_them)
        assert all(values == all_of_them[key] for key, values in found.items()), name
    for name in ("as-recorded", "padding-packed"):
        found = groups_of(trace, name)
        assert {step for step, _, _ in found} == {0, 1, 2}
        assert {size for _, _, size in found} == {4}
        assert len(found) in (6, 7)


@pytest.mark.slow
def test_a_larger_sample_adds_to_the_smaller_and_scores_nothing_twice(trace, monkeypatch):
    from tim_trace.replay.hf_scorer import HfScorer

    scored = []
    score = HfScorer.score

    def counted(self, rows, *told):
        scored.extend(row.seq_id for row in rows)
        return score(self, rows, *told)

    monkeypatch.setattr(HfScorer, "score", counted)
    replay(trace, sample=0.2, batch_size=1)
    small, first = scores(trace, "batch-size-1"), len(scored)
    results = replay(trace, sample="16", batch_size=1)
    larger = scores(trace, "batch-size-1")
    assert small.items() < larger.items()
    assert results.sample.num_drawn == len(larger) // 4
    monkeypatch.undo()
    with pytest.raises(InvalidOption, match="has already scored all of these sequences"):
        replay(trace, sample="16", batch_size=1)
    assert first < len(scored)
    rest = replay(trace, batch_size=1)
    assert sum(step.num_tokens for step in rest if step.arm == "batch-size-1") == sum(
        len(values) for values in scores(trace, "batch-size-1").values()
    )
    assert len(scores(trace, "batch-size-1")) == 72
    twice = "SELECT count(*) FROM (SELECT step, seq_id FROM scores WHERE pass LIKE 'replay/b%' GROUP BY ALL HAVING count(*) > 1)"
    assert connect(trace).execute(twice).fetchall() == [(0,)]
    assert larger.items() < scores(trace, "batch-size-1").items()
    with pytest.raises(InvalidOption, match="has already scored all of these steps"):
        replay(trace, batch_size=1)


@pytest.mark.slow
def test_what_a_sample_lacks_is_no_fault_and_is_said(trace):
    replay(trace, sample=0.5, dtype="bf16")
    with pytest.warns(SampleWarning, match="replay/bf16 is a sample: 36 of 72 sequences in its steps"):
        found = check(trace, pair="replay/bf16:train")
    replay(trace, dtype="bf16")
    whole = check(trace, pair="replay/bf16:train")
    assert [finding.code for finding in found.findings] == [finding.code for finding in whole.findings]
    (bf16,) = [row for row in info(trace).passes if row.name == "replay/bf16"]
    assert bf16.note is None


@pytest.mark.slow
def test_info_and_stats_say_what_is_a_sample(trace):
    replay(trace, sample=0.5, dtype="bf16")
    assert not info(trace).missing
    (bf16,) = [row for row in info(trace).passes if row.name == "replay/bf16"]
    assert bf16.note == "a sample: 36 of 72 sequences in its steps"
    done = tim_trace("stats", trace, "--pair", "replay/bf16:train")
    assert done.stderr == "tim-trace: replay/bf16 is a sample: 36 of 72 sequences in its steps\n"


def test_the_contract_says_that_it_is_a_sample(trace):
    replay(trace, sample=0.5, dtype="bf16")
    query = "SELECT contract_json ->> '$.sample' FROM passes WHERE pass = 'replay/bf16'"
    ((text,),) = connect(trace).execute(query).fetchall()
    assert json.loads(text) == {"of": "groups, stratified by step", "seed": SEED}


@pytest.mark.slow
def test_the_command_says_what_was_drawn(trace):
    done = tim_trace("replay", trace, "--sample", "0.6", "--dtype", "bf16", "--json")
    assert {row["arm"] for row in done.json()} == {"as-recorded", "bf16"}
    assert f"sampled 11 of 18 groups (share 0.6, seed {SEED})" in done.stderr


@pytest.mark.parametrize("text", ["0", "-1", "many", "1.5", "nan", "inf"])
def test_what_is_no_sample_is_refused(trace, text):
    with pytest.raises(InvalidOption, match="pass a fraction below 1"):
        replay(trace, sample=text)


def test_a_share_that_draws_nothing_is_refused(trace):
    with pytest.raises(InvalidOption, match=r"none of the 18 groups \(72 sequences\)"):
        replay(trace, sample="1e-9")


@given(st.integers(1, 40), st.floats(0.01, 1), st.integers(0, 1000), st.integers(0, 5))
def test_a_step_gives_its_share_of_groups(number, share, seed, step):
    drawn = sum(place < share for place in places(step, [str(name) for name in range(number)], seed).values())
    assert abs(drawn - share * number) < 1 + 1e-9


def test_every_group_is_drawn_as_often_as_the_share_says():
    names = [str(name) for name in range(7)]
    drawn = [[place < 0.3 for place in places(3, names, seed).values()] for seed in range(4000)]
    by_name = [dict(zip(places(3, names, seed), row, strict=True)) for seed, row in enumerate(drawn)]
    for name in names:
        assert np.mean([row[name] for row in by_name]) == pytest.approx(0.3, abs=0.03)


def test_a_number_is_sequences_and_a_fraction_a_share():
    assert (parse_sample("0.01"), parse_sample(".5"), parse_sample("1"), parse_sample(300)) == (0.01, 0.5, 1.0, 300.0)
