"""vLLM as it is: other weights in an engine that runs, what it derives from them, and ways that a release lacks."""

import warnings

import numpy as np
import pytest
import torch
from tim_trace.replay.backends import vllm as module
from tim_trace.replay.backends.vllm import LOGITS_PROCESSOR, TRACE_REPLAY, VllmEngine
from tim_trace.replay.recorded import RecordedRow
from tim_trace.schemas.errors import CannotReplay, TimTraceWarning
from tim_trace.tracer.weights.chunks import bits_type
from tim_trace.tracer.weights.reader import Tensor
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:(?!arm|engine)"),  # vLLM runs in this process, with warnings of its own
]

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
}
ARGUMENTS = {"dtype": "bfloat16", "max_model_len": 64, "enforce_eager": True, "max_num_seqs": 4}


def qwen3():
    shape = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True}
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE, **shape))


def olmo2():
    shape = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return Olmo2ForCausalLM(Olmo2Config(**SHAPE, **shape))


def with_latent_attention():
    """Of DeepSeek's shape, with dense layers alone."""
    shape = {
        "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64,
        "v_head_dim": 32, "qk_nope_head_dim": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 2,
        "moe_intermediate_size": 32, "n_shared_experts": 1,
    }  # fmt: skip
    return DeepseekV2ForCausalLM(DeepseekV2Config(**SHAPE, **shape))


def versions(build, count):
    """A model's config and several versions of its weights."""
    torch.manual_seed(0)
    model, found = build().bfloat16(), []
    for _ in range(count):
        for parameter in model.parameters():
            parameter.data += 0.05 * torch.randn_like(parameter)
        held = {}
        found.append({
            name: held.setdefault(value.data_ptr(), Tensor("bfloat16", value.clone().view(torch.int16).numpy().view(bits_type("bfloat16"))))
            for name, value in model.state_dict().items()
        })  # fmt: skip
    return model.config.to_dict() | {"architectures": [type(model).__name__]}, found


def logprobs(engine, **options):
    ids = np.arange(1, 20, dtype=np.int32)
    row = RecordedRow(
        seq_id="a", prompt_ids=ids[:8], response_ids=ids[8:], logprobs=np.zeros(11, np.float32), scored=np.ones(11, bool),
        policy_version=0, contract="", writer="", forward_id=0, forward_row=0, pad_left=0, pad_right=0,
    )  # fmt: skip
    return engine.score([row], 1.0, None, None, **options)[0].tolist()


def test_other_weights_are_compared_with_what_the_engine_holds(monkeypatch):
    config, (first, second) = versions(qwen3, 2)
    engine = VllmEngine(config, ARGUMENTS, decodes=False, device="cpu")
    engine.put(first)
    began, of_first = engine.llm, logprobs(engine)
    assert engine.not_compared == set()
    with warnings.catch_warnings(action="error", category=TimTraceWarning):
        engine.put(second)
    assert engine.llm is began
    of_second = logprobs(engine)
    assert of_second != of_first
    # A load that leaves one tensor out.
    name = "model.layers.1.mlp.down_proj.weight"
    owner = type(began.apply_model(lambda model: model)[0])
    load = owner.load_weights
    monkeypatch.setattr(
        owner, "load_weights", lambda model, weights: load(model, (one for one in weights if one[0] != name))
    )
    restart = engine._start
    monkeypatch.setattr(engine, "_start", lambda tensors: (monkeypatch.undo(), restart(tensors)))
    began = None
    with pytest.warns(TimTraceWarning, match=rf"{name} did not receive the new weights, so the engine is restarted"):
        engine.put(first)
    assert logprobs(engine) == of_first
    engine.close()


def test_what_latent_attention_derives_from_weights_is_made_again(monkeypatch):
    """In a decode vLLM computes with products of `kv_b_proj` that it makes once it has loaded."""
    monkeypatch.setattr(module, "has_experts", lambda config: False)  # else the engine is restarted on a CPU
    config, (first, second) = versions(with_latent_attention, 2)
    engine = VllmEngine(config, ARGUMENTS, decodes=True, device="cpu")
    engine.put(first)
    of_first = logprobs(engine)
    engine.put(second)
    again = logprobs(engine)
    engine.close()
    fresh = VllmEngine(config, ARGUMENTS, decodes=True, device="cpu")
    fresh.put(second)
    assert logprobs(fresh) == again != of_first
    fresh.close()


def test_where_vllm_has_no_trace_replay_tokens_are_forced_by_a_logits_processor(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    config, (weights,) = versions(qwen3, 1)
    engine = VllmEngine(config, ARGUMENTS, decodes=True, device="cuda")
    assert engine.way == TRACE_REPLAY
    engine.put(weights)
    assert engine.way == (TRACE_REPLAY if torch.cuda.is_available() else LOGITS_PROCESSOR)
    assert len(logprobs(engine)) == 11
    engine.close()


def test_a_preempted_request_is_recomputed_and_goes_on(monkeypatch):
    from vllm.v1.core.sched.scheduler import Scheduler

    config, (weights,) = versions(qwen3, 1)
    engine = VllmEngine(config, ARGUMENTS, decodes=True, device="cpu")
    engine.put(weights)
    plain, preempted = logprobs(engine), []
    preempt = Scheduler._preempt_request
    monkeypatch.setattr(
        Scheduler, "_preempt_request",
        lambda self, request, *rest, **words: (preempted.append(request.num_output_tokens), preempt(self, request, *rest, **words)),
    )  # fmt: skip
    assert logprobs(engine, preempt=3) == pytest.approx(plain, abs=0.05)  # bfloat16 activations
    assert preempted == [3, 6, 9]
    engine.close()


def test_an_argument_that_a_release_does_not_know_is_named():
    config, (weights,) = versions(qwen3, 1)
    engine = VllmEngine(config, ARGUMENTS | {"no_such_argument": 1}, decodes=False, device="cpu")
    with pytest.raises(CannotReplay, match=r"engine vllm rejects this configuration: .*no_such_argument"):
        engine.put(weights)
    engine.close()


def test_the_trainer_s_model_is_built_and_runs_beside_an_engine_that_uses_its_class():
    # vLLM runs Olmo2 with transformers' class, which it decorates in place.
    config, (weights,) = versions(olmo2, 1)
    ids = torch.arange(1, 20)[None]
    before = olmo2()
    expected = before(ids).logits
    engine = VllmEngine(config, ARGUMENTS, decodes=False, device="cpu")
    engine.put(weights)
    first = logprobs(engine)
    after = olmo2()
    after.load_state_dict(before.state_dict())
    assert torch.equal(before(ids).logits, expected)
    assert torch.equal(after(ids).logits, expected)
    engine.close()
    again = VllmEngine(config, ARGUMENTS, decodes=False, device="cpu")
    again.put(weights)
    assert logprobs(again) == first
    again.close()
