"""A look at cases of planted faults and harmless pairs: which layer and operator `tim-trace locate` names first.

A case has a name, an architecture, `make` (changes model B in place), `fault` (with `modules` and the words that are right; None where
it is harmless) and `inputs`, rows of tokens of which the longest comes last.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from replaying import forward_of
from tim_trace.replay.locate.engine import locate
from tim_trace.replay.locate.reference import layer_of
from tim_trace.schemas.errors import TimTraceError
from tim_trace.tracer.recorder import Recorder

PROMPT = 8
KINDS = {
    "embedding": "embedding", "embed_tokens": "embedding", "embed_in": "embedding", "word_embeddings": "embedding",
    "rotary_emb": "rotary", "rotary": "rotary",
    "attention": "attention", "queries": "attention", "keys": "attention", "values": "attention", "residual": "residual",
    "gate": "router", "router": "router", "experts": "experts", "lm_head": "head", "embed_out": "head", "log_softmax": "log_softmax",
    "act_fn": "activation", "act": "activation", "gelu_impl": "activation", "activation_fn": "activation",
}  # fmt: skip
"""What `locate` calls an operator -> its word in the lists."""


def words(kind: str) -> set[str]:
    """The words that an answer may stand for."""
    if kind == "activation":
        return {"gate_up_product", "activation"}
    if kind == "logits":
        return {"logit_scaling", "soft_cap", "log_softmax"}
    if "norm" in kind or kind.startswith("ln"):
        return {"norm"}
    return {KINDS.get(kind, "linear")}


def recorded(folder: Path, model: Any, rows: list[torch.Tensor]) -> Path:
    """A trace of one step of some rows, scored in one forward."""
    config = model.config.to_dict() if hasattr(model.config, "to_dict") else dict(vars(model.config))
    config["experts_implementation"] = "eager"
    attention = getattr(model.config, "_attn_implementation", "eager")
    tokens = [row.numpy() for row in rows]
    responses = [row[PROMPT:] for row in tokens]
    with Recorder(folder) as recorder:
        recorder.describe(model={"class": f"{type(model).__module__}.{type(model).__name__}", "config": config})
        recorder.add_contract(
            "train", {"engine": "a loop", "model": {"dtypes": {"float32": 1}, "attention": attention}}
        )
        recorder.add_weights(0, model.state_dict())
        batch = recorder.add_sequences(
            step=1, prompt_ids=[row[:PROMPT] for row in tokens], response_ids=responses, policy_version=0,
            group_ids=[f"g{number}" for number in range(len(tokens))],
        )  # fmt: skip
        logprobs = [np.full(len(row), -1.0, np.float32) for row in responses]
        recorder.add_scores("train", batch, logprobs=logprobs, forward=forward_of(responses, len(tokens)))
    return folder


def is_right(modules: set[str], operators: set[str], first: Any) -> bool:
    """Whether the planted layer and one of its operators are named, on the second side."""
    layers = {layer_of(module) for module in modules}
    at_layer = first.layer in layers or any({first.layer, each} == {None, 0} for each in layers)
    return at_layer and first.side == "b" and bool(words(first.kind) & operators)


def look(
    cases: Iterable[Any],
    *,
    model_of: Callable[[Any], Any],
    rows_of: Callable[[Any], list[torch.Tensor]],
    operators_of: Callable[[Any], set[str]],
    arms_of: Callable[[Any], tuple[str, str]],
    title: str,
) -> None:
    """Print a line for each case, and how many were right."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    counts: Counter[tuple[str, str]] = Counter()
    for case in cases:
        kind = "healthy" if case.fault is None else "fault"
        arm, against = arms_of(case)
        planted = "" if case.fault is None else f"{sorted(case.fault.modules)} {sorted(operators_of(case))}: "
        with tempfile.TemporaryDirectory() as folder:
            try:
                with torch.no_grad():
                    trace = recorded(Path(folder, "run"), model_of(case), rows_of(case))
                first = locate(
                    trace, arm=arm, against=against, sequences=f"random:{len(rows_of(case))}", patch="none",
                    prepare_against=_quiet(case.make),
                ).first  # fmt: skip
            except TimTraceError as error:
                said, answer = "refused", str(error)
            except Exception as error:  # a row of its own
                said, answer = "traceback", f"{type(error).__name__}: {error}"
            else:
                right = first is None if case.fault is None else (
                    first is not None and is_right(case.fault.modules, operators_of(case), first)
                )  # fmt: skip
                said = "right" if right else "wrong"
                answer = "nothing" if first is None else (
                    f"{first.side} {first.operator} ({first.kind}; {first.why}, {first.ratio:.3g})"
                )  # fmt: skip
        counts[kind, said] += 1
        print(f"{kind:<8} {said:<9} {case.name:<48} {planted if said != 'right' else ''}{answer}", flush=True)
    for kind in ("fault", "healthy"):
        told = ", ".join(f"{counts[kind, said]} {said}" for said in ("right", "wrong", "refused", "traceback"))
        print(f"{title}: {sum(number for (of, _), number in counts.items() if of == kind)} {kind}: {told}")


def _quiet(change: Callable[[Any], Any]) -> Callable[[Any], None]:
    """The change without gradients, whatever it returns."""

    def make(model: Any) -> None:
        with torch.no_grad():
            change(model)

    return make
