"""The named queries, against NumPy over the same tokens."""

import numpy as np
import pytest
from builders import make_trace, tim_trace
from rich_trace import close, make_rich_trace, of_step, tokens_of
from tim_trace.analysis.queries.catalogue import catalogue, named_query, query
from tim_trace.analysis.query import sql
from tim_trace.schemas.errors import InvalidOption, NothingToCompare
from tim_trace.tracer.recorder import Recorder

NAMES = [each.name for each in catalogue()]


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return make_rich_trace(tmp_path_factory.mktemp("catalogue") / "run")


@pytest.fixture(scope="module")
def tokens(trace):
    return tokens_of(trace)


def rows(trace, name, **options):
    return query(name, trace, **options).dicts()


@pytest.mark.parametrize("name", NAMES)
def test_every_query_says_what_it_is_and_runs(trace, name):
    chosen = named_query(name)
    assert chosen.unit
    assert chosen.source
    assert chosen.meaning
    assert len(chosen.summary) <= 120
    assert rows(trace, name)
    assert sql(trace, chosen.over("rollout", "train")).rows


def test_bins_hold_every_token_once(trace, tokens):
    for name in ("by-probability", "by-position", "by-turn"):
        assert sum(row["num_tokens"] for row in rows(trace, name)) == len(tokens["d"]), name
    assert sum(row["num_sequences"] for row in rows(trace, "by-length")) == len(np.unique(tokens["sequence"]))


def test_decades_of_probability(trace, tokens):
    decade = np.floor(tokens["logprob_b"].astype(float) / np.log(10))
    for row in rows(trace, "by-probability"):
        inside = decade == row["decade"]
        d = tokens["d"][inside]
        share = tokens["k3"][inside].sum() / tokens["k3"].sum()
        close(
            row,
            {"num_tokens": inside.sum(), "mean_d": d.mean(), "rms_d": np.sqrt((d * d).mean()), "share_of_k3": share},
        )


def test_places_are_taken_by_powers_of_two(trace, tokens):
    for row in rows(trace, "by-position"):
        first = row["first_position"]
        inside = (tokens["position"] >= first) & (tokens["position"] < max(2 * first, 1))
        close(row, {"num_tokens": inside.sum(), "mean_abs_d": np.abs(tokens["d"][inside]).mean()})


def test_turns_are_stretches_of_the_mask(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        mask = [[True, True, False, True, False, False, True]]
        batch = recorder.add_sequences(step=1, prompt_ids=[[1]], response_ids=[[2] * 7], response_mask=mask)
        recorder.add_scores("rollout", batch, logprobs=[[-1.0] * 7])
        recorder.add_scores("train", batch, logprobs=[[-1.0, -1.5, -9.0, -2.0, -9.0, -9.0, -4.0]])
    found = [(row["turn"], row["num_tokens"], row["mean_d"]) for row in rows(tmp_path / "run", "by-turn")]
    assert found == [(1, 2, -0.25), (2, 1, -1.0), (3, 1, -3.0)]


def test_groups_carry_shares_of_the_gap(trace, tokens):
    for name, key in (("by-token", "token_id"), ("by-prompt", "group_id")):
        found = rows(trace, name)
        assert sum(row["share_of_k3"] for row in found) == pytest.approx(1.0)
        assert [row["share_of_k3"] for row in found] == sorted((row["share_of_k3"] for row in found), reverse=True)
        inside = tokens[key] == found[0][key]
        if name == "by-prompt":
            inside &= tokens["step"] == found[0]["step"]
        close(found[0], {"num_tokens": inside.sum(), "max_abs_d": np.abs(tokens["d"][inside]).max()})


def test_concentration_and_the_worst_tokens(trace, tokens):
    (row,) = rows(trace, "concentration")
    largest = np.sort(tokens["k3"])[::-1]
    kept = {"top_thousandth": 0.001, "top_hundredth": 0.01, "top_tenth": 0.1}
    close(
        row, {name: largest[: int(np.ceil(share * len(largest)))].sum() / largest.sum() for name, share in kept.items()}
    )
    assert rows(trace, "worst-tokens")[0]["d"] == pytest.approx(tokens["d"][np.abs(tokens["d"]).argmax()])


def test_correlations(trace, tokens):
    for row in rows(trace, "advantage-correlation"):
        step = of_step(tokens, row["step"])
        d, advantage = step["d"], step["advantage"].astype(float)
        expected = {
            "corr_d_advantage": np.corrcoef(d, advantage)[0, 1],
            "cov_d_advantage": np.cov(d, advantage, bias=True)[0, 1],
            "mean_d_negative": d[advantage < 0].mean(),
        }
        close(row, expected)


def test_a_lag_counts_tokens_of_the_response_also_those_that_the_loss_masks(trace, tokens):
    (row,) = rows(trace, "autocorrelation")
    at = {(int(s), int(p)): d for s, p, d in zip(*(tokens[c] for c in ("sequence", "position", "d")), strict=True)}
    expected = {"num_tokens": len(at)}
    for lag in (1, 2, 8, 32):
        pairs = [(d, at[sequence, place + lag]) for (sequence, place), d in at.items() if (sequence, place + lag) in at]
        expected[f"lag_{lag}"] = np.corrcoef(*np.transpose(pairs))[0, 1]
    close(row, expected)


def test_masked_tool_output_joins_no_neighbours(tmp_path):
    # d is +, -, +, - within each turn of the model; over a tool's output the last and the first token have one sign.
    d = np.array([0.5, -0.5, 0.5, 7.0, 7.0, 0.5, -0.5, 0.5])
    with Recorder(tmp_path / "run") as recorder:
        batch = recorder.add_sequences(
            step=1, prompt_ids=[[1]], response_ids=[[2] * 8], response_mask=[[True] * 3 + [False] * 2 + [True] * 3]
        )
        recorder.add_scores("rollout", batch, logprobs=[np.full(8, -9.0)])
        recorder.add_scores("train", batch, logprobs=[-9.0 + d])
    (row,) = rows(tmp_path / "run", "autocorrelation")
    assert row["num_tokens"] == 6
    assert row["lag_1"] == pytest.approx(-1.0)


def test_what_is_not_finite_is_counted_by_side(trace):
    found = rows(trace, "not-finite")
    masked = sql(trace, "SELECT step, isnan(logprob_a), isinf(logprob_b) FROM pair('train', 'rollout') WHERE mask")
    for row in found:
        step = [values[1:] for values in masked.rows if values[0] == row["step"]]
        assert (row["nan_a"], row["inf_b"]) == (sum(nan for nan, _ in step), sum(inf for _, inf in step))


def test_a_name_that_is_not_there_names_the_nearest(trace):
    with pytest.raises(InvalidOption, match=r"unknown query 'by-prob'; did you mean by-probability\?"):
        query("by-prob", trace)
    with pytest.raises(InvalidOption, match="tim-trace query lists them"):
        query("zzz", trace)


def test_what_a_query_lacks_is_said(tmp_path):
    make_trace(tmp_path / "run", passes=("rollout",))
    with pytest.raises(NothingToCompare, match="has no logprobs from pass 'train'"):
        query("by-position", tmp_path / "run")
    with Recorder(tmp_path / "bare") as recorder:
        batch = recorder.add_sequences(step=1, prompt_ids=[[1]], response_ids=[[2]])
        for name in ("rollout", "train"):
            recorder.add_scores(name, batch, logprobs=[[-1.0]])
    with pytest.raises(NothingToCompare, match="query advantage-correlation needs advantages"):
        query("advantage-correlation", tmp_path / "bare")


def test_the_command_lists_prints_and_runs(trace):
    listed = tim_trace("query")
    assert [line.split()[0] for line in listed.stdout.splitlines()[2:]] == NAMES
    printed = tim_trace("query", "ess", "--sql", "--pair", "rollout:train").stdout
    assert "pair_steps('rollout', 'train')" in printed
    asked = tim_trace("sql", trace, "--json", stdin=printed)
    assert asked.json() == tim_trace("query", "ess", trace, "--pair", "rollout:train", "--json").json()
    assert tim_trace("query", "ess").code == 2


def test_shares_near_and_far_and_the_correlation_of_the_far_ones(trace, tokens):
    for row in rows(trace, "shape"):
        step = of_step(tokens, row["step"])
        size, a, b = np.abs(step["d"]), step["logprob_a"].astype(float), step["logprob_b"].astype(float)
        far = size > 0.3
        close(row, {
            "num_tokens": len(size), "corr": np.corrcoef(a, b)[0, 1], "corr_far": np.corrcoef(a[far], b[far])[0, 1],
            "share_near": (size < 0.02).mean(), "share_far": (size > 1).mean(), "share_zero_a": (a == 0).mean(),
            "mean_b": b.mean(), "max_abs_d": size.max(),
        })  # fmt: skip


@pytest.fixture(scope="module")
def repeated(tmp_path_factory):
    """Two steps of responses to two prompts that share prefixes; pass b at step 2 is noisy, pass a is b at temperature 2."""
    path, draw = tmp_path_factory.mktemp("catalogue") / "repeated", np.random.default_rng(1)
    logits = draw.normal(0, 2, (2, 200, 4))
    with Recorder(path) as recorder:
        for step in (1, 2):
            prompts = [[1], [1], [1], [1], [2], [2]]
            responses = [[0, 1, 2, 3], [0, 1, 3], [0, 1, 2, 3], [2, 1], [0, 1], [0, 2, 2]]
            batch = recorder.add_sequences(
                step=step, prompt_ids=prompts, response_ids=responses, group_ids=[str(prompt[0]) for prompt in prompts]
            )
            for name, temperature in (("train", 1.0), ("rollout", 2.0)):
                noise = 0.1 if step == 2 and name == "rollout" else 0.0
                recorder.add_scores(name, batch, logprobs=[
                    [
                        _logprob(logits[prompt[0] - 1, hash(tuple(response[:place])) % 200] / temperature, token)
                        - noise * draw.random()
                        for place, token in enumerate(response)
                    ]
                    for prompt, response in zip(prompts, responses, strict=True)
                ])  # fmt: skip
    return path


def _logprob(logits, token):
    return float(logits[token] - np.log(np.exp(logits).sum()))


def test_noise_is_what_a_pass_gives_twice_to_one_prefix(repeated):
    quiet, noisy = rows(repeated, "prefix-noise")
    # Sorted: [0,1,2,3] twice share 4 tokens, [0,1,3] shares 2 with it, [2,1] none; of the other prompt, one.
    assert (quiet["num_compared"], noisy["num_compared"]) == (7, 7)
    assert {quiet[name] for name in ("noisy_a", "noisy_b", "max_a", "max_b")} == {0}
    assert (noisy["noisy_a"], noisy["max_a"]) == (0, 0)
    assert noisy["noisy_b"] > 0.8
    assert 0.01 < noisy["rms_b"] < noisy["max_b"] < 0.1


def test_a_temperature_is_the_slope_of_the_log_odds_of_one_context(repeated):
    quiet, noisy = rows(repeated, "context-odds")
    # [0,1,2,3] and [0,1,3], [0,1,3] and [2,1], and the two responses to the other prompt part at one token each.
    assert quiet["num_contexts"] == noisy["num_contexts"] == 3
    assert quiet["corr"] == pytest.approx(1.0, abs=1e-6)
    assert quiet["slope"] == pytest.approx(2.0, rel=1e-5)
    assert noisy["slope"] != pytest.approx(2.0, rel=1e-3)


@pytest.mark.parametrize(
    "rule", ["error_std", "error_std_pop", "error_mean", "error_previous", "error_next", "error_step"]
)
def test_the_rule_of_a_baseline_leaves_no_error(tmp_path, rule):
    draw = np.random.default_rng(2)
    reward = draw.random((6, 4))
    mean, std = reward.mean(axis=1, keepdims=True), reward.std(axis=1, ddof=1, keepdims=True)
    advantage = {
        "error_std": (reward - mean) / (std + 1e-4), "error_std_pop": (reward - mean) / (reward.std(axis=1, keepdims=True) + 1e-4),
        "error_mean": reward - mean, "error_previous": (reward - np.roll(mean, 1, axis=0)) / (std + 1e-4),
        "error_next": (reward - np.roll(mean, -1, axis=0)) / (std + 1e-4),
        "error_step": (reward - reward.mean()) / (reward.std(ddof=1) + 1e-4),
    }[rule]  # fmt: skip
    with Recorder(tmp_path / "run") as recorder:
        batch = recorder.add_sequences(
            step=1, prompt_ids=[[1]] * 24, response_ids=[[2]] * 24, group_ids=[str(n // 4) for n in range(24)],
            reward=reward.ravel(), advantage=advantage.ravel(),
        )  # fmt: skip
        for name in ("train", "rollout"):
            recorder.add_scores(name, batch, logprobs=[[-1.0]] * 24)
    (row,) = rows(tmp_path / "run", "group-baseline")
    errors = {name: value for name, value in row.items() if name.startswith("error_")}
    assert min(errors, key=errors.get) == rule
    assert errors[rule] < 1e-6  # the first group has no previous one and the last no next one
    assert (row["num_sequences"], row["rows_per_group"]) == (24, 4)


def test_the_course_has_the_run_s_quantities_by_step(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        for step in (1, 2):
            batch = recorder.add_sequences(
                step=step, prompt_ids=[[1]] * 4, response_ids=[[2], [2], [3, 4], [2]] if step == 1 else [[5]] * 4,
                reward=[1.0, 0.0, 0.0, 0.5], advantage=[1.0, -3.0, 0.0, 0.5], policy_version=[step - 1, step - 1, 0, 0],
            )  # fmt: skip
            lengths = [1, 1, 2, 1] if step == 1 else [1] * 4
            recorder.add_scores("rollout", batch, logprobs=[[-1.0] * n for n in lengths])
            recorder.add_scores("train", batch, logprobs=[[-1.5] * n for n in lengths], policy_version=step - 1)
            recorder.add_metrics(step, {"actor/grad_norm": 2.0 * step, "hyperparameter/lr": 9.0, "actor/lr": 0.5})
    first, second = rows(tmp_path / "run", "course")
    close(first, {"num_sequences": 4, "mean_reward": 0.375, "share_top_reward": 0.25, "share_top_response": 0.75,
                  "mean_length": 1.25, "max_abs_advantage": 3.0, "lag": 0.0, "grad_norm": 2.0, "learning_rate": 0.5,
                  "mean_a": -1.5, "mean_abs_d": 0.5})  # fmt: skip
    assert (second["share_top_response"], second["lag"], second["loss"]) == (1.0, 0.5, None)
