"""Rows packed as a tree of what they begin with alike."""

import importlib.util
from importlib import metadata

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tim_trace.replay.batching import UNLABELLED
from tim_trace.replay.prefix_tree import tree_batch
from tim_trace.replay.recorded import RecordedRow


def row(prompt, response, scored):
    return RecordedRow(
        seq_id="s", prompt_ids=np.array(prompt, np.int32), response_ids=np.array(response, np.int32),
        logprobs=np.zeros(len(response), np.float32), scored=np.array(scored, bool), policy_version=0, contract="", writer="w",
        forward_id=0, forward_row=0, pad_left=0, pad_right=0,
    )  # fmt: skip


def drawn(seed):
    """Rows of few tokens, so that they have much in common."""
    draw = np.random.default_rng(seed)
    rows = []
    for _ in range(int(draw.integers(1, 9))):
        prompt, response = (draw.integers(1, 4, int(draw.integers(1, 7))).tolist() for _ in range(2))
        rows.append(row(prompt, response, draw.integers(0, 2, len(response))))
    return rows


@given(st.integers(0, 2**32 - 1))
def test_every_token_lies_on_its_row_s_path_and_sees_what_its_row_has_before_it(seed):
    rows = drawn(seed)
    batch = tree_batch(rows)
    seen = {}
    for span in batch.spans:
        path = [place for first, stop in span.prefix for place in range(first, stop)]
        for place in range(span.start, span.end):
            path.append(place)
            seen[place] = list(path)
    assert sorted(seen) == list(range(batch.width))
    for one, places in zip(rows, batch.places_B, strict=True):
        ids = [*one.prompt_ids.tolist(), *one.response_ids.tolist()]
        assert batch.ids_BW[0][places].tolist() == ids
        assert batch.positions_W[places].tolist() == list(range(len(ids)))
        assert seen[places[-1]] == places.tolist()
    assert batch.ids_BW[0][batch.scored_N].tolist() == [token for one in rows for token in one.response_ids.tolist()]
    labelled = {
        place for place, scored in zip(batch.before_N, np.concatenate([r.scored for r in rows]), strict=True) if scored
    }
    assert {place for place, label in enumerate(batch.labels_W) if label != UNLABELLED} == labelled


def test_a_token_is_shared_where_rows_agree_on_the_one_behind_it():
    batch = tree_batch([row([5, 6], [7, 8], [True, True]), row([5, 6], [7, 9], [True, True]), row([4], [4], [True])])
    assert batch.ids_BW[0].tolist() == [5, 6, 7, 8, 7, 9, 4, 4]
    assert [(span.start, span.end, span.prefix) for span in batch.spans] == [
        (0, 2, ()), (2, 4, ((0, 2),)), (4, 6, ((0, 2),)), (6, 8, ()),
    ]  # fmt: skip
    assert batch.labels_W.tolist() == [UNLABELLED, 7, 8, UNLABELLED, 9, UNLABELLED, 4, UNLABELLED]


def trl_packing():
    """TRL's module alone: its package imports vLLM."""
    path = metadata.distribution("trl").locate_file("trl/experimental/async_grpo/packing.py")
    spec = importlib.util.spec_from_file_location("trl_packing", str(path))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.engine
def test_rows_are_packed_as_trl_packs_them():
    TreeRow = trl_packing().TreeRow
    for seed in range(200):
        rows, packed = drawn(seed), TreeRow()
        for one in rows:
            ids = np.concatenate([one.prompt_ids, one.response_ids])
            mask = np.concatenate([np.zeros(len(one.prompt_ids), int), one.scored.astype(int)])
            packed.add(
                {"input_ids": ids, "completion_mask": mask, "old_log_probs": ids * 0.0, "advantage": 0.0, "group_id": 0}
            )
        theirs, ours = packed.pack(), tree_batch(rows)
        assert ours.ids_BW[0].tolist() == theirs["input_ids"].tolist()
        assert ours.positions_W.tolist() == theirs["position_ids"].tolist()
        assert ours.labels_W.tolist() == theirs["shift_labels"].tolist()
        assert [span.end for span in ours.spans] == theirs["tree_cu_seqlens_q"].tolist()[1:]
        paths = [[*span.prefix, (span.start, span.end)] for span in ours.spans]
        places = [place for path in paths for first, stop in path for place in range(first, stop)]
        assert places == theirs["tree_kv_index"].tolist()
        scored_N = np.concatenate([one.scored for one in rows])
        assert ours.before_N[scored_N].tolist() == theirs["token_index"].tolist()
