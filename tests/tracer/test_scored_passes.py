import subprocess
import sys
from functools import partial

import numpy as np
import pytest
from builders import make_trace
from tim_trace.analysis.trace.columns import num_scored
from tim_trace.analysis.views import open_database
from tim_trace.schemas.errors import DamageWarning
from tim_trace.schemas.passes import first_pair
from tim_trace.tracer.ragged import Ragged
from tim_trace.tracer.recorder import Recorder
from tim_trace.tracer.scored_passes import scored_passes


def recorded(folder, passes, *, closes=True, num_tokens=3):
    """A trace of sequences with these passes: name -> whether it has logprobs. Those of importers may have none."""
    recorder = Recorder(folder)
    for step in (1, 2):
        batch = recorder.add_sequences(step=step, response_ids=[list(range(num_tokens))] * 2)
        for name, has_logprobs in passes.items():
            if has_logprobs:
                recorder.add_scores(name, batch, logprobs=[[-1.0] * num_tokens] * 2)
                continue
            entropy = Ragged(np.ones(2 * num_tokens, np.float32), np.full(2, num_tokens))
            columns = {"pass": name, "step": step, "seq_id": ["a", "b"], "iteration": 0, "entropy": entropy}
            recorder.writer.submit(partial(recorder.writer.append, "scores", columns, 2), 0)
    if closes:
        recorder.close()
    else:
        recorder.flush()
    return folder


@pytest.mark.parametrize("closes", [True, False])
@pytest.mark.parametrize(
    ("passes", "pair"),
    [
        ({"train": True, "rollout": True, "current": True}, "train:rollout"),
        ({"train": False, "rollout": True, "current": True}, "current:rollout"),
        ({"replay/x": True, "rollout": False}, None),
        ({}, None),
    ],
)
def test_the_passes_that_have_logprobs_are_those_that_a_database_counts(tmp_path, passes, pair, closes):
    trace = recorded(tmp_path / "run", passes, closes=closes)
    assert scored_passes(trace) == list(num_scored(open_database(trace)))
    assert first_pair(scored_passes(trace)) == pair


def test_responses_without_tokens_have_logprobs_all_the_same(tmp_path):
    trace = recorded(tmp_path / "run", {"train": True, "rollout": True}, num_tokens=0)
    assert scored_passes(trace) == list(num_scored(open_database(trace))) == ["rollout", "train"]


def test_traces_of_earlier_releases_tell_their_passes(trace_v2):
    assert scored_passes(trace_v2) == list(num_scored(open_database(trace_v2)))


def test_damage_is_told(tmp_path):
    make_trace(tmp_path / "run")
    next((tmp_path / "run" / "scores").iterdir()).unlink()
    with pytest.warns(DamageWarning, match="is missing"):
        assert scored_passes(tmp_path / "run") == []


def test_neither_a_database_nor_pandas_is_imported_for_it(tmp_path):
    make_trace(tmp_path / "run")
    program = (
        "import sys; from tim_trace.tracer.scored_passes import scored_passes; "
        f"print(scored_passes({str(tmp_path / 'run')!r}), sorted({{'duckdb', 'pandas'}} & {{*sys.modules}}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "['rollout', 'train'] []\n"
