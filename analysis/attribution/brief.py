from __future__ import annotations

import shlex

from ..rows import wrapped_lines
from .attribution import SUSPECTS, Attribution, Suspect
from .text import evidence_sentence, note_sentences, verdict_sentence

_MOST_LETTERS = 10_000
"""Maximum length of the facts table in characters. It keeps the whole brief at about 4,000 tokens."""
_WEAK, _OPEN, _ALIKE = 0.05, 0.05, 3.0

QUESTIONS: dict[str, tuple[str, str]] = {
    "mismatch": ("Does the mismatch begin before the drop?",
        "SELECT step, mean_abs_d, max_abs_d FROM pair_steps('train', 'rollout') WHERE {near} ORDER BY step"),
    "staleness": ("How many updates is the engine behind?",
        "SELECT q.step, avg(s.policy_version - q.policy_version) AS lag FROM sequences q JOIN scores s USING (step, seq_id) "
        "WHERE s.pass = 'train' AND q.{near} GROUP BY q.step ORDER BY q.step"),
    "optimizer": ("Did the learning rate, the gradient norm or the loss change before the drop?",
        "SELECT step, name, value FROM metrics WHERE regexp_matches(name, '(^|[/_])(lr|learning_rate|grad_norm|loss)$') AND {near} ORDER BY name, step"),
    "reward": ("Which identical responses get different rewards before and after the drop?",
        "SELECT prompt_ids, response_ids, avg(reward) FILTER (step < {step}) AS reward_before, avg(reward) FILTER (step >= {step}) "
        "AS reward_after FROM sequences GROUP BY ALL HAVING reward_before <> reward_after LIMIT 5"),
    "pairing": ("Does each row's advantage still match its reward?",
        "SELECT step, corr(coalesce(advantage, list_avg(advantages)), reward) AS correlation FROM sequences WHERE {near} GROUP BY step ORDER BY step"),
    "data": ("Did the prompts change?",
        "SELECT step, avg(num_prompt_tokens) AS tokens, count(DISTINCT prompt_ids) AS prompts FROM sequences WHERE {near} "
        "GROUP BY step ORDER BY step"),
    "truncation": ("Do responses begin to hit a length limit?",
        "SELECT step, max(num_response_tokens) AS longest, avg(num_response_tokens) AS mean, "
        "count(DISTINCT response_ids[-1]) AS last_tokens FROM sequences WHERE {near} GROUP BY step ORDER BY step"),
    "reference": ("Did the distance to the reference model or the KL coefficient change?",
        "SELECT series, step, before, after FROM changes WHERE kind IN ('reference', 'setting') ORDER BY step"),
    "advantages": ("Did the advantages change in sign, scale or mean?",
        "SELECT step, avg(a) AS mean, stddev(a) AS scale, corr(a, reward) AS correlation FROM (SELECT *, coalesce(advantage, "
        "list_avg(advantages)) AS a FROM sequences) WHERE {near} GROUP BY step ORDER BY step"),
    "entropy": ("Does the entropy change before the reward?",
        "SELECT step, name, value FROM metrics WHERE name ILIKE '%entropy%' AND {near} ORDER BY name, step"),
    "length": ("Do longer responses get higher rewards?",
        "SELECT step, avg(num_response_tokens) AS length, corr(num_response_tokens, reward) AS correlation FROM sequences "
        "WHERE {near} GROUP BY step ORDER BY step"),
    "unknown": ("What else changed?",
        "SELECT series, kind, step, before, after, before_text, after_text FROM changes WHERE step <= {last} AND follows IS NULL "
        "ORDER BY abs(step - {step}) LIMIT 20"),
}  # fmt: skip


def attribution_brief(result: Attribution, width: int | None = None, story: str = "", since: int | None = None) -> str:
    """Return what is known and what to look at. `story` replaces the first sentence, and `since` is the step at which a fault
    begins if there is no drop."""
    change = result.supposed
    suspects = result.suspects or (change.suspects if change else ())
    about = f"{result.trace}, {result.num_steps} steps" + (f", baseline {result.control}" if result.control else "")
    parts = [f"{about}\n{story or verdict_sentence(result)}"]
    if result.facts:
        parts.append(_facts(result))
    if suspects:
        parts.append(_alike(suspects))
    onset = _onset(result, since)
    parts += [_rows(result, onset), _questions(result, suspects, onset)]
    if notes := note_sentences(result):
        parts.append("\n".join(f"Note: {note}" for note in notes))
    return wrapped_lines("\n\n".join(parts), width)


def _facts(result: Attribution) -> str:
    facts = [one for one in result.facts if abs(one.level) >= _WEAK]
    begin = f"step {result.supposed.step}" if result.supposed else "the step with the strongest facts"
    when = "timing relative to the drop" if result.fall else f"rated as for a drop at {begin}, although none was found"
    lines = [f"Facts, strongest first (strength from 0 to 1, {when}):"]
    for number, one in enumerate(facts):
        line = f"  {abs(one.level):.2f}  {one.order(result.fall) or '':<6}  {evidence_sentence(one)}"
        if sum(map(len, lines)) + len(line) > _MOST_LETTERS:
            lines.append(f"  and {len(facts) - number} weaker: SELECT * FROM facts")
            break
        lines.append(line)
    return "\n".join(lines)


def _alike(suspects: tuple[Suspect, ...]) -> str:
    first, *rest = suspects
    listed = ", ".join(f"{one.title} {one.probability:.0%}" for one in suspects if one.probability >= _OPEN)
    alike = [one.title for one in rest if one.probability >= _OPEN and first.probability <= _ALIKE * one.probability]
    apart = f"Undecided: {', '.join([first.title, *alike])}." if alike else "No other suspect is nearly as likely."
    return f"Probabilities: {listed}. {apart}"


def _onset(result: Attribution, since: int | None) -> tuple[int, int] | None:
    if result.fall is not None:
        return result.fall.step, result.fall.latest
    step = since if result.supposed is None else result.supposed.step
    return None if step is None else (step, step)


def _rows(result: Attribution, onset: tuple[int, int] | None) -> str:
    steps = [int(each.values["step"]) for each in result.difference_codes if "step" in each.values]
    first = min(steps, default=result.num_steps if onset is None else onset[0])
    traces = " ".join(shlex.quote(each) for each in (result.trace, result.control) if each)
    where = f"step = {first}" if result.control else f"step IN ({first - 1}, {first})"
    return (
        f'Look at rows first:\n  tim-trace sql {traces} "SELECT run, step, prompt_ids, response_ids, reward, coalesce(advantage, list_avg(advantages)) AS advantage FROM sequences '
        f'WHERE {where} ORDER BY prompt_ids, run, step LIMIT 16"'
    )


def _questions(result: Attribution, suspects: tuple[Suspect, ...], onset: tuple[int, int] | None) -> str:
    open_ = [one.code for one in suspects if one.probability >= _OPEN] or ["unknown"]
    lines = [f'Open questions. To answer each, run: tim-trace sql {shlex.quote(result.trace)} "QUERY"']
    for code in dict.fromkeys((*open_, "unknown")):
        lines += [f"  {SUSPECTS[code]}: {QUESTIONS[code][0]}", f"    {query(code, onset, result.num_steps)}"]
    return "\n".join(lines)


def query(suspect: str, onset: tuple[int, int] | None, num_steps: int) -> str:
    """Return the SQL for a suspect's open question, at the steps around the drop's `onset` (first and last step)."""
    step, last = onset or (num_steps, num_steps)
    near = f"step BETWEEN {max(step - 15, 0)} AND {last + 10}" if onset else "step IS NOT NULL"
    return QUESTIONS[suspect][1].format(near=near, step=step, last=last)
