from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...schemas.steps import ALL_STEPS
from ..facts.recorded import change_sentence, interval_text
from ..facts.series import FLAT, Fall
from ..rows import Form, of_steps, shown, wrapped_lines
from ..statement import Statement, sentences
from .attribution import Attribution, Evidence, NotFinite, Suspect
from .fact import Fact

_MOST_CHANGES = 12
_MOST_EVIDENCE = 8
_SHOWN = 0.02

_ENTROPY = "entropy is {first:.3g} nats at the start, {at_fall:.3g} at the onset and {last:.3g} at the end: "
EVIDENCE: Mapping[str, str] = {
    "prior": "prior, before any evidence",
    "setting_changed": "at step {step}, {series} changes from {from_value} to {to_value}",
    "rewards_changed": "{share:.0%} of {num_responses:,} responses sampled both before and after step {step} get a different reward after that step",
    "gradient_is_equal": "the update at step {step} has the same gradient norm as the baseline's, so the loss has no extra term",
    "gradient_grows": "the update at step {step} has {factor:.3g} times the baseline's gradient norm",
    "mismatch_grows_before_fall": "mean |d| grows {factor:.3g}-fold at step {step}{interval}, before the drop",
    "mismatch_grows_with_fall": "mean |d| grows {factor:.3g}-fold at step {step}{interval}, when the drop begins",
    "mismatch_grows_after_fall": "mean |d| grows {factor:.3g}-fold at step {step}{interval}, after the drop began, so it is a consequence of the drop",
    "not_sampled_so": "since the drop, the mean -logprob of sampled tokens is {surprisal:.2g} nats, but the mean entropy is only {entropy:.2g} (ratio {ratio_since:.2g}, {ratio_before:.2g} before), so the engine returns logprobs of a distribution that it does not sample from",
    "trainer_moves_first": "when the mismatch jumps, the engine still samples as before but the trainer's scores change, so the trainer's weights changed abruptly",
    "exact_until": "the engine was exact until step {step}{interval}; from then on mean |d| is {mean_abs_d:.2g} nats",
    "check_fails": "check finds: {finding_title}",
    "data_fault": "check finds a fault from step {step} on: {finding}",
    "prompts_changed": "{series} changes from {from_value:.3g} to {to_value:.3g} at step {step}{interval}, which the policy cannot cause",
    "stop_ignored": "starting at step {step}, {share:.0%} of responses continue past the usual end token ({before_share:.0%} before), so the engine no longer stops there",
    "never_ended": "starting at step {step}, {share:.0%} of responses have no end token ({before_share:.0%} before), so something other than the end token stops them",
    "rows_left_out": "starting at step {step}, the loss mask leaves out all tokens of {share:.0%} of responses ({before_share:.0%} before)",
    "endings_change": "starting at step {step}, up to {share:.0%} of responses end with an unusual token ({before_share:.0%} before), so responses are being cut off",
    "responses_capped": "starting at step {step}, no response is longer than {limit} tokens and at least {share:.0%} have that length ({before_share:.0%} were longer before), so responses are being cut off",
    "reference_changed": "starting at step {step}, {share:.0%} of {num_responses:,} repeated responses or prefixes get different reference logprobs than before, so the reference was replaced or misaligned",
    "loss_term_inverted": "since the drop, the logged loss implies a coefficient with the wrong sign for the {term} term ({coefficient:.3g})",
    "loss_term_oversized": "since the drop, the logged loss implies a coefficient of {coefficient:.3g} for the {term} term, but {declared:.3g} is declared",
    "loss_term_unusual": "since the drop, the logged loss implies a coefficient of {coefficient:.3g} for the {term} term, but none is declared (usual: at most {usual:g})",
    "returns_to_reference": "the mean log-ratio to the reference changes from {distance_before:.3g} to {distance_after:.3g} nats per token with the drop, so the policy returns to its reference, as under a strong KL term",
    "advantages_inverted": "within groups, advantages decrease as rewards increase (correlation {correlation:.2f})",
    "advantages_of_other_sign": "within groups, advantages do not follow rewards (correlation {correlation:.2f}) but have the expected size, so some have the wrong sign",
    "advantages_changed": "{series} changes from {from_value:.3g} to {to_value:.3g} at step {step}{interval}, more than the rewards explain",
    "declared_fresh": "according to the recorded policy versions, sequences were sampled and scored with the same weights",
    "engine_stands_still": "{still_share:.0%} of {num_openings:,} repeated prefixes have bitwise identical engine logprobs, and {trainer_share:.0%} have identical trainer logprobs, so the engine gets no new weights",
    "declared_lag": "sequences were sampled with weights {lag:g} updates older than the trainer's (mean |d| {mean_abs_d:.2g} nats)",
    "declared_lag_grows": "sequences were sampled with weights {lag:g} updates older than the trainer's, up from {lag_before:g} (mean |d| {mean_abs_d:.2g} nats)",
    "earlier_weights_of_step": "where engine and trainer differ, the engine's logprobs match the trainer's at step {version} for {share:.0%} of {num_agreeing:,} prefixes, so the engine kept those weights",
    "earlier_weights_at_distance": "where engine and trainer differ, for {share:.0%} of {num_agreeing:,} prefixes, the engine's logprobs match those that the trainer had {version} steps earlier",
    "engine_moves_on": "the engine's logprobs changed for {changed} {num_openings:,} repeated prefixes, so its weights do change, on time or late",
    "reward_starts_below": "the first rewards average {reward:.3g}, but the first {outcome} of the same policy equals {evaluated:.3g}, so reward and {outcome} measure different things",
    "learning_rate_spike": "from step {step} on, the learning rate reaches {factor:.3g} times its earlier median",
    "learning_rate_beyond": "from step {step} on, the learning rate is up to {factor:.3g} times the declared one",
    "update_size": "a typical update changes the weights by {update_to_weight:.2g} times their norm",
    "update_leaps": "the update at step {step} is {factor:.3g} times as large as earlier ones",
    "rewards_noisy": "{unequal_share:.0%} of {num_pairs:,} repeated responses get a different reward than last time (mean difference {mean_difference:.2g})",
    "rewards_differ_by_group": "identical responses to identical prompts get different rewards in {between_groups_share:.0%} of pairs across the groups of a step, but in only {within_groups_share:.0%} of pairs within a group, so rewards depend on more than prompt and response",
    "reward_hides_fall": "the recorded reward goes from {reward_before:.3g} to {reward_after:.3g} while {outcome} drops from {outcome_before:.3g} to {outcome_after:.3g}, so the reward measures something else",
    "rewards_in_other_rows": "{unequal_share:.0%} of {num_pairs:,} repeated responses get a different reward than last time, but only {unequal_ordered_share:.0%} with {order}",
    "rewards_move_rows": "starting at step {step}, rewards do not increase with response probability, while the reward distribution is unchanged (mean {mean:.3g}, {mean_before:.3g} before), so rewards are in the wrong rows",
    "advantages_do_not_follow": "within groups, advantages do not follow rewards (correlation {correlation:.2f}, but 1 is expected for any baseline and scale)",
    "logprobs_in_other_rows": "check finds logprobs in the wrong rows",
    "entropy_impossible": _ENTROPY + "more than any vocabulary allows, so the weights are broken, or other weights sampled these tokens",
    "entropy_climbs": _ENTROPY + "it keeps growing after the drop began, as under an entropy bonus",
    "entropy_collapses": _ENTROPY + "it drops together with the outcome, although good results do not require low entropy",
    "length_pays": "within groups, longer responses get higher rewards (correlation {correlation:.2f})",
    "length_pays_since": "starting at step {step}, the same response gets a different reward than before, and the change depends on its length (correlation {correlation:.2f}, {num_responses:,} responses)",
    "mismatch_size": "mean |d| at the onset is {mean_abs_d:.2g} nats",
    "length_costs": "within groups, longer responses get lower rewards (correlation {correlation:.2f})",
    "relation_breaks_alone": "starting at step {step}, rewards no longer increase with response probability, although the reward distribution and the policy are unchanged",
    "reward_and_relation_move": "at step {step}, rewards change and no longer increase with response probability, while the policy stays the same",
    "reward_moves_alone": "at step {step}, rewards change while the policy stays the same",
    "control_fell": "the baseline run collapsed too",
}  # fmt: skip
"""Fact code -> sentence about a run. DIFFERENCES has the sentences that compare a run with its baseline."""

_FIRST = "first difference at step {step}: "
_EQUAL = _FIRST + "{num_equal} of {num_sequences} responses are identical to the baseline's"
DIFFERENCES: Mapping[str, str] = {
    "prompts_part": _FIRST + "the prompts",
    "responses_cut_off": _EQUAL + ", and the others end earlier than in the baseline",
    "sampling_parts": _EQUAL + ", although both engines return the same logprobs",
    "tool_parts": _EQUAL + ", and the others first differ at a token that the policy did not sample",
    "engine_parts": _FIRST + "for identical tokens the engine's logprobs differ (by {apart:.2g} nats) but the trainer's do not",
    "scoring_parts": _FIRST + "for identical tokens the trainer's logprobs differ (by {apart:.2g} nats) but the engine's do not",
    "rewards_part": _FIRST + "{share:.0%} of identical responses get a different reward",
    "rewards_permuted_part": _FIRST + "the rewards are the baseline's in a different order",
    "rewards_by_length_part": _FIRST + "{share:.0%} of identical responses get a different reward, and the difference depends on their length (correlation {correlation:.2f})",
    "rewards_of_last_step_part": _FIRST + "the rewards come from the previous step",
    "advantages_or_rewards_part": _FIRST + "identical responses have different advantages (rewards not recorded)",
    "reference_parts": _FIRST + "for identical tokens the reference model's logprobs differ (by {apart:.2g} nats)",
    "advantages_part": _FIRST + "identical responses with equal rewards have different advantages",
    "advantages_permuted_part": _FIRST + "the advantages are the baseline's in a different order",
    "update_parts": "first difference: with the same sequences, rewards and advantages, the update at step {step} yields different weights (logprobs differ by {apart:.2g} nats per token)",
    "mismatch": "mean |d| at the onset is {run:.2g} nats in the run and {control:.2g} in the baseline",
    "learning_rate": "starting at step {step}, the learning rate is {run:.6g} in the run and {control:.6g} in the baseline",
    "setting": "{setting} is {run} in the run and {control} in the baseline",
    "update_or_loss": "with the same sequences, rewards and advantages as in the baseline, the update at step {step} yields different weights, so the optimizer or a loss term differs (record the gradient norm to tell which)",
}  # fmt: skip

NOTES: Mapping[str, str] = {
    "no_outcome": "detecting a collapse requires rewards or evaluations from at least {min_values} steps",
    "no_evaluation": "no evaluation (a metric such as eval/reward) was logged, so a collapse stays hidden if the reward "
    "itself is wrong",
    "reward_changed": "the reward changed at step {step}: {share:.0%} of {num_responses:,} responses "
    "consistently get a different reward from then on. Only an evaluation can show whether the run does worse",
    "no_shared_token": "passes {first_pass} and {second_pass} share no token, so the mismatch is unknown",
    "no_tokens": "the trace has logged averages but no tokens (mean |d| is {source}), so checks, replays and "
    "token-level evidence are unavailable",
    "check_failed": "check failed: {error}",
    "other_prompts": "the run and its baseline begin with different prompts, so this is only an observation. For an intervention, "
    "rerun with the same seeds and data",
    "no_prompts": "without tokens it is unknown whether both runs saw the same prompts, so this is only an observation",
    "same_outcome": "over the last {num_steps} shared steps, {outcome} equals the baseline's",
    "no_effect": "no effect detected: over the last {num_steps} shared steps, {outcome} differs from the baseline's by "
    "{difference:+.3g} (95% CI {low:+.3g} to {high:+.3g}), so the effect, if any, is at most {most:.3g}",
    "ends_apart": "over the last {num_steps} shared steps, {outcome} differs from the baseline's by {difference:+.3g} (95% CI "
    "{low:+.3g} to {high:+.3g}), although no lasting drop was found",
    "no_difference": "the traces show no difference between the run and its baseline, yet the run does worse",
}


def evidence_sentence(evidence: Statement) -> str:
    sentence, values = EVIDENCE.get(evidence.code) or DIFFERENCES[evidence.code], evidence.values
    interval = interval_text(int(values["low"]), int(values["high"])) if "low" in values else ""
    still = values.get("still_share")
    changed = "all" if still == 0 else "" if still is None else f"{1 - float(still):.0%} of"
    return sentence.format(**values, interval=interval, changed=changed)


def named_series(result: Attribution) -> set[str]:
    """Return the series that are evidence for the most likely suspect."""
    if not result.suspects:
        return set()
    first = result.suspects[0]
    series = {str(each.values["series"]) for each in first.evidence if "series" in each.values}
    if first.code in ("mismatch", "staleness"):
        series |= {"mean_abs_d", "k3"}
    return series


def difference_sentences(result: Attribution) -> tuple[str, ...]:
    return tuple(dict.fromkeys(sentences(result.difference_codes, DIFFERENCES)))


def note_sentences(result: Attribution) -> tuple[str, ...]:
    return sentences(result.note_codes, NOTES)


def verdict_sentence(result: Attribution) -> str:
    broken = not_finite_clause(result.not_finite)
    if broken and result.fall is None:
        before = f" No drop in {result.outcome} before that." if result.outcome else ""
        return f"{broken}. Nothing can be concluded from these steps.{before}"
    if not result.outcome:
        return "Cannot detect a collapse: neither rewards nor evaluations were recorded at three steps or more."
    if result.fall is None:
        calm = f"No collapse detected: {result.outcome} shows no lasting drop beyond noise{later_clause(result.later)}"
        if any(note.code == "reward_changed" for note in result.note_codes):
            calm += ", but the reward itself changed (see the note)"
        if (supposed := result.supposed_cause) is None:
            return f"{calm}."
        cause = f"the most likely cause is {supposed.suspects[0].titled()}, starting at step {supposed.step}"
        return f"{calm}. If an evaluation does show a drop, {cause}."
    fall, step = result.fall, f"step {result.fall.step}{interval_text(*result.fall.interval)}"
    where = f"{fall.outcome} {fall.verb} from {fall.before:.3g} to {fall.after:.3g} after {step}"
    if fall.kind == FLAT:
        where = f"Learning stalled: {fall.course} {step}"
    return f"{where}. {f'{broken}. ' if broken else ''}{_cause(result)}"


def later_clause(later: Fall | None) -> str:
    if later is None:
        return ""
    return f"; after the selected steps, {later.outcome} {later.verb} after step {later.step}"


def not_finite_clause(found: Sequence[NotFinite]) -> str:
    by_step: dict[int, list[str]] = {}
    for each in found:
        by_step.setdefault(each.step, []).append(each.series)
    parts = []
    for step, (*others, last) in by_step.items():
        subject = f"{', '.join(others)} and {last} are" if others else f"{last} is"
        parts.append(f"{subject} NaN or infinite from step {step} until the end")
    return ", ".join(parts)


def _cause(result: Attribution) -> str:
    first = result.suspects[0]
    how = (
        "compared with a same-seed baseline" if result.is_intervention else "from this run alone"
        if result.control is None else "compared with another run"
    )  # fmt: skip
    not_mismatch = " The mismatch is not the cause." if result.clears_mismatch else ""
    if result.cause is None:
        return f"{unsure_clause(result)}, {how}.{not_mismatch}"
    return f"Most likely cause: {first.titled(how)}.{not_mismatch}"


def unsure_clause(result: Attribution) -> str:
    first, named = result.suspects[0], result.first_suspect
    if named is None:
        why = f": {evidence_sentence(first.for_it[0])}" if first.code == "unknown" and first.for_it else ""
        return f"Cause unknown. Probably none of the causes tested ({first.probability:.0%}){why}"
    if named is not first:
        return f"Cause unknown. Probably none of the causes tested ({first.probability:.0%}); the likeliest of them is {named.titled()}"
    return f"Cause unknown. Most likely of those tested: {named.titled()}; {result.suspects[1].titled()}"


def attribution_text(result: Attribution, width: int | None = None) -> str:
    result = shown(result)
    sentence = verdict_sentence(result)
    parts = [sentence if result.steps == ALL_STEPS else f"{result.trace}{of_steps(result.steps)}: {sentence}"]
    if differences := difference_sentences(result):
        parts.append("\n  ".join(["Differences between the run and its baseline:", *differences]))
    if result.changes:
        parts.append(_changes(result))
    change = result.supposed_cause
    suspects = change.suspects if change else result.suspects
    if suspects:
        parts.append("Suspects, with the log odds that each fact adds (for) or takes away (against):")
    parts += [_suspect(suspect) for suspect in suspects if _is_shown(suspect)]
    others = [f"{s.title} {s.probability:.1%}" for s in suspects if not _is_shown(s)]
    if others:
        parts.append(f"Unlikely (<{_SHOWN:.0%}): " + ", ".join(others))
    if notes := note_sentences(result):
        parts.append("\n".join(f"Note: {note}" for note in notes))
    return wrapped_lines("\n\n".join(parts), width)


def _first_suspect(result: Attribution) -> str | None:
    return None if result.first_suspect is None else result.first_suspect.code


def _is_shown(suspect: Suspect) -> bool:
    return round(suspect.probability, 3) >= _SHOWN  # as printed


def _shown_evidence(suspect: Suspect) -> tuple[Evidence, ...] | None:
    """Evidence for and against the suspect, or null if the suspect is unlikely (below 2%). `diagnose --verbose` always
    shows it."""
    return suspect.evidence if _is_shown(suspect) else None


WHOLE_FORM: Form = {
    Attribution: {
        "sentence": verdict_sentence, "cause": Attribution.cause, "differences": difference_sentences,
        "notes": note_sentences, "first_suspect": _first_suspect,
    },
    Suspect: {"broken": Suspect.broken, "since": Suspect.since},
    Evidence: {"sentence": evidence_sentence},
    Fact: {"sentence": evidence_sentence},
}  # fmt: skip
ATTRIBUTION_FORM: Form = {**WHOLE_FORM, Suspect: {**WHOLE_FORM[Suspect], "evidence": _shown_evidence}}


def _changes(result: Attribution) -> str:
    of_cause = {*named_series(result), result.fall.onset_of if result.fall else ""}
    own = [change for change in result.changes if not change.follows or change.series in of_cause]
    own.sort(key=lambda change: -change.abnormal)
    onset = result.fall and (result.fall.onset_of, result.fall.step)
    lines = ["Changes around the drop, largest first:"]
    for change in own[:_MOST_CHANGES]:
        is_drop = onset == (change.series, change.step)
        lines.append(f"  {change.order:<7} {change_sentence(change, is_drop=is_drop)}")
    if len(own) > _MOST_CHANGES:
        lines.append(f"  and {len(own) - _MOST_CHANGES} more: SELECT * FROM changes")
    followed = [change.series for change in result.changes if change.series not in {one.series for one in own}]
    if followed:
        lines.append(f"  consequences: {', '.join(dict.fromkeys(followed))}")
    return "\n".join(lines)


def _suspect(suspect: Suspect) -> str:
    lines = [suspect.titled()]
    for evidence in suspect.evidence[:_MOST_EVIDENCE]:
        word = "for" if evidence.points > 0 else "against" if evidence.points < 0 else "neutral"
        lines.append(f"  {word:<8}{evidence.points:+.1f}  {evidence_sentence(evidence)}")
    if suspect.broken:
        lines.append(f"  broken: {suspect.broken}" + ("" if suspect.since is None else f", since step {suspect.since}"))
    if suspect.next:
        lines.append(f"  next: {suspect.next}")
    return "\n".join(lines)
