"""Compare `stats --like verl` with a bare DuckDB pass and with verl's own function."""

import importlib.util
import sys
import tempfile
from importlib.metadata import distribution
from pathlib import Path
from types import ModuleType

import duckdb
from comparison import Comparison, in_turn, ratios
from peak import Peak, can_reset
from steps import make_step, record
from tim_trace.analysis.stats import stats
from tim_trace.tracer.recorder import Recorder

NUM_STEPS = 20
ROUNDS = 7
LIMIT = "2GB"

BARE = """
SELECT avg(a::DOUBLE - b::DOUBLE)
FROM (
    SELECT unnest(train.logprobs) AS a, unnest(rollout.logprobs) AS b
    FROM scores AS train
    JOIN scores AS rollout USING (step, seq_id)
    WHERE train.pass = 'train' AND rollout.pass = 'rollout'
)
"""
"""The mean of d: a query that only reads and pairs both columns."""


def compare():
    """Time `stats --like verl`, a bare DuckDB pass over both columns, and verl's function, on 20 million tokens."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace")
        steps = [make_step(number) for number in range(1, NUM_STEPS + 1)]
        with Recorder(trace) as recorder:
            for number, step in enumerate(steps, 1):
                record(recorder, number, step)
        verl = _verl()
        functions = {
            "bare": lambda: bare_pass(trace),
            "steps": lambda: stats(trace, by="step", like="verl"),
            "run": lambda: stats(trace, like="verl"),
        }
        if verl is not None:
            functions["verl"] = lambda: [_of_verl(verl, step) for step in steps]
        taken = in_turn(ROUNDS, **functions)
        over = "time over that of a bare pass,"
        yield Comparison(what=f"{over} by step", values=ratios(taken["steps"], taken["bare"]), at_most=4)
        yield Comparison(what=f"{over} by run", values=ratios(taken["run"], taken["bare"]), at_most=4)
        if verl is not None:
            what = "verl's compute_offpolicy_metrics on the same steps, time over that of a bare pass"
            yield Comparison(what=what, values=ratios(taken["verl"], taken["bare"]))
        if can_reset():
            gained = []
            for _ in range(3):
                peak = Peak()
                stats(trace, by="step", like="verl")
                gained.append(peak.gained())
            yield Comparison(what="peak memory of stats --like verl", values=gained, unit=" MB", at_most=2000)


def bare_pass(trace):
    """Read both logprob columns, pair them, and do nothing else."""
    connection = duckdb.connect()
    connection.execute(f"SET memory_limit = '{LIMIT}'")
    connection.execute(f"CREATE VIEW scores AS FROM '{trace}/scores/*.parquet'")
    return connection.execute(BARE).fetchall()


def _of_verl(verl, step):
    held = step.tensors
    return verl.compute_offpolicy_metrics(held["train"], held["rollout"], held["mask"].long())


def _verl():
    """Return verl's module, with stubs for its imports; None if verl is not installed."""
    if importlib.util.find_spec("verl") is None:
        return None
    import torch

    before = dict(sys.modules)

    def stand_in(name, **values):
        module = sys.modules[name] = ModuleType(name)
        module.__path__ = []
        vars(module).update(values)
        return module

    def masked_sum(values, mask, axis=None):
        return (torch.where(mask.bool(), values, 0.0) * mask).sum(axis=axis)

    def masked_mean(values, mask, axis=None):
        return masked_sum(values, mask, axis) / (mask.sum(axis=axis) + 1e-8)

    for name in ("verl", "verl.utils", "verl.trainer", "verl.trainer.config", "verl.workers", "verl.workers.config"):
        stand_in(name)
    sys.modules["verl.utils"].torch_functional = stand_in(
        "verl.utils.torch_functional", masked_sum=masked_sum, masked_mean=masked_mean
    )
    stand_in("verl.protocol", DataProto=object)
    stand_in("verl.trainer.config.algorithm", RolloutCorrectionConfig=dict)
    stand_in("verl.workers.config.actor", PolicyLossConfig=dict)
    path = distribution("verl").locate_file("verl/trainer/ppo/rollout_corr_helper.py")
    spec = importlib.util.spec_from_file_location("rollout_corr_helper", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in set(sys.modules) - set(before):
        if name.split(".")[0] == "verl":
            del sys.modules[name]
    return module
