"""The head against numbers worked by hand and against a plain log_softmax."""

import math
from types import SimpleNamespace

import pytest
import torch
from tim_trace.replay.backends import head as heads
from tim_trace.replay.backends.double import KeepDouble
from tim_trace.replay.backends.head import Head, cut

# Probabilities 0.5, 0.3, 0.15, 0.05.
LOGITS = torch.log(torch.tensor([[0.15, 0.5, 0.05, 0.3]], dtype=torch.float64))


def make_model(dtype=torch.float32, vocab=50, hidden=8, **config):
    linear = torch.nn.Linear(hidden, vocab, bias=False, dtype=dtype)
    text = SimpleNamespace(**config)
    return SimpleNamespace(
        get_output_embeddings=lambda: linear, config=SimpleNamespace(get_text_config=lambda: text)
    ), linear


def kept(logits):
    return [index for index, value in enumerate(logits[0].tolist()) if value > -math.inf]


def test_top_k_keeps_the_most_probable():
    assert kept(cut(LOGITS, 2, None)) == [1, 3]


@pytest.mark.parametrize(("mass", "tokens"), [(0.4, [1]), (0.79, [1, 3]), (0.81, [0, 1, 3]), (1.0, [0, 1, 2, 3])])
def test_top_p_keeps_the_smallest_set_of_that_mass(mass, tokens):
    assert kept(cut(LOGITS, None, mass)) == tokens


def test_top_k_comes_before_top_p():
    # Of the two that top-k leaves, the first holds 0.5 / 0.8 = 0.625 of the mass.
    assert kept(cut(LOGITS, 2, 0.6)) == [1]
    assert kept(cut(LOGITS, None, 0.6)) == [1, 3]


def test_a_token_that_was_cut_has_no_probability():
    model, linear = make_model(torch.float64)
    hidden, ids = torch.randn(50, 8, dtype=torch.float64), torch.arange(50)
    is_kept = (linear(hidden).topk(3, dim=-1).indices == ids[:, None]).any(dim=-1)
    is_kept[0], ids[0] = True, linear(hidden[0]).argmax()
    values = Head(top_k=3).logprobs(model, hidden, ids)
    assert torch.equal(torch.isfinite(values), is_kept)
    assert torch.isneginf(values[~is_kept]).all()


def test_in_half_precision_logprobs_are_rounded_once():
    model, linear = make_model(torch.bfloat16)
    hidden, ids = torch.randn(200, 8, dtype=torch.bfloat16), torch.randint(50, (200,))
    values = Head(logits_dtype=torch.bfloat16).logprobs(model, hidden, ids)
    assert torch.equal(values, torch.log_softmax(linear(hidden), -1).gather(-1, ids[:, None]).squeeze(-1))


@pytest.mark.parametrize("chunk_bytes", [1, 50 * 8 * 3, 1 << 30])
def test_chunks_give_what_log_softmax_gives(chunk_bytes, monkeypatch):
    monkeypatch.setattr(heads, "CHUNK_BYTES", chunk_bytes)
    model, linear = make_model(torch.float64)
    hidden, ids = torch.randn(20, 8, dtype=torch.float64), torch.randint(50, (20,))
    plain = torch.log_softmax(linear(hidden) / 0.7, -1).gather(-1, ids[:, None]).squeeze(-1)
    torch.testing.assert_close(Head(temperature=0.7).logprobs(model, hidden, ids), plain, rtol=1e-12, atol=1e-12)


def test_the_projection_can_be_of_another_dtype():
    model, linear = make_model(torch.bfloat16)
    hidden, ids = torch.randn(5, 8).to(torch.bfloat16), torch.arange(5)
    exact = torch.log_softmax(hidden.double() @ linear.weight.double().T, -1).gather(-1, ids[:, None]).squeeze(-1)
    near = Head(projection_dtype=torch.float32).logprobs(model, hidden, ids)
    rounded = Head().logprobs(model, hidden, ids)
    assert near.dtype == torch.float32
    assert (near.double() - exact).abs().max() < 1e-5 < (rounded.double() - exact).abs().max()


def test_soft_caps_are_applied():
    model, linear = make_model(torch.float64, final_logit_softcapping=0.5, model_type="gemma2")
    hidden, ids = torch.randn(4, 8, dtype=torch.float64), torch.arange(4)
    capped = torch.tanh(linear(hidden) / 0.5) * 0.5
    plain = torch.log_softmax(capped, -1).gather(-1, ids[:, None]).squeeze(-1)
    torch.testing.assert_close(Head().logprobs(model, hidden, ids), plain)


def test_double_precision_stays_double():
    value = torch.ones(2, dtype=torch.float64) + 1e-12
    with KeepDouble():
        results = [
            value.float(),
            value.to(torch.float32),
            value.to(dtype=torch.float32),
            torch.softmax(value, dim=-1, dtype=torch.float32),
            torch.nn.functional.softmax(value, dim=-1, dtype=torch.float32),
        ]
        assert torch.ones(2).to(torch.bfloat16).float().dtype == torch.float32
        assert value.to(torch.int32).dtype == torch.int32
    assert {result.dtype for result in results} == {torch.float64}
