"""Runs that train LoRA adapters, recorded and replayed. Bits are compared as bits."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from builders import tim_trace
from peft import PeftModel
from runs import train
from tim_trace.analysis.stats import stats
from tim_trace.analysis.weights import export
from tim_trace.replay.arms import Arm
from tim_trace.replay.backends import adapters, model
from tim_trace.replay.engine import replay
from tim_trace.replay.gradients.engine import gradient
from tim_trace.replay.recorded import RecordedRun
from tim_trace.replay.results import by_arm
from tim_trace.schemas.errors import CannotReplay
from tim_trace.tracer.store import Store
from tim_trace.tracer.weights.checkpoints import open_weights
from tim_trace.tracer.weights.reader import Tensor
from transformers import AutoModelForCausalLM

pytestmark = [pytest.mark.engine, pytest.mark.slow]

CONFIG = {"beta": 0.1, "learning_rate": 0.03}
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}
KINDS = {
    "lora": {"rank_pattern": {"q_proj": 2}, "use_rslora": True},
    "dora": {"use_dora": True},
    "saved": {"modules_to_save": ["norm"], "lora_bias": True},
}


def trained(kind, *arguments, config=CONFIG):
    return train(
        "--steps", "4", "--lora", json.dumps(LORA | KINDS[kind]), *arguments, config=config, capture="logprobs"
    )


@pytest.fixture(scope="module")
def vllm(tmp_path_factory):
    """DoRA with vLLM, replayed in every way that adapters have."""
    trace = tmp_path_factory.mktemp("adapters") / "run"
    shutil.copytree(trained("dora", "--vllm", "--bf16-engine").trace, trace)
    arms = ["engine=vllm", "adapter=off", "adapter=merged", "engine=exact", "quantize=int8"]
    done = tim_trace("replay", trace, "--json", *(word for arm in arms for word in ("--arm", arm)))
    assert done.code == 0, done.stderr[-3000:]
    by_name = {}
    for row in json.loads(done.stdout)["rows"]:
        by_name.setdefault(row["arm"], []).append(row)
    return SimpleNamespace(trace=trace, arms=by_name)


def gap(trace, pair):
    return stats(trace, pair=pair).dicts()[0]["max_abs_d"]


@pytest.mark.parametrize(
    "kind", ["lora", pytest.param("dora", marks=pytest.mark.slow), pytest.param("saved", marks=pytest.mark.slow)]
)
def test_replaying_as_recorded_gives_every_bit_back(kind, tmp_path):
    shutil.copytree(trained(kind).trace, tmp_path / "run")
    (row,) = by_arm(replay(tmp_path / "run", arm=["adapter=off"]))[:1]
    assert (row.arm, row.share_equal, row.steps_reproduced) == ("as-recorded", 1.0, 4)
    assert gap(tmp_path / "run", "replay/adapter-off:reference") == 0.0


@pytest.mark.slow
def test_with_an_engine_every_pass_comes_back_bit_for_bit(vllm):
    own = vllm.arms["as-recorded"]
    assert (len(own), {step["num_equal"] == step["num_tokens"] and step["identity_held"] for step in own}) == (
        4,
        {True},
    )
    assert gap(vllm.trace, "replay/vllm:rollout") < 0.2 * gap(vllm.trace, "train:rollout")
    assert gap(vllm.trace, "replay/adapter-off:reference") == 0.0
    assert gap(vllm.trace, "replay/adapter-off:train") > 0.01
    for close in ("replay/adapter-merged", "replay/exact"):
        assert 0.0 < gap(vllm.trace, f"{close}:train") < 1e-5
    assert 1e-5 < gap(vllm.trace, "replay/int8:train") < 0.05


def test_the_contract_says_what_became_of_the_adapter(vllm):
    run = RecordedRun(vllm.trace)
    names = ("replay/adapter-off", "replay/exact", "replay/as-recorded")
    found = {name: run.arms(name)[0]["model"]["adapters"] for name in names}
    assert found["replay/adapter-off"] == "off"
    assert found["replay/exact"] == "merged"
    assert found["replay/as-recorded"] == ["default"]


def test_the_gradient_of_an_adapter_is_the_logged_one(vllm):
    steps = gradient(vllm.trace).steps
    assert len(steps) == 4
    assert [step.grad_norm for step in steps] == pytest.approx([step.logged_norm for step in steps], rel=1e-6)


def test_the_trace_keeps_how_the_adapter_is_configured(vllm):
    model = RecordedRun(vllm.trace).model
    assert model["class"].endswith("Qwen3ForCausalLM")
    assert set(model["adapters"]) == {"default"}
    kept = model["adapters"]["default"]
    assert (kept["r"], kept["use_dora"], sorted(kept["target_modules"])) == (4, True, sorted(LORA["target_modules"]))
    assert model["num_trained_parameters"] < model["num_parameters"] / 10


def test_the_base_is_stored_once_and_the_adapter_with_each_version():
    reader = open_weights(Store(trained("lora").trace))
    stored = [reader.parts[version][0] for version in reader.versions]
    assert [part.is_keyframe for part in stored] == [True, False, False, False]
    changed = {name for part in stored[1:] for name, count in part.num_changed.items() if count}
    assert changed
    assert all("lora_" in name for name in changed)


def test_the_base_changes_a_little_where_the_adapter_is_merged_for_an_engine(vllm):
    # TRL merges in place for vLLM and takes the adapter out again, which rounds: the base of each version is kept.
    reader = open_weights(Store(vllm.trace))
    changed = reader.parts[reader.versions[-1]][0].num_changed
    assert any(count for name, count in changed.items() if "base_layer.weight" in name)
    first, last = (reader.load(version) for version in (reader.versions[0], reader.versions[-1]))
    name = next(name for name, count in changed.items() if count and "base_layer.weight" in name)
    one, other = (weights[name].bits.view(np.float32) for weights in (first, last))
    assert 0 < np.abs(one - other).max() < 1e-6


@pytest.mark.filterwarnings("ignore:`lora_bias=True`")
@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_version_is_loaded_by_transformers_and_peft(kind, tmp_path):
    trace = trained(kind).trace
    folder = export(trace, 3, tmp_path / "model")
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), folder / "default")
    loaded, recorded = model.state_dict(), open_weights(Store(trace)).load(3)
    assert loaded.keys() == recorded.keys()
    for name, tensor in recorded.items():
        assert loaded[name].numpy().tobytes() == np.ascontiguousarray(tensor.bits).tobytes(), name


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "cannot be replayed"),
        ({"peft_type": "LORA", "r": 1 << 40}, "cannot be replayed"),
        ({"peft_type": "LORA", "megatron_core": "os", "megatron_config": {"a": 1}}, "sets 'megatron_core', 'megatron_config'"),
        ({"peft_type": "LORA", "layer_replication": [[0, 4]]}, "sets 'layer_replication'"),
        ({"peft_type": "LORA", "target_modules": ["no_such_layer"]}, "cannot be added to the model"),
    ],
)  # fmt: skip
def test_an_adapter_that_is_not_known_is_refused_by_name(config, message, tmp_path):
    run = trained("lora")
    recorded = RecordedRun(shutil.copytree(run.trace, tmp_path / "run"))
    identity = recorded.model | {"adapters": {"default": config}}
    with pytest.raises(CannotReplay, match=message):
        model.build(identity, dtype="float32", attention="sdpa", device="cpu")


def test_a_model_without_adapters_has_none_to_take_off(tmp_path):
    shutil.copytree(train(capture="logprobs").trace, tmp_path / "run")
    for engine in ("hf", "exact"):
        with pytest.raises(CannotReplay, match="has no adapters"):
            replay(tmp_path / "run", arm=[Arm(adapter="off", engine=engine)])


def test_the_model_below_has_its_own_names():
    def tensor(value):
        return Tensor("float32", np.full(1, value, np.uint32))

    recorded = {
        "base_model.model.model.q_proj.base_layer.weight": tensor(1),
        "base_model.model.model.q_proj.lora_A.default.weight": tensor(2),
        "base_model.model.model.q_proj.lora_magnitude_vector.default.weight": tensor(3),
        "base_model.model.norm.original_module.weight": tensor(4),
        "base_model.model.norm.modules_to_save.default.weight": tensor(5),
        "base_model.model.model.colora_proj.weight": tensor(6),
    }
    below = {name: int(kept.bits[0]) for name, kept in adapters.below(recorded).items()}
    assert below == {"model.q_proj.weight": 1, "norm.weight": 4, "model.colora_proj.weight": 6}
