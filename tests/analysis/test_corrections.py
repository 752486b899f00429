"""Corrections, against NumPy over padded batches, by hand, and against verl's rejection masks."""

import importlib.util
import math
import sys
from importlib.metadata import distribution
from types import ModuleType

import numpy as np
import pytest
import torch
from builders import make_trace, tim_trace
from shared import rest_slow
from tim_trace.analysis.correction import published
from tim_trace.analysis.corrections import corrections
from tim_trace.analysis.query import sql
from tim_trace.schemas.errors import InvalidOption, NothingToCompare, TimTraceWarning
from tim_trace.tracer.recorder import Recorder


def write(path, batches, advantages=True):
    """Batches of (there, mask, rollout, train, advantage), a step each; advantage by row or by token."""
    with Recorder(path) as recorder:
        for step, (there, mask, rollout, train, advantage) in enumerate(batches, 1):
            given = {}
            if advantages:
                by_row = advantage.ndim == 1
                given = {"advantage": advantage} if by_row else {"advantage": cut(advantage, there)}
            batch = recorder.add_sequences(
                step=step,
                prompt_ids=[[1]] * len(there),
                response_ids=[[2] * row.sum() for row in there],
                response_mask=cut(mask, there),
                **given,
            )
            recorder.add_scores("rollout", batch, logprobs=cut(rollout, there))
            recorder.add_scores("train", batch, logprobs=cut(train, there))


def cut(values, there):
    return [row[inside].tolist() for row, inside in zip(values, there, strict=True)]


def random_batch(seed, spread, by_token=False, rows=12, width=10):
    """Inner masks, a row that is masked as a whole, ratios beyond every bound, a NaN and an infinity."""
    draw = np.random.default_rng(seed)
    there = np.arange(width) < draw.integers(2, width + 1, rows)[:, None]
    mask = there & (draw.random(there.shape) > 0.3)
    mask[:3, 0], mask[3] = True, False
    rollout = (-20 - draw.exponential(1.5, there.shape)).astype(np.float32)
    train = (rollout + draw.normal(0, spread, there.shape)).astype(np.float32)
    train[0, 0], rollout[1, 0], train[2, 0] = np.nan, -np.inf, rollout[2, 0] - 30
    advantage = draw.normal(size=there.shape if by_token else rows).astype(np.float32)
    return there, mask, rollout, train, advantage


def expected(batch, rule):
    """What a rule does to one batch, token by token."""
    _, mask, rollout, train, advantage = batch
    with np.errstate(invalid="ignore"):
        d = train.astype(float) - rollout.astype(float)
    counts = mask & np.isfinite(train) & np.isfinite(rollout)
    advantage = np.broadcast_to(advantage if advantage.ndim == 2 else advantage[:, None], mask.shape).astype(float)
    c = np.where(counts, np.clip(np.where(counts, d, 0), -20, 20), 0)
    n, d = counts.sum(1), np.where(counts, d, 0)
    rho, seq_rho = np.exp(c), np.exp(np.clip(d.sum(1), -20, 20))
    mean = c.sum(1) / np.maximum(n, 1)
    k3 = ((rho - 1 - c) * counts).sum(1) / np.maximum(n, 1)
    keep = (c.sum(1) >= rule.sum_low) & (c.sum(1) <= rule.sum_high) & (mean >= rule.mean_low) & (mean <= rule.mean_high)
    keep &= (k3 <= rule.k3_high) & ((c * c / 2).max(1) <= rule.k2_high)
    keep &= np.where(counts, rho, np.inf).min(1) >= rule.token_low
    ratio = {"none": np.ones_like(rho), "token": rho, "sequence": np.broadcast_to(seq_rho[:, None], rho.shape)}[
        rule.level
    ]
    low, high = (rule.low, rule.high) if rule.level != "none" else (0, math.inf)
    importance = np.where(ratio < low, 0, np.where(ratio <= high, ratio, high if rule.truncates else 0))
    weight = importance * keep[:, None]
    is_cut, truncated = counts & (weight == 0), counts & (weight > 0) & (ratio > high)
    rows, total = n > 0, counts.sum()
    one_a_row = weight.max(1)[rows]
    found = {
        "num_sequences": rows.sum(),
        "num_tokens": total,
        "num_nan": (mask & (np.isnan(train) | np.isnan(rollout))).sum(),
        "num_inf": (mask & ~np.isfinite(train - rollout) & ~np.isnan(train) & ~np.isnan(rollout)).sum(),
        "share_tokens_cut": is_cut.sum() / total,
        "share_tokens_truncated": truncated.sum() / total,
        "share_sequences_touched": is_cut.any(1)[rows].mean(),
        "share_sequences_cut": (is_cut.sum(1) == n)[rows].mean(),
        "num_tokens_cut": is_cut.sum(),
        "mean_weight": weight[counts].mean(),
        "ess_token": weight[counts].sum() ** 2 / (total * (weight[counts] ** 2).sum())
        if weight[counts].any()
        else None,
        "mass_cut_token": rho[is_cut].sum() / rho[counts].sum(),
    }
    for name, side in (("positive", advantage > 0), ("negative", advantage < 0)):
        inside, whole = counts & side, (counts & side).any(1)
        found |= {
            f"share_tokens_cut_{name}": is_cut[inside].mean(),
            f"share_tokens_truncated_{name}": truncated[inside].mean(),
            f"share_sequences_cut_{name}": ((is_cut & side).sum(1) == inside.sum(1))[whole].mean(),
            f"advantage_cut_{name}": np.abs(advantage[is_cut & side]).sum(),
            f"share_advantage_cut_{name}": np.abs(advantage[is_cut & side]).sum() / np.abs(advantage[inside]).sum(),
        }
    if rule.level != "none":
        normal = importance[counts] / (importance[counts].mean() + 1e-8)
        found["ess_verl"] = 1 / (normal**2).mean()
    if rule.level != "sequence":
        found |= {"bias_token": np.abs(rho - weight)[counts].mean(), "variance_token": (weight[counts] ** 2).mean()}
    if rule.level != "token":
        found |= {
            "bias_sequence": np.abs(seq_rho[rows] - one_a_row).mean(),
            "variance_sequence": (one_a_row**2).mean(),
            "mass_cut_sequence": seq_rho[rows][one_a_row == 0].sum() / seq_rho[rows].sum(),
        }
    return found


@pytest.mark.parametrize(("seed", "spread"), rest_slow([(0, 0.0005), (1, 0.02), (2, 0.5), (3, 3.0)], 2))
@pytest.mark.parametrize("by_token", [False, True])
def test_every_rule_against_numpy(tmp_path, seed, spread, by_token):
    batches = [random_batch(seed + 10 * step, spread, by_token) for step in range(2)]
    write(tmp_path / "run", batches)
    options = {"token_threshold": 1.3, "sequence_threshold": 3.0, "icepop": (0.9, 1.2), "geometric": (0.99, 1.05)}
    rules = published(**options, veto=0.2)
    texts = {"icepop": "0.9_1.2", "geometric": "0.99_1.05"}
    rows = corrections(tmp_path / "run", by="step", veto=0.2, **options | texts).dicts()
    assert len(rows) == 2 * len(rules)
    for row in rows:
        (rule,) = (rule for rule in rules if rule.name == row["correction"])
        for name, value in expected(batches[row["step"] - 1], rule).items():
            assert row[name] == (None if value is None else pytest.approx(value, rel=1e-9, abs=1e-12)), (
                rule.name,
                name,
            )


@pytest.fixture
def verl(monkeypatch):
    """verl's module of corrections, with stand-ins for what it imports and does not use here."""

    def masked_sum(values, mask, axis=None):
        return (torch.where(mask.bool(), values, 0.0) * mask).sum(axis=axis)

    def masked_mean(values, mask, axis=None):
        return masked_sum(values, mask, axis) / (mask.sum(axis=axis) + 1e-8)

    class DataProto:
        def __init__(self, tensors):
            self.batch = tensors

        @classmethod
        def from_dict(cls, tensors):
            return cls(tensors)

    parts = {
        "verl": {}, "verl.utils": {}, "verl.trainer": {}, "verl.trainer.config": {}, "verl.workers": {},
        "verl.workers.config": {}, "verl.protocol": {"DataProto": DataProto},
        "verl.utils.torch_functional": {"masked_sum": masked_sum, "masked_mean": masked_mean},
        "verl.trainer.config.algorithm": {"RolloutCorrectionConfig": dict},
        "verl.workers.config.actor": {"PolicyLossConfig": dict},
    }  # fmt: skip
    for name, values in parts.items():
        stand_in = ModuleType(name)
        stand_in.__path__ = []
        vars(stand_in).update(values)
        monkeypatch.setitem(sys.modules, name, stand_in)
    sys.modules["verl.utils"].torch_functional = sys.modules["verl.utils.torch_functional"]
    path = distribution("verl").locate_file("verl/trainer/ppo/rollout_corr_helper.py")
    spec = importlib.util.spec_from_file_location("verl_corrections", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PRESETS = {
    "verl/token-is": {"rollout_is": "token"},
    "verl/seq-is": {"rollout_is": "sequence"},
    "verl/token-icepop": {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"},
    "verl/seq-is-rs": {"rollout_is": "sequence", "rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"},
    "verl/geo-rs": {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"},
    "verl/geo-rs-token-tis": {
        "rollout_is": "token",
        "rollout_rs": "seq_mean_k1",
        "rollout_rs_threshold": "0.999_1.001",
    },
    "verl/geo-rs-seq-tis": {
        "rollout_is": "sequence",
        "rollout_rs": "seq_mean_k1",
        "rollout_rs_threshold": "0.999_1.001",
    },
    "verl/k3-rs": {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01},
    "verl/k3-rs-token-tis": {"rollout_is": "token", "rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01},
    "verl/k3-rs-seq-tis": {"rollout_is": "sequence", "rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01},
}
"""Preset -> its options in verl 0.9.0."""


@pytest.mark.parametrize("spread", [0.002, 0.05, 0.7])
def test_the_presets_of_verl_do_what_verl_does(tmp_path, verl, spread):
    draw = np.random.default_rng(4)
    there = np.arange(8) < draw.integers(2, 9, 40)[:, None]
    mask = there & (draw.random(there.shape) > 0.2)
    mask[:, 0] = True
    rollout = (-20 - draw.exponential(1.5, there.shape)).astype(np.float32)
    train = (rollout + draw.normal(0, spread, there.shape)).astype(np.float32)
    write(tmp_path / "run", [(there, mask, rollout, train, draw.normal(size=40))])
    rows = {row["correction"]: row for row in corrections(tmp_path / "run").dicts()}
    assert {name for name in rows if name.startswith("verl/")} == set(PRESETS)
    old, new = torch.tensor(train, dtype=torch.float64), torch.tensor(rollout, dtype=torch.float64)
    for name, options in PRESETS.items():
        weights, kept, logged = verl.compute_rollout_correction_and_rejection_mask(
            old, new, torch.tensor(mask, dtype=torch.int64), rollout_is=options.get("rollout_is"),
            rollout_is_threshold=options.get("rollout_is_threshold", 2.0), rollout_rs=options.get("rollout_rs"),
            rollout_rs_threshold=options.get("rollout_rs_threshold"),
        )  # fmt: skip
        weights = torch.ones_like(old) if weights is None else weights.batch["rollout_is_weights"]
        final = (weights * kept)[torch.tensor(mask)]
        assert rows[name]["num_tokens_cut"] == int((final == 0).sum()), name
        assert rows[name]["mean_weight"] == pytest.approx(float(final.mean()), rel=1e-9)
        if "rollout_is" in options:
            ess = logged["rollout_corr/rollout_is_eff_sample_size"]
            assert rows[name]["ess_verl"] == pytest.approx(ess, rel=1e-6), name


def by_hand(path, **options):
    """Two sequences: ratios 2, 2 with advantage 1, and 1/4, 3 with advantage -2."""
    there = np.ones((2, 2), dtype=bool)
    rollout = np.full((2, 2), -3, dtype=np.float32)
    train = (rollout + np.log([[2, 2], [0.25, 3]])).astype(np.float32)
    write(path, [(there, there, rollout, train, np.array([1.0, -2.0]))])
    return {row["correction"]: row for row in corrections(path, **options).dicts()}


def test_numbers_worked_by_hand(tmp_path):
    rows = by_hand(tmp_path / "run")
    near = pytest.approx
    # Of 2, 2, 0.25 and 3 under C = 2.5 the last becomes 2.5.
    tis = by_hand(tmp_path / "other", token_threshold=2.5)["token-tis"]
    assert tis["share_tokens_truncated"] == 1 / 4
    assert (tis["share_tokens_truncated_positive"], tis["share_tokens_truncated_negative"]) == (0, 1 / 2)
    assert tis["mean_weight"] == near((2 + 2 + 0.25 + 2.5) / 4, rel=1e-6)
    assert tis["ess_token"] == near(6.75**2 / (4 * (4 + 4 + 0.0625 + 6.25)), rel=1e-6)
    assert tis["bias_token"] == near(0.5 / 4, rel=1e-6)
    # Sequence ratios 4 and 0.75 under C = 2: 2 and 0.75.
    seq = rows["sequence-tis"]
    assert seq["share_tokens_truncated"] == 1 / 2
    assert seq["bias_sequence"] == near(2 / 2, rel=1e-6)
    assert seq["variance_sequence"] == near((4 + 0.5625) / 2, rel=1e-6)
    assert seq["ess_sequence"] == near(2.75**2 / (2 * 4.5625), rel=1e-6)
    # The first is thrown out: its advantage of 1 on two tokens, and 4 of 4.75 of the mass.
    mis = rows["sequence-mis"]
    assert (mis["num_sequences_cut"], mis["num_tokens_cut"], mis["advantage_cut_positive"]) == (1, 2, 2.0)
    assert (mis["share_sequences_cut_positive"], mis["share_sequences_cut_negative"]) == (1, 0)
    assert mis["mass_cut_sequence"] == near(4 / 4.75, rel=1e-6)
    # IcePop cuts 0.25 alone.
    assert rows["icepop"]["num_tokens_cut"] == 1
    assert rows["icepop"]["advantage_cut_negative"] == 2.0
    assert rows["none"]["bias_token"] == near((1 + 1 + 0.75 + 2) / 4, rel=1e-6)


@pytest.mark.parametrize("size", [1e-50, 0.1, 1e300])
def test_advantages_of_whole_responses_keep_their_sign_and_size(tmp_path, size):
    # The ratio 6 is cut, whatever the unit of the advantage.
    there, rollout = np.ones((2, 1), bool), np.full((2, 1), -2.0)
    write(tmp_path / "run", [(there, there, rollout, rollout + np.log(6), np.array([size, -size]))])
    rows = {row["correction"]: row for row in corrections(tmp_path / "run", by="run").dicts()}
    assert rows["icepop"]["advantage_cut_positive"] == rows["sequence-mis"]["advantage_cut_negative"] == size


@pytest.mark.parametrize(
    ("mean_ratio", "verl", "nemo"), [(1.0005, True, True), (1.0015, False, True), (0.9985, False, False)]
)
def test_bounds_act_on_the_ratio_that_they_name(tmp_path, mean_ratio, verl, nemo):
    d = np.full((1, 50), math.log(mean_ratio), dtype=np.float32)
    there = np.ones(d.shape, dtype=bool)
    write(tmp_path / "run", [(there, there, np.full_like(d, -1), d - 1, np.ones(1))])
    rows = {row["correction"]: row for row in corrections(tmp_path / "run").dicts()}
    assert (rows["verl/geo-rs"]["num_sequences_cut"] == 0) == verl
    assert (rows["geometric"]["num_sequences_cut"] == 0) == nemo
    assert rows["verl/geo-rs"]["bound_on"] == "rollout/train"
    assert rows["verl/geo-rs"]["kept"] == "0.999001 <= rho_geo <= 1.001001"
    assert rows["geometric"]["bound_on"] == "train/rollout"


def test_an_asymmetric_bound_of_verl_is_turned_around():
    geo = next(rule for rule in published("current", "rollout") if rule.name == "verl/geo-rs-seq-tis")
    assert (geo.mean_low, geo.mean_high) == (-math.log(1.001), -math.log(0.999))
    assert geo.bound_on == "w: current/rollout; cut: rollout/current"


def test_lengths_are_taken_by_quarters(tmp_path):
    lengths = [1, 2, 3, 4, 5, 6, 7, 8]
    with Recorder(tmp_path / "run") as recorder:
        batch = recorder.add_sequences(
            step=1, prompt_ids=[[1]] * 8, response_ids=[[2] * n for n in lengths], advantage=[1.0] * 8
        )
        recorder.add_scores("rollout", batch, logprobs=[[-1.0] * n for n in lengths])
        recorder.add_scores("train", batch, logprobs=[[-0.8] * n for n in lengths])
    rows = [row for row in corrections(tmp_path / "run", by="length").dicts() if row["correction"] == "sequence-mis"]
    assert [(row["shortest"], row["longest"], row["num_sequences"]) for row in rows] == [
        (1, 2, 2), (3, 4, 2), (5, 6, 2), (7, 8, 2),
    ]  # fmt: skip
    # exp(0.2 n) passes 2 at 3.5 tokens.
    assert [row["num_sequences_cut"] for row in rows] == [0, 1, 2, 2]


def test_without_advantages_it_says_which_columns_are_null(tmp_path):
    write(tmp_path / "run", [random_batch(0, 0.5)], advantages=False)
    with pytest.warns(TimTraceWarning, match="no advantages recorded"):
        rows = corrections(tmp_path / "run").dicts()
    assert {row["share_tokens_cut_positive"] for row in rows} == {None}
    assert {row["advantage_cut_negative"] for row in rows} == {None}
    assert all(row["share_tokens_cut"] is not None for row in rows)
    told = tim_trace("corrections", tmp_path / "run", "--json")
    assert told.code == 0
    assert told.stderr.startswith("tim-trace: no advantages recorded")


def test_nothing_finite_is_counted(tmp_path):
    there = np.ones((1, 2), dtype=bool)
    nan = np.full((1, 2), np.nan, dtype=np.float32)
    write(tmp_path / "run", [(there, there, nan, nan, np.ones(1))])
    (row, *_) = corrections(tmp_path / "run").dicts()
    assert (row["num_tokens"], row["num_nan"], row["num_sequences"], row["share_tokens_cut"]) == (0, 2, 0, None)


def test_what_cannot_be_is_refused(tmp_path):
    make_trace(tmp_path / "one", passes=("rollout",))
    with pytest.raises(NothingToCompare, match="no logprobs from pass 'train'"):
        corrections(tmp_path / "one")
    for wrong in ({"icepop": "5"}, {"geometric": "2_1"}, {"token_threshold": 0.0}, {"veto": -1.0}, {"by": "moon"}):
        with pytest.raises(InvalidOption, match=next(iter(wrong)).replace("_", "-")):
            corrections(tmp_path / "one", **wrong)


def test_sql_has_them_at_the_published_thresholds(tmp_path):
    make_trace(tmp_path / "run")
    asked = sql(tmp_path / "run", "FROM correction_runs('train', 'rollout')")
    found = corrections(tmp_path / "run")
    assert asked.columns == found.columns
    # Several threads add in another order.
    for one, other in zip(asked.dicts(), found.dicts(), strict=True):
        assert one == {name: near(value) for name, value in other.items()}


def near(value):
    return pytest.approx(value, rel=1e-12) if isinstance(value, float) else value


def test_a_bound_of_one_parts_sequences(tmp_path):
    # ln 1 is 0: d of 0.1 lies within [1, 1.2], d of -0.1 below.
    there = np.ones((2, 3), dtype=bool)
    rollout = np.full((2, 3), -2, dtype=np.float32)
    train = rollout + np.array([[0.1], [-0.1]], dtype=np.float32)
    write(tmp_path / "run", [(there, there, rollout, train, np.ones(2))])
    rows = {row["correction"]: row for row in corrections(tmp_path / "run", geometric="1_1.2").dicts()}
    assert rows["geometric"]["num_sequences_cut"] == 1
    assert rows["geometric"]["mass_cut_sequence"] == pytest.approx(
        math.exp(-0.3) / (math.exp(-0.3) + math.exp(0.3)), rel=1e-6
    )
