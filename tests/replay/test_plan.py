"""What a replay says before it starts, and while it runs."""

import json
import re
import sys

import pytest
from builders import change_contract, run, tim_trace
from grouped import record_groups
from tim_trace.analysis.replay_text import estimate_sentence
from tim_trace.analysis.views import connect
from tim_trace.replay.backends import trusted
from tim_trace.replay.engine import replay
from tim_trace.replay.results import ArmPlan, ReplayPlan

pytestmark = pytest.mark.engine


@pytest.fixture
def trace(tmp_path):
    return record_groups(tmp_path / "run", version=lambda step: step // 2)


def total(trace, where="true"):
    query = f"SELECT sum(num_prompt_tokens + num_response_tokens)::BIGINT FROM sequences WHERE {where}"
    return connect(trace).execute(query).fetchone()[0]


def replayed(trace):
    return connect(trace).execute("SELECT count(*) FROM scores WHERE pass LIKE 'replay/%'").fetchone()[0]


@pytest.mark.slow
def test_a_dry_run_counts_what_is_to_be_done_and_writes_nothing(trace):
    results = replay(trace, dtype="bf16", dry_run=True)
    identity, bf16 = results.plan
    assert list(results) == []
    assert (bf16.arm, bf16.num_steps, bf16.num_sequences, bf16.num_versions) == ("bf16", 3, 72, 2)
    assert identity.num_tokens == bf16.num_tokens == total(trace)
    assert bf16.seconds > bf16.num_tokens / bf16.tokens_per_s > 0
    assert replayed(trace) == 0
    assert connect(trace).execute("SELECT count(*) FROM passes WHERE pass LIKE 'replay/%'").fetchall() == [(0,)]


def test_a_dry_run_with_force_leaves_what_is_there(trace):
    replay(trace, steps="0", dtype="bf16")
    before = replayed(trace)
    replay(trace, dtype="bf16", force=True, dry_run=True)
    assert replayed(trace) == before == 48


def test_a_dry_run_imports_no_trainer_and_no_engine(trace):
    """TRL's import, and that of vLLM which it brings, takes longer than all else that a dry run does."""
    scored = {
        "engine": "trl",
        "scoring_function": trusted.SCORING_FUNCTIONS[0],
        "fused_lm_head": trusted.FUSED_HEADS[0],
    }
    change_contract(trace, "train", lambda contract: contract | scored)
    program = (
        "import sys; from tim_trace.replay.engine import replay; (arm,) = replay(sys.argv[1], dry_run=True).plan; "
        "print(arm.tokens_per_s > 0, sorted({'trl', 'vllm'} & set(sys.modules)))"
    )
    done = run(sys.executable, "-c", program, trace)
    assert done.stdout == "True []\n", done.stderr


def test_an_arm_that_has_everything_takes_no_time(trace):
    replay(trace, dtype="bf16")
    identity, bf16, alone = replay(trace, arm=["dtype=bf16", "batch-size=1"], dry_run=True).plan
    assert identity.seconds == bf16.seconds == 0.0
    assert (bf16.num_steps, bf16.num_tokens, bf16.tokens_per_s) == (0, 0, None)
    assert alone.num_tokens == total(trace)
    assert alone.seconds > 0


def test_what_is_there_is_not_counted(trace):
    replay(trace, steps="0:1", dtype="bf16")
    _, bf16 = replay(trace, dtype="bf16", dry_run=True).plan
    assert (bf16.num_steps, bf16.num_sequences, bf16.num_tokens) == (1, 24, total(trace, "step = 2"))
    assert bf16.num_versions == 1


def test_a_sample_s_plan_has_its_neighbours_and_the_whole(trace):
    results = replay(trace, sample=0.34, arm=["batch-size=1", "engine=exact"], dry_run=True)
    identity, alone, exact = results.plan
    drawn = {seq_id for step in results.sample.steps.values() for seq_id in step}
    names = ", ".join(f"'{name}'" for name in drawn)
    assert alone.num_tokens == exact.num_tokens == total(trace, f"seq_id IN ({names})")
    assert identity.num_sequences == alone.num_sequences == len(drawn)
    assert alone.num_tokens < identity.num_tokens < total(trace)


@pytest.mark.slow
def test_the_command_prints_the_plan_and_says_how_long(trace):
    done = tim_trace("replay", trace, "--sample", "0.5", "--dtype", "bf16", "--dry-run", "--json")
    _, bf16 = done.json()
    assert (bf16["arm"], bf16["num_sequences"], bf16["num_steps"]) == ("bf16", 36, 3)
    assert bf16["seconds"] > 0
    assert re.search(
        r"^tim-trace: about [\d.]+ \w+: [\d,]+ tokens in 2 arms at [\d,]+ tokens/s, 4 weight loads$",
        done.stderr,
        re.MULTILINE,
    ), done.stderr
    assert json.loads(done.stdout)
    assert replayed(trace) == 0


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.25, "0.2 seconds"), (45, "45 seconds"), (500, "8.3 minutes"), (90_000, "25 hours"), (3.7e6, "43 days")],
)
def test_times_are_said_in_words(seconds, words):
    plan = ReplayPlan([ArmPlan(arm="a", num_steps=1, num_sequences=1, num_tokens=100, tokens_per_s=100 / seconds)])
    assert estimate_sentence(plan).startswith(f"about {words}: 100 tokens in 1 arm at ")
