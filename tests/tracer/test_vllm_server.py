"""vLLM as a server: recorded itself, and as the engine of trainers that ask it over HTTP."""

import json

import numpy as np
import pytest
from runs import program, train
from tim_trace.analysis.info import info
from tim_trace.analysis.views import connect

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SEEDED = {"generation_kwargs": {"seed": 1}}


@pytest.fixture(scope="module")
def served():
    return program("served.py", capture="logprobs")


@pytest.fixture(scope="module")
def rloo():
    return train("--trainer", "rloo", "--server", config=SEEDED, capture="logprobs")


def rows(run, query):
    return connect(run.trace).execute(query).fetchall()


def choices(answer):
    """Token ids and logprobs of each choice of an answer, put together where it was streamed."""
    ids, logprobs = {}, {}
    for piece in answer if isinstance(answer, list) else [answer]:
        for choice in piece["choices"]:
            index = choice["index"]
            ids.setdefault(index, []).extend(choice.get("token_ids") or [])
            given = choice.get("logprobs") or {}
            values = given.get("token_logprobs") or [entry["logprob"] for entry in given.get("content") or []]
            logprobs.setdefault(index, []).extend(values)
    return ids, logprobs


def joined(result):
    """What clients got, with each stream put together: how it is cut into pieces depends on the machine's load."""
    return {name: answer if not isinstance(answer, list) else _stream(answer) for name, answer in result.items()}


def _stream(pieces):
    given = [choice for piece in pieces for choice in piece["choices"]]
    text = "".join(choice.get("text") or (choice.get("delta") or {}).get("content") or "" for choice in given)
    ends = [choice["finish_reason"] for choice in given if choice.get("finish_reason")]
    return choices(pieces), text, ends, {piece["object"] for piece in pieces}


def test_clients_get_what_they_would_have_got(served):
    bare = program("served.py").result
    assert joined(served.result) == joined(bare)
    assert "error" in bare["refused"]
    assert not any(choices(bare["completion"])[1].values())


def test_what_clients_were_given_is_recorded_with_the_engine_s_logprobs(served):
    found = rows(
        served,
        "SELECT step, seq_id, prompt_ids, response_ids, logprobs, finish_reason FROM sequences JOIN scores USING (step, seq_id) "
        "WHERE \"pass\" = 'rollout' ORDER BY step, seq_id",
    )
    asked = ("completion", "several", "logprobs", "chat", "chat_logprobs", "stream", "chat_stream")
    answers = [ids for name in asked for ids in choices(served.result[name])[0].values()]
    assert [row[3] for row in found[:-1]] == answers
    assert all(len(row[3]) == len(row[4]) for row in found)
    for name in ("logprobs", "chat_logprobs"):
        ((recorded,),) = [[row[4]] for row in found if row[0] == asked.index(name) + 1]
        np.testing.assert_array_equal(np.float32(recorded), np.float32(choices(served.result[name])[1][0]))
    left = found[-1]
    assert left[5] == "abort"
    assert 0 < len(left[3]) < 50
    assert {row[5] for row in found[:-1]} <= {"length", "stop"}


def test_ctrl_c_ends_the_server_and_the_trace_is_finished(served):
    told = info(str(served.trace))
    assert (told.state, told.exit_code, told.damaged, told.missing) == ("finished", 0, (), ())
    contracts = [
        json.loads(text) for (text,) in rows(served, "SELECT contract_json FROM passes WHERE \"pass\" = 'rollout'")
    ]
    assert {contract["function"] for contract in contracts} == {"vllm.AsyncLLM.generate"}


def test_rloo_with_a_server_trains_on_what_it_would_have_trained_on(rloo):
    assert rloo.result["weights"] == train("--trainer", "rloo", "--server", config=SEEDED).result["weights"]


def test_the_logprobs_of_rloo_s_server_are_recorded_though_rloo_asks_for_none(rloo):
    tokens, scored = rows(rloo, "SELECT sum(num_response_tokens) FROM sequences")[0][0], 0
    for mean, largest, count in rows(
        rloo, "SELECT avg(abs(d)), max(abs(d)), count(*) FROM tokens WHERE d IS NOT NULL GROUP BY step"
    ):
        # Both sides compute in float32 with the same weights: what is left is rounding.
        assert 0 < mean < 1e-5
        assert largest < 1e-4
        scored += count
    assert scored == tokens > 0
    ((text,),) = rows(rloo, "SELECT contract_json FROM passes WHERE \"pass\" = 'rollout'")
    assert json.loads(text)["server"]["model_config"]["logprobs_mode"] == "processed_logprobs"
