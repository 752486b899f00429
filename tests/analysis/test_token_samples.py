"""Chosen sequences: what they hold, which they are, and that a model's output cannot hide or reorder anything."""

import shutil
import subprocess
import sys
from collections import Counter

import fsspec
import numpy as np
import pytest
from tim_trace.analysis.token_samples import choice
from tim_trace.analysis.token_samples.choice import PROMPT_TOKENS, Wanted
from tim_trace.analysis.token_samples.token_samples import FINITE, INFINITE, NAN, NOT_RECORDED, read_token_samples
from tim_trace.analysis.token_samples.token_text import read_token_text
from tim_trace.analysis.trace.source import open_source
from tim_trace.analysis.trace.sums import ensure
from tim_trace.analysis.views import open_database
from tim_trace.schemas.loss import Loss
from tim_trace.tracer.recorder import Recorder
from tokenizers import Tokenizer, models

HOSTILE = [
    "<script>alert(1)</script>", "</script>", "\u202e", "\u200b", "\x00", "&lt;", "\"'`", "\U0001f469\u200d\U0001f680",
    "\u0301", "\ufeff", "]]>", "<!--", "\u2066", "\ue000", "\x1b[31m", "plain",
]  # fmt: skip


def record(path, *, num_steps=3, rows=6, length=5, passes=("rollout", "train"), loss=None, by_token=False, seed=0):
    """Random steps, in which the token 2 of the last row of step s is s nats off."""
    draw = np.random.default_rng(seed)
    with Recorder(path) as recorder:
        if loss is not None:
            recorder.add_loss(loss)
        for step in range(1, num_steps + 1):
            rollout = [-draw.exponential(0.5, length).astype(np.float32) for _ in range(rows)]
            train = [np.minimum(r + draw.normal(0, 0.05, length), 0).astype(np.float32) for r in rollout]
            train[-1][2] = rollout[-1][2] - step
            batch = recorder.add_sequences(
                step=step,
                seq_ids=[f"{step}-{row}" for row in range(rows)],
                prompt_ids=[[7, 8]] * rows,
                response_ids=draw.integers(0, len(HOSTILE), (rows, length)),
                response_mask=draw.random((rows, length)) > 0.2 if loss else None,
                advantage=draw.normal(size=(rows, length) if by_token else rows),
                reward=draw.random(rows),
                policy_version=step - 1,
            )
            sides = {"rollout": rollout, "train": train}
            for name in passes:
                near = [np.minimum(t + draw.normal(0, 0.2, length), 0).astype(np.float32) for t in train]
                recorder.add_scores(name, batch, logprobs=sides.get(name, near))
    return open_database(path)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Where three steps of six sequences lie."""
    path = tmp_path_factory.mktemp("plain") / "run"
    record(path)
    return path


def one(path, **columns):
    """A sequence of step 1 with everything that columns name."""
    scores = {name: columns.pop(name) for name in ("rollout", "train", "current") if name in columns}
    more = columns.pop("scores", {})
    with Recorder(path) as recorder:
        batch = recorder.add_sequences(step=1, seq_ids=["one"], **columns)
        for name, logprobs in scores.items():
            recorder.add_scores(name, batch, logprobs=[logprobs], **more.get(name, {}))
    (found,) = read_token_samples(open_database(path)).sequences
    return found


def names(excerpts, why):
    return [each.seq_id for each in excerpts.sequences if why in each.why]


def test_values_are_those_that_were_recorded(tmp_path):
    found = one(
        tmp_path / "run", prompt_ids=[[3, 4]], response_ids=[[5, 6]], group_ids=["g"], reward=[0.5], advantage=[-2.0],
        policy_version=9, finish_reason="stop", rollout=[-0.5, -1.0], train=[-0.25, -3.0], current=[-0.1, -2.0],
        scores={"train": {"entropy": [[0.5, 0.75]]}},
    )  # fmt: skip
    told = (found.step, found.seq_id, found.group_id, found.policy_version, found.finish_reason)
    assert told == (1, "one", "g", 9, "stop")
    assert (found.reward, found.advantage, found.advantages) == (0.5, -2.0, None)
    assert (found.sum_d, found.mean_abs_d, found.max_abs_d) == (-1.75, 1.125, 2.0)
    assert (found.num_tokens, found.first_token, found.num_prompt_tokens) == (2, 0, 2)
    assert {name: values.tolist() for name, values in found.logprobs.items()} == {
        "train": [-0.25, -3.0],
        "rollout": [-0.5, -1.0],
        "current": [np.float32(-0.1), -2.0],
    }
    assert found.entropy.tolist() == [0.5, 0.75]
    assert found.prompt == ((3, "\u27e83\u27e9"), (4, "\u27e84\u27e9"))
    assert (found.ids.tolist(), found.texts) == ([5, 6], ["\u27e85\u27e9", "\u27e86\u27e9"])


def test_placeholders_are_told_from_numbers_and_are_in_no_sum(tmp_path):
    found = one(
        tmp_path / "run", response_ids=[[1, 2, 3, 4, 5]], response_mask=[[1, 1, 1, 1, 0]],
        rollout=[-1.0, -1.0, -1.0, -np.inf, -1.0], train=[-0.5, -1.0, np.nan, -1.0, -9.0],
        scores={"rollout": {"scored_mask": [[1, 0, 1, 1, 1]]}},
    )  # fmt: skip
    assert found.state["rollout"].tolist() == [FINITE, NOT_RECORDED, FINITE, INFINITE, FINITE]
    assert found.state["train"].tolist() == [FINITE, FINITE, NAN, FINITE, FINITE]
    assert np.isnan(found.logprobs["rollout"][1])
    assert found.logprobs["rollout"][3] == -np.inf
    assert found.mask.tolist() == [True, True, True, True, False]
    assert (found.sum_d, found.mean_abs_d, found.max_abs_d) == (0.5, 0.5, 0.5)


def test_sums_are_those_of_sql(tmp_path):
    record(tmp_path / "run", loss=Loss())
    database = open_database(tmp_path / "run")
    query = "SELECT seq_id, sum_d, sum_abs_d / num_tokens, max_abs_d FROM pair_sums('train', 'rollout')"
    known = {seq_id: values for seq_id, *values in database.connection.execute(query).fetchall()}
    found = read_token_samples(database, wanted=Wanted(random=99)).sequences
    assert len(found) == len(known) == 18
    for each in found:
        assert [each.sum_d, each.mean_abs_d, each.max_abs_d] == pytest.approx(known[each.seq_id], rel=1e-12)


def test_each_sort_is_what_its_name_says(tmp_path):
    record(tmp_path / "run", num_steps=5)
    database = open_database(tmp_path / "run")
    query = "SELECT seq_id, sum_abs_d / num_tokens FROM pair_sums('train', 'rollout')"
    mean = dict(database.connection.execute(query).fetchall())
    found = read_token_samples(database, wanted=Wanted(worst=2, typical=3, random=4))
    middle = np.median(list(mean.values()))
    assert names(found, "worst") == ["5-5", "4-5"]
    assert names(found, "typical") == sorted(mean, key=lambda name: abs(mean[name] - middle))[:3]
    assert sorted(names(found, "worst of step")) == ["1-5", "2-5", "3-5", "4-5", "5-5"]
    assert len(names(found, "random")) == 4
    for said in ("5 steps, 30 sequences, 150 response tokens", "2 worst", "3 typical", "4 random", "5 worst of step"):
        assert said in found.choice


def test_the_choice_is_the_same_every_time_and_from_kept_sums(plain):
    database = open_database(plain)
    first, again = (
        read_token_samples(database, wanted=Wanted(random=3)),
        read_token_samples(open_database(plain), wanted=Wanted(random=3)),
    )
    ensure(database, ("train", "rollout"))
    assert database.sums.covers(("train", "rollout"))
    for other in (again, read_token_samples(database, wanted=Wanted(random=3))):
        assert [(each.seq_id, each.why) for each in other.sequences] == [
            (each.seq_id, each.why) for each in first.sequences
        ]
        assert other.choice == first.choice


def test_worst_of_step_keeps_to_some_steps_notable_ones_first(tmp_path):
    found = read_token_samples(
        record(tmp_path / "run", num_steps=9), notable=[8], wanted=Wanted(worst=0, typical=0, random=0, max_steps=3)
    )
    assert names(found, "worst of step") == ["8-5", "1-5", "9-5"]


def test_a_long_run_is_looked_at_in_part_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(choice, "LOOKED_TOKENS", 120)  # 4 of 10 steps
    found = read_token_samples(record(tmp_path / "run", num_steps=10), notable=[7, 77], wanted=Wanted(worst=1))
    assert {each.step for each in found.sequences} == {1, 5, 7, 10}
    assert "searched 4 steps with 24 sequences and 120 response tokens" in found.choice
    assert "(1 notable, 3 evenly spaced)" in found.choice


def test_kept_sums_find_the_worst_of_the_whole_run(tmp_path, monkeypatch):
    monkeypatch.setattr(choice, "LOOKED_TOKENS", 90)
    record(tmp_path / "run", num_steps=20)
    database = open_database(tmp_path / "run")
    ensure(database, ("train", "rollout"))
    found = read_token_samples(database, wanted=Wanted(worst=2))
    assert names(found, "worst") == ["20-5", "19-5"]
    assert "2 worst: largest single-token |d| in all steps" in found.choice
    assert "2 with the largest |d|" in found.choice


def test_a_long_response_is_shown_around_its_worst_token(tmp_path):
    draw = np.random.default_rng(0)
    rollout = -draw.exponential(1.0, 100).astype(np.float32)
    train = rollout.copy()
    train[70] -= 4
    with Recorder(tmp_path / "run") as recorder:
        batch = recorder.add_sequences(step=1, response_ids=[list(range(100))], prompt_ids=[list(range(900))])
        recorder.add_scores("rollout", batch, logprobs=[rollout])
        recorder.add_scores("train", batch, logprobs=[train])
    (found,) = read_token_samples(open_database(tmp_path / "run"), wanted=Wanted(max_sequence_tokens=10)).sequences
    assert (found.num_tokens, found.first_token, found.ids.tolist()) == (100, 65, list(range(65, 75)))
    np.testing.assert_array_equal(found.logprobs["train"], train[65:75])
    assert len(found.texts) == len(found.mask) == len(found.state["train"]) == 10
    assert found.max_abs_d == pytest.approx(4)
    assert [token for token, _ in found.prompt] == list(range(900 - PROMPT_TOKENS, 900))
    assert found.num_prompt_tokens == 900


def test_whole_sequences_are_left_out_the_worst_last(plain):
    found = read_token_samples(open_database(plain), wanted=Wanted(worst=2, typical=2, random=9, max_tokens=30))
    assert sum(len(each.ids) + len(each.prompt) for each in found.sequences) == 28
    assert Counter(each.why[0] for each in found.sequences) == {"worst": 2, "typical": 2}
    assert "Omitted to stay within 30 shown tokens" in found.choice


def test_one_pass_is_shown_without_d(tmp_path):
    found = read_token_samples(record(tmp_path / "run", passes=("train",)), wanted=Wanted(random=4))
    assert found.passes == ("train",)
    assert [(each.why, each.max_abs_d, each.sum_d) for each in found.sequences] == [(("random",), None, None)] * 4
    assert "Pass 'rollout' has no logprobs" in found.choice


def test_an_empty_trace_has_no_sequences(tmp_path):
    with Recorder(tmp_path / "run"):
        pass
    found = read_token_samples(open_database(tmp_path / "run"))
    assert (found.sequences, found.passes) == ((), ())
    assert "no sequences" in found.choice


def add_tokenizer(path, tokenizer):
    (path / "tokenizer").mkdir()
    tokenizer.save(str(path / "tokenizer" / "tokenizer.json"))


def hostile_tokenizer():
    return Tokenizer(models.WordLevel({word: number for number, word in enumerate(HOSTILE)}, unk_token="plain"))


def test_hostile_tokens_hide_and_reorder_nothing(tmp_path):
    database = record(tmp_path / "run", rows=30)
    add_tokenizer(tmp_path / "run", hostile_tokenizer())
    found = read_token_samples(database, wanted=Wanted(random=99))
    shown = {token: text for each in found.sequences for token, text in zip(each.ids, each.texts, strict=True)}
    assert {HOSTILE[token]: text.removeprefix("\u00b7") for token, text in shown.items()} == {
        "<script>alert(1)</script>": "<script>alert(1)</script>", "</script>": "</script>", "&lt;": "&lt;",
        "\"'`": "\"'`", "]]>": "]]>", "<!--": "<!--", "plain": "plain",
        "\u202e": "\u27e8U+202E\u27e9", "\u200b": "\u27e8U+200B\u27e9", "\x00": "\u27e8U+0000\u27e9",
        "\U0001f469\u200d\U0001f680": "\U0001f469\u27e8U+200D\u27e9\U0001f680", "\u0301": "\u27e8U+0301\u27e9",
        "\ufeff": "\u27e8U+FEFF\u27e9", "\u2066": "\u27e8U+2066\u27e9", "\ue000": "\u27e8U+E000\u27e9",
        "\x1b[31m": "\u27e8U+001B\u27e9[31m",
    }  # fmt: skip
    assert found.text_from == "Text decoded with the trace's tokenizer: 16 tokens."


def test_a_token_that_the_tokenizer_lacks_is_shown_by_its_id(plain, tmp_path):
    shutil.copytree(plain, tmp_path / "run")
    add_tokenizer(tmp_path / "run", hostile_tokenizer())
    text = read_token_text(open_source(str(tmp_path / "run")))
    assert text.of([15, 16, -100]) == ["\u00b7plain", "\u27e816\u27e9", "\u27e8-100\u27e9"]


def test_a_tokenizer_that_cannot_be_read_leaves_ids(plain, tmp_path):
    shutil.copytree(plain, tmp_path / "run")
    (tmp_path / "run" / "tokenizer").mkdir()
    assert "has no tokenizer/tokenizer.json" in read_token_text(open_source(str(tmp_path / "run"))).told
    (tmp_path / "run" / "tokenizer" / "tokenizer.json").write_text("{")
    text = read_token_text(open_source(str(tmp_path / "run")))
    assert "is unreadable" in text.told
    assert text.of([5]) == ["\u27e85\u27e9"]


def test_the_tokenizer_of_a_remote_trace_is_read(plain, tmp_path):
    shutil.copytree(plain, tmp_path / "run")
    add_tokenizer(tmp_path / "run", hostile_tokenizer())
    fsspec.filesystem("memory").put(str(tmp_path / "run"), "/excerpts/run", recursive=True)
    assert read_token_text(open_source("memory://excerpts/run")).of([15]) == ["\u00b7plain"]


def test_heavy_libraries_wait_until_they_are_needed():
    program = "import sys, tim_trace.analysis.token_samples.token_samples; print({'tokenizers', 'transformers', 'torch'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
