"""Planted faults and harmless pairs in transformer language models, for judging a tool that names the first faulty operator.

CASES: list of fourth_common.Case: name, architecture, build() -> (model_a, model_b), fault (None or modules, operator, why), inputs
(list of 1-d LongTensors: rows of 24, 41, 63 and 96 tokens), note.
Operator kinds: linear, norm, rotary, attention, activation, gate_up_product, residual, router, experts, embedding, head, logit_scaling,
soft_cap, log_softmax.  The module path "" is the root model (operators in its own forward).
Run the rows one by one (or padded on the right): some of the own codes in B ignore attention_mask and position_ids.
"first" in a label means first in A's order of execution; B is usually also harmlessly recoded elsewhere (attention, norms, MLPs).
check() runs float64 under Exact, since transformers casts norms, softmax and rotary tables to float32 even in a double model.
A full run takes about 5 minutes on a free core; --shards/--shard, --first/--last and -k run parts; results go to fourth_measured.json.
"""

from __future__ import annotations

import argparse
import collections
import fcntl
import json
import os
import sys
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import torch
from torch.overrides import TorchFunctionMode

from fourth_common import CASES, OPERATORS, Case, Fault  # noqa: F401
import fourth_fault_list  # noqa: F401
import fourth_harmless  # noqa: F401

MEASURED = os.path.join(os.path.dirname(os.path.abspath(__file__)), "fourth_measured.json")
if os.path.exists(MEASURED):  # fault.subtle: the measured change is 10 to 1000 times A's float32 rounding
    with open(MEASURED) as _f:
        for _n, _r in json.load(_f).items():
            for _c in CASES:
                if _c.name == _n and _c.fault is not None:
                    _c.fault.subtle = bool(10 <= _r["ratio"] <= 1000)


class Exact(TorchFunctionMode):
    """model.double() alone leaves casts to float32 within transformers' norms, softmax and rotary tables; here they become float64."""

    def __enter__(self):
        self.old = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, *a):
        torch.set_default_dtype(self.old)
        return super().__exit__(*a)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        kwargs = {k: (torch.float64 if v is torch.float32 else v) for k, v in kwargs.items()}
        return func(*args, **kwargs)


@torch.no_grad()
def logprobs(model, rows):
    return [model(input_ids=r[None]).logits[0].log_softmax(-1) for r in rows]


def distance(xs, ys):
    d = 0.0
    for x, y in zip(xs, ys):
        n = min(x.shape[-1], y.shape[-1])
        e = (x[..., :n].double() - y[..., :n].double()).abs()
        assert torch.isfinite(e).all()
        d = max(d, e.max().item())
    return d


def check(case):
    a, b = case.build()
    rows = case.inputs
    assert min(len(r) for r in rows) >= 24 and any(len(r) == 96 for r in rows)
    names = {n for m in (a, b) for n, _ in m.named_modules()}
    a32, b32 = logprobs(a, rows), logprobs(b, rows)
    with Exact():
        a.double(), b.double()
        a64, b64 = logprobs(a, rows), logprobs(b, rows)
    return dict(
        names=names,
        d32=distance(a32, b32),
        d64=distance(a64, b64),
        round_a=distance(a32, a64),
        round_b=distance(b32, b64),
    )


def main(argv=None):
    p = argparse.ArgumentParser()
    p.add_argument("-k", default="")
    p.add_argument("--kind", choices=["fault", "harmless"])
    p.add_argument("--first", type=int, default=0)
    p.add_argument("--last", type=int, default=10**6)
    p.add_argument("--shards", type=int, default=1)
    p.add_argument("--shard", type=int, default=0)
    o = p.parse_args(argv)
    torch.set_num_threads(1)
    bad, ratios, measured, t0 = [], [], {}, time.time()
    for i, c in enumerate(CASES):
        if not o.first <= i < o.last or i % o.shards != o.shard:
            continue
        if o.k not in c.name or (o.kind and (o.kind == "fault") != (c.fault is not None)):
            continue
        try:
            r = check(c)
            names = r.pop("names")
        except Exception as e:  # noqa: BLE001
            import traceback

            print(f"{c.name:46} FAILED {type(e).__name__} {e}")
            print("".join(traceback.format_exc().splitlines(True)[-6:]))
            bad.append(c.name)
            continue
        ratio = r["d64"] / max(r["round_a"], 1e-12)
        msg = ""
        measured[c.name] = dict(r, ratio=ratio)
        if r["round_a"] > 1e-4:
            msg = "A itself rounds badly (a tie in a router?)"
        if c.fault is not None:
            ratios.append((c.name, ratio))
            if not r["d64"] > 1e-7:
                msg = "NO FAULT"
            elif not ratio > 5:
                msg = "within five times the rounding"
            if not c.fault.modules <= names:
                msg += f" unknown modules {c.fault.modules - names}"
        else:
            if not r["d64"] < 1e-9:
                msg = "NOT HARMLESS in float64"
            elif r["d32"] > 5 * max(r["round_a"] + r["round_b"], 2e-6):
                msg = "more than rounding in float32"
            elif r["round_b"] > 10 * max(r["round_a"], 1e-6):
                msg = "B rounds much more"
        print(
            f"{'fault' if c.fault else 'same ':5} {c.name:46} f32 {r['d32']:.2e} f64 {r['d64']:.2e} round A {r['round_a']:.1e} B {r['round_b']:.1e}"
            f" ratio {ratio:9.2e} {msg}",
            flush=True,
        )
        if msg and not msg.startswith("("):
            bad.append(c.name)
    with open(MEASURED + ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.exists(MEASURED):
            with open(MEASURED) as fh:
                measured = {n: r for n, r in {**json.load(fh), **measured}.items() if n in {c.name for c in CASES}}
        with open(MEASURED, "w") as fh:
            json.dump(measured, fh, indent=1)
    n_f = sum(c.fault is not None for c in CASES)
    small = [n for n, x in ratios if 10 <= x <= 1000]
    print(
        f"{n_f} faults, {len(CASES) - n_f} harmless; {len(small)} faults change logprobs by 10 to 1000 times A's float32 rounding,"
        f" {sum(x < 10 for _, x in ratios)} by less; {time.time() - t0:.0f} s"
    )
    table = collections.Counter((c.architecture, c.fault is not None) for c in CASES)
    for a in sorted({c.architecture for c in CASES}):
        print(f"  {a:18} faults {table[a, True]:3} harmless {table[a, False]:3}")
    assert not bad, bad


if __name__ == "__main__":
    main()
