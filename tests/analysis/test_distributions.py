"""Captured distributions compared through SQL, stats and Python."""

import sys

import fsspec
import numpy as np
import pytest
import torch
from builders import make_trace, run
from tim_trace.analysis.distributions import captured
from tim_trace.analysis.distributions.divergence import Full, compare_full
from tim_trace.analysis.query import sql
from tim_trace.analysis.stats import stats
from tim_trace.analysis.views import connect
from tim_trace.schemas.errors import DamagedTrace, DamageWarning, InvalidQuery, InvalidRecord
from tim_trace.tracer.dense import TOP_K, Hidden, Logits, TopK, top_k_with_tail
from tim_trace.tracer.recorder import Recorder

LENGTHS = [3, 1, 200]
CAPTURED = [0, 2]
VOCAB = 12


def logits(seed, dtype=torch.float32):
    tokens = sum(LENGTHS[row] for row in CAPTURED)
    return (torch.randn(tokens, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2).to(dtype)


def add(recorder, added, name, distribution, contract=None):
    if contract:
        recorder.add_contract(name, contract)
    recorder.add_scores(
        name, added, logprobs=[[-1.0] * n for n in LENGTHS], distribution=distribution, captured_rows=CAPTURED
    )


def record(path, left, right, contract=None, steps=1):
    """A trace of two passes with these distributions, `train` under a contract."""
    with Recorder(path) as recorder:
        for step in range(1, steps + 1):
            added = recorder.add_sequences(
                step=step, seq_ids=["x", "y", "z"], response_ids=[list(range(n)) for n in LENGTHS],
                response_mask=[[True] * (n - 1) + [n != 3] for n in LENGTHS], policy_version=0,
            )  # fmt: skip
            add(recorder, added, "train", left, contract)
            add(recorder, added, "rollout", right)
    return path


def exact(left, right, temperature=1.0):
    """The measures of these logits, one after the other."""
    return compare_full(Full(left.double().numpy() / temperature), Full(right.double().numpy()))


def column(rows, name):
    return np.array([row[name] for row in rows.dicts()], np.float64)


def ask(trace, columns="*", order="seq_id, position"):
    query = f"SELECT {columns} FROM pair_distributions('train', 'rollout') ORDER BY step, {order}"
    return sql(trace, query)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_row_a_token_that_both_captured(tmp_path, dtype):
    left, right = logits(0, dtype), logits(1)
    rows = ask(record(tmp_path / "run", Logits(logits=left), Logits(logits=right)))
    assert [row["seq_id"] for row in rows.dicts()] == ["x"] * 3 + ["z"] * 200
    assert [row["position"] for row in rows.dicts()] == [0, 1, 2, *range(200)]
    assert [row["token_id"] for row in rows.dicts()] == [0, 1, 2, *range(200)]
    wanted = exact(left, right)
    for name in ("kl_ab", "kl_ba", "js", "tv", "max_abs_dlogit", "entropy_a", "tv_low", "kl_ab_high"):
        # The same numbers in chunks of other sizes: NumPy adds in another order.
        np.testing.assert_allclose(column(rows, name), wanted[name], rtol=1e-12, err_msg=name)
    assert column(rows, "argmax_flip").tolist() == np.asarray(wanted["argmax_flip"]).tolist()


def test_small_chunks_change_nothing(tmp_path, monkeypatch):
    trace = record(tmp_path / "run", Logits(logits=logits(0)), Logits(logits=logits(1)), steps=2)
    whole = ask(trace).rows
    monkeypatch.setattr(captured, "CHUNK_BYTES", 8 * 24 * 7)
    monkeypatch.setattr(captured, "OPEN_GROUPS", 2)
    assert ask(trace).rows == whole


def test_logits_are_divided_by_the_contract_s_temperature(tmp_path):
    left, right = logits(0), logits(1)
    full = Logits(logits=torch.log_softmax(right, -1), kind="logprobs")
    rows = ask(record(tmp_path / "run", Logits(logits=left), full, {"temperature": 0.5}))
    np.testing.assert_allclose(column(rows, "kl_ab"), exact(left, right, 0.5)["kl_ab"], rtol=1e-5)


def test_top_k_gives_bounds_and_no_exact_numbers(tmp_path):
    left, right = logits(0), logits(1)
    part = TopK(**dict(zip(TOP_K, top_k_with_tail(right, 4, 1.0), strict=True)))
    rows = ask(record(tmp_path / "run", Logits(logits=left), part))
    wanted = exact(left, right)
    assert {row["tv"] for row in rows.dicts()} == {None}
    assert {(row["vocab_a"], row["vocab_b"]) for row in rows.dicts()} == {(VOCAB, None)}
    for name in ("kl_ab", "kl_ba", "js", "tv"):
        assert (column(rows, f"{name}_low") <= wanted[name]).all()
        assert (column(rows, f"{name}_high") >= wanted[name]).all()


def test_a_cut_token_is_a_support_violation(tmp_path):
    cut = logits(0).clone()
    cut[:, 3] = -torch.inf
    rows = ask(record(tmp_path / "run", Logits(logits=logits(0)), Logits(logits=cut)))
    assert set(column(rows, "num_unsupported_ab")) == {1.0}
    assert set(column(rows, "num_unsupported_ba")) == {0.0}
    assert set(column(rows, "kl_ab")) == {np.inf}
    assert np.isfinite(column(rows, "kl_ba")).all()


def test_several_traces_keep_apart(tmp_path):
    for name, seed in (("one", 1), ("two", 2)):
        record(tmp_path / name, Logits(logits=logits(0)), Logits(logits=logits(seed)))
    rows = sql(
        [tmp_path / "one", tmp_path / "two"],
        "SELECT run, sum(tv) AS total FROM pair_distributions('train', 'rollout') GROUP BY run ORDER BY run",
    )
    wanted = [(name, exact(logits(0), logits(seed))["tv"].sum()) for name, seed in (("one", 1), ("two", 2))]
    assert [row[0] for row in rows.rows] == ["one", "two"]
    np.testing.assert_allclose([row[1] for row in rows.rows], [total for _, total in wanted], rtol=1e-12)


def test_what_is_not_sealed_yet_is_compared_too(tmp_path):
    path = tmp_path / "run"
    with Recorder(path) as recorder:
        for step in (1, 2):
            added = recorder.add_sequences(step=step, response_ids=[[0] * n for n in LENGTHS], policy_version=0)
            add(recorder, added, "train", Logits(logits=logits(step)))
            add(recorder, added, "rollout", Logits(logits=logits(3)))
        recorder.flush()
        assert not (path / "dense").exists() or not any((path / "dense").iterdir())
        live = connect(path).sql(
            "SELECT step, sum(tv) FROM pair_distributions('train', 'rollout') GROUP BY step ORDER BY step"
        )
        found = live.fetchall()
    wanted = [exact(logits(step), logits(3))["tv"].sum() for step in (1, 2)]
    np.testing.assert_allclose([total for _, total in found], wanted, rtol=1e-12)


def test_a_remote_trace_answers_as_a_local_one(tmp_path):
    trace = record(tmp_path / "run", Logits(logits=logits(0)), Logits(logits=logits(1)))
    memory = fsspec.filesystem("memory")
    memory.put(str(trace), "/dense/run", recursive=True)
    try:
        assert ask("memory://dense/run").rows == ask(trace).rows
    finally:
        memory.rm("/dense", recursive=True)


def test_the_function_reads_nothing_but_the_trace_s_own_groups(tmp_path):
    trace = record(tmp_path / "run", Logits(logits=logits(0)), Logits(logits=logits(1)))
    record(tmp_path / "other", Logits(logits=logits(0)), Logits(logits=logits(1)))
    (theirs,) = (tmp_path / "other" / "dense").iterdir()
    (own,) = (trace / "dense").iterdir()
    place = "{0}, 0::BIGINT, NULL, NULL, NULL"
    call = f"SELECT compare_distributions('run', 1::BIGINT, {place}, {place})"
    assert sql(trace, call.format(f"'{own.name}/train'")).rows[0][0][0]["tv"] == 0.0
    for group in (
        f"'{own.name}/../../../other/dense/{theirs.name}/train'",
        f"'../{own.name}'",
        f"'{theirs.name}/train'",
        "NULL",
    ):
        with pytest.raises(InvalidQuery):
            sql(trace, call.format(group))


@pytest.mark.slow
def test_hidden_states_are_projected_by_the_weights_of_their_own_attempt(tmp_path):
    draw = torch.Generator().manual_seed(0)
    heads = [torch.randn(VOCAB, 4, generator=draw) for _ in range(2)]
    hidden = torch.randn(3, 4, generator=draw)
    described = {
        "weight": ["lm_head.weight"], "bias": None, "weight_dtype": "float32", "projection_dtype": None,
        "scale": None, "softcap": None, "logits_dtype": None,
    }  # fmt: skip
    for attempt, head in enumerate(heads, 1):
        with Recorder(tmp_path / "run", resume=attempt > 1) as recorder:
            recorder.add_weights(0, {"lm_head.weight": head})  # both attempts come to version 0, with other weights
            added = recorder.add_sequences(step=attempt, response_ids=[[1, 2, 3]], policy_version=0)
            recorder.add_contract("train", {"head": described})
            recorder.add_scores(
                "train",
                added,
                logprobs=[[-1.0] * 3],
                distribution=Hidden(hidden=hidden),
                captured_rows=[0],
                policy_version=0,
            )
            logits = hidden @ head.T
            recorder.add_scores(
                "rollout", added, logprobs=[[-1.0] * 3], distribution=Logits(logits=logits), captured_rows=[0]
            )
    found = connect(tmp_path / "run").sql(
        "SELECT step, max(tv) FROM pair_distributions('train', 'rollout') GROUP BY step"
    )
    assert [tv < 1e-6 for _, tv in sorted(found.fetchall())] == [True, True]


def test_without_captures_there_are_no_rows(tmp_path):
    make_trace(tmp_path / "run")
    assert ask(tmp_path / "run").rows == []
    assert "num_distributions" not in stats(tmp_path / "run").columns


@pytest.mark.slow
def test_stats_without_a_capture_needs_no_zarr(tmp_path):
    make_trace(tmp_path / "run")
    program = (
        "import sys; from tim_trace.analysis.stats import stats; from tim_trace.analysis.query import sql; "
        f"stats({str(tmp_path / 'run')!r}); sql({str(tmp_path / 'run')!r}, \"FROM pair_distributions('train', 'rollout')\"); "
        "assert not {'zarr', 'torch', 'tim_trace.analysis.distributions.captured'} & set(sys.modules)"
    )
    done = run(sys.executable, "-c", program)
    assert (done.code, done.stderr) == (0, "")


@pytest.mark.parametrize("by", ["run", "step", "sequence"])
def test_stats_adds_what_the_captures_say(tmp_path, by):
    left, right = logits(0), logits(1)
    trace = record(tmp_path / "run", Logits(logits=left), Logits(logits=right), steps=2)
    wanted = {name: np.asarray(values) for name, values in exact(left, right).items()}
    counted = np.arange(len(left)) != 2  # the loss leaves out the third token of the first sequence
    if by == "sequence":
        counted &= np.arange(len(left)) < 3
    first = stats(trace, by=by).dicts()[0]
    repeats = 2 if by == "run" else 1
    assert first["num_distributions"] == counted.sum() * repeats
    for name in ("tv", "js", "kl_ab", "kl_ba"):
        assert first[f"mean_{name}"] == pytest.approx(wanted[name][counted].mean(), rel=1e-12)
        assert first[f"max_{name}"] == pytest.approx(wanted[name][counted].max(), rel=1e-12)
    assert first["share_argmax_flips"] == pytest.approx(wanted["argmax_flip"][counted].mean())
    assert (first["num_unsupported_ab"], first["num_unsupported_ba"]) == (0, 0)
    assert "mean_tv_low" not in first
    if by == "sequence":
        assert [row["num_distributions"] for row in stats(trace, by=by).dicts()] == [2, None, 200] * 2


def test_stats_of_top_k_says_bounds(tmp_path):
    part = TopK(**dict(zip(TOP_K, top_k_with_tail(logits(1), 4, 1.0), strict=True)))
    (row,) = stats(record(tmp_path / "run", Logits(logits=logits(0)), part)).dicts()
    assert "mean_tv" not in row
    mean = exact(logits(0), logits(1))["tv"][np.arange(203) != 2].mean()
    assert row["mean_tv_low"] <= mean <= row["mean_tv_high"]


def test_a_group_that_is_gone_is_named(tmp_path):
    trace = record(tmp_path / "run", Logits(logits=logits(0)), Logits(logits=logits(1)))
    (trace / "dense").rename(tmp_path / "gone")
    with pytest.warns(DamageWarning), pytest.raises(InvalidQuery, match="is missing, but scores refer to it"):
        ask(trace)
    with pytest.warns(DamageWarning), pytest.raises(DamagedTrace, match="is missing, but scores refer to it"):
        stats(trace)


def test_hidden_states_of_unknown_weights_are_refused(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        added = recorder.add_sequences(step=1, response_ids=[[1, 2, 3]], policy_version=0)
        given = {"logprobs": [[-1.0] * 3], "distribution": Hidden(hidden=torch.zeros(3, 4)), "captured_rows": [0]}
        with pytest.raises(InvalidRecord, match="are needed to compute logits from hidden states"):
            recorder.add_scores("train", added, **given)
        recorder.add_scores("train", added, **given, policy_version=0)
