"""Judge the traces of blind_faults.py by `tim-trace check`: strict rates, false alarms by kind, and each error.

python benchmarks/planted/blind.py runs/planted/blind-1 [runs/planted/blind-2] [--errors]

Strict: the first finding's code is the label's fault, or one of its `also`. Faults of weights are scored by class: their
label is `weights_differ`, and `computation_differs` is as right. `other` labels values that no code of a cause names: right
are the codes that claim no cause (CAUSELESS). A false alarm is a healthy trace with a failing finding. Detectable faults
that are called VALID are counted by themselves.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from score import OF_WEIGHTS, checked

CAUSELESS = ("unrelated", "not_logprobs", "unexplained")
"""Codes that say what the values are not, and no cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlindVerdict:
    """What check said of one trace of the blind generator."""

    name: str
    label: dict[str, Any]
    found: tuple[str, ...]
    """Codes of the findings, most probable first; `nothing_to_compare` where check refused."""
    fails: bool

    @property
    def is_healthy(self) -> bool:
        return bool(self.label["fault"] == "none")

    @property
    def is_right(self) -> bool:
        if self.is_healthy:
            return not self.fails
        right = (self.label["fault"], *self.label["also"])
        of_weights = OF_WEIGHTS if "weights_differ" in right else ()
        return self.found[0] in (*right, *of_weights, *(CAUSELESS if "other" in right else ()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", help="folders of traces, as blind_faults.py writes them")
    parser.add_argument("--errors", action="store_true", help="list each trace that was judged wrongly")
    parser.add_argument("--only", nargs="*", default=(), help="names, or beginnings of names, of the traces to judge")
    given = parser.parse_args()
    for folder in given.folders:
        verdicts = list(judge(folder, tuple(given.only)))
        if not verdicts:
            parser.error(f"no traces in {folder}; make some with benchmarks/planted/blind_faults.py")
        print(report(folder.name, verdicts, with_errors=given.errors))


def judge(folder: Path, beginnings: tuple[str, ...] = ()) -> Iterable[BlindVerdict]:
    """Check every trace of a folder."""
    for path in sorted(folder.glob("*/label.json")):
        if not beginnings or path.parent.name.startswith(beginnings):
            found, fails = checked(path.parent)
            label = json.loads(path.read_text())
            yield BlindVerdict(name=path.parent.name, label=label, found=found or ("nothing_to_compare",), fails=fails)


def report(name: str, verdicts: list[BlindVerdict], *, with_errors: bool) -> str:
    """Text: strict rates, rates by fault, false alarms by kind, and the errors where these are asked for."""
    faults = [verdict for verdict in verdicts if not verdict.is_healthy]
    detectable = [verdict for verdict in faults if verdict.label["detectable"]]
    weights = [verdict for verdict in detectable if verdict.label["of_weights"]]
    others = [verdict for verdict in detectable if not verdict.label["of_weights"]]
    healthy = [verdict for verdict in verdicts if verdict.is_healthy]
    lines = [
        f"{name}: {len(verdicts)} traces",
        f"strict, detectable faults not of weights  {_share(v.is_right for v in others)}",
        f"strict, detectable faults of weights      {_share(v.is_right for v in weights)}",
        f"detectable faults called VALID            {_share(not v.fails for v in detectable)}",
        f"false alarms on healthy traces            {_share(v.fails for v in healthy)}",
    ]
    alarms = Counter(verdict.label["kind"] for verdict in healthy if verdict.fails)
    lines += [f"  {kind}: {count}" for kind, count in alarms.most_common()]
    by_fault = defaultdict(list)
    for verdict in detectable:
        by_fault[(verdict.label["of_weights"], verdict.label["fault"])].append(verdict)
    for (of_weights, fault), some in sorted(by_fault.items()):
        lines.append(f"  {'weights: ' if of_weights else ''}{fault:26} {_share(v.is_right for v in some)}")
    if with_errors:
        for verdict in verdicts:
            wrong = not verdict.is_right and (verdict.is_healthy or verdict.label["detectable"])
            if wrong or (not verdict.label["detectable"] and verdict.fails and not verdict.is_right):
                label = verdict.label
                lines.append(
                    f"  {verdict.name}: said {', '.join(verdict.found[:3])}; is {label['fault']}"
                    f"{''.join(f' or {code}' for code in label['also'])}"
                    f"{'' if label['detectable'] else ' (not detectable)'}; {label['detail']}"
                )
    return "\n".join(lines)


def _share(outcomes: Iterable[bool]) -> str:
    known = list(outcomes)
    return f"{sum(known)} of {len(known)}" + (f" = {sum(known) / len(known):.1%}" if known else "")


if __name__ == "__main__":
    main()
