from __future__ import annotations

from ..tracer.located import ROUTES, Divergence
from .location import Location, PatchShare, location_rows
from .rows import MAIN_COLUMNS, Rows, counted, shown, to_text

_MOST_ROWS = 12
_LEAST = 5e-4
"""Rows below this share of the mismatch are not shown."""
_REMOVES = 0.5
"""Minimum share of the mismatch that a patch must remove to be reported as the answer."""
_TRIES = {
    "attention": "--attention eager", "lm_head": "--lm-head fp32", "log_softmax": "--lm-head fp32", "logits": "--lm-head fp32",
    ROUTES: "--routing recorded",
}  # fmt: skip
"""For each kind of operator, the replay option that computes it more precisely."""
_UNCHECKED = (
    "           all other operators are checked; to check these too, use code that runs each operator separately, such "
    "as transformers"
)


def location_text(found: Location, width: int | None = None) -> str:
    whole, found = found, shown(found)
    groups = f", {found.num_groups:,} groups" if found.num_groups != found.num_sequences else ""
    sizes = f"mean |d| {found.mean_abs_d:.3g}, largest {found.max_abs_d:.3g} (d = b - a)"
    facts = {
        "a": found.a,
        "b": found.b,
        "step": f"{found.step}, {found.num_sequences} sequences ({found.chosen}){groups}, {found.num_tokens:,} tokens",
        "mismatch": f"{found.gap_rms:.3g} nats rms, {sizes}",
    }
    if found.explained is not None:
        share = f"{round(found.explained, 3) + 0.0:.1%} of the mismatch"  # + 0.0 turns -0.0 into 0.0
        facts["explained"] = f"{share} comes from the operators' own errors, to first order"
    flipped = [each for each in found.routers if each.num_flipped]
    if flipped:
        number, of = (sum(getattr(each, name) for each in found.routers) for name in ("num_flipped", "num_tokens"))
        margins = [each.margin for each in flipped if each.margin is not None]
        tie = f"; chosen and rejected experts' scores differ by at most {max(margins):.2g}" if margins else ""
        facts["routes"] = f"{number:,} of {of:,} expert choices differ, first in {flipped[0].operator}{tie}"
    if found.no_interval:
        facts["intervals"] = f"none: {found.no_interval}"
    if found.engines:
        facts["vllm"] = "eager: not compiled, no CUDA graphs, no prefix cache"
    if found.unseen:
        facts["unmatched"] = f"{', '.join(found.unseen)}: run in only one execution"
    lines = [f"{name:<9}  {value}" for name, value in facts.items()]
    lines += [f"unchecked  {name} ({why})" for name, why in list(found.unjudged.items())[:_MOST_ROWS]]
    if found.unjudged:
        lines.append(_UNCHECKED)
    parts = [location_sentence(whole), "\n".join(lines)]
    named = found.first.version if found.first is not None else None
    for each in [each for each in found.weights if each.version is None or each.version != named][:_MOST_ROWS]:
        of = f"; it is from version {each.version}" if each.version is not None else ""
        parts.append(f"{each.tensor} in {each.side} differs from the recorded tensor by up to {each.largest:.3g}{of}")
    for by, name, value in (("kind", "locate_kinds", "carried"), ("patch", "locate_patches", "removed")):
        if rows := _largest(location_rows(found, by), value):
            parts.append(to_text(rows, width, MAIN_COLUMNS[name]))
    return "\n\n".join(parts)


def _largest(rows: Rows, value: str) -> Rows | None:
    kept = sorted((row for row in rows.dicts() if abs(row[value] or 0.0) >= _LEAST), key=lambda row: -row[value])
    return Rows(rows.columns, [tuple(row.values()) for row in kept[:_MOST_ROWS]]) if kept else None


def location_sentence(found: Location) -> str:
    return _answer(found) + (f" Limited to {found.only}." if found.only else "")


def _answer(found: Location) -> str:
    if found.first is not None:
        return _first(found.first, found)
    if not found.gap_rms:
        return "No mismatch: both executions give every token the same logprob."
    said = "Only rounding: no operator of a or b exceeds its rounding bound."
    top = max(found.kinds, key=lambda each: each.carried, default=None)
    if (best := _best(found)) is not None:
        other = "a" if best.taker == "b" else "b"
        done = f"Computing {best.patch} in {best.taker} as {other} does"
        if best.patch == ROUTES:
            done = f"Giving {best.taker} the experts that {other} chose"
        share = f"{best.removed:.0%}{_interval(best.removed_low, best.removed_high)}"
        return f"{said} {done} removes {share} of the mismatch (mean squared d)."
    if _is_after_logits(found):
        return f"{said} Patching changes nothing: the mismatch arises after the logits (temperature, top-p or top-k)."
    if top is None or abs(top.carried) < 0.01:
        return said
    carried = f"{top.carried:.0%}{_interval(top.carried_low, top.carried_high)}"
    return (
        f"{said} {top.kind} in {top.side} accounts for {carried} of the mismatch (mean squared d), more than any other."
    )


def _is_after_logits(found: Location) -> bool:
    shares = [*(each.carried for each in found.kinds), *(each.removed for each in found.patches)]
    return bool(found.patches) and not found.only and all(abs(share) < _LEAST for share in shares)


def next_command(found: Location) -> str:
    if found.first.why == "weights" if found.first is not None else _is_after_logits(found):
        return "tim-trace diagnose RUN"
    # Suggest float32: vLLM cannot run in float64, and rounding in bf16 or fp16 can hide a bug in its code.
    hides = any(each.dtype in ("bfloat16", "float16") for each in found.operators if each.side in found.engines)
    if found.first is None and hides:
        return f"tim-trace locate RUN --steps {found.step} --arm dtype=fp32 --against engine=vllm,dtype=fp32"
    kind = max(found.kinds, key=lambda each: each.carried).kind if found.kinds else ""
    if found.first is not None:
        kind = found.first.kind
    elif (best := _best(found)) is not None:
        kind = best.patch
    return f"tim-trace replay RUN --steps {found.step} {_TRIES.get(kind, '--dtype fp32')}"


def _best(found: Location) -> PatchShare | None:
    singles = {ROUTES, *(each.kind for each in found.kinds)}
    removing = [each for each in found.patches if each.patch in singles and each.removed > _REMOVES]
    return max(removing, key=lambda each: each.removed, default=None)


def _interval(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f" (95% CI {low:.0%} to {high:.0%})"


def _first(first: Divergence, found: Location) -> str:
    whose = f"{first.side} ({found.a if first.side == 'a' else found.b})"
    if first.why == "weights":
        num = sum(each.version == first.version for each in found.weights)
        of = (
            ""
            if first.version is None
            else f"; {counted(num, 'tensor is', 'tensors are')} from version {first.version}"
        )
        return f"The first divergence is {first.operator}: its weights in {whose} differ from the recorded weights{of}."
    if first.why == "beyond":
        size = "an expert choice that rounding does not explain" if first.ratio == float("inf") else (
            f"its own error is {first.ratio or 0.0:,.3g} times its rounding bound"
        )  # fmt: skip
        return f"The first divergence is {first.operator} in {whose}: {size} (sequence {first.seq_id}, token {first.token})."
    return (
        f"The first divergence is {first.operator} in {whose}: its code computes something different. "
        f"Rounding hides this, but float64 shows it."
    )
