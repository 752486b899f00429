"""Scalars alone: the values of the files come in bit for bit, and each verb answers or says that it needs tokens."""

import importlib.util
import json
import math
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from builders import add_step, in_process, make_batch, make_trace, run, tim_trace
from tim_trace import Recorder, attribute, connect, diagnose, dynamics, import_dump, info
from tim_trace.analysis.facts.read_series import AVERAGES, ESTIMATED, NAMES, read_averages, read_series
from tim_trace.analysis.views import open_database
from tim_trace.schemas.errors import ImportFailed, TraceExists

AWKWARD = [0.1, 1 / 3, 1e-300, -0.0, 5e-324, 1.7976931348623157e308, math.nan, math.inf, -math.inf, 2.0]


def rows(num=10):
    return [{"step": step, "loss": AWKWARD[step % 10], "reward": step / 7} for step in range(1, num + 1)]


def values_of(trace):
    found = (
        connect(trace)
        .execute("SELECT name, step, value FROM metrics WHERE value IS NOT NULL ORDER BY name, step")
        .fetchall()
    )
    return {(name, step): struct.pack("<d", value) for name, step, value in found}


def wanted(given, as_kept=float):
    return {
        (name, row["step"]): struct.pack("<d", as_kept(value))
        for row in given
        for name, value in row.items()
        if name != "step"
    }


def text(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def as_csv(given):
    return "".join([",".join(given[0]) + "\n", *(",".join(map(repr, row.values())) + "\n" for row in given)])


def as_lines(given):
    return "".join(json.dumps(row) + "\n" for row in given)


def trainer_state(path, given):
    """As transformers writes it."""
    from transformers import TrainerState

    state = TrainerState()
    state.log_history, state.global_step = given, given[-1]["step"]
    path.mkdir(parents=True, exist_ok=True)
    state.save_to_json(str(path / "trainer_state.json"))
    return path


def verl_logger():
    """verl's own console logger, without what the rest of verl needs."""
    package = importlib.util.find_spec("verl")
    if package is None:
        pytest.skip("verl is not installed")
    path = Path(package.submodule_search_locations[0]) / "utils" / "logger" / "aggregate_logger.py"
    spec = importlib.util.spec_from_file_location("aggregate_logger", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.LocalLogger()


@pytest.mark.parametrize("format", ["metrics", "auto"])
@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", "json", "trainer_state"])
def test_values_are_those_of_the_file_bit_for_bit(tmp_path, kind, format):
    given = rows()
    path = tmp_path / f"scalars.{kind}"
    if kind == "trainer_state":
        path = trainer_state(tmp_path / "outputs" / "checkpoint-10", given)
        trainer_state(tmp_path / "outputs" / "checkpoint-9", given[:9])
        path = path.parent
    else:
        written = {
            "csv": as_csv(given), "tsv": as_csv(given).replace(",", "\t"), "jsonl": as_lines(given),
            "json": json.dumps(given),
        }  # fmt: skip
        text(path, written[kind])
    imported = import_dump(format, path, output=tmp_path / "run")
    assert imported.num_metrics == 20
    assert values_of(tmp_path / "run") == wanted(given)
    assert any("3 values are NaN or infinite" in note for note in imported.notes)


def test_event_files_keep_every_point_and_its_float32(tmp_path):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    given = [{"step": step, "loss": step / 7, "train/reward": -step / 3} for step in range(1, 3001)]
    given[5]["loss"] = math.nan
    with tensorboard.SummaryWriter(tmp_path / "log") as writer:
        for row in given:
            for name in ("loss", "train/reward"):
                writer.add_scalar(name, row[name], row["step"], new_style=row["step"] % 2 == 0)
        writer.add_histogram("h", np.arange(9.0), 1)
    imported = import_dump("auto", tmp_path / "log", output=tmp_path / "run")
    assert values_of(tmp_path / "run") == wanted(given, np.float32)
    assert imported.ignored_columns == ("h",)
    (path,) = (tmp_path / "log").iterdir()
    content = path.read_bytes()
    cut = import_dump("metrics", text(tmp_path / "events.tfevents.1", content[:-7]), output=tmp_path / "cut")
    assert "ends in the middle of record" in cut.notes[0]
    content = bytearray(content)
    content[len(content) // 2] ^= 1
    with pytest.raises(ImportFailed, match=r"record \S+ is damaged"):
        import_dump("metrics", text(tmp_path / "events.tfevents.2", bytes(content)), output=tmp_path / "bad")


WANDB = """
import sys, wandb
run = wandb.init(project="p", dir=sys.argv[1], mode="offline", config={"lr": 1e-6, "nested": {"betas": [0.9, 0.95]}})
for step in range(1, 41):
    run.log({"loss": step / 7, "train/global_step": step, "h": wandb.Histogram([1, 2]), "outer": {"inner": -step}})
run.finish()
"""


def test_an_offline_run_of_wandb_comes_with_its_settings(tmp_path):
    pytest.importorskip("wandb")
    done = run(sys.executable, "-c", WANDB, tmp_path, env={"WANDB_SILENT": "true"}, cwd=tmp_path)
    assert done.code == 0, done.stderr
    imported = import_dump("auto", tmp_path / "wandb", output=tmp_path / "run")
    found = values_of(tmp_path / "run")
    given = [{"step": step, "loss": step / 7, "outer/inner": -step} for step in range(1, 41)]
    settings = {key: value for key, value in found.items() if key[0].startswith("hyperparameter/")}
    assert {key: value for key, value in found.items() if key not in settings} | settings == found
    assert {key: found[key] for key in wanted(given)} == wanted(given)
    assert settings[("hyperparameter/lr", 0)] == struct.pack("<d", 1e-6)
    query = "SELECT text FROM metrics WHERE name = 'hyperparameter/nested/betas'"
    assert connect(tmp_path / "run").execute(query).fetchall() == [("[0.9, 0.95]",)]
    assert "h" in imported.ignored_columns
    (path,) = (tmp_path / "wandb").glob("offline*/*.wandb")
    content = bytearray(path.read_bytes())
    cut = import_dump(
        "metrics", text(tmp_path / "cut.wandb", bytes(content[: len(content) // 2])), output=tmp_path / "cut"
    )
    assert "ends in the middle" in cut.notes[0]
    content[len(content) // 2] ^= 1
    with pytest.raises(ImportFailed, match="is damaged"):
        import_dump("metrics", text(tmp_path / "bad.wandb", bytes(content)), output=tmp_path / "bad")


def test_console_lines_of_verl(tmp_path, capsys):
    logger, given = verl_logger(), rows()
    for row in given:
        data = {name: value for name, value in row.items() if name != "step"}
        logger.log(data | {"of/numpy": np.float64(row["reward"]), "text": "left out"}, step=row["step"])
    lines = capsys.readouterr().out.splitlines()
    lines[1] = f"\x1b[36m(TaskRunner pid=7)\x1b[0m {lines[1]} [repeated 2x across cluster]"
    imported = import_dump("auto", text(tmp_path / "out.log", "\n".join(["noise", *lines])), output=tmp_path / "run")
    assert values_of(tmp_path / "run") == wanted([row | {"of/numpy": row["reward"]} for row in given])
    assert imported.num_metrics == 30


def test_console_lines_of_slime(tmp_path):
    given = rows()
    lines = [f"[2026-01-01 10:00:00] model.py:915 - step {row['step']}: {dict(row)}" for row in given]
    lines.append(
        "[2026-01-01] train_metric_utils.py:1 - rollout 3: {'rollout/raw_reward': np.float64(0.5), 'x': tensor(2.)}"
    )
    import_dump("metrics", text(tmp_path / "out.log", "\n".join(lines)), output=tmp_path / "run")
    found = values_of(tmp_path / "run")
    assert {key: found[key] for key in wanted(given)} == wanted(given)
    assert found["rollout/raw_reward", 3] == struct.pack("<d", 0.5)


def logprob_pairs(num, seed):
    """(engine's, trainer's) logprobs of `num` batches."""
    draw = np.random.default_rng(seed)
    for _ in range(num):
        engine = -draw.exponential(1.0, 500)
        yield engine, engine + draw.normal(0.001, 0.02, 500)


def test_tinker_s_metrics_are_the_mismatch_they_measure(tmp_path):
    """A line of metrics.jsonl (tinker-cookbook 9dfcc3a, stores/training_store.py: write_metrics; rl/metrics.py:
    compute_kl_sample_train; rl/train.py)."""
    pairs = [*logprob_pairs(40, seed=0)]
    given = []
    for step, (sampling, training) in enumerate(pairs):
        difference = sampling - training
        given.append(
            {
                "step": step, "progress/batch": step, "optim/lr": 4e-5, "progress/done_frac": (step + 1) / 40,
                "env/all/reward/total": 0.5, "optim/kl_sample_train_v1": difference.mean(),
                "optim/kl_sample_train_v2": 0.5 * (difference**2).mean(), "optim/entropy": -sampling.mean(), "time/total": 9.5,
            }
        )  # fmt: skip
    given[30]["optim/kl_sample_train_v1"] = 0.02
    trace = tmp_path / "run"
    assert import_dump("auto", text(tmp_path / "metrics.jsonl", as_lines(given)), output=trace).format == "metrics"
    database = open_database(trace)
    series = read_series(database)
    d = [training - sampling for sampling, training in pairs]
    wanted = np.array([each.mean() for each in d[1:]])
    wanted[29] = -0.02
    assert series["mean_d"].values == pytest.approx(wanted, abs=1e-15)
    assert read_averages(database)["k2"][1] == pytest.approx([(each**2).mean() / 2 for each in d[1:]], rel=1e-12)
    assert series["mean_abs_d"].values == pytest.approx([math.sqrt((each**2).mean()) for each in d[1:]], rel=1e-12)
    assert series["mean_abs_d"].source.startswith(ESTIMATED)
    assert series["entropy"].values == pytest.approx([-sampling.mean() for sampling, _ in pairs[1:]])
    assert set(series["reward"].values) == {0.5}
    told = diagnose(trace)
    assert told.metrics["rms_d"] == pytest.approx(math.sqrt(np.mean([(each**2).mean() for each in d[1:]])), rel=1e-12)
    assert [(each.alarm.who, each.alarm.metric) for each in told.alarms.raised] == [("Tinker", "k1")]


def test_the_last_value_of_a_step_wins_and_it_is_told(tmp_path):
    path = text(tmp_path / "a.csv", "step,a,b\n1,1,1\n2,2,2\n3,3,3\n2,20,\n3,30,30\n")
    done = tim_trace("import", "metrics", path, "-o", tmp_path / "run")
    assert done.code == 0
    assert (
        "3 values were logged again for the same step, e.g. by a resumed run; the last one was kept (first: a at step 2)"
        in done.stderr
    )
    found = {key: struct.unpack("<d", value)[0] for key, value in values_of(tmp_path / "run").items()}
    assert found == {("a", 1): 1, ("a", 2): 20, ("a", 3): 30, ("b", 1): 1, ("b", 2): 2, ("b", 3): 30}


def test_columns_are_mapped_skipped_and_selected(tmp_path):
    path = text(tmp_path / "a.csv", "it,score,noise,note\n1,0.5,3,x\n2,0.25,4,\n")
    mapped = {"it": "step", "score": "reward", "noise": ""}
    imported = import_dump("metrics", path, output=tmp_path / "run", map=mapped, steps="1")
    assert connect(tmp_path / "run").execute("SELECT step, name, value, text FROM metrics ORDER BY name").fetchall() == [
        (1, "note", None, "x"), (1, "reward", 0.5, None),
    ]  # fmt: skip
    assert "1 values are text, and were kept as text (first: note at step 1)" in imported.notes[0]
    with pytest.raises(ImportFailed, match="no row has the column nothing"):
        import_dump("metrics", path, output=tmp_path / "other", map=mapped | {"nothing": "x"})


def test_wandbs_counter_is_used_only_if_it_agrees_with_the_step(tmp_path):
    agree = [{"_step": 5, "a": 1.0}, {"_step": 6, "train/global_step": 6, "a": 2.0}]
    import_dump("metrics", text(tmp_path / "a.jsonl", as_lines(agree)), output=tmp_path / "run")
    assert [step for _, step in values_of(tmp_path / "run")] == [5, 6]
    differ = [*agree, {"_step": 7, "train/global_step": 70, "a": 3.0}]
    with pytest.raises(ImportFailed, match=r"no step except W&B's _step, which differs from"):
        import_dump("metrics", text(tmp_path / "b.jsonl", as_lines(differ)), output=tmp_path / "other")


def test_scalars_are_added_beside_a_trace(tmp_path):
    make_trace(tmp_path / "run", steps=3)
    before = info(str(tmp_path / "run")).num_sequences
    path = text(tmp_path / "a.csv", "step,mine\n1,1\n2,2\n")
    import_dump("metrics", path, output=tmp_path / "run")
    assert values_of(tmp_path / "run")["mine", 2] == struct.pack("<d", 2.0)
    assert info(str(tmp_path / "run")).num_sequences == before
    with pytest.raises(ImportFailed, match="already has values for mine"):
        import_dump("metrics", path, output=tmp_path / "run")
    import_dump("metrics", path, output=tmp_path / "alone")
    with pytest.raises(TraceExists):
        import_dump("metrics", path, output=tmp_path / "alone")
    import_dump("metrics", path, output=tmp_path / "alone", force=True)


HOSTILE = {
    "empty.csv": ("", "contains no scalars"), "empty.json": ("", "not JSON"), "list.json": ("[]", "contains no scalars"),
    "text.json": ('"x"', "is not a list of objects"), "numbers.json": ("[1]", "is not an object"), "deep.json": ("[" * 99999, "not JSON"),
    "junk.csv": (b"\xff\xfe\x00", "cannot be read as CSV"), "junk.jsonl": (b"\xff\n", "not JSON"),
    "junk.log": (b"\xff\x00\n", "no scalars in the format"), "trl.log": ("{'loss': 1.0}\n", "import its trainer_state.json"),
    "junk.tfevents.1": (b"\xff" * 99, "record 1 is damaged"), "junk.wandb": (b"\xff" * 99, "is not a W&B run file"),
    "short.csv": ("step,a\n1,2\n2\n", "line 3 has 1 cells for 2 columns"), "no.csv": ("a,b\n1,2\n", "has no step"),
    "twice.csv": ("step,a,a\n1,2,3\n", "two columns named a"), "half.csv": ("step,a\n1.5,2\n", "a step must be a whole number"),
    "negative.csv": ("step,a\n-1,2\n", "cannot be negative"), "huge.jsonl": ('{"step": 1e300, "a": 1}', "a step must be a whole number"),
    "flag.jsonl": ('{"step": true, "a": 1}', "a step must be a whole number"), "lines.jsonl": ('{"step": 1}\nx\n', "line 2 is not JSON"),
    "quote.csv": ('step,a\n1,"' + "x" * 200_000, "cannot be read as CSV"), "cut.csv.gz": (b"\x1f\x8b\x08\x00", "cannot be read"),
    "wide.csv": ("step," + ",".join(map(str, range(200_000))) + "\n1" + ",1" * 200_000 + "\n", "more than 100,000 columns"),
    "untagged.jsonl": ('{"gen_kl_error": 1.0}\n', "has no step"),
    "runs.csv": ("Step,a - loss,b - loss\n1,2,3\n", "contains 2 runs"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_one_sentence_and_no_trace(tmp_path, name):
    content, sentence = HOSTILE[name]
    done = in_process(["import", "metrics", str(text(tmp_path / name, content)), "-o", str(tmp_path / "run")])
    assert done.code == 2
    assert sentence in done.stderr
    assert done.stderr.startswith("Error: ")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_folder_of_several_runs_is_refused(tmp_path):
    for name in ("a", "b"):
        trainer_state(tmp_path / "outputs" / name, rows())
    with pytest.raises(ImportFailed, match="several runs"):
        import_dump("metrics", tmp_path / "outputs", output=tmp_path / "run")


def curves(path, seed, *, engine=1.0, falls=False, names=("critic/rewards/mean", "rollout_corr/k3_kl")):
    draw = np.random.default_rng(seed)
    given = []
    for step in range(1, 121):
        late = falls and step > 80
        gap = 0.002 * engine * np.exp(0.1 * draw.normal()) * (40 if late else 1)
        reward = (
            0.3
            + 0.3 * min(step, 80) / 80
            + 0.02 * draw.normal()
            - (0.3 * min(1, (step - 82) / 10) if step > 82 and falls else 0)
        )
        given.append(
            {
                "step": step,
                names[0]: float(reward),
                names[1]: float(gap**2 / 2),
                "actor/grad_norm": float(np.exp(draw.normal() / 10)),
            }
        )
    import_dump("metrics", text(path.with_suffix(".jsonl"), as_lines(given)), output=path)
    return path


def test_a_collapse_after_a_jump_of_the_logged_mismatch(tmp_path):
    trace = curves(tmp_path / "run", 0, falls=True)
    moved = {one.name: one.change.step for one in dynamics(trace).onsets}
    assert moved["k3"] == 81
    found = attribute(trace)
    assert found.fall is not None
    assert found.suspects[1].code == "mismatch" or found.suspects[0].code == "mismatch"
    told = diagnose(trace)
    assert told.checked is None
    assert any(each.alarm.metric == "k3" for each in told.alarms.raised)
    assert not any(
        each.alarm.metric == "mean_abs_d" for each in told.alarms.judged
    )  # an estimate has no published level


def test_runs_that_end_alike_end_in_no_effect_and_its_bound(tmp_path):
    trace, exact = curves(tmp_path / "run", 1), curves(tmp_path / "exact", 2, engine=0.0)
    done = tim_trace("attribute", trace, "--control", exact)
    assert done.code == 0
    assert "no effect detected: over the last 24 shared steps, critic/rewards/mean" not in done.stdout
    note = next(note for note in attribute(trace, control=exact).note_codes if note.code == "no_effect")
    assert note.values["low"] <= 0 <= note.values["high"]
    assert note.values["most"] < 0.05
    assert (
        done.stdout.strip()
        .splitlines()[-1]
        .startswith("Note: no effect detected: over the last 24 shared steps, reward differs")
    )


NEEDS_TOKENS = (
    "stats", "check", "corrections", "replay", "triangulate", "gradient", "locate", "reproduce", "query by-token",
    "gate --fail-on check",
)  # fmt: skip


@pytest.mark.parametrize("words", NEEDS_TOKENS)
def test_a_verb_that_needs_tokens_says_so(tmp_path, words):
    trace = curves(tmp_path / "run", 3)
    verb, *more = words.split(" ", 1)
    arguments = [verb, *more, str(trace)] if verb == "query" else [verb, str(trace), *" ".join(more).split()]
    done = in_process(arguments)
    assert done.code == 2
    assert "has logged scalars but no tokens" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "words", ["info", "verify", "dynamics", "attribute", "watch --once", "diagnose", "objective", "sql"]
)
def test_a_verb_over_metrics_answers(tmp_path, words):
    trace = curves(tmp_path / "run", 4)
    more = ["SELECT count(*) FROM metrics"] if words == "sql" else []
    done = in_process([*words.split(), str(trace), *more])
    assert done.code == 0, done.stderr
    assert "Traceback" not in done.stderr
    if words == "info":
        assert "120 (1 to 120)" in done.stdout


NAMED = [("", name) for names in AVERAGES.values() for name in names] + [
    ("train/", names[0]) for names in AVERAGES.values()
]


@pytest.mark.parametrize(("prefix", "name"), NAMED)
def test_every_framework_name_is_known(tmp_path, prefix, name):
    given = [{"step": step, f"{prefix}{name}": 0.1 * step} for step in range(1, 6)]
    import_dump("metrics", text(tmp_path / "a.jsonl", as_lines(given)), output=tmp_path / "run")
    database = open_database(tmp_path / "run")
    series = next(series for series, names in AVERAGES.items() if name in names)
    averages = {key: values.tolist() for key, (_, values) in read_averages(database).items()}
    if series == "reference_k3":
        from tim_trace.analysis.facts.conditions import read_conditions

        averages[series] = read_conditions(database)[series].values.tolist()
    found = averages.get(series) or read_series(database)[series].values.tolist()
    sign = -1 if series == "mean_d" else 1
    assert found == [sign * row[f"{prefix}{name}"] for row in given]


def test_names_are_in_one_series_only():
    every = [name for names in (*AVERAGES.values(), *NAMES.values()) for name in names]
    assert len(every) == len(set(every))


def test_a_trace_with_tokens_computes_its_own_mismatch(tmp_path):
    with Recorder(tmp_path / "run") as recorder:
        for step in (1, 2):
            add_step(recorder, step, make_batch(seed=step))
            recorder.add_metrics(step, {"rollout_corr/k3_kl": 99.0, "response_length/mean": 99.0})
    series = read_series(open_database(tmp_path / "run"))
    assert series["k3"].values.max() < 99
    assert series["length"].values.max() < 99
    assert not series["k3"].source.startswith(ESTIMATED)


def test_scalars_select_no_sequences(tmp_path):
    path = text(tmp_path / "a.csv", as_csv(rows()))
    for option in ({"sample": 0.5}, {"partial": True}):
        with pytest.raises(ImportFailed, match="Remove this option"):
            import_dump("metrics", path, output=tmp_path / "run", **option)
