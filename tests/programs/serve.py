"""Sample from vLLM's asynchronous engine as a user's script would: it knows nothing of tim-trace."""

import argparse
import asyncio
import contextlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import tiny
from generate import described


def prompt(number):
    return {"prompt_token_ids": [3, 12, 4 + number, 13]}


async def streamed(engine, params, request_id, number, stop_after=None):
    """Every output of a request, as far as it is wanted."""
    found = []
    async with contextlib.aclosing(engine.generate(prompt(number), params, request_id)) as outputs:
        async for output in outputs:
            found.append(described([output])[0])
            if len(found) == stop_after:
                break
    return found


async def aborted(engine, params, request_id):
    """The only output of a request that the engine is told to abort."""

    async def abort():
        while not engine.output_processor.external_req_ids.get(request_id):
            await asyncio.sleep(0)
        await engine.abort(request_id)

    told = asyncio.create_task(abort())
    found = await streamed(engine, params, request_id, 0)
    await told
    return found


async def serve(engine):
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import RequestOutputKind

    async def wave(**settings):
        # One after the other: which requests run together decides the last bits of a logprob.
        names = {"CUMULATIVE": "all", "DELTA": "new", "FINAL_ONLY": "last"}
        return {
            kind: await streamed(
                engine,
                SamplingParams(max_tokens=5, seed=1, output_kind=RequestOutputKind[kind], **settings),
                name,
                number,
            )
            for number, (kind, name) in enumerate(names.items())
        }

    result = {
        "plain": await wave(temperature=0.7),
        "two": await wave(n=2),
        "asked": await wave(logprobs=1),
        "flat": await wave(logprobs=2, flat_logprobs=True, top_p=0.9),
    }
    together = SamplingParams(max_tokens=4, seed=1, output_kind=RequestOutputKind.FINAL_ONLY)
    result["together"] = await asyncio.gather(*(streamed(engine, together, "same", number) for number in range(4)))
    delta = SamplingParams(max_tokens=40, seed=1, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    result["left"] = await streamed(engine, delta, "left", 0, stop_after=2)
    last = SamplingParams(max_tokens=40, seed=1, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)
    result["aborted"] = await aborted(engine, last, "aborted")
    waiting = asyncio.create_task(streamed(engine, last, "cancelled", 1))
    while not engine.output_processor.external_req_ids.get("cancelled"):
        await asyncio.sleep(0)
    waiting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting
    try:
        await anext(engine.generate({"prompt_token_ids": [3] * 100}, delta, "refused"))
    except VLLMValidationError as error:
        result["refused"] = str(error)
    try:
        engine.generate(prompt(0))
    except TypeError as error:
        result["wrong_call"] = str(error)
    return result


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--result", required=True)
    arguments = parser.parse_args()
    tiny.save_model(arguments.model)

    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    async def run():
        # float32 runs on every CPU.
        settings = AsyncEngineArgs(model=arguments.model, max_model_len=64, seed=0, enforce_eager=True, dtype="float32")
        engine = AsyncLLM.from_engine_args(settings)
        try:
            return await serve(engine)
        finally:
            engine.shutdown()

    tiny.finish(arguments.result, **asyncio.run(run()))


if __name__ == "__main__":
    main()
