"""Derive a JSON Schema of each command's --json output from the types that the command prints."""

import ast
import inspect
import itertools
import re
import textwrap
import types
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from datetime import date, datetime
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from tim_trace import analysis, cli
from tim_trace.analysis.diagnosis.text import SHORT_FORM
from tim_trace.analysis.gate.condition import Verdict
from tim_trace.analysis.info import TraceInfo
from tim_trace.analysis.rows import JSON_VERSION, Rows, entries, form_of, to_json
from tim_trace.analysis.watch.watched import Watched
from tim_trace.replay.results import ArmPlan, ReplayedStep

DIALECT = "https://json-schema.org/draft/2020-12/schema"
NUMBER = {
    "description": "A float. JSON has no NaN and no infinities, so these are strings.",
    "anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}],
}
DATA_ROWS = "One object per row. The columns depend on the command's options and on the data."
SCALARS = {str: "string", bool: "boolean", int: "integer", type(None): "null", date: "string", datetime: "string"}
PLAN_FORM = {ArmPlan: {"seconds": ArmPlan.seconds}}

COMMON = {
    "json_version": {"const": JSON_VERSION},
    "damaged": {
        "description": "One sentence per damaged file. The results do not cover these files.",
        "type": "array", "items": {"type": "string"},
    },
}  # fmt: skip
"""Keys that every command's output has."""
ROWS = {"gate": (Verdict,), "info": (TraceInfo,), "replay": (ReplayedStep, ArmPlan)}
"""Command -> possible dataclasses of its `rows`. Within one output, all rows have the same class."""
SHORTER = {"diagnose": SHORT_FORM}
"""Command -> form of its output without --verbose, which lacks some keys."""


@cache
def hints(owner):
    return get_type_hints(owner)


def returned(function):
    """Return a function's result type without resolving its argument types, which may be unavailable at run time."""
    annotated = types.SimpleNamespace(__annotations__={"return": function.__annotations__["return"]})
    return get_type_hints(annotated, globalns=function.__globals__)["return"]


@cache
def docs_of(kind):
    """Return the docstrings of a dataclass's fields."""
    found = {}
    for owner in reversed(kind.__mro__):
        if is_dataclass(owner):
            body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0].body
            for assigned, said in itertools.pairwise(body):
                if isinstance(assigned, ast.AnnAssign) and isinstance(said, ast.Expr):
                    found[assigned.target.id] = " ".join(said.value.value.split())
    return found


class Schemas:
    """Collects the definitions of the dataclasses in one command's output."""

    def __init__(self, form, shorter=None):
        self.forms = [form] if shorter is None else [shorter, form]
        self.definitions = {}

    def of(self, hint):
        """Return the JSON Schema for a type hint."""
        origin, arguments = get_origin(hint) or hint, get_args(hint)
        if origin in (Union, types.UnionType):
            return {"anyOf": [self.of(choice) for choice in arguments]}
        if origin is Literal:
            return {"enum": [*arguments]}
        if hint is Any or hint is object:
            return {}
        if hint is float:
            self.definitions["number"] = NUMBER
            return {"$ref": "#/$defs/number"}
        if hint is Rows:
            return {"description": DATA_ROWS, "type": "array", "items": {"type": "object"}}
        if is_dataclass(hint):
            if hint.__name__ not in self.definitions:
                self.definitions[hint.__name__] = {}  # set first, because a dataclass may contain itself
                self.definitions[hint.__name__] = self.object(hint)
            return {"$ref": f"#/$defs/{hint.__name__}"}
        if issubclass(origin, tuple) and arguments[-1] is not ...:
            items = [self.of(each) for each in arguments]
            return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
        if issubclass(origin, Mapping):
            return {"type": "object", "additionalProperties": self.of(arguments[1])}
        if issubclass(origin, Sequence) and not issubclass(origin, str):
            return {"type": "array", "items": self.of(arguments[0])}
        return {"type": next(name for kind, name in SCALARS.items() if issubclass(origin, kind))}

    def object(self, kind):
        """Return the schema of a dataclass. A key is required if the output has it both with and without --verbose."""
        chosen = [entries(kind, form) for form in self.forms]
        properties = {}
        for name, entry in itertools.chain(*(each.items() for each in chosen)):
            is_field = not hasattr(entry, "__annotations__")
            said = docs_of(kind).get(name) if is_field else inspect.getdoc(entry)
            schema = self.of(hints(kind)[name] if is_field else returned(entry))
            told = " ".join(f"{said or ''} {schema.pop('description', '')}".split())
            told = re.sub(r"\bNone\b", "null", told)
            properties[name] = ({"description": told} if told else {}) | schema
        required = [name for name in properties if all(name in each for each in chosen)]
        return {
            "type": "object", "properties": properties, "required": required, "additionalProperties": False,
        }  # fmt: skip


def enclosed(schema, definitions, title):
    """Return the full schema of a command's output: the keys in `schema`, and those that all outputs share."""
    return {
        "$schema": DIALECT, "title": title, "type": "object", "properties": COMMON | schema["properties"],
        "required": list(dict.fromkeys([*COMMON, *schema["required"]])), "additionalProperties": False,
        "$defs": dict(sorted(definitions.items())),
    }  # fmt: skip


def of_rows(items):
    rows = {"description": DATA_ROWS, "type": "array", "items": {"type": "object"}}
    if items:
        rows = {"anyOf": [{"type": "array", "items": each} for each in items]} if len(items) > 1 else {
            "type": "array", "items": items[0],
        }  # fmt: skip
    return {"properties": {"rows": rows}, "required": ["rows"]}


def printed(verb):
    """Return the type that a command prints."""
    kind = hints(getattr(analysis, verb).__wrapped__)["return"]
    return Watched if verb == "watch" else kind


def schema_of(verb):
    title = f"tim-trace {verb} --json"
    kinds, kind = ROWS.get(verb, ()), printed(verb)
    if get_origin(kind) is types.UnionType:
        return either([(each, Schemas(form_of(each))) for each in get_args(kind)], title)
    schemas = Schemas(form_of(kind) | PLAN_FORM, SHORTER.get(verb))
    rows = of_rows([schemas.of(each) for each in kinds])
    if kind is Rows or (kinds and verb != "info"):
        return enclosed(rows, schemas.definitions, title)
    found = schemas.object(kind)
    if not kinds:
        return enclosed(found, schemas.definitions, title)
    # `info` prints an object for one trace and rows for several, so its schema allows both.
    return any_of([enclosed(found, schemas.definitions, title), enclosed(rows, {}, title)], title)


def either(kinds, title):
    """Return the schema of a command that prints one of several types of results."""
    return any_of([enclosed(schemas.object(kind), schemas.definitions, title) for kind, schemas in kinds], title)


def any_of(schemas, title):
    keys = ("type", "properties", "required", "additionalProperties")
    branches = [{key: each[key] for key in keys} for each in schemas]
    definitions = {name: found for each in schemas for name, found in each["$defs"].items()}
    return {"$schema": DIALECT, "title": title, "anyOf": branches, "$defs": dict(sorted(definitions.items()))}


def error():
    texts = {"type": "string"}
    return {
        "$schema": DIALECT, "title": "tim-trace COMMAND --json, if it fails", "type": "object",
        "properties": {
            "json_version": {"const": JSON_VERSION},
            "error": {
                "type": "object", "properties": {"code": texts, "message": texts}, "required": ["code", "message"],
                "additionalProperties": False,
            },
        },
        "required": ["json_version", "error"], "additionalProperties": False,
    }  # fmt: skip


def verbs():
    """Return the commands that have --json."""
    return [name for name, command in cli.main.commands.items() if any("--json" in one.opts for one in command.params)]


def documents():
    """Return the text of every schema file, keyed by file name."""
    made = {verb: schema_of(verb) for verb in verbs()} | {"error": error()}
    return {f"{name}.json": to_json(schema) + "\n" for name, schema in sorted(made.items())}


def table():
    """Return the schema files as a Markdown table, with the top-level keys of each output."""
    lines = ["| command | schema | keys |", "|---|---|---|"]
    for verb in verbs():
        schema = schema_of(verb)
        objects = schema.get("anyOf", [schema])
        names = dict.fromkeys(name for one in objects for name in one["properties"] if name not in COMMON)
        lines.append(f"| `{verb}` | [{verb}.json](json/{verb}.json) | {', '.join(f'`{name}`' for name in names)} |")
    return "\n".join(lines)
