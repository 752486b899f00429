"""What a recorder refuses: in a sentence, at the call, and without keeping half of it."""

import re

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from tim_trace.schemas.capture import Capture
from tim_trace.schemas.errors import InvalidRecord, TimTraceWarning
from tim_trace.schemas.loss import Loss
from tim_trace.tracer import staging
from tim_trace.tracer.dense import TopK
from tim_trace.tracer.recorder import Recorder
from tim_trace.tracer.rows import Forward
from tim_trace.tracer.writer import TraceWriter

RESPONSES = [[1, 2], [3]]
PADDED = np.array([[1, 2], [3, 0]])
MASK = np.array([[1, 1], [1, 0]])
LOGPROBS = [[-1.0, -2.0], [-3.0]]
NAN, INF = float("nan"), float("inf")


@pytest.fixture
def recorder(tmp_path):
    with Recorder(tmp_path / "run") as opened:
        yield opened


@pytest.fixture
def on_device(monkeypatch):
    """Host tensors take the way of device tensors: they are checked on the writing thread."""
    monkeypatch.setattr(staging, "on_device", staging.is_tensor)


def table(recorder, name, *columns):
    """Rows of a table of a closed recorder."""
    return list(zip(*(pq.read_table(recorder.folder / name)[column].to_pylist() for column in columns), strict=True))


def refused(recorder, message, **changes):
    """Have `add_sequences` refuse a batch, and see that the recorder goes on as if it had not been given."""
    given = {"step": 1, "seq_ids": "ab", "response_ids": RESPONSES} | changes
    with pytest.raises(InvalidRecord, match=message) as caught:
        recorder.add_sequences(**given)
    assert "\n" not in str(caught.value)
    added = recorder.add_sequences(step=1, seq_ids="ab", response_ids=RESPONSES)
    recorder.add_scores("train", added, logprobs=LOGPROBS)
    recorder.close()
    assert recorder.writer.state.state == "closed"
    assert table(recorder, "sequences", "step", "seq_id", "response_ids") == [(1, "a", [1, 2]), (1, "b", [3])]
    assert len(table(recorder, "scores", "seq_id")) == 2


@pytest.mark.parametrize("step", [1.5, 1.0, "1", True, None, -1, 2**63, np.float64(1), torch.tensor(1.0), [1], NAN])
def test_a_step_is_an_integer_from_0_on(recorder, step):
    refused(recorder, r"^step: got .*; pass a non-negative integer", step=step)
    with pytest.raises(InvalidRecord, match=r"^step: got"):
        recorder.add_metrics(step, {"loss": 1.0})


@pytest.mark.parametrize("step", [3, np.int32(3), np.uint8(3), torch.tensor(3), np.array(3)])
def test_integers_of_numpy_and_torch_are_steps(recorder, step):
    assert recorder.add_sequences(step=step, response_ids=[[1]]).step == 3
    recorder.add_metrics(step, {"loss": 1.0})


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[1, 7.5], [3]], r"response_ids: row 0, token 1 is 7.5; token ids are whole numbers from 0 to 2147483647"),
        ([[1, 2**31], [3]], "row 0, token 1 is 2147483648"),
        ([[1, 2], [-100]], "row 1, token 0 is -100"),
        ([[1, 2**70], [3]], r"row 0 is \[1, 1180591620717411303424\]"),
        ([[1, NAN], [3]], "row 0, token 1 is nan"),
        ([[1, None], [3]], "row 0, token 1 is None"),
        ([["1", "2"], ["3"]], r"row 0 is \['1', '2'\]"),
        ([[True, False], [True]], r"row 0 is \[True, False\]"),
        ([[[1], [2]], [[3]]], r"row 0 has shape \(2, 1\)"),
        ([[1, 2], 3], r"row 1 is 3 \(int\)\. Pass B lists"),
        ([None, [3]], r"row 0 is None\. Pass B lists"),
        (["ab", "c"], r"row 0 is 'ab' \(str\)"),
        (np.array([[1, 2**40], [3, 4]]), "row 0, token 1 is 1099511627776"),
        (np.array([[1, -1], [3, 4]]), "row 0, token 1 is -1"),
        (np.array([[1, 2.5], [3, 4]]), "row 0, token 1 is 2.5"),
        (np.array([["a", "b"]]), "got values of str"),
        (np.array([[1, None], [2, 3]], dtype=object), "got values of object"),
        (np.array([[True, False]]), "got values of bool"),
        (np.array([[1j]]), "got values of complex128"),
        (np.array([1, 2]), r"got shape \(2,\); pass a batch \[B, T\]"),
        (np.float32([[2**24 + 2, 1]]), "row 0, token 0 is 16777218.0"),
        (torch.tensor([[1, 2]], dtype=torch.bfloat16), "got bfloat16, which rounds token ids"),
        (torch.tensor([[1, 2]], dtype=torch.float16), "float16, which rounds token ids"),
        (torch.tensor([[1, 2**40]]), "row 0, token 1 is 1099511627776"),
        ({"a": [1]}, r"response_ids: got \{'a': \[1\]\} \(dict\); pass a tensor or array"),
        ("ab", r"response_ids: got 'ab' \(str\)"),
        (None, "response_ids: got None"),
        (7, r"response_ids: got 7 \(int\)"),
        ([], r"response_ids is empty\. Skip this call"),
        (np.zeros((0, 5), int), "response_ids is empty"),
    ],
)
def test_token_ids_are_whole_numbers_of_int32(recorder, ids, message):
    refused(recorder, message, response_ids=ids, seq_ids=None)


@pytest.mark.parametrize(
    "ids", [[[1.0, 2.0], [3.0]], [np.array([1, 2], np.uint16), torch.tensor([3])], np.array([[1, 2], [3]], object)]
)
def test_whole_numbers_in_another_form_are_token_ids(tmp_path, ids):
    with Recorder(tmp_path / "run") as recorder:
        recorder.add_sequences(step=1, seq_ids="ab", response_ids=ids)
    assert table(recorder, "sequences", "response_ids") == [([1, 2],), ([3],)]


PER_ROW = {
    "reward": ("high", "a number"),
    "advantage": ("high", "a number"),
    "temperature": ("hot", "a number"),
    "top_p": ([0.9, "0.9"], "a number"),
    "min_p": (True, "a number"),
    "repetition_penalty": (1j, "one value, or one for each|a number"),
    "top_k": (1.5, "an integer of at most 2147483647"),
    "max_tokens": (2**31, "an integer of at most 2147483647"),
    "policy_version": ("3", "an integer"),
    "finish_reason": ([1, 2], "text"),
}


@pytest.mark.parametrize("name", PER_ROW)
def test_a_value_of_another_kind_is_refused(recorder, name):
    value, needed = PER_ROW[name]
    refused(recorder, rf"^step 1, {name}.*: got .*; pass ({needed})", **{name: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward": [1.0, "2"]}, r"reward: row 1: got '2' \(str\); pass a number"),
        ({"reward": [1.0]}, "reward: got 1 values for 2 sequences"),
        (
            {"reward": np.ones((2, 1))},
            r"reward: got shape \(2, 1\); pass one value, or one for each of the 2 sequences",
        ),
        ({"reward": {"a": 1.0}}, r"reward: got \{'a': 1.0\} \(dict\)"),
        ({"reward": [[1.0], [2.0]]}, r"reward: row 0: got \[1.0\] \(list\)"),
        ({"reward": np.array(["a", "b"])}, "reward: row 0: got .*; pass a number"),
        ({"reward": 10**400}, "reward: got .*; pass a number"),
        ({"policy_version": [1, NAN]}, "policy_version: row 1: got nan"),
        ({"policy_version": 2**63}, "policy_version: got"),
        ({"advantage": ["a", "b"]}, "advantage: row 0: got 'a'"),
        ({"advantage": [[0.5], [1.0]]}, "sequence 'a': got 1 values of advantages for 2 response tokens"),
        ({"advantage": [[0.5, "x"], [1.0]]}, r"advantages: row 0 is \[0.5, 'x'\]"),
        (
            {"advantage": [[0.5, 1e39], [1.0]]},
            "advantages: row 0, token 1 is 1e\\+39; pass numbers within the range of float32",
        ),
        ({"rewards": [[1.0, 2.0]]}, r"rewards: got \[\[1.0, 2.0\]\] \(list\); pass a dict that maps"),
        ({"rewards": {1: [1.0, 2.0]}}, "rewards: got .*; pass a dict that maps"),
        ({"rewards": {"right": [1.0]}}, r"rewards\['right'\]: got 1 values for 2 sequences"),
        ({"rewards": {"right": ["a", 1.0]}}, r"rewards\['right'\]: row 0: got 'a' \(str\); pass a number"),
        ({"group_ids": ["g"]}, "group_ids: got 1 values for 2 sequences"),
        ({"group_ids": [0.5, 1.5]}, "group_ids: row 0 is 0.5 .*; pass a string or an integer, or None"),
        ({"group_ids": 7}, "group_ids: got 7"),
        ({"seq_ids": ["a", None]}, r"seq_ids: row 1 is None; pass a string or an integer"),
        ({"seq_ids": [1.5, 2.5]}, "seq_ids: row 0 is 1.5"),
        ({"seq_ids": {"a": 1, "b": 2}}, "seq_ids: got .*; pass a list of strings or integers"),
        ({"seq_ids": ["a"]}, "1 seq_ids for 2 responses"),
        ({"seq_ids": ["a", "a"]}, "sequence 'a' occurs twice"),
        ({"seq_ids": ["a", "\ud800"]}, "seq_ids: row 1: .* cannot be encoded as UTF-8"),
        ({"finish_reason": ["stop", "\ud800"]}, "finish_reason: row 1: .* cannot be encoded as UTF-8"),
        ({"prompt_ids": [[1]]}, "1 prompts for 2 responses"),
        ({"prompt_ids": [[1], [-1]]}, "prompt_ids: row 1, token 0 is -1"),
        ({"response_mask": [[1, 0]]}, "response_mask: got 1 rows for 2 sequences"),
        ({"response_mask": [[1], [1]]}, "sequence 'a': got 1 values of response_mask for 2 response tokens"),
        ({"response_mask": [[1, NAN], [1]]}, "response_mask: row 0, token 1 is nan; mask values must be 0 or 1"),
        ({"response_mask": [[1, -1], [1]]}, "response_mask: row 0, token 1 is -1; mask values must be 0 or 1"),
        ({"response_mask": [[1, 0.5], [1]]}, "response_mask: row 0, token 1 is 0.5; mask values must be 0 or 1"),
        ({"response_mask": [[1, None], [1]]}, "response_mask: row 0, token 1 is None"),
        ({"response_mask": [["1", "0"], ["1"]]}, "response_mask: row 0 is"),
        ({"response_attention_mask": MASK}, "response_ids were given as lists, which have no padding"),
        ({"prompt_attention_mask": MASK}, "prompt_ids were not given"),
    ],
)
def test_what_contradicts_a_batch_is_refused(recorder, changes, message):
    refused(recorder, message, **changes)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (np.zeros((2, 2)), "response_attention_mask: contains only 0, so no row has a token"),
        (np.ones((2, 3)), r"got shape \(2, 2\), but the attention mask has shape \(2, 3\)"),
        (np.ones(2), r"response_attention_mask: got shape \(2,\); pass \[B, T\]"),
        (np.array([[1, NAN], [1, 0]]), "response_attention_mask: row 0, token 1 is nan"),
        (np.array([[0, -INF], [0, 0]]), "response_attention_mask: row 0, token 1 is -inf"),
        (np.array([["1", "0"], ["1", "1"]]), "response_attention_mask: got values of str"),
        ([[1, 1], [1]], "response_attention_mask is "),
    ],
)
def test_a_mask_is_0_or_1_where_the_batch_has_cells(recorder, mask, message):
    refused(recorder, message, response_ids=PADDED, response_attention_mask=mask)


def test_a_row_without_a_token_is_recorded_with_a_warning(recorder):
    mask = np.array([[1, 1], [0, 0]])
    with pytest.warns(
        TimTraceWarning, match=r"row 1 contains only 0 \(1 of 2 rows do\), so it is recorded without tokens"
    ):
        recorder.add_sequences(step=1, response_ids=PADDED, response_attention_mask=mask)
    recorder.close()
    assert table(recorder, "sequences", "response_ids") == [([1, 2],), ([],)]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", [np.array, torch.tensor])
def test_padding_without_a_mask_is_pointed_at_once(recorder, side, kind):
    rows = [[5, 6, 7, 8, 9, 4], [5, 6, 0, 0, 0, 0], [5, 6, 7, 8, 0, 0]]
    ids = kind([row if side == "right" else row[::-1] for row in rows])
    with pytest.warns(TimTraceWarning) as told:
        recorder.add_sequences(step=1, response_ids=ids)
    recorder.add_sequences(step=2, response_ids=ids)  # in silence: a warning would be an error here
    (sentence,) = [str(warning.message) for warning in told]
    edge = "end" if side == "right" else "begin"
    assert sentence.startswith(
        f"step 1, response_ids: 2 of 3 rows {edge} with up to 4 repeats of token 0, which looks like"
    )
    assert "Pass that mask, or lists without padding" in sentence


@pytest.mark.parametrize(
    "ids",
    [
        [[5, 6, 7, 8], [5, 7, 7, 7], [1, 2, 3, 4]],  # a model repeats a token
        [[5, 6, 7, 8, 9]] * 8 + [[5, 7, 7, 7, 7]] * 2,  # and goes on in some rows
        [[0, 0, 0, 0], [0, 0, 0, 0]],  # nothing says where a row would begin
        [[5, 6, 7, 2], [5, 6, 8, 2]],  # both end in the end token
    ],
)
def test_what_does_not_look_like_padding_is_recorded_in_silence(recorder, ids):
    recorder.add_sequences(step=1, response_ids=np.array(ids))


def test_scores_shorter_than_a_batch_without_a_mask_name_the_mask(recorder):
    added = recorder.add_sequences(step=1, seq_ids="ab", response_ids=PADDED)
    with pytest.raises(InvalidRecord, match="response_ids were 2 wide without response_attention_mask, so every cell"):
        recorder.add_scores("train", added, logprobs=LOGPROBS)
    with pytest.raises(InvalidRecord, match=r"'b': got 1 values of logprobs .* without response_attention_mask"):
        recorder.add_scores("train", added, logprobs=np.full((2, 2), -1.0, np.float32), attention_mask=MASK)


SCORES = [
    ({"logprobs": None}, "logprobs: got None; pass a tensor or array"),
    ({"logprobs": {"a": [-1.0]}}, r"logprobs: got .* \(dict\)"),
    ({"logprobs": [["a", "b"], ["c"]]}, r"logprobs of pass 'train': row 0 is \['a', 'b'\]"),
    ({"logprobs": [None, [-1.0]]}, "logprobs of pass 'train': row 0 is None"),
    ({"logprobs": [[True, True], [True]]}, "row 0 is"),
    (
        {"logprobs": [torch.tensor([-1, -2]), torch.tensor([-3])]},
        "logprobs: got int64; pass log-probabilities as floats",
    ),
    ({"logprobs": np.array([[-1, -2], [-3, -4]])}, "logprobs: got int64"),
    ({"logprobs": [[-1e39, -2.0], [-3.0]]}, "row 0, token 0 is -1e\\+39; pass numbers within the range of float32"),
    ({"logprobs": np.array([-1.0, -2.0])}, r"logprobs of pass 'train': got shape \(2,\)"),
    ({"logprobs": LOGPROBS, "attention_mask": MASK}, "attention_mask: logprobs are lists, which have no padding"),
    ({"logprobs": LOGPROBS, "entropy": [["x", 1.0], [1.0]]}, "entropy of pass 'train': row 0"),
    ({"logprobs": LOGPROBS, "scored_mask": [[1, NAN], [1]]}, "scored_mask of pass 'train': row 0, token 1 is nan"),
    ({"logprobs": LOGPROBS, "policy_version": [1, 2, 3]}, "policy_version: got 3 values for 2 sequences"),
    ({"logprobs": LOGPROBS, "policy_version": "x"}, "policy_version: got 'x'"),
    ({"logprobs": LOGPROBS, "rows": [0.5, 1]}, r"rows: got \[0.5, 1\] \(list\); pass a list of row numbers"),
    ({"logprobs": LOGPROBS, "rows": [True, False]}, r"rows: .*for a mask, pass np.flatnonzero\(mask\)"),
    ({"logprobs": LOGPROBS, "rows": ["0", "1"]}, "rows: got"),
    ({"logprobs": LOGPROBS, "rows": [[0, 1]]}, "rows: got"),
    ({"logprobs": LOGPROBS, "rows": 1}, "rows: got"),
    ({"logprobs": LOGPROBS, "forward": {"ids": [1, 2]}}, r"forward: got .* \(dict\); pass a Forward"),
    ({"logprobs": LOGPROBS, "distribution": {"token_ids": 1}}, "distribution: got .*pass a TopK or Logits or Hidden"),
    ({"logprobs": LOGPROBS, "routing": [1]}, "routing: got .*pass a Routing"),
    ({"logprobs": LOGPROBS, "rows": [0, 0]}, "give each row number only once"),
]


@pytest.mark.parametrize(("scores", "message"), SCORES)
def test_scores_that_contradict_the_batch_are_refused_and_may_come_again(recorder, scores, message):
    added = recorder.add_sequences(step=1, seq_ids="ab", response_ids=RESPONSES)
    with pytest.raises(InvalidRecord, match=message) as caught:
        recorder.add_scores("train", added, **scores)
    assert "\n" not in str(caught.value)
    recorder.add_scores("train", added, logprobs=LOGPROBS)
    recorder.close()
    assert table(recorder, "scores", "seq_id", "logprobs") == [("a", LOGPROBS[0]), ("b", LOGPROBS[1])]


def forward(**changes):
    one = {name: np.zeros(2, np.int32) for name in ("ids", "places", "rows", "pad_left", "pad_right")}
    return Forward(**one | changes)


def test_a_forward_has_one_integer_a_row(recorder):
    added = recorder.add_sequences(step=1, response_ids=RESPONSES)
    with pytest.raises(
        InvalidRecord, match=r"forward: places has shape \(3,\) and dtype int64\. Pass one integer for each of the 2"
    ):
        recorder.add_scores("train", added, logprobs=LOGPROBS, forward=forward(places=np.zeros(3, int)))
    with pytest.raises(InvalidRecord, match="forward: ids has shape"):
        recorder.add_scores("train", added, logprobs=LOGPROBS, forward=forward(ids=np.zeros(2)))
    recorder.add_scores("train", added, logprobs=LOGPROBS, forward=forward())


def top_k(tokens):
    return TopK(
        token_ids=np.zeros((tokens, 1), np.int32),
        logprobs=np.zeros((tokens, 1), np.float32),
        tail_logprob=np.full(tokens, -INF, np.float32),
    )


def test_distributions_that_fit_no_scored_row_are_refused_at_the_call(recorder):
    added = recorder.add_sequences(step=1, response_ids=RESPONSES)
    with pytest.raises(InvalidRecord, match="captured_rows: row 1 is not among the scored rows"):
        recorder.add_scores("train", added, rows=[0], logprobs=LOGPROBS[:1], distribution=top_k(1), captured_rows=[1])
    with pytest.raises(InvalidRecord, match=r"distributions must have 2 rows, .*; got "):
        recorder.add_scores("train", added, logprobs=LOGPROBS, distribution=top_k(3), captured_rows=[0])
    recorder.add_scores("train", added, logprobs=LOGPROBS, distribution=top_k(2), captured_rows=[0])


@pytest.mark.parametrize("name", ["Train", "teacher", "", "replay/", "replay/a b", None, 3, "rollout "])
def test_a_pass_that_is_none_is_named_with_those_that_are(recorder, name):
    added = recorder.add_sequences(step=1, response_ids=[[1]])
    with pytest.raises(
        InvalidRecord, match=rf"pass {re.escape(repr(name))}.*Use one of rollout, train, current, reference"
    ):
        recorder.add_scores(name, added, logprobs=[[-1.0]])


def test_scores_go_to_the_recorder_that_gave_the_batch(tmp_path):
    with Recorder(tmp_path / "a") as one, Recorder(tmp_path / "b") as other:
        added = one.add_sequences(step=1, response_ids=[[1]])
        with pytest.raises(
            InvalidRecord, match=r"recorded in .*/a, but this recorder writes .*/b\. Add its scores with"
        ):
            other.add_scores("train", added, logprobs=[[-1.0]])
        with pytest.raises(
            InvalidRecord, match=r"batch: got \[1\] \(list\); pass the batch that add_sequences returned"
        ):
            one.add_scores("train", [1], logprobs=[[-1.0]])
        one.add_scores("train", added, logprobs=[[-1.0]])


def test_scores_may_come_through_another_recorder_of_the_trace(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    with Recorder(tmp_path / "run", join=True) as one, Recorder(tmp_path / "link" / "run", join=True) as other:
        other.add_scores("train", one.add_sequences(step=1, response_ids=[[1]]), logprobs=[[-1.0]])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"loss": {"policy": 1.0}},
            r"'loss': got \{'policy': 1.0\} \(dict\); give each value its own name",
        ),
        ({"loss": [1.0, 2.0]}, r"'loss': got \[1.0, 2.0\] \(list\); pass one number"),
        ({"loss": torch.ones(3)}, r"'loss': got values of shape \(3,\); pass one number, such as their mean"),
        ({"loss": np.ones((2, 2))}, r"'loss': got values of shape \(2, 2\)"),
        ({"loss": np.ones(0)}, r"'loss': got values of shape \(0,\)"),
        ({3: 1.0}, r"the name 3 \(int\) is not a string"),
        ({"loss": 10**400}, "too large for float64"),
        ({"loss": "\ud800"}, "cannot be encoded as UTF-8"),
        ([("loss", 1.0)], "pass a dict of values by name"),
        (None, "metrics of step 1: got None; pass a dict"),
    ],
)
def test_a_metric_is_one_value_with_a_name(recorder, values, message):
    with pytest.raises(InvalidRecord, match=message):
        recorder.add_metrics(1, values)
    recorder.add_metrics(0, {"loss": 0.5})  # what was refused has not moved the step on
    recorder.close()
    assert table(recorder, "metrics", "step", "name", "value", "text") == [(0, "loss", 0.5, None)]


def test_none_is_a_metric_that_was_not_recorded(recorder):
    recorder.add_metrics(1, {"kl": None, "flag": True, "one": np.ones((1, 1))})
    recorder.close()
    found = table(recorder, "metrics", "name", "value", "text")
    assert found == [("kl", None, None), ("flag", 1.0, None), ("one", 1.0, None)]


def test_what_a_framework_logs_is_kept_in_every_form(tmp_path):
    Recorder(tmp_path / "run", join=True).close()
    with Recorder.of_writer(TraceWriter(tmp_path / "run"), Capture()) as recorder:
        recorder.add_metrics(1, {"nested": {"a": 1}, "several": [1.0, 2.0], "large": 10**400, "odd": "\ud800"})
    recorder.add_metrics(2, {"late": 1.0})
    found = dict(table(recorder, "metrics", "name", "text"))
    assert found == {"nested": "{'a': 1}", "several": "[1.0, 2.0]", "large": str(10**400), "odd": "\\ud800"}


def test_a_closed_recorder_takes_nothing_in_silence(recorder):
    added = recorder.add_sequences(step=1, response_ids=[[1]])
    recorder.close()
    with pytest.raises(InvalidRecord, match=r"the recorder is closed\. Open a new one"):
        recorder.add_scores("train", added, logprobs=[[-1.0]])
    with pytest.raises(InvalidRecord, match="the recorder is closed"):
        recorder.add_sequences(step=2, response_ids=[[1]])
    with pytest.raises(InvalidRecord, match="the recorder is closed"):
        recorder.add_metrics(2, {"loss": 1.0})


def test_what_is_added_has_its_own_type(recorder):
    with pytest.raises(InvalidRecord, match=r"hyperparameters: got \[1\] \(list\); pass a dict"):
        recorder.add_hyperparameters([1])
    with pytest.raises(InvalidRecord, match=r"loss: got .*; pass a tim_trace.Loss"):
        recorder.add_loss({"kind": "ppo_clip"})
    with pytest.raises(InvalidRecord, match=r"version: got 1.5"):
        recorder.add_weights(1.5, {"w": torch.ones(1)})
    with pytest.raises(InvalidRecord, match="pass a state_dict"):
        recorder.add_weights(1, [torch.ones(1)])
    recorder.add_loss(Loss())


def test_rewards_in_every_form_come_back(tmp_path):
    forms = {
        "bools": [True, False],
        "none": [None, 1.0],
        "tensors": [torch.tensor(0.5), torch.tensor(-1)],
        "half": torch.tensor([0.5, 0.25], dtype=torch.bfloat16),
        "ints": np.array([1, 2]),
        "tuple": (1, 0.5),
        "flags": np.array([True, False]),
    }
    with Recorder(tmp_path / "run") as recorder:
        for name, value in forms.items():
            recorder.add_sequences(step=1, seq_ids=[f"{name}-0", f"{name}-1"], response_ids=RESPONSES, reward=value)
    assert dict(table(recorder, "sequences", "seq_id", "reward")) == {
        "bools-0": 1.0, "bools-1": 0.0, "none-0": None, "none-1": 1.0, "tensors-0": 0.5, "tensors-1": -1.0,
        "half-0": 0.5, "half-1": 0.25, "ints-0": 1.0, "ints-1": 2.0, "tuple-0": 1.0, "tuple-1": 0.5,
        "flags-0": 1.0, "flags-1": 0.0,
    }  # fmt: skip


def test_a_reward_function_that_gave_none_is_nan(recorder):
    recorder.add_sequences(step=1, response_ids=RESPONSES, rewards={"a": [None, 1.0], "b": None})
    recorder.close()
    rewards = table(recorder, "sequences", "rewards")
    assert str(rewards) == "[([('a', nan), ('b', nan)],), ([('a', 1.0), ('b', nan)],)]"


def test_names_of_tensors_are_their_digits(recorder):
    recorder.add_sequences(step=1, seq_ids=torch.tensor([7, 8]), group_ids=torch.tensor([0, 0]), response_ids=RESPONSES)
    recorder.close()
    assert table(recorder, "sequences", "seq_id", "group_id") == [("7", "0"), ("8", "0")]


def test_advantages_of_tensors_are_one_a_sequence(recorder):
    recorder.add_sequences(step=1, response_ids=RESPONSES, advantage=[torch.tensor(0.5), torch.tensor(-1.0)])
    recorder.close()
    assert table(recorder, "sequences", "advantage", "advantages") == [(0.5, None), (-1.0, None)]


def test_a_refused_batch_does_not_move_the_step_on_and_keeps_no_name(recorder):
    recorder.add_sequences(step=1, seq_ids=["a"], response_ids=[[1]])
    with pytest.raises(InvalidRecord):
        recorder.add_sequences(step=9, seq_ids=["z"], response_ids=[[1]], reward="x")
    with pytest.raises(InvalidRecord, match="'a' occurs twice"):
        recorder.add_sequences(step=1, seq_ids=["b", "a"], response_ids=RESPONSES)
    recorder.add_sequences(step=1, seq_ids=["b", "c"], response_ids=RESPONSES)
    with pytest.raises(InvalidRecord, match="'c' occurs twice"):
        recorder.add_sequences(step=1, seq_ids=["c"], response_ids=[[1]])
    recorder.add_sequences(step=2, seq_ids=["z"], response_ids=[[1]])


@pytest.mark.usefixtures("on_device")
def test_a_device_tensor_that_is_wrong_is_told_at_the_next_call_which_then_works(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        bad = recorder.add_sequences(step=1, seq_ids="ab", response_ids=torch.tensor([[1, 2], [-3, 4]]))
        recorder.writer._worker.drain()
        with pytest.raises(
            InvalidRecord, match=r"row 1, token 0 is -3.*\(from an earlier call; this call recorded nothing"
        ):
            recorder.add_metrics(1, {"loss": 0.5})
        recorder.add_metrics(1, {"loss": 0.5})
        with pytest.raises(
            InvalidRecord, match=r"this batch was rejected \(.*row 1, token 0 is -3.*Fix the add_sequences call"
        ):
            recorder.add_scores("train", bad, logprobs=LOGPROBS)
        good = recorder.add_sequences(step=1, seq_ids="ab", response_ids=torch.tensor([[1, 2], [3, 4]]))
        recorder.add_scores("train", good, logprobs=torch.full((2, 2), -1.0))
    assert recorder.writer.state.state == "closed"
    assert table(recorder, "sequences", "seq_id", "response_ids") == [("a", [1, 2]), ("b", [3, 4])]
    assert len(table(recorder, "scores", "seq_id")) == 2
    assert len(table(recorder, "metrics", "name")) == 1


@pytest.mark.usefixtures("on_device")
def test_scores_of_a_batch_that_is_refused_meanwhile_name_the_reason(tmp_path):
    recorder = Recorder(tmp_path / "run")
    bad = recorder.add_sequences(step=1, seq_ids="ab", response_ids=torch.tensor([[1, 2], [-3, 4]]))
    told = []
    try:
        recorder.add_scores("train", bad, logprobs=torch.full((2, 2), -1.0))
    except InvalidRecord as error:
        told.append(str(error))
    try:
        recorder.close()
    except InvalidRecord as error:
        told.append(str(error))
    assert told
    assert all("row 1, token 0 is -3" in sentence for sentence in told)
    assert recorder.writer.state.state == "closed"


@pytest.mark.usefixtures("on_device")
def test_device_scores_that_are_wrong_may_come_again(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        added = recorder.add_sequences(step=1, seq_ids="ab", response_ids=torch.tensor([[1, 2], [3, 4]]))
        recorder.add_scores("train", added, logprobs=torch.full((2, 2), 0.5))
        recorder.writer._worker.drain()
        with pytest.raises(InvalidRecord, match="A log-probability is at most 0"):
            recorder.add_scores("train", added, logprobs=torch.full((2, 2), -1.0))
        recorder.add_scores("train", added, logprobs=torch.full((2, 2), -1.0), policy_version=torch.tensor(3))
    assert table(recorder, "scores", "logprobs", "policy_version") == [([-1.0, -1.0], 3)] * 2


@pytest.mark.usefixtures("on_device")
def test_settings_may_lie_on_a_device(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        recorder.add_sequences(
            step=torch.tensor(1), seq_ids=torch.arange(2), group_ids=torch.tensor([5, 5]), response_ids=RESPONSES,
            temperature=torch.tensor(0.5), top_k=torch.tensor([3, 4]), reward=[torch.tensor(1.0), torch.tensor(2.0)],
        )  # fmt: skip
    columns = ("step", "seq_id", "group_id", "temperature", "top_k", "reward")
    assert table(recorder, "sequences", *columns) == [(1, "0", "5", 0.5, 3, 1.0), (1, "1", "5", 0.5, 4, 2.0)]


@pytest.mark.usefixtures("on_device")
def test_wrong_device_values_at_the_end_are_told_by_close(tmp_path):
    recorder = Recorder(tmp_path / "run")
    recorder.add_sequences(step=1, response_ids=torch.tensor([[1, -2]]))
    with pytest.raises(InvalidRecord, match="row 0, token 1 is -2"):
        recorder.close()
    assert not (tmp_path / "run" / "sequences").exists()
