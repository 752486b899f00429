"""All passes of one trace compared: classes of equal bits, odd tokens, and settings that contradict the bits."""

import csv
import io
import json
import resource
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from builders import tim_trace
from tim_trace import Recorder, compare
from tim_trace.analysis.comparison import pass_values
from tim_trace.analysis.comparison.passes import CHANCE, beyond_chance
from tim_trace.analysis.comparison.passes_text import passes_text
from tim_trace.schemas.errors import InvalidOption, NothingToCompare, QueryFailed

LENGTHS = (40, 60)


def record(path, passes, settings=None, *, lengths=LENGTHS, group_ids=None, ids=None):
    """Record {name: [T] logprobs} over sequences of these lengths; NaN in a masked array is no value."""
    with Recorder(path) as recorder:
        responses = ids or [list(range(3, 3 + num)) for num in lengths]
        batch = recorder.add_sequences(
            step=0, prompt_ids=[[1]] * len(lengths), response_ids=responses, group_ids=group_ids
        )
        ends = np.cumsum(lengths)
        for name, logprobs in passes.items():
            recorder.add_contract(name, {"source": name, **(settings or {}).get(name, {})})
            flat = np.ma.asarray(logprobs, np.float32)
            parts = [flat[end - num : end] for end, num in zip(ends, lengths, strict=True)]
            known = [~np.ma.getmaskarray(part) for part in parts]
            recorder.add_scores(
                name, batch, logprobs=[part.data for part in parts], scored_mask=[part.tolist() for part in known]
            )
    return path


def make(seed=0, num=100):
    draw = np.random.default_rng(seed)
    return -draw.exponential(2.0, num).astype(np.float32) - 1


def noisy(values, seed, size=0.02):
    return (values + np.random.default_rng(100 + seed).normal(0, size, len(values))).astype(np.float32)


def only(path, **options):
    (group,) = compare(path, **options).groups
    return group


def test_passes_with_equal_bits_are_a_class_and_its_distance_is_to_the_largest(tmp_path):
    base = make()
    other, third = noisy(base, 1), noisy(base, 2)
    passes = {"a": other, "b": base, "c": base.copy(), "d": third, "e": other.copy(), "f": base.copy()}
    group = only(record(tmp_path / "run", passes))
    assert [one.passes for one in group.classes] == [("b", "c", "f"), ("a", "e"), ("d",)]
    assert group.reference == "b"
    for one, values in zip(group.classes, (base, other, third), strict=True):
        d = np.abs(values.astype(np.float64) - base)
        assert one.mean_abs_d == pytest.approx(d.mean(), abs=1e-12)
        assert one.max_abs_d == pytest.approx(d.max(), abs=1e-12)
        assert (one.num_shared, one.num_equal) == (100, int((values == base).sum()))
    _, token = group.classes[2].max_at
    at = int(np.argmax(np.abs(third.astype(np.float64) - base)))
    assert token == (at if at < LENGTHS[0] else at - LENGTHS[0])
    assert (group.odd_tokens, group.contradictions) == ((), ())
    assert only(tmp_path / "run", against="d").classes[0].passes == ("d",)


def test_zeros_of_both_signs_are_other_bits(tmp_path):
    base = make()
    base[3] = 0.0
    signed = base.copy()
    signed[3] = -0.0
    group = only(record(tmp_path / "run", {"a": base, "b": base.copy(), "c": signed}))
    assert [one.num_equal for one in group.classes] == [100, 99]
    assert group.classes[1].max_abs_d == 0.0


@pytest.mark.parametrize("num_wrong", [1, 3])
def test_a_wrong_token_is_the_only_odd_one(tmp_path, num_wrong):
    base = make()
    passes = {name: noisy(base, seed) for seed, name in enumerate("abcdef")}
    for at in range(num_wrong):
        passes["c"][7 + 30 * at] -= 9
    group = only(record(tmp_path / "run", passes))
    assert {(one.passes, one.token) for one in group.odd_tokens} == {
        (("c",), at if at < LENGTHS[0] else at - LENGTHS[0]) for at in (7, 37, 67)[:num_wrong]
    }
    odd = group.odd_tokens[0]
    at = odd.token if odd.seq_id == "0" or odd.token in (7, 37) else odd.token + LENGTHS[0]
    assert odd.value == passes["c"][at]
    assert odd.others == pytest.approx(
        np.median([values[at] for name, values in passes.items() if name != "c"]), abs=1e-6
    )
    assert (odd.num_others, odd.abs_d) == (5, pytest.approx(9, abs=0.1))
    assert odd.expected < CHANCE
    assert odd.ratio == odd.abs_d / odd.typical > 100


def test_a_token_that_alone_differs_is_odd_and_of_two_either_may_be(tmp_path):
    base = make()
    wrong = base.copy()
    wrong[5] -= 1
    group = only(record(tmp_path / "run", {"a": base, "b": base.copy(), "c": wrong}))
    assert [(one.passes, one.token, one.num_others, one.expected) for one in group.odd_tokens] == [
        (("a", "b"), 5, 1, None), (("c",), 5, 1, None),
    ]  # fmt: skip
    assert "Either" in passes_text(compare(tmp_path / "run"))


def test_few_tokens_or_noise_alone_have_no_odd_token(tmp_path):
    base = make()
    tails = np.random.default_rng(3).standard_t(3, (4, 100)).astype(np.float32) * 0.02
    assert not only(
        record(tmp_path / "noise", {name: base + d for name, d in zip("abcd", tails, strict=True)})
    ).odd_tokens
    few = {name: noisy(base[:6], seed) for seed, name in enumerate("abc")}
    few["a"][2] -= 9
    assert not only(record(tmp_path / "few", few, lengths=(6,))).odd_tokens


@pytest.mark.parametrize("tail", ["normal", "laplace", "t3", "lognormal"])
def test_chance_is_kept(tail):
    """At most 2 of 300 classes have a token beyond chance, whatever the tail."""
    draw = np.random.default_rng(5)
    drawn = {
        "normal": draw.normal, "laplace": draw.laplace, "t3": lambda size: draw.standard_t(3, size),
        "lognormal": lambda size: draw.lognormal(0, 3, size),
    }[tail]  # fmt: skip
    found = [beyond_chance(np.sort(np.abs(drawn(size=120)))[::-1], np.zeros(0), 360) for _ in range(300)]
    assert sum(map(bool, found)) <= 2


TP1, TP8 = (
    {"config": {"parallel_config": {"tensor_parallel_size": 1}}},
    {"config": {"parallel_config": {"tensor_parallel_size": 8}}},
)


def test_a_wrong_name_is_found_by_the_bits_it_has(tmp_path):
    """tp8 changes the bits with and without a cache; the pass `wrong` says tp 8 and has the bits of tp 1."""
    one, eight = make(), noisy(make(), 1)
    settings = {
        "tp1": TP1, "tp1_cache": TP1 | {"cache": True}, "tp1_graphs": TP1 | {"graphs": True}, "tp8_cache": TP8 | {"cache": True},
        "wrong": TP8 | {"graphs": True},
    }  # fmt: skip
    passes = {name: eight if name == "tp8_cache" else one for name in settings}
    group = only(record(tmp_path / "run", passes, settings))
    first = group.contradictions[0]
    assert (first.code, first.passes, first.value, first.other_value) == ("other_setting", ("wrong",), "8", "1")
    assert first.others == ("tp1", "tp1_cache", "tp1_graphs")
    assert first.setting == "config.parallel_config.tensor_parallel_size"
    assert (first.num_different, first.num_same, first.example) == (1, 0, ("tp1_cache", "tp8_cache"))
    assert {one.passes for one in group.contradictions} == {("wrong",)}


def test_right_names_have_no_contradiction(tmp_path):
    one, eight = make(), noisy(make(), 1)
    settings = {
        "tp1": TP1, "tp1_graphs": TP1 | {"graphs": True}, "tp8": TP8, "tp8_graphs": TP8 | {"graphs": True},
        "tp1_cache": TP1 | {"cache": True}, "tp8_cache": TP8 | {"cache": True},
    }  # fmt: skip
    passes = {name: eight if name.startswith("tp8") else one for name in settings}
    group = only(record(tmp_path / "run", passes, settings))
    assert group.contradictions == ()
    assert group.classes[1].settings == {"config.parallel_config.tensor_parallel_size": ("8", "1")}


def test_a_setting_that_keeps_the_bits_elsewhere_does_not_explain_others(tmp_path):
    one, other = make(), noisy(make(), 1)
    settings = {
        name: {"mode": name[0], **({"graphs": True} if name.endswith("graphs") else {})}
        for name in ("a", "a_graphs", "b", "b_graphs", "c", "c_graphs")
    }
    passes = dict.fromkeys(settings, one) | {"c_graphs": other}
    contradictions = only(record(tmp_path / "run", passes, settings)).contradictions
    (found,) = [one for one in contradictions if one.code == "inert_setting"]
    assert {*found.passes, *found.others} == {"c", "c_graphs"}
    assert all(one.passes == ("c",) for one in contradictions if one is not found)
    assert (found.setting, found.num_same, found.num_different) == ("graphs", 2, 0)


def test_equal_settings_with_other_bits_are_told_only_if_settings_are_stated(tmp_path):
    passes = {"a": make(), "b": make(), "c": noisy(make(), 1)}
    (found,) = only(record(tmp_path / "run", passes, dict.fromkeys(passes, TP1))).contradictions
    assert (found.code, found.passes, found.others) == ("same_settings", ("c",), ("a", "b"))
    assert not only(record(tmp_path / "silent", passes)).contradictions


def test_an_odd_token_is_no_contradiction_too(tmp_path):
    base = make()
    wrong = base.copy()
    wrong[5] -= 9
    passes = {"a": base, "b": wrong, "c": noisy(base, 1), "d": noisy(base, 2)}
    settings = {"a": TP1, "b": TP1, "c": TP8, "d": TP8 | {"graphs": True}}
    group = only(record(tmp_path / "run", passes, settings))
    assert [(one.passes, one.token) for one in group.odd_tokens] == [(("b",), 5)]
    assert not [one for one in group.contradictions if one.code == "same_settings"]


def test_responses_are_compared_until_they_diverge(tmp_path):
    """One prompt, two responses that share 25 tokens: the second is stored from there on."""
    base = make(num=80)
    first = np.ma.array(base, mask=np.arange(80) >= 40)
    second = np.ma.array(noisy(base, 1), mask=((np.arange(80) >= 25) & (np.arange(80) < 65)))
    ids = [list(range(3, 43)), [*range(3, 28), *range(50, 65)]]
    passes = {"a": first, "b": first.copy(), "c": second}
    group = only(record(tmp_path / "run", passes, lengths=(40, 40), group_ids=["p", "p"], ids=ids))
    one, other = group.classes
    assert (other.num_tokens, other.num_shared, other.num_diverged, other.diverges_at[1]) == (40, 25, 1, 25)
    assert (one.num_diverged, one.diverges_at) == (0, None)
    longer = np.ma.array(base, mask=False)  # goes on where the others ended
    group = only(record(tmp_path / "longer", {"a": first, "b": longer}, lengths=(80,), ids=[list(range(3, 83))]))
    assert [each.num_diverged for each in group.classes] == [0, 0]


def test_passes_without_shared_sequences_are_groups_of_their_own(tmp_path):
    base = np.ma.array(make(), mask=np.arange(100) >= 40)
    other = np.ma.array(make(), mask=np.arange(100) < 40)
    found = compare(record(tmp_path / "run", {"a": base, "b": base, "c": other, "d": other, "e": other}))
    assert [(group.num_passes, group.num_tokens) for group in found.groups] == [(3, 60), (2, 40)]
    found = compare(record(tmp_path / "two", {"a": base, "b": base, "c": other}))
    assert (len(found.groups), found.alone) == (1, ("c",))
    with pytest.raises(NothingToCompare, match="no two passes share"):
        compare(record(tmp_path / "none", {"a": base, "c": other}))


def test_what_is_not_finite_is_counted_and_left_out(tmp_path):
    base = make()
    odd = noisy(base, 1)
    odd[[3, 4]] = np.nan, -np.inf
    group = only(record(tmp_path / "run", {"a": base, "b": base.copy(), "c": odd}))
    assert (group.classes[1].num_not_finite, group.classes[1].num_shared) == (2, 100)
    assert group.classes[1].mean_abs_d < 0.1
    assert "NaN" in tim_trace("compare", tmp_path / "run", "--json").stdout or group.odd_tokens == ()


def test_options_that_do_not_apply_are_refused(tmp_path):
    run = record(tmp_path / "run", {"a": make(), "b": make()})
    with pytest.raises(InvalidOption, match="choose one of a, b"):
        compare(run, against="z")
    with pytest.raises(InvalidOption, match="needs a second run"):
        compare(run, pair="a:b")
    with pytest.raises(InvalidOption, match="two runs were given"):
        compare(run, run, against="a")


def test_the_command_shows_what_python_returns(tmp_path):
    base = make()
    passes = {name: noisy(base, seed) for seed, name in enumerate("abcd")} | {"e": noisy(base, 0)}
    passes["b"][7] -= 9
    run = record(tmp_path / "run", passes, {"a": TP1, "b": TP8, "c": TP1, "d": TP8, "e": TP8})
    done = tim_trace("compare", run, "--json")
    assert done.code == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["sentence"].startswith(
        "5 passes over the same tokens: logprobs are bitwise equal within each of 4 classes and differ between classes; 1 odd token"
    )
    (odd,) = found["groups"][0]["odd_tokens"]
    assert odd["sentence"].startswith(f"Token 7 of {odd['seq_id']}: ")
    text = tim_trace("compare", run).stdout
    assert odd["sentence"] in " ".join(text.split())
    assert found["groups"][0]["contradictions"][0]["sentence"] in text
    rows = list(csv.DictReader(io.StringIO(tim_trace("compare", run, "--csv").stdout)))
    assert [row["pass"] for row in rows] == ["a", "e", "b", "c", "d"]
    assert float(rows[2]["max_abs_d"]) == found["groups"][0]["classes"][1]["max_abs_d"]
    assert tim_trace("compare", run, "--against", "z").code == 2


def test_check_compares_all_passes_where_there_is_neither_a_trainer_nor_a_rollout(tmp_path):
    base = make()
    odd = noisy(base, 1)
    odd[30] -= 12
    names = ("engine/a", "engine/b", "engine/c", "engine/d")
    good = record(tmp_path / "good", {name: noisy(base, number) for number, name in enumerate(names)})
    bad = record(
        tmp_path / "bad",
        {name: odd if name == "engine/b" else noisy(base, 7 + number) for number, name in enumerate(names)},
    )
    assert tim_trace("check", good).code == 0
    found = tim_trace("check", bad)
    assert found.code == 1
    assert "Token 30 of " in found.stdout
    assert tim_trace("compare", bad).stdout == found.stdout
    told = tim_trace("check", bad, "--json")
    assert told.code == 1
    assert told.json()["is_valid"] is False
    assert [one["token"] for one in told.json()["groups"][0]["odd_tokens"]] == [30]
    assert tim_trace("gate", bad, "--fail-on", "check").code == 1
    assert tim_trace("gate", good, "--fail-on", "check").code == 0
    assert tim_trace("check", bad, "--pair", "engine/x:engine/y").code == 2


def test_the_size_of_a_block_never_changes_the_result(tmp_path, monkeypatch):
    base = make(num=1000)
    passes = {name: noisy(base, seed) for seed, name in enumerate("abcd")} | {"e": base, "f": base.copy()}
    passes["b"][[7, 940]] -= 9
    passes["c"][[3, 600]] = np.nan, -np.inf
    passes["d"] = np.ma.array(passes["d"], mask=np.arange(1000) >= 900)
    passes["g"] = np.ma.array(base, mask=(np.arange(1000) >= 330) & (np.arange(1000) < 500))
    ids = [list(range(3, 503)), [*range(3, 333), *range(600, 770)]]
    settings = {name: TP1 if name in "ace" else TP8 for name in passes}
    run = record(tmp_path / "run", passes, settings, lengths=(500, 500), group_ids=["p", "p"], ids=ids)
    whole = only(run)
    monkeypatch.setattr(pass_values, "CELLS", 64)
    parts = only(run)
    assert [one.mean_abs_d for one in parts.classes] == pytest.approx(
        [one.mean_abs_d for one in whole.classes], rel=1e-12
    )
    whole, parts = (
        replace(each, classes=tuple(replace(one, mean_abs_d=None) for one in each.classes)) for each in (whole, parts)
    )
    assert parts == whole
    assert {(odd.passes, odd.token) for odd in parts.odd_tokens} == {(("b",), 7), (("b",), 440)}
    assert parts.contradictions


def test_memory_does_not_grow_with_the_number_of_passes(tmp_path, monkeypatch):
    monkeypatch.setattr(pass_values, "CELLS", 1 << 12)
    base, peaks = make(num=50_000), []
    for num in (3, 18):
        run = record(tmp_path / str(num), {f"p{seed}": noisy(base, seed) for seed in range(num)}, lengths=(500,) * 100)
        tracemalloc.start()
        compare(run)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]


def test_a_run_beyond_the_memory_or_the_temporary_folder_is_refused(tmp_path, monkeypatch):
    run = record(tmp_path / "run", {"a": make(), "b": make()})
    monkeypatch.setattr(pass_values, "BYTES_PER_TOKEN", 1 << 50)
    with pytest.raises(QueryFailed, match=r"comparing 100 response tokens takes .* Compare fewer steps"):
        compare(run)
    monkeypatch.undo()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
    try:
        with pytest.raises(QueryFailed, match=r"temporary file .* could not be written .* Set TMPDIR"):
            compare(run)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
