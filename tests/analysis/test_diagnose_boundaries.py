"""Every level and verdict of diagnose, just under and just over its boundary."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import tim_trace.analysis
from click.testing import CliRunner
from tim_trace import cli
from tim_trace.analysis.advice import Advice
from tim_trace.analysis.alarms.reading import ALARMS, AlarmReadings, judge_level
from tim_trace.analysis.alarms.text import alarm_sentence
from tim_trace.analysis.attribution.attribution import Attribution, Evidence, Suspect
from tim_trace.analysis.check import commands
from tim_trace.analysis.check.check import CheckResult
from tim_trace.analysis.check.faults import ALL, FAULTS
from tim_trace.analysis.check.finding import Finding
from tim_trace.analysis.check.pair_data import Precision
from tim_trace.analysis.diagnosis import diagnose as diagnose_module
from tim_trace.analysis.diagnosis import diagnose as replay_effects
from tim_trace.analysis.diagnosis.diagnose import (
    _figures,
    _next,
    coarser_dtype,
    own_metrics,
    removed_interval,
    size_comparison,
)
from tim_trace.analysis.diagnosis.diagnosis import Diagnosis, Numerics, ReplayEffect, SizeComparison
from tim_trace.analysis.diagnosis.figures import FIGURES
from tim_trace.analysis.diagnosis.text import (
    diagnosis_text,
    effect_text,
    numerics_text,
    size_text,
    story,
)
from tim_trace.analysis.facts.recorded import RecordedChange
from tim_trace.analysis.facts.series import Fall
from tim_trace.analysis.rows import result_json
from tim_trace.analysis.statement import Statement
from tim_trace.analysis.trace.pair_sums import OF_DIFFERENCES
from tim_trace.schemas.steps import ALL_STEPS


def effect(removed, changes=None):
    return ReplayEffect(
        arm="bf16", pair=("train", "rollout"), num_tokens=10, gap_rms=1.0, left_rms=0.5, removed=removed, low=None, high=None,
        no_interval="fewer than 8 groups", changes=changes,
    )  # fmt: skip


def checked(code="rounding", command=""):
    fault = next(each for each in ALL if each.code == code)
    finding = Finding(
        code=code, signal=next(iter(fault.evidence)), effect=0.1, share=1.0, next=Advice(command), cause=fault.title, side=fault.broken,
        numbers={"level": 0.1, "allowed": 0.2, "a": "train", "b": "rollout", "dtype_a": None, "dtype_b": None},
    )  # fmt: skip
    return CheckResult(
        trace="run", pair="train:rollout", num_tokens=2, num_sampled_tokens=2, rms_d=0.1, findings=(finding,)
    )


FALL = Fall(
    outcome="reward", onset_of="reward", kind="collapse", step=60, low=58, high=62, interval=(57, 63), fallen=65,
    before=0.8, after=0.3, size_in_sd=9.0,
)  # fmt: skip
LENGTHS = RecordedChange(
    series="prompt_length", kind="prompts", step=60, low=60, high=60, before=4.0, after=12.0, size_in_sd=99.0, shape="shift",
    order="with",
)  # fmt: skip
TEMPERATURE = RecordedChange(
    series="temperature", kind="setting", step=57, low=57, high=57, before=1.0, after=2.0, size_in_sd=None, shape="set",
    order="with",
)  # fmt: skip


def attributed(*, fall=None, outcome="reward", changes=(), suspects=(), **given):
    return Attribution(
        trace="run", control=None, kind="observation", num_steps=100, outcome=outcome, fall=fall,
        changes=tuple(changes), suspects=tuple(suspects), **given,
    )  # fmt: skip


def readings(metric, *values):
    """The published alarms of a metric, held against its values at steps 1, 2, ..."""
    steps = np.arange(1, len(values) + 1)
    return [judge_level(alarm, steps, np.array(values)) for alarm in ALARMS if alarm.metric == metric]


def diagnosed(code="rounding", replays=(), attribution=None, jumps=()):
    return Diagnosis(
        checked=checked(code),
        attribution=attribution or attributed(),
        jumps=tuple(jumps),
        numerics=Numerics(
            passes=("train", "rollout"), declared=("float32", None), logits=("float32", "bfloat16"), values=(None, "float16")
        ),
        metrics={}, size=SizeComparison(code="unpublished", own=0.1, coarser=None), figures=(),
        alarms=AlarmReadings(judged=tuple(readings("mean_abs_d", 0.04))), replays=tuple(replays), next=(),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("removed", "code", "words"),
    [
        (1.0, "settles", "this setting causes the mismatch"),
        (0.901, "settles", "this setting causes the mismatch"),
        (0.899, "part", "bf16 accounts for part of the mismatch"),
        (0.101, "part", "bf16 accounts for part of the mismatch"),
        (0.099, "nothing", "bf16 has no effect on the mismatch"),
        (-0.099, "nothing", "bf16 has no effect on the mismatch"),
        (-0.101, "adds", "bf16 increases the mismatch"),
    ],
)
def test_what_a_replay_does(removed, code, words):
    replay = effect(removed)
    assert replay.code == code
    assert words in effect_text(replay)
    diagnosis = diagnosed(replays=[replay])
    assert diagnosis.settled_by == (replay if code == "settles" else None)
    assert (
        result_json(diagnosis)["replays"][0] | {"code": code, "sentence": effect_text(replay)}
        == (result_json(diagnosis)["replays"][0])
    )


@pytest.mark.parametrize(("removed", "code"), [(0.901, "repeats"), (0.899, "part")])
def test_an_engine_that_repeats_its_own_rollout_settles_nothing(removed, code):
    replay = replace(effect(removed), is_own_engine=True)
    assert (replay.code, diagnosed(replays=[replay]).settled_by) == (code, None)
    assert ("bf16 reproduces rollout: rollout's engine computes" in effect_text(replay)) == (code == "repeats")


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ("weights-version=3", "the engine has the weights of version 3: fix the weight sync"),
        ("quantize=int8,attention=math", "the engine has weights quantised to int8: send unquantised weights, or correct for the mismatch"),
        ("temperature=0.9", "the engine's logprobs are at temperature 0.9: compute both sides' logprobs at one temperature"),
        ("kv-dtype=fp8,mode=decode", "the engine's key-value cache is quantised with scale 1: use calibrated scales, or do not quantise the cache"),
        ("attention=math", ""),
    ],
)  # fmt: skip
def test_a_replay_that_settles_it_is_the_answer(changes, cause):
    found, invalid = effect(0.95, changes), checked("weights_differ")
    assert effect_text(found).endswith(cause.partition(": ")[0] or "this setting causes the mismatch")
    data = SimpleNamespace(has_weights=False)
    assert not invalid.is_valid
    assert _next(data, invalid, (found,)) == ((cause,) if cause else ())
    assert _next(data, checked("rounding"), (found,)) == ()


def test_the_first_replay_that_settles_is_named():
    replays = [effect(0.5), effect(0.95), effect(0.99)]
    assert diagnosed(replays=replays).settled_by == replays[1]


# The ends of what was published of healthy runs: rms_d in nats, by the coarser side's dtype.
RANGES = {
    "float32": (1.9e-3, 2.2e-3),
    "float16": (5.0e-3, 5.0e-3),
    "bfloat16": (0.0306, 0.045),
    "float8": (0.131, 0.131),
}


@pytest.mark.parametrize("coarser", RANGES)
@pytest.mark.parametrize(
    ("end", "factor", "code"), [(0, 0.99, "below"), (0, 1.0, "within"), (1, 1.0, "within"), (1, 1.01, "above")]
)
def test_the_size_lies_below_within_or_above_what_was_published(coarser, end, factor, code):
    own = RANGES[coarser][end] * factor
    size = size_comparison("rounding", own, _figures({"rms_d": own}, coarser), coarser)
    assert (size.code, size.low, size.high) == (code, *RANGES[coarser])
    said = size_text(size, is_valid=True)
    is_value = np.ptp(RANGES[coarser]) == 0
    where = "at" if is_value and code == "within" else code
    assert f"is {where} the published {'value' if is_value else 'range'} for {coarser} (" in said
    assert said.endswith("): the check explains it (rounding)." if code == "above" else "): normal.")
    said = size_text(size, is_valid=False)
    assert said == f"cannot tell until the fault is fixed; the mismatch is {own:.3g} nats rms over the whole run"


def test_a_size_without_figures_or_without_mismatch():
    unknown = size_comparison("rounding", 0.1, _figures({"rms_d": 0.1}, None), None)
    assert (unknown.code, unknown.low, unknown.high) == ("unpublished", None, None)
    assert size_text(unknown, is_valid=True).endswith("dtype not recorded, so there is no reference value.")
    lost = size_comparison("placeholders", float("nan"), _figures({}, "float32"), "float32")
    assert size_text(lost, is_valid=False).endswith("is fixed; no token has a finite logprob in both passes")
    equal = size_comparison("equal", 0.0, _figures({"rms_d": 0.0}, "float32"), "float32")
    assert (equal.code, size_text(equal, is_valid=True)) == ("equal", "No mismatch.")


def test_figures_of_broken_runs_are_no_range():
    faults = {figure.metric for figure in FIGURES if figure.is_fault}
    assert "mean_abs_d" in faults
    found = [each for each in _figures({"rms_d": 0.04}, "bfloat16") if each.fits]
    broken = [
        SimpleNamespace(**{"fits": True, "figure": SimpleNamespace(metric="rms_d", is_fault=True, low=0.0, high=9.0)})
    ]
    assert size_comparison("rounding", 1.0, [*found, *broken], "bfloat16").code == "above"


@pytest.mark.parametrize(
    ("sides", "coarser"),
    [
        ((None, None), None),
        (("float32", None), "float32"),
        (("float32", "float16"), "float16"),
        (("bfloat16", "float16"), "bfloat16"),
        (("bfloat16", "float8"), "float8"),
        (("float64", "float32"), "float32"),
    ],
)
def test_the_coarser_side_decides(sides, coarser):
    assert coarser_dtype(tuple(Precision(dtype, None, None) for dtype in sides)) == coarser


def test_a_figure_fits_by_its_coarser_side_and_comes_first():
    metrics = {"rms_d": 0.1, "mean_abs_d": 0.1}
    found = _figures(metrics, "float8")
    assert {each.figure.dtypes for each in found if each.fits} == {("bfloat16", "float8")}
    assert [each.fits for each in found] == sorted((each.fits for each in found), reverse=True)
    assert not any(each.fits for each in _figures(metrics, None))


# Published levels, as the sources have them: raised above the level, or below it.
LEVELS = [
    ("verl", "prob_diff_mean", 0.01, True), ("verl", "k1", 0.1, True), ("verl", "chi2_token", 1.0, True),
    ("verl", "ess_token", 0.3, False), ("NeMo-RL", "mean_exp_abs_d", 1.05, True), ("NeMo-RL", "k3", 1e-3, True),
    ("Miles", "k3", 1.0, True), ("Miles", "mean_abs_d", 0.8, True), ("prime-rl", "k3", 0.15, True),
    ("Tinker", "k3", 0.01, True), ("Tinker", "k1", 0.01, True), ("Liu and Li", "k3", 1e-3, True), ("Liu and Li", "k3", 2e-2, True),
    ("Ling team (IcePop)", "mean_abs_d", 0.05, True), ("slime", "mean_abs_d", 0.03, True),
]  # fmt: skip


def raised(who, metric, level, own):
    (reading,) = [
        each
        for each in readings(metric, own)
        if (each.alarm.who, each.alarm.metric) == (who, metric) and each.alarm.level == level
    ]
    return reading.is_raised


@pytest.mark.parametrize(("who", "metric", "level", "above"), LEVELS)
def test_an_alarm_is_raised_beyond_its_level(who, metric, level, above):
    assert raised(who, metric, level, level * 1.01) is above
    assert raised(who, metric, level, level * 0.99) is not above
    assert not raised(who, metric, level, level)


def test_every_alarm_has_its_level_here():
    assert {(alarm.who, alarm.metric, alarm.level, alarm.above) for alarm in ALARMS} == set(LEVELS)


def test_only_of_k1_a_negative_value_alarms_like_a_positive_one():
    assert raised("verl", "k1", 0.1, -0.101)
    assert not raised("verl", "k1", 0.1, -0.099)
    assert not raised("verl", "chi2_token", 1.0, -1.5)


def test_an_alarm_says_which_step_its_figure_is_of():
    k1, _ = readings("k1", 0.01, -0.3, 0.2, 0.02)  # verl's level, then Tinker's
    assert (k1.own, k1.worst_step, k1.first_step, k1.last_step, k1.num_steps, k1.still) == (-0.3, 2, 2, 3, 2, False)
    assert alarm_sentence(k1) == "verl: k1 > 0.1 (worst: -0.3 at step 2), from step 2 to 3"
    (ess,) = readings("ess_token", 0.9, 0.4, 0.8)
    assert (ess.own, ess.worst_step, ess.is_raised, ess.first_step) == (0.4, 2, False, None)
    assert alarm_sentence(ess) == "verl: ess_token < 0.3 (worst: 0.4 at step 2)"


DATA = SimpleNamespace(
    trace="run",
    has_weights=True,
    is_import=False,
    is_recorder=False,
    sample=SimpleNamespace(steps=np.array([3, 7])),
    contract=lambda side: {},
    config={},
)
LOCATE = "tim-trace locate run --steps 7 --against dtype=bf16"
TRIANGULATE = "tim-trace triangulate run --steps 7 --arm dtype=bf16 --arm lm-head=fp32"
RECORD = "tim-trace record --weights delta -o RUN -- COMMAND  # this trace has no weights for a replay"


@pytest.mark.parametrize(
    ("code", "removed", "has_weights", "expected"),
    [
        ("rounding", None, True, ("look", TRIANGULATE)),
        ("rounding", 0.899, True, ("look", TRIANGULATE)),
        ("rounding", 0.901, True, ()),
        ("rounding", None, False, ("look",)),
        ("temperature", None, True, ("look",)),
        ("temperature", None, False, ("look", RECORD)),
        ("temperature", 0.901, True, ()),
        ("equal", None, True, ()),
        ("equal", None, False, ()),
    ],
)
def test_what_is_next(code, removed, has_weights, expected):
    data = SimpleNamespace(**vars(DATA) | {"has_weights": has_weights})
    replays = () if removed is None else (effect(0.0), effect(removed))
    assert _next(data, checked(code, "look"), replays) == expected


@pytest.mark.parametrize(
    ("removed", "changes", "shown"),
    [
        (0.77, "kv-dtype=fp8,mode=decode", "a replay with kv-dtype=fp8,mode=decode accounts for part of the mismatch (77% of it)"),
        (-0.5, "kv-dtype=fp8,mode=decode", "a replay with kv-dtype=fp8,mode=decode increases the mismatch"),
        (0.77, "quantize=int8", None),
        (0.77, None, None),
    ],
)  # fmt: skip
def test_a_replay_that_was_run_is_not_proposed_again(removed, changes, shown):
    asked = Advice("tim-trace replay run --steps 7 --kv-dtype fp8 --mode decode --name suspect")
    result = checked("weights_differ")
    found = replace(result, findings=(replace(result.findings[0], next=asked),))
    assert _next(DATA, found, (effect(removed, changes),))[0] == (shown or asked)


@pytest.mark.parametrize("source", [{}, {"is_import": True}, {"is_recorder": True}])
def test_missing_weights_are_supplied_as_the_trace_was_written_and_once(source):
    data = SimpleNamespace(**vars(DATA) | {"has_weights": False, "steps": ALL_STEPS} | source)
    sides = {"a": SimpleNamespace(name="train"), "b": SimpleNamespace(name="rollout")}
    data.sample = SimpleNamespace(**vars(data.sample), **sides)
    advice = commands.arms(data, "--arm quantize=int8")
    assert ("Recorder.add_weights" in advice, "tim-trace record" in advice) == (
        "is_recorder" in source, not source,
    )  # fmt: skip
    result = checked("weights_differ")
    found = replace(result, findings=(replace(result.findings[0], next=advice),))
    assert _next(data, found, ()) == (advice,)


@pytest.mark.parametrize(
    ("code", "removed", "changes", "more", "expected"),
    [
        ("rounding", 0.901, "dtype=bf16", {}, (LOCATE,)),
        ("rounding", 0.101, "dtype=bf16", {}, ("look", LOCATE, TRIANGULATE)),
        ("rounding", 0.099, "dtype=bf16", {}, ("look", TRIANGULATE)),
        ("rounding", 0.901, None, {}, ()),
        ("rounding", 0.901, "dtype=bf16", {"has_weights": False}, ()),
        ("temperature", 0.901, "dtype=bf16", {}, (LOCATE,)),
        ("equal", 0.901, "dtype=bf16", {}, ()),
        ("rounding", 0.901, "engine=exact", {}, ()),
        ("rounding", 0.901, "mode=decode", {}, ()),
        ("rounding", 0.901, "compile=true", {}, ()),
        ("rounding", 0.901, "engine=vllm,mode=decode", {}, (LOCATE.replace("dtype=bf16", "engine=vllm,mode=decode"),)),
        ("rounding", 0.901, "engine=vllm,prefix-caching=on", {}, ()),
        ("rounding", 0.901, "engine=vllm", {"config": {"num_experts": 4}}, ()),
        ("rounding", 0.901, "dtype=bf16", {"config": {"num_experts": 4}}, (LOCATE,)),
    ],
)
def test_where_is_asked_once_a_replay_says_what(code, removed, changes, more, expected):
    data = SimpleNamespace(**vars(DATA) | more)
    replays = (effect(removed, changes), effect(0.0, changes))
    assert _next(data, checked(code, "look"), replays) == expected
    located = _next(data, checked(code, "look"), replays, located=object())
    assert located == tuple(command for command in expected if "locate" not in command)


@pytest.mark.parametrize(("dtype", "arm"), [("bfloat16", "fp32"), ("float16", "fp32"), ("float32", "bf16")])
def test_triangulate_is_offered_with_another_dtype_than_the_trainer_s(dtype, arm):
    data = SimpleNamespace(**vars(DATA) | {"contract": {"a": {"dtype": dtype}, "b": {}}.get})
    assert _next(data, checked("rounding", "look"), ()) == ("look", TRIANGULATE.replace("dtype=bf16", f"dtype={arm}"))


@pytest.mark.parametrize(("code", "exit_code"), [(code, 1) for code in FAULTS] + [("rounding", 0), ("equal", 0)])
def test_a_fault_is_the_exit_code(monkeypatch, code, exit_code):
    monkeypatch.setattr(tim_trace.analysis, "diagnose", lambda *_, **__: diagnosed(code))
    assert CliRunner().invoke(cli.main, ["diagnose", "run"]).exit_code == exit_code


def test_what_each_side_computed_in_is_said():
    assert numerics_text(diagnosed().numerics) == (
        "train recorded as float32; logits not rounded to 16 bits. rollout has no recorded dtype; logits rounded to bfloat16, "
        "logprobs rounded to float16."
    )


def test_blocks_stand_where_there_is_something_to_say():
    text = diagnosis_text(diagnosed(), verbose=True)
    assert "REPLAYS" not in text
    assert "WHAT TO RUN NEXT?" not in text
    assert "WHAT DO THE REPLAYS SHOW?" in diagnosis_text(diagnosed(replays=[effect(0.5)]), verbose=True)
    # slime's level is 0.03 and the trace has 0.04: only that alert is in the table.
    count, row, *rest = text[text.index("WHICH ALERTS FIRED?") :].splitlines()[2:]
    assert count == "1 of 3 alerts fired, 1 still firing"
    assert "slime: mean_abs_d > 0.03 (worst: 0.04 at step 1)" in row
    assert not any("> " in line for line in rest)


def suspect(code, probability, *evidence):
    return Suspect(code=code, probability=probability, evidence=evidence)


def prompts_changed():
    values = {"series": "prompt_length", "step": 60, "low": 60, "high": 60, "from_value": 4.0, "to_value": 12.0}
    return Evidence(code="prompts_changed", values=values, points=7.0)


def test_a_calm_run_is_told_in_one_line():
    calm = "No collapse detected; the comparison is valid."
    assert story(diagnosed()) == calm
    assert story(diagnosed("temperature")) == (
        "No collapse detected; the comparison is not valid: temperature on one side only."
    )
    assert story(diagnosed(attribution=attributed(outcome=""))) == (
        "Rewards or evaluations were recorded at fewer than 3 steps; the comparison is valid."
    )
    without = Statement(code="no_outcome", values={"min_values": 3, "num_series": 0})
    assert story(diagnosed(attribution=attributed(outcome="", note_codes=(without,)))) == (
        "No rewards or evaluations were recorded; the comparison is valid."
    )
    jump = RecordedChange(
        series="k3", kind="mismatch", step=40, low=39, high=41, before=1e-5, after=1e-2, size_in_sd=50.0, shape="shift"
    )
    assert story(diagnosed(jumps=[jump])) == (
        "No collapse detected; k3 jumps 1,000-fold at step 40 (95% CI 39-41); the comparison is valid."
    )
    assert diagnosis_text(diagnosed()).startswith(calm)
    assert result_json(diagnosed())["story"] == calm


@pytest.mark.parametrize(
    ("changes", "suspects", "told"),
    [
        (
            [TEMPERATURE, LENGTHS], [suspect("data", 0.9, prompts_changed())],
            "prompt_length jumps 3-fold at step 60, as reward drops from 0.8 to 0.3 after step 60 (95% CI 57-63). Most "
            "likely cause: a change in the prompts (90%).",
        ),
        (
            [TEMPERATURE], [suspect("data", 0.4), suspect("reward", 0.3)],
            "temperature is changed from 1 to 2 at step 57, 3 steps before reward drops from 0.8 to 0.3 after step 60 (95% CI 57-63). "
            "Cause unknown. Most likely of those tested: a change in the prompts (40%); noisy or wrong rewards or labels (30%).",
        ),
        (
            [], [suspect("unknown", 0.9), suspect("reward", 0.1)],
            "reward drops from 0.8 to 0.3 after step 60 (95% CI 57-63). Cause unknown. Probably none of the causes tested (90%); the likeliest "
            "of them is noisy or wrong rewards or labels (10%).",
        ),
    ],
)  # fmt: skip
def test_a_fall_is_told_with_what_leads_it_and_its_cause(changes, suspects, told):
    attribution = attributed(fall=FALL, changes=changes, suspects=suspects)
    found = diagnosed(attribution=attribution)
    assert story(found) == told
    assert " ".join(diagnosis_text(found).split()).startswith(" ".join(told.split()))
    assert result_json(found)["attribution"]["fall"]["step"] == 60


def test_a_fault_below_every_alert_level_is_said_to_reach_none():
    found = replace(diagnosed("temperature"), alarms=AlarmReadings(judged=tuple(readings("mean_abs_d", 0.01))))
    assert "no alert fired (3 rules); the mismatch reaches no alert level" in diagnosis_text(found)


def test_a_story_says_when_a_mismatch_began_once():
    part = Finding(
        code="subset",
        signal="column",
        effect=0.1,
        share=0.5,
        numbers={"since": 57, "column": "step"},
        cause=FAULTS["subset"],
    )
    elsewhere = replace(part, numbers={"since": None, "column": "writer_a"})
    assert part.title == "the mismatch grows at step 57"
    assert replace(part, numbers={"since": 57, "last_before": 50}).title == "the mismatch grows between steps 50 and 57"
    assert elsewhere.title == FAULTS["subset"]
    cause = Suspect(code="mismatch", detail="subset", probability=0.9, evidence=())
    attribution = attributed(fall=FALL, suspects=[cause])
    told = "reward drops from 0.8 to 0.3 after step 60 (95% CI 57-63). Most likely cause: training-inference mismatch"
    found = diagnosed(attribution=attribution)
    assert story(replace(found, checked=replace(found.checked, findings=(part,)))) == f"{told} (90%)."
    assert story(replace(found, checked=replace(found.checked, findings=(elsewhere,)))) == (
        f"{told} (90%): the mismatch is concentrated in part of the run."
    )


def test_a_diagnosis_fits_a_screen_and_says_why():
    attribution = attributed(
        fall=FALL, changes=[LENGTHS], suspects=[suspect("data", 0.9, prompts_changed()), suspect("reward", 0.1)]
    )
    lines = diagnosis_text(diagnosed(attribution=attribution), 100).splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 100
    assert [line.split()[0] for line in lines if line and line[0] != " "][-5:] == [
        "valid",
        "why",
        "broken",
        "normal",
        "alerts",
    ]
    why = " ".join(diagnosis_text(diagnosed(attribution=attribution)).split())
    assert "prompt_length changes from 4 to 12 at step 60, which the policy cannot cause (from this run alone)" in why


@pytest.mark.parametrize(("after", "num"), [(0.99e-3, 0), (1.0e-3, 1)])
def test_a_mismatch_that_grows_tenfold_is_a_jump(monkeypatch, after, num):
    change = RecordedChange(
        series="k3", kind="mismatch", step=40, low=39, high=41, before=1e-4, after=after, size_in_sd=50.0, shape="shift"
    )
    monkeypatch.setattr(diagnose_module, "known_run", lambda *_: (None, None))
    monkeypatch.setattr(diagnose_module, "read_recorded", lambda *_: (change, LENGTHS, TEMPERATURE))
    assert len(diagnose_module._jumps(None, ("train", "rollout"))) == num


def test_json_has_the_alarms_and_the_sentences():
    told = result_json(diagnosed())
    by_who = {reading["alarm"]["who"]: reading for reading in told["alarms"]["judged"]}
    assert (by_who["slime"]["is_raised"], by_who["Miles"]["is_raised"]) == (True, False)
    assert told["normal"] == size_text(diagnosed().size, is_valid=True)
    assert told["numerics"]["sentence"] == numerics_text(diagnosed().numerics)


def test_no_replay_removes_more_than_all(monkeypatch):
    groups = np.arange(3, dtype=np.uint64)
    for drawn, expected in (((0.9, 1.2), (0.9, 1.0)), ((0.9, 0.95), (0.9, 0.95))):
        monkeypatch.setattr(replay_effects, "bootstrap", lambda *_, drawn=drawn: {"removed": drawn})
        assert removed_interval(np.ones(3), np.ones(3), groups) == expected


def test_the_largest_and_the_mean_exponential_of_d_are_those_of_the_tokens():
    d = np.array([0.5, -1.0, 800.0])
    sums = SimpleNamespace(
        num_tokens=3,
        columns={"num_tokens": np.array([3, 0]), "max_abs_d": np.array([800.0, 0.0])}
        | dict.fromkeys(set(OF_DIFFERENCES) - {"max_abs_d"}, np.array([1.0, 0.0])),
    )
    data = SimpleNamespace(sums=sums, sample=SimpleNamespace(d=d, compared=np.array([True, True, False])))
    found = own_metrics(data)
    assert found["max_abs_d"] == 800.0
    assert found["mean_exp_abs_d"] == pytest.approx((math.exp(0.5) + math.e) / 2)
    assert own_metrics(SimpleNamespace(sums=SimpleNamespace(num_tokens=0))) == {}
