"""exp and its like, against decimals."""

import math
from decimal import Decimal, localcontext

import pytest
import torch
from tim_trace.replay.backends.exact import functions
from tim_trace.replay.backends.exact.functions import rounded

ANGLES = torch.cat((torch.linspace(0, 7, 400), torch.logspace(-6, 5.3, 400))).double()


def exact_exp(x):
    with localcontext(prec=40):
        return Decimal(x).exp()


def exact_log(x):
    with localcontext(prec=40):
        return Decimal(x).ln()


def worst(values, truths):
    """Largest relative error."""
    return max(
        float(abs(Decimal(value) - true) / abs(true)) for value, true in zip(values, truths, strict=True) if true
    )


def test_exp_is_that_of_decimals():
    points = torch.cat((torch.linspace(-707, 708, 900), -torch.logspace(-9, 1, 300))).double()
    assert worst(functions.exp(points).tolist(), map(exact_exp, points.tolist())) < 3.4e-16
    ends = functions.exp(torch.tensor([-math.inf, -709.0, 0.0, math.nan], dtype=torch.float64)).tolist()
    assert ends[:3] == [0.0, 0.0, 1.0]
    assert math.isnan(ends[3])


def test_log_is_that_of_decimals():
    points = torch.cat((torch.logspace(-300, 300, 500), 1 + torch.logspace(-15, 0, 300), torch.linspace(0.5, 2, 300)))
    points = points.double().clamp(min=1e-300)
    assert worst(functions.log(points).tolist(), map(exact_log, points.tolist())) < 5e-16


def test_sines_lie_on_the_circle_and_agree_with_the_c_library():
    cosine, sine = functions.cosine_and_sine(ANGLES)
    for angle, c, s in zip(ANGLES.tolist(), cosine.tolist(), sine.tolist(), strict=True):
        assert abs(c - math.cos(angle)) <= 4e-16
        assert abs(s - math.sin(angle)) <= 4e-16


def test_silu_is_x_times_the_logistic_function():
    points = torch.linspace(-50, 50, 500).double()
    with localcontext(prec=40):
        truths = [Decimal(x) / (1 + exact_exp(-x)) for x in points.tolist()]
    assert worst(functions.silu(points).tolist(), truths) < 1e-15


@pytest.mark.parametrize(
    "function",
    [
        functions.exp, functions.log, functions.silu, lambda x: functions.cosine_and_sine(x)[0], torch.sqrt,
        lambda x: functions.divided(x, 0.7), lambda x: rounded(x, torch.bfloat16), lambda x: rounded(x, torch.float16),
    ],
    ids=["exp", "log", "silu", "cosine", "sqrt", "divided", "bf16", "fp16"],
)  # fmt: skip
def test_an_element_s_result_does_not_depend_on_its_place(function):
    """Vector code handles most of a tensor and other code its tail; here every element is in a tail once."""
    points = torch.rand(67, dtype=torch.float64) * 9 + 1e-3
    together = function(points.clone())
    for index in range(len(points)):
        alone = function(points[index : index + 1].clone())
        assert alone.view(torch.int64) == together[index].view(torch.int64)


def test_a_division_is_rounded_once():
    points = torch.rand(100, dtype=torch.float64)
    assert functions.divided(points, 0.7).tolist() == [x / 0.7 for x in points.tolist()]
