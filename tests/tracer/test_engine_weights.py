"""Accounting for the engine's weights, in real trainings whose transfer goes wrong as a user's own code makes it."""

import json
from types import SimpleNamespace

import pytest
import torch
from runs import train
from temporaries import MOST_BYTES, most_beside
from tim_trace.analysis.check.check import check
from tim_trace.analysis.verify import verify
from tim_trace.analysis.views import connect
from tim_trace.schemas.documents import Manifest
from tim_trace.tracer.create import new_trace
from tim_trace.tracer.hooks.engine_weights import EngineWeights, values_a_row
from tim_trace.tracer.hooks.models import held_tensors, trainer_tensors, transfer_name
from tim_trace.tracer.hooks.session import Order, Session
from tim_trace.tracer.weights import digests
from tim_trace.tracer.weights.digests import _sum, digest, resolved

LORA = json.dumps({"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]})
SKIPPED = "model.layers.1.mlp.down_proj.weight"
NUM_TENSORS = 24


def summed(tensor):
    """The digest that an accelerator gives."""
    return _sum(tensor, tensor.dtype, tensor.device)


def trained(*arguments, options=()):
    config = {"learning_rate": 0.03} if "--lora" in arguments else None
    return train(
        "--vllm", "--bf16-engine", "--steps", "4", *arguments, config=config, capture="logprobs", options=options
    ).trace


def faulty(name, *arguments):
    """What check says of a training with a fault of tests/programs/transfers.py."""
    found = check(trained("--transfer", name, *arguments)).findings
    assert [finding.signal for finding in found] == ["engine_weights"], found
    return found[0].numbers


def counts(trace):
    return connect(trace).execute("""
        SELECT policy_version, count(*), count(trainer), count(given), count(held), sum((given = trainer)::INT),
            count("cast")
        FROM engine_weights GROUP BY ALL ORDER BY ALL
    """).fetchall()  # fmt: skip


@pytest.mark.slow
@pytest.mark.engine
def test_a_tensor_that_is_skipped_is_named_with_the_version_that_the_engine_has():
    numbers = faulty("skips")
    assert (numbers["cause"], numbers["tensor"], numbers["num_tensors"]) == ("partial_sync", SKIPPED, 1)
    assert (numbers["holds_version"], numbers["given_version"], numbers["trainer_version"]) == (0, 0, 3)
    assert not verify(trained("--transfer", "skips")).damaged


@pytest.mark.slow
@pytest.mark.engine
def test_weights_that_are_a_step_late_are_stale():
    numbers = faulty("late")
    assert (numbers["cause"], numbers["num_tensors"]) == ("stale_weights", NUM_TENSORS)
    assert (numbers["holds_version"], numbers["given_version"], numbers["trainer_version"]) == (2, 3, 3)


@pytest.mark.engine
@pytest.mark.slow
def test_a_transfer_that_never_comes_is_told_by_what_the_engine_holds():
    numbers = faulty("never")
    assert (numbers["cause"], numbers["holds_version"], numbers["given_version"]) == ("never_synchronised", 0, None)


@pytest.mark.engine
@pytest.mark.slow
def test_an_adapter_that_is_not_merged_is_told():
    numbers = faulty("unmerged", "--lora", LORA)
    assert (numbers["cause"], numbers["num_tensors"], numbers["of_tensors"]) == ("adapter", 6, NUM_TENSORS)


@pytest.mark.engine
@pytest.mark.slow
def test_a_merged_adapter_that_comes_a_step_late_is_stale_and_no_missing_adapter():
    assert faulty("late", "--lora", LORA)["cause"] == "stale_weights"


@pytest.mark.engine
@pytest.mark.slow
def test_a_second_cast_is_told_with_its_dtype():
    numbers = faulty("fp8")
    assert (numbers["cause"], numbers["dtype"], numbers["first_version"]) == ("quantised", "float8_e4m3fn", 0)


@pytest.mark.engine
@pytest.mark.slow
def test_weights_of_two_bits_are_told_by_how_few_values_they_have():
    numbers = faulty("coarse")
    assert (numbers["cause"], numbers["dtype"], numbers["num_tensors"]) == ("quantised", "3 values", 14)


@pytest.mark.parametrize(("levels", "count"), [(1, 3), (3, 7), (7, 15), (127, 180)])
def test_rounding_to_few_values_a_row_is_seen_with_a_scale_for_each_row(levels, count):
    torch.manual_seed(0)
    own = torch.randn(20, 4096)
    scale = own.abs().amax(1, keepdim=True) / levels
    found = values_a_row(own, (own / scale).round() * scale)
    assert found == count if levels < 100 else count < found < 256


@pytest.mark.parametrize(
    "change", [lambda own: own * 1.001, torch.zeros_like, torch.ones_like, lambda own: own.sign().roll(1)]
)
def test_other_changes_are_no_rounding_to_few_values(change):
    torch.manual_seed(0)
    own = torch.randn(20, 4096)
    assert values_a_row(own, change(own)) is None
    assert values_a_row(own[0, :1], own[0, :1]) is None


@pytest.mark.engine
@pytest.mark.slow
def test_weights_that_the_trainer_never_had_are_told():
    assert faulty("scales")["cause"] == "other_weights"


@pytest.mark.engine
@pytest.mark.slow
def test_what_was_given_and_not_loaded_is_told():
    numbers = faulty("drops")
    assert (numbers["cause"], numbers["tensor"], numbers["is_loaded"]) == ("partial_sync", SKIPPED, 0)
    assert (numbers["holds_version"], numbers["given_version"]) == (0, 3)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("arguments", [(), ("--lora", LORA), ("--transfer", "bf16")])
def test_a_transfer_that_is_right_has_equal_digests_everywhere(arguments):
    """Rounding to bfloat16 on the way is what the engine does anyway."""
    trace = trained(*arguments)
    held = [NUM_TENSORS, NUM_TENSORS, NUM_TENSORS, 0]
    assert counts(trace) == [
        (version, NUM_TENSORS, NUM_TENSORS, NUM_TENSORS, held[version], NUM_TENSORS, 0) for version in range(4)
    ]
    assert check(trace).is_valid


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize(("level", "held"), [("held", [NUM_TENSORS] * 4), ("none", [])])
def test_how_much_is_accounted_for_is_the_user_s_choice(level, held):
    assert [row[4] for row in counts(trained(options=("--engine-weights", level)))] == held


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool]
)
def test_a_small_tensor_has_the_digest_that_it_has_in_pieces(monkeypatch, dtype):
    several = [torch.arange(60).view(6, 10).to(dtype).t(), torch.tensor(3).to(dtype), torch.zeros(0).to(dtype)]
    whole = [digest(tensor, torch.bfloat16) for tensor in several]
    monkeypatch.setattr(digests, "_LANES", {})
    monkeypatch.setattr(digests, "_CAST_ELEMENTS", 7)
    assert [digest(tensor, torch.bfloat16) for tensor in several] == whole


def test_digests_are_equal_where_the_bits_are_in_the_engine_s_dtype():
    wide = torch.randn(300, 7)
    assert digest(wide, torch.bfloat16) == digest(wide.to(torch.bfloat16)) != digest(wide)
    assert digest(wide.t().contiguous().t()) == digest(wide)
    assert digest(torch.arange(5), torch.bfloat16) == digest(torch.arange(5))
    assert len({digest(torch.zeros(0)), digest(torch.zeros(1)), digest(torch.tensor(0.0) + 1)}) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64])
def test_the_sum_of_an_accelerator_tells_every_change_of_a_bit_and_of_a_place(dtype):
    torch.manual_seed(0)
    values = torch.randn(1001).to(dtype) if dtype.is_floating_point else torch.randint(-(2**62), 2**62, (1001,))
    bits = values.view(torch.uint8)
    changed = []
    for place in range(0, len(bits), 97):
        for bit in range(8):
            other = bits.clone()
            other[place] ^= 1 << bit
            changed.append(other.view(dtype))
    changed += [values.roll(1), values[:-1], torch.cat([values, values[:1]])]
    found = resolved([summed(each) for each in (values, *changed)])
    assert len(set(found)) == len(found)
    assert resolved([summed(values.clone())]) == found[:1]
    assert all(0 <= value < 2**64 for value in found)


def test_the_sum_goes_on_over_chunks():
    lanes = torch.ones(digests._CHUNK_LANES + 5, dtype=torch.int32)
    moved = lanes.clone()
    moved[3], moved[digests._CHUNK_LANES + 3] = 2, 0
    assert resolved([summed(lanes)]) != resolved([summed(moved)])


@pytest.mark.parametrize("kind", [digest, summed])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8])
def test_a_tensor_has_the_digest_of_its_values_however_it_lies(kind, dtype, monkeypatch):
    monkeypatch.setattr(digests, "_CHUNK_LANES", 13)
    monkeypatch.setattr(digests, "_CAST_ELEMENTS", 7)
    values = torch.randn(5 * 9 * 11).to(dtype)
    for first in range(4):
        placed = torch.cat([torch.zeros(first).to(dtype), values, values])
        assert resolved([kind(placed[first : first + 495])]) == resolved([kind(values)])
    cube = values.view(5, 9, 11)
    for turned in (cube.transpose(1, 2), cube.transpose(0, 2), cube[:, 1:8, ::2], cube[1]):
        assert resolved([kind(turned)]) == resolved([kind(turned.contiguous())])


@pytest.mark.parametrize("through", [None, torch.float8_e4m3fn])
def test_a_digest_rounds_as_a_cast_of_the_whole_does(through, monkeypatch):
    monkeypatch.setattr(digests, "_CHUNK_LANES", 13)
    wide = torch.randn(40, 30)
    cast = (wide if through is None else wide.to(through).float()).to(torch.bfloat16)
    assert digest(wide, torch.bfloat16, through=through) == digest(cast)
    assert resolved([_sum(wide, torch.bfloat16, wide.device, through)]) == resolved([summed(cast)])


@pytest.mark.parametrize("turned", [False, True])
def test_a_digest_takes_little_beside_a_large_tensor(turned):
    large = torch.zeros(4096, 9216)
    tensor = large.t() if turned else large
    assert most_beside(_sum, tensor, torch.bfloat16, tensor.device) <= MOST_BYTES
    assert most_beside(digest, tensor, torch.bfloat16) <= MOST_BYTES


def test_quantised_layers_are_left_out_of_the_account_and_named(session, capsys):
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.LayerNorm(4))
    model[0].weight = torch.nn.Parameter(torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False)
    account = EngineWeights(session)
    account.hold(Trainer(model))
    account.tell(1)
    assert [row[1] for row in rows_of(session)] == ["1.bias", "1.weight"]
    assert (
        "1 quantised tensors are not compared with the engine's, because the trainer stores them packed"
        in capsys.readouterr().err
    )


def test_it_is_said_why_the_account_of_a_sharded_trainer_has_nothing_of_its_own(session, monkeypatch, capsys):
    monkeypatch.setattr("tim_trace.tracer.hooks.engine_weights.is_whole", lambda model: False)
    account = EngineWeights(session)
    model = Fused()
    account.watch(Engine(model))
    account.hold(Trainer(model.norm))
    model.load_weights([("norm.weight", torch.full((4,), 2.0))])
    account.tell(1)
    assert "the engine's weights are not compared: the trainer's weights are sharded" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_device_gives_the_same_sum():
    values = torch.randn(5_000_001).to(torch.bfloat16)
    assert resolved([digest(values.cuda())]) == resolved([summed(values)])
    assert resolved([digest(values, device=torch.device("cuda"))]) == resolved([summed(values)])


class Fused(torch.nn.Module):
    """Query, key and value in one parameter, a padded vocabulary, and a part of a tensor that is split over processes."""

    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}  # noqa: RUF012  (as vLLM's models have it)

    def __init__(self):
        super().__init__()
        self.qkv_proj = torch.nn.Linear(4, 10, bias=False)
        self.embed_tokens = torch.nn.Embedding(64, 4)
        self.norm = torch.nn.LayerNorm(4, bias=False)
        self.down = torch.nn.Linear(2, 4, bias=False)

    def load_weights(self, weights):
        own = dict(self.named_parameters())
        for name, tensor in weights:
            if name in own:
                own[name].data.copy_(tensor)


SHAPES = {
    "q_proj.weight": (6, 4), "k_proj.weight": (2, 4), "v_proj.weight": (2, 4), "embed_tokens.weight": (50, 4),
    "norm.weight": (4,), "down.weight": (4, 4), "elsewhere.weight": (3,),
}  # fmt: skip


def test_held_tensors_are_cut_out_of_fused_ones_and_left_out_where_they_are_not_whole():
    model = Fused()
    found = dict(held_tensors(model, SHAPES))
    whole, vocabulary = model.qkv_proj.weight, model.embed_tokens.weight
    assert list(found) == ["q_proj.weight", "k_proj.weight", "v_proj.weight", "embed_tokens.weight", "norm.weight"]
    assert torch.equal(torch.cat([found[f"{part}_proj.weight"] for part in "qkv"]), whole)
    assert torch.equal(found["embed_tokens.weight"], vocabulary[:50])


def test_a_fused_tensor_whose_parts_do_not_fill_it_is_left_out():
    shapes = {name: shape for name, shape in SHAPES.items() if name != "v_proj.weight"}
    assert not any("_proj" in name for name, _ in held_tensors(Fused(), shapes))


@pytest.mark.parametrize(
    ("name", "prefix", "expected"),
    [
        ("model.norm.weight", None, "model.norm.weight"),
        ("model._checkpoint_wrapped_module.norm.weight", None, "model.norm.weight"),
        ("base_model.model.model.q_proj.base_layer.weight", "lora_", "model.q_proj.weight"),
        ("base_model.model.model.q_proj.lora_A.default.weight", "lora_", None),
        ("base_model.model.model.norm.original_module.weight", "lora_", None),
        ("base_model.model.model.norm.modules_to_save.default.weight", "lora_", "model.norm.weight"),
    ],
)
def test_a_tensor_has_the_name_under_which_trl_gives_it(name, prefix, expected):
    assert transfer_name(name, prefix) == expected


@pytest.mark.parametrize("kind", [{}, {"use_dora": True}, {"use_rslora": True, "lora_bias": True}])
def test_the_merged_adapter_has_the_bits_that_peft_merges_and_the_model_keeps_its_own(kind):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    inner = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
    model = get_peft_model(inner, LoraConfig(r=2, target_modules=["0"], init_lora_weights=False, **kind))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    own = {name: (tensor.clone(), unmerged) for name, tensor, unmerged in trainer_tensors(model)}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert sorted(own) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    assert torch.equal(own["0.weight"][1], before["base_model.model.0.base_layer.weight"])
    assert own["1.weight"][1] is None
    model.merge_adapter()
    merged = dict(model.named_parameters())
    assert torch.equal(own["0.weight"][0], merged["base_model.model.0.base_layer.weight"])
    assert torch.equal(own["0.bias"][0], merged["base_model.model.0.base_layer.bias"])


class Trainer:
    """As much of a TRL trainer as the account asks."""

    def __init__(self, model):
        self.model, self.state = model, SimpleNamespace(global_step=0)
        self.accelerator = SimpleNamespace(unwrap_model=lambda model: model)


class Engine:
    def __init__(self, model):
        runner = SimpleNamespace(get_model=lambda: model)
        executor = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
        config = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.bfloat16))
        self.llm_engine = SimpleNamespace(model_executor=executor, vllm_config=config)


@pytest.fixture
def session(tmp_path):
    manifest = Manifest(
        run_id="r", created_at="", created_by="", source="record", command=(), capture="logprobs", capture_fraction=1.0
    )
    with new_trace(tmp_path / "run", manifest, force=False) as folder:
        session = Session(Order(run=str(folder)))
        yield session
        session.close()


def rows_of(session):
    session.recorder.flush()
    query = "SELECT policy_version, tensor, trainer = given, trainer = held FROM engine_weights ORDER BY ALL"
    return connect(session.order.run).execute(query).fetchall()


def test_a_generator_of_weights_is_heard_as_it_is_read(session):
    model = Fused()
    account = EngineWeights(session)
    account.watch(Engine(model))
    trainer = Trainer(model.norm)
    account.hold(trainer)
    model.load_weights((name, parameter.data) for name, parameter in model.norm.named_parameters())
    account.tell(1)
    account.tell(1)
    assert [row[:3] for row in rows_of(session)] == [(0, "weight", True)]


def test_another_engine_of_the_same_class_is_not_heard(session):
    account = EngineWeights(session)
    kept, other = Fused(), Fused()
    account.watch(Engine(kept))
    account.hold(Trainer(kept.norm))
    other.load_weights([("weight", torch.zeros(4))])
    account.tell(1)
    assert [row[2] for row in rows_of(session)] == [None]


def test_a_sharded_trainer_s_own_are_those_that_trl_gathers(session, monkeypatch):
    monkeypatch.setattr("tim_trace.tracer.hooks.engine_weights.is_whole", lambda model: False)
    account = EngineWeights(session)
    model = Fused()
    account.watch(Engine(model))
    account.hold(Trainer(model.norm))
    for name, tensor in account.gathered([("norm.weight", torch.full((4,), 2.0))]):
        model.load_weights([(name, tensor)])
    account.tell(1)
    assert rows_of(session) == [(0, "norm.weight", True, True)]


def test_what_is_sent_to_a_server_is_held_against_the_trainer_s(session):
    account = EngineWeights(session)
    trainer = Trainer(torch.nn.LayerNorm(4))
    account.hold(trainer)
    sent = list(account.heard((name, tensor.data) for name, tensor in trainer.model.named_parameters()))
    account.tell(1)
    assert [name for name, _ in sent] == ["weight", "bias"]
    assert rows_of(session) == [(0, "bias", True, None), (0, "weight", True, None)]


def test_an_error_ends_the_account_and_not_the_recording(session, capsys):
    account = EngineWeights(session)
    account.hold(SimpleNamespace(state=SimpleNamespace(global_step=0)))
    account.hold(Trainer(torch.nn.LayerNorm(4)))
    assert not account.is_on
    assert session.is_recording
    assert "no longer recorded: the engine's weights (AttributeError" in capsys.readouterr().err
