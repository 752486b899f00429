"""An attribution as text and as JSON. All sentences about suspects are made here, from codes and numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ...schemas.steps import ALL_STEPS
from ..check.finding import TITLES
from ..check.text import of_steps
from ..dynamics.change_text import change_sentence
from ..rows import shown
from ..statement import Statement

if TYPE_CHECKING:
    from .attribution import Attribution, NotFinite
    from .silent import SilentChange
    from .suspect import Suspect

_MOST_CHANGES = 12
"""Changes that are listed."""
_SHOWN = 0.02
"""Suspects below this probability are named without their evidence."""

EVIDENCE_OF: Mapping[str, Mapping[str, str]] = {
    "any": {
        "prior": "before any evidence",
        "control_differs_and_did_not_fall": "the control differs in this and did not fall",
        "control_is_alike": "the control differs in something else alone",
        "control_differs_and_fell": "the control differs in this and fell too",
        "setting_changed": "{series} goes from {from_value} to {to_value} at step {step}",
        "setting_unusual": "{setting} is {value:g}; {customary_low:g} to {customary_high:g} is customary",
        "rewards_changed": "of {num_responses:,} responses that came before step {step} and after it {share:.0%} earn another "
        "reward since",
        "rewards_not_the_controls": "of {num_responses:,} responses from step {step} on that the control gave, too, {share:.0%} earn "
        "another reward, each time the same one",
        "policies_apart": "from step {step} on what is sampled is {apart:.2g} nats a token less likely to the trainer than to the "
        "engine: the recorded reward is that of another policy",
        "entropy_parts_first": "from the first update that differs on the entropy is higher than the control's, as a bonus for it makes it",
        "loss_moves_down": "the loss falls out of its range at step {step} (by {in_sd:.0f} standard deviations), before the policy moves: a bonus is "
        "taken off it",
        "loss_moves_up": "the loss rises out of its range at step {step} (by {in_sd:.0f} standard deviations), before the policy moves: a penalty is "
        "added to it",
        "loss_punishes_entropy": "since the fall the loss is far above what it was and goes down with the entropy (correlation {correlation:.2f}): "
        "entropy is punished",
        "loss_follows_entropy": "since the fall the loss is a multiple of what it was and goes down as the entropy goes up (correlation "
        "{correlation:.2f}): a bonus for it is most of the loss",
        "loss_follows_distance": "since the fall the loss is a multiple of what it was and goes with the distance to the reference (correlation "
        "{correlation:.2f}): a KL term is most of it",
        "update_moves_first": "updates become larger at step {step}, after gradients as before and before the policy moves",
        "masks_change": "from step {step} on the loss counts other tokens in {share:.0%} of {num_responses:,} responses that came before it and after it",
        "gradient_moves_first": "the gradient's norm grows at step {step}, before reward and policy move",
        "policy_moves_at_once": "at step {step} the policy is another one at once, after a gradient as before",
        "relation_breaks_alone": "from step {step} on likelier answers no longer earn more, while the step's rewards and the policy are what "
        "they were",
        "mismatch_grows_by_updates": "from step {step} on the mismatch grows from little to a multiple within some updates, as of weights that stay "
        "behind",
        "update_differs": "the two runs part at an update that was given the same in both",
        "gradient_is_equal": "the update of step {step} has the control's gradient norm: the loss has no other term",
        "gradient_differs": "the update of step {step} has {factor:.3g} times the control's gradient norm: the loss differs",
        "gradient_grows": "the update of step {step} has {factor:.3g} times the control's gradient norm",
        "update_is_other": "the update of step {step} is {factor:.3g} times as large as the control's, which its gradient does not explain",
        "update_is_equal": "the update of step {step} has the control's gradient norm and size, and other weights all the same",
        "loss_is_lower": "the loss of step {step} lies below the control's by {factor:.3g} times its usual size: a bonus is taken off it",
        "loss_is_higher": "the loss of step {step} lies above the control's by {factor:.3g} times its usual size: a penalty is added",
        "weights_jump": "the update of step {step} leaves weights that are {apart:.2g} nats a token from the control's: too far for a term of the "
        "loss",
        "leaves_reference": "within three steps the policy is {farther:.2g} nats a token farther from the reference than the control's",
        "evaluation_holds": "the evaluation holds while the reward of what was sampled falls: the policy is what it was",
    },
    "mismatch": {
        "no_passes": "fewer than two passes were recorded: no mismatch can be measured",
        "mismatch_small": "mean |d| at the onset is {mean_abs_d:.2g} nats: too small to affect a run",
        "mismatch_unclear": "mean |d| at the onset is {mean_abs_d:.2g} nats: this size may matter",
        "mismatch_large": "mean |d| at the onset is {mean_abs_d:.2g} nats: large enough to affect a run",
        "mismatch_grows_before_fall": "mean |d| grows {factor:.3g}-fold from step {step} on ({low} to {high}), before the fall",
        "mismatch_grows_with_fall": "mean |d| grows {factor:.3g}-fold from step {step} on ({low} to {high}), with the fall",
        "mismatch_grows_after_fall": "mean |d| grows {factor:.3g}-fold from step {step} on ({low} to {high}), after the fall "
        "began: it follows the fall",
        "not_sampled_so": "since the fall tokens have -logprob {surprisal:.2g} nats where the entropy is {entropy:.2g} ({ratio_since:.2g} times "
        "it, {ratio_before:.2g} before): they are not sampled with the logprobs that the engine returns",
        "engine_disagrees": "since the mismatch begins the engine gives {share:.0%} of equal openings of one step two logprobs, and the trainer one: "
        "it computes with noise",
        "trainer_disagrees": "since the mismatch begins the trainer gives {share:.0%} of equal openings of one step two logprobs, and the engine one: "
        "its scoring has noise, as dropout makes it",
        "trainer_moves_first": "where the mismatch jumps, the engine samples as before and the trainer scores otherwise: the trainer's weights changed at once",
        "exact_until": "the engine was exact until step {step} ({low} to {high}), and mean |d| is {mean_abs_d:.2g} nats from then on",
        "check_passes": "check finds {finding_title}",
        "check_fails": "check finds: {finding_title}",
        "explained_by_stale_weights": "the engine's logprobs of repeated openings are the trainer's of {distance} steps before "
        "({left_share:.0%} of the mismatch is left, {num_openings:,} openings): that is staleness",
        "explained_by_declared_lag": "sequences were sampled {lag:g} updates before they were scored, and the mismatch begins "
        "with the first updates: that is staleness",
        "explained_by_earlier_weights": "the engine has weights that the trainer had before",
        "explained_by_still_engine": "the engine gives {still_share:.0%} of {num_openings:,} repeated openings the same bits while the trainer's change: "
        "it has no new weights, which is staleness",
        "explained_by_steady_size": "the mismatch begins with the first updates and then keeps its size, as with weights that "
        "are behind: that is staleness",
    },
    "data": {
        "prompts_changed": "{series} goes from {from_value:.3g} to {to_value:.3g} at step {step} ({low} to {high}): no policy changes "
        "its prompts",
        "prompts_steady": "the prompts are what they were where the fall begins",
    },
    "truncation": {
        "responses_cut": "{longer_share:.0%} of the responses before were longer than {limit:g} tokens, none since is, and "
        "{cut_share:.0%} end exactly there",
        "responses_cut_at_end": "{longer_share:.0%} of the responses before were longer than {limit:g} tokens, none from step {step} on is, "
        "and {cut_share:.0%} of these end exactly there: a limit that goes on shrinking",
        "limited_shorter": "{share:.0%} of the responses of step {step} end at a limit, as hardly one did before; none is longer than "
        "{limit:g} tokens, where some had {longest_before:g} before",
        "endings_become_one": "{share:.0%} of the responses of step {step} end with token {token} ({before_share:.0%} before) and are shorter: the token stops them",
        "endings_change": "from step {step} on {share:.0%} of the responses end with tokens with which hardly one ended before ({before_share:.0%}): "
        "they are broken off",
        "endings_shift": "by step {step} {share:.0%} of the responses end with tokens with which hardly one ended before ({before_share:.0%}), more "
        "and more of them",
        "responses_not_cut": "responses do not end at a limit that those before passed",
    },
    "reference": {
        "reference_jumps": "k3 to the reference goes from {from_value:.3g} to {to_value:.3g} nats at step {step} ({low} to {high}), at "
        "once",
        "distance_jumps": "responses are {from_value:.3g} and then {to_value:.3g} nats a token likelier to the policy than to the reference, "
        "from step {step} on, at once, and the policy is the same",
        "reference_changed": "from step {step} on the reference model scores {share:.0%} of {num_responses:,} responses otherwise than "
        "before: it is another one",
        "advantages_by_distance": "advantages go with the distance to the reference within groups since the fall (correlation {correlation:.2f}, "
        "{correlation_before:.2f} before): a KL term is most of them",
        "returns_to_reference": "the distance to the reference goes from {distance_before:.3g} to {distance_after:.3g} nats a token with the "
        "fall: the policy returns to its reference, which a KL term makes it do",
        "moved_by_distance": "the update of step {step} moves tokens by how far they were from the reference (correlation {correlation:.2f}), beside "
        "the control's: a KL term does that",
        "no_reference": "no coefficient of a KL term and no jump of the distance to a reference was recorded",
    },
    "advantages": {
        "advantages_inverted": "within groups advantages go down where rewards go up (correlation {correlation:.2f})",
        "advantages_turn": "from step {step} on advantages go down within groups where rewards go up (correlation {correlation:.2f}, "
        "{correlation_before:.2f} before)",
        "advantages_of_other_sign": "within groups advantages do not follow rewards (correlation {correlation:.2f}), and have the size that rewards make "
        "them: part of them has another sign",
        "advantages_one_sided": "{negative_share:.0%} of the advantages are negative since the fall, {before_share:.0%} were before",
        "advantages_changed": "{series} goes from {from_value:.3g} to {to_value:.3g} at step {step} ({low} to {high}), more than rewards "
        "make it",
        "advantages_steady": "sign, scale and mean of the advantages are what rewards make them",
    },
    "staleness": {
        "declared_fresh": "the trace declares for every step that the weights that sampled were those that scored",
        "engine_stands_still": "the engine gives {still_share:.0%} of {num_openings:,} repeated openings the same bits as some steps before, the "
        "trainer {trainer_share:.0%}: the engine has no new weights",
        "declared_fresh_and_still": "the trace declares for every step that the weights that sampled were those that scored, which the engine's "
        "logprobs contradict",
        "no_declared_lag": "the trace declares no lag between sampling and scoring weights",
        "declared_lag": "sequences were sampled by weights {lag:g} updates older than those that scored them; mean |d| is "
        "{mean_abs_d:.2g} nats",
        "declared_lag_grows": "sequences were sampled by weights {lag:g} updates older than those that scored them, where it was "
        "{lag_before:g} before; mean |d| is {mean_abs_d:.2g} nats",
        "ordinary_lag": "sequences were sampled by weights {lag:g} updates older than those that scored them, as before the fall: the run "
        "learned with that",
        "mismatch_grows_beside_lag": "the mismatch grew to {mean_abs_d:.2g} nats while sequences were sampled {lag:g} updates before "
        "they were scored, as before: it is not the lag's",
        "earlier_weights_of_step": "where both sides differ, {share:.0%} of the engine's logprobs of {num_agreeing:,} openings are those that the trainer had at "
        "step {version}: it kept these weights",
        "earlier_weights_at_distance": "where both sides differ, {share:.0%} of the engine's logprobs of {num_agreeing:,} openings are those that the "
        "trainer had {version} steps before",
        "earlier_weights_of_several_steps": "where both sides differ, {num_equal:,} of the engine's logprobs of {num_openings:,} openings are those that "
        "the trainer had at some step before, {by_chance:,} by chance",
        "stale_weights_match": "the engine's logprobs of repeated openings are the trainer's of {distance} steps before "
        "({left_share:.0%} of the mismatch is left, {num_openings:,} openings)",
        "stale_weights_excluded": "the engine's logprobs of repeated openings are the trainer's of no step up to {max_distance} "
        "before (at best {left_share:.0%} of the mismatch is left): the weights are not behind",
        "engine_moves_on": "the engine gives {num_openings:,} repeated openings other logprobs at each step: it gets new weights",
        "mismatch_at_first_step": "the mismatch is there at the first recorded step",
        "mismatch_at_first_step_without_lag": "the mismatch is there at the first recorded step, where no weights can be behind "
        "unless the run was resumed",
        "mismatch_steady": "the mismatch comes with the first updates and then keeps its size, as with weights that are some "
        "updates behind",
        "mismatch_steady_and_check": "the mismatch comes with the first updates and then keeps its size (check finds stale "
        "weights), as with weights that are some updates behind",
    },
    "optimizer": {
        "learning_rate_spike_before_fall": "the learning rate is {factor:.3g} times its median from step {step} on, before the "
        "fall begins",
        "learning_rate_spike_at_fall": "the learning rate is {factor:.3g} times its median from step {step} on, where the fall "
        "begins",
        "learning_rate_spike_after_fall": "the learning rate is {factor:.3g} times its median from step {step} on, after the "
        "fall began",
        "update_size": "an update changes the weights by {update_to_weight:.2g} of their size",
        "update_leaps": "the update of step {step} is {factor:.3g} times as large as those before",
        "update_bursts": "{num_updates} updates until then are more than {burst_factor:g} times as large as the median one, up "
        "to {max_factor:.3g} times",
        "reward_drops_with_policy": "the reward loses {share:.0%} of the fall at step {step}, and the policy is another one from "
        "then on: too much for so few updates",
        "grad_norm_grows_before_fall": "the gradient norm grows {factor:.3g}-fold from step {step} on, before the fall",
        "grad_norm_grows_after_fall": "the gradient norm grows {factor:.3g}-fold from step {step} on, after the fall began",
    },
    "reward": {
        "rewards_deterministic": "the reward depends on the response alone: {unequal_share:.1%} of {num_pairs:,} repeated "
        "responses have two rewards",
        "rewards_disagree_in_step": "{share:.0%} of the equal responses within a step have two rewards since the fall, {before_share:.1%} before it: the "
        "reward depends on more than the response",
        "rewards_of_other_rule": "{share:.0%} of {num_responses:,} responses that came before step {step} earn something else since, and equal responses "
        "of one step earn the same: the reward follows another rule",
        "rewards_noisy": "{unequal_share:.0%} of {num_pairs:,} repeated responses to the same prompt have two rewards, "
        "{mean_difference:.2g} apart",
        "rewards_noisy_before": "{unequal_share:.0%} of {num_pairs:,} repeated responses have two rewards, and about as many had "
        "before the fall",
        "likelier_earn_less": "where the fall begins the likelier answers earn less in {negative_share:.0%} of the groups (mean "
        "correlation {correlation:.2f}), as if the reward were inverted",
        "likelier_earn_no_more": "where the fall begins likelier answers earn no more (correlation {correlation:.2f} within "
        "groups), as if the reward were random",
        "likelier_earn_more": "where the fall begins likelier answers earn more (correlation {correlation:.2f} within groups)",
        "reward_drops_without_policy": "the reward loses {share:.0%} of the fall at step {step}, where entropy, length and "
        "likelihood stay what they were: the same answers earn less",
        "reward_and_relation_move": "at step {step} rewards are other ones and likelier answers no longer earn more, while the policy is what it was",
        "reward_moves_alone": "at step {step} rewards are other ones while the policy is what it was",
        "rewards_beyond_range": "{share:.0%} of the rewards since the fall lie above all before, up to {highest:.3g} where it was {highest_before:.3g}",
        "reward_hides_fall": "the recorded reward goes from {reward_before:.3g} to {reward_after:.3g} while {outcome} falls from "
        "{outcome_before:.3g} to {outcome_after:.3g}: it pays for something else",
        "reward_hides_fall_of_other_policy": "the recorded reward goes from {reward_before:.3g} to {reward_after:.3g} while {outcome} falls "
        "from {outcome_before:.3g} to {outcome_after:.3g}, of another policy than what was sampled",
        "reward_hides_fall_pays_length": "the recorded reward goes from {reward_before:.3g} to {reward_after:.3g} while {outcome} "
        "falls from {outcome_before:.3g} to {outcome_after:.3g}: it pays for length",
        "reward_falls_too": "the recorded reward falls with the evaluation",
    },
    "pairing": {
        "rewards_sorted": "in {share:.0%} of the groups since the fall the rewards lie in the order of their size, in {before_share:.0%} before",
        "rewards_reversed": "{unequal_share:.0%} of {num_pairs:,} repeated responses have two rewards; with each step's rewards in reverse it "
        "is {unequal_shifted_share:.0%}",
        "rewards_reversed_in_groups": "{unequal_share:.0%} of {num_pairs:,} repeated responses have two rewards; with each group's rewards in "
        "reverse it is {unequal_shifted_share:.0%}",
        "rewards_members_first": "{unequal_share:.0%} of {num_pairs:,} repeated responses have two rewards; with those of the groups' first "
        "members before all second ones it is {unequal_shifted_share:.0%}: rows and columns were exchanged",
        "rewards_groups_first": "{unequal_share:.0%} of {num_pairs:,} repeated responses have two rewards; read group by group where they "
        "came member by member, it is {unequal_shifted_share:.0%}: rows and columns were exchanged",
        "rewards_next_in_groups": "{unequal_share:.0%} of {num_pairs:,} repeated responses have two rewards; with the reward of the member beside each in "
        "its group it is {unequal_shifted_share:.0%}",
        "rewards_halves": "{unequal_share:.0%} of {num_pairs:,} repeated responses have two rewards; with both halves of each step exchanged it is "
        "{unequal_shifted_share:.0%}",
        "rewards_of_last_step": "{unequal_share:.0%} of {num_pairs:,} repeated responses have two rewards; with the rewards of the step after it is "
        "{unequal_shifted_share:.0%}: rewards are recorded a step late",
        "rewards_in_other_rows": "{unequal_share:.0%} of {num_pairs:,} repeated responses have two rewards; moved by {shift} rows "
        "within the step it is {unequal_shifted_share:.0%}",
        "rewards_reordered": "{num_responses:,} responses earn something else than before the fall, and {num_lacking:,} of their earlier "
        "rewards are missing in their steps ({by_chance:.0f} would be by chance): the rewards lie in other rows",
        "rewards_move_rows": "from step {step} on likelier answers earn no more, while the same rewards are given (mean {mean:.3g}, {mean_before:.3g} "
        "before): they lie in other rows",
        "rewards_of_other_prompts": "{share:.0%} of {num_responses:,} responses that came before under the prompt {shift:+d} places away have "
        "the reward that they earned there ({chance_share:.0%} would by chance): they are graded by the wrong prompt",
        "rewards_in_their_rows": "{num_pairs:,} repeated responses have the same reward each time ({unequal_share:.1%} differ)",
        "advantages_do_not_follow": "within groups advantages do not follow rewards (correlation {correlation:.2f}; a baseline "
        "and a scale leave it at 1)",
        "rewards_by_finish": "{unequal_share:.0%} of {num_pairs:,} repeated responses have two rewards; with those in the order in which "
        "responses of that length end it is {unequal_shifted_share:.0%}",
        "logprobs_of_other_rows": "from step {step} on the trainer scores {num_responses:,} responses otherwise than the engine, and {share:.0%} of "
        "them as the engine scores another one of the step ({chance_share:.0%} as one of the step before): they lie in other rows",
        "logprobs_in_other_rows": "check finds logprobs of the two passes in each other's rows",
    },
    "entropy": {
        "entropy_impossible": "entropy goes from {first:.3g} over {at_fall:.3g} at the onset to {last:.3g} nats: more than any vocabulary "
        "allows, so that the weights are broken or are not those that sampled",
        "entropy_climbs": "entropy goes from {first:.3g} over {at_fall:.3g} at the onset to {last:.3g} nats: it grows from before the fall "
        "to the end, as under a bonus for it",
        "entropy_rose_before_fall": "entropy goes from {first:.3g} over {at_fall:.3g} at the onset to {last:.3g} nats: it rose "
        "before the fall",
        "entropy_lost": "entropy goes from {first:.3g} over {at_fall:.3g} at the onset to {last:.3g} nats: the policy becomes more "
        "certain while it does worse",
        "entropy_collapses": "entropy goes from {first:.3g} over {at_fall:.3g} at the onset to {last:.3g} nats: it is lost with the fall, before the "
        "policy had learned to be certain",
        "entropy_explodes": "entropy goes from {first:.3g} over {at_fall:.3g} at the onset to {last:.3g} nats: it explodes with "
        "the fall",
        "entropy_rises_with_fall": "entropy goes from {first:.3g} over {at_fall:.3g} at the onset to {last:.3g} nats: it rises "
        "with the fall or after it",
        "entropy_in_range": "entropy goes from {first:.3g} over {at_fall:.3g} at the onset to {last:.3g} nats: it stays in its "
        "range",
        "advantages_by_surprise": "advantages go with -logprob within groups since the fall (correlation {correlation:.2f}, "
        "{correlation_before:.2f} before): an entropy bonus or a penalty in the reward is most of them",
        "updates_large": "updates are large, which changes entropy as well",
    },
    "length": {
        "length_steady": "the length of responses stays what it was",
        "length_changes": "responses go from {before:.3g} to {after:.3g} tokens from step {step} on, not after the fall",
        "length_changes_after_fall": "responses go from {before:.3g} to {after:.3g} tokens from step {step} on, after the fall "
        "began",
        "length_pays": "within groups longer responses earn more (correlation {correlation:.2f})",
        "length_pays_since": "from step {step} on the same responses earn something else by their length (correlation "
        "{correlation:.2f}, {num_responses:,} responses)",
        "length_explains_rewards": "lengths explain {share:.0%} of what the rewards of a step differ by since the fall, {before_share:.0%} before",
        "length_pays_while_hidden": "within groups longer responses earn more (correlation {correlation:.2f}), and the reward "
        "stays up while they grow and the evaluation falls",
        "length_costs_while_hidden": "within groups shorter responses earn more (correlation {correlation:.2f}), and the reward "
        "stays up while they shrink and the evaluation falls",
    },
}  # fmt: skip
"""Suspect -> code of its evidence -> the sentence, with the numbers that it holds."""

EVIDENCE = {code: sentence for of_suspect in EVIDENCE_OF.values() for code, sentence in of_suspect.items()}

UNITS: Mapping[str, str] = {
    "after": "tokens", "apart": "nats", "at_fall": "nats", "before": "tokens", "before_share": "0 to 1", "by_chance": "count", "burst_factor": "times the median",
    "chance_share": "0 to 1", "correlation": "-1 to 1", "correlation_before": "-1 to 1", "cut_share": "0 to 1", "customary_high": "the setting's", "customary_low": "the setting's",
    "distance": "steps", "distance_after": "nats", "distance_before": "nats", "entropy": "nats", "factor": "ratio", "farther": "nats", "finding": "code of check", "first": "nats", "from_value": "the series'", "high": "step", "highest": "rewards", "highest_before": "rewards", "in_sd": "standard deviations",
    "lag": "updates", "lag_before": "updates", "last": "nats", "left_share": "0 to 1", "limit": "tokens", "longer_share": "0 to 1", "low": "step", "max_distance": "steps",
    "max_factor": "times the median", "mean": "rewards", "mean_before": "rewards", "mean_abs_d": "nats", "mean_difference": "rewards", "negative_share": "0 to 1",
    "longest_before": "tokens", "num_agreeing": "count", "num_equal": "count", "token": "id", "version": "step, or steps before",
    "num_lacking": "count", "num_openings": "count", "num_pairs": "count", "num_responses": "count", "num_updates": "count",
    "outcome": "series", "outcome_after": "the outcome's", "outcome_before": "the outcome's",
    "series": "name", "to_value": "the series'",
    "ratio_before": "ratio", "ratio_since": "ratio", "reward_after": "rewards", "reward_before": "rewards", "setting": "name", "share": "0 to 1", "shift": "rows",
    "step": "step", "still_share": "0 to 1", "surprisal": "nats", "trainer_share": "0 to 1", "unequal_share": "0 to 1", "unequal_shifted_share": "0 to 1", "update_to_weight": "ratio",
    "value": "the setting's",
}  # fmt: skip
"""Number of an evidence -> its unit."""

DIFFERENCES: Mapping[str, str] = {
    "prompts_part": "step {step} is the first that differs: it asks other prompts",
    "responses_cut_off": "step {step} is the first that differs: {num_equal} of {num_sequences} responses are the control's, the others end "
    "where the control's go on",
    "sampling_parts": "step {step} is the first that differs: {num_equal} of {num_sequences} responses are the control's, though both engines "
    "return the same logprobs",
    "tool_parts": "step {step} is the first that differs: {num_equal} of {num_sequences} responses are the control's, the others differ first in "
    "tokens that were not sampled",
    "engine_parts": "step {step} is the first that differs: the engine gives equal tokens other logprobs ({apart:.2g} nats apart), the trainer "
    "the same",
    "scoring_parts": "step {step} is the first that differs: the trainer gives equal tokens other logprobs ({apart:.2g} nats apart), the engine "
    "the same",
    "scored_rows_part": "step {step} is the first that differs: the trainer's logprobs are the control's of other rows",
    "rewards_part": "step {step} is the first that differs: {share:.0%} of equal responses earn another reward",
    "rewards_permuted_part": "step {step} is the first that differs: its rewards are the control's in another order",
    "rewards_by_length_part": "step {step} is the first that differs: {share:.0%} of equal responses earn another reward, by their length "
    "(correlation {correlation:.2f})",
    "rewards_of_last_step_part": "step {step} is the first that differs: its rewards are those of the step before",
    "advantages_by_distance_part": "step {step} is the first that differs: equal responses with equal rewards have other advantages, by their "
    "distance to the reference (correlation {correlation:.2f})",
    "advantages_by_surprise_part": "step {step} is the first that differs: equal responses with equal rewards have other advantages, by their "
    "-logprob (correlation {correlation:.2f})",
    "advantages_or_rewards_part": "step {step} is the first that differs: equal responses have other advantages, and their rewards were not "
    "recorded",
    "reference_parts": "step {step} is the first that differs: the reference gives equal tokens other logprobs ({apart:.2g} nats apart)",
    "advantages_part": "step {step} is the first that differs: equal responses with equal rewards have other advantages",
    "advantages_permuted_part": "step {step} is the first that differs: its advantages are the control's in another order",
    "update_parts": "the update of step {step} is the first that differs: from the same sequences, rewards and advantages it leaves weights that "
    "are {apart:.2g} nats a token apart",
    "rewards_by_length": "{share:.0%} of {num_responses:,} responses that both runs gave earn another reward in each, the more "
    "the longer they are (correlation {correlation:.2f})",
    "rewards_permuted": "{share:.0%} of {num_responses:,} responses that both runs gave earn another reward in each, and a step's "
    "rewards are those of the control in another order",
    "rewards": "{share:.0%} of {num_responses:,} responses that both runs gave earn another reward in each",
    "advantages": "advantages follow rewards in the control (correlation {control:.2f}) and not in the run ({run:.2f})",
    "lag": "the run's sequences were sampled {run:g} updates before they were scored, the control's {control:g}",
    "mismatch": "mean |d| at the onset is {run:.2g} nats in the run and {control:.2g} in the control",
    "learning_rate": "from step {step} on the learning rate is {run:.3g} in the run and {control:.3g} in the control",
    "setting": "{setting} is {run} in the run and {control} in the control",
    "gradient": "at step {step} the same sequences, rewards and advantages give a gradient of norm {run:.4g} in the run and "
    "{control:.4g} in the control: the loss has another term (an entropy bonus, a KL term)",
    "update_or_loss": "the update of step {step} leaves other weights than the control's, from the same sequences, rewards and "
    "advantages: the optimizer or a term of the loss differs (no gradient norm was recorded, which would tell them apart)",
    "prompts": "from step {step} on the prompts are other ones than the control's ({num_steps} steps)",
    "changed": "{series} changes near the fall in the run and not in the control",
    "gradient_without_advantages": "at step {step} the same sequences and rewards give a gradient of norm {run:.4g} in the run and "
    "{control:.4g} in the control: the advantages, which were not recorded, or a term of the loss differ",
    "update_or_loss_without_advantages": "the update of step {step} leaves other weights than the control's, from the same sequences "
    "and rewards: the optimizer, a term of the loss, or the advantages differ (neither they nor a gradient norm was recorded)",
    "entropy_higher": "after step {step} the entropy is higher in the run at {share:.0%} of {num_steps} steps, before the fall is there",
    "update": "the update of step {step} leaves other weights than the control's, from the same sequences, rewards and gradient "
    "norm: the optimizer differs, or the weights were changed by something else",
}
"""Code of a difference from the control -> the sentence."""

NOTES: Mapping[str, str] = {
    "no_outcome": "neither a reward nor an evaluation was recorded at {min_values} steps or more, so that no fall can be seen",
    "no_evaluation": "no evaluation was logged (a metric such as eval/reward): a wrong reward hides a fall, since the reward "
    "that was recorded is the wrong one",
    "reward_changed": "from step {step} on the reward is another one: {share:.0%} of {num_responses:,} responses that came before and "
    "since earn something else, the same each time. Whether the run does worse since, only an evaluation can tell",
    "no_shared_token": "the passes {first_pass} and {second_pass} share no token, so that nothing can be said of a mismatch",
    "check_failed": "check could not be asked: {error}",
    "other_prompts": "the first steps of run and control do not share their prompts: differences between them are an "
    "observation, for an intervention rerun with the same seeds and data",
    "no_difference": "run and control differ in nothing that the traces hold, and only the run fell",
}
"""Code of a note -> the sentence."""


def evidence_sentence(evidence: Statement) -> str:
    """The sentence of a piece of evidence."""
    finding = str(evidence.values.get("finding", ""))
    return EVIDENCE[evidence.code].format(**evidence.values, finding_title=TITLES.get(finding, finding))


def verdict_sentence(result: Attribution) -> str:
    """Whether the run fell, where that begins, and the cause."""
    broken = not_finite_clause(result.not_finite)
    if broken and result.fall is None:
        before = f" No fall of {result.outcome} is seen before." if result.outcome else ""
        return f"{broken}: nothing can be learned from these steps.{before}"
    if not result.outcome:
        return "It cannot be told whether this run fell: neither a reward nor an evaluation was recorded at three steps or more."
    if result.fall is None:
        if result.silent is not None:
            return f"No fall is seen: {result.outcome} did not go down for good beyond its noise, but {silent_clause(result.silent)}."
        if any(note.code == "reward_changed" for note in result.note_codes):
            return f"No fall is seen: {result.outcome} did not go down for good beyond its noise, but it was changed on the way (below)."
        if result.supposed_cause is not None:
            return f"No fall: {result.outcome} did not go down for good beyond its noise. {supposed_clause(result.supposed_cause)}."
        return f"No fall: {result.outcome} did not go down for good beyond its noise, so that there is no cause to look for."
    fall = result.fall
    first, last = fall.interval
    where = (
        f"{fall.outcome} {fall.verb} from step {fall.step} on (95 % interval {first} to {last}), {fall.before:.3g} to "
        f"{fall.after:.3g}"
    )
    return f"{where}. {f'{broken}. ' if broken else ''}{_cause(result)}"


def not_finite_clause(found: Sequence[NotFinite]) -> str:
    """What is NaN or infinite from which step to the end of the run; empty where nothing is."""
    by_step: dict[int, list[str]] = {}
    for each in found:
        by_step.setdefault(each.step, []).append(each.series)
    parts = []
    for step, names in by_step.items():
        *others, last = names
        told = f"{', '.join(others)} and {last} are" if others else f"{last} is"
        parts.append(f"{told} NaN or infinite from step {step} to the end")
    return ", ".join(parts)


def silent_clause(silent: SilentChange) -> str:
    """From which step on the recorded reward tells nothing of the policy, and why."""
    first = silent.suspects[0]
    return (
        f"from step {silent.step} on (interval {silent.low} to {silent.high}) it no longer tells how good the trained policy is: most "
        f"probably {first.title} ({first.probability:.0%}). Whether the run does worse since, only an evaluation can tell"
    )


def supposed_clause(supposed: SilentChange) -> str:
    """What was changed where nothing fell, in case that an evaluation says otherwise."""
    first = supposed.suspects[0]
    return (
        f"Should an evaluation say that it does worse all the same, then most probably by {first.title} ({first.probability:.0%}), from step "
        f"{supposed.step} on"
    )


def _cause(result: Attribution) -> str:
    first = result.suspects[0]
    how = (
        "By intervention (the control shares its seeds)" if result.is_intervention else "By observation of one run"
        if result.control is None else "By observation of two runs"
    )  # fmt: skip
    not_mismatch = "; not the mismatch" if result.clears_mismatch else ""
    if result.cause is None:
        return f"{how} {unsure_clause(result)}{not_mismatch}."
    return f"{how} the cause is {first.title} ({first.probability:.0%}){not_mismatch}."


def unsure_clause(result: Attribution) -> str:
    """Where no suspect is more probable than all others together: which comes first, and what else may be."""
    first, named = result.suspects[0], result.first_suspect
    if named is None:
        told = first.for_it[0].sentence if first.code == "unknown" and first.for_it else first.title
        return f"no suspect explains it ({first.probability:.0%}): {told}"
    second = result.suspects[1] if named is first else first
    word = "then" if named is first else "behind"
    return f"no cause is sure: the first suspect is {named.title} ({named.probability:.0%}), {word} {second.title} ({second.probability:.0%})"


def attribution_text(result: Attribution) -> str:
    """The verdict, then what moved first, the suspects with their evidence, and what would decide."""
    result = shown(result)
    parts = [
        f"{result.trace}{of_steps(result.steps)}: {result.sentence}" if result.steps != ALL_STEPS else result.sentence
    ]
    if result.differences:
        parts.append("The run and its control differ:\n" + "\n".join(f"  {each}" for each in result.differences))
    if result.changes:
        parts.append(_changes(result))
    told = result.silent or (result.supposed_cause if result.fall is None else None)
    suspects = told.suspects if told else result.suspects
    parts += [_suspect(suspect) for suspect in suspects if suspect.probability >= _SHOWN]
    others = [f"{s.title} {s.probability:.1%}" for s in suspects if s.probability < _SHOWN]
    if others:
        parts.append("Hardly: " + ", ".join(others))
    if result.notes:
        parts.append("\n".join(f"Note: {note}" for note in result.notes))
    return "\n\n".join(parts)


def attribution_json(result: Attribution) -> dict[str, Any]:
    """The same as JSON can say it, with every number; sentences beside their codes."""
    rendered = {name: getattr(result, name) for name in ("sentence", "cause", "differences", "notes")}
    rendered["first_suspect"] = None if result.first_suspect is None else result.first_suspect.code
    changes = {name: _silent_json(getattr(result, name)) for name in ("silent", "supposed")}
    return asdict(result) | {"suspects": [_suspect_json(each) for each in result.suspects]} | changes | rendered


def _silent_json(found: SilentChange | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return asdict(found) | {"suspects": [_suspect_json(each) for each in found.suspects]}


def _suspect_json(suspect: Suspect) -> dict[str, Any]:
    """A suspect with the sentences of its evidence."""
    return asdict(suspect) | {"evidence": [asdict(each) | {"sentence": each.sentence} for each in suspect.evidence]}


def _changes(result: Attribution) -> str:
    """What changed around the fall, and in one line what only follows."""
    own = [change for change in result.changes if not change.follows]
    lines = ["What changed around the fall, the most abnormal first:"]
    lines += [f"  {change.order:<7} {change_sentence(change)}" for change in own[:_MOST_CHANGES]]
    if len(own) > _MOST_CHANGES:
        lines.append(f"  and {len(own) - _MOST_CHANGES} more: SELECT * FROM changes")
    followed = [change.series for change in result.changes if change.follows]
    if followed:
        lines.append(f"  what follows these: {', '.join(dict.fromkeys(followed))}")
    return "\n".join(lines)


def _suspect(suspect: Suspect) -> str:
    lines = [f"{suspect.title}: {suspect.probability:.0%}"]
    for evidence in suspect.evidence:
        word = "for" if evidence.points > 0 else "against" if evidence.points < 0 else "neither"
        lines.append(f"  {word:<8}{evidence.points:+.1f}  {evidence.sentence}")
    if suspect.next:
        lines.append(f"  would decide: {suspect.next}")
    return "\n".join(lines)
