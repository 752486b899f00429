"""Build the shell commands that confirm a finding. If weights are missing, the first command supplies them."""

from __future__ import annotations

import re
import shlex

from ...schemas.steps import ALL_STEPS
from ...schemas.tables import TABLES
from ..advice import Advice
from .pair_data import PairData


def sql(data: PairData, query: str) -> Advice:
    """Return a `tim-trace sql` command. In the query, `{pair}` and `{sequences}` are tables that join both passes."""
    a, b = data.sample.a.name, data.sample.b.name
    tables = {"pair": f"pair('{a}', '{b}')", "sequences": f"pair_sequences('{a}', '{b}')"}
    if data.condition:
        tables = {name: f"(FROM {table} WHERE {data.condition})" for name, table in tables.items()}
    return sql_of(data.trace, query.format(**tables))


def sql_of(trace: str, query: str) -> Advice:
    text = re.sub(r'(["$`\\])', r"\\\1", query)
    return Advice(f'tim-trace sql {shlex.quote(trace)} "{text}"')


def tokens(data: PairData, where: str = "mask", order: str = "step, seq_id, position LIMIT 40") -> Advice:
    where = where.replace("{", "{{").replace("}", "}}")
    columns = "step, seq_id, position, token_id, mask, logprob_a, logprob_b, d"
    return sql(data, f"SELECT {columns} FROM {{pair}} WHERE {where} ORDER BY {order}")


def far_tokens(data: PairData) -> Advice:
    return tokens(data, order="abs(d) DESC LIMIT 40")


def row(data: PairData, number: int) -> Advice:
    name = data.sample.seq_ids[number].replace("'", "''")
    return tokens(data, f"step = {int(data.sample.steps[number])} AND seq_id = '{name}'", "position")


def query(data: PairData, name: str) -> Advice:
    return Advice(f"tim-trace query {name} {_trace(data)}{_pair(data)}")


def stats(data: PairData, by: str) -> Advice:
    return Advice(f"tim-trace stats {_trace(data)}{_pair_and_steps(data)} --by {by}")


def replay(data: PairData, options: str, name: str, step: int | None = None) -> Advice:
    """Return the command that replays one step and compares the result with pass b."""
    step, options = int(data.sample.steps[0]) if step is None else step, f"{options} --name {name}".strip()
    return _replay(data, step, options, "stats", f" --pair replay/{name}:{data.sample.b.name}")


def whole_vocabulary_replay(data: PairData, other: str, step: int) -> Advice:
    """Return the command that replays one step in vLLM without a grammar and checks pass `other` against it."""
    return _replay(data, step, "--engine vllm --name whole", "check", f" --pair {shlex.quote(f'{other}:replay/whole')}")


def arms(data: PairData, options: str, step: int | None = None) -> Advice:
    step = int(data.sample.steps[-1]) if step is None else step
    return _replay(data, step, options, "diagnose", _pair_and_steps(data))


def _replay(data: PairData, step: int, options: str, verb: str, of: str) -> Advice:
    return _with_weights(data, f"tim-trace replay {{trace}} --steps {step} {options} && tim-trace {verb} {{trace}}{of}")


def _with_weights(data: PairData, command: str) -> Advice:
    asked = command.format(trace=_trace(data) if data.has_weights or data.is_import else "RUN")
    return Advice(asked) if data.has_weights else supply(data, f"supplies the missing weights; then run: {asked}")


_COLUMNS = {
    "version": "policy_version", "lag": "policy_version", "reward_above_0": "reward > 0", "row": "seq_id",
    "advantage_above_0": "advantage > 0", "response_length": "num_response_tokens", "prompt_length": "num_prompt_tokens",
    "total_length": "num_prompt_tokens + num_response_tokens",
}  # fmt: skip


def by_column(data: PairData, column: str) -> Advice:
    table, name, passed = "sequences", column, ""
    if column.endswith(("_a", "_b")):
        table, name = "scores", {"version_a": "policy_version", "version_b": "policy_version"}.get(column, column[:-2])
        side = data.sample.a if column.endswith("_a") else data.sample.b
        passed = f" WHERE \"pass\" = '{side.name}'"
    if name not in _COLUMNS and name not in TABLES[table].schema.names:
        return stats(data, "sequence")  # computed columns, such as a row's index in its group, are in no table
    asked = _COLUMNS.get(name, name)
    asked = asked if " " in asked else f"{table}.{asked}"
    shown = f"{asked}, count(*) AS num_sequences, sqrt(sum(rms_d * rms_d * num_tokens) / sum(num_tokens)) AS rms_d"
    rows = f"{{sequences}} JOIN {table} USING (run, step, seq_id){passed}"
    return sql(data, f"SELECT {shown} FROM {rows} GROUP BY 1 ORDER BY 3 DESC")


def weights_replay(data: PairData, step: int | None = None) -> Advice:
    """Return the command that replays the last step with the policy version of the sequences at `step`. If that is not
    known, the command tries the last version but one, and quantised weights."""
    versions = data.sample.versions
    of_step = versions[data.sample.steps == step].compressed()
    if len(of_step):
        return arms(data, f"--arm weights-version={of_step.max()}")
    known = sorted({*versions.compressed().tolist()}) or [2]
    version = known[-2] if len(known) > 1 else max(known[0] - 1, 0)
    return arms(data, f"--arm weights-version={version} --arm quantize=int8")


def weights(data: PairData) -> Advice:
    if not data.has_weights:
        return supply(data, "supplies the weights")
    return Advice(f"tim-trace weights {_trace(data)} --by module")


def engine_weights(data: PairData) -> Advice:
    return Advice(f"tim-trace weights {_trace(data)} --engine")


def triangulate(data: PairData, dtype: str | None) -> Advice:
    step, other = int(data.sample.steps[-1]), "fp32" if dtype in ("bfloat16", "float16") else "bf16"
    return _with_weights(data, f"tim-trace triangulate {{trace}} --steps {step} --arm dtype={other} --arm lm-head=fp32")


def predict(data: PairData) -> Advice:
    first, last = int(data.sample.steps[0]), int(data.sample.steps[-1])
    steps = f"{first}:{last}:{max((last - first) // 8, 2)}"
    return Advice(f"tim-trace triangulate {_trace(data)} --steps {steps} --predict dtype=fp16")


def locate(data: PairData, against: str) -> Advice:
    step = int(data.sample.steps[-1])
    return Advice(f"tim-trace locate {_trace(data)} --steps {step} --against {shlex.quote(against)}")


def supply(data: PairData, remark: str) -> Advice:
    if data.is_recorder:
        return Advice(remark=f"call Recorder.add_weights and record again: {remark}")
    record = "tim-trace record --weights delta -o RUN -- COMMAND"
    return Advice(f"tim-trace weights {_trace(data)} --attach VERSION DIR" if data.is_import else record, remark)


def _trace(data: PairData) -> str:
    return shlex.quote(data.trace)


def _pair(data: PairData) -> str:
    pair = f"{data.sample.a.name}:{data.sample.b.name}"
    return "" if pair == "train:rollout" else f" --pair {shlex.quote(pair)}"


def _pair_and_steps(data: PairData) -> str:
    return _pair(data) + ("" if data.steps == ALL_STEPS else f" --steps {shlex.quote(data.steps)}")
