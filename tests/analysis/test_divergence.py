"""Divergences of distributions that are known whole, against numbers worked by hand and torch's."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tim_trace.analysis.distributions.divergence import Full, compare_full

LN2 = np.log(2.0)


def full(*rows):
    """Distributions of these probabilities."""
    with np.errstate(divide="ignore"):
        return Full(np.log(np.array(rows, np.float64)))


def one(a, b):
    return {name: values[0] for name, values in compare_full(a, b).items()}


def test_numbers_worked_by_hand():
    found = one(full([0.5, 0.25, 0.25]), full([0.25, 0.5, 0.25]))
    # Two tokens change places: KL is 1/2 ln 2 - 1/4 ln 2 both ways, the total variation 1/4.
    assert found["kl_ab"] == pytest.approx(LN2 / 4, rel=1e-12)
    assert found["kl_ba"] == pytest.approx(LN2 / 4, rel=1e-12)
    assert found["tv"] == pytest.approx(0.25, rel=1e-12)
    # Their mean has 3/8 on both: 1/2 ln(4/3) + 1/4 ln(2/3).
    assert found["js"] == pytest.approx(np.log(4 / 3) / 2 + np.log(2 / 3) / 4, rel=1e-12)
    assert found["entropy_a"] == pytest.approx(1.5 * LN2, rel=1e-12)
    assert found["argmax_flip"]
    # Logits less their mean differ by ln 2, -ln 2 and 0.
    assert found["max_abs_dlogit"] == pytest.approx(LN2, rel=1e-12)
    assert (found["num_unsupported_ab"], found["num_unsupported_ba"]) == (0, 0)


def test_disjoint_supports_are_as_far_apart_as_can_be():
    found = one(full([0.5, 0.5, 0, 0]), full([0, 0, 0.75, 0.25]))
    assert (found["kl_ab"], found["kl_ba"]) == (np.inf, np.inf)
    assert found["tv"] == pytest.approx(1.0)
    assert found["js"] == pytest.approx(LN2)
    assert (found["num_unsupported_ab"], found["num_unsupported_ba"]) == (2, 2)
    assert np.isnan(found["max_abs_dlogit"])


def test_a_cut_makes_one_way_infinite_and_is_counted():
    found = one(full([0.5, 0.3, 0.2]), full([0.625, 0.375, 0]))
    assert found["kl_ab"] == np.inf
    assert found["kl_ba"] == pytest.approx(np.log(1.25), rel=1e-12)
    assert found["tv"] == pytest.approx(0.2, rel=1e-12)
    assert (found["num_unsupported_ab"], found["num_unsupported_ba"]) == (1, 0)
    assert found["max_abs_dlogit"] == pytest.approx(0.0, abs=1e-12)


def test_a_padded_vocabulary_is_compared_on_the_common_part_and_its_mass_told():
    found = one(full([0.4, 0.4, 0.2]), full([0.5, 0.5]))
    assert (found["vocab_a"], found["vocab_b"]) == (3, 2)
    assert found["mass_beyond_a"] == pytest.approx(0.2)
    assert found["mass_beyond_b"] == 0.0
    for name in ("kl_ab", "kl_ba", "js", "tv"):
        assert found[name] == pytest.approx(0.0, abs=1e-15)
    assert found["entropy_a"] == pytest.approx(-0.8 * np.log(0.4) - 0.2 * np.log(0.2))


def test_nan_stays_nan_and_leaves_its_neighbours_alone():
    broken = np.array([[0.0, np.nan], [0.0, 1.0], [np.inf, 0.0]])
    found = compare_full(Full(broken), Full(np.zeros((3, 2))))
    assert np.isnan(found["tv"]).tolist() == [True, False, True]
    assert np.ma.getmaskarray(found["argmax_flip"]).tolist() == [True, False, True]


LOGITS = st.lists(st.lists(st.floats(-30, 30), min_size=3, max_size=3), min_size=2, max_size=2)


@given(LOGITS)
@settings(max_examples=200, deadline=None)
def test_they_are_torch_s(logits):
    a, b = (torch.tensor([row], dtype=torch.float64) for row in logits)
    found = one(Full(a.numpy()), Full(b.numpy()))
    p, q = torch.distributions.Categorical(logits=a), torch.distributions.Categorical(logits=b)
    mean = torch.distributions.Categorical(probs=(p.probs + q.probs) / 2)
    kl = torch.distributions.kl_divergence
    # The plain sum p ln(p / q) loses 1e-16 a term.
    assert found["kl_ab"] == pytest.approx(float(kl(p, q)), rel=1e-9, abs=1e-13)
    assert found["kl_ba"] == pytest.approx(float(kl(q, p)), rel=1e-9, abs=1e-13)
    assert found["js"] == pytest.approx(float(kl(p, mean) + kl(q, mean)) / 2, rel=1e-9, abs=1e-13)
    assert found["tv"] == pytest.approx(float((p.probs - q.probs).abs().sum() / 2), abs=1e-14)
    assert found["entropy_a"] == pytest.approx(float(p.entropy()), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("distance", [1e-3, 1e-5, 1e-7])
def test_near_distributions_keep_their_digits(distance):
    # KL(p || q) of logits 0, 0 and d, 0 is ln cosh(d / 2), and Jensen-Shannon near a quarter of it: d^2 / 8, d^2 / 32.
    found = one(Full(np.zeros((1, 2))), Full(np.array([[distance, 0.0]])))
    assert found["kl_ab"] == pytest.approx(distance**2 / 8, rel=1e-6)
    assert found["js"] == pytest.approx(distance**2 / 32, rel=1e-6)


def test_probabilities_below_what_float64_holds_are_no_zeros():
    found = one(Full(np.array([[0.0, -800.0]])), Full(np.array([[-800.0, 0.0]])))
    assert found["kl_ab"] == pytest.approx(800.0)
    assert (found["num_unsupported_ab"], found["num_unsupported_ba"]) == (0, 0)
