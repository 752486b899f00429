"""Tasks over digits with verifiable answers: prompts, correct answers, and a reward for each correct place."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

PAD, EOS, SEP, PLUS, ZERO = 0, 1, 2, 3, 4
VOCABULARY = 16

Digits = list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A task: its prompts and correct answers."""

    name: str
    question: Callable[[random.Random], Digits]
    """Function that draws the symbols of a prompt: digits, and -1 for a plus sign."""
    solve: Callable[[Digits], Digits]
    max_tokens: int
    """Maximum number of response tokens, including the end token."""

    def prompt(self, chance: random.Random) -> tuple[list[int], list[int]]:
        """Return token ids of a prompt and of the correct response, including its end token."""
        question = self.question(chance)
        ids = [PLUS if digit < 0 else ZERO + digit for digit in question]
        return [*ids, SEP], [*(ZERO + digit for digit in self.solve(question)), EOS]


def reward(response: list[int], answer: list[int]) -> float:
    """Return the share of correct places, out of the longer of the two; the end token counts as a place."""
    right = sum(given == wanted for given, wanted in zip(response, answer, strict=False))
    return right / max(len(response), len(answer))


def _digits(count: int) -> Callable[[random.Random], Digits]:
    return lambda chance: [chance.randrange(10) for _ in range(count)]


def _sum_question(chance: random.Random) -> Digits:
    return [*_digits(4)(chance), -1, *_digits(4)(chance)]


def _sum(question: Digits) -> Digits:
    """Return the sum of two numbers, lowest digit first."""
    plus = question.index(-1)
    first, second = (int("".join(map(str, part))) for part in (question[:plus], question[plus + 1 :]))
    return [int(digit) for digit in reversed(str(first + second))]


def _unique(question: Digits) -> Digits:
    return list(dict.fromkeys(question))


def _mirrored(question: Digits) -> Digits:
    return [(digit + 1) % 10 for digit in reversed(question)]


def _running_sum(question: Digits) -> Digits:
    total, sums = 0, []
    for digit in question:
        total += digit
        sums.append(total % 10)
    return sums


TASKS = {
    task.name: task
    for task in (
        Task(name="sort", question=_digits(10), solve=sorted, max_tokens=16),
        Task(name="mirror", question=_digits(10), solve=_mirrored, max_tokens=16),
        Task(name="sum", question=_sum_question, solve=_sum, max_tokens=12),
        Task(name="unique", question=_digits(12), solve=_unique, max_tokens=18),
        Task(name="running-sum", question=_digits(8), solve=_running_sum, max_tokens=14),
    )
}
