"""A job on several nodes: each runs `tim-trace record` with the same folder, and one trace comes of it."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from builders import PROGRAMS, free_port, make_batch, run, tim_trace
from shared import rest_slow
from tim_trace.analysis.info import info
from tim_trace.analysis.views import connect
from tim_trace.schemas.documents import Manifest, WriterState, command_exit_code
from tim_trace.schemas.errors import TraceExists
from tim_trace.tracer import create, whole_file
from tim_trace.tracer.create import new_trace
from tim_trace.tracer.hooks.session import BOOTSTRAP
from tim_trace.tracer.processes import has_several_nodes, is_same, later_node
from tim_trace.tracer.store import Store

TORCHRUN = Path(sys.executable).parent / "torchrun"
RANKS = ("NODE_RANK", "PET_NODE_RANK", "PET_NNODES", "GROUP_RANK", "SLURM_NODEID", "SLURM_PROCID", "RANK")
OTHER_HOST = ["unshare", "--user", "--map-root-user", "--uts", "sh", "-c", 'hostname node1; exec "$@"', "sh"]


def other_host():
    """Words before a command that give it another host's name, where this is allowed."""
    is_possible = (
        shutil.which("unshare")
        and not subprocess.run([*OTHER_HOST, "true"], capture_output=True, check=False).returncode
    )
    return OTHER_HOST if is_possible else []


def node(number, output, *command, options=(), wait_s=60, env=None, elsewhere=True):
    """Start `tim-trace record` on a node; the second one has another host's name."""
    words = [sys.executable, "-m", "tim_trace", "record", "-o", output, "--max-wait", wait_s, *options, "--", *command]
    clean = {name: value for name, value in os.environ.items() if name not in RANKS}
    return subprocess.Popen(
        [*(other_host() if number and elsewhere else []), *map(str, words)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env=clean | {"GLOO_SOCKET_IFNAME": "lo"} | (env or {}),
    )  # fmt: skip


def ranked(number, output, folder, *arguments, **options):
    """A node whose number the environment tells, and its one process without torch."""
    command = [sys.executable, PROGRAMS / "nodes.py", folder, *arguments]
    return node(number, output, *command, env={"NODE_RANK": str(number), "RANK": str(number)}, **options)


def torchrun(number, output, port, *arguments, rendezvous="static", **options):
    where = ["--node-rank", number, "--master-addr", "127.0.0.1", "--master-port", port]
    if rendezvous == "c10d":
        where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "job"]
    command = [TORCHRUN, "--nnodes", 2, "--nproc-per-node", 1, *where, PROGRAMS / "nodes.py", *arguments]
    return node(number, output, *command, **options)


def ended(*processes, timeout=300):
    """Exit code, stdout and stderr of each; all are killed where one does not end."""
    try:
        told = [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    return [(process.returncode, *texts) for process, texts in zip(processes, told, strict=True)]


def wait_for(condition, what):
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError(what)


def begun(output):
    return lambda: (output / "writers" / "record.json").exists()


def rows(output):
    return connect(output).execute("SELECT step, seq_id, response_ids, attempt FROM sequences ORDER BY ALL").fetchall()


def expected(steps, attempt=1):
    return [
        (step, f"r{rank}-{row}", make_batch(seed=100 * rank + step)["response_ids"][row], attempt)
        for step in range(1, steps + 1) for rank in (0, 1) for row in range(4)
    ]  # fmt: skip


def check_whole(output, results, steps, attempt=1):
    """Both nodes ended well, every row is there once, one of them finished the trace, and nothing is called damaged."""
    assert [code for code, _, _ in results] == [0, 0], results
    assert rows(output) == expected(steps, attempt)
    found = info(str(output))
    assert (found.state, found.exit_code, found.damaged, found.missing) == ("finished", 0, (), ())
    assert sum("next: tim-trace info" in stderr for _, _, stderr in results) == 1, results
    assert sum(". The trace is finished once" in stderr for _, _, stderr in results) == 1, results
    assert (output / "index").exists()
    assert tim_trace("verify", output).code == 0


@pytest.mark.slow
@pytest.mark.parametrize(("first", "rendezvous"), [(0, "static"), (1, "static"), (0, "c10d"), (1, "c10d")])
def test_two_agents_of_torchrun_record_one_trace_whoever_comes_first(tmp_path, first, rendezvous):
    output, port = tmp_path / "run", free_port()

    def start(number):
        return torchrun(number, output, port, tmp_path / "meet", 3, rendezvous=rendezvous)

    one = start(first)
    if first and rendezvous == "static":
        time.sleep(3)  # it waits
        assert not output.exists()
    else:
        wait_for(begun(output), "the first node begins the trace")
    check_whole(output, ended(one, start(1 - first)), 3)
    assert {state.host for state in Store(output).writers()[0]} >= ({"node1"} if other_host() else set())


@pytest.mark.parametrize("last", rest_slow([0, 1], 1))
def test_a_trace_is_whole_whoever_ends_first(tmp_path, last):
    output = tmp_path / "run"
    second = ranked(1, output, tmp_path / "meet", 3, last)
    first = ranked(0, output, tmp_path / "meet", 3, last)
    outlived = first if last else second
    wait_for(lambda: outlived.poll() is not None, "one ends")
    while_one_runs = info(str(output))
    (tmp_path / "meet" / "go").touch()
    results = ended(first, second)
    assert (while_one_runs.state, while_one_runs.damaged, while_one_runs.missing) == ("live", (), ())
    check_whole(output, results, 3)
    assert "joining the recording started on" in results[1][2]


@pytest.mark.parametrize("option", rest_slow(["--force", "--resume"], 1))
def test_both_nodes_may_be_started_again_with_the_same_option(tmp_path, option):
    output = tmp_path / "run"
    for attempt in (1, 2):
        options = [option] if attempt == 2 else []
        second = ranked(1, output, tmp_path / f"meet{attempt}", 2, options=options)
        first = ranked(0, output, tmp_path / f"meet{attempt}", 2, options=options)
        check_whole(output, ended(first, second), 2, attempt if option == "--resume" else 1)


def test_a_node_does_not_join_an_old_trace_and_starts_its_command(tmp_path):
    output = tmp_path / "run"
    (tmp_path / "meet").mkdir()
    for step in (1, 2):
        for rank in (0, 1):
            (tmp_path / "meet" / f"{step}-{rank}").touch()
    ended(ranked(0, output, tmp_path / "meet", 2))
    before = rows(output)
    (refused,) = ended(ranked(0, output, tmp_path / "meet", 2))
    assert (refused[0], "a trace already exists there" in refused[2]) == (2, True)
    (alone,) = ended(ranked(1, output, tmp_path / "meet", 2, wait_s=1))
    assert alone[:2] == (0, "rank 1 trained\n")
    assert alone[2].count("NOT RECORDED on this node") == 2
    assert "NODE_RANK=1 is set, so another node must start the recording" in alone[2]
    assert rows(output) == before


def test_a_node_that_does_not_see_the_folder_starts_its_command(tmp_path):
    second = ranked(1, tmp_path / "no" / "mount" / "run", tmp_path / "meet", 2, wait_s=1)
    results = ended(ranked(0, tmp_path / "run", tmp_path / "meet", 2), second)
    assert [code for code, _, _ in results] == [0, 0], results
    assert "Start every node with the same shared folder; unset NODE_RANK" in results[1][2]
    assert not (tmp_path / "no").exists()
    assert {seq_id for _, seq_id, _, _ in rows(tmp_path / "run")} == {f"r0-{row}" for row in range(4)}


def test_a_further_node_does_not_record_to_object_storage_and_starts_its_command(tmp_path):
    (done,) = ended(node(1, "memory://run", sys.executable, "-c", "print('ran')", env={"RANK": "1"}))
    assert done[:2] == (0, "ran\n")
    assert "Use a folder shared by all nodes" in done[2]


@pytest.mark.slow
def test_a_node_that_is_killed_leaves_its_rows_and_the_other_one_finishes(tmp_path):
    output = tmp_path / "run"
    second = ranked(1, output, tmp_path / "meet", 2, 0, 1)
    first = ranked(0, output, tmp_path / "meet", 2, 0, 1)
    assert second.stdout.readline() == "rank 1 trained\n"
    os.killpg(second.pid, signal.SIGKILL)
    ended(second)
    (tmp_path / "meet" / "go").touch()
    (done,) = ended(first)
    assert done[0] == 0
    assert "next: tim-trace info" in done[2]
    assert rows(output) == expected(2)
    assert (output / "index").exists()


def test_a_recording_that_was_killed_on_another_host_is_not_joined(tmp_path):
    output = tmp_path / "run"
    wait = "import time; print('up', flush=True); time.sleep(600)"
    old = node(1, output, sys.executable, "-c", wait)
    assert old.stdout.readline() == "up\n"
    os.killpg(old.pid, signal.SIGKILL)
    ended(old)
    (alone,) = ended(node(0, output, sys.executable, "-c", "print('ran')", env={"SLURM_PROCID": "3"}, wait_s=2))
    assert alone[:2] == (0, "ran\n")
    assert "NOT RECORDED on this node" in alone[2]


def test_the_exit_code_of_several_nodes_is_that_of_the_one_that_failed():
    def launcher(name, session, opened_at, exit_code):
        return WriterState(writer=name, attempt_key=session, opened_at=opened_at, exit_code=exit_code)

    before, first, second = (
        launcher("record", "a", "1", 5),
        launcher("record-2", "b", "2", 0),
        launcher("record-x", "b", "3", 0),
    )
    assert command_exit_code([before, first, second]) == 0
    second.exit_code = None  # it runs
    assert command_exit_code([second, before, first]) is None
    first.exit_code = 3
    assert command_exit_code([before, first, second]) == 3
    assert command_exit_code([before, launcher("record-2", None, "2", 0)]) == 0  # of a release without sessions
    assert command_exit_code([WriterState(writer="r0-p1-a")]) is None


def test_a_process_that_got_our_path_without_the_order_says_so(tmp_path):
    """As DeepSpeed starts them on other nodes: it passes PYTHON* on."""
    said = run(
        sys.executable,
        "-c",
        "print('ran')",
        env={"PYTHONPATH": os.pathsep.join([BOOTSTRAP, os.environ.get("PYTHONPATH", "")])},
    )
    assert (said.code, said.stdout) == (0, "ran\n")
    assert "this process is not recorded" in said.stderr


@pytest.mark.parametrize(("command", "setting"), [
    (["torchrun", "--nnodes", "2", "--node-rank", "1", "train.py"], "--node-rank 1"),
    (["torchrun", "--nnodes=2", "--node_rank=1", "train.py"], "--node_rank=1"),
    (["accelerate", "launch", "--num_machines", "2", "--machine_rank", "1", "train.py"], "--machine_rank 1"),
    (["torchrun", "--nnodes", "2", "--node-rank", "0", "train.py"], None),
    (["torchrun", "--nnodes", "2", "--node-rank"], None),
    (["python", "train.py", "--rank", "1"], None),
])  # fmt: skip
def test_a_command_tells_which_node_it_is_of(monkeypatch, command, setting):
    for name in RANKS:
        monkeypatch.delenv(name, raising=False)
    assert later_node(command) == setting


@pytest.mark.parametrize("name", ["NODE_RANK", "GROUP_RANK", "SLURM_NODEID", "SLURM_PROCID", "RANK", "PET_NODE_RANK"])
def test_the_environment_tells_which_node_this_is(monkeypatch, name):
    for other in RANKS:
        monkeypatch.setenv(other, "0")
    assert later_node(["python", "train.py"]) is None
    monkeypatch.setenv(name, "2")
    assert later_node(["python", "train.py"]) == f"{name}=2"
    assert later_node(["torchrun", "--node-rank", "0", "train.py"]) is None


def test_a_command_tells_that_there_are_several_nodes(monkeypatch):
    monkeypatch.delenv("PET_NNODES", raising=False)
    for several in (["--nnodes", "2"], ["--nnodes=1:4"], ["--num_machines", "3"], ["--num-machines=3"]):
        assert has_several_nodes(["torchrun", *several, "train.py"])
    for one in (["--nnodes", "1"], ["--nnodes=1:1"], [], ["--nnodes"]):
        assert not has_several_nodes(["torchrun", *one, "train.py"])
    monkeypatch.setenv("PET_NNODES", "2")
    assert has_several_nodes(["torchrun", "train.py"])


def test_commands_of_two_nodes_are_the_same_but_for_their_number():
    assert is_same(["torchrun", "--node-rank", "0", "a.py"], ["torchrun", "--node-rank=1", "a.py"])
    assert not is_same(["torchrun", "--node-rank", "0", "a.py"], ["torchrun", "--node-rank", "0", "a.py", "--lr", "1"])


def test_a_second_command_that_is_no_node_of_the_first_is_refused(tmp_path):
    """The same path by mistake: two runs in one trace would be worse than a refusal."""
    wait = "import time; print('up', flush=True); time.sleep(600)"
    running = node(0, tmp_path / "run", sys.executable, "-c", wait)
    assert running.stdout.readline() == "up\n"
    results = ended(
        node(0, tmp_path / "run", sys.executable, "-c", wait),
        node(0, tmp_path / "run", "echo", "--nnodes", "2", "ran"),
    )
    for code, stdout, stderr in results:
        assert (code, stdout, "a trace already exists there" in stderr) == (2, "", True)
    os.killpg(running.pid, signal.SIGTERM)
    ended(running)


@pytest.mark.filterwarnings("ignore:.*does not support locks")  # which is what it is about
def test_of_two_processes_that_begin_a_trace_without_locks_one_does(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(9, "Bad file descriptor")

    def manifest(name):
        return Manifest(run_id=name, created_at="2026-01-01T00:00:00Z", created_by="0", source="record")

    def move_aside(folder):  # between the second one's look and its manifest
        monkeypatch.undo()
        monkeypatch.setattr(whole_file.fcntl, "flock", no_locks)
        begun.enter_context(new_trace(folder, manifest("first")))

    from contextlib import ExitStack

    monkeypatch.setattr(whole_file.fcntl, "flock", no_locks)
    monkeypatch.setattr(create, "move_aside", move_aside)
    with ExitStack() as begun:
        with (
            pytest.raises(TraceExists, match="another process has just created a trace"),
            new_trace(tmp_path / "run", manifest("second")),
        ):
            pass
        assert Store(tmp_path / "run").manifest().run_id == "first"
