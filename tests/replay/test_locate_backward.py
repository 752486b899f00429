"""Where gradients part: a planted fault of a backward is named where it lies, and rounding is taken for nothing else."""

import copy

import numpy as np
import pytest
import torch
import transformers
from adapted import identity, with_adapters
from builders import tim_trace
from shared import rest_slow
from tim_trace.replay.locate import backward_bounds
from tim_trace.replay.locate.backward import locate_backward
from tim_trace.schemas.errors import CannotReplay, InvalidOption
from tim_trace.schemas.loss import Loss
from tim_trace.tracer.recorder import Recorder
from tim_trace.tracer.rows import Forward

VOCAB, ROWS = 60, 6
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": VOCAB,
    "tie_word_embeddings": False,
}  # fmt: skip
MODELS = {
    "llama": ("Llama", {"num_key_value_heads": 2}),
    "tied": ("Llama", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"num_key_value_heads": 2, "head_dim": 8}),
    "gemma2": ("Gemma2", {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 12}),
    "gpt_neox": ("GPTNeoX", {"eos_token_id": 1}),
}


def model_of(name):
    prefix, changes = MODELS[name]
    config = getattr(transformers, f"{prefix}Config")(**(SIZES | changes), attn_implementation="eager")
    torch.manual_seed(1)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 1.2 / parameter.shape[-1] ** 0.5)
            else:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def sequences():
    """Prompts, responses and advantages."""
    draw = np.random.default_rng(3)
    prompts = [draw.integers(2, VOCAB, 4) for _ in range(ROWS)]
    responses = [draw.integers(2, VOCAB, length) for length in draw.integers(8, 15, ROWS)]
    return prompts, responses, draw.normal(size=ROWS).astype("f4")


def record(folder, model, *, advantages=True, checkpoints=False, autocast=None):
    """A step of six sequences in forwards of three, padded on the right, with a clipped loss."""
    prompts, responses, advantage = sequences()
    number = np.arange(ROWS)
    lengths = np.array([len(ids) for ids in responses])
    most = np.array([lengths[place - place % 3 : place - place % 3 + 3].max() for place in number])
    with Recorder(folder) as recorder:
        recorder.describe(model=identity(model))
        contract = {"engine": "a loop", "model": {"dtypes": {"float32": 1}, "attention": "eager"}}
        if autocast:
            contract["torch"] = {"autocast_dtype": autocast}
        recorder.add_contract("train", contract | {"training_mode": True, "gradient_checkpointing": checkpoints})
        recorder.add_loss(Loss(denominator="current"))
        recorder.add_weights(0, model.state_dict())
        batch = recorder.add_sequences(
            step=1, prompt_ids=prompts, response_ids=responses, policy_version=0, group_ids=[f"g{n}" for n in number],
            seq_ids=[f"s{n}" for n in number], advantage=advantage if advantages else None,
        )  # fmt: skip
        forward = Forward(
            ids=number // 3, places=(number % 3).astype("i4"), rows=np.full(ROWS, 3, np.int32),
            pad_left=np.zeros(ROWS, "i4"), pad_right=(most - lengths).astype("i4"),
        )  # fmt: skip
        recorder.add_scores(
            "train", batch, logprobs=[np.full(len(ids), -1.0, np.float32) for ids in responses], forward=forward
        )
    return folder


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    made = {}

    def trace(name, **options):
        key = name, *options.items()
        if key not in made:
            made[key] = record(tmp_path_factory.mktemp(name) / "run", model_of(name), **options)
        return made[key]

    return trace


@pytest.mark.parametrize("against", ["dtype=fp64", "dtype=bf16", "attention=math", "batch-size=1"])
@pytest.mark.parametrize("name", rest_slow(MODELS))
def test_rounding_is_no_fault_of_a_backward(traces, name, against):
    if (name, against) == ("gemma2", "attention=math"):
        pytest.skip("leaves the soft cap out: test_a_kernel_without_the_soft_cap_is_named")
    found = locate_backward(traces(name), against=against, sequences="random:6")
    worst = max(found.operators, key=lambda each: each.ratio)
    assert found.first is None, found.first
    assert 0 < worst.ratio < 1
    assert found.norm_a > 0
    assert sum(each.share for each in found.parameters) == pytest.approx(1)


def more_scale(model):
    """What the adapter of one projection adds counts half as much again."""
    model.model.layers[1].self_attn.v_proj.scaling["default"] *= 1.5


@pytest.mark.parametrize(
    ("prepare", "against"),
    [(None, "dtype=bf16"), (more_scale, "dtype=fp64"), pytest.param(more_scale, "dtype=bf16", marks=pytest.mark.slow)],
)
def test_gradients_of_adapters_are_judged(tmp_path, prepare, against):
    run = record(tmp_path / "run", with_adapters(model_of("llama")))
    found = locate_backward(run, against=against, sequences="random:6", prepare_against=prepare)
    assert {each.kind for each in found.parameters} >= {"default", "base_layer"}
    if prepare is None:
        assert found.first is None
        assert 0 < max(each.ratio for each in found.operators) < 1
    else:
        operator = "model.layers.1.self_attn.v_proj.lora_B.default.output"
        assert (found.first.side, found.first.operator, found.first.what) == ("b", operator, "between")


def test_the_backward_of_dora_is_refused(tmp_path):
    run = record(tmp_path / "run", with_adapters(model_of("llama"), use_dora=True))
    with pytest.raises(CannotReplay, match="DoRA"):
        locate_backward(run)


def test_a_kernel_without_the_soft_cap_is_named(traces):
    found = locate_backward(traces("gemma2"), against="attention=math", sequences="random:6")
    assert (found.first.side, found.first.operator) == ("b", "model.layers.1.self_attn.attention")


@pytest.mark.slow
def test_autocast_is_no_fault(tmp_path):
    model = model_of("llama")
    trace = record(tmp_path / "run", model, autocast="bfloat16")
    found = locate_backward(trace, against="dtype=fp32", sequences="random:6")
    assert found.first is None, found.first
    assert found.difference > 1e-4


def scaled_gradient(module, factor):
    """A module's output with a backward that is scaled."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(context, value):
            return value.clone()

        @staticmethod
        def backward(context, gradient):
            return gradient * factor

    original = module.forward
    module.forward = lambda hidden: Scaled.apply(original(hidden))


def wrong_scale(model):
    scaled_gradient(model.model.layers[1].mlp.up_proj, 1.01)


def detached_branch(model):
    original = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = lambda hidden: original(hidden).detach()


def frozen_parameter(model):
    model.model.layers[1].self_attn.v_proj.weight.requires_grad_(False)


def norm_without_gradient(model):
    module = model.model.layers[1].self_attn.q_norm
    module.forward = torch.no_grad()(module.forward)


def narrow_gradient(model):
    """The gradient goes through bfloat16 in a model of float32."""

    class Narrow(torch.autograd.Function):
        @staticmethod
        def forward(context, value):
            return value.clone()

        @staticmethod
        def backward(context, gradient):
            return gradient.bfloat16().float()

    module = model.model.layers[0].mlp.gate_proj
    original = module.forward
    module.forward = lambda hidden: original(Narrow.apply(hidden))


def narrow_residual(model):
    """A layer's gradient goes through bfloat16 where the residual stream comes in."""
    layer = model.model.layers[1]
    original = layer.forward

    def forward(hidden_states, **more):
        out = original(hidden_states, **more)
        out.register_hook(lambda gradient: gradient.bfloat16().float())
        return out

    layer.forward = forward


def other_dropout(model):
    """A checkpoint that draws another dropout when it runs again."""
    module = model.model.layers[1].mlp.down_proj
    original, runs = module.forward, []

    def dropped(hidden):
        runs.append(1)
        generator = torch.Generator().manual_seed(len(runs))
        return original(hidden * (torch.rand(hidden.shape, generator=generator) > 0.1))

    def forward(hidden):
        return torch.utils.checkpoint.checkpoint(dropped, hidden, use_reentrant=False)

    module.forward = forward


def weight_without_gradient_of_one_token(model):
    """A custom linear layer whose weight's gradient leaves out the last row."""

    class Leaky(torch.autograd.Function):
        @staticmethod
        def forward(context, value, weight):
            context.save_for_backward(value, weight)
            return value @ weight.T

        @staticmethod
        def backward(context, gradient):
            value, weight = context.saved_tensors
            kept = gradient[:-1].flatten(0, 1)
            return gradient @ weight, kept.T @ value[:-1].flatten(0, 1)

    module = model.model.layers[0].self_attn.o_proj
    module.forward = lambda hidden: Leaky.apply(hidden, module.weight)


PLANTED = [
    ("llama", wrong_scale, "layers.1.mlp.up_proj", "parameter"),
    ("llama", detached_branch, "layers.0.mlp.down_proj.output", "between"),
    ("llama", frozen_parameter, "layers.1.self_attn.v_proj", "parameter"),
    ("qwen3", norm_without_gradient, "layers.1.self_attn.q_norm", "detached"),
    ("llama", narrow_gradient, "layers.0.mlp.gate_proj", "input"),
    ("llama", narrow_residual, "layers.1.mlp.down_proj.output", "between"),
    ("llama", other_dropout, "layers.1.mlp.down_proj", "input"),
    ("llama", weight_without_gradient_of_one_token, "layers.0.self_attn.o_proj", "parameter"),
]


@pytest.mark.parametrize(
    ("name", "plant", "operator", "what"),
    rest_slow(PLANTED, 4),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_planted_fault_of_a_backward_is_named_where_it_lies(traces, name, plant, operator, what):
    found = locate_backward(traces(name), against="dtype=fp32", sequences="random:6", prepare_against=plant)
    assert found.first is not None
    assert (found.first.side, found.first.what) == ("b", what)
    assert found.first.operator.endswith(operator)


def test_gradient_checkpoints_change_nothing(traces):
    found, plain = (
        locate_backward(traces("llama", checkpoints=checkpoints), against="dtype=bf16", sequences="random:6")
        for checkpoints in (True, False)
    )
    assert found.first is None
    assert found.parameters == plain.parameters


def test_the_parameters_differences_are_those_of_the_gradients_by_hand(traces):
    """The loss with every ratio 1 is minus the mean of advantage times logprob over the tokens of the step."""
    found = locate_backward(traces("llama"), sequences="random:6")
    rows = list(zip(*sequences(), strict=True))
    norms = {}
    for dtype in (torch.float32, torch.float64):
        model = model_of("llama").to(dtype)
        total = sum(len(ids) for _, ids, _ in rows)
        loss = 0.0
        for prompt, ids, advantage in rows:
            tokens = torch.tensor([*prompt, *ids])
            logprobs = model(tokens[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            loss = loss - float(advantage) * logprobs.gather(-1, tokens[len(prompt) :, None]).sum() / total
        loss.backward()
        norms[dtype] = {name: float(value.grad.norm()) for name, value in model.named_parameters()}
    for each in found.parameters:
        assert each.norm_a == pytest.approx(norms[torch.float32][each.parameter], rel=1e-4)
        assert each.norm_b == pytest.approx(norms[torch.float64][each.parameter], rel=1e-6)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"arm": "engine=vllm"}, InvalidOption, "has no backward"),
        ({"against": "padding=packed"}, CannotReplay, "use padding=left"),
        ({"steps": "7"}, InvalidOption, "matches no recorded step"),
        ({"sequences": "nobody"}, InvalidOption, "is not a scored sequence"),
    ],
)
def test_what_cannot_be_done_is_said(traces, options, error, message):
    with pytest.raises(error, match=message):
        locate_backward(traces("llama"), **options)


def test_a_mixture_of_experts_is_refused(tmp_path):
    config = transformers.Qwen3MoeConfig(
        **SIZES, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    )
    trace = record(tmp_path / "run", transformers.Qwen3MoeForCausalLM(config))
    with pytest.raises(CannotReplay, match="mixture of experts"):
        locate_backward(trace, sequences="random:6")


def test_a_trace_without_advantages_says_how_to_record_them(traces):
    with pytest.raises(CannotReplay, match="record them with"):
        locate_backward(traces("llama", advantages=False))


def test_the_command_says_where_and_refuses_what_makes_no_sense(traces):
    command = ("locate", traces("gemma2"), "--backward", "--against", "attention=math")
    ended = tim_trace(*command)
    assert ended.code == 1, ended.stderr
    assert ended.stdout.startswith(
        "The first divergence in the backward pass is model.layers.1.self_attn.attention in b"
    )
    refused = tim_trace(*command, "--patch", "kinds")
    assert refused.code == 2
    assert "--patch: does not apply with --backward" in refused.stderr


MODULES = {
    "linear": lambda width: torch.nn.Linear(width, 24),
    "layer_norm": torch.nn.LayerNorm,
    "silu": lambda width: torch.nn.SiLU(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [4, 300])
@pytest.mark.parametrize("kind", list(MODULES))
def test_bounds_hold_for_random_backwards_and_are_not_empty(kind, width, dtype):
    torch.manual_seed(width)
    module = MODULES[kind](width).to(dtype)
    exact = copy.deepcopy(module).double()
    x = torch.randn(3, 20, width).to(dtype).requires_grad_()
    x_exact = x.detach().double().requires_grad_()
    given = module(x)
    incoming = torch.randn_like(given)
    given.backward(incoming)
    exact(x_exact).backward(incoming.double())
    rounding = backward_bounds.BackwardRounding.of(x, given, x.grad)
    with torch.no_grad():
        bound = backward_bounds.of_input(exact, x_exact, incoming.double(), x_exact.grad, rounding)
        assert 1e-4 < float(((x.grad.double() - x_exact.grad).abs() / bound).max()) < 1
        for name, parameter in exact.named_parameters():
            found = module.get_parameter(name).grad.double()
            bound = backward_bounds.of_parameter(exact, name, x_exact, incoming.double(), parameter.grad, rounding)
            bound = bound + 3 * rounding.out * parameter.grad.abs()
            assert 1e-4 < float(((found - parameter.grad).abs() / bound).max()) < 1
