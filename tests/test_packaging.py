import ast
import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections import Counter
from importlib import metadata
from pathlib import Path

import pytest
import torch
from builders import ROOT, run, tim_trace
from packaging.requirements import Requirement
from tim_trace import Recorder, cli
from tim_trace import __all__ as PUBLIC
from tim_trace.schemas.errors import EXTRAS

CONFIGURATION = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = CONFIGURATION["tool"]["setuptools"]
LAYERS = ("schemas", "tracer", "replay", "analysis", "cli")


def python_files():
    tracked = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [Path(line) for line in tracked.stdout.splitlines() if (ROOT / line).exists()]


def test_the_list_of_packages_is_the_tree():
    outside = ("tests", "examples", "benchmarks", "docs")
    found = {".".join(("tim_trace", *path.parent.parts)) for path in python_files() if path.parts[0] not in outside}
    assert set(SETUPTOOLS["packages"]) == found


def test_the_wheel_gets_the_example():
    (pattern,) = SETUPTOOLS["package-data"]["tim_trace.analysis"]
    assert [path.name for path in (ROOT / "analysis").glob(pattern)] == ["example.zip"]


def test_no_module_but_the_package_s_own_lies_at_the_root():
    assert {str(path) for path in python_files() if len(path.parts) == 1} == {"__init__.py", "__main__.py", "cli.py"}


def test_the_root_package_holds_no_class_no_state_and_no_relative_import():
    body = ast.parse((ROOT / "__init__.py").read_text()).body
    assert not [node for node in ast.walk(ast.Module(body, [])) if isinstance(node, ast.ImportFrom) and node.level]
    assigned = [target.id for node in body if isinstance(node, ast.Assign) for target in node.targets]
    assert assigned == ["__all__"]
    kinds = (
        ast.Expr,
        ast.ImportFrom,
        ast.If,
        ast.Assign,
    )  # docstring and call, imports, those for type checkers, names
    assert all(isinstance(node, kinds) for node in body)


def version():
    return re.search(r'__version__ = "(.+)"', (ROOT / "schemas" / "version.py").read_text())[1]


OF_LOCATE = {
    "tim_trace.replay.locate": {
        "analysis/locate.py",
        *(f"replay/reproduce/{name}.py" for name in ("calls", "engine", "script", "search", "vllm_parts")),
    },
    "tim_trace.replay.reproduce": {"analysis/__init__.py", "analysis/reproduce_text.py"},
    "tim_trace.analysis.locate": {"analysis/__init__.py"},
}
"""The part that runs `locate` -> who may import it. What lies in a trace is read without it, through tracer/located."""


def test_only_the_verb_imports_the_part_that_locates():
    importers = {module: set() for module in OF_LOCATE}
    for path in python_files():
        if path.parts[0].removesuffix(".py") in LAYERS:
            for module in OF_LOCATE:
                if any(f"{name}.".startswith(f"{module}.") for name in imported(path)) and not is_inside(path, module):
                    importers[module].add(str(path))
    assert importers == OF_LOCATE


def imported(path):
    """Every module that a file names in an import, and `module.name` of what it takes from one, also inside functions."""
    package = ("tim_trace", *path.parent.parts)
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def is_inside(path, module):
    return ".".join(("tim_trace", *path.with_suffix("").parts)).startswith(module + ".")


def test_heavy_libraries_are_imported_only_by_the_hooks_and_inside_functions():
    """Only a replay, which computes with torch, imports it at the top of its files."""
    for path in python_files():
        if path.parts[0] in ("schemas", "tracer", "replay", "analysis", "cli.py"):
            heavy = "transformers|trl|vllm|ray" + ("" if path.parts[0] == "replay" else "|torch")
            found = re.findall(rf"^(?:import|from) ({heavy})\b", (ROOT / path).read_text(), re.MULTILINE)
            assert not found, f"{path} imports {found} at its top"


def test_options_results_and_texts_of_a_replay_come_up_without_torch():
    program = """
import sys
import tim_trace.cli, tim_trace.analysis.weights, tim_trace.analysis.replay_text
import tim_trace.analysis.diagnosis.diagnose, tim_trace.replay.recorded
print("torch" in sys.modules)
"""
    assert run(sys.executable, "-c", program).stdout == "False\n"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    shutil.rmtree(ROOT / "build", ignore_errors=True)  # of an earlier build, with files that are gone
    done = run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", folder, ROOT)
    assert done.code == 0, done.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"tim_trace", f"tim_trace-{version()}.dist-info"}
    inside = {name.removeprefix("tim_trace/") for name in names if name.startswith("tim_trace/")}
    outside = ("tests", "examples", "benchmarks", "docs")
    sources = {str(path) for path in python_files() if path.parts[0] not in outside}
    queries = {str(path.relative_to(ROOT)) for path in (ROOT / "analysis").glob("*/*.sql")}
    page = {f"analysis/report/page/report.{kind}" for kind in ("html", "css", "js")}
    model = {"analysis/check/kinds.json", "analysis/attribution/model.json"}  # fitted by programs in benchmarks
    reference = ROOT / "docs" / "reference"
    schemas = {str(path.relative_to(ROOT)) for name in ("format", "json") for path in (reference / name).iterdir()}
    assert len(schemas) > 20
    assert inside == sources | queries | page | model | schemas | {
        "py.typed",
        "analysis/example.zip",
        "skills/tim-trace/SKILL.md",
    }


@pytest.mark.slow
def test_the_wheel_works_away_from_the_repository(wheel, tmp_path):
    done = run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", tmp_path / "site", wheel)
    assert done.code == 0, done.stderr
    # A copy: statistics keep sums in a trace that they can write.
    trace = shutil.copytree(ROOT / "tests" / "data" / "trace-v2", tmp_path / "trace-v2")
    program = f"""
import sys
sys.path.insert(0, {str(tmp_path / "site")!r})
import tim_trace
assert tim_trace.__file__.startswith({str(tmp_path)!r}), tim_trace.__file__
from tim_trace.analysis.stats import stats
print(len(stats({str(trace)!r}, by="step")))
"""
    done = run(sys.executable, "-I", "-c", program, cwd=tmp_path)
    assert done.stdout == "2\n", done.stderr


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The Python of an environment that holds the wheel and what it requires: files of this one, so nothing is downloaded."""
    home = tmp_path_factory.mktemp("environment")
    assert run(sys.executable, "-m", "venv", "--without-pip", home).code == 0
    (site,) = home.glob("lib/python*/site-packages")
    for name in required():
        tops = {Path(file.parts[0]) for file in metadata.files(name) if file.parts[0] not in ("..", "__pycache__")}
        for top in tops:
            if not (site / top).exists():
                (site / top).symlink_to(metadata.distribution(name).locate_file(top))
    done = run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", site, wheel)
    assert done.code == 0, done.stderr
    return home / "bin" / "python"


def required():
    """Every distribution that the base requires, also through others."""
    found, waiting = set(), [*CONFIGURATION["project"]["dependencies"]]
    while waiting:
        one = Requirement(waiting.pop())
        if one.name not in found and (one.marker is None or one.marker.evaluate({"extra": ""})):
            found.add(one.name)
            waiting.extend(metadata.requires(one.name) or ())
    return found


@pytest.mark.slow
def test_every_verb_and_function_answers_from_the_wheel_or_names_what_is_missing(installed, tmp_path):
    program = ROOT / "tests" / "programs" / "every_verb.py"
    done = run(installed, program, cwd=tmp_path, env={"PYTHONPATH": ""})
    assert done.code == 0, done.stderr
    calls = [json.loads(line) for line in done.stdout.splitlines()]
    words = {call["call"].removeprefix("tim_trace.").partition(" ")[0] for call in calls}
    assert words >= cli.main.commands.keys() | {*PUBLIC} - {"Loss", "Recorder"}
    torch = {"replay", "triangulate", "gradient", "locate", "certify", "reproduce"}
    for call in calls:
        name = call["call"].removeprefix("tim_trace.").partition(" ")[0]
        if name in torch:  # what the trace lacks comes first
            assert re.search(
                r"has no weights|torch is not installed; pip install 'tim-trace\[replay\]' or, in a clone, pip install '\.\[replay\]'$",
                call["error"],
            ), call
        elif name == "mcp":
            assert "pip install 'tim-trace[mcp]'" in call["error"], call
        elif call["code"] not in (0, 1):
            assert name in ("weights", "export", "attach"), call
            assert re.search("has no (weights|config.json)", call["error"]), call
        else:
            assert call["libraries"] is None or "matplotlib" not in call["libraries"], call
    assert any("torch is not installed" in (call["error"] or "") for call in calls)
    assert not next(call["libraries"] for call in calls if call["call"] == "--help")


def test_nothing_in_the_repository_names_a_package_index_or_this_machine():
    tracked = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in tracked.stdout.splitlines():
        path = ROOT / name
        if path.suffix in (".parquet", ".png") or not path.exists():
            continue
        text = path.read_bytes().decode("utf-8", "replace")  # chunks of weights are no text
        assert str(ROOT) not in text, name
        assert (
            not re.search(r"--(extra-)?index-url\s+\S|pypi\.org/simple", text) or name == "tests/test_packaging.py"
        ), name


def test_no_name_of_a_class_stands_twice_in_the_analysis():
    found = [
        name
        for file in (ROOT / "analysis").rglob("*.py")
        for name in re.findall(r"^class (\w+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert [name for name, count in Counter(found).items() if count > 1] == []


RECORDING = (ROOT / "requirements-record.txt").read_text().splitlines()
WITHOUT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in MISSING:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
"""
"""Importing one of the other dependencies fails as where it is not installed."""


def recording_alone(program):
    of = {re.match(r"[\w-]+", each)[0] for each in CONFIGURATION["project"]["dependencies"]}
    missing = of - {re.match(r"[\w-]+", line)[0] for line in RECORDING if not line.startswith("#")}
    assert {"duckdb", "matplotlib", "scipy", "bokeh"} <= missing
    return run(sys.executable, "-c", without(missing, program))


def without(missing, program):
    return f"MISSING = {missing!r}{WITHOUT}{program}"


def test_the_ranges_of_what_recording_needs_are_those_of_the_whole():
    assert set(RECORDING[2:12]) <= set(CONFIGURATION["project"]["dependencies"])


def test_recording_needs_no_other_dependency(tmp_path):
    program = f"""
import numpy as np
from tim_trace import Recorder
from tim_trace.tracer.dense import Logits

with Recorder({str(tmp_path / "trace")!r}, capture="logits") as recorder:
    for step in range(1, 4):
        batch = recorder.add_sequences(step=step, prompt_ids=[[5, 6]], response_ids=[[7, 8, 9]], reward=[1.0])
        recorder.add_scores("rollout", batch, logprobs=[[-0.5, -0.1, -2.0]])
        logits = Logits(logits=np.zeros((3, 16), np.float32))
        recorder.add_scores("train", batch, logprobs=[[-0.5, -0.1, -2.1]], distribution=logits, captured_rows=[0])
        recorder.add_metrics(step, {{"loss": 0.25}})
"""
    assert recording_alone(program).code == 0
    assert tim_trace("verify", tmp_path / "trace").code == 0


def test_other_commands_say_what_is_missing(tmp_path):
    done = recording_alone("from tim_trace.cli import main\nmain(['stats', 'nowhere'])")
    assert done.code == 2
    assert "duckdb is not installed; this may be a recorder-only installation." in done.stderr
    assert "Run pip install tim-trace, or open the trace on a machine with the full installation" in done.stderr


def test_every_library_of_an_extra_is_known_with_its_extra():
    extras = CONFIGURATION["project"]["optional-dependencies"]
    named = {re.match(r"[\w-]+", each)[0]: extra for extra in set(EXTRAS.values()) for each in extras[extra]}
    assert named == EXTRAS


NEED_TORCH = [("torch", verb) for verb in ("replay", "triangulate", "gradient", "locate", "certify", "reproduce")]


@pytest.mark.parametrize(("missing", "words"), [*NEED_TORCH, ("transformers", "weights --attach 0 .")])
def test_a_verb_that_needs_torch_names_the_extra_that_installs_it(tmp_path, missing, words):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with Recorder(tmp_path / "run") as recorder:
        recorder.describe(model={"class": "LlamaForCausalLM", "config": {"model_type": "llama"}})
        recorder.add_weights(0, {"model.norm.weight": torch.ones(2)})
        recorder.add_sequences(step=1, prompt_ids=[[1]], response_ids=[[2]], policy_version=0)
    verb, *rest = words.split()
    words = [verb, str(tmp_path / "run"), *rest]
    done = run(
        sys.executable, "-c", without({missing}, f"from tim_trace.cli import main\nmain({words!r})"), cwd=tmp_path
    )
    assert (
        done.stderr
        == f"Error: {missing} is not installed; pip install 'tim-trace[replay]' or, in a clone, pip install '.[replay]'\n"
    )
    assert done.code == 2


def test_a_function_that_needs_torch_raises_what_names_the_extra():
    program = """
import tim_trace
for name in ("replay", "triangulate", "gradient", "locate", "certify", "reproduce"):
    try:
        getattr(tim_trace, name)
    except tim_trace.schemas.errors.NotInstalled as error:
        print(error)
"""
    done = run(sys.executable, "-c", without({"torch"}, program))
    assert (
        done.stdout
        == "torch is not installed; pip install 'tim-trace[replay]' or, in a clone, pip install '.[replay]'\n" * 6
    )
