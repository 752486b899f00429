"""A brief of an attribution, and the facts in SQL: what a reader needs to go on, with queries that run."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from builders import tim_trace
from test_recorded import PLANTED, Plan, always, record
from tim_trace.analysis.attribution.attribute import attribute
from tim_trace.analysis.attribution.attribution import SUSPECTS, Suspect
from tim_trace.analysis.attribution.brief import QUESTIONS, attribution_brief


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return record(tmp_path_factory.mktemp("brief") / "run", PLANTED["longer prompts"][2])


def test_a_brief_names_the_cause_the_facts_and_a_query_for_each_open_question(trace):
    text = tim_trace("attribute", trace, "--brief").stdout
    assert "a change of the prompts" in text
    assert "prompt_length changes from 4 to 12 at step 50" in text
    assert "SELECT step, avg(num_prompt_tokens)" in text
    assert tim_trace("diagnose", trace, "--brief").stdout.splitlines()[2:] == text.splitlines()[2:]


def test_every_suspect_has_a_question_whose_query_runs(trace):
    assert set(QUESTIONS) == set(SUSPECTS)
    found = attribute(trace)
    all_open = tuple(Suspect(code=code, evidence=(), probability=1 / 12) for code in SUSPECTS)
    lines = attribution_brief(replace(found, suspects=all_open)).splitlines()
    queries = [line.strip() for line in lines if line.startswith("    SELECT")]
    assert len(queries) == len(QUESTIONS)
    for query in queries:
        tim_trace("sql", trace, query)


def test_a_brief_has_at_most_4000_tokens(trace):
    found = attribute(trace)
    text = attribution_brief(replace(found, facts=found.facts * 50))
    assert len(text) < 16_000  # four letters a token
    assert "weaker: SELECT * FROM facts" in text


def test_a_run_without_a_drop_has_a_brief_and_no_facts(tmp_path):
    run = record(tmp_path / "run", Plan(right=always(0.7)))
    assert "No collapse detected" in tim_trace("attribute", run, "--brief").stdout
    assert tim_trace("sql", run, "SELECT count(*) AS num FROM facts", "--json").json() == [{"num": 0}]


def test_the_view_and_the_json_have_the_facts_strongest_first(trace):
    rows = tim_trace("sql", trace, 'SELECT code, step, before, after, "order", sentence FROM facts', "--json").json()
    (prompts,) = (row for row in rows if row["code"] == "prompts_changed")
    assert (prompts["step"], prompts["before"], prompts["after"], prompts["order"]) == (50, "4.0", "12.0", "with")
    facts = json.loads(tim_trace("attribute", trace, "--json").stdout)["facts"]
    assert [fact["sentence"] for fact in facts] == [row["sentence"] for row in rows]
    levels = [abs(fact["level"]) for fact in facts]
    assert levels == sorted(levels, reverse=True)


def test_a_brief_is_no_json(trace):
    done = tim_trace("attribute", trace, "--brief", "--json", code=2)
    assert "--json and --brief cannot be combined" in done.stderr
