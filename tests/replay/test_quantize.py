import pytest
import torch
from tim_trace.replay.backends.quantize import GROUP, rounded


def test_int4_by_hand():
    # The largest is 1.4, so the scale is 0.2: -0.3 is -1.5 steps, which rounds to the even -2.
    weight = torch.tensor([[1.4, -0.3, 0.09, 0.11]])
    torch.testing.assert_close(rounded(weight, "int4"), torch.tensor([[1.4, -0.4, 0.0, 0.2]]))


@pytest.mark.parametrize(("kind", "steps"), [("int8", 254), ("int4", 14)])
def test_an_error_is_at_most_half_a_step_of_its_group(kind, steps):
    weight = torch.randn(5, 300)
    for start in range(0, 300, GROUP):
        group = weight[:, start : start + GROUP]
        step = 2 * group.abs().amax(dim=1, keepdim=True) / steps
        error = (rounded(weight, kind)[:, start : start + GROUP] - group).abs()
        assert (error <= step / 2 * (1 + 1e-5)).all()


def test_fp8_keeps_three_bits_of_mantissa():
    weight = torch.randn(4, 64)
    error = (rounded(weight, "fp8") - weight).abs() / weight.abs().clamp(min=1e-2)
    assert 0.01 < error.max() <= 1 / 16 + 1e-4


def test_zeros_and_the_dtype_stay():
    assert torch.equal(rounded(torch.zeros(2, 3), "int8"), torch.zeros(2, 3))
    assert rounded(torch.randn(2, 3).to(torch.bfloat16), "fp8").dtype == torch.bfloat16
