"""A diagnosis as text."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ..check.text import checked_json, checked_text, wrapped
from ..rows import Rows, shown, to_text
from .diagnosis import Diagnosis, Settled


def diagnosis_text(found: Diagnosis, width: int | None = None) -> str:
    """Write a diagnosis, for reading: the check, the numerics, what is normal, the alarms, the replays, what is next."""
    found = shown(found)
    parts = [
        _titled("IS IT VALID?", checked_text(found.checked, width)),
        _titled("WHAT WAS COMPUTED IN?", wrapped(found.numerics.sentence, "", width)),
        _titled("IS IT NORMAL?", wrapped(found.normal, "", width) + "\n\n" + to_text(_figures(found), width)),
        _titled("WHICH ALARMS SOUND?", to_text(_alarms(found), width)),
    ]
    if found.replays:
        parts.append(_titled("WHAT DID REPLAYS SETTLE?", to_text(_replays(found), width)))
    if found.next:
        parts.append(_titled("WHAT WOULD SETTLE THE REST?", "\n".join(found.next)))
    return "\n\n\n".join(parts)


def diagnosis_json(found: Diagnosis) -> dict[str, Any]:
    """The same as JSON can say it, with every number."""
    return asdict(found) | {"checked": checked_json(found.checked)}


def _titled(title: str, text: str) -> str:
    return f"{title}\n\n{text}"


def _figures(found: Diagnosis) -> Rows:
    chosen = [each for each in found.figures if each.fits] or list(found.figures)
    return Rows(
        ("metric", "this trace", "published", "dtypes", "model", "setting", "source"),
        [
            (
                each.figure.metric, each.own, _range(each.figure.low, each.figure.high), "/".join(each.figure.dtypes),
                each.figure.model, each.figure.setting, each.figure.source,
            )
            for each in chosen
        ],
    )  # fmt: skip


def _alarms(found: Diagnosis) -> Rows:
    return Rows(
        ("alarm", "this trace", "level", "who", "definition", "says"),
        [
            (
                "SOUNDS" if each.sounds else "silent", each.own, f"{'>' if each.alarm.above else '<'} {each.alarm.level:g}",
                each.alarm.who, each.alarm.definition, each.alarm.says,
            )
            for each in sorted(found.alarms, key=lambda each: not each.sounds)
        ],
    )  # fmt: skip


def _replays(found: Diagnosis) -> Rows:
    return Rows(
        ("replay", "tokens", "gap_rms", "left_rms", "removed", "95 %", "what it says"),
        [
            (r.arm, r.num_tokens, r.gap_rms, r.left_rms, f"{r.removed:.1%}", _interval(r), r.sentence)
            for r in found.replays
        ],
    )


def _interval(replay: Settled) -> str:
    if replay.low is None or replay.high is None:
        return f"none: {replay.no_interval}"
    return f"{replay.low:.1%} to {replay.high:.1%}"


def _range(low: float, high: float) -> str:
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"
