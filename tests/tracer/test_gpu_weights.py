"""Weights, digests and optimizer statistics from a CUDA device. Run on a machine that has one: pytest -m gpu."""

import pytest
import torch
from tim_trace.analysis.views import connect
from tim_trace.replay.backends.model import to_torch
from tim_trace.tracer.optimizer import optimizer_statistics
from tim_trace.tracer.recorder import Recorder
from tim_trace.tracer.store import Store
from tim_trace.tracer.weights.checkpoints import open_weights
from tim_trace.tracer.weights.digests import digest, resolved

pytestmark = [
    pytest.mark.gpu,
    # The machine's releases of torch and transformers are not those that the warnings of other tests were read for.
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = "cuda"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def drawn(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed.weight": (1000, 64), "norm.weight": (64,), "head.weight": (1000, 64)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def kept(path, version):
    return {name: to_torch(tensor) for name, tensor in open_weights(Store(path)).load(version).items()}


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_on_the_device_are_kept_bit_for_bit(tmp_path, dtype):
    versions = [drawn(dtype, seed) for seed in range(3)]
    with Recorder(tmp_path / "run") as recorder:
        for version, tensors in enumerate(versions):
            recorder.add_weights(version, {name: tensor.to(DEVICE) for name, tensor in tensors.items()})
    for version, tensors in enumerate(versions):
        found = kept(tmp_path / "run", version)
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_weights_that_change_right_after_the_call_are_kept_as_they_were(tmp_path):
    tensors = drawn()
    live = {name: tensor.to(DEVICE, copy=True) for name, tensor in tensors.items()}
    with Recorder(tmp_path / "run") as recorder:
        recorder.add_weights(0, live)
        for tensor in live.values():
            tensor.fill_(-99)
    found = kept(tmp_path / "run", 0)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_view_at_an_odd_offset_has_the_digest_of_its_copy(dtype):
    whole = torch.randn(1001).to(DEVICE, dtype)
    view = whole[1:]
    assert resolved([digest(view)]) == resolved([digest(view.clone())])


def test_a_tensor_cast_for_its_digest_has_that_of_the_cast_tensor():
    tensor = torch.randn(3_000_001).to(DEVICE)
    assert resolved([digest(tensor, torch.bfloat16)]) == resolved([digest(tensor.to(torch.bfloat16))])


def test_statistics_of_an_optimizer_on_the_device_are_those_on_the_host(tmp_path):
    found = {}
    for device in ("cpu", DEVICE):
        parameters = [tensor.to(device).requires_grad_() for tensor in drawn().values()]
        optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        found[device] = {name: float(value) for name, value in optimizer_statistics(optimizer).items()}
    assert found[DEVICE] == pytest.approx(found["cpu"], rel=1e-5)
    with Recorder(tmp_path / "run") as recorder:
        recorder.add_optimizer(1, optimizer)
    ((count,),) = connect(tmp_path / "run").execute("SELECT count(*) FROM metrics").fetchall()
    assert count >= len(found[DEVICE])


def test_the_statistics_need_little_memory_beside_a_large_tensor():
    if DEVICE == "cpu":
        pytest.skip("measures the memory of a device")
    parameter = torch.randn(64 << 20, device=DEVICE).requires_grad_()
    optimizer = torch.optim.AdamW([parameter])
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer_statistics(optimizer)
    assert torch.cuda.max_memory_allocated() - before <= 160 << 20


def test_replicated_dtensor_logprobs_are_recorded_from_the_device(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    values = -torch.rand(2, 3)
    torch.distributed.init_process_group(
        "nccl" if DEVICE == "cuda" else "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        given = distribute_tensor(values.to(DEVICE), init_device_mesh(DEVICE, (1,)), [Replicate()])
        with Recorder(tmp_path / "run") as recorder:
            batch = recorder.add_sequences(step=1, seq_ids="ab", response_ids=[[1, 2, 3], [4, 5, 6]])
            recorder.add_scores("train", batch, logprobs=given)
    finally:
        torch.distributed.destroy_process_group()
    rows = connect(tmp_path / "run").execute("SELECT logprobs FROM scores ORDER BY seq_id").fetchall()
    assert [row for (row,) in rows] == values.tolist()
