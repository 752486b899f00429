import dataclasses
import sys
import threading
import time

import fsspec
import numpy as np
import pytest
import torch
from builders import PROGRAMS, make_trace, tim_trace
from tim_trace.analysis.compact import compact
from tim_trace.analysis.info import info
from tim_trace.analysis.stats import stats
from tim_trace.analysis.verify import verify
from tim_trace.schemas.errors import StorageError, TraceExists
from tim_trace.tracer.dense import Logits, read_dense
from tim_trace.tracer.recorder import Recorder
from tim_trace.tracer.seal import adopt
from tim_trace.tracer.store import Store
from tim_trace.tracer.upload import Sender, Upload


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("remote") / "run"
    make_trace(path)
    return path


def test_a_trace_on_s3_answers_as_it_does_on_disk(s3, trace):
    s3.put(str(trace), "bucket/runs/run", recursive=True)
    for by in ("run", "step", "sequence"):
        assert stats("s3://bucket/runs/run", by=by).rows == stats(trace, by=by).rows
    there, here = info("s3://bucket/runs/run"), info(str(trace))
    assert dataclasses.replace(there, path="", num_bytes={}) == dataclasses.replace(here, path="", num_bytes={})


@pytest.mark.slow
def test_the_command_line_takes_urls(s3, trace):
    s3.put(str(trace), "bucket/cli/run", recursive=True)
    done = tim_trace("sql", "s3://bucket/cli/run", "SELECT count(*) AS n FROM tokens", "--json")
    assert done.json() == tim_trace("sql", trace, "SELECT count(*) AS n FROM tokens", "--json").json()
    assert tim_trace("stats", "s3://bucket/cli/run", trace, "--json").code == 0
    missing = tim_trace("info", "s3://bucket/cli/nothing")
    assert missing.code == 2
    assert "s3://bucket/cli/nothing does not exist" in missing.stderr


RECORDS = PROGRAMS / "records.py"


@pytest.mark.slow
def test_a_run_is_recorded_straight_to_object_storage(s3, tmp_path):
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = tim_trace("record", "-o", "s3://bucket/recorded/run", "--", sys.executable, RECORDS, env=env)
    assert done.code == 0, done.stderr
    assert "next: tim-trace info s3://bucket/recorded/run" in done.stderr
    here = tim_trace("record", "-o", tmp_path / "run", "--", sys.executable, RECORDS)
    assert here.code == 0, here.stderr
    assert stats("s3://bucket/recorded/run").rows == stats(tmp_path / "run").rows
    assert verify("s3://bucket/recorded/run").is_whole
    assert s3.ls("bucket/recorded/run/index")
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    again = tim_trace("record", "-o", "s3://bucket/recorded/run", "--", sys.executable, RECORDS, env=env)
    assert (again.code, "already exists. Use another URL" in again.stderr) == (2, True)
    assert "ran" not in again.stdout
    for option in ("--force", "--resume"):
        refused = tim_trace("record", "-o", "s3://bucket/new/run", option, "--", sys.executable, RECORDS, env=env)
        assert (refused.code, option in refused.stderr) == (2, True)


@pytest.mark.slow
def test_what_cannot_be_sent_stays_here_and_the_command_that_sends_it_is_told(s3, tmp_path):
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    program = tmp_path / "program.py"
    # The bucket goes while the command runs.
    program.write_text(
        f"import runpy, sys; sys.argv = [{str(RECORDS)!r}]; runpy.run_path({str(RECORDS)!r}, run_name='__main__')\n"
        "import fsspec; s3 = fsspec.filesystem('s3'); s3.rmdir('gone')\n"
    )
    s3.mkdir("gone")
    done = tim_trace("record", "-o", "s3://gone/run", "--", sys.executable, program, env=env)
    assert done.code == 2
    (folder,) = (path.parent for path in (tmp_path / "cache").rglob("trace.json"))
    command = f"tim-trace compact {folder} -o s3://gone/run"
    assert command in done.stderr
    s3.mkdir("gone")
    again = tim_trace("record", "-o", "s3://gone/run", "--", sys.executable, RECORDS, env=env)
    assert (again.code, command in again.stderr) == (2, True)
    assert tim_trace(*command.split()[1:]).code == 0
    assert info("s3://gone/run").num_response_tokens == info(str(folder)).num_response_tokens


@pytest.fixture
def half_sent(s3, tmp_path, monkeypatch):
    """A recording to a URL that was killed: sealed rows are at the URL, later ones in the cache folder alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    url = f"s3://bucket/{tmp_path.name}/run"
    sender = Sender(url)
    with Recorder(sender.folder) as recorder:
        recorder.writer.segments.seal_bytes = 1
        recorder.add_sequences(step=1, response_ids=[[1, 2, 3]])
        recorder.flush()
        while not list((sender.folder / "sequences").glob("*.parquet")):
            time.sleep(0.01)
        sender._upload.send()
        recorder.add_sequences(step=2, response_ids=[[4, 5]])
    return url, sender.folder


def test_a_live_recording_is_whole_at_its_url(s3, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    url = f"s3://bucket/{tmp_path.name}/run"
    sender = Sender(url)
    with Recorder(sender.folder) as recorder:
        recorder.add_sequences(step=1, response_ids=[[1, 2, 3]])
        recorder.flush()
        sender._upload.send()
        assert info(url).damaged == ()
        assert verify(url).is_whole


def test_a_segment_is_sent_once_all_of_it_is_sealed(tmp_path):
    folder, url = tmp_path / "run", f"memory://{tmp_path.name}/run"
    recorder = Recorder(folder, capture="logits")
    batch = recorder.add_sequences(step=1, response_ids=[[1, 2, 3]])
    distribution = Logits(logits=torch.zeros(3, 7))
    recorder.add_scores("train", batch, logprobs=[[-1.0] * 3], distribution=distribution, captured_rows=[0])
    recorder.writer.close(at_exit=True)  # seals rows, and leaves the distributions in their journal
    assert list((folder / "scores").glob("*.parquet"))
    assert list((folder / "journal").glob("*.dense.arrows"))
    upload = Upload(folder, url)
    upload.send()
    try:
        assert (info(url).num_sequences, info(url).damaged) == (0, ())
        adopt(folder)
        upload.send()
        assert (info(url).num_sequences, verify(url).is_whole) == (1, True)
    finally:
        fsspec.filesystem("memory").rm(f"/{tmp_path.name}", recursive=True)


def test_the_rest_of_a_killed_recording_is_sent_by_the_command_that_is_named(half_sent):
    url, folder = half_sent
    whole = info(str(folder)).num_response_tokens
    with pytest.raises(TraceExists, match=f"tim-trace compact {folder} -o {url}"):
        Sender(url)
    compact(str(folder), output=url)
    assert info(url).num_response_tokens == whole == 5
    assert verify(url).is_whole
    assert not folder.exists()
    with pytest.raises(TraceExists, match=r"already exists\. Use another URL"):
        Sender(url)


def test_another_run_at_a_url_is_never_replaced(half_sent, tmp_path):
    url, _ = half_sent
    with Recorder(tmp_path / "other") as recorder:
        recorder.add_sequences(step=1, response_ids=[[1, 2, 3]])
    with pytest.raises(TraceExists, match=r"already exists\. Use another URL"):
        compact(str(tmp_path / "other"), output=url)


def test_storage_that_takes_nothing_ends_the_wait_and_names_the_remedy(s3, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("tim_trace.tracer.upload._QUIET_S", 0.2)
    url, never = f"s3://bucket/{tmp_path.name}/run", threading.Event()
    sender = Sender(url, max_wait=1.0)
    with Recorder(sender.folder) as recorder:
        recorder.add_sequences(step=1, response_ids=[[1, 2, 3]])
    monkeypatch.setattr(sender._upload, "put", lambda *_, **__: never.wait())
    with pytest.raises(StorageError, match=f"accepted no data for 1 s. .*`tim-trace compact {sender.folder} -o {url}`"):
        sender.finish()
    never.set()
    assert "stops after 1 s without progress" in capsys.readouterr().err
    assert sender.folder.exists()


def test_a_trace_whose_journal_was_copied_too_is_read_whole(tmp_path):
    memory = fsspec.filesystem("memory")
    with Recorder(tmp_path / "run") as recorder:
        recorder.add_sequences(step=1, response_ids=[[1, 2, 3]])
        recorder.flush()
        memory.put(str(tmp_path / "run"), "/live", recursive=True)
    try:
        assert info("memory://live").num_response_tokens == 3
    finally:
        memory.rm("/live", recursive=True)


def test_distributions_are_read_from_a_url(s3, tmp_path):
    logits = torch.randn(3, 7)
    with Recorder(tmp_path / "run", capture="logits") as recorder:
        added = recorder.add_sequences(step=1, response_ids=[[1, 2, 3]])
        recorder.add_scores(
            "train", added, logprobs=[[-1.0] * 3], distribution=Logits(logits=logits), captured_rows=[0]
        )
    s3.put(str(tmp_path / "run"), "bucket/dense/run", recursive=True)
    (group,) = (tmp_path / "run" / "dense").iterdir()
    found = read_dense(Store("s3://bucket/dense/run"), f"{group.name}/train", 0, 3)
    np.testing.assert_array_equal(found["logits"], logits.numpy())
