"""Which rows go through the model together: bounds of tokens."""

import numpy as np
import pytest
from grouped import VOCAB, record_groups, tiny_model
from hypothesis import given
from hypothesis import strategies as st
from tim_trace.analysis.views import connect
from tim_trace.replay.arms import Arm
from tim_trace.replay.batching import forwards
from tim_trace.replay.engine import replay
from tim_trace.replay.hf_scorer import HfScorer
from tim_trace.replay.recorded import RecordedRow, RecordedRun
from tim_trace.schemas.errors import CannotReplay, InvalidOption
from tim_trace.tracer.weights.checkpoints import open_weights

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return record_groups(tmp_path_factory.mktemp("grouped") / "run")


def row(number, prompt, length, seed=0):
    draw = np.random.default_rng([seed, number])
    return RecordedRow(
        seq_id=f"{number}", prompt_ids=np.asarray(prompt, np.int32), response_ids=draw.integers(1, VOCAB, length).astype("i4"),
        logprobs=np.zeros(length, np.float32), scored=np.ones(length, bool), policy_version=0, contract="", writer="w",
        forward_id=number // 4, forward_row=number % 4, pad_left=3, pad_right=2,
    )  # fmt: skip


row_lists = st.lists(
    st.tuples(st.lists(st.integers(1, 3), min_size=1, max_size=6), st.integers(0, 9)), min_size=1, max_size=12
).map(lambda parts: [row(number, *part) for number, part in enumerate(parts)])


@given(row_lists, st.integers(1, 60), st.sampled_from(["left", "right", "packed"]))
def test_no_forward_exceeds_its_tokens_and_no_row_is_lost(rows, most, padding):
    batches = forwards(rows, 0, batch_tokens=most, padding=padding)
    for batch in batches:
        cells = batch.tokens_BW.size
        assert cells <= most or len(batch.rows) == 1
    assert sorted(row.seq_id for batch in batches for row in batch.rows) == sorted(row.seq_id for row in rows)


@given(row_lists, st.integers(1, 60), st.sampled_from(["left", "right", "packed"]))
def test_every_token_lies_where_the_batch_says(rows, most, padding):
    for batch in forwards(rows, 0, batch_tokens=most, padding=padding):
        ids = batch.ids_BW.ravel()
        whole = np.concatenate([part for row in batch.rows for part in (row.prompt_ids, row.response_ids)])
        before = np.concatenate(
            [np.r_[row.prompt_ids, row.response_ids][len(row.prompt_ids) - 1 : -1] for row in batch.rows]
        )
        assert ids[batch.places_N].tolist() == whole.tolist()
        assert ids[batch.scored_N].tolist() == np.concatenate([row.response_ids for row in batch.rows]).tolist()
        assert ids[batch.before_N].tolist() == before.tolist()


def scored(run, changes):
    """Sequence -> the double precision logprobs of one step under an arm, and how many tokens went through the model."""
    recorded = run.step(1)
    contract = run.train_contract(recorded[0].contract)
    scorer = HfScorer(run, Arm(dtype="fp64", **changes), contract, "cpu")
    model = scorer.build()
    scorer.put(model, open_weights(run.store).load(recorded[0].policy_version))
    scorer.attach(model)
    result = scorer.score(recorded)
    by_name = {row.seq_id: values for row, values in zip(result.rows, result.logprobs, strict=True)}
    return by_name, sum(batch.tokens_BW.size for batch in result.batches)


def furthest(one, other):
    return max(float(np.abs(one[name] - other[name]).max(initial=0)) for name in other)


@pytest.mark.parametrize(
    "changes",
    [
        {"batch_tokens": 96},
        {"batch_tokens": 96, "padding": "left"},
        {"batch_tokens": 96, "mode": "decode"},
        {"batch_tokens": 96, "padding": "packed"},
        {"padding": "packed", "batch_size": 3},
        {"padding": "packed", "attention": "math"},
    ],
    ids=str,
)
def test_a_batch_changes_nothing_but_rounding(trace, changes):
    run = RecordedRun(trace)
    _, tokens = scored(run, {})
    alone, _ = scored(run, {"batch_size": 1})
    found, fewer = scored(run, changes)
    assert found.keys() == alone.keys()
    assert all(values.dtype == np.float64 for values in found.values())
    # Padding before a prompt moves its positions, whose angles transformers computes in float32.
    is_moved = changes.get("padding") == "left" or "mode" in changes
    assert furthest(found, alone) < (1e-7 if is_moved else 1e-12)
    assert fewer < tokens


def llama(**changes):
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES | changes)).eval()


def mixture(**changes):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES | experts | changes)).eval()


SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "dtype": "float32",
}  # fmt: skip


@pytest.mark.parametrize("make", [llama, mixture])
def test_packed_rows_give_what_each_row_gives_alone_in_other_models(make, tmp_path):
    run = RecordedRun(record_groups(tmp_path / "run", make(), steps=2))
    assert furthest(scored(run, {"padding": "packed"})[0], scored(run, {"batch_size": 1})[0]) < 1e-12


def test_packed_rows_of_a_model_with_adapters_give_what_each_row_gives_alone(tmp_path):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    run = RecordedRun(record_groups(tmp_path / "run", model, steps=2))
    assert furthest(scored(run, {"padding": "packed"})[0], scored(run, {"batch_size": 1})[0]) < 1e-12


def test_a_sliding_window_is_refused_in_a_line(tmp_path):
    layers = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    trace = record_groups(tmp_path / "run", tiny_model(**layers), steps=1)
    with pytest.raises(CannotReplay, match=r"padding=packed is not possible .* sliding_attention"):
        replay(trace, padding="packed")
    replay(trace, batch_tokens=64)


def forwards_of(trace, name):
    query = f"SELECT step, seq_id, forward_rows, logprobs FROM scores WHERE pass = 'replay/{name}' ORDER BY ALL"
    return connect(trace).execute(query).fetchall()


@pytest.mark.slow
def test_steps_whose_sequences_have_the_same_names_stay_apart(tmp_path):
    """Each step's logprobs are its own, with names that come again in every step."""
    trace = record_groups(tmp_path / "run", steps=2, name=lambda step, place: f"s{place}")
    replay(trace, arm=["batch-tokens=4096", "batch-size=1"])
    found, wanted = (forwards_of(trace, name) for name in ("batch-tokens-4096", "batch-size-1"))
    assert len(found) == len(wanted) == 48
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one[3], other[3], rtol=0, atol=1e-5)


def test_the_contract_names_the_shape_and_the_pass_is_named_for_it(trace, tmp_path):
    trace = record_groups(tmp_path / "run", steps=1)
    replay(trace, arm=["batch-tokens=64", "padding=packed"])
    query = """SELECT pass, contract_json ->> '$.rows_a_forward', contract_json ->> '$.prompt_padding_side', contract_json ->> '$.arm'
               FROM passes WHERE pass LIKE 'replay/%' ORDER BY pass"""
    found = connect(trace).execute(query).fetchall()
    assert found == [
        ("replay/as-recorded", None, "left", "{}"),
        ("replay/batch-tokens-64", "up to 64 tokens", "right", '{"batch_tokens":64}'),
        ("replay/padding-packed", None, "packed", '{"padding":"packed"}'),
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_tokens": 0}, "got 0; pass 1 or more"),
        (
            {"batch_tokens": 64, "batch_size": 2},
            "64 cannot be combined with batch-size 2: both options limit the size of a forward pass; drop one",
        ),
        (
            {"padding": "packed", "mode": "decode"},
            "padding: packed cannot be combined with mode decode: .*; use mode='prefill'",
        ),
        (
            {"padding": "packed", "attention": "eager"},
            "attention eager: this attention kernel cannot separate packed rows; use attention='math', flash",
        ),
        (
            {"batch_tokens": 64, "engine": "vllm", "mode": "chunked:8"},
            "mode chunked:8: chunked mode already sets vLLM's token limit; use mode='prefill', decode",
        ),
    ],
)
def test_what_excludes_each_other_is_refused(changes, message):
    with pytest.raises(InvalidOption, match=message):
        Arm(**changes)
