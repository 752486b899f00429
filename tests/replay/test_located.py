"""Results of `locate` in the trace: what is read back is what was found, and damage is named."""

import shutil

import pytest
from builders import tim_trace
from click.testing import CliRunner
from forged import change_document
from located import make_run
from tim_trace import cli
from tim_trace.analysis.compact import compact
from tim_trace.analysis.diagnosis.diagnose import diagnose
from tim_trace.analysis.diagnosis.text import diagnosis_text
from tim_trace.analysis.info import info
from tim_trace.analysis.locate import locate, question_id
from tim_trace.analysis.location import location, location_rows, read_located
from tim_trace.analysis.query import sql
from tim_trace.analysis.rows import result_json
from tim_trace.analysis.verify import verify
from tim_trace.analysis.views import open_database
from tim_trace.replay.engine import replay
from tim_trace.schemas.errors import DamageWarning
from tim_trace.tracer.located import LocateQuestion, read_results
from tim_trace.tracer.store import Store


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run, and the one result that it keeps."""
    run = make_run(tmp_path_factory.mktemp("located") / "run")
    return run, locate(run, steps="1", arm="dtype=bf16", against="dtype=fp32", sequences="4")


@pytest.fixture
def run(made, tmp_path):
    return shutil.copytree(made[0], tmp_path / "run")


def names(run):
    return sorted(path.name for path in (run / "locate").iterdir())


def test_what_is_read_back_is_what_was_found(made):
    run, found = made
    ((kept,), damaged) = read_results(Store(run))
    assert damaged == []
    assert location(kept.found, kept=kept.relative) == found
    assert (kept.found.device, kept.found.policy_version) == ("cpu", 0)
    assert "torch" in kept.versions


def test_the_views_have_the_rows_that_the_verb_prints(made):
    run, found = made
    rows = sql(run, "FROM operators ORDER BY side, forward_order").dicts()
    printed = sorted(location_rows(found, "operator").dicts(), key=lambda row: (row["side"], row["order"]))
    for row, wanted in zip(rows, printed, strict=True):
        assert (row["run"], row["step"], row["a"], row["b"]) == ("run", 1, found.a, found.b)
        assert row | {"order": row["forward_order"]} == row | wanted
    assert sum(row["carried"] or 0.0 for row in rows) == pytest.approx(found.explained)
    columns = ", ".join(location_rows(found, "patch").columns)
    assert sql(run, f"SELECT {columns} FROM patches").rows == location_rows(found, "patch").rows


def test_several_results_and_runs_are_told_apart(run, made):
    locate(run, steps="2", arm="dtype=bf16", against="dtype=fp32", sequences="4", patch="none")
    several = open_database([run, made[0]])
    query = "SELECT run, step, count(DISTINCT result) AS n FROM operators GROUP BY ALL ORDER BY ALL"
    assert several.ask(query).rows == [("run", 1, 1), ("run", 2, 1), ("run-2", 1, 1)]
    assert open_database(run, "2").ask("SELECT DISTINCT step FROM operators").rows == [(2,)]


def test_a_trace_where_nothing_was_located_has_empty_views(made, run):
    shutil.rmtree(run / "locate")
    for view in ("operators", "patches"):
        assert sql(run, f"FROM {view}").columns == sql(made[0], f"FROM {view}").columns
        assert sql(run, f"FROM {view}").rows == []


def test_the_same_question_replaces_its_own_result_alone(run):
    before = names(run)
    locate(run, steps="1", arm="dtype=bf16", against="dtype=fp32", sequences="2", patch="none")
    assert len(names(run)) == 2 * len(before)
    again = locate(run, steps="1", arm=" dtype=bf16", against="dtype=fp32", sequences="4")
    assert len(names(run)) == 2 * len(before)
    assert [each.location for each in read_located(open_database(run))][-1] == again
    assert verify(run).is_whole
    assert verify(run).ignored == ()


def test_a_question_is_known_by_what_an_arm_changes():
    asked = {
        "step": 1, "against": "dtype=fp64", "sequences": "8", "layers": None, "patch": "kinds", "model_factory": None,
        "against_factory": None, "weights_from": None,
    }  # fmt: skip

    def id_of(arm, **more):
        return question_id(LocateQuestion(arm=arm, **asked, **more))

    assert id_of("dtype=bf16,batch-size=1") == id_of("batch-size=1, dtype=bf16")
    assert id_of(None) == id_of("name=x") == "2768cc6005dcfa72"  # as of a release without `operators`
    assert id_of(None, operators="q_proj") != id_of(None)
    assert id_of("dtype=fp16") != id_of("dtype=bf16")


def test_nothing_is_kept_without_keep(run):
    shutil.rmtree(run / "locate")
    found = locate(run, steps="1", arm="dtype=bf16", sequences="2", patch="none", keep=False)
    assert (found.kept, found.not_kept) == (None, None)
    assert not (run / "locate").exists()


def test_a_trace_that_cannot_be_written_to_is_located_and_says_why_nothing_is_kept(run):
    shutil.rmtree(run / "locate")
    (run / "locate").write_text("a file lies where the folder would")
    asked = ["locate", str(run), "--steps", "1", "--arm", "dtype=bf16", "--sequences", "2", "--patch", "none"]
    done = CliRunner().invoke(cli.main, asked)
    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith("Only rounding")
    assert "not stored in the trace: " in done.stderr


@pytest.mark.slow
def test_the_command_says_where_the_result_lies(run):
    asked = ("locate", run, "--steps", "2", "--arm", "dtype=bf16", "--sequences", "2", "--patch", "none")
    done = tim_trace(*asked, "--json")
    assert done.code == 0, done.stderr
    assert (run / done.json()["kept"]).exists()
    assert f'tim-trace sql {run} "FROM operators"' in done.stderr
    assert tim_trace("sql", run, "SELECT count(*) AS n FROM operators WHERE step = 2", "--json").json()[0]["n"]


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone", "other"])
def test_a_damaged_result_is_named_by_verify_and_in_no_answer(run, damage):
    (path,) = (run / "locate").iterdir()
    content = bytearray(path.read_bytes())
    if damage == "flipped":
        content[len(content) // 3] ^= 0x20
    changed = {"cut": bytes(content[:-9]), "other": b"no file of ours"}.get(damage, bytes(content))
    path.write_bytes(changed)
    if damage == "gone":
        path.unlink()
    found = verify(run)
    if damage == "gone":  # who knows of no result misses none
        assert found.is_whole
        assert sql(run, "FROM operators").rows == []
        return
    assert any(f"/locate/{path.name}" in sentence for sentence in found.damaged), found.damaged
    with pytest.warns(DamageWarning, match=path.name):
        assert sql(run, "FROM operators").rows == []


def test_a_file_that_is_no_result_is_ignored(run):
    (run / "locate" / "notes.txt").write_text("not a result")
    found = verify(run)
    assert found.is_whole
    assert [sentence for sentence in found.ignored if "locate/notes.txt: not a result" in sentence]


def test_a_result_of_another_run_or_of_a_later_release_is_in_no_answer(run):
    (path,) = (run / "locate").glob("*.json")
    for change, said in (
        ({"format": 2}, "newer release"),
        ({"format": 1, "run_id": "of another"}, "to run of another"),
    ):
        change_document(path, lambda values, change=change: values | change)
        with pytest.warns(DamageWarning, match=said):
            assert sql(run, "FROM patches").rows == []
        assert not verify(run).is_whole


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda found: found["patches"][0].update(squares_left=[0.0]), "values that locate never writes"),
        (lambda found: found["operators"][0].update(side="c"), "values that locate never writes"),
        (
            lambda found: found["products"][0].__setitem__(2, {"no such sequence": 0.0}),
            "values that locate never writes",
        ),
        (lambda found: found["operators"][0].update(ratio="large"), "not a locate result"),
        (lambda found: found.update(products=[["a"]]), "not a locate result"),
        (lambda found: found.pop("products"), "not a locate result"),
    ],
    ids=["a patch of other sequences", "another side", "a product of no sequence", "a text", "a short row", "nothing"],
)
def test_values_that_locate_never_writes_are_damage(run, change, said):
    (path,) = (run / "locate").iterdir()
    change_document(path, lambda values: change(values["found"]) and None)
    with pytest.warns(DamageWarning, match=said):
        assert sql(run, "FROM patches").rows == []


def test_info_counts_results_and_their_bytes(made):
    found = info(str(made[0]))
    assert found.num_located == 1
    assert found.num_bytes["locate"] == sum(path.stat().st_size for path in (made[0] / "locate").iterdir())
    assert "located    1 result of locate" in str(found)


def test_compaction_keeps_results(run, tmp_path):
    before = read_located(open_database(run))
    compact(run)
    assert read_located(open_database(run)) == before
    compact(run, output=tmp_path / "other" / "run")
    assert read_located(open_database(tmp_path / "other" / "run")) == before
    assert verify(tmp_path / "other" / "run").is_whole


@pytest.mark.slow
def test_results_are_read_from_object_storage(s3, run):
    s3.put(str(run), "bucket/located/run", recursive=True)
    assert sql("s3://bucket/located/run", "FROM operators").rows == sql(run, "FROM operators").rows


def test_diagnose_asks_where_once_a_replay_says_what_and_then_tells_it(run):
    shutil.rmtree(run / "locate")
    assert "locate" not in str(diagnose(run).next)
    replay(run, arm=["dtype=bf16"])
    asked = diagnose(run)
    assert asked.next[0] == f"tim-trace locate {run} --steps 2 --against dtype=bf16"
    locate(run, steps="2", against="dtype=bf16", sequences="4", patch="none")
    told = diagnose(run)
    assert told.next == asked.next[1:]
    assert told.located.step == 2
    text = diagnosis_text(told, 80)
    assert "where   Only rounding: no operator of a or b exceeds its rounding bound." in text
    assert "(a: as-recorded, b: bf16, step 2)" in " ".join(text.split())
    assert len(text.splitlines()) < 24
    assert result_json(told)["located"]["sentence"].startswith("Only rounding")
