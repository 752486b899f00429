"""JSON that programs can rely on: versioned, by a schema, with stable codes."""

import ast
import json
import runpy
import sys
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import tim_trace
from builders import ROOT, in_process, make_trace
from json_output import SCHEMAS, assert_valid
from shared import made_once
from tim_trace import Recorder, cli
from verbs import HEAVY, words_of

DOCS = ROOT / "docs"
VERBS = [name for name, command in cli.main.commands.items() if any("--json" in one.opts for one in command.params)]
RELEASED = Path(__file__).parent / "data" / "codes.txt"
"""Every code that a release has, with its place: one a line. Add new ones; none may go."""


@pytest.fixture(scope="module")
def documents():
    sys.path.insert(0, str(DOCS))
    try:
        yield runpy.run_path(str(DOCS / "json_schemas.py")), runpy.run_path(str(DOCS / "codes.py"))
    finally:
        sys.path.remove(str(DOCS))


@pytest.fixture(scope="module")
def example():
    return made_once("example trace", lambda folder: tim_trace.example(folder / "run")) / "run"


def test_every_verb_with_json_has_a_schema_and_every_schema_is_current(documents):
    schemas, _ = documents
    fresh = schemas["documents"]()
    assert {path.name: path.read_text() for path in SCHEMAS.iterdir()} == fresh
    assert set(fresh) == {f"{name}.json" for name in (*VERBS, "error")}


MORE = {
    "diagnose": [["-v"], ["--steps", "1:50"], ["--steps", "3"]],
    "attribute": [["--steps", "1:50"]],
    "objective": [["--by", "step"], ["--loss", "gspo"]],
    "stats": [["--by", "step"], ["--by", "sequence", "--steps", "3"], ["--like", "verl"]],
    "gate": [["--fail-on", "tim.k3>1e-3 any step"]],
    "watch": [["--steps", "1:3"]],
}


@pytest.mark.parametrize(
    ("verb", "more"), [(verb, more) for verb in sorted({*VERBS} - HEAVY) for more in ([], *MORE.get(verb, ()))]
)
def test_what_a_verb_prints_fits_its_schema(example, tmp_path, verb, more):
    done = in_process([*words_of(verb, run=example, new=tmp_path / "new"), *more, "--json"])
    found = assert_valid(verb, done.stdout)
    assert found["json_version"] == 1
    assert ("error" in found) == (verb == "weights"), done.stderr  # the example has none


def test_two_traces_a_list_of_queries_and_a_run_of_curves_fit_too(example, tmp_path):
    make_trace(tmp_path / "run")
    with Recorder(tmp_path / "curves") as recorder:
        for step in range(1, 30):
            recorder.add_metrics(
                step, {"reward": 0.5 + step % 3, "rollout_corr/k3_kl": 1e-4 * step, "grad_norm": np.nan}
            )
    for words in (
        ["info", example, tmp_path / "run"], ["query"], ["stats", example, tmp_path / "run"], ["compare", example, tmp_path / "run"],
        ["compare", tmp_path / "run", tmp_path / "curves"], ["sql", example, "SELECT 'NaN'::DOUBLE AS x, [1, NULL] AS y FROM steps"],
        ["query", "shape", example, "--steps", "3"],
        *([verb, tmp_path / name] for verb in ("info", "diagnose", "attribute", "dynamics", "watch", "check", "objective", "verify")
          for name in ("run", "curves")),
    ):  # fmt: skip
        done = in_process([*map(str, words), "--json"])
        assert assert_valid(words[0], done.stdout)["json_version"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["replay", "--dtype", "bf16"], ["replay", "--dtype", "fp16", "--dry-run"], ["triangulate", "--arm", "dtype=bf16"],
        ["locate", "--steps", "1", "--arm", "dtype=bf16", "--sequences", "2"], ["reproduce", "--steps", "1", "--sequences", "2"], ["weights"], ["weights", "--by", "module"],
        ["weights", "--verify"], ["gradient"], ["diagnose", "-v"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_what_a_replay_prints_fits_its_schema(words):
    from located import make_run

    run = made_once("a run with weights for --json", lambda folder: make_run(folder / "run")) / "run"
    done = in_process([words[0], str(run), *words[1:], "--json"])
    found = assert_valid(words[0], done.stdout)
    assert ("error" in found) == (words[0] == "gradient"), done.stderr  # without advantages


def test_a_key_that_is_not_declared_does_not_fit(example):
    found = json.loads(in_process(["check", str(example), "--json"]).stdout)
    for broken in (found | {"surplus": 1}, {name: value for name, value in found.items() if name != "rms_d"}):
        with pytest.raises(AssertionError, match="check: "):
            assert_valid("check", json.dumps(broken))
    schema = json.loads((SCHEMAS / "check.json").read_text())
    assert not jsonschema.Draft202012Validator(schema).is_valid(found | {"rms_d": "many"})
    assert jsonschema.Draft202012Validator(schema).is_valid(found | {"rms_d": "NaN"})


def test_diagnose_is_short_unless_detail_is_asked_for(example):
    short = in_process(["diagnose", str(example), "--json"]).stdout
    long = json.loads(in_process(["diagnose", str(example), "--json", "--verbose"]).stdout)
    assert len(short) < 6000
    found = json.loads(short)
    assert found["story"] == long["story"]
    assert found["attribution"]["suspects"][0]["code"] == long["attribution"]["cause"] == "mismatch"
    raised = [each for each in long["alarms"]["judged"] if each["is_raised"]]
    assert found["alarms"]["fired"] == {each["alarm"]["code"]: each["first_step"] for each in raised}
    assert len(long["figures"]) > 20
    assert len(long["attribution"]["suspects"]) > 8


def test_objective_prints_every_step_only_where_it_is_asked_for(example):
    run, step = (
        json.loads(in_process(["objective", str(example), "--by", by, "--json"]).stdout) for by in ("run", "step")
    )
    assert (len(run["steps"]), len(step["steps"])) == (5, 130)
    assert run["steps"] == sorted(step["steps"], key=lambda row: -abs(row["bias"]))[:5]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["check", "nowhere"], "TraceNotFound"), (["check"], "UsageError"), (["check", "nowhere", "--bad"], "UsageError"),
        (["nothing"], "UsageError"), (["query", "shape", "--sql", "--steps", "3"], "UsageError"),
    ],
)  # fmt: skip
def test_an_error_is_json_too(tmp_path, monkeypatch, words, code):
    monkeypatch.chdir(tmp_path)
    done = in_process([*words, "--json"])
    assert done.code == 2
    found = assert_valid("error", done.stdout)
    assert found["error"]["code"] == code
    assert found["error"]["message"] in done.stderr


def test_no_code_is_renamed_or_taken_away(documents):
    _, codes = documents
    now = [f"{place}: {code}" for place, found in codes["codes"]().items() for code in found]
    assert RELEASED.read_text().splitlines() == sorted(now), (
        "a code is never renamed or removed; add new ones to the list"
    )


def test_every_code_in_the_source_is_on_the_list(documents):
    """Codes are constants in calls: Statement(code="..."), fact("..."), Alarm(code="...")."""
    _, codes = documents
    known = {code for found in codes["codes"]().values() for code in found}
    written = {}
    for path in (ROOT / "analysis").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                given = [each.value for each in node.keywords if each.arg == "code" and name not in OF_PAGES]
                given += node.args[:1] if name in ("fact", "_own_alarm") else []
                written |= {each.value: path.name for each in given if isinstance(each, ast.Constant)}
    assert len(written) > 100
    assert {code: where for code, where in written.items() if code not in known} == {}


OF_PAGES = {"Answer", "CustomJS", "CustomJSTickFormatter"}
""""Calls whose `code` is of the report's page, not of the JSON output."""
