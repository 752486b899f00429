"""The server for coding agents, asked by a client of the package mcp over stdin and stdout."""

import json
import os
import sys
import time
from contextlib import asynccontextmanager

import anyio
import pytest
from builders import make_trace, run
from tim_trace.analysis.mcp_server import TOOLS, RunTools, _rounded, fitted
from tim_trace.tracer.importers.import_dump import import_dump

pytest.importorskip("mcp")

from mcp.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client

TIMEOUT = 6


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mcp")
    for name, steps in (("one", 3), ("two", 4)):
        make_trace(folder / name, steps=steps)
    return folder


@asynccontextmanager
async def connected(folder):
    server = StdioServerParameters(
        command=sys.executable, cwd=folder, env=dict(os.environ),
        args=["-m", "tim_trace", "mcp", "one", "two", "--timeout", str(TIMEOUT), "--memory", "200MB"],
    )  # fmt: skip
    with open(os.devnull, "w") as log:
        async with Client(stdio_client(server, errlog=log)) as client:
            yield client


def answers(folder, *calls):
    """Each call's answer, and whether it is an error, in one session."""

    async def ask():
        async with connected(folder) as client:
            return [await client.call_tool(name, arguments) for name, arguments in calls]

    return [(json.loads(found.content[0].text), found.is_error) for found in anyio.run(ask)]


def listing(folder):
    return {str(path): path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}


def test_every_tool_answers_within_its_bytes_and_writes_nothing(traces):
    calls = [
        *(("describe", {"part": part}) for part in ("run", "views", "macros", "queries", "metrics")),
        *(("diagnose", {"detail": detail, "control": "two"}) for detail in ("none", "suspects", "alarms", "figures")),
        ("check", {"run": "two"}),
        ("changes", {"around_step": 2, "kinds": ["logged"]}),
        ("probe", {"name": "shape", "steps": "2:3"}),
        ("rows", {"step": 2, "order": "worst", "n": 2}),
        ("rows", {"step": 2, "order": "group"}),
        ("sql", {"query": "SELECT run, count(*) AS n FROM steps GROUP BY run ORDER BY run"}),
        ("compare", {"other": "two"}),
    ]
    before = listing(traces)
    found = answers(traces, *calls)
    assert listing(traces) == before
    assert {name for name, _ in calls} == {*TOOLS}
    for call, (value, is_error) in zip(calls, found, strict=True):
        assert not is_error, (call, value)
        assert len(json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()) <= 3000, call
    told = {json.dumps(call): value for call, (value, _) in zip(calls, found, strict=True)}
    assert told[json.dumps(calls[0])]["last_step"] == 3
    assert told[json.dumps(calls[-2])] == {"columns": ["run", "n"], "rows": [["one", 3], ["two", 4]]}
    assert [row[0] for row in told[json.dumps(calls[11])]["rows"]] == [2, 3]
    worst = told[json.dumps(calls[12])]["rows"]
    assert len(worst) == 2
    assert worst[0]["max_abs_d"] >= worst[1]["max_abs_d"]
    assert len(worst[0]["train"]) == len(worst[0]["rollout"]) > 0


OUTSIDE = [
    "SELECT * FROM read_csv('/etc/passwd')",
    "SELECT * FROM read_text('{folder}/../x')",
    "SELECT * FROM '/etc/passwd'",
    "ATTACH '{folder}/new.db'",
    "COPY (SELECT 1) TO '{folder}/new.csv'",
    "COPY (SELECT 1) TO '{folder}/one/trace.json'",
    "INSTALL httpfs",
    "LOAD httpfs",
    "SET memory_limit = '100GB'",
    "RESET lock_configuration",
    "PRAGMA database_list",
    "CREATE TABLE x AS SELECT 1",
    "SELECT 1; SET enable_external_access = true",
]


def test_a_query_only_reads_the_given_runs(traces):
    before = listing(traces)
    for value, is_error in answers(traces, *(("sql", {"query": text.format(folder=traces)}) for text in OUTSIDE)):
        assert is_error
        assert "unsafe" not in value["error"]
    assert listing(traces) == before


@pytest.mark.slow
def test_an_error_names_what_may_have_been_meant(traces):
    found = answers(
        traces,
        ("sql", {"query": "SELECT stepp FROM tokens"}),
        ("sql", {"query": "SELECT * FROM sequencess"}),
        ("probe", {"name": "shap"}),
        ("check", {"run": "../one"}),
        ("check", {"run": str(traces / "one")}),
        ("sql", {"query": "SELECT 1", "runs": ["tow"]}),
        ("rows", {"step": "abc"}),
        ("rows", {"stepp": 1}),
        ("rows", {"step": 1, "n": 10**9}),
        ("rows", {"step": 1, "order": "best"}),
        ("probe", {"name": "shape", "steps": "77"}),
        ("probe", {"name": "shape", "pair": "train"}),
        ("tell", {}),
        ("sql", {"query": "SELECT '" + "x" * 1_000_000 + "' FROM nowhere"}),
        ("sql", {"query": "SELECT 1 AS one", "max_bytes": -1}),
        ("rows", {"step": 77}),
        ("rows", {"step": 1, "pair": "a'b:c"}),
    )
    *wrong, (one, _), (beyond, _), (strange, _) = found
    assert all(is_error for _, is_error in wrong)
    values = [value for value, _ in wrong]
    assert "step" in values[0]["candidates"]
    assert "sequences" in values[1]["candidates"]
    assert values[2]["candidates"] == ["shape"]
    for value in values[3:6]:
        assert {*value["candidates"]} == {"one", "two"}
    assert "valid integer" in values[6]["got"][0]
    assert "step" in values[7]["candidates"]
    assert values[8]["error"] == "n: got 1000000000; use 1 to 10000"
    assert "order" in values[9]["got"][0]
    assert {*values[12]["candidates"]} == {*TOOLS}
    assert all(len(json.dumps(value)) < 3000 for value in values)
    assert one == {"columns": ["one"], "rows": [[1]]}
    assert beyond == {"rows": [], "first_step": 1, "last_step": 3, "passes": {"rollout": "vllm", "train": "trl"}}
    assert {*strange["passes"]} == {"rollout", "train"}


def test_a_run_of_curves_is_diagnosed(tmp_path):
    rows = "".join(f"{step},{0.5 + step % 3 / 10},{0.01 + step % 2 / 1000}\n" for step in range(1, 40))
    (tmp_path / "curves.csv").write_text("step,reward,tim/mean_abs_d\n" + rows)
    import_dump("metrics", tmp_path / "curves.csv", output=tmp_path / "run")
    tools = RunTools({"run": str(tmp_path / "run")}, 60.0, "1GB")
    for detail in ("none", "suspects", "alarms", "figures"):
        assert tools.diagnose(detail=detail)["valid"] is None
    assert tools.describe()["num_metrics"] == 2 * 39


def test_an_answer_that_is_too_long_says_what_was_cut(traces):
    (rows, _), (bytes_, _) = answers(
        traces,
        ("sql", {"query": "SELECT * FROM range(1000000000000)", "max_rows": 7}),
        ("sql", {"query": "SELECT range AS n, repeat('x', 50) AS text FROM range(1000)", "max_rows": 1000}),
    )
    assert rows["rows"] == [[n] for n in range(7)]
    assert rows["warnings"] == ["only the first 7 rows are returned; aggregate, add LIMIT, or set max_rows=14"]
    assert 5000 < len(json.dumps(bytes_, separators=(",", ":"))) <= 8000
    assert bytes_["cut"] == {
        "rows": f"the first {len(bytes_['rows'])} of 1000; raise max_bytes, or ask for less (steps, n, limit, columns)"
    }


def test_text_that_is_not_unicode_is_escaped():
    assert fitted(_rounded({"text": "a\udc80"}, 4), 100) == '{"text":"a\\\\udc80"}'


def test_numbers_have_few_digits_and_whole_ones_no_point():
    assert _rounded([0.1599999964, 25600.0, 57043, True, None, 1e-9, -0.0], 4) == [
        0.16,
        25600,
        57043,
        True,
        None,
        1e-9,
        0,
    ]


def test_a_list_inside_a_row_is_cut_too():
    value = json.loads(fitted({"rows": [{"id": 1, "values": list(range(5000))}]}, 1000))
    assert 100 < len(value["rows"][0]["values"]) < 300
    assert value["cut"] == {
        "rows[0].values": f"the first {len(value['rows'][0]['values'])} of 5000; raise max_bytes, or ask for less (steps, n, limit, columns)"
    }


def test_two_calls_at_once_and_calls_that_would_never_end(traces):
    async def ask():
        async with connected(traces) as client:
            endless = {"query": "SELECT count(*) FROM range(10000000) a, range(10000000) b"}
            large = {"query": "SELECT repeat('x', 4000000000)"}
            found = {}

            async def call(key, name, arguments):
                found[key] = json.loads((await client.call_tool(name, arguments)).content[0].text)

            began = time.monotonic()
            async with anyio.create_task_group() as group:
                group.start_soon(call, "endless", "sql", endless)
                group.start_soon(call, "large", "sql", large)
                group.start_soon(call, "check", "check", {})
            found["seconds"] = time.monotonic() - began
            with anyio.move_on_after(1):  # cancelled by the client
                await client.call_tool("sql", endless)
            with anyio.move_on_after(1):
                await client.call_tool("sql", endless)
            began = time.monotonic()
            await call("after", "sql", {"query": "SELECT 1 AS one"})
            found["waited"] = time.monotonic() - began
            return found

    found = anyio.run(ask)
    assert "took longer than 6 s" in found["endless"]["error"]
    assert "--timeout" in found["endless"]["hint"]
    assert "more memory than 200MB" in found["large"]["error"]
    assert "is_valid" in found["check"]
    assert found["seconds"] < 3 * TIMEOUT
    assert found["after"]["rows"] == [[1]]
    assert found["waited"] < TIMEOUT - 1  # the cancelled calls no longer run


def test_the_server_ends_with_its_input_and_names_what_is_missing(traces):
    done = run(sys.executable, "-m", "tim_trace", "mcp", "one", cwd=traces, stdin="")
    assert (done.code, done.stdout, done.stderr) == (0, "", "")
    done = run(sys.executable, "-m", "tim_trace", "mcp", "none", cwd=traces, stdin="")
    assert done.code == 2
    program = "import sys; sys.modules['mcp'] = None; from tim_trace.cli import main; main()"
    done = run(sys.executable, "-c", program, "mcp", "one", cwd=traces, stdin="")
    assert done.code == 2
    assert (
        done.stderr
        == "Error: version 2 of the mcp package is not installed; pip install 'tim-trace[mcp]' or, in a clone, '.[mcp]'\n"
    )
