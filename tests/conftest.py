import shutil
import signal
from pathlib import Path

import pytest

if (
    signal.getsignal(signal.SIGINT) == signal.SIG_IGN
):  # as in the background of a shell: what tests start would ignore it, too
    signal.signal(signal.SIGINT, signal.default_int_handler)

DATA = Path(__file__).parent / "data"


@pytest.fixture
def trace_v1(tmp_path):
    """A copy of the trace that the first format version's release wrote."""
    shutil.copytree(DATA / "trace-v1", tmp_path / "trace-v1")
    shutil.copy(DATA / "trace-v1.json", tmp_path)
    return tmp_path / "trace-v1"
