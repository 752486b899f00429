"""A `locate` that was interrupted goes on where it was, to the bits of one that was not, and takes up nothing foreign."""

import random
import shutil
import signal
import subprocess
import sys
import time
import warnings
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from builders import TIM_TRACE
from located import make_run
from tim_trace.analysis.locate import locate
from tim_trace.analysis.located import read_located
from tim_trace.analysis.verify import verify
from tim_trace.analysis.views import open_database
from tim_trace.replay.locate.engine import locate as locate_operators
from tim_trace.replay.locate.unfinished import Unfinished
from tim_trace.schemas.errors import DamageWarning
from tim_trace.schemas.layout import is_own
from tim_trace.tracer.located.results import LocateQuestion
from tim_trace.tracer.store import Store

ASKED = {"steps": "1", "arm": "dtype=bf16", "against": "dtype=fp32", "sequences": "4"}
KILLED = """
import os, signal, sys
from contextlib import contextmanager
from tim_trace.analysis.locate import locate

@contextmanager
def progress(what, total):
    print(what, flush=True)
    left = int(sys.argv[3]) if what.startswith(sys.argv[2]) else 1 << 30

    def advance(units):
        nonlocal left
        left -= units
        if left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)

    yield advance

locate(sys.argv[1], steps="1", arm="dtype=bf16", against="dtype=fp32", sequences="4", progress=progress)
"""


class Interrupted(Exception):
    """In the place of a kill."""


class Heard:
    """A progress that notes what is done, and stops there after so many units."""

    def __init__(self, where="nowhere", units=0):
        self.told, self._where, self._left = [], where, units

    @contextmanager
    def __call__(self, what, total):
        self.told.append(what)

        def advance(units):
            if what.startswith(self._where):
                self._left -= units
                if self._left <= 0:
                    raise Interrupted

        yield advance


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run in which nothing was located, and what is found there without an interruption."""
    run = make_run(tmp_path_factory.mktemp("located") / "run")
    return run, locate(run, **ASKED, keep=False)


@pytest.fixture
def run(made, tmp_path):
    return shutil.copytree(made[0], tmp_path / "run")


def names(run):
    return sorted(path.name for path in (run / "locate").iterdir())


def interrupted(run, where="running operators", units=8, **changes):
    with pytest.raises(Interrupted):
        locate(run, **ASKED | changes, progress=Heard(where, units))


def test_a_killed_locate_goes_on_where_it_was(run, made):
    interrupted(run)
    done = subprocess.run([sys.executable, "-c", KILLED, run, "patching", "3"], capture_output=True, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert done.stdout.decode().startswith("running operators, 2 of 4 sequences done before")
    heard = Heard()
    found = locate(run, **ASKED, progress=heard)
    assert heard.told[0] == "running operators, 4 of 4 sequences done before"
    assert heard.told[1].startswith("patching operators, 3 of ")
    assert replace(found, kept=None) == made[1]
    assert [name for name in names(run) if "unfinished" in name] == []
    assert read_located(open_database(run))[0].location == found
    assert (verify(run).damaged, verify(run).ignored) == ((), ())


def test_layers_that_are_listened_to_in_turns_go_on_with_the_same_windows(run):
    store, question = Store(run), LocateQuestion(
        step=-1, arm=None, against="attention=eager", sequences="4", layers=None, patch="none", model_factory=None,
        against_factory=None, weights_from=None,
    )  # fmt: skip
    asked = {"arm": "dtype=bf16", "against": "attention=eager", "sequences": "4", "patch": "none"}
    whole = locate_operators(run, **asked, tapped_bytes=1)
    with pytest.raises(Interrupted):
        locate_operators(
            run, **asked, tapped_bytes=1, unfinished=Unfinished(store, question), progress=Heard("running", 8)
        )
    heard = Heard()
    found = locate_operators(run, **asked, unfinished=Unfinished(store, question), progress=heard)
    assert "done before" in heard.told[0]
    assert found == whole


@pytest.mark.parametrize("changes", [{"seed": 2}, {"token_seed": 6}])
def test_what_was_done_in_a_trace_of_other_content_is_not_taken_up(run, tmp_path, changes):
    asked = ASKED | {"patch": "none"}
    interrupted(run, patch="none")
    other = make_run(tmp_path / "other", **changes)
    alone = locate(other, **asked, keep=False)
    shutil.copytree(run / "locate", other / "locate")
    heard = Heard()
    found = locate(other, **asked, progress=heard)
    assert not any("done before" in what for what in heard.told)
    assert replace(found, kept=None) == alone
    assert [name for name in names(other) if "unfinished" in name] == []


def test_what_was_done_with_another_number_of_threads_or_for_another_question_is_not_taken_up(run):
    asked = ASKED | {"patch": "none"}
    interrupted(run, patch="none")
    heard = Heard()
    locate(run, **asked | {"sequences": "3"}, progress=heard)
    assert not any("done before" in what for what in heard.told)
    assert any("unfinished-sequence" in name for name in names(run))
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        locate(run, **asked, progress=heard)
    finally:
        torch.set_num_threads(before)
    assert not any("done before" in what for what in heard.told)


@pytest.mark.parametrize("part", ["unfinished", "unfinished-sequence-1", "unfinished-patch-b-0"])
@pytest.mark.parametrize(
    "damage", ["flipped", pytest.param("cut", marks=pytest.mark.slow), pytest.param("gone", marks=pytest.mark.slow)]
)
def test_a_damaged_part_is_named_and_located_again(run, made, part, damage):
    interrupted(run, "patching", 3)
    (path,) = (run / "locate").glob(f"*-{part}.json")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x04
    path.write_bytes(content if damage == "flipped" else content[:-40])
    if damage == "gone":
        path.unlink()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = locate(run, **ASKED)
    told = [str(each.message) for each in caught if issubclass(each.category, DamageWarning)]
    assert [path.name in each and each.endswith("is located again") for each in told] == [True] * (damage != "gone")
    assert replace(found, kept=None) == made[1]


def test_parts_are_files_of_ours_and_verify_says_what_they_are(run):
    interrupted(run, "patching", 3)
    left = [f"locate/{name}" for name in names(run)]
    assert len(left) == 1 + 4 + 3
    assert all(map(is_own, left))
    found = verify(run)
    assert found.is_whole
    (told,) = found.ignored
    assert "8 files of a `locate` that was interrupted" in told


def test_without_keep_nothing_is_written_on_the_way(run):
    interrupted(run, keep=False)
    assert not (run / "locate").exists()


def test_with_code_of_the_users_it_begins_anew(run):
    def plain(model):
        """Nothing is changed."""

    question = LocateQuestion(
        step=-1, arm=None, against="dtype=fp32", sequences="2", layers=None, patch="none", model_factory=None,
        against_factory=None, weights_from=None,
    )  # fmt: skip
    locate_operators(
        run,
        sequences="2",
        against="dtype=fp32",
        patch="none",
        prepare=plain,
        unfinished=Unfinished(Store(run), question),
    )
    assert not (run / "locate").exists()


@pytest.mark.slow
def test_a_command_that_is_killed_again_and_again_comes_to_the_same_end(run, made):
    draw = random.Random(0)
    command = [str(TIM_TRACE), "locate", str(run), "--steps", "1", "--arm", "dtype=bf16", "--against", "dtype=fp32",
               "--sequences", "4"]  # fmt: skip
    for _ in range(4):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        before = set(names(run)) if (run / "locate").exists() else set()
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            if (run / "locate").exists() and set(names(run)) - before:
                break
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 0.5))
        process.kill()
        process.wait()
    found = locate(run, **ASKED)
    assert replace(found, kept=None) == made[1]
    assert (verify(run).damaged, verify(run).ignored) == ((), ())
