"""Planted faults are real: what is written is what the models say, recomputed here by plain transformers."""

import json
import math
from dataclasses import replace

import blind
import blind_faults
import make
import numpy as np
import pytest
import torch
from acts import perform
from builders import ROOT
from heads import Sampling
from score import judge
from splits import SMOKE
from tim_trace.analysis.trace.database import Database
from training import load
from transformers import AutoModelForCausalLM
from writing import write

ROUNDING_NATS = 1e-4
"""How far two float32 forwards of these models may differ."""


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("worlds")
    return {recipe.name: load(recipe, folder) for recipe in SMOKE.recipes}


def planned(worlds, code, index, **scene):
    found, fault, recording, seed = make.planned(SMOKE, worlds, code, index, 0)
    for name, value in scene.items():
        setattr(found, name, value)
    return found, fault, recording, seed


def small(worlds, code, index=0, **scene):
    """A short trace's scene and fault, in float32."""
    return planned(worlds, code, index, **{"num_groups": 2, "group_size": 4, "numerics": "fp32"} | scene)


def logits_of(act, scene, version):
    """[B, T, V] by a plain forward of the plain model."""
    model = AutoModelForCausalLM.from_config(scene.world.config)
    model.load_state_dict(scene.states[version])
    with torch.no_grad():
        whole = torch.cat([act.prompts, act.ids], 1)
        return model.eval()(input_ids=whole).logits[:, act.prompts.shape[1] - 1 : -1].float()


def logprob(logits, ids):
    return logits.log_softmax(-1).gather(-1, ids[..., None])[..., 0]


def d_of(path):
    """Every d that the trace holds, step by step, NaN where a side has no value."""
    rows = (
        Database(path)
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
def test_a_trace_of_every_fault_holds_what_was_computed(worlds, tmp_path, code):
    scene, fault, recording, seed = planned(worlds, code, 0)
    scene.num_steps = min(scene.num_steps, 6 if code == "subset" else 2)
    acts = perform(scene, fault)
    write(tmp_path / "one", scene, fault, acts, recording, "smoke", seed)
    label = json.loads((tmp_path / "one" / "label.json").read_text())
    assert label["code"] == code
    computed = []
    for act in acts:
        d = act.train.double() - act.rollout.double()
        computed.append(d.masked_fill(~(act.train_known & act.rollout_known), torch.nan)[act.tokens])
    np.testing.assert_array_equal(d_of(tmp_path / "one" / "trace"), np.sort(torch.cat(computed).numpy()))


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_planted_temperature_is_a_division_of_the_logits(worlds, index):
    scene, fault, _, _ = small(worlds, "temperature", index, num_steps=1)
    (act,) = perform(scene, fault)
    logits = logits_of(act, scene, act.version)
    one, tempered = logprob(logits, act.ids), logprob(logits / scene.sampling.temperature, act.ids)
    expected = tempered - one if index == 0 else one - tempered
    torch.testing.assert_close((act.train - act.rollout)[act.tokens], expected[act.tokens], atol=ROUNDING_NATS, rtol=0)
    assert (act.train - act.rollout)[act.tokens].abs().max() > 10 * ROUNDING_NATS


def test_planted_truncation_takes_the_logarithm_of_the_kept_mass(worlds):
    scene, fault, _, _ = small(worlds, "truncation", 1, num_steps=1)
    (act,) = perform(scene, fault)
    logits = logits_of(act, scene, act.version) / scene.sampling.temperature
    kept = logits.softmax(-1).topk(scene.sampling.top_k, -1).values.sum(-1).log()
    torch.testing.assert_close((act.train - act.rollout)[act.tokens], kept[act.tokens], atol=ROUNDING_NATS, rtol=0)


def test_planted_stale_weights_are_those_of_an_older_version(worlds):
    scene, fault, _, _ = small(worlds, "stale_weights", 1, num_steps=2)
    for act in perform(scene, fault):
        older, newer = (logits_of(act, scene, act.version - behind) for behind in (2, 0))
        temperature = scene.sampling.temperature
        expected = logprob(newer / temperature, act.ids) - logprob(older / temperature, act.ids)
        d = (act.train - act.rollout)[act.tokens]
        torch.testing.assert_close(d, expected[act.tokens], atol=ROUNDING_NATS, rtol=0)
        assert d.abs().max() > 10 * ROUNDING_NATS


def test_planted_zero_rows_add_one_each_to_the_denominator(worlds):
    scene, fault, _, _ = small(worlds, "padded_vocabulary", 0, num_steps=1, sampling=Sampling())
    (act,) = perform(scene, fault)
    logits = logits_of(act, scene, act.version)
    total = logits.logsumexp(-1)
    expected = torch.logaddexp(total, torch.tensor(math.log(fault.strength["rows"]))) - total
    torch.testing.assert_close((act.train - act.rollout)[act.tokens], expected[act.tokens], atol=ROUNDING_NATS, rtol=0)


def test_an_engine_gives_its_own_tokens_the_same_bits_again(worlds):
    scene, fault, _, _ = small(worlds, "equal", 0, num_steps=1, same_engine=True)
    (act,) = perform(scene, fault)
    assert torch.equal(act.train, act.rollout)
    assert act.rollout[act.tokens].lt(0).any()


def test_healthy_sides_differ_by_rounding_alone(worlds):
    scene, fault, _, _ = small(worlds, "rounding", 0, num_steps=1)
    (act,) = perform(scene, fault)
    d = (act.train - act.rollout)[act.tokens]
    assert 0 < d.abs().max() < ROUNDING_NATS


def test_the_prompt_s_end_counts_when_the_mask_is_off(worlds):
    scene, fault, _, _ = small(worlds, "mask", 2, num_steps=1)
    (act,) = perform(scene, fault)
    tail = scene.prompt_tail
    assert torch.equal(act.affected.sum(1), torch.full((8,), tail))
    assert not act.rollout[:, :tail].any()
    expected = logprob(logits_of(act, scene, act.version) / scene.sampling.temperature, act.ids)
    torch.testing.assert_close(act.train[act.tokens], expected[act.tokens], atol=ROUNDING_NATS, rtol=0)
    torch.testing.assert_close(act.rollout[:, tail:], (act.train * act.tokens)[:, tail:], atol=ROUNDING_NATS, rtol=0)


def test_only_the_sequences_that_carry_a_fault_differ(worlds):
    scene, fault, _, _ = small(worlds, "subset", 0, num_steps=1, num_groups=4)
    (act,) = perform(scene, fault)
    d = (act.train - act.rollout).masked_fill(~act.tokens, 0).abs().amax(1).numpy()
    assert d[~act.carried].max() < ROUNDING_NATS < d[act.carried].max()


def test_the_splits_share_no_world():
    names = [{(r.architecture, r.seed) for r in split.recipes} for split in make.SPLITS.values()]
    assert not names[0] & names[1]
    architectures = [{r.architecture for r in split.recipes} for split in make.SPLITS.values()]
    assert not architectures[0] & architectures[1]


def test_a_judge_reads_a_folder_of_traces(worlds, tmp_path):
    scene, fault, recording, seed = small(worlds, "log_base", 0, num_steps=1)
    write(tmp_path / "one", scene, fault, perform(scene, fault), replace(recording, imported=False), "smoke", seed)
    (verdict,) = judge(tmp_path)
    assert verdict.code == "log_base"
    assert verdict.is_detectable
    assert verdict.found
    assert (ROOT / "benchmarks" / "planted" / "score.py").exists()


def test_the_blind_generator_s_traces_are_judged_by_their_labels(tmp_path):
    everything = {name: rest for name, *rest in blind_faults.everything(1)}
    for number, name in enumerate(("healthy-fp32-both-0", "fault-shift-right", "fault-nan-one", "fault-shuffled")):
        blind_faults.make_one(tmp_path / name, 7 + number, *everything[name])
    verdicts = {verdict.name: verdict for verdict in blind.judge(tmp_path)}
    assert len(verdicts) == 4
    assert all(verdict.is_right for verdict in verdicts.values())
    assert [name for name, verdict in verdicts.items() if verdict.is_healthy] == ["healthy-fp32-both-0"]
    assert "false alarms on healthy traces            0 of 1" in blind.report(
        "seed", list(verdicts.values()), with_errors=True
    )
