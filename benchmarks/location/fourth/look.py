"""Hold `tim-trace locate` against the fourth list of planted faults and harmless pairs: which layer and operator it names first.

python benchmarks/location/fourth/look.py [--dtype fp32|bf16] [--sample N] [--only WORD,WORD]

Of each case the longest row (96 tokens) is recorded with the first model's weights, and the second model's code is put into one of two
executions of it. `--sample` takes some cases at random.
"""

import argparse
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
import fourth_faults  # noqa: F401
from fourth_common import CASES
from fourth_models import build
from looking import look


def model_of(case):
    """The first model; what a case does to it concerns its weights alone, which are recorded."""
    model = build(case.architecture)
    if case.a is not None:
        case.a(model)
    return model


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--sample", type=int)
    parser.add_argument("--only", default="")
    asked = parser.parse_args()
    cases = list(CASES)
    random.Random(0).shuffle(cases)
    look(
        [case for case in cases if any(word in case.name for word in asked.only.split(","))][: asked.sample],
        model_of=model_of,
        rows_of=lambda case: case.inputs[-1:],
        operators_of=lambda case: case.fault.operator,
        arms_of=lambda case: (f"dtype={asked.dtype}", f"dtype={asked.dtype}"),
        title=asked.dtype,
    )


if __name__ == "__main__":
    main()
