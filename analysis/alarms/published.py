"""Alert levels published by frameworks and papers. Each has its own definition, so levels are not interchangeable."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """A level that was published for one metric, or one of tim-trace's own rules."""

    who: str
    """Framework or paper that published the level; `tim-trace` for its own rules."""
    metric: str
    """Name of the per-step figure that the level applies to; see alarms.figures."""
    definition: str
    level: float | None
    """The level, in units of the metric; None if the text in `rule` says when the alert fires."""
    rule: str = ""
    above: bool = True
    """True if the alert fires above the level, False if it fires below."""
    of_size: bool = False
    """True if the metric's absolute value is compared with the level."""
    summary: str
    """What the source says about a run beyond the level."""
    source: str
    of_mismatch: bool = True
    """True if the alert concerns the size of the mismatch, False if it concerns rewards or the optimizer."""

    @property
    def condition(self) -> str:
        """The condition under which the alert fires, e.g. `> 0.001`."""
        return self.rule if self.level is None else f"{'>' if self.above else '<'} {self.level:g}"

    @property
    def gate(self) -> str | None:
        """The same level as a condition of `gate`, e.g. `tim.k3>0.001 any step`; None for a rule without a level."""
        metric = f"|{self.metric}|" if self.of_size else self.metric
        return None if self.level is None else f"tim.{metric}{self.condition.replace(' ', '')} any step"


ALARMS = (
    Alarm(
        who="verl", metric="prob_diff_mean", definition="training/rollout_probs_diff_mean: mean |exp(train) - exp(rollout)|",
        level=0.01, summary="a problem (below 0.005 is normal)", source="verl FAQ",
    ),
    Alarm(
        who="verl", metric="k1", definition="|rollout_corr/kl|: mean(rollout - train)", level=0.1, of_size=True,
        summary="far off-policy", source="verl docs, rollout correction",
    ),
    Alarm(
        who="verl", metric="chi2_token", definition="rollout_corr/chi2_token: mean exp(2 d) - 1", level=1.0,
        summary="far off-policy", source="verl docs, rollout correction",
    ),
    Alarm(
        who="verl", metric="ess_token", definition="1 / mean((w / mean w)^2) with w = exp(d), not truncated", level=0.3, above=False,
        summary="few tokens carry most of the weight", source="verl docs, rollout correction",
    ),
    Alarm(
        who="NeMo-RL", metric="mean_exp_abs_d", definition="token_mult_prob_error: mean exp(|d|)", level=1.05,
        summary="the sample is plotted; 1.00 to 1.05 is fine", source="NeMo-RL docs, GRPO",
    ),
    Alarm(
        who="NeMo-RL", metric="k3", definition="gen_kl_error: mean(exp(d) - 1 - d)", level=1e-3,
        summary="above the acceptable range", source="NeMo-RL docs, GRPO",
    ),
    Alarm(
        who="Miles", metric="k3", definition="mean(exp(d) - 1 - d); called KL on their page", level=1.0,
        summary="a configuration error (below 1e-4 is jitter)", source="Miles docs, debug",
    ),
    Alarm(
        who="Miles", metric="mean_abs_d", definition="mean |d|", level=0.8, summary="chat templates differ",
        source="Miles docs, debug",
    ),
    Alarm(
        who="prime-rl", metric="k3", definition="mismatch_kl: mean(exp(d) - d - 1)", level=0.15,
        summary="its own CI fails", source="prime-rl CI",
    ),
    Alarm(
        who="Tinker", metric="k3", definition="KL between sampler and trainer (compared with k3)", level=0.01,
        summary="investigate", source="tinker-feedback#22",
    ),
    Alarm(
        who="Liu and Li", metric="k3", definition="vllm-kl: token mean of k3", level=1e-3,
        summary="above their low group", source="richardli.xyz/rl-collapse",
    ),
    Alarm(
        who="Liu and Li", metric="k3", definition="vllm-kl: token mean of k3", level=2e-2,
        summary="the group with high mismatch in the paper, whose runs collapsed", source="richardli.xyz/rl-collapse",
    ),
    Alarm(
        who="Ling team (IcePop)", metric="mean_abs_d", definition="mean |d|", level=0.05,
        summary="an MoE run collapsed above this level", source="Ling team, IcePop; arXiv 2510.18855",
    ),
    Alarm(
        who="slime", metric="mean_abs_d", definition="mean |d|", level=0.03, summary="the framework's CI fails (4B "
            "model)",
        source="slime, Miles CI",
    ),
)  # fmt: skip
"""Alert levels as published."""
