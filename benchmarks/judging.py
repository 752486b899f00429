"""Compare `check`, `diagnose`, `dynamics` and `gate` with a bare DuckDB pass over both logprob columns."""

import shutil
import tempfile
from functools import partial
from pathlib import Path

from comparison import Comparison, in_turn, ratios
from likeness import bare_pass
from peak import Peak, can_reset
from steps import make_step, record
from tim_trace.analysis.check.check import check
from tim_trace.analysis.diagnosis.diagnose import diagnose
from tim_trace.analysis.dynamics.dynamics import dynamics
from tim_trace.analysis.gate.gate import gate
from tim_trace.analysis.stats import stats
from tim_trace.tracer.recorder import Recorder

NUM_STEPS = 20
ROUNDS = 7

GATED = {
    "verl": "k3_kl", "trl": "sampling/sampling_logp_difference/mean", "slime": "tis", "nemo-rl": "gen_kl_error",
    "openrlhf": "vllm_kl", "prime-rl": "mismatch_kl/all/mean",
}  # fmt: skip
"""One number per framework; `gate` computes the others along with it."""


def compare():
    """Time `check`, `diagnose`, `dynamics` and `gate` on 20 million tokens, without and with stored sums."""
    with tempfile.TemporaryDirectory() as folder:
        trace, summed = Path(folder, "trace"), Path(folder, "summed")
        with Recorder(trace) as recorder:
            for number in range(1, NUM_STEPS + 1):
                record(recorder, number, make_step(number))
        shutil.copytree(trace, summed)
        stats(summed, by="step")  # keeps its sums
        taken = in_turn(
            ROUNDS,
            bare=lambda: bare_pass(trace),
            check=lambda: check(trace),
            summed=lambda: check(summed),
            diagnose=lambda: diagnose(trace),
            diagnose_summed=lambda: diagnose(summed),
            dynamics=lambda: dynamics(trace),
            dynamics_summed=lambda: dynamics(summed),
            **{f"gate_{name}": partial(gate, trace, fail_on=[f"{name}.{metric}>1"]) for name, metric in GATED.items()},
        )
        over = "time over that of a bare pass,"
        yield Comparison(what=f"{over} check", values=ratios(taken["check"], taken["bare"]), at_most=4)
        yield Comparison(what=f"{over} check with kept sums", values=ratios(taken["summed"], taken["bare"]), at_most=4)
        yield Comparison(what=f"{over} diagnose", values=ratios(taken["diagnose"], taken["bare"]), at_most=4)
        yield Comparison(
            what=f"{over} diagnose with kept sums", values=ratios(taken["diagnose_summed"], taken["bare"]), at_most=4
        )
        yield Comparison(what=f"{over} dynamics", values=ratios(taken["dynamics"], taken["bare"]), at_most=4)
        yield Comparison(
            what=f"{over} dynamics with kept sums", values=ratios(taken["dynamics_summed"], taken["bare"]), at_most=4
        )
        for name in GATED:
            taken_by_gate = ratios(taken[f"gate_{name}"], taken["bare"])
            yield Comparison(what=f"{over} gate on a number of {name}", values=taken_by_gate, at_most=20)
        if can_reset():
            for judge in (diagnose, dynamics):
                gained = []
                for _ in range(3):
                    peak = Peak()
                    judge(trace)
                    gained.append(peak.gained())
                yield Comparison(what=f"peak memory of {judge.__name__}", values=gained, unit=" MB", at_most=2000)
