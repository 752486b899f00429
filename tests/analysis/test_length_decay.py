import runpy

import pytest
import torch
from builders import ROOT

LengthDecayLR = runpy.run_path(str(ROOT / "examples" / "length_decay_lr.py"))["LengthDecayLR"]
LENGTHS = [100.0 + k % 3 for k in range(40)] + [400.0] * 260
"""A surge at step 41: the third of the last five steps at twice the median is step 43."""


def optimizer_of(*rates):
    return torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates])


def rates(scheduler, optimizer, lengths):
    found = []
    for length in lengths:
        optimizer.step()
        scheduler.step(length)
        found.append([group["lr"] for group in optimizer.param_groups])
    return found


def test_the_rate_halves_every_1_8_surge_steps_down_to_a_tenth():
    optimizer = optimizer_of(1.0, 0.1)
    scheduler = LengthDecayLR(optimizer)
    found = rates(scheduler, optimizer, LENGTHS + [400.0] * 90)
    assert scheduler.surge_step == 43
    assert scheduler.decay_period == round(1.8 * 43) == 77
    for first, scale in ((1, 1.0), (77, 0.5), (154, 0.25), (231, 0.125), (308, 0.1), (385, 0.1)):
        assert found[first - 1] == pytest.approx([scale, 0.1 * scale])
    assert found[75] == [1.0, 0.1]


def test_without_a_surge_nothing_decays():
    optimizer = optimizer_of(1.0)
    assert rates(LengthDecayLR(optimizer), optimizer, [100.0 * 1.01**k for k in range(60)])[-1] == [1.0]


def test_a_run_that_resumes_has_the_same_schedule(tmp_path):
    optimizer = optimizer_of(1.0)
    whole = rates(LengthDecayLR(optimizer), optimizer, LENGTHS)
    for stop in (10, 42, 43, 100, 200):
        first = optimizer_of(1.0)
        scheduler = LengthDecayLR(first)
        begun = rates(scheduler, first, LENGTHS[:stop])
        torch.save({"optimizer": first.state_dict(), "scheduler": scheduler.state_dict()}, tmp_path / "state.pt")
        second = optimizer_of(1.0)
        resumed = LengthDecayLR(second, kappa=9.0)
        state = torch.load(tmp_path / "state.pt", weights_only=True)
        second.load_state_dict(state["optimizer"])
        resumed.load_state_dict(state["scheduler"])
        assert begun + rates(resumed, second, LENGTHS[stop:]) == whole


def test_it_composes_with_another_scheduler():
    optimizer = optimizer_of(1.0)
    other = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    scheduler = LengthDecayLR(optimizer)
    for length in LENGTHS[:160]:
        optimizer.step()
        other.step()
        scheduler.step(length)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.25 * 0.99**160)


def test_a_length_may_be_observed_where_a_trainer_calls_step():
    one, two = optimizer_of(1.0), optimizer_of(1.0)
    given, observed = LengthDecayLR(one), LengthDecayLR(two)
    for length in LENGTHS[:100]:
        one.step()
        given.step(length)
        two.step()
        observed.observe(length)
        observed.step()
    assert observed.state_dict() == given.state_dict()
    assert two.param_groups[0]["lr"] == one.param_groups[0]["lr"] == 0.5
