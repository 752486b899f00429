"""Recording from a CUDA device. Run on a machine that has one: pytest -m gpu."""

import numpy as np
import pytest
import torch
from tim_trace.analysis.stats import stats
from tim_trace.analysis.views import connect
from tim_trace.schemas.errors import InvalidRecord
from tim_trace.tracer import staging
from tim_trace.tracer.dense import Logits, read_dense
from tim_trace.tracer.recorder import Recorder
from tim_trace.tracer.store import Store

pytestmark = [
    pytest.mark.gpu,
    # The machine's releases of torch and transformers are not those that the warnings of other tests were read for.
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ROWS, WIDTH = 64, 512
BUSY_CYCLES = 2_000_000_000
"""About a second of a kernel that only waits."""


def draw(seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, WIDTH + 1, (ROWS,), generator=generator)
    mask = torch.arange(WIDTH)[None, :] < lengths[:, None]
    logprobs = -torch.rand(ROWS, WIDTH, generator=generator).to(dtype)
    ids = torch.randint(0, 150_000, (ROWS, WIDTH), generator=generator)
    return ids, mask, logprobs


def recorded(path, pass_name="train"):
    query = 'SELECT logprobs FROM scores WHERE "pass" = ? ORDER BY step, TRY_CAST(seq_id AS INT)'
    return [values for (values,) in connect(path).execute(query, [pass_name]).fetchall()]


def expected(mask, logprobs):
    return [row[keep].float().tolist() for row, keep in zip(logprobs, mask, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_device_tensors_record_what_host_tensors_do(tmp_path, dtype):
    ids, mask, logprobs = draw(dtype=dtype)
    with Recorder(tmp_path / "run") as recorder:
        batch = recorder.add_sequences(
            step=1, seq_ids=range(ROWS), response_ids=ids.cuda(), response_attention_mask=mask.cuda(),
            reward=torch.arange(ROWS, device="cuda") / 2, policy_version=torch.tensor(3, device="cuda"),
        )  # fmt: skip
        recorder.add_scores("train", batch, logprobs=logprobs.cuda())
        recorder.add_scores("rollout", batch, logprobs=logprobs, scored_mask=mask.cuda())
        recorder.add_metrics(1, {"loss": torch.tensor(0.25, device="cuda")})
    assert recorded(tmp_path / "run") == expected(mask, logprobs)
    assert recorded(tmp_path / "run", "rollout") == expected(mask, logprobs)
    connection = connect(tmp_path / "run")
    assert connection.execute("SELECT response_ids FROM sequences ORDER BY seq_id::INT").fetchall() == [
        (row[keep].tolist(),) for row, keep in zip(ids, mask, strict=True)
    ]
    assert connection.execute("SELECT reward FROM sequences ORDER BY seq_id::INT").fetchall()[3] == (1.5,)
    assert connection.execute("SELECT value FROM metrics").fetchall() == [(0.25,)]


def test_recording_returns_while_the_device_is_still_busy(tmp_path):
    ids, mask, logprobs = (tensor.cuda() for tensor in draw())
    with Recorder(tmp_path / "run") as recorder:
        recorder.add_scores("train", recorder.add_sequences(step=1, response_ids=ids), logprobs=logprobs)
        recorder.flush()
        torch.cuda.synchronize()
        done = torch.cuda.Event()
        torch.cuda._sleep(BUSY_CYCLES)
        late = logprobs * 2
        batch = recorder.add_sequences(step=2, response_ids=ids, response_attention_mask=mask)
        recorder.add_scores("train", batch, logprobs=late)
        done.record()
        assert not done.query(), "the calls waited for the device"
    assert recorded(tmp_path / "run")[-1] is not None


def test_the_training_stream_never_waits_for_a_copy_and_may_change_what_it_gave(tmp_path):
    ids, mask, given = draw()
    logprobs = given.cuda()
    with Recorder(tmp_path / "run") as recorder:
        batch = recorder.add_sequences(step=1, seq_ids=range(ROWS), response_ids=ids, response_attention_mask=mask)
        side, _ = staging._copies_of(logprobs.device)
        staging.stage(torch.zeros_like(logprobs).fill_(-1.0))()  # a kernel's first launch may wait for all streams
        with torch.cuda.stream(side):
            torch.cuda._sleep(BUSY_CYCLES)
        recorder.add_scores("train", batch, logprobs=logprobs)
        logprobs.fill_(-99.0)
        done = torch.cuda.Event()
        done.record()
        done.synchronize()
        assert not side.query(), "the training stream waited for the copying one"
    assert recorded(tmp_path / "run") == expected(mask, given)


@pytest.mark.parametrize("change", ["in_place", "graph"])
def test_values_that_training_changes_at_once_are_recorded_as_they_were(tmp_path, change):
    """The side stream begins late; a CUDA graph writes its outputs to the same memory at every replay."""
    wanted, source = [], torch.zeros(ROWS, WIDTH, device="cuda")
    source.fill_(-1.0)
    graph, output = torch.cuda.CUDAGraph(), None
    with torch.cuda.graph(graph):
        output = source * 2
    with Recorder(tmp_path / "run") as recorder:
        for step in range(1, 11):
            ids, mask, logprobs = draw(seed=step)
            batch = recorder.add_sequences(
                step=step, seq_ids=range(ROWS), response_ids=ids, response_attention_mask=mask
            )
            side, _ = staging._copies_of(output.device)
            with torch.cuda.stream(side):
                torch.cuda._sleep(BUSY_CYCLES // 20)
            source.copy_(logprobs.cuda() / 2)
            graph.replay()
            recorder.add_scores("train", batch, logprobs=output)
            if change == "in_place":
                output.mul_(0)
            else:
                source.fill_(-7.0)
                graph.replay()
            wanted += expected(mask, logprobs)
    assert recorded(tmp_path / "run") == wanted


def test_copies_that_find_no_room_in_pinned_memory_are_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(staging.PinnedMemory, "take", lambda *_: None)
    test_the_training_stream_never_waits_for_a_copy_and_may_change_what_it_gave(tmp_path)


def test_pinned_memory_stays_within_its_bound(tmp_path):
    ids, mask, logprobs = draw()
    with Recorder(tmp_path / "run") as recorder:
        batch = recorder.add_sequences(step=1, seq_ids=range(ROWS), response_ids=ids, response_attention_mask=mask)
        given = logprobs.cuda()
        pinned = staging._copies_of(given.device)[1]
        waits = [staging.stage(given) for _ in range(2 * pinned.num_bytes // (4 * ROWS * WIDTH))]
        assert pinned._stop <= pinned.num_bytes
        assert all(torch.equal(wait(), logprobs) for wait in waits)
        del waits
        recorder.add_scores("train", batch, logprobs=given)
    assert pinned._num_pieces == 0
    assert recorded(tmp_path / "run") == expected(mask, logprobs)


@pytest.mark.parametrize("shard", [False, True])
def test_logprobs_of_a_dtensor_are_this_process_s_rows(tmp_path, shard):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh, (ids, mask, logprobs) = init_device_mesh("cuda", (1,)), draw()
        placement = Shard(0) if shard else Replicate()
        given = DTensor.from_local(logprobs.cuda(), mesh, [placement], run_check=False)
        with Recorder(tmp_path / "run") as recorder:
            batch = recorder.add_sequences(step=1, seq_ids=range(ROWS), response_ids=ids, response_attention_mask=mask)
            recorder.add_scores("train", batch, logprobs=given)
    finally:
        torch.distributed.destroy_process_group()
    assert recorded(tmp_path / "run") == expected(mask, logprobs)


def test_memory_that_is_used_again_at_once_does_not_change_what_is_recorded(tmp_path):
    wanted = []
    with Recorder(tmp_path / "run") as recorder:
        for step in range(1, 51):
            ids, mask, logprobs = draw(seed=step)
            device = logprobs.cuda()
            batch = recorder.add_sequences(
                step=step, seq_ids=range(ROWS), response_ids=ids, response_attention_mask=mask
            )
            recorder.add_scores("train", batch, logprobs=device)
            del device
            torch.full((ROWS, WIDTH), -99.0, device="cuda")
            wanted += expected(mask, logprobs)
    assert recorded(tmp_path / "run") == wanted


def test_values_that_contradict_each_other_are_told_at_the_next_call(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        batch = recorder.add_sequences(step=1, seq_ids="ab", response_ids=[[1], [2]])
        recorder.add_scores("train", batch, logprobs=torch.tensor([[-1.0], [0.5]], device="cuda"))
        with pytest.raises(InvalidRecord, match=r"sequence 'b': pass 'train' has logprob 0.5"):
            recorder.flush()
        recorder.add_scores("rollout", batch, logprobs=torch.tensor([[-1.0], [-0.5]], device="cuda"))
    query = 'SELECT logprobs FROM scores WHERE "pass" = ? ORDER BY seq_id'
    assert connect(tmp_path / "run").execute(query, ["rollout"]).fetchall() == [([-1.0],), ([-0.5],)]


def test_distributions_come_from_the_device_in_their_dtype(tmp_path):
    logits = torch.randn(3, 11, device="cuda").bfloat16()
    with Recorder(tmp_path / "run", capture="logits") as recorder:
        batch = recorder.add_sequences(step=1, response_ids=[[1, 2, 3]])
        recorder.add_scores(
            "train",
            batch,
            logprobs=torch.full((1, 3), -1.0, device="cuda"),
            distribution=Logits(logits=logits),
            captured_rows=[0],
        )
    (group,) = (tmp_path / "run" / "dense").iterdir()
    found = read_dense(Store(tmp_path / "run"), f"{group.name}/train", 0, 3)["logits"]
    np.testing.assert_array_equal(found, logits.float().cpu().numpy())


@pytest.mark.parametrize("capture", ["logprobs", "topk:3", "logits"])
def test_training_on_the_device_is_the_same_bit_for_bit_whether_recorded_or_not(capture):
    pytest.importorskip("trl")
    pytest.importorskip("datasets")
    from runs import train

    config = {"use_cpu": False, "full_determinism": True, "num_iterations": 2, "steps_per_generation": 2, "beta": 0.1}
    bare, again = train("--steps", "6", config=config), train("--steps", "6", config=config | {"run_name": "again"})
    assert bare.result["weights"] == again.result["weights"], "this training does not repeat itself even when bare"
    recorded_run = train("--steps", "6", config=config, capture=capture, fraction="0.5")
    assert recorded_run.result["weights"] == bare.result["weights"]
    (row,) = stats(recorded_run.trace, pair="current:train").dicts()
    assert row["num_tokens"] > 100
    ((device,),) = (
        connect(recorded_run.trace).execute("SELECT DISTINCT device FROM passes WHERE \"pass\" = 'train'").fetchall()
    )
    assert device.startswith("cuda ")
