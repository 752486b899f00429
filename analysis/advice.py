"""What to do next: a command to copy, and what is said of it."""

from __future__ import annotations


class Advice(str):
    """A text whose command and remark are known apart.

    >>> advice = Advice("tim-trace record -- X", "keeps weights")
    >>> str(advice), advice.command, advice.remark
    ('tim-trace record -- X  # keeps weights', 'tim-trace record -- X', 'keeps weights')
    """

    command: str
    """As a shell takes it; empty where there is none."""
    remark: str
    """What it is for, or what to do where no command does it; empty where the command says all."""

    def __new__(cls, command: str = "", remark: str = "") -> Advice:
        made = super().__new__(cls, f"{command}  # {remark}" if command and remark else command or remark)
        made.command, made.remark = command, remark
        return made

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]  # a copy has both parts
        return self.command, self.remark


NOTHING = Advice()
"""Where there is nothing left to do."""
