import json
import time
import warnings

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from builders import add_step, make_batch
from tim_trace.analysis.views import connect
from tim_trace.schemas.errors import InvalidRecord, StorageError, TimTraceWarning, TraceExists
from tim_trace.tracer.dense import Logits
from tim_trace.tracer.recorder import Recorder
from tim_trace.tracer.routing import Routing
from tim_trace.tracer.rows import Forward


def logprobs_of(path, pass_name="train"):
    rows = connect(path).execute(
        'SELECT seq_id, iteration, logprobs FROM scores WHERE "pass" = ? ORDER BY step, seq_id, iteration', [pass_name]
    )
    return {(seq_id, iteration): values for seq_id, iteration, values in rows.fetchall()}


def padded(rows, width, side, value=0.0):
    cells, mask = np.full((len(rows), width), value), np.zeros((len(rows), width), int)
    for index, row in enumerate(rows):
        place = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        cells[index, place], mask[index, place] = row, 1
    return cells, mask


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["torch", "numpy", "lists"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_every_form_of_a_batch_records_the_same(tmp_path, kind, side):
    batch = make_batch(rows=5)
    ids, mask = padded(batch["response_ids"], 9, side)
    values, _ = padded(batch["train"], 9, side, value=-77.0)
    with Recorder(tmp_path / "run") as recorder:
        if kind == "lists":
            added = recorder.add_sequences(step=1, seq_ids=range(5), response_ids=batch["response_ids"])
            recorder.add_scores("train", added, logprobs=batch["train"])
        else:
            make = torch.tensor if kind == "torch" else np.array
            added = recorder.add_sequences(
                step=1, seq_ids=range(5), response_ids=make(ids).astype(int) if kind == "numpy" else make(ids).long(),
                response_attention_mask=make(mask),
            )  # fmt: skip
            recorder.add_scores("train", added, logprobs=make(values.astype(np.float32)))
    recorded = logprobs_of(tmp_path / "run")
    assert [recorded[str(row), 0] for row in range(5)] == [values.tolist() for values in batch["train"]]
    ids = connect(tmp_path / "run").execute("SELECT response_ids FROM sequences ORDER BY seq_id").fetchall()
    assert [row for (row,) in ids] == batch["response_ids"]


def test_float32_comes_back_bit_for_bit(tmp_path):
    bits = np.random.default_rng(0).integers(0, 2**31, 2000, dtype=np.int64).astype(np.uint32) | 0x80000000
    values = bits.view(np.float32)
    with Recorder(tmp_path / "run") as recorder:
        added = recorder.add_sequences(step=1, response_ids=[[0] * 2000])
        recorder.add_scores("train", added, logprobs=[values])
    (file,) = (tmp_path / "run" / "scores").glob("*.parquet")
    found = pq.read_table(file)["logprobs"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
    assert found.view(np.uint32).tolist() == bits.tolist()


def test_nan_and_infinities_are_kept(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        added = recorder.add_sequences(step=1, seq_ids=["a"], response_ids=[[1, 2, 3]])
        recorder.add_scores("train", added, logprobs=[[float("nan"), float("-inf"), None]])
    values = logprobs_of(tmp_path / "run")["a", 0]
    assert np.isnan(values[0])
    assert values[1:] == [float("-inf"), None]


def test_every_column_of_a_sequence_comes_back(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        recorder.add_sequences(
            step=4, seq_ids=["a", "b"], group_ids=["g", None], policy_version=3, prompt_ids=[[1], [2, 3]],
            response_ids=[[4, 5], [6]], response_mask=[[1, 0], [1]], reward=torch.tensor([0.5, -1.0]),
            rewards={"right": [1.0, 0.0], "short": np.array([-0.5, -1.0])}, advantage=[[0.25, 0.5], [-1.0]],
            temperature=0.7, top_p=0.9, top_k=20, min_p=0.01, repetition_penalty=1.1, max_tokens=8,
            finish_reason=["stop", "length"],
        )  # fmt: skip
    cursor = connect(tmp_path / "run").execute("SELECT * EXCLUDE (run, writer) FROM sequences ORDER BY seq_id")
    names = [column[0] for column in cursor.description]
    first, second = (dict(zip(names, row, strict=True)) for row in cursor.fetchall())
    assert first == {
        "step": 4, "seq_id": "a", "group_id": "g", "policy_version": 3, "prompt_ids": [1], "response_ids": [4, 5],
        "response_mask": [True, False], "num_prompt_tokens": 1, "num_response_tokens": 2, "reward": 0.5,
        "rewards": {"right": 1.0, "short": -0.5}, "advantage": None, "advantages": [0.25, 0.5], "temperature": 0.7,
        "top_p": 0.9, "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.1, "max_tokens": 8, "finish_reason": "stop", "attempt": 1,
    }  # fmt: skip
    assert (second["group_id"], second["reward"], second["finish_reason"]) == (None, -1.0, "length")


@pytest.mark.parametrize(
    ("texts", "problem"),
    [
        (["stop", None], None),
        (["é", "stop"], None),
        (["stop", 3], "row 1: got 3"),
        (["stop", "\udcff"], "row 1.*cannot be encoded as UTF-8"),
    ],
)
def test_a_column_of_texts_is_looked_at_text_by_text(tmp_path, texts, problem):
    with Recorder(tmp_path / "run") as recorder:
        if problem is not None:
            with pytest.raises(InvalidRecord, match=problem):
                recorder.add_sequences(step=1, response_ids=[[4], [5]], finish_reason=texts)
            return
        recorder.add_sequences(step=1, response_ids=[[4], [5]], finish_reason=texts)
    rows = connect(tmp_path / "run").execute("SELECT finish_reason FROM sequences ORDER BY seq_id").fetchall()
    assert [found for (found,) in rows] == texts


def test_what_is_not_given_is_null(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        recorder.add_sequences(step=1, response_ids=[[4, 5]])
    row = (
        connect(tmp_path / "run").execute("SELECT reward, prompt_ids, temperature, advantage FROM sequences").fetchone()
    )
    assert row == (None, None, None, None)


def test_some_rows_of_a_batch_are_scored_in_their_own_order(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        added = recorder.add_sequences(step=1, seq_ids="abc", response_ids=[[1], [2, 2], [3, 3, 3]])
        recorder.add_scores("current", added, rows=[2, 0], logprobs=[[-3.0] * 3, [-1.0]])
        recorder.add_scores("current", added, rows=[1, 2], logprobs=[[-2.0] * 2, [-4.0] * 3])
    assert logprobs_of(tmp_path / "run", "current") == {
        ("a", 0): [-1.0], ("b", 0): [-2.0, -2.0], ("c", 0): [-3.0] * 3, ("c", 1): [-4.0] * 3,
    }  # fmt: skip


def test_refused_scores_of_a_later_iteration_leave_the_count_of_iterations(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        added = recorder.add_sequences(step=1, seq_ids="a", response_ids=[[1, 2]])
        recorder.add_scores("current", added, logprobs=[[-1.0, -1.0]])
        with pytest.raises(InvalidRecord):
            recorder.add_scores("current", added, logprobs=[[1.0, -2.0]])
        recorder.add_scores("current", added, logprobs=[[-3.0, -3.0]])
    assert logprobs_of(tmp_path / "run", "current") == {("a", 0): [-1.0, -1.0], ("a", 1): [-3.0, -3.0]}


def test_padding_of_a_batch_serves_its_rows_in_any_order(tmp_path):
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    with Recorder(tmp_path / "run") as recorder:
        added = recorder.add_sequences(
            step=1, seq_ids="ab", response_ids=torch.tensor([[1, 2, 0], [3, 4, 5]]), response_attention_mask=mask
        )
        recorder.add_scores("train", added, rows=[1, 0], logprobs=torch.tensor([[-3.0, -4, -5], [-1, -2, -9]]))
    assert logprobs_of(tmp_path / "run") == {("a", 0): [-1.0, -2.0], ("b", 0): [-3.0, -4.0, -5.0]}


def test_places_that_a_pass_did_not_score_are_null(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        added = recorder.add_sequences(step=1, seq_ids="a", response_ids=[[1, 2, 3]])
        recorder.add_scores("rollout", added, logprobs=[[-1.0, 0.0, -2.0]], scored_mask=[[1, 0, 1]])
    assert logprobs_of(tmp_path / "run", "rollout") == {("a", 0): [-1.0, None, -2.0]}


def test_a_logprob_of_none_stays_null_wherever_the_mask_is(tmp_path):
    given = [[-1.0, None, None, -2.0], [None]]
    with Recorder(tmp_path / "run") as recorder:
        added = recorder.add_sequences(step=1, seq_ids="ab", response_ids=[[1, 2, 3, 4], [5]])
        for name, mask in (
            ("rollout", [[1, 1, 0, 0], [1]]),
            ("train", [[1, 1, 1, 1], [1]]),
            ("current", [[0] * 4, [0]]),
        ):
            recorder.add_scores(name, added, logprobs=given, entropy=[[0.5, None, 0.5, None], [0.25]], scored_mask=mask)
    assert logprobs_of(tmp_path / "run", "rollout") == {("a", 0): [-1.0, None, None, None], ("b", 0): [None]}
    assert logprobs_of(tmp_path / "run", "train") == {("a", 0): given[0], ("b", 0): [None]}
    assert logprobs_of(tmp_path / "run", "current") == {("a", 0): [None] * 4, ("b", 0): [None]}
    query = "SELECT entropy FROM scores WHERE pass = 'rollout' ORDER BY seq_id"
    assert connect(tmp_path / "run").execute(query).fetchall() == [([0.5, None, None, None],), ([0.25],)]


VERSIONS = 'SELECT "pass", seq_id, policy_version FROM scores ORDER BY ALL'


def test_chosen_rows_keep_their_own_policy_versions(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        added = recorder.add_sequences(
            step=1, seq_ids="abcd", response_ids=[[1]] * 4, policy_version=torch.tensor([7, 8, 9, 10])
        )
        recorder.add_scores("rollout", added, rows=[3, 1], logprobs=[[-1.0]] * 2)
        recorder.add_scores("rollout", added, rows=[0], logprobs=[[-1.0]])
        recorder.add_scores("train", added, rows=[2, 0], logprobs=[[-1.0]] * 2, policy_version=[12, 11])
    assert connect(tmp_path / "run").execute(VERSIONS).fetchall() == [
        ("rollout", "a", 7), ("rollout", "b", 8), ("rollout", "d", 10), ("train", "a", 11), ("train", "c", 12),
    ]  # fmt: skip


def test_a_pass_that_does_not_say_its_version_has_none(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        added = recorder.add_sequences(step=1, seq_ids="a", response_ids=[[1]], policy_version=7)
        for name in ("rollout", "train", "current", "reference"):
            recorder.add_scores(name, added, logprobs=[[-1.0]])
    assert connect(tmp_path / "run").execute(VERSIONS).fetchall() == [
        ("current", "a", None), ("reference", "a", None), ("rollout", "a", 7), ("train", "a", None),
    ]  # fmt: skip


def test_a_place_that_was_not_scored_may_hold_anything(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        added = recorder.add_sequences(step=1, seq_ids="ab", response_ids=[[1, 2], [3]])
        recorder.add_scores("train", added, logprobs=[[5.0, -1.0], [-2.0]], scored_mask=[[0, 1], [1]])
    assert logprobs_of(tmp_path / "run") == {("a", 0): [None, -1.0], ("b", 0): [-2.0]}


def test_rows_that_come_out_of_order_keep_their_distributions_and_router_choices(tmp_path):
    prompts, lengths = [1, 4, 2], [2, 3, 1]
    with Recorder(tmp_path / "run") as recorder:
        added = recorder.add_sequences(
            step=1, seq_ids="abc", prompt_ids=[[1] * n for n in prompts], response_ids=[[2] * n for n in lengths]
        )
        for rows, captured in (([2, 0], [0]), ([1], [1])):
            tokens = sum(prompts[row] + lengths[row] for row in rows)
            recorder.add_scores(
                "train", added, rows=rows, logprobs=[[-1.0] * lengths[row] for row in rows], captured_rows=captured,
                distribution=Logits(logits=torch.zeros(sum(lengths[row] for row in captured), 3)),
                routing=Routing(expert_ids=np.zeros((tokens, 1, 1), np.int64)),
            )  # fmt: skip
    found = (
        connect(tmp_path / "run")
        .execute("SELECT seq_id, dense_start, routing_start FROM scores ORDER BY ALL")
        .fetchall()
    )
    assert found == [("a", 0, 3), ("b", 2, 6), ("c", None, 0)]


def test_who_was_forwarded_together_is_recorded(tmp_path):
    forward = Forward(
        ids=np.array([7, 7, 8]), places=np.array([0, 1, 0], np.int32), rows=np.array([2, 2, 1], np.int32),
        pad_left=np.array([0, 2, 1], np.int32), pad_right=np.array([3, 0, 0], np.int32),
    )  # fmt: skip
    with Recorder(tmp_path / "run") as recorder:
        added = recorder.add_sequences(step=1, seq_ids="abc", response_ids=[[1], [2], [3]])
        recorder.add_scores("train", added, logprobs=[[-1.0]] * 3, forward=forward)
    query = "SELECT seq_id, forward_id, forward_row, forward_rows, pad_left, pad_right FROM scores ORDER BY seq_id"
    assert connect(tmp_path / "run").execute(query).fetchall() == [
        ("a", 7, 0, 2, 0, 3), ("b", 7, 1, 2, 2, 0), ("c", 8, 0, 1, 1, 0),
    ]  # fmt: skip


def test_metrics_keep_numbers_as_numbers_and_the_rest_as_text(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        recorder.add_hyperparameters({"lr": 1e-6, "loss_type": "dapo", "names": ["a"]})
        recorder.add_metrics(3, {"loss": torch.tensor(0.25), "nan": float("nan"), "count": 3})
    rows = (
        connect(tmp_path / "run").execute("SELECT step, name, value, text FROM metrics ORDER BY step, name").fetchall()
    )
    assert [row for row in rows if row[1] != "nan"] == [
        (0, "hyperparameter/loss_type", None, "dapo"),
        (0, "hyperparameter/lr", 1e-6, None),
        (0, "hyperparameter/names", None, "['a']"),
        (3, "count", 3.0, None),
        (3, "loss", 0.25, None),
    ]
    (nan,) = [value for _, name, value, text in rows if name == "nan" and text is None]
    assert np.isnan(nan)


def test_scores_point_at_the_contract_that_held_when_they_were_added(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        first = recorder.add_contract("train", {"num_threads": 1})
        added = recorder.add_sequences(step=1, seq_ids="ab", response_ids=[[1], [2]])
        recorder.add_scores("train", added, rows=[0], logprobs=[[-1.0]])
        second = recorder.add_contract("train", {"num_threads": 2})
        recorder.add_scores("train", added, rows=[1], logprobs=[[-1.0]])
    found = connect(tmp_path / "run").execute(
        "SELECT seq_id, contract, contract_json FROM scores JOIN passes USING (run, contract) ORDER BY seq_id"
    )
    assert [(name, digest, json.loads(text)["num_threads"]) for name, digest, text in found.fetchall()] == [
        ("a", first, 1),
        ("b", second, 2),
    ]


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (
            {"logprobs": [[-1.0], [-1.0]]},
            r"step 1, sequence 'b': got 1 values of logprobs of pass 'train' for 2 response tokens",
        ),
        ({"logprobs": [[-1.0]]}, "1 rows of logprobs for 2 sequences; pass rows="),
        (
            {"logprobs": [[-1.0], [-1.0, 0.5]]},
            r"step 1, sequence 'b': pass 'train' has logprob 0.5 at response token 1",
        ),
        ({"logprobs": [[0.9], [0.1, 0.2]]}, "not probabilities or logits"),
        ({"logprobs": [[-1.0], [-1.0, -1.0]], "entropy": [[1.0], [1.0]]}, "'b': got 1 values of entropy"),
        ({"logprobs": [[-1.0]], "rows": [2]}, "pass row numbers from 0 to 1"),
        ({"logprobs": [[-1.0], [-1.0]], "rows": [0, 0]}, "each row number only once"),
    ],
)
def test_scores_that_contradict_the_batch_are_refused(tmp_path, scores, message):
    with Recorder(tmp_path / "run") as recorder:
        added = recorder.add_sequences(step=1, seq_ids="ab", response_ids=[[1], [2, 3]])
        with pytest.raises(InvalidRecord, match=message):
            recorder.add_scores("train", added, **scores)


def test_a_logprob_above_0_by_rounding_is_no_error(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        added = recorder.add_sequences(step=1, response_ids=[[1]])
        recorder.add_scores("train", added, logprobs=[[1e-7]])
        recorder.add_scores("rollout", added, logprobs=torch.tensor([[0.0625]], dtype=torch.bfloat16))


def test_a_step_that_goes_back_is_refused(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        recorder.add_sequences(step=3, response_ids=[[1]])
        recorder.add_metrics(3, {"loss": 1})
        with pytest.raises(InvalidRecord, match="step 2 after step 3: steps must not decrease"):
            recorder.add_sequences(step=2, response_ids=[[1]])
        with pytest.raises(InvalidRecord, match="metrics of step 2 after step 3"):
            recorder.add_metrics(2, {"loss": 1})


def test_a_name_that_comes_twice_in_a_step_is_refused_and_in_another_step_not(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        recorder.add_sequences(step=1, seq_ids=["a"], response_ids=[[1]])
        with pytest.raises(InvalidRecord, match="step 1, sequence 'a' occurs twice"):
            recorder.add_sequences(step=1, seq_ids=["a"], response_ids=[[1]])
        recorder.add_sequences(step=2, seq_ids=["a"], response_ids=[[1]])


def test_a_name_of_an_earlier_call_is_refused_as_long_as_its_step_lasts(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        for name in "ab":
            recorder.add_sequences(step=1, seq_ids=[name], response_ids=[[1]])
        with pytest.raises(InvalidRecord, match="'a' occurs twice"):
            recorder.add_sequences(step=1, seq_ids=["a"], response_ids=[[1]])
        recorder.add_sequences(step=2, seq_ids=["a"], response_ids=[[1]])


def test_a_pass_scores_a_sequence_once(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        added = recorder.add_sequences(step=1, seq_ids=["a"], response_ids=[[1]])
        recorder.add_scores("train", added, logprobs=[[-1.0]])
        with pytest.raises(InvalidRecord, match="'a': pass 'train' has already scored this sequence"):
            recorder.add_scores("train", added, logprobs=[[-1.0]])


def test_an_unknown_pass_is_refused_until_it_is_declared(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        added = recorder.add_sequences(step=1, seq_ids=["a"], response_ids=[[1]])
        with pytest.raises(InvalidRecord, match="pass 'teacher' is unknown"):
            recorder.add_scores("teacher", added, logprobs=[[-1.0]])
        recorder.add_contract("teacher", {"model": "big"})
        recorder.add_scores("teacher", added, logprobs=[[-1.0]])
    assert logprobs_of(tmp_path / "run", "teacher") == {("a", 0): [-1.0]}


def test_after_a_refusal_the_corrected_batch_is_recorded(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        with pytest.raises(InvalidRecord):
            recorder.add_sequences(step=1, seq_ids="ab", response_ids=[[1], [2]], prompt_ids=[[1]])
        added = recorder.add_sequences(step=1, seq_ids="ab", response_ids=[[1], [2]])
        with pytest.raises(InvalidRecord):
            recorder.add_scores("train", added, logprobs=[[-1.0], [-1.0, -1.0]])
        recorder.add_scores("train", added, logprobs=[[-1.0], [-2.0]])
    assert logprobs_of(tmp_path / "run") == {("a", 0): [-1.0], ("b", 0): [-2.0]}


def test_float64_is_kept_as_float32_with_a_warning_that_says_how_far_off(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        added = recorder.add_sequences(step=1, response_ids=[[1]])
        with pytest.warns(
            UserWarning, match=r"float64 logprobs of pass 'train' are stored as float32 .* 1\.\de-09 nats"
        ):
            recorder.add_scores("train", added, logprobs=np.array([[-0.1]]))
        recorder.add_scores("rollout", added, logprobs=np.array([[-0.5]]))


def test_an_empty_response_is_a_sequence(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        added = recorder.add_sequences(step=1, seq_ids="ab", response_ids=[[], [1]])
        recorder.add_scores("train", added, logprobs=[[], [-1.0]])
    assert logprobs_of(tmp_path / "run") == {("a", 0): [], ("b", 0): [-1.0]}


def test_a_trace_that_is_there_is_left_alone_without_force(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        add_step(recorder, 1, make_batch())
    with pytest.raises(TraceExists, match="force=True"):
        Recorder(tmp_path / "run")
    with Recorder(tmp_path / "run", force=True):
        pass
    assert connect(tmp_path / "run").execute("SELECT count(*) FROM sequences").fetchone() == (0,)


def test_a_folder_that_is_no_trace_is_left_alone_even_with_force(tmp_path):
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(TraceExists, match="is not a trace, so it was left unchanged"):
        Recorder(tmp_path, force=True)
    assert (tmp_path / "mine.txt").read_text() == "x"


def test_recording_to_a_url_says_what_to_do_instead(tmp_path):
    with pytest.raises(StorageError, match="with: tim-trace compact FOLDER -o s3"):
        Recorder("s3://bucket/run")


def test_joining_a_finished_trace_is_refused(tmp_path):
    Recorder(tmp_path / "run", join=True).close()
    with pytest.raises(TraceExists, match="finished trace"):
        Recorder(tmp_path / "run", join=True)


def test_two_writers_of_one_process_share_a_trace(tmp_path):
    with Recorder(tmp_path / "run", join=True) as one, Recorder(tmp_path / "run", join=True) as other:
        one.add_sequences(step=1, response_ids=[[1]])
        other.add_sequences(step=1, response_ids=[[2]])
    assert connect(tmp_path / "run").execute("SELECT count(*), count(DISTINCT writer) FROM sequences").fetchone() == (
        2,
        2,
    )


@pytest.mark.slow
def test_a_segment_is_sealed_whenever_enough_has_gathered(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        recorder.writer.segments.seal_bytes = 4000
        for step in range(1, 31):
            add_step(recorder, step, make_batch(seed=step))
            recorder.flush()
            while recorder.writer.segments.is_behind:
                time.sleep(0.001)
    assert len(list((tmp_path / "run" / "scores").glob("*.parquet"))) > 3
    assert connect(tmp_path / "run").execute("SELECT count(*), count(DISTINCT step) FROM scores").fetchone() == (
        240,
        30,
    )
    assert not list((tmp_path / "run" / "journal").glob("*"))


def test_scores_of_one_pass_lie_together_so_that_queries_can_leave_the_others_alone(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        for step in range(1, 4):
            add_step(recorder, step, make_batch(seed=step))
    (file,) = (tmp_path / "run" / "scores").glob("*.parquet")
    metadata = pq.ParquetFile(file).metadata
    column = [metadata.schema.column(i).name for i in range(metadata.num_columns)].index("pass")
    bounds = [metadata.row_group(i).column(column).statistics for i in range(metadata.num_row_groups)]
    assert [(b.min, b.max) for b in bounds] == [("rollout", "rollout"), ("train", "train")]


@pytest.mark.parametrize("described", [False, True])
def test_the_recorder_says_at_its_end_what_a_replay_still_lacks(tmp_path, described):
    recorder = Recorder(tmp_path / "run")
    with pytest.warns(TimTraceWarning, match="a replay of these weights also needs"):
        recorder.add_weights(0, {"w": torch.zeros(2)})
    recorder.describe(model={"class": "transformers.GPT2LMHeadModel", "config": {}})
    if described:
        recorder.add_contract("train", {"engine": "mine", "dtype": "float32"})
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        recorder.close()
    assert [
        str(each.message).startswith("a replay of these weights will fail without a call to add_contract(")
        for each in told
    ] == ([] if described else [True])


def test_weights_that_cannot_be_replayed_are_said_at_the_first_call(tmp_path):
    with Recorder(tmp_path / "bare") as recorder:
        with pytest.warns(TimTraceWarning, match=r"also needs describe\(.*\) and add_contract\("):
            recorder.add_weights(0, {"w": torch.ones(2)})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            recorder.add_weights(1, {"w": torch.ones(2)})
    with Recorder(tmp_path / "whole") as recorder, warnings.catch_warnings():
        warnings.simplefilter("error")
        recorder.describe(model={"class": "transformers.GPT2LMHeadModel", "config": {}})
        recorder.add_contract("train", {"engine": "loop", "dtype": "float32"})
        recorder.add_weights(0, {"w": torch.ones(2)})


def test_sequences_without_ids_of_their_own_are_named_by_their_row(tmp_path):
    with Recorder(tmp_path / "trace") as recorder:
        batch = recorder.add_sequences(step=1, response_ids=[[7], [8, 9]])
        with pytest.raises(InvalidRecord, match="step 1, row 1: got 1 values of logprobs"):
            recorder.add_scores("train", batch, logprobs=[[-1.0], [-1.0]])
        with pytest.raises(InvalidRecord, match=r"step 1, row 1: pass 'train' has logprob 0\.5"):
            recorder.add_scores("train", batch, rows=[1], logprobs=[[-1.0, 0.5]])


def contracts_of(path):
    query = 'SELECT "pass", contract_json FROM passes ORDER BY ALL'
    return {name: json.loads(text) for name, text in connect(path).execute(query).fetchall()}


def test_a_short_dtype_is_recorded_as_torch_names_it_and_a_misspelt_setting_warns_once(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        recorder.add_contract("train", {"dtype": "bf16"})
        recorder.add_contract("reference", {"dtype": "float16", "scale": 2})
        with pytest.warns(TimTraceWarning, match="'rollout': did you mean 'dtype' by 'dtyp'"):
            recorder.add_contract("rollout", {"dtyp": "bf16"})
        recorder.add_contract("rollout", {"dtyp": "fp16"})
        batch = recorder.add_sequences(step=1, response_ids=[[1]])
        for name in ("train", "reference"):
            recorder.add_scores(name, batch, logprobs=[[-1.0]])
    found = contracts_of(tmp_path / "run")
    assert found["train"] == {"dtype": "bfloat16"}
    assert found["reference"] == {"dtype": "float16", "scale": 2}


@pytest.mark.parametrize(("name", "near"), [("Rollout", "rollout"), ("trainer", "train"), ("curent", "current")])
def test_a_misspelt_pass_gets_the_pass_that_may_be_meant(tmp_path, name, near):
    with Recorder(tmp_path / "run") as recorder:
        batch = recorder.add_sequences(step=1, response_ids=[[1]])
        with pytest.raises(InvalidRecord, match=f"pass '{name}' is unknown; did you mean '{near}'"):
            recorder.add_scores(name, batch, logprobs=[[-1.0]])
