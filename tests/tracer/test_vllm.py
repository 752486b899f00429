"""Recording a script that calls vLLM by itself."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from runs import program
from tim_trace.analysis.info import info
from tim_trace.analysis.views import connect
from tim_trace.tracer.dense import read_dense
from tim_trace.tracer.hooks.vllm_contract import Conditions, async_contract
from tim_trace.tracer.store import Store

pytestmark = pytest.mark.engine

OWN_PROCESS = (("VLLM_ENABLE_V1_MULTIPROCESSING", "1"),)


def rows(run, query):
    return connect(run.trace).execute(query).fetchall()


SLOW = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize(
    "capture", ["logprobs", pytest.param("topk:3", marks=SLOW), pytest.param("logits", marks=SLOW)]
)
def test_the_script_gets_what_it_would_have_got(capture):
    bare, recorded = program("generate.py"), program("generate.py", capture=capture)
    assert recorded.result == bare.result


@pytest.mark.slow
def test_the_script_gets_what_it_would_have_got_from_an_engine_in_its_own_process():
    bare = program("generate.py", env=OWN_PROCESS)
    recorded = program("generate.py", capture="topk:3", env=OWN_PROCESS)
    assert without_values(recorded.result) == without_values(bare.result)


def without_values(result):
    """Tokens and shapes alone: requests reach such an engine one by one, so which run together differs by the run."""
    return {
        call: [
            [(c["ids"], c["container"], [len(entry) for entry in c["logprobs"] or ()]) for c in output]
            for output in outputs
        ]
        for call, outputs in result.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("env", [(), pytest.param(OWN_PROCESS, marks=SLOW)])
def test_every_completion_is_recorded_with_the_engine_s_logprobs(env):
    run = program("generate.py", capture="topk:3", env=env)
    query = """
        SELECT step, response_ids, logprobs, temperature, top_p, max_tokens, finish_reason
        FROM sequences JOIN scores USING (run, step, seq_id) ORDER BY step, seq_id
    """
    found = rows(run, query)
    calls = [("plain", 0.7, 1.0, 5), ("listed", 1.0, 1.0, 5), ("flat", 1.0, 0.9, 4)]
    for step, (call, temperature, top_p, most) in enumerate(calls, start=1):
        wanted = [completion for output in run.result[call] for completion in output]
        assert [row[1] for row in found if row[0] == step] == [completion["ids"] for completion in wanted]
        for row, completion in zip([row for row in found if row[0] == step], wanted, strict=True):
            assert row[3:6] == (temperature, top_p, most)
            assert row[6] in ("stop", "length")
            if completion["logprobs"] is not None:
                told = [
                    entry[str(token)][0] for token, entry in zip(completion["ids"], completion["logprobs"], strict=True)
                ]
                assert row[2] == told


@pytest.mark.slow
def test_logprobs_that_the_script_did_not_ask_for_are_recorded():
    run = program("generate.py", capture="logprobs")
    assert all(completion["logprobs"] is None for output in run.result["plain"] for completion in output)
    ((count,),) = rows(run, "SELECT count(*) FROM tokens WHERE step = 1 AND rollout_logprob < 0")
    assert count == sum(len(completion["ids"]) for output in run.result["plain"] for completion in output)


@pytest.mark.slow
def test_completions_of_a_prompt_are_a_group():
    run = program("generate.py", capture="logprobs")
    query = (
        "SELECT group_id, count(*), count(DISTINCT prompt_ids) FROM sequences WHERE step = 1 GROUP BY ALL ORDER BY ALL"
    )
    assert rows(run, query) == [(str(prompt), 2, 1) for prompt in range(4)]


@pytest.mark.slow
def test_the_contract_tells_raw_logprobs_from_processed_ones():
    run = program("generate.py", capture="logprobs")
    modes = {json.loads(text)["logprobs_mode"] for (text,) in rows(run, "SELECT contract_json FROM passes")}
    assert modes == {"raw_logprobs"}
    (rollout,) = info(str(run.trace)).passes
    assert (rollout.name, rollout.num_rows, rollout.engine) == ("rollout", 13, "vllm")


@pytest.mark.slow
@pytest.mark.parametrize("env", [(), OWN_PROCESS])
def test_captured_top_k_is_what_the_engine_ranks_first(env):
    run = program("generate.py", capture="topk:3", env=env)
    store = Store(run.trace)
    found = rows(run, "SELECT dense, dense_start, len(logprobs) FROM scores WHERE step = 3")
    (output,) = run.result["flat"]
    (completion,) = output
    ((group, start, tokens),) = found
    arrays = read_dense(store, group, start, tokens)
    for position, entries in enumerate(completion["logprobs"]):
        ranked = {int(token): value for token, (value, rank, _) in entries.items() if rank <= 2}
        for token, value in ranked.items():
            place = arrays["token_ids"][position].tolist().index(token)
            assert arrays["logprobs"][position][place] == np.float32(value)


@pytest.mark.slow
def test_the_whole_vocabulary_sums_to_one():
    run = program("generate.py", capture="logits")
    store = Store(run.trace)
    for group, start, tokens in rows(run, "SELECT dense, dense_start, len(logprobs) FROM scores"):
        values = read_dense(store, group, start, tokens)["logprobs"]
        assert values.shape == (tokens, 15)
        np.testing.assert_allclose(np.exp(values.astype(np.float64)).sum(axis=1), 1.0, atol=1e-5)


def test_a_contract_names_the_gpu_without_starting_cuda(monkeypatch):
    def start(*_):
        raise AssertionError("CUDA was started")

    class NvmlCudaPlatform:
        """As vLLM's, which imports on a GPU alone."""

        def get_device_name(self, device_id=0):
            return f"NVIDIA H200 {device_id}"

    monkeypatch.setattr("vllm.platforms.current_platform", NvmlCudaPlatform())
    for name in ("_lazy_init", "is_available", "device_count", "current_device"):
        monkeypatch.setattr(torch.cuda, name, start)
    config = SimpleNamespace(device_config=SimpleNamespace(device=torch.device("cuda", 1)))
    contract = async_contract(SimpleNamespace(vllm_config=config), SimpleNamespace(), [], Conditions())
    assert contract["device"] == "cuda NVIDIA H200 1"
