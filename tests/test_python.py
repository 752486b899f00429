"""The Python interface: names, arguments, results, and the page that documents them."""

import inspect
import pathlib
import re
import shutil
import subprocess
import sys
from importlib import import_module
from types import SimpleNamespace
from typing import get_type_hints

import numpy as np
import pandas as pd
import pytest
import tim_trace
from builders import ROOT, TIM_TRACE, run
from click.testing import CliRunner
from shared import rest_slow
from tim_trace import analysis, cli
from tim_trace.analysis import views
from tim_trace.analysis.frameworks import registry
from tim_trace.analysis.report.contents import Report
from tim_trace.analysis.rows import Rows
from tim_trace.replay.results import ReplayedSteps
from tim_trace.schemas.errors import (
    DamageWarning,
    InvalidOption,
    NotInstalled,
    TimTraceError,
    TimTraceWarning,
    TraceNotFound,
    WrongType,
)
from tim_trace.schemas.lazy import fits

VERBS = sorted(set(tim_trace.__all__) - {"Loss", "Recorder"})
HEAVY = ("torch", "duckdb", "pyarrow", "numpy", "pandas", "click", "bokeh", "matplotlib", "scipy")


def python(program, *arguments):
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("python") / "run"
    with tim_trace.Recorder(path) as recorder:
        recorder.add_loss(tim_trace.Loss())
        for step in (1, 2, 3):
            responses, rollout, train = make_scored(step)
            batch = recorder.add_sequences(
                step=step, prompt_ids=[[1, 2]] * len(responses), response_ids=responses, reward=[0.0, 1.0] * 2,
                advantage=[-1.0, 1.0] * 2,
            )  # fmt: skip
            recorder.add_scores("rollout", batch, logprobs=rollout)
            recorder.add_scores("train", batch, logprobs=train)
    return str(path)


def make_scored(seed):
    draw = np.random.default_rng(seed)
    rollout = [-draw.exponential(1.0, 6) for _ in range(4)]
    train = [np.minimum(row + draw.normal(0, 0.05, 6), 0).astype(np.float32) for row in rollout]
    return [draw.integers(3, 50, 6).tolist() for _ in range(4)], [row.astype(np.float32) for row in rollout], train


def test_importing_the_package_or_its_analysis_imports_nothing_heavy():
    program = f"import sys, tim_trace, tim_trace.analysis; print(sorted({{*{HEAVY}}} & {{*sys.modules}}))"
    assert python(program) == "[]"


def test_the_recorder_needs_neither_torch_nor_duckdb():
    program = "import sys; from tim_trace import Loss, Recorder; print(sorted({'torch', 'duckdb'} & {*sys.modules}))"
    assert python(program) == "[]"


def test_every_public_name_is_listed_and_is_what_the_module_of_it_defines():
    assert set(tim_trace.__all__) == set(vars(tim_trace)["_sources"])
    assert set(analysis.__all__) == set(vars(analysis)["_sources"])
    for name in VERBS:
        public, source = getattr(analysis, name), vars(analysis)["_sources"][name]
        defined = getattr(import_module(source, analysis.__name__), name)
        assert inspect.signature(public) == inspect.signature(defined)
        assert public.__doc__ == defined.__doc__
        assert getattr(tim_trace, name).__doc__ == defined.__doc__


@pytest.mark.slow
@pytest.mark.parametrize("package", ["tim_trace", "tim_trace.analysis"])
def test_a_verb_stays_a_function_whatever_is_imported_before_or_after(package):
    program = """
import importlib, inspect, pkgutil, sys
name, order = sys.argv[1:]
import tim_trace, tim_trace.analysis
package = sys.modules[name]
modules = [found.name for found in pkgutil.iter_modules(package.__path__) if found.name in package.__all__]
assert modules
if order == "verb first":
    before = [getattr(package, module) for module in modules]
for module in modules:
    importlib.import_module(f"{name}.{module}")
    assert inspect.ismodule(sys.modules[f"{name}.{module}"])
for module in modules:
    assert inspect.isfunction(getattr(package, module)), module
    exec(f"from {name} import {module}; assert inspect.isfunction({module})")
if order == "verb first":
    assert before == [getattr(package, module) for module in modules]
print(len(modules))
"""
    assert python(program, package, "verb first") == python(program, package, "module first")


def test_a_name_that_is_not_there_is_an_attribute_error():
    for package in (tim_trace, analysis):
        with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
            getattr(package, "nothing")  # noqa: B009
        assert set(package.__all__) <= set(dir(package))


WRONG = {
    "list": [1],
    "no element": [],
    "None": None,
    "str": "nowhere",
    "int": 3,
    "float": -1.5,
    "dict": {"a": 1},
    "path": pathlib.Path("/proc/nowhere"),
    "frame": pd.DataFrame({"a": [1]}),
    "object": object(),
    "bytes": b"x",
    "array": np.arange(3),
    "bool": True,
}
"""Values of every kind; nothing can be written below /proc."""


def check_sentence(error, kind):
    assert not re.search(r"object has no attribute|not supported between|NoneType", str(error)), (kind, error)


GIVEN = {
    "attach": {"version": 1, "folder": "/proc/nowhere"},
    "example": {"path": "/proc/nowhere"},
    "export": {"version": 1, "folder": "/proc/nowhere"},
    "export_run": {"to": "parquet", "output": "out", "force": True},
    "gate": {"fail_on": ["check"]},
    "import_dump": {"format": "auto", "path": "/proc/nowhere", "output": "/proc/nowhere"},
    "import_parquet": {"path": "/proc/nowhere", "output": "/proc/nowhere"},
    "query": {"name": "ess"},
    "record": {"command": ["true"], "output": "/proc/nowhere"},
    "sql": {"query": "SELECT 1"},
    "watch": {"once": True},
}
"""What a verb needs beside a trace."""

WRITES = {
    ("example", "path"),
    ("record", "output"),
    ("import_dump", "output"),
    ("import_parquet", "output"),
    ("export", "folder"),
    ("export_run", "output"),
    ("gate", "junit"),
    ("gate", "summary"),
} | {("report", name) for name in ("output", "png", "pdf")}
"""Arguments that are written to: a str is no mistake there."""


def _cases():
    for verb in VERBS:
        for name, parameter in inspect.signature(getattr(tim_trace, verb)).parameters.items():
            if parameter.kind is not parameter.VAR_KEYWORD and name != "progress":
                yield verb, name


@pytest.mark.parametrize(("verb", "name"), rest_slow(_cases(), 10))
@pytest.mark.filterwarnings("ignore::tim_trace.schemas.errors.TimTraceWarning")
def test_a_value_of_a_wrong_type_is_an_answer_or_a_sentence(trace, verb, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    function = getattr(tim_trace, verb)
    trace_name = next((key for key in ("trace", "traces") if key in inspect.signature(function).parameters), None)
    given = GIVEN.get(verb, {}) | ({trace_name: trace} if trace_name else {})
    given |= {"a": trace, "b": trace} if verb == "compare" else {}
    for kind, value in WRONG.items():
        if (verb, name) in WRITES and kind in ("str", "path"):
            continue
        if (
            verb in ("report", "figures")
            and kind in ("bool", "None", "str", "path")
            and name not in ("traces", "control", "pair")
        ):
            continue  # right values, with which it draws for a second or two
        try:
            found = function(**(given | {name: value}))
            next(found) if verb == "watch" else None
        except TimTraceError as error:
            check_sentence(error, kind)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: tim_trace.check([1]), WrongType, "check: trace: got a list object, expected a str or a path"),
        (lambda: tim_trace.check(None), WrongType, "check: trace: got None, expected a str or a path"),
        (lambda: tim_trace.stats(3), WrongType, "stats: traces: got 3, expected a str or a path or a list"),
        (lambda: tim_trace.gate("x", fail_on="check"), WrongType, "gate: fail_on: got 'check', expected a list"),
        (lambda: tim_trace.Recorder(None), WrongType, "Recorder: path: got None, expected a str or a path"),
        (lambda: tim_trace.stats([]), InvalidOption, "traces: no trace given"),
        (lambda: tim_trace.check(pathlib.Path("/proc/nowhere")), TraceNotFound, "/proc/nowhere"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_an_argument_is_said(call, error, message):
    with pytest.raises(error, match=re.escape(message)) as raised:
        call()
    assert isinstance(raised.value, TypeError) == (error is WrongType)


def test_options_of_frameworks_and_replays_have_types_too(trace):
    for value in ("3", [3.0], {}):
        with pytest.raises(WrongType, match="slime: tis_clip: got"):
            tim_trace.stats(trace, like="slime", tis_clip=value)
    with pytest.raises(WrongType, match="replay: batch_size: got 'four', expected an int or None"):
        tim_trace.replay(trace, batch_size="four")


RECORDED = {
    "add_contract": {"pass_name": "mine", "contract": {"engine": "x"}},
    "add_hyperparameters": {"values": {"beta": 0.1}},
    "add_metrics": {"step": 1, "values": {"loss": 1.0}},
    "add_optimizer": {"step": 1, "optimizer": None},
    "add_sequences": {"step": 1, "response_ids": [[7, 8]], "prompt_ids": [[1]]},
    "add_weights": {"version": 1, "tensors": {}},
    "captures": {"step": 1, "seq_ids": ["a"]},
}
"""What a method of a recorder needs."""


FILES = {
    "trace", "traces", "a", "b", "control", "path", "output", "folder", "tokenizer", "weights_from", "png", "svg", "pdf", "junit", "summary",
}  # fmt: skip
"""Parameters that name a file or a folder."""


def test_every_function_takes_a_path_wherever_it_takes_the_name_of_a_file():
    for name in VERBS:
        function = getattr(tim_trace, name)
        hints = get_type_hints(function.__wrapped__)
        for parameter in FILES & hints.keys():
            path = pathlib.Path("run")
            assert fits(path, hints[parameter]) or fits([path], hints[parameter]), (name, parameter)


def test_a_path_gives_the_answer_of_its_name(trace):
    path = pathlib.Path(trace)
    assert tim_trace.info(path) == tim_trace.info(str(path))
    assert tim_trace.query("shape", path) == tim_trace.query("shape", str(path))
    assert tim_trace.check(path) == tim_trace.check(str(path))


def test_a_named_query_covers_the_steps_that_are_asked_for(trace):
    every = tim_trace.query("shape", trace).dicts()
    assert tim_trace.query("shape", trace, steps="-1").dicts() == every[-1:] != every


def _recorder_cases():
    for method, function in inspect.getmembers(tim_trace.Recorder, inspect.isfunction):
        if not method.startswith("_"):
            yield from ((method, name) for name in inspect.signature(function).parameters if name != "self")


@pytest.mark.parametrize(("method", "name"), rest_slow(_recorder_cases(), 10))
@pytest.mark.filterwarnings("ignore::tim_trace.schemas.errors.TimTraceWarning")
def test_a_recorder_takes_a_value_or_says_what_is_wrong_with_it(tmp_path, method, name):
    for kind, value in WRONG.items():
        recorder = tim_trace.Recorder(tmp_path / kind)
        given = dict(RECORDED.get(method, {}))
        if method == "add_scores":
            batch = recorder.add_sequences(**RECORDED["add_sequences"])
            given = {"pass_name": "rollout", "batch": batch, "logprobs": [[-0.5, -0.1]]}
        try:
            getattr(recorder, method)(**(given | {name: value}))
            recorder.close()
        except TimTraceError as error:
            check_sentence(error, kind)


@pytest.mark.parametrize("name", [name for name in inspect.signature(tim_trace.Recorder).parameters if name != "path"])
def test_a_recorder_s_options_are_taken_or_a_sentence(tmp_path, name):
    for kind, value in WRONG.items():
        try:
            tim_trace.Recorder(tmp_path / kind, **{name: value}).close()
        except TimTraceError as error:
            check_sentence(error, kind)


@pytest.mark.parametrize(
    "verb",
    rest_slow(["info", "verify", "stats", "diagnose", "check", "corrections", "objective", "dynamics", "attribute"], 4),
)
def test_a_result_prints_as_what_the_command_prints(trace, verb):
    found = getattr(tim_trace, verb)(trace)
    assert str(found).strip() == CliRunner().invoke(cli.main, [verb, trace]).stdout.strip()
    assert found._repr_html_().startswith(("<pre>", "<table>"))
    assert type(found).__name__ in repr(found)
    shown = []
    found._repr_pretty_(SimpleNamespace(text=shown.append), cycle=False)
    assert shown == [str(found)]


@pytest.mark.slow
def test_a_gate_and_a_view_print_as_what_the_command_prints(trace):
    found = tim_trace.gate(trace, fail_on=["tim.k3>1"])
    printed = CliRunner().invoke(cli.main, ["gate", trace, "--fail-on", "tim.k3>1"]).stdout
    assert str(found).strip() == printed.strip()
    assert found.arrow().column_names[:2] == ["condition", "metric"]
    (view,) = tim_trace.watch(trace, once=True)
    assert str(view).split()[:3] == run(TIM_TRACE, "watch", trace, "--once").stdout.split()[:3]


def test_a_table_goes_to_pandas_and_arrow(trace):
    rows = tim_trace.stats(trace, by="step")
    assert rows.df()["k3"].tolist() == [row["k3"] for row in rows.dicts()]
    assert rows.arrow().num_rows == rows.df().shape[0] == 3
    assert tuple(rows.df().columns) == rows.columns


def test_a_table_keeps_what_has_no_common_type_and_names_that_come_twice():
    rows = Rows(("a", "a", "b"), [(1, "x", None), (2.5, 3, 2**70)])
    table = rows.arrow()
    assert table.column_names == ["a", "a", "b"]
    assert [column.to_pylist() for column in table.columns] == [[1.0, 2.5], ["x", "3"], [None, str(2**70)]]
    assert Rows(("a",), []).arrow().num_rows == 0


def test_a_table_goes_to_polars_value_by_value(trace):
    import polars

    rows = tim_trace.sql(
        trace,
        "SELECT step, seq_id, reward, response_ids, response_mask, finish_reason FROM sequences ORDER BY step, seq_id",
    )
    frame = rows.pl()
    assert isinstance(frame, polars.DataFrame)
    assert frame.columns == list(rows.columns)
    assert frame.rows() == [tuple(row.values()) for row in rows.dicts()]
    assert frame.schema["response_ids"] == polars.List(polars.Int64)
    assert frame["response_mask"].null_count() == len(rows)
    measured = tim_trace.stats(trace, by="step")
    assert measured.pl().to_dicts() == measured.dicts()


def test_an_empty_table_goes_to_polars_with_its_columns(trace):
    frame = tim_trace.sql(trace, "SELECT step, reward FROM sequences WHERE step < 0").pl()
    assert (frame.columns, frame.height) == (["step", "reward"], 0)


def test_without_polars_the_error_says_how_to_install_it(trace, monkeypatch):
    rows = tim_trace.stats(trace)
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(NotInstalled, match="pl: polars is not installed; pip install polars"):
        rows.pl()


def test_text_of_a_trace_is_no_markup_in_a_notebook():
    shown = Rows(("<a>",), [("<script>alert(1)</script>",), (None,)])._repr_html_()
    assert "<script>" not in shown
    assert "<th>&lt;a&gt;</th>" in shown


TOY = """
from dataclasses import dataclass
from typing import ClassVar

from tim_trace.analysis.frameworks.framework import Framework, option_field
from tim_trace.analysis.trace.macros import quoted_pair


@dataclass(frozen=True, slots=True, kw_only=True)
class Toy(Framework):
    scale: float = option_field(1.0, "Multiplies the toy (1).", metavar="S", at_least=0)
    delta: float | None = option_field(None, "As TRL's, of the toy.", metavar="C")

    name: ClassVar[str] = "my-toy"
    version: ClassVar[str] = "0.1"
    source: ClassVar[str] = "toy.py"

    def row_calls(self, pair):
        return [f"my_toy_rows({quoted_pair(pair)})"]


FRAMEWORK = Toy
"""
TOY_SQL = """
CREATE OR REPLACE MACRO my_toy_rows(a, b) AS TABLE
    SELECT run, step, seq_id, max_abs_d AS most FROM pair_sequences(a, b);
CREATE OR REPLACE MACRO my_toy_runs(a, b, {parameters}) AS TABLE
    SELECT run, scale * max(most) AS toy FROM my_toy_rows(a, b) GROUP BY run;
CREATE OR REPLACE MACRO my_toy_steps(a, b, {parameters}) AS TABLE
    SELECT run, step, scale * max(most) AS toy FROM my_toy_rows(a, b) GROUP BY run, step;
"""


def test_a_framework_is_one_module_and_one_file_of_sql(trace, tmp_path, monkeypatch):
    (tmp_path / "my_toy.py").write_text(TOY)
    (tmp_path / "my_toy.sql").write_text(TOY_SQL)
    package = import_module("tim_trace.analysis.frameworks")
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    registry._files.cache_clear()
    views.catalogue.cache_clear()
    try:
        assert "my-toy" in registry.FRAMEWORKS
        rows, stats = tim_trace.stats(trace, like="my-toy", scale=2.0), tim_trace.stats(trace)
        assert rows.dicts()[0]["toy"] == 2.0 * stats.dicts()[0]["max_abs_d"]
        assert tim_trace.sql(trace, "SELECT toy FROM my_toy_steps('train', 'rollout')").arrow().num_rows == 3
        with pytest.raises(InvalidOption, match="scale: verl has no such option; it belongs to my-toy"):
            tim_trace.stats(trace, like="verl", scale=2.0)
        with pytest.raises(InvalidOption, match="scale: got -1; pass 0 or more"):
            tim_trace.stats(trace, like="my-toy", scale=-1.0)
    finally:
        registry._files.cache_clear()
        views.catalogue.cache_clear()


WITH_TOY = """
import sys
import tim_trace.analysis.frameworks as package
package.__path__.append(sys.argv.pop(1))
from tim_trace.cli import main
main()
"""


@pytest.mark.slow
def test_a_framework_s_options_are_on_the_command_line_without_a_change_there(trace, tmp_path):
    (tmp_path / "my_toy.py").write_text(TOY)
    (tmp_path / "my_toy.sql").write_text(TOY_SQL)

    def told(*words):
        return run(sys.executable, "-c", WITH_TOY, tmp_path, "stats", *words)

    shown = told("--help").stdout
    section = shown.partition("with --like my-toy:")[2].partition("with --like")[0]
    assert re.search(r"--scale S +Multiplies the toy \(1\)\.", section)
    assert re.search(r"--delta C +As TRL's, of the toy\.", section)  # a name that two frameworks have
    assert re.search(r"--delta C +Maximum ratio in the loss\.", shown.partition("with --like trl:")[2])
    answered = told(trace, "--like", "my-toy", "--scale", "2", "--json")
    assert answered.json()[0]["toy"] == 2 * tim_trace.stats(trace).dicts()[0]["max_abs_d"]
    refused = told(trace, "--like", "my-toy", "--epsilon", "1")
    assert refused.stderr.startswith("Error: --epsilon: my-toy has no such option; it belongs to trl")


@pytest.mark.slow
def test_the_examples_of_the_python_page_run(tmp_path):
    page = (ROOT / "docs" / "reference" / "python.md").read_text()
    (tmp_path / "page.py").write_text("\n".join(re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)))
    done = run(sys.executable, "-W", "error", tmp_path / "page.py", cwd=tmp_path)
    assert done.code == 0, done.stderr
    assert (tmp_path / "demo.html").exists()
    for error in ("TraceNotFound: ", "WrongType: ", "InvalidOption: ", "TraceExists: "):
        assert error in done.stdout


def test_every_public_name_is_on_the_python_page():
    page = (ROOT / "docs" / "reference" / "python.md").read_text()
    for name in tim_trace.__all__:
        assert f"### {name}\n" in page


def test_an_error_names_keywords_in_python_and_flags_on_the_command_line(trace, tmp_path):
    def told(*arguments):
        return CliRunner().invoke(cli.main, [str(argument) for argument in arguments]).stderr

    with pytest.raises(InvalidOption, match="use by='run' or by='step'"):
        tim_trace.stats(trace, like="verl", by="sequence")
    assert "use --by run or --by step" in told("stats", trace, "--like", "verl", "--by", "sequence")
    with pytest.raises(InvalidOption, match="use like='slime'"):
        tim_trace.stats(trace, tis_clip=3.0)
    assert "use --like slime" in told("stats", trace, "--tis-clip", 3)
    with pytest.raises(TimTraceError, match="replace it with force=True"):
        tim_trace.Recorder(trace)
    damaged = without_scores(trace, tmp_path)
    with pytest.raises(TimTraceError, match="use partial=True to analyze the rest anyway"), pytest.warns(DamageWarning):
        tim_trace.check(damaged)
    assert "use --partial to analyze the rest anyway" in told("check", damaged)


def test_what_is_damaged_is_said_of_the_line_that_asks(trace, tmp_path):
    damaged = without_scores(trace, tmp_path)
    with pytest.warns(DamageWarning) as caught:
        tim_trace.connect(damaged).close()
    assert {warning.filename for warning in caught} == {__file__}


def test_a_warning_points_to_the_line_that_calls(tmp_path):
    with tim_trace.Recorder(tmp_path / "run") as recorder, pytest.warns(TimTraceWarning) as caught:
        recorder.add_sequences(
            step=0, prompt_ids=[[1]] * 4, response_ids=np.array([[5, 6, 0, 0, 0, 0], [5, 6, 7, 8, 9, 5]] * 2)
        )
    assert {warning.filename for warning in caught} == {__file__}


def without_scores(trace, folder):
    """A copy of a trace that lacks a file of scores."""
    copy = shutil.copytree(trace, folder / "damaged")
    next((copy / "scores").rglob("*.parquet")).unlink()
    return str(copy)


def test_the_function_named_by_a_result_renders_this_result():
    """Type checkers do not follow these names."""
    files = [file for layer in ("replay", "analysis") for file in (ROOT / layer).rglob("*.py")]
    kinds = [
        getattr(import_module(".".join(("tim_trace", *file.relative_to(ROOT).with_suffix("").parts))), name)
        for file in files
        for name in re.findall(r"^class (\w+)\([^)]*\b(?:Result|Table)\):", file.read_text(), re.MULTILINE)
    ]
    assert {Rows, ReplayedSteps} <= {*kinds}
    for kind, renderer in [*((kind, vars(kind)["_text"]) for kind in kinds), (Report, Report._page)]:
        module, _, name = renderer.partition(":")
        given, *_ = inspect.signature(getattr(import_module(module), name)).parameters.values()
        assert given.annotation == kind.__name__, renderer
