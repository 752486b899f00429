"""Kinds of faults that only a general property shows: repeated values, neighbours, entropies, and a course over steps."""

from types import SimpleNamespace

import numpy as np
import pytest
from bigrams import BOTH_FP32, FP32, VLLM_BF16, Recording, bfloat16, in_float32, log_softmax, moved, sample, table
from tim_trace.analysis.check.check import check, gather
from tim_trace.analysis.check.faults import evidence_text
from tim_trace.analysis.check.faults.kinds import routing_replay
from tim_trace.analysis.check.features import _part_followed, model, reasons
from tim_trace.analysis.check.finding import Finding
from tim_trace.analysis.views import open_database
from tim_trace.tracer.recorder import Recorder

PADDING = 7
SOFT = table(sharpness=1.5)


def recorded(path, change, *, steps=4, logits=SOFT, contracts=BOTH_FP32, described=None, version=None, **options):
    """Record steps whose responses and values `change(number, response, train, rollout, draw)` returns for each row."""
    with Recorder(path) as recorder:
        for name, contract in contracts.items():
            recorder.add_contract(name, contract)
        if described is not None:
            recorder.describe(model={"config": described})
        for number in range(1, steps + 1):
            step, draw = sample(logits, number, **options), np.random.default_rng(number)
            own = zip(step.responses, step.scored(), in_float32(step, number), strict=True)
            rows = [change(number, *each, draw) for each in own]
            known = {} if version is None else {"policy_version": version(number)}
            batch = recorder.add_sequences(
                step=number, prompt_ids=[row.tolist() for row in step.prompts], response_ids=[row[0].tolist() for row in rows], **known
            )  # fmt: skip
            recorder.add_scores("train", batch, logprobs=[row[1] for row in rows], **known)
            recorder.add_scores("rollout", batch, logprobs=[row[2] for row in rows])
    return check(path)


def test_a_bias_of_each_id_is_of_the_output_layer(tmp_path):
    bias = np.random.default_rng(0).normal(size=60).astype(np.float32) * 0.1
    run = Recording(train=lambda step, number: step.scored(process=lambda rows: rows + bias), contracts=BOTH_FP32)
    first = check(run.write(tmp_path / "trace")).findings[0]
    assert (first.code, first.numbers["cause"]) == ("computation_differs", "head"), evidence_text(first)
    assert "output layer" in first.title


# --- Placeholders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "rounded"), [(-2.5, np.asarray), (-1.0, bfloat16)])
def test_padding_with_one_id_and_one_value_is_no_bias_on_this_id(tmp_path, value, rounded):
    def padded(number, response, train, rollout, draw):
        num = int(draw.integers(2, 20)) * (draw.random() < 0.4)
        low = draw.normal(-9, 1, num).astype(np.float32)
        padding = np.full(num, value, np.float32)
        return np.r_[response, np.full(num, PADDING)], np.r_[train, low], np.r_[rounded(rollout), padding]

    first = recorded(tmp_path / "trace", padded).findings[0]
    assert (first.code, first.signal, first.numbers["reason"]) == ("mask", "constant", "after_end")
    assert first.numbers["value"] == value
    assert f"all with id {PADDING}, extend to the end of their responses" in evidence_text(first)


def test_the_values_of_a_frequent_pair_of_tokens_are_no_placeholder(tmp_path):
    """After the same token, a token has one value, whatever the other side does."""

    def wrong(number, response, train, rollout, draw):
        pair = (response[1:] == 3) & (response[:-1] == 5)
        return response, train - np.r_[False, pair] * draw.uniform(3, 6, len(train)).astype(np.float32), rollout

    logits = SOFT.copy()
    logits[:, 5] += 2.0
    logits[5, 3] += 8.0
    found = recorded(tmp_path / "trace", wrong, logits=logits)
    assert not found.is_valid
    assert not {"placeholders", "mask"} & {each.code for each in found.findings}


# --- Values of neighbours --------------------------------------------------------------------------------------------------


def test_a_token_that_is_recorded_twice_is_named(tmp_path):
    rows = []

    def doubled(number, response, train, rollout, draw):
        if draw.random() < 0.8:
            return response, train, rollout
        at = int(draw.integers(2, len(response) - 2))
        twice = np.r_[np.arange(at), at - 1, np.arange(at, len(response))]
        rows.append(at)
        low = np.float32(draw.uniform(-9, -4))
        return response[twice], np.where(np.arange(len(twice)) == at, low, train[twice]), rollout[twice]

    found = recorded(tmp_path / "trace", doubled)
    first, *others = found.findings
    assert (first.code, first.signal, first.numbers["side"]) == ("shift", "neighbours", "rollout")
    assert (first.numbers["lag"], first.numbers["num_tokens"]) == (-1, len(rows))
    assert first.title == "some tokens were recorded twice"
    assert "one token was recorded twice" in evidence_text(first)
    assert not any(each.fails for each in others)


@pytest.mark.parametrize("side", ["train", "rollout"])
def test_short_runs_with_the_values_of_earlier_tokens_are_no_other_tokenisation(tmp_path, side):
    def offset(number, response, train, rollout, draw):
        values, right = (np.array(rollout), rollout) if side == "rollout" else (np.array(train), train)
        at = 1
        while (at := at + int(draw.integers(6, 16))) < len(values) - 5:
            num = int(draw.integers(2, 5))
            values[at : at + num] = right[at - 2 : at + num - 2]
        return (response, train, values) if side == "rollout" else (response, values, rollout)

    found = recorded(tmp_path / "trace", offset, steps=6)
    first = found.findings[0]
    assert (first.code, first.signal, first.numbers["side"], first.numbers["lag"]) == ("shift", "neighbours", side, -2)
    assert "the token 2 places earlier" in evidence_text(first)


def test_the_first_values_of_such_runs_can_belong_to_another_row(tmp_path):
    def offset(number, response, train, rollout, draw):
        values, at = np.array(rollout), 1
        while (at := at + int(draw.integers(6, 16))) < len(values) - 5:
            num = int(draw.integers(2, 5))
            values[at : at + num] = np.r_[np.float32(-draw.exponential(3.0)), rollout[at : at + num - 1]]
        return response, train, values

    first, *others = recorded(tmp_path / "trace", offset, steps=6).findings
    assert (first.code, first.numbers["lag"]) == ("shift", -1)
    assert 0.2 * first.numbers["num_tokens"] < first.numbers["num_beside"] < first.numbers["num_tokens"]
    assert "retokenised" not in {each.code for each in others}


def test_other_wrong_values_belong_to_no_neighbour(tmp_path):
    def wrong(number, response, train, rollout, draw):
        off = draw.random(len(rollout)) < 0.05
        return response, train, np.where(off, -draw.exponential(2.0, len(rollout)), rollout).astype(np.float32)

    found = recorded(tmp_path / "trace", wrong, steps=6)
    assert not found.is_valid
    assert "shift" not in {each.code for each in found.findings}


# --- Logprobs divided by the temperature -----------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.6, 1.4])
def test_logprobs_divided_by_the_temperature_are_no_extra_vocabulary(tmp_path, temperature):
    run = Recording(
        weights=lambda number: table() / temperature,
        rollout=lambda step, number: [row / np.float32(temperature) for row in step.scored(step.logits * temperature)],
        sequences=lambda step, number: {"temperature": temperature}, contracts=BOTH_FP32,
    )  # fmt: skip
    first = check(run.write(tmp_path / "trace")).findings[0]
    assert (first.code, first.signal, first.numbers["side"]) == ("temperature", "divided", "rollout")
    assert first.numbers["temperature"] == pytest.approx(temperature)
    assert "not normalised again" in evidence_text(first)


def test_extra_vocabulary_at_a_recorded_temperature_stays_that(tmp_path):
    def rollout(step, number):
        wide = np.concatenate([step.logits, np.zeros((len(step.logits), 40), np.float32)], axis=1)
        scores, rows = log_softmax(wide), zip(step.prompts, step.responses, strict=True)
        return [scores[np.r_[p[-1:], r[:-1]].astype(int), r].astype(np.float32) for p, r in rows]

    run = Recording(rollout=rollout, sequences=lambda step, number: {"temperature": 0.6}, contracts=BOTH_FP32)
    assert check(run.write(tmp_path / "trace")).findings[0].code == "padded_vocabulary"


# --- Growth and onset below the largest possible rounding -----------------------------------------------------------------

BF16 = {"train": FP32, "rollout": VLLM_BF16}


def rounded(size):
    """Change the engine's logprobs by errors of the logit of `size(number, position)` nats."""

    def change(number, response, train, rollout, draw):
        error = draw.normal(size=len(train)) * size(number, np.arange(len(train)))
        return response, train, np.minimum(train + np.expm1(train) * error, -1e-6).astype(np.float32)

    return change


def test_a_mismatch_that_grows_with_the_updates_on_policy_is_no_rounding(tmp_path):
    path, growing = tmp_path / "trace", rounded(lambda number, position: 0.005 * number)
    first = recorded(path, growing, steps=5, contracts=BF16, version=lambda number: number - 1).findings[0]
    assert (first.code, first.signal, first.broken) == ("weights_differ", "grows", "engine")
    assert first.numbers["ratio"] == pytest.approx(5, rel=0.3)
    assert "same policy version" in evidence_text(first)


@pytest.mark.parametrize(
    ("size", "version"),
    [
        (lambda number, position: 0.005 * number, None),  # the recording does not say that the engine is up to date
        (lambda number, position: 0.005 * (1 + 0.1 * number), lambda number: number - 1),
        (lambda number, position: 0.005 * (1 + number % 2), lambda number: number - 1),  # no course
    ],
)
def test_rounding_that_varies_between_steps_is_no_fault(tmp_path, size, version):
    assert recorded(tmp_path / "trace", rounded(size), steps=6, contracts=BF16, version=version).is_valid


@pytest.mark.parametrize(
    ("sharpness", "size"),
    [
        (lambda number: 1.0 + 0.6 * number, lambda number: 0.005 * number),
        (lambda number: 0.1 * number**1.5, lambda number: 0.0005 * number**1.5),  # from a uniform policy
        (lambda number: 0.001 * 6.0 ** (number - 1), lambda number: 1.5e-5 * 6.5 ** (number - 1)),
        (lambda number: 1.2 * 0.7**number, lambda number: 0.012 * 1.01**number),  # towards a uniform policy
    ],
)
def test_rounding_that_grows_relative_to_a_policy_whose_sharpness_changes_is_no_fault(tmp_path, sharpness, size):
    with Recorder(tmp_path / "trace") as recorder:
        for name, contract in BF16.items():
            recorder.add_contract(name, contract)
        for number in range(1, 6):
            step, draw = sample(table(sharpness=sharpness(number)), number), np.random.default_rng(number)
            batch = recorder.add_sequences(
                step=number, prompt_ids=[row.tolist() for row in step.prompts], policy_version=number - 1,
                response_ids=[row.tolist() for row in step.responses],
            )  # fmt: skip
            change = rounded(lambda number, position: size(number))
            rows = [change(number, None, row, row, draw) for row in step.scored()]
            recorder.add_scores("train", batch, logprobs=[row[1] for row in rows], policy_version=number - 1)
            recorder.add_scores("rollout", batch, logprobs=[row[2] for row in rows])
    assert check(tmp_path / "trace").is_valid


@pytest.mark.parametrize(("window", "is_fault"), [(19, True), (28, False)])
def test_rounding_that_begins_to_grow_at_the_recorded_window_is_a_fault(tmp_path, window, is_fault):
    change = rounded(lambda number, position: np.where(position + 4 >= 20, 0.02, 0.006))
    found = recorded(tmp_path / "trace", change, steps=6, contracts=BF16, described={"sliding_window": window})
    assert found.is_valid != is_fault
    assert ("the recorded sliding_window of 19" in evidence_text(found.findings[0])) == is_fault


# --- The reference -----------------------------------------------------------------------------------------------------


def with_reference(path, part, steps=8, moved=lambda number: number - 1):
    """Record steps. The trainer is `moved(number)` away from the reference, and the engine stays `part(number)` of the
    way behind."""
    with Recorder(path) as recorder:
        for name, contract in BOTH_FP32.items():
            recorder.add_contract(name, contract)
        for number in range(1, steps + 1):
            step, draw = sample(SOFT, number), np.random.default_rng(number)
            apart = [draw.normal(0, 0.1 * moved(number), len(row)) for row in step.responses]
            train = [np.minimum(row, -0.01) for row in step.scored()]
            batch = recorder.add_sequences(
                step=number, prompt_ids=[row.tolist() for row in step.prompts], response_ids=[row.tolist() for row in step.responses]
            )  # fmt: skip
            values = {
                "train": train,
                "reference": [np.minimum(row - each, -1e-3) for row, each in zip(train, apart, strict=True)],
            }
            values["rollout"] = [
                row + part(number) * (other - row) + draw.normal(0, 1e-5, len(row))
                for row, other in zip(train, values["reference"], strict=True)
            ]
            for name, rows in values.items():
                recorder.add_scores(name, batch, logprobs=[row.astype(np.float32) for row in rows])
    return check(path).findings[0]


@pytest.mark.parametrize(
    ("part", "cause", "steps"),
    [
        (lambda number: 0.5, "part_of_updates", (2, 8)),
        (lambda number: 1.0, "reference", (2, 8)),
        (lambda number: 1.0 * (number == 6), "reference", (6, 6)),
    ],
)
def test_an_engine_with_the_references_weights_or_part_of_the_updates_is_named(tmp_path, part, cause, steps):
    found = with_reference(tmp_path / "run", part)
    assert (found.code, found.signal, found.numbers["cause"]) == ("weights_differ", "reference", cause)
    assert (found.numbers["first_step"], found.numbers["last_step"]) == steps
    assert found.broken == "engine"
    assert f"{part(6):.0%} of the way from train's to the reference's" in evidence_text(found)


@pytest.mark.parametrize("steps", [2, 8])
def test_an_engine_one_update_behind_does_not_have_the_references_weights(tmp_path, steps):
    found = with_reference(tmp_path / "run", lambda number: 1 / max(number - 1, 1), steps)
    assert found.signal != "reference"


@pytest.mark.parametrize("steps", [1, 8])
def test_a_trainer_that_is_wrong_from_the_first_step_is_no_fault_of_the_engine(tmp_path, steps):
    found = with_reference(tmp_path / "run", lambda number: 1.0, steps, moved=lambda number: 2.0)
    assert found.signal != "reference"


def with_part(path, part, curve=lambda logits: logits, steps=8):
    """A run whose engine applies `part` of each update, and whose trainer computes a `curve` of its logits."""
    trainer = engine = table()
    with Recorder(path) as recorder:
        for name, contract in BOTH_FP32.items():
            recorder.add_contract(name, contract)
        for number in range(1, steps + 1):
            step = sample(engine, 100 + number, in_group=8, longest=30)
            step.prompts = [np.full(4, row // 8) for row in range(len(step.prompts))]
            batch = recorder.add_sequences(
                step=number, prompt_ids=[row.tolist() for row in step.prompts], response_ids=[row.tolist() for row in step.responses],
                policy_version=number - 1,
            )  # fmt: skip
            recorder.add_scores("rollout", batch, logprobs=step.scored(engine))
            recorder.add_scores("train", batch, logprobs=step.scored(curve(trainer)))
            change = moved(trainer, number, 0.15) - trainer
            trainer, engine = trainer + change, engine + (change * part).astype(np.float32)
    return check(path).findings[0]


def test_a_share_of_the_updates_is_found_if_all_tokens_come_again_at_one_step():
    draw = np.random.default_rng(0)
    others = draw.normal(size=80)
    own = 0.04 * others + 0.02 * draw.normal(size=80)
    assert _part_followed(own, others, np.full(80, 2), noise=1e-3) == pytest.approx(0.04, rel=0.2)


def test_changes_that_only_resemble_the_trainers_are_no_share_of_the_updates():
    draw = np.random.default_rng(0)
    others = draw.normal(size=400)
    own = 0.25 * others + 0.35 * draw.normal(size=400)  # an engine three steps behind that learns in similar directions
    assert _part_followed(own, others, np.arange(400), noise=0.1) == 0.0


@pytest.mark.parametrize(("part", "signal"), [(0.25, "follows"), (0.04, "follows"), (0.0, "frozen")])
def test_an_engine_that_applies_part_of_each_update_is_not_frozen(tmp_path, part, signal):
    first = with_part(tmp_path / "run", part)
    assert (first.code, first.signal, first.broken) == ("weights_differ", signal, "engine")
    if part:
        assert first.numbers["part"] == pytest.approx(part, rel=0.3)
    assert ("--arm weights-version=0 &&" in first.next) == (not part)


@pytest.mark.parametrize(("scatter", "expected"), [(0.6, "row_context"), (0.0, "weights_differ")])
def test_identical_tokens_with_many_wrong_values_do_not_come_from_other_weights(tmp_path, scatter, expected):
    """Half of a trainer's rows are off in the direction of its updates: as far as their neighbours move them, or all equally far."""
    direction = moved(table(), 9, 1.0) - table()

    def train(step, number):
        out, draw = step.scored(), np.random.default_rng(number)
        for row in draw.permutation(len(out))[::2]:
            out[row] = step.scored(step.logits + (0.6 + scatter * draw.normal()) * direction)[row]
        return out

    run = Recording(
        train=train, rollout=lambda step, number: step.scored(bfloat16(step.logits)), steps=6,
        weights=lambda number: table() + 0.2 * number * direction, contracts={"rollout": VLLM_BF16, "train": FP32},
        options={"in_group": 8, "longest": 40},
    )  # fmt: skip
    assert check(run.write(tmp_path / "trace")).findings[0].code == expected


@pytest.mark.parametrize(("lag", "cause", "side"), [(1, "stale_weights", "rollout"), (-1, "after_update", "train")])
def test_weights_of_another_step_are_found_in_tokens_that_come_again(tmp_path, lag, cause, side):
    """The engine keeps the weights of the step before, or the trainer scores with those of the next step."""
    weights = [table()]
    weights += [moved(weights[0], 70 + number, 3.0) for number in range(9)]
    with Recorder(tmp_path / "run") as recorder:
        for name, contract in BOTH_FP32.items():
            recorder.add_contract(name, contract)
        for number in range(8):
            engine = weights[max(number - (lag > 0), 0)]
            step = sample(engine, 100 + number, in_group=8, longest=30)
            step.prompts = [np.full(4, row // 8) for row in range(len(step.prompts))]
            batch = recorder.add_sequences(
                step=number, prompt_ids=[row.tolist() for row in step.prompts], response_ids=[row.tolist() for row in step.responses],
                policy_version=number,
            )  # fmt: skip
            recorder.add_scores("rollout", batch, logprobs=step.scored(moved(engine, 7, 1e-5)))
            recorder.add_scores("train", batch, logprobs=step.scored(weights[number + (lag < 0)]))
    first = check(tmp_path / "run").findings[0]
    assert (first.code, first.signal, first.numbers["cause"]) == ("weights_differ", "same_weights", cause)
    assert (first.numbers["side"], first.numbers["lag"]) == (side, 1)
    assert f"--arm weights-version={7 - (lag > 0)} &&" in first.next


def test_a_trainer_whose_logits_are_wrong_from_the_first_step_on_does_not_miss_updates(tmp_path):
    wrong = with_part(tmp_path / "run", 1.0, lambda logits: 4 * logits * np.tanh(np.abs(logits) / 2))
    assert wrong.signal != "follows"


@pytest.mark.parametrize(("config", "is_valid"), [({"hidden_size": 8}, False), ({"num_experts": 8}, True)])
def test_two_tokens_that_rounding_cannot_explain_are_router_flips_only_with_experts(tmp_path, config, is_valid):
    rows = iter(range(10_000))

    def change(number, response, train, rollout, draw):
        if next(rows) in (3, 70):
            rollout = rollout.copy()
            rollout[2] -= np.float32(2.0)
        return response, train, rollout

    assert recorded(tmp_path / "run", change, described=config).is_valid == is_valid


@pytest.mark.parametrize(("value", "found"), [(1.0, "use_rollout_routing_replay"), (0.0, ""), ("disabled", "")])
def test_a_routing_replay_may_be_recorded_as_a_hyperparameter(value, found):
    data = SimpleNamespace(settings={"use_rollout_routing_replay": value}, contract=lambda side: {})
    assert routing_replay(data) == found


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        ({"rope_parameters": {"rope_type": "linear", "factor": 4.0}}, "rope_type=linear, factor=4.0"),
        ({"num_experts": 8, "norm_topk_prob": True, "logit_scale": 1.0}, "num_experts=8, norm_topk_prob=True"),
        ({"rope_parameters": {"rope_type": "default", "factor": 1.0}, "sliding_window": 4096}, None),
    ],
)
def test_a_model_that_differs_from_the_first_step_on_has_a_setting_that_may_be_ignored(tmp_path, config, settings):
    noise = table(9, sharpness=0.3)

    def change(number, response, train, rollout, draw):
        return response, train, np.minimum(rollout + noise[response, np.r_[response[1:], 0]], -1e-4).astype(np.float32)

    found = recorded(tmp_path / "run", change, described=config).findings
    known = [each.numbers["settings"] for each in found if each.signal == "setting"]
    assert known == ([] if settings is None else [settings])
    assert settings is None or f"include {settings}" in evidence_text(found[0])


def test_a_run_whose_mask_leaves_out_every_token_is_told_so(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        for number in range(1, 4):
            step = sample(table(), 100 + number)
            batch = recorder.add_sequences(
                step=number, prompt_ids=[row.tolist() for row in step.prompts], response_ids=[row.tolist() for row in step.responses],
                response_mask=[[False] * len(row) for row in step.responses], reward=np.arange(len(step.responses)) % 2,
                finish_reason=["length" if at % 4 == 0 else "stop" for at in range(len(step.responses))],
            )  # fmt: skip
            recorder.add_scores("rollout", batch, logprobs=in_float32(step, number))
            for name in ("train", "reference", "current"):
                recorder.add_scores(name, batch, logprobs=step.scored())
    found = check(tmp_path / "run")
    assert not found.is_compared
    assert "has no token in the loss: response_mask is false for every token" in evidence_text(found.findings[0])
    assert "finished_masked" in [each.code for each in found.data]


@pytest.mark.parametrize("is_known", [True, False])
def test_experts_are_expected_only_where_the_trace_has_some(is_known):
    numbers = {"tail_share": 0.05, "tail_ratio": 10.0, "bulk": 0.01, "experts_known": int(is_known), "cause": "" if is_known else "unknown"}  # fmt: skip
    found = Finding(
        code="router_flips", signal="router_tail", effect=0.1, share=0.05, is_expected=True, numbers=numbers
    )
    assert ("expected for the recorded engines" in evidence_text(found)) == is_known
    assert ("does not show whether the model has experts" in evidence_text(found)) != is_known


@pytest.mark.parametrize("first", [0.02, 0.4])
def test_a_first_step_within_rounding_is_not_said_to_be_large(tmp_path, first):
    with Recorder(tmp_path / "run") as recorder:
        recorder.add_contract("train", FP32)
        recorder.add_contract("rollout", VLLM_BF16)
        for number in range(1, 7):
            step, draw = sample(table(), 100 + number), np.random.default_rng(number)
            size = first if number == 1 else 0.6
            train = [np.minimum(row + size * draw.normal(size=len(row)), -1e-6) for row in step.scored()]
            batch = recorder.add_sequences(
                step=number, prompt_ids=[row.tolist() for row in step.prompts], response_ids=[row.tolist() for row in step.responses]
            )  # fmt: skip
            recorder.add_scores("rollout", batch, logprobs=step.scored())
            recorder.add_scores("train", batch, logprobs=[row.astype(np.float32) for row in train])
    data = gather(open_database(tmp_path / "run"), ("train", "rollout"), trace=str(tmp_path / "run"))
    said = {is_above for kind in model().kinds for name, _, is_above in reasons(data, kind) if name == "first_step"}
    assert said == ({True} if first > 0.1 else set())
