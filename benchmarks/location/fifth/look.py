"""Hold `tim-trace locate` against the fifth list of planted faults and harmless pairs: which layer and operator it names first.

python benchmarks/location/fifth/look.py [--bf16 | --arms] [--only WORD,WORD]

Of each case the longest row is recorded, or all rows in one forward where its arms differ in batches or padding, with the first model's
weights; the second model's code is put into the second of the two arms that the case names. `--bf16` looks at the faults alone, with
bfloat16 on both sides in the place of float32. `--arms` looks at every architecture with every pair of arms that the list's harmless
cases name, and changes no code.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from fifth_list import ARCHITECTURES, CASES, Case, build
from looking import look


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--arms", action="store_true")
    parser.add_argument("--only", default="")
    asked = parser.parse_args()

    def arms_of(case):
        arms = case.arm_a, case.arm_b
        return tuple(arm.replace("dtype=fp32", "dtype=bf16") for arm in arms) if asked.bf16 else arms

    look(
        [
            case
            for case in (_of_arms() if asked.arms else CASES)
            if any(word in case.name for word in asked.only.split(",")) and not (asked.bf16 and case.fault is None)
        ],
        model_of=lambda case: build(case.architecture),
        rows_of=lambda case: case.inputs[-_num_rows(case) :],
        operators_of=lambda case: case.fault.operators,
        arms_of=arms_of,
        title="bf16" if asked.bf16 else "arms alone" if asked.arms else "arms of the cases",
    )


def _of_arms():
    """Every architecture with every pair of arms, by name."""
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


def _num_rows(case):
    are_batches = any(word in f"{case.arm_a},{case.arm_b}" for word in ("padding", "batch"))
    return len(case.inputs) if are_batches else 1


if __name__ == "__main__":
    main()
