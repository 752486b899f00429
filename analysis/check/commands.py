"""The commands that would confirm a finding, as a shell takes them."""

from __future__ import annotations

import shlex

from ..advice import Advice
from .evidence import Evidence


def sql(evidence: Evidence, query: str) -> Advice:
    """`tim-trace sql` with a query; `{pair}` in it becomes the tokens of both passes."""
    a, b = evidence.sample.a.name, evidence.sample.b.name
    text = query.format(pair=f"pair('{a}', '{b}')", sequences=f"pair_sequences('{a}', '{b}')")
    for special in ("\\", '"', "$", "`"):
        text = text.replace(special, f"\\{special}")
    return Advice(f'tim-trace sql {_trace(evidence)} "{text}"')


def row(evidence: Evidence, number: int) -> Advice:
    """`tim-trace sql` with the tokens of one sequence of the sample."""
    name = evidence.sample.seq_ids[number].replace("'", "''").replace("{", "{{").replace("}", "}}")
    step = int(evidence.sample.steps[number])
    return sql(
        evidence,
        "SELECT position, token_id, mask, logprob_a, logprob_b, d FROM {pair} "
        f"WHERE step = {step} AND seq_id = '{name}' ORDER BY position",
    )


def query(evidence: Evidence, name: str) -> Advice:
    """`tim-trace query` over both passes."""
    return Advice(f"tim-trace query {name} {_trace(evidence)}{_pair(evidence)}")


def stats(evidence: Evidence, by: str) -> Advice:
    """`tim-trace stats` over both passes."""
    return Advice(f"tim-trace stats {_trace(evidence)}{_pair(evidence)} --by {by}")


def replay(evidence: Evidence, options: str, name: str, step: int | None = None) -> Advice:
    """`tim-trace replay` of one step, and how far the replay lies from pass b; what to record first without weights."""
    step = int(evidence.sample.steps[0]) if step is None else step
    trace = _trace(evidence) if evidence.has_weights else "RUN"
    asked = f"tim-trace replay {trace} --steps {step} {options} --name {name} && tim-trace stats {trace} "
    asked += f"--pair replay/{name}:{evidence.sample.b.name}"
    return Advice(asked) if evidence.has_weights else Advice(RECORD, f"this trace has no weights; then: {asked}")


def weights(evidence: Evidence) -> Advice:
    """`tim-trace weights` by module; what to record first without weights."""
    if not evidence.has_weights:
        return Advice(RECORD, "keeps weights")
    return Advice(f"tim-trace weights {_trace(evidence)} --by module")


def triangulate(evidence: Evidence) -> Advice:
    """`tim-trace triangulate` of one step: which side carries the gap."""
    step = int(evidence.sample.steps[-1])
    return Advice(f"tim-trace triangulate {_trace(evidence)} --steps {step} --arm dtype=bf16 --arm lm-head=fp32")


RECORD = "tim-trace record --weights delta -o RUN -- COMMAND"
"""Records with what a replay needs."""


def _trace(evidence: Evidence) -> str:
    return shlex.quote(evidence.trace)


def _pair(evidence: Evidence) -> str:
    a, b = evidence.sample.a.name, evidence.sample.b.name
    return "" if (a, b) == ("train", "rollout") else f" --pair {shlex.quote(f'{a}:{b}')}"
