"""Compare all passes over the same tokens: group bitwise equal ones, and find those that contradict their settings.

Shapes: P passes, C classes of bitwise equal passes, T tokens.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, combinations_with_replacement, product
from tempfile import TemporaryFile

import numpy as np

from ...schemas.errors import InvalidOption, NothingToCompare
from ...schemas.results import Result
from ...schemas.steps import ALL_STEPS
from ..trace.columns import flat_contract
from ..trace.database import Database
from ..trace.source import Pair
from .pass_values import PassValues

SAME_SETTINGS, OTHER_SETTING, INERT_SETTING = "same_settings", "other_setting", "inert_setting"
"""Codes of contradictions. `same_settings`: passes with the same recorded settings have different logprobs.
`other_setting`: bitwise equal passes differ in a setting that changes the logprobs in other pairs of passes.
`inert_setting`: passes have different logprobs, but differ only in a setting that has no effect in other pairs."""
TAIL = 16
"""If a class differs from the median at more tokens than this, its odd tokens are judged by the tail of its own
differences, otherwise by the tail of the other classes' differences."""
CHANCE = 1e-3
"""A token is reported as odd if the expected number of tokens that differ as much, over all classes, is below this. On
simulated differences (normal, Laplace, t with 2 or 3 degrees of freedom, log-normal; 40 to 20,000 tokens), at most 0.2%
of the classes had such a token."""
MOST_ODD = 1000  # reported per class


@dataclass(frozen=True, slots=True, kw_only=True)
class PassClass:
    """Passes with bitwise equal logprobs at all tokens. d = logprob of this class - logprob of the reference class
    (nats)."""

    passes: tuple[str, ...]
    num_tokens: int
    """Number of tokens with a logprob."""
    num_shared: int
    """Number of tokens with a logprob in this class and the reference class, up to the first divergent token."""
    num_equal: int
    """Number of shared tokens with bitwise equal logprobs."""
    mean_abs_d: float | None
    """Mean |d| (nats). None if no shared token has finite logprobs in both classes."""
    max_abs_d: float | None
    max_at: tuple[str, int] | None
    """seq_id and token index of `max_abs_d`."""
    num_not_finite: int
    """Number of shared tokens whose logprob is NaN or infinite in either class. They are left out of d."""
    diverges_at: tuple[str, int] | None
    """seq_id and index of the first token where the class generated a different token than the reference class."""
    num_diverged: int
    """Number of sequences that diverge from the reference class."""
    settings: Mapping[str, tuple[str | None, str | None]]
    """Setting -> (value in this class, value in the reference class), for settings that differ between the two classes
    but not within either of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingContradiction:
    """Passes whose logprobs contradict their recorded settings."""

    code: str
    passes: tuple[str, ...]
    others: tuple[str, ...]
    """Passes that `passes` contradict."""
    setting: str = ""
    """Name of the differing setting, or empty if none differs. Settings that always change together count as one."""
    value: str | None = None
    """Value of the setting in `passes`, or None if not recorded."""
    other_value: str | None = None
    num_different: int = 0
    """Number of other pairs of passes that differ only in these two values, and whose logprobs differ."""
    num_same: int = 0
    """Number of such pairs whose logprobs are bitwise equal at all shared tokens."""
    example: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OddToken:
    """A token where one class differs from the others far more than it does elsewhere."""

    passes: tuple[str, ...]
    seq_id: str
    token: int
    value: float
    """The class's logprob (nats)."""
    others: float
    """Median logprob of the other classes."""
    num_others: int
    """Number of other classes with a logprob at this token. If there is only one, either class may be the odd one."""
    abs_d: float
    """|value - median over all classes| (nats)."""
    typical: float | None
    """Median nonzero `abs_d` of the class's other tokens. None if all are 0."""
    expected: float | None
    """Expected number of tokens with at least this `abs_d` over all tokens and classes, extrapolated from this class's
    other tokens. None if `abs_d` is 0 at all of them."""

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
    """The reference class first, then the other classes by descending number of passes."""
    contradictions: tuple[SettingContradiction, ...]
    odd_tokens: tuple[OddToken, ...]
    """Largest ratio first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassComparison(Result):
    """A trace's passes in bitwise equal classes, with odd tokens and passes that contradict their settings."""

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


_Setting = str | None


def compare_passes(database: Database, against: str | None = None) -> PassComparison:
    """Group a trace's bitwise equal passes, and find odd tokens and passes that contradict their settings.

    Replays are not compared. `against` names the reference pass. By default, it is a pass from the largest class.

    Raises NothingToCompare if no two passes share a sequence, InvalidOption, and QueryFailed if there is too little memory
    or temporary disk space (4 bytes per token and pass).
    """
    settings = {
        name: flat_contract({key: value for key, value in json.loads(text).items() if key not in ("source", "path")})
        for name, text in database.connection.execute('SELECT "pass", contract_json FROM passes').fetchall()
    }
    with TemporaryFile(buffering=0) as file:
        values = PassValues(database, file)
        if against is not None and against not in values.has:
            raise InvalidOption(
                f"no pass {against!r} with logprobs; choose one of {', '.join(values.has)}", option="against"
            )
        connected = _connected(values.has)
        groups = [_Group(values, names, settings, against) for names in connected if len(names) > 1]
        if not groups:
            raise NothingToCompare(
                f"{database.given[0]}: no two passes share a sequence (passes with logprobs: {len(values.has)}); import "
                "several engines' logprobs for the same prompts, or pass a second run"
            )
        keeps = _by_setting(relation for group in groups for relation in group.relations if relation.is_same)
        found = [group.measured(against, keeps) for group in sorted(groups, key=lambda group: -len(group.settings))]
    alone = tuple(names[0] for names in connected if len(names) == 1)
    return PassComparison(run=database.given[0], steps=database.steps, groups=tuple(found), alone=alone)


def _connected(has: Mapping[str, np.ndarray]) -> list[list[str]]:
    """Group the passes that share sequences, directly or through other passes. `has` maps each pass to [R] bool."""
    groups: list[tuple[list[str], np.ndarray]] = []
    for name, has_R in has.items():
        joined = [group for group in groups if (group[1] & has_R).any()]
        groups = [group for group in groups if not (group[1] & has_R).any()]
        groups.append(
            ([*chain(*(names for names, _ in joined)), name], np.any([has_R, *(of for _, of in joined)], axis=0))
        )
    return [names for names, _ in groups]


@dataclass(frozen=True, slots=True)
class _Relation:
    pair: Pair
    is_class: bool
    is_same: bool
    """True if the logprobs of all shared tokens are bitwise equal."""
    settings: Mapping[str, tuple[_Setting, _Setting]]
    """Setting -> both passes' values, for settings that differ."""


_Relations = Mapping[tuple[str, frozenset[_Setting]], Sequence[Pair]]
"""Pairs of passes that differ in only one setting, keyed by the setting and its two values."""


def _by_setting(relations: Iterable[_Relation]) -> _Relations:
    found: dict[tuple[str, frozenset[_Setting]], list[Pair]] = {}
    for relation in relations:
        if len(relation.settings) == 1:
            ((key, values),) = relation.settings.items()
            found.setdefault((key, frozenset(values)), []).append(relation.pair)
    return found


class _Group:
    def __init__(
        self, values: PassValues, names: Sequence[str], settings: Mapping[str, Mapping[str, str]], against: str | None
    ):
        self.values = values
        self.num_sequences = int(np.any([values.has[name] for name in names], axis=0).sum())
        by_digest: dict[bytes, list[str]] = {}
        for name in sorted(names):
            by_digest.setdefault(values.digest(name), []).append(name)
        self.classes = sorted(by_digest.values(), key=lambda passes: (against not in passes, -len(passes), passes))
        self.firsts = [passes[0] for passes in self.classes]
        """The pass that represents each class."""
        self.states = any(value != "null" for name in names for value in settings.get(name, {}).values())
        self.settings = _differing([name for passes in self.classes for name in passes], settings)
        self.odd_tokens: list[OddToken] = []
        self.not_judged: dict[int, np.ndarray] = {}
        """Odd tokens of each class. They do not count in contradictions."""
        self._find_odd_tokens()
        self.relations = list(self._relations())

    def _relations(self) -> Iterator[_Relation]:
        pairs = [*combinations_with_replacement(range(len(self.classes)), 2)]
        is_same: dict[tuple[int, int], bool] = {}
        for block in self.values.blocks(self.firsts):
            bits_CB, judged_CB = block.bits_CB, block.known_CB
            for number, tokens in self.not_judged.items():
                here = tokens - block.start
                judged_CB[number, here[(here >= 0) & (here < judged_CB.shape[1])]] = False
            for one, other in pairs:
                if is_same.get((one, other), True) and (shared_B := judged_CB[one] & judged_CB[other]).any():
                    is_same[one, other] = bool((bits_CB[one] == bits_CB[other])[shared_B].all())
        for one, other in pairs:
            if (one, other) not in is_same:
                continue
            passes, others = self.classes[one], self.classes[other]
            for a, b in combinations(passes, 2) if one == other else product(passes, others):
                values = ((key, (value, self.settings[b][key])) for key, value in self.settings[a].items())
                different = {key: both for key, both in values if both[0] != both[1]}
                yield _Relation((a, b), one == other, is_same[one, other], different)

    def measured(self, against: str | None, keeps: _Relations) -> PassGroup:
        first = self.classes[0]
        return PassGroup(
            reference=against if against is not None and against in first else first[0], num_passes=len(self.settings),
            num_sequences=self.num_sequences, num_tokens=self.num_tokens,
            classes=tuple(self._class(passes, first) for passes in self.classes),
            contradictions=tuple(self._contradictions(keeps)),
            odd_tokens=tuple(sorted(self.odd_tokens, key=lambda odd: (-odd.ratio, -odd.abs_d))),
        )  # fmt: skip

    def _class(self, passes: Sequence[str], reference: Sequence[str]) -> PassClass:
        counts, total, largest = np.zeros(4, np.int64), 0.0, (-1.0, 0)
        ends_3R = np.zeros((3, len(self.values.rows)), np.int64)
        for block in self.values.blocks([passes[0], reference[0]]):
            shared_B = block.known_CB.all(axis=0)
            abs_B = np.abs(np.subtract(*block.values_CB))
            finite = np.flatnonzero(~np.isnan(abs_B))
            is_equal_B = shared_B & (block.bits_CB[0] == block.bits_CB[1])
            counts += [block.known_CB[0].sum(), shared_B.sum(), is_equal_B.sum(), len(finite)]
            total += float(abs_B[finite].sum())
            if len(finite):
                most = int(finite[np.argmax(abs_B[finite])])
                largest = max(largest, (float(abs_B[most]), -block.start - most))
            for ends_R, known_B in zip(ends_3R, (*block.known_CB, shared_B), strict=True):
                self.values.extend(ends_R, block.start + np.flatnonzero(known_B))
        diverged = self._divergences(*ends_3R)
        num_tokens, num_shared, num_equal, num_finite = counts.tolist()
        own, others = (
            {key: values[0] for key in self.settings[names[0]] if len(values := [*{self.settings[name][key] for name in names}]) == 1}
            for names in (passes, reference)
        )  # fmt: skip
        return PassClass(
            passes=tuple(passes), num_tokens=num_tokens, num_shared=num_shared, num_equal=num_equal,
            num_not_finite=num_shared - num_finite, mean_abs_d=total / num_finite if num_finite else None,
            max_abs_d=largest[0] if num_finite else None, max_at=self.values.place(-largest[1]) if num_finite else None,
            diverges_at=self.values.place(diverged[0]) if diverged else None, num_diverged=len(diverged),
            settings={key: (own[key], others[key]) for key in own if key in others and own[key] != others[key]},
        )  # fmt: skip

    def _divergences(self, own_R: np.ndarray, other_R: np.ndarray, shared_R: np.ndarray) -> list[int]:
        """Return the index of the first differing token for each prompt whose responses differ between the two classes.

        The arguments are the end offsets [R] of this class's tokens, the other class's tokens, and the shared tokens.
        """
        numbers: dict[tuple[int, str], int] = {}
        prompt_R = np.array([numbers.setdefault((row[0], row[2]), len(numbers)) for row in self.values.rows], np.int64)
        common = np.zeros(len(numbers), np.int64)
        np.maximum.at(common, prompt_R, shared_R)
        common_R = common[prompt_R]
        theirs, first = np.unique(prompt_R[rows := np.flatnonzero(other_R > common_R)], return_index=True)
        firsts = rows[first[np.isin(theirs, prompt_R[own_R > common_R])]]
        return [int(self.values.starts[row] + common_R[row]) for row in firsts]

    def _contradictions(self, keeps: _Relations) -> list[SettingContradiction]:
        """Find pairs of passes that contradict other pairs with the same single difference in settings.

        Whether a setting changes logprobs depends on the model and the prompts, so a pair from another group of passes
        counts only if it is bitwise equal. A differing pair is a contradiction if bitwise equal pairs outnumber
        differing pairs, including this one.
        """
        changes = _by_setting(one for one in self.relations if not one.is_same)
        class_of = {name: tuple(passes) for passes in self.classes for name in passes}
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
                few, many = sorted(sides, key=len)  # the smaller set of passes is more likely to be wrong
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
        median_T = np.full(self.values.num_tokens, np.nan)
        num_finite, num_above = np.zeros((2, len(self.classes)), np.int64)
        self.num_tokens = 0
        for block in self.values.blocks(self.firsts):
            self.num_tokens += int(block.known_CB.any(axis=0).sum())
            values_CB = block.values_CB
            compared = np.flatnonzero((~np.isnan(values_CB)).sum(axis=0) >= 2)
            if not len(compared):
                continue
            median = np.nanmedian(values_CB[:, compared], axis=0)
            median_T[block.start + compared] = median
            abs_CB = np.abs(values_CB[:, compared] - median)
            num_finite += np.isfinite(abs_CB).sum(axis=1)
            num_above += (abs_CB > 0).sum(axis=1)
        num_tested, num_different = int(num_finite.sum()), int(num_above.sum())
        most = num_different // 8 + 3 * TAIL
        largest = np.empty(0)
        """Differences of all classes, used to judge classes with few differences."""
        for number in range(len(self.classes)) if (num_above <= TAIL).any() else ():
            abs_T = self._abs(number, median_T)
            largest = np.sort(np.concatenate([largest, abs_T[abs_T > 0]]))[::-1][:most]
        for number, passes in enumerate(self.classes):
            abs_T = self._abs(number, median_T)
            own = abs_T[abs_T > 0]
            own[::-1].sort()
            others = _without(largest, own) if len(own) <= TAIL else largest[:0]
            chances: list[float | None] = [*beyond_chance(own, others, num_tested, num_different - len(own))]
            if len(own) == 1 and not chances and num_finite[number] > TAIL:
                chances = [None]
            if not chances:
                continue
            typical = float(np.median(own[len(chances) :])) if len(own) > len(chances) else None
            tokens = np.flatnonzero(abs_T >= own[len(chances) - 1])
            self.not_judged[number] = tokens = tokens[np.argsort(-abs_T[tokens], kind="stable")][: len(chances)]
            for token, abs_d, expected in zip(tokens.tolist(), own, chances, strict=False):
                values = self.values.at(self.firsts, token)
                others = np.delete(values, number)
                seq_id, place = self.values.place(token)
                odd = OddToken(
                    passes=tuple(passes), seq_id=seq_id, token=place, value=float(values[number]),
                    others=float(np.nanmedian(others)), num_others=int(np.isfinite(others).sum()), abs_d=float(abs_d),
                    typical=typical, expected=expected,
                )  # fmt: skip
                self.odd_tokens.append(odd)

    def _abs(self, number: int, median_T: np.ndarray) -> np.ndarray:
        """Return a class's distance from the median at each token, [T]: 0 where its logprob or the median is not
        finite."""
        abs_T = median_T.copy()
        for block in self.values.blocks([self.firsts[number]]):
            abs_T[block.start : block.start + block.known_CB.shape[1]] -= block.values_CB[0]
        return np.asarray(np.nan_to_num(np.abs(abs_T, out=abs_T), copy=False))


def _without(values: np.ndarray, own: np.ndarray) -> np.ndarray:
    """Return `values` (the largest of all classes) without one class's values, `own`. Both are in descending order."""
    places = np.searchsorted(-values, -own) + np.arange(len(own)) - np.searchsorted(-own, -own)
    return np.delete(values, places[places < len(values)])


def _differing(names: Sequence[str], settings: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, _Setting]]:
    """Return the settings that differ between passes, by pass. Settings that always change together count as one."""
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


def beyond_chance(own: np.ndarray, others: np.ndarray, num_tested: int, num_others: int | None = None) -> list[float]:
    """For each |d| that exceeds chance, return the expected number of tokens with at least this |d|.

    `own` holds a class's |d| above 0, largest first. Values below each |d| are assumed to follow a power law, with
    Hill's estimate of the exponent (Annals of Statistics 3, 1975) from their largest eighth. A class with few values is
    judged by the tail of `others`, which are the largest of `num_others` values. Rounding errors have a shorter tail,
    so the expected number is an upper bound.
    """
    is_own = len(own) > TAIL
    most = min(max(len(own) // 4, 1), MOST_ODD, len(own))
    judged = own if is_own else np.sort(others)[::-1]
    num = len(judged) if is_own or num_others is None else num_others
    logs = np.log(judged[: max(TAIL, num // 8) + most + 1])
    sums = np.concatenate([[0.0], np.cumsum(logs)])

    def expected(value: float, num_odd: int) -> float:
        first = num_odd if is_own else 0
        tail = max(TAIL, (num - first) // 8)
        if num - first <= tail:
            return math.inf
        bound = logs[first + tail]
        mean = max((sums[first + tail] - sums[first]) / tail - bound, 1e-9)
        return float(num_tested * tail / (num - first) * math.exp(min((bound - math.log(value)) / mean, 0.0)))

    num_odd = max((odd for odd in range(1, most + 1) if expected(own[odd - 1], odd) < CHANCE), default=0)
    return [expected(value, num_odd) for value in own[:num_odd]]
