"""Sample from vLLM with a cache of prefixes, grammars and an adapter, or with drafts, and score what came by transformers."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import tiny
import torch
from generate import described
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

PROMPTS = [{"prompt_token_ids": [3, 12, 4, 13] * 10 + [2 + number]} for number in range(3)]


def scored(model, outputs):
    """The logprob of each sampled token over the whole vocabulary."""
    with torch.no_grad():
        return [
            model(torch.tensor([[*output.prompt_token_ids, *completion.token_ids]]))
            .logits[0, len(output.prompt_token_ids) - 1 : -1]
            .log_softmax(-1)
            .gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
            .tolist()
            for output in outputs
            for completion in output.outputs
        ]


def plain(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def adapted(folder):
    return PeftModel.from_pretrained(plain(folder), f"{folder}-adapter")


def calls(engine, arguments):
    """Name, model, and what `LLM.generate` is called with."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import StructuredOutputsParams

    model = plain(arguments.model)
    if arguments.speculative:
        settings = {"max_tokens": 12, "ignore_eos": True, "temperature": 0.0}
        yield "drafts", model, (PROMPTS, SamplingParams(**settings)), {}
        yield "drafts_asked", model, (PROMPTS, SamplingParams(logprobs=2, **settings)), {}
        yield "drafts_stopped", model, (PROMPTS, SamplingParams(stop=["22"], **settings)), {}
        return
    twice = SamplingParams(max_tokens=6, n=2, seed=1)
    yield "cold", model, (PROMPTS, twice), {}
    yield "warm", model, (PROMPTS, twice), {}
    for name, grammar in {
        "regex": {"regex": "[0-9]{3}"},
        "choice": {"choice": ["12", "345"]},
        "json": {"json": {"type": "integer"}},
    }.items():
        params = SamplingParams(max_tokens=6, n=2, seed=2, structured_outputs=StructuredOutputsParams(**grammar))
        yield name, model, (PROMPTS, params), {}
    adapter = LoRARequest("arithmetic", 1, f"{arguments.model}-adapter")
    yield "adapter", adapted(arguments.model), (PROMPTS, twice), {"lora_request": adapter}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--speculative", action="store_true")
    parser.add_argument("--model", required=True)
    parser.add_argument("--result", required=True)
    arguments = parser.parse_args()
    tiny.save_model(arguments.model)
    torch.manual_seed(1)
    config = LoraConfig(r=8, lora_alpha=64, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    get_peft_model(plain(arguments.model), config).save_pretrained(f"{arguments.model}-adapter")

    from vllm import LLM

    settings = {
        "model": arguments.model,
        "max_model_len": 64,
        "enforce_eager": True,
        "dtype": "float32",
        "block_size": 32,
    }
    if arguments.speculative:
        lookup = {"num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
        engine = LLM(**settings, speculative_config={"method": "ngram"} | lookup, disable_log_stats=False)
    else:
        engine = LLM(**settings, enable_prefix_caching=True, enable_lora=True, max_lora_rank=8)
    result = {}
    for name, model, given, options in calls(engine, arguments):
        outputs = engine.generate(*given, **options, use_tqdm=False)
        result[name] = {
            "outputs": described(outputs),
            "cached": [output.num_cached_tokens for output in outputs],
            "scored": scored(model, outputs),
        }
    if arguments.speculative:
        values = {metric.name: getattr(metric, "value", None) for metric in engine.get_metrics()}
        result["num_accepted"] = values["vllm:spec_decode_num_accepted_tokens"]
    else:
        result["without_adapter"] = scored(plain(arguments.model), outputs)
        result["queued"] = len(engine.enqueue(PROMPTS[:1], use_tqdm=False))
        engine.wait_for_completion(use_tqdm=False)
    tiny.finish(arguments.result, **result)


if __name__ == "__main__":
    main()
