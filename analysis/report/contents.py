"""A report's first screen, charts and provenance."""

from __future__ import annotations

import html
import json
from dataclasses import dataclass

from ...schemas.errors import option
from ...schemas.passes import REPLAY_PREFIX
from ...schemas.results import Result, rendered
from ...schemas.steps import ALL_STEPS
from ...schemas.version import __version__
from ..advice import Advice
from ..attribution.text import note_sentences
from ..diagnosis.text import story, story_of_run
from ..dynamics.text import unanswered_sentences
from ..info import TraceInfo
from ..info_text import created_by
from ..trace.columns import field_text, flat_contract
from .answers import QUESTIONS, Answer, answers
from .chart import Chart, LineChart
from .commands import command
from .mismatch_charts import mismatch_charts
from .run_charts import constants, run_charts
from .subject import Subject

_LIKELY = 0.05
"""Minimum probability of a suspected cause for the report to suggest a rerun that tests it."""
_SHOWN = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    headline: str
    answers: tuple[Answer, ...]
    next: tuple[Advice, ...]
    recorded: tuple[str, ...]
    not_recorded: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    name: str
    values: tuple[str, ...]
    differs: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    facts: tuple[tuple[str, str], ...]
    passes: tuple[str, ...]
    """Names of the columns in `fields`: the passes, with a number appended if a pass has several contracts."""
    hashes: tuple[str, ...]
    fields: tuple[Field, ...]
    settings: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class Report(Result):
    """A run's full analysis. Printing it shows the verdict, and a notebook displays it as the HTML page."""

    _text = "tim_trace.analysis.report.contents:report_text"
    _page = "tim_trace.analysis.report.page.page:page"

    subjects: tuple[Subject, ...]
    """The first run is analysed. The others are drawn for comparison."""
    verdicts: tuple[RunSummary, ...]
    run: tuple[LineChart, ...]
    constants: dict[str, float]
    """Series that are constant in the first run, with their values."""
    mismatch: tuple[Chart, ...]
    provenance: tuple[Provenance, ...]
    made_with: str = __version__

    @property
    def charts(self) -> tuple[Chart, ...]:
        return (*self.run, *self.mismatch)

    @property
    def title(self) -> str:
        return f"{self.subjects[0].name}: {self.verdicts[0].headline}"

    def _repr_html_(self) -> str:
        """Return the page in an iframe, so that its styles and scripts do not affect the notebook."""
        return f'<iframe srcdoc="{html.escape(rendered(self, self._page))}" width="100%" height="900" style="border:0"></iframe>'


def report_text(made: Report) -> str:
    verdict = made.verdicts[0]
    width = max(len(title) for title, *_ in QUESTIONS.values()) + 2
    lines = [f"{QUESTIONS[one.question][0]:<{width}}{one.short}" for one in verdict.answers]
    return "\n".join([verdict.headline, "", *lines])


def report_of(subjects: tuple[Subject, ...]) -> Report:
    verdicts = tuple(
        RunSummary(
            headline=_headline(subject), answers=answers(subject), next=_next(subject), recorded=_recorded(subject.info),
            not_recorded=_not_recorded(subject),
        )
        for subject in subjects
    )  # fmt: skip
    return Report(
        subjects=subjects, verdicts=verdicts, run=tuple(run_charts(subjects)), constants=constants(subjects[0]),
        mismatch=tuple(mismatch_charts(subjects[0])), provenance=tuple(provenance(subject) for subject in subjects),
    )  # fmt: skip


# --- the first screen ---------------------------------------------------------------------------------------------------


def _headline(subject: Subject) -> str:
    if subject.diagnosis is not None:
        return story(subject.diagnosis)
    if subject.attribution is not None:
        return story_of_run(subject.attribution, None)
    return "This trace has nothing to analyze."


def _next(subject: Subject) -> tuple[Advice, ...]:
    found: list[Advice] = []
    diagnosis, attribution = subject.diagnosis, subject.attribution
    if diagnosis and not diagnosis.is_valid:
        found += diagnosis.next
    if attribution and attribution.fall:
        found += [
            suspect.next for suspect in attribution.suspects[:2] if suspect.next and suspect.probability >= _LIKELY
        ]
        if attribution.control is None:
            rerun = command(subject, "attribute", "--control", "RUN2")
            found.append(Advice(rerun, "RUN2: a rerun with the same seeds and one change"))
    if diagnosis and diagnosis.is_valid:
        found += diagnosis.next
    if diagnosis is None:
        found.append(Advice(command(subject, "info")))
    if not found:
        level = 3 * max((diagnosis.metrics.get("k3", 0.0) if diagnosis else 0.0), 1e-6)
        found.append(Advice(command(subject, "gate", "--fail-on", "check", "--fail-on", f"tim.k3>{level:.1g}")))
    first: dict[str, Advice] = {}
    for advice in found:
        first.setdefault(advice.command or advice.remark, advice)
    return tuple(first.values())


def _recorded(held: TraceInfo) -> tuple[str, ...]:
    steps = f"{held.num_steps:,} step{'s' if held.num_steps != 1 else ''}"
    if held.num_steps:
        steps += f" ({held.first_step} to {held.last_step})" if held.num_steps > 1 else f" ({held.first_step})"
    lines = [f"{steps}, {held.num_sequences:,} sequences, {held.num_response_tokens:,} response tokens"]
    lines += [
        f"pass {each.name}: {each.num_sequences:,} sequences{f' by {each.engine}' if each.engine else ''}"
        for each in held.passes
        if each.num_rows and not each.name.startswith(REPLAY_PREFIX)
    ]
    arms = [each.name.removeprefix(REPLAY_PREFIX) for each in held.passes if each.name.startswith(REPLAY_PREFIX)]
    if arms:
        lines.append(f"{len(arms)} replay{'s' if len(arms) > 1 else ''}: {', '.join(arms)}")
    if held.num_metrics:
        lines.append(f"{held.num_metrics:,} logged values")
    if held.num_bytes.get("weights"):
        lines.append(f"policy weights, {held.num_bytes['weights'] / 1e6:,.1f} MB")
    return tuple(lines)


def _not_recorded(subject: Subject) -> tuple[str, ...]:
    lines = [*subject.info.missing, *subject.info.damaged]
    if subject.dynamics:
        lines += unanswered_sentences(subject.dynamics)
    if subject.objective:
        lines += subject.objective.cannot
    if subject.attribution:
        lines += note_sentences(subject.attribution)
    lines += [f"{what}: {why}" for what, why in subject.unanswered.items()]
    return tuple(dict.fromkeys(lines))


# --- provenance --------------------------------------------------------------------------------------------------------


def provenance(subject: Subject) -> Provenance:
    """Compare the contracts of the recorded passes. Replays are left out, because their names describe the change."""
    rows = [row for row in subject.contracts if not row["pass"].startswith(REPLAY_PREFIX) and row["contract_json"]]
    order = {name: place for place, name in enumerate(subject.pair)}
    rows.sort(key=lambda row: (order.get(row["pass"], len(order)), row["pass"], row["contract"]))
    passes = [row["pass"] for row in rows]
    numbered = [(name, passes[: place + 1].count(name)) for place, name in enumerate(passes)]
    contracts = [flat_contract(json.loads(row["contract_json"])) for row in rows]
    names = sorted({name for contract in contracts for name in contract})
    values = {name: tuple(contract.get(name, "") for contract in contracts) for name in names}
    fields = [Field(name=name, values=of, differs=len({*of} - {""}) > 1) for name, of in values.items()]
    return Provenance(
        facts=_facts(subject),
        passes=tuple(f"{name} {number}" if passes.count(name) > 1 else name for name, number in numbered),
        hashes=tuple(str(row["contract"])[:_SHOWN] for row in rows),
        fields=tuple(sorted(fields, key=lambda field: not field.differs)),
        settings=tuple((name, field_text(value)) for name, value in sorted(subject.settings.items())),
    )


def _facts(subject: Subject) -> tuple[tuple[str, str], ...]:
    held = subject.info
    size = f"{held.num_parameters:,} parameters" if held.num_parameters else ""
    facts = {
        "trace": held.path,
        "steps": "" if subject.asked_steps == ALL_STEPS else f"selected with {option('steps', subject.asked_steps)}",
        "run id": held.run_id,
        "recorded": f"{held.created_at[:19]}Z with {created_by(held)}",
        "state": held.state if held.exit_code is None else f"{held.state}, the command exited with {held.exit_code}",
        "command": " ".join(held.command),
        "model": ", ".join(filter(None, [held.model, size, *held.model_dtypes])),
        "tokenizer": held.tokenizer or "",
        "versions": ", ".join(f"{name} {version}" for name, version in held.versions.items()),
        "format": f"version {held.format_version}",
    }  # fmt: skip
    return tuple((name, value) for name, value in facts.items() if value)
