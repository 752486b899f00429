import json
import math

import numpy as np
import pytest
from builders import add_step, make_batch, make_trace, tim_trace
from tim_trace.analysis.dynamics.dynamics import dynamics, growths, onsets_of, peaks_of
from tim_trace.analysis.dynamics.text import dynamics_text, summary_sentences, unanswered_sentences
from tim_trace.analysis.facts.changes import change_points
from tim_trace.analysis.facts.read_series import read_series
from tim_trace.analysis.facts.series import KINDS, Series, named
from tim_trace.analysis.objective.objective import objective
from tim_trace.analysis.rows import result_json
from tim_trace.analysis.statistics.change_points import StretchSquares, penalty, tail
from tim_trace.analysis.statistics.noise import long_run_variance
from tim_trace.analysis.stats import stats
from tim_trace.analysis.views import open_database
from tim_trace.schemas.errors import InvalidOption, NothingToCompare
from tim_trace.schemas.loss import Loss
from tim_trace.tracer.recorder import Recorder


def series(values, name="reward", steps=None):
    kind, scale = KINDS[name]
    values = np.asarray(values, float)
    steps = np.arange(1, len(values) + 1) if steps is None else np.asarray(steps)
    return Series(name, steps, values, scale, kind)


def autoregressive(draw, n, phi):
    noise = draw.normal(size=n + 50)
    for place in range(1, n + 50):
        noise[place] += phi * noise[place - 1]
    return noise[50:]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Six steps of eight responses in groups of four, with a loss, entropies, versions, and a NaN among the logged values."""
    folder = tmp_path_factory.mktemp("dynamics") / "run"
    batches = {}
    with Recorder(folder) as recorder:
        recorder.add_loss(Loss(clip_low=0.1, clip_high=0.2))
        for step in range(1, 7):
            batch = batches[step] = make_batch(8, seed=step)
            draw = np.random.default_rng(step)
            batch["reward"][:4] = 0.5
            batch["finish_reason"] = ["length" if row % 4 == 0 else "stop" for row in range(8)]
            batch["current"] = [np.minimum(t + draw.normal(0, 0.3, len(t)), 0).astype("f4") for t in batch["train"]]
            batch["entropy"] = [draw.exponential(1.0, len(t)).astype("f4") for t in batch["train"]]
            added = add_step(
                recorder, step, batch, ("rollout",), group_ids=[str(row // 4) for row in range(8)],
                finish_reason=batch["finish_reason"],
            )  # fmt: skip
            recorder.add_scores("train", added, logprobs=batch["train"], entropy=batch["entropy"], policy_version=step)
            recorder.add_scores("current", added, logprobs=batch["current"], policy_version=step + 1)
            norm = math.nan if step == 3 else 0.5 * step
            recorder.add_metrics(step, {"grad_norm": norm, "learning_rate": 1e-6, "actor/pg_loss": -0.1 * step})
    return folder, batches


def flat(batch, name):
    return np.concatenate([np.asarray(values, float) for values in batch[name]])


@pytest.mark.parametrize("kept", [False, True])
def test_series_are_what_numpy_makes_of_the_steps(run, tmp_path, kept):
    folder, batches = run
    database = open_database(folder)
    assert not database.sums.covers(("train", "rollout"))
    if kept:
        from tim_trace.analysis.trace.sums import ensure

        ensure(database, ("train", "rollout"), of_run=False)
    found = read_series(database)
    for place, batch in enumerate(batches.values()):
        d = flat(batch, "train") - flat(batch, "rollout")
        advantage = np.repeat(batch["advantage"], [len(r) for r in batch["rollout"]])
        k3 = np.expm1(d) - d
        w = np.exp(d)
        log_ratio = flat(batch, "current") - flat(batch, "train")
        cut = (advantage > 0) & (log_ratio > math.log(1.2)) | (advantage < 0) & (log_ratio < math.log(0.9))
        expected = {
            "k3": k3.mean(),
            "mean_abs_d": np.abs(d).mean(),
            "p99_abs_d": np.quantile(np.abs(d), 0.99),
            "max_abs_d": np.abs(d).max(),
            "mean_d": d.mean(),
            "k3_positive": k3[advantage > 0].mean(),
            "k3_negative": k3[advantage < 0].mean(),
            "ess": w.sum() ** 2 / (len(w) * (w * w).sum()),
            "reward": batch["reward"].mean(),
            "reward_std_within_groups": np.std(batch["reward"][4:], ddof=1) / 2,
            "share_groups_without_spread": 0.5,
            "length": np.mean([len(r) for r in batch["response_ids"]]),
            "share_length_limited": 0.25,
            "entropy": flat(batch, "entropy").mean(),
            "policy_lag": 2.0,
            "version_lag": 1.0,
            "clip_share": cut.mean(),
            "loss": -0.1 * (place + 1),
        }
        for name, value in expected.items():
            assert found[name].values[place] == pytest.approx(value, rel=1e-9, abs=1e-12), name
    assert found["grad_norm"].values[[0, 1, 3]] == pytest.approx([0.5, 1.0, 2.0])
    assert np.isnan(found["grad_norm"].values[2])
    assert found["grad_norm"].not_finite.tolist() == [3]
    assert "token entropy in train" in found["entropy"].source


def test_the_order_of_the_rows_changes_no_bit_of_rewards_and_their_spread(tmp_path):
    rewards = np.random.default_rng(0).normal(size=400)
    found = {}
    for name, order in (("forward", np.arange(400)), ("backward", np.arange(400)[::-1])):
        with Recorder(tmp_path / name) as recorder:
            recorder.add_sequences(
                step=1, seq_ids=[f"{row}" for row in order], group_ids=[f"{row // 4}" for row in order],
                response_ids=[[1]] * 400, reward=rewards[order],
            )  # fmt: skip
        series = read_series(open_database(tmp_path / name))
        found[name] = [series[each].values.tobytes() for each in ("reward", "reward_std_within_groups")]
    assert found["forward"] == found["backward"]


def test_tiny_advantages_of_whole_responses_have_their_sign_beside_those_of_tokens(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        for advantage, logprob in ((1e-50, -2.5), (-1e-50, -1.75), ([0.0], -2.0)):
            batch = recorder.add_sequences(step=1, response_ids=[[1]], advantage=[advantage])
            recorder.add_scores("rollout", batch, logprobs=[[-2.0]])
            recorder.add_scores("train", batch, logprobs=[[logprob]])
            recorder.add_scores("current", batch, logprobs=[[logprob + 1.0]])
        recorder.add_loss(Loss(kind="ppo_clip"))
    found = read_series(open_database(tmp_path / "run"))
    assert found["k3_positive"].values == pytest.approx([math.exp(-0.5) - 1 + 0.5])
    assert found["k3_negative"].values == pytest.approx([math.exp(0.25) - 1 - 0.25])
    assert found["clip_share"].values == pytest.approx([1 / 3])


def test_masked_tokens_and_tokens_that_are_not_finite_are_left_out(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        batch = recorder.add_sequences(
            step=1, response_ids=[[1, 2, 3, 4]], response_mask=[[1, 0, 1, 1]], advantage=[[1.0, 1.0, -1.0, 1.0]]
        )
        recorder.add_scores("rollout", batch, logprobs=[[-1.0, -1.0, -2.0, math.nan]])
        recorder.add_scores("train", batch, logprobs=[[-1.5, -9.0, -1.75, -1.0]])
    found = read_series(open_database(tmp_path / "run"))
    assert found["mean_abs_d"].values == pytest.approx([0.375])
    assert found["k3_positive"].values == pytest.approx([math.exp(-0.5) - 1 + 0.5])
    assert found["k3_negative"].values == pytest.approx([math.exp(0.25) - 1 - 0.25])
    assert found["entropy"].values == pytest.approx([(1.5 + 1.75 + 1.0) / 3])
    assert "estimated" in found["entropy"].source


def clip_trace(path, loss, advantage, log_ratio):
    """A sequence a row, of two tokens that the updates moved by log_ratio."""
    with Recorder(path) as recorder:
        recorder.add_loss(loss)
        given = {} if advantage is None else {"advantage": advantage}
        batch = recorder.add_sequences(step=1, response_ids=[[1, 2]] * len(log_ratio), **given)
        for name in ("rollout", "train"):
            recorder.add_scores(name, batch, logprobs=[[-2.0, -2.0]] * len(log_ratio))
        recorder.add_scores("current", batch, logprobs=[[-2.0 + each, -2.0 + each] for each in log_ratio])
    return path


@pytest.mark.parametrize(
    "loss",
    [
        Loss(kind="cispo", clip_high=1.2),
        Loss(clip_low=0.1, clip_high=0.2),
        Loss(clip_low=0.1, clip_high=0.2, clip_hard=1.1),
        Loss(clip_low=0.1, clip_high=0.2, clip_hard=1.5),
        Loss(level="sequence_mean", clip_low=0.1, clip_high=0.2),
    ],
)
def test_the_clipped_share_is_the_objective_s(tmp_path, loss):
    """Also where an advantage is 0 or NaN, and between a hard bound and the plain one."""
    advantage = [1.0, 0.0, -1.0, -1.0, math.nan, 2.0, -1.0, 0.0]
    log_ratio = [0.3, 0.4, 0.15, 0.5, 0.5, -0.4, -0.3, 0.0]
    trace = clip_trace(tmp_path / "run", loss, advantage, log_ratio)
    share = objective(trace).value("clipped")
    assert 0 < share < 1
    assert read_series(open_database(trace))["clip_share"].values == pytest.approx([share])


def test_a_loss_without_a_clip_or_advantages_has_no_clipped_share(tmp_path):
    moved = [0.5, -0.5]
    vespo = Loss(kind="vespo", level="sequence_sum")
    for name, loss in (("sapo", Loss(kind="sapo")), ("vespo", vespo), ("reinforce", Loss(kind="reinforce"))):
        assert "clip_share" not in read_series(open_database(clip_trace(tmp_path / name, loss, [1.0, -1.0], moved)))
    assert "clip_share" not in read_series(
        open_database(clip_trace(tmp_path / "none", Loss(kind="cispo", clip_high=1.2), None, moved))
    )


def test_kept_weights_say_how_much_of_them_each_update_changed(tmp_path):
    import torch

    with Recorder(tmp_path / "run") as recorder:
        weights = torch.zeros(8)
        for version in range(3):
            recorder.add_sequences(step=version + 1, response_ids=[[1]])
            recorder.add_weights(version, {"w": weights})
            weights[: 2 * (version + 1)] += 1
    assert read_series(open_database(tmp_path / "run"))["changed_weights"].values[:2].tolist() == [0.25, 0.5]


def test_several_runs_are_read_one_at_a_time(tmp_path):
    make_trace(tmp_path / "a")
    make_trace(tmp_path / "b", steps=2)
    both = open_database([tmp_path / "a", tmp_path / "b"])
    with pytest.raises(InvalidOption, match="several traces are open; name one of a, b"):
        read_series(both)


def test_a_scale_has_room_for_zero():
    assert series([0, 0, 0], "k3").scaled.tolist() == [0, 0, 0]
    assert series([0, 2, 8], "k3").scaled == pytest.approx(np.log([1, 2, 8]))
    assert series([0, 0.5, 1], "clip_share").scaled == pytest.approx([-math.log(4), 0, math.log(4)], abs=0.7)
    assert np.isnan(series([1, np.nan], "k3").scaled).tolist() == [False, True]


def test_lines_are_least_squares_of_any_stretch():
    y = np.random.default_rng(0).normal(size=30)
    lines = StretchSquares(y)
    for start, end in ((0, 30), (3, 9), (17, 19), (5, 30)):
        t = np.arange(start, end)
        left = y[start:end] - np.polyval(np.polyfit(t, y[start:end], 1), t)
        assert float(lines.squares(start, end)) == pytest.approx(float(left @ left), abs=1e-10)


def test_the_penalty_bounds_what_white_noise_gains():
    draw = np.random.default_rng(1)
    for n in (30, 200):
        places, gains = np.arange(4, n - 3), []
        for _ in range(400):
            lines = StretchSquares(draw.normal(size=n))
            gains.append(float((lines.squares(0, n) - lines.squares(0, places) - lines.squares(places, n)).max()))
        for gain in (9.0, 12.0):
            assert np.mean(np.array(gains) > gain) < tail(gain, n) + 0.02
        assert np.mean(np.array(gains) > penalty(n)) < 0.012


@pytest.mark.parametrize("phi", [0.0, 0.5, 0.8])
def test_the_long_run_variance_is_that_of_the_mean(phi):
    draw = np.random.default_rng(2)
    found = np.median([long_run_variance(autoregressive(draw, 2000, phi), 2) for _ in range(20)])
    assert found == pytest.approx(1 / (1 - phi) ** 2, rel=0.35)


@pytest.mark.slow
def test_stationary_noise_and_trends_rarely_change():
    draw = np.random.default_rng(3)
    runs = alarms = 0
    for n in (40, 120, 200):
        for phi in (0.0, 0.4, 0.7):
            for slope in (0.0, 0.1):
                for _ in range(35):
                    runs += 1
                    alarms += bool(change_points(series(autoregressive(draw, n, phi) + slope * np.arange(n))))
    assert alarms <= 0.01 * runs


@pytest.mark.parametrize("phi", [0.0, 0.5])
def test_jumps_and_ramps_are_found_where_they_are(phi):
    draw = np.random.default_rng(4)
    at = np.arange(200)
    spread = 1 / math.sqrt(1 - phi * phi)
    inside, jumps, ramps = 0, [], []
    for _ in range(15):
        noise = autoregressive(draw, 200, phi)
        jumps += change_points(series(noise + 6 * spread * (at >= 119)))
        ramps += change_points(series(noise + 9 * spread * np.maximum(at - 118, 0) / 81))
    assert 14 <= len(jumps) <= 16
    assert 14 <= len(ramps) <= 16
    assert {change.kind for change in jumps} == {"shift"}
    assert np.median([change.size_in_sd for change in jumps]) == pytest.approx(6, abs=1.2)
    inside = sum(change.low <= 120 <= change.high for change in jumps + ramps)
    assert inside >= 0.9 * len(jumps + ramps)
    assert np.mean([change.kind == "ramp" for change in ramps]) > 0.8
    assert all(change.p < 0.003 for change in jumps + ramps)


def test_the_onset_of_a_ramp_that_noise_hides_lies_within_its_interval():
    # A ramp that looks like a jump began before it: intervals of the best form alone held 8 of 10.
    draw = np.random.default_rng(13)
    at, held = np.arange(120), []
    for _ in range(150):
        first = int(draw.integers(30, 90))
        noise = autoregressive(draw, 120, 0.5) * math.sqrt(0.75)
        found = change_points(series(noise + 6 * np.maximum(at - first + 1, 0) / (120 - first)))
        held += [found[0].low <= first + 1 <= found[0].high] if found else []
    assert len(held) > 60
    assert np.mean(held) >= 0.9


def test_the_onset_of_an_exponential_drop_lies_within_its_interval():
    held, widths = [], []
    for length in (60, 120):
        for share in (0.04, 0.08, 0.16):
            for number in range(9):
                draw = np.random.default_rng([length, number])
                first = int(draw.integers(length // 4, 3 * length // 4))
                drop = 20 * -np.expm1(-np.maximum(np.arange(length) - first + 1, 0) / (share * length))
                changes = change_points(series(draw.normal(size=length) - drop))
                nearest = sorted(changes, key=lambda change: abs(change.step - first - 1))[:1]
                held += [change.low <= first + 1 <= change.high for change in nearest]
                widths += [change.high - change.low for change in nearest]
    assert len(held) >= 52
    assert sum(held) >= 51  # jumps and breaks of slope alone hold 42 of 53
    assert np.mean(widths) < 8


def test_changes_are_found_on_the_series_own_scale_and_said_in_its_unit():
    draw = np.random.default_rng(5)
    (change,) = change_points(series(np.exp(draw.normal(-8, 0.2, 100) + 2.0 * (np.arange(100) >= 60)), "k3"))
    assert change.step == 61
    assert change.before == pytest.approx(math.exp(-8), rel=0.3)
    assert change.after == pytest.approx(math.exp(-6), rel=0.3)


@pytest.mark.parametrize(
    "values",
    [[1.0] * 50, [0.0] * 50, list(range(50)), [np.nan] * 50, [1, 2, 3], [], [1e-6 * (1 - k / 50) for k in range(50)]],
)
def test_what_does_not_scatter_does_not_change(values):
    assert change_points(series(values)) == []


def test_a_mismatch_of_every_second_step_changes_at_some_steps():
    draw, found = np.random.default_rng(2), 0
    for _ in range(100):
        usual = np.exp(draw.normal(-14, 0.4, 24))
        found += bool(list(peaks_of(series(usual, "k3"))))
        usual[9::2] *= 3000
        assert change_points(series(usual, "k3")) == []
        (change,) = peaks_of(series(usual, "k3"))
        assert (change.step, change.kind) == (10, "peaks")
    assert found <= 2
    assert list(peaks_of(series(usual, "reward"))) == []


def test_one_outlier_is_no_change():
    values = np.random.default_rng(6).normal(size=100)
    values[40] = 50
    assert change_points(series(values)) == []


def test_a_lag_that_is_1_after_the_first_step_does_not_change_later():
    assert change_points(series([0.0] + [1.0] * 59, "policy_lag")) == []
    assert change_points(series([0.9999] * 2 + [1.0] * 58, "policy_lag")) == []


def test_long_series_are_thinned_and_steps_stay_the_run_s():
    values = np.random.default_rng(7).normal(size=5000) + 4.0 * (np.arange(5000) >= 3000)
    (change,) = change_points(series(values, steps=np.arange(10, 5010)))
    assert change.low <= 3010 <= change.high
    assert change.high - change.low < 40


def test_the_order_of_onsets_is_open_where_intervals_overlap():
    draw = np.random.default_rng(8)
    at = np.arange(150)
    runs = {
        "k3": series(np.exp(draw.normal(-8, 0.2, 150) + 2 * (at >= 40)), "k3"),
        "grad_norm": series(np.exp(draw.normal(0, 0.2, 150) + 2 * (at >= 40)), "grad_norm"),
        "reward": series(draw.normal(0, 0.05, 150) - 0.5 * (at >= 100)),
        "learning_rate": series(1e-6 * (1 + 9 * (at >= 20)), "learning_rate"),
        "length": series(draw.normal(100, 1, 150), "length"),
    }
    changes = {name: change_points(each) for name, each in runs.items()}
    onsets = {o.name: o for o in onsets_of(changes, {name: each.kind for name, each in runs.items()})}
    assert list(onsets) == ["grad_norm", "k3", "reward"]
    assert onsets["k3"].may_be_first
    assert onsets["k3"].undecided == ("grad_norm",)
    assert not onsets["reward"].may_be_first
    assert onsets["reward"].undecided == ()
    assert [change.step for change in changes["learning_rate"]] == [21]


def test_k3_compounds_by_its_slope():
    steps = np.arange(1, 61)
    draw = np.random.default_rng(11)
    whole, last = growths(series(np.exp(-9 + 0.05 * steps + draw.normal(0, 0.1, 60)), "k3"))
    assert whole.low < 0.05 < whole.high
    assert whole.doubling == pytest.approx(math.log(2) / 0.05, rel=0.1)
    assert (last.part, last.num_steps) == ("last third", 20)
    assert growths(series([1e-4] * 7, "k3")) == ()
    assert growths(series([0.0] * 20, "k3")) == ()
    assert growths(None) == ()


@pytest.mark.parametrize(("num_steps", "phi"), [(8, 0.0), (12, 0.8), (24, 0.5)])
def test_the_slope_s_interval_holds_it_where_few_steps_hide_autocorrelation(num_steps, phi):
    # With the normal quantile and the estimated autocorrelation: 0.93, 0.76 and 0.90.
    draw = np.random.default_rng(14)
    steps = np.arange(1, num_steps + 1)
    held = 0
    for _ in range(400):
        logs = -9 + 0.05 * steps + 0.3 * autoregressive(draw, num_steps, phi)
        found = growths(series(np.exp(logs), "k3"))[0]
        held += found.low <= 0.05 <= found.high
    assert held >= 0.9 * 400


def test_the_interval_of_a_slope_of_white_noise_is_student_s():
    # Of many steps: 1.96 standard errors, times what 1.5 / sqrt(n) of autocorrelation adds.
    logs = np.random.default_rng(15).normal(0, 0.1, 2000)
    (whole, _) = growths(series(np.exp(logs), "k3"))
    error = 0.1 / math.sqrt(2000 * (2000**2 - 1) / 12)
    assert whole.high - whole.slope == pytest.approx(1.96 * error, rel=0.15)


def collapsing(path, steps=56):
    """A run whose mismatch begins to ramp at step 20 and whose responses surge at step 40."""
    draw = np.random.default_rng(12)
    with Recorder(path) as recorder:
        for step in range(1, steps + 1):
            size = 0.01 * math.exp(0.15 * max(0, step - 20))
            lengths = draw.integers(8, 12, 16) * (3 if step >= 40 else 1)
            rollout = [-draw.exponential(1.0, n) for n in lengths]
            train = [np.minimum(r + draw.normal(0, size, len(r)), 0).astype("f4") for r in rollout]
            batch = recorder.add_sequences(
                step=step, response_ids=[[1] * int(n) for n in lengths], reward=draw.normal(size=16)
            )
            recorder.add_scores("rollout", batch, logprobs=[r.astype("f4") for r in rollout])
            recorder.add_scores("train", batch, logprobs=train)
    return path


@pytest.mark.slow
def test_a_run_is_told_from_its_first_move_on(tmp_path):
    trace = collapsing(tmp_path / "run")
    found = dynamics(trace)
    onsets = {onset.name: onset for onset in found.onsets}
    assert onsets["k3"].change.low <= 21 <= onsets["k3"].change.high
    assert onsets["k3"].may_be_first
    assert not onsets["length"].may_be_first
    assert onsets["length"].change.step == 40
    text = dynamics_text(found)
    assert "HOW FAST DOES THE MISMATCH GROW?" in text
    shown = tim_trace("dynamics", trace, "--json").json()
    assert shown["onsets"][0]["name"] == found.onsets[0].name
    assert shown["series"] == json.loads(json.dumps(result_json(found)["series"]))


def test_a_part_of_the_steps_is_a_run_of_its_own(tmp_path):
    trace = collapsing(tmp_path / "run", steps=30)
    found = dynamics(trace, steps=":15")
    assert (found.first_step, found.last_step, found.num_steps) == (1, 15, 15)
    assert found.onsets == ()
    assert "No series changed" in summary_sentences(found)[0]


def test_one_step_is_told_and_the_rest_named_as_open(tmp_path):
    make_trace(tmp_path / "run", steps=1)
    found = dynamics(tmp_path / "run")
    assert summary_sentences(found) == (
        "The run is too short to find what changed first (steps recorded: 1, needed: 12).",
    )
    assert any(
        sentence.startswith("steps with a value: 1; change points need 12") for sentence in unanswered_sentences(found)
    )
    # `stats` adds up sequence by sequence: a unit in the last place.
    k3 = {each.name: each.first for each in found.series}["k3"]
    assert k3 == pytest.approx(stats(tmp_path / "run").dicts()[0]["k3"], rel=1e-14)
    assert "WHAT IS UNKNOWN?" in dynamics_text(found)


def test_metrics_alone_are_followed_too(tmp_path):
    draw = np.random.default_rng(13)
    with Recorder(tmp_path / "run") as recorder:
        for step in range(1, 41):
            recorder.add_metrics(step, {"grad_norm": math.exp(draw.normal(0, 0.1) + 3 * (step > 25))})
    found = dynamics(tmp_path / "run")
    assert [(o.name, o.change.step) for o in found.onsets] == [("grad_norm", 26)]
    assert any("share no token" in sentence for sentence in unanswered_sentences(found))


def test_a_trace_without_steps_is_refused(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        recorder.add_hyperparameters({"seed": 1})
    with pytest.raises(NothingToCompare, match="neither sequences nor metrics"):
        dynamics(tmp_path / "run")


def test_no_line_is_laid_across_a_jump():
    steps = np.arange(1, 121)
    values = np.exp(np.random.default_rng(0).normal(0, 0.05, 120)) * np.where(steps < 100, 1e-3, 0.5)
    k3 = named("k3", steps, values, "")
    assert {part.part for part in growths(k3)} == {"run", "last third"}
    (last,) = growths(k3, change_points(k3))
    assert (last.part, last.num_steps) == ("last third", 20)  # from the end of its interval on


def test_a_change_between_two_values_may_be_at_any_step_between_them():
    steps = np.arange(5, 305, 5)
    values = (
        1 + 0.01 * np.random.default_rng(0).normal(size=60) - (steps >= 148)
    )  # the value of step 145 is the last before
    (change,) = change_points(named("reward", steps, values, ""))
    assert (change.low, change.step, change.high) == (146, 150, 150)


def test_a_lag_is_of_passes_that_say_their_version(tmp_path):
    for name, version in (("silent", None), ("said", 3)):
        with Recorder(tmp_path / name) as recorder:
            for step in (1, 2):
                batch = recorder.add_sequences(step=step, response_ids=[[1, 2]], policy_version=2, reward=[1.0])
                recorder.add_scores("rollout", batch, logprobs=[[-1.0, -1.0]])
                recorder.add_scores("train", batch, logprobs=[[-1.0, -1.5]], policy_version=version)
    silent, said = (read_series(open_database(tmp_path / name)) for name in ("silent", "said"))
    assert not {"policy_lag", "version_lag"} & silent.keys()
    assert [said[name].values.tolist() for name in ("policy_lag", "version_lag")] == [[1.0, 1.0]] * 2
