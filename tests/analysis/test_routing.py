"""Agreement of router choices, in numbers worked by hand."""

import numpy as np
import pyarrow.parquet as pq
import pytest
from builders import add_step, make_batch, make_trace
from forged import reseal, rewrite_table
from tim_trace.analysis.info import info
from tim_trace.analysis.info_text import info_text
from tim_trace.analysis.query import sql
from tim_trace.analysis.stats import stats
from tim_trace.analysis.views import connect
from tim_trace.schemas.errors import DamagedTrace, DamageWarning, InvalidQuery, InvalidRecord
from tim_trace.tracer.recorder import Recorder
from tim_trace.tracer.routing import Routing, read_routing
from tim_trace.tracer.store import Store

# One sequence of two prompt and two response tokens; two layers; two of four experts a token.
IDS_A = np.array([[[0, 1], [0, 1]], [[0, 1], [2, 3]], [[1, 0], [2, 3]], [[3, 2], [2, 3]]], np.int8)
IDS_B = np.array([[[0, 1], [0, 1]], [[1, 0], [2, 0]], [[1, 0], [0, 1]], [[3, 2], [-1, -1]]], np.int8)
WEIGHTS_A = np.full(IDS_A.shape, 0.5, np.float32)
WEIGHTS_B = np.array(
    [[[0.5, 0.5], [0.25, 0.75]], [[0.75, 0.25], [0.5, 0.5]], [[0.5, 0.5], [1, 0]], [[0.5, 0.5], [0, 0]]], np.float32
)


def make_routed(path, moe_layers=(3, 7), weights=True, close=True, **changes):
    recorder = Recorder(path)
    try:
        if moe_layers:
            recorder.add_contract("train", {"engine": "mine", "model": {"moe_layers": list(moe_layers)}})
        batch = recorder.add_sequences(step=1, seq_ids=["s"], prompt_ids=[[5, 6]], response_ids=[[7, 8]])
        for name, ids, values in (("train", IDS_A, WEIGHTS_A), ("rollout", IDS_B, WEIGHTS_B)):
            routing = {"expert_ids": ids, "expert_weights": values if weights else None} | changes
            recorder.add_scores(name, batch, logprobs=[[-1.0, -2.0]], routing=Routing(**routing))
    except InvalidRecord:
        recorder.close()
        raise
    if close:
        recorder.close()
    return recorder


def rows(trace, query):
    return connect(trace).execute(query).fetchall()


@pytest.mark.slow
@pytest.mark.parametrize("close", [True, False], ids=["sealed", "journal"])
def test_agreement_worked_by_hand(tmp_path, close):
    recorder = make_routed(tmp_path / "run", close=close)
    recorder.flush()
    # Layer 3: the same experts for all four tokens, in one of them in other slots; their weights differ there by 0.25
    # each: |0.5 - 0.25| of expert 0 and |0.5 - 0.75| of expert 1, over eight common experts.
    # Layer 7: three tokens that both routed: all, one and none of two experts in common. |0.5 - 0.25|, |0.5 - 0.75| and
    # |0.5 - 0.5| over three common experts.
    assert rows(tmp_path / "run", "FROM pair_routing('train', 'rollout')") == [
        ("run", 1, 3, 4, 1.0, 0.75, 1.0, 0.5 / 8),
        ("run", 1, 7, 3, pytest.approx(1 / 3), pytest.approx(1 / 3), 0.5, pytest.approx(0.5 / 3)),
    ]
    (row,) = stats(tmp_path / "run", pair="train:rollout").dicts()
    assert row["routing_agreement"] == pytest.approx(5 / 7)
    # The first response token is predicted from the prompt's last, the second from the first response token.
    query = "SELECT position, num_layers, num_layers_differing FROM pair_routing_tokens('train', 'rollout')"
    assert rows(tmp_path / "run", query) == [(0, 2, 1), (1, 2, 1)]
    recorder.close()


@pytest.mark.parametrize("close", [True, False], ids=["sealed", "journal"])
def test_rows_of_many_batches_come_back_each_by_itself(tmp_path, close):
    recorder, draw, given = Recorder(tmp_path / "run"), np.random.default_rng(0), {}
    for step in range(1, 4):
        lengths = draw.integers(1, 5, (3, 2))
        ids = draw.integers(0, 300, (int(lengths.sum()), 2, 4)).astype(np.int16)
        weights = draw.random(ids.shape).astype(np.float32)
        names = [f"{step}-{row}" for row in range(3)]
        batch = recorder.add_sequences(
            step=step,
            seq_ids=names,
            prompt_ids=[[1] * p for p, _ in lengths],
            response_ids=[[1] * r for _, r in lengths],
        )
        logprobs = [[-1.0] * r for _, r in lengths]
        recorder.add_scores("train", batch, logprobs=logprobs, routing=Routing(expert_ids=ids, expert_weights=weights))
        cuts = np.cumsum(lengths.sum(axis=1))[:-1]
        given |= dict(zip(names, zip(np.split(ids, cuts), np.split(weights, cuts), strict=True), strict=True))
    recorder.close() if close else recorder.flush()
    query = """SELECT seq_id, routing, routing_start, num_prompt_tokens + num_response_tokens
        FROM scores JOIN sequences USING (step, seq_id) ORDER BY hash(seq_id)"""
    found = rows(tmp_path / "run", query)
    store = Store(tmp_path / "run")
    for (name, *_), routing in zip(found, read_routing(store, [place for _, *place in found]), strict=True):
        assert np.array_equal(routing.expert_ids, given[name][0])
        assert np.array_equal(routing.expert_weights, given[name][1])
    recorder.close()


def test_weights_and_layer_names_may_lack(tmp_path):
    make_routed(tmp_path / "run", moe_layers=None, weights=False)
    query = "SELECT layer, mean_overlap, mean_abs_dweight FROM pair_routing('train', 'rollout')"
    assert rows(tmp_path / "run", query) == [(0, 1.0, None), (1, 0.5, None)]


def test_a_confined_query_may_compare_routing_and_reads_nothing_else(tmp_path):
    make_routed(tmp_path / "run")
    (row,) = sql(tmp_path / "run", "SELECT count(*) AS n FROM pair_routing('train', 'rollout')").dicts()
    assert row["n"] == 2
    group, start = rows(tmp_path / "run", "SELECT routing, routing_start FROM scores WHERE pass = 'train'")[0]
    for run, wrong in (("run", f"{group}/../../../../other"), ("other", group)):
        with pytest.raises(InvalidQuery, match="has no rows at this position"):
            sql(tmp_path / "run", f"SELECT routing_sums_of('{run}', '{wrong}', {start}, '{group}', {start}, 4)")
    with pytest.raises(InvalidQuery, match="has 4 rows, but scores refer to rows 2 to 6"):
        sql(tmp_path / "run", f"SELECT routing_sums_of('run', '{group}', 2, '{group}', 2, 4)")


def test_a_trace_without_its_routing_is_named(tmp_path):
    import shutil

    make_routed(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "dense")
    with (
        pytest.warns(DamageWarning, match="is missing"),
        pytest.raises(DamagedTrace, match="is missing, but scores refer to it"),
    ):
        stats(tmp_path / "run")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"expert_ids": IDS_A[1:]}, "Pass integers .N, layers, slots. with N = 4. Each row's prompt tokens come"),
        ({"expert_ids": IDS_A.astype(np.float32)}, r"dtype float32\. Pass integers"),
        ({"expert_weights": WEIGHTS_A[:, :1]}, r"have shape \(4, 1, 2\), but expert_ids have shape \(4, 2, 2\)"),
    ],
)
def test_routing_that_does_not_fit_is_refused(tmp_path, changes, words):
    with pytest.raises(InvalidRecord, match=words):
        make_routed(tmp_path / "run", **changes)


def test_a_pass_has_one_form_of_routing(tmp_path):
    recorder = make_routed(tmp_path / "run", close=False)
    batch = recorder.add_sequences(step=2, prompt_ids=[[5, 6]], response_ids=[[7, 8]])
    with pytest.raises(InvalidRecord, match="must not change within a pass"):
        recorder.add_scores("train", batch, logprobs=[[-1.0, -2.0]], routing=Routing(expert_ids=IDS_A))
    batch = recorder.add_sequences(step=2, response_ids=[[7, 8]])
    with pytest.raises(InvalidRecord, match=r"have no prompt_ids\. Routing covers prompt tokens too"):
        recorder.add_scores("train", batch, logprobs=[[-1.0, -2.0]], routing=Routing(expert_ids=IDS_A[:2]))
    recorder.close()


def test_files_of_before_routing_are_read_beside_new_ones(tmp_path):
    make_trace(tmp_path / "run")
    (path,) = (tmp_path / "run" / "scores").iterdir()
    count = pq.read_table(path).num_rows
    rewrite_table(path, lambda table: table.drop_columns(["routing", "routing_start"]))
    reseal(tmp_path / "run")
    assert rows(tmp_path / "run", "SELECT count(*), count(routing_start) FROM scores") == [(count, 0)]
    with Recorder(tmp_path / "run", resume=True) as recorder:
        add_step(recorder, 9, make_batch(2))
    assert rows(tmp_path / "run", "SELECT count(*), count(routing), count(logprobs) FROM scores") == [
        (count + 4, 0, count + 4)
    ]


def test_info_counts_the_scores_that_have_router_choices(tmp_path):
    make_routed(tmp_path / "run")
    found = info(tmp_path / "run")
    assert {p.name: (p.num_routed, p.num_captured) for p in found.passes} == {"rollout": (1, 0), "train": (1, 0)}
    header = next(line for line in info_text(found).splitlines() if line.startswith("pass "))
    assert header.split() == ["pass", "sequences", "scores", "engine", "contracts", "routings"]
