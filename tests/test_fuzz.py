"""Damaged traces give right answers, answers that say what is missing, or one line of error: tests/fuzz.py."""

import warnings
from collections import Counter

import pytest
from fuzz import Fuzzer, table_of


class OnceFailed(UserWarning):
    """A case failed and, carried out again, did not."""


@pytest.mark.filterwarnings("default::test_fuzz.OnceFailed")
@pytest.mark.parametrize(("seed", "num_cases"), [(2, 36), pytest.param(3, 300, marks=pytest.mark.slow)])
def test_damaged_traces(tmp_path, seed, num_cases):  # `make fuzz` has seed 1
    fuzzer = Fuzzer(tmp_path, seed)
    try:
        cases = [fuzzer.case(number) for number in range(num_cases)]
        failures = [case for case in cases if case.outcome == "FAILED"]
        again = [fuzzer.case(case.number) for case in failures]
    finally:
        fuzzer.close()
    says = "\n".join(f"{case.says()}\n    {case.reason}" for case in failures)
    assert not any(case.outcome == "FAILED" for case in again), f"{table_of(cases)}\n{says}"
    if failures:  # a starved machine does that: a verb that takes 0.3 s is given up after a minute
        warnings.warn(f"failed once, and not when they were repeated:\n{says}", OnceFailed, stacklevel=1)
    # The oracle sees all its outcomes, else nothing was damaged.
    outcomes = Counter(case.outcome for case in cases)
    assert min(outcomes[name] for name in ("right", "said", "refused", "hostile")) > num_cases / 50, outcomes
