"""What surrounds a command may be broken: storage, disk, streams, folder, and files that claim gigabytes. Each is one line."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from importlib.util import find_spec

import fsspec
import pytest
import tim_trace
from builders import TIM_TRACE, in_process, make_trace, run
from shared import rest_slow
from tim_trace.schemas.errors import ImportFailed, StorageError
from tim_trace.tracer.importers import textfiles
from tim_trace.tracer.importers.textfiles import read_lines
from tim_trace.tracer.store import Store


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("surroundings") / "run"
    make_trace(path, steps=12)
    return path


def is_one_line(done, code=2):
    """The command ended as documented, and stderr has one sentence."""
    assert (done.code, "Traceback" in done.stderr) == (code, False), done.stderr
    assert re.fullmatch(r"Error: [^\n]+\n", done.stderr), done.stderr
    return done.stderr


@pytest.fixture
def no_access(monkeypatch):
    """S3 without credentials, and nothing that listens at its endpoint."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    yield
    fsspec.get_filesystem_class("s3").clear_instance_cache()


URLS = {
    "s3://bucket/run": "Unable to locate credentials",
    "s3://": "does not name a folder",
    "gopher://somewhere/run": "unsupported file system",
    "gcs://bucket/run": "unsupported file system",
    "ftp://127.0.0.1:9/run": "refused",
    "github://": "unsupported file system",
    "zip://run::/nonexistent.zip": "No such file",
    "reference://": "unsupported file system",
}


@pytest.mark.parametrize("url", URLS)
def test_a_url_that_cannot_be_reached_is_one_line(no_access, url):
    if url.startswith("gcs:") and find_spec("gcsfs"):
        pytest.skip("gcsfs is installed")
    assert URLS[url] in is_one_line(in_process(["info", url]))
    with pytest.raises(StorageError):
        tim_trace.stats(url)


@pytest.mark.parametrize("verb", rest_slow(["stats", "sql", "verify", "attribute", "check", "diagnose", "report"], 2))
def test_every_reading_verb_says_so(no_access, verb):
    more = {"sql": ["SELECT 1"], "report": ["-o", "page.html"]}.get(verb, [])
    assert "credentials" in is_one_line(in_process([verb, "s3://bucket/run", *more]))


def test_an_endpoint_that_refuses_is_no_damage(no_access, monkeypatch):
    for name, value in {
        "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_MAX_ATTEMPTS": "1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    said = is_one_line(in_process(["info", "s3://bucket/run"]))
    assert "cannot be reached" in said
    assert "damaged" not in said


def in_shell(line, cwd):
    """A line of a shell, in which $T is tim-trace."""
    return run("bash", "-c", line, env={"T": str(TIM_TRACE)}, cwd=cwd)


@pytest.mark.parametrize(
    ("line", "said"),
    rest_slow(
        [
            ('"$T" info {trace} > /dev/full', "stdout: No space left on device"),
            ('"$T" stats {trace} --csv >&-', "stdout: Bad file descriptor"),
            ('"$T" stats nowhere --json > /dev/full', "nowhere does not exist"),
            ('mkdir gone && cd gone && rmdir "$PWD" && exec "$T" info run', "the working directory was removed"),
            ('ulimit -f 1; exec "$T" compact {trace} -o merged', "File too large. Raise the file size limit"),
            ('"$T" sql {trace} $\'SELECT \\xff\'', "character 8 of the query is not UTF-8"),
            ("printf 'SELECT \\xff' | \"$T\" sql {trace}", "character 8 of the query is not UTF-8"),
            ('"$T" info {trace} --json >&-', "stdout: Bad file descriptor"),
            ('"$T" sql {trace} "SELECT * FROM tokens" --json > /dev/full', "stdout: No space left on device"),
            ('mkdir gone && cd gone && rmdir "$PWD" && exec "$T" record -o run -- true', "the working directory was removed"),
            ('mkdir gone && cd gone && rmdir "$PWD" && exec "$T" report {trace} -o x.html', "the working directory was removed"),
            ('mkdir gone && cd gone && rmdir "$PWD" && exec "$T" export {trace} --to parquet -o x', "the working directory was removed"),
            ('mkdir gone && cd gone && rmdir "$PWD" && exec "$T" import parquet x.parquet -o x', "the working directory was removed"),
        ],
        7,
    ),
)  # fmt: skip
def test_what_the_system_refuses_is_one_line(trace, tmp_path, line, said):
    assert said in is_one_line(in_shell(line.format(trace=trace), tmp_path))
    assert not (tmp_path / "merged").exists()


def test_in_python_a_removed_folder_is_an_error_of_the_store(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(StorageError, match="working directory was removed"):
        Store("run")


def test_a_command_is_recorded_where_stderr_takes_nothing(tmp_path):
    done = in_shell('"$T" record -o run -- touch ran 2> /dev/full', tmp_path)
    assert (done.code, (tmp_path / "ran").exists()) == (0, True)


ENDLESS = "SELECT sum(range) FROM range(30000000000000)"


@pytest.mark.parametrize("is_python", [False, True])
def test_ctrl_c_in_a_query_is_ctrl_c(trace, is_python):
    watched = f"from tim_trace.analysis.query import sql; sql({str(trace)!r}, 'SELECT 1'); print(flush=True); "
    called = f"sql({str(trace)!r}, {ENDLESS!r})"
    if not is_python:  # as the command line runs it, after a line that tells that everything is imported
        called = f"from tim_trace.cli import main; main(['sql', {str(trace)!r}, {ENDLESS!r}])"
    process = subprocess.Popen(
        [sys.executable, "-c", watched + called], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.readline()
    said = None
    while said is None:  # the first one may come before the query
        time.sleep(3)
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            _, said = process.communicate(timeout=20)
    if is_python:
        assert said.strip().endswith("KeyboardInterrupt")
    else:
        assert (process.returncode, said.strip()) == (1, "Aborted!")


PEAK = """
import resource, sys
from tim_trace.cli import main
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    main(sys.argv[1:])
except SystemExit as ended:
    print(ended.code, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def peak(*words):
    """Exit code, MB of memory beyond the imports, and stderr of a command."""
    done = run(sys.executable, "-c", PEAK, *words)
    code, kilobytes = done.stdout.splitlines()[-1].split()
    return int(code), int(kilobytes) / 1024, done.stderr


def grown(path, num_bytes):
    """Make a file larger by a hole."""
    os.truncate(path, num_bytes)


@pytest.mark.parametrize("pattern", ["passes/*/*.json", "weights/*/zarr.json"])
def test_verify_reads_no_more_than_the_account_says(tmp_path, pattern):
    torch = pytest.importorskip("torch")
    make_trace(tmp_path / "run")
    from tim_trace.tracer.recorder import Recorder

    with Recorder(tmp_path / "more") as recorder:
        recorder.add_contract("train", {"engine": "a loop"})
        recorder.add_weights(0, {"w": torch.ones(4, 4)})
        added = recorder.add_sequences(step=1, response_ids=[[1, 2]], policy_version=0)
        recorder.add_scores("train", added, logprobs=[[-1.0, -2.0]])
    place = next((tmp_path / "more").glob(pattern))
    grown(place, 3 << 30)
    code, megabytes, _ = peak("verify", str(tmp_path / "more"))
    assert code == 2
    assert megabytes < 600


@pytest.mark.parametrize(
    ("name", "format", "begins", "said"),
    rest_slow(
        [
            ("1.pt", "slime", b"\x80\x04", "bytes of memory, but this machine has"),
            ("rows.jsonl", "parquet", b"{", "line 1 is longer than"),
            ("rows.json", "parquet", b"[", "bytes of memory, but this machine has"),
            ("run_rollouts_0.jsonl", "open-instruct", b"{", "line 1 is longer than"),
            ("1.jsonl", "verl", b"{", "line 1 is longer than"),
        ],
        3,
    ),
)
def test_an_import_reads_no_file_that_claims_terabytes(tmp_path, name, format, begins, said):
    place = {"slime": "rollout_data"}.get(format, ".")
    (tmp_path / "dump" / place).mkdir(parents=True)
    (tmp_path / "dump" / place / name).write_bytes(begins)
    grown(tmp_path / "dump" / place / name, 4 << 40)
    code, megabytes, stderr = peak("import", format, str(tmp_path / "dump"), "-o", str(tmp_path / "run"))
    assert (code, said in stderr) == (2, True), stderr
    assert megabytes < 1500


def test_a_long_line_is_read_and_one_without_end_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(textfiles, "MAX_LINE", 100)
    (tmp_path / "rows.jsonl").write_bytes(b'{"a": "' + b"x" * 90 + b'"}\n' + b'{"a": "' + b"x" * 92)
    found = read_lines(tmp_path / "rows.jsonl")
    assert next(found)[0] == 1
    (tmp_path / "rows.jsonl").write_bytes(b"{}\n" + b"x" * 101)
    found = read_lines(tmp_path / "rows.jsonl")
    assert next(found) == (1, {})
    with pytest.raises(ImportFailed, match="line 2 is longer than 100 bytes"):
        next(found)


def test_an_endpoint_that_never_answers_is_asked_a_few_times_and_named(no_access, monkeypatch):
    s3fs = pytest.importorskip("s3fs")
    num_asked = 0
    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:

        def accept():
            nonlocal num_asked
            held = []
            while True:
                try:
                    held.append(silent.accept())
                except OSError:
                    return
                num_asked += 1

        threading.Thread(target=accept, daemon=True).start()
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(s3fs.S3FileSystem, "read_timeout", 0.3)
        s3fs.S3FileSystem.clear_instance_cache()
        with pytest.raises(StorageError, match=r"s3://bucket/run cannot be reached"):
            Store("s3://bucket/run").manifest()
        s3fs.S3FileSystem.clear_instance_cache()
    assert 0 < num_asked <= 10
