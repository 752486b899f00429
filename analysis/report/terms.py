"""The words of a report: of each series its title, its unit, and what it is for one who does not know it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Term:
    """A word, in other words."""

    title: str
    unit: str
    note: str


SERIES: dict[str, Term] = {
    "k3": Term("Mismatch k3", "nats", "Mean of exp(d) - 1 - d over tokens, d = logprob of the trainer less the engine's: an estimate of the KL divergence between them that is never negative."),
    "p99_abs_d": Term("p99 of |d|", "nats", "99 of 100 tokens have a smaller |d|: the gap between the trainer's and the engine's logprob of the same token."),
    "max_abs_d": Term("Largest |d|", "nats", "The token of the step whose two logprobs lie furthest apart. At 0.69 nats one side gives it twice the probability of the other."),
    "ess": Term("ESS of tokens", "share", "Effective sample size: (sum w)^2 / (n sum w^2) with w = exp(d). At 1 every token counts alike; near 0 a few carry all weight."),
    "reward": Term("Reward", "", "Mean reward of the sequences of the step, as recorded."),
    "length": Term("Response length", "tokens", "Mean number of tokens of a response."),
    "entropy": Term("Entropy", "nats", "Mean entropy of the policy's next-token distribution: how undecided it is. A fall to near 0 ends exploration."),
    "grad_norm": Term("Gradient norm", "", "L2 norm of the gradient, as the trainer logged it."),
    "learning_rate": Term("Learning rate", "", "As the trainer logged it."),
    "clip_share": Term("Clipped share", "share of tokens", "Tokens whose ratio is beyond the recorded loss's bound: ppo_clip gives them no gradient, cispo one whose weight is the bound."),
    "policy_lag": Term("Policy lag", "updates", "Updates between the weights that sampled and those inside the loss: 0 is on-policy."),
    "changed_weights": Term("Changed weights", "share of elements", "Elements of the weights whose bits differ from the version before. In bfloat16 small updates are rounded away."),
    "loss": Term("Loss", "", "As the trainer logged it."),
    "update_to_weight": Term("Update to weight", "ratio", "Size of one update over the size of the weights."),
    "reward_std_within_groups": Term("Reward spread in groups", "", "Standard deviation of the reward within groups of one prompt: what advantages are made of."),
    "share_groups_without_spread": Term("Groups without spread", "share of groups", "Groups in which all rewards are equal: they give no gradient."),
    "share_length_limited": Term("Cut at the limit", "share of responses", "Responses that ended because they reached the limit of tokens."),
}  # fmt: skip
"""Series of dynamics.quantities that a report shows -> what they are, in the order in which it shows them."""

EVALUATION = Term("", "", "An evaluation that the run logged: the outcome that a wrong reward cannot move.")

WORDS: dict[str, str] = {name: term.note for name, term in SERIES.items() if "_" in name} | {
    "k3_positive": "k3 of the tokens with an advantage above 0.",
    "k3_negative": "k3 of the tokens with an advantage below 0.",
    "d": "The gap of one token: the trainer's logprob less the engine's, in nats. 0.69 nats is a factor of two in probability.",
    "nats": "Natural-logarithm units: exp(x nats) is a factor.",
    "rms": "Root mean square: large values count more.",
    "valid": "Whether both logprobs are of the same thing: same tokens, temperature, mask, weights and position. Otherwise their gap says nothing about numerics.",
    "contract": "Everything that decides the numbers of a pass: engine, versions, dtypes, kernels, parallelism, sampling.",
    "advantage": "How much better a response did than the others of its group; its sign says whether training makes it likelier.",
    "|d|": "Size of the gap of one token between the trainer's logprob and the engine's, in nats.",
    "sum |f|": "Sum over tokens of the size of their contribution to the objective: ratio times advantage, as the loss clips it.",
    "k3": "Mean of exp(d) - 1 - d: an estimate of the KL divergence between trainer and engine, in nats.",
    "alarms": "A level that a framework or paper sounds an alarm at, each under its own definition: see why.",
    "interval": "Of resampled groups of sequences: where the value would lie if the run had drawn others.",
    "replay": "Recorded steps scored again under other numerics, from the weights that the trace keeps.",
    "ln ratio": "Natural logarithm of the probability of a token under one policy over that under another.",
    "arm": "A replay of recorded steps under other numerics, kept as a pass of its own.",
    "observation": "Judged from one run: what came first need not be the cause.",
    "intervention": "Judged beside a control run that shares its seeds and differs in one thing.",
}
"""Words that have a hover note wherever they stand in a report -> the note."""
