import shutil

import numpy as np
import pytest
import torch
import zarr
from tim_trace.analysis.info import info
from tim_trace.analysis.verify import verify
from tim_trace.analysis.views import connect
from tim_trace.schemas.errors import DamagedTrace, InvalidRecord
from tim_trace.tracer import dense
from tim_trace.tracer.dense import Logits, TopK, read_dense, top_k_with_tail
from tim_trace.tracer.journal import DENSE_TABLE
from tim_trace.tracer.liveness import journaled_segments
from tim_trace.tracer.recorder import Recorder
from tim_trace.tracer.seal import seal_table
from tim_trace.tracer.store import Store

LENGTHS = [3, 1, 4]


def record_logits(path, logits, rows, dtype=torch.float32, steps=1):
    with Recorder(path, capture="logits") as recorder:
        for step in range(1, steps + 1):
            added = recorder.add_sequences(step=step, seq_ids=range(3), response_ids=[[0] * n for n in LENGTHS])
            recorder.add_scores(
                "train", added, logprobs=[[-1.0] * n for n in LENGTHS],
                distribution=Logits(logits=logits.to(dtype)), captured_rows=rows,
            )  # fmt: skip


def links(path):
    return (
        connect(path)
        .execute("SELECT seq_id, dense, dense_start, len(logprobs) FROM scores ORDER BY step, seq_id")
        .fetchall()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_logits_come_back_in_the_dtype_that_the_framework_had(tmp_path, dtype):
    logits = torch.randn(7, 11, generator=torch.Generator().manual_seed(0))
    record_logits(tmp_path / "run", logits, [0, 2], dtype)
    rows = links(tmp_path / "run")
    assert rows[1][1:3] == (None, None)
    wanted = logits.to(dtype).split([3, 4])
    for (_, group, start, tokens), part in zip([rows[0], rows[2]], wanted, strict=True):
        found = read_dense(Store(tmp_path / "run"), group, start, tokens)["logits"]
        assert torch.equal(torch.from_numpy(found).to(dtype), part)
    (array,) = zarr.open_group(tmp_path / "run" / "dense" / rows[0][1], mode="r").arrays()
    assert array[1].attrs["dtype"] == str(dtype).removeprefix("torch.")
    assert array[1].dtype == (np.uint16 if dtype == torch.bfloat16 else str(dtype).removeprefix("torch."))


@pytest.mark.slow
def test_rows_across_chunks_and_shards_come_back(tmp_path, monkeypatch):
    monkeypatch.setattr(dense, "CHUNK_BYTES", 200)
    monkeypatch.setattr(dense, "CHUNKS_A_SHARD", 3)
    logits = torch.arange(7 * 11, dtype=torch.float32).reshape(7, 11)
    record_logits(tmp_path / "run", logits, [0, 2], steps=9)
    for step in range(9):
        for (_, group, start, tokens), part in zip(
            links(tmp_path / "run")[3 * step :: 2][:2], logits.split([3, 4]), strict=True
        ):
            assert torch.equal(
                torch.from_numpy(read_dense(Store(tmp_path / "run"), group, start, tokens)["logits"]), part
            )
    group = zarr.open_group(tmp_path / "run" / "dense" / links(tmp_path / "run")[0][1], mode="r")
    assert group["logits"].shape == (63, 11)
    assert group["logits"].shards == (12, 11)
    assert len(list((tmp_path / "run" / "dense").rglob("c/*/*"))) == 6


def test_top_k_with_its_tail_is_the_distribution_s_top():
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(1)).double()
    ids, logprobs, tail = top_k_with_tail(logits, 6, temperature=0.7)
    exact = torch.log_softmax(logits / 0.7, -1)
    assert torch.equal(ids.long(), exact.topk(6).indices)
    # float32 of logprobs near 1e1: half a unit in the last place is 5e-7.
    assert torch.allclose(logprobs.double(), exact.topk(6).values, atol=1e-6)
    rest = exact.exp().sum(-1) - exact.topk(6).values.exp().sum(-1)
    assert torch.allclose(tail.double().exp(), rest, atol=1e-6)


def test_the_whole_vocabulary_leaves_no_tail():
    _, _, tail = top_k_with_tail(torch.randn(2, 4), 9, temperature=1.0)
    assert tail.tolist() == [-np.inf, -np.inf]


def test_distributions_of_another_length_are_refused(tmp_path):
    with pytest.raises(InvalidRecord, match=r"distributions must have 7 rows, .*; got \{'logits': 5\}"):
        record_logits(tmp_path / "run", torch.zeros(5, 2), [0, 2])


def test_top_k_is_linked_like_logits(tmp_path):
    with Recorder(tmp_path / "run", capture="topk:2") as recorder:
        added = recorder.add_sequences(step=1, seq_ids=range(3), response_ids=[[0] * n for n in LENGTHS])
        top = TopK(
            token_ids=np.arange(10, dtype=np.int32).reshape(5, 2),
            logprobs=-np.ones((5, 2), np.float32),
            tail_logprob=np.arange(5, dtype=np.float32),
        )
        recorder.add_scores(
            "rollout", added, logprobs=[[-1.0] * n for n in LENGTHS], distribution=top, captured_rows=[1, 2]
        )
    _, one, two = links(tmp_path / "run")
    store = Store(tmp_path / "run")
    assert read_dense(store, *one[1:])["tail_logprob"].tolist() == [0.0]
    assert read_dense(store, *two[1:])["tail_logprob"].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert read_dense(store, *two[1:])["token_ids"].tolist() == [[2, 3], [4, 5], [6, 7], [8, 9]]


def test_until_the_state_knows_the_group_its_journal_is_read(tmp_path):
    """A process can be killed between the group's rename and its writer's state."""
    run, killed = tmp_path / "run", tmp_path / "killed"
    recorder = Recorder(run, capture="topk:2")
    added = recorder.add_sequences(step=1, seq_ids=range(3), response_ids=[[0] * n for n in LENGTHS])
    top = TopK(
        token_ids=np.arange(16, dtype=np.int32).reshape(8, 2),
        logprobs=-np.ones((8, 2), np.float32),
        tail_logprob=np.zeros(8, np.float32),
    )
    recorder.add_scores("rollout", added, logprobs=[[-1.0] * n for n in LENGTHS], distribution=top)
    recorder.flush()
    shutil.copytree(run, killed)
    recorder.close()
    (segment,) = journaled_segments(Store(killed))
    assert seal_table(killed, segment, DENSE_TABLE)
    group, start = links(killed)[2][1:3]
    assert read_dense(Store(killed), group, start, 4)["token_ids"].tolist() == [[8, 9], [10, 11], [12, 13], [14, 15]]
    assert not verify(killed).damaged


def test_info_shows_what_captures_take(tmp_path):
    record_logits(tmp_path / "run", torch.randn(7, 500), [0, 2])
    found = info(str(tmp_path / "run"))
    assert found.num_captured == 2
    assert found.num_bytes["dense"] > 7 * 500 * 2


def test_a_missing_group_is_named(tmp_path):
    record_logits(tmp_path / "run", torch.zeros(7, 2), [0, 2])
    (_, group, start, tokens), *_ = links(tmp_path / "run")
    (tmp_path / "run" / "dense").rename(tmp_path / "elsewhere")
    with pytest.raises(DamagedTrace, match=f"dense/{group} is missing"):
        read_dense(Store(tmp_path / "run"), group, start, tokens)
