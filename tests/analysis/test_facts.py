"""Facts lie below every opinion, and results below what renders them."""

import ast
from types import SimpleNamespace

import numpy as np
import pytest
from builders import ROOT
from tim_trace.analysis.facts.two_runs import paired

ANALYSIS = ROOT / "analysis"
ROOMS = ("facts", "dynamics", "comparison", "attribution", "diagnosis")
"""Each may import those before it."""


def imported(path):
    """Names of analysis/ that a file imports anywhere, also inside functions: `room.module` or `module`."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            parts = (*package[: len(package) - node.level + 1], *(node.module or "").split("."))
            if parts[0] == "analysis":
                yield ".".join(filter(None, parts[1:]))


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_no_room_above_it(room):
    above = ROOMS[ROOMS.index(room) + 1 :]
    found = {(path.name, name) for path in (ANALYSIS / room).rglob("*.py") for name in imported(path)}
    assert found
    assert not [(file, name) for file, name in found if name.split(".")[0] in above]


def test_facts_know_no_verb():
    rooms = {name.split(".")[0] for path in (ANALYSIS / "facts").glob("*.py") for name in imported(path)}
    assert rooms - {"facts"} == {"statement", "statistics", "trace"}


def test_no_result_imports_what_renders_it():
    results = [path for room in ROOMS for path in (ANALYSIS / room).glob("*.py") if "(Result)" in path.read_text()]
    assert len(results) == 5
    assert not [(path.name, name) for path in results for name in imported(path) if name.endswith("text")]


def sequences(chance, num):
    step, prompt, response = (np.sort(chance.integers(0, 4, num)), *chance.integers(0, 3, (2, num)))
    return SimpleNamespace(step=step, prompt=prompt, whole=prompt * 10 + response)


def beside(a, b):
    """The same pairing, one sequence after the other."""
    pairs, used = [], set()
    for column, is_equal in (("whole", True), ("prompt", False)):
        for place in range(len(a.step)):
            if place in {at for at, _, _ in pairs}:
                continue
            key = (a.step[place], getattr(a, column)[place])
            others = (at for at in range(len(b.step)) if (b.step[at], getattr(b, column)[at]) == key and at not in used)
            if (other := next(others, None)) is not None:
                pairs.append((place, other, is_equal))
                used.add(other)
    return sorted(pairs)


@pytest.mark.parametrize("seed", range(20))
def test_sequences_are_paired_in_the_order_of_recording(seed):
    chance = np.random.default_rng(seed)
    a, b = sequences(chance, int(chance.integers(0, 30))), sequences(chance, int(chance.integers(0, 30)))
    pairs = paired(a, b)
    assert list(zip(pairs.a.tolist(), pairs.b.tolist(), pairs.equal.tolist(), strict=True)) == beside(a, b)
