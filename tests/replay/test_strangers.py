"""Replaying a trace that a stranger made: nothing that it names is imported or called, and nothing outside of it is read."""

import builtins
import os
import sys

import numpy as np
import pytest
import torch
from tim_trace.analysis.triangulate import triangulate
from tim_trace.analysis.views import connect
from tim_trace.analysis.weights import export, weights
from tim_trace.replay.arms import Arm
from tim_trace.replay.backends import model as models
from tim_trace.replay.backends import trusted
from tim_trace.replay.engine import replay
from tim_trace.replay.gradients.engine import gradient
from tim_trace.replay.locate.engine import locate
from tim_trace.replay.recorded import RecordedRun
from tim_trace.replay.vllm_scorer import VllmScorer
from tim_trace.schemas.errors import CannotReplay, StorageError, TimTraceWarning, WeightsMissing
from tim_trace.schemas.loss import Loss
from tim_trace.tracer.recorder import Recorder
from tim_trace.tracer.weights.checkpoints import FOLDER_VARIABLE
from transformers import Qwen3Config, Qwen3ForCausalLM, modeling_flash_attention_utils, modeling_utils
from transformers.utils import import_utils

CLASS = "transformers.models.qwen3.modeling_qwen3.Qwen3ForCausalLM"
OWN = trusted.SCORING_FUNCTIONS[0]
HEAD = trusted.FUSED_HEADS[0]


def model_config(**changes):
    sizes = {
        "vocab_size": 30, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 8, "dtype": "float32",
    }  # fmt: skip
    return Qwen3Config(**sizes).to_dict() | changes


def record(path, *, name=CLASS, config=None, contract=None, keeps_weights=True, weights_from=None, padding=None):
    """A trace of a loop whose contract and model say what is given; its checksums are right."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**model_config())).eval()
    ids = [1, 2, 3, 4]
    with torch.no_grad():
        table = torch.log_softmax(model(torch.tensor([ids])).logits[0], -1)
    with Recorder(path) as recorder:
        recorder.describe(model={"class": name, "config": config or model_config()})
        recorder.add_contract("train", {"engine": "mine"} | (contract or {}))
        recorder.add_loss(Loss())
        if keeps_weights:
            recorder.add_weights(0, model.state_dict())
        batch = recorder.add_sequences(
            step=1, prompt_ids=[ids[:2]], response_ids=[ids[2:]], policy_version=0, advantage=[1.0]
        )
        recorder.add_scores("train", batch, logprobs=[[float(table[1, 3]), float(table[2, 4])]])
        recorder.add_scores("rollout", batch, logprobs=[[-1.0, -1.0]])
    if weights_from is not None:
        forge_manifest(path, weights_from=str(weights_from))
    return model


def forge_manifest(path, **changes):
    from tim_trace.schemas.documents import read_document, to_document

    values = read_document((path / "trace.json").read_bytes(), "", "")
    (path / "trace.json").write_text(to_document(values | changes))


TRL = {"engine": "trl", "scoring_function": OWN, "fused_lm_head": HEAD, "grad_enabled": False, "training_mode": False}


@pytest.mark.parametrize("verb", [replay, gradient, triangulate])
def test_a_file_inside_of_the_trace_is_not_run(tmp_path, monkeypatch, verb):
    record(tmp_path / "run", name="stranger_model.Model")
    (tmp_path / "run" / "stranger_model.py").write_text("import os; os.environ['STRANGER'] = 'ran'\nclass Model: ...\n")
    monkeypatch.syspath_prepend(str(tmp_path / "run"))
    with pytest.raises(CannotReplay, match=r"'stranger_model\.Model'.*model_factory='MODULE:FUNCTION'") as caught:
        verb(tmp_path / "run")
    assert "STRANGER" not in os.environ
    assert "stranger_model" not in sys.modules
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_locate_says_that_a_factory_cannot_replace_an_unknown_class(tmp_path):
    record(tmp_path / "run", name="stranger_model.Model")
    with pytest.raises(CannotReplay, match=r"'stranger_model\.Model'.*a model factory cannot replace it"):
        locate(tmp_path / "run", model_factory="stranger_model:build", against_factory="stranger_model:build")


@pytest.mark.parametrize(
    "name",
    [
        "builtins.print", "os.abort", "os.system", "transformers.pipeline", "transformers.AutoModelForCausalLM",
        "transformers.utils.hub.cached_file", "transformers.utils.Qwen3ForCausalLM", "transformers.PreTrainedModel",
        "transformers.models.auto.auto_factory._BaseAutoModelClass", "torch.load", "print", "", ".", "..",
        "transformers.models.qwen3.modeling_qwen3.Qwen3ForCausalLM.__init__", "transformers.__class__", "x\x1b[2J.y",
    ],
)  # fmt: skip
def test_only_a_language_model_that_transformers_lists_is_built(name):
    with pytest.raises(CannotReplay, match="not a language model in the installed transformers") as caught:
        trusted.model_class(name)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "name", [CLASS, "Qwen3ForCausalLM", "transformers.Qwen3ForCausalLM", "transformers.models.qwen3.Qwen3ForCausalLM"]
)
def test_a_language_model_of_transformers_is_known_by_its_names(name):
    assert trusted.model_class(name) is Qwen3ForCausalLM


@pytest.mark.parametrize("field", ["scoring_function", "fused_lm_head"])
@pytest.mark.parametrize(
    "name", ["builtins.print", "os.abort", "trl.import_utils.is_vllm_available", "stranger.f", f"{OWN}.__call__", "", 7]
)
def test_no_function_is_called_but_trl_s_own(tmp_path, monkeypatch, field, name):
    called = []
    monkeypatch.setattr(builtins, "print", lambda *_, **__: called.append("print"))
    monkeypatch.setattr(os, "abort", lambda: called.append("abort"))
    record(tmp_path / "run", contract=TRL | {field: name or "nothing"})
    with pytest.raises(CannotReplay, match=rf"{field}.*model_factory='MODULE:FUNCTION'|cannot be replayed"):
        replay(tmp_path / "run")
    assert called == []


def attended(path, attention, dtype="float32"):
    return record(path, contract={"model": {"dtypes": {dtype: 1}, "attention": attention}})


@pytest.fixture
def fetched(monkeypatch):
    """What transformers was asked to fetch from the hub; nothing is."""
    from transformers.integrations import hub_kernels

    found = []

    def fetch(name, *_, **__):
        found.append(name)
        raise ValueError(f"{name} is not there")

    monkeypatch.setattr(hub_kernels, "get_kernel", fetch)
    monkeypatch.setattr(modeling_flash_attention_utils, "_loaded_implementation", None)
    monkeypatch.setattr(import_utils, "is_kernels_available", lambda: True)
    for module in (hub_kernels, modeling_utils):
        monkeypatch.setattr(module, "is_kernels_available", lambda: True)
    return found


@pytest.mark.parametrize(
    ("attention", "code"),
    [
        ("kernels-community/flash-attn2", trusted.KERNEL_NOT_ALLOWED),
        ("evil/kernel:run", trusted.KERNEL_NOT_ALLOWED),
        ("paged|kernels-community/flash-attn2", trusted.KERNEL_NOT_ALLOWED),
        ("../x", trusted.KERNEL_NOT_ALLOWED),
        ("sdpa\n", trusted.UNKNOWN),
        ("evil", trusted.UNKNOWN),
        ("flash_attention_2", trusted.NOT_INSTALLED),
        ("flash_attention_3", trusted.NOT_INSTALLED),
        ("flash_attention_4", trusted.NOT_INSTALLED),
    ],
)
def test_no_attention_is_fetched_and_arms_run_without_it(tmp_path, fetched, attention, code):
    attended(tmp_path / "run", attention, "bfloat16")  # other bits, whatever runs
    with pytest.warns(TimTraceWarning, match=r"arm \S+: the recorded attention .*; sdpa is used instead"):
        results = replay(tmp_path / "run", arm=["dtype=fp64", "attention=eager"])
    assert [result.arm for result in results] == ["as-recorded", "fp64", "eager"]
    assert all(result.num_tokens == 2 and np.isfinite(result.mean_abs_d) for result in results)
    assert fetched == []
    assert {(result.identity_held, result.not_held) for result in results} == {(False, code)}
    assert f"model.attention: recorded {attention}, now sdpa" in results[0].differs


@pytest.mark.parametrize("how", ["option", "variable"])
def test_a_kernel_of_the_hub_is_fetched_on_the_user_s_word_alone(tmp_path, monkeypatch, fetched, how):
    attended(tmp_path / "run", "kernels-community/flash-attn2", "bfloat16")
    name = "kernels-community/flash-attn2"
    if how == "variable":
        monkeypatch.setenv("TIM_TRACE_ALLOW_KERNEL", f"other/kernel,{name}")
    with pytest.raises(CannotReplay, match=r"kernels-community/flash-attn2 is not there"):
        replay(tmp_path / "run", **({"allow_kernel": [name]} if how == "option" else {}))
    assert fetched == [name]
    with pytest.raises(
        CannotReplay, match=r"kernels-community/flash-attn2"
    ):  # which transformers takes to be loaded now
        replay(tmp_path / "run", arm=["batch-size=1"], allow_kernel=[name])
    with pytest.warns(TimTraceWarning, match="is used instead"):
        assert replay(tmp_path / "run", arm=["dtype=fp64"], allow_kernel=[name])[0].not_held == "refused"


def test_a_kernel_that_stands_for_a_package_runs_where_it_is_allowed(tmp_path, fetched):
    attended(tmp_path / "run", "flash_attention_2", "bfloat16")
    with pytest.raises(CannotReplay, match="is not there"):
        replay(tmp_path / "run", allow_kernel=["kernels-community/flash-attn2"])
    assert fetched == ["kernels-community/flash-attn2"]


def test_flash_attention_takes_16_bits_alone(tmp_path, fetched):
    attended(tmp_path / "run", "kernels-community/flash-attn2", "float32")
    with pytest.warns(TimTraceWarning, match=r"'kernels-community/flash-attn2' computes in bf16 and fp16 only"):
        replay(tmp_path / "run", allow_kernel=["kernels-community/flash-attn2"])
    assert fetched == []


def test_a_kernel_that_a_model_s_author_names_is_not_fetched_either(fetched):
    found = trusted.attention_here(
        "flash_attention_2", "transformers.GptOssForCausalLM", (), is_half=True, device="cuda"
    )
    assert found == ("eager", trusted.KERNEL_NOT_ALLOWED)  # this model has no sdpa
    assert fetched == []


@pytest.mark.parametrize(("recorded", "used"), [("paged|sdpa", "sdpa"), ("paged|eager", "eager")])
def test_attention_by_pages_is_the_attention_below_it(tmp_path, recorded, used):
    attended(tmp_path / "run", recorded)
    (result,) = replay(tmp_path / "run")
    assert result.num_tokens == 2
    query = "SELECT contract_json ->> '$.model.attention' FROM passes WHERE pass = 'replay/as-recorded'"
    assert connect(tmp_path / "run").execute(query).fetchall() == [(used,)]


def test_experts_that_are_not_torch_s_are_not_loaded(tmp_path):
    record(
        tmp_path / "run", contract={"model": {"dtypes": {"float32": 1}, "attention": "sdpa", "experts": "evil/experts"}}
    )
    with pytest.warns(
        TimTraceWarning,
        match=r"the recorded experts implementation 'evil/experts' is not one of torch's implementations; eager",
    ):
        (result,) = replay(tmp_path / "run")
    assert result.num_tokens == 2


@pytest.mark.filterwarnings("ignore:arm .*the recorded attention")
def test_triangulate_and_gradient_say_that_other_code_ran(tmp_path):
    attended(tmp_path / "run", "flash_attention_4", "bfloat16")
    found = triangulate(tmp_path / "run")
    assert (found.identity_held, found.not_held) == (False, trusted.NOT_INSTALLED)
    assert "because the recorded attention is not installed here" in str(found)
    (step,) = gradient(tmp_path / "run").steps
    assert any("attention-not-installed" in note for note in step.notes)


@pytest.mark.parametrize(
    ("contract", "told"),
    [
        ({"model": {"dtypes": {"load": 1}}}, "dtype 'load'"),
        ({"model": {"dtypes": {}}}, "dtypes"),
        ({"model": {"dtypes": [1]}}, "dtypes"),
        ({"model": "x"}, "dtypes"),
        ({"torch": {"autocast_dtype": "torch.save"}}, "dtype 'save'"),
        ({"torch": {"num_threads": 10**9}}, "num_threads"),
        ({"torch": {"num_threads": "2"}}, "num_threads"),
        ({"torch": {"float32_matmul_precision": "x"}}, "float32_matmul_precision"),
        ({"torch": {"sdp_math": {"a": 1}}}, "sdp_math"),
        ({"torch": {"cublas_workspace_config": ":16:8\n"}}, "cublas_workspace_config"),
        ({"torch": {"fp32_precision": "x"}}, "fp32_precision"),
        ({"torch": [1]}, "torch"),
        ({"temperature": {"a": 1}}, "temperature"),
    ],
)
def test_a_contract_of_other_types_and_names_is_refused(tmp_path, contract, told):
    record(tmp_path / "run", contract=contract)
    with pytest.raises(CannotReplay, match=told) as caught:
        replay(tmp_path / "run")
    assert "\n" not in str(caught.value)


HOSTILE = {
    "auto_map": {"AutoModel": "evil--model.Model", "AutoConfig": "evil--model.Config"},
    "_name_or_path": "/etc", "name_or_path": "evil/model", "trust_remote_code": True, "use_pretrained_backbone": True,
    "backbone": "evil/backbone", "quantization_config": {"quant_method": "evil"}, "use_kernels": True,
    "_attn_implementation": "evil/kernel", "attn_implementation": "evil/kernel", "_experts_implementation": "evil/kernel",
    "num_labels": 10**9, "id2label": {"0": "a"}, "torch_dtype": "load", "__class__": "x", "__dict__": {},
}  # fmt: skip


def test_a_config_loses_what_would_be_fetched_or_imported_at_any_depth():
    kept = {"hidden_size": 16, "rope_parameters": {"rope_type": "default"}}
    nested = kept | HOSTILE | {"text_config": kept | HOSTILE | {"layers": [kept | HOSTILE]}}
    assert trusted.safe_config(nested) == kept | {"text_config": kept | {"layers": [kept]}}


def test_a_model_with_a_hostile_config_is_transformers_own_and_gives_the_same_bits(tmp_path):
    record(tmp_path / "run", config=model_config(**HOSTILE))
    (result,) = replay(tmp_path / "run")
    assert result.max_abs_d < 1e-6


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 10**12}, {"hidden_size": 2**39}, {"vocab_size": 2**45},
        {"num_hidden_layers": -(2**62)}, {"num_attention_heads": 2**35}, {"hidden_size": "x"}, {"hidden_act": "os.abort"},
        {"rope_parameters": 7}, {"layer_types": ["evil"]}, {"hidden_size": 2**20, "intermediate_size": 2**20},
    ],
)  # fmt: skip
def test_a_model_of_any_claimed_size_is_refused_before_there_is_memory_for_it(tmp_path, changes):
    record(tmp_path / "run", config=model_config(**changes))
    with pytest.raises(CannotReplay) as caught:
        replay(tmp_path / "run")
    assert "\n" not in str(caught.value)


def test_a_model_of_many_small_layers_is_refused_while_it_is_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "MAX_MODULES", 1000)
    record(tmp_path / "run", config=model_config(num_hidden_layers=10**5, layer_types=None))
    with pytest.raises(CannotReplay, match="needs at least 1,001 modules and tensors"):
        replay(tmp_path / "run")


def save_checkpoint(model, folder):
    model.save_pretrained(folder / "checkpoint-0")
    return folder


def test_a_folder_that_the_trace_names_is_read_on_the_user_s_word_alone(tmp_path, monkeypatch):
    outside = tmp_path / "outside"
    model = record(tmp_path / "run", keeps_weights=False, weights_from=outside)
    save_checkpoint(model, outside)
    for verb in (replay, triangulate, weights):
        with pytest.raises(
            WeightsMissing, match=rf"'{outside}' at the time of recording; to read them, pass weights_from='DIR'"
        ):
            verb(tmp_path / "run")
    with pytest.raises((CannotReplay, WeightsMissing), match="weights_from='DIR'"):
        gradient(tmp_path / "run")
    (result,) = replay(tmp_path / "run", weights_from=outside)
    assert result.max_abs_d < 1e-6
    assert triangulate(tmp_path / "run", weights_from=outside).num_tokens == 2
    assert [row["version"] for row in weights(tmp_path / "run", weights_from=outside).dicts()] == [0]
    monkeypatch.setenv(FOLDER_VARIABLE, str(outside))
    assert [row["kind"] for row in weights(tmp_path / "run").dicts()] == ["checkpoint"]


def test_an_exported_folder_holds_no_code_and_no_other_config(tmp_path):
    record(tmp_path / "run")
    (tmp_path / "run" / "tokenizer").mkdir()
    for name in (
        "vocab.json",
        "modeling_x.py",
        "config.json",
        "pytorch_model.bin",
        "model.safetensors",
        "model.safetensors.index.json",
    ):
        (tmp_path / "run" / "tokenizer" / name).write_text("{}")
    folder = export(tmp_path / "run", 0, tmp_path / "out")
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors", "vocab.json"]
    assert "Qwen3" in (folder / "config.json").read_text() or "qwen3" in (folder / "config.json").read_text()


@pytest.mark.parametrize("folder", ["journal", "writers", "passes", "scores", "dense", "sums", "passes/replay"])
def test_a_replay_writes_nothing_through_a_link(tmp_path, folder):
    record(tmp_path / "run")
    outside, there = tmp_path / "outside", tmp_path / "run" / folder
    outside.mkdir()
    if there.exists():
        for entry in there.iterdir():
            entry.rename(outside / entry.name)
        there.rmdir()
    (outside / "mine.txt").write_text("mine")
    there.symlink_to(outside)
    before = {path: path.stat().st_mtime_ns for path in outside.rglob("*")}
    with pytest.raises(StorageError, match=f"{folder} is a link"):
        replay(tmp_path / "run")
    assert {path: path.stat().st_mtime_ns for path in outside.rglob("*")} == before


def test_vllm_takes_of_the_recorded_arguments_what_is_a_number_or_a_word():
    own = {
        "max_num_seqs": 4,
        "quantization": "compressed-tensors",
        "gpu_memory_utilization": 0.5,
        "max_model_len": "auto",
    }
    assert (
        trusted.safe_engine_arguments(own | {"hf_overrides": {"a": 1}, "model": "/etc", "kv_cache_dtype": None}) == own
    )
    for wrong in ({"max_num_seqs": 2**40}, {"quantization": "/etc/x"}, {"tensor_parallel_size": 0}, [1]):
        with pytest.raises(CannotReplay, match="engine vllm: the recorded engine arguments"):
            trusted.safe_engine_arguments(wrong)


@pytest.mark.parametrize(
    ("contract", "dtype"), [({"dtype": "bfloat16"}, "bfloat16"), ({"dtype": "fp4"}, "float32"), ({}, "float32")]
)  # fmt: skip
def test_a_loop_is_replayed_in_the_dtype_of_its_contract(tmp_path, contract, dtype):
    record(tmp_path / "run", contract=contract)
    run = RecordedRun(tmp_path / "run")
    assert run.train_contract(run.step(1)[0].contract)["model"]["dtypes"] == {dtype: 1}


@pytest.mark.parametrize(
    ("recorded", "changes", "length", "share"),
    [
        ({}, {}, 5, None),  # four tokens, and one that vLLM samples
        ({"max_model_len": 64, "gpu_memory_utilization": 0.3}, {}, 64, 0.3),
        ({"max_model_len": 4}, {}, 5, None),
        ({"max_model_len": -1}, {}, -1, None),
        ({"max_model_len": 64}, {"max_model_len": 9, "gpu_memory_utilization": 0.5}, 9, 0.5),
    ],
)
def test_vllm_has_room_for_the_longest_sequence_and_no_more(tmp_path, recorded, changes, length, share):
    record(tmp_path / "run", contract={"model": {"dtypes": {"float32": 1}, "attention": "sdpa"}})
    run = RecordedRun(tmp_path / "run")
    contract = run.train_contract(run.step(1)[0].contract)
    scorer = VllmScorer(run, Arm(engine="vllm", **changes), contract, "cpu")
    scorer.rollout = {"engine_arguments": recorded}
    arguments = scorer._arguments()
    assert (arguments["max_model_len"], arguments.get("gpu_memory_utilization")) == (length, share)
