"""Sample from vLLM as a user's script would: it knows nothing of tim-trace."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import tiny


def described(outputs):
    return [
        [
            {
                "index": completion.index,
                "ids": list(completion.token_ids),
                "container": type(completion.logprobs).__name__,
                "cumulative": completion.cumulative_logprob,
                "logprobs": None
                if completion.logprobs is None
                else [
                    {str(token): [entry.logprob, entry.rank, entry.decoded_token] for token, entry in position.items()}
                    for position in completion.logprobs
                ],
            }
            for completion in output.outputs
        ]
        for output in outputs
    ]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--result", required=True)
    arguments = parser.parse_args()
    tiny.save_model(arguments.model)

    from vllm import LLM, SamplingParams

    llm = LLM(model=arguments.model, max_model_len=64, seed=0, enforce_eager=True)
    prompts = [{"prompt_token_ids": [3, 12, 4 + i, 13]} for i in range(4)]
    plain = llm.generate(prompts, SamplingParams(temperature=0.7, max_tokens=5, n=2, seed=1), use_tqdm=False)
    asked = [SamplingParams(temperature=1.0, max_tokens=5, logprobs=i % 3, seed=i) for i in range(4)]
    listed = llm.generate(prompts, asked, use_tqdm=False)
    flat = llm.generate(
        prompts[0], SamplingParams(max_tokens=4, logprobs=2, flat_logprobs=True, top_p=0.9, seed=1), use_tqdm=False
    )

    tiny.finish(arguments.result, plain=described(plain), listed=described(listed), flat=described(flat))


if __name__ == "__main__":
    main()
