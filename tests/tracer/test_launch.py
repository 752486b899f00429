import json
import os
import signal
import subprocess
import sys
import time

import pytest
from builders import PROGRAMS, TIM_TRACE, run, tim_trace
from tim_trace.analysis.info import info
from tim_trace.schemas.documents import Manifest
from tim_trace.tracer.create import new_trace
from tim_trace.tracer.hooks.session import Order, Session
from tim_trace.tracer.store import Store

SAY = [sys.executable, "-c"]


@pytest.mark.slow
def test_the_exit_code_is_the_command_s(tmp_path):
    for code in (0, 3):
        done = tim_trace("record", "-o", tmp_path / f"run{code}", "--", *SAY, f"raise SystemExit({code})")
        assert done.code == code
        assert info(str(tmp_path / f"run{code}")).exit_code == code


def test_a_command_that_dies_of_a_signal_ends_as_a_shell_tells_it(tmp_path):
    done = tim_trace("record", "-o", tmp_path / "run", "--", *SAY, "import os; os.kill(os.getpid(), 9)")
    assert done.code == 128 + 9


def test_a_termination_is_handed_on_and_the_trace_is_finished(tmp_path):
    program = "import time, sys; print('up', flush=True); time.sleep(600)"
    command = [TIM_TRACE, "record", "-o", tmp_path / "run", "--", *SAY, program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 128 + signal.SIGTERM
    assert info(str(tmp_path / "run")).exit_code == 128 + signal.SIGTERM


def test_output_and_input_of_the_command_pass_through(tmp_path):
    program = "import sys; print(input()); print('aside', file=sys.stderr)"
    done = tim_trace("record", "-o", tmp_path / "run", "--", *SAY, program, stdin="hello\n")
    assert done.stdout == "hello\n"
    assert "aside\n" in done.stderr


def test_recording_nothing_says_what_may_be_the_reason(tmp_path):
    done = tim_trace("record", "-o", tmp_path / "run", "--", *SAY, "pass")
    assert done.code == 0
    assert "nothing was recorded" in done.stderr
    assert "tim_trace.Recorder" in done.stderr
    assert tim_trace("info", tmp_path / "run").code == 0


@pytest.mark.parametrize(("program", "code"), [("1 / 0", 1), ("import os; os.kill(os.getpid(), 9)", 137)])
def test_a_command_that_fails_before_anything_is_recorded_is_told_as_that(tmp_path, program, code):
    done = tim_trace("record", "-o", tmp_path / "run", "--", *SAY, program)
    assert done.code == code
    said = done.stderr.splitlines()[-1]
    assert f"the command failed first (exit code {code})" in said
    assert "Start Python without" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--"], "no command given. Write it after --"),
        ([], "no command given"),
        (["--", "no-such-command"], "no-such-command: no such command"),
        (["--", "/etc/hostname"], "cannot be executed"),
        (["--capture", "topk:x", "--", "true"], "expected topk:K"),
        (["--capture-fraction", "7", "--", "true"], "between 0 and 1"),
    ],
)
def test_wrong_use_is_one_line_and_leaves_nothing(tmp_path, arguments, message):
    done = tim_trace("record", "-o", tmp_path / "run", *arguments)
    assert done.code == 2
    assert message in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_trace_that_is_there_is_refused_before_the_command_starts(tmp_path):
    tim_trace("record", "-o", tmp_path / "run", "--", *SAY, "pass")
    done = tim_trace("record", "-o", tmp_path / "run", "--", *SAY, "print('ran')")
    assert (done.code, done.stdout) == (2, "")
    assert "--force" in done.stderr
    assert tim_trace("record", "--force", "-o", tmp_path / "run", "--", *SAY, "print('ran')").stdout == "ran\n"


def test_options_after_the_command_are_the_command_s(tmp_path):
    done = tim_trace("record", "-o", tmp_path / "run", *SAY, "import sys; print(sys.argv[1:])", "--force", "-o", "x")
    assert done.stdout == "['--force', '-o', 'x']\n"


def test_the_user_s_own_sitecustomize_still_runs(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys; print('mine of', sys.orig_argv[-1])\n")
    done = tim_trace("record", "-o", tmp_path / "run", "--", *SAY, "pass # it", env={"PYTHONPATH": str(tmp_path)})
    # tim-trace's own Python and the command's.
    assert done.stdout == "mine of pass # it\n" * 2


def test_a_python_without_tim_trace_runs_and_says_that_it_is_not_recorded(tmp_path):
    program = [
        sys.executable,
        "-S",
        "-c",
        "import sys; sys.path = [p for p in sys.path if 'site-packages' not in p]; import sitecustomize; print('ran')",
    ]
    done = tim_trace("record", "-o", tmp_path / "run", "--", *program)
    assert done.stdout == "ran\n"
    assert "it cannot import tim_trace" in done.stderr
    assert "-m pip install tim-trace" in done.stderr


def test_a_recorded_python_starts_without_the_heavy_libraries(tmp_path):
    program = (
        "import sys, json; print(json.dumps([n for n in sys.modules if n in ('pyarrow', 'duckdb', 'numpy', 'zarr')]))"
    )
    done = tim_trace("record", "-o", tmp_path / "run", "--", *SAY, program)
    assert json.loads(done.stdout) == []


@pytest.mark.slow
def test_processes_below_processes_are_recorded(tmp_path):
    shell = f"{sys.executable} {PROGRAMS / 'forks.py'}"
    done = tim_trace("record", "-o", tmp_path / "run", "--", "sh", "-c", f"sh -c '{shell}'")
    assert done.code == 0, done.stderr
    assert info(str(tmp_path / "run")).num_sequences == 16


def test_nothing_of_the_recording_is_left_in_a_bare_environment():
    done = run(*SAY, "import os; print('TIM_TRACE_RECORD' in os.environ)")
    assert done.stdout == "False\n"
    assert "TIM_TRACE_RECORD" not in os.environ


def test_a_process_says_what_cpu_time_its_recording_took(tmp_path):
    """Hooks and threads; what they wait for is none."""
    manifest = Manifest(run_id="run", created_at="2026-01-01T00:00:00Z", created_by="0", source="record")
    with new_trace(tmp_path / "run", manifest, force=False) as folder:
        session = Session(Order(run=str(folder)))
    with session.guard("work"):
        busy_for(0.2)
        time.sleep(2)
    session.recorder.add_sequences(step=1, response_ids=[[1]])
    session.recorder.writer.submit(lambda: busy_for(0.1), 0)
    session.close()
    (state,) = Store(folder).writers()[0]
    assert 0.3 <= state.cpu_s < 2


def busy_for(seconds):
    begin = time.thread_time()
    while time.thread_time() - begin < seconds:
        pass
