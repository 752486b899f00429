"""However a Python is started in the recorded command, it records, or one line says why it does not."""

import itertools
import os
import shlex
import subprocess
import sys
import venv

import pytest
from builders import PROGRAMS, TIM_TRACE, make_batch, make_trace, run, tim_trace
from tim_trace.analysis.check.check import check
from tim_trace.analysis.info import info
from tim_trace.analysis.stats import stats
from tim_trace.analysis.verify import verify
from tim_trace.analysis.views import connect
from tim_trace.analysis.watch.watch import watch

RECORDS = PROGRAMS / "records.py"


def recorded(tmp_path, *command, **options):
    done = tim_trace("record", "-o", tmp_path / "run", "--", *command, **options)
    return done, info(str(tmp_path / "run")).num_sequences


def script(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.mark.slow
def test_a_module_a_console_script_and_a_wrapper_are_recorded(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text(RECORDS.read_text().replace("__file__", repr(str(RECORDS))))
    console = script(
        tmp_path / "bin" / "my-trainer", f"#!{sys.executable}\n" + (tmp_path / "package" / "__main__.py").read_text()
    )
    # As `conda run` and module systems do: the environment of a prefix, then the command.
    wrapper = script(
        tmp_path / "conda-run",
        f'#!/bin/sh\nexport CONDA_PREFIX=/opt/env PATH={shlex.quote(os.path.dirname(sys.executable))}:"$PATH"\n"$@"\nexit $?\n',
    )
    for command in (
        [sys.executable, "-m", "package", "--lr", "1"],
        [console, "--lr", "1"],
        [wrapper, "python", RECORDS, "--lr", "1"],
        ["sh", "-c", f"cd / && exec {sys.executable} {RECORDS} --lr 1"],
    ):
        done = tim_trace("record", "--force", "-o", tmp_path / "run", "--", *command, cwd=tmp_path)
        assert (done.code, done.stdout) == (0, "ran True --lr 1\n"), (command, done.stderr)
        assert info(str(tmp_path / "run")).num_sequences == 4, command


@pytest.mark.parametrize("flag", ["-S", "-I", "-E"])
def test_a_python_that_reads_no_site_says_what_may_be_the_reason(tmp_path, flag):
    done, sequences = recorded(tmp_path, sys.executable, flag, "-c", "print('ran')")
    assert (done.code, done.stdout, sequences) == (0, "ran\n", 0)
    assert "nothing was recorded" in done.stderr
    assert "without -I, -E and -S" in done.stderr


def test_a_virtual_environment_without_tim_trace_says_how_to_install_it_there(tmp_path):
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    command = f'. {tmp_path / "venv" / "bin" / "activate"}; PYTHONPATH="${{PYTHONPATH%%:*}}" python -c "print(1 + 1)"'
    done, sequences = recorded(tmp_path, "sh", "-c", command)
    assert (done.code, done.stdout, sequences) == (0, "2\n", 0)
    assert f"{python} is not recorded, because it cannot import tim_trace" in done.stderr
    assert f"{python} -m pip install tim-trace" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ['it\'s $HOME "quoted" [x]*?', "日本語 é\n-o"])
def test_a_folder_may_have_any_name(tmp_path, name):
    (tmp_path / name).mkdir()
    done = tim_trace("record", "-o", "./-run [1]*", "--", sys.executable, RECORDS, cwd=tmp_path / name)
    assert (done.code, done.stdout) == (0, "ran True\n"), done.stderr
    found = info(str(tmp_path / name / "-run [1]*"))
    assert (found.num_sequences, found.damaged, found.state) == (4, (), "finished")


@pytest.mark.slow
def test_answers_while_it_is_recorded_are_those_of_the_steps_so_far(tmp_path):
    path, rows = tmp_path / "run", 32
    lengths = [sum(map(len, make_batch(rows=rows, seed=seed, longest=200)["response_ids"])) for seed in range(4)]
    tokens = [0, *itertools.accumulate(lengths[step % 4] for step in range(1, 3000))]
    command = [sys.executable, PROGRAMS / "durable.py", path, "1", "0.02", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for _ in range(8):
            assert process.stdout.readline()
        seen = 0
        while seen < 12:
            query = "SELECT step, count(*), sum(num_response_tokens)::BIGINT FROM sequences GROUP BY step ORDER BY step"
            held = connect(path).execute(query).fetchall()
            last = len(held)
            assert held == [(step, rows, lengths[step % 4]) for step in range(1, last + 1)]
            assert last >= seen
            found = info(str(path))
            assert (found.state, found.damaged, found.first_step) == ("live", (), 1)
            assert found.num_response_tokens == tokens[found.num_steps]
            (row,) = stats(path).dicts()
            assert row["num_tokens"] in tokens[max(last - 1, 0) :]
            assert check(path).num_tokens in tokens[max(last - 1, 0) :]
            watched = next(watch(str(path), once=True))
            assert (watched.state, watched.last_step >= last) == ("live", True)
            assert watched.num_tokens == tokens[watched.num_steps]
            seen = last
        process.kill()
    assert list((path / "scores").glob("*.parquet"))
    assert list((path / "journal").glob("*.scores.arrows"))


@pytest.mark.slow
def test_processes_that_make_sums_at_once_agree(tmp_path):
    make_trace(tmp_path / "run", steps=6, rows=16)
    commands = [["stats", tmp_path / "run", "--json"]] * 2 + [
        ["report", tmp_path / "run", "-o", tmp_path / "page.html"]
    ]
    processes = [subprocess.Popen([TIM_TRACE, *command], stdout=subprocess.PIPE, text=True) for command in commands]
    told = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert told[0] == told[1] == run(TIM_TRACE, "stats", tmp_path / "run", "--json").stdout
    assert verify(str(tmp_path / "run")).is_whole
