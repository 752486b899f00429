"""Dumps of one side, of text, and of views: imported as what they are."""

import json

import dumps
import numpy as np
import pytest
from dumps import make_samples
from tim_trace import check, connect, diagnose, import_dump, info, stats
from tim_trace.schemas.errors import ImportFailed, NothingToCompare
from tim_trace.tracer.importers.textfiles import as_object, parsed


def scores(run, name):
    query = 'SELECT seq_id, logprobs FROM scores WHERE "pass" = ? ORDER BY seq_id'
    return dict(connect(run).execute(query, [name]).fetchall())


def floats(values):
    return np.asarray(values, np.float32).tolist()


def note_of(run, name):
    return next(each.note for each in info(str(run)).passes if each.name == name)


def completion(sample, **choice):
    return {
        "id": "cmpl-1", "object": "text_completion", "model": "m",
        "choices": [
            {
                "index": 0, "text": "x", "finish_reason": "length", "token_ids": sample.response.tolist(),
                "prompt_token_ids": sample.prompt.tolist(),
                "logprobs": {"tokens": ["x"] * len(sample.response), "token_logprobs": sample.rollout.astype(float).tolist()},
                **choice,
            }
        ],
    }  # fmt: skip


@pytest.mark.slow
def test_responses_of_vllm_are_the_engine_s_side(tmp_path):
    samples = make_samples(1)
    chat = completion(samples[1])
    chat["prompt_token_ids"] = samples[1].prompt.tolist()
    chat["choices"][0].update(
        prompt_token_ids=None,
        token_ids=None,
        logprobs={
            "content": [
                {"token": f"token_id:{token}", "logprob": float(value), "top_logprobs": []}
                for token, value in zip(samples[1].response, samples[1].rollout, strict=True)
            ]
        },
    )
    with_request = {"request": {"temperature": 0.6, "top_p": 0.9}, "response": completion(samples[2]), "step": 3}
    dumps.write_lines(tmp_path / "saved.jsonl", [completion(samples[0]), chat, with_request])
    imported = import_dump("auto", tmp_path / "saved.jsonl", output=tmp_path / "run")
    assert (imported.format, imported.num_sequences, imported.passes) == ("vllm", 3, ("rollout",))
    assert list(scores(tmp_path / "run", "rollout").values()) == [s.rollout.tolist() for s in samples[:3]]
    query = "SELECT prompt_ids, response_ids, temperature, finish_reason FROM sequences ORDER BY seq_id"
    rows = connect(tmp_path / "run").execute(query).fetchall()
    assert [row[:2] for row in rows] == [(s.prompt.tolist(), s.response.tolist()) for s in samples[:3]]
    assert rows[2][2:] == (0.6, "length")
    assert "only the engine's logprobs" in note_of(tmp_path / "run", "train")
    with pytest.raises(NothingToCompare, match="only the engine's logprobs"):
        check(tmp_path / "run")
    with pytest.raises(NothingToCompare, match="only the engine's logprobs"):
        stats(tmp_path / "run")


def test_responses_without_token_ids_say_how_to_ask_for_them(tmp_path):
    dumps.write_lines(tmp_path / "saved.jsonl", [completion(make_samples(1)[0], token_ids=None)])
    with pytest.raises(ImportFailed, match="return_token_ids=true"):
        import_dump("vllm", tmp_path / "saved.jsonl", output=tmp_path / "run")
    dumps.write_lines(tmp_path / "saved.jsonl", [completion(make_samples(1)[0], token_ids=[1])])
    with pytest.raises(ImportFailed, match="5 values of logprobs of pass 'rollout' for 1 response tokens"):
        import_dump("vllm", tmp_path / "saved.jsonl", output=tmp_path / "run")


def test_meta_info_of_sglang_is_the_engine_s_side_and_its_truncation(tmp_path):
    sample = make_samples(1, masked=False)[0]
    triples = [[float(value), int(token), None] for token, value in zip(sample.response, sample.rollout, strict=True)]
    meta = {
        "id": "1", "finish_reason": {"type": "stop", "matched": 2}, "weight_version": "7", "cached_tokens": 3,
        "input_token_logprobs": [[None, int(token), None] for token in sample.prompt],
        "output_token_logprobs": triples, "output_token_sampling_logprobs": [float(value) + 0.1 for value in sample.rollout],
    }  # fmt: skip
    (tmp_path / "saved.json").write_text(
        json.dumps([{"text": "x", "output_ids": sample.response.tolist(), "meta_info": meta}])
    )
    assert import_dump("auto", tmp_path / "saved.json", output=tmp_path / "run").format == "sglang"
    assert list(scores(tmp_path / "run", "rollout").values()) == [sample.rollout.tolist()]
    found = stats(tmp_path / "run", pair="rollout:rollout/sampling").dicts()[0]
    assert found["mean_abs_d"] == pytest.approx(0.1, rel=1e-5)
    query = "SELECT prompt_ids, policy_version, finish_reason FROM sequences"
    assert connect(tmp_path / "run").execute(query).fetchall() == [(sample.prompt.tolist(), 7, "stop")]
    (tmp_path / "saved.json").write_text(json.dumps([{"output_ids": [1], "meta_info": meta}]))
    with pytest.raises(ImportFailed, match="differ from the tokens"):
        import_dump("sglang", tmp_path / "saved.json", output=tmp_path / "x")


def open_instruct_record(step, sample):
    return {
        "step": step, "sample_idx": 0, "prompt_idx": 4, "prompt_tokens": sample.prompt.tolist(),
        "response_tokens": sample.response.tolist(), "reward": sample.reward, "advantage": sample.advantage,
        "finish_reason": "stop", "dataset": "d", "ground_truth": "g", "request_info": {}, "logprobs": sample.rollout.tolist(),
    }  # fmt: skip


def test_lines_that_open_instruct_adds_are_added_and_nothing_twice(tmp_path):
    samples = make_samples(1)
    path = tmp_path / "dump" / "run_rollouts_000000.jsonl"
    records = [open_instruct_record(1 + place // 2, s) for place, s in enumerate(samples)]
    dumps.write_lines(path, records[:4])
    path.write_text(path.read_text() + json.dumps(records[4])[:40])
    first = import_dump("auto", tmp_path / "dump", output=tmp_path / "run")
    assert (first.format, first.num_sequences) == ("open-instruct", 4)
    dumps.write_lines(path, records)
    second = import_dump("auto", tmp_path / "dump", output=tmp_path / "run")
    assert second.num_sequences == 2
    assert sorted(scores(tmp_path / "run", "rollout").values()) == sorted(s.rollout.tolist() for s in samples)
    assert import_dump("auto", tmp_path / "dump", output=tmp_path / "run").num_sequences == 0
    part = import_dump("auto", tmp_path / "dump", output=tmp_path / "part", steps="-1:")
    assert part.num_sequences == 2


def turn(prompt, completion, logprobs, version):
    return {
        "turn_id": 0, "min_policy_version": version, "max_policy_version": version, "prompt_messages": [],
        "completion_message": {}, "env_messages": [], "env_rewards": [], "prompt_token_ids": prompt,
        "completion_token_ids": completion, "completion_logprobs": logprobs,
    }  # fmt: skip


def test_turns_of_torchtitan_are_one_response_with_masked_tokens_between(tmp_path):
    rollout = {
        "is_validation": False, "group_id": "g", "rollout_id": "r", "status": "completed", "reward": 1.0, "advantage": 0.5,
        "turns": [turn([1, 2], [3, 4], [-0.5, -0.25], 6), turn([1, 2, 3, 4, 5], [6], [-1.0], 7)],
    }  # fmt: skip
    dumps.write_lines(tmp_path / "rollout_samples.jsonl", [rollout, {**rollout, "is_validation": True}])
    imported = import_dump("auto", tmp_path, output=tmp_path / "run")
    assert (imported.format, imported.num_sequences) == ("torchtitan", 1)
    query = "SELECT step, policy_version, prompt_ids, response_ids, response_mask FROM sequences"
    assert connect(tmp_path / "run").execute(query).fetchall() == [
        (7, 7, [1, 2], [3, 4, 5, 6], [True, True, False, True])
    ]
    assert list(scores(tmp_path / "run", "rollout").values()) == [[-0.5, -0.25, None, -1.0]]
    rollout["turns"][1]["prompt_token_ids"] = [1, 2, 9, 4, 5]
    dumps.write_lines(tmp_path / "rollout_samples.jsonl", [rollout])
    with pytest.raises(ImportFailed, match="turn 1 was re-tokenized"):
        import_dump("torchtitan", tmp_path, output=tmp_path / "x")


@pytest.mark.parametrize("format", list(dumps.ONE_SIDED))
def test_auto_knows_every_format_and_adds_nothing_twice(tmp_path, format):
    dumps.ONE_SIDED[format](tmp_path / "dump", dumps.make_steps(1))
    imported = import_dump("auto", tmp_path / "dump", output=tmp_path / "run")
    assert imported.format == format
    again = import_dump("auto", tmp_path / "dump", output=tmp_path / "run")
    assert (again.num_sequences, again.num_known_files) == (0, imported.num_files)


def test_the_text_of_verl_adds_nothing_twice(tmp_path):
    dumps.write_verl_text(tmp_path / "dump", {})
    assert import_dump("auto", tmp_path / "dump", output=tmp_path / "run").num_sequences == 3
    assert import_dump("auto", tmp_path / "dump", output=tmp_path / "run").num_sequences == 0


def test_a_trace_without_tokens_is_told_as_what_it_is(tmp_path):
    dumps.write_lines(tmp_path / "1.jsonl", [{"input": "a", "output": "b", "score": 1.0, "step": 1}])
    import_dump("verl", tmp_path, output=tmp_path / "run")
    found = info(str(tmp_path / "run"))
    assert (found.num_sequences, found.num_response_tokens) == (1, 0)
    assert "rollout_data_dir" in note_of(tmp_path / "run", "rollout")
    assert "rollout_data_dir contains only text" in str(diagnose(tmp_path / "run"))


@pytest.mark.parametrize(
    "text",
    [
        '{"a": [1, 2.5, -0.0, null, true], "b": {"c": [{"d": 1}]}}', '{"a": "x: y", "b": 1}', '{"a:b": "c\\":d"}', "{}",
        '{"a": NaN, "b": [Infinity, 1e400]}', '{"a": 123456789012345678901234567890}', '{"a": "\\ud800"}', '{"a": [[{"b": 1}], [2]]}',
    ],
)  # fmt: skip
def test_json_is_what_python_reads(text):
    assert repr(dict(as_object(parsed(text.encode(), "here", ""), "here", ""))) == repr(json.loads(text))
