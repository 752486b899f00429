"""Several engines' values of the same prompts: imported as passes of the same sequences."""

import json

import dumps
import numpy as np
import pytest
from builders import tim_trace
from dumps import golden_request, gym_rollout, make_samples, write_golden
from tim_trace import compare, connect, import_dump, info, stats
from tim_trace.schemas.errors import ImportFailed
from tim_trace.tracer.importers.shared_rows import named_settings, pass_names

DRAW = np.random.default_rng(7)


def values(num, draw=DRAW):
    return [float(np.float32(value)) for value in -draw.exponential(1.0, num)]


def whole(run, name):
    """The values of a pass over all rows, by row: [(response ids, logprobs)]."""
    query = """SELECT response_ids, logprobs FROM scores JOIN sequences USING (step, seq_id) WHERE "pass" = ?
    ORDER BY seq_id"""
    return connect(run).execute(query, [name]).fetchall()


def known(run, name):
    return [value for _, logprobs in whole(run, name) for value in logprobs if value is not None]


def contract(run, name):
    (text,) = connect(run).execute('SELECT contract_json FROM passes WHERE "pass" = ?', [name]).fetchone()
    return json.loads(text)


def test_golden_files_are_passes_and_every_value_is_stored_once(tmp_path):
    """Three files of one prompt; the third generates another second token."""
    a, b, c = values(7), values(7), values(8)
    write_golden(tmp_path / "in", "gpt_static_inference_tp1_583m_logitsmatch", golden_request("p", a, [5, 6, 7]))
    write_golden(tmp_path / "in", "gpt_static_inference_tp2_583m_fp8", golden_request("p", b, [5, 6, 7]))
    write_golden(tmp_path / "in", "gpt_static_inference_tp4_583m", golden_request("p", c, [5, 9, 8, 4]))
    imported = import_dump("auto", tmp_path / "in", output=tmp_path / "run")
    assert (imported.format, imported.num_sequences, imported.num_above_zero) == ("megatron-lm", 2, 0)
    names = ("gpt_static_tp1_583m", "gpt_static_tp2_583m_fp8", "gpt_static_tp4_583m")
    assert sorted(imported.passes) == sorted(names)
    for name, given in zip(names, (a, b, c), strict=True):
        assert known(tmp_path / "run", name) == given
    (main, logprobs), (other, rest) = whole(tmp_path / "run", names[2])
    assert (main, other) == ([-1] * 4 + [5, 6, 7], [-1] * 4 + [5, 9, 8, 4])
    assert (logprobs[5:], rest[:5]) == ([None, None], [None] * 5)
    found = stats(tmp_path / "run", pair=f"{names[0]}:{names[1]}").dicts()[0]
    assert found["mean_abs_d"] == pytest.approx(np.abs(np.subtract(a, b)).mean(), rel=1e-6)
    found = stats(tmp_path / "run", pair=f"{names[0]}:{names[2]}").dicts()[0]
    assert (found["num_tokens"], found["mean_abs_d"]) == (
        5,
        pytest.approx(np.abs(np.subtract(a[:5], c[:5])).mean(), rel=1e-6),
    )
    config = contract(tmp_path / "run", names[1])["config"]
    assert config == {"parallel_config": {"tensor_parallel_size": 2}, "model_config": {"quantization": "fp8"}}


def test_other_prompts_and_models_share_no_sequence(tmp_path):
    one = golden_request("p", values(4), [5, 6])
    write_golden(tmp_path / "in", "gpt_tp1_583m", one, golden_request("q", values(4), [5, 6]))
    write_golden(tmp_path / "in", "gpt_tp1_16b", one)
    write_golden(tmp_path / "in", "hybrid_tp1_583m", one, family="hybrid")
    write_golden(tmp_path / "in", "gpt_tp2_583m", golden_request("p", values(5), [5, 6]))  # another tokenizer
    assert import_dump("megatron-lm", tmp_path / "in", output=tmp_path / "run").num_sequences == 5


def test_a_file_copied_out_of_its_folders_keeps_its_name(tmp_path):
    """`__` stands for `/`; platforms are part of the name if they differ, and folders if they must."""
    nested = write_golden(tmp_path / "in", "gpt_tp1", golden_request("p", values(4), [5, 6]))
    flat = tmp_path / "in" / "gpt__gpt_tp1__golden_values_dev_dgx_a100.json"
    flat.write_text(nested.read_text())
    again = write_golden(tmp_path / "again", "gpt_tp1", golden_request("p", values(4), [5, 6]))
    imported = import_dump("megatron-lm", [tmp_path / "in", again], output=tmp_path / "run")
    assert sorted(imported.passes) == ["again/gpt/gpt_tp1.h100", "gpt_tp1.a100", "in/gpt/gpt_tp1.h100"]
    assert contract(tmp_path / "run", "gpt_tp1.a100")["device"] == "a100"


def test_files_without_logprobs_are_skipped_and_named(tmp_path):
    write_golden(tmp_path / "in", "gpt_tp1", golden_request("p", values(4), [5, 6]))
    write_golden(tmp_path / "in", "gpt_tp2", golden_request("p", [], []) | {"logprobs": None})
    training = {"lm loss": {"start_step": 1, "end_step": 2, "step_interval": 1, "values": {"1": 10.8, "2": 10.7}}}
    (tmp_path / "in" / "golden_values_dev.json").write_text(json.dumps(training))
    (tmp_path / "in" / "golden_values_lts.json").write_text("")  # there are some
    done = tim_trace("import", "auto", tmp_path / "in", "-o", tmp_path / "run")
    assert done.code == 0, done.stderr
    assert "skipped 3 files without logprobs" in done.stderr
    (tmp_path / "in" / "gpt" / "gpt_tp1" / "golden_values_dev_dgx_h100.json").unlink()
    with pytest.raises(ImportFailed, match="contains no rows"):
        import_dump("megatron-lm", tmp_path / "in", output=tmp_path / "other")


def test_a_request_of_its_own_without_a_prompt_is_read(tmp_path):
    """Older files hold one request, without input_prompt."""
    given = {"id": "0", "generated_text": "x", "generated_tokens": [5, 6], "latency": 3.5, "logprobs": values(4)}
    path = write_golden(tmp_path / "in", "gpt_tp1")
    path.write_text(json.dumps(given))
    import_dump("megatron-lm", path, output=tmp_path / "run")
    assert known(tmp_path / "run", "gpt_tp1") == given["logprobs"]


GOOD = golden_request("p", [-0.5, -1.0, -1.5], [5, 6])
HOSTILE = {
    "truncated": json.dumps({"0": GOOD})[:-40],
    "fewer logprobs than tokens": json.dumps({"0": GOOD | {"logprobs": [-0.5]}}),
    "logprobs of text": json.dumps({"0": GOOD | {"logprobs": ["a", "b", "c"]}}),
    "logprobs that are no list": json.dumps({"0": GOOD | {"logprobs": 3}}),
    "tokens of text": json.dumps({"0": GOOD | {"generated_tokens": ["5", "6"]}}),
    "tokens below zero": json.dumps({"0": GOOD | {"generated_tokens": [-5, 6]}}),
    "no tokens": json.dumps({"0": GOOD | {"generated_tokens": None}}),
    "lists in lists": json.dumps({"0": GOOD | {"logprobs": [[-0.5], [-1.0], [-1.5]]}}),
    "a prompt that is no text": json.dumps({"0": GOOD | {"input_prompt": [1]}}),
    "beyond float32": json.dumps({"0": GOOD | {"logprobs": [-1e39, -1.0, -1.5]}}),
    "deep": '{"0": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "deep and open": '{"0": ' + '{"a": ' * 1_000_000,
    "no object": "[1, 2]",
    "bytes": "\x00\x01",
    "empty": "",
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("with_sound", [False, True])
def test_a_hostile_golden_file_is_one_sentence_and_leaves_nothing(tmp_path, name, with_sound):
    path = write_golden(tmp_path / "in", "gpt_tp1")
    path.write_text(HOSTILE[name])
    if with_sound:
        write_golden(tmp_path / "in", "gpt_tp2", GOOD)
    if name in ("no object", "empty") and with_sound:
        assert import_dump("megatron-lm", tmp_path / "in", output=tmp_path / "run").passes == ("gpt_tp2",)
        return
    with pytest.raises(ImportFailed) as raised:
        import_dump("megatron-lm", tmp_path / "in", output=tmp_path / "run")
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 600
    assert not (tmp_path / "run").exists()


def test_nan_and_positive_logprobs_are_kept_and_counted(tmp_path):
    odd = [float("nan"), 0.25, -1.5]
    write_golden(tmp_path / "in", "gpt_tp1", GOOD | {"logprobs": odd})
    write_golden(tmp_path / "in", "gpt_tp2", GOOD)
    imported = import_dump("megatron-lm", tmp_path / "in", output=tmp_path / "run")
    assert imported.num_above_zero == 1
    np.testing.assert_array_equal(known(tmp_path / "run", "gpt_tp1"), odd)
    (group,) = compare(tmp_path / "run").groups
    assert [one.num_not_finite for one in group.classes] == [1, 1]


def test_a_further_file_is_refused_and_the_same_files_are_known(tmp_path):
    write_golden(tmp_path / "in", "gpt_tp1", GOOD)
    import_dump("megatron-lm", tmp_path / "in", output=tmp_path / "run")
    assert import_dump("megatron-lm", tmp_path / "in", output=tmp_path / "run").num_known_files == 1
    write_golden(tmp_path / "in", "gpt_tp2", GOOD)
    with pytest.raises(ImportFailed, match="--force"):
        import_dump("megatron-lm", tmp_path / "in", output=tmp_path / "run")
    assert len(import_dump("megatron-lm", tmp_path / "in", output=tmp_path / "run", force=True).passes) == 2


def vllm_response(prompt, tokens, logprobs, prompt_logprobs=None):
    before = None
    if prompt_logprobs is not None:
        before = [None, *({str(i): {"logprob": v, "rank": 1, "decoded_token": "x"}, "9": {"logprob": -9.0}}
                          for i, v in zip(prompt[1:], prompt_logprobs, strict=True))]  # fmt: skip
    choice = {
        "index": 0, "finish_reason": "length", "token_ids": tokens, "prompt_token_ids": prompt, "prompt_logprobs": before,
        "logprobs": {"tokens": ["x"] * len(tokens), "token_logprobs": logprobs},
    }  # fmt: skip
    return {"id": "cmpl-1", "object": "text_completion", "choices": [choice]}


def test_several_files_of_vllm_are_passes_matched_by_prompt(tmp_path):
    prompts = [[1, 2, 3], [4, 5]]
    a = [vllm_response(p, [7, 8], values(2), values(len(p) - 1)) for p in prompts]
    b = [vllm_response(p, [7, 8], values(2)) for p in reversed(prompts)]
    dumps.write_lines(tmp_path / "tp1.jsonl", a)
    dumps.write_lines(tmp_path / "tp8.jsonl", b)
    imported = import_dump("vllm", [tmp_path / "tp1.jsonl", tmp_path / "tp8.jsonl"], output=tmp_path / "run")
    assert (imported.num_sequences, imported.passes) == (2, ("tp1", "tp8"))
    rows = (
        connect(tmp_path / "run").execute("SELECT prompt_ids, response_ids FROM sequences ORDER BY seq_id").fetchall()
    )
    assert rows == [([1], [2, 3, 7, 8]), ([4], [5, 7, 8])]
    scored = [choice["logprobs"]["token_logprobs"] for one in reversed(b) for choice in one["choices"]]
    assert [row[1] for row in whole(tmp_path / "run", "tp8")] == [[None, None, *scored[0]], [None, *scored[1]]]
    first = whole(tmp_path / "run", "tp1")[0][1]
    assert first[:2] == [
        a[0]["choices"][0]["prompt_logprobs"][place][str(prompts[0][place])]["logprob"] for place in (1, 2)
    ]
    assert contract(tmp_path / "run", "tp8")["config"]["parallel_config"] == {"tensor_parallel_size": 8}
    # One path is one engine, as before: the same pass for all of its files.
    assert import_dump("vllm", [tmp_path / "tp1.jsonl"], output=tmp_path / "one").passes == ("rollout",)
    assert whole(tmp_path / "one", "rollout")[0][0] == [7, 8]


def test_a_repeated_response_is_a_pass_and_another_response_is_a_sequence(tmp_path):
    """As under load: one prompt, four times."""
    same, other = [vllm_response([1, 2], tokens, values(2)) for tokens in ([7, 8], [7, 9])]
    repeated = vllm_response([1, 2], [7, 8], values(2))
    dumps.write_lines(tmp_path / "a.jsonl", [same, repeated, other])
    dumps.write_lines(tmp_path / "b.jsonl", [same, other])
    imported = import_dump("vllm", [tmp_path / "a.jsonl", tmp_path / "b.jsonl"], output=tmp_path / "run")
    assert (imported.num_sequences, set(imported.passes)) == (2, {"a", "a.1", "b"})
    assert known(tmp_path / "run", "a.1") == repeated["choices"][0]["logprobs"]["token_logprobs"]
    assert info(str(tmp_path / "run")).passes


def test_a_response_repeated_without_end_is_refused(tmp_path):
    dumps.write_lines(tmp_path / "a.jsonl", [vllm_response([1, 2], [7], [-0.5])] * 1100)
    dumps.write_lines(tmp_path / "b.jsonl", [vllm_response([1, 2], [7], [-0.5])])
    with pytest.raises(ImportFailed, match="repeats a prompt and response more than 1,024 times"):
        import_dump("vllm", [tmp_path / "a.jsonl", tmp_path / "b.jsonl"], output=tmp_path / "run")


def test_a_file_given_twice_is_refused(tmp_path):
    dumps.write_lines(tmp_path / "in" / "a.jsonl", [vllm_response([1, 2], [7], [-0.5])])
    with pytest.raises(ImportFailed, match="was given twice"):
        import_dump("vllm", [tmp_path / "in", tmp_path / "in" / "a.jsonl"], output=tmp_path / "run")


@pytest.mark.parametrize("place", ["first", "later"])
def test_rows_without_prompt_ids_cannot_be_matched(tmp_path, place):
    lines = [vllm_response([1, 2], [7, 8], values(2)), vllm_response(None, [7, 8], values(2))]
    dumps.write_lines(tmp_path / "a.jsonl", lines if place == "later" else lines[1:])
    dumps.write_lines(tmp_path / "b.jsonl", lines[:1])
    with pytest.raises(ImportFailed, match=r"a\.jsonl, response \d has no prompt token ids"):
        import_dump("vllm", [tmp_path / "a.jsonl", tmp_path / "b.jsonl"], output=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_turns_of_nemo_gym_are_rows(tmp_path):
    samples = make_samples(1, num=2, masked=False)
    dumps.write_lines(tmp_path / "rollouts.jsonl", [gym_rollout(s) for s in samples])
    imported = import_dump("auto", tmp_path / "rollouts.jsonl", output=tmp_path / "run")
    assert (imported.format, imported.num_sequences) == ("nemo-gym", 4)
    query = """SELECT prompt_ids, response_ids, logprobs, reward, group_id, temperature FROM sequences
    JOIN scores USING (step, seq_id) ORDER BY seq_id"""
    rows = connect(tmp_path / "run").execute(query).fetchall()
    for sample, first, second in zip(samples, rows[::2], rows[1::2], strict=True):
        assert first[0] == sample.prompt.tolist()
        assert second[0] == first[0] + first[1]
        assert first[1] + second[1] == sample.response.tolist()
        assert first[2] + second[2] == sample.rollout.tolist()
        assert first[3:] == second[3:] == (sample.reward, "3", 0.7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"response": {"output": 3}}, "has no output items"),
        ({"response": {"output": [{"type": "message"}]}}, "no output item has generation_token_ids"),
        ({"response": {"output": [{"generation_token_ids": ["a"]}]}}, "expected"),
        ({"response": {"output": [{"generation_token_ids": [1], "generation_log_probs": [-1.0, -2.0]}]}}, "2 values"),
    ],
)
def test_hostile_rollouts_of_nemo_gym_are_one_sentence(tmp_path, change, message):
    dumps.write_lines(tmp_path / "rollouts.jsonl", [gym_rollout(make_samples(1)[0], **change)])
    with pytest.raises(ImportFailed, match=message) as raised:
        import_dump("nemo-gym", tmp_path / "rollouts.jsonl", output=tmp_path / "run")
    assert "\n" not in str(raised.value)


def test_prompt_logprobs_of_sglang_are_compared_too(tmp_path):
    paths = []
    for name in ("a", "b"):
        meta = {
            "input_token_logprobs": [[None, 1, None], [values(1)[0], 2, None]],
            "output_token_logprobs": [[values(1)[0], 7, None]],
        }
        paths.append(tmp_path / f"{name}.json")
        paths[-1].write_text(json.dumps({"text": "x", "output_ids": [7], "meta_info": meta}))
    import_dump("sglang", paths, output=tmp_path / "run")
    assert len(known(tmp_path / "run", "a")) == 2


def test_several_paths_of_other_formats_are_refused(tmp_path):
    for format in ("parquet", "metrics", "slime"):
        (tmp_path / "a.csv").write_text("step,loss\n1,0.5\n")
        (tmp_path / "b.csv").write_text("step,loss\n1,0.5\n")
        with pytest.raises(ImportFailed, match="reads one path"):
            import_dump(format, [tmp_path / "a.csv", tmp_path / "b.csv"], output=tmp_path / "run")
    row = {"step": 1, "prompt_ids": [1], "response_ids": [2], "rollout_logprobs": [-0.5]}
    dumps.write_lines(tmp_path / "rows.jsonl", [row])
    assert import_dump("parquet", [tmp_path / "rows.jsonl"], output=tmp_path / "one").num_sequences == 1
    with pytest.raises(ImportFailed, match="no path"):
        import_dump("vllm", [], output=tmp_path / "run")


def test_files_that_do_not_fit_into_memory_together_are_refused(tmp_path, monkeypatch):
    write_golden(tmp_path / "in", "gpt_tp1", GOOD)
    write_golden(tmp_path / "in", "gpt_tp2", GOOD)
    size = len((tmp_path / "in" / "gpt" / "gpt_tp1" / "golden_values_dev_dgx_h100.json").read_bytes())
    pages = {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": 20 * size}  # each file alone fits
    monkeypatch.setattr("tim_trace.tracer.store.os.sysconf", pages.__getitem__)
    with pytest.raises(ImportFailed, match="so import fewer at once"):
        import_dump("megatron-lm", tmp_path / "in", output=tmp_path / "run")


def test_the_command_takes_several_paths_and_says_how_to_compare(tmp_path):
    for name in ("a", "b", "c"):
        dumps.write_lines(tmp_path / f"{name}.jsonl", [vllm_response([1, 2], [7, 8], values(2))])
    paths = [tmp_path / f"{name}.jsonl" for name in ("a", "b", "c")]
    done = tim_trace("import", "vllm", *paths, "-o", tmp_path / "run")
    assert done.code == 0, done.stderr
    assert "3 passes" in done.stderr
    assert f"next: tim-trace compare {tmp_path / 'run'}" in done.stderr


def test_names_are_as_short_as_they_can_be():
    assert pass_names(["x/a.json", "y/a.json", "y/b.jsonl"]) == ["x/a", "y/a", "b"]
    assert pass_names(["train.jsonl", "replay/tp 8.json", "~.json"]) == ["rollout/train", "tp-8", "pass"]
    assert pass_names(["a b.json", "a-b.json"]) == ["a-b", "a-b.2"]
    assert named_settings("run-TP.fp8/chunked_prefill") == {
        "run": True, "TP": True,
        "config": {"scheduler_config": {"enable_chunked_prefill": True}, "model_config": {"quantization": "fp8"}},
    }  # fmt: skip


def test_columns_of_tokens_follow_the_tokens_of_matched_responses(tmp_path):
    """Two engines agree on one token; one also scored the prompt, whose tokens have no entropy."""
    a = vllm_response([1, 2, 3], [7, 8], values(2), values(2))
    a |= {"spread": [0.5, 0.25], "gap": [1.5, None], "mask": [1, 0], "gain": [0.75, 0.5]}
    b = vllm_response([1, 2, 3], [7, 9, 5], values(3)) | {"spread": [0.125, 2.0, 3.0], "mask": [1, 1, 0]}
    for name, response in (("tp1", a), ("tp8", b)):
        dumps.write_lines(tmp_path / f"{name}.jsonl", [response])
    map = {"spread": "entropy", "gap": "top2_gap", "mask": "response_mask", "gain": "advantages"}
    import_dump("vllm", [tmp_path / "tp1.jsonl", tmp_path / "tp8.jsonl"], output=tmp_path / "run", map=map)
    query = """SELECT "pass", response_ids, entropy, top2_gap, response_mask, advantages FROM scores
    JOIN sequences USING (step, seq_id) ORDER BY seq_id, "pass" """
    no = None
    ids_a, ids_b = [2, 3, 7, 8], [2, 3, 7, 9, 5]
    mask_a, mask_b = [False, False, True, False], [False, False, True, True, False]
    assert connect(tmp_path / "run").execute(query).fetchall() == [
        ("tp1", ids_a, [no, no, 0.5, 0.25], [no, no, 1.5, no], mask_a, [no, no, 0.75, 0.5]),
        ("tp8", ids_a, [no, no, 0.125, no], no, mask_a, [no, no, 0.75, 0.5]),
        ("tp8", ids_b, [no, no, no, 2.0, 3.0], no, mask_b, no),
    ]
    dumps.write_lines(tmp_path / "tp8.jsonl", [b | {"spread": [0.5]}])
    with pytest.raises(ImportFailed, match=r"tp8.jsonl, response 1: entropy needs one value per token \(3\), got 1"):
        import_dump("vllm", [tmp_path / "tp1.jsonl", tmp_path / "tp8.jsonl"], output=tmp_path / "odd", map=map)


def test_a_pass_named_as_an_array_of_another_is_a_pass(tmp_path):
    for name in ("a", "a_topk", "a_vocabulary"):
        dumps.write_lines(tmp_path / f"{name}.jsonl", [vllm_response([1, 2], [7, 8], [-0.5, -0.25])])
    paths = sorted(tmp_path.glob("*.jsonl"))
    assert import_dump("vllm", paths, output=tmp_path / "run").passes == ("a", "a_topk", "a_vocabulary")
