"""Names that a release of TRL lacks: what they give is lost, a note says so, and everything else is recorded."""

import http.server
import json
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from runs import train
from tim_trace.analysis.info import info
from tim_trace.analysis.views import connect
from tim_trace.schemas.documents import Manifest
from tim_trace.tracer.create import new_trace
from tim_trace.tracer.hooks.patches import Patches
from tim_trace.tracer.hooks.session import Order, Session
from tim_trace.tracer.hooks.trl import _hook_engines
from tim_trace.tracer.hooks.trl_trainer import TrainerHooks

# TRL warns of a vLLM that is newer than itself.
pytestmark = pytest.mark.filterwarnings("ignore:TRL currently supports vLLM versions:UserWarning")

ENDED = "SELECT seq_id, finish_reason, reward FROM sequences ORDER BY ALL"


@pytest.fixture
def session(tmp_path):
    manifest = Manifest(
        run_id="r", created_at="", created_by="", source="record", command=(), capture="logprobs", capture_fraction=1.0
    )
    with new_trace(tmp_path / "run", manifest, force=False) as folder:
        session = Session(Order(run=str(folder)))
        yield session
        session.close()


def recorded(without, *arguments):
    """TRL's real trainer, in whose source a name is another one."""
    return train("--pretend", "9.9.9", "--without", without, *arguments, capture="logprobs")


def rows(run, query=ENDED):
    return connect(run.trace).execute(query).fetchall()


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("name", ["eos_token_ids", "self._tokenizer"])
def test_responses_ended_as_they_did_where_a_release_names_its_end_tokens_otherwise(name):
    plain = rows(train(capture="logprobs"))
    assert {reason for _, reason, _ in plain} == {"stop", "length"}
    assert rows(recorded(name)) == plain


@pytest.mark.slow
@pytest.mark.engine
def test_rewards_without_weights_are_lost_alone_and_a_note_says_so():
    run = recorded("self.reward_weights")
    assert rows(run) == [(name, reason, None) for name, reason, _ in rows(train(capture="logprobs"))]
    assert any("rewards (GRPOTrainer has no reward_weights)" in said for said in info(str(run.trace)).missing)
    assert rows(run, 'SELECT "pass", count(*) FROM scores GROUP BY ALL ORDER BY ALL') == [
        ("current", 24),
        ("train", 24),
    ]


@pytest.mark.slow
@pytest.mark.engine
def test_logprobs_that_the_trainer_s_output_does_not_have_are_those_that_generate_returned():
    """As in TRL before 0.28."""
    query = (
        "SELECT response_mask, logprobs FROM sequences JOIN scores USING (run, step, seq_id) WHERE \"pass\" = 'rollout'"
    )
    found = rows(recorded("sampling_per_token_logps", "--rollout-function"), query)
    assert len(found) == 24
    assert all(row == ([True, True, False, False, True], [-0.5, -0.25, None, None, -0.125]) for row in found)


def test_no_reason_is_made_up_where_end_tokens_are_not_known():
    from tim_trace.tracer.hooks.trl_batches import why_ended

    assert why_ended(set(), [1, None]) == [None, None]
    assert why_ended({1}, [1, 2, None]) == ["stop", "length", None]


class Trainer(SimpleNamespace):
    """As much of a trainer as the account of the engine's weights asks; unlike its base it can be referred to weakly."""


@contextmanager
def server(info):
    """The address of a vLLM server as TRL's client sees it; without `info` it has no development endpoints."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            models = {"data": [{"id": "tiny"}]}
            known = {"/health": {}, "/v1/models": models, "/server_info?config_format=json": info}
            body = known.get(self.path)
            self.send_response(404 if body is None else 200)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener:
        threading.Thread(target=listener.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{listener.server_port}"
        listener.shutdown()


@pytest.mark.parametrize("is_old", [False, True], ids=["from 0.28", "before 0.28"])
def test_a_server_s_configuration_needs_no_function_of_trl_s_client(session, monkeypatch, is_old):
    client_module = pytest.importorskip("trl.generation.vllm_client")
    monkeypatch.delattr(client_module.VLLMClient, "get_server_info", raising=False)
    with server({"vllm_config": {"model": "tiny"}}) as url:
        client = client_module.VLLMClient(base_url=url)
        trainer = SimpleNamespace(vllm_client=client)
        trainer = trainer if is_old else SimpleNamespace(vllm_generation=trainer)
        assert TrainerHooks(session)._server_info(trainer) == {"model": "tiny"}
        client.session.close()


def test_a_server_that_does_not_give_its_configuration_is_noted_and_recording_goes_on(session, capsys):
    client_module = pytest.importorskip("trl.generation.vllm_client")
    with server(None) as url:
        client = client_module.VLLMClient(base_url=url)
        assert TrainerHooks(session)._server_info(SimpleNamespace(vllm_client=client)) is None
        client.session.close()
    assert "the vLLM server's configuration is not recorded" in capsys.readouterr().err
    assert session.is_recording


@pytest.fixture
def hooked(session):
    """TRL's classes around vLLM as a release has them, with recording's hooks."""
    patches = Patches()
    yield lambda: _hook_engines(session, patches)
    patches.restore()


@pytest.mark.parametrize("more", [([[2]],), ({"extra": 1},), ([[2]], {"extra": 1})], ids=["from 1.0", "0.28", "0.29"])
def test_rloo_gets_as_many_values_of_its_server_as_its_release_gives(hooked, monkeypatch, more):
    owner = pytest.importorskip("trl.generation.vllm_generation").VLLMGeneration
    monkeypatch.setattr(owner, "generate", lambda self: ([[1]], [[2]], [[[-0.5]]], *more))
    hooked()
    generation = object.__new__(owner)
    generation.mode, generation.logprobs = "server", None
    # Bare, it has no logprobs and no tokens of them, which are lists.
    bare = [None if isinstance(value, list) else value for value in more]
    assert generation.generate() == ([[1]], [[2]], None, *bare)


def test_a_sharded_trainer_that_cannot_be_heard_is_noted(session, hooked, monkeypatch, capsys):
    """As in TRL before 1.11."""
    torch = pytest.importorskip("torch")
    owner = pytest.importorskip("trl.generation.vllm_generation").VLLMGeneration
    monkeypatch.delattr(owner, "_iter_named_params")
    monkeypatch.setattr("tim_trace.tracer.hooks.engine_weights.is_whole", lambda model: False)
    hooked()
    accelerator = SimpleNamespace(unwrap_model=lambda model: model)
    state = SimpleNamespace(global_step=0)
    trainer = Trainer(model=torch.nn.Linear(1, 1), state=state, accelerator=accelerator)
    session.engine_weights.hold(trainer)
    list(session.engine_weights.heard([("weight", torch.zeros(4))]))
    session.engine_weights.tell(1)
    assert "this TRL release cannot gather them" in capsys.readouterr().err
    assert session.is_recording


def test_tensors_that_are_sent_one_by_one_are_heard(session, hooked, monkeypatch):
    """As in TRL before 1.11."""
    torch = pytest.importorskip("torch")
    owner = pytest.importorskip("trl.generation.vllm_client").VLLMClient
    sent = []
    monkeypatch.delattr(owner, "update_named_params")
    monkeypatch.setattr(owner, "update_named_param", lambda client, name, weights: sent.append(name))
    hooked()
    object.__new__(owner).update_named_param("weight", torch.zeros(4))
    assert (sent, list(session.engine_weights._given)) == (["weight"], ["weight"])


def test_rollouts_without_logprobs_are_noted(session, capsys):
    """As RLOO's with vLLM's tensor parallelism."""
    generation = SimpleNamespace(server_logprobs=[], rows=None)
    TrainerHooks(session)._record_rollout(SimpleNamespace(use_vllm=True), generation, None, None, {})
    assert "rollout logprobs are not recorded for types.SimpleNamespace" in capsys.readouterr().err
