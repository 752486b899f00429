"""Workers of a real Ray under `tim-trace record`, whatever runtime environment the program and its job have."""

import json
import os
import sys
from types import SimpleNamespace

import pytest
from builders import PROGRAMS, tim_trace
from tim_trace.analysis.info import info
from tim_trace.schemas.documents import Manifest
from tim_trace.tracer.create import new_trace
from tim_trace.tracer.hooks import ray as hook
from tim_trace.tracer.hooks.session import BOOTSTRAP, Order, Session

JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
THEIRS = os.environ.get("PYTHONPATH") or "/theirs"


def job(**variables):
    """What `ray job submit` gives its entrypoint."""
    return {JOB: json.dumps({"runtime_env": {"env_vars": variables}, "metadata": {}})}


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "environment"), [
    ({}, {}),
    ({"runtime_env": {"env_vars": {"PYTHONPATH": THEIRS, "MINE": "1"}}}, {}),
    ({"job_config": {"env_vars": {"PYTHONPATH": THEIRS, "MINE": "1"}}}, {}),
    ({}, job(PYTHONPATH=THEIRS, MINE="1")),
    ({"runtime_env": {"env_vars": {"MINE": "1"}}}, job(PYTHONPATH=THEIRS)),
    ({"runtime_env": {"env_vars": {"PYTHONPATH": THEIRS}}}, job(MINE="1")),
])  # fmt: skip
def test_workers_are_recorded_beside_a_path_list_of_the_program_or_its_job(tmp_path, arguments, environment):
    words = [sys.executable, PROGRAMS / "ray_workers.py", json.dumps(arguments)]
    done = tim_trace("record", "-o", tmp_path / "run", "--", *words, env=environment)
    assert done.code == 0, done.stderr[-3000:]
    paths, mine = json.loads(done.stdout.splitlines()[-1])
    has_paths, has_mine = (name in json.dumps([arguments, environment]) for name in ("PYTHONPATH", "MINE"))
    assert paths.split(os.pathsep)[0] == BOOTSTRAP
    assert THEIRS in paths or not has_paths
    assert mine == ("1" if has_mine else None)
    assert info(str(tmp_path / "run")).num_sequences == 1


@pytest.fixture
def session(tmp_path):
    manifest = Manifest(run_id="run", created_at="2026-01-01T00:00:00Z", created_by="0", source="record")
    with new_trace(tmp_path / "run", manifest) as folder:
        session = Session(Order(run=str(folder)))
    yield session
    session.close()


def refusing(*refused):
    """A module whose `init` refuses variables as Ray does those that are given twice, and tells what it was called with."""
    calls = []

    def init(**arguments):
        calls.append(arguments)
        given = arguments.get("runtime_env")
        if isinstance(given, dict) and set(refused) & set(given["env_vars"]):
            raise ValueError("Failed to merge the Job's runtime env")
        return "started"

    return SimpleNamespace(init=init), calls


def test_what_ray_refuses_starts_without_the_order_and_says_so(session, monkeypatch):
    monkeypatch.delenv(JOB, raising=False)
    module, calls = refusing("PYTHONPATH")
    hook.install(session, module)
    assert module.init(num_cpus=1) == "started"
    assert calls[1] == {"num_cpus": 1}
    assert [note for note in session.recorder.writer.state.not_recorded if "Failed to merge" in note]
    with pytest.raises(ValueError, match="Failed to merge"):
        module.init(runtime_env={"env_vars": {"PYTHONPATH": "x"}})


def test_an_error_of_ours_starts_the_training_with_its_own_arguments(session, monkeypatch):
    module, calls = refusing()
    hook.install(session, module)
    monkeypatch.setenv(JOB, "{")
    assert module.init(num_cpus=1) == "started"
    monkeypatch.delenv(JOB)
    assert module.init(runtime_env="a name") == "started"
    assert calls == [{"num_cpus": 1}, {"runtime_env": "a name"}]
    assert session.is_recording
