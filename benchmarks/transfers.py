"""Measure weight transfers to an engine in this process, with and without digests."""

import tempfile
from types import SimpleNamespace

from comparison import Comparison, in_turn, ratios
from tim_trace.schemas.capture import Capture
from tim_trace.schemas.documents import Manifest
from tim_trace.tracer.create import new_trace
from tim_trace.tracer.hooks.engine_weights import EngineWeights
from tim_trace.tracer.hooks.session import Order, Session

NUM_LAYERS, WIDTH = 20, 2500
NUM_BYTES = NUM_LAYERS * WIDTH * WIDTH * 4
ROUNDS = 5


def compare():
    """Time the transfer of 0.5 GB of float32 weights, tensor by tensor, to an engine that stores them as bfloat16."""
    import torch

    trained = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS))
    model = _engine(trained, torch)
    with tempfile.TemporaryDirectory() as folder, new_trace(f"{folder}/run", _manifest(), force=False) as run:
        session = Session(Order(run=str(run)))
        account = EngineWeights(session)
        account.watch(_llm(model, torch))
        trainer = _Trainer(trained)

        def accounted():
            trainer.state.global_step += 1
            account.hold(trainer)
            _transfer(trained, model)
            account.tell(trainer.state.global_step + 1)

        _transfer(trained, model)
        for _ in range(4):
            accounted()  # the engine's weights are read after 1, 2 and 4 versions
        taken = in_turn(ROUNDS, bare=lambda: _unheard(trained, model), accounted=accounted)
        assert account.is_on
        session.close()
    added = [a - b for a, b in zip(taken["accounted"], taken["bare"], strict=True)]
    yield Comparison(
        what="a transfer with digests of both sides, over one without",
        values=ratios(taken["accounted"], taken["bare"]),
        at_most=5,
    )
    yield Comparison(what="what they add", values=[1e9 * s / NUM_BYTES for s in added], unit=" s a GB", at_most=1)


class _Trainer:
    def __init__(self, trained):
        self.model, self.state = trained, SimpleNamespace(global_step=0)
        self.accelerator = SimpleNamespace(unwrap_model=lambda model: model)


def _manifest():
    return Manifest(
        run_id="bench", created_at="", created_by="", source="bench", command=(), capture=str(Capture.parse("logprobs", 1.0)),
        capture_fraction=1.0,
    )  # fmt: skip


def _engine(trained, torch):
    class Engine(torch.nn.Module):
        def __init__(self):
            super().__init__()
            for name, parameter in trained.named_parameters():
                self.register_parameter(
                    name.replace(".", "_"), torch.nn.Parameter(parameter.detach().to(torch.bfloat16))
                )

        def load_weights(self, weights):
            own = dict(self.named_parameters())
            for name, tensor in weights:
                own[name.replace(".", "_")].data.copy_(tensor)

    return Engine()


def _llm(model, torch):
    runner = SimpleNamespace(get_model=lambda: model)
    executor = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
    config = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.bfloat16))
    return SimpleNamespace(llm_engine=SimpleNamespace(model_executor=executor, vllm_config=config))


def _transfer(trained, model):
    for name, parameter in trained.named_parameters():
        model.load_weights([(name, parameter.data)])


def _unheard(trained, model):
    load = type(model).load_weights.__wrapped__
    for name, parameter in trained.named_parameters():
        load(model, [(name, parameter.data)])
