"""Hold `tim-trace locate` against the fourth list of planted faults and harmless pairs: which layer and operator it names first.

python benchmarks/location/fourth/look.py [--dtype fp32|bf16] [--sample N] [--only WORD]

Cases of models that are not transformers' are refused, and counted so. Of each case the longest row (96 tokens) is recorded with the
first model's weights, and the second model's code is put into one of two executions of it. `--sample` takes some cases at random.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))
import fourth_faults  # noqa: F401
from fourth_common import CASES
from fourth_models import build
from replaying import forward_of
from tim_trace.replay.locate.engine import locate
from tim_trace.replay.locate.reference import layer_of
from tim_trace.schemas.errors import TimTraceError
from tim_trace.tracer.recorder import Recorder

PROMPT = 8
KINDS = {
    "embed_tokens": "embedding", "embed_in": "embedding", "word_embeddings": "embedding", "rotary_emb": "rotary", "rotary": "rotary",
    "attention": "attention", "queries": "attention", "keys": "attention", "values": "attention", "residual": "residual",
    "gate": "router", "router": "router", "experts": "experts", "lm_head": "head", "embed_out": "head", "log_softmax": "log_softmax",
    "act_fn": "activation", "act": "activation", "gelu_impl": "activation",
}  # fmt: skip
"""What `locate` calls an operator -> its word in the list."""


def words(kind):
    """The words that an answer may stand for."""
    if kind == "activation":
        return {"gate_up_product", "activation"}
    if kind == "logits":
        return {"logit_scaling", "soft_cap", "log_softmax"}
    if "norm" in kind or kind.startswith("ln"):
        return {"norm"}
    return {KINDS.get(kind, "linear")}


def recorded(folder, case):
    """A trace of one step of one row."""
    with torch.no_grad():
        model = build(case.architecture)
        if case.a is not None:
            case.a(model)
    ids = case.inputs[-1].numpy()
    config = model.config.to_dict() if hasattr(model.config, "to_dict") else dict(vars(model.config))
    config["experts_implementation"] = "eager"
    attention = getattr(model.config, "_attn_implementation", "eager")
    with Recorder(folder) as recorder:
        recorder.describe(model={"class": f"{type(model).__module__}.{type(model).__name__}", "config": config})
        recorder.add_contract(
            "train", {"engine": "a loop", "model": {"dtypes": {"float32": 1}, "attention": attention}}
        )
        recorder.add_weights(0, model.state_dict())
        responses = [ids[PROMPT:]]
        batch = recorder.add_sequences(
            step=1, prompt_ids=[ids[:PROMPT]], response_ids=responses, policy_version=0, group_ids=["g0"]
        )
        logprobs = [np.full(len(row), -1.0, np.float32) for row in responses]
        recorder.add_scores("train", batch, logprobs=logprobs, forward=forward_of(responses, 1))
    return folder


def quiet(change):
    return None if change is None else torch.no_grad()(lambda model: (change(model), None)[1])


def is_right(case, first):
    """Whether the planted layer and one of its operators are named, on the second side."""
    layers = {layer_of(module) for module in case.fault.modules}
    at_layer = first.layer in layers or any({first.layer, each} == {None, 0} for each in layers)
    return at_layer and first.side == "b" and bool(words(first.kind) & case.fault.operator)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--sample", type=int)
    parser.add_argument("--only", default="")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    cases = [case for case in CASES if asked.only in case.name]
    random.Random(0).shuffle(cases)
    counts, arm = Counter(), f"dtype={asked.dtype}"
    for case in cases[: asked.sample]:
        kind = "healthy" if case.fault is None else "fault"
        counts[kind] += 1
        with tempfile.TemporaryDirectory() as folder:
            try:
                first = locate(
                    recorded(Path(folder, "run"), case), arm=arm, against=arm, sequences="random:1", patch="none",
                    prepare=quiet(case.a), prepare_against=quiet(case.make),
                ).first  # fmt: skip
            except TimTraceError as error:
                said = "refused"
                print(f"{case.name:<44} refused: {error}", flush=True)
            except Exception as error:  # a row of its own
                said = "traceback"
                print(f"{case.name:<44} {type(error).__name__}: {error}", flush=True)
            else:
                right = first is None if case.fault is None else first is not None and is_right(case, first)
                said = "right" if right else "wrong"
                if not right:
                    print(
                        f"{case.name:<44} {case.fault and (case.fault.modules, case.fault.operator)}: {first}",
                        flush=True,
                    )
        counts[kind, said] += 1
    for kind in ("fault", "healthy"):
        told = ", ".join(f"{counts[kind, said]} {said}" for said in ("right", "wrong", "refused", "traceback"))
        print(f"{asked.dtype}: {counts[kind]} {kind}: {told}")


if __name__ == "__main__":
    main()
