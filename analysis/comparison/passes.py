"""Compare all passes over the same tokens: which have equal bits, and which contradict the settings they state.

Shapes: P passes, C classes of passes with equal bits, T tokens.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import combinations, product

import numpy as np

from ...schemas.errors import InvalidOption, NothingToCompare
from ...schemas.passes import REPLAY_PREFIX
from ...schemas.results import Result
from ...schemas.steps import ALL_STEPS
from ..trace.columns import flat_contract
from ..trace.database import Database

SAME_SETTINGS, OTHER_SETTING, INERT_SETTING = "same_settings", "other_setting", "inert_setting"
"""Codes: equal settings but different bits; equal bits although a setting differs that changes them elsewhere;
different bits although only a setting differs that keeps them elsewhere."""
TAIL = 16
"""Minimum differences from which a tail is estimated. A class that differs at no more tokens is judged by the others."""
CHANCE = 1e-3
"""Maximum expected number of tokens with such a difference, among all tokens and classes, to report one. On simulated
differences (normal, Laplace, t with 2 or 3 degrees of freedom, log-normal; 40 to 20,000 tokens), at most 0.2% of the
classes had a token reported."""
MOST_ODD = 1000
"""Maximum odd tokens per class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassClass:
    """Passes with equal bits at all tokens. d = logprob of this class - logprob of the reference class (nats)."""

    passes: tuple[str, ...]
    num_tokens: int
    """Tokens with a logprob."""
    num_shared: int
    """Tokens with a logprob in the reference class too. Values after the first divergent token are not comparable."""
    num_equal: int
    """Shared tokens with equal bits."""
    mean_abs_d: float | None
    """None without a finite shared token."""
    max_abs_d: float | None
    max_at: tuple[str, int] | None
    """seq_id and token index of `max_abs_d`."""
    num_not_finite: int
    """Shared tokens with NaN or infinity on either side, left out of d."""
    diverges_at: tuple[str, int] | None
    """seq_id and index of the first token at which the class generated another token than the reference class."""
    num_diverged: int
    """Sequences in which it did."""
    settings: Mapping[str, tuple[str | None, str | None]]
    """Settings on which each class agrees within itself, but not with the reference class: (own, reference)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingContradiction:
    """Passes whose stated settings contradict their bits."""

    code: str
    passes: tuple[str, ...]
    others: tuple[str, ...]
    """Passes that they contradict."""
    setting: str = ""
    """The setting in question. Settings that always change together are one."""
    value: str | None = None
    """The passes' value, or None if they do not state the setting."""
    other_value: str | None = None
    num_different: int = 0
    """Other pairs of passes that differ in this setting only, by the same two values, and have different bits."""
    num_same: int = 0
    """As `num_different`, with equal bits at all shared tokens."""
    example: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OddToken:
    """A token at which one class is much farther from the others than at other tokens."""

    passes: tuple[str, ...]
    step: int
    seq_id: str
    token: int
    value: float
    """The class's logprob (nats)."""
    others: float
    """Median logprob of the other classes."""
    num_others: int
    """Other classes with a logprob here. With 1, either may be the odd one."""
    abs_d: float
    """|value - median over all classes| (nats)."""
    typical: float | None
    """Median of `abs_d` at the other tokens at which it is not 0, or None if it is 0 at all of them."""
    expected: float | None
    """Expected number of tokens with such a difference or a larger one among all tokens and classes, extrapolated from
    this class's differences at other tokens. None if these are all 0."""

    @property
    def ratio(self) -> float:
        return self.abs_d / self.typical if self.typical else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class PassGroup:
    """Passes that share sequences."""

    reference: str
    num_passes: int
    num_sequences: int
    num_tokens: int
    classes: tuple[PassClass, ...]
    """The reference class first, then by number of passes."""
    contradictions: tuple[SettingContradiction, ...]
    odd_tokens: tuple[OddToken, ...]
    """Largest ratio first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassComparison(Result):
    """Classes of equal bits among a trace's passes, and what contradicts the passes' settings."""

    _text = "tim_trace.analysis.comparison.passes_text:passes_text"

    run: str
    steps: str = ALL_STEPS
    groups: tuple[PassGroup, ...]
    alone: tuple[str, ...] = ()
    """Passes that share no token with another pass."""


_SCORES = f"""
SELECT "pass", step, seq_id, logprobs FROM scores
WHERE iteration = 0 AND logprobs IS NOT NULL AND NOT starts_with("pass", '{REPLAY_PREFIX}')
ORDER BY "pass", step, seq_id
"""
_SEQUENCES = "SELECT step, seq_id, coalesce(group_id, seq_id), num_response_tokens FROM sequences ORDER BY step, seq_id"

_Key = tuple[int, str]
_Row = tuple[int, str, str, int]
"""Step, seq_id, prompt and number of response tokens."""


@dataclass(slots=True)
class _Values:
    logprobs_T: np.ndarray
    known_T: np.ndarray
    passes: list[str] = field(default_factory=list)

    def shares(self, other: _Values) -> np.ndarray:
        return self.known_T & other.known_T

    def equals(self, other: _Values) -> np.ndarray:
        return self.logprobs_T.view(np.int32) == other.logprobs_T.view(np.int32)


def compare_passes(database: Database, against: str | None = None) -> PassComparison:
    """Group a trace's passes by equal bits, and find those that contradict their settings or the other passes.

    Replays are not compared. `against` names the reference pass, otherwise the largest class of a group is the
    reference. Raises NothingToCompare if no two passes share a token, and InvalidOption.
    """
    run = database.given[0]
    scores: dict[str, dict[_Key, np.ma.MaskedArray]] = {}
    for batch in database.connection.sql(_SCORES).to_arrow_reader(1024):
        for name, step, seq_id, logprobs in zip(*(batch.column(place) for place in range(4)), strict=True):
            values = logprobs.values
            known = values.is_valid().to_numpy(zero_copy_only=False)
            filled = np.where(known, values.to_numpy(zero_copy_only=False), 0).astype(np.float32)
            if known.any():
                scores.setdefault(name.as_py(), {})[step.as_py(), seq_id.as_py()] = np.ma.array(filled, mask=~known)
    if against is not None and against not in scores:
        raise InvalidOption(f"no pass {against!r} with logprobs; choose one of {', '.join(scores)}", option="against")
    rows = database.connection.execute(_SEQUENCES).fetchall()
    settings = _settings(database)
    alone, groups = list[str](), list[_Group]()
    for names in _connected(scores):
        if len(names) == 1:
            alone += names
        else:
            groups.append(_group({name: scores[name] for name in names}, rows, settings, against))
    if not groups:
        raise NothingToCompare(
            f"{run}: no two passes share a token ({len(scores)} with logprobs); import several engines' values of the "
            "same prompts, or pass a second run"
        )
    keeps = [relation for group in groups for relation in group.relations if relation.is_same and len(relation.settings) == 1]
    groups.sort(key=lambda group: -len(group.differing))
    return PassComparison(
        run=run, steps=database.steps, groups=tuple(group.measured(against, keeps) for group in groups), alone=tuple(alone)
    )


def _settings(database: Database) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for name, text in database.connection.execute('SELECT "pass", contract_json FROM passes').fetchall():
        contract = {key: value for key, value in json.loads(text).items() if key not in ("source", "path")}
        found[name] = flat_contract(contract)
    return found


def _connected(scores: Mapping[str, Mapping[_Key, np.ma.MaskedArray]]) -> list[list[str]]:
    """Return passes that share sequences, directly or through others."""
    of_sequence: dict[_Key, str] = {}
    parent = {name: name for name in scores}

    def root(name: str) -> str:
        while parent[name] != name:
            parent[name] = name = parent[parent[name]]
        return name

    for name, rows in scores.items():
        for key in rows:
            parent[root(name)] = root(of_sequence.setdefault(key, name))
    found: dict[str, list[str]] = {}
    for name in scores:
        found.setdefault(root(name), []).append(name)
    return list(found.values())


@dataclass(frozen=True, slots=True)
class _Relation:
    pair: tuple[str, str]
    is_class: bool
    is_same: bool
    """True if the bits of all shared tokens are equal."""
    settings: Mapping[str, tuple[str | None, str | None]]
    """Settings that differ."""


@dataclass(frozen=True, slots=True)
class _Group:
    classes: Sequence[_Values]
    rows: Sequence[_Row]
    starts: np.ndarray
    """[rows + 1] first token of each row."""
    differing: Mapping[str, Mapping[str, str | None]]
    relations: Sequence[_Relation]

    def measured(self, against: str | None, keeps: Sequence[_Relation]) -> PassGroup:
        reference, rows, starts = self.classes[0], self.rows, self.starts
        return PassGroup(
            reference=against if against in reference.passes else reference.passes[0], num_passes=len(self.differing),
            num_sequences=len(rows), num_tokens=int(np.logical_or.reduce([one.known_T for one in self.classes]).sum()),
            classes=tuple(_measured(one, reference, rows, starts, self.differing) for one in self.classes),
            contradictions=_contradictions(self, keeps),
            odd_tokens=tuple(sorted(_odd_tokens(self.classes, rows, starts), key=lambda odd: (-odd.ratio, -odd.abs_d))),
        )  # fmt: skip


def _group(
    scores: Mapping[str, Mapping[_Key, np.ma.MaskedArray]], rows: Sequence[_Row],
    settings: Mapping[str, Mapping[str, str]], against: str | None,
) -> _Group:  # fmt: skip
    there = {key for of_pass in scores.values() for key in of_pass}
    rows = [row for row in rows if (row[0], row[1]) in there]
    starts = np.concatenate([[0], np.cumsum([row[3] for row in rows])]).astype(np.int64)
    classes: dict[bytes, _Values] = {}
    for name, of_pass in scores.items():
        found = _Values(np.zeros(starts[-1], np.float32), np.zeros(starts[-1], bool))
        for (step, seq_id, _, num), start in zip(rows, starts, strict=False):
            if (values := of_pass.get((step, seq_id))) is not None:
                found.logprobs_T[start : start + num] = values.data
                found.known_T[start : start + num] = ~values.mask
        digest = sha256(found.known_T.tobytes() + found.logprobs_T.tobytes()).digest()
        classes.setdefault(digest, found).passes.append(name)
    ordered = sorted(classes.values(), key=lambda one: (against not in one.passes, -len(one.passes), one.passes))
    differing = _differing([name for one in ordered for name in one.passes], settings)
    return _Group(ordered, rows, starts, differing, list(_relations(ordered, differing)))


def _relations(classes: Sequence[_Values], differing: Mapping[str, Mapping[str, str | None]]) -> Iterator[_Relation]:
    for number, one in enumerate(classes):
        for other in classes[number:]:
            shared_T = one.shares(other)
            if not shared_T.any():
                continue
            is_same = bool(one.equals(other)[shared_T].all())
            pairs = combinations(one.passes, 2) if other is one else product(one.passes, other.passes)
            for a, b in pairs:
                values = {key: (value, differing[b][key]) for key, value in differing[a].items()}
                settings = {key: both for key, both in values.items() if both[0] != both[1]}
                yield _Relation((a, b), other is one, is_same, settings)


def _differing(names: Sequence[str], settings: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str | None]]:
    """Return the settings that differ between passes, by pass. Settings with the same pattern are joined."""
    of_pattern: dict[tuple[int, ...], list[str]] = {}
    keys = sorted({key for name in names for key in settings.get(name, {})})
    for key in keys:
        values = [settings.get(name, {}).get(key) for name in names]
        seen = list(dict.fromkeys(values))
        if len(seen) > 1:
            of_pattern.setdefault(tuple(seen.index(value) for value in values), []).append(key)
    found: dict[str, dict[str, str | None]] = {name: {} for name in names}
    for joined in of_pattern.values():
        for name in names:
            values = [settings.get(name, {}).get(key) for key in joined]
            found[name][", ".join(joined)] = next(iter(values)) if len(set(values)) == 1 else ", ".join(map(str, values))
    return found


def _measured(
    one: _Values, reference: _Values, rows: Sequence[_Row], starts: np.ndarray,
    differing: Mapping[str, Mapping[str, str | None]],
) -> PassClass:  # fmt: skip
    def place(token: int) -> tuple[str, int]:
        row = int(np.searchsorted(starts, token, side="right")) - 1
        return rows[row][1], token - int(starts[row])

    shared_T = one.shares(reference)
    with np.errstate(invalid="ignore"):
        abs_T = np.abs(one.logprobs_T.astype(np.float64) - reference.logprobs_T)
    finite_T = shared_T & np.isfinite(abs_T)
    d = abs_T[finite_T]
    largest = int(np.flatnonzero(finite_T)[np.argmax(d)]) if len(d) else None
    ends = _divergences(one, reference, rows, starts)
    agreed = [_agreed(each.passes, differing) for each in (one, reference)]
    return PassClass(
        passes=tuple(one.passes), num_tokens=int(one.known_T.sum()), num_shared=int(shared_T.sum()),
        num_equal=int((shared_T & one.equals(reference)).sum()), mean_abs_d=float(d.mean()) if len(d) else None,
        max_abs_d=float(d.max()) if len(d) else None, max_at=None if largest is None else place(largest),
        num_not_finite=int(shared_T.sum()) - len(d), diverges_at=place(ends[0]) if ends else None, num_diverged=len(ends),
        settings={
            key: (agreed[0][key], agreed[1][key])
            for key in agreed[0]
            if key in agreed[1] and agreed[0][key] != agreed[1][key]
        },
    )  # fmt: skip


def _agreed(passes: Sequence[str], differing: Mapping[str, Mapping[str, str | None]]) -> dict[str, str | None]:
    first = differing[passes[0]]
    return {key: value for key, value in first.items() if all(differing[name][key] == value for name in passes)}


def _divergences(
    one: _Values, other: _Values, rows: Sequence[_Row], starts: np.ndarray
) -> list[int]:
    """Return, for each prompt to which both classes respond differently, the first divergent token of `other`."""
    of_prompt: dict[tuple[int, str], list[slice]] = {}
    for (step, _, group, num), start in zip(rows, starts, strict=False):
        of_prompt.setdefault((step, group), []).append(slice(int(start), int(start) + num))
    shared_T = one.shares(other)
    found = []
    for parts in of_prompt.values():
        common = max(int(np.flatnonzero(shared_T[part])[-1]) + 1 if shared_T[part].any() else 0 for part in parts)
        mine, theirs = ([part for part in parts if side.known_T[part][common:].any()] for side in (one, other))
        if mine and theirs:
            found.append(theirs[0].start + common)
    return found


def _contradictions(group: _Group, keeps: Sequence[_Relation]) -> tuple[SettingContradiction, ...]:
    """Hold each pair of passes against the other pairs that differ in one setting only, by the same two values.

    Whether a setting changes the bits depends on model and prompt, so only this group shows it. That it keeps them is
    learned from all groups (`keeps`).
    """
    found: dict[tuple[str, str, frozenset[str]], SettingContradiction] = {}
    changes = [one for one in group.relations if not one.is_same and len(one.settings) == 1]
    for relation in group.relations:
        if not relation.settings and not relation.is_same:
            a, b = relation.pair
            found[SAME_SETTINGS, a, frozenset((b,))] = SettingContradiction(code=SAME_SETTINGS, passes=(a,), others=(b,))
        for key, values in relation.settings.items():
            different, same = (_elsewhere(pairs, key, values, relation.pair) for pairs in (changes, keeps))
            if relation.is_class and len(different) > len(same):
                code, example = OTHER_SETTING, different[0]
                passes = next(one.passes for one in group.classes if relation.pair[0] in one.passes)
            elif not relation.is_same and len(relation.settings) == 1 and len(same) > len(different):
                code, example, passes = INERT_SETTING, same[0], [*relation.pair]
            else:
                continue
            sides = [tuple(name for name in passes if group.differing[name][key] == value) for value in values]
            few, many = sorted(sides, key=len)  # the smaller side is more likely to be wrong
            known = found.get((code, key, frozenset((*few, *many))))
            if known is None or known.num_different < len(different):
                found[code, key, frozenset((*few, *many))] = SettingContradiction(
                    code=code, passes=few, others=many, setting=key, value=group.differing[few[0]][key],
                    other_value=group.differing[many[0]][key], num_different=len(different), num_same=len(same), example=example,
                )  # fmt: skip
    times = Counter(name for one in found.values() for name in one.passes)
    return tuple(sorted(found.values(), key=lambda one: (-max(times[name] for name in one.passes), -len(one.others))))


def _elsewhere(
    relations: Sequence[_Relation], key: str, values: tuple[str | None, str | None], pair: tuple[str, str]
) -> list[tuple[str, str]]:
    return [
        one.pair
        for one in relations
        if key in one.settings and {*one.settings[key]} == {*values} and not {*one.pair} & {*pair}
    ]


def _odd_tokens(
    classes: Sequence[_Values], rows: Sequence[_Row], starts: np.ndarray
) -> Iterator[OddToken]:
    values_CT = np.array([np.where(one.known_T, one.logprobs_T, np.nan) for one in classes], np.float64)
    values_CT[~np.isfinite(values_CT)] = np.nan
    compared = np.flatnonzero(np.isfinite(values_CT).sum(axis=0) >= 2)
    if not len(compared):
        return
    abs_CT = np.abs(values_CT[:, compared] - np.nanmedian(values_CT[:, compared], axis=0))
    num_tested = int(np.isfinite(abs_CT).sum())
    for number, (one, abs_T) in enumerate(zip(classes, abs_CT, strict=True)):
        order = np.argsort(-np.nan_to_num(abs_T))
        own = abs_T[order[: int((abs_T > 0).sum())]]
        others = np.delete(abs_CT, number, axis=0)
        expected = _beyond_chance(own, own if len(own) > TAIL else others[others > 0], num_tested)
        if len(own) == 1 and not expected and np.isfinite(abs_T).sum() > TAIL:
            expected = [None]
        for at, chance in zip(order, expected, strict=False):
            token = int(compared[at])
            row = int(np.searchsorted(starts, token, side="right")) - 1
            values = np.delete(values_CT[:, token], number)
            yield OddToken(
                passes=tuple(one.passes), step=rows[row][0], seq_id=rows[row][1], token=token - int(starts[row]),
                value=float(values_CT[number, token]), others=float(np.nanmedian(values)),
                num_others=int(np.isfinite(values).sum()), abs_d=float(abs_T[at]),
                typical=float(np.median(own[len(expected) :])) if len(own) > len(expected) else None, expected=chance,
            )  # fmt: skip


def _beyond_chance(own: np.ndarray, known: np.ndarray, num_tested: int) -> list[float | None]:
    """Return, for each of the largest |d| that are beyond chance, the expected number of tokens at or beyond it.

    The tail below the tested values is taken as a power law with Hill's estimate of its exponent (Annals of Statistics
    3, 1975), from its largest eighth. Rounding errors have a shorter tail, so the number is then an upper bound.
    """
    logs = np.log(np.sort(known)[::-1])
    sums = np.concatenate([[0.0], np.cumsum(logs)])
    found: list[float | None] = []
    best = 0
    for place, value in enumerate(own[: min(max(len(own) // 4, 1), MOST_ODD)]):
        first = place + 1 if known is own else 0
        num = len(logs) - first
        tail = max(TAIL, num // 8)
        if num <= tail:
            break
        bound = logs[first + tail]
        inverse = max((sums[first + tail] - sums[first]) / tail - bound, 1e-9)
        found.append(num_tested * tail / num * math.exp(min(-(math.log(value) - bound) / inverse, 0.0)))
        best = place + 1 if found[-1] < CHANCE else best
    return found[:best]
