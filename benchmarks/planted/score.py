"""Run `tim-trace check` on traces with planted faults, and score its findings.

python benchmarks/planted/score.py runs/planted/tuning [runs/planted/heldout]

A fault is detectable if the rms of d over the tokens that it affects is more than twice the rms of d of the same trace
without the fault (label.json: d_rms, noise_rms); a missing or non-finite value there counts as detectable, and so does
a copied pass if there was any noise. Top-1 accuracy is the share of traces whose first finding has the planted code.
For stale, partly synchronised or quantised weights and a missing adapter, this code is `weights_differ`, or
`computation_differs` if the mismatch has its full size from the first step on, since only a replay tells these apart. A
false alarm is a healthy trace that check fails.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tim_trace.schemas.errors import NothingToCompare

HEALTHY = ("rounding", "equal")
WEIGHT_CAUSES = ("stale_weights", "partial_sync", "adapter", "quantised")
OF_WEIGHTS = ("weights_differ", "computation_differs")
"""Codes that are right if the weights differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answer of check for one trace."""

    name: str
    label: dict[str, Any]
    found: tuple[str, ...]
    """Codes of the findings, most probable first."""
    fails: bool

    @property
    def code(self) -> str:
        return str(self.label["code"])

    @property
    def expected(self) -> tuple[str, ...]:
        """Return the codes of findings that are right."""
        return expected(self.code)

    @property
    def first(self) -> str:
        return self.found[0] if self.found else "nothing"

    @property
    def is_right(self) -> bool:
        return self.first in self.expected

    @property
    def is_healthy(self) -> bool:
        return self.code in HEALTHY

    @property
    def is_detectable(self) -> bool:
        return bool(self.label["detectable"]) and not self.is_healthy


def expected(code: str) -> tuple[str, ...]:
    """Return the codes of findings that are right for a planted code."""
    return OF_WEIGHTS if code in WEIGHT_CAUSES else (code,)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", help="folders of traces, as make.py writes them")
    parser.add_argument("--json", type=Path, help="write each trace's verdict to this file, one per line")
    parser.add_argument("--only", nargs="*", help="codes to judge")
    given = parser.parse_args()
    verdicts = [verdict for folder in given.folders for verdict in judge(folder, given.only)]
    if not verdicts:
        parser.error("no traces found; generate some with benchmarks/planted/make.py")
    if given.json:
        given.json.write_text("".join(json.dumps(_plain(verdict)) + "\n" for verdict in verdicts))
    by_split = defaultdict(list)
    for verdict in verdicts:
        by_split[verdict.label["split"]].append(verdict)
    for split, some in by_split.items():
        print(report(split, some))


def judge(folder: Path, only: Iterable[str] | None = None) -> Iterable[Verdict]:
    """Check every trace below a folder."""
    for path in sorted(folder.glob("*/label.json")):
        label = json.loads(path.read_text())
        if only and label["code"] not in only:
            continue
        found, fails = checked(path.parent)
        yield Verdict(name=path.parent.name, label=label, found=found, fails=fails)


def checked(folder: Path) -> tuple[tuple[str, ...], bool]:
    """Return check's codes for a folder's trace, most probable first, and whether it fails; none if it refuses."""
    from tim_trace.analysis.check.check import check

    try:
        findings = check(folder / "trace").findings
    except NothingToCompare:
        findings = ()
    return tuple(finding.code for finding in findings), not findings or any(finding.fails for finding in findings)


def report(split: str, verdicts: list[Verdict]) -> str:
    """Return as text: confusion, accuracy, false alarms, and each trace with a wrong answer."""
    faults = [verdict for verdict in verdicts if not verdict.is_healthy]
    healthy = [verdict for verdict in verdicts if verdict.is_healthy]
    detectable = [verdict for verdict in faults if verdict.is_detectable]
    drowned = [verdict for verdict in faults if not verdict.is_detectable]
    lines = [f"split {split}: {len(verdicts)} traces", "", "planted -> first finding (traces; right ones marked *)"]
    for code in dict.fromkeys(verdict.code for verdict in verdicts):
        firsts = Counter(verdict.first for verdict in verdicts if verdict.code == code)
        said = ", ".join(
            f"{'*' if first in expected(code) else ''}{first} {count}" for first, count in firsts.most_common()
        )
        lines.append(f"  {code:24} {said}")
    lines += [
        "",
        f"top-1, every trace              {_share(verdicts, lambda v: v.is_right)}",
        f"top-1, detectable faults        {_share(detectable, lambda v: v.is_right)}",
        f"  in the first two              {_share(detectable, lambda v: bool({*v.expected} & {*v.found[:2]}))}",
        f"drowned faults taken for rounding, or rightly named  {_share(drowned, lambda v: v.is_right or not v.fails)}",
        f"false alarms on healthy traces  {_share(healthy, lambda v: v.fails)}",
        "",
    ]
    for verdict in verdicts:
        wrong = not verdict.is_right if verdict.is_detectable else verdict.fails and not verdict.is_right
        if wrong or (verdict.is_healthy and not verdict.is_right):
            label = verdict.label
            lines.append(
                f"  {verdict.name}: {verdict.found[:3]}; {label['variant']}, {label['strength']}, {label['numerics']}, "
                f"{label['tokens']} tokens, d {label['d_rms']} over {label['noise_rms']:.2g}, {label['recording']['level']}"
            )
    return "\n".join(lines)


def _share(verdicts: list[Verdict], holds: Any) -> str:
    count = sum(bool(holds(verdict)) for verdict in verdicts)
    return f"{count} of {len(verdicts)}" + (f" = {count / len(verdicts):.1%}" if verdicts else "")


def _plain(verdict: Verdict) -> dict[str, Any]:
    return {"name": verdict.name, "found": verdict.found, "fails": verdict.fails, **verdict.label}


if __name__ == "__main__":
    main()
