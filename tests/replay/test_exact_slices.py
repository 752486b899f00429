"""Sums in slices, against fractions."""

import operator
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tim_trace.replay.backends.exact import slices


def as_fractions(tensor):
    return [[Fraction(value) for value in line] for line in tensor.tolist()]


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("length", [1, 7, 64, 1000])
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 1 << 30), spread=st.sampled_from([0, 3, 40]))
def test_a_product_is_that_of_fractions_within_its_bound(count, length, seed, spread):
    make = torch.Generator().manual_seed(seed)

    def vectors(rows):
        exponents = torch.randint(-spread, spread + 1, (rows, length), generator=make)
        return torch.randn(rows, length, generator=make).double() * 2.0**exponents

    left, right = vectors(2), vectors(3)
    bits = slices.bits_for(length, count)
    found = slices.matmul(slices.sliced(left, bits, count), slices.sliced(right, bits, count))
    for a, line in zip(as_fractions(left), as_fractions(found), strict=True):
        for b, value in zip(as_fractions(right), line, strict=True):
            true = sum(x * y for x, y in zip(a, b, strict=True))
            bound = 6 * length * Fraction(2) ** (-count * bits) * max(map(abs, a)) * max(map(abs, b))
            assert abs(value - true) <= bound + abs(true) / 2**52


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1 << 30), length=st.integers(1, 300))
def test_the_order_of_what_is_summed_changes_no_bit(seed, length):
    make = torch.Generator().manual_seed(seed)
    left, right = (torch.randn(4, length, generator=make).double() for _ in range(2))
    order = torch.randperm(length, generator=make)
    bits = slices.bits_for(length, 2)

    def results(left, right):
        product = slices.matmul(slices.sliced(left, bits, 2), slices.sliced(right, bits, 2))
        units = left.abs() / left.abs().amax()
        return torch.cat(
            (product.flatten(), slices.sum_of_squares(left, 2).flatten(), slices.sum_of_units(units).flatten())
        )

    straight, shuffled = results(left, right), results(left[:, order], right[:, order])
    assert torch.equal(straight.view(torch.int64), shuffled.view(torch.int64))


def test_slices_put_together_are_the_number():
    values = torch.randn(5, 33).double() * 2.0 ** torch.randint(-20, 20, (5, 33))
    cut = slices.sliced(values, 20, 4)
    for line, exponent, *parts in zip(
        as_fractions(values), cut.exponent.flatten().tolist(), *map(as_fractions, cut.parts), strict=True
    ):
        scale = Fraction(2) ** (exponent - 20)
        for index, value in enumerate(line):
            whole = sum(part[index] / Fraction(2) ** (20 * order) for order, part in enumerate(parts))
            assert abs(whole * scale - value) <= scale / 2**61
        assert max(map(abs, line)) < Fraction(2) ** exponent


def test_first_slices_leave_no_room_unused_and_none_exceeded():
    for length in range(1, 5000):
        bits = slices.bits_for(length, 2)
        assert length * 4**bits <= 2**53 < length * 4 ** (bits + 2)
        assert length * 4 ** slices.bits_for(length, 3) * 5 / 4 <= 2**53


def test_sums_of_units_and_squares_are_those_of_fractions():
    units = torch.rand(3, 1000, dtype=torch.float64) ** 20
    for line, value in zip(as_fractions(units), slices.sum_of_units(units).flatten().tolist(), strict=True):
        assert abs(Fraction(value) - sum(line)) <= sum(line) / 2**51
    numbers = torch.randn(3, 1000).double()
    for line, value in zip(as_fractions(numbers), slices.sum_of_squares(numbers, 2).flatten().tolist(), strict=True):
        assert abs(Fraction(value) - sum(x * x for x in line)) <= sum(x * x for x in line) / 2**30


def test_a_sum_of_zeros_is_positive_whatever_the_library_gives():
    ones = slices.sliced(torch.ones(2, 4).double(), 20, 2)
    assert not slices._total(ones, ones, lambda a, b: -torch.zeros(2, 2).double()).view(torch.int64).any()


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("length", [1, 2, 31, 64, 1024, 3000])
def test_products_of_slices_are_those_of_python_s_integers_where_they_are_largest(count, length):
    """All elements of one sign and close to the power of two above: no sum of products can be larger."""
    left, right = (2 - torch.rand(2, length, dtype=torch.float64) / 1000 for _ in range(2))
    bits = slices.bits_for(length, count)
    left, right = slices.sliced(left, bits, count), slices.sliced(right, bits, count)
    for a in left.parts:
        for b in right.parts:
            true = [[sum(map(operator.mul, map(int, x), map(int, y))) for y in b.tolist()] for x in a.tolist()]
            assert (a @ b.mT).tolist() == true
