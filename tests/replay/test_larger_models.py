"""Models that are larger than a device: layers on several (device_map), and each layer's weights in several processes (vLLM)."""

import shutil

import pytest
from runs import train
from tim_trace.analysis.trace.database import connect
from tim_trace.replay.arms import Arm
from tim_trace.replay.backends import model as models
from tim_trace.replay.engine import replay
from tim_trace.schemas.errors import CannotReplay, InvalidOption

BITS = "SELECT pass, step, seq_id, logprobs FROM scores WHERE pass LIKE 'replay/%' ORDER BY ALL"


@pytest.mark.slow
@pytest.mark.engine
def test_a_model_whose_layers_are_placed_one_by_one_gives_the_bits_of_one_device(tmp_path, monkeypatch):
    trace = train(capture="logprobs").trace
    found = {}
    maps = []
    for name in ("whole", "divided"):
        shutil.copytree(trace, tmp_path / name / "run")
        with monkeypatch.context() as patch:
            if name == "divided":

                def placed(model, device):
                    model = models.divided(model, {device: 10**9})
                    maps.append(model.hf_device_map)
                    assert hasattr(model.base_model.layers[0], "_hf_hook")  # each is moved, where it has to be
                    return model

                patch.setattr(models, "_placed", placed)
            results = replay(tmp_path / name / "run", arm=["dtype=bf16", "batch-size=1", "mode=decode"])
        assert results[0].identity_held
        found[name] = connect(tmp_path / name / "run").execute(BITS).fetchall()
    assert maps
    assert found["divided"] == found["whole"]


def test_a_model_that_fits_nowhere_is_refused():
    import torch

    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    with pytest.raises(CannotReplay, match="does not fit: its layers need more than the 20,000 bytes of 1 devices"):
        models.divided(model, {"cpu": 20_000})


@pytest.mark.slow
@pytest.mark.engine
def test_vllm_divides_a_model_among_two_processes_and_takes_version_after_version(tmp_path):
    trace = train("--vllm", "--bf16-engine", config={"temperature": 0.8}, capture="topk:3", fraction="0.5").trace
    shutil.copytree(trace, tmp_path / "run")
    arms = ["engine=vllm,dtype=fp32", "engine=vllm,dtype=fp32,tensor-parallel-size=2"]
    results = replay(tmp_path / "run", arm=arms)
    assert {step.arm for step in results} >= {"vllm+fp32+tensor-parallel-size-2"}
    query = """
        SELECT count(*), max(abs(d)), count(DISTINCT step) FROM pair('replay/vllm+fp32+tensor-parallel-size-2', 'replay/vllm+fp32')
    """
    ((count, largest, steps),) = connect(tmp_path / "run").execute(query).fetchall()
    assert count > 100
    assert steps > 1  # with other weights
    assert largest < 1e-4  # sums in another order


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensor_parallel_size": 2}, "is vLLM's; add engine='vllm'"),
        ({"engine": "exact", "tensor_parallel_size": 2}, "engine exact has no such setting"),
        ({"engine": "vllm", "tensor_parallel_size": 0}, "got 0; use 1 or more"),
    ],
)
def test_it_is_an_arm_of_vllm_alone(options, words):
    with pytest.raises(InvalidOption, match=words):
        Arm(**options)
    assert not Arm(engine="vllm", tensor_parallel_size=2).is_heard  # locate listens in its own process
