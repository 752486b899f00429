"""What holds for every test: few threads, which worker and which shard runs it, and the data of tests."""

import json
import os
import shutil
import signal
from collections import Counter
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
import shared

# Set before a test imports NumPy or torch; every process that a test starts inherits it. OpenMP's threads spin while they
# wait, and so take the core of the other worker.
for name, value in {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else the engines of two workers share a core
    # Else the trainers of two workers may take one port.
    "MASTER_PORT": str(29600 + 10 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))),
}.items():
    os.environ.setdefault(name, value)

# In the background of a shell, or under nohup, they are ignored: what tests start would ignore them, too.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL), (signal.SIGQUIT, signal.SIG_DFL),
):  # fmt: skip
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, handler)

DATA = Path(__file__).parent / "data"


def pytest_addoption(parser):
    parser.addoption("--shard", default="1/1", metavar="K/N", help="run the K-th of N parts of about equal duration")


def pytest_ignore_collect(collection_path, config):
    """Leave out files without a GPU test under `-m gpu`: a borrowed GPU machine may lack what they import."""
    if config.option.markexpr == "gpu" and collection_path.suffix == ".py":
        return True if "mark.gpu" not in collection_path.read_text() else None
    return None


def pytest_collection_modifyitems(config, items):
    """Keep the shard's files, long ones first: each worker takes a file at a time, and all should end together."""
    files = _files_of_shard(items, *map(int, config.option.shard.split("/")))
    config.hook.pytest_deselected(items=[item for item in items if item.path not in files])
    items[:] = [item for item in items if item.path in files]
    sizes = Counter(item.path for item in items)
    starts_programs = {item.path for item in items if item.get_closest_marker("engine")}
    of_two_long_tests = {item.path for item in items if item.path.name == "test_fuzz.py"}
    items.sort(key=lambda item: (item.path not in starts_programs | of_two_long_tests, -sizes[item.path]))


def _files_of_shard(items, shard, num_shards):
    """Return the files of one shard: each file, longest first, goes to the shard with the least seconds so far."""
    measured = json.loads((Path(__file__).parent / "slow_seconds.json").read_text())
    num_slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    tests = Path(__file__).parent
    seconds = {
        path: measured.get(path.relative_to(tests).as_posix(), 5 * num_slow[path]) for path in {i.path for i in items}
    }
    shards = [(0.0, number, []) for number in range(1, num_shards + 1)]
    for path in sorted(seconds, key=lambda path: (-seconds[path], path)):
        total, number, paths = min(shards)
        shards[number - 1] = (total + seconds[path], number, [*paths, path])
    return set(shards[shard - 1][2])


@pytest.fixture(scope="session", autouse=True)
def shared_folder(tmp_path_factory):
    """The folder in which workers share what is made once."""
    shared.set_folder(tmp_path_factory.getbasetemp())


@pytest.fixture
def trace_v2(tmp_path):
    """A copy of the trace of format 2 that is kept for later releases."""
    shutil.copytree(DATA / "trace-v2", tmp_path / "trace-v2")
    shutil.copy(DATA / "trace-v2.json", tmp_path)
    return tmp_path / "trace-v2"


@pytest.fixture(scope="module")
def s3():
    """A file system of s3fs over an S3 server on this machine, which child processes find too, with a bucket `bucket`."""
    import fsspec
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    patch = pytest.MonkeyPatch()
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
    for name, value in {**keys, "AWS_ENDPOINT_URL": f"http://{host}:{port}"}.items():
        patch.setenv(name, value)
    fsspec.get_filesystem_class("s3").clear_instance_cache()  # one speaks to another module's server
    urlopen(
        Request(f"http://{host}:{port}/moto-api/reset", method="POST")
    ).close()  # servers of a process share what they hold
    filesystem = fsspec.filesystem("s3")
    filesystem.mkdir("bucket")
    yield filesystem
    patch.undo()
    server.stop()
