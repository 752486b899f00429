"""What is recorded are the numbers as they were given; tests/tracer/test_gpu.py holds it on a device."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tim_trace.analysis.views import connect
from tim_trace.schemas.errors import InvalidRecord
from tim_trace.tracer import staging
from tim_trace.tracer.recorder import Recorder
from tim_trace.tracer.staging import PinnedMemory, stage


@pytest.mark.parametrize(
    "given",
    [
        torch.tensor([1.0, 2.0]), np.array([1.0, 2.0]), [1.0, 2.0], [[1.0], [2.0]], [torch.tensor([1.0]), torch.tensor([2.0])],
        [np.array([1.0]), np.array([2.0])], ([1.0], [2.0]),
    ],
    ids=lambda given: type(given).__name__,
)  # fmt: skip
def test_values_that_are_staged_may_change_at_once(given):
    expected = [float(np.asarray(value).reshape(-1)[0]) for value in given]
    wait = stage(given)
    if isinstance(given, list) and isinstance(given[0], float):
        given.clear()
    else:
        for value in (
            given if not torch.is_tensor(given) and isinstance(given[0], (list, np.ndarray, torch.Tensor)) else [given]
        ):
            value[:1] = [0.0] if isinstance(value, list) else 0.0
    assert [float(np.asarray(value).reshape(-1)[0]) for value in wait()] == expected


@pytest.fixture
def device(monkeypatch):
    """CUDA's streams where there are none: work on the side stream begins when the test lets training overtake it."""
    overtakes = []
    stream = SimpleNamespace(wait_event=lambda _: [overtake() for overtake in overtakes])
    event = SimpleNamespace(record=lambda *_: None, synchronize=lambda: None)
    for name, value in {
        "Stream": lambda **_: stream, "Event": lambda: event, "current_stream": lambda _: stream,
        "stream": lambda _: contextlib.nullcontext(),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    staging._copies_of.cache_clear()
    yield overtakes
    staging._copies_of.cache_clear()


@pytest.mark.parametrize("fits", [True, False])
def test_a_device_tensor_that_training_changes_before_it_is_copied_is_recorded_as_it_was(device, monkeypatch, fits):
    if not fits:
        monkeypatch.setattr(PinnedMemory, "take", lambda *_: None)
    logprobs = torch.arange(6.0).reshape(2, 3).T
    expected = logprobs.clone()
    device.append(lambda: logprobs.fill_(-99.0))
    found = staging._stage_cuda(logprobs)()
    assert logprobs[0, 0] == -99.0
    assert torch.equal(found, expected)


def test_copies_of_every_dtype_and_shape_share_pinned_memory_until_they_are_taken(device):
    given = [torch.tensor(True), torch.ones(3, dtype=torch.bfloat16), torch.zeros(0), torch.arange(5), torch.rand(2, 3)]
    waits = [staging._stage_cuda(value) for value in given]
    for wait, value in zip(waits, given, strict=True):
        assert torch.equal(wait(), value)
    pinned = staging._copies_of(given[0].device)[1]
    assert pinned._num_pieces == 4
    del waits, wait
    assert pinned._num_pieces == 0


def test_pinned_memory_never_exceeds_its_bound_and_is_used_again():
    pinned = PinnedMemory(100)
    first, second = pinned.take(40), pinned.take(40)
    assert first.data_ptr() + 48 == second.data_ptr()
    assert pinned.take(40) is None
    pinned.give_back()
    assert pinned.take(40) is None, "what lies behind is still in use"
    pinned.give_back()
    assert pinned.take(100).data_ptr() == first.data_ptr()
    assert pinned.take(1) is None


@pytest.fixture
def mesh():
    from torch.distributed.device_mesh import init_device_mesh

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_of_divided_logprobs_whole_rows_are_recorded_and_others_refused_without_asking_anybody(
    tmp_path, mesh, monkeypatch
):
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    def collective(*args, **options):
        raise AssertionError("a collective in recording")

    for name in ("all_reduce", "all_gather_into_tensor", "broadcast", "all_gather", "reduce_scatter_tensor"):
        monkeypatch.setattr(torch.distributed, name, collective)
    logprobs = -torch.arange(1.0, 7.0).reshape(2, 3)
    with Recorder(tmp_path / "run") as recorder:
        batch = recorder.add_sequences(step=1, seq_ids="ab", response_ids=[[1, 2, 3], [4, 5, 6]])
        for name, placement in {"train": Replicate(), "rollout": Shard(0)}.items():
            given = DTensor.from_local(logprobs, mesh, [placement], run_check=False)
            recorder.add_scores(name, batch, logprobs=given)
        for placement in (Shard(1), Partial()):
            given = DTensor.from_local(logprobs, mesh, [placement], run_check=False)
            with pytest.raises(InvalidRecord, match=r"step 1, pass 'reference', logprobs is a DTensor .*full_tensor"):
                recorder.add_scores("reference", batch, logprobs=given)
            with pytest.raises(InvalidRecord, match=r"step 1, pass 'reference', entropy is a DTensor"):
                recorder.add_scores("reference", batch, logprobs=logprobs, entropy=given)
        recorder.add_scores("reference", batch, logprobs=logprobs)
        whole = DTensor.from_local(torch.tensor(0.5), mesh, [Replicate()], run_check=False)
        recorder.add_metrics(1, {"loss": whole})
    connection = connect(tmp_path / "run")
    rows = connection.execute("SELECT list(logprobs ORDER BY seq_id) FROM scores GROUP BY pass").fetchall()
    assert rows == [(logprobs.tolist(),)] * 3
    assert connection.execute("SELECT value FROM metrics").fetchall() == [(0.5,)]
