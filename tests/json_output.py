"""The JSON output of commands, held against its schema."""

import json
from functools import cache

import jsonschema
from builders import ROOT

SCHEMAS = ROOT / "docs" / "reference" / "json"


@cache
def validator(name):
    schema = json.loads((SCHEMAS / f"{name}.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def assert_valid(verb, printed):
    """Hold what a command printed with --json against its schema, or that of an error."""
    found = json.loads(printed)
    problem = jsonschema.exceptions.best_match(validator("error" if "error" in found else verb).iter_errors(found))
    assert problem is None, f"{verb}: {problem.json_path}: {problem.message[:500]}"
    return found
