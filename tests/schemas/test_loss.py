"""The loss of a run, from what was recorded of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tim_trace.schemas.errors import InvalidOption, InvalidRecord
from tim_trace.schemas.loss import AGGREGATIONS, CORRECTIONS, DENOMINATORS, KINDS, LEVELS, Loss, parse_loss, read_loss

GRPO = {
    "loss_type": "dapo",
    "importance_sampling_level": "token",
    "epsilon": 0.2,
    "epsilon_high": "None",
    "delta": "None",
    "beta": 0.0,
    "use_vllm": 1.0,
    "vllm_importance_sampling_correction": 1.0,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0,
    "vllm_importance_sampling_clip_min": "None",
    "max_completion_length": 64.0,
}


@given(
    kind=st.sampled_from(KINDS),
    level=st.sampled_from(LEVELS),
    denominator=st.sampled_from(DENOMINATORS),
    aggregation=st.sampled_from(AGGREGATIONS),
    correction=st.sampled_from(CORRECTIONS),
    clip_hard=st.none() | st.floats(1.0, 10.0),
    max_tokens=st.none() | st.integers(1, 10_000),
    kl_weighted=st.booleans(),
    kl_level=st.none() | st.sampled_from(LEVELS),
    sapo_temperature_neg=st.floats(0.1, 10.0),
    vespo_k_pos=st.floats(0.0, 10.0),
)
def test_a_loss_comes_back_as_it_was_recorded(**given):
    given["level"] = "sequence_sum" if given["kind"] == "vespo" else given["level"]
    loss = Loss(**given)
    assert read_loss(loss.hyperparameters) == loss


def test_trl_says_its_clip_and_its_correction():
    loss = read_loss(GRPO)
    assert loss == Loss(max_tokens=64, correction="sequence_mask", correction_high=3.0)


def test_trl_without_its_engine_corrects_nothing():
    assert read_loss(GRPO | {"use_vllm": 0.0}) == Loss(max_tokens=64)


def test_gspo_is_a_ratio_of_sequences():
    assert read_loss(GRPO | {"importance_sampling_level": "sequence"}).level == "sequence_mean"


def test_cispo_clips_the_weight_itself():
    loss = read_loss(GRPO | {"loss_type": "cispo", "epsilon_high": 5.0})
    assert (loss.kind, loss.clip_high) == ("cispo", 5.0)


def test_sapo_s_temperatures_are_trl_s():
    loss = read_loss(GRPO | {"loss_type": "sapo", "sapo_temperature_neg": 1.5})
    assert (loss.kind, loss.level, loss.aggregation) == ("sapo", "token", "sequence_mean")
    assert (loss.sapo_temperature_pos, loss.sapo_temperature_neg) == (1.0, 1.5)
    assert not loss.has_clip


def test_vespo_takes_the_ratio_of_the_sequence_whatever_trl_s_level_says():
    said = {"loss_type": "vespo", "vespo_k_neg": 4.0, "vllm_importance_sampling_mode": "token_mask"}
    loss = read_loss(GRPO | said)
    assert loss == Loss(
        kind="vespo", level="sequence_sum", vespo_k_neg=4.0, max_tokens=64, correction="token_mask", correction_high=3.0
    )
    # The ratio in its KL term is that of importance_sampling_level.
    weighed = GRPO | said | {"beta": 0.1, "use_bias_correction_kl": 1.0}
    assert read_loss(weighed).kl_level == "token"
    assert read_loss(weighed | {"importance_sampling_level": "sequence"}).kl_level == "sequence_mean"
    with pytest.raises(InvalidRecord, match="vespo needs one ratio per sequence, but level is token"):
        Loss(kind="vespo")


def test_settings_of_other_kinds_are_not_recorded():
    names = {name.removeprefix("loss/") for name in Loss().hyperparameters}
    assert not any(name.startswith(("sapo", "vespo")) for name in names)
    assert "loss/sapo_temperature_pos" in Loss(kind="sapo").hyperparameters
    assert "loss/vespo_k_pos" not in Loss(kind="sapo").hyperparameters


def test_a_temperature_is_above_0():
    with pytest.raises(InvalidRecord, match="sapo_temperature_neg must be above 0, got 0"):
        Loss(kind="sapo", sapo_temperature_neg=0)


def test_what_changes_the_loss_and_is_not_said_here_is_named():
    assert read_loss(GRPO | {"top_entropy_quantile": 0.2}).unknown == ("top_entropy_quantile",)
    assert read_loss(GRPO | {"use_adaptive_entropy": True}).unknown == ("use_adaptive_entropy",)
    assert read_loss(GRPO | {"router_aux_loss_coef": 0.001}).unknown == ("router_aux_loss_coef",)
    assert read_loss(GRPO | {"router_aux_loss_coef": "None"}).unknown == ()


def test_trl_s_token_mean_is_over_its_generation_batch():
    steps = {"gradient_accumulation_steps": 2.0, "steps_per_generation": 4.0}
    assert read_loss(GRPO | steps).aggregation == "batch_token_mean"
    assert read_loss(GRPO | steps | {"steps_per_generation": 2.0}).aggregation == "token_mean"


def test_trl_weights_its_kl_term_by_the_ratio():
    loss = read_loss(GRPO | {"beta": 0.1, "use_bias_correction_kl": 1.0})
    assert (loss.kl_coefficient, loss.kl_weighted, loss.unknown) == (0.1, True, ())
    assert not read_loss(GRPO | {"use_bias_correction_kl": 1.0}).kl_weighted


def test_fields_that_are_said_take_the_place_of_recorded_ones():
    said = parse_loss("kind=reinforce, correction-high=none,kl_weighted=true", Loss(clip_low=0.1, correction_high=2.0))
    assert parse_loss("kl_level=token").kl_level == "token"
    assert said == Loss(kind="reinforce", clip_low=0.1, kl_weighted=True)


@pytest.mark.parametrize("text", ["kind", "clip=1", "clip_low=much", "kl_weighted=1", "kind=ppo"])
def test_a_field_that_cannot_be_is_refused(text):
    with pytest.raises(InvalidOption, match=r"Names: kind|expected a number|true or false|ppo_clip, reinforce"):
        parse_loss(text)


def test_rloo_has_one_term_a_sequence():
    loss = read_loss({"normalize_advantages": 0.0, "epsilon": 0.2, "epsilon_high": "None"})
    assert loss == Loss(level="sequence_sum", aggregation="sequence")


@pytest.mark.parametrize("values", [{}, {"learning_rate": 1e-6}, GRPO | {"loss_type": "ipo"}])
def test_a_loss_that_we_do_not_know_is_none(values):
    assert read_loss(values) is None


def test_a_word_that_there_is_not_names_those_that_there_are():
    with pytest.raises(InvalidRecord, match="ppo_clip, reinforce, cispo, sapo, vespo"):
        replace(Loss(), kind="ppo")
