"""One seq_id in several steps and runs, as verl's importer and many dumps name rows, changes no answer of any view, macro or verb."""

import numpy as np
import pytest
import torch
from tim_trace.analysis.check.check import check
from tim_trace.analysis.corrections import corrections
from tim_trace.analysis.facts.read_series import read_series
from tim_trace.analysis.frameworks.registry import FRAMEWORKS
from tim_trace.analysis.objective.objective import objective
from tim_trace.analysis.stats import stats
from tim_trace.analysis.views import connect, open_database
from tim_trace.tracer.dense import Logits
from tim_trace.tracer.recorder import Recorder
from tim_trace.tracer.routing import Routing

ROWS, VOCAB = 4, 7
LENGTHS = [[3, 2, 5, 1], [2, 4, 1, 3], [4, 3, 2, 2]]
ARGUMENTS = {
    "a": "'train'", "b": "'rollout'", "c": "'reference'", "train": "'train'", "rollout": "'rollout'", "now": "'current'",
    "by_step": "true", "by_sequence": "true", "by_length": "false", "of_run": "NULL", "of_runs": "NULL", "first_step": "NULL", "last_step": "NULL",
}  # fmt: skip
DEFAULTS = {"kind", "aggregation", "level"}
"""Parameters from which on each has a default."""
OF_WRITING = {
    "writer",
    "contract",
    "dense",
    "routing",
    "group_a",
    "group_b",
    "logged_at",
    "sequence",
    "contract_json",
    "hash",
}
"""Columns that two recordings of the same numbers have otherwise."""


def add(recorder, draw, step, name, split="train"):
    lengths = LENGTHS[step - 1]
    rollout = [-draw.exponential(1.0, n).astype("f4") for n in lengths]
    added = recorder.add_sequences(
        step=step, seq_ids=[name(step, row) for row in range(ROWS)], group_ids=[row // 2 for row in range(ROWS)],
        prompt_ids=[[9, row, step] for row in range(ROWS)], response_ids=[draw.integers(0, VOCAB, n) for n in lengths],
        response_mask=[np.arange(n) != 1 for n in lengths], reward=draw.normal(size=ROWS), advantage=draw.normal(size=ROWS),
        policy_version=step, finish_reason="stop", split=split,
    )  # fmt: skip
    if split == "eval":
        recorder.add_scores("rollout", added, logprobs=rollout)
        return
    for pass_name in ("rollout", "train", "reference", "current", "current"):
        moved = [np.minimum(one + draw.normal(0, 0.1, len(one)).astype("f4"), 0) for one in rollout]
        is_captured = pass_name in ("rollout", "train")
        recorder.add_scores(
            pass_name, added, logprobs=moved, entropy=[draw.random(n) for n in lengths], top2_gap=[draw.random(n) for n in lengths],
            policy_version=step + (pass_name == "current"),
            distribution=Logits(logits=torch.from_numpy(draw.normal(size=(sum(lengths), VOCAB)))) if is_captured else None,
            captured_rows=range(ROWS) if is_captured else None,
            routing=Routing(expert_ids=draw.integers(0, 4, (sum(lengths) + 3 * ROWS, 2, 2))) if is_captured else None,
        )  # fmt: skip
    recorder.add_metrics(step, {"loss": float(draw.normal()), "grad_norm": 1.0, "learning_rate": 1e-6})


def record(folder, name):
    """Two runs with the same numbers, whatever their sequences are called."""
    draw = np.random.default_rng(0)
    for run in ("one", "two"):
        with Recorder(folder / run) as recorder:
            recorder.add_contract("train", {"engine": "mine", "temperature": 1.0})
            recorder.add_contract("rollout", {"engine": "mine", "temperature": 1.0})
            for step in (1, 2, 3):
                add(recorder, draw, step, name)
            for step in (1, 2):
                add(recorder, draw, step, name, split="eval")
    return [folder / "one", folder / "two"]


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    folder = tmp_path_factory.mktemp("names")
    return record(folder / "a", lambda step, row: str(row)), record(folder / "b", lambda step, row: f"{step}-{row}")


def rounded(value):
    if isinstance(value, float):
        return f"{value:.9g}"
    return [rounded(each) for each in value] if isinstance(value, list) else value


def _without_side(name):
    """A column's name in scores, of which scored_by_both has two."""
    return name.removesuffix("_a").removesuffix("_b")


def answer(connection, query):
    """Rows in any order, with the sequences' own numbers in the place of their names."""
    cursor = connection.execute(query)
    names = [column[0] if column[0] in OF_WRITING else _without_side(column[0]) for column in cursor.description]
    kept = [place for place, name in enumerate(names) if name not in OF_WRITING]
    rows = [
        [str(row[place])[-1] if names[place] == "seq_id" else rounded(row[place]) for place in kept]
        for row in cursor.fetchall()
    ]
    return sorted(map(repr, rows))


def questions(connection):
    """A query of every view and of every table macro, with the arguments that its parameters ask for."""
    views = "SELECT view_name FROM duckdb_views() WHERE NOT internal ORDER BY 1"
    for (name,) in connection.execute(views).fetchall():
        if not name.startswith(("contracts", "empty_")):
            yield name, f"SELECT * FROM {name}"
    macros = """
        SELECT function_name, parameters FROM duckdb_functions()
        WHERE function_type = 'table_macro' AND NOT internal ORDER BY 1
    """
    for name, parameters in connection.execute(macros).fetchall():
        needed = [p for place, p in enumerate(parameters) if not DEFAULTS & set(parameters[: place + 1])]
        yield name, f"SELECT * FROM {name}({', '.join(ARGUMENTS[parameter] for parameter in needed)})"


def test_every_view_and_macro_answers_alike_whatever_sequences_are_called(traces):
    namesakes, others = connect(traces[0]), connect(traces[1])
    asked, empty = [], []
    for name, query in questions(namesakes):
        wanted = answer(others, query)
        assert answer(namesakes, query) == wanted, name
        (asked if wanted else empty).append(name)
    assert {"pair", "pair_now", "pair_entropies", "triangle", "tokens", "steps"} <= {*asked}
    assert {"pair_distributions", "pair_routing_tokens", "correction_steps", "sequence_cuts", "eval_scores"} <= {*asked}
    # What is kept beside a trace is not there, nor what nobody recorded.
    kept = {
        "kept_groups",
        "left_out",
        "run_quantiles",
        "run_statistics",
        "sequence_sums",
        "step_histograms",
        "step_quantiles",
        "step_statistics",
    }
    assert {*empty} <= kept | {
        "changes",
        "operators",
        "patches",
        "engine_weights",
        "all_engine_weights",
        "pair_neighbours",
    }


def test_a_row_a_token_is_a_row_a_token(traces):
    num_tokens = 2 * sum(map(sum, LENGTHS))
    counts = {
        "tokens": 1, "pair('train', 'rollout')": 1, "pair_now('train', 'rollout', 'current')": 2,
        "pair_entropies('train', 'rollout')": 1, "pair_distributions('train', 'rollout')": 1,
    }  # fmt: skip
    for source, times in counts.items():
        (found,) = connect(traces[0]).execute(f"SELECT count(*) FROM {source}").fetchone()
        assert found == times * num_tokens, source


@pytest.mark.parametrize("by", ["run", "step", "sequence", "layer"])
def test_statistics_answer_alike(traces, by):
    found = [
        sorted(repr([rounded(v) for k, v in row.items() if k != "seq_id"]) for row in stats(trace, by=by).dicts())
        for trace in traces
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("framework", sorted(FRAMEWORKS))
def test_frameworks_numbers_answer_alike(traces, framework):
    for by in ("run", "step"):
        found = [
            [[rounded(v) for v in row.values()] for row in stats(trace, by=by, like=framework).dicts()]
            for trace in traces
        ]
        assert found[0] == found[1]


@pytest.mark.filterwarnings("ignore")
def test_verbs_answer_alike(traces):
    for place in (0, 1):
        one, other = (trace[place] for trace in traces)
        assert repr(corrections(one)) == repr(corrections(other))
        judged = [
            [[rounded(v) for v in row.values()] for row in objective(trace).steps.dicts()] for trace in (one, other)
        ]
        assert judged[0] == judged[1]
        assert [f.code for f in check(one).findings] == [f.code for f in check(other).findings]
        mine, theirs = (read_series(open_database(trace)) for trace in (one, other))
        assert mine.keys() == theirs.keys()
        for name in mine:
            np.testing.assert_allclose(mine[name].values, theirs[name].values, rtol=1e-9, err_msg=name)


def test_a_sequence_that_is_left_out_takes_no_namesake_with_it(traces):
    for trace in traces:
        database = open_database(trace)
        some = database.connection.sql(
            "SELECT run, step, seq_id FROM sequences WHERE run = 'one' AND step = 2"
        ).to_arrow_table()
        database.leave_out(some)
        left = database.connection.execute(
            "SELECT run, step, count(*), (SELECT count(*) FROM scores AS c WHERE c.run = s.run AND c.step = s.step) "
            "FROM sequences AS s GROUP BY run, step ORDER BY ALL"
        ).fetchall()
        assert left == [("one", 1, 4, 20), ("one", 3, 4, 20), ("two", 1, 4, 20), ("two", 2, 4, 20), ("two", 3, 4, 20)]
