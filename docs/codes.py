"""Every code in the JSON output: its command, the field that contains it, and its meaning."""

import inspect
import re
import string

from tim_trace.analysis import conformance
from tim_trace.analysis.alarms.reading import EVERY_ALARM
from tim_trace.analysis.attribution import text as attribution
from tim_trace.analysis.attribution.attribution import SUSPECTS
from tim_trace.analysis.check.data_checks import FAULTS as DATA_FAULTS
from tim_trace.analysis.check.faults import ALL, FAULTS, HEALTHY
from tim_trace.analysis.check.text import NOTES
from tim_trace.analysis.comparison import passes_text
from tim_trace.analysis.comparison import text as comparison
from tim_trace.analysis.dynamics import text as dynamics
from tim_trace.analysis.objective import sentences as objective
from tim_trace.analysis.replay_text import PREDICTION_NOTES
from tim_trace.replay.backends.trusted import WHY
from tim_trace.replay.certify.results import VERDICTS
from tim_trace.schemas import errors

DIAGNOSE = {
    "size": {
        "equal": "nothing differs",
        "unpublished": "no value is published for the coarser dtype, or no dtype was recorded",
        "below": "below the published range",
        "within": "within the published range",
        "above": "above the published range",
    },
    "replays": {
        "settles": "the replay removes the mismatch",
        "repeats": "the replay, in pass b's engine, reproduces pass b",
        "part": "the replay removes part of the mismatch",
        "nothing": "the replay has no effect on the mismatch",
        "adds": "the replay increases the mismatch",
    },
}


def error_codes():
    """Return the name of every error class and its meaning."""
    kinds = {
        name: inspect.getdoc(kind)
        for name, kind in vars(errors).items()
        if inspect.isclass(kind) and issubclass(kind, errors.TimTraceError) and kind is not errors.TimTraceError
    }
    return kinds | {"UsageError": "The command line is wrong: an unknown, missing or malformed option or argument."}


def alarm_codes():
    return {alarm.code: f"{alarm.who}, {alarm.metric} {alarm.condition}: {alarm.summary}" for alarm in EVERY_ALARM}


def codes():
    """Return every code's meaning, grouped by command and output field, such as `check: findings`."""
    return {
        "check: findings": FAULTS | HEALTHY,
        "check: signals": {f"{fault.code}.{name}": text for fault in ALL for name, text in fault.evidence.items()},
        "check: causes (numbers.cause)": {
            f"{fault.code}.{name}": title for fault in ALL for name, title in fault.causes.items()
        },
        "check: data": {code: fault.title for (code, _), fault in DATA_FAULTS.items()},
        "check: data signals": {f"{code}.{name}": fault.evidence[name] for (code, name), fault in DATA_FAULTS.items()},
        "check: note_codes": NOTES,
        "attribute: suspects": SUSPECTS,
        "attribute: evidence, facts, differences": attribution.EVIDENCE | attribution.DIFFERENCES,
        "attribute: note_codes": attribution.NOTES,
        **{f"diagnose: {place}": found for place, found in DIAGNOSE.items()},
        "diagnose, watch: alarms": alarm_codes(),
        "dynamics: summary_codes": dynamics.SUMMARY,
        "dynamics: unanswered_codes": dynamics.UNANSWERED,
        "compare: kinds of differences": comparison.FIRST,
        "certify: verdict": VERDICTS,
        "compare: note_codes": comparison.NOTES,
        "compare: contradictions": passes_text.CONTRADICTIONS,
        "objective: verdict_codes": objective.VERDICT,
        "objective: note_codes": objective.NOTES,
        "objective: cannot_codes": objective.CANNOT,
        "objective: loss_basis": objective.loss_basis(),
        "replay, triangulate: not_held": WHY,
        "triangulate: predictions": PREDICTION_NOTES,
        "verify: deviations": conformance.CODES,
        "errors": error_codes(),
    }


def table():
    """Return all codes as Markdown, with one table per command and output field."""
    parts = []
    for place, found in codes().items():
        rows = [f"| `{code}` | {plain(meaning)} |" for code, meaning in found.items()]
        parts.append("\n".join([f"### {place}", "", "| code | meaning |", "|---|---|", *rows]))
    return "\n\n".join(parts)


def plain(sentence):
    """Return a sentence template as table-cell text, with each placeholder replaced by its name in italics."""
    parts = [
        text + ("" if name is None else f"*{re.sub(r'[^a-z_0-9].*', '', name)}*")
        for text, name, _, _ in string.Formatter().parse(sentence)
    ]
    # Two placeholders side by side would read as bold text.
    return " ".join("".join(parts).replace("**", "* *").split()).replace("|", "\\|")
