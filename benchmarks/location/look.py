"""Score `tim-trace locate` on planted code faults and harmless pairs: which layer and operator it names first.

python benchmarks/location/look.py [--bf16 | --arms | --reproduce DIR] [--only WORD,WORD]

For each case, the longest row is recorded (all rows in one forward if its arms differ in batches or padding) with the
first model's weights; the second model's code runs in the second of the case's two arms. `--bf16` tests only the
faults, with bfloat16 instead of float32 on both sides. `--arms` tests every architecture with every pair of arms that
the list's harmless cases name, and changes no code. `--reproduce` writes a script for each fault into DIR, with
float32 on both sides, and counts the scripts that show their fault in a fresh process.
"""

import argparse
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from faults import ARCHITECTURES, CASES, Case, build
from recording import recorded
from tim_trace.replay.locate.engine import locate
from tim_trace.replay.locate.names import layer_of
from tim_trace.replay.recorded import RecordedRun
from tim_trace.replay.reproduce.engine import reproduced
from tim_trace.schemas.errors import TimTraceError

PROMPT = 8
KINDS = {
    "embedding": "embedding", "embed_tokens": "embedding", "embed_in": "embedding", "word_embeddings": "embedding",
    "rotary_emb": "rotary", "rotary": "rotary",
    "attention": "attention", "queries": "attention", "keys": "attention", "values": "attention", "residual": "residual",
    "gate": "router", "router": "router", "experts": "experts", "lm_head": "head", "embed_out": "head", "log_softmax": "log_softmax",
    "act_fn": "activation", "act": "activation", "gelu_impl": "activation", "activation_fn": "activation",
}  # fmt: skip
"""The list's word for each operator name of `locate`."""


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--arms", action="store_true")
    parser.add_argument("--reproduce", metavar="DIR", type=Path)
    parser.add_argument("--only", default="")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    counts = Counter()
    for case in every_pair_of_arms() if asked.arms else CASES:
        if ((asked.bf16 or asked.reproduce) and case.fault is None) or not any(
            word in case.name for word in asked.only.split(",")
        ):
            continue
        arms = case.arm_a, case.arm_b
        if asked.bf16:
            arms = tuple(arm.replace("dtype=fp32", "dtype=bf16") for arm in arms)
        if asked.reproduce:
            arms = ("dtype=fp32", "dtype=fp32")
        kind, planted = "healthy", ""
        if case.fault is not None:
            kind, planted = "fault", f"{sorted(case.fault.modules)} {sorted(case.fault.operators)}: "
        outcome, answer = look(case, *arms, asked.reproduce)
        counts[kind, outcome] += 1
        print(f"{kind:<8} {outcome:<9} {case.name:<48} {planted if outcome != 'right' else ''}{answer}", flush=True)
    title = "bf16" if asked.bf16 else "arms alone" if asked.arms else "arms of the cases"
    for kind in ("fault", "healthy"):
        by_outcome = ", ".join(
            f"{counts[kind, name]} {name}" for name in ("right", "wrong", "refused", "traceback", "script")
        )
        print(f"{title}: {sum(number for (of, _), number in counts.items() if of == kind)} {kind}: {by_outcome}")


def every_pair_of_arms():
    """Return every architecture with every pair of arms, by name."""
    pairs = dict.fromkeys((case.arm_a, case.arm_b) for case in CASES if case.fault is None and case.arm_a != case.arm_b)
    inputs = {case.architecture: case.inputs for case in CASES}
    return [
        Case(
            name=f"{architecture} {a} {b}", architecture=architecture, make=lambda model: None, fault=None,
            inputs=inputs[architecture], arm_a=a, arm_b=b,
        )
        for a, b in pairs
        for architecture in ARCHITECTURES
    ]  # fmt: skip


def look(case, arm, against, scripts=None):
    """Locate one case, and return the outcome and the answer in words. With a folder, write a script there, too."""
    are_batches = any(word in f"{case.arm_a},{case.arm_b}" for word in ("padding", "batch"))
    rows = [row.numpy() for row in case.inputs[-(len(case.inputs) if are_batches else 1) :]]

    def plant(model):
        with torch.no_grad():
            case.make(model)

    with tempfile.TemporaryDirectory() as folder:
        try:
            prompts, responses = zip(*((row[:PROMPT], row[PROMPT:]) for row in rows), strict=True)
            with torch.no_grad():
                trace = recorded(Path(folder, "run"), build(case.architecture), prompts, responses, len(rows))
            executions = {}
            found = locate(
                trace, arm=arm, against=against, sequences=f"random:{len(rows)}", patch="none", prepare_against=plant,
                executions=executions,
            )  # fmt: skip
            first = found.first
            if scripts is not None and first is not None:
                scripts.mkdir(exist_ok=True)
                made = reproduced(RecordedRun(trace), found, executions, scripts / f"{case.name}.py")
                return "script", f"{made.num_lines} lines, {made.num_bytes} bytes, {made.duration_s:.1f} s"
        except TimTraceError as error:
            return "refused", str(error)
        except Exception as error:  # a row of its own
            return "traceback", f"{type(error).__name__}: {error}"
    right = first is None if case.fault is None else first is not None and is_right(case.fault, first)
    answer = (
        "nothing" if first is None else f"{first.side} {first.operator} ({first.kind}; {first.why}, {first.ratio:.3g})"
    )
    return "right" if right else "wrong", answer


def is_right(fault, first):
    """Return True if the planted layer and one of its operators are named, on the second side."""
    layers = {layer_of(module) for module in fault.modules}
    at_layer = first.layer in layers or any({first.layer, each} == {None, 0} for each in layers)
    return at_layer and first.side == "b" and bool(words(first.kind) & set(fault.operators))


def words(kind):
    """Return the words of the list that match an answer."""
    if kind == "activation":
        return {"gate_up_product", "activation"}
    if kind == "logits":
        return {"logit_scaling", "soft_cap", "log_softmax"}
    if "norm" in kind or kind.startswith("ln"):
        return {"norm"}
    return {KINDS.get(kind, "linear")}


if __name__ == "__main__":
    main()
