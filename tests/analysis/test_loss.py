"""The rules of a loss: the same in Python and in SQL, and the same wherever they are asked for."""

import duckdb
import numpy as np
import pytest
from gradient_rule import has_gradient
from hypothesis import given, settings
from hypothesis import strategies as st
from tim_trace.analysis.objective.objective import objective
from tim_trace.analysis.statistics.loss import (
    clamped_exp,
    contribution,
    is_clipped,
    sql_options,
)
from tim_trace.analysis.trace.macros import sql_file
from tim_trace.schemas.loss import KINDS, SEQUENCE_SUM, TOKEN, VESPO, Loss
from tim_trace.tracer.recorder import Recorder
from tim_trace.tracer.rows import Forward

SHARES = st.floats(0.0, 0.9)
BOUNDS = st.floats(0.5, 4.0)
TEMPERATURES = st.floats(0.1, 5.0)
LOSSES = st.builds(
    lambda kind, **settings: Loss(kind=kind, level=SEQUENCE_SUM if kind == VESPO else TOKEN, **settings),
    kind=st.sampled_from(KINDS),
    clip_low=SHARES,
    clip_high=st.floats(0.0, 3.0),
    clip_hard=st.none() | BOUNDS,
    sapo_temperature_pos=TEMPERATURES,
    sapo_temperature_neg=TEMPERATURES,
    vespo_k_pos=TEMPERATURES,
    vespo_lambda_pos=st.floats(-1.0, 5.0),
    vespo_k_neg=TEMPERATURES,
    vespo_lambda_neg=st.floats(-1.0, 5.0),
)
LOG_RATIOS = st.floats(-25.0, 25.0) | st.floats(-0.5, 1.5)
ADVANTAGES = st.sampled_from([-1.5, 0.0, 0.5]) | st.floats(-3.0, 3.0, allow_subnormal=False)


@pytest.fixture(scope="module")
def sql():
    connection = duckdb.connect()
    connection.execute(sql_file("loss"))
    return connection


@settings(deadline=None)  # DuckDB plans a query an example
@given(loss=LOSSES, log_ratio=LOG_RATIOS, advantage=ADVANTAGES)
def test_every_rule_is_the_same_in_sql(sql, loss, log_ratio, advantage):
    options = sql_options(loss)
    clips = options if loss.has_clip else f"kind := '{loss.kind}'"
    found = sql.execute(
        f"SELECT clamped_exp(x), loss_term(clamped_exp(x), a, {options}), loss_clips(clamped_exp(x), a, {clips}) "
        "FROM (SELECT $x::DOUBLE AS x, $a::DOUBLE AS a)",
        {"x": log_ratio, "a": advantage},
    ).fetchall()
    x, a = np.array([log_ratio]), np.array([advantage])
    ratio = clamped_exp(x)
    # exp and ln may differ by their last bit, which turns no bound that is drawn beside them.
    expected = [ratio, contribution(loss, ratio, a), is_clipped(loss, ratio, a)]
    for value, wanted in zip(found[0], expected, strict=True):
        assert value == pytest.approx(wanted.item(), rel=1e-12, abs=1e-12)


@given(loss=LOSSES, log_ratio=st.floats(-5.0, 5.0), advantage=st.sampled_from([-1.5, 0.5]))
def test_one_rule_gives_the_term_its_logarithm_the_clip_and_the_gradient(loss, log_ratio, advantage):
    x, a = np.array([log_ratio]), np.array([advantage])
    ratio = clamped_exp(x)
    (term,), (clipped,) = contribution(loss, ratio, a), is_clipped(loss, ratio, a)
    if loss.has_clip:
        # Clipped is what the bound moves, and nothing else.
        assert clipped == (term != ratio[0] * advantage)
    if loss.kind == "ppo_clip":
        held = min(ratio[0], np.inf if loss.clip_hard is None else loss.clip_hard)
        bounded = np.clip(ratio[0], 1 - loss.clip_low, 1 + loss.clip_high)
        assert term == min(held * advantage, bounded * advantage)
    assert has_gradient(loss, ratio, a)[0] == (loss.kind != "ppo_clip" or not clipped)


def test_a_clipped_token_keeps_its_gradient_under_cispo_alone():
    ratio, advantage = np.array([1.5, 1.5, 0.5]), np.array([1.0, -1.0, 0.0])
    cispo = Loss(kind="cispo", clip_high=1.2)
    assert is_clipped(cispo, ratio, advantage).tolist() == [True, True, False]
    assert has_gradient(cispo, ratio, advantage).tolist() == [True, True, False]
    assert is_clipped(Loss(), ratio, advantage).tolist() == [True, False, False]
    assert has_gradient(Loss(), ratio, advantage).tolist() == [False, True, False]


def test_forwards_of_two_ranks_with_one_number_are_two_forwards(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, tokens in enumerate((2, 3)):
        monkeypatch.setenv("RANK", str(rank))
        with Recorder(tmp_path / "run", join=True) as recorder:
            added = recorder.add_sequences(
                step=1, seq_ids=[str(rank)], response_ids=[[1] * tokens], advantage=[1 + rank]
            )
            one = np.zeros(1, np.int32)
            forward = Forward(ids=np.zeros(1, np.int64), places=one, rows=one + 1, pad_left=one, pad_right=one)
            for name in ("rollout", "train"):
                recorder.add_scores(name, added, logprobs=[[-1.0] * tokens])
            recorder.add_scores("current", added, logprobs=[[-1.0] * tokens], forward=forward)
    used = objective(tmp_path / "run", loss="aggregation=micro_token_mean").value("used")
    assert used == pytest.approx((1 + 2) / 2)  # one forward would give (2 * 1 + 3 * 2) / 5
