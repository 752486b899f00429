"""Check a trace that another program wrote: every deviation from the format at once, for `tim-trace verify --format`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields
from typing import Any, get_type_hints

import msgspec
import pyarrow as pa

from ..schemas.documents import CHECKSUM, FORMAT, Manifest, WriterState, contract_hash
from ..schemas.errors import TimTraceError
from ..schemas.layout import FORMAT_VERSION, MANIFEST, PASS_NAME, PASSES, SPLITS, WRITERS, Segment
from ..schemas.tables import PER_RESPONSE_TOKEN, TABLES, TOKEN_SCORES, Table
from ..tracer.parquet_file import read_footer
from ..tracer.snapshot import same_type
from ..tracer.store import Store, first_line
from .rows import Rows
from .trace.database import Database

COLUMNS = ("where", "field", "code", "expected", "found", "num_rows")
"""`where` is a file, or a table for faults in its rows; `num_rows` is None for faults of a whole file."""

CODES = {
    "unreadable": "the file cannot be parsed",
    "wrong_name": "the file's name does not fit its folder or content",
    "missing_field": "a JSON field is missing",
    "unknown_field": "readers ignore this JSON field",
    "wrong_value": "a JSON field does not have its only possible value",
    "wrong_type": "a field or column has another type",
    "missing_column": "a required column is missing",
    "unknown_column": "readers ignore this column",
    "duplicate_column": "two columns have the same name",
    "null": "a required column contains NULL",
    "duplicate_row": "two rows have the same key",
    "no_sequence": "a score has no sequence",
    "wrong_length": "a list or a count does not fit the response or prompt",
    "bad_token_id": "a token id is negative or NULL",
    "positive_logprob": "a logprob is above 0",
    "bad_pass_name": "a pass has an invalid name",
    "unknown_contract": "the contract's file is missing",
}
"""Meaning of each code."""

Deviation = tuple[str, str, str, str, str, int | None]


def conformance(store: Store, database: Database | None) -> Rows:
    """Return each deviation of a trace's files, fields, columns and rows from the format, as COLUMNS.

    `database` is None if the trace cannot be opened, and its rows are then not checked.
    """
    found = [*_documents(store), *_tables(store)]
    if database is not None:
        found += _rows(database)
    return Rows(COLUMNS, found)


def _documents(store: Store) -> Iterator[Deviation]:
    kinds: list[tuple[str, type[Manifest] | type[WriterState], dict[str, object]]] = [
        (MANIFEST, Manifest, {"format": FORMAT, "format_version": FORMAT_VERSION})
    ]
    for name in store.files(WRITERS):
        kinds.append((f"{WRITERS}/{name}", WriterState, {"writer": name.removesuffix(".json")}))
    for where, kind, fixed in kinds:
        try:
            values = json.loads(store.read_json(where))
            names = dict(values)
        except (OSError, ValueError, TypeError) as error:
            yield where, "", "unreadable", "a JSON object", first_line(error), None
            continue
        for name, wanted in fixed.items():
            if names.get(name) != wanted:
                yield where, name, "wrong_value", json.dumps(wanted), json.dumps(names.get(name)), None
        hints = get_type_hints(kind)
        for field in fields(kind):
            is_required = field.default is MISSING and field.default_factory is MISSING
            if is_required and field.name not in names:
                yield where, field.name, "missing_field", _shown(hints[field.name]), "", None
            elif field.name in names and not _is(names[field.name], hints[field.name]):
                yield (
                    where,
                    field.name,
                    "wrong_type",
                    _shown(hints[field.name]),
                    json.dumps(names[field.name])[:80],
                    None,
                )
        for name in names.keys() - hints.keys() - {CHECKSUM, "format"}:
            yield where, name, "unknown_field", "", json.dumps(names[name])[:80], None
    for name in store.walk(PASSES):
        pass_name, _, digest = name.removesuffix(".json").rpartition("/")
        try:
            document = json.loads(store.read_json(f"{PASSES}/{name}"))
            actual = (document["pass"], contract_hash(dict(document["contract"])))
        except (OSError, ValueError, TypeError, KeyError) as error:
            yield f"{PASSES}/{name}", "", "unreadable", "a JSON object with pass and contract", first_line(error), None
            continue
        if actual != (pass_name, digest):
            yield f"{PASSES}/{name}", "", "wrong_name", "/".join(map(str, actual)) + ".json", name, None


def _shown(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint)


def _is(value: Any, hint: Any) -> bool:
    try:
        msgspec.convert(value, hint)
    except (msgspec.ValidationError, RecursionError):
        return False
    return True


def _tables(store: Store) -> Iterator[Deviation]:
    for table, spec in TABLES.items():
        for name, num_bytes in store.files(table).items():
            where = f"{table}/{name}"
            if not name.endswith(".parquet") or Segment.parse(name.removesuffix(".parquet")) is None:
                yield where, "", "wrong_name", "WRITER-000000.parquet", name, None
                continue
            try:
                schema = read_footer(store, where, num_bytes).schema
            except (TimTraceError, OSError) as error:
                yield where, "", "unreadable", "a Parquet file", first_line(error), None
                continue
            yield from _columns(where, schema, spec)


def _columns(where: str, schema: pa.Schema, spec: Table) -> Iterator[Deviation]:
    for name in dict.fromkeys(schema.names):
        if schema.names.count(name) > 1:
            yield where, name, "duplicate_column", "one column", str(schema.names.count(name)), None
        elif name not in spec.schema.names:
            yield where, name, "unknown_column", "", str(schema.field(name).type), None
        elif not same_type(schema.field(name).type, wanted := spec.schema.field(name).type):
            yield where, name, "wrong_type", str(wanted), str(schema.field(name).type), None
    for name in spec.schema.names:
        if name not in schema.names and name not in spec.optional:
            yield where, name, "missing_column", str(spec.schema.field(name).type), "", None


def _rows(database: Database) -> Iterator[Deviation]:
    for where, field, code, expected, query in _queries():
        try:
            ((count, example),) = database.connection.execute(query).fetchall()
        except Exception as error:  # DuckDB raises arbitrary errors on unreadable values
            yield where, field, "unreadable", expected, first_line(error), None
            continue
        if count:
            yield where, field, code, expected, str(example), count


def _queries() -> Iterator[tuple[str, str, str, str, str]]:
    """Yield table, column, code, what is expected, and a query for the number of rows without it and one example."""
    for sequences, scores in SPLITS.values():
        for table in (sequences, scores):
            key = '"pass", step, seq_id, iteration' if table == scores else "step, seq_id"
            for column in TABLES[table].columns:
                if not column.null:
                    yield table, column.name, "null", "a value", _count(f"all_{table}", f'"{column.name}" IS NULL', key)
            yield (
                table, "seq_id", "duplicate_row", f"one row per ({key.replace(chr(34), '')}, attempt)",
                f"SELECT count(*), any_value(concat_ws(' ', {key})) FROM (SELECT {key} FROM all_{table} "
                f"GROUP BY {key}, attempt HAVING count(*) > 1)",
            )  # fmt: skip
        for ids in ("prompt_ids", "response_ids"):
            bad = f"len(list_filter({ids}, lambda token: token IS NULL OR token < 0)) > 0"
            yield sequences, ids, "bad_token_id", "ids from 0", _count(f"all_{sequences}", bad)
        for count in ("num_prompt_tokens", "num_response_tokens"):
            ids = count.removeprefix("num_").removesuffix("_tokens") + "_ids"
            yield (
                sequences,
                count,
                "wrong_length",
                f"the length of {ids}",
                _count(f"all_{sequences}", f"{count} <> len({ids})"),
            )
        for column in TABLES[sequences].columns:
            if column.alignment == PER_RESPONSE_TOKEN and column.name != "response_ids":
                wrong = f"len({column.name}) <> len(response_ids)"
                yield sequences, column.name, "wrong_length", PER_RESPONSE_TOKEN, _count(f"all_{sequences}", wrong)
        joined = (
            f"all_{scores} AS score LEFT JOIN all_{sequences} AS sequence ON (score.step, score.seq_id) = "
            "(sequence.step, sequence.seq_id) AND score.attempt IS NOT DISTINCT FROM sequence.attempt"
        )
        key = 'score."pass", score.step, score.seq_id'
        yield scores, "seq_id", "no_sequence", f"a row in {sequences}", _count(joined, "sequence.seq_id IS NULL", key)
        for name in TOKEN_SCORES:
            wrong = f"len(score.{name}) <> len(sequence.response_ids)"
            yield scores, name, "wrong_length", PER_RESPONSE_TOKEN, _count(joined, wrong, key)
        positive = "len(list_filter(logprobs, lambda value: isfinite(value) AND value > 0)) > 0"
        yield scores, "logprobs", "positive_logprob", "natural logarithms, at most 0", _count(f"all_{scores}", positive)
        named = f"NOT regexp_full_match(\"pass\", '{PASS_NAME}')"
        yield scores, "pass", "bad_pass_name", re.sub(r"\(\?:", "(", PASS_NAME), _count(f"all_{scores}", named)
        unknown = "contract IS NOT NULL AND contract NOT IN (SELECT contract FROM passes WHERE contract IS NOT NULL)"
        yield scores, "contract", "unknown_contract", "the name of a file in passes/", _count(f"all_{scores}", unknown)


def _count(table: str, condition: str, key: str = "step, seq_id") -> str:
    return f"SELECT count(*), any_value(concat_ws(' ', {key})) FROM {table} WHERE {condition}"
