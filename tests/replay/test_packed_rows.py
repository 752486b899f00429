"""Forwards as verl's FSDP engine makes them, padded behind the response or end to end, replayed bit for bit."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from grouped import VOCAB, tiny_model
from tim_trace.analysis.views import connect
from tim_trace.replay.batching import packed_batch
from tim_trace.replay.engine import replay
from tim_trace.replay.recorded import RecordedRun
from tim_trace.schemas.documents import PACKED_ROWS
from tim_trace.tracer.hooks.trl_contract import model_identity
from tim_trace.tracer.recorder import Recorder
from tim_trace.tracer.rows import Forward

pytestmark = pytest.mark.engine

FORWARDS = ((4, 0, 3), (5, 1), (2,))
"""Rows of each, in the order in which they went through the model."""


def scored(model, rows, *, is_packed, num_pads, attended):
    """[T] logprobs of each row's response, of one forward whose attention sees some places of each row, or all."""
    whole = [torch.tensor(np.r_[prompt, response]) for prompt, response in rows]
    if is_packed:
        none = torch.zeros(num_pads, dtype=torch.long)
        positions = torch.cat([*(torch.arange(len(ids)) for ids in whole), torch.arange(num_pads)])
        inputs = {"input_ids": torch.cat([*whole, none])[None], "position_ids": positions[None]}
    else:
        inputs = {
            "input_ids": torch.nn.utils.rnn.pad_sequence(whole, batch_first=True),
            "attention_mask": torch.nn.utils.rnn.pad_sequence(
                [torch.ones_like(ids) for ids in whole], batch_first=True
            ),
        }
        if attended is not None:
            inputs["attention_mask"][:] = torch.arange(inputs["input_ids"].shape[1]) < attended
    with torch.no_grad():
        logits = model(**inputs, use_cache=False).logits
    found, start = [], 0
    for index, ((prompt, response), ids) in enumerate(zip(rows, whole, strict=True)):
        of_row = logits[0, start : start + len(ids)] if is_packed else logits[index]
        before = of_row[len(prompt) - 1 : len(ids) - 1]
        taken = before.gather(-1, torch.tensor(response)[:, None]).squeeze(-1)
        found.append((taken - before.logsumexp(-1)).numpy())
        start += len(ids)
    return found


def recorded(path, *, is_packed, num_pads=0, attended=None):
    model, draw = tiny_model().eval(), np.random.default_rng(0)
    rows = [
        (draw.integers(0, VOCAB, draw.integers(3, 20)), draw.integers(0, VOCAB, draw.integers(1, 24))) for _ in range(6)
    ]
    logprobs, forward = [None] * 6, np.zeros((6, 4), np.int64)
    for number, chosen in enumerate(FORWARDS):
        some = [rows[row] for row in chosen]
        lengths = [len(prompt) + len(response) for prompt, response in some]
        given = scored(model, some, is_packed=is_packed, num_pads=num_pads, attended=attended)
        for place, (row, values) in enumerate(zip(chosen, given, strict=True)):
            after = num_pads * (place == len(chosen) - 1) if is_packed else max(lengths) - lengths[place]
            logprobs[row], forward[row] = values, (number, place, len(chosen), after)
    with Recorder(path) as recorder:
        trainer = SimpleNamespace(model=model, accelerator=SimpleNamespace(unwrap_model=lambda model: model))
        recorder.describe(model=model_identity(trainer))
        packing = PACKED_ROWS if is_packed else None
        contract = {
            "engine": "verl", "packing": packing, "prompt_padding_side": "right", "torch": {"num_threads": 1},
            "settings": {"ulysses_sequence_parallel_size": 2},
            **({} if attended is None else {"attended_tokens": attended}),
        }  # fmt: skip
        recorder.add_contract("train", contract)
        recorder.add_weights(0, model.state_dict())
        prompts, responses = zip(*rows, strict=True)
        batch = recorder.add_sequences(step=1, prompt_ids=prompts, response_ids=responses, policy_version=0)
        ids, places, sizes, after = forward.T.astype(np.int32)
        recorder.add_scores(
            "train", batch, logprobs=logprobs,
            forward=Forward(ids=ids.astype(np.int64), places=places, rows=sizes, pad_left=0 * ids, pad_right=after),
        )  # fmt: skip
    return path


@pytest.mark.parametrize(
    ("is_packed", "num_pads"), [(False, 0), (True, 0), (True, 3)], ids=["padded", "packed", "and a tail"]
)
def test_every_bit_comes_back_of_forwards_as_verl_makes_them(tmp_path, is_packed, num_pads):
    trace = recorded(tmp_path / "run", is_packed=is_packed, num_pads=num_pads)
    torch.set_num_threads(1)
    (row,) = replay(trace)
    assert row.identity_held, row.differs
    query = """
        SELECT contract_json ->> '$.packing', contract_json ->> '$.prompt_padding_side',
            contract_json ->> '$.settings.ulysses_sequence_parallel_size' FROM passes WHERE pass = 'replay/as-recorded'
    """
    assert connect(trace).execute(query).fetchall() == [("rows" if is_packed else None, "right", "1")]


def test_a_mask_that_hides_the_end_of_a_row_is_replayed_where_rows_stay_padded(tmp_path):
    """As verl before 0.8 makes it for padded rows: of 30 tokens and more, attention sees the first 12."""
    trace = recorded(tmp_path / "run", is_packed=False, attended=12)
    torch.set_num_threads(1)
    found = {
        row.arm: row for row in replay(trace, arm=["batch-size=2", "padding=packed", "padding=left", "engine=exact"])
    }
    assert found["as-recorded"].identity_held, found["as-recorded"].differs
    seen = "SELECT pass, contract_json ->> '$.attended_tokens' FROM passes WHERE pass LIKE 'replay/%'"
    for pass_name, attended in connect(trace).execute(seen).fetchall():
        is_seen = found[pass_name.removeprefix("replay/")].max_abs_d < 1e-5
        assert attended == ("12" if is_seen else None), pass_name
    assert sum(row.max_abs_d < 1e-5 for row in found.values()) == 2


def test_an_arm_of_another_shape_takes_packed_rows_apart(tmp_path):
    trace = recorded(tmp_path / "run", is_packed=True, num_pads=3)
    found = {
        row.arm: row for row in replay(trace, arm=["batch-size=2", "padding=packed", "attention=eager", "mode=decode"])
    }
    assert len(found) == 5
    for row in found.values():
        assert row.max_abs_d < 1e-5


def test_padding_behind_packed_rows_is_a_row_of_its_own(tmp_path):
    rows = RecordedRun(recorded(tmp_path / "run", is_packed=True)).step(1)[:3]
    batch = packed_batch(rows, num_pads=4)
    assert [row.seq_id.rpartition("-")[2] for row in rows] == ["4", "0", "3"]
    assert batch.spans[-1].end - batch.spans[-1].start == 4
    assert batch.places_N.tolist() == list(range(batch.width - 4))
    assert batch.tokens_BW.sum() == batch.width - 4
    assert [padding.tolist() for padding in batch.padding()] == [[0, 0, 0], [0, 0, 4]]
