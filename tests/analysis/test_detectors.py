"""A detector that nothing calls would find nothing, silently."""

import ast

import pytest
from builders import ROOT

FILES = sorted((ROOT / "analysis" / "check").rglob("*.py"))
FOUND = ("Finding", "Hypothesis", "Contradiction")


def trees():
    return {file: ast.parse(file.read_text(encoding="utf-8")) for file in FILES}


def named(node):
    """Names that code reads; an import does not count."""
    return {
        each.id if isinstance(each, ast.Name) else each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Name | ast.Attribute) and isinstance(each.ctx, ast.Load)
    }


def uncalled(trees):
    """Functions that return what a check finds, and that no code but their own names."""
    statements = [(node, named(node)) for tree in trees.values() for node in tree.body]
    for node, _ in statements:
        is_detector = isinstance(node, ast.FunctionDef) and any(word in ast.unparse(node.returns) for word in FOUND)
        if is_detector and not any(node.name in names for other, names in statements if other is not node):
            yield node.name


def test_every_detector_is_called():
    assert [*uncalled(trees())] == []


@pytest.mark.parametrize(
    ("file", "code"),
    [
        ("faults/values.py", "def find_forgotten(data) -> list[Finding]: return find_forgotten(data)"),
        ("data_checks.py", "def _forgotten(run) -> Iterator[DataFinding]: yield"),
    ],
)
def test_a_forgotten_detector_is_noticed(file, code):
    changed = trees()
    (place,) = (path for path in FILES if path.as_posix().endswith(f"check/{file}"))
    changed[place].body += ast.parse(code).body
    assert "forgotten" in " ".join(uncalled(changed))
