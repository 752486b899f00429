"""What one screen says: the verdict, the alerts, the size and the collapse of one diagnosis do not contradict each other."""

import re
import sys
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from bigrams import BOTH_FP32, FP32, VLLM_BF16, Recording, in_bfloat16, in_float32, moved, sample, table
from shared import rest_slow
from tim_trace.analysis.attribution.attribution import SUSPECTS, Evidence, Suspect
from tim_trace.analysis.check.finding import DataFinding
from tim_trace.analysis.check.text import checked_text
from tim_trace.analysis.diagnosis.diagnose import diagnose
from tim_trace.analysis.diagnosis.diagnosis import BrokenSide
from tim_trace.analysis.diagnosis.text import broken_text, diagnosis_text, story
from tim_trace.analysis.report.report import report
from tim_trace.analysis.stats import stats
from tim_trace.tracer.recorder import Recorder


def neighbour(name):
    """The module of tests beside this one; pytest imports each under a name of its own."""
    spec = spec_from_file_location(f"{name}_of_verdicts", Path(__file__).with_name(f"{name}.py"))
    sys.modules[spec.name] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


of_check, of_attribute = neighbour("test_check"), neighbour("test_attribute")
PLANTED, HEALTHY_RUNS = of_check.PLANTED, of_check.HEALTHY_RUNS
SMALL = {"groups": 4, "longest": 40}


def from_step(first, rollout):
    """An engine that rounds to bfloat16 until a step."""
    return lambda step, number: rollout(step, number) if number >= first else in_bfloat16(step, number)


OTHERS = {
    "other weights starting at step 10": Recording(
        rollout=from_step(10, lambda step, number: step.scored(moved(step.logits, 3, 0.4))), steps=16, options=SMALL
    ),
    "another precision starting at step 10": Recording(
        rollout=lambda step, number: (in_float32 if number < 10 else in_bfloat16)(step, number), steps=16, options=SMALL
    ),
    "grows": Recording(
        rollout=lambda step, number: step.scored(moved(step.logits, 3, 1e-4 * 2**number)), steps=14, options=SMALL
    ),
    "grows within rounding": Recording(
        rollout=lambda step, number: step.scored(moved(step.logits, 3, 1e-6 * 2**number)), steps=14, options=SMALL
    ),
    "large rounding": Recording(
        rollout=in_bfloat16,
        contracts={"train": FP32, "rollout": VLLM_BF16},
        weights=lambda number: table(sharpness=20.0),
    ),
    "bitwise equal, as declared": Recording(contracts=BOTH_FP32),
    "bitwise equal, unlike declared": Recording(contracts={"train": FP32, "rollout": VLLM_BF16}),
}
STALE = "stale, as declared"
RUNS = {**OTHERS, STALE: PLANTED["stale_weights"], **PLANTED, **HEALTHY_RUNS}


def write(kind, path):
    """A small trace with one verdict."""
    run = RUNS[kind]
    if kind != STALE:
        return run.write(path)
    with Recorder(path) as recorder:
        for number in range(1, 15):
            sampled = sample(run.weights(number), 100 + number, **SMALL)
            batch = recorder.add_sequences(
                step=number,
                prompt_ids=[row.tolist() for row in sampled.prompts],
                response_ids=[row.tolist() for row in sampled.responses],
                group_ids=sampled.groups,
            )
            old = run.rollout(sampled, number)
            recorder.add_scores("rollout", batch, logprobs=old, policy_version=max(number - 2, 0))
            recorder.add_scores("train", batch, logprobs=sampled.scored(), policy_version=number - 1)
    return path


def rows_of(text):
    """The headline, and the row of every label."""
    headline, _, rest = text.partition("\n\n")
    rows = {}
    for line in rest.splitlines():
        label, said = line[:8].strip(), line[8:]
        rows.setdefault(label, said)
    return headline, rows


def contradictions(found, text=None):
    """What the screens of a diagnosis, or another text in place of the first, say that does not go together."""
    headline, rows = rows_of(text or diagnosis_text(found))
    valid, first = found.checked.is_valid, found.checked.findings[0]
    screen = checked_text(found.checked)
    raised = [each for each in found.alarms.raised if each.alarm.of_mismatch]
    grown = [change for change in found.jumps if not change.follows]
    wrong = {
        "verdicts differ": rows["valid"].startswith("yes") != (valid and not found.checked.has_few_tokens)
        or (screen.startswith("NOT VALID") == valid and first.code != "too_few"),
        "headline denies the verdict": found.attribution.fall is None and ("is not valid" in headline) == valid,
        "headline names another fault": "is not valid" in headline and first.title not in headline,
        "a jump in a size called normal": bool(grown) and valid and rows["normal"].endswith("normal."),
        "a size called normal in an invalid comparison": not valid and rows["normal"].endswith("normal."),
        "alerts for an expected level are not explained": valid
        and bool(raised)
        and not grown
        and first.title not in rows["alerts"],
        "silent alerts beside a fault are not explained": not valid
        and not raised
        and not re.search("reaches no alert level|none for the mismatch", rows["alerts"]),
        "a valid comparison above its range is not explained": valid
        and "above the published range for" in rows["normal"]
        and not grown
        and first.title not in rows["normal"],
        "nothing is broken in an invalid comparison": not valid and "broken" not in rows,
        "something is broken in a valid comparison without a fault": valid
        and "broken" in rows
        and found.attribution.cause is None
        and not found.checked.data,
        "an inferred dtype is not said to be inferred": valid
        and found.size.coarser is not None
        and found.size.code in ("below", "within", "above")
        and found.size.coarser not in found.numerics.declared
        and "inferred" not in rows["normal"],
        "a range of no width": re.search(r"\((\S+) to \1\)", rows["normal"]) is not None,
        "the steps differ": any(
            finding.since is not None
            and grown
            and not (finding.numbers["last_before"] < grown[0].high + 1 and grown[0].low <= finding.since)
            for finding in found.checked.findings
        ),
    }
    return [name for name, is_so in wrong.items() if is_so]


@pytest.mark.parametrize("kind", rest_slow(RUNS, 8))
def test_one_screen_does_not_contradict_itself(tmp_path, kind):
    found = diagnose(write(kind, tmp_path / "trace"))
    assert contradictions(found) == [], diagnosis_text(found)


@pytest.mark.parametrize("spoilt", ["normal", "alerts", "broken"])
def test_a_contradiction_is_seen(tmp_path, spoilt):
    found = diagnose(write("lengths", tmp_path / "trace"))
    lines = {"normal": "normal  The mismatch is small: normal.", "alerts": "alerts  no alert fired", "broken": ""}
    text = re.sub(rf"^{spoilt} .*$", lines[spoilt], diagnosis_text(found), flags=re.MULTILINE)
    assert len(contradictions(found, text)) == 1


@pytest.mark.filterwarnings("ignore:no advantages recorded")
def test_a_jump_for_no_recorded_reason_is_not_called_normal(tmp_path):
    trace = write("another precision starting at step 10", tmp_path / "trace")
    found = diagnose(trace)
    rms = [row["rms_d"] for row in stats(trace, by="step").dicts()]
    assert min(rms[9:]) > 1000 * max(rms[:9])
    assert found.checked.is_valid
    said = rows_of(diagnosis_text(found))[1]["normal"]
    assert "at step 10, and no recorded setting changed there" in said
    made = report(trace)
    (size,) = [each for each in made.verdicts[0].answers if each.question == "size"]
    assert (size.code, size.severity) == ("changed", "notice")


def test_a_jump_with_a_recorded_change_is_explained(tmp_path):
    path = tmp_path / "trace"
    with Recorder(path) as recorder:
        for number in range(1, 17):
            recorder.add_contract("rollout", {"engine": "vllm", "dtype": "float32" if number < 10 else "bfloat16"})
            recorder.add_contract("train", {"engine": "trl", "dtype": "float32"})
            step = sample(table(), 100 + number, **SMALL)
            batch = recorder.add_sequences(
                step=number,
                prompt_ids=[row.tolist() for row in step.prompts],
                response_ids=[row.tolist() for row in step.responses],
            )
            rounds = in_float32 if number < 10 else in_bfloat16
            recorder.add_scores("rollout", batch, logprobs=rounds(step, number))
            recorder.add_scores("train", batch, logprobs=step.scored())
    found = diagnose(path)
    assert [jump.follows for jump in found.jumps] == ["rollout"]
    assert found.unexplained_jump is None


def test_a_collapse_through_the_mismatch_says_who_is_broken_and_since_when(tmp_path):
    drops = of_attribute.drops
    happens = of_attribute.Story(reward=drops(62, 0.7, 0.1), gap=drops(60, 1e-5, 0.5), evaluation=drops(62, 0.7, 0.1))
    found = diagnose(of_attribute.record(tmp_path / "trace", happens))
    assert contradictions(found) == []
    assert found.attribution.cause == "mismatch"
    assert found.broken is not None
    assert found.broken.by == ("check", "attribute")
    assert found.broken.since == 60


# --- who is broken ----------------------------------------------------------------------------------------------------


def suspect(code, *evidence, detail="", probability=0.9):
    return Suspect(
        code=code, detail=detail, probability=probability,
        evidence=tuple(Evidence(code=name, points=5.0, values=values) for name, values in evidence),
    )  # fmt: skip


@pytest.fixture(scope="module")
def invalid(tmp_path_factory):
    """A diagnosis of a trace with holes: the recording is broken."""
    return diagnose(write("placeholders", tmp_path_factory.mktemp("invalid") / "trace"))


@pytest.fixture(scope="module")
def unclear(tmp_path_factory):
    """A diagnosis of a trace in which engine or trainer is broken."""
    return diagnose(write("quantised", tmp_path_factory.mktemp("unclear") / "trace"))


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    return diagnose(write("bfloat16", tmp_path_factory.mktemp("calm") / "trace"))


def caused(found, first, **checked):
    return replace(
        found,
        attribution=replace(found.attribution, suspects=(first,)),
        checked=replace(found.checked, **checked),
    )


NOISY = ("not_sampled_so", {"entropy": 0.5})
MOVED = ("prompts_changed", {"step": 7})
TITLE = "the baseline is not the group's mean"
BASELINE = DataFinding(code="baseline", signal="baseline", title=TITLE, share=1.0, since=5, is_notice=False, next="")


def test_both_name_the_same_side(unclear):
    found = caused(unclear, suspect("mismatch", NOISY, ("mismatch_grows_before_fall", {"step": 4})))
    assert found.broken == BrokenSide(side="engine", since=4, by=("check", "attribute"))
    assert broken_text(found.broken) == "engine since step 4 (found by check and attribute)"


def test_a_proof_is_stronger_than_a_fit(invalid):
    assert invalid.checked.broken == "recording"
    weak = tuple(replace(each, weight=0.7) for each in invalid.checked.findings)
    found = caused(invalid, suspect("mismatch", NOISY), findings=weak)
    assert found.broken == BrokenSide(side="engine", since=None, by=("attribute",), other="recording", is_stronger=True)
    assert "not recording, for which the evidence is weaker" in broken_text(found.broken)


def test_bits_are_stronger_than_what_is_inferred_from_series(invalid):
    bits = tuple(replace(each, weight=1.0) for each in invalid.checked.findings)
    found = caused(invalid, suspect("mismatch", NOISY), findings=bits)
    assert (found.broken.side, found.broken.other, found.broken.by) == ("recording", "engine", ("check",))


def test_a_cause_beside_an_invalid_comparison_leaves_both_to_fix(invalid):
    found = caused(invalid, suspect("data", MOVED))
    assert found.broken == BrokenSide(side="data", since=7, by=("attribute",), other="recording")
    assert (
        broken_text(found.broken)
        == "data since step 7 (found by attribute); also recording, which did not cause the drop"
    )


def test_a_trainer_that_did_not_cause_the_mismatch_is_not_its_side(unclear):
    assert unclear.checked.broken == "computation"
    found = caused(unclear, suspect("optimizer", ("learning_rate_spike_before_fall", {"step": 3})))
    assert found.broken == BrokenSide(side="trainer", since=3, by=("attribute",), other="computation")


def test_data_are_broken_since_the_step_that_check_finds(calm):
    assert calm.broken is None
    assert calm.broken is None
    assert replace(calm, checked=replace(calm.checked, data=(BASELINE,))).broken == BrokenSide(
        side="data", since=5, by=("check",)
    )
    found = caused(calm, suspect("advantages", ("advantages_one_sided", {"step": 9})), data=(BASELINE,))
    assert found.broken == BrokenSide(side="data", since=5, by=("check", "attribute"))
    assert "but the baseline is not the group's mean, starting at step 5" in story(
        replace(calm, checked=replace(calm.checked, data=(BASELINE,)))
    )


@pytest.mark.parametrize("code", SUSPECTS)
def test_every_suspect_names_what_is_broken(code):
    sides = ("recording", "engine", "trainer", "computation", "versions", "data")
    assert (suspect(code).broken in sides) == (code != "unknown")


def test_the_probability_stands_at_the_suspect_and_not_at_its_kind():
    named = suspect("mismatch", detail="placeholders", probability=0.93)
    assert named.titled("one run") == "training-inference mismatch (93%, one run): placeholders instead of logprobs"
