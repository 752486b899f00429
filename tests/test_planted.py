"""Planted faults are real: what is written is what the models say, recomputed here by plain transformers."""

import json
import math
from dataclasses import replace

import make
import numpy as np
import pytest
import torch
from builders import ROOT
from heads import Sampling
from score import judge
from simulation import simulate
from splits import SMOKE
from tim_trace.analysis.views import open_database
from training import load
from transformers import AutoModelForCausalLM
from writing import write

pytestmark = pytest.mark.slow

ROUNDING_NATS = 1e-4
"""How far two float32 forwards of these models may differ."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("models")
    return {recipe.name: load(recipe, folder) for recipe in SMOKE.recipes}


def planned(models, code, index, **scenario):
    found, fault, recording, seed = make.planned(SMOKE, models, code, index, 0)
    for name, value in scenario.items():
        setattr(found, name, value)
    return found, fault, recording, seed


def small(models, code, index=0, **scenario):
    """A short trace's scenario and fault, in float32."""
    return planned(models, code, index, **{"num_groups": 2, "group_size": 4, "numerics": "fp32"} | scenario)


def logits_of(step, scenario, version):
    """[B, T, V] by a plain forward of the plain model."""
    model = AutoModelForCausalLM.from_config(scenario.model.config)
    model.load_state_dict(scenario.states[version])
    with torch.no_grad():
        whole = torch.cat([step.prompts, step.ids], 1)
        return model.eval()(input_ids=whole).logits[:, step.prompts.shape[1] - 1 : -1].float()


def logprob(logits, ids):
    return logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]


def d_of(path):
    """Every d that the trace holds, step by step, NaN where a side has no value."""
    rows = (
        open_database(path)
        .connection.execute(
            """
        SELECT s.step, t.logprobs AS train, r.logprobs AS rollout FROM sequences s
        JOIN scores t ON t.step = s.step AND t.seq_id = s.seq_id AND t.pass = 'train'
        JOIN scores r ON r.step = s.step AND r.seq_id = s.seq_id AND r.pass = 'rollout'
        """
        )
        .fetchall()
    )
    values = [np.array(t, np.float64) - np.array(r, np.float64) for _, t, r in rows]
    return np.sort(np.concatenate(values))


@pytest.mark.parametrize("code", make.FAULTS)
def test_a_trace_of_every_fault_holds_what_was_computed(models, tmp_path, code):
    scenario, fault, recording, seed = planned(models, code, 0)
    scenario.num_steps = min(scenario.num_steps, 6 if code == "subset" else 2)
    steps = simulate(scenario, fault)
    write(tmp_path / "one", scenario, fault, steps, recording, "smoke", seed)
    label = json.loads((tmp_path / "one" / "label.json").read_text())
    assert label["code"] == code
    computed = []
    for step in steps:
        d = step.train.double() - step.rollout.double()
        computed.append(d.masked_fill(~(step.train_known & step.rollout_known), torch.nan)[step.tokens])
    np.testing.assert_array_equal(d_of(tmp_path / "one" / "trace"), np.sort(torch.cat(computed).numpy()))


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_planted_temperature_is_a_division_of_the_logits(models, index):
    scenario, fault, _, _ = small(models, "temperature", index, num_steps=1)
    (step,) = simulate(scenario, fault)
    logits = logits_of(step, scenario, step.version)
    one, tempered = logprob(logits, step.ids), logprob(logits / scenario.sampling.temperature, step.ids)
    expected = tempered - one if index == 0 else one - tempered
    torch.testing.assert_close(
        (step.train - step.rollout)[step.tokens], expected[step.tokens], atol=ROUNDING_NATS, rtol=0
    )
    assert (step.train - step.rollout)[step.tokens].abs().max() > 10 * ROUNDING_NATS


def test_planted_truncation_takes_the_logarithm_of_the_kept_mass(models):
    scenario, fault, _, _ = small(models, "truncation", 1, num_steps=1)
    (step,) = simulate(scenario, fault)
    logits = logits_of(step, scenario, step.version) / scenario.sampling.temperature
    kept = logits.softmax(-1).topk(scenario.sampling.top_k, -1).values.sum(-1).log()
    torch.testing.assert_close((step.train - step.rollout)[step.tokens], kept[step.tokens], atol=ROUNDING_NATS, rtol=0)


def test_planted_stale_weights_are_those_of_an_older_version(models):
    scenario, fault, _, _ = small(models, "stale_weights", 1, num_steps=2)
    for step in simulate(scenario, fault):
        older, newer = (logits_of(step, scenario, step.version - behind) for behind in (2, 0))
        temperature = scenario.sampling.temperature
        expected = logprob(newer / temperature, step.ids) - logprob(older / temperature, step.ids)
        d = (step.train - step.rollout)[step.tokens]
        torch.testing.assert_close(d, expected[step.tokens], atol=ROUNDING_NATS, rtol=0)
        assert d.abs().max() > 10 * ROUNDING_NATS


def test_planted_zero_rows_add_one_each_to_the_denominator(models):
    scenario, fault, _, _ = small(models, "padded_vocabulary", 0, num_steps=1, sampling=Sampling())
    (step,) = simulate(scenario, fault)
    logits = logits_of(step, scenario, step.version)
    total = logits.logsumexp(-1)
    expected = torch.logaddexp(total, torch.tensor(math.log(fault.strength["rows"]))) - total
    torch.testing.assert_close(
        (step.train - step.rollout)[step.tokens], expected[step.tokens], atol=ROUNDING_NATS, rtol=0
    )


def test_an_engine_gives_its_own_tokens_the_same_bits_again(models):
    scenario, fault, _, _ = small(models, "equal", 0, num_steps=1, same_engine=True)
    (step,) = simulate(scenario, fault)
    assert torch.equal(step.train, step.rollout)
    assert step.rollout[step.tokens].lt(0).any()


def test_healthy_sides_differ_by_rounding_alone(models):
    scenario, fault, _, _ = small(models, "rounding", 0, num_steps=1)
    (step,) = simulate(scenario, fault)
    d = (step.train - step.rollout)[step.tokens]
    assert 0 < d.abs().max() < ROUNDING_NATS


def test_the_prompt_s_end_counts_when_the_mask_is_off(models):
    scenario, fault, _, _ = small(models, "mask", 2, num_steps=1)
    (step,) = simulate(scenario, fault)
    tail = scenario.prompt_tail
    assert torch.equal(step.affected.sum(1), torch.full((8,), tail))
    assert not step.rollout[:, :tail].any()
    expected = logprob(logits_of(step, scenario, step.version) / scenario.sampling.temperature, step.ids)
    torch.testing.assert_close(step.train[step.tokens], expected[step.tokens], atol=ROUNDING_NATS, rtol=0)
    torch.testing.assert_close(step.rollout[:, tail:], (step.train * step.tokens)[:, tail:], atol=ROUNDING_NATS, rtol=0)


def test_only_the_sequences_that_carry_a_fault_differ(models):
    scenario, fault, _, _ = small(models, "subset", 0, num_steps=1, num_groups=4)
    (step,) = simulate(scenario, fault)
    d = (step.train - step.rollout).masked_fill(~step.tokens, 0).abs().amax(1).numpy()
    assert d[~step.carried].max() < ROUNDING_NATS < d[step.carried].max()


def test_the_splits_share_no_world():
    names = [{(r.architecture, r.seed) for r in split.recipes} for split in make.SPLITS.values()]
    assert not names[0] & names[1]
    architectures = [{r.architecture for r in split.recipes} for split in make.SPLITS.values()]
    assert not architectures[0] & architectures[1]


def test_a_judge_reads_a_folder_of_traces(models, tmp_path):
    scenario, fault, recording, seed = small(models, "log_base", 0, num_steps=1)
    write(
        tmp_path / "one", scenario, fault, simulate(scenario, fault), replace(recording, imported=False), "smoke", seed
    )
    (verdict,) = judge(tmp_path)
    assert verdict.code == "log_base"
    assert verdict.is_detectable
    assert verdict.found
    assert (ROOT / "benchmarks" / "planted" / "score.py").exists()
