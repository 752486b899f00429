"""Weights of a Hugging Face folder for a trace that was made without them."""

import json
import sys

import dumps
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from builders import make_trace, run, tim_trace
from tim_trace.analysis.check.check import check
from tim_trace.analysis.diagnosis.diagnose import diagnose
from tim_trace.analysis.diagnosis.text import numerics_text
from tim_trace.analysis.info import info
from tim_trace.analysis.stats import stats
from tim_trace.analysis.weights import export, weights
from tim_trace.replay.engine import replay
from tim_trace.replay.recorded import RecordedRun
from tim_trace.schemas.errors import CannotReplay, InvalidOption, WeightsMissing
from tim_trace.tracer.importers.import_dump import import_dump
from tim_trace.tracer.recorder import Recorder
from tim_trace.tracer.weights.attach import attach
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

VOCABULARY = 64
PREVIOUS_ULPS = 2
"""Units in the last place by which another way to sum may move a logprob below 8 nats."""


@pytest.fixture(autouse=True)
def quiet():
    logging.disable_progress_bar()


def make_model(seed=0, **changes):
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    }  # fmt: skip
    return Qwen3ForCausalLM(Qwen3Config(**sizes | changes)).eval()


def save(model, folder):
    model.save_pretrained(folder)
    words = {f"w{token}": token for token in range(VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="w0")))
    tokenizer.save_pretrained(folder)
    return folder


def alone(model, rows):
    """[S - 1] logprobs of each row's tokens, a row a forward, as the logit less logsumexp."""
    with torch.no_grad():
        logits = [model(torch.tensor([row])).logits[0, :-1] for row in rows]
    taken = [each.gather(-1, torch.tensor(row[1:])[:, None])[:, 0] for each, row in zip(logits, rows, strict=True)]
    return [(a - b.logsumexp(-1)).numpy() for a, b in zip(taken, logits, strict=True)]


def padded(model, rows):
    """The same, of one padded forward and log_softmax."""
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    there = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    with torch.no_grad():
        table = model(ids, attention_mask=there).logits.log_softmax(-1)
    return [table[place, range(len(row) - 1), row[1:]].numpy() for place, row in enumerate(rows)]


def scored(model, score=alone, step=1):
    """Samples whose logprobs are a model's."""
    samples, draw = dumps.make_samples(step, 6, masked=False), np.random.default_rng(step)
    for sample in samples:
        sample.prompt = draw.integers(3, VOCABULARY, len(sample.prompt))
        sample.response = draw.integers(3, VOCABULARY, 12 + len(sample.response))
        sample.mask, sample.entropy = (np.ones(len(sample.response), kind) for kind in (bool, np.float32))
    for sample, logprobs in zip(samples, score(model, [s.tokens.tolist() for s in samples]), strict=True):
        sample.train = sample.rollout = sample.reference = logprobs[len(sample.prompt) - 1 :]
    return samples


@pytest.fixture
def model(tmp_path):
    found = make_model()
    save(found, tmp_path / "model")
    return found


@pytest.fixture
def dumped(tmp_path, model):
    """A trace of a dump of the model's own logprobs, which says no policy version."""
    dumps.write_verl(tmp_path / "dump", {1: scored(model)})
    import_dump("verl", tmp_path / "dump", output=tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_replay_of_a_dump_gives_its_bits_back(tmp_path, is_tied):
    model = make_model(tie_word_embeddings=is_tied)
    save(model, tmp_path / "model")
    dumps.write_verl(tmp_path / "dump", {1: scored(model)})
    import_dump("verl", tmp_path / "dump", output=tmp_path / "run")
    found = attach(tmp_path / "run", 0, tmp_path / "model")
    assert found.num_bytes == sum(p.numel() * 4 for p in model.parameters())
    assert found.has_tokenizer
    (result,) = replay(tmp_path / "run")
    assert result.identity_held
    assert result.num_equal == result.num_tokens > 0
    assert [row["verified"] for row in weights(tmp_path / "run", verify=True).dicts()] == ["ok"]
    export(tmp_path / "run", 0, tmp_path / "out")
    again = Qwen3ForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in model.state_dict().items())
    assert PreTrainedTokenizerFast.from_pretrained(tmp_path / "out").get_vocab()["w9"] == 9


def test_another_batch_shape_is_a_last_place_off_and_the_replay_says_what_was_not_recorded(tmp_path, model):
    dumps.write_verl(tmp_path / "dump", {1: scored(model, padded)})
    import_dump("verl", tmp_path / "dump", output=tmp_path / "run")
    attach(tmp_path / "run", 0, tmp_path / "model")
    (result,) = replay(tmp_path / "run")
    assert 0 < result.max_abs_d <= PREVIOUS_ULPS * np.spacing(np.float32(7.9))
    assert result.differs[:2] == (
        "batch composition was not recorded, so the replay runs one row per forward pass",
        "policy version not recorded, assumed to be 0 (the only version with weights)",
    )


def test_the_model_that_was_attached_is_built_whichever_writer_comes_first(tmp_path, model):
    with Recorder(tmp_path / "run") as recorder:
        recorder.describe(model={"name": "as vLLM says it", "config": model.config.to_dict()})
        batch = recorder.add_sequences(step=1, prompt_ids=[[1, 5]], response_ids=[[2, 9]])
        recorder.add_contract("rollout", {"engine": "vllm"})
        recorder.add_scores("rollout", batch, logprobs=[[-1.0, -2.0]])
    for _ in range(8):  # each has a random name
        attach(tmp_path / "run", 0, tmp_path / "model", force=True)
        assert RecordedRun(tmp_path / "run").model["class"].endswith("Qwen3ForCausalLM")
    assert replay(tmp_path / "run")[0].num_tokens == 2


def test_a_replay_without_weights_says_how_to_attach_them(tmp_path, model):
    with Recorder(tmp_path / "run") as recorder:
        described = {
            "class": "transformers.models.qwen3.modeling_qwen3.Qwen3ForCausalLM",
            "config": model.config.to_dict(),
        }
        recorder.describe(model=described)
        batch = recorder.add_sequences(step=1, prompt_ids=[[1, 5]], response_ids=[[2, 9]])
        recorder.add_contract("rollout", {"engine": "vllm"})
        recorder.add_scores("rollout", batch, logprobs=[[-1.0, -2.0]])
    with pytest.raises(CannotReplay, match=r"does not contain policy_version.*tim-trace weights RUN --attach 0 DIR"):
        replay(tmp_path / "run")


def test_rows_of_no_version_are_not_scored_where_there_are_several(dumped, tmp_path):
    save(make_model(1), tmp_path / "other")
    attach(dumped, 0, tmp_path / "model")
    attach(dumped, 1, tmp_path / "other")
    with pytest.raises(CannotReplay, match="does not contain policy_version"):
        replay(dumped)


def test_a_tensor_keeps_the_dtype_of_its_file(tmp_path, dumped):
    mixed = make_model().to(torch.bfloat16)
    mixed.model.norm.weight = torch.nn.Parameter(1 + 1e-3 * torch.randn(32))
    save(mixed, tmp_path / "mixed")
    attach(dumped, 0, tmp_path / "mixed")
    export(dumped, 0, tmp_path / "out")
    again = Qwen3ForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").state_dict()
    assert torch.equal(again["lm_head.weight"], mixed.lm_head.weight)
    from safetensors.torch import load_file

    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["model.norm.weight"], mixed.model.norm.weight)


@pytest.mark.slow
def test_a_parquet_file_is_replayed_with_an_attached_model(tmp_path, model):
    rows = [
        {
            "step": 1, "prompt_ids": sample.prompt.tolist(), "response_ids": sample.response.tolist(),
            "rollout_logprobs": sample.rollout.tolist(), "train_logprobs": sample.train.tolist(),
        }
        for sample in scored(model)
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "mine.parquet")
    assert tim_trace("import", "parquet", tmp_path / "mine.parquet", "-o", tmp_path / "run").code == 0
    done = tim_trace("weights", tmp_path / "run", "--attach", 0, tmp_path / "model")
    assert done.code == 0, done.stderr
    assert "attached 25 tensors" in done.stderr
    assert f"tim-trace replay {tmp_path / 'run'}" in done.stderr
    (result,) = replay(tmp_path / "run")
    assert result.identity_held
    assert result.num_equal == result.num_tokens > 0


@pytest.mark.slow
def test_the_engine_s_side_alone_is_scored_with_the_weights(tmp_path, model):
    """As of a client of `vllm serve`: what the trainer would have given its tokens is what a replay gives."""
    samples = scored(model)
    for sample in samples:
        sample.rollout = sample.train + np.float32(0.25)
    lines = [
        {
            "prompt_token_ids": sample.prompt.tolist(),
            "choices": [
                {"token_ids": sample.response.tolist(), "logprobs": {"token_logprobs": sample.rollout.tolist()}}
            ],
        }
        for sample in samples
    ]
    (tmp_path / "saved.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    import_dump("vllm", tmp_path / "saved.jsonl", output=tmp_path / "run")
    told = tim_trace("stats", tmp_path / "run").stderr
    assert f"`tim-trace weights {tmp_path / 'run'} --attach VERSION DIR` and `tim-trace replay" in told
    attach(tmp_path / "run", 0, tmp_path / "model")
    done = tim_trace("replay", tmp_path / "run", "--arm", "dtype=fp64", "--json")
    assert done.code == 0, done.stderr
    assert "the trace has no `train` pass" in done.stderr
    assert f"next: tim-trace stats {tmp_path / 'run'} --pair replay/fp64:rollout --by step" in done.stderr
    found = {row["arm"]: row for row in done.json()}
    num_tokens = sum(len(sample.response) for sample in samples)
    assert {row["num_tokens"] for row in found.values()} == {num_tokens}
    assert found["as-recorded"]["num_equal"] == 0
    assert found["as-recorded"]["mean_abs_d"] == pytest.approx(0.25, abs=1e-6)
    (row,) = stats(tmp_path / "run", pair="replay/as-recorded:rollout").dicts()
    given = np.concatenate([sample.train.astype(np.float64) - sample.rollout for sample in samples])
    assert row["mean_abs_d"] == pytest.approx(np.abs(given).mean(), abs=1e-12)
    assert row["num_tokens"] == num_tokens


def test_a_rollout_bank_in_float16_is_valid_and_its_rounding_is_the_file_s(tmp_path, model):
    """The engine computed in float32, so all of the mismatch with a float32 replay is the file's rounding."""
    dumps.write_rollout_bank(tmp_path / "bank", {step: scored(model, step=step) for step in range(1, 5)})
    import_dump("auto", tmp_path / "bank", output=tmp_path / "run")
    attach(tmp_path / "run", 0, tmp_path / "model")
    replay(tmp_path / "run")
    found = check(tmp_path / "run", pair="replay/as-recorded:rollout")
    assert found.is_valid
    assert all(finding.code != "low_precision_head" for finding in found.findings)
    told = diagnose(tmp_path / "run", pair="replay/as-recorded:rollout")
    assert told.numerics.values[1] == "float16"
    assert told.numerics.in_file == (False, True)
    assert "the imported file rounds logprobs to float16" in numerics_text(told.numerics)
    # The same numbers without the contract are those of an engine in float16.
    given = scored(model, step=1)
    for sample in given:
        sample.rollout = sample.rollout.astype(np.float16).astype(np.float32)
    dumps.write_verl(tmp_path / "verl", {1: given})
    import_dump("verl", tmp_path / "verl", output=tmp_path / "other")
    assert check(tmp_path / "other").findings[0].code == "low_precision_head"


def dumps_with_versions(folder, model, step):
    samples = scored(model, step=step)
    dumps.write_rollouts(folder, {step: samples})
    dumps.write_slime_train(folder, {step: samples})


def test_a_version_that_no_row_is_of_is_refused_with_those_there_are(tmp_path, model):
    dumps_with_versions(tmp_path / "dump", model, 1)
    import_dump("slime", tmp_path / "dump", output=tmp_path / "run")
    with pytest.raises(InvalidOption, match=r" no row has version 0; recorded versions: 4"):
        attach(tmp_path / "run", 0, tmp_path / "model")
    assert info(tmp_path / "run").num_sequences == 6
    with pytest.raises(InvalidOption, match="got True"):
        attach(tmp_path / "run", True, tmp_path / "model")


def test_what_is_attached_already_stays_unless_it_is_replaced(dumped, tmp_path, model):
    attach(dumped, 0, tmp_path / "model")
    save(make_model(1), tmp_path / "other")
    with pytest.raises(
        InvalidOption, match=r"already has weights of version 0, attached from .*model; replace them with force=True"
    ):
        attach(dumped, 0, tmp_path / "other")
    assert replay(dumped)[0].identity_held
    attach(dumped, 0, tmp_path / "other", force=True)
    assert not replay(dumped, force=True)[0].identity_held
    attach(dumped, 0, tmp_path / "model", force=True)
    assert replay(dumped, force=True)[0].identity_held
    assert [row["verified"] for row in weights(dumped, verify=True).dicts()] == ["ok"]
    assert not info(dumped).damaged
    assert len(list((dumped / "weights").glob("*.json"))) == 1


def test_recorded_weights_are_not_replaced(tmp_path, model):
    with Recorder(tmp_path / "run") as recorder:
        batch = recorder.add_sequences(step=1, prompt_ids=[[1]], response_ids=[[2]], policy_version=0)
        recorder.add_scores("train", batch, logprobs=[[-1.0]])
        recorder.add_weights(0, model.state_dict())
    with pytest.raises(InvalidOption, match="which cannot be replaced"):
        attach(tmp_path / "run", 0, tmp_path / "model", force=True)


def test_a_loop_that_recorded_no_weights_takes_them_and_only_of_its_model(tmp_path, model):
    with Recorder(tmp_path / "run") as recorder:
        identity = {"class": "transformers.Qwen3ForCausalLM", "config": model.config.to_dict()}
        recorder.describe(model=identity)
        batch = recorder.add_sequences(step=1, prompt_ids=[[1, 5]], response_ids=[[2, 9]], policy_version=0)
        recorder.add_contract("train", {"engine": "mine"})
        recorder.add_scores("train", batch, logprobs=[alone(model, [[1, 5, 2, 9]])[0][1:]])
    save(make_model(num_hidden_layers=1), tmp_path / "small")
    with pytest.raises(InvalidOption, match=r"does not match the model in .*: num_hidden_layers 1, not 2"):
        attach(tmp_path / "run", 0, tmp_path / "small")
    attach(tmp_path / "run", 0, tmp_path / "model")
    assert replay(tmp_path / "run")[0].identity_held


def test_a_model_of_another_vocabulary_is_refused(dumped, tmp_path):
    save(make_model(vocab_size=32), tmp_path / "small")
    with pytest.raises(
        InvalidOption,
        match=r"a vocabulary of 32 tokens, but .* contains token \d\d; check that the folder holds the model",
    ):
        attach(dumped, 0, tmp_path / "small")


def _without_weights(folder):
    (folder / "model.safetensors").unlink()


def _pickled(folder):
    _without_weights(folder)
    (folder / "pytorch_model.bin").write_bytes(b"x")


def _without_config(folder):
    (folder / "config.json").unlink()


def _adapter(folder):
    (folder / "adapter_config.json").write_text("{}")


def _cut(folder):
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])


def _of(**changes):
    def change(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return change


@pytest.mark.parametrize(
    ("break_it", "sentence"),
    [
        (_without_weights, r"has no \*\.safetensors"),
        (_pickled, r"has no \*\.safetensors"),
        (_without_config, "has no config.json"),
        (_adapter, "contains an adapter; merge it"),
        (_cut, "cannot be loaded"),
        (
            _of(architectures=["Qwen3Model"]),
            "names the architecture Qwen3Model, which .* does not provide as a language model",
        ),
        (_of(architectures=["Mine"], auto_map={"AutoModelForCausalLM": "mine.Mine"}), "names the architecture Mine"),
        (
            _of(num_hidden_layers=3, layer_types=["full_attention"] * 3),
            r"has no model\.layers\.2\..* and \d+ more; check that it contains a complete Qwen3ForCausalLM",
        ),
        (_of(intermediate_size=40), "has the wrong shape for|cannot be loaded"),
        (_of(model_type="moon"), "config.json cannot be read"),
    ],
)
def test_a_folder_that_cannot_be_taken_is_refused_and_nothing_is_written(dumped, tmp_path, break_it, sentence):
    break_it(tmp_path / "model")
    before = {path: path.stat().st_mtime_ns for path in dumped.rglob("*")}
    with pytest.raises(WeightsMissing, match=sentence):
        attach(dumped, 0, tmp_path / "model")
    assert {path: path.stat().st_mtime_ns for path in dumped.rglob("*")} == before


def test_a_tokenizer_of_its_own_folder_is_taken_and_what_is_none_refused(dumped, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidOption, match=r"tokenizer: .*contains no tokenizer that can be loaded"):
        attach(dumped, 0, tmp_path / "model", tokenizer=tmp_path / "empty")
    (tmp_path / "words").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "model" / name).rename(tmp_path / "words" / name)
    assert attach(dumped, 0, tmp_path / "model", tokenizer=tmp_path / "words").has_tokenizer
    assert (dumped / "tokenizer" / "tokenizer.json").exists()


def test_info_check_and_replay_name_the_command(dumped):
    (missing,) = (sentence for sentence in info(dumped).missing if "--attach" in sentence)
    assert f"tim-trace weights {dumped} --attach VERSION DIR" in missing
    with pytest.raises(
        CannotReplay,
        match="was imported from a dump and has no model; attach the weights used to score it: tim-trace weights",
    ):
        replay(dumped)
    with pytest.raises(WeightsMissing, match="attach a folder"):
        weights(dumped)


def test_check_s_advice_for_a_dump_is_to_attach(tmp_path):
    samples = dumps.make_samples(1, 64, masked=False)
    for sample in samples:
        sample.train = sample.rollout + np.random.default_rng(sample.index).normal(0, 1, len(sample.rollout)).astype(
            "f4"
        )
    dumps.write_verl(tmp_path / "dump", {1: samples})
    import_dump("verl", tmp_path / "dump", output=tmp_path / "run")
    told = [finding.next.command for finding in check(tmp_path / "run").findings if finding.next is not None]
    assert not any("tim-trace record" in command for command in told)


def test_options_of_attach_go_with_it(dumped):
    assert "require --attach" in tim_trace("weights", dumped, "--force").stderr


KILLED = """
import os, signal, sys
from pathlib import Path
from tim_trace.analysis import import_dump
from tim_trace.tracer import create
from tim_trace.tracer.weights.attach import attach

class Dying:
    def __init__(self, moves):
        self.moves = moves

    def __getattr__(self, name):
        return getattr(os, name)

    def replace(self, *given):
        if not self.moves:
            os.kill(os.getpid(), signal.SIGKILL)
        self.moves -= 1
        os.replace(*given)

dump, folder, place = map(Path, sys.argv[1:])
for moves in range(40):
    run = place / f"{moves:02}"
    import_dump("verl", dump, output=run)
    if not (child := os.fork()):
        create.os = Dying(moves)
        attach(run, 0, folder)
        os._exit(0)
    if not os.waitpid(child, 0)[1]:
        break
"""


@pytest.mark.slow
def test_a_kill_leaves_all_of_it_or_none_and_the_next_writer_finishes_it(tmp_path, model):
    dumps.write_verl(tmp_path / "dump", {1: scored(model)})
    arguments = (tmp_path / "dump", tmp_path / "model", tmp_path / "runs")
    done = run(sys.executable, "-c", KILLED, *arguments, timeout=1800)
    assert done.code == 0, done.stderr
    *killed, whole = sorted((tmp_path / "runs").iterdir())
    assert len(killed) > 3
    assert replay(whole)[0].identity_held
    for place in killed:
        assert not info(place).damaged
        with pytest.raises(WeightsMissing, match="has no weights"):
            weights(place)
        # A replay writes to the trace: it finds the files on their way, and moves the rest.
        assert replay(place)[0].identity_held
        assert not list(place.glob(".tmp-*"))
        assert [row["verified"] for row in weights(place, verify=True).dicts()] == ["ok"]
        assert not info(place).damaged


def test_another_trace_s_kind_of_damage_is_still_told(tmp_path, dumped):
    attach(dumped, 0, tmp_path / "model")
    states = {path for path in (dumped / "writers").iterdir() if 'attached_from": "' in path.read_text()}
    assert len(states) == 1
    states.pop().unlink()
    with pytest.warns(UserWarning, match="is missing or damaged"), pytest.raises(WeightsMissing):
        weights(dumped)


def test_a_recorded_trace_needs_no_attached_weights_to_be_told_of(tmp_path):
    make_trace(tmp_path / "run")
    assert not any("--attach" in sentence for sentence in info(tmp_path / "run").missing)
