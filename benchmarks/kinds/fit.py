"""Fit the model that judges what kind of fault a mismatch is, and score it on authors that it was not fitted to.

python benchmarks/kinds/fit.py score             # each author left out in turn: kinds, false alarms, calibration
python benchmarks/kinds/fit.py fit               # write analysis/check/kinds.json (needs scikit-learn)
python benchmarks/kinds/fit.py measure TRACE...  # features of traces as JSON lines, to add to runs.parquet

`runs.parquet` has one row per trace: its author, the fault planted by the author, the kind that it counts as (`rounding`
for a healthy run), and its features. Faults that an explanation predicts token by token are left out, as `check` never asks
the model about them. The traces are two real executions of tiny models by authors
who had not read `check` (0, 1 and 4, and the public reports of 5), pairs of executions on an H100 (2, healthy), and an n-gram
model in numpy whose engine has bfloat16 weights (3, healthy).
"""

import argparse
import itertools
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

RUNS = Path(__file__).with_name("runs.parquet")
MODEL = Path(__file__).parents[2] / "analysis" / "check" / "kinds.json"
LABELS = ("author", "fault", "kind")
STRENGTH = 0.05
"""Inverse of the L2 penalty: of 0.02 to 0.2, the best on authors left out."""
BANDS = (0.0, 0.4, 0.6, 0.8, 1.0)


def read():
    table = pq.read_table(RUNS)
    names = [name for name in table.column_names if name not in LABELS]
    features = np.column_stack([table[name].to_numpy() for name in names]).astype(float)
    return names, features, *(np.array(table[name].to_pylist()) for name in LABELS)


def fitted(names, features, kinds):
    from sklearn.linear_model import LogisticRegression
    from tim_trace.analysis.check.kinds import MAX_DISTANCE, Model

    mean, scale = features.mean(0).round(5), np.maximum(features.std(0), 1e-3).round(5)
    standard = np.clip((features - mean) / scale, -MAX_DISTANCE, MAX_DISTANCE)
    found = LogisticRegression(C=STRENGTH, max_iter=5000).fit(standard, kinds)
    return Model(
        features=tuple(names), kinds=tuple(map(str, found.classes_)), mean=mean, scale=scale,
        coefficients=found.coef_.round(4), intercept=found.intercept_.round(4),
    )  # fmt: skip


def fit():
    names, features, _, _, kinds = read()
    model = fitted(names, features, kinds)
    stored = {"features": model.features, "kinds": model.kinds}
    stored |= {name: getattr(model, name).tolist() for name in ("mean", "scale", "coefficients", "intercept")}
    MODEL.write_text(json.dumps(stored) + "\n", encoding="ascii")


def score():
    from tim_trace.analysis.check.faults.kinds import MAX_ROUNDING, MIN_SECOND
    from tim_trace.analysis.check.kinds import ROUNDING

    names, features, authors, _, kinds = read()
    said = []
    for author in np.unique(authors):
        model = fitted(names, features[authors != author], kinds[authors != author])
        rounding = model.kinds.index(ROUNDING)
        own = authors == author
        found = np.array([model.probabilities(dict(zip(names, row, strict=True))) for row in features[own]])
        alarmed = found[:, rounding] < MAX_ROUNDING
        healthy = kinds[own] == ROUNDING
        found[:, rounding] = 0.0
        found /= found.sum(1, keepdims=True)
        order = np.argsort(-found, axis=1)
        is_first = np.array(model.kinds)[order[:, 0]] == kinds[own]
        is_second = np.array(model.kinds)[order[:, 1]] == kinds[own]
        is_named = is_first | (is_second & (np.sort(found, axis=1)[:, -2] >= MIN_SECOND))
        print(f"author {author}: {healthy.sum()} healthy, {alarmed[healthy].mean():.2%} alarmed", end="")
        if (~healthy).any():
            print(
                f"; {(~healthy).sum()} faults, {alarmed[~healthy].mean():.0%} alarmed, kind right in {is_first[~healthy].mean():.0%}, among those said in {is_named[~healthy].mean():.0%}",
                end="",
            )
            said += zip(found.max(1)[~healthy], is_first[~healthy], strict=True)
        print()
    for low, high in itertools.pairwise(BANDS):
        band = [(p, right) for p, right in said if low <= p < high or p == high == 1.0]
        if band:
            p, right = np.mean(band, axis=0)
            print(f"said {low:.0%} to {high:.0%}: {len(band)} faults, {p:.0%} on average, right in {right:.0%}")


def measure(traces):
    from tim_trace.analysis.check.check import gather
    from tim_trace.analysis.check.features import features
    from tim_trace.analysis.views import open_database

    for trace in traces:
        data = gather(open_database(trace), ("train", "rollout"), trace=trace)
        print(json.dumps({"trace": trace, **features(data)}))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("score", "fit", "measure"))
    parser.add_argument("traces", nargs="*", metavar="TRACE")
    args = parser.parse_args()
    measure(args.traces) if args.what == "measure" else {"score": score, "fit": fit}[args.what]()


if __name__ == "__main__":
    main()
