"""Replays on a real Ray cluster of several raylets on this machine. Bits are compared as bits."""

import os
import shutil
import signal
import subprocess
import threading
import time

import pytest
from builders import TIM_TRACE, tim_trace
from clusters import two_nodes
from runs import train
from tim_trace.analysis.trace.tokens import spread
from tim_trace.analysis.views import connect, open_database
from tim_trace.replay.engine import replay
from tim_trace.schemas.errors import ClusterFailed, InvalidOption

pytestmark = [
    pytest.mark.engine,
    # Ray's own: pipes of its processes that it leaves to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore:.*:FutureWarning:ray"),
]

ARMS = ("batch-size=1", "dtype=bf16", "batch-tokens=64")
BITS = "SELECT pass, step, seq_id, logprobs FROM scores WHERE pass LIKE 'replay/%' ORDER BY ALL"


@pytest.fixture(scope="module")
def recording():
    return train(capture="logprobs").trace


@pytest.fixture(scope="module")
def alone(recording, tmp_path_factory):
    """What one process gives: its results, and every logprob."""
    trace = tmp_path_factory.mktemp("alone") / "run"
    shutil.copytree(recording, trace)
    results = replay(trace, arm=ARMS)
    return list(results), connect(trace).execute(BITS).fetchall()


@pytest.fixture
def trace(recording, tmp_path):
    shutil.copytree(recording, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def cluster():
    with two_nodes() as made:
        yield made


def wait_for_the_first_step(trace, process=None):
    """Until an actor has begun to write: its processes need most of the time to start."""
    deadline = time.monotonic() + 400
    while not any((trace / "journal").glob("*.scores.arrows")) and time.monotonic() < deadline:
        assert process is None or process.poll() is None
        time.sleep(0.01)


def added(trace):
    """Steps of the replays' passes that the trace has by now."""
    count = "SELECT count(DISTINCT (pass, step)) FROM scores WHERE pass LIKE 'replay/%'"
    return connect(trace).execute(count).fetchone()[0]


def bits(trace):
    return connect(trace).execute(BITS).fetchall()


@pytest.mark.slow
def test_two_nodes_give_the_bits_of_one_process(trace, alone, cluster):
    results, logprobs = alone
    assert list(replay(trace, arm=ARMS, ray=cluster[0].address)) == results
    assert bits(trace) == logprobs
    writers = "SELECT count(DISTINCT writer) FROM scores WHERE pass LIKE 'replay/%'"
    assert connect(trace).execute(writers).fetchone()[0] >= 2
    with pytest.raises(InvalidOption, match="has already scored all of these steps"):
        replay(trace, arm=ARMS, ray=cluster[0].address)


@pytest.mark.slow
def test_what_a_node_had_when_it_died_is_scored_on_another(trace, alone, cluster):
    results, logprobs = alone
    made, nodes = cluster
    removed = threading.Event()

    def remove():
        wait_for_the_first_step(trace)
        made.remove_node(nodes[0], allow_graceful=False)
        removed.set()

    thread = threading.Thread(target=remove)
    thread.start()
    try:
        found = list(replay(trace, arm=ARMS, ray=made.address))
        assert removed.is_set()
    finally:
        thread.join()
    assert found == results
    assert bits(trace) == logprobs


@pytest.mark.slow
def test_what_a_node_had_when_it_died_is_read_on_another(recording, cluster):
    def total(database, step):
        query = "SELECT sum(list_sum(logprobs)) FROM scores WHERE step = ?"
        return database.connection.execute(query, [step]).fetchall()

    def slow_total(database, step):
        time.sleep(2)
        yield total(database, step)

    made, nodes = cluster
    steps = [1, 2, 3, 1, 2, 3]
    found = spread(open_database(recording, ray=made.address), slow_total, steps)
    read = [next(found)]
    made.remove_node(nodes[0], allow_graceful=False)
    assert read + list(found) == [total(open_database(recording), step) for step in steps]


def of_this_module(database, step):
    """Actors do not find the tests."""
    yield step


@pytest.mark.slow
def test_actors_that_cannot_start_end_the_work(recording, cluster):
    with pytest.raises(
        ClusterFailed,
        match=r"3 actors died before they were ready .*No module named .*Check that tim-trace .* and all packages",
    ):
        list(spread(open_database(recording, ray=cluster[0].address), of_this_module, [1, 2, 3]))


@pytest.mark.slow
def test_a_driver_that_was_killed_goes_on_where_it_was(trace, alone, cluster):
    _, logprobs = alone
    command = ["replay", str(trace), *(part for arm in ARMS for part in ("--arm", arm)), "--ray", cluster[0].address]
    process = subprocess.Popen(
        [str(TIM_TRACE), *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    wait_for_the_first_step(trace, process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert added(trace) < 12
    done = tim_trace(*command)
    assert done.code == 0, done.stderr
    assert bits(trace) == logprobs


@pytest.mark.slow
def test_an_actor_s_refusal_is_the_sentence_of_one_process(trace, cluster):
    chunks = [file for file in (trace / "weights").rglob("*") if file.is_file() and "/c/" in file.as_posix()]
    assert chunks
    for file in chunks:
        file.write_bytes(b"\0" * 64)
    told = [tim_trace("replay", trace, *ray) for ray in ((), ("--ray", cluster[0].address))]
    assert [done.code for done in told] == [2, 2]
    assert told[0].stderr == told[1].stderr
    assert "ray" not in told[1].stderr.lower().replace(str(trace), "")


def test_an_address_without_a_cluster_is_refused_before_anything_is_removed(trace):
    replay(trace, steps="1", dtype="bf16")
    before = bits(trace)
    with pytest.raises(InvalidOption, match=r"ray: no cluster answers at .127\.0\.0\.1:1."):
        replay(trace, steps="1", dtype="bf16", force=True, ray="127.0.0.1:1")
    assert bits(trace) == before


def test_options_that_a_cluster_does_not_take_are_refused(trace):
    with pytest.raises(InvalidOption, match="gpus_per_arm: applies only to a cluster; add ray='auto'"):
        replay(trace, gpus_per_arm=1)
    with pytest.raises(InvalidOption, match=r"gpus_per_arm: got 1\.5; pass a fraction from 0 to 1, or a whole number"):
        replay(trace, ray="local", gpus_per_arm=1.5)
    with pytest.raises(
        InvalidOption, match="dry_run: measures the speed in this process, so it cannot be combined with ray"
    ):
        replay(trace, ray="local", dry_run=True)
