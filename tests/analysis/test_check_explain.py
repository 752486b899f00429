"""What check says of faults of one kind each: the cause, or else the place of the tokens that nobody explains."""

import re
import shlex
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
from bigrams import (
    BOTH_FP32,
    FP32,
    VLLM_BF16,
    VOCABULARY,
    Recording,
    in_bfloat16,
    in_float32,
    log_softmax,
    moved,
    sample,
    table,
    top_p,
)
from builders import ROOT, in_process, tim_trace
from rich_trace import make_rich_trace
from tim_trace.analysis.check.check import check, gather
from tim_trace.analysis.check.commands import by_column, weights_replay
from tim_trace.analysis.check.faults import evidence_text
from tim_trace.analysis.check.faults.kinds import MAX_ROUNDING
from tim_trace.analysis.check.features import REASONS, features, model
from tim_trace.analysis.check.text import checked_text
from tim_trace.analysis.check.where import sequence_columns
from tim_trace.analysis.queries.catalogue import catalogue
from tim_trace.analysis.views import open_database
from tim_trace.tracer.recorder import Recorder
from tim_trace.tracer.rows import Forward

END = VOCABULARY - 1
"""Token id of the end of a response."""


def changed(step, number, change):
    """Values of an engine that rounds, of which `change(row, values, draw)` sets some."""
    draw = np.random.default_rng(number)
    values = [np.array(row) for row in in_float32(step, number)]
    for row, own in enumerate(values):
        change(row, own, draw)
    return values


def planted(change, **options):
    return Recording(rollout=lambda step, number: changed(step, number, change), **options)


def first_of(run, path):
    found = check(run.write(path))
    assert not found.is_valid
    return found.findings[0]


def codes(run, path):
    return [finding.code for finding in check(run.write(path)).findings]


# --- Tokens at one place ----------------------------------------------------------------------------------------------------


def last_tokens(row, values, draw):
    values[-1] -= draw.uniform(1, 3)


def first_tokens(row, values, draw):
    values[0] -= draw.uniform(1, 3)


def one_position(row, values, draw):
    values[7] = np.minimum(values[7] + draw.choice([-1, 1]) * draw.uniform(0.5, 1), -1e-3)


@pytest.mark.parametrize(
    ("change", "features"),
    [
        (first_tokens, {"first_token", "position"}),
        (last_tokens, {"last_token", "from_end"}),
        (one_position, {"position"}),
    ],
)
def test_tokens_at_one_place_are_found_with_their_place(tmp_path, change, features):
    first = first_of(planted(change, contracts=BOTH_FP32), tmp_path / "trace")
    assert first.code == "one_place"
    assert first.numbers["feature"] in features
    assert first.numbers["num_tokens"] == 4 * 32
    assert "and the rest by" in evidence_text(first)


def test_tokens_at_the_boundary_of_chunks_are_found(tmp_path):
    def rollout(step, number):
        draw = np.random.default_rng(number)
        values = [np.array(row) for row in in_float32(step, number)]
        for prompt, own in zip(step.prompts, values, strict=True):
            chunk = -(-(len(prompt) + len(own)) // 4)
            place = np.arange(len(own)) + len(prompt)
            own[place % chunk == 0] -= draw.uniform(1, 3)
        return values

    first = first_of(Recording(rollout=rollout, contracts=BOTH_FP32), tmp_path / "trace")
    assert (first.code, first.numbers["feature"]) == ("chunk_boundary", "first_of_chunk_4")
    assert "first token of a chunk" in evidence_text(first)


def test_the_end_token_is_found_by_its_id_or_its_place(tmp_path):
    def ended(step):
        for response in step.responses:
            response[response == END] = END - 1
            response[-1] = END
        return step

    def rollout(step, number):
        values = [np.array(row) for row in in_float32(ended(step), number)]
        for own in values:
            own[-1] -= 2.0
        return values

    with Recorder(tmp_path / "trace") as recorder:
        for number in range(1, 5):
            step = ended(sample(table(), number))
            batch = recorder.add_sequences(
                step=number,
                prompt_ids=[p.tolist() for p in step.prompts],
                response_ids=[r.tolist() for r in step.responses],
            )
            recorder.add_scores("rollout", batch, logprobs=rollout(step, number))
            recorder.add_scores("train", batch, logprobs=step.scored())
    found = check(tmp_path / "trace")
    assert not found.is_valid
    assert found.findings[0].code == "one_place"
    assert found.findings[0].numbers["feature"] in ("last_token", "from_end", "token_id")


# --- Tokens that nothing explains -------------------------------------------------------------------------------------------


def test_values_of_other_tokens_that_are_scattered_are_uncorrelated(tmp_path):
    def rollout(step, number):
        draw = np.random.default_rng(number)
        values = [np.array(row) for row in in_float32(step, number)]
        flat = np.concatenate(values)
        for own in values:
            wrong = draw.random(len(own)) < 0.04
            own[wrong] = draw.choice(flat, int(wrong.sum()))
        return values

    first = first_of(Recording(rollout=rollout, contracts=BOTH_FP32), tmp_path / "trace")
    assert (first.code, first.signal) == ("unrelated", "scattered")
    assert abs(first.numbers["correlation"]) < 0.3
    assert 0.02 < first.share < 0.06


def test_one_wrong_token_of_117_is_not_valid_and_has_its_position(tmp_path):
    draw = np.random.default_rng(0)
    train = [(-draw.exponential(1.5, 39) - 0.05).astype(np.float32) for _ in range(3)]
    rollout = [(row + draw.normal(0, 1e-3, 39)).astype(np.float32) for row in train]
    rollout[1][17] -= 8.0
    with Recorder(tmp_path / "trace") as recorder:
        batch = recorder.add_sequences(
            step=1, seq_ids=["x", "y", "z"], response_ids=draw.integers(0, 500, (3, 39)), prompt_ids=[[1]] * 3
        )
        recorder.add_scores("rollout", batch, logprobs=rollout)
        recorder.add_scores("train", batch, logprobs=train)
    found = check(tmp_path / "trace")
    (first,) = found.findings
    assert (found.is_valid, first.code) == (False, "unexplained")
    assert [first.numbers[name] for name in ("num_tokens", "of_tokens", "position", "seq_id")] == [1, 117, 17, "y"]
    assert "position 17 of sequence 'y' at step 1" in evidence_text(first)
    assert checked_text(found).startswith("NOT VALID, the engine or the trainer is wrong")


# --- The computation --------------------------------------------------------------------------------------------------------


def noisy(step, number):
    """As with dropout: other logits at each token."""
    draw = np.random.default_rng(number)
    scores = []
    for prompt, response in zip(step.prompts, step.responses, strict=True):
        before = np.concatenate([prompt[-1:], response[:-1]]).astype(int)
        rows = step.logits[before] + draw.normal(0, 0.5, (len(response), VOCABULARY))
        scores.append(log_softmax(rows)[np.arange(len(response)), response].astype(np.float32))
    return scores


def test_a_side_with_dropout_does_not_repeat_itself(tmp_path):
    first = first_of(Recording(rollout=in_float32, train=noisy, options={"in_group": 16}), tmp_path / "trace")
    assert (first.code, first.numbers["side"], first.broken) == ("not_repeatable", "train", "trainer")


def recorded_forwards(path, rollout, forward):
    with Recorder(path) as recorder:
        for number in range(1, 5):
            step = sample(table(), 100 + number)
            batch = recorder.add_sequences(
                step=number, prompt_ids=[p.tolist() for p in step.prompts], group_ids=step.groups,
                response_ids=[r.tolist() for r in step.responses],
            )  # fmt: skip
            recorder.add_scores("rollout", batch, logprobs=in_float32(step, number))
            recorder.add_scores(
                "train", batch, logprobs=rollout(step, number), forward=forward(len(step.prompts), number)
            )
    return check(path)


def forwards(num, number, pad_left):
    rows = np.arange(num)
    return Forward(
        ids=number * 100 + rows // 4, places=(rows % 4).astype(np.int32), rows=np.full(num, 4, np.int32),
        pad_left=pad_left.astype(np.int32), pad_right=np.zeros(num, np.int32),
    )  # fmt: skip


def off_where(chosen, *, is_exact=False):
    """Values of other logits in the rows that `chosen(num, number)` marks; the others round, or have the engine's bits."""

    def rollout(step, number):
        other = step.scored(moved(step.logits, 7 + number, 0.5))
        right = in_float32(step, number) if is_exact else step.scored()
        rows = zip(right, other, chosen(len(step.prompts), number), strict=True)
        return [b if is_off else a for a, b, is_off in rows]

    return rollout


def not_first(num, number):
    return np.arange(num) % 4 > 0


def padding(num, number):
    return np.random.default_rng(number).integers(0, 2, num) * 5


def test_packed_rows_that_see_each_other_are_found_by_their_recorded_place(tmp_path):
    found = recorded_forwards(
        tmp_path / "trace", off_where(not_first), lambda num, number: forwards(num, number, np.zeros(num))
    )
    first = found.findings[0]
    assert (found.is_valid, first.code, first.numbers["cause"]) == (False, "row_context", "packing")
    assert first.numbers["feature"] in ("forward_row_a", "not_first_of_4")


def test_rows_that_are_exact_where_they_are_first_of_a_pack_are_no_copies(tmp_path):
    found = recorded_forwards(
        tmp_path / "trace",
        off_where(not_first, is_exact=True),
        lambda num, number: forwards(num, number, np.zeros(num)),
    )
    assert found.findings[0].code == "row_context"


def test_rows_without_padding_have_the_longest_prompts(tmp_path):
    found = recorded_forwards(
        tmp_path / "trace",
        off_where(lambda num, number: padding(num, number) == 0),
        lambda num, number: forwards(num, number, padding(num, number)),
    )
    first = found.findings[0]
    assert (first.code, first.numbers["cause"], first.numbers["kind"]) == ("row_context", "cut", "before")


def test_padding_that_is_attended_to_is_found_by_its_record(tmp_path):
    found = recorded_forwards(
        tmp_path / "trace",
        off_where(lambda num, number: padding(num, number) > 0),
        lambda num, number: forwards(num, number, padding(num, number)),
    )
    first = found.findings[0]
    assert (found.is_valid, first.code) == (False, "row_context")
    assert (first.numbers["cause"], first.numbers["feature"]) == ("padding", "pad_left_a")
    assert "padding=left" in first.next


def test_packed_rows_are_found_without_a_record(tmp_path):
    first = first_of(Recording(rollout=in_float32, train=off_where(not_first)), tmp_path / "trace")
    assert (first.code, first.numbers["cause"], first.numbers["feature"]) == (
        "row_context",
        "packing",
        "not_first_of_4",
    )


# --- Settings of sampling ---------------------------------------------------------------------------------------------------


def penalised(step, penalty):
    """Logprobs whose logits are divided, or multiplied, where the token occurred before in prompt or response."""
    out = []
    for prompt, response in zip(step.prompts, step.responses, strict=True):
        before, values = list(prompt), []
        for token in response:
            row = step.logits[int(before[-1])].astype(float)
            seen = np.unique(np.asarray(before, int))
            row[seen] = np.where(row[seen] > 0, row[seen] / penalty, row[seen] * penalty)
            values.append(log_softmax(row)[int(token)])
            before.append(int(token))
        out.append(np.array(values, np.float32))
    return out


@pytest.mark.parametrize(("recorded", "penalty"), [(1.3, 1.3), (None, 1.3), (None, 1.1)])
def test_a_penalty_for_repetition_is_found_recorded_or_not(tmp_path, recorded, penalty):
    run = Recording(
        rollout=lambda step, number: penalised(step, penalty),
        sequences=lambda step, number: {"repetition_penalty": recorded} if recorded else {},
        contracts=BOTH_FP32,
    )
    first = first_of(run, tmp_path / "trace")
    assert (first.code, first.signal, first.numbers["side"]) == ("penalty", "repeated", "rollout")
    assert ("recorded: repetition_penalty 1.3" in evidence_text(first)) == (recorded is not None)


def sampled_with_penalty(logits, seed, penalty):
    """A step whose responses are drawn with the penalty, so that repeated tokens are rare."""
    step, draw = sample(logits, seed, longest=40), np.random.default_rng(seed)
    for row, (prompt, response) in enumerate(zip(step.prompts, step.responses, strict=True)):
        before = [int(token) for token in prompt]
        for _ in response:
            odds = logits[before[-1]].astype(float)
            seen = np.unique(before)
            odds[seen] = np.where(odds[seen] > 0, odds[seen] / penalty, odds[seen] * penalty)
            before.append(int(draw.choice(len(odds), p=np.exp(log_softmax(odds)))))
        step.responses[row] = np.array(before[len(prompt) :])
    return step


def test_a_penalty_that_leaves_few_repeated_tokens_is_found_by_the_sign_of_d(tmp_path):
    with Recorder(tmp_path / "trace") as recorder:
        for name, contract in BOTH_FP32.items():
            recorder.add_contract(name, contract)
        for number in range(1, 9):
            step = sampled_with_penalty(table(sharpness=12.0), 100 + number, 2.0)
            batch = recorder.add_sequences(
                step=number, prompt_ids=[row.tolist() for row in step.prompts], response_ids=[row.tolist() for row in step.responses]
            )  # fmt: skip
            recorder.add_scores("rollout", batch, logprobs=penalised(step, 2.0))
            recorder.add_scores("train", batch, logprobs=step.scored())
    first = check(tmp_path / "trace").findings[0]
    assert (first.code, first.signal, first.numbers["side"]) == ("penalty", "lowers_repeated", "rollout")
    assert "lowers the logprobs of tokens that occurred earlier in the row" in evidence_text(first)


@pytest.mark.parametrize("sharpness", [2.5, 8.0])
def test_a_temperature_is_found_beside_a_filter(tmp_path, sharpness):
    def process(rows):
        return top_p(rows / 0.7, 0.7)

    run = Recording(
        rollout=lambda step, number: step.scored(process=process), process=process, contracts=BOTH_FP32,
        weights=lambda number: table(sharpness=sharpness), options={"in_group": 16, "longest": 30},
        sequences=lambda step, number: {"temperature": 0.7, "top_p": 0.7},
    )  # fmt: skip
    first = first_of(run, tmp_path / "trace")
    assert (first.code, first.signal) == ("temperature", "in_contexts")
    assert first.numbers["temperature"] == pytest.approx(0.7, rel=0.05)
    assert "recorded: sampling 0.7; top_p 0.7" in evidence_text(first)


def test_a_recorded_top_p_is_asked_first(tmp_path):
    run = Recording(
        rollout=lambda step, number: step.scored(process=lambda rows: top_p(rows, 0.9)),
        process=lambda rows: top_p(rows, 0.9),
        sequences=lambda step, number: {"top_p": 0.9},
    )
    first = first_of(run, tmp_path / "trace")
    assert (first.code, first.numbers["recorded"]) == ("truncation", "top_p 0.9")


def test_a_fault_that_is_not_a_scale_of_the_logits_is_no_temperature(tmp_path):
    """Unlikely tokens are less likely still in the trainer: d leans to one side and grows with surprise, as with a temperature."""

    def train(step, number):
        draw = np.random.default_rng(number)
        return [row + np.where(row < -4, -draw.uniform(1, 4, len(row)), 0).astype(np.float32) for row in step.scored()]

    found = check(Recording(rollout=in_float32, train=train, contracts=BOTH_FP32).write(tmp_path / "trace"))
    assert not found.is_valid
    assert "temperature" not in [finding.code for finding in found.findings]


# --- Order ------------------------------------------------------------------------------------------------------------------


def halves(step, number):
    return [np.concatenate([row[len(row) // 2 :], row[: len(row) // 2]]) for row in in_float32(step, number)]


def test_halves_in_the_wrong_order_are_misplaced(tmp_path):
    first = first_of(Recording(rollout=halves, contracts=BOTH_FP32), tmp_path / "trace")
    assert (first.code, first.numbers["order"]) == ("misplaced", "blocks")


def test_rows_of_steps_farther_away_are_misplaced(tmp_path):
    run = Recording(steps=8, options={"longest": 40})
    kept = {}

    def rollout(step, number):
        kept[number] = in_float32(step, number)
        if number <= 3:
            return kept[number]
        out = []
        for own, other in zip(kept[number], kept[number - 3], strict=True):
            row = np.array(own)
            row[: len(other)] = other[: len(row)]
            out.append(row)
        return out

    first = first_of(replace(run, rollout=rollout, contracts=BOTH_FP32), tmp_path / "trace")
    assert (first.code, first.numbers["order"], first.numbers["steps_apart"]) == ("misplaced", "rows", -3)


# --- Weights over time ------------------------------------------------------------------------------------------------------


def versions(number):
    logits = table()
    for update in range(1, number + 1):
        logits = moved(logits, 50 + update, 0.05)
    return logits


def from_version_0(path, declared):
    """A run whose engine keeps the weights of version 0. The step of version 0 agrees."""
    with Recorder(path) as recorder:
        for name, contract in BOTH_FP32.items():
            recorder.add_contract(name, contract)
        for number in range(8):
            step = sample(versions(number), 100 + number)
            batch = recorder.add_sequences(
                step=number,
                prompt_ids=[p.tolist() for p in step.prompts],
                response_ids=[r.tolist() for r in step.responses],
            )
            old = step.scored(versions(0)) if number else in_float32(step, number)
            recorder.add_scores("rollout", batch, logprobs=old, policy_version=0 if declared else None)
            recorder.add_scores("train", batch, logprobs=step.scored(), policy_version=number if declared else None)
    return check(path)


def test_a_declared_lag_does_not_explain_a_mismatch_that_is_as_large_without_one(tmp_path):
    with Recorder(tmp_path / "trace") as recorder:
        for name, contract in BOTH_FP32.items():
            recorder.add_contract(name, contract)
        for number in range(8):
            step = sample(table(), 100 + number)
            batch = recorder.add_sequences(
                step=number,
                prompt_ids=[p.tolist() for p in step.prompts],
                response_ids=[r.tolist() for r in step.responses],
            )
            other = step.scored(moved(step.logits, 7, 0.3))
            recorder.add_scores("rollout", batch, logprobs=other, policy_version=max(number - number % 2, 0))
            recorder.add_scores("train", batch, logprobs=step.scored(), policy_version=number)
    found = check(tmp_path / "trace")
    assert not found.is_valid
    assert "policy_versions" not in [finding.signal for finding in found.findings]


def test_a_mismatch_that_grows_from_version_0_is_of_weights(tmp_path):
    found = from_version_0(tmp_path / "trace", declared=False)
    first = found.findings[0]
    assert (found.is_valid, first.code, first.signal) == (False, "weights_differ", "judged")
    assert first.numbers["first"] < first.numbers["later"]


def test_a_recorded_lag_without_effect_is_no_explanation(tmp_path):
    with Recorder(tmp_path / "trace") as recorder:
        for number in range(1, 8):
            step = sample(versions(number), 100 + number)
            batch = recorder.add_sequences(
                step=number,
                prompt_ids=[p.tolist() for p in step.prompts],
                response_ids=[r.tolist() for r in step.responses],
            )
            recorder.add_scores("rollout", batch, logprobs=in_float32(step, number), policy_version=number - 1)
            recorder.add_scores("train", batch, logprobs=step.scored(), policy_version=number)
    found = check(tmp_path / "trace")
    assert (found.is_valid, found.findings[0].code) == (True, "rounding")
    assert "policy versions that differ by 1, so either an update changes less" in evidence_text(found.findings[0])


@pytest.mark.parametrize(("top_p", "is_valid"), [(0.9, True), (1.0, False)])
def test_a_filter_of_both_sides_may_keep_a_token_on_one_alone(tmp_path, top_p, is_valid):
    def rollout(step, number):
        rows = in_float32(step, number)
        for row in rows[:3]:
            row[1] -= np.float32(0.08)  # of a probability of 1 / 0.9
        return rows

    path = tmp_path / "trace"
    Recording(rollout=rollout, contracts=BOTH_FP32, sequences=lambda step, number: {"top_p": top_p}).write(path)
    assert check(path).is_valid == is_valid


def test_a_lag_that_is_declared_is_valid_and_said(tmp_path):
    found = from_version_0(tmp_path / "trace", declared=True)
    first = found.findings[0]
    assert found.is_valid
    assert (first.code, first.signal, first.is_expected) == ("weights_differ", "policy_versions", True)
    assert "expected for the recorded engines" in evidence_text(first)


# --- No fault ---------------------------------------------------------------------------------------------------------------


def test_rows_of_float32_that_are_equal_by_luck_are_no_copies(tmp_path):
    def rollout(step, number):
        draw = np.random.default_rng(number)
        return [
            np.where(draw.random(len(row)) < 0.6, row, np.nextafter(row, np.float32(-9), dtype=np.float32))
            for row in step.scored()
        ]

    run = Recording(rollout=rollout, contracts=BOTH_FP32, options={"longest": 10, "groups": 16}, steps=6)
    found = check(run.write(tmp_path / "trace"))
    assert found.is_valid
    assert [finding.code for finding in found.findings] == ["rounding"]


def test_rows_that_are_equal_where_a_third_of_all_tokens_is_are_no_copies(tmp_path):
    def rollout(step, number):
        draw = np.random.default_rng(number)
        noise = [
            2e-3 * draw.normal(size=len(row)) * (draw.random(len(row)) < 0.7 * (at % 6 == 0))
            for at, row in enumerate(step.scored())
        ]
        return [row + each.astype(np.float32) for row, each in zip(step.scored(), noise, strict=True)]

    found = check(Recording(rollout=rollout, options={"longest": 40, "groups": 24}, steps=3).write(tmp_path / "trace"))
    assert "copies" not in [finding.code for finding in found.findings]


@pytest.mark.parametrize(
    ("contract", "code"),
    [({"dtype": "float32", "autocast": "bfloat16"}, "rounding"), ({"dtype": "bfloat16", "quantization": "fp8"}, "weights_differ")],
)  # fmt: skip
def test_a_setting_of_a_contract_counts_at_any_depth(tmp_path, contract, code):
    run = Recording(rollout=in_bfloat16, contracts={"train": FP32, "rollout": contract})
    found = check(run.write(tmp_path / "trace"))
    assert found.is_valid
    assert found.findings[0].code == code


@pytest.mark.parametrize(
    ("setting", "cause", "options"),
    [
        ({"quantization": "fp8"}, "quantised", "--quantize fp8"),
        ({"quantization": "awq_marlin"}, "quantised", "--quantize int4"),
        ({"quantization": "w8a8_int8"}, "quantised", "--quantize int8"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "quantised_cache", "--kv-dtype fp8 --mode decode"),
    ],
)
def test_a_quantisation_that_a_contract_sets_is_replayed_as_what_it_is(tmp_path, setting, cause, options):
    run = Recording(rollout=in_bfloat16, contracts={"train": FP32, "rollout": {"dtype": "bfloat16", **setting}})
    first = check(run.write(tmp_path / "trace")).findings[0]
    assert (first.signal, first.numbers["cause"]) == ("contract", cause)
    assert f" {options} --name " in str(first.next)


@pytest.mark.parametrize(
    ("versions", "step", "version"),
    [([0, 2, 4, 6], None, 4), ([5, 5, 5], None, 4), ([0], None, 0), ([0, 2, 4, 6], 1, 2)],
)
def test_the_weights_that_a_replay_tries_are_those_of_a_version_that_was_sampled_from(versions, step, version):
    sample = SimpleNamespace(versions=np.ma.array(versions), steps=np.arange(len(versions)))
    data = SimpleNamespace(
        sample=sample, has_weights=True, trace="run", steps="all", names={"a": "train", "b": "rollout"}
    )
    sample.a, sample.b = SimpleNamespace(name="train"), SimpleNamespace(name="rollout")
    assert f"--arm weights-version={version} " in weights_replay(data, step) + " "


@pytest.mark.parametrize("sharpness", [8.0, 16.0])
def test_a_sharp_policy_in_bfloat16_is_valid(tmp_path, sharpness):
    run = Recording(
        weights=lambda number: table(sharpness=sharpness),
        rollout=in_bfloat16,
        contracts={"train": FP32, "rollout": VLLM_BF16},
        steps=6,
    )
    found = check(run.write(tmp_path / "trace"))
    assert found.is_valid, found.findings[0]


def test_every_query_that_a_finding_proposes_is_in_the_catalogue():
    sources = [path.read_text() for path in (ROOT / "analysis" / "check").rglob("*.py")]
    calls = [call for text in sources for call in re.findall(r"commands\.query\(data, (.+)\)", text)]
    proposed = {name for call in calls for name in re.findall(r'"([a-z]+-[a-z-]+)"', call)}
    assert proposed
    assert proposed <= {each.name for each in catalogue()}


@pytest.mark.slow
def test_the_command_for_every_column_of_sequences_runs(tmp_path):
    make_rich_trace(tmp_path / "trace")
    data = gather(open_database(tmp_path / "trace"), ("train", "rollout"), trace=str(tmp_path / "trace"))
    asked = {name: str(by_column(data, name)) for name in sequence_columns(data.sample)}
    assert {"group_rank", "forward_row_a", "version_b", "not_first_of_4"} <= asked.keys()
    for name, command in asked.items():
        done = in_process(shlex.split(command)[1:])
        assert done.code == 0, f"{name}: {done.stderr}"


# --- The fitted model -------------------------------------------------------------------------------------------------------


def test_the_fitted_model_knows_the_features_and_the_runs_it_was_fitted_to(tmp_path):
    path = Recording(rollout=in_float32).write(tmp_path / "trace")
    measured = features(gather(open_database(path), ("train", "rollout"), trace=""))
    assert model().features == tuple(measured)
    runs = pq.read_table(ROOT / "benchmarks" / "kinds" / "runs.parquet").to_pylist()
    found = [model().probabilities(run) for run in runs]
    assert np.allclose(np.sum(found, axis=1), 1.0)
    named = [model().kinds[int(np.argmax(each))] == run["kind"] for each, run in zip(found, runs, strict=True)]
    assert np.mean(named) > 0.8
    rounding = model().kinds.index("rounding")
    healthy = [each[rounding] for each, run in zip(found, runs, strict=True) if run["kind"] == "rounding"]
    assert np.mean(np.array(healthy) < MAX_ROUNDING) < 0.01


def test_a_judged_kind_says_how_probable_it_is_why_and_what_else_it_may_be(tmp_path):
    run = Recording(rollout=in_float32, train=noisy, options={"in_group": 16})
    first = first_of(run, tmp_path / "trace")
    assert 0.5 < first.numbers["probability"] <= 1
    assert first.weight == first.numbers["probability"]
    assert REASONS[first.numbers["reason_0"]]
    assert evidence_text(first).startswith(f"probability {first.numbers['probability']:.0%}; typical causes: ")


def test_values_of_one_step_say_the_step(tmp_path):
    def rollout(step, number):
        values = in_float32(step, number)
        return [np.append(row[1:], np.float32(-0.7)) for row in values] if number == 2 else values

    first = first_of(Recording(rollout=rollout, contracts=BOTH_FP32), tmp_path / "trace")
    assert (first.code, first.numbers["in_steps"]) == ("shift", "2")
    assert evidence_text(first).endswith("all affected tokens are at step 2")


# --- Contracts, limits of ids, and mismatches that begin later ---------------------------------------------------------------


def test_each_sequence_is_judged_by_its_own_contract(tmp_path):
    with Recorder(tmp_path / "trace") as recorder:
        for number in range(1, 7):
            step = sample(table(), 100 + number)
            is_fine = number > 3
            recorder.add_contract("train", FP32)
            recorder.add_contract("rollout", {"engine": "vllm", "dtype": "float32" if is_fine else "bfloat16"})
            batch = recorder.add_sequences(
                step=number, prompt_ids=[row.tolist() for row in step.prompts], response_ids=[row.tolist() for row in step.responses]
            )  # fmt: skip
            recorder.add_scores("rollout", batch, logprobs=(in_float32 if is_fine else in_bfloat16)(step, number))
            recorder.add_scores("train", batch, logprobs=step.scored(), entropy=step.entropies())
    found = check(tmp_path / "trace")
    assert found.is_valid
    assert [finding.code for finding in found.findings] == ["rounding", "rounding"]
    assert {finding.numbers["dtype_b"] for finding in found.findings} == {"bfloat16", "float32"}


def some_exact_rows(step, number):
    values, exact = in_bfloat16(step, number), step.scored()
    return [exact[row] if row in (3, 8, 21) else values[row] for row in range(len(values))]


@pytest.mark.parametrize(("dtype", "codes_of"), [("float32", ["copies"]), ("bfloat16", ["rounding"])])
def test_equal_rows_are_copies_only_if_the_dtypes_differ(tmp_path, dtype, codes_of):
    contracts = {"train": {"engine": "trl", "dtype": dtype}, "rollout": {"engine": "vllm", "dtype": "bfloat16"}}
    found = check(Recording(rollout=some_exact_rows, contracts=contracts).write(tmp_path / "trace"))
    assert [finding.code for finding in found.findings][:1] == codes_of


def wrong_ids(limit):
    """An engine whose values belong to another token if the id is at least `limit`."""

    def rollout(step, number):
        draw = np.random.default_rng(number)
        values = in_float32(step, number)
        return [
            np.where(row >= limit, np.minimum(own - draw.uniform(1, 4, len(row)), -1e-3), own)
            for row, own in zip(step.responses, values, strict=True)
        ]

    return rollout


@pytest.mark.parametrize("limit", [VOCABULARY // 4, VOCABULARY // 2])
def test_ids_beyond_a_limit_are_named(tmp_path, limit):
    first = first_of(Recording(rollout=wrong_ids(limit), contracts=BOTH_FP32), tmp_path / "trace")
    assert (first.code, first.numbers["cause"], first.numbers["feature"]) == ("one_place", "ids", "token_id")
    assert float(first.numbers["values"]) == pytest.approx(limit, abs=3)


def test_rows_that_are_off_from_a_later_step_on_are_not_packed(tmp_path):
    rollout = off_where(not_first)
    run = lambda step, number: in_float32(step, number) if number == 1 else rollout(step, number)  # noqa: E731
    found = recorded_forwards(tmp_path / "trace", run, lambda num, number: forwards(num, number, np.zeros(num)))
    assert not found.is_valid
    assert "packing" not in {finding.numbers.get("cause") for finding in found.findings}


def test_unrelated_values_blame_no_side_that_the_sampler_does_not_rule_out(tmp_path):
    other = table()[:, ::-1]
    improbable = Recording(train=lambda step, number: step.scored(other), entropy=False, contracts=BOTH_FP32)
    first = first_of(improbable, tmp_path / "trace")
    assert (first.code, first.broken) == ("unrelated", "computation")
    engine = Recording(rollout=lambda step, number: step.scored(other), entropy=False, contracts=BOTH_FP32)
    first = first_of(engine, tmp_path / "engine")
    assert (first.code, first.broken) == ("unrelated", "engine")


def test_what_is_off_within_a_part_of_the_run_is_named(tmp_path):
    def rollout(step, number):
        draw = np.random.default_rng(number)
        values = [np.array(row) for row in in_float32(step, number)]
        for own in values[16:]:
            own[9:] = np.minimum(own[9:] + draw.normal(0, 1.0, len(own) - 9), -1e-3)
        return values

    found = check(Recording(rollout=rollout, contracts=BOTH_FP32).write(tmp_path / "trace"))
    text = " ".join(evidence_text(finding) for finding in found.findings)
    assert not found.is_valid
    assert "the row index in the step is at least 16" in text
    assert "the position in the response is at least 9" in text


# --- Places that imply their cause, and values that depend on something ---------------------------------------------------------


def shifted_by(lags):
    """Values of an engine, of which row r is moved by `lags(r)` tokens towards its beginning."""

    def rollout(step, number):
        values = in_float32(step, number)
        return [np.r_[row[lags(place) :], row[: lags(place)]] for place, row in enumerate(values)]

    return rollout


def test_rows_that_are_each_shifted_by_their_own_number_of_tokens_are_found(tmp_path):
    first = first_of(Recording(rollout=shifted_by(lambda row: row % 4)), tmp_path / "trace")
    assert (first.code, first.signal, first.numbers["counted"]) == ("shift", "own_lags", "place of 4")
    assert (first.numbers["least"], first.numbers["largest"]) == (-3, -1)
    assert "by its index in its block of 4 rows" in evidence_text(first)


def test_rows_that_padding_moves_out_of_sight_count_as_shifted(tmp_path):
    def train(step, number):
        """Short rows begin with values of their prompt, as many as they are shorter than the longest row."""
        draw, values = np.random.default_rng(number), in_float32(step, number)
        longest = max(map(len, values))
        return [np.r_[-draw.gamma(1.0, 1.5, longest - len(row)), row][: len(row)] for row in values]

    first = first_of(Recording(train=train, entropy=False), tmp_path / "trace")
    assert (first.code, first.signal) == ("shift", "own_lags")
    assert str(first.numbers["counted"]).startswith("padding of")
    assert first.numbers["num_sequences"] > 0.9 * first.numbers["of_sequences"]


def test_a_replaced_last_token_of_truncated_responses_is_named(tmp_path):
    def reasons(step):
        longest = max(map(len, step.responses))
        return ["length" if len(row) >= longest - 2 else "stop" for row in step.responses]

    def rollout(step, number):
        values = in_float32(step, number)
        for row, reason in zip(values, reasons(step), strict=True):
            row[-1] -= 3.0 * (reason == "length")
        return values

    run = Recording(
        rollout=rollout, contracts=BOTH_FP32, options={"longest": 20}, sequences=lambda step, number: {"finish_reason": reasons(step)},
    )  # fmt: skip
    first = first_of(run, tmp_path / "trace")
    assert (first.code, first.numbers["cause"]) == ("one_place", "truncated")
    assert "the last token of truncated responses" in evidence_text(first)


def test_without_an_engine_the_passes_of_the_trainer_are_compared(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        for number in range(1, 5):
            step = sample(table(), number)
            batch = recorder.add_sequences(
                step=number, prompt_ids=[row.tolist() for row in step.prompts], response_ids=[row.tolist() for row in step.responses],
            )  # fmt: skip
            for name, values in (("train", step.scored()), ("current", [row - 1 for row in step.scored()])):
                recorder.add_scores(name, batch, logprobs=values, policy_version=number)
            recorder.add_scores("reference", batch, logprobs=step.scored())
    found = check(tmp_path / "run")
    assert (found.pair, found.is_valid) == ("current:train", False)


def test_a_shift_that_is_the_same_in_all_rows_is_no_other_tokenisation(tmp_path):
    def rollout(step, number):
        return moved_by_one(step, number) if number > 2 else in_float32(step, number)

    moved_by_one = shifted_by(lambda row: 1)
    first = first_of(Recording(rollout=rollout), tmp_path / "trace")
    assert (first.code, first.signal, first.numbers["since_step"]) == ("shift", "moved_rows", 3)


def test_a_token_with_the_value_of_the_next_one_is_told_from_a_wrong_value(tmp_path):
    def next_one(row, values, draw):
        values[0] = values[1]

    first = first_of(planted(next_one), tmp_path / "trace")
    assert (first.code, first.signal, first.numbers["lag"]) == ("shift", "neighbours", 1)
    assert first.numbers["feature"] == "first_token"


def with_penalty(size, *, by_count=False):
    """Values of an engine that lowers the logit of tokens that the response already has, once or for each occurrence."""

    def rollout(step, number):
        out = []
        for prompt, response in zip(step.prompts, step.responses, strict=True):
            context = np.concatenate([prompt[-1:], response[:-1]]).astype(int)
            logits = step.logits[context].astype(float)
            for place in range(1, len(response)):
                before = response[:place] if by_count else np.unique(response[:place])
                np.subtract.at(logits[place], before, size)
            out.append(log_softmax(logits)[np.arange(len(response)), response].astype(np.float32))
        return out

    return rollout


@pytest.mark.parametrize("size", [0.8, 0.05])
def test_a_penalty_is_named_even_if_it_is_no_larger_than_rounding(tmp_path, size):
    first = first_of(Recording(rollout=with_penalty(size), contracts={"rollout": VLLM_BF16}), tmp_path / "trace")
    assert (first.code, first.numbers["cause"], first.numbers["counted"]) == ("penalty", "repeated", "response")


def test_a_frequency_penalty_has_its_size_per_occurrence(tmp_path):
    first = first_of(Recording(rollout=with_penalty(0.2, by_count=True), contracts=BOTH_FP32), tmp_path / "trace")
    assert (first.code, first.numbers["cause"], first.numbers["by_count"]) == ("penalty", "repeated", 1)
    assert first.numbers["slope"] == pytest.approx(0.2, abs=0.05)
    assert "for each time it occurred earlier in the response" in evidence_text(first)


def test_repeated_tokens_that_differ_by_no_fixed_amount_have_no_penalty(tmp_path):
    sizes = np.random.default_rng(3).normal(0.8, 1.0, (60, 60))

    def train(step, number):
        out = step.scored(moved(step.logits, 7, 0.1))
        for prompt, response, row in zip(step.prompts, step.responses, out, strict=True):
            ids = np.concatenate([prompt[-1:], response]).astype(int)
            for place in range(1, len(response)):
                if ids[place + 1] in ids[1 : place + 1]:
                    odds = row[place] - np.log(-np.expm1(row[place])) - sizes[ids[place], ids[place + 1]]
                    row[place] = -np.logaddexp(0.0, -odds)
        return out

    found = codes(Recording(train=train, contracts=BOTH_FP32, options={"longest": 40}), tmp_path / "trace")
    assert found[0] == "computation_differs"


def test_a_factor_on_the_logits_is_no_penalty(tmp_path):
    run = Recording(rollout=lambda step, number: step.scored(step.logits * 1.3), contracts=BOTH_FP32)
    assert "penalty" not in codes(run, tmp_path / "trace")


def with_other_ids(swapped):
    """Values of an engine that reads the ids `swapped` as their partners, in the context and as labels."""

    def rollout(step, number):
        draw, out = np.random.default_rng(number), []
        for row, response in zip(in_float32(step, number), step.responses, strict=True):
            own = np.array(row)
            seen = np.isin(response, swapped)
            own[seen] = -draw.uniform(1, 8, seen.sum())
            later = (np.cumsum(seen) > 0) & ~seen
            own[later] = np.minimum(own[later] + draw.normal(0, 0.5, later.sum()), -1e-3)
            out.append(own.astype(np.float32))
        return out

    return rollout


def test_rows_that_are_off_after_some_ids_read_these_ids_differently(tmp_path):
    run = Recording(rollout=with_other_ids((3, END - 3)), contracts=BOTH_FP32)
    first = first_of(run, tmp_path / "trace")
    assert (first.code, first.numbers["cause"], first.numbers["feature"]) == ("row_context", "ids", "from_ids")
    assert set(first.numbers["values"].split(", ")) <= {"3", str(END - 3)}
    assert "the id of this token or an earlier one is one of" in checked_text(check(tmp_path / "trace"), 400)


@pytest.mark.parametrize("chunk", [3, 8])
def test_chunks_in_reverse_are_found_with_their_length(tmp_path, chunk):
    def rollout(step, number):
        rows = in_float32(step, number)
        return [np.concatenate([row[at : at + chunk][::-1] for at in range(0, len(row), chunk)]) for row in rows]

    first = first_of(Recording(rollout=rollout), tmp_path / "trace")
    assert (first.code, first.signal, first.numbers["chunk"]) == ("shift", "reversed_chunks", chunk)


def test_values_that_are_lost_are_not_another_tokenisation(tmp_path):
    def lose_two(row, values, draw):
        at = 4 + row % 8
        values[at:-2], values[-2:] = values[at + 2 :].copy(), -1.0

    first = first_of(planted(lose_two, contracts=BOTH_FP32), tmp_path / "trace")
    assert (first.code, first.signal, first.numbers["num_lost"], first.numbers["filler"]) == ("shift", "lost", 2, -1.0)


def test_probabilities_stored_in_a_byte_are_named(tmp_path):
    def rollout(step, number):
        return [
            np.log(np.maximum(np.round(np.exp(row) * 255), 1) / 255).astype(np.float32)
            for row in in_float32(step, number)
        ]

    first = first_of(Recording(rollout=rollout), tmp_path / "trace")
    assert (first.code, first.numbers["cause"], first.side) == ("low_precision_head", "stored", "recording")
    assert "the logarithm of a multiple of 1/255" in evidence_text(first)


def from_step_4(change):
    return lambda step, number: in_float32(step, number) if number < 4 else change(step, number)


def test_what_jumps_in_mid_run_and_stays_is_not_called_stale(tmp_path):
    run = Recording(
        rollout=from_step_4(lambda step, number: step.scored(moved(step.logits, 77, 0.3))), steps=7, contracts=BOTH_FP32
    )
    first = first_of(run, tmp_path / "trace")
    assert (first.code, first.numbers["cause"], first.numbers["since_step"]) == ("computation_differs", "since", 4)


def test_the_steps_after_a_jump_are_judged_as_a_run_of_their_own(tmp_path):
    run = Recording(train=from_step_4(noisy), rollout=in_float32, steps=7, options={"in_group": 16})
    first = first_of(run, tmp_path / "trace")
    assert (first.code, first.numbers["since_step"], first.broken) == ("not_repeatable", 4, "trainer")


def test_a_jump_is_judged_where_some_tokens_are_outside_of_the_loss(tmp_path):
    def masked(step, number):
        return {"response_mask": [np.arange(len(response)) >= 2 for response in step.responses]}

    run = Recording(train=from_step_4(noisy), rollout=in_float32, steps=7, options={"in_group": 16}, sequences=masked)
    first = first_of(run, tmp_path / "trace")
    assert (first.code, first.numbers["since_step"]) == ("not_repeatable", 4)


def test_temperatures_that_only_one_side_applies_to_its_rows_are_named(tmp_path):
    heats = (0.7, 0.9, 1.1, 1.3)

    def rollout(step, number):
        of_heat = {heat: step.scored(step.logits / heat) for heat in heats}
        return [of_heat[heats[row % 4]][row] for row in range(len(step.responses))]

    def settings(step, number):
        return {"temperature": [heats[row % 4] for row in range(len(step.responses))]}

    first = first_of(Recording(rollout=rollout, sequences=settings, entropy=False), tmp_path / "trace")
    assert (first.code, first.signal, first.numbers["side"]) == ("temperature", "by_setting", "rollout")
    assert first.numbers["num_values"] == 4


def smoothed(step, number):
    """Logprobs mixed with their mean over the vocabulary, as a loss with label smoothing of 0.1 has them."""
    scores = log_softmax(step.logits)
    rows = zip(step.prompts, step.responses, strict=True)
    before = [np.concatenate([p[-1:], r[:-1]]).astype(int) for p, r in rows]
    return [
        (0.9 * scores[b, r] + 0.1 * scores[b].mean(axis=-1)).astype(np.float32)
        for b, r in zip(before, step.responses, strict=True)
    ]


def test_label_smoothing_is_no_truncation(tmp_path):
    first = first_of(Recording(train=smoothed, rollout=in_float32), tmp_path / "trace")
    assert (first.code, first.numbers["side"]) == ("smoothed", "train")
    assert first.numbers["smoothing"] == pytest.approx(0.1, abs=0.05)


def test_a_wrong_soft_cap_is_no_label_smoothing(tmp_path):
    def train(step, number):
        return step.scored(step.logits * np.tanh(step.logits / 30))

    first = first_of(Recording(train=train, rollout=in_float32), tmp_path / "trace")
    assert (first.code, first.numbers["cause"], first.broken) == ("smoothed", "flattened", "trainer")
    assert "capped or scaled by a wrong formula" in evidence_text(first)


def clamped(step, number):
    draw = np.random.default_rng(number)
    return [row + np.clip(draw.normal(0, 0.05, len(row)), -0.05, 0.05).astype(np.float32) for row in step.scored()]


def averaged(step, number):
    out = []
    for row in in_float32(step, number):
        own = row.astype(float)
        for place in range(1, len(own)):
            own[place] = 0.6 * own[place - 1] + 0.4 * own[place]
        out.append(own.astype(np.float32))
    return out


@pytest.mark.parametrize(
    ("train", "rollout", "signal", "key", "value"),
    [
        (clamped, lambda step, number: step.scored(), "clamped", "limit", pytest.approx(0.05, rel=1e-3)),
        (lambda step, number: step.scored(), averaged, "other_unit", "unit", "moving_average"),
        (
            lambda step, number: step.scored(),
            lambda step, number: [row / len(row) for row in in_float32(step, number)],
            "other_unit",
            "unit",
            "by_length",
        ),
    ],
)
def test_values_that_are_a_function_of_the_other_sides_are_named(tmp_path, train, rollout, signal, key, value):
    first = first_of(Recording(train=train, rollout=rollout), tmp_path / "trace")
    assert (first.code, first.signal, first.numbers[key]) == ("log_base", signal, value)


@pytest.mark.parametrize("contracts", [{}, {"rollout": VLLM_BF16}])
def test_values_clipped_or_rounded_alike_are_no_clamp(tmp_path, contracts):
    assert check(Recording(rollout=in_bfloat16, contracts=contracts).write(tmp_path / "trace")).is_valid


def test_a_pass_that_copies_the_other_from_some_step_on_is_found(tmp_path):
    def rollout(step, number):
        return in_bfloat16(step, number) if number < 3 else step.scored()

    first = first_of(Recording(rollout=rollout, steps=5), tmp_path / "trace")
    assert (first.code, first.signal, first.numbers["since_equal"]) == ("copies", "copied_steps", 3)


@pytest.mark.parametrize("is_after", [True, False])
def test_a_mismatch_that_follows_the_advantages_from_the_first_step_is_from_after_the_update(tmp_path, is_after):
    """An engine that is behind also lacks what raised the rewarded tokens, but not yet at the first step."""
    draw = np.random.default_rng(0)
    advantages = {number: draw.choice([-1.0, 1.0], 32) for number in range(1, 5)}

    def train(step, number):
        rows = zip(in_float32(step, number), advantages[number], strict=True)
        size = np.float32(0.2 if is_after else 0.15 * (number - 1))
        return [np.minimum(row + size * sign * -np.expm1(row), -1e-6) for row, sign in rows]

    run = Recording(train=train, sequences=lambda step, number: {"advantage": advantages[number]}, contracts=BOTH_FP32)
    first = first_of(run, tmp_path / "trace")
    assert (first.code == "weights_differ" and first.numbers["cause"] == "after_update") == is_after
    assert first.numbers.get("cause") != "after_update" or first.broken == "trainer"


def test_masked_logits_are_a_filter_and_one_constant_is_a_placeholder(tmp_path):
    def masked(spread):
        def train(step, number):
            draw = np.random.default_rng(number)
            return [
                np.where(row < -4.5, np.float32(-1e4) - spread * draw.random(len(row), np.float32), row)
                for row in in_float32(step, number)
            ]

        return train

    first = first_of(Recording(train=masked(5.0), entropy=False), tmp_path / "masked")
    assert (first.code, first.numbers["cause"]) == ("truncation", "masked")
    shown = tim_trace(*shlex.split(first.next)[1:]).stdout
    assert len(re.findall(r"-100\d\d", shown)) > 10
    assert first_of(Recording(train=masked(0.0), entropy=False), tmp_path / "constant").code == "placeholders"


@pytest.mark.parametrize("rows", [lambda row: True, lambda row: row % 2 == 1])
def test_samples_that_are_too_likely_are_found_in_all_rows_or_in_some(tmp_path, rows):
    with Recorder(tmp_path / "trace") as recorder:
        for number in range(1, 5):
            cold = sample(table(), number, process=lambda logits: logits / 0.5)
            usual = sample(table(), number)
            step = replace(usual, responses=[(cold if rows(r) else usual).responses[r] for r in range(32)])
            batch = recorder.add_sequences(
                step=number,
                prompt_ids=[p.tolist() for p in step.prompts],
                response_ids=[r.tolist() for r in step.responses],
                temperature=1.0,
                top_p=1.0,
                top_k=0,
            )
            recorder.add_scores("rollout", batch, logprobs=in_float32(step, number))
            recorder.add_scores("train", batch, logprobs=step.scored(), entropy=step.entropies())
    found = check(tmp_path / "trace")
    first = found.findings[0]
    assert (first.code, first.numbers["cause"]) == ("penalty", "sampled_elsewhere")
    assert first.signal == ("sampled_elsewhere" if rows(0) else "sampled_by_rows")
    assert found.is_valid  # the passes agree


def test_rows_sorted_by_length_are_no_rows_that_were_sampled_otherwise(tmp_path):
    def until(row, end):
        return row[: int(np.argmax(row == end)) + 1 if (row == end).any() else len(row)]

    logits = table()
    logits[:, 0] = logits.max(axis=1)  # short responses are more likely than their entropies say
    with Recorder(tmp_path / "trace") as recorder:
        for number in range(1, 9):
            drawn = sample(logits, number, groups=40, longest=20)
            rows = [(prompt, until(row, 0)) for prompt, row in zip(drawn.prompts, drawn.responses, strict=True)]
            prompts, responses = zip(*sorted(rows, key=lambda row: -len(row[1])), strict=True)
            step = replace(drawn, prompts=prompts, responses=responses)
            batch = recorder.add_sequences(
                step=number,
                prompt_ids=[prompt.tolist() for prompt in step.prompts],
                response_ids=[row.tolist() for row in responses],
                temperature=1.0,
                top_p=1.0,
                top_k=0,
            )
            recorder.add_scores("rollout", batch, logprobs=in_float32(step, number))
            recorder.add_scores("train", batch, logprobs=step.scored(), entropy=step.entropies())
    found = check(tmp_path / "trace")
    assert "penalty" not in [each.code for each in found.findings]


def test_a_filter_that_lowers_surprise_by_ln_2_is_not_taken_for_bits(tmp_path):
    run = Recording(
        rollout=in_float32, process=lambda rows: top_p(rows, 0.7), steps=6,
        sequences=lambda step, number: {"temperature": 1.0, "top_p": 1.0},
    )  # fmt: skip
    found = check(run.write(tmp_path / "trace"))
    assert found.is_valid
    assert [finding.signal for finding in found.findings] == ["sampled_elsewhere"]


def test_rows_of_older_weights_are_not_taken_for_samples_of_another_distribution(tmp_path):
    with Recorder(tmp_path / "trace") as recorder:
        for number in range(1, 7):
            old, new = (moved(table(), 40 + version, 0.35 * version) for version in (number, number + 1))
            step = sample(old, number)
            batch = recorder.add_sequences(
                step=number, prompt_ids=[row.tolist() for row in step.prompts], policy_version=number,
                response_ids=[row.tolist() for row in step.responses], temperature=1.0, top_p=1.0,
            )  # fmt: skip
            recorder.add_scores("rollout", batch, logprobs=in_float32(step, number), policy_version=number)
            entropy = replace(step, logits=new).entropies()
            recorder.add_scores("train", batch, logprobs=step.scored(new), entropy=entropy, policy_version=number + 1)
    assert "penalty" not in [finding.code for finding in check(tmp_path / "trace").findings]


# --- Several tokens in one value, and tokens that were not sampled ----------------------------------------------------------


@pytest.mark.parametrize("where", ["before", "after"])
def test_logprobs_of_several_tokens_in_one_value_are_told_from_placeholders(tmp_path, where):
    def merge(row, values, draw):
        for at in range(3, len(values) - 1, 6):
            to, other = (at, at + 1) if where == "before" else (at + 1, at)
            values[to], values[other] = values[at] + values[at + 1], 0.0

    first = first_of(planted(merge, contracts=BOTH_FP32), tmp_path / "trace")
    assert (first.code, first.signal, first.numbers["where"]) == ("log_base", "merged", where)
    assert first.numbers["residual"] < 1e-5


def test_tokens_that_were_appended_after_sampling_are_named(tmp_path):
    def train(step, number):
        return [np.r_[row[:-1], row[-1:] - np.float32(12)] for row in step.scored()]

    def unsampled(row, values, draw):
        values[-1] = 0.0

    first = first_of(planted(unsampled, train=train, entropy=False), tmp_path / "trace")
    assert (first.code, first.numbers["cause"], first.numbers["num_tokens"]) == ("mask", "appended", 4 * 32)
    assert "appended after sampling" in evidence_text(first)


def test_one_fill_value_is_a_placeholder_although_one_id_has_all_of_it(tmp_path):
    def rollout(step, number):
        rows = zip(in_float32(step, number), step.responses, strict=True)
        return [np.where(response == 7, np.float32(-100), row) for row, response in rows]

    first = first_of(Recording(rollout=rollout, contracts=BOTH_FP32, entropy=False), tmp_path / "trace")
    assert (first.code, first.numbers["value"]) == ("placeholders", -100.0)
    assert "all where the token id is 7" in evidence_text(first)


def test_a_reference_that_is_stored_as_the_trainers_is_found(tmp_path):
    with Recorder(tmp_path / "trace") as recorder:
        for number in range(1, 5):
            step = sample(moved(table(), number, 0.6), number)
            batch = recorder.add_sequences(
                step=number,
                prompt_ids=[row.tolist() for row in step.prompts],
                response_ids=[row.tolist() for row in step.responses],
            )
            recorder.add_scores("rollout", batch, logprobs=step.scored())
            for name in ("train", "reference"):
                recorder.add_scores(name, batch, logprobs=step.scored(table()))
    first = check(tmp_path / "trace").findings[0]
    assert (first.code, first.signal, first.numbers["cause"]) == ("copies", "reference", "reference")


# --- Where and how a mismatch begins ----------------------------------------------------------------------------------------


def begins(path, size):
    """A run in which the engine's noise at a token has the size of `size(position, total position)`."""
    with Recorder(path) as recorder:
        for number in range(1, 7):
            step, draw = sample(table(), 100 + number, in_group=1, groups=24, longest=90), np.random.default_rng(number)
            lengths = draw.integers(0, 40, len(step.prompts))
            prompts = [
                np.r_[draw.integers(0, VOCABULARY, n), row] for n, row in zip(lengths, step.prompts, strict=True)
            ]
            batch = recorder.add_sequences(
                step=number,
                prompt_ids=[row.tolist() for row in prompts],
                response_ids=[row.tolist() for row in step.responses],
            )
            values = []
            for prompt, row in zip(prompts, in_float32(step, number), strict=True):
                position = np.arange(len(row))
                noise = draw.normal(size=len(row)) * size(position, position + len(prompt))
                values.append(np.minimum(row - np.expm1(row) * noise, -1e-6).astype(np.float32))
            recorder.add_scores("rollout", batch, logprobs=values)
            recorder.add_scores("train", batch, logprobs=step.scored())
    return check(path).findings[0]


@pytest.mark.parametrize(
    ("shape", "column", "size"),
    [
        ("event", 24, lambda position, total: np.where(position >= 24, 0.3, 0)),
        ("window", 40, lambda position, total: np.where(total >= 40, 0.02 * (total - 39), 0)),
        ("shards", 32, lambda position, total: np.where(total > 32, 0.6 / (1 + (total - 1) % 32), 0)),
    ],
)
def test_a_mismatch_says_where_it_begins_and_what_begins_there(tmp_path, shape, column, size):
    first = begins(tmp_path / "trace", size)
    assert (first.code, first.numbers["cause"]) == ("position_onset", shape)
    assert first.numbers["onset"] == pytest.approx(column, abs=4 if shape == "window" else 1)
