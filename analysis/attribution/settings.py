from __future__ import annotations

import re

from ..facts.conditions import is_coefficient

_SAMPLING = ("temperature", "top_p", "top_k", "min_p")
_SUSPECTS = (
    ("length", ("length_bonus", "length_penalty", "length_reward", "length_coef", "length_cost", "length_weight", "len_penalty", "len_bonus",
                "overlong", "token_cost", "brevity", "verbosity", "token_penalty", "token_bonus")),
    ("optimizer", ("max_norm", "grad_norm", "clip_norm", "norm_clip")),
    ("entropy", ("entropy", "ent", "ent_coef", "exploration")),
    ("reference", ("kl", "ref", "reference", "beta")),
    ("truncation", ("max_tokens", "max_new_tokens", "max_completion", "max_response", "max_length", "max_len", "length_limit", "max_turns",
                    "turn_limit", "num_turns", "horizon", "truncation", "stop", "stop_tokens", "token_budget", "turns")),
    ("mismatch", (*_SAMPLING, "quant", "quantization", "quantisation", "engine", "kv_cache", "dtype", "precision", "bits", "kernel", "fp8",
                  "int8", "int4", "vllm", "sglang")),
    ("advantages", ("advantage", "advantages", "adv", "baseline", "scale_rewards", "normalize", "normalise", "standardize", "standardise",
                    "whiten", "whitening", "gamma", "discount", "lam", "lambda", "gae", "gae_lambda")),
    ("data", ("prompt", "prompts", "data", "dataset", "curriculum", "difficulty", "task", "tasks", "template", "level", "split")),
    ("reward", ("reward", "rewards", "verifier", "judge", "scorer", "grader", "rm", "score", "bonus", "penalty")),
    ("staleness", ("sync", "staleness", "stale", "lag", "lags", "async", "refresh", "off_policy", "behind")),
    ("optimizer", ("lr", "learning_rate", "rate", "betas", "beta1", "beta2", "eps", "epsilon", "adam", "weight_decay", "wd", "decay", "l2",
                   "momentum", "nesterov", "grad", "clip", "cliprange", "ratio_low", "ratio_high", "optimizer", "optim", "warmup", "schedule", "scheduler", "updates",
                   "epochs", "step_size", "stepsize", "accumulation")),
)  # fmt: skip
"""Suspect -> words in setting names. The first match decides. Norm clipping belongs to the optimizer."""

_PATTERNS = {
    "optimizer": r"^(adam_?)?betas?_?[12]$",
    "truncation": r"^(?!.*prompt)(max_.*(tokens|length|len)|(.*(token|length|response|completion|generation)s?_)?limit)$",
}

_MEASURED = (
    "mean", "max", "min", "std", "score", "acc", "accuracy", "success", "loss", "share", "frac", "fraction", "ratio",
    "count", "num", "time", "norm", "kl", "entropy", "rewards", "reward", "return", "value", "values", "length", "len",
    "lengths",
)  # fmt: skip


def suspect_of(setting: str) -> str:
    """Return the suspect that a setting belongs to, or `unknown`. The part after the last `/` or `.` is tried first."""
    words = re.split(r"[/.]", setting.lower())
    for suspect, pattern in _PATTERNS.items():
        if re.match(pattern, words[-1]):
            return suspect
    for name in (words[-1], ".".join(words)):
        parts = set(re.split(r"[^a-z0-9]+", name))
        for suspect, known in _SUSPECTS:
            if any(word in parts or ("_" in word and word in name) for word in known):
                return suspect
    return "unknown"


def is_setting(name: str) -> bool:
    return is_coefficient(name) or not any(word in _MEASURED for word in re.split(r"[^a-z0-9]+", name.lower()))
