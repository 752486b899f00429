"""Compare all passes over the same tokens: which have equal bits, and which contradict the settings they state.

Shapes: P passes, C classes of passes with equal bits, T tokens.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import chain, combinations, combinations_with_replacement, product
from typing import Any

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

    @property
    def is_valid(self) -> bool:
        """True if no token is odd and no pass contradicts its settings."""
        return not any(group.odd_tokens or group.contradictions for group in self.groups)


_SCORES = f"""
SELECT "pass", step, seq_id, logprobs FROM scores
WHERE iteration = 0 AND logprobs IS NOT NULL AND NOT starts_with("pass", '{REPLAY_PREFIX}') ORDER BY "pass"
"""
_SEQUENCES = "SELECT step, seq_id, coalesce(group_id, seq_id), num_response_tokens FROM sequences ORDER BY step, seq_id"

_Key = tuple[int, str]
_Pair = tuple[str, str]
_Setting = str | None
_Scores = Mapping[str, Mapping[_Key, "_Values"]]
"""Values by pass and (step, seq_id)."""


@dataclass(frozen=True, slots=True)
class _Values:
    logprobs_T: np.ndarray
    known_T: np.ndarray
    passes: list[str] = field(default_factory=list)

    def equals(self, other: _Values) -> Any:
        """Return [T] True where both have a value, with equal bits."""
        return self.known_T & other.known_T & (self.logprobs_T.view(np.int32) == other.logprobs_T.view(np.int32))


def compare_passes(database: Database, against: str | None = None) -> PassComparison:
    """Group a trace's passes by equal bits, and find those that contradict their settings or the other passes.

    Replays are not compared. `against` names the reference pass. By default, it is one of the largest class.

    Raises NothingToCompare if no two passes share a sequence, and InvalidOption.
    """
    scores: dict[str, dict[_Key, _Values]] = {}
    for batch in database.connection.batches(_SCORES, 1024):
        for name, step, seq_id, logprobs in zip(*batch.columns, strict=True):
            known = logprobs.values.is_valid().to_numpy(zero_copy_only=False)
            values = np.where(known, logprobs.values.to_numpy(zero_copy_only=False), 0).astype(np.float32)
            if known.any():
                scores.setdefault(name.as_py(), {})[step.as_py(), seq_id.as_py()] = _Values(values, known)
    if against is not None and against not in scores:
        raise InvalidOption(f"no pass {against!r} with logprobs; choose one of {', '.join(scores)}", option="against")
    settings = {
        name: flat_contract({key: value for key, value in json.loads(text).items() if key not in ("source", "path")})
        for name, text in database.connection.execute('SELECT "pass", contract_json FROM passes').fetchall()
    }
    rows = database.connection.execute(_SEQUENCES).fetchall()
    connected = _connected(scores)
    groups = [
        _Group({name: scores[name] for name in names}, rows, settings, against) for names in connected if len(names) > 1
    ]
    if not groups:
        raise NothingToCompare(
            f"{database.given[0]}: no two passes share a sequence ({len(scores)} with logprobs); import several engines' "
            "values for the same prompts, or pass a second run"
        )
    keeps = _by_setting(relation for group in groups for relation in group.relations if relation.is_same)
    found = [group.measured(against, keeps) for group in sorted(groups, key=lambda group: -len(group.settings))]
    alone = tuple(names[0] for names in connected if len(names) == 1)
    return PassComparison(run=database.given[0], steps=database.steps, groups=tuple(found), alone=alone)


def _connected(scores: _Scores) -> list[list[str]]:
    """Return the passes that share sequences, directly or through other passes."""
    groups: list[tuple[list[str], set[_Key]]] = []
    for name, rows in scores.items():
        joined = [group for group in groups if not group[1].isdisjoint(rows)]
        groups = [group for group in groups if group[1].isdisjoint(rows)]
        groups.append(([*chain(*(names for names, _ in joined)), name], set(rows).union(*(keys for _, keys in joined))))
    return [names for names, _ in groups]


@dataclass(frozen=True, slots=True)
class _Relation:
    pair: _Pair
    is_class: bool
    is_same: bool
    """True if the bits of all shared tokens are equal."""
    settings: Mapping[str, tuple[_Setting, _Setting]]
    """Settings that differ."""


_Relations = Mapping[tuple[str, frozenset[_Setting]], Sequence[_Pair]]
"""Pairs of passes that differ in one setting only, by the setting and its two values."""


def _by_setting(relations: Iterable[_Relation]) -> _Relations:
    found: dict[tuple[str, frozenset[_Setting]], list[_Pair]] = {}
    for relation in relations:
        if len(relation.settings) == 1:
            ((key, values),) = relation.settings.items()
            found.setdefault((key, frozenset(values)), []).append(relation.pair)
    return found


class _Group:
    def __init__(
        self, scores: _Scores, rows: Sequence[tuple[int, str, str, int]], settings: Mapping[str, Mapping[str, str]],
        against: str | None,
    ):  # fmt: skip
        there = {key for of_pass in scores.values() for key in of_pass}
        self.rows = [row for row in rows if row[:2] in there]
        ends = np.cumsum([row[3] for row in self.rows])
        self.parts = [slice(int(end) - row[3], int(end)) for row, end in zip(self.rows, ends, strict=True)]
        classes: dict[bytes, _Values] = {}
        for name, of_pass in scores.items():
            found = _Values(np.zeros(ends[-1], np.float32), np.zeros(ends[-1], bool))
            for row, part in zip(self.rows, self.parts, strict=True):
                if (values := of_pass.get(row[:2])) is not None:
                    found.logprobs_T[part], found.known_T[part] = values.logprobs_T, values.known_T
            digest = sha256(found.known_T.tobytes() + found.logprobs_T.tobytes()).digest()
            classes.setdefault(digest, found).passes.append(name)
        self.classes = sorted(
            classes.values(), key=lambda one: (against not in one.passes, -len(one.passes), one.passes)
        )
        self.states = any(value != "null" for name in scores for value in settings.get(name, {}).values())
        self.settings = _differing([name for one in self.classes for name in one.passes], settings)
        self.odd_tokens: list[OddToken] = []
        self.judged_CT = np.array([one.known_T for one in self.classes])
        """[C, T] tokens whose bits are held against the settings: all but the odd ones."""
        self._find_odd_tokens()
        self.relations = list(self._relations())

    def _relations(self) -> Iterator[_Relation]:
        for (one, judged_T), (other, others_T) in combinations_with_replacement(
            zip(self.classes, self.judged_CT, strict=True), 2
        ):
            shared_T = judged_T & others_T
            if not shared_T.any():
                continue
            is_same = bool(one.equals(other)[shared_T].all())
            for a, b in combinations(one.passes, 2) if one is other else product(one.passes, other.passes):
                values = ((key, (value, self.settings[b][key])) for key, value in self.settings[a].items())
                yield _Relation(
                    (a, b), one is other, is_same, {key: both for key, both in values if both[0] != both[1]}
                )

    def measured(self, against: str | None, keeps: _Relations) -> PassGroup:
        first = self.classes[0].passes
        return PassGroup(
            reference=against if against is not None and against in first else first[0], num_passes=len(self.settings),
            num_sequences=len(self.rows), num_tokens=int(np.logical_or.reduce([one.known_T for one in self.classes]).sum()),
            classes=tuple(self._class(one, self.classes[0]) for one in self.classes),
            contradictions=tuple(self._contradictions(keeps)),
            odd_tokens=tuple(sorted(self.odd_tokens, key=lambda odd: (-odd.ratio, -odd.abs_d))),
        )  # fmt: skip

    def _place(self, token: int) -> tuple[str, int]:
        row = next(row for row, part in enumerate(self.parts) if token < part.stop)
        return self.rows[row][1], token - self.parts[row].start

    def _class(self, one: _Values, reference: _Values) -> PassClass:
        shared_T = one.known_T & reference.known_T
        with np.errstate(invalid="ignore"):
            abs_T = np.abs(one.logprobs_T.astype(np.float64) - reference.logprobs_T)
        finite_T = shared_T & np.isfinite(abs_T)
        d = abs_T[finite_T]
        diverged = self._divergences(one, reference)
        own, others = (
            {key: values[0] for key in self.settings[each.passes[0]] if len(values := [*{self.settings[name][key] for name in each.passes}]) == 1}
            for each in (one, reference)
        )  # fmt: skip
        return PassClass(
            passes=tuple(one.passes), num_tokens=int(one.known_T.sum()), num_shared=int(shared_T.sum()),
            num_equal=int(one.equals(reference).sum()), num_not_finite=int(shared_T.sum()) - len(d),
            mean_abs_d=float(d.mean()) if len(d) else None, max_abs_d=float(d.max()) if len(d) else None,
            max_at=self._place(int(np.flatnonzero(finite_T)[np.argmax(d)])) if len(d) else None,
            diverges_at=self._place(diverged[0]) if diverged else None, num_diverged=len(diverged),
            settings={key: (own[key], others[key]) for key in own if key in others and own[key] != others[key]},
        )  # fmt: skip

    def _divergences(self, one: _Values, other: _Values) -> list[int]:
        """Return, for each prompt that both classes continue with different tokens, the first divergent token."""
        prompts: dict[tuple[int, str], list[slice]] = {}
        for row, part in zip(self.rows, self.parts, strict=True):
            prompts.setdefault((row[0], row[2]), []).append(part)
        found = []
        for parts in prompts.values():
            shared = [np.flatnonzero((one.known_T & other.known_T)[part]) for part in parts]
            common = max(int(tokens[-1]) + 1 if len(tokens) else 0 for tokens in shared)
            mine, theirs = ([part for part in parts if side.known_T[part][common:].any()] for side in (one, other))
            if mine and theirs:
                found.append(theirs[0].start + common)
        return found

    def _contradictions(self, keeps: _Relations) -> list[SettingContradiction]:
        """Hold each pair of passes against other pairs that differ in one setting only, by the same two values.

        Whether a setting changes the bits depends on model and prompt, so only this group shows it. That it keeps them
        is learned from all groups, if more pairs say so than this one and those that differ.
        """
        changes = _by_setting(one for one in self.relations if not one.is_same)
        class_of = {name: tuple(one.passes) for one in self.classes for name in one.passes}
        found: dict[tuple[str, str, frozenset[str]], SettingContradiction] = {}
        for relation in self.relations:
            if self.states and not relation.settings and not relation.is_same:
                few, many = sorted((class_of[name] for name in relation.pair), key=len)
                alike = [
                    tuple(name for name in each if self.settings[name] == self.settings[relation.pair[0]])
                    for each in (few, many)
                ]
                found[SAME_SETTINGS, "", frozenset(chain(*alike))] = SettingContradiction(
                    code=SAME_SETTINGS, passes=alike[0], others=alike[1]
                )
            for key, values in relation.settings.items():
                passes = class_of[relation.pair[0]] if relation.is_class else relation.pair
                sides = [tuple(name for name in passes if self.settings[name][key] == value) for value in values]
                few, many = sorted(sides, key=len)  # the smaller side is more likely to be wrong
                different, same = (
                    [pair for pair in each.get((key, frozenset(values)), ()) if not {*pair} & {*relation.pair}]
                    for each in (changes, keeps)
                )
                if relation.is_class:
                    suspects = [name for name in relation.pair if len(few) == len(many) or name in few]
                    kept = keeps.get((key, frozenset(values)), ())
                    same = min(([pair for pair in kept if name not in pair] for name in suspects), key=len)
                if relation.is_class and len(different) > len(same):
                    code, example = OTHER_SETTING, different[0]
                elif not relation.is_same and len(relation.settings) == 1 and len(same) > len(different) + 1:
                    code, example = INERT_SETTING, same[0]
                else:
                    continue
                known = found.get((code, key, frozenset((*few, *many))))
                if known is None or known.num_different < len(different):
                    found[code, key, frozenset((*few, *many))] = SettingContradiction(
                        code=code, passes=few, others=many, setting=key, value=self.settings[few[0]][key],
                        other_value=self.settings[many[0]][key], num_different=len(different), num_same=len(same), example=example,
                    )  # fmt: skip
        times = Counter(name for one in found.values() for name in one.passes)
        return sorted(found.values(), key=lambda one: (-max(times[name] for name in one.passes), -len(one.others)))

    def _find_odd_tokens(self) -> None:
        values_CT = np.array([np.where(one.known_T, one.logprobs_T, np.nan) for one in self.classes], np.float64)
        values_CT[~np.isfinite(values_CT)] = np.nan
        compared = np.flatnonzero(np.isfinite(values_CT).sum(axis=0) >= 2)
        abs_CT = (
            np.abs(values_CT[:, compared] - np.nanmedian(values_CT[:, compared], axis=0))
            if len(compared)
            else values_CT[:, :0]
        )
        for number, (one, abs_T) in enumerate(zip(self.classes, abs_CT, strict=True)):
            order = np.argsort(-np.nan_to_num(abs_T))
            own, others = abs_T[order[: int((abs_T > 0).sum())]], np.delete(abs_CT, number, axis=0)
            chances: list[float | None] = [*beyond_chance(own, others[others > 0], int(np.isfinite(abs_CT).sum()))]
            if len(own) == 1 and not chances and np.isfinite(abs_T).sum() > TAIL:
                chances = [None]
            for at, expected in zip(order, chances, strict=False):
                token = int(compared[at])
                (seq_id, place), values = self._place(token), np.delete(values_CT[:, token], number)
                self.judged_CT[number, token] = False
                odd = OddToken(
                    passes=tuple(one.passes), seq_id=seq_id, token=place, value=float(values_CT[number, token]),
                    others=float(np.nanmedian(values)), num_others=int(np.isfinite(values).sum()), abs_d=float(abs_T[at]),
                    typical=float(np.median(own[len(chances) :])) if len(own) > len(chances) else None, expected=expected,
                )  # fmt: skip
                self.odd_tokens.append(odd)


def _differing(names: Sequence[str], settings: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, _Setting]]:
    """Return each pass's settings that other passes do not share. Settings that always change together are one."""
    joined: dict[tuple[int, ...], list[str]] = {}
    for key in sorted({key for name in names for key in settings.get(name, {})}):
        values = [settings.get(name, {}).get(key) for name in names]
        joined.setdefault(tuple(values.index(value) for value in values), []).append(key)
    found: dict[str, dict[str, _Setting]] = {name: {} for name in names}
    for pattern, keys in joined.items():
        for name in names if any(pattern) else ():
            stated = dict.fromkeys(settings.get(name, {}).get(key) for key in keys)
            found[name][", ".join(keys)] = next(iter(stated)) if len(stated) == 1 else ", ".join(map(str, stated))
    return found


def beyond_chance(own: np.ndarray, others: np.ndarray, num_tested: int) -> list[float]:
    """Return the expected number of tokens with a |d| at or beyond the given ones, for those that are beyond chance.

    `own` holds a class's |d| above 0, largest first. The tail below each value is taken as a power law with Hill's
    estimate of its exponent (Annals of Statistics 3, 1975) from its largest eighth. A class with few values is judged by
    the tail of the `others`. Rounding errors have a shorter tail, so the number is an upper bound.
    """
    is_own = len(own) > TAIL
    logs = np.log(own if is_own else np.sort(others)[::-1])
    sums = np.concatenate([[0.0], np.cumsum(logs)])

    def expected(value: float, num_odd: int) -> float:
        first = num_odd if is_own else 0
        tail = max(TAIL, (len(logs) - first) // 8)
        if len(logs) - first <= tail:
            return math.inf
        bound = logs[first + tail]
        mean = max((sums[first + tail] - sums[first]) / tail - bound, 1e-9)
        return float(num_tested * tail / (len(logs) - first) * math.exp(min((bound - math.log(value)) / mean, 0.0)))

    most = min(max(len(own) // 4, 1), MOST_ODD, len(own))
    num_odd = max((num for num in range(1, most + 1) if expected(own[num - 1], num) < CHANCE), default=0)
    return [expected(value, num_odd) for value in own[:num_odd]]
