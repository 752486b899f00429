"""Next steps for the user: a command to copy and a remark."""

from __future__ import annotations


class Advice(str):
    """A command with a remark, as one string and as separate attributes.

    >>> advice = Advice("tim-trace record -- X", "keeps weights")
    >>> str(advice), advice.command, advice.remark
    ('tim-trace record -- X  # keeps weights', 'tim-trace record -- X', 'keeps weights')
    """

    command: str
    """Shell command; empty if no command applies."""
    remark: str
    """Purpose of the command; if no command applies, advice on what to do; empty if the command is self-explanatory."""

    def __new__(cls, command: str = "", remark: str = "") -> Advice:
        made = super().__new__(cls, f"{command}  # {remark}" if command and remark else command or remark)
        made.command, made.remark = command, remark
        return made

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]  # copies keep both parts
        return self.command, self.remark


NOTHING = Advice()
"""Advice without a next step."""
