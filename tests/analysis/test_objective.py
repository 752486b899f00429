"""What the mismatch does to an objective, against NumPy token by token, by hand, and against its own SQL."""

import math

import numpy as np
import pytest
from builders import tim_trace
from hypothesis import given
from hypothesis import strategies as st
from tim_trace.analysis.objective.objective import objective
from tim_trace.analysis.objective.text import objective_text
from tim_trace.analysis.statistics.loss import contribution, correction_weight, is_clipped
from tim_trace.analysis.trace import connection, ragged, tokens
from tim_trace.analysis.views import open_database
from tim_trace.schemas.errors import InvalidOption
from tim_trace.schemas.loss import Loss
from tim_trace.tracer.recorder import Recorder

LOSSES = {
    "ppo": Loss(clip_low=0.1, clip_high=0.3),
    "hard": Loss(clip_low=0.1, clip_high=0.3, clip_hard=1.6, aggregation="constant"),
    "bypass": Loss(denominator="rollout"),
    "current": Loss(denominator="current", aggregation="sequence_sum"),
    "reinforce": Loss(kind="reinforce", correction="token_truncate", correction_high=1.1, correction_low=0.95),
    "masked": Loss(aggregation="sequence_mean", correction="token_mask", correction_high=1.1, correction_low=0.9),
    "sequence": Loss(correction="sequence_mask", correction_high=1.5),
    "truncated": Loss(correction="sequence_truncate", correction_high=1.2),
    "gspo": Loss(level="sequence_mean", clip_low=0.02, clip_high=0.03, aggregation="sequence_mean"),
    "gspo_masked": Loss(
        level="sequence_mean", clip_low=0.02, clip_high=0.03, correction="token_mask", correction_high=1.1
    ),
    "rloo": Loss(level="sequence_sum", aggregation="sequence", correction="sequence_truncate", correction_high=1.2),
    "cispo": Loss(kind="cispo", clip_high=1.15),
    "sapo": Loss(kind="sapo", sapo_temperature_pos=2.0, aggregation="sequence_mean"),
    "vespo": Loss(kind="vespo", level="sequence_sum", vespo_k_neg=1.5),
    "vespo_masked": Loss(
        kind="vespo", level="sequence_sum", correction="token_mask", correction_high=1.2, correction_low=0.8
    ),
    "vespo_truncated": Loss(
        kind="vespo", level="sequence_sum", correction="sequence_truncate", correction_high=1.2, denominator="current"
    ),
}


SMOOTH = (
    "sapo_temperature_pos",
    "sapo_temperature_neg",
    "vespo_k_pos",
    "vespo_lambda_pos",
    "vespo_k_neg",
    "vespo_lambda_neg",
)


def make(seed, rows=12, width=9, spread=0.15, by_token=False, holes=True):
    """Logprobs of four rows to a group, two inner iterations, masks, a NaN, an infinity and a NULL."""
    draw = np.random.default_rng(seed)
    lengths = draw.integers(2, width + 1, rows)
    rollout = [-draw.exponential(0.6, n) for n in lengths]
    train = [np.minimum(r + draw.normal(0, spread, len(r)), 0) for r in rollout]
    current = [[np.minimum(t + draw.normal(0, spread * (1 + k), len(t)), 0) for t in train] for k in range(2)]
    mask = [draw.random(n) > 0.2 for n in lengths]
    advantage = [draw.normal(size=n).astype(np.float32) for n in lengths] if by_token else list(draw.normal(size=rows))
    if holes:
        train[0][0], rollout[1][0], current[0][2][0] = np.nan, -np.inf, np.nan
        mask[0][0] = mask[1][0] = mask[2][0] = True
        mask[3][:] = False
        advantage[4] = np.full(lengths[4], np.nan, np.float32) if by_token else math.nan
    as32 = [[np.asarray(values, np.float32) for values in side] for side in (rollout, train, *current)]
    return {"rollout": as32[0], "train": as32[1], "current": as32[2:], "mask": mask, "advantage": advantage}


def write(path, steps, loss=None, passes=("rollout", "train", "current"), advantages=True, iterations=2):
    with Recorder(path) as recorder:
        if loss is not None:
            recorder.add_loss(loss)
        for step, batch in enumerate(steps, 1):
            rows = len(batch["mask"])
            given = {"advantage": batch["advantage"]} if advantages else {}
            added = recorder.add_sequences(
                step=step,
                response_ids=[[1] * len(m) for m in batch["mask"]],
                response_mask=[m.astype(int).tolist() for m in batch["mask"]],
                group_ids=[str(row // 4) for row in range(rows)],
                **given,
            )
            for name in passes:
                if name == "current":
                    for number in range(iterations):
                        recorder.add_scores(name, added, logprobs=batch[name][number])
                else:
                    recorder.add_scores(name, added, logprobs=batch[name])
    return path


def options_of(loss, **changes):
    """A loss, with changes, as the option of `objective`."""
    name = {"sequence_mean": "gspo", "sequence_sum": "rloo"}.get(loss.level, loss.kind)
    if loss.kind == "vespo":
        name = "vespo"
    names = (
        "clip_low",
        "clip_high",
        "clip_hard",
        "denominator",
        "aggregation",
        "correction",
        "correction_low",
        "correction_high",
        *SMOOTH,
    )
    values = {option: getattr(loss, option) for option in names} | changes
    return {"loss": ",".join([name, *(f"{key}={value}" for key, value in values.items() if value is not None)])}


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """Whether advantages are by token -> two steps of two inner iterations, and the trace of them."""
    steps = {by_token: [make(seed, by_token=by_token) for seed in (1, 2)] for by_token in (False, True)}
    folder = tmp_path_factory.mktemp("objective")
    return {by_token: (made, open_database(write(folder / str(by_token), made))) for by_token, made in steps.items()}


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
    """A trace whose engine is exact, and whose policy drifts."""
    batch = make(3, holes=False)
    batch["rollout"] = batch["train"]
    return open_database(write(tmp_path_factory.mktemp("exact") / "run", [batch]))


def f(loss, ratio, advantage):
    """The loss, one number at a time, as papers write it."""
    if loss.kind == "reinforce":
        return ratio * advantage
    if loss.kind == "cispo":
        return min(ratio, loss.clip_high) * advantage
    if loss.kind == "sapo":
        tau = loss.sapo_temperature_pos if advantage > 0 else loss.sapo_temperature_neg
        return 4 / tau / (1 + math.exp(-tau * (ratio - 1))) * advantage
    if loss.kind == "vespo":
        power, decay = (
            (loss.vespo_k_pos, loss.vespo_lambda_pos) if advantage >= 0 else (loss.vespo_k_neg, loss.vespo_lambda_neg)
        )
        w = min(max(ratio, 1e-8), math.exp(20))
        return math.exp(decay) * w**power * math.exp(-decay * w) * advantage
    free = min(ratio, loss.clip_hard or math.inf)
    return min(free * advantage, max(min(ratio, 1 + loss.clip_high), 1 - loss.clip_low) * advantage)


def clips(loss, ratio, advantage):
    """Whether a small change of the ratio changes nothing, or for cispo not the weight."""
    if loss.kind in ("sapo", "vespo"):
        return False
    steps = [f(loss, ratio * factor, advantage) for factor in (1 - 1e-7, 1 + 1e-7)]
    return advantage != 0 and abs(steps[0] - steps[1]) < 1e-12 * abs(advantage)


def weight_of(loss, ratio):
    low = loss.correction_low or 0.0
    if loss.correction == "none":
        return 1.0
    if loss.correction.endswith("truncate"):
        return max(min(ratio, loss.correction_high), low)
    return ratio if low <= ratio <= loss.correction_high else 0.0


def plain_sequence(loss, batch, row, iteration):
    """[(advantage, d, drift, true ratio, used ratio, weight, p's)] of the tokens of a sequence that count."""
    sides = [np.asarray(batch[name][row], float) for name in ("rollout", "train")] + [
        batch["current"][iteration][row].astype(float)
    ]
    given = batch["advantage"][row]
    advantage = np.broadcast_to(np.asarray(given, float), len(sides[0]))
    there = batch["mask"][row] & np.all(np.isfinite(sides), axis=0)
    rollout, train, current = (side[there] for side in sides)
    advantage = advantage[there]
    d, drift = train - rollout, current - train
    if loss.level == "token":
        true, used = np.exp(d + drift), np.exp(drift)
    else:
        how = np.mean if loss.level == "sequence_mean" else np.sum
        true, used = (np.full(len(d), np.exp(how(x))) if len(d) else d for x in (d + drift, drift))
        advantage = np.full(len(d), np.mean(advantage)) if len(d) else d  # one of the sequence
    used = {"train": used, "rollout": true, "current": np.ones_like(true)}[loss.denominator]
    ratio = np.exp(d) if loss.correction.startswith("token") else np.full(len(d), np.exp(d.sum()))
    weights = [weight_of(loss, one) for one in ratio]
    if loss.kind == "vespo" and loss.correction != "none" and len(d):  # in the ratio
        product = math.prod(max(one, 1e-8) for one in (weights if loss.correction.startswith("token") else weights[:1]))
        weights = [f(loss, used[0] * product, a) / f(loss, used[0], a) if a else 1.0 for a in advantage]
    return list(zip(advantage, d, drift, true, used, weights, rollout, train, current, strict=True))


def expected(loss, batch, iteration):
    """The figures of one update, token by token; the loss divides by every row, and by every token that its mask counts."""
    num_rows = len(batch["mask"])
    num_counted = sum(mask.sum() for mask in batch["mask"])
    sequences = [plain_sequence(loss, batch, row, iteration) for row in range(num_rows)]
    counted = [mask.sum() for mask, tokens in zip(batch["mask"], sequences, strict=True) if tokens]
    sequences = [tokens for tokens in sequences if tokens]
    num_tokens = sum(len(tokens) for tokens in sequences)
    found = dict.fromkeys(
        ("bias", "bias_positive", "bias_negative", "abs_bias", "size", "used", "uncorrected_bias", "unclipped_bias"),
        0.0,
    )
    for rows, num_own in zip(sequences, counted, strict=True):
        each = {
            "token_mean": 1 / num_counted, "sequence_mean": 1 / num_own / num_rows, "sequence_sum": 1 / num_rows,
            "sequence": 1 / len(rows) / num_rows, "constant": 1 / num_rows / (loss.max_tokens or 1),
        }[loss.aggregation]  # fmt: skip
        terms = []
        for advantage, _, _, true, used, weight, *_ in rows:
            if math.isfinite(advantage):
                true_term, used_term = f(loss, true, advantage), f(loss, used, advantage)
                free = advantage * (weight * used - true)
                terms.append(
                    (advantage, true_term, used_term, weight * used_term - true_term, weight * used_term, free)
                )
        if loss.level != "token" and terms:  # one term a sequence: its tokens share everything
            mean = [np.mean([term[i] for term in terms]) for i in range(6)]
            terms = [tuple(mean)] * len(terms)
        for advantage, true_term, used_term, b, applied, free in terms:
            found["unclipped_bias"] += each * free
            found["used"] += each * applied
            found["bias"] += each * b
            found["abs_bias"] += each * abs(b)
            found["size"] += each * abs(true_term)
            found["uncorrected_bias"] += each * (used_term - true_term)
            found["bias_positive" if advantage > 0 else "bias_negative"] += each * b
    found["skew"] = found["bias"] / found["abs_bias"] if found["abs_bias"] else None
    found["relative_bias"] = found["bias"] / found["size"]
    found["unclipped_relative_bias"] = found["unclipped_bias"] / found["size"]
    tokens = [token for rows in sequences for token in rows]
    d, drift = (np.array([token[i] for token in tokens]) for i in (1, 2))
    found |= {
        "num_tokens": num_tokens, "num_sequences": len(sequences), "num_rows": num_rows, "mean_d": d.mean(), "mean_abs_d": np.abs(d).mean(),
        "var_d": d.var(), "var_drift": drift.var(), "cov_d_drift": np.mean(d * drift) - d.mean() * drift.mean(),
        "var_total": (d + drift).var(), "share_mismatch": (d**2).sum() / ((d**2).sum() + (drift**2).sum()),
        "mean_abs_sum_d": np.mean([abs(sum(token[1] for token in rows)) for rows in sequences]),
        "bad_updates": np.mean([t[0] < 0 and math.exp(t[6]) - math.exp(t[8]) >= 0.5 for t in tokens]),
        "bad_updates_mismatch": np.mean([t[0] < 0 and math.exp(t[6]) - math.exp(t[7]) >= 0.5 for t in tokens]),
    }  # fmt: skip
    known = [[token for token in rows if math.isfinite(token[0])] for rows in sequences]
    terms = [token for rows in known for token in (rows if loss.level == "token" else rows[:1])]
    flags = [(t[0] > 0, clips(loss, t[3], t[0]), clips(loss, t[4], t[0])) for t in terms]
    found |= {
        "clipped": np.mean([used for _, _, used in flags]), "clipped_true": np.mean([true for _, true, _ in flags]),
        "to_clipped_positive": np.mean([up and used and not true for up, true, used in flags]),
        "to_clipped_negative": np.mean([not up and used and not true for up, true, used in flags]),
        "to_free_positive": np.mean([up and true and not used for up, true, used in flags]),
        "to_free_negative": np.mean([not up and true and not used for up, true, used in flags]),
        "sequence_proxy": np.mean([np.expm1(sum(t[1] for t in rows)) * np.mean([t[0] for t in rows]) for rows in known if rows]),
    }  # fmt: skip
    return found


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_every_figure_of_every_update_is_what_numpy_says(opened, name, by_token):
    loss, (steps, database) = LOSSES[name], opened[by_token]
    found = objective(database, **options_of(loss))
    assert found.loss == loss
    for row in found.steps.dicts():
        wanted = expected(loss, steps[row["step"] - 1], row["iteration"])
        for figure, value in wanted.items():
            if figure in row:
                close = value if value is None else pytest.approx(value, rel=1e-9, abs=1e-12)
                assert row[figure] == close, (row["step"], row["iteration"], figure)
    of_run = np.mean([expected(loss, steps[step], k)["bias"] for step in (0, 1) for k in (0, 1)])
    assert found.value("bias") == pytest.approx(of_run, rel=1e-9, abs=1e-12)
    assert (found.num_updates, found.num_groups) == (4, 6)
    assert (found.num_nan, found.num_inf) == (6, 4)
    assert any("6 tokens have a NaN logprob and 4 an infinite logprob" in note for note in found.notes)


@given(advantage=st.floats(-5, 5), drift=st.floats(-3, 3), name=st.sampled_from(sorted(LOSSES)), d=st.floats(-3, 3))
def test_identities_of_a_term(advantage, drift, name, d):
    loss = LOSSES[name]
    ratio, a = np.exp(np.array([drift])), np.array([advantage])
    # Without mismatch there is no bias, and no decision turns.
    assert contribution(loss, ratio * np.exp(0.0), a) == contribution(loss, ratio, a)
    # A clip never gives more than the ratio alone, and the same where it does not bind.
    free = ratio * a
    if loss.kind == "ppo_clip":
        held = np.minimum(ratio, loss.clip_hard or np.inf) * a
        assert contribution(loss, ratio, a)[0] <= held[0]
    if not is_clipped(loss, ratio, a)[0] and loss.kind in ("ppo_clip", "cispo"):
        assert contribution(loss, ratio, a)[0] == pytest.approx(free[0], rel=1e-12)
    # REINFORCE: b = A (rho_used - rho*), and the full weight takes it away.
    plain = Loss(kind="reinforce", correction="token_truncate")
    true = ratio * np.exp(d)
    b = contribution(plain, ratio, a) - contribution(plain, true, a)
    assert b[0] == pytest.approx(advantage * (ratio[0] - true[0]), rel=1e-9, abs=1e-12)
    corrected = correction_weight(plain, np.array([d])) * contribution(plain, ratio, a) - contribution(plain, true, a)
    assert corrected[0] == pytest.approx(0, abs=1e-10 * max(1, abs(advantage) * true[0]))


@pytest.mark.parametrize("name", LOSSES)
def test_without_mismatch_nothing_is_bent(exact, name):
    found = objective(exact, **options_of(LOSSES[name], denominator="train", correction="none"))
    assert {found.value(figure) for figure in ("bias", "abs_bias")} == {0.0}
    assert found.value("flipped") == (0 if LOSSES[name].has_clip else None)
    assert found.value("var_d") == 0
    assert found.value("var_drift") > 0
    assert "does not change the objective's value" in found.verdict[0]


def test_a_recorded_loss_is_read_whole(tmp_path):
    loss = Loss(aggregation="constant", max_tokens=20, kl_coefficient=0.1)
    batch = make(18)
    found = objective(write(tmp_path / "run", [batch], loss))
    assert found.loss == loss
    assert found.loss_from == "as recorded"
    assert found.steps.dicts()[1]["bias"] == pytest.approx(expected(loss, batch, 1)["bias"], rel=1e-9)
    assert "all figures exclude the KL term (coefficient 0.1)" in found.notes


def test_bypass_uses_the_true_ratio(opened):
    found = objective(opened[False][1], loss="denominator=rollout")
    assert found.value("abs_bias") == 0
    assert "divides by the rollout's own logprobs" in found.verdict[0]
    assert found.value("var_d") > 0


def test_bypass_is_not_said_to_be_untouched(opened):
    found = objective(opened[False][1], loss="denominator=rollout")
    (verdict,) = found.verdict
    assert "does not change the objective" not in verdict
    assert "That ratio contains both the mismatch" in verdict
    assert (
        f"{found.value('mean_abs_d'):.3g} nats on average; {found.value('clipped') * 100:.3g}% of the tokens are clipped"
        in verdict
    )


def lifted_by_the_clip(path):
    """Tokens that the engine likes a little more than the trainer, and one in ten that the clip cuts off at 1.2 of 4.5."""
    draw = np.random.default_rng(3)
    with Recorder(path) as recorder:
        batch = recorder.add_sequences(
            step=1, response_ids=[[1] * 10] * 80, group_ids=[str(row // 2) for row in range(80)], advantage=[1.0] * 80
        )
        rollout = np.full((80, 10), -2.0, np.float32)
        train = rollout - 0.1 + draw.normal(0, 0.01, rollout.shape).astype(np.float32)
        train[:, 4] = -0.5
        recorder.add_scores("rollout", batch, logprobs=list(rollout))
        recorder.add_scores("train", batch, logprobs=list(train))
    return path


def test_a_bias_that_the_clip_makes_has_no_direction(tmp_path):
    found = objective(lifted_by_the_clip(tmp_path / "run"))
    clipped, free = found.figures["relative_bias"], found.figures["unclipped_relative_bias"]
    assert clipped.value > clipped.low > 0 > free.high > free.value
    assert clipped.value * found.value("size") == pytest.approx(0.9 * (1 - math.exp(-0.1)) + 0.1 * -0.2, abs=2e-3)
    assert free.value * found.value("size") == pytest.approx(
        0.9 * (1 - math.exp(-0.1)) + 0.1 * (1 - math.exp(1.5)), abs=2e-3
    )
    first, second = found.verdict[:2]
    assert [part.code for part in found.verdict_codes][:2] == ["large_opposed", "unclipped"]
    assert first.endswith("This comes from clipping.")
    assert f"by {clipped.value * 100:+.3g}% (95% interval over groups " in first
    assert second.startswith(f"Without clipping, the bias would be {free.value * 100:+.3g}% (95% interval over groups ")
    for word in ("up: ", "down: ", "one way", "credited", "punished"):
        assert not any(word in sentence for sentence in found.verdict)
    text = objective_text(found)
    assert "unclipped_relative_bias" in text


def test_a_loss_without_a_clip_has_one_figure(opened):
    found = objective(opened[False][1], **options_of(LOSSES["reinforce"]))
    assert "unclipped_relative_bias" not in found.figures
    assert "unclipped" not in [part.code for part in found.verdict_codes]


def one_sequence(path, rollout, train, current=None, advantage=1.0, loss=None, rows=1):
    with Recorder(path) as recorder:
        if loss:
            recorder.add_loss(loss)
        given = {} if advantage is None else {"advantage": [advantage] * rows}
        batch = recorder.add_sequences(step=1, response_ids=[[1] * len(rollout)] * rows, **given)
        for name, logprobs in (("rollout", rollout), ("train", train), ("current", current)):
            if logprobs is not None:
                recorder.add_scores(name, batch, logprobs=[logprobs] * rows)
    return path


def test_the_explainer_s_sequence_is_19_nats(tmp_path):
    # p = 0.7234 against 0.7268 looks like nothing: 0.0047 nats a token, and over 4,096 tokens a ratio of exp(19.2).
    each = math.log(0.7268 / 0.7234)
    trace = one_sequence(tmp_path / "run", [math.log(0.7234)] * 4096, [math.log(0.7268)] * 4096)
    found = objective(trace, loss="reinforce")
    assert found.value("mean_sum_d") == pytest.approx(4096 * each, rel=1e-5)
    assert found.value("mean_sum_d") == pytest.approx(19.2, abs=0.05)
    assert found.value("mean_d") == pytest.approx(0.0047, abs=1e-4)
    # The token's ratio is 1.0047, so REINFORCE sees 0.47 % less than there is; the sequence is off by exp(19.2) - 1.
    assert found.value("relative_bias") == pytest.approx(math.exp(-each) - 1, rel=1e-3)
    assert found.value("sequence_proxy") == pytest.approx(math.expm1(4096 * each), rel=1e-2)
    rloo = objective(trace, loss="rloo,clip_low=0.2,clip_high=0.2")
    assert rloo.value("flipped") == 1
    # f(1) = 1 against a ratio that the clip holds at 1.2.
    assert rloo.value("bias") == pytest.approx(-0.2)


def test_a_ratio_that_the_mismatch_alone_clips_by_hand(tmp_path):
    # current / train = 1.1 stays within 1.2, current / rollout = 1.1 * 1.25 does not: b = 1.1 - 1.2.
    trace = one_sequence(
        tmp_path / "run", [math.log(0.4)], [math.log(0.5)], [math.log(0.55)], advantage=2.0, loss=Loss()
    )
    found = objective(trace)
    assert found.value("bias") == pytest.approx(2 * (1.1 - 1.2), abs=1e-6)
    assert (found.value("to_free_positive"), found.value("clipped"), found.value("clipped_true")) == (1, 0, 1)
    # A < 0: nothing is clipped above, so that b = -2 (1.1 - 1.375).
    trace = one_sequence(
        tmp_path / "other", [math.log(0.4)], [math.log(0.5)], [math.log(0.55)], advantage=-2.0, loss=Loss()
    )
    found = objective(trace)
    assert found.value("bias") == pytest.approx(-2 * (1.1 - 1.375), abs=1e-6)
    assert found.value("flipped") == 0


def test_a_correction_is_part_of_what_the_loss_used(tmp_path):
    # w = min(1.25, 1.1), used ratio 1, true ratio 1.25: b = 1.1 - 1.25, and 1 - 1.25 without the correction.
    loss = Loss(kind="reinforce", correction="token_truncate", correction_high=1.1)
    found = objective(one_sequence(tmp_path / "run", [math.log(0.4)], [math.log(0.5)], loss=loss))
    assert found.value("bias") == pytest.approx(1.1 - 1.25, abs=1e-6)
    assert found.value("uncorrected_bias") == pytest.approx(1 - 1.25, abs=1e-6)
    assert any("without the correction weights, the bias would be -20% instead of -12%" in s for s in found.verdict)
    assert "uncorrected_bias" not in objective(tmp_path / "run", loss="correction=none").figures


HARD = [Loss(clip_low=0.1, clip_high=0.3, clip_hard=hard) for hard in (0.5, 1.05, 1.3, 1.6)]


@pytest.mark.parametrize("loss", [*LOSSES.values(), *HARD])
def test_terms_and_the_clip_rule_are_the_same_in_sql(opened, loss):
    database = opened[False][1]
    ratio, advantage = (grid.ravel() for grid in np.meshgrid(np.arange(1, 400) / 150, [-1.5, 0.0, 0.5]))
    clip = {"kind": loss.kind} | {name: getattr(loss, name) for name in ("clip_low", "clip_high", "clip_hard")}
    texts = [
        ", ".join(f"{name} := {'NULL' if value is None else repr(value)}" for name, value in options.items())
        for options in (clip | {name: getattr(loss, name) for name in SMOOTH}, clip)
    ]
    rows = ", ".join(f"({r!r}::DOUBLE, {a!r}::DOUBLE)" for r, a in zip(ratio.tolist(), advantage.tolist(), strict=True))
    found = database.ask(
        f"SELECT loss_term(r, a, {texts[0]}) AS term, loss_clips(r, a, {texts[1]}) AS clips FROM (VALUES {rows}) AS t(r, a)"
    ).rows
    terms = contribution(loss, ratio, advantage)
    assert [term for term, _ in found] == pytest.approx(terms, rel=1e-12, abs=1e-300)
    clipped = is_clipped(loss, ratio, advantage)
    assert [clips for _, clips in found] == clipped.tolist()
    if loss.kind == "ppo_clip":
        # The rule is that the term stands still; away from the bounds themselves, where it turns.
        moved = [contribution(loss, ratio * factor, advantage) for factor in (1 - 1e-6, 1 + 1e-6)]
        bounds = [1 - loss.clip_low, 1 + loss.clip_high, loss.clip_hard or 1.0]
        inside = np.min(np.abs(ratio[:, None] - bounds), axis=1) > 1e-5
        still = (moved[0] == moved[1]) & (advantage != 0)
        assert np.array_equal(clipped[inside], still[inside])


def test_sapo_and_vespo_by_hand(tmp_path):
    # rho* = 0.55 / 0.4 = 1.375, used 1.1; tau = 1: 4 sigmoid(0.375) = 2.3706664, 4 sigmoid(0.1) = 2.0999167
    logprobs = [math.log(0.4)], [math.log(0.5)], [math.log(0.55)]
    found = objective(one_sequence(tmp_path / "sapo", *logprobs, loss=Loss(kind="sapo")))
    assert found.value("used") == pytest.approx(2.0999167, abs=1e-6)
    assert found.value("bias") == pytest.approx(2.0999167 - 2.3706664, abs=1e-6)
    # A < 0: k = 3, lambda = 2: phi(1.1) = 1.331 exp(-0.2) = 1.0897306, phi(1.375) = 1.375^3 exp(-0.75) = 1.2279685.
    vespo = Loss(kind="vespo", level="sequence_sum")
    found = objective(one_sequence(tmp_path / "vespo", *logprobs, advantage=-2.0, loss=vespo))
    assert found.value("used") == pytest.approx(-2 * 1.0897306, abs=1e-6)
    assert found.value("bias") == pytest.approx(-2 * (1.0897306 - 1.2279685), abs=1e-6)
    assert "clipped" not in found.figures
    assert "vespo has no clip: its weight decays smoothly, so no term counts as clipped" in found.notes
    assert "k 2, lambda 3 where A >= 0, else k 3, lambda 2" in objective_text(found)


@pytest.mark.slow
def test_what_the_loss_divides_by_counts_rows_that_cannot_be_compared(tmp_path):
    """Five rows went through the loss: one masked, one without a token, one without the engine's logprobs. A sixth did not."""
    with Recorder(tmp_path / "run") as recorder:
        recorder.add_loss(Loss(kind="reinforce", aggregation="sequence_mean"))
        ids = [[1, 1], [1, 1], [1], [], [1, 1], [1]]
        mask = [[1, 1], [1, 0], [0], [], [1, 1], [1]]
        batch = recorder.add_sequences(step=1, response_ids=ids, response_mask=mask, advantage=[1.0] * 6)
        values = [[-1.0] * len(row) for row in ids]
        recorder.add_scores("rollout", batch, rows=[0, 1, 2, 3, 5], logprobs=[values[row] for row in (0, 1, 2, 3, 5)])
        recorder.add_scores("train", batch, rows=range(5), logprobs=[[-1.5] * len(row) for row in ids[:5]])
    found = objective(tmp_path / "run")
    bias = 1 - math.exp(-0.5)
    assert found.value("bias") == pytest.approx(2 * bias / 5)
    assert (found.num_rows, found.num_sequences, found.num_tokens) == (5, 2, 3)
    # Of a mean over tokens the five that the mask counts.
    assert objective(tmp_path / "run", loss="aggregation=token_mean").value("bias") == pytest.approx(3 * bias / 5)


def test_micro_batches_that_were_not_recorded_are_said(tmp_path):
    trace = write(tmp_path / "run", [make(19)], Loss(aggregation="micro_token_mean"))
    found = objective(trace)
    assert any("micro-batches were not recorded" in note for note in found.notes)
    assert found.value("bias") == objective(trace, loss="aggregation=token_mean").value("bias")


def test_blocks_and_ranges_of_steps_change_no_digit(tmp_path, monkeypatch):
    trace = open_database(
        write(
            tmp_path / "run", [make(seed) for seed in range(5)], Loss(correction="sequence_mask", correction_high=1.5)
        )
    )
    whole = objective(trace)
    monkeypatch.setattr(ragged, "_BLOCK_TOKENS", 7)
    monkeypatch.setattr(connection, "BATCH_ROWS", 3)
    monkeypatch.setattr(tokens, "CHUNK_TOKENS", 100)
    cut = objective(trace)
    assert cut.steps == whole.steps
    assert {name: each.value for name, each in cut.figures.items()} == {
        n: each.value for n, each in whole.figures.items()
    }


def test_groups_that_agree_and_few_groups_leave_no_interval(tmp_path):
    rows = 40
    same = one_sequence(tmp_path / "same", [-1.0, -0.5], [-1.1, -0.5], rows=rows)
    found = objective(same, loss="reinforce").figures["bias"]
    assert (found.low, found.high, found.no_interval) == (None, None, "every group gives the same value")
    single = objective(one_sequence(tmp_path / "one", [-1.0], [-1.1]))
    assert (single.figures["bias"].low, single.figures["bias"].no_interval) == (None, "fewer than 8 groups")
    assert "Cannot tell whether the mismatch biases the objective: fewer than 8 groups" in single.verdict[0]


def noisy(path, shift, seed=0, rows=200):
    """Advantages of both signs, and a mismatch that goes with them by `shift`."""
    draw = np.random.default_rng(seed)
    with Recorder(path) as recorder:
        advantage = np.repeat([1.0, -1.0], rows // 2)
        batch = recorder.add_sequences(
            step=1,
            response_ids=[[1] * 20] * rows,
            advantage=advantage,
            group_ids=[str(row % 50) for row in range(rows)],
        )
        rollout = -1 - draw.exponential(0.3, (rows, 20))
        d = draw.normal(0, 0.02, (rows, 20)) + shift * advantage[:, None]
        recorder.add_scores("rollout", batch, logprobs=rollout.astype(np.float32))
        recorder.add_scores("train", batch, logprobs=(rollout + d).astype(np.float32))
    return path


def test_variances_keep_their_digits_where_the_mismatch_is_large_and_even(tmp_path):
    # d is -19 give or take a few units in float32's last place; step 2 has another level than the run.
    draw = np.random.default_rng(4)
    levels, steps = (-19.0, -3.0), []
    with Recorder(tmp_path / "run") as recorder:
        for step, level in enumerate(levels, 1):
            advantage = draw.normal(size=10)
            batch = recorder.add_sequences(step=step, response_ids=[[1] * 9] * 10, advantage=advantage)
            rollout = np.full((10, 9), -1.0, np.float32)
            train = (rollout + level + draw.integers(-3, 4, (10, 9)) * 4e-6).astype(np.float32)
            recorder.add_scores("rollout", batch, logprobs=rollout)
            recorder.add_scores("train", batch, logprobs=train)
            steps.append(train.astype(float) - rollout)
    found = objective(tmp_path / "run", loss="reinforce")
    assert found.value("var_d") == pytest.approx(np.var(np.concatenate(steps)), rel=1e-12)
    for row, of_step in zip(found.steps.dicts(), steps, strict=True):
        assert row["var_d"] == row["var_total"] == pytest.approx(np.var(of_step), rel=1e-10)


def test_the_verdict_tells_noise_from_a_push(tmp_path):
    noise = objective(noisy(tmp_path / "noise", 0.0), loss="reinforce")
    assert noise.verdict[0].startswith("The mismatch does not detectably bias the objective, but it adds noise.")
    push = objective(noisy(tmp_path / "push", 0.01), loss="reinforce")
    assert push.verdict[0].startswith("The mismatch biases the objective slightly downward")
    assert push.figures["relative_bias"].high < 0
    # A > 0 has rho* = exp(0.01): seen 1 % too small. A < 0 has exp(-0.01): punished 1 % too much.
    assert push.value("relative_positive") == pytest.approx(-0.01, abs=0.002)
    assert push.value("relative_negative") == pytest.approx(-0.01, abs=0.002)
    assert "credited too little" in push.verdict[1]
    assert "punished too much" in push.verdict[1]


def test_a_loss_that_is_not_recorded_is_assumed_and_said(opened):
    database = opened[False][1]
    found = objective(database)
    assert found.loss == Loss()
    assert found.loss_from == "assumed, because the trace records no known loss: set it with loss='KIND,FIELD=VALUE'"
    asked = objective(database, loss="gspo,clip_high=0.01")
    assert (asked.loss.level, asked.loss.clip_low, asked.loss.clip_high) == ("sequence_mean", 3e-4, 0.01)
    assert asked.loss_from == "as requested, with clip_high 0.01 as requested"


def test_options_change_what_is_recorded_and_no_more(tmp_path):
    recorded = Loss(
        clip_low=0.1, clip_high=0.3, aggregation="sequence_mean", correction="token_mask", correction_high=2.0
    )
    trace = open_database(write(tmp_path / "run", [make(9)], recorded))
    assert objective(trace).loss == recorded
    assert objective(trace, loss="ppo_clip").loss == recorded
    assert objective(trace, loss="clip_high=0.5").loss.clip_low == 0.1
    # Another loss keeps no bounds of this one, but its correction.
    other = objective(trace, loss="reinforce").loss
    assert other == Loss(kind="reinforce", correction="token_mask", correction_high=2.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "ipo"}, "loss: got 'ipo'; use one of ppo_clip, reinforce, gspo, rloo, cispo, sapo, vespo"),
        ({"loss": "vespo_k_pos=-1.0"}, "vespo_k_pos: got -1.0"),
        ({"loss": "sapo_temperature_neg=0.0"}, "sapo_temperature_neg must be above 0, got 0.0"),
        ({"loss": "denominator=old"}, "denominator 'old' is unknown; use train, rollout, current"),
        ({"loss": "correction=tis"}, "correction 'tis' is unknown; use none, token_truncate"),
        ({"loss": "clip_low=-0.1"}, "clip_low: got -0.1"),
        ({"confidence": 95}, "confidence: got 95"),
    ],
)
def test_options_that_cannot_be_are_refused(opened, options, message):
    with pytest.raises(InvalidOption, match=message):
        objective(opened[False][1], **options)


def test_a_recorded_loss_that_cannot_be_read_is_said(tmp_path):
    with Recorder(tmp_path / "strange") as recorder:
        recorder.add_hyperparameters({"loss/kind": "ipo"})
        recorder.add_scores(
            "train", recorder.add_sequences(step=1, response_ids=[[1]], advantage=[1.0]), logprobs=[[-1.0]]
        )
    found = objective(tmp_path / "strange")
    assert "cannot be read (loss: kind 'ipo' is unknown" in found.loss_from
    assert found.loss == Loss()


def test_without_advantages_ratios_are_still_answered(tmp_path):
    found = objective(write(tmp_path / "run", [make(11)], LOSSES["ppo"], advantages=False))
    assert any("all questions about advantages" in sentence for sentence in found.cannot)
    assert found.value("bias") is None
    assert found.value("mean_abs_d") > 0
    assert found.value("var_total") > 0
    assert "cannot be computed" in found.verdict[0]
    assert "On average, the mismatch changes" in found.verdict[1]


def test_without_current_the_first_update_is_answered(tmp_path):
    batch = make(12, holes=False)
    found = objective(write(tmp_path / "run", [batch], Loss(kind="reinforce"), passes=("rollout", "train")))
    assert any("first update on a batch" in note for note in found.notes)
    assert any("later updates on a batch" in sentence for sentence in found.cannot)
    assert "var_drift" not in found.figures
    a = np.concatenate([np.full(m.sum(), v) for m, v in zip(batch["mask"], batch["advantage"], strict=True)])
    d = np.concatenate(
        [(t.astype(float) - r)[m] for t, r, m in zip(batch["train"], batch["rollout"], batch["mask"], strict=True)]
    )
    assert found.value("bias") == pytest.approx((a * (1 - np.exp(d))).mean(), rel=1e-9)


def test_without_train_the_loss_divides_by_itself(tmp_path):
    found = objective(write(tmp_path / "run", [make(13, holes=False)], Loss(), passes=("rollout", "current")))
    assert found.loss.denominator == "current"
    assert found.passes == ("current", "rollout", "current")
    assert found.num_updates == 2
    assert any("'current' replaces it" in note for note in found.notes)
    assert any("mismatch and policy drift" in sentence for sentence in found.cannot)
    assert found.value("bias") is not None


def test_without_rollout_there_is_no_mismatch_to_judge(tmp_path):
    found = objective(write(tmp_path / "run", [make(14, holes=False)], Loss(), passes=("train", "current")))
    assert any("no 'rollout' logprobs" in sentence for sentence in found.cannot)
    assert set(found.figures) == {"clipped", "mean_drift", "var_drift"}
    assert objective_text(found)


@pytest.mark.parametrize("passes", [("rollout",), ()])
def test_one_side_alone_or_none_is_said(tmp_path, passes):
    found = objective(write(tmp_path / "run", [make(15)], Loss(), passes=passes))
    assert found.verdict == ("The mismatch's effect on the objective cannot be computed.",)
    assert found.cannot[0].startswith("all questions")
    assert objective_text(found)


def test_traces_with_nothing_to_count_have_an_answer(tmp_path):
    with Recorder(tmp_path / "empty") as recorder:
        recorder.add_metrics(1, {"loss": 0.5})
    assert objective(tmp_path / "empty").num_tokens == 0
    nan = objective(one_sequence(tmp_path / "nan", [math.nan, -math.inf], [-1.0, -1.0]))
    assert (nan.num_tokens, nan.num_nan, nan.num_inf) == (0, 1, 1)
    assert nan.verdict[0].startswith("No result")
    zero = objective(one_sequence(tmp_path / "zero", [-1.0, -2.0], [-1.1, -2.0], advantage=0.0))
    assert "all advantages are 0" in zero.verdict[0]
    for name in ("nan", "zero"):
        assert objective_text(objective(tmp_path / name))


def test_ratios_beyond_what_a_float_holds_stay_numbers(tmp_path):
    trace = one_sequence(tmp_path / "run", [-2000.0, -1.0], [-1.0, -1.0], advantage=-1.0)
    found = objective(trace)
    assert found.value("bias") == pytest.approx((-1 + math.exp(20)) / 2)
    assert math.isfinite(found.value("sequence_proxy"))


def test_sequences_that_a_pass_lacks_are_counted(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        batch = recorder.add_sequences(step=1, response_ids=[[1], [1]], advantage=[1.0, -1.0])
        recorder.add_scores("rollout", batch, logprobs=[[-1.0], [-1.0]])
        recorder.add_scores("train", batch, logprobs=[[-1.1], [-1.1]])
        other = recorder.add_sequences(step=1, response_ids=[[1]], advantage=[1.0])
        recorder.add_scores("rollout", other, logprobs=[[-1.0]])
    found = objective(tmp_path / "run")
    assert found.num_sequences == 2
    assert any("1 of 3 sequences lack logprobs in some pass" in note for note in found.notes)


@pytest.mark.slow
def test_the_command_says_it_in_words_and_as_json(tmp_path):
    trace = write(tmp_path / "run", [make(seed) for seed in (16, 17, 18)], LOSSES["ppo"])
    done = tim_trace("objective", trace)
    assert done.code == 0
    assert done.stdout.startswith("The mismatch ")
    assert "Worst steps, by bias:" in done.stdout
    told = tim_trace("objective", trace, "--json", "--by", "step").json()
    assert told["figures"]["bias"]["value"] == objective(trace).value("bias")
    assert [(row["step"], row["iteration"]) for row in told["steps"]] == [
        (step, iteration) for step in (1, 2, 3) for iteration in (0, 1)
    ]
    assert told["loss"]["clip_high"] == 0.3
    soft = tim_trace("objective", trace, "--loss", "sapo,sapo_temperature_pos=2.5", "--json").json()
    assert soft["figures"]["used"]["value"] == objective(trace, loss="sapo,sapo_temperature_pos=2.5").value("used")
    by_step = objective_text(objective(trace, loss="reinforce"), by="step")
    assert "Worst steps" not in by_step
    assert "meaning" not in by_step
