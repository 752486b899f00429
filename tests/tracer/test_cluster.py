"""What is said of a Ray cluster that is not what a verb needs. Clusters are real ones of several raylets on this machine."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import tim_trace
from clusters import two_nodes
from segmented import make_run
from tim_trace import stats
from tim_trace.schemas.errors import ClusterFailed, InvalidOption, TimTraceWarning
from tim_trace.tracer import cluster
from tim_trace.tracer.cluster import connected, run_units

pytestmark = [
    # Ray's own: pipes of its processes that it leaves to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore:.*:FutureWarning:ray"),
]


class Writer:
    """A worker that writes an empty file where a unit says, and one more at its end."""

    def __init__(self, last):
        self.last = last

    def run(self, unit):
        Path(unit).touch()
        return unit

    def close(self):
        Path(self.last).touch()


class Mortal:
    """A worker whose process is killed at unit 2, once."""

    def __init__(self, died):
        self.died = died

    def run(self, unit):
        if unit == 2 and not Path(self.died).exists():
            Path(self.died).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return 2 * unit

    def close(self):
        pass


@pytest.fixture(scope="module")
def address():
    with two_nodes() as (made, _):
        yield made.address


@pytest.mark.parametrize("address", ["myhost", "ray://127.0.0.1:10001", "", ":6379"])
def test_what_is_no_address_is_refused(address):
    with (
        pytest.raises(InvalidOption, match=r"ray: got .*; use 'auto' on a node of the cluster, HOST:PORT of its head"),
        connected(address),
    ):
        pass  # fmt: skip


@pytest.mark.slow
def test_a_cluster_that_asks_for_a_token_is_told_apart():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = [Path(sys.executable).with_name("ray"), "start", "--head", "--block", "--num-cpus=1", f"--port={port}"]
    command += ["--object-store-memory=100000000", "--include-dashboard=false", "--disable-usage-stats"]
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            with socket.socket() as attempt:
                if attempt.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.2)
        with pytest.raises(InvalidOption, match="set RAY_AUTH_MODE=token"), connected(f"127.0.0.1:{port}"):
            pass
    finally:
        process.terminate()
        process.wait()


@pytest.mark.slow
def test_another_release_of_ray_is_named(address, monkeypatch):
    import ray

    monkeypatch.setattr(ray, "__version__", "1.0.0")
    told = r"and this process have different Ray or Python versions \(.*Ray: 1\.0\.0.*\. Install the cluster's"
    with pytest.raises(InvalidOption, match=told), connected(address):
        pass


@pytest.mark.slow
def test_nodes_with_another_release_of_tim_trace_are_named(tmp_path, monkeypatch):
    # Their package is this one, but for its version.
    package = tmp_path / "other" / "tim_trace"
    here = Path(tim_trace.__file__).parent
    shutil.copytree(here / "schemas", package / "schemas")
    for entry in here.iterdir():
        if entry.name != "schemas":
            (package / entry.name).symlink_to(entry)
    (package / "schemas" / "version.py").write_text('__version__ = "0.0.9"\n')
    told = rf"node .* has tim-trace 0.0.9, but this process has {tim_trace.__version__}\. Install the same version on every node"
    with two_nodes(env_vars={"PYTHONPATH": str(package.parent)}) as (made, _), pytest.raises(ClusterFailed, match=told):
        list(run_units(made.address, None, [1], num_cpus=1, num_gpus=0))


@pytest.mark.slow
def test_a_trace_that_nodes_do_not_see_is_named_with_its_node(tmp_path, address, monkeypatch):
    make_run(tmp_path / "run", writers=1, steps=3)
    shutil.rmtree(tmp_path / "run" / "sums", ignore_errors=True)
    monkeypatch.chdir(tmp_path)  # which is another folder for each process
    with pytest.raises(
        ClusterFailed,
        match=r"node .*: /proc/self/cwd/run .*; the trace and the imported files must be at the same path",
    ):
        stats("/proc/self/cwd/run", ray=address)


@pytest.mark.slow
def test_a_disk_that_cannot_be_written_is_told_in_a_sentence(tmp_path, address):
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # actors do not find the tests
    (tmp_path / "file").touch()
    below = str(tmp_path / "file" / "other")
    for unit, last in ((below, str(tmp_path / "last")), (str(tmp_path / "unit"), below)):
        with pytest.raises(
            ClusterFailed, match=r"node .*Not a directory: .*; check the node's disk and write permissions"
        ):
            list(run_units(address, Writer(last), [unit], num_cpus=1, num_gpus=0))
    done = list(run_units(address, Writer(str(tmp_path / "last")), [str(tmp_path / "unit")], num_cpus=1, num_gpus=0))
    assert done == [(0, str(tmp_path / "unit"))]
    assert (tmp_path / "last").exists()


@pytest.mark.slow
def test_no_room_for_an_actor_is_told_with_what_there_is(address, monkeypatch):
    monkeypatch.setattr(cluster, "LOOK_S", 0.2)
    told = r"no node of the cluster has 1 CPUs and 2 GPUs for an actor \(largest node: 1 CPUs, 0 GPUs\)\. Add a larger node, or request less with gpus_per_arm="
    with pytest.raises(ClusterFailed, match=told):
        list(run_units(address, None, [1], num_cpus=1, num_gpus=2))


@pytest.mark.slow
def test_two_drivers_share_a_cluster_and_the_one_that_waits_says_what_for(tmp_path, address, monkeypatch):
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # actors do not find the tests
    monkeypatch.setattr(cluster, "LOOK_S", 1.0)
    with connected(address) as ray:
        held = [ray.remote(num_cpus=1)(Writer).remote(str(tmp_path / "other")) for _ in range(2)]
        ray.get([one.run.remote(str(tmp_path / f"held-{number}")) for number, one in enumerate(held)])

        def let_go():
            for one in held:
                ray.kill(one)

        timer = threading.Timer(10.0, let_go)
        timer.start()
        with pytest.warns(TimTraceWarning, match=r"no actor has started for 3 s: the cluster has 0 free CPUs"):
            done = list(
                run_units(address, Writer(str(tmp_path / "last")), [str(tmp_path / "unit")], num_cpus=1, num_gpus=0)
            )
        timer.join()
    assert done == [(0, str(tmp_path / "unit"))]


@pytest.mark.slow
def test_a_worker_that_is_killed_is_replaced(tmp_path, address):
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # actors do not find the tests
    done = list(run_units(address, Mortal(str(tmp_path / "died")), [1, 2, 3], num_cpus=1, num_gpus=0))
    assert sorted(done) == [(0, 2), (1, 4), (2, 6)]
    assert (tmp_path / "died").exists()
