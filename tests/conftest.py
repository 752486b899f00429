"""What holds for every test: few threads, which worker runs it, and the data of tests."""

import os
import shutil
import signal
from collections import Counter
from pathlib import Path

import pytest
import shared

# Set before a test imports NumPy or torch, and inherited by every process that a test starts: threads that spin while
# they wait would take the core of the other worker.
for name, value in {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}.items():
    os.environ.setdefault(name, value)

if (
    signal.getsignal(signal.SIGINT) == signal.SIG_IGN
):  # as in the background of a shell: what tests start would ignore it, too
    signal.signal(signal.SIGINT, signal.default_int_handler)

DATA = Path(__file__).parent / "data"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Give each test the group whose tests one worker runs, and put the groups that take longest first.

    Engines are one group: two at once want more memory than a small machine has. The other groups are the files, so
    that a module's fixtures are made once.
    """
    groups = {item: "vllm" if item.get_closest_marker("vllm") else item.path.stem for item in items}
    sizes = Counter(groups.values())
    for item, group in groups.items():
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: (groups[item] != "vllm", not item.get_closest_marker("engine"), -sizes[groups[item]]))


@pytest.fixture(scope="session", autouse=True)
def shared_folder(tmp_path_factory):
    """The folder in which workers share what is made once."""
    shared.set_folder(tmp_path_factory.getbasetemp())


@pytest.fixture
def trace_v1(tmp_path):
    """A copy of the trace that the first format version's release wrote."""
    shutil.copytree(DATA / "trace-v1", tmp_path / "trace-v1")
    shutil.copy(DATA / "trace-v1.json", tmp_path)
    return tmp_path / "trace-v1"
