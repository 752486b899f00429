"""Verbs that divide their reading among the nodes of a real Ray cluster. What they give is compared with one process, to the last bit."""

import shutil
from functools import partial
from importlib import import_module

import numpy as np
import pytest
from builders import tim_trace
from clusters import removing, two_nodes
from runs import train
from segmented import make_run
from tim_trace.analysis import check, corrections, gradient, objective, stats, triangulate
from tim_trace.analysis.views import connect
from tim_trace.schemas.errors import DamagedTrace, InvalidOption
from tim_trace.tracer.batch import Batch
from tim_trace.tracer.recorder import Recorder

pytestmark = [
    # Ray's own: pipes of its processes that it leaves to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore:.*:FutureWarning:ray"),
]


@pytest.fixture(scope="module")
def cluster():
    with two_nodes() as made:
        yield made


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    """Three writers that sealed twice each, with attempts, masks, groups and advantages."""
    path = tmp_path_factory.mktemp("recording") / "run"
    make_run(path)
    return path


@pytest.fixture
def trace(recording, tmp_path):
    shutil.copytree(recording, tmp_path / "run")
    return tmp_path / "run"


def make_triangle(trace):
    """Give every sequence that train and rollout scored the replays that a triangulation asks for."""
    rows = (
        connect(trace)
        .execute(
            "SELECT step, seq_id, attempt, logprobs FROM scores WHERE \"pass\" = 'train' ORDER BY step, seq_id, attempt"
        )
        .fetchall()
    )
    draw = np.random.default_rng(0)
    with Recorder(trace, resume=True) as recorder:
        recorder.describe(model={"class": "none.None", "config": {"model_type": "none"}})
        for name, size in (("as-recorded", 0.0), ("fp64", 1e-6), ("bf16", 1e-2)):
            for step, seq_id, attempt, logprobs in rows:
                values = np.minimum(np.array(logprobs, np.float32) + draw.normal(0, size, len(logprobs)), 0)
                batch = Batch(step, [seq_id], attempt=attempt)
                batch.resolve(np.array([len(values)]), None, np.array([3]))
                recorder.add_scores(f"replay/{name}", batch, logprobs=[values.astype(np.float32)])


def without_sums(trace):
    """The same trace, of which nothing is kept that was asked before."""
    shutil.rmtree(trace / "sums", ignore_errors=True)
    return trace


@pytest.mark.slow
def test_sums_that_actors_made_are_those_of_one_process_and_are_kept(trace):
    alone = stats(trace, by="step")
    num_files = len(list((trace / "sums").iterdir()))
    assert stats(without_sums(trace), by="step", ray="local") == alone
    assert len(list((trace / "sums").iterdir())) == num_files
    assert stats(trace, by="step") == alone


@pytest.mark.slow
@pytest.mark.parametrize(
    "ask",
    [
        partial(stats, by="run"),
        partial(stats, by="sequence", pair="current:rollout"),
        partial(stats, by="step", steps="2:9:3"),
        check,
        partial(check, steps="3:"),
        objective,
        partial(objective, steps=":7"),
        corrections,
        partial(corrections, by="step", steps="2:9:3"),
        partial(corrections, by="length", pair="current:rollout"),
    ],
)
def test_two_nodes_give_the_digits_of_one_process(ask, trace, cluster):
    alone = ask(without_sums(trace))
    assert ask(without_sums(trace), ray=cluster[0].address) == alone


@pytest.mark.slow
def test_a_check_on_a_cluster_reads_no_token_here(trace, cluster, monkeypatch):
    alone = check(trace)
    monkeypatch.setattr(import_module("tim_trace.analysis.check.check"), "read_sample", None)
    assert check(without_sums(trace), ray=cluster[0].address) == alone
    with pytest.raises(TypeError):
        check(trace)


@pytest.mark.slow
def test_corrections_survive_a_node_that_is_removed_after_the_first_part(trace):
    alone = corrections(trace, by="step")
    told = []
    with two_nodes() as (made, nodes):
        assert corrections(trace, by="step", ray=made.address, progress=removing(made, nodes[0], told)) == alone
    assert len(told) > 4


@pytest.mark.slow
def test_quantiles_of_runs_that_are_not_read_at_once_are_the_same(trace, cluster, monkeypatch):
    exact = stats(without_sums(trace))
    monkeypatch.setattr("tim_trace.analysis.trace.sums.EXACT_TOKENS", 100)
    alone = stats(without_sums(trace))
    assert alone != exact
    assert stats(without_sums(trace), ray=cluster[0].address) == alone


@pytest.mark.slow
def test_damage_is_told_in_the_same_words(trace, cluster):
    for file in sorted((trace / "scores").iterdir())[:2]:
        content = bytearray(file.read_bytes())
        content[64] ^= 1
        file.write_bytes(content)
    refusals = []
    for ray in (None, cluster[0].address):
        with pytest.raises(DamagedTrace) as refusal:
            stats(without_sums(trace), ray=ray)
        refusals.append(str(refusal.value))
    assert refusals[0] == refusals[1]


@pytest.mark.slow
def test_gradients_of_two_nodes_are_those_of_one_process(cluster):
    trace = train(capture="logprobs").trace
    arms = ("batch-size=1", "correction=none")
    alone = gradient(trace, arm=arms)
    assert len(alone.steps) > 3
    assert gradient(trace, arm=arms, ray=cluster[0].address) == alone
    with pytest.raises(InvalidOption, match="ray: no cluster answers"):
        gradient(trace, ray="127.0.0.1:1")


@pytest.mark.slow
@pytest.mark.engine
def test_a_triangulation_replays_on_the_nodes(tmp_path, cluster):
    trace = train("--vllm", "--bf16-engine", config={"temperature": 0.8}, capture="topk:3", fraction="0.5").trace
    found = []
    for name, ray in (("alone", None), ("divided", cluster[0].address)):
        shutil.copytree(trace, tmp_path / name / "run")
        found.append(triangulate(tmp_path / name / "run", arm=("dtype=bf16",), ray=ray))
    assert found[0] == found[1]


@pytest.mark.slow
def test_errors_are_measured_by_the_nodes_with_the_digits_of_one_process(trace, cluster, monkeypatch):
    make_triangle(trace)
    alone = triangulate(trace, arm=("dtype=bf16",))
    assert len(alone.arms.rows) == 1
    assert (len(alone.steps), alone.num_groups) == (12, 24)
    monkeypatch.setattr(import_module("tim_trace.analysis.triangulate"), "_tokens", None)
    assert triangulate(trace, arm=("dtype=bf16",), ray=cluster[0].address) == alone
    with pytest.raises(TypeError):
        triangulate(trace, arm=("dtype=bf16",))


@pytest.mark.slow
def test_a_trace_that_grows_is_not_divided(tmp_path):
    recorder = Recorder(tmp_path / "run")
    batch = recorder.add_sequences(step=1, prompt_ids=[[1]], response_ids=[[2, 3]])
    for name in ("train", "rollout"):
        recorder.add_scores(name, batch, logprobs=[[-0.5, -0.25]])
    recorder.flush()
    try:
        for ask in (stats, objective, corrections):
            with pytest.raises(InvalidOption, match=r"ray: .* is still being recorded or was never finished"):
                ask(tmp_path / "run", ray="local")
    finally:
        recorder.close()


def test_numbers_of_a_framework_are_of_one_process(trace):
    with pytest.raises(InvalidOption, match="ray: a framework's metrics are computed in a single process"):
        stats(trace, like="verl", ray="local")


def test_the_command_line_takes_an_address(trace):
    told = tim_trace("check", trace, "--ray", "127.0.0.1:1")
    assert told.code == 2
    assert "--ray: no cluster answers at '127.0.0.1:1'" in told.stderr
    told = tim_trace("check", "--ray", trace)
    assert told.code == 2
    assert f"--ray: got '{trace}'; use 'auto' on a node" in told.stderr
    assert "put RUN before --ray, which takes the next word as its value" in told.stderr
    told = tim_trace("triangulate", trace, "--gpus-per-arm", "1")
    assert told.code == 2
    assert "--gpus-per-arm: applies only to a cluster; add --ray auto" in told.stderr
