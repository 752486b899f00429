"""Replays that keep distributions. Bits are compared as bits."""

import shutil

import numpy as np
import pytest
import torch
from builders import tim_trace
from runs import train
from tim_trace.analysis.stats import stats
from tim_trace.analysis.views import connect
from tim_trace.replay.engine import replay
from tim_trace.replay.recorded import RecordedRun
from tim_trace.schemas.capture import Capture
from tim_trace.schemas.errors import CannotReplay, InvalidOption
from tim_trace.tracer.dense import read_dense
from tim_trace.tracer.store import Store

pytestmark = pytest.mark.engine

ARMS = [
    "dtype=bf16", "dtype=fp64", "mode=decode", "top-k=3", "temperature=0.5,top-p=0.9", "dtype=bf16,lm-head=fp32",
    "logits-dtype=bf16", "weights-version=0", "padding=packed",
]  # fmt: skip
COLD = {"temperature": 0.7}
MIXED = {"bf16": True}


def copy(run, folder):
    shutil.copytree(run.trace, folder)
    return folder


def rows(trace, query):
    return connect(trace).execute(query).fetchall()


def captured(trace, name):
    """(step, seq_id) -> the arrays that a pass keeps of the sequence, and its logprobs and response."""
    query = f"""
        SELECT step, seq_id, dense, dense_start, logprobs, response_ids
        FROM scores JOIN sequences USING (step, seq_id) WHERE pass = '{name}' AND dense IS NOT NULL
    """
    return {
        (step, seq_id): (read_dense(Store(trace), group, start, len(ids)), np.array(logprobs, np.float64), ids)
        for step, seq_id, group, start, logprobs, ids in rows(trace, query)
    }


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    """One recording at temperature 0.7, its arms replayed once with each capture."""
    folder = tmp_path_factory.mktemp("capture")
    kinds = ("logprobs", "logits", "topk:4", "hidden")
    found = {}
    for kind in kinds:
        trace = found[kind] = copy(train(capture="logprobs", config=COLD), folder / kind.replace(":", "-"))
        arms = [text for text in ARMS if kind != "hidden" or not text.startswith(("top-k", "temperature"))]
        replay(trace, steps="2", arm=arms, capture=kind)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["logits", "topk:4", "hidden"])
def test_capturing_changes_no_bit_of_any_arm(traces, kind):
    query = """
        SELECT pass, step, seq_id, logprobs, forward_id, forward_row FROM scores WHERE pass LIKE 'replay/%' ORDER BY ALL
    """
    bare, kept = ({row[:3]: row[3:] for row in rows(traces[name], query)} for name in ("logprobs", kind))
    assert kept == {key: bare[key] for key in kept}
    assert {key[0] for key in kept} >= {"replay/as-recorded", "replay/bf16", "replay/decode"}


@pytest.mark.slow
@pytest.mark.parametrize(("config", "kind"), [(COLD, "topk:4"), (MIXED, "logits"), (MIXED, "hidden")])
def test_the_recorded_bits_come_back_with_capture_on(tmp_path, config, kind):
    trace = copy(train(capture="logprobs", config=config), tmp_path / "run")
    results = replay(trace, steps="1", capture=kind)
    assert all(result.identity_held and result.num_equal == result.num_tokens > 0 for result in results)


@pytest.mark.slow
def test_the_captured_logits_give_the_pass_s_own_logprobs(traces):
    trace = traces["logits"]
    # Half a unit in the last place of a bfloat16 logit near 1, over the temperature, and what float32 leaves.
    close = {"replay/bf16": 0.01, "replay/logits-dtype-bf16": 0.03}
    names = [name for (name,) in rows(trace, "SELECT DISTINCT pass FROM scores WHERE pass LIKE 'replay/%'")]
    assert len(names) == len(ARMS) + 1
    for name in names:
        temperature = 0.5 if "temperature" in name else 0.7
        for arrays, logprobs, ids in captured(trace, name).values():
            with np.errstate(invalid="ignore"):
                logp = torch.log_softmax(torch.tensor(arrays["logits"]).double() / temperature, -1).numpy()
            taken = logp[np.arange(len(ids)), ids]
            cut = np.isneginf(logprobs)
            assert (np.isneginf(taken) == cut).all(), name
            np.testing.assert_allclose(taken[~cut], logprobs[~cut], rtol=0, atol=close.get(name, 2e-6), err_msg=name)


@pytest.mark.slow
def test_each_arm_keeps_its_own_dtype_and_cuts(traces):
    import zarr

    def attribute(name):
        ((group,),) = rows(traces["logits"], f"SELECT DISTINCT dense FROM scores WHERE pass = '{name}'")
        return zarr.open_group(traces["logits"] / "dense" / group, mode="r")["logits"].attrs["dtype"]

    dtypes = {"as-recorded": "float32", "bf16": "bfloat16", "fp64": "float64", "bf16+head-fp32": "float32"}
    assert {name: attribute(f"replay/{name}") for name in dtypes} == dtypes
    for arrays, _, _ in captured(traces["logits"], "replay/top-k-3").values():
        assert (np.isfinite(arrays["logits"]).sum(axis=1) == 3).all()


@pytest.mark.slow
def test_hidden_states_give_the_logits_that_were_captured(traces):
    trace, other = traces["hidden"], traces["logits"]
    names = [name for (name,) in rows(trace, "SELECT DISTINCT pass FROM scores WHERE pass LIKE 'replay/%'")]
    assert len(names) == len(ARMS) - 1
    for name in names:
        query = f"SELECT step, seq_id, position, entropy_a FROM pair_distributions('{name}', '{name}') ORDER BY ALL"
        hidden, logits = ([row[3] for row in rows(each, query)] for each in (trace, other))
        assert len(hidden) > 20
        # NumPy's and torch's float32 sums differ in their last places; a bfloat16 logit may round the other way.
        np.testing.assert_allclose(hidden, logits, rtol=0, atol=5e-3 if "bf16" in name else 1e-5, err_msg=name)


@pytest.mark.slow
def test_hidden_states_name_their_head(traces):
    ((head,),) = rows(
        traces["hidden"], "SELECT contract_json ->> '$.head.weight' FROM passes WHERE pass = 'replay/bf16'"
    )
    assert head == '["lm_head.weight","model.embed_tokens.weight"]'
    assert rows(traces["logits"], "SELECT count(*) FROM passes WHERE contract_json ->> '$.head' IS NOT NULL") == [(0,)]


@pytest.mark.slow
def test_bounds_from_top_k_hold_for_the_logits_of_the_same_replay(traces):
    def measured(trace, name):
        query = f"SELECT * FROM pair_distributions('{name}', 'replay/as-recorded') ORDER BY step, seq_id, position"
        return connect(trace).execute(query).fetchnumpy()

    for name in ("replay/bf16", "replay/fp64", "replay/top-k-3", "replay/temperature-0.5+top-p-0.9"):
        exact, bounds = measured(traces["logits"], name), measured(traces["topk:4"], name)
        assert np.ma.getmaskarray(bounds["tv"]).all()
        assert len(exact["tv"]) > 20
        for measure in ("kl_ab", "kl_ba", "js", "tv", "entropy_a", "entropy_b"):
            assert (bounds[f"{measure}_low"] <= exact[measure]).all(), (name, measure)
            assert (bounds[f"{measure}_high"] >= exact[measure]).all(), (name, measure)


@pytest.mark.slow
def test_stats_of_a_replayed_pair_says_how_far_the_distributions_lie_apart(traces):
    (row,) = stats(traces["logits"], pair="replay/top-k-3:replay/as-recorded").dicts()
    assert row["num_distributions"] == row["num_tokens"] + row["num_inf"]
    assert row["mean_kl_ba"] == np.inf
    assert 0 < row["mean_kl_ab"] < row["max_kl_ab"] < np.inf
    # Of 15 tokens 3 stay, on every position.
    assert row["num_unsupported_ba"] == 12 * row["num_distributions"]
    assert row["share_argmax_flips"] == 0.0


def test_a_share_of_the_sequences_is_the_one_that_a_recording_keeps(tmp_path):
    trace = copy(train(capture="logprobs"), tmp_path / "run")
    replay(trace, steps="1", dtype="bf16", capture="topk:2", capture_fraction=0.5)
    kept = rows(trace, "SELECT seq_id FROM scores WHERE pass = 'replay/bf16' AND dense IS NOT NULL")
    names = rows(trace, "SELECT seq_id FROM sequences WHERE step = 1")
    choice = Capture.parse("topk:2", 0.5)
    assert sorted(kept) == sorted(name for name in names if choice.selects(1, name[0]))
    assert 0 < len(kept) < len(names)


def test_force_removes_the_distributions_too(tmp_path):
    trace = copy(train(capture="logprobs"), tmp_path / "run")
    replay(trace, steps="1", capture="logits")
    before = {path.name for path in (trace / "dense").iterdir()}
    replay(trace, steps="1", capture="topk:2", force=True)
    assert len(before) == 1
    assert before.isdisjoint(path.name for path in (trace / "dense").iterdir())


def test_what_cannot_be_captured_is_refused_by_name(tmp_path):
    trace = copy(train(capture="logprobs"), tmp_path / "run")
    with pytest.raises(CannotReplay, match="capture hidden: vLLM gives no hidden states"):
        replay(trace, engine="vllm", capture="hidden")
    with pytest.raises(CannotReplay, match="capture: engine exact cannot capture distributions"):
        replay(trace, engine="exact", capture="logits")
    with pytest.raises(CannotReplay, match="capture hidden: does not show which tokens top-k and top-p cut"):
        replay(trace, top_k=3, capture="hidden")
    with pytest.raises(InvalidOption, match="use logprobs, topk:K or logits"):
        replay(trace, capture="everything")
    done = tim_trace("record", "-o", tmp_path / "new", "--capture", "hidden", "--", "true")
    assert done.code == 2
    assert "hidden states are kept by a replay" in done.stderr
    assert RecordedRun(trace).steps("replay/as-recorded") == []


@pytest.mark.slow
def test_vllm_s_distributions_are_kept_and_its_logprobs_stay(tmp_path):
    run = train("--trainer", "rloo", "--vllm", "--bf16-engine", config={"beta": 0.05}, capture="logprobs")
    arms = ["--arm", "engine=vllm,mode=decode,name=decode", "--arm", "engine=vllm,top-k=3,name=cut"]
    found = {}
    for kind in ("logprobs", "logits", "topk:4"):
        found[kind] = copy(run, tmp_path / kind.replace(":", "-"))
        done = tim_trace(
            "replay", found[kind], "--steps", "1", "--engine", "vllm", "--name", "whole", *arms, "--capture", kind
        )
        assert done.code == 0, done.stderr[-3000:]
    query = "SELECT pass, seq_id, logprobs FROM scores WHERE pass LIKE 'replay/%' ORDER BY ALL"
    bare = rows(found["logprobs"], query)
    assert rows(found["logits"], query) == bare
    assert rows(found["topk:4"], query) == bare
    for name in ("whole", "decode", "cut"):
        for arrays, logprobs, ids in captured(found["logits"], f"replay/{name}").values():
            taken = arrays["logprobs"][np.arange(len(ids)), ids]
            np.testing.assert_allclose(taken, logprobs, rtol=0, atol=2e-6)
            np.testing.assert_allclose(np.exp(arrays["logprobs"].astype(np.float64)).sum(axis=1), 1.0, atol=1e-5)
        pair = f"pair_distributions('replay/{name}', 'replay/as-recorded')"
        exact, bounds = (
            rows(found[kind], f"SELECT tv, tv_low, tv_high FROM {pair} ORDER BY seq_id, position")
            for kind in ("logits", "topk:4")
        )
        assert len(exact) == len(bounds) > 20
        assert all(low <= tv <= high for (tv, _, _), (_, low, high) in zip(exact, bounds, strict=True)), name
