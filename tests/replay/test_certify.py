"""Two executions: batches in which their bits differ are found, shrunk and shown by a replay; sound ones are certified."""

import json

import pytest
import torch
from adapted import identity
from builders import tim_trace
from tim_trace import certify, gate
from tim_trace.replay.certify.batches import Batch, shrunk
from tim_trace.replay.certify.results import CERTIFIED, COUNTEREXAMPLE, UNDECIDED
from tim_trace.schemas.errors import InvalidOption
from tim_trace.tracer.recorder import Recorder
from transformers import LlamaConfig, LlamaForCausalLM

PINNED = "padding=left,mode=prefill,threads=1"
SMALL = {"max_batch": 6, "max_length": 10, "arm": PINNED}

SIZES = {
    "vocab_size": 128, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 128,
}  # fmt: skip

FACTORY = """
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

class Lookup(nn.Module):
    "Logits that depend on one token alone, in float64, so that no batch changes their bits. `change` plants a break."

    def __init__(self, config, dtype, change):
        super().__init__()
        whole = LlamaForCausalLM(LlamaConfig.from_dict(config)).to(dtype)
        self.model, self.lm_head, self.change, self.kept = whole.model, whole.lm_head, change, 0

    def forward(self, input_ids, attention_mask):
        hidden = self.model.embed_tokens(input_ids).double()
        logits = hidden @ self.lm_head.weight.double().T
        return (logits + (1e-3 * hidden[..., :1] if self.change(self, input_ids, attention_mask) else 0.0)).float()

def never(self, ids, mask): return False
def five_rows(self, ids, mask): return len(ids) == 5
def neighbour(self, ids, mask): return len(ids) > 1 and bool((ids == 77).any())
def width(self, ids, mask): return ids.shape[1] == 17
def padding(self, ids, mask): return bool((mask == 0).sum(1).max() >= 16)
def twins(self, ids, mask): return len(ids) > 1 and bool((ids[0] == ids[-1]).all())
def once(self, ids, mask):
    self.kept += 1
    if self.kept < 40 or len(ids) == 1:
        return False
    self.kept = -10**9
    return True
def history(self, ids, mask):
    kept, self.kept = self.kept, ids.numel()
    return kept > 40 and ids.numel() < 40 and len(ids) > 1
"""
NAMES = ("never", "five_rows", "neighbour", "width", "padding", "twins", "once", "history")
FACTORY += "\n".join(
    f"def build_{name}(config, dtype, attention): return Lookup(config, dtype, {name})" for name in NAMES
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("certify") / "model"
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder)
    (folder.parent / "lookups.py").write_text(FACTORY)
    return folder


@pytest.fixture(autouse=True)
def here(model, monkeypatch):
    monkeypatch.syspath_prepend(str(model.parent))


def search(model, tmp_path, name, **options):
    asked = {"minutes": 1.0, "output": tmp_path / "out", **SMALL, **options}
    return certify(model, model_factory=f"lookups:build_{name}", **asked)


@pytest.mark.parametrize(
    "name",
    ["five_rows", *(pytest.param(name, marks=pytest.mark.slow) for name in ("neighbour", "width", "padding", "twins"))],
)
def test_a_break_is_found_and_shrunk(model, tmp_path, name):
    found = search(model, tmp_path, name)
    assert found.verdict == COUNTEREXAMPLE
    one = found.counterexample
    sizes = {"five_rows": 5, "neighbour": 2, "width": 2, "padding": 2, "twins": 2}
    assert len(one.prompt_lengths) <= sizes[name]
    assert (one.num_different > 0, one.max_abs_d > 0, one.needs_history) == (True, True, False)
    if name == "width":
        assert one.pad_left + max(one.prompt_lengths) + max(one.response_lengths) + one.pad_right == 17


@pytest.mark.slow
def test_a_break_that_needs_an_earlier_batch_is_found_with_it(model, tmp_path):
    found = search(model, tmp_path, "history")
    assert found.verdict == COUNTEREXAMPLE
    assert found.counterexample.needs_history


def test_a_difference_that_does_not_come_again_is_told_with_its_values(model, tmp_path):
    one = search(model, tmp_path, "once").counterexample
    assert (one.repeats, one.num_different > 0, one.value != one.other) == (False, True, True)


@pytest.mark.slow
def test_the_command_that_is_printed_shows_the_difference(model, tmp_path):
    one = search(model, tmp_path, "five_rows").counterexample
    replayed, stats = one.replay.split(" && ")
    assert tim_trace(*replayed.split()[1:], env={"PYTHONPATH": str(model.parent)}, cwd=model.parent).code == 0
    shown = tim_trace(*stats.split()[1:], "--json").json()[0]
    assert shown["max_abs_d"] == pytest.approx(one.max_abs_d, rel=1e-6)
    assert shown["num_tokens"] == sum(one.response_lengths)


def test_a_sound_execution_is_certified_and_a_run_is_held_against_it(model, tmp_path):
    found = search(model, tmp_path, "never", minutes=0.5, max_batch=4, max_length=6)
    assert (found.verdict, found.counterexample) == (CERTIFIED, None)
    assert found.covered.row_counts == (1, 2, 3, 4)
    assert found.covered.prompt_lengths == tuple(range(1, 7))
    assert found.covered.num_batches >= found.covered.num_planned
    told = json.loads((tmp_path / "out" / "certificate.json").read_text())
    assert told["settings_hash"] == found.settings_hash
    bad = search(model, tmp_path, "five_rows", arm=f"{PINNED},name=x").counterexample
    tim_trace(*bad.replay.split(" && ")[0].split()[1:], env={"PYTHONPATH": str(model.parent)}, cwd=model.parent)
    (verdict,) = gate(bad.folder, certificate=found.file).verdicts
    assert (verdict.condition, verdict.fails) == ("certificate", True)
    assert "5 rows per batch, certified up to 4" in verdict.how
    (tmp_path / "out" / "certificate.json").write_text(json.dumps(told | {"settings": [{}, {}]}))
    with pytest.raises(InvalidOption, match="its settings were changed"):
        gate(bad.folder, certificate=tmp_path / "out" / "certificate.json")


@pytest.mark.slow
def test_against_another_execution_the_same_batches_are_compared(model, tmp_path):
    same = search(
        model, tmp_path, "width", against_factory="lookups:build_width", minutes=0.4, max_batch=3, max_length=10
    )
    assert same.verdict in (CERTIFIED, UNDECIDED)
    other = search(model, tmp_path, "never", against_factory="lookups:build_width")
    assert other.verdict == COUNTEREXAMPLE


def test_time_that_runs_out_gives_no_certificate(model, tmp_path):
    found = search(model, tmp_path, "never", minutes=0)
    assert (found.verdict, found.file) == (UNDECIDED, None)
    assert any(each.startswith("row_counts: ") for each in found.not_covered)
    assert not (tmp_path / "out" / "certificate.json").exists()


@pytest.fixture
def vllm_run(tmp_path):
    """A step whose engine ran without compiling, with heads that vLLM's attention supports."""
    whole = LlamaForCausalLM(LlamaConfig(**SIZES | {"hidden_size": 64}))
    with Recorder(tmp_path / "run") as recorder:
        recorder.describe(model=identity(whole))
        recorder.add_contract("train", {"engine": "transformers"})
        recorder.add_contract("rollout", {"engine": "vllm", "engine_arguments": {"enforce_eager": True}})
        recorder.add_weights(0, whole.state_dict())
        step = recorder.add_sequences(step=0, prompt_ids=[[0]], response_ids=[[0]], policy_version=0)
        for name in ("rollout", "train"):
            recorder.add_scores(name, step, logprobs=[[-1.0]])
    return tmp_path / "run"


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # vLLM runs in this process, with warnings of its own
def test_a_break_that_only_a_preempted_request_shows_is_found_in_vllm(vllm_run, tmp_path, monkeypatch):
    """Without preemption, a step has prompts of up to 4 tokens, or one token of each of up to 2 rows."""
    from vllm.model_executor.models.llama import LlamaForCausalLM, LlamaModel

    broken = False

    def forward(self, input_ids, positions, *rest, **words):
        is_recomputed = len(positions) > 2 and int(positions.max()) >= 4
        return self.embed_input_ids(input_ids) + (1e-2 if broken and is_recomputed else 0.0)

    def compute_logits(self, hidden):
        return (hidden.double() @ self.lm_head.weight.double().T).float()

    monkeypatch.setattr(LlamaModel, "forward", forward)
    monkeypatch.setattr(LlamaForCausalLM, "compute_logits", compute_logits)
    arm = "engine=vllm,dtype=fp32,mode=decode,batch-tokens=64,prefix-caching=off"
    asked = {"arm": arm, "max_batch": 2, "max_length": 4, "minutes": 1, "output": tmp_path / "out"}
    found = certify(vllm_run, **asked)
    assert (found.verdict, found.covered.layouts, found.not_covered) == (CERTIFIED, ("", "preempt=2"), ())
    broken = True
    one = certify(vllm_run, **asked).counterexample
    assert (one.layout, one.needs_history, one.repeats, one.num_different > 0) == ("preempt=2", False, True, True)
    assert len(one.prompt_lengths) == 1
    assert f"--arm {arm},preempt=2 " in one.replay


@pytest.mark.slow
def test_layouts_that_an_arm_leaves_open_are_searched(model, tmp_path):
    found = certify(model, arm="engine=exact", max_batch=2, max_length=3, minutes=0.2, output=tmp_path / "out")
    assert {"", "mode=decode", "padding=right", "padding=packed", "threads=2"} <= {*found.covered.layouts}
    assert found.counterexample is None


@pytest.mark.slow
def test_plain_matrix_products_are_not_the_same_in_every_batch(model, tmp_path):
    done = tim_trace("certify", model, "--arm", "dtype=bf16", "--minutes", "1", "-o", tmp_path / "out", "--json")
    assert done.code == 1
    assert done.json()["verdict"] == COUNTEREXAMPLE


def test_lengths_beyond_the_model_are_refused(model, tmp_path):
    with pytest.raises(InvalidOption, match="pass at most 63"):
        certify(model, max_length=64, output=tmp_path / "out")


def test_shrinking_keeps_what_matters():
    batch = Batch(tuple(((5,) * n, (6,) * n) for n in range(1, 20)), "mode=decode", 3, 4)
    small = shrunk(batch, lambda each: any(len(row[1]) >= 7 for row in each.rows) and each.layout == batch.layout, 400)
    assert small == Batch((((5,), (6,) * 7),), "mode=decode")
