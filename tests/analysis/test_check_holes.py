"""Values that are none, or no logprobs: they are named, taken out, and hide nothing behind them."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from bigrams import (
    BOTH_FP32,
    FP32,
    HOT,
    VLLM_BF16,
    Recording,
    in_bfloat16,
    in_float32,
    log_softmax,
    moved,
    sample,
    table,
)
from builders import tim_trace
from tim_trace.analysis.check.check import check, gather
from tim_trace.analysis.check.faults import evidence_text
from tim_trace.analysis.check.faults.values import find_unit
from tim_trace.analysis.check.features import fall
from tim_trace.analysis.diagnosis.diagnose import diagnose
from tim_trace.analysis.diagnosis.text import diagnosis_text
from tim_trace.analysis.gate.gate import gate
from tim_trace.analysis.views import open_database
from tim_trace.schemas.errors import NothingToCompare
from tim_trace.tracer.importers.neutral import import_parquet
from tim_trace.tracer.recorder import Recorder


def record(path, sides, *, entropy=None, steps=1, lengths=40, prompts=None):
    """One trace of `steps` steps of four sequences; `sides` gives the two passes' values of a step, [4, T]."""
    with Recorder(path) as recorder:
        for step in range(1, steps + 1):
            train, rollout = sides(step)
            ids = np.random.default_rng(step).integers(0, 500, (4, lengths))
            batch = recorder.add_sequences(step=step, response_ids=ids, prompt_ids=prompts or [[step]] * 4)
            recorder.add_scores("rollout", batch, logprobs=rollout)
            recorder.add_scores("train", batch, logprobs=train, entropy=None if entropy is None else entropy(step))
    return path


def drawn(step, lengths=40):
    return -np.random.default_rng(step).exponential(1.0, (4, lengths)).astype(np.float32) - np.float32(0.01)


def near(values, step):
    """The same with rounding of float32."""
    return (values * (1 + 1e-6 * np.random.default_rng(99 + step).normal(size=values.shape))).astype(np.float32)


def one_lost(values, value):
    values = [np.array(row) for row in values]
    values[1][3] = value
    return values


def codes(path):
    return [finding.code for finding in check(path).findings]


def hot(value):
    """One value of the engine is none, and the trainer's logits are divided by a temperature."""
    scored = HOT.train

    def train(step, number):
        values = scored(step, number)
        return one_lost(values, value) if number == 2 else values

    return Recording(train=train, sequences=HOT.sequences)


def test_one_infinity_hides_no_temperature(tmp_path):
    assert codes(hot(-np.inf).write(tmp_path / "trace")) == ["temperature", "placeholders"]


def test_one_nan_in_thousands_hides_no_temperature(tmp_path):
    assert codes(hot(np.nan).write(tmp_path / "trace")) == ["temperature", "placeholders"]


@pytest.mark.parametrize(("value", "cause"), [(-np.inf, "impossible"), (np.nan, "not_finite")])
def test_a_probability_of_zero_is_told_from_a_value_that_is_no_number(tmp_path, value, cause):
    def sides(step):
        engine = near(drawn(step), step)
        engine[1:3, 4] = value
        return drawn(step), engine

    first = check(record(tmp_path / "trace", sides, steps=4)).findings[0]
    assert (first.code, first.numbers["cause"]) == ("placeholders", cause)


@pytest.mark.slow
@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("both", [False, True])
def test_a_lost_step_in_the_middle_of_two_hundred_is_no_valid_comparison(tmp_path, value, both):
    def sides(step):
        a = drawn(step, 6)
        b = near(a, step)
        if step == 101:
            b[:] = value
            a[:] = value if both else a
        return a, b

    found = check(record(tmp_path / "trace", sides, steps=200, lengths=6))
    assert not found.is_valid
    assert found.findings[0].numbers["num_tokens"] == 24
    assert found.findings[0].signal == ("missing_in_both" if both else "missing")


def test_what_is_lost_in_steps_that_were_not_read_is_counted(tmp_path):
    def sides(step):
        a = drawn(step, 6)
        b = near(a, step)
        if step in (57, 101, 143):
            b[2, 1] = np.nan
        return a, b

    found = check(record(tmp_path / "trace", sides, steps=200, lengths=6)).findings
    assert sum(finding.numbers["num_tokens"] for finding in found) == 3
    assert found[-1].signal == "missing_elsewhere"


def test_null_in_a_step_that_would_not_be_read_is_seen(tmp_path):
    with Recorder(tmp_path / "trace") as recorder:
        for step in range(1, 201):
            a = drawn(step, 6)
            batch = recorder.add_sequences(step=step, response_ids=np.ones((4, 6), int))
            recorder.add_scores("train", batch, logprobs=a)
            known = np.full(a.shape, step != 101)
            recorder.add_scores("rollout", batch, logprobs=near(a, step), scored_mask=known)
    assert not check(tmp_path / "trace").is_valid


def test_nothing_finite_on_either_side_is_no_valid_comparison(tmp_path):
    path = record(tmp_path / "trace", lambda step: (np.full((4, 40), np.nan),) * 2)
    assert not check(path).is_valid
    assert tim_trace("check", path).code == 1


def test_no_value_on_either_side_is_nothing_to_compare(tmp_path):
    with Recorder(tmp_path / "trace") as recorder:
        batch = recorder.add_sequences(step=1, response_ids=np.ones((2, 5), int))
        for name in ("train", "rollout"):
            recorder.add_scores(name, batch, logprobs=np.zeros((2, 5)), scored_mask=np.zeros((2, 5), bool))
    with pytest.raises(NothingToCompare):
        check(tmp_path / "trace")
    assert tim_trace("check", tmp_path / "trace").code != 0


def dump(tmp_path, train, rollout):
    rows = [
        {
            "step": 1,
            "prompt_ids": [1],
            "response_ids": list(range(len(a))),
            "train_logprobs": a.tolist(),
            "rollout_logprobs": b.tolist(),
        }
        for a, b in zip(train, rollout, strict=True)
    ]
    (tmp_path / "dump.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return import_parquet(tmp_path / "dump.jsonl", output=tmp_path / "trace").folder


def test_values_above_zero_are_no_logprobs_also_where_both_sides_share_them(tmp_path):
    probabilities = np.exp(drawn(1))
    first = check(dump(tmp_path, probabilities, near(probabilities, 1))).findings[0]
    assert (first.code, first.signal) == ("not_logprobs", "above_zero")


def test_logits_are_no_logprobs(tmp_path):
    a = drawn(1)
    assert codes(dump(tmp_path, a, a + np.random.default_rng(3).normal(12, 4, (4, 40))))[0] == "not_logprobs"


def test_one_value_above_zero_hides_nothing(tmp_path):
    a = drawn(1, 200)
    found = codes(dump(tmp_path, a, np.concatenate([a[1:], a[:1]]) + (np.arange(200) == 5) * 9.0))
    assert found == ["row_pairing", "not_logprobs"]


def test_fewer_tokens_than_a_statistic_takes_are_no_fault(tmp_path):
    path = record(tmp_path / "trace", lambda step: (drawn(1, 3), drawn(1, 3) * np.float32(1.3)), lengths=3)
    found = check(path)
    assert [finding.code for finding in found.findings] == ["too_few"]
    assert tim_trace("check", path).stdout.startswith("TOO FEW TOKENS")
    (judged,) = gate(path, fail_on=["check"]).verdicts
    assert (judged.verdict, judged.fails) == ("cannot tell", True)
    said = diagnosis_text(diagnose(path))
    assert said.count(f"cannot tell: only {found.num_tokens} comparable tokens") == 2
    assert "the comparison cannot be checked" in said


def test_a_constant_that_both_sides_have_is_seen(tmp_path):
    def sides(step):
        a = np.where(np.random.default_rng(50 + step).random((4, 200)) < 0.1, np.float32(-0.5), drawn(step, 200))
        return a, np.where(a == -0.5, a, near(a, step))

    first = check(record(tmp_path / "trace", sides, steps=2, lengths=200)).findings[0]
    assert (first.code, first.signal) == ("placeholders", "constant_in_both")


def test_zeros_that_both_sides_have_are_told_from_certain_tokens_by_their_entropy(tmp_path):
    def sides(step):
        a = np.where(np.random.default_rng(50 + step).random((4, 200)) < 0.3, np.float32(0), drawn(step, 200))
        return a, np.where(a == 0, a, near(a, step))

    for name, at_zero, code in (("lost", 1.0, "placeholders"), ("certain", 0.0, "rounding")):
        entropy = lambda step, at_zero=at_zero: np.where(sides(step)[0] == 0, at_zero, 1.0)  # noqa: E731
        assert codes(record(tmp_path / name, sides, steps=2, lengths=200, entropy=entropy))[0] == code


def test_a_unit_that_both_sides_share_is_seen_by_the_entropies(tmp_path):
    run = Recording(
        rollout=lambda step, number: [row / np.float32(np.log(2)) for row in in_float32(step, number)],
        train=lambda step, number: [row / np.float32(np.log(2)) for row in step.scored()],
    )
    first = check(run.write(tmp_path / "trace")).findings[0]
    assert (first.code, first.signal) == ("penalty", "sampled_elsewhere")


def test_values_that_are_equal_but_for_a_few_last_bits_are_in_no_other_unit(tmp_path):
    def sides(step):
        values = drawn(step, 200)
        is_off = np.random.default_rng(70 + step).random(values.shape) < 0.05
        return values, np.where(is_off, np.nextafter(values, np.float32(-9), dtype=np.float32), values)

    path = record(tmp_path / "trace", sides, steps=3, lengths=200)
    assert not find_unit(gather(open_database(path), ("train", "rollout"), trace=""))
    assert codes(path) == ["rounding"]


def test_a_mean_of_the_sequence_at_each_token_is_seen(tmp_path):
    run = Recording(rollout=lambda step, number: [np.full_like(row, row.mean()) for row in step.scored()])
    assert codes(run.write(tmp_path / "trace"))[0] == "placeholders"


def shuffled(step, number):
    values = step.scored()
    draw = np.random.default_rng(number).permutation(np.concatenate(values))
    return np.split(draw, np.cumsum([len(row) for row in values])[:-1])


def most_probable(step, number):
    scores = step.logits - np.log(np.exp(step.logits.astype(float)).sum(axis=-1, keepdims=True))
    rows = zip(step.prompts, step.responses, strict=True)
    return [scores.max(axis=-1)[np.concatenate([p[-1:], r[:-1]]).astype(int)] for p, r in rows]


@pytest.mark.parametrize(
    ("rollout", "signal"),
    [
        (shuffled, "no_correlation"),
        (lambda step, number: [-row for row in step.entropies()], "negative_entropies"),
        (most_probable, "most_probable"),
    ],
)
def test_values_of_something_else_have_a_name_of_their_own(tmp_path, rollout, signal):
    first = check(Recording(rollout=rollout).write(tmp_path / "trace")).findings[0]
    assert (first.code, first.signal) == ("unrelated", signal)


def one_for_a_context(step, number):
    """A value of each context's distribution: neither its entropy nor its largest logprob."""
    return [-2 * row for row in step.entropies()]


def test_a_side_that_does_not_depend_on_the_token_holds_other_values(tmp_path):
    first = check(Recording(rollout=one_for_a_context, entropy=False).write(tmp_path / "trace")).findings[0]
    assert (first.code, first.signal, first.numbers["side"]) == ("unrelated", "same_in_context", "rollout")
    assert first.numbers["num_equal"] == first.numbers["num_pairs"] >= 12


def test_probabilities_in_a_quarter_of_the_sequences_are_named_and_counted(tmp_path):
    run = Recording(
        rollout=lambda step, number: [
            -np.exp(row) if at % 4 == 0 else row for at, row in enumerate(in_float32(step, number))
        ]
    )
    first = check(run.write(tmp_path / "trace")).findings[0]
    assert (first.code, first.numbers["unit"]) == ("log_base", "negative_probability")
    assert (first.numbers["part_sequences"], first.numbers["part_of"]) == (32, 128)
    assert "only 32 of 128 sequences" in evidence_text(first)


@pytest.mark.parametrize("step_of", [0.125, 0.05])
def test_logprobs_on_a_grid_have_low_precision(tmp_path, step_of):
    run = Recording(rollout=lambda step, number: [np.round(row / step_of) * step_of for row in step.scored()])
    first = check(run.write(tmp_path / "trace")).findings[0]
    assert (first.code, first.numbers["dtype"]) == ("low_precision_head", f"steps of {step_of:g}")


def biased(rows):
    """A bias of 2 nats on a third of the ids."""
    return rows + 2.0 * (np.arange(rows.shape[-1]) % 3 == 0)


def test_a_bias_on_many_ids_is_measured_on_tokens_of_one_context(tmp_path):
    run = Recording(rollout=lambda step, number: step.scored(process=biased), process=biased, entropy=False)
    first = check(run.write(tmp_path / "trace")).findings[0]
    assert (first.code, first.signal) == ("penalty", "one_shift")
    assert first.numbers["bias"] == pytest.approx(2.0, abs=0.01)
    assert 0 < first.numbers["num_shifted"] < first.numbers["num_pairs"]


# --- Two explanations, and a cause beside a part ----------------------------------------------------------------------------


def stale_with_prompts_again(path, versions, fade=None, grows=False):
    with Recorder(path) as recorder:
        for name, contract in BOTH_FP32.items():
            recorder.add_contract(name, contract)
        for number in range(1, 7):
            step = sample(table(), 100 + number)
            step.prompts = [np.full(4, row // 4) for row in range(len(step.prompts))]
            batch = recorder.add_sequences(
                step=number, prompt_ids=[p.tolist() for p in step.prompts], group_ids=step.groups,
                response_ids=[r.tolist() for r in step.responses],
            )  # fmt: skip
            size = versions * (number if grows else 1)
            right, old = in_float32(step, number), step.scored(moved(step.logits, 3, size))
            rows = zip(right, old, strict=True)
            fading = [np.where(np.arange(len(a)) < (fade or len(a)), b, a) for a, b in rows]
            recorder.add_scores("rollout", batch, logprobs=right if number == 1 else fading)
            recorder.add_scores("train", batch, logprobs=step.scored(), entropy=step.entropies())
    return path


@pytest.mark.parametrize("since", [1, 3])
@pytest.mark.parametrize("side", ["rollout", "train"])
def test_a_side_that_gives_repeated_tokens_the_same_logprobs_at_all_steps_is_not_updated(tmp_path, side, since):
    with Recorder(tmp_path / "trace") as recorder:
        for name, contract in BOTH_FP32.items():
            recorder.add_contract(name, contract)
        new = old = table()
        for number in range(1, 9):
            old = new if number <= since else old
            step = sample(old if side == "rollout" else new, 100 + number, in_group=8, longest=30)
            step.prompts = [np.full(4, row // 8) for row in range(len(step.prompts))]
            batch = recorder.add_sequences(
                step=number, prompt_ids=[p.tolist() for p in step.prompts], group_ids=step.groups,
                response_ids=[r.tolist() for r in step.responses],
            )  # fmt: skip
            for name in ("rollout", "train"):
                recorder.add_scores(name, batch, logprobs=step.scored(old if name == side else new))
            new = moved(new, number, 0.15)
    first = check(tmp_path / "trace").findings[0]
    assert (first.code, first.signal, first.numbers["cause"]) == ("weights_differ", "frozen", "frozen")
    assert (first.numbers["side"], first.numbers["since"]) == (side, since)
    assert first.broken == ("engine" if side == "rollout" else "trainer")


def updated_every(path, interval, *, steps=8, noise=0.0):
    """An engine that is updated every `interval` steps, with trainer logprobs that differ by `noise` at each forward."""
    weights = [table()]
    for number in range(steps):
        weights.append(moved(weights[-1], number, 0.15))
    with Recorder(path) as recorder:
        for name, contract in BOTH_FP32.items():
            recorder.add_contract(name, contract)
        for number in range(steps):
            engine = weights[number // interval * interval]
            step = sample(engine, 100 + number, in_group=8, longest=30)
            step.prompts = [np.full(4, row // 8) for row in range(len(step.prompts))]
            batch = recorder.add_sequences(
                step=number, prompt_ids=[p.tolist() for p in step.prompts], group_ids=step.groups,
                response_ids=[r.tolist() for r in step.responses],
            )  # fmt: skip
            draw = np.random.default_rng(number)
            train = step.scored(engine if noise else weights[number])
            train = [np.minimum(row + noise * draw.normal(size=len(row)), -1e-6).astype(np.float32) for row in train]
            recorder.add_scores("rollout", batch, logprobs=step.scored())
            recorder.add_scores("train", batch, logprobs=train)
    return check(path).findings[0]


def test_an_engine_that_is_updated_every_few_steps_is_not_frozen(tmp_path):
    first = updated_every(tmp_path / "trace", 4, steps=12)
    assert (first.code, first.signal) == ("weights_differ", "judged")


def test_noise_of_the_trainer_is_no_frozen_engine(tmp_path):
    first = updated_every(tmp_path / "trace", 8, noise=0.2)
    assert (first.code, first.numbers["side"]) == ("not_repeatable", "train")


def test_prompts_that_come_again_make_no_prefix_cache_of_other_weights(tmp_path):
    found = check(stale_with_prompts_again(tmp_path / "trace", 0.3)).findings
    assert found[0].code == "weights_differ"
    assert 2 in (found[0].numbers.get("since_step"), found[0].numbers.get("since"))


def test_a_mismatch_that_fades_along_the_sequence_is_a_prefix_cache(tmp_path):
    first = check(stale_with_prompts_again(tmp_path / "trace", 0.3, fade=8)).findings[0]
    assert (first.code, first.numbers["cause"]) == ("row_context", "prompt")


def test_a_growing_mismatch_that_ends_at_once_is_of_weights_replaced_during_sampling(tmp_path):
    first = check(stale_with_prompts_again(tmp_path / "trace", 0.1, fade=30, grows=True)).findings[0]
    assert (first.code, first.numbers["cause"], first.broken) == ("row_context", "replaced", "recording")
    assert first.numbers["onset"] == 30


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("longest", [0, 1, 4, 50])
def test_a_level_without_a_spread_does_not_fall(longest, monkeypatch):
    position = np.tile(np.arange(longest), 60)
    monkeypatch.setitem(fall.__globals__, "levels", lambda data: np.full(len(position), -7.2))
    assert fall(SimpleNamespace(position=position)) == 0


def asynchronous(path, change, update=lambda logits, number: moved(logits, number, 0.05), *, start=2.5, first=1):
    """A run in which weights that are one update old score all rollouts from step `first` on, as recorded."""
    weights = [table(sharpness=start)]
    with Recorder(path) as recorder:
        for name, contract in BOTH_FP32.items():
            recorder.add_contract(name, contract)
        for number in range(1, 7):
            weights.append(update(weights[-1], number))
            new, old = (number if number >= first else number - 1), number - 1
            step = sample(weights[old], 100 + number)
            batch = recorder.add_sequences(
                step=number,
                prompt_ids=[p.tolist() for p in step.prompts],
                response_ids=[r.tolist() for r in step.responses],
            )
            recorder.add_scores("rollout", batch, logprobs=change(step), policy_version=old)
            recorder.add_scores("train", batch, logprobs=step.scored(weights[new]), policy_version=new)
    return check(path)


def test_older_weights_do_not_excuse_what_a_formula_explains(tmp_path):
    found = asynchronous(tmp_path / "cold", lambda step: step.scored(step.logits / 0.6))
    assert (found.is_valid, found.findings[0].code) == (False, "temperature")
    found = asynchronous(tmp_path / "rolled", lambda step: [np.roll(row, 1) for row in step.scored()])
    assert (found.is_valid, found.findings[0].code) == (False, "shift")
    found = asynchronous(tmp_path / "sound", lambda step: step.scored())
    assert found.is_valid
    assert found.findings[0].is_expected


@pytest.mark.parametrize(("factor", "start"), [(1.15, 2.0), (1.3, 0.3), (0.8, 1.0)])
def test_a_policy_whose_logits_grow_or_shrink_has_no_other_temperature(tmp_path, factor, start):
    def scaled(logits, number):
        return moved(logits * np.float32(factor), number, 0.01)

    found = asynchronous(tmp_path / "trace", lambda step: step.scored(), scaled, start=start)
    assert found.is_valid, evidence_text(found.findings[0])


def test_a_policy_that_becomes_random_has_the_same_unit(tmp_path):
    def mixed(logits, number):
        chances = np.exp(log_softmax(logits))
        return np.log(0.99 * chances + 0.01 / len(logits)).astype(np.float32)

    found = asynchronous(tmp_path / "trace", lambda step: step.scored(), mixed, start=1.5, first=2)
    assert found.is_valid, evidence_text(found.findings[0])
    assert found.findings[0].is_expected


def test_a_uniform_policy_at_the_first_step_has_no_placeholders(tmp_path):
    run = Recording(
        weights=lambda number: table(sharpness=0.4 * (number - 1)), steps=5, contracts=BOTH_FP32, rollout=in_float32
    )
    assert check(run.write(tmp_path / "trace")).is_valid


def continued(path, *, since=3, are_first=True, fade=False):
    """Half of the rows have weights of their own before (or after) a token that varies from row to row."""
    with Recorder(path) as recorder:
        for name, contract in BOTH_FP32.items():
            recorder.add_contract(name, contract)
        for number in range(1, 9):
            weights = moved(table(), 3, 0.2 * number)
            step, draw = sample(weights, 100 + number), np.random.default_rng(number)
            batch = recorder.add_sequences(
                step=number, prompt_ids=[p.tolist() for p in step.prompts], policy_version=number - 1,
                response_ids=[r.tolist() for r in step.responses],
            )  # fmt: skip
            rows = []
            other = step.scored(moved(weights, 3, -0.4) if since > 1 else moved(weights, 4, 0.4))
            for place, (right, wrong) in enumerate(zip(in_float32(step, number), other, strict=True)):
                at = draw.integers(5, len(right) - 4)
                inside = np.arange(len(right)) < at if are_first else np.arange(len(right)) >= at
                share = np.exp(-np.arange(len(right)) / 10) if fade else 1.0 * inside
                rows.append(np.float32(right + (wrong - right) * share * (place % 2 and number >= since)))
            recorder.add_scores("rollout", batch, logprobs=rows)
            recorder.add_scores("train", batch, logprobs=step.scored(), entropy=step.entropies())
    return check(path)


@pytest.mark.parametrize(
    ("given", "cause", "broken"),
    [
        ({}, "older", "recording"), ({"are_first": False}, "newer", "recording"),
        ({"since": 1}, "beginnings", "computation"), ({"since": 1, "are_first": False}, "ends", "computation"),
    ],
)  # fmt: skip
def test_rows_that_change_at_a_token_of_their_own_were_continued(tmp_path, given, cause, broken):
    found = continued(tmp_path / "trace", **given)
    first = found.findings[0]
    assert (first.code, first.signal, first.numbers["cause"]) == ("position_onset", "in_rows", cause)
    assert found.broken == broken
    num = sum(number >= given.get("since", 3) for number in range(1, 9)) * 16
    assert 0.8 * num < first.numbers["num_rows"] <= num
    assert "varies from sequence to sequence" in evidence_text(first)


def test_a_mismatch_that_fades_in_half_of_the_rows_changes_at_no_token(tmp_path):
    assert "in_rows" not in {each.signal for each in continued(tmp_path / "trace", fade=True).findings}


def test_rounding_that_grows_after_a_router_flip_does_not_begin_in_another_context(tmp_path):
    def rollout(step, number):
        draw, rows = np.random.default_rng(number), []
        for right in step.scored():
            flips = draw.random(len(right)) < 0.03
            size = 0.002 + 0.01 * (np.cumsum(flips) > 0) + 0.5 * flips
            rows.append(np.minimum(right + np.expm1(right) * draw.normal(size=len(right)) * size, 0).astype(np.float32))
        return rows

    experts = {"engine": "trl", "model": {"dtypes": {"bfloat16": 1}, "class": "Qwen3MoeForCausalLM"}}
    run = Recording(
        rollout=rollout, contracts={"train": experts, "rollout": VLLM_BF16}, weights=lambda number: table(sharpness=1.5)
    )
    codes = {each.code for each in check(run.write(tmp_path / "trace")).findings}
    assert "router_flips" in codes
    assert "position_onset" not in codes


def test_ids_with_a_larger_mismatch_are_no_place_if_the_rest_is_wrong_too(tmp_path):
    def rollout(step, number):
        size = np.where(np.arange(len(step.logits)) % 4 == 0, 0.4, 0.08)[:, None]
        return step.scored(
            (step.logits + np.random.default_rng(7).normal(size=step.logits.shape) * size).astype(np.float32)
        )

    found = check(Recording(rollout=rollout, contracts={"train": FP32, "rollout": VLLM_BF16}).write(tmp_path / "trace"))
    assert not found.is_valid
    assert "one_place" not in {each.code for each in found.findings}


def test_a_cause_stands_beside_the_part_that_it_acts_in(tmp_path):
    def rollout(step, number):
        hot = step.scored(step.logits / 0.7)
        rows = zip(in_float32(step, number), hot, step.groups, strict=True)
        return [b if group in ("prompt-2", "prompt-5") else a for a, b, group in rows]

    assert codes(Recording(rollout=rollout).write(tmp_path / "trace")) == ["temperature", "subset"]


@pytest.mark.parametrize(("first", "since"), [(5, 5), (2, 2), (9, None)])
def test_a_mismatch_that_is_larger_from_a_step_on_says_the_step(tmp_path, first, since):
    def rollout(step, number):
        far = step.scored(moved(step.logits, 3, 0.3))
        rows = zip(in_float32(step, number), far, step.groups, strict=True)
        return [b if number >= first or (since is None and group == "prompt-2") else a for a, b, group in rows]

    trace = Recording(rollout=rollout, steps=6, contracts=BOTH_FP32).write(tmp_path / "trace")
    finding = next(each for each in check(trace).findings if each.code == "subset")
    assert finding.since == since
    assert (f"grows at step {since}" in finding.title) == (since is not None)


def test_sequences_that_are_off_as_a_whole_did_not_change_inside(tmp_path):
    def rollout(step, number):
        old = step.scored(moved(step.logits, 3, 0.3))
        rows = zip(in_bfloat16(step, number), old, strict=True)
        return [b if row % 3 == 1 else a for row, (a, b) in enumerate(rows)]

    found = check(Recording(rollout=rollout, steps=8).write(tmp_path / "trace")).findings
    part = next(finding for finding in found[:2] if finding.code == "subset")
    assert (part.numbers["column"], part.numbers["values"]) == ("row", "1, 4, 7, 10, 13, ...")


# --- Chance, and what is no fault -------------------------------------------------------------------------------------------


def test_rows_copied_from_the_other_pass_are_counted(tmp_path):
    def rollout(step, number):
        draw = np.random.default_rng(number)
        return [
            own if draw.random() < 0.2 else other
            for own, other in zip(step.scored(), in_bfloat16(step, number), strict=True)
        ]

    first = check(
        Recording(rollout=rollout, contracts={"train": FP32, "rollout": VLLM_BF16}).write(tmp_path / "trace")
    ).findings[0]
    assert (first.code, first.signal) == ("copies", "copied_rows")
    assert 0.1 < first.numbers["num_sequences"] / first.numbers["of_sequences"] < 0.3


def test_rows_of_three_tokens_find_partners_by_chance(tmp_path):
    def sides(step):
        draw = np.random.default_rng(step)
        return (-draw.exponential(1.5, (64, 3)) - 0.01).astype(np.float32), (-draw.exponential(1.5, (64, 3))).astype(
            np.float32
        )

    with Recorder(tmp_path / "trace") as recorder:
        for step in range(1, 9):
            batch = recorder.add_sequences(
                step=step, response_ids=np.random.default_rng(step).integers(0, 500, (64, 3))
            )
            for name, values in zip(("train", "rollout"), sides(step), strict=True):
                recorder.add_scores(name, batch, logprobs=values)
    assert "row_pairing" not in codes(tmp_path / "trace")


def test_a_shift_in_a_third_of_the_rows_is_one(tmp_path):
    def rollout(step, number):
        values = in_float32(step, number)
        return [np.append(row[1:], np.float32(-0.7)) if n % 3 == 0 else row for n, row in enumerate(values)]

    assert codes(Recording(rollout=rollout).write(tmp_path / "trace"))[0] == "shift"


def test_tokens_that_were_drawn_outside_of_what_a_side_keeps_are_a_truncation(tmp_path):
    def train(step, number):
        chances = np.exp(step.logits.astype(float))
        chances /= chances.sum(axis=-1, keepdims=True)
        kept = chances >= np.sort(chances, axis=-1)[:, -20:-19]
        with np.errstate(divide="ignore"):
            cut = np.log(np.where(kept, chances, 0) / (chances * kept).sum(axis=-1, keepdims=True))
        rows = zip(step.prompts, step.responses, strict=True)
        return [cut[np.concatenate([p[-1:], r[:-1]]).astype(int), r] for p, r in rows]

    assert codes(Recording(rollout=in_float32, train=train).write(tmp_path / "trace")) == ["truncation", "placeholders"]


def contracts(train, rollout):
    return {"train": {"engine": "trl"} | train, "rollout": {"engine": "vllm"} | rollout}


def test_weights_that_both_sides_quantise_alike_do_not_differ(tmp_path):
    both = contracts({"model": {"quantization": "int8"}}, {"config": {"model_config": {"quantization": "int8"}}})
    assert check(Recording(rollout=in_float32, contracts=both).write(tmp_path / "both")).is_valid
    one = contracts({}, {"config": {"model_config": {"quantization": "int8"}}})
    assert codes(Recording(rollout=in_float32, contracts=one).write(tmp_path / "one")) == ["weights_differ"]


def test_bfloat16_logprobs_of_a_bfloat16_engine_are_said_and_valid(tmp_path):
    from bigrams import bfloat16

    declared = contracts({"dtype": "float32"}, {"dtype": "bfloat16"})
    run = Recording(
        rollout=lambda step, number: [bfloat16(row) for row in in_bfloat16(step, number)], contracts=declared
    )
    found = check(run.write(tmp_path / "trace"))
    assert found.is_valid
    assert found.findings[0].code == "low_precision_head"
    assert "expected for the recorded engines, dtypes and versions" in evidence_text(found.findings[0])


def test_equal_bits_of_two_engines_in_one_dtype_are_said_and_valid(tmp_path):
    same = contracts({"dtype": "float32"}, {"dtype": "float32"})
    found = check(Recording(contracts=same).write(tmp_path / "trace"))
    assert (found.is_valid, found.findings[0].code) == (True, "copies")


def test_a_fitted_temperature_has_an_error_and_a_command_that_the_trace_can_run(tmp_path):
    for planted in (0.6, 0.9, 1.3):
        run = Recording(train=lambda step, number, t=planted: step.scored(step.logits / t), entropy=False)
        first = check(run.write(tmp_path / str(planted))).findings[0]
        assert first.numbers["least"] < 1 / planted < first.numbers["largest"]
        assert first.next.command.startswith("tim-trace query context-odds")


def tool_rows(step, number):
    """[T] bool a row: which tokens the engine sampled. The third to sixth are a tool's."""
    return [~np.isin(np.arange(len(row)), range(3, 7)) for row in step.responses]


def rolled(rows, by):
    return [np.roll(row, by(number)) for number, row in enumerate(rows)]


def without_tools(filler):
    def rows(step, number):
        rows = zip(in_float32(step, number), tool_rows(step, number), strict=True)
        return [np.where(sampled, row, np.float32(filler)) for row, sampled in rows]

    return rows


@pytest.mark.parametrize(
    ("by", "text", "filler"),
    [
        (lambda row: 0, "", np.nan),
        (lambda row: 1, "1 token late", np.nan),
        (lambda row: -2, "2 tokens early", np.nan),
        (lambda row: row % 5 - 2, "displaced, by different numbers of tokens", np.nan),
        (lambda row: 0, "", 0.0),
        (lambda row: 1, "1 token late", 0.0),
        (lambda row: -2, "2 tokens early", -1.0),
    ],
)
def test_a_loss_mask_beside_the_tokens_with_logprobs_is_displaced(tmp_path, by, text, filler):
    run = Recording(
        rollout=without_tools(filler), contracts=BOTH_FP32, options={"longest": 40},
        sequences=lambda step, number: {"response_mask": rolled(tool_rows(step, number), by)},
    )  # fmt: skip
    found = check(run.write(tmp_path / "trace"))
    displaced = [one for one in found.findings if one.code == "mask"]
    assert bool(displaced) == bool(text)
    assert found.is_valid == (not text)
    if text:
        assert f"the loss mask is {text}" in evidence_text(displaced[0])


@pytest.mark.parametrize("filler", [np.nan, 0.0])
def test_a_mask_of_exactly_the_tokens_without_logprobs_is_inverted(tmp_path, filler):
    inverted = Recording(
        rollout=without_tools(filler),
        sequences=lambda step, number: {"response_mask": [~row for row in tool_rows(step, number)]},
    )
    found = check(inverted.write(tmp_path / "trace"))
    assert not found.is_valid
    assert found.findings[0].title == "the loss mask is inverted"


def test_a_placeholder_at_the_first_token_is_no_displaced_mask_although_the_end_token_is_masked(tmp_path):
    def filled(step, number):
        return [np.r_[np.float32(0), row[1:]] for row in in_float32(step, number)]

    def all_but_last(step, number):
        return {"response_mask": [np.arange(len(row)) < len(row) - 1 for row in step.responses]}

    run = Recording(rollout=filled, contracts=BOTH_FP32, sequences=all_but_last)
    assert check(run.write(tmp_path / "trace")).findings[0].title == "placeholders instead of logprobs"


def test_sampled_from_neither_names_the_side_whose_entropies_are_recorded(tmp_path):
    def other_tokens(step, number):
        return step.scored(moved(step.logits, 7, 5.0))

    first = check(Recording(train=other_tokens).write(tmp_path / "trace")).findings[0]
    assert (first.code, first.numbers["sampled"]) == ("unrelated", "from_neither")
    assert "train's logprob + entropy averages" in evidence_text(first)
