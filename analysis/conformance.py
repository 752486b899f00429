"""Find every deviation from the format in a trace that another program wrote, for `tim-trace verify --format`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import get_type_hints

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
"""`where` names the file or, for faults in rows, the table. `num_rows` is None if the fault concerns a whole file."""

CODES = {
    "unreadable": "the file cannot be parsed",
    "wrong_name": "the file's name does not match its folder or content",
    "missing_field": "a JSON field is missing",
    "unknown_field": "readers ignore this JSON field",
    "wrong_value": "a JSON field does not have the required value",
    "wrong_type": "a field or column has the wrong type",
    "missing_column": "a required column is missing",
    "unknown_column": "readers ignore this column",
    "duplicate_column": "two columns have the same name",
    "null": "a required column contains NULL",
    "duplicate_row": "two rows have the same key",
    "no_sequence": "a score has no sequence",
    "wrong_length": "a list's length or a token count differs from the length of the response or prompt",
    "bad_token_id": "a token id is negative or NULL",
    "positive_logprob": "a logprob is above 0",
    "bad_pass_name": "a pass has an invalid name",
    "unknown_contract": "the contract's file is missing",
}

Deviation = tuple[str, str, str, str, str, int | None]


def conformance(store: Store, database: Database | None) -> Rows:
    """Return one row (see COLUMNS) for each file, field, column or row of a trace that deviates from the format.

    If the trace cannot be opened, `database` is None and no row is checked.
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
                found = json.dumps(names[field.name])[:80]
                yield where, field.name, "wrong_type", _shown(hints[field.name]), found, None
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


def _shown(hint: object) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint)


def _is(value: object, hint: type) -> bool:
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


@dataclass(frozen=True, slots=True)
class _Rule:
    column: str
    code: str
    expected: str
    broken: str
    """SQL condition that selects the deviating rows."""


def _rows(database: Database) -> Iterator[Deviation]:
    for sequences, scores in SPLITS.values():
        joined = (
            f"all_{scores} AS score LEFT JOIN all_{sequences} AS sequence ON (score.step, score.seq_id) = "
            "(sequence.step, sequence.seq_id) AND score.attempt IS NOT DISTINCT FROM sequence.attempt"
        )
        yield from _broken(database, sequences, f"all_{sequences}", "step, seq_id", _sequence_rules(sequences))
        yield from _duplicates(database, sequences, "step, seq_id")
        yield from _broken(database, scores, f"all_{scores}", "step, seq_id", _score_rules(scores))
        yield from _duplicates(database, scores, '"pass", step, seq_id, iteration')
        yield from _broken(database, scores, joined, 'score."pass", score.step, score.seq_id', _joined_rules(sequences))


def _broken(database: Database, table: str, source: str, key: str, rules: Sequence[_Rule]) -> Iterator[Deviation]:
    """Yield each broken rule with the number of rows that break it and the key of one such row. Scans `source` once."""
    counts = ", ".join(
        f"count(*) FILTER ({rule.broken}), any_value(concat_ws(' ', {key})) FILTER ({rule.broken})" for rule in rules
    )
    try:
        (found,) = database.connection.execute(f"SELECT {counts} FROM {source}").fetchall()
    except Exception as error:  # DuckDB raises arbitrary errors on unreadable values
        yield table, "", "unreadable", "readable values", first_line(error), None
        return
    for rule, count, example in zip(rules, found[::2], found[1::2], strict=True):
        if count:
            yield table, rule.column, rule.code, rule.expected, str(example), count


def _duplicates(database: Database, table: str, key: str) -> Iterator[Deviation]:
    query = f"SELECT {key} FROM all_{table} GROUP BY {key}, attempt HAVING count(*) > 1"
    expected = f"one row per ({key.replace(chr(34), '')}, attempt)"
    rule = _Rule("seq_id", "duplicate_row", expected, "true")
    yield from _broken(database, table, f"({query})", key, [rule])


def _nulls(table: str) -> list[_Rule]:
    columns = TABLES[table].columns
    return [_Rule(one.name, "null", "a value", f'"{one.name}" IS NULL') for one in columns if not one.null]


def _sequence_rules(table: str) -> list[_Rule]:
    rules = _nulls(table)
    for ids in ("prompt_ids", "response_ids"):
        bad = f"len(list_filter({ids}, lambda token: token IS NULL OR token < 0)) > 0"
        rules.append(_Rule(ids, "bad_token_id", "ids from 0", bad))
        count = f"num_{ids.removesuffix('_ids')}_tokens"
        rules.append(_Rule(count, "wrong_length", f"the length of {ids}", f"{count} <> len({ids})"))
    per_token = [column.name for column in TABLES[table].columns if column.alignment == PER_RESPONSE_TOKEN]
    lists = [name for name in per_token if name != "response_ids"]
    return rules + [
        _Rule(name, "wrong_length", PER_RESPONSE_TOKEN, f"len({name}) <> len(response_ids)") for name in lists
    ]


def _score_rules(table: str) -> list[_Rule]:
    positive = "len(list_filter(logprobs, lambda value: isfinite(value) AND value > 0)) > 0"
    misnamed = f"NOT regexp_full_match(\"pass\", '{PASS_NAME}')"
    unknown = "contract IS NOT NULL AND contract NOT IN (SELECT contract FROM passes WHERE contract IS NOT NULL)"
    return [
        *_nulls(table),
        _Rule("logprobs", "positive_logprob", "natural logarithms, at most 0", positive),
        _Rule("pass", "bad_pass_name", PASS_NAME.replace("(?:", "("), misnamed),
        _Rule("contract", "unknown_contract", "the name of a file in passes/", unknown),
    ]


def _joined_rules(sequences: str) -> list[_Rule]:
    return [
        _Rule("seq_id", "no_sequence", f"a row in {sequences}", "sequence.seq_id IS NULL"),
        *(
            _Rule(name, "wrong_length", PER_RESPONSE_TOKEN, f"len(score.{name}) <> len(sequence.response_ids)")
            for name in TOKEN_SCORES
        ),
    ]
