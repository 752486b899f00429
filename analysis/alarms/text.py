"""An alarm in words."""

from __future__ import annotations

from typing import Any

from .reading import AlarmReading


def taken_over(reading: AlarmReading) -> str:
    """What its figure is taken over."""
    return "every step" if reading.worst_step is None else f"worst step {reading.worst_step}"


def since(reading: AlarmReading) -> str:
    """At which steps it sounds; empty where it is silent."""
    if not reading.is_raised:
        return ""
    if reading.num_steps == 1:
        return f"at step {reading.first_step}"
    if reading.still:
        return f"from step {reading.first_step} on"
    return f"from step {reading.first_step} to {reading.last_step}"


def alarm_sentence(reading: AlarmReading) -> str:
    """Whose alarm it is, its figure with what that is taken over, and since when it sounds."""
    alarm = reading.alarm
    own = "" if reading.own is None else f" ({reading.own:.3g} at the {taken_over(reading)})"
    when = since(reading)
    return f"{alarm.who}: {alarm.metric} {alarm.condition}{own}{f', {when}' if when else ''}"


def reading_json(reading: AlarmReading) -> dict[str, Any]:
    """The figure of an alarm, what it is taken over, and where it sounds."""
    return {
        "own": reading.own, "over": taken_over(reading), "worst_step": reading.worst_step, "is_raised": reading.is_raised,
        "sounds": reading.is_raised, "first_step": reading.first_step, "first_value": reading.first_value,
        "last_step": reading.last_step, "num_steps": reading.num_steps, "still": reading.still,
    }  # fmt: skip
