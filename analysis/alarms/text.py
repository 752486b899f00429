from __future__ import annotations

from collections.abc import Callable

from ..rows import Form
from .reading import Alarm, AlarmReading


def taken_over(reading: AlarmReading) -> str:
    return "every step" if reading.worst_step is None else f"worst step {reading.worst_step}"


def fired(num_raised: int, num_judged: int) -> str:
    if not num_raised:
        return f"no alert fired ({num_judged} rule{'' if num_judged == 1 else 's'})"
    return f"{num_raised} of {num_judged} alerts fired"


def value_text(reading: AlarmReading, number: Callable[[float], str] = "{:.3g}".format) -> str:
    assert reading.own is not None
    return f"worst: {number(reading.own)} at step {reading.worst_step}"


def since(reading: AlarmReading) -> str:
    if not reading.is_raised:
        return ""
    if reading.num_steps == 1:
        return f"at step {reading.first_step}"
    if reading.still:
        return f"since step {reading.first_step}"
    return f"from step {reading.first_step} to {reading.last_step}"


def alarm_sentence(reading: AlarmReading) -> str:
    alarm = reading.alarm
    own = "" if reading.own is None else f" ({value_text(reading)})"
    when = since(reading)
    return f"{alarm.who}: {alarm.metric} {alarm.condition}{own}{f', {when}' if when else ''}"


def _gate(reading: AlarmReading) -> str | None:
    """Condition for `gate` that fails when the alert fires."""
    return reading.alarm.gate


ALARM_FORM: Form = {AlarmReading: {"gate": _gate, "over": taken_over}, Alarm: {"condition": Alarm.condition}}
