"""Faults that are planted by computing with them, and healthy traces, on a language model that is a table."""

import inspect
import json
import re
import shlex
from dataclasses import replace
from string import Formatter
from types import SimpleNamespace

import numpy as np
import pytest
from bigrams import (
    BOTH_FP32,
    FP32,
    HOT,
    VLLM_BF16,
    Recording,
    bfloat16,
    in_bfloat16,
    in_float32,
    moved,
    sample,
    table,
    top_p,
)
from builders import ROOT, tim_trace
from shared import rest_slow
from tim_trace import cli
from tim_trace.analysis.advice import Advice
from tim_trace.analysis.check.check import CheckResult, check, gather, read_pair_sums
from tim_trace.analysis.check.faults import ALL, FAULTS, HEALTHY, WEIGHT_CAUSES, evidence_text
from tim_trace.analysis.check.faults.not_computed import EQUAL
from tim_trace.analysis.check.features import along_movement, error_structure, features, variance_between
from tim_trace.analysis.check.finding import DataFinding, Finding
from tim_trace.analysis.check.pair_data import PairData, dtype_of, precisions, value_precision
from tim_trace.analysis.check.text import BROKEN, NOTES, checked_text, note_texts
from tim_trace.analysis.check.where import where_text
from tim_trace.analysis.rows import result_json, wrapped, wrapped_lines
from tim_trace.analysis.trace.pair_sums import OF_DIFFERENCES, difference_sums
from tim_trace.analysis.trace.sums import summarize
from tim_trace.analysis.views import open_database
from tim_trace.schemas.errors import InvalidOption, NothingToCompare
from tim_trace.tracer.importers.neutral import import_parquet
from tim_trace.tracer.recorder import Recorder


def changed(values, change):
    """Each sequence's values, changed."""
    return [change(np.array(row)) for row in values]


def shifted(row):
    return np.concatenate([row[1:], row[-1:] - 0.5])


def padded(rows):
    return np.concatenate([rows, np.zeros((len(rows), 40), np.float32)], axis=-1)


def after(place, step, other):
    """Values of another table from a place on."""
    rows = zip(in_float32(step, 0), step.scored(other), strict=True)
    return [np.where(np.arange(len(a)) < place, a, b).astype(np.float32) for a, b in rows]


def own_places(step, number, other):
    draw = np.random.default_rng(number)
    rows = zip(in_float32(step, 0), step.scored(other), strict=True)
    return [np.where(np.arange(len(a)) < draw.integers(8, len(a) - 6), a, b).astype(np.float32) for a, b in rows]


def holes(values, draw):
    """One value in twenty is 0."""
    return changed(values, lambda row: np.where(draw.random(len(row)) < 0.05, np.float32(0), row))


def quantised(logits):
    """Rounded to 4 bits, each column with a scale of its own."""
    scale = np.abs(logits).max(axis=0) / 7
    return np.round(logits / scale) * scale


def versions(number):
    """The table moves at every step."""
    logits = table()
    for update in range(1, number + 1):
        logits = moved(logits, 50 + update, 0.03 * (1 + update % 3))
    return logits


PLANTED = {
    "temperature": HOT,
    "truncation": Recording(
        rollout=lambda step, number: step.scored(process=lambda rows: top_p(rows, 0.9)),
        process=lambda rows: top_p(rows, 0.9),
    ),
    "shift": Recording(rollout=lambda step, number: changed(in_float32(step, number), shifted)),
    "row_pairing": Recording(rollout=lambda step, number: swapped(in_float32(step, number))),
    "placeholders": Recording(
        rollout=lambda step, number: holes(in_float32(step, number), np.random.default_rng(number))
    ),
    "padded_vocabulary": Recording(train=lambda step, number: step.scored(process=padded), rollout=in_float32),
    "lengths": Recording(
        rollout=lambda step, number: changed(
            in_float32(step, number), lambda row: np.where(np.arange(len(row)) < 30, row, np.nan)
        )
    ),
    "copies": Recording(rollout=lambda step, number: step.scored(), contracts={"train": FP32, "rollout": VLLM_BF16}),
    "position_onset": Recording(rollout=lambda step, number: after(25, step, moved(step.logits, 3, 0.5))),
    "own_places": Recording(
        rollout=lambda step, number: own_places(step, number, moved(step.logits, 3, 0.3)),
        options={"groups": 12, "longest": 90},
    ),
    "subset": Recording(
        rollout=lambda step, number: [
            b if group in ("prompt-2", "prompt-5") else a
            for a, b, group in zip(
                in_float32(step, number), step.scored(moved(step.logits, 3, 0.3)), step.groups, strict=True
            )
        ]
    ),
    "quantised": Recording(
        rollout=lambda step, number: step.scored(quantised(step.logits)), contracts=BOTH_FP32, steps=6
    ),
    "low_precision_head": Recording(rollout=in_bfloat16, contracts=BOTH_FP32),
    "stale_weights": Recording(
        weights=versions,
        rollout=lambda step, number: step.scored(versions(number - 1)),
        sequences=lambda step, number: {"policy_version": number},
        contracts=BOTH_FP32,
        steps=9,
    ),
}


def swapped(values):
    """Rows of which each gets the values of the next, cut to its length or filled with 0."""
    out = []
    for own, other in zip(values, [*values[1:], values[0]], strict=True):
        row = np.zeros_like(own)
        row[: len(other)] = other[: len(row)]
        out.append(row)
    return out


def is_understood(commands):
    """Whether a shell and tim-trace take the commands of a finding; what asks for recording or a replay is parsed alone."""
    commands = commands.partition("then run: ")[2] if commands.startswith("call Recorder.") else commands
    for words in map(shlex.split, commands.split("  # ")[0].split(" && ")):
        assert words[0] == "tim-trace"
        if words[1] in ("sql", "query") or (words[1] == "stats" and "--by" in words):
            done = tim_trace(*words[1:])
            assert done.code == 0, done.stderr
        else:
            cli.main.commands[words[1]].make_context(words[1], words[2:])


EXPECTED = {
    "quantised": "computation_differs", "stale_weights": "weights_differ", "own_places": "position_onset"
}  # fmt: skip
"""Planted fault -> code of its finding, where the two differ. Quantised weights are at their full size from the first step, as any
other difference of the computation."""


@pytest.mark.parametrize("code", rest_slow(PLANTED, 5))
def test_a_planted_fault_comes_first(tmp_path, code):
    found = check(PLANTED[code].write(tmp_path / "trace"))
    first = found.findings[0]
    assert first.fails
    assert not found.is_valid
    assert first.code == EXPECTED.get(code, code), first
    assert 0 < first.share <= 1
    assert first.broken in ("recording", "engine", "computation")
    assert evidence_text(first)
    for finding in found.findings:
        is_understood(finding.next)


def test_a_lost_mass_is_no_factor_where_all_tokens_are_about_as_likely(tmp_path):
    settings = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
    even = replace(
        PLANTED["padded_vocabulary"],
        weights=lambda number: table(sharpness=0.04),
        sequences=lambda step, number: settings,
    )
    first = check(even.write(tmp_path / "trace")).findings[0]
    assert (first.code, first.numbers["side"]) == ("padded_vocabulary", "train"), first
    assert first.numbers["lost_mass"] == pytest.approx(40 / 100, abs=0.02)


@pytest.mark.parametrize("copies", [2, 8])
def test_a_sum_over_several_copies_of_the_vocabulary_is_told(tmp_path, copies):
    def train(step, number):
        return [row - np.float32(np.log(copies)) for row in step.scored()]

    first = check(Recording(train=train, rollout=in_bfloat16).write(tmp_path / "trace")).findings[0]
    assert (first.code, first.numbers["copies"]) == ("padded_vocabulary", copies)
    assert f"All tokens lose the same factor, {copies}," in evidence_text(first)


HEALTHY_RUNS = {
    "float32": Recording(rollout=in_float32),
    "float32 with contracts": Recording(rollout=in_float32, contracts=BOTH_FP32),
    "bfloat16": Recording(rollout=in_bfloat16),
    "bfloat16 with contracts": Recording(rollout=in_bfloat16, contracts={"train": FP32, "rollout": VLLM_BF16}),
    "temperature on both sides": Recording(
        rollout=lambda step, number: step.scored(bfloat16(step.logits) / 0.7),
        train=lambda step, number: step.scored(step.logits / 0.7),
        process=lambda rows: rows / 0.7,
        sequences=lambda step, number: {"temperature": 0.7},
        entropy=False,
    ),
    "raw logprobs of truncated samples": Recording(rollout=in_float32, process=lambda rows: top_p(rows, 0.9)),
    "a policy that moves": Recording(rollout=in_float32, weights=versions, steps=8),
    "a policy that sharpens": Recording(rollout=in_bfloat16, weights=lambda number: table() * (0.2 + 0.2 * number)),
    "one step": Recording(rollout=in_bfloat16, steps=1),
    "one sequence": Recording(rollout=in_float32, steps=1, options={"groups": 1, "in_group": 1, "longest": 200}),
    "short": Recording(rollout=in_bfloat16, options={"longest": 6}),
}


@pytest.mark.parametrize("kind", rest_slow(HEALTHY_RUNS, 5))
def test_a_healthy_run_is_valid(tmp_path, kind):
    found = check(HEALTHY_RUNS[kind].write(tmp_path / "trace"))
    assert found.is_valid, found.findings[0]
    assert [finding.code for finding in found.findings] == ["rounding"]


@pytest.mark.parametrize(("code", "points"), [("stale_weights", True), ("quantised", False)])
def test_only_weights_that_are_behind_differ_along_their_movement(tmp_path, code, points):
    database = open_database(PLANTED[code].write(tmp_path / "trace"))
    along = along_movement(gather(database, ("train", "rollout"), trace=""))
    assert along > 2.5 if points else abs(along) < 2.5


def half_updated(step, number):
    """Each sequence's first half, up to a place of its own, with weights of two updates before."""
    old = step.scored(step.logits + 0.3 * np.random.default_rng(number).normal(size=step.logits.shape))
    new = in_float32(step, number)
    return [
        np.where(np.arange(len(n)) < len(n) * (row % 4) / 4, o, n)
        for row, (o, n) in enumerate(zip(old, new, strict=True))
    ]


def test_a_gap_that_changes_inside_of_sequences_lasts_from_token_to_token(tmp_path):
    seen = {}
    for name, rollout in {"inside": half_updated, "rounding": in_bfloat16}.items():
        path = Recording(rollout=rollout, steps=6).write(tmp_path / name)
        seen[name] = error_structure(gather(open_database(path), ("train", "rollout"), trace=""))
    persistence, _, sequence_score = seen["inside"]
    assert persistence >= 0.12
    assert sequence_score >= 4
    assert seen["rounding"][0] < 0.07


def test_variance_between_groups_is_that_of_an_analysis_of_variance():
    # Groups (1, 2) and (5, 8): 25 of 30 lie between them; F = 25 / 2.5 = 10; 1 - (5 / 2) / (30 / 3) = 0.75.
    share, score = variance_between(np.array([1.0, 5.0, 2.0, 8.0]), np.array([3, 7, 3, 7]))
    assert share == pytest.approx(0.75)
    assert score == pytest.approx(9 / np.sqrt(2 / 1 + 2 / 2))
    assert variance_between(np.ones(3), np.zeros(3)) == (0.0, 0.0)
    assert variance_between(np.arange(3.0), np.arange(3)) == (0.0, 0.0)


def test_sums_of_tokens_are_those_that_the_trace_keeps(tmp_path):
    draw = np.random.default_rng(0)
    with Recorder(tmp_path / "trace") as recorder:
        for step in (1, 2):
            rollout = -draw.exponential(1.0, (5, 9)).astype(np.float32)
            train = np.minimum(rollout + draw.normal(0, 0.2, rollout.shape), 0).astype(np.float32)
            train[0, 2], rollout[1, 3], train[2] = np.nan, -np.inf, np.nan
            known = draw.random(rollout.shape) < 0.9
            batch = recorder.add_sequences(
                step=step,
                response_ids=draw.integers(0, 50, rollout.shape),
                response_mask=draw.random(rollout.shape) < 0.7,
            )
            recorder.add_scores("rollout", batch, logprobs=rollout)
            recorder.add_scores("train", batch, logprobs=train, scored_mask=known)
    pair = ("train", "rollout")
    of_tokens = read_pair_sums(open_database(tmp_path / "trace"), pair)
    assert summarize(tmp_path / "trace")
    database = open_database(tmp_path / "trace")
    assert database.sums.covers(pair)
    kept = read_pair_sums(database, pair)
    for name, values in of_tokens.columns.items():
        combine = np.max if name == "max_abs_d" else np.sum
        assert combine(values) == pytest.approx(combine(kept.columns[name]), rel=1e-12), name
    assert of_tokens.worst_steps == kept.worst_steps


def test_a_temperature_is_fitted(tmp_path):
    assert check(HOT.write(tmp_path / "hot")).findings[0].numbers["temperature"] == pytest.approx(1 / 0.9, rel=0.01)


def test_the_kept_mass_of_a_recorded_top_p_is_fitted(tmp_path):
    recorded = replace(PLANTED["truncation"], sequences=lambda step, number: {"top_p": 0.9})
    first = check(recorded.write(tmp_path / "cut")).findings[0]
    assert first.numbers["recorded"] == "top_p 0.9"
    kept = first.numbers["kept_mass"]
    steps = [sample(table(), 100 + n, process=lambda rows: top_p(rows, 0.9)) for n in range(1, 5)]
    cut = [step.scored(process=lambda rows: top_p(rows, 0.9)) for step in steps]
    whole = [step.scored() for step in steps]
    d = np.concatenate([np.concatenate(w) - np.concatenate(c) for w, c in zip(whole, cut, strict=True)])
    assert kept == pytest.approx(np.exp(d).mean(), rel=1e-3)


def test_the_right_pairing_is_named(tmp_path):
    numbers = check(PLANTED["row_pairing"].write(tmp_path / "trace")).findings[0].numbers
    pairs = {name.partition("/")[2]: other for name, other in numbers.items() if name.startswith("belongs_to/")}
    assert pairs
    for row, other in pairs.items():
        names = row.rpartition("-"), other.rpartition("-")
        assert (int(names[0][2]) - 1 - int(names[1][2])) % 32 == 0  # each row got the values of the next


def test_the_gap_of_a_shift_names_its_side(tmp_path):
    assert check(PLANTED["shift"].write(tmp_path / "trace")).findings[0].numbers["lag"] == -1


def test_prompt_tokens_that_count_are_told_from_lost_values(tmp_path):
    def write(path, given):
        with Recorder(path) as recorder:
            for number in range(1, 4):
                step = sample(table(), number)
                foreign = np.random.default_rng(9).integers(0, 60, (8, 3))
                rows = range(len(step.responses))
                starts = [foreign[row // 4] if given else step.responses[row][:3] for row in rows]
                step.responses = [np.concatenate([starts[row], step.responses[row][3:]]) for row in rows]
                batch = recorder.add_sequences(
                    step=number,
                    prompt_ids=[prompt.tolist() for prompt in step.prompts],
                    response_ids=[response.tolist() for response in step.responses],
                )
                train = step.scored()
                recorder.add_scores("train", batch, logprobs=train)
                recorder.add_scores("rollout", batch, logprobs=changed(train, lambda row: np.r_[np.zeros(3), row[3:]]))
        return path

    assert check(write(tmp_path / "given", True)).findings[0].code == "mask"
    assert check(write(tmp_path / "lost", False)).findings[0].code == "placeholders"


@pytest.mark.parametrize(
    ("unit", "change"),
    [
        ("log2", lambda row: row / np.log(2)),
        ("log10", lambda row: row / np.log(10)),
        ("probability", np.exp),
        ("negative_ln", np.negative),
        ("complement", lambda row: -np.expm1(row)),
        ("negative_probability", lambda row: -np.exp(row)),
        ("negative_complement", np.expm1),
        ("log_complement", lambda row: np.log(-np.expm1(row))),
        ("floor", lambda row: np.log(np.exp(row) + 0.01)),
        ("cumulative", np.cumsum),
        ("cumulative_to_end", lambda row: np.cumsum(row[::-1])[::-1]),
        ("factor", lambda row: row * 1.015),
        ("curve", lambda row: -3 * np.sqrt(-row)),
    ],
)
def test_another_unit_is_named(tmp_path, unit, change):
    step = sample(table(), 1)
    rows = [
        {
            "step": 1,
            "prompt_ids": prompt.tolist(),
            "response_ids": response.tolist(),
            "train_logprobs": train.tolist(),
            "rollout_logprobs": change(train).tolist(),
        }
        for prompt, response, train in zip(step.prompts, step.responses, step.scored(), strict=True)
    ]
    dump = tmp_path / "dump.jsonl"
    dump.write_text("\n".join(map(json.dumps, rows)))
    first = check(import_parquet(dump, output=tmp_path / "trace").folder).findings[0]
    assert (first.code, first.numbers["unit"]) == ("log_base", unit)
    # If a = ln(1 - exp(b)), then b = ln(1 - exp(a)), so either side may be the wrong one.
    assert first.numbers["side"] == "rollout" or unit == "log_complement"


@pytest.mark.parametrize("has_turns", [False, True])
def test_other_tokens_after_a_place_are_told_from_a_shift(tmp_path, has_turns):
    """The rest of the row, or of its first turn, belongs to other tokens."""

    def inserted(values, number):
        draw = np.random.default_rng(number)
        out = []
        for row in values:
            end = 14 if has_turns else len(row)
            place = int(draw.integers(3, end - 6))
            rest = -draw.exponential(4.0, end - place - 1) if has_turns else row[place : end - 1]
            out.append(
                np.concatenate(
                    [row[:place], [-8 - draw.random() if has_turns else -3 * draw.random()], rest, row[end:]]
                ).astype(np.float32)
            )
        return out

    run = Recording(
        rollout=lambda step, number: inserted(in_float32(step, number), number),
        sequences=lambda step, number: (
            {"response_mask": [np.abs(np.arange(len(row)) - 16) > 2 for row in step.responses]} if has_turns else {}
        ),
    )
    assert check(run.write(tmp_path / "trace")).findings[0].code == "retokenised"


def test_bits_that_agree_are_no_fault_where_contracts_agree(tmp_path):
    same = Recording(rollout=lambda step, number: step.scored(), contracts={"train": FP32, "rollout": FP32})
    found = check(same.write(tmp_path / "trace"))
    assert found.is_valid
    assert found.findings[0].code == "equal"


def test_policy_versions_that_differ_are_said(tmp_path):
    with Recorder(tmp_path / "trace") as recorder:
        step = sample(table(), 1)
        batch = recorder.add_sequences(
            step=1, prompt_ids=[p.tolist() for p in step.prompts], response_ids=[r.tolist() for r in step.responses]
        )
        recorder.add_scores("rollout", batch, logprobs=step.scored(moved(step.logits, 1, 0.3)), policy_version=4)
        recorder.add_scores("train", batch, logprobs=step.scored(), policy_version=6)
    first = check(tmp_path / "trace").findings[0]
    assert (first.code, first.numbers["updates_behind"], first.numbers["side"]) == ("weights_differ", 2, "rollout")
    assert (first.signal, first.numbers["cause"]) == ("policy_versions", "stale_weights")
    assert first.is_expected
    assert check(tmp_path / "trace").is_valid


@pytest.mark.parametrize("passes", [(), ("rollout",), ("train",)])
def test_it_never_passes_on_nothing_to_compare(tmp_path, passes):
    with Recorder(tmp_path / "trace") as recorder:
        batch = recorder.add_sequences(step=1, prompt_ids=[[1]], response_ids=[[2, 3]])
        for name in passes:
            recorder.add_scores(name, batch, logprobs=[[-1.0, -2.0]])
    with pytest.raises(NothingToCompare, match=r"no logprobs from pass|the trace has no scores"):
        check(tmp_path / "trace")


@pytest.mark.parametrize("passes", [(), ("train",), ("train", "reference")])
@pytest.mark.parametrize("moved_by", [0, 4])
def test_without_engine_logprobs_rewards_and_advantages_are_checked_all_the_same(tmp_path, passes, moved_by):
    draw = np.random.default_rng(3)
    with Recorder(tmp_path / "trace") as recorder:
        for step in range(1, 6):
            reward, logprobs = draw.normal(size=16), draw.normal(-1, 0.3, (16, 8)).astype(np.float32)
            centred = reward - np.repeat(reward.reshape(4, 4).mean(1), 4)
            batch = recorder.add_sequences(
                step=step, prompt_ids=[[row // 4, step] for row in range(16)], response_ids=draw.integers(0, 50, (16, 8)),
                group_ids=[f"{step}-{row // 4}" for row in range(16)], reward=reward, advantage=np.roll(centred, moved_by),
            )  # fmt: skip
            for name in passes:
                recorder.add_scores(name, batch, logprobs=logprobs)
    found = check(tmp_path / "trace")
    assert [finding.code for finding in found.findings] == ["not_compared"]
    assert not found.is_valid
    assert found.broken is None
    assert [finding.code for finding in found.data if not finding.is_notice] == ["rewards_of_other_rows"] * bool(
        moved_by
    )
    done = tim_trace("check", str(tmp_path / "trace"))
    assert (done.code, done.stdout.split(":")[0]) == (1, "NOT COMPARED")
    assert ("No fault was found" in done.stdout) == (not found.data)


def test_a_pass_that_is_all_nan_is_no_valid_comparison(tmp_path):
    with Recorder(tmp_path / "trace") as recorder:
        batch = recorder.add_sequences(step=1, prompt_ids=[[1]], response_ids=[[2, 3]])
        recorder.add_scores("rollout", batch, logprobs=[[np.nan, np.nan]])
        recorder.add_scores("train", batch, logprobs=[[-1.0, -2.0]])
    assert not check(tmp_path / "trace").is_valid


def test_without_tokens_in_the_loss_nothing_is_compared(tmp_path):
    with Recorder(tmp_path / "trace") as recorder:
        batch = recorder.add_sequences(step=1, prompt_ids=[[1]], response_ids=[[2, 3]], response_mask=[[0, 0]])
        for name in ("rollout", "train"):
            recorder.add_scores(name, batch, logprobs=[[-1.0, -2.0]])
    found = check(tmp_path / "trace")
    assert not found.is_compared
    assert "has no token in the loss" in evidence_text(found.findings[0])


def test_what_cannot_be_asked_is_said(tmp_path):
    with Recorder(tmp_path / "trace") as recorder:
        batch = recorder.add_sequences(step=1, response_ids=[[2, 3]])
        recorder.add_scores("rollout", batch, logprobs=[[-1.0, -2.0]])
        recorder.add_scores("train", batch, logprobs=[[-1.0, -2.000001]])
    notes = " ".join(note_texts(check(tmp_path / "trace")))
    for part in ("only 2 comparable tokens", "no contract", "entropies were", "fewer than three", "prompts were not"):
        assert part in notes


@pytest.mark.slow
def test_the_command_tells_the_same_and_its_exit_code(tmp_path):
    hot, healthy = HOT.write(tmp_path / "hot"), HEALTHY_RUNS["float32"].write(tmp_path / "healthy")
    done = tim_trace("check", hot)
    assert done.code == 1
    assert done.stdout.startswith("NOT VALID")
    assert "temperature on one side only" in done.stdout
    told = tim_trace("check", hot, "--json").json()
    assert told["findings"][0]["code"] == "temperature"
    assert told["is_valid"] is False
    assert tim_trace("check", healthy).code == 0
    assert tim_trace("check", tmp_path / "none").code == 2
    with pytest.raises(InvalidOption):
        check(hot, pair="train")


def test_the_docs_name_every_code_with_its_signals_and_what_is_broken():
    page = (ROOT / "docs" / "reference" / "check.md").read_text(encoding="utf-8")
    table = page.split("| code | fault |")[1].split("\n\n")[0]
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in table.splitlines()[2:]]
    documented = {row[0].strip(" `"): (row[2].strip(), set(re.findall(r"`(\w+)`", row[3]))) for row in rows}
    assert documented.keys() == FAULTS.keys() | HEALTHY.keys()
    of_code = {}
    for fault in ALL:
        of_code.setdefault(fault.code, (fault.broken or "", set()))[1].update(fault.evidence)
    shared = {signal for _, signals in of_code.values() for signal in signals}
    assert set.union(*(signals for _, signals in documented.values())) == shared
    for code, (part, signals) in documented.items():
        assert (part, signals - of_code[code][1]) == (of_code[code][0], set())
    page += (ROOT / "docs" / "reference" / "json.md").read_text(encoding="utf-8")
    assert all(f"`{code}`" in page for code in (*NOTES, *WEIGHT_CAUSES))


def test_every_sentence_belongs_to_a_signal_that_is_found():
    sources = (ROOT / "analysis" / "check" / "faults").glob("*.py")
    written = "".join(path.read_text(encoding="utf-8") for path in sources)
    signals = {signal for fault in ALL for signal in fault.evidence}
    assert [s for s in signals if written.count(f'"{s}"') == written.count(f'"{s}":')] == []


def test_codes_have_words():
    assert not set(FAULTS) & set(HEALTHY)
    assert {EXPECTED.get(code, code) for code in PLANTED} < set(FAULTS)


def test_a_policy_that_is_sure_of_nearly_all_tokens_has_no_wrong_unit(tmp_path):
    chance = np.random.default_rng(0)
    with Recorder(tmp_path) as recorder:
        for step in (1, 2):
            sides = np.where(chance.random((2, 8, 20)) < 0.05, -3 * chance.random((2, 8, 20)), 0.0).astype(np.float32)
            batch = recorder.add_sequences(
                step=step, prompt_ids=[[1]] * 8, response_ids=chance.integers(2, 9, (8, 20)), group_ids=["0"] * 8
            )
            for name, logprobs in zip(("train", "rollout"), sides, strict=True):
                recorder.add_scores(name, batch, logprobs=logprobs)
    assert "log_base" not in [finding.code for finding in check(tmp_path).findings]


def test_a_run_whose_last_steps_keep_no_token_is_judged(tmp_path):
    """Tokens that are certain on both sides tell nothing of logits, so that a policy that has learned leaves steps empty."""
    with Recorder(tmp_path / "run") as recorder:
        draw = np.random.default_rng(0)
        for step in range(1, 15):
            logprobs = -draw.exponential(1.0, (30, 8)) if step < 14 else np.zeros((30, 8))
            noise = draw.normal(0, 1e-3, (30, 8)) if step < 14 else 0.0
            batch = recorder.add_sequences(
                step=step, prompt_ids=[[row] for row in range(30)], response_ids=draw.integers(0, 20, (30, 8))
            )
            recorder.add_scores("rollout", batch, logprobs=logprobs.astype(np.float32))
            recorder.add_scores("train", batch, logprobs=np.minimum(logprobs + noise, 0).astype(np.float32))
    error_structure(gather(open_database(tmp_path / "run"), ("train", "rollout"), trace=""))


# --- A second fault behind values that stand at other tokens or in other rows ---------------------------------------------

MISPLACED = {"shift": lambda values: changed(values, shifted), "row_pairing": swapped}


def found_behind(path, misplaced, behind, **options):
    """Codes of a trace whose rollout is misplaced, and differs by `behind`."""
    recording = Recording(rollout=lambda step, number: MISPLACED[misplaced](behind(step, number)), **options)
    return check(recording.write(path)).findings


def at_temperature(step, number):
    return step.scored(step.logits / 0.8)


@pytest.mark.parametrize("misplaced", MISPLACED)
def test_a_temperature_is_found_behind_values_at_other_places(tmp_path, misplaced):
    first, second, *_ = found_behind(tmp_path / "trace", misplaced, at_temperature)
    assert (first.code, second.code) == (misplaced, "temperature")
    assert second.numbers["behind"] == misplaced
    assert "visible only after correcting for" in evidence_text(second)
    assert not second.next


@pytest.mark.parametrize("misplaced", MISPLACED)
def test_other_weights_are_found_behind_values_at_other_places(tmp_path, misplaced):
    def stale(step, number):
        return step.scored(moved(step.logits, 3, 0.1))

    findings = found_behind(tmp_path / "trace", misplaced, stale, contracts=BOTH_FP32)
    assert [finding.code for finding in findings[:2]] == [misplaced, "computation_differs"]


def test_what_is_left_behind_values_at_other_places_says_so(tmp_path):
    findings = found_behind(
        tmp_path / "trace", "shift", lambda step, number: step.scored(moved(step.logits, 3, 0.1)), contracts=BOTH_FP32
    )
    assert findings[1].numbers["behind"] == "shift"


@pytest.mark.parametrize("misplaced", MISPLACED)
@pytest.mark.parametrize("behind", [in_float32, in_bfloat16])
def test_what_is_only_misplaced_has_no_second_fault(tmp_path, misplaced, behind):
    (first, *others) = found_behind(tmp_path / "trace", misplaced, behind)
    assert first.code == misplaced
    assert not [finding.code for finding in others if "behind" in finding.numbers]


# --- Values, precision and rendering ----------------------------------------------------------------------------------------

LOGPROBS = -np.random.default_rng(0).exponential(1.5, 400) - 0.01


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        (LOGPROBS.astype(np.float32), "float32"),
        (LOGPROBS.astype(np.float16).astype(np.float32), "float16"),
        (bfloat16(LOGPROBS), "bfloat16"),
        ((LOGPROBS.astype(np.float32).view(np.uint32) & 0xFFF00000).view(np.float32), "float8"),
        ((LOGPROBS.astype(np.float32).view(np.uint32) & 0xFFE00000).view(np.float32), "float8_e5m2"),
        (np.round(LOGPROBS, 2), "2 decimals"),
        (np.round(LOGPROBS / 0.125) * 0.125, "steps of 0.125"),
        (np.round(LOGPROBS / 0.0371) * 0.0371, "steps of 0.0371"),
        (np.round(np.maximum(LOGPROBS, -5)), "0 decimals"),
        (LOGPROBS[:5], None),
        (np.zeros(400), None),
    ],
)
def test_the_precision_of_logprobs_is_inferred_from_their_bits(values, dtype):
    assert value_precision(values) == dtype


@pytest.mark.parametrize(
    ("contract", "dtype"),
    [(FP32, "float32"), (VLLM_BF16, "bfloat16"), ({"dtype": "torch.float16"}, "float16"), ({}, None)],
)
def test_the_dtype_of_a_pass_is_that_of_its_contract(contract, dtype):
    assert dtype_of(contract) == dtype


def test_logits_in_bfloat16_are_inferred_from_pairs_of_tokens_in_one_context(tmp_path):
    run = Recording(rollout=in_bfloat16, options={"groups": 4, "in_group": 16}).write(tmp_path / "trace")
    train, rollout = precisions(gather(open_database(run), ("train", "rollout"), trace=""))
    assert (rollout.logits, rollout.coarsest) == ("bfloat16", "bfloat16")
    assert train.coarsest is None  # float32 logits alone do not show what the layers were computed in


@pytest.mark.parametrize(("num", "place", "code"), [(2, "scattered", "placeholders"), (3, "end", "lengths")])
def test_values_missing_at_the_end_are_told_from_holes(tmp_path, num, place, code):
    def cut(step, number):
        values = in_float32(step, number)
        values[0][-num:] = np.nan
        return values

    first = check(Recording(rollout=cut, steps=1).write(tmp_path / "trace")).findings[0]
    assert (first.code, first.numbers["place"], first.numbers["num_tokens"]) == (code, place, num)


def result_of(*faults):
    findings = tuple(
        Finding(
            code=fault.code, signal="equal_bits", effect=0.0, share=1.0, cause=fault.title, side=fault.broken,
            numbers={"num_tokens": 2, "a": "train", "b": "rollout", "contracts_known": 0},
        )
        for fault in faults
    )  # fmt: skip
    return CheckResult(
        trace="run", pair="train:rollout", num_tokens=2, num_sampled_tokens=2, rms_d=0.1, findings=findings
    )


@pytest.mark.parametrize("side", BROKEN)
def test_the_verdict_says_what_is_broken(side, monkeypatch):
    monkeypatch.setitem(checked_text.__globals__, "evidence_text", lambda finding: "evidence")
    fault = replace(EQUAL, broken=side)
    result = result_of(fault)
    assert checked_text(result).startswith(f"NOT VALID, {BROKEN[side]}: train:rollout of run, 2 tokens")
    assert f"broken: {side}" in checked_text(result)


def test_json_has_codes_numbers_and_sentences():
    result = result_of(EQUAL)
    told = result_json(result)
    assert (told["is_valid"], told["broken"]) == (True, None)
    (finding,) = told["findings"]
    assert (finding["code"], finding["title"], finding["fails"]) == ("equal", "bitwise equal", False)
    assert finding["evidence"] == evidence_text(result.findings[0])
    assert checked_text(result).startswith("VALID: train:rollout of run, 2 tokens (all inspected individually)")
    some = replace(result, num_tokens=3)
    assert "3 tokens (statistics on all, 2 inspected individually)" in checked_text(some)


def test_commands_are_not_wrapped():
    numbers = {"num": 1, "column": "reward"}
    query = Advice(f'tim-trace sql run "SELECT {", ".join(map(str, range(50)))}"')
    known = {"code": "not_finite", "signal": "values", "title": "NaN or infinite reward", "numbers": numbers}
    fault = DataFinding(**known, share=1.0, since=None, is_notice=False, next=query)
    text = checked_text(replace(result_of(EQUAL), num_tokens=1, num_sampled_tokens=1, data=(fault,)), 80)
    assert f"next: {query}" in text.splitlines()[-1]
    assert ", 1 token (all inspected" in " ".join(text.split())
    told = wrapped_lines(f"  next: call it and record again; then run: {query}", 80)
    assert query in told
    command = f"`tim-trace weights {'run/' * 30} --attach VERSION DIR`"
    assert command in wrapped(f"no weights; run {command} and replay", "  ", 80)


def test_steps_are_named_as_places():
    at = {"feature": "step", "values": "32"}
    assert [where_text({**at, "kind": kind}) for kind in ("from", "before")] == [
        "all from step 32 on",
        "all before step 32",
    ]


def test_every_inspected_token_has_an_owner(tmp_path):
    result = check(PLANTED["placeholders"].write(tmp_path / "holes"))
    (finding,) = result.findings
    num = finding.numbers["num_tokens"]
    rest = result.num_sampled_tokens - num
    told = result_json(result)
    assert list(told["owners"]) == [
        {"owner": "placeholders", "num_tokens": num},
        {"owner": "rounding", "num_tokens": rest},
        {"owner": "nobody", "num_tokens": 0},
    ]
    assert "tokens" not in told["findings"][0]
    cut = check(PLANTED["lengths"].write(tmp_path / "cut"))
    assert [each.num_tokens for each in cut.owners] == [0, cut.num_sampled_tokens, 0]


def test_tokens_that_no_cause_explains_belong_to_nobody(tmp_path):
    def scattered(step, number):
        draw = np.random.default_rng(number)
        return changed(
            in_float32(step, number), lambda row: row - draw.choice([0, 2, 5], len(row), p=[0.98, 0.01, 0.01])
        )

    result = check(Recording(rollout=scattered, contracts=BOTH_FP32).write(tmp_path / "run"))
    owners = {each.owner: each.num_tokens for each in result.owners}
    assert result.findings[0].code == "unexplained"
    assert owners["nobody"] == result.findings[0].numbers["num_tokens"]
    assert owners["nobody"] > 10
    assert sum(owners.values()) == result.num_sampled_tokens


def test_one_fault_among_findings_fails():
    recording, computation = replace(EQUAL, broken="recording"), replace(EQUAL, broken="computation")
    assert result_of(EQUAL).is_valid
    assert not result_of(EQUAL, recording).is_valid
    assert result_of(computation, recording).broken == "computation"
    expected = replace(result_of(recording).findings[0], is_expected=True)
    assert replace(result_of(EQUAL), findings=(expected,)).is_valid


def test_of_equally_frequent_contracts_the_first_counts():
    for number in range(20):
        one, two = (f"{name}{number}" for name in ("one", "two"))
        data = SimpleNamespace(
            sample=SimpleNamespace(a=SimpleNamespace(contracts=[one, None, two, two, one])),
            contracts={name: {"name": name} for name in (one, two)},
            seq=np.arange(5),
        )
        assert PairData.contract(data, "a") == {"name": one}


def test_rounding_above_its_usual_level_says_so():
    numbers = {
        "level": 0.2,
        "allowed": 0.1,
        "most": 0.25,
        "a": "train",
        "b": "rollout",
        "dtype_a": None,
        "dtype_b": None,
    }
    usual = Finding(code="rounding", signal="rounding", effect=0.1, share=1.0, numbers=numbers | {"level": 0.05})
    high = replace(usual, numbers=numbers | {"cause": "high"})
    assert "0.05 nats rms; rounding in unknown dtypes usually causes at most 0.1" in evidence_text(usual)
    assert "0.2 nats rms, more than the 0.1" in evidence_text(high)
    assert "but less than 0.25" in evidence_text(high)


def test_bigrams_that_hardly_repeat_say_nothing(tmp_path):
    draw = np.random.default_rng(0)
    ids = draw.permutation(100_000)[:2000].reshape(20, 100)
    ids[1, :3] = ids[0, :3]
    rollout = -draw.exponential(1.0, ids.shape).astype(np.float32)
    with Recorder(tmp_path / "trace") as recorder:
        for step in (1, 2):
            batch = recorder.add_sequences(step=step, response_ids=ids[10 * (step - 1) :][:10])
            for name, noise in (("rollout", 0.0), ("train", 0.01)):
                values = rollout[10 * (step - 1) :][:10] + draw.normal(0, 1, (10, 100)) * noise
                recorder.add_scores(name, batch, logprobs=np.minimum(values, 0).astype(np.float32))
    database = open_database(tmp_path / "trace")
    assert features(gather(database, ("train", "rollout"), trace="trace"))["bigram"] == 0.0


@pytest.mark.parametrize("name", OF_DIFFERENCES)
def test_a_sum_is_bitwise_the_same_alone_and_with_the_others(name):
    draw = np.random.default_rng(1)
    a, b, starts = -draw.exponential(1, 50), -draw.exponential(1, 50), np.array([0, 7, 30])
    alone, together = difference_sums(a, b, starts, [name]), difference_sums(a, b, starts)
    assert list(alone) == [name]
    assert alone[name].tobytes() == together[name].tobytes()


def test_no_template_uses_a_number_that_adds_a_clause_to_every_sentence():
    source = inspect.getsource(evidence_text)
    clauses = set(re.findall(r'if "(\w+)" in numbers', source))
    used = {
        field for fault in ALL for text in fault.evidence.values() for _, field, *_ in Formatter().parse(text) if field
    }
    assert len(clauses) >= 7
    assert clauses.isdisjoint(used)
