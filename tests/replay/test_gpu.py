"""Replay and locate on a CUDA device. Run on a machine that has one: pytest -m gpu. Needs torch and transformers alone."""

import numpy as np
import pytest
import torch
from grouped import VOCAB, tiny_model
from tim_trace.analysis.views import connect
from tim_trace.replay.backends.kernels import KERNELS
from tim_trace.replay.engine import replay
from tim_trace.replay.locate.engine import locate
from tim_trace.tracer.recorder import Recorder
from tim_trace.tracer.rows import Forward

pytestmark = [
    pytest.mark.gpu,
    # The machine's releases of torch and transformers are not those that the warnings of other tests were read for.
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = "cuda"
ROWS, PROMPT, RESPONSE = 4, 6, 10


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """Two steps of a bfloat16 model of head size 64, scored on the device by a loop of transformers' own."""
    path = tmp_path_factory.mktemp("gpu") / "run"
    model = tiny_model(hidden_size=128, head_dim=64).to(DEVICE)
    for parameter in model.parameters():  # the rotary's frequencies stay in float32
        parameter.data = parameter.data.to(torch.bfloat16)
    draw = np.random.default_rng(0)
    with Recorder(path) as recorder:
        name = f"{type(model).__module__}.{type(model).__qualname__}"
        recorder.describe(model={"class": name, "config": model.config.to_dict()})
        recorder.add_contract("train", {"engine": "a loop", "model": {"dtypes": {"bfloat16": 1}, "attention": "sdpa"}})
        recorder.add_weights(0, model.state_dict())
        for step in (1, 2):
            ids_BW = torch.from_numpy(draw.integers(0, VOCAB, (2 * ROWS, PROMPT + RESPONSE))).to(DEVICE)
            batch = recorder.add_sequences(
                step=step, prompt_ids=ids_BW[:, :PROMPT], response_ids=ids_BW[:, PROMPT:], policy_version=0
            )
            logprobs = torch.cat([_score(model, rows) for rows in ids_BW.split(ROWS)])
            recorder.add_scores("train", batch, logprobs=logprobs, forward=_forward(2 * ROWS))
    return path


def _score(model, ids_BW):
    with torch.no_grad():
        logits_BTV = model(ids_BW, logits_to_keep=RESPONSE + 1).logits[:, :-1].float()
    return logits_BTV.gather(-1, ids_BW[:, PROMPT:, None]).squeeze(-1) - torch.logsumexp(logits_BTV, -1)


def _forward(number):
    place, none = np.arange(number), np.zeros(number, np.int32)
    return Forward(
        ids=place // ROWS, places=(place % ROWS).astype("i4"), rows=np.full(number, ROWS, np.int32),
        pad_left=none, pad_right=none,
    )  # fmt: skip


def distance(trace, name, other="train"):
    """The largest distance between two passes, and the share of equal tokens."""
    query = f"SELECT max(abs(d)), avg((d = 0)::INT), count(*) FROM pair('{name}', '{other}')"
    ((largest, equal, tokens),) = connect(trace).execute(query).fetchall()
    assert tokens == 2 * 2 * ROWS * RESPONSE
    return largest, equal


def test_a_replay_on_the_device_gives_the_recorded_bits(trace):
    replay(trace, force=True)
    assert distance(trace, "replay/as-recorded") == (0.0, 1.0)


@pytest.mark.parametrize("kernel", KERNELS)
def test_each_attention_kernel_gives_the_model_s_logprobs(trace, kernel):
    try:
        replay(trace, arm=[f"dtype=bf16,attention={kernel},name={kernel}"], force=True)
    except RuntimeError as error:
        pytest.skip(f"{kernel} is not available for this device and shape: {error}")
    largest, _ = distance(trace, f"replay/{kernel}")
    assert largest < 0.2, "a kernel is off by more than bfloat16 rounds in two layers"


@pytest.mark.parametrize(("dtype", "bound"), [("fp64", 0.2), ("fp32", 0.2), ("fp16", 0.2), ("tf32", 0.2)])
def test_each_dtype_gives_the_model_s_logprobs(trace, dtype, bound):
    replay(trace, arm=[f"dtype={dtype},name={dtype}"], force=True)
    assert distance(trace, f"replay/{dtype}")[0] < bound


def test_double_and_single_precision_agree_to_single_precision(trace):
    replay(trace, arm=["dtype=fp64,name=double", "dtype=fp32,name=single"], force=True)
    assert distance(trace, "replay/double", "replay/single")[0] < 1e-4


def test_the_exact_engine_gives_equal_bits_for_every_batch_size(trace):
    arms = [f"engine=exact,dtype=bf16,batch-size={size},name=exact-{size}" for size in (1, 3, 8)]
    replay(trace, arm=arms, force=True)
    assert distance(trace, "replay/exact-1", "replay/exact-3") == (0.0, 1.0)
    assert distance(trace, "replay/exact-1", "replay/exact-8") == (0.0, 1.0)
    assert distance(trace, "replay/exact-1")[0] < 0.2


def test_a_deterministic_arm_repeats_its_bits(trace):
    replay(
        trace, arm=["dtype=bf16,deterministic=true,name=first", "dtype=bf16,deterministic=true,name=second"], force=True
    )
    assert distance(trace, "replay/first", "replay/second") == (0.0, 1.0)


def test_locate_finds_nothing_but_rounding_between_bfloat16_and_double(trace):
    found = locate(trace, steps="1", arm="dtype=bf16", against="dtype=fp64", sequences="4")
    assert found.device == DEVICE
    assert found.first is None
    assert found.num_tokens == 4 * RESPONSE


def test_locate_names_a_planted_operator(trace):
    def plant(model):
        model.model.layers[1].mlp.act_fn = torch.nn.GELU()

    found = locate(trace, steps="1", arm="dtype=bf16", against="dtype=fp64", sequences="2", prepare=plant, patch="none")
    assert found.first is not None
    assert (found.first.side, found.first.layer) == ("a", 1)
