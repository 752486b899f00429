"""A query that would take hours or all memory ends with one sentence, and leaves nothing behind."""

import json
import os
import resource
import sys
import time

import pytest
from builders import make_trace, run
from tim_trace.analysis.queries.catalogue import query
from tim_trace.analysis.query import sql
from tim_trace.schemas.errors import InvalidOption, InvalidQuery, TimTraceWarning

ENDLESS = [
    "SELECT count(*) FROM range(1000000) a, range(1000000) b",
    "SELECT count(*) FROM tokens, range(1000000000000)",
    "WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t) SELECT max(n) FROM t",
    "SELECT sum(range) FROM range(1000000000000)",
    "SELECT levenshtein(repeat('a', 200000), repeat('b', 200000)) FROM range(100)",
]
LARGE = [
    "SELECT repeat('x', 4000000000)",
    "SELECT repeat('x', 1000000) FROM range(2048)",
    "SELECT list(range) FROM range(1000000000)",
    "SELECT list_sort(range(100000000))",
    "SELECT * FROM range(1000000000) ORDER BY hash(range)",
    "SELECT string_agg(repeat('x', 100000), '') FROM range(1000000)",
    "SELECT count(*) FROM range(2048) WHERE regexp_matches(repeat('ab', 500000 + range::INT), '(a?b?){1,500}c')",
    "SELECT repeat('x', 1000) FROM range(10000000)",
]

MEASURED = """
import json, os, sys, time
from tim_trace.analysis.query import sql
from tim_trace.schemas.errors import InvalidQuery

for query, timeout in json.load(sys.stdin):
    began, (reading, writing) = time.monotonic(), os.pipe()
    if not (child := os.fork()):  # its peak is this query's alone
        try:
            sql(sys.argv[1], query, timeout=timeout, memory="200MB")
        except InvalidQuery as error:
            os.write(writing, str(error).encode())
        os._exit(0)
    os.close(writing)
    _, status, used = os.wait4(child, 0)
    assert not status
    print(json.dumps([os.read(reading, 1000).decode(), time.monotonic() - began, used.ru_maxrss]))
"""


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("limits") / "run"
    make_trace(path)
    return path


def test_a_hostile_query_ends_in_time_and_within_its_memory(trace, tmp_path):
    asked = [(text, 1) for text in ENDLESS] + [(text, 100) for text in LARGE]
    done = run(sys.executable, "-c", MEASURED, trace, cwd=tmp_path, stdin=json.dumps(asked))
    assert done.code == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    for (text, timeout), (told, seconds, peak_kb) in zip(asked, found, strict=True):
        assert told, text
        assert "\n" not in told
        assert seconds < timeout + 20, text  # on a busy machine; one expression cannot be interrupted
        assert peak_kb < 500_000, text  # 200 MB, 64 MiB for stacks, and the program itself
    assert {told for told, *_ in found[: len(ENDLESS)]} == {
        "sql: the query took longer than 1 s; select fewer steps or rows, or set timeout=2"
    }
    assert {told for told, *_ in found[len(ENDLESS) :]} == {
        "sql: the query needs more memory than 200MB; select fewer steps or columns, or set memory='400MB'"
    }
    assert not os.listdir(tmp_path)


def test_after_a_limit_the_process_gets_its_memory_back(trace):
    before = resource.getrlimit(resource.RLIMIT_DATA)
    for hostile in (ENDLESS[0], LARGE[0]):
        with pytest.raises(InvalidQuery):
            sql(trace, hostile, timeout=0.5, memory="200MB")
        assert sql(trace, "SELECT 1 AS one", timeout=0.5, memory="200MB").rows == [(1,)]
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_the_limits_change_no_result(trace):
    text = "SELECT * FROM pair_steps('train', 'rollout')"
    assert sql(trace, text, timeout=60, memory="1GB", max_rows=1000) == sql(trace, text)
    assert query("shape", trace, timeout=60, memory="1GB") == query("shape", trace)


def test_rows_beyond_the_most_are_cut_with_a_warning(trace):
    with pytest.warns(TimTraceWarning, match="only the first 3 rows are returned"):
        assert sql(trace, "SELECT * FROM range(1000000000000)", max_rows=3).rows == [(0,), (1,), (2,)]
    assert len(sql(trace, "SELECT * FROM range(3)", max_rows=3)) == 3


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"timeout": 0}, "timeout: got 0; use a number of seconds above 0"),
        ({"timeout": float("nan")}, "timeout: got nan; use a number of seconds above 0"),
        ({"memory": "much"}, "memory: got 'much', expected a number"),
        ({"memory": "1kB"}, "memory: got '1kB'; use at least 1MB"),
        ({"max_rows": 0}, "max_rows: got 0; use at least 1"),
    ],
)
def test_a_limit_that_is_none_is_refused(trace, limits, message):
    with pytest.raises(InvalidOption, match=message):
        sql(trace, "FROM steps", **limits)


@pytest.mark.parametrize("text", [ENDLESS[0], "SELECT list_reduce(range(10000000), lambda a, b: a + b)"])
def test_the_command_ends_in_time_even_within_one_expression(trace, text):
    began = time.monotonic()
    done = run(sys.executable, "-m", "tim_trace", "sql", trace, text, "--timeout", "1")
    assert done.code == 2
    assert done.stderr == (
        "Error: sql: the query took longer than 1 s; select fewer steps or rows, or set --timeout 2\n"
    )
    assert time.monotonic() - began < 15
