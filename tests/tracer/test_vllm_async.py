"""Recording a script that drives vLLM's asynchronous engine by itself."""

import json

import numpy as np
import pytest
from runs import program
from tim_trace.analysis.info import info
from tim_trace.analysis.views import connect
from tim_trace.tracer.dense import read_dense
from tim_trace.tracer.store import Store

pytestmark = [pytest.mark.engine, pytest.mark.slow]

WAVES = ("plain", "two", "asked", "flat")
NAMES = {"CUMULATIVE": "all", "DELTA": "new", "FINAL_ONLY": "last"}


def serve(**options):
    return program("serve.py", **options)


@pytest.fixture(scope="module")
def recorded():
    return serve(capture="topk:3")


def rows(run, query):
    return connect(run.trace).execute(query).fetchall()


def joined(kind, outputs):
    """What the outputs of a request tell together, by completion. vLLM joins outputs that wait, so their number varies."""
    completions = {}
    for completion in (completion for output in outputs for completion in output):
        before = completions.get(completion["index"])
        if before is not None and kind == "DELTA":
            logprobs = None if before["logprobs"] is None else before["logprobs"] + completion["logprobs"]
            completion = completion | {"ids": before["ids"] + completion["ids"], "logprobs": logprobs}
        elif before is not None:
            assert completion["ids"][: len(before["ids"])] == before["ids"]
        completions[completion["index"]] = completion
    return completions


@pytest.mark.parametrize("capture", ["logprobs", "topk:3", pytest.param("logits", marks=pytest.mark.slow)])
def test_the_script_gets_what_it_would_have_got(capture):
    bare, run = serve(), serve(capture=capture)
    for wave in WAVES:
        for kind in NAMES:
            given = joined(kind, run.result[wave][kind])
            assert without_last_bits(given) == without_last_bits(joined(kind, bare.result[wave][kind]))
            asked = wave in ("asked", "flat")
            assert all((c["logprobs"] is not None) == (c["cumulative"] is not None) == asked for c in given.values())
    for output in ("together", "refused", "wrong_call"):
        assert run.result[output] == bare.result[output]


def without_last_bits(completions):
    """Completions of a request start one by one, and which run together decides the last bits of a logprob."""
    return {
        index: completion
        | {
            "cumulative": None
            if completion["cumulative"] is None
            else pytest.approx(completion["cumulative"], abs=1e-5)
        }
        | {
            "logprobs": None
            if completion["logprobs"] is None
            else [
                {token: [pytest.approx(value, abs=1e-5), rank, text] for token, (value, rank, text) in position.items()}
                for position in completion["logprobs"]
            ]
        }
        for index, completion in completions.items()
    }


@pytest.mark.parametrize(("number", "wave"), list(enumerate(WAVES)))
@pytest.mark.parametrize("kind", NAMES)
def test_every_completion_is_recorded_with_the_engine_s_logprobs(recorded, number, wave, kind):
    wanted = joined(kind, recorded.result[wave][kind])
    step = 1 + len(NAMES) * number + list(NAMES).index(kind)
    query = f"""
        SELECT seq_id, group_id, prompt_ids, response_ids, finish_reason, logprobs, temperature, max_tokens
        FROM sequences JOIN scores USING (run, step, seq_id) WHERE step = {step} ORDER BY seq_id
    """
    found = rows(recorded, query)
    name = NAMES[kind]
    assert [row[:2] for row in found] == [(f"{name}-{index}", name) for index in sorted(wanted)]
    for row, (_, completion) in zip(found, sorted(wanted.items()), strict=True):
        prompt, ids, reason, logprobs, temperature, most = row[2:]
        assert (prompt, ids) == ([3, 12, 4 + list(NAMES).index(kind), 13], completion["ids"])
        assert reason == ("stop" if ids[-1] == 1 else "length")
        assert (temperature, most) == (0.7 if wave == "plain" else 1.0, 5)
        assert len(logprobs) == len(ids)
        assert max(logprobs) < 0
        if completion["logprobs"] is not None:
            told = [position[str(token)][0] for token, position in zip(ids, completion["logprobs"], strict=True)]
            assert logprobs == told


def test_requests_that_run_together_are_a_step_and_a_name_that_comes_again_gets_a_number(recorded):
    query = "SELECT seq_id, response_ids FROM sequences WHERE step = 13 ORDER BY prompt_ids"
    wanted = [output[0][0]["ids"] for output in recorded.result["together"]]
    names = ["same-0", "same.2-0", "same.3-0", "same.4-0"]
    assert rows(recorded, query) == list(zip(names, wanted, strict=True))


def test_of_a_request_that_ended_early_what_its_caller_was_given_is_recorded(recorded):
    given = joined("DELTA", recorded.result["left"])[0]["ids"]
    query = "SELECT response_ids, finish_reason, len(logprobs) FROM sequences JOIN scores USING (run, step, seq_id)"
    assert rows(recorded, f"{query} WHERE seq_id = 'left-0'") == [(given, "abort", len(given))]
    ids = recorded.result["aborted"][0][0]["ids"]
    found = rows(recorded, f"{query} WHERE seq_id = 'aborted-0'")
    assert found == ([(ids, "abort", len(ids))] if ids else [])


def test_a_request_of_which_its_caller_was_given_nothing_is_told(recorded):
    assert rows(
        recorded, "SELECT count(*) FROM sequences WHERE seq_id LIKE 'cancelled%' OR seq_id LIKE 'refused%'"
    ) == [(0,)]
    sentence = "before the caller received any token"
    assert recorded.done.stderr.count(sentence) == 1
    assert any(sentence in missing for missing in info(str(recorded.trace)).missing)


def test_captured_top_k_is_what_the_engine_ranks_first(recorded):
    store = Store(recorded.trace)
    query = "SELECT dense, dense_start, len(logprobs) FROM scores WHERE step = {} AND dense IS NOT NULL"
    for number, kind in enumerate(NAMES):
        ((group, start, tokens),) = rows(recorded, query.format(10 + number))
        arrays = read_dense(store, group, start, tokens)
        (completion,) = joined(kind, recorded.result["flat"][kind]).values()
        for position, entries in enumerate(completion["logprobs"]):
            for token, (value, rank, _) in entries.items():
                if rank <= 2:
                    assert arrays["token_ids"][position][rank - 1] == int(token)
                    assert arrays["logprobs"][position][rank - 1] == np.float32(value)


def test_the_contract_names_the_engine_s_function_and_each_sampling(recorded):
    found = [json.loads(text) for (text,) in rows(recorded, "SELECT contract_json FROM passes")]
    assert {contract["function"] for contract in found} == {"vllm.AsyncLLM.generate"}
    samplings = {(contract["sampling"]["temperature"], contract["sampling"]["top_p"]) for contract in found}
    assert samplings == {(0.7, 1.0), (1.0, 1.0), (1.0, 0.9)}
