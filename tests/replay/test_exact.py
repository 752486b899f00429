"""The exact engine: bits are compared as bits, and the reasons for them are tested one by one."""

import math
import shutil
from collections import Counter
from functools import cache

import numpy as np
import pytest
import torch
from builders import tim_trace
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import train
from shared import rest_slow
from tim_trace.analysis.views import connect
from tim_trace.replay.arms import parse_arm
from tim_trace.replay.backends.double import KeepDouble
from tim_trace.replay.backends.exact import attention, layers
from tim_trace.replay.backends.exact.model import ExactModel, check
from tim_trace.replay.backends.exact.scorer import ExactScorer
from tim_trace.replay.backends.head import Head
from tim_trace.replay.backends.transformers import TransformersScorer
from tim_trace.replay.batching import forwards, responses
from tim_trace.replay.engine import replay
from tim_trace.replay.recorded import RecordedRow
from tim_trace.schemas.errors import CannotReplay, InvalidOption
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCAB = 61
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "pad_token_id": 0,
}  # fmt: skip
MODELS = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=True)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True)),
    "qwen3-moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SHAPE, moe_intermediate_size=24, num_experts=8, num_experts_per_tok=3, norm_topk_prob=True,
                       mlp_only_layers=[1])
    ),
    "qwen2, windowed": lambda: Qwen2ForCausalLM(
        Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=5, max_window_layers=1)
    ),
    "llama3's rotary": lambda: LlamaForCausalLM(
        LlamaConfig(**SHAPE, rope_parameters={
            "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
        })
    ),
}  # fmt: skip
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


@pytest.fixture(autouse=True)
def one_thread():
    """Threads that wait for each other take longer than the work of these models."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def model(kind, dtype="fp32", scale=1.0):
    """A model whose attention and experts are far from uniform."""
    torch.manual_seed(0)
    made = MODELS[kind]()
    with torch.no_grad():
        for name, weight in made.named_parameters():
            spread = 1.5 / math.sqrt(weight.shape[-1]) if weight.dim() > 1 else 0.3
            weight.copy_(torch.randn_like(weight) * spread * scale + ("norm" in name))
    made.config._attn_implementation = "eager"
    made.config._experts_implementation = "eager"
    return made.to(DTYPES[dtype]).eval()


@cache
def exact(kind, dtype="fp32"):
    return ExactModel(model(kind, dtype))


def row(name, prompt, response, pad_left=0, pad_right=0):
    return RecordedRow(
        seq_id=name, prompt_ids=np.array(prompt, np.int32), response_ids=np.array(response, np.int32),
        logprobs=np.zeros(len(response), np.float32), scored=np.ones(len(response), bool), policy_version=0,
        contract="", writer="w", forward_id=0, forward_row=int(name), pad_left=pad_left, pad_right=pad_right,
    )  # fmt: skip


def tokens(longest):
    return st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=longest)


ROWS = st.lists(st.tuples(tokens(9), tokens(9), st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=6).map(
    lambda parts: [row(str(index), *part) for index, part in enumerate(parts)]
)
SHAPES = st.one_of(
    st.tuples(st.sampled_from(["left", "right"]), st.sampled_from([None, 1, 2, 5])), st.just(("packed", None))
)


def score(scorer, rows, batch_size=1, padding="left"):
    """Each row's bits, by name."""
    found = {}
    for batch in forwards(rows, 0, batch_size=batch_size, padding=padding):
        values = scorer(batch).numpy()
        bits = values.view({4: np.int32, 8: np.int64}[values.itemsize])
        found |= {row.seq_id: part.tolist() for row, part in zip(batch.rows, responses(batch, bits), strict=True)}
    return found


def some_rows(count=8, seed=0):
    random = np.random.default_rng(seed)
    return [
        row(str(index), *(random.integers(1, VOCAB, random.integers(1, 20)) for _ in range(2)))
        for index in range(count)
    ]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    rest_slow(
        [
            *((kind, dtype) for kind in ("qwen3", "llama", "qwen3-moe") for dtype in ("fp32", "bf16")),
            ("qwen3-moe", "fp16"),
            ("qwen3", "fp64"),
            ("qwen2, windowed", "fp32"),
            ("llama3's rotary", "bf16"),
        ]
    ),
)
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_a_token_s_bits_depend_on_nothing_but_what_came_before_it(kind, dtype, data):
    """Batch, padding, packing, chunks, order and neighbours change no bit."""
    rows = data.draw(ROWS)
    alone = score(ExactScorer(exact(kind, dtype)), rows)
    padding, cached = data.draw(SHAPES)
    together = data.draw(st.permutations(rows))
    found = score(
        ExactScorer(exact(kind, dtype), cached_tokens=cached), together, data.draw(st.integers(1, 6)), padding
    )
    assert found == alone


@pytest.mark.parametrize("kind", rest_slow(["qwen3", "llama", "qwen3-moe"]))
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_plain_transformers_does_not_give_equal_bits(kind, dtype):
    """The control of the test above: on a few rows the same comparison fails for the plain forward."""
    rows = some_rows()
    alone = score(TransformersScorer(model(kind, dtype), Head()), rows)
    assert score(TransformersScorer(model(kind, dtype), Head()), rows, 8) != alone
    if dtype == "fp32":
        assert score(TransformersScorer(model(kind, dtype), Head(), cached_tokens=1), rows) != alone
    ours = score(ExactScorer(exact(kind, dtype)), rows)
    assert score(ExactScorer(exact(kind, dtype)), rows, 8) == ours
    assert score(ExactScorer(exact(kind, dtype), cached_tokens=1), rows) == ours


@pytest.mark.parametrize("kind", list(MODELS))
def test_it_lies_closer_to_double_precision_than_transformers(kind):
    rows = some_rows()
    (batch,) = forwards(rows, 0, batch_size=8)
    double = MODELS[kind]()
    double.load_state_dict(model(kind).state_dict())
    double = double.double().eval()
    double.config._attn_implementation = double.config._experts_implementation = "eager"
    with KeepDouble():
        truth = TransformersScorer(double, Head())(batch)
    ours = (ExactScorer(exact(kind))(batch).double() - truth).abs()
    plain = (TransformersScorer(model(kind), Head())(batch).double() - truth).abs()
    assert ours.mean() < plain.mean()
    assert ours.max() < 1e-5


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_it_rounds_as_coarsely_as_the_dtype_asks(dtype):
    rows = some_rows()
    (batch,) = forwards(rows, 0, batch_size=8)
    # The same, rounded, weights in float32: what is left are the activations.
    held = MODELS["qwen3"]()
    held.load_state_dict(model("qwen3", dtype).float().state_dict())
    model("qwen3", dtype).to(DTYPES[dtype])
    fine = ExactScorer(ExactModel(held.eval()))(batch)
    ours = (ExactScorer(exact("qwen3", dtype))(batch) - fine).abs().mean()
    plain = (TransformersScorer(model("qwen3", dtype), Head())(batch) - fine).abs().mean()
    assert plain / 2 < ours < plain * 2


def test_the_number_of_threads_changes_no_bit():
    rows = some_rows(2)
    one = score(ExactScorer(exact("qwen3-moe")), rows, 2)
    torch.set_num_threads(2)
    assert score(ExactScorer(exact("qwen3-moe")), rows, 2) == one


def test_blocks_and_chunks_change_no_bit(monkeypatch):
    rows = some_rows()
    whole = score(ExactScorer(exact("qwen3-moe")), rows, 8)
    for scores in (1, 1 << 10, attention.BLOCK["cuda"]):
        monkeypatch.setitem(attention.BLOCK, "cpu", scores)
        monkeypatch.setattr(layers, "ROWS", 3)
        monkeypatch.setattr(layers, "CHUNK_BYTES", 1)
        assert score(ExactScorer(ExactModel(model("qwen3-moe"))), rows, 8) == whole


class Questions(TorchDispatchMode):
    """Counts what makes a program wait for a GPU: a number that is read, or a shape that depends on numbers."""

    ASKING = (
        "_local_scalar_dense",
        "nonzero",
        "_unique2",
        "unique_dim",
        "masked_select",
        "is_nonzero",
        "equal",
        "where.self",
    )

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.partition(".")[0]
        if name in self.ASKING or (
            name == "index" and any(part is not None and part.dtype == torch.bool for part in args[1])
        ):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-moe", "qwen2, windowed"])
@pytest.mark.parametrize("scores", [1, 1 << 18])
def test_a_forward_asks_the_device_once(monkeypatch, kind, scores):
    """What layers of a kind see is read at its start, and in a mixture of experts which of them work, a layer."""
    monkeypatch.setitem(attention.BLOCK, "cpu", scores)
    lists, ours, to_list = [], ExactModel(model(kind)), torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: lists.append(tensor.shape) or to_list(tensor))
    ours.prepare()
    (batch,) = forwards(some_rows(3), 0, batch_size=3)
    with Questions() as questions:
        ExactScorer(ours)(batch)
    mixtures = 1 if kind == "qwen3-moe" else 0
    assert len(lists) == 1 + mixtures
    assert questions.counts.total() == 0


def test_other_weights_are_cut_anew():
    held = MODELS["qwen3"]().eval()
    ours, rows = ExactModel(held), some_rows(2)
    before = score(ExactScorer(ours), rows)
    with torch.no_grad():
        held.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    ours.forget()
    after = score(ExactScorer(ours), rows)
    assert after != before
    assert after == score(ExactScorer(ExactModel(held)), rows)


ELEMENTWISE = {
    "add", "add_", "sub", "sub_", "rsub", "mul", "mul_", "div", "sqrt", "round", "round_", "neg", "clamp", "maximum",
    "masked_fill", "masked_fill_", "where", "bitwise_and", "bitwise_and_", "bitwise_or", "bitwise_not",
    "__lshift__", "__rshift__", "__and__", "__or__", "lt", "le", "gt", "ge", "eq",
}  # fmt: skip
MOVING = {
    "_to_copy", "new_zeros", "view", "_unsafe_view", "unsqueeze", "squeeze", "slice", "select", "transpose", "expand", "index",
    "index_put", "index_put_", "copy_", "cat", "clone", "empty_like", "full", "full_like", "zeros", "zeros_like",
    "arange", "detach", "split", "gather", "nonzero", "amax", "aminmax", "any", "sort", "_unique2", "unique_dim",
    "unbind", "lift_fresh", "_local_scalar_dense", "t", "permute", "alias", "empty", "zero_", "fill_", "mT",
    "argmax", "flip", "stack", "searchsorted", "floor_divide",
}  # fmt: skip
SUMS = {"mm", "bmm", "sum"}


class Watch(TorchDispatchMode):
    """Lets through what IEEE 754 fixes for each element, what only moves or compares, and sums of small integers."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.partition(".")[0]
        self.seen.add(name)
        if name in SUMS:
            operands = args[:2] if name != "sum" else args[:1]
            assert all(value.dtype == torch.float64 and torch.equal(value, value.round()) for value in operands), name
            sizes = [value.abs() for value in operands]
            largest = sizes[0] @ sizes[1] if name != "sum" else sizes[0].sum(dim=args[1])
            assert not largest.numel() or largest.max() <= 2**53, name
        else:
            assert name in ELEMENTWISE | MOVING, name
            assert not (kwargs or {}).get("alpha"), name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("kind", "dtype"), [("qwen3-moe", "bf16"), ("llama", "fp32"), ("qwen3", "fp64")])
def test_every_sum_is_one_of_integers_that_float64_holds(kind, dtype):
    """Nothing else can depend on order: all other operations work element by element, and are rounded as IEEE says."""
    rows = some_rows(3)
    ours = ExactModel(model(kind, dtype))
    with Watch() as watch:
        for cached in (None, 2):
            for batch in forwards(rows, 0, batch_size=3):
                ExactScorer(ours, temperature=0.7, cached_tokens=cached)(batch)
    assert watch.seen >= SUMS


def test_an_overflow_is_nan_where_it_is_seen_and_nowhere_else():
    """In float16 the values of token 7 overflow: what came before it, and its neighbours, keep their bits."""
    held = MODELS["llama"]().half().eval()
    with torch.no_grad():
        held.model.embed_tokens.weight[:, 0] = 0.0
        held.model.embed_tokens.weight[7] = torch.eye(48)[0] * 60000.0
        held.model.layers[0].self_attn.v_proj.weight[:, 0] = 60000.0
    ours = ExactModel(held)
    rows = [row("0", [1, 2, 3], [4, 7, 5, 6]), row("1", [9], [8, 6, 3, 2])]
    alone = score(ExactScorer(ours), rows)
    assert [np.isnan(np.array(bits, np.int32).view(np.float32)).tolist() for bits in alone.values()] == [
        [False, False, True, True],
        [False] * 4,
    ]
    assert score(ExactScorer(ours, cached_tokens=1), rows, 2) == alone
    assert score(ExactScorer(ours), rows, 2, "packed") == alone


# What it refuses.


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("Gemma2ForCausalLM", {}, "cannot run Gemma2ForCausalLM, only LlamaForCausalLM, .*; use engine='hf'"),
        ("LlamaForCausalLM", {"hidden_act": "gelu"}, "activation 'gelu' is not supported"),
        ("Qwen3ForCausalLM", {"rope_parameters": {"rope_type": "dynamic"}}, "rotary embedding 'dynamic'"),
        ("Qwen2ForCausalLM", {"rope_scaling": {"type": "longrope"}}, "rotary embedding 'longrope'"),
    ],
)
def test_a_model_that_it_cannot_run_is_refused(name, config, message):
    with pytest.raises(CannotReplay, match=message):
        check({"class": f"transformers.models.x.{name}", "config": config})


@pytest.mark.parametrize("change", ["attention=eager", "logits-dtype=fp32", "prefix-caching=on", "top-p=0.9", "top-k=2",
                                    "deterministic", "compile", "mode=decode,kv-dtype=fp8"])  # fmt: skip
def test_a_setting_that_it_lacks_is_refused(change):
    with pytest.raises(
        InvalidOption, match="engine exact does not support this option; with engine='exact' use dtype, quant"
    ):
        parse_arm(f"engine=exact,{change}")


# Replaying a recording.

ARMS = [
    "engine=exact", "engine=exact,mode=decode,batch-size=1", "engine=exact,padding=packed",
    "engine=exact,mode=chunked:3,padding=right,batch-size=5", "engine=exact,threads=1,dtype=fp32",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.engine
def test_two_exact_replays_of_a_recording_have_equal_bits(tmp_path):
    trace = tmp_path / "run"
    shutil.copytree(train(capture="logprobs").trace, trace)
    results = replay(trace, arm=ARMS)
    assert all(result.identity_held for result in results)
    passes = [name for (name,) in rows_of(trace, "SELECT DISTINCT pass FROM scores WHERE pass LIKE 'replay/exact%'")]
    assert len(passes) == len(ARMS)
    for other in passes:
        ((tokens, wrong, distance),) = rows_of(
            trace,
            f"""SELECT count(*), count(*) FILTER (WHERE logprob_a IS DISTINCT FROM logprob_b), max(abs(d))
            FROM pair('replay/exact', '{other}')""",
        )
        assert (wrong, distance) == (0, 0.0), other
        assert tokens == rows_of(trace, "SELECT count(*) FROM tokens")[0][0] > 100
    exact = [result for result in results if result.arm == "exact"]
    assert len(exact) == 3
    assert all(0 < result.max_abs_d < 1e-5 for result in exact)


@pytest.mark.slow
@pytest.mark.engine
def test_the_contract_says_what_scored(tmp_path):
    trace = tmp_path / "run"
    shutil.copytree(train(capture="logprobs").trace, trace)
    done = tim_trace("replay", trace, "--steps", "2", "--engine", "exact", "--dtype", "bf16", "--json")
    assert [line["arm"] for line in done.json()] == ["as-recorded", "exact+bf16"]
    query = """SELECT contract_json ->> '$.engine', contract_json ->> '$.scoring_function',
        contract_json ->> '$.model.attention', contract_json ->> '$.model.built_in'
        FROM passes WHERE pass = 'replay/exact+bf16'"""
    assert rows_of(trace, query) == [("exact", ExactScorer.name, "exact", "bfloat16")]


@pytest.mark.slow
@pytest.mark.engine
def test_a_recording_under_autocast_needs_a_dtype(tmp_path):
    trace = tmp_path / "run"
    shutil.copytree(train(capture="logprobs", config={"bf16": True}).trace, trace)
    with pytest.raises(CannotReplay, match=r"used autocast to torch.bfloat16 .* add dtype='bf16', fp16, fp32 or fp64"):
        replay(trace, engine="exact")
    assert not (trace / "passes" / "replay").exists()


def rows_of(trace, query):
    return connect(trace).execute(query).fetchall()
