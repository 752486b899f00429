"""The engine's weights beside the trainer's. Digests are small numbers here: equal ones are equal bits."""

import json

import numpy as np
import pytest
from bigrams import BOTH_FP32, Recording, moved, table
from builders import tim_trace
from tim_trace.analysis import weights
from tim_trace.analysis.check.check import check, gather
from tim_trace.analysis.check.faults.kinds import find_engine_weights, weights_agree
from tim_trace.analysis.check.text import checked_text
from tim_trace.analysis.engine_weights import engine_verdict, engine_versions, read_engine_verdict
from tim_trace.analysis.verify import verify
from tim_trace.analysis.views import open_database
from tim_trace.analysis.weights import engine_weights_text
from tim_trace.schemas.capture import Capture
from tim_trace.schemas.errors import InvalidOption, WeightsMissing
from tim_trace.schemas.layout import ENGINE_WEIGHTS
from tim_trace.tracer.recorder import Recorder
from tim_trace.tracer.store import Store
from tim_trace.tracer.writer import TraceWriter

UP, DOWN, NORM = "model.layers.0.mlp.up_proj.weight", "model.layers.7.mlp.down_proj.weight", "model.norm.weight"


def row(version, tensor, trainer, given=None, held=None, unmerged=None, cast=None, writer="p1"):
    return {
        "step": version + 1, "policy_version": version, "tensor": tensor, "dtype": "bfloat16", "trainer": trainer,
        "unmerged": unmerged, "given": given, "held": held, "cast": cast, "attempt": None, "writer": writer,
    }  # fmt: skip


def add(recorder, rows):
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    recorder.writer.submit(lambda: recorder.writer.append(ENGINE_WEIGHTS, columns, len(rows)), 0)


def traced(path, rows):
    with Recorder(path) as recorder:
        add(recorder, rows)
        for step in sorted({row["step"] for row in rows}):
            recorder.add_sequences(step=step, prompt_ids=[[5]], response_ids=[[7]])
    return path


def verdict(path, rows, steps=None):
    return engine_verdict(list(engine_versions(open_database(traced(path, rows)))), steps)


def only(path, rows):
    (fault,) = verdict(path, rows).faults
    return fault


def run_of(given, tensors=(UP, DOWN), versions=4, **more):
    """Versions of tensors whose digest is the version plus 100 times their place; `given(version, tensor, digest_of)`."""
    rows = []
    for version in range(versions):
        for place, tensor in enumerate(tensors):

            def digest_of(version, place=place):
                return 100 * (place + 1) + version

            value = given(version, tensor, digest_of)
            rows.append(row(version, tensor, digest_of(version), value, **more))
    return rows


def test_weights_that_agree_at_every_version_have_no_fault(tmp_path):
    found = verdict(tmp_path / "t", run_of(lambda v, t, of: of(v)))
    assert (found.faults, found.agreeing_steps) == ((), {1, 2, 3, 4})


def test_a_tensor_that_is_not_given_again_is_a_partial_transfer(tmp_path):
    fault = only(tmp_path / "t", run_of(lambda v, t, of: None if v and t == DOWN else of(v)))
    assert (fault.cause, fault.tensor, fault.holds_version, fault.version) == ("partial_sync", DOWN, 0, 3)
    assert (fault.given_version, fault.num_tensors, fault.of_tensors, fault.first_version) == (0, 1, 2, 1)
    assert fault.steps == {2, 3, 4}


def test_weights_of_the_version_before_are_stale(tmp_path):
    fault = only(tmp_path / "t", run_of(lambda v, t, of: of(max(v - 1, 0))))
    assert (fault.cause, fault.holds_version, fault.version, fault.given_version) == ("stale_weights", 2, 3, 3)


def test_a_transfer_that_stopped_is_stale_since_then(tmp_path):
    fault = only(tmp_path / "t", run_of(lambda v, t, of: of(v) if v < 2 else None))
    assert (fault.cause, fault.holds_version, fault.given_version, fault.first_version) == ("stale_weights", 1, 1, 2)


def test_an_engine_that_was_never_given_anything_is_told_by_what_it_holds(tmp_path):
    rows = [row(v, t, n + v, held=n) for v in range(3) for t, n in ((UP, 100), (DOWN, 200))]
    fault = only(tmp_path / "t", rows)
    assert (fault.cause, fault.holds_version, fault.given_version) == ("never_synchronised", 0, None)


def test_an_engine_that_began_with_dummy_weights_and_was_never_given_any_is_told(tmp_path):
    fault = only(tmp_path / "t", [each | {"held": 999} for each in run_of(lambda v, t, of: None)])
    assert (fault.cause, fault.holds_version, fault.given_version) == ("never_synchronised", None, None)


def test_engines_of_workers_serve_a_driver_that_records_the_sequences(tmp_path):
    """As verl's: each worker trains, and tells of its own engine."""
    with (
        Recorder(tmp_path / "run") as driver,
        Recorder.of_writer(TraceWriter(tmp_path / "run"), Capture.parse("logprobs", 1.0)) as worker,
    ):
        for step in (1, 2, 3):
            batch = driver.add_sequences(step=step, seq_ids=["a"], prompt_ids=[[5]], response_ids=[[7]])
            if step == 3:
                break
            worker.add_scores("current", batch, logprobs=[[-0.5]])
            add(worker, [row(step - 1, UP, 100 + step, given=100 + step, writer=worker.writer.name)])
    assert verdict_of(tmp_path / "run").agreeing_steps == {1, 2}


def verdict_of(path):
    return read_engine_verdict(open_database(path))


def test_nothing_is_said_of_tensors_that_were_neither_given_nor_read(tmp_path):
    found = verdict(tmp_path / "t", [row(v, UP, 100 + v) for v in range(3)])
    assert (found.faults, found.agreeing_steps) == ((), frozenset())


def test_an_adapter_that_is_not_merged_is_told_from_stale_weights(tmp_path):
    """Before the first update an adapter does nothing, so that its base is what the trainer had at version 0, too."""
    rows = [row(v, UP, 100 + v, given=100, unmerged=100) for v in range(4)]
    assert only(tmp_path / "unmerged", rows).cause == "adapter"
    rows = [row(v, UP, 100 + v, given=100 + max(v - 1, 0), unmerged=100) for v in range(4)]
    assert only(tmp_path / "late", rows).cause == "stale_weights"


def test_a_cast_is_told_from_values_that_the_trainer_never_had(tmp_path):
    rows = [row(v, UP, 100 + v, given=900 + v, cast="float8_e4m3fn") for v in range(3)]
    fault = only(tmp_path / "cast", rows)
    assert (fault.cause, fault.cast, fault.first_version) == ("quantised", "float8_e4m3fn", 0)
    assert only(tmp_path / "other", [row(v, UP, 100 + v, given=900 + v) for v in range(3)]).cause == "other_weights"


def test_a_norm_that_rounds_to_what_it_was_is_not_stale_beside_tensors_that_were_rounded(tmp_path):
    rows = [row(v, t, n + v, given=n + 50 + v, cast="float16") for v in range(2) for t, n in ((UP, 100), (DOWN, 200))]
    rows += [row(v, NORM, 300 + v, given=300, cast="float16" if v else None) for v in range(2)]
    assert [fault.cause for fault in verdict(tmp_path / "t", rows).faults] == ["quantised"]


def test_what_was_given_and_not_loaded_is_told(tmp_path):
    rows = [row(v, t, n + v, given=n + v, held=n if t == DOWN else n + v) for v in range(3) for t, n in ((UP, 100), (DOWN, 200))]  # fmt: skip
    fault = only(tmp_path / "t", rows)
    assert (fault.cause, fault.tensor, fault.given_version, fault.is_loaded) == ("partial_sync", DOWN, 2, False)


def test_two_causes_are_two_faults(tmp_path):
    rows = run_of(lambda v, t, of: of(0) + 50 if t == DOWN else None if v else of(v))
    rows += [row(v, NORM, 300 + v, given=300 + v) for v in range(4)]
    assert {fault.cause for fault in verdict(tmp_path / "t", rows).faults} == {"partial_sync", "other_weights"}


def test_each_engine_is_held_against_its_own_trainer(tmp_path):
    good, bad = (run_of(lambda v, t, of, late=late: of(max(v - late, 0)), writer=f"p{late}") for late in (0, 1))
    found = verdict(tmp_path / "t", good + bad)
    assert [fault.cause for fault in found.faults] == ["stale_weights"]
    assert found.agreeing_steps == {1}


def test_chosen_steps_are_judged_by_the_versions_before_them_too(tmp_path):
    trace = traced(tmp_path / "t", run_of(lambda v, t, of: of(v) if v < 2 else None))
    assert not engine_verdict(list(engine_versions(open_database(trace))), {1, 2}).faults
    assert [v.version for v in engine_versions(open_database(trace, "4:"))] == [0, 1, 2, 3]


def test_the_table_names_each_tensor_and_each_module(tmp_path):
    trace = traced(tmp_path / "t", run_of(lambda v, t, of: None if v and t == DOWN else of(v)))
    found = {row["tensor"]: row for row in weights(trace, engine=True).dicts()}
    assert found[UP] == {
        "tensor": UP, "cause": None, "num_differ": 0, "num_versions": 4, "first_differs": None, "given_version": 3,
        "holds_version": 3, "trainer_version": 3, "agrees": True,
    }  # fmt: skip
    assert [found[DOWN][name] for name in ("given_version", "holds_version", "agrees", "num_differ", "cause")] == [
        0, 0, False, 3, "partial_sync",
    ]  # fmt: skip
    shown = tim_trace("weights", trace, "--engine", "--by", "module", "--json").json()
    assert [(row["tensor"], row["cause"]) for row in shown] == [
        ("model.layers.*.mlp.up_proj", None), ("model.layers.*.mlp.down_proj", "partial_sync"),
    ]  # fmt: skip


@pytest.mark.slow
def test_tensors_that_agree_are_counted_in_a_line(tmp_path):
    trace = traced(tmp_path / "whole", run_of(lambda v, t, of: of(v)))
    told = tim_trace("weights", trace, "--engine").stdout
    assert told.splitlines() == [
        f"All {len(weights(trace, engine=True))} engine tensors equal the trainer's bit for bit at all 4 versions "
        "(--csv lists them)."
    ]
    assert UP in tim_trace("weights", trace, "--engine", "--csv").stdout
    assert "All 2 engine modules" in tim_trace("weights", trace, "--engine", "--by", "module").stdout


def test_tensors_that_do_not_agree_have_a_row(tmp_path):
    trace = traced(tmp_path / "t", run_of(lambda v, t, of: None if v == 1 and t == DOWN else of(v)))
    asked = tim_trace("weights", trace, "--engine")
    head, table, legend = (block.splitlines() for block in asked.stdout.split("\n\n"))
    num = len(weights(trace, engine=True))
    what = f"1 of {num} engine tensors differ (partial_sync), first at version 1. Fix the engine's weight update: "
    assert head[0].startswith(f"{what}send every tensor that changed. {num - 1} of {num} ")
    assert [line.split()[0] for line in table] == ["tensor", "-" * len(DOWN), DOWN]
    assert table[2].split()[1:3] == ["partial_sync", "1"]
    assert all(f"{column}: " in legend[0] for column in table[0].split()[5:])
    assert "next" not in asked.stderr
    assert len(tim_trace("weights", trace, "--engine", "--csv").stdout.splitlines()) == 1 + num


def test_the_legend_explains_every_column_but_the_first_two(tmp_path):
    rows = weights(traced(tmp_path / "t", run_of(lambda v, t, of: None if v else of(v))), engine=True)
    legend = engine_weights_text(rows, "tensor").split("\n\n")[-1]
    assert all(name in legend for name in rows.columns[2:-1])


def test_an_engine_of_which_no_tensor_agrees_has_no_line_of_those_that_do(tmp_path):
    trace = traced(tmp_path / "t", run_of(lambda v, t, of: None if v else of(v)))
    assert "equal" not in tim_trace("weights", trace, "--engine").stdout


def test_a_trace_without_digests_says_how_to_record_them(tmp_path):
    with Recorder(tmp_path / "t") as recorder:
        recorder.add_sequences(step=1, prompt_ids=[[5]], response_ids=[[7]])
    with pytest.raises(WeightsMissing, match="has no digests of the engine's weights"):
        weights(tmp_path / "t", engine=True)
    with pytest.raises(InvalidOption, match="applies only to the trainer's weights; drop one"):
        weights(tmp_path / "t", engine=True, verify=True)


def test_verify_reads_the_digests(tmp_path):
    trace = traced(tmp_path / "t", run_of(lambda v, t, of: of(v)))
    folders = {row["folder"]: row for row in verify(trace).folders.dicts()}
    assert folders[ENGINE_WEIGHTS]["num_files"] == 1
    (file,) = (trace / ENGINE_WEIGHTS).glob("*.parquet")
    file.write_bytes(file.read_bytes()[:-9] + b"x" + file.read_bytes()[-8:])
    assert any(ENGINE_WEIGHTS in sentence for sentence in verify(trace).damaged)


def moving(number):
    """The trainer's logits at a step."""
    return moved(table(), number, 0.3)


def behind(step, number):
    """The engine's logprobs by the table before the first update."""
    return of_table(step, moving(0))


def of_table(step, logits):
    """Logprobs by a table of logits, summed in float32 as an engine does."""
    scores = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True, dtype=np.float32))
    rows = zip(step.prompts, step.responses, strict=True)
    return [scores[np.concatenate([p[-1:], r[:-1]]).astype(int), r] for p, r in rows]


def recorded(path, rows, rollout=behind):
    """A run whose engine computes with the weights before the first update, and what the digests say of them."""
    trace = Recording(rollout=rollout, weights=moving, contracts=BOTH_FP32).write(path)
    (state,) = Store(trace).writers()[0]
    rows = [row | {"writer": state.writer} if row["writer"] == "p1" else row for row in rows]
    with Recorder(trace, resume=True) as recorder:
        add(recorder, rows)
    return trace


def test_check_says_which_tensor_is_behind_and_asks_no_logprobs(tmp_path):
    found = check(recorded(tmp_path / "t", run_of(lambda v, t, of: None if v and t == DOWN else of(v))))
    (finding,) = found.findings
    assert (finding.code, finding.signal, finding.weight) == ("weights_differ", "engine_weights", 1.0)
    numbers = {name: finding.numbers[name] for name in ("cause", "tensor", "holds_version", "trainer_version")}
    assert numbers == {"cause": "partial_sync", "tensor": DOWN, "holds_version": 0, "trainer_version": 3}
    assert 0 < finding.share < 1
    assert f"the engine's {DOWN} is from version 0, while the trainer is at version 3" in checked_text(found)
    assert finding.next.command.endswith("--engine")
    assert json.loads(tim_trace("check", tmp_path / "t", "--json").stdout)["findings"][0]["numbers"]["tensor"] == DOWN


def test_a_mismatch_too_small_for_logprobs_is_told_by_digests(tmp_path):
    rows = run_of(lambda v, t, of: None if v and t == DOWN else of(v))
    found = check(recorded(tmp_path / "t", rows, rollout=lambda step, number: of_table(step, moving(number))))
    assert [finding.code for finding in found.findings] == ["weights_differ"]


def test_where_all_digests_agree_it_is_not_said_that_weights_differ(tmp_path):
    trace = recorded(tmp_path / "t", run_of(lambda v, t, of: of(v)))
    (finding,) = check(trace).findings
    assert (finding.code, finding.signal) == ("computation_differs", "equal_weights")
    bare = Recording(rollout=behind, weights=moving, contracts=BOTH_FP32).write(tmp_path / "bare")
    assert {finding.signal for finding in check(bare).findings} == {"judged"}


def test_steps_whose_digests_are_not_there_are_judged_by_logprobs(tmp_path):
    trace = recorded(tmp_path / "t", run_of(lambda v, t, of: of(v), versions=3))
    assert {finding.signal for finding in check(trace).findings} == {"judged"}


def test_an_engine_without_digests_beside_one_that_has_them_is_judged_by_logprobs(tmp_path):
    rows = run_of(lambda v, t, of: of(v), writer="another process")
    assert {finding.signal for finding in check(recorded(tmp_path / "t", rows)).findings} == {"judged"}
    served = [row | {"dtype": None} for row in rows]
    assert [finding.signal for finding in check(recorded(tmp_path / "u", served)).findings] == ["equal_weights"]


def test_another_pair_is_not_judged_by_the_engine_s_weights(tmp_path):
    trace = recorded(tmp_path / "t", run_of(lambda v, t, of: of(0)))
    assert check(trace).findings[0].signal == "engine_weights"
    data = gather(open_database(trace), ("train", "rollout"), trace=str(trace))
    data.sample.b.name = "replay/as-recorded"
    assert not find_engine_weights(data)
    assert not weights_agree(data)


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (lambda: [row(v, UP, 100 + v, given=100, unmerged=100) for v in range(4)], "is the trainer's tensor without its adapter"),
        (lambda: [row(v, UP, 100 + v, given=900 + v, cast="float16") for v in range(4)], "is the trainer's tensor rounded to float16"),
        (lambda: [row(v, UP, 100 + v, given=900 + v) for v in range(4)], "matches the trainer's at no recorded version"),
        (lambda: [row(v, UP, 100 + v, held=100) for v in range(4)], "it was never sent"),
        (lambda: [row(v, UP, 100 + v, given=100 + v, held=100) for v in range(4)], "at version 3 was not loaded"),
        (lambda: [row(v, UP, 100 + v, given=99 + v if v else 100) for v in range(4)], "last sent at version 3, when it was already stale"),
    ],
)  # fmt: skip
def test_every_cause_has_its_sentence(tmp_path, rows, sentence):
    assert sentence in checked_text(check(recorded(tmp_path / "t", rows())))
