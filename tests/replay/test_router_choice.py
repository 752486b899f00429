"""A choice of experts is held against the router's own code, on the logits that the execution had."""

import pytest
import torch
from located_runs import model_of
from tim_trace.replay.backends.model import build
from tim_trace.replay.locate.experts import follows


@pytest.fixture(scope="module")
def router():
    return model_of("deepseek_v3").model.layers[1].mlp.gate


def chosen_by(router, logits, *, ignores_groups=False):
    scores = logits.sigmoid() + router.e_score_correction_bias
    if not ignores_groups:
        groups = scores.unflatten(-1, (router.num_group, -1)).topk(2, -1).values.sum(-1)
        taken = torch.zeros_like(groups).scatter(-1, groups.topk(router.topk_group, -1).indices, 1.0)
        scores = scores.masked_fill(taken.repeat_interleave(scores.shape[-1] // router.num_group, -1) == 0, -torch.inf)
    return scores.topk(router.top_k, -1).indices


@torch.no_grad()
def followed(router, hidden, given, ids):
    return follows(lambda: router.forward(hidden), router.forward(hidden)[0], given, ids, 2, 2.0**-24)


@torch.no_grad()
def test_a_choice_among_groups_follows_from_the_logits_that_it_was_made_of(router):
    """Not from those of the exact weights: a group may fall either way, and takes experts along that lie far apart."""
    torch.manual_seed(0)
    hidden = torch.randn(4000, 48)
    exact = router.forward(hidden)[0]
    given = torch.nn.functional.linear(hidden, router.weight.bfloat16().float())
    ids = chosen_by(router, given)
    apart = (ids.sort(-1).values != chosen_by(router, exact).sort(-1).values).any(-1)
    assert apart.sum() > 10
    least = exact.gather(-1, chosen_by(router, exact)).amin(-1) - exact.gather(-1, ids).amin(-1)
    assert (least[apart].abs() > 20 * (given - exact).abs().max()).any()
    assert bool(followed(router, hidden, given, ids).all())


@torch.no_grad()
def test_a_choice_by_another_rule_does_not_follow(router):
    torch.manual_seed(0)
    hidden = torch.randn(400, 48)
    given = router.forward(hidden)[0]
    ids = chosen_by(router, given, ignores_groups=True)
    apart = (ids.sort(-1).values != chosen_by(router, given).sort(-1).values).any(-1)
    assert 0 < apart.sum() < 400
    assert torch.equal(followed(router, hidden, given, ids), ~apart)


@torch.no_grad()
def test_where_the_code_makes_no_such_logits_nothing_is_said(router):
    hidden = torch.randn(3, 48)
    made = router.forward(hidden)[0]
    assert follows(lambda: router.forward(hidden), made + 1, made, chosen_by(router, made), 2, 2.0**-24) is None


@pytest.mark.parametrize(("dtype", "bias"), [("bfloat16", "float32"), ("float16", "float32"), ("float64", "float64")])
def test_an_arm_has_what_transformers_keeps_in_float32_in_float32(dtype, bias):
    model = model_of("deepseek_v3")
    made = build(
        {"class": f"{type(model).__module__}.{type(model).__name__}", "config": model.config.to_dict()},
        dtype=dtype, attention="eager", device="cpu",
    )  # fmt: skip
    assert made.model.layers[1].mlp.gate.e_score_correction_bias.dtype == getattr(torch, bias)
    assert made.model.layers[1].mlp.gate.weight.dtype == getattr(torch, dtype)
