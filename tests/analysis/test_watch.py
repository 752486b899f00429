import io
import math
import os
import pty
import select
import signal
import sys
import threading
import time
from itertools import islice

import numpy as np
import pytest
from builders import TIM_TRACE, add_step, make_batch, make_trace, tim_trace
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from rich.cells import cell_len
from rich.console import Console
from rich.screen import Screen
from shared import rest_slow
from tim_trace.analysis.alarms import figures as rule
from tim_trace.analysis.alarms.reading import judge_alarms
from tim_trace.analysis.alarms.repeats import Repeats, unequal_rewards
from tim_trace.analysis.facts.read_series import read_series
from tim_trace.analysis.facts.series import KINDS, Series
from tim_trace.analysis.info import info
from tim_trace.analysis.rows import result_json
from tim_trace.analysis.trace.source import open_source
from tim_trace.analysis.views import open_database
from tim_trace.analysis.watch import memory
from tim_trace.analysis.watch.memory import Memory, Surveyor
from tim_trace.analysis.watch.view import WatchedView
from tim_trace.analysis.watch.watch import Watcher, watch
from tim_trace.analysis.watch.watched import ASCII, BLOCKS, spark
from tim_trace.schemas.errors import InvalidOption, TraceNotFound
from tim_trace.schemas.loss import Loss
from tim_trace.tracer.recorder import Recorder

PAIR = ("train", "rollout")


def series(name, values, steps=None, not_finite=()):
    kind, scale = KINDS[name]
    values = np.asarray(values, float)
    steps = np.arange(1, len(values) + 1) if steps is None else np.asarray(steps)
    return Series(name, steps, values, scale, kind, not_finite=np.asarray(not_finite, np.int64))


def assert_same(found, expected):
    assert list(found) == [name for name in expected if name != "changed_weights"]
    for name, one in found.items():
        assert one.steps.tolist() == expected[name].steps.tolist(), name
        assert one.values == pytest.approx(expected[name].values, rel=1e-9, abs=1e-15, nan_ok=True), name
        assert one.source == expected[name].source
        assert one.not_finite.tolist() == expected[name].not_finite.tolist()


def drawn(seen, width=100, height=None, encoding="utf-8"):
    """What is drawn on paper, or on a screen of `height` lines."""
    console = Console(file=io.TextIOWrapper(io.BytesIO(), encoding), width=width, height=height)
    view = WatchedView(seen) if height is None else Screen(WatchedView(seen, is_screen=True))
    lines = console.render_lines(view, pad=False)
    return "\n".join("".join(segment.text for segment in line).rstrip() for line in lines)


def add(recorder, step, *, passes=("rollout", "train", "current"), **more):
    """A step of eight responses in groups of four."""
    batch = make_batch(8, seed=step)
    draw = np.random.default_rng(step)
    batch["current"] = [np.minimum(t + draw.normal(0, 0.3, len(t)), 0).astype("f4") for t in batch["train"]]
    return add_step(recorder, step, batch, passes, group_ids=[str(row // 4) for row in range(8)], **more)


@pytest.mark.parametrize("seal_bytes", rest_slow([None, 1]))
def test_what_is_kept_of_steps_is_what_a_whole_reading_gives(tmp_path, seal_bytes):
    watcher = Watcher(tmp_path / "run")
    with Recorder(tmp_path / "run") as recorder:
        if seal_bytes:
            recorder.writer.segments.seal_bytes = seal_bytes
        recorder.add_loss(Loss(clip_low=0.1, clip_high=0.2))
        for step in range(1, 7):
            if step == 4:  # what was estimated from logprobs is logged from here on
                recorder.add_metrics(step, {"entropy": 1.5})
            add(recorder, step, passes=("rollout", "train", "current") if step > 2 else ("rollout", "train"))
            recorder.add_metrics(step, {"grad_norm": math.inf if step == 5 else 0.5 * step})
            recorder.flush()
            while (seen := watcher.look()).num_unread_steps:
                pass
            if step in (3, 4, 5):
                assert_same(seen.series, read_series(open_database(tmp_path / "run")))
            assert (seen.state, seen.last_step, seen.num_steps, seen.is_over) == ("live", step, step, False)
    seen = watcher.look()
    assert (seen.state, seen.is_over) == ("finished", True)
    told = info(tmp_path / "run")
    assert (seen.num_sequences, seen.num_tokens) == (told.num_sequences, told.num_response_tokens)
    assert_same(seen.series, read_series(open_database(tmp_path / "run")))


def test_only_steps_that_have_grown_are_read_again(tmp_path):
    surveyor, kept = Surveyor(PAIR), Memory(PAIR)

    def pending():
        source = open_source(tmp_path / "run")
        extents = surveyor.survey(source)
        found = kept.pending(extents)
        kept.read(source, extents)
        return found

    with Recorder(tmp_path / "run", join=True) as recorder, Recorder(tmp_path / "run", join=True) as late:
        for step in (1, 2, 3):
            add(recorder, step)
        recorder.flush()
        assert pending() == [3, 2, 1]
        assert pending() == []
        added = add(recorder, 4, passes=("rollout",))
        late.add_sequences(step=2, response_ids=[[1, 2]], seq_ids=["late"], reward=[1.0])
        recorder.flush()
        late.flush()
        assert pending() == [4, 2]
        recorder.add_scores("train", added, logprobs=make_batch(8, seed=4)["train"])
        recorder.flush()
        assert pending() == [4]
    assert pending() == []
    whole = read_series(open_database(tmp_path / "run"))
    assert_same(kept.series([1, 2, 3, 4]), whole)


def test_a_replay_of_old_steps_changes_nothing_that_is_shown(tmp_path):
    batches = make_trace(tmp_path / "run")
    surveyor = Surveyor(PAIR)
    before = surveyor.survey(open_source(tmp_path / "run"))
    with Recorder.of_writer(_writer(tmp_path / "run"), _capture()) as recorder:
        recorder.add_contract("replay/bf16", {"engine": "hf"})
        batch = batches[2]
        added = recorder.add_sequences(step=9, response_ids=batch["response_ids"])
        recorder.add_scores("replay/bf16", added, logprobs=batch["train"])
    after = surveyor.survey(open_source(tmp_path / "run"))
    assert after.passes - before.passes == {"replay/bf16"}
    assert after.steps[9].num_scores == 0
    assert Surveyor(("replay/bf16", "rollout")).survey(open_source(tmp_path / "run")).steps[9].num_scores == 4


def _writer(folder):
    from tim_trace.tracer.writer import TraceWriter

    return TraceWriter(folder)


def _capture():
    from tim_trace.schemas.capture import Capture

    return Capture.parse("logprobs", 1.0)


@pytest.mark.slow
def test_a_long_run_is_read_in_portions_the_newest_first(tmp_path, monkeypatch):
    make_trace(tmp_path / "run", steps=5)
    monkeypatch.setattr(memory, "MOST_TOKENS", 1)
    watcher = Watcher(tmp_path / "run")
    first = watcher.look()
    assert first.num_unread_steps == 4
    assert np.flatnonzero(first.series["k3"].known).tolist() == [4]
    assert "4 earlier steps are not shown yet" in drawn(first)
    (seen,) = watch(tmp_path / "run", once=True)
    assert_same(seen.series, read_series(open_database(tmp_path / "run")))
    assert [one.num_unread_steps for one in watch(tmp_path / "run", every=0.01)] == [4, 3, 2, 1, 0]


def test_steps_are_read_from_the_newest_on_without_gaps(tmp_path, monkeypatch):
    with Recorder(tmp_path / "run") as recorder:
        for step, num in enumerate((3, 6, 6), 1):
            batch = recorder.add_sequences(step=step, response_ids=[[7] * num])
            for name in ("rollout", "train"):
                recorder.add_scores(name, batch, logprobs=[[-1.0] * num])
    monkeypatch.setattr(memory, "MOST_TOKENS", 10)  # the newest step and the oldest would fit
    first = Watcher(tmp_path / "run").look()
    assert np.flatnonzero(first.series["k3"].known).tolist() == [2]


@pytest.mark.slow
def test_a_trace_is_watched_while_files_are_sealed_and_vanish(tmp_path):
    recorder = Recorder(tmp_path / "run")
    recorder.writer.segments.seal_bytes = 1

    def train():
        for step in range(1, 41):
            add(recorder, step)
            recorder.add_metrics(step, {"loss": 0.1})
        recorder.close()

    watcher, training = Watcher(tmp_path / "run"), threading.Thread(target=train)
    training.start()
    counts = []
    while not (seen := watcher.look()).is_over or seen.num_unread_steps:
        counts.append(seen.num_steps)
    training.join()
    assert counts == sorted(counts)
    assert_same(seen.series, read_series(open_database(tmp_path / "run")))


def test_watching_writes_nothing(tmp_path):
    make_trace(tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    list(watch(tmp_path / "run"))
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_it_waits_for_a_run_and_ends_with_it(tmp_path):
    views = watch(tmp_path / "run", every=0.01)
    seen = next(views)
    assert (seen.state, seen.is_over) == ("waiting", False)
    assert "does not exist. Record a run with" in seen.notes[0]
    with Recorder(tmp_path / "run") as recorder:
        seen = next(views)
        assert (seen.state, seen.notes) == ("live", ("no sequence recorded yet",))
        add(recorder, 1)
        recorder.flush()
        assert next(views).last_step == 1
    *_, last = views
    assert last.is_over
    assert drawn(last).endswith(f"Recording ended: finished. Next:\ntim-trace diagnose {tmp_path}/run")


def test_a_trace_that_takes_another_s_place_is_watched_from_its_beginning(tmp_path):
    make_trace(tmp_path / "run", steps=3)
    watcher = Watcher(tmp_path / "run")
    assert watcher.look().num_steps == 3
    with Recorder(tmp_path / "run", force=True) as recorder:
        add(recorder, 7)
    assert_same(watcher.look().series, read_series(open_database(tmp_path / "run")))


def test_a_pair_without_scores_is_said_with_the_passes_there_are(tmp_path):
    make_trace(tmp_path / "run", passes=("rollout",))
    (seen,) = watch(tmp_path / "run", once=True)
    assert "no scores of pass 'train' yet; passes so far: rollout" in seen.notes[0]
    assert "reward" in seen.series


@pytest.mark.parametrize(
    ("options", "told"),
    [({"every": 0}, "every: got 0"), ({"every": math.nan}, "every"), ({"steps": "few"}, "steps: got 'few'")],
)
def test_options_that_mean_nothing_are_refused(tmp_path, options, told):
    with pytest.raises(InvalidOption, match=told):
        watch(tmp_path, **options)


def test_once_refuses_a_run_that_is_not_there(tmp_path):
    with pytest.raises(TraceNotFound, match="does not exist"):
        watch(tmp_path / "run", once=True)


# ---- alarms


def heard(found, repeats=None):
    raised = judge_alarms(found, repeats or Repeats(), {}).raised
    return {(each.alarm.who, each.alarm.metric, each.alarm.condition): each for each in raised}


def test_an_alarm_has_its_first_step_and_whether_it_still_sounds():
    found = heard({"k3": series("k3", [1e-4, 2e-3, math.nan, 1e-4, 0.5], steps=[1, 2, 3, 5, 8])})
    nemo, tinker = found["NeMo-RL", "k3", "> 0.001"], found["Tinker", "k3", "> 0.01"]
    assert (nemo.first_step, nemo.first_value, nemo.num_steps, nemo.still) == (2, 2e-3, 2, True)
    assert (tinker.first_step, tinker.num_steps) == (8, 1)
    assert ("Miles", "k3", "> 1") not in found
    assert "gen_kl_error" in nemo.alarm.definition


def test_a_level_of_size_takes_both_signs_and_silence_is_told():
    found = heard({"mean_d": series("mean_d", [0.0, 0.2, -0.05])})
    assert found["verl", "k1", "> 0.1"].first_step == 2
    assert not found["verl", "k1", "> 0.1"].still


def test_chi_square_follows_from_the_series():
    d = np.random.default_rng(0).normal(0.1, 1.2, 1000)
    w = np.exp(d)
    one = {"mean_d": d.mean(), "k3": (np.expm1(d) - d).mean(), "ess": w.sum() ** 2 / (len(w) * (w * w).sum())}
    found = judge_alarms({name: series(name, [value]) for name, value in one.items()}, Repeats(), {})
    (chi2,) = (each for each in found.judged if each.alarm.metric == "chi2_token")
    assert chi2.own == pytest.approx(np.mean(w * w) - 1)


def test_this_project_s_rule_needs_three_steps_of_a_gap():
    values = np.full(10, 0.01)
    values[[2, 3, 5, 6, 7]] = 0.1
    found = heard({"mean_abs_d": series("mean_abs_d", values)})["tim-trace", "mean_abs_d", "> 0.06 for 3 steps"]
    assert (found.first_step, found.num_steps, found.still) == (8, 1, False)


def test_a_gradient_norm_that_is_no_number_sounds():
    found = heard({"grad_norm": series("grad_norm", [1.0, math.nan, 1.0], not_finite=[2])})
    alarm = found["tim-trace", "grad_norm", "is NaN or infinite"]
    assert (alarm.first_step, alarm.first_value, alarm.still) == (2, None, False)


def test_a_reward_that_changes_its_mind_sounds(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        for step in range(1, 5):
            recorder.add_sequences(
                step=step, response_ids=[[1, token] for token in range(20)], reward=[float(step > 2)] * 20
            )
    watcher = Watcher(tmp_path / "run")
    alarm = {(a.alarm.who, a.alarm.metric): a for a in watcher.look().alarms.raised}["tim-trace", "unequal_rewards"]
    assert (alarm.first_step, alarm.first_value, alarm.still) == (3, 0.5, True)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 1.0, math.nan])), max_size=40), st.randoms())
def test_unequal_rewards_are_what_a_plain_count_gives(rows, random):
    place = np.sort([random.randrange(30) for _ in rows]).astype(int)
    whole, reward = np.array([w for w, _ in rows], np.uint64), np.array([r for _, r in rows], float)
    last, repeated, unequal = {}, np.zeros(30), np.zeros(30)
    for at, name, value in zip(place, whole, reward, strict=True):
        if name in last:
            repeated[at] += 1
            unequal[at] += abs(last[name] - value) > 1e-6
        last[name] = value
    expected = []
    for at in range(30):
        total = repeated[max(0, at - 19) : at + 1].sum()
        expected.append(unequal[max(0, at - 19) : at + 1].sum() / total if total >= 20 else 0.0)
    assert unequal_rewards(place, whole, reward, 30) == pytest.approx(expected)


@settings(max_examples=60, deadline=None)
@given(
    arrays(float, st.integers(0, 40), elements=st.floats(0, 10) | st.just(math.nan)),
    st.integers(1, 6),
    st.integers(0, 3),
)
def test_trailing_medians_and_runs_are_what_plain_loops_give(values, window, gap):
    medians = [
        np.nanmedian(past)
        if i >= window + gap and np.isfinite(past := values[i - window - gap : i - gap]).any()
        else math.nan
        for i in range(len(values))
    ]
    assert rule.trailing_median(values, window, gap) == pytest.approx(medians, nan_ok=True)
    flags = values > 5
    runs = [i + 1 >= window and bool(flags[i + 1 - window : i + 1].all()) for i in range(len(values))]
    assert rule.sustained(flags, window).tolist() == runs


# ---- sparklines

FINITE = st.floats(1e-9, 1e9)


@settings(max_examples=60, deadline=None)
@given(arrays(float, st.integers(1, 300), elements=FINITE | st.just(math.nan)), st.integers(1, 120))
def test_a_sparkline_fits_and_reaches_both_ends(values, width):
    drawn = spark(series("k3", values), width)
    known = values[np.isfinite(values)]
    if not len(known):
        assert drawn == ""
        return
    assert len(drawn) == min(width, len(values))
    assert set(drawn) <= {*BLOCKS, " "}
    assert BLOCKS[0] in drawn
    if len(drawn) == len(values) and known.max() > known.min() * 1.001:
        assert drawn[int(np.nanargmax(values))] == BLOCKS[-1]
        assert drawn[int(np.nanargmin(values))] == BLOCKS[0]


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 500), st.integers(2, 60), st.data())
def test_a_spike_of_one_step_survives_the_narrowest_line(n, width, data):
    at = data.draw(st.integers(0, n - 1))
    values = np.full(n, 1e-3)
    values[at] = 1.0
    assert spark(series("k3", values), width).count(BLOCKS[-1]) == 1
    assert spark(series("ess", 1 - values / 2), width).count(BLOCKS[0]) == 1


@settings(max_examples=60, deadline=None)
@given(arrays(float, st.integers(1, 50), elements=st.floats(-1e6, 1e6)))
def test_the_same_levels_are_drawn_in_ascii(values):
    drawn = spark(series("reward", values), 20)
    assert spark(series("reward", values), 20, ASCII) == drawn.translate(str.maketrans(BLOCKS, ASCII))


def test_scales_and_holes_of_a_sparkline():
    assert spark(series("k3", [1e-6, 1e-4, 1e-2]), 3) == BLOCKS[0] + BLOCKS[4] + BLOCKS[7]
    assert (
        spark(series("reward", [0.0, math.nan, 0.5, 1.0], not_finite=[2]), 4) == BLOCKS[0] + "!" + BLOCKS[4] + BLOCKS[7]
    )
    assert spark(series("reward", [3.0, math.nan, 3.0]), 3) == f"{BLOCKS[0]} {BLOCKS[0]}"


# ---- what is shown


@pytest.fixture(scope="module")
def collapsing(tmp_path_factory):
    """Twenty steps whose gap opens at step 11, under a name that would act on a terminal."""
    folder = tmp_path_factory.mktemp("watch") / "[red]run\x1b[31m\n\u202e\u8a13\u7df4"
    with Recorder(folder) as recorder:
        for step in range(1, 21):
            batch = make_batch(8, seed=step)
            if step > 10:
                batch["train"] = [t - 1 for t in batch["train"]]
            add_step(recorder, step, batch, group_ids=[str(row // 4) for row in range(8)])
            recorder.add_metrics(
                step, {"grad_norm": math.nan if step == 20 else 1.0, "learning_rate": 1e-6, "[b]\x1b[1m": 1.0}
            )
    return folder


@pytest.fixture(scope="module")
def seen(collapsing):
    (view,) = watch(collapsing, once=True)
    return view


@pytest.mark.parametrize("width", [10, 40, 80, 300])
@pytest.mark.parametrize("height", [5, 24, 50])
def test_a_view_fits_its_terminal(seen, width, height):
    for encoding in ("utf-8", "ascii", "latin-1"):
        text = drawn(seen, width, height, encoding)
        lines = text.rstrip("\n").split("\n")
        assert len(lines) <= height
        assert max(cell_len(line) for line in lines) <= width
        assert height < 24 or width < 40 or lines[-1].startswith("tim-trace diagnose ")
        text.encode(encoding)


@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_view_names_the_alarms_the_steps_and_the_course(seen, width):
    text = drawn(seen, width)
    flat = " ".join(text.split())
    assert "11 still Miles: mean_abs_d > 0.8 (" in flat
    assert "20 still tim-trace: grad_norm is NaN or infinite" in flat
    assert "steps 20 (1 to 20)" in text
    assert f"WHOLE RUN steps 1 to {'20' if width > 40 else ''}" in flat
    assert BLOCKS[-1] in text
    assert width < 80 or "reward_std_within_groups" in drawn(seen, width, 100)


@pytest.mark.slow
def test_names_do_not_act_on_the_terminal(seen, collapsing):
    for encoding in ("utf-8", "ascii"):
        text = drawn(seen, encoding=encoding)
        assert all(char.isprintable() or char == "\n" for char in text)
        assert "[red]run\\x1b[31m\\x0a\\u202e" in text
    done = tim_trace("watch", collapsing, "--once")
    assert done.code == 0
    assert "\x1b" not in done.stdout
    assert "[red]run" in done.stdout


def test_json_has_every_digit_of_the_latest_steps(collapsing, seen):
    told = tim_trace("watch", collapsing, "--json", "--steps", "-2:").json()
    k3 = read_series(open_database(collapsing))["k3"].values
    assert [row["step"] for row in told["latest"]] == [19, 20]
    assert [row["k3"] for row in told["latest"]] == [k3[18], k3[19]]
    assert told["latest"][1]["grad_norm"] == "NaN"
    assert [a["first_step"] for a in told["alarms"]["raised"] if a["alarm"]["code"] == "miles_abs_d"] == [11]
    assert {row["name"]: row["num_steps"] for row in told["series"]}["k3"] == 20
    assert told["state"] == "finished"
    assert len(result_json(seen)["latest"]) == result_json(seen)["num_latest"] == 10


def test_without_a_terminal_one_view_is_printed(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        add(recorder, 1)
        recorder.flush()
        done = tim_trace("watch", tmp_path / "run")
    assert done.code == 0
    assert "LIVE" in done.stdout
    assert "Still recording. Next:\ntim-trace diagnose" in done.stdout


def on_terminal(*arguments, interrupt_when=None):
    """Run tim-trace on a terminal of its own; Ctrl-C once `interrupt_when` was printed. Exit code and output."""
    child, terminal = pty.fork()
    if child == 0:
        os.environ["TERM"] = "xterm"
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell lets what runs in the background ignore it
        os.execv(sys.executable, [sys.executable, str(TIM_TRACE), *map(str, arguments)])
    output, end = b"", time.monotonic() + 120
    while True:
        if not select.select([terminal], [], [], max(0.0, end - time.monotonic()))[0]:
            os.kill(child, signal.SIGKILL)
            pytest.fail(f"it did not end: {output[-2000:].decode(errors='replace')}")
        try:
            read = os.read(terminal, 65536)
        except OSError:  # the other side was closed
            break
        if not read:
            break
        output += read
        if interrupt_when and interrupt_when in output:
            os.write(terminal, b"\x03")
            interrupt_when = None
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), output.decode()


def test_on_a_terminal_it_ends_with_the_recording_and_leaves_the_last_view(tmp_path):
    make_trace(tmp_path / "run")
    code, output = on_terminal("watch", tmp_path / "run")
    assert code == 0
    drawn, left = output.split("\x1b[?1049l")
    assert "\x1b[?1049h" in drawn
    assert "FINISHED" in left
    assert "tim-trace diagnose" in left


@pytest.mark.slow
def test_ctrl_c_ends_the_view_and_not_the_recording(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        add(recorder, 1)
        recorder.flush()
        code, output = on_terminal("watch", tmp_path / "run", "--every", "0.2", interrupt_when=b"LATEST STEPS")
        assert code == 0
        assert "LIVE" in output.split("\x1b[?1049l")[1]
        assert "\x1b[?25h" in output  # the cursor is back
        add(recorder, 2)
    assert [one.num_steps for one in islice(watch(tmp_path / "run"), 1)] == [2]


def test_the_steps_to_show_are_named_as_everywhere(collapsing):
    done = tim_trace("watch", collapsing, "--csv", "--steps", "3:5,-1")
    lines = [line.split(",") for line in done.stdout.splitlines()]
    assert lines[0][0] == "step"
    assert [line[0] for line in lines[1:]] == ["3", "4", "5", "20"]
    k3 = read_series(open_database(collapsing))["k3"].values
    assert [float(line[lines[0].index("k3")]) for line in lines[1:]] == k3[[2, 3, 4, 19]].tolist()


def test_a_screen_keeps_the_last_steps_and_says_what_is_missing(seen):
    text = drawn(seen, 80, 24)
    assert (
        f"... and {len(seen.alarms.raised) - text.count('still') - text.count(' to ')} more" in text or "more" in text
    )
    steps = [line.split()[0] for line in text.split("LATEST STEPS")[1].split("WHOLE RUN")[0].splitlines()[2:] if line]
    assert len(steps) >= 3
    assert steps[-1] == "20"
