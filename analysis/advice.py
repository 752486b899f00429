from __future__ import annotations


class Advice(str):
    """A suggested next step: a shell command and a remark, joined into one string but also available separately.

    >>> advice = Advice("tim-trace record -- X", "keeps weights")
    >>> str(advice), advice.command, advice.remark
    ('tim-trace record -- X  # keeps weights', 'tim-trace record -- X', 'keeps weights')
    """

    command: str
    """Shell command, or empty if there is none to run."""
    remark: str
    """Purpose of the command, or the whole advice if there is no command. May be empty."""

    def __new__(cls, command: str = "", remark: str = "") -> Advice:
        made = super().__new__(cls, f"{command}  # {remark}" if command and remark else command or remark)
        made.command, made.remark = command, remark
        return made

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]  # so that copies keep both parts
        return self.command, self.remark


NOTHING = Advice()
