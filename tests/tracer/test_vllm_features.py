"""Recording rollouts of vLLM's features: cached prefixes, grammars, adapters, drafts."""

import json

import numpy as np
import pytest
from runs import program
from tim_trace.analysis.info import info
from tim_trace.analysis.views import connect

pytestmark = [pytest.mark.engine, pytest.mark.slow]

FEATURES = ("cold", "warm", "regex", "choice", "json", "adapter")
DRAFTS = ("drafts", "drafts_asked", "drafts_stopped")
GRAMMARS = ("regex", "choice", "json")

# Two float32 forwards of one tiny model.
FLOAT32 = 5e-6


@pytest.fixture(scope="module")
def features():
    return program("features.py", capture="logprobs")


@pytest.fixture(scope="module")
def drafts():
    return program("features.py", "--speculative", capture="logprobs")


def recorded(run, calls, call):
    query = f"""
        SELECT response_ids, logprobs FROM sequences JOIN scores USING (run, step, seq_id)
        WHERE step = {1 + calls.index(call)} ORDER BY seq_id
    """
    return connect(run.trace).execute(query).fetchall()


def contracts(run):
    query = "SELECT step, contract_json FROM scores JOIN passes USING (run, contract) GROUP BY ALL ORDER BY step"
    return {step: json.loads(text) for step, text in connect(run.trace).execute(query).fetchall()}


@pytest.mark.parametrize("arguments", [(), ("--speculative",)])
def test_the_script_gets_what_it_would_have_got(arguments):
    bare = program("features.py", *arguments)
    run = program("features.py", *arguments, capture="logprobs")
    for call in DRAFTS if arguments else FEATURES:
        assert run.result[call]["outputs"] == bare.result[call]["outputs"]


@pytest.mark.parametrize("call", FEATURES)
def test_ids_are_the_caller_s_and_logprobs_those_of_the_model_that_sampled(features, call):
    check(features, FEATURES, call)


@pytest.mark.parametrize("call", DRAFTS)
def test_accepted_drafts_have_the_model_s_logprobs(drafts, call):
    check(drafts, DRAFTS, call)
    assert drafts.result["num_accepted"] > 0


def completions(run, call):
    return [completion for output in run.result[call]["outputs"] for completion in output]


def check(run, calls, call):
    found = recorded(run, calls, call)
    assert [ids for ids, _ in found] == [completion["ids"] for completion in completions(run, call)]
    for (_, logprobs), scored in zip(found, run.result[call]["scored"], strict=True):
        assert len(logprobs) == len(scored)
        if call in GRAMMARS:
            # What the grammar forbids is shared out among the tokens that it allows.
            assert np.greater_equal(np.array(logprobs) + FLOAT32, scored).all()
        else:
            np.testing.assert_allclose(logprobs, scored, rtol=0, atol=FLOAT32)


def test_the_cache_of_prefixes_was_used(features):
    assert features.result["warm"]["cached"] == [32, 32, 32]


def test_the_adapter_s_logprobs_are_not_those_of_the_model_below_it(features):
    found = [logprobs for _, logprobs in recorded(features, FEATURES, "adapter")]
    apart = np.abs(np.concatenate(found) - np.concatenate(features.result["without_adapter"]))
    assert apart.max() > 1e-3


def test_contracts_name_grammars_and_adapters(features):
    found = contracts(features)
    for step, call in enumerate(FEATURES, start=1):
        assert found[step]["structured_outputs"] is (call in GRAMMARS)
        assert found[step]["logprobs_of"].endswith("with the grammar's mask") is (call in GRAMMARS)
        names = [adapter["name"] for adapter in found[step]["adapters"]]
        assert names == (["arithmetic"] if call == "adapter" else [])


def test_the_contract_names_drafts(drafts):
    assert {contract["config"]["speculative_config"]["method"] for contract in contracts(drafts).values()} == {"ngram"}


def test_what_is_not_recorded_of_them_is_said_once(features):
    for sentence in (
        "logprobs over the full vocabulary are not recorded for rollouts with structured outputs",
        "the weights of LoRA adapter arithmetic, used in vLLM's requests, are not recorded",
        "rollouts of LLM.enqueue are not recorded",
    ):
        assert features.done.stderr.count(sentence) == 1
        assert any(sentence in missing for missing in info(str(features.trace)).missing)
