"""Terms used in a report: title, unit and a short explanation for each series."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Term:
    """A term used in a report, with its explanation."""

    title: str
    unit: str
    note: str


SERIES: dict[str, Term] = {
    "k3": Term("Mismatch k3", "nats", "Mean of exp(d) - 1 - d over tokens, d = the trainer's logprob minus the engine's: an estimate of the KL divergence between them that is never negative."),
    "p99_abs_d": Term("p99 of |d|", "nats", "99 of 100 tokens have a smaller |d|, the difference between the trainer's and the engine's logprob of the same token."),
    "max_abs_d": Term("Largest |d|", "nats", "The largest difference between the two logprobs of a token in the step. "
    "At 0.69 nats, one side gives the token twice the probability."),
    "ess": Term("ESS of tokens", "share", "Effective sample size: (sum w)^2 / (n sum w^2) with w = exp(d). At 1, all "
    "tokens have equal weight; near 0, a few tokens have nearly all of it."),
    "reward": Term("Reward", "", "Mean reward of the sequences in the step, as recorded."),
    "length": Term("Response length", "tokens", "Mean number of tokens per response."),
    "entropy": Term("Entropy", "nats", "Mean entropy of the policy's next-token distribution. Near 0 there is no exploration."),
    "grad_norm": Term("Gradient norm", "", "L2 norm of the gradient, as the trainer logged it."),
    "learning_rate": Term("Learning rate", "", "As the trainer logged it."),
    "clip_share": Term("Clipped share", "share of tokens", "Tokens whose ratio exceeds the bound of the recorded loss: ppo_clip gives them no gradient, cispo clamps their weight to the bound."),
    "policy_lag": Term("Policy lag", "updates", "Updates between the weights that sampled and those inside the loss: 0 is on-policy."),
    "changed_weights": Term("Changed weights", "share of elements", "Weight elements that differ bitwise from the previous version. In bfloat16, small updates are rounded away."),
    "loss": Term("Loss", "", "As the trainer logged it."),
    "update_to_weight": Term("Update to weight", "ratio", "Norm of one update divided by the norm of the weights."),
    "reward_std_within_groups": Term("Reward spread in groups", "", "Standard deviation of the reward within groups "
    "with the same prompt, from which advantages are computed."),
    "share_groups_without_spread": Term("Groups without spread", "share of groups", "Groups in which all rewards are equal: they give no gradient."),
    "share_length_limited": Term("Cut at the limit", "share of responses", "Responses that ended because they reached "
    "the token limit."),
}  # fmt: skip
"""Name of a series -> the term under which a report shows the series, in the order shown."""

EVALUATION = Term("", "", "An evaluation logged by the run: a wrong reward does not affect it.")

WORDS: dict[str, str] = {name: term.note for name, term in SERIES.items() if "_" in name} | {
    "k3_positive": "k3 over the tokens with an advantage above 0.",
    "k3_negative": "k3 over the tokens with an advantage below 0.",
    "d": "The trainer's logprob of a token minus the engine's, in nats. 0.69 nats is a factor of two in probability.",
    "nats": "Natural-logarithm units: exp(x nats) is a factor.",
    "rms": "Root mean square: large values count more.",
    "valid": "Whether both logprobs are the same quantity: same tokens, temperature, mask, weights and position. Otherwise their difference says nothing about numerics.",
    "contract": "Everything that affects the numbers of a pass: engine, versions, dtypes, kernels, parallelism, "
    "sampling.",
    "advantage": "How much better a response did than the others in its group; if positive, training makes it "
    "likelier.",
    "|d|": "Absolute difference between the trainer's and the engine's logprob of a token, in nats.",
    "sum |f|": "Sum over tokens of the size of their contribution to the objective: ratio times advantage, as the loss clips it.",
    "k3": "Mean of exp(d) - 1 - d: an estimate of the KL divergence between trainer and engine, in nats.",
    "alerts": "Levels at which a framework or paper warns, each under its own definition.",
    "interval": "Range expected if the run had sampled other sequences, from resampled groups of sequences.",
    "replay": "Recorded steps scored again under different numerics, from the weights in the trace.",
    "ln ratio": "Natural logarithm of the ratio between a token's probabilities under two policies.",
    "arm": "A replay of recorded steps under different numerics, stored as its own pass.",
    "observation": "Judged from one run: what changed first need not be the cause.",
    "intervention": "Judged against a baseline run with the same seeds and one change.",
}
"""Word -> the note that a report shows when the reader hovers over the word."""
