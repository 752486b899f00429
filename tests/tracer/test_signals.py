"""A recorded command gets the signals, the terminal and the end that it would have had bare."""

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from builders import TIM_TRACE, tim_trace
from shared import rest_slow
from tim_trace.analysis.info import info

TELLS = """
import signal, sys, time
def tell(number, _):
    print(signal.Signals(number).name, flush=True)
    if number == signal.SIGUSR2:
        sys.exit(7)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT):
    signal.signal(number, tell)
print("up", flush=True)
while True:
    time.sleep(0.1)  # a signal that comes just before a sleep is told after it
"""
SLEEPS = "import time; print('up', flush=True); time.sleep(600)"
PLENTY_S = 240.0


def started(tmp_path, program, *, bare=False, mark="", before=(), **options):
    """A program that has said `up`, recorded or bare; `mark` is in the environment of all of its processes."""
    own = [] if bare else [TIM_TRACE, "record", "-o", tmp_path / "run", "--"]
    process = subprocess.Popen(
        [*before, *own, sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"TIM_TRACE_TEST_MARK": mark}, **options,
    )  # fmt: skip
    assert process.stdout.readline() == "up\n", process.stderr.read()
    return process


def marked(mark):
    """The processes with a mark in their environment: pid -> state."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"TIM_TRACE_TEST_MARK={mark}".encode() in (path / "environ").read_bytes().split(b"\0"):
                found[int(path.name)] = (path / "stat").read_text().rpartition(")")[2].split()[0]
    return found


def wait_for(condition):
    """What a condition gives as soon as it gives something, within a minute."""
    deadline = time.monotonic() + PLENTY_S
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def as_a_shell_says(code):
    return 128 - code if code < 0 else code


@pytest.mark.parametrize("name", rest_slow(["SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGKILL"], 2))
def test_a_signal_to_record_alone_ends_the_command_as_it_ends_a_bare_one(tmp_path, name):
    number, ends = getattr(signal, name), {}
    for bare in (True, False):
        with started(tmp_path, SLEEPS, bare=bare, mark=(mark := uuid.uuid4().hex)) as process:
            process.send_signal(number)
            ends[bare] = as_a_shell_says(process.wait(PLENTY_S))
            assert wait_for(lambda mark=mark: not marked(mark)), "no process is left"
    assert ends[True] == ends[False] == 128 + number
    found = info(str(tmp_path / "run"))
    if name == "SIGKILL":
        assert (found.state, found.exit_code) == ("finished", None)
        assert any("the exit code of the command is unknown" in sentence for sentence in found.missing)
    else:
        assert (found.state, found.exit_code, found.missing) == ("finished", 128 + number, ())


def test_every_signal_reaches_the_command_once(tmp_path):
    with started(tmp_path, TELLS) as process:
        for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGCONT", "SIGUSR2"):
            process.send_signal(getattr(signal, name))
            assert process.stdout.readline() == f"{name}\n"
        assert process.stdout.read() == ""
        assert process.wait(PLENTY_S) == 7


@pytest.mark.slow
def test_a_command_that_ignores_ctrl_c_goes_on_and_so_does_the_recording(tmp_path):
    program = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); print('up', flush=True); print(input())"
    with started(tmp_path, program, stdin=subprocess.PIPE) as process:
        for _ in range(3):
            process.send_signal(signal.SIGINT)
        assert process.communicate("still here\n", PLENTY_S)[0] == "still here\n"
        assert process.returncode == 0


def test_what_is_stopped_goes_on(tmp_path):
    # A group of its own: one whose parents have gone is not stopped by the terminal's signals.
    with started(tmp_path, TELLS, mark=(mark := uuid.uuid4().hex), process_group=0) as process:
        process.send_signal(signal.SIGTSTP)
        assert wait_for(lambda: set(marked(mark).values()) == {"T"}), marked(mark)
        process.send_signal(signal.SIGCONT)
        assert process.stdout.readline() == "SIGCONT\n"
        process.send_signal(signal.SIGUSR2)
        assert process.stdout.readline() == "SIGUSR2\n"
        assert process.wait(PLENTY_S) == 7
    assert info(str(tmp_path / "run")).exit_code == 7


def test_nohup_keeps_a_hang_up_from_both(tmp_path):
    program = "print('up', flush=True); print(input())"
    with started(tmp_path, program, before=["nohup"], stdin=subprocess.PIPE) as process:
        process.send_signal(signal.SIGHUP)
        assert process.communicate("still here\n", PLENTY_S)[0] == "still here\n"
        assert process.returncode == 0


class Terminal:
    """A command in a terminal of its own."""

    def __init__(self, command):
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execv(command[0], [str(word) for word in command])
        self.shown = ""

    def shows(self, text, times=1):
        deadline = time.monotonic() + PLENTY_S
        while self.shown.count(text) < times and time.monotonic() < deadline:
            if select.select([self.fd], [], [], 0.1)[0]:
                try:
                    self.shown += os.read(self.fd, 4096).decode()
                except OSError:  # all of its processes have ended
                    break
        return self.shown.count(text) >= times

    def type(self, text):
        os.write(self.fd, text.encode())

    def end(self):
        self.shows("\0")
        _, status = os.waitpid(self.pid, 0)
        os.close(self.fd)
        return as_a_shell_says(os.waitstatus_to_exitcode(status))


def test_ctrl_c_of_a_terminal_reaches_the_command_once_each_time(tmp_path):
    terminal = Terminal([TIM_TRACE, "record", "-o", tmp_path / "run", "--", sys.executable, "-c", TELLS])
    assert terminal.shows("up\r\n")
    for times in (1, 2):
        terminal.type("\x03")
        assert terminal.shows("SIGINT", times), terminal.shown
    terminal.type("\x1c")
    assert terminal.shows("SIGQUIT")
    (child,) = wait_for(
        lambda: [int(p) for p in Path(f"/proc/{terminal.pid}/task/{terminal.pid}/children").read_text().split()]
    )
    os.kill(child, signal.SIGUSR2)
    assert terminal.end() == 7
    assert (terminal.shown.count("SIGINT"), terminal.shown.count("SIGQUIT")) == (2, 1)


def test_ctrl_c_ends_a_program_that_knows_nothing_of_it(tmp_path):
    terminal = Terminal([TIM_TRACE, "record", "-o", tmp_path / "run", "--", sys.executable, "-c", SLEEPS])
    assert terminal.shows("up\r\n")
    terminal.type("\x03")
    assert terminal.end() == 128 + signal.SIGINT
    assert terminal.shown.count("KeyboardInterrupt") == 1
    assert info(str(tmp_path / "run")).exit_code == 128 + signal.SIGINT


def test_the_command_has_the_terminal(tmp_path):
    program = "import sys; print(sys.stdin.isatty(), sys.stdout.isatty()); print('you said', input('name? '))"
    terminal = Terminal([TIM_TRACE, "record", "-o", tmp_path / "run", "--", sys.executable, "-c", program])
    assert terminal.shows("True True")
    assert terminal.shows("name? ")
    terminal.type("tim\n")
    assert terminal.shows("you said tim")
    assert terminal.end() == 0


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("name", [None, "SIGINT"])
def test_children_of_multiprocessing_end_as_in_a_bare_run(tmp_path, method, name):
    program = tmp_path / "pool.py"
    program.write_text(
        "import multiprocessing, sys, time\n"
        "def work(number):\n    return number * number\n"
        "if __name__ == '__main__':\n"
        f"    with multiprocessing.get_context({method!r}).Pool(2) as pool:\n"
        "        print(pool.map(work, range(4)), flush=True)\n" + ("        time.sleep(600)\n" if name else "")
    )
    ends = {}
    for bare in (True, False):
        mark = uuid.uuid4().hex
        own = [] if bare else [TIM_TRACE, "record", "-o", tmp_path / "run", "--"]
        with subprocess.Popen(
            [*own, sys.executable, program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            start_new_session=True, env=os.environ | {"TIM_TRACE_TEST_MARK": mark},
        ) as process:  # fmt: skip
            assert process.stdout.readline() == "[0, 1, 4, 9]\n"
            if name:
                process.send_signal(getattr(signal, name))
            ends[bare] = as_a_shell_says(process.wait(PLENTY_S))
            assert wait_for(lambda mark=mark: not marked(mark)), (bare, marked(mark))
    assert ends[True] == ends[False]


def test_a_shell_script_that_becomes_python_gets_its_signals(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{SLEEPS}"\n')
    script.chmod(0o755)
    command = [TIM_TRACE, "record", "-o", tmp_path / "run", "--", script]
    mark = uuid.uuid4().hex
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TIM_TRACE_TEST_MARK": mark},
    ) as process:
        assert process.stdout.readline() == "up\n"
        process.kill()
        process.wait(PLENTY_S)
        assert wait_for(lambda: not marked(mark)), "what the script became gets the signal, too"


def test_a_folder_that_is_removed_meanwhile_is_said_and_the_command_goes_on(tmp_path):
    program = (
        f"import shutil; shutil.rmtree({str(tmp_path / 'run')!r}); print('trained to the end'); raise SystemExit(3)"
    )
    done = tim_trace("record", "-o", tmp_path / "run", "--", sys.executable, "-c", program)
    assert (done.code, done.stdout) == (3, "trained to the end\n")
    assert f"{tmp_path / 'run'} was removed while the command ran, so the recording is lost" in done.stderr
    assert not (tmp_path / "run").exists()
    assert "Traceback" not in done.stderr
