"""Commands of a report, as a shell takes them when they are copied."""

from __future__ import annotations

import shlex

from .subject import Subject

_TAKES_PAIR = frozenset({"check", "diagnose", "attribute", "corrections", "gate", "dynamics"})


def command(subject: Subject, verb: str, *options: str) -> str:
    """`tim-trace VERB` of the reported trace, with the pair and the control that the report was made with."""
    own: list[str] = []
    if verb in _TAKES_PAIR and subject.pair != ("train", "rollout"):
        own += ["--pair", ":".join(subject.pair)]
    found = subject.attribution
    if verb == "attribute" and "--control" not in options and found is not None and found.control is not None:
        own += ["--control", found.control]
    return shlex.join(["tim-trace", verb, subject.trace, *own, *options])
