"""Which file imports which: also inside functions, and where only type checkers import."""

import ast
from functools import cache

import pytest
from builders import ROOT

LAYERS = ("schemas", "tracer", "replay", "analysis", "cli")
"""Each imports those before it."""


@cache
def modules():
    """Module, as its parts without `tim_trace` -> its file."""
    files = [file for layer in LAYERS[:-1] for file in (ROOT / layer).rglob("*.py")]
    found = {}
    for file in (*files, ROOT / "cli.py", ROOT / "__main__.py", ROOT / "__init__.py"):
        parts = file.relative_to(ROOT).with_suffix("").parts
        found[parts[:-1] if parts[-1] == "__init__" else parts] = file
    return found


@cache
def nodes(module):
    return tuple(ast.walk(ast.parse(modules()[module].read_text(encoding="utf-8"))))


def imported(module, file):
    package = module if file.name == "__init__.py" else module[:-1]
    for node in nodes(module):
        if isinstance(node, ast.Import):
            names = [tuple(alias.name.split(".")) for alias in node.names if alias.name.split(".")[0] == "tim_trace"]
            yield from (name[1:] for name in names)
        elif isinstance(node, ast.ImportFrom):
            parts = tuple((node.module or "").split(".")) if node.module else ()
            if not node.level and parts[:1] != ("tim_trace",):
                continue
            base = (*package[: len(package) - node.level + 1], *parts) if node.level else parts[1:]
            for alias in node.names:
                yield (*base, alias.name) if (*base, alias.name) in modules() else base


@cache
def graph():
    return {module: {*imported(module, file)} - {module} for module, file in modules().items()}


def circles(arrows):
    """Groups of nodes in which each reaches every other."""

    def reached(start):
        found, waiting = set(), [start]
        while waiting:
            for other in arrows[waiting.pop()] - found:
                found.add(other)
                waiting.append(other)
        return found

    reach = {node: reached(node) for node in arrows}
    return sorted(
        {
            tuple(sorted(other for other in reach[node] if node in reach[other]))
            for node in arrows
            if node in reach[node]
        }
    )


def rooms(layer):
    """Folders of a layer -> the others that they import. A file that lies beside the folders of analysis is a room, too.

    In tracer and replay such a file belongs to the parent, and a folder and its own subfolder may import each other.
    """

    def room(module):
        depth = 1 if layer == "analysis" else 2
        return module[1] if module[:1] == (layer,) and len(module) > depth else None

    found = {room(module): set() for module in graph() if room(module)}
    for module, others in graph().items():
        if room(module):
            found[room(module)] |= {room(other) for other in others} - {room(module), None}
    return found


def test_every_import_is_of_a_file_that_there_is():
    assert {other for others in graph().values() for other in others} <= modules().keys()


def test_no_file_is_imported_in_a_circle():
    assert circles(graph()) == []


@pytest.mark.parametrize("layer", ["tracer", "replay", "analysis"])
def test_no_folder_is_imported_in_a_circle(layer):
    assert circles(rooms(layer)) == []


def test_layers_are_imported_one_way():
    for module, others in graph().items():
        if module and module[0] in LAYERS:
            above = {other for other in others if not other or other[0] not in LAYERS[: LAYERS.index(module[0]) + 1]}
            assert not above, f"{'.'.join(module)} imports {above}"


def test_the_trace_is_read_without_any_feature():
    """What lies in analysis/trace/ knows tables, sums and tokens; features, which offer macros over these, are above it."""
    assert rooms("analysis")["trace"] <= {"rows", "statistics"}


def test_what_reads_the_trace_is_short():
    lengths = {file.name: len(file.read_text().splitlines()) for file in (ROOT / "analysis" / "trace").glob("*.py")}
    assert max(lengths.values()) <= 300, lengths


def test_databases_are_opened_with_the_macros_of_every_feature():
    found = {
        ".".join(module)
        for module in modules()
        for node in nodes(module)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Database"
    }
    assert {name for name in found if not name.startswith("analysis.trace.")} == {"analysis.views"}
