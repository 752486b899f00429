"""Damaged traces give right answers, answers that say what is missing, or one line of error: tests/fuzz.py."""

from collections import Counter

from fuzz import Fuzzer, table_of

SEED = 2  # `make fuzz` has seed 1
NUM_CASES = 36


def test_damaged_traces(tmp_path):
    fuzzer = Fuzzer(tmp_path, SEED)
    try:
        cases = [fuzzer.case(number) for number in range(NUM_CASES)]
    finally:
        fuzzer.close()
    failures = [f"{case.says()}\n    {case.reason}" for case in cases if case.outcome == "FAILED"]
    assert not failures, "\n".join([*failures, table_of(cases)])
    # The oracle sees all its outcomes, else nothing was damaged.
    outcomes = Counter(case.outcome for case in cases)
    assert min(outcomes[name] for name in ("right", "said", "refused", "hostile")) > NUM_CASES / 50, outcomes
