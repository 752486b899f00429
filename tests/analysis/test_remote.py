import dataclasses

import fsspec
import numpy as np
import pytest
import torch
from builders import make_trace, tim_trace
from tim_trace.analysis.info import info
from tim_trace.analysis.stats import stats
from tim_trace.tracer.dense import Logits, read_dense
from tim_trace.tracer.recorder import Recorder
from tim_trace.tracer.store import Store

KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}


@pytest.fixture(scope="module")
def bucket():
    """An S3 server on this machine, spoken to by s3fs as by any user."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    patch = pytest.MonkeyPatch()
    for name, value in {**KEYS, "AWS_ENDPOINT_URL": f"http://{host}:{port}"}.items():
        patch.setenv(name, value)
    filesystem = fsspec.filesystem("s3")
    filesystem.mkdir("bucket")
    yield filesystem
    patch.undo()
    server.stop()


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("remote") / "run"
    make_trace(path)
    return path


def test_a_trace_on_s3_answers_as_it_does_on_disk(bucket, trace):
    bucket.put(str(trace), "bucket/runs/run", recursive=True)
    for by in ("run", "step", "sequence"):
        assert stats("s3://bucket/runs/run", by=by).rows == stats(trace, by=by).rows
    there, here = info("s3://bucket/runs/run"), info(str(trace))
    assert dataclasses.replace(there, path="", num_bytes={}) == dataclasses.replace(here, path="", num_bytes={})


def test_the_command_line_takes_urls(bucket, trace):
    bucket.put(str(trace), "bucket/cli/run", recursive=True)
    done = tim_trace("sql", "s3://bucket/cli/run", "SELECT count(*) AS n FROM tokens", "--json")
    assert done.json() == tim_trace("sql", trace, "SELECT count(*) AS n FROM tokens", "--json").json()
    assert tim_trace("stats", "s3://bucket/cli/run", trace, "--json").code == 0
    missing = tim_trace("info", "s3://bucket/cli/nothing")
    assert missing.code == 2
    assert "s3://bucket/cli/nothing: nothing is there" in missing.stderr


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


def test_distributions_are_read_from_a_url(bucket, tmp_path):
    logits = torch.randn(3, 7)
    with Recorder(tmp_path / "run", capture="logits") as recorder:
        added = recorder.add_sequences(step=1, response_ids=[[1, 2, 3]])
        recorder.add_scores(
            "train", added, logprobs=[[-1.0] * 3], distribution=Logits(logits=logits), captured_rows=[0]
        )
    bucket.put(str(tmp_path / "run"), "bucket/dense/run", recursive=True)
    (group,) = (tmp_path / "run" / "dense").iterdir()
    found = read_dense(Store("s3://bucket/dense/run"), f"{group.name}/train", 0, 3)
    np.testing.assert_array_equal(found["logits"], logits.numpy())
