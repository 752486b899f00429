import dataclasses
import inspect
import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import click
import pytest
from builders import ROOT, TIM_TRACE, in_process, make_trace, run, tim_trace
from dumps import make_samples, write_prime_rl
from runs import train
from shared import rest_slow
from tim_trace import analysis, cli
from tim_trace.analysis.attribution.attribute import attribute
from tim_trace.analysis.check.check import check
from tim_trace.analysis.compact import compact
from tim_trace.analysis.comparison.compare import compare
from tim_trace.analysis.corrections import corrections
from tim_trace.analysis.diagnosis.diagnose import diagnose
from tim_trace.analysis.dynamics.dynamics import dynamics
from tim_trace.analysis.example import example
from tim_trace.analysis.export.export import export_run
from tim_trace.analysis.frameworks.registry import FRAMEWORKS, declared_options
from tim_trace.analysis.gate.gate import gate
from tim_trace.analysis.info import info
from tim_trace.analysis.locate import locate
from tim_trace.analysis.mcp_server import mcp
from tim_trace.analysis.objective.objective import objective
from tim_trace.analysis.queries.catalogue import query
from tim_trace.analysis.query import sql
from tim_trace.analysis.report.report import report
from tim_trace.analysis.rows import Rows, to_text
from tim_trace.analysis.stats import stats
from tim_trace.analysis.trace.sums import summarize
from tim_trace.analysis.triangulate import triangulate
from tim_trace.analysis.verify import verify
from tim_trace.analysis.watch.watch import watch
from tim_trace.analysis.weights import weights
from tim_trace.replay.arms import Arm
from tim_trace.replay.certify.engine import certify
from tim_trace.replay.engine import replay
from tim_trace.replay.gradients.engine import gradient
from tim_trace.replay.reproduce.engine import reproduce
from tim_trace.schemas.errors import NotInstalled
from tim_trace.tracer.importers.import_dump import import_dump
from tim_trace.tracer.launch import record
from tim_trace.tracer.recorder import Recorder

PRINTING = {"as_json", "as_csv", "is_wide", "is_brief", "as_sql", "quiet", "help", "exported", "attached", "verbose"}
"""Options that say how to print, or that call another function (`analysis.weights.export`, `attach`), and have no twin."""

TWINS = {
    "example": example,
    "record": record,
    "import": import_dump,
    "info": info,
    "sql": sql,
    "query": query,
    "mcp": mcp,
    "stats": stats,
    "diagnose": diagnose,
    "check": check,
    "compare": compare,
    "corrections": corrections,
    "dynamics": dynamics,
    "attribute": attribute,
    "objective": objective,
    "weights": weights,
    "verify": verify,
    "triangulate": triangulate,
    "gradient": gradient,
    "certify": certify,
    "locate": locate,
    "reproduce": reproduce,
    "replay": replay,
    "watch": watch,
    "gate": gate,
    "report": report,
    "export": export_run,
    "compact": compact,
}


@pytest.fixture
def trace(tmp_path):
    make_trace(tmp_path / "run")
    return tmp_path / "run"


def test_every_command_has_a_twin_and_a_section():
    assert set(cli.main.commands) == set(TWINS)
    assert {name for names in cli.SECTIONS.values() for name in names} == set(TWINS)


def params_of(name):
    command = cli.main.commands[name]
    context = click.Context(command)
    return [parameter for parameter in command.get_params(context) if parameter is not command.get_help_option(context)]


def said(default):
    """A default as a value; None where there is none."""
    return default if isinstance(default, (str, int, float)) else None


def default_of(option):
    """What a command gets where the option is not given: a switch without a default of its own is off."""
    if option.is_bool_flag and option.default is not None:
        return option.default is True
    return said(None if option.required else option.default)


@pytest.mark.parametrize("name", TWINS)
def test_a_command_s_options_and_defaults_are_its_twin_s(name):
    options = {
        option.name: default_of(option)
        for option in params_of(name)
        if isinstance(option, click.Option) and option.name not in PRINTING
    }
    parameters = {
        parameter.name: said(parameter.default)
        for parameter in inspect.signature(TWINS[name]).parameters.values()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and parameter.name not in ("progress", "at_end")
    }
    if name == "replay":  # one arm's changes are options of their own
        parameters |= {field.name: said(field.default) or None for field in dataclasses.fields(Arm)}
        parameters |= {"deterministic": False, "compile": False}
    if name == "weights":  # those of `attach`
        options = {option: value for option, value in options.items() if option not in ("tokenizer", "force")}
    if name in ("objective", "gradient", "locate", "triangulate"):  # their values hold every row
        options.pop("by")
    if name == "stats":  # the frameworks' options, of which none is given unless the command line says so
        parameters |= {
            field.name: False if field.default is False else None
            for framework in FRAMEWORKS.values()
            for field in dataclasses.fields(framework)
        }
    assert options == parameters


@pytest.mark.parametrize(
    "name",
    [
        "example",
        "record",
        "info",
        "sql",
        "query",
        "mcp",
        "stats",
        "diagnose",
        "check",
        "corrections",
        "objective",
        "dynamics",
        "weights",
        "replay",
        "triangulate",
        "gradient",
        "certify",
        "locate",
        "reproduce",
        "watch",
        "gate",
        "report",
    ],
)
def test_a_command_and_its_twin_say_the_same_first(name):
    assert cli.main.commands[name].help.splitlines()[0] == inspect.getdoc(TWINS[name]).splitlines()[0]


ON_THE_DEMO = {"record", "replay", "triangulate", "gradient", "locate", "certify", "reproduce"}
"""Their examples take a minute and more, as does the recording that they look at; the others look at a short one."""


def examples():
    for name, command in cli.main.commands.items():
        lines = command.epilog.splitlines()
        assert lines[:2] == ["\b", "Example:"], f"{name} has no example"
        marks = [pytest.mark.slow] if name in ON_THE_DEMO else []
        yield from (pytest.param(name, line.strip(), id=name, marks=marks) for line in lines[2:])


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder as the examples expect it: a recorded run, the examples, and a dump to import."""
    folder = tmp_path_factory.mktemp("workplace")
    trained = train("--vllm", "--bf16-engine", config={"temperature": 0.8}, capture="topk:3", fraction="0.5")
    for name in ("demo", "other"):
        shutil.copytree(trained.trace, folder / "runs" / name)
    return filled(folder)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """A folder as `workplace`, in which the example of `record` comes first and makes the run."""
    return filled(tmp_path_factory.mktemp("demo"))


def filled(folder):
    shutil.copytree(ROOT / "examples", folder / "examples")
    row = {"step": 1, "prompt_ids": [1], "response_ids": [2, 3]}
    logprobs = {"rollout_logprobs": [-0.5, -1.0], "train_logprobs": [-0.5, -1.25]}
    (folder / "dump.jsonl").write_text(json.dumps(row | logprobs) + "\n")
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist([row | logprobs]), folder / "dump.parquet")
    write_prime_rl(folder / "outputs", {1: make_samples(1)})
    return folder


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize(("name", "line"), list(examples()))
def test_the_example_of_every_help_works(request, name, line):
    workplace = request.getfixturevalue("demo" if name in ON_THE_DEMO else "workplace")
    env = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HF_HUB_OFFLINE": "1"}
    done = run(*shlex.split(line), cwd=workplace, env=env)
    assert done.code == 0, done.stderr[-2000:]
    if name == "record":
        assert "mean reward: " in done.stdout
        assert "recorded 2,560 sequences" in done.stderr


@pytest.mark.parametrize("words", [["--help"], ["stats", "--help"], ["replay", "--help"]])
def test_help_comes_up_without_the_heavy_libraries(words):
    heavy = ("torch", "pyarrow", "duckdb", "numpy", "zarr", "rich", "fsspec")
    program = f"""
import sys
from tim_trace.cli import main
try:
    main({words})
except SystemExit:
    pass
print("heavy:", [name for name in {heavy!r} if name in sys.modules])
"""
    done = run(sys.executable, "-c", program)
    assert done.stdout.endswith("heavy: []\n")


@pytest.mark.parametrize(
    "command",
    [["info"], ["stats"], ["verify"], ["dynamics"], ["objective"], ["compare", "control"], ["sql", "SELECT 1"]],
    ids=lambda command: command[0],
)
def test_looking_at_a_summed_trace_needs_neither_torch_nor_pandas(trace, command, tmp_path):
    summarize(trace)
    if "control" in command:
        command = [command[0], str(shutil.copytree(trace, tmp_path / "control"))]
    program = f"""
import sys
from tim_trace.cli import main
try:
    main({[command[0], str(trace), *command[1:]]!r})
except SystemExit as done:
    assert not done.code
assert not [name for name in ("torch", "pandas") if name in sys.modules]
"""
    assert run(sys.executable, "-c", program).code == 0


def test_help_begins_with_the_verbs_to_begin_with_and_has_a_line_a_verb():
    shown = tim_trace("--help", env={"COLUMNS": "80"}).stdout.splitlines()
    verbs = [line.split()[0] for line in shown if line.startswith("  ") and line.split()[0] in TWINS]
    assert verbs[:10] == [
        "example",
        "record",
        "import",
        "diagnose",
        "report",
        "watch",
        "replay",
        "sql",
        "stats",
        "gate",
    ]
    assert sorted(verbs) == sorted(TWINS)
    assert shown.index("getting started:") < shown.index("analyzing a run:") < shown.index("replaying in depth:")
    assert not [line for line in shown[shown.index("getting started:") :] if line.startswith("   ")]
    assert len(shown) <= 46
    assert max(map(len, shown)) <= 80


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("di", "plain,diagnose"),
        ("stats --b", "plain,--by"),
        ("stats --by se", "plain,sequence"),
        ("stats runs/ex", "file,runs/ex"),
        ("compare one runs/ex", "file,runs/ex"),
        ("import auto outp", "file,outp"),
        ("report runs/example -o runs/ex", "file,runs/ex"),
        ("attribute runs/example --control runs/ex", "file,runs/ex"),
    ],
)
def test_a_shell_completes_commands_options_values_and_paths(words, completed):
    typed = f"tim-trace {words}"
    env = {"_TIM_TRACE_COMPLETE": "bash_complete", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    assert run(TIM_TRACE, env=env).stdout.splitlines() == [completed]


def options_of(name):
    return {option for parameter in params_of(name) for option in parameter.opts}


def test_a_thing_has_one_option_name():
    every = {name: options_of(name) for name in TWINS}
    assert not any("--table" in options for options in every.values())
    assert {name for name, options in every.items() if "--against" in options} == {
        "certify",
        "locate",
        "reproduce",
        "compare",
    }
    assert {name for name, options in every.items() if "--arm" in options} == {
        "replay", "triangulate", "gradient", "certify", "locate", "reproduce",
    }  # fmt: skip
    assert {name for name, options in every.items() if "--steps" in options} == {
        "replay", "triangulate", "gradient", "locate", "reproduce", "dynamics", "watch", "stats", "check", "diagnose", "objective", "corrections",
        "attribute", "report", "compare", "import", "export", "query",
    }  # fmt: skip
    assert all({"-q", "--quiet"} <= options for options in every.values())
    assert all({"--json", "--csv"} <= every[name] for name in every if "--wide" in every[name] and name != "info")


def test_options_of_a_framework_stand_in_a_section_of_their_own():
    shown = tim_trace("stats", "--help").stdout
    general, *sections = shown.split("with --like ")
    slime = next(section for section in sections if section.startswith("slime:"))
    assert "--tis-clip" in slime
    assert "--tis-clip" not in general
    assert len(sections) == len({declared.framework for declared in declared_options()})


def test_python_dash_m_is_the_same_program():
    assert run(sys.executable, "-m", "tim_trace", "--version").stdout == tim_trace("--version").stdout


def test_json_has_every_digit(trace):
    shown = tim_trace("stats", trace, "--by", "step", "--json").json()
    assert shown == stats(trace, by="step").dicts()


def test_csv_has_every_digit_and_an_empty_field_for_null(trace):
    done = tim_trace("sql", trace, "SELECT k3, NULL AS gone FROM pair_runs('train', 'rollout')", "--csv")
    assert done.stdout == f"k3,gone\n{stats(trace).dicts()[0]['k3']!r},\n"


def test_numbers_that_json_lacks_are_told_apart_from_null(trace):
    query = "SELECT 'NaN'::DOUBLE AS a, 'inf'::DOUBLE AS b, '-inf'::DOUBLE AS c, NULL AS d, [1.5, 'nan'::DOUBLE] AS e"
    assert tim_trace("sql", trace, query, "--json").json() == [
        {"a": "NaN", "b": "Infinity", "c": "-Infinity", "d": None, "e": [1.5, "NaN"]}
    ]


@pytest.mark.parametrize(
    ("command", "columns", "num_rows"),
    rest_slow(
        [
            (["objective", "--by", "step"], "step,", 3),
            (["objective"], "figure,value,low,high,meaning", None),
            (["dynamics"], "series,steps,", None),
            (["gate", "--fail-on", "tim.k3>1"], "condition,metric,value,", 1),
            (["verify"], "folder,num_files,", None),
            (["watch"], "step,", 3),
        ],
        3,
    ),
)
def test_every_table_is_there_as_csv(trace, command, columns, num_rows):
    done = tim_trace(command[0], trace, *command[1:], "--csv")
    lines = done.stdout.splitlines()
    assert lines[0].startswith(columns)
    assert len(lines) > 1
    assert num_rows is None or len(lines) == 1 + num_rows


def test_a_query_may_come_on_stdin(trace):
    done = tim_trace("sql", trace, "--json", stdin="SELECT count(*) AS n\nFROM sequences;")
    assert done.json() == [{"n": 12}]


@pytest.mark.slow
def test_several_traces_are_queried_together(trace, tmp_path):
    make_trace(tmp_path / "other", steps=1)
    done = tim_trace(
        "sql", trace, tmp_path / "other", "SELECT run, count(*) AS n FROM sequences GROUP BY run ORDER BY run", "--json"
    )
    assert done.json() == [{"run": "other", "n": 4}, {"run": "run", "n": 12}]
    assert len(tim_trace("stats", trace, tmp_path / "other", "--json").json()) == 2
    assert len(tim_trace("info", trace, tmp_path / "other", "--json").json()) == 2


def test_info_tells_the_trace_in_words_and_as_json(trace):
    shown, told = tim_trace("info", trace).stdout, tim_trace("info", trace, "--json").json()
    assert "sequences  12" in shown
    assert told["num_sequences"] == 12
    assert [p["name"] for p in told["passes"]] == ["rollout", "train"]


def test_data_goes_to_stdout_and_the_rest_to_stderr(trace):
    for command in (["info", trace], ["stats", trace], ["sql", trace, "FROM steps"]):
        done = tim_trace(*command)
        assert done.stdout
        assert done.stderr == ""


def test_control_characters_of_the_data_do_not_reach_the_terminal(trace):
    done = tim_trace("sql", trace, "SELECT chr(27) || '[31mred' || chr(8238) AS text")
    assert "\x1b" not in done.stdout
    assert "\\x1b[31mred" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["stats"], "Missing argument"),
        (["stats", "x", "--by", "moon"], "'moon' is not one of"),
        (["sql", "x", "SELECT 1", "--json", "--csv"], "cannot be combined"),
        (["import", "csv", "x", "-o", "y"], "unknown format 'csv' (format metrics reads csv files)"),
        (["import", "jsonl", "x", "-o", "y"], "unknown format 'jsonl' (format parquet reads jsonl files)"),
        (["fly"], "No such command 'fly'"),
    ],
)
def test_wrong_use_ends_with_2(arguments, message):
    done = tim_trace(*arguments)
    assert done.code == 2
    assert message in done.stderr


def test_an_error_comes_before_a_word_on_what_is_not_done(tmp_path):
    assert tim_trace("record", "-o", tmp_path / "run").stderr.startswith("Error: record: no command given")


def test_a_run_in_place_of_a_query_s_name_is_told(trace):
    for arguments in ([trace], [trace, trace]):
        assert (
            f"put a query's name first, e.g. tim-trace query worst-tokens {trace}"
            in tim_trace("query", *arguments).stderr
        )


def test_an_intact_trace_is_called_intact(trace):
    last = tim_trace("verify", trace).stdout.splitlines()[-1]
    assert re.fullmatch(r"intact: every byte of \d+ files matches its checksum", last)


def test_a_copy_of_few_files_is_said_to_be_written(trace, tmp_path):
    done = tim_trace("compact", trace, "-o", tmp_path / "copy")
    assert done.stderr == f"tim-trace: wrote {tmp_path / 'copy'}\n"
    assert tim_trace("verify", tmp_path / "copy").code == 0


@pytest.mark.parametrize("verb", ["replay", "triangulate", "gradient", "locate", "reproduce"])
def test_what_a_trace_lacks_comes_before_a_library_to_install(trace, monkeypatch, verb):
    def lacks(*arguments, **options):
        raise NotInstalled("torch is not installed")

    monkeypatch.setitem(vars(analysis), verb, lacks)
    done = in_process([verb, str(trace)])
    assert done.code == 2
    assert "torch" not in done.stderr
    assert "was not recorded" in done.stderr or "has no weights; none were recorded" in done.stderr


def test_sentences_of_a_table_are_wrapped_and_not_cut():
    rows = Rows(("query", "result"), [("by-length", "Mismatch by response length, one row per power of two")] * 5)
    told = to_text(rows, 40).splitlines()
    assert max(map(len, told)) <= 40
    assert told[2:5] == ["by-length  Mismatch by response length,", "           one row per power of two", told[2]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dynamics", "--steps", "few"], "Error: --steps: got 'few', expected 3, 2:8"),
        (["stats", "--pair", "train"], "Error: --pair: "),
        (["gate", "--fail-on", "k3>1"], "Error: --fail-on: got 'k3>1'; did you mean 'tim.k3>1'? Use 'check'"),
        (["gate", "--fail-on", "tim.k3>1", "--confidence", "2"], "Error: --confidence: got 2.0"),
        (["stats", "--like", "trl", "--by", "step", "--logging-steps", "0"], "Error: --logging-steps: got 0"),
    ],
)
def test_an_error_names_the_option_as_it_is_written(trace, arguments, message):
    done = tim_trace(arguments[0], trace, *arguments[1:])
    assert done.code == 2
    assert done.stderr.startswith(message)


CHATTER = """
import os, sys, warnings
import click
from tim_trace import analysis, cli
from tim_trace.schemas.errors import CannotReplay

@cli.main.command("noise")
def noise():
    with cli._library_output_held_back():
        os.write(2, b"from C code\\n")
        print("a library's banner")
        warnings.warn("a library's warning", stacklevel=1)
        cli._tell("ours")
        if sys.argv[-1] == "own":
            raise CannotReplay("no such arm")
        if sys.argv[-1] == "caused":
            try:
                raise RuntimeError("deep inside")
            except RuntimeError as error:
                raise CannotReplay("the engine refuses") from error

cli.main(["noise"])
"""


@pytest.mark.parametrize(("way", "code", "is_shown"), [("well", 0, False), ("own", 2, False), ("caused", 2, True)])
def test_what_libraries_print_is_shown_only_where_they_fail(way, code, is_shown):
    done = run(sys.executable, "-c", CHATTER, way)
    assert done.code == code
    assert done.stdout == ""
    assert "tim-trace: ours" in done.stderr
    for chatter in ("from C code", "a library's banner", "a library's warning"):
        assert (chatter in done.stderr) == is_shown


def test_stats_say_whose_definition_they_are(trace):
    done = tim_trace("stats", trace, "--like", "verl", "--json")
    assert "as verl 0.9.0 defines them: verl/trainer/ppo/rollout_corr_helper.py" in done.stderr
    assert "do not count" not in done.stderr
    refused = tim_trace("stats", trace, "--like", "trl", "--tis-clip", "2")
    assert refused.code == 2
    assert "--tis-clip: trl has no such option; it belongs to slime" in refused.stderr


@pytest.mark.slow
def test_options_of_a_framework_are_switches_and_given_in_pairs(trace):
    done = tim_trace("stats", trace, "--like", "slime", "--calculate-per-token-loss", "--json")
    assert {"tis_clipfrac", "mis_chi2_seq"} <= set(done.json()[0])
    assert "run: no pass 'current' recorded, so ppo_kl, ois are NULL" in done.stderr
    done = tim_trace("stats", trace, "--like", "openrlhf", "--eps-clip-low-high", "0.1", "0.3", "--json")
    assert set(done.json()[0]) == {"run", "vllm_kl", "ppo_kl", "ppo_clip_ratio"}


def test_nan_outside_of_the_mask_is_told_of_beside_a_framework_s_numbers(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        added = recorder.add_sequences(step=1, response_ids=[[1, 2]], response_mask=[[True, False]])
        recorder.add_scores("rollout", added, logprobs=[[-1.0, float("nan")]])
        recorder.add_scores("train", added, logprobs=[[-1.5, -1.0]])
    done = tim_trace("stats", tmp_path / "run", "--like", "slime", "--json")
    assert done.json()[0]["train_rollout_logprob_abs_diff"] == 0.5
    assert "1 logprobs at 1 steps are NaN or infinite on masked tokens: slime multiplies" in done.stderr


def test_sql_knows_the_frameworks_macros(trace):
    query = "SELECT count(*) AS steps FROM verl_steps('train', 'rollout')"
    assert tim_trace("sql", trace, query, "--json").json()[0]["steps"] > 0


def test_an_error_is_also_json_if_json_is_asked_for(tmp_path):
    done = tim_trace("check", tmp_path / "none", "--json")
    assert done.code == 2
    assert done.json()["error"]["code"] == "TraceNotFound"
    assert done.json()["error"]["message"] in done.stderr
    assert tim_trace("check", tmp_path / "none").stdout == ""


def test_the_version_names_the_format_of_traces():
    assert tim_trace("--version").stdout.strip().endswith("(trace format 2)")


def test_an_unknown_option_does_not_suggest_the_help(trace):
    done = tim_trace("weights", trace, "--steps", "3")
    assert done.code == 2
    assert "No such option '--steps'" in done.stderr
    assert "Did you mean" not in done.stderr


def test_an_unknown_export_format_names_the_formats_and_the_way_to_csv(trace, tmp_path):
    done = tim_trace("export", trace, "--to", "csv", "-o", tmp_path / "out")
    assert done.code == 2
    assert "parquet" in done.stderr
    assert "sql RUN QUERY --csv" in done.stderr


@pytest.mark.parametrize("command", [["corrections"], ["stats", "--by", "sequence"]])
def test_a_piped_table_has_at_most_120_columns_unless_wide_is_given(trace, command):
    done = tim_trace(command[0], trace, *command[1:])
    assert max(map(len, done.stdout.splitlines())) <= 120
    assert "--wide shows every column" in done.stderr
    wide = tim_trace(command[0], trace, *command[1:], "--wide")
    assert max(map(len, wide.stdout.splitlines())) > 120
    assert "left out" not in wide.stderr
