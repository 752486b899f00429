"""Dumps of frameworks: what comes in equals what the arrays say, and each trap of a format is stepped around."""

import json
import os
import shutil
import sys

import dumps
import numpy as np
import pytest
import torch
from builders import run, tim_trace
from dumps import WRITERS, expected, make_samples, make_steps
from shared import rest_slow
from tim_trace import check, connect, import_dump, info, stats, verify
from tim_trace.schemas.checksums import sealed
from tim_trace.schemas.errors import ImportFailed, InvalidOption, NothingToCompare
from tim_trace.tracer.importers.dump_rows import routed
from tim_trace.tracer.importers.format import Part
from tim_trace.tracer.importers.formats import FORMATS
from tim_trace.tracer.importers.import_dump import _are_ordered
from tim_trace.tracer.importers.slime_dumps import zig_zag
from tim_trace.tracer.routing import NOT_ROUTED, read_routing
from tim_trace.tracer.store import Store


def everyone(steps):
    return [sample for samples in steps.values() for sample in samples]


def check_stats(run, samples, tolerance=1e-12):
    found, wanted = stats(run).dicts()[0], expected(samples)
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, rel=tolerance, abs=0), name


@pytest.mark.parametrize("format", rest_slow(WRITERS, 6))
def test_stats_of_an_import_are_those_of_the_arrays(tmp_path, format):
    steps = make_steps(3, 4)
    WRITERS[format](tmp_path / "dump", steps)
    imported = import_dump("auto", tmp_path / "dump", output=tmp_path / "run")
    assert imported.format == format
    assert imported.num_sequences == len(everyone(steps))
    assert imported.num_tokens == sum(len(s.response) for s in everyone(steps))
    check_stats(tmp_path / "run", everyone(steps))
    for step, samples in steps.items():
        row = next(row for row in stats(tmp_path / "run", by="step").dicts() if row["step"] == step)
        assert row["k3"] == pytest.approx(expected(samples)["k3"], rel=1e-12)


@pytest.mark.parametrize("format", rest_slow(WRITERS, 3))
def test_tokens_masks_rewards_and_advantages_come_in(tmp_path, format):
    steps = make_steps(3)
    WRITERS[format](tmp_path / "dump", steps)
    import_dump(format, tmp_path / "dump", output=tmp_path / "run")
    query = "SELECT prompt_ids, response_ids, response_mask, reward, advantage FROM sequences"
    found = {tuple(row[0] + row[1]): row for row in connect(tmp_path / "run").execute(query).fetchall()}
    for sample in steps[3]:
        prompt, response, mask, reward, advantage = found[tuple(sample.tokens.tolist())]
        assert (prompt, response, mask) == (sample.prompt.tolist(), sample.response.tolist(), sample.mask.tolist())
        assert reward == (None if format == "skyrl" else sample.reward)  # SkyRL takes rewards out before it dumps
        assert advantage == pytest.approx(sample.advantage, rel=1e-6)


@pytest.mark.parametrize("format", rest_slow(WRITERS, 3))
def test_what_is_masked_has_no_rollout_logprob(tmp_path, format):
    steps = make_steps(3)
    WRITERS[format](tmp_path / "dump", steps)
    import_dump(format, tmp_path / "dump", output=tmp_path / "run")
    query = """
        SELECT response_mask, logprobs FROM scores JOIN sequences USING (step, seq_id) WHERE "pass" = 'rollout'
    """
    for mask, logprobs in connect(tmp_path / "run").execute(query).fetchall():
        assert [value is not None for value in logprobs] == mask


@pytest.mark.parametrize("method", ["consolidated", "plain", "numpy"])
def test_verl_batches_are_read_however_they_were_written(tmp_path, method):
    steps = make_steps(5, 6)
    dumps.write_verl(tmp_path / "dump", steps, method=method)
    import_dump("verl", tmp_path / "dump", output=tmp_path / "run")
    check_stats(tmp_path / "run", everyone(steps))
    row = connect(tmp_path / "run").execute(
        "SELECT group_id, temperature FROM sequences WHERE step = 5 AND seq_id = '3'"
    )
    assert row.fetchall() == [("g1", 0.7)]


def test_a_batch_of_verl_of_before_the_trainer_says_what_it_lacks(tmp_path):
    dumps.write_verl(tmp_path / "dump", make_steps(5), train=False)
    imported = import_dump("verl", tmp_path / "dump", output=tmp_path / "run")
    assert imported.passes == ("rollout",)
    with pytest.raises(NothingToCompare, match=r"no old_log_probs.*batch.save_to_disk"):
        check(tmp_path / "run")
    (note,) = [each.note for each in info(str(tmp_path / "run")).passes if each.name == "train"]
    assert "save_to_disk" in note


def test_a_batch_of_verl_with_another_mask_is_refused(tmp_path):
    tensors = dumps.verl_tensors(make_samples(1))
    with pytest.raises(ImportFailed, match="attention_mask must have shape"):
        import_verl(tmp_path, {**tensors, "attention_mask": tensors["attention_mask"][:, 1:]})
    with pytest.raises(ImportFailed, match="train_logprobs has shape"):
        import_verl(tmp_path, {**tensors, "old_log_probs": tensors["old_log_probs"][:, 1:]})


def test_the_step_of_a_batch_of_verl_is_the_folder_it_lies_in(tmp_path):
    dumps.write_verl(tmp_path / "run" / "12", make_steps(5, 6))
    for meta in (tmp_path / "run").rglob("meta.json"):
        meta.unlink()
    import_dump("verl", tmp_path / "run", output=tmp_path / "trace")
    assert connect(tmp_path / "trace").execute("SELECT DISTINCT step FROM sequences ORDER BY 1").fetchall() == [
        (5,),
        (6,),
    ]


def test_rewards_of_verl_count_where_the_response_has_a_token(tmp_path):
    samples = make_samples(1)
    tensors = dumps.verl_tensors(samples)
    scores = torch.zeros_like(tensors["token_level_scores"])
    width = tensors["responses"].shape[1]
    there = tensors["attention_mask"][:, -width:].bool()
    assert not there.all()
    scores[~there[:, -1], -1] = 100.0  # one cell of padding
    wanted = []
    for row, sample in enumerate(samples):
        masked = np.flatnonzero(~sample.mask)
        scores[row, masked] = 0.25  # tool output: it is of the response, though no loss is taken of it
        scores[row, len(sample.response) - 1] += 1.0 + row
        wanted.append((str(row), 1.0 + row + 0.25 * len(masked)))
    row = int((~there).sum(axis=1).argmax())
    scores[row, there[row]] = 0.0  # nothing but what lies in the padding
    wanted[row] = (str(row), 0.0)
    trace = import_verl(tmp_path, {**tensors, "token_level_scores": scores}).folder
    assert connect(trace).execute("SELECT seq_id, reward FROM sequences ORDER BY seq_id::INT").fetchall() == wanted


def import_verl(tmp_path, tensors):
    folder = tmp_path / "other"
    shutil.rmtree(folder, ignore_errors=True)
    original = dumps.verl_tensors
    dumps.verl_tensors = lambda samples, train: tensors
    try:
        dumps.write_verl(folder, {1: make_samples(1)})
    finally:
        dumps.verl_tensors = original
    return import_dump("verl", folder, output=tmp_path / "other-run")


def test_a_dump_of_another_framework_is_named(tmp_path):
    WRITERS["prime-rl"](tmp_path / "dump", make_steps(1))
    with pytest.raises(ImportFailed, match=r"contains no rollout_data.*. Import it as prime-rl"):
        import_dump("slime", tmp_path / "dump", output=tmp_path / "run")


def test_an_import_claims_no_libraries_of_the_machine_that_reads_it(tmp_path):
    WRITERS["verl"](tmp_path / "dump", make_steps(1))
    import_dump("verl", tmp_path / "dump", output=tmp_path / "run")
    assert info(str(tmp_path / "run")).versions == {}
    assert "versions" not in tim_trace("info", tmp_path / "run").stdout


@pytest.mark.parametrize(
    ("format", "write", "lacks"),
    [
        ("verl", dumps.write_verl_text, "no token ids, so the trace"),
        ("vllm", dumps.write_vllm, "no prompt token ids, so the trace"),
    ],
)
def test_weights_are_not_advised_where_they_would_not_help(tmp_path, format, write, lacks):
    write(tmp_path / "dump", make_steps(1))
    import_dump(format, tmp_path / "dump", output=tmp_path / "run")
    (missing,) = info(str(tmp_path / "run")).missing
    assert missing.startswith(lacks)
    shown = tim_trace("stats", tmp_path / "run")
    assert shown.code == 2
    assert "--attach" not in shown.stderr


def test_the_text_of_verl_is_sequences_without_tokens(tmp_path):
    rows = [{"input": "a", "output": "b", "gts": "c", "score": 1.0, "step": 7, "acc": True, "uid": "g"}] * 3
    dumps.write_lines(tmp_path / "dump" / "7.jsonl", rows)
    imported = import_dump("auto", tmp_path / "dump", output=tmp_path / "run")
    assert (imported.format, imported.num_sequences, imported.passes) == ("verl", 3, ())
    query = "SELECT step, reward, group_id, rewards, response_ids FROM sequences LIMIT 1"
    assert connect(tmp_path / "run").execute(query).fetchall() == [(7, 1.0, "g", {"acc": 1.0}, [])]
    (found,) = check(tmp_path / "run").findings
    assert found.code == "not_compared"
    assert "rollout_data_dir" in str(found.numbers["why"])


@pytest.mark.slow
def test_slime_joins_rollouts_and_what_the_trainer_made_of_them(tmp_path):
    steps = make_steps(0)
    dumps.write_rollouts(tmp_path / "dump", steps)
    dumps.write_slime_train(tmp_path / "dump", {0: steps[0][:4]})
    import_dump("slime", tmp_path / "dump", output=tmp_path / "run")
    assert connect(tmp_path / "run").execute("SELECT count(*) FROM sequences").fetchall() == [(6,)]
    check_stats(tmp_path / "run", steps[0][:4])
    query = "SELECT DISTINCT policy_version, finish_reason FROM sequences"
    assert connect(tmp_path / "run").execute(query).fetchall() == [(4, "stop")]
    versions = (
        connect(tmp_path / "run").execute('SELECT DISTINCT "pass", policy_version FROM scores ORDER BY 1').fetchall()
    )
    assert versions == [("reference", None), ("rollout", 4), ("train", None)]  # nothing says the trainer's version


def test_the_newest_weights_that_sampled_a_response_of_slime_are_its_version(tmp_path, monkeypatch):
    sample = dumps.rollout_sample
    monkeypatch.setattr(dumps, "rollout_sample", lambda s: sample(s, weight_versions=["10", "9", "8"]))
    dumps.write_rollouts(tmp_path / "dump", make_steps(1))
    import_dump("slime", tmp_path / "dump", output=tmp_path / "run")
    assert connect(tmp_path / "run").execute("SELECT DISTINCT policy_version FROM sequences").fetchall() == [(10,)]


def test_slime_without_all_shards_is_refused(tmp_path):
    steps = make_steps(1)
    dumps.write_slime_train(tmp_path / "dump", steps)
    path = tmp_path / "dump" / "train_data" / "1.pt"
    record = torch.load(path, weights_only=True)
    record["samples"] = record["samples"][:4]
    torch.save(record, path)
    with pytest.raises(ImportFailed, match="has 4 samples, but its 2 data-parallel shards list 6"):
        import_dump("slime", tmp_path / "dump", output=tmp_path / "run")


def test_a_removed_sample_counts_nowhere(tmp_path):
    samples = make_samples(1)
    (tmp_path / "dump" / "rollout_data").mkdir(parents=True)
    rows = [dumps.rollout_sample(s, remove_sample=place == 0) for place, s in enumerate(samples)]
    torch.save({"rollout_id": 1, "samples": rows}, tmp_path / "dump" / "rollout_data" / "1.pt")
    import_dump("slime", tmp_path / "dump", output=tmp_path / "run")
    query = "SELECT seq_id FROM sequences WHERE NOT list_bool_or(response_mask)"
    assert connect(tmp_path / "run").execute(query).fetchall() == [(str(samples[0].index),)]


def test_evaluations_of_slime_are_passed_over(tmp_path):
    dumps.write_rollouts(tmp_path / "dump", make_steps(1))
    for name in ("eval_1.pt", "debug_eval_2.pt"):
        shutil.copy(tmp_path / "dump" / "rollout_data" / "1.pt", tmp_path / "dump" / "rollout_data" / name)
    assert import_dump("auto", tmp_path / "dump", output=tmp_path / "run").num_sequences == 6


@pytest.mark.slow
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("context", [1, 2, 3])
def test_miles_puts_context_parallel_parts_together(tmp_path, context, padded):
    steps = make_steps(1, 2)
    dumps.write_miles_train(tmp_path / "dump", steps, context=context, padded=padded)
    import_dump("auto", tmp_path / "dump", output=tmp_path / "run")
    check_stats(tmp_path / "run", everyone(steps))
    query = "SELECT seq_id, entropy FROM scores WHERE \"pass\" = 'train' AND step = 1"
    found = dict(connect(tmp_path / "run").execute(query).fetchall())
    assert found == {str(s.index): s.entropy.tolist() for s in steps[1]}


@pytest.mark.parametrize("total", range(2, 30))
def test_zig_zag_parts_are_every_token_once(total):
    for length in range(1, total):
        for size in (1, 2, 4):
            spans = [span for rank in range(size) for span in zig_zag(total, length, rank, size)]
            places = sorted(place for start, end in spans for place in range(start, end))
            assert places == list(range(length))


def test_miles_without_a_context_parallel_rank_is_refused(tmp_path):
    dumps.write_miles_train(tmp_path / "dump", make_steps(1), tensor=1)
    (tmp_path / "dump" / "train_data" / "1_1.pt").unlink()
    with pytest.raises(ImportFailed, match="is missing context-parallel rank 1 of 2"):
        import_dump("miles", tmp_path / "dump", output=tmp_path / "run")
    import_dump("miles", tmp_path / "dump", output=tmp_path / "run", partial=True)


def test_an_old_dump_of_miles_with_context_parallelism_is_refused(tmp_path):
    dumps.write_miles_train(tmp_path / "dump", make_steps(1), tensor=1)
    for path in (tmp_path / "dump" / "train_data").iterdir():
        record = torch.load(path, weights_only=True)
        del record["cp_rank"], record["cp_size"]
        torch.save(record, path)
    with pytest.raises(ImportFailed, match=r"Without cp_rank|different lengths on two ranks"):
        import_dump("miles", tmp_path / "dump", output=tmp_path / "run")


@pytest.mark.parametrize("is_joined", rest_slow([True, False]))
@pytest.mark.parametrize("format", ["auto", "slime", "miles"])
def test_ranks_of_slime_are_slime_s(tmp_path, format, is_joined):
    steps = make_steps(0, 3)
    if is_joined:
        dumps.write_rollouts(tmp_path / "dump", steps)
    dumps.write_slime_ranks(tmp_path / "dump", steps)
    imported = import_dump(format, tmp_path / "dump", output=tmp_path / "run")
    assert imported.format == {"auto": "slime"}.get(format, format)
    assert (imported.num_sequences, imported.passes) == (12, ("rollout", "train"))
    check_stats(tmp_path / "run", everyone(steps))


def test_ranks_beside_rollouts_of_miles_are_miles_s(tmp_path):
    dumps.write_rollouts(tmp_path / "dump", make_steps(1), metadata={})
    dumps.write_slime_ranks(tmp_path / "dump", make_steps(1))
    assert import_dump("auto", tmp_path / "dump", output=tmp_path / "run").format == "miles"


@pytest.mark.parametrize("name", ["debug_train_{}_{}.pt", "train_data_{}_{}.pt", "train_{}_{}.pt", "dump/{}_{}.pt"])
def test_ranks_of_slime_under_names_of_one_s_own(tmp_path, name):
    """slime adds `_<id>_<rank>` to a template that lacks them."""
    dumps.write_slime_ranks(tmp_path / "dump", make_steps(7))
    for path in (tmp_path / "dump" / "train_data").iterdir():
        place = tmp_path / "other" / name.format(*path.stem.split("_"))
        place.parent.mkdir(parents=True, exist_ok=True)
        path.rename(place)
    assert import_dump("auto", tmp_path / "other", output=tmp_path / "run").format == "slime"
    check_stats(tmp_path / "run", everyone(make_steps(7)))


def test_samples_that_two_ranks_name_alike_are_refused(tmp_path):
    dumps.write_slime_ranks(tmp_path / "dump", make_steps(1))
    for path in (tmp_path / "dump" / "train_data").iterdir():
        record = torch.load(path, weights_only=True)
        del record["rollout_data"]["sample_indices"]
        torch.save(record, path)
    with pytest.raises(ImportFailed, match="sample row-0: another rank has different tokens"):
        import_dump("slime", tmp_path / "dump", output=tmp_path / "run")


@pytest.mark.parametrize("format", ["slime", "miles"])
def test_checkpoints_beside_dumps_are_left_alone(tmp_path, format):
    WRITERS[format](tmp_path / "out" / "dump", make_steps(1, 2))
    for name in ("ckpt/rollout/global_dataset_state_dict_1.pt", "ckpt/epoch_2.pt", "ckpt/rng_1_0.pt"):
        (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        torch.save({"sample_offset": 4}, tmp_path / "out" / name)
    assert import_dump("auto", tmp_path / "out", output=tmp_path / "run").format == format
    check_stats(tmp_path / "run", everyone(make_steps(1, 2)))


@pytest.mark.parametrize("left_padded", [True, False])
def test_skyrl_is_read_however_it_pads(tmp_path, left_padded):
    steps = make_steps(1)
    dumps.write_skyrl(tmp_path / "dump", steps, left_padded=left_padded)
    imported = import_dump("skyrl", tmp_path / "dump", output=tmp_path / "run")
    check_stats(tmp_path / "run", steps[1])
    assert imported.placeholders.clamped == sum((~s.mask).sum() for s in steps[1])


def test_skyrl_keeps_the_bits_of_bfloat16(tmp_path):
    steps = make_steps(1)
    dumps.write_skyrl(tmp_path / "dump", steps, bfloat16=True)
    import_dump("skyrl", tmp_path / "dump", output=tmp_path / "run")
    for sample in steps[1]:
        sample.train = torch.from_numpy(sample.train).bfloat16().float().numpy()
    check_stats(tmp_path / "run", steps[1])


def test_packed_sequences_of_prime_rl_are_split(tmp_path):
    steps = make_steps(1)
    dumps.write_prime_rl(tmp_path / "dump", steps, packed=True)
    assert import_dump("prime-rl", tmp_path / "dump", output=tmp_path / "run").num_sequences == 6
    check_stats(tmp_path / "run", steps[1])


def test_the_first_token_of_a_sequence_and_nulls_of_prime_rl_are_not_recorded(tmp_path):
    sample = make_samples(1, masked=False)[0]
    record = dumps.prime_rl_record(sample, 1, 0)
    cut = len(sample.prompt)
    record = {key: value[cut:] if isinstance(value, list) else value for key, value in record.items()}
    record["position_ids"] = list(range(len(sample.response)))
    record["trainer_logprobs"][1] = None
    dumps.write_lines(tmp_path / "step_1" / "rank_0.jsonl", [record])
    (tmp_path / "step_1" / "STABLE").touch()
    import_dump("prime-rl", tmp_path, output=tmp_path / "run")
    found = dict(connect(tmp_path / "run").execute('SELECT "pass", logprobs FROM scores').fetchall())
    assert [value is None for value in found["train"]] == [True, True] + [False] * (len(sample.response) - 2)
    assert [value is None for value in found["rollout"]] == [True] + [False] * (len(sample.response) - 1)


def test_steps_of_prime_rl_without_their_marker_are_held_back(tmp_path):
    dumps.write_prime_rl(tmp_path / "dump", make_steps(1))
    dumps.write_prime_rl(tmp_path / "dump", make_steps(2), stable=False)
    imported = import_dump("prime-rl", tmp_path / "dump", output=tmp_path / "run")
    assert (imported.num_sequences, len(imported.held_back)) == (6, 1)
    assert "step 2 has no STABLE" in imported.held_back[0]
    assert import_dump("prime-rl", tmp_path / "dump", output=tmp_path / "all", partial=True).num_sequences == 12
    dumps.write_prime_rl(tmp_path / "young", make_steps(2), stable=False)
    with pytest.raises(ImportFailed, match="step 2 has no STABLE"):
        import_dump("prime-rl", tmp_path / "young", output=tmp_path / "x")


def test_prev_logprobs_of_nothing_but_zeros_are_not_recorded(tmp_path):
    dumps.write_nemo_rl(tmp_path / "dump", make_steps(1, 2), prev=False)
    imported = import_dump("nemo-rl", tmp_path / "dump", output=tmp_path / "run")
    assert imported.placeholders.all_zero
    query = "SELECT list_count(logprobs) FROM scores WHERE \"pass\" = 'train'"
    assert {count for (count,) in connect(tmp_path / "run").execute(query).fetchall()} == {0}
    with pytest.raises(NothingToCompare, match="force_on_policy_ratio"):
        stats(tmp_path / "run")


@pytest.mark.parametrize("format", rest_slow(WRITERS, 2))
def test_a_folder_that_has_grown_adds_what_is_new_and_nothing_twice(tmp_path, format):
    WRITERS[format](tmp_path / "dump", make_steps(3))
    first = import_dump("auto", tmp_path / "dump", output=tmp_path / "run")
    again = import_dump("auto", tmp_path / "dump", output=tmp_path / "run")
    assert (first.num_sequences, again.num_sequences, again.num_known_files) == (6, 0, first.num_files)
    WRITERS[format](tmp_path / "dump", make_steps(4))
    assert import_dump("auto", tmp_path / "dump", output=tmp_path / "run").num_sequences == 6
    check_stats(tmp_path / "run", everyone(make_steps(3, 4)))
    assert verify(tmp_path / "run").is_whole
    assert not [sentence for sentence in info(str(tmp_path / "run")).missing if "twice" in sentence]


def test_a_step_that_the_trainer_has_not_dumped_yet_waits_for_it(tmp_path):
    steps = make_steps(1, 2)
    dumps.write_rollouts(tmp_path / "dump", steps)
    dumps.write_slime_train(tmp_path / "dump", {1: steps[1]})
    first = import_dump("slime", tmp_path / "dump", output=tmp_path / "run")
    assert (first.num_sequences, len(first.held_back)) == (6, 1)
    dumps.write_slime_train(tmp_path / "dump", {2: steps[2]})
    assert import_dump("slime", tmp_path / "dump", output=tmp_path / "run").num_sequences == 6
    check_stats(tmp_path / "run", everyone(steps))


def test_files_that_changed_since_they_were_imported_are_refused(tmp_path):
    dumps.write_nemo_rl(tmp_path / "dump", make_steps(1))
    import_dump("nemo-rl", tmp_path / "dump", output=tmp_path / "run")
    before = sorted(str(path) for path in (tmp_path / "run").rglob("*"))
    path = tmp_path / "dump" / "train_data_step1.jsonl"
    path.write_text(path.read_text().replace('"rewards": [1.0]', '"rewards": [2.0]'))
    with pytest.raises(ImportFailed, match="has changed since it was imported"):
        import_dump("nemo-rl", tmp_path / "dump", output=tmp_path / "run")
    assert sorted(str(path) for path in (tmp_path / "run").rglob("*")) == before


def test_another_folder_or_other_options_do_not_add_to_a_trace(tmp_path):
    dumps.write_nemo_rl(tmp_path / "dump", make_steps(1))
    dumps.write_nemo_rl(tmp_path / "other", make_steps(9))
    import_dump("nemo-rl", tmp_path / "dump", output=tmp_path / "run")
    with pytest.raises(ImportFailed, match="imported from another folder"):
        import_dump("nemo-rl", tmp_path / "other", output=tmp_path / "run")
    with pytest.raises(ImportFailed, match=r"was imported with --sample 1.0, but this import has --sample 0.5"):
        import_dump("nemo-rl", tmp_path / "dump", output=tmp_path / "run", sample=0.5)
    assert import_dump("nemo-rl", tmp_path / "other", output=tmp_path / "run", force=True).num_sequences == 6


def test_an_addition_that_fails_leaves_the_trace_as_it_was(tmp_path):
    dumps.write_nemo_rl(tmp_path / "dump", make_steps(1))
    import_dump("nemo-rl", tmp_path / "dump", output=tmp_path / "run")
    tree = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    (tmp_path / "dump" / "train_data_step2.jsonl").write_text("{}\n")
    with pytest.raises(ImportFailed, match="token_ids or the loss mask is missing"):
        import_dump("nemo-rl", tmp_path / "dump", output=tmp_path / "run")
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == tree


@pytest.mark.slow
@pytest.mark.parametrize("format", list(WRITERS))
def test_steps_and_samples_are_chosen(tmp_path, format):
    steps = make_steps(3, 4, 5, num=40)
    WRITERS[format](tmp_path / "dump", steps)
    import_dump(format, tmp_path / "dump", output=tmp_path / "part", steps="4:")
    check_stats(tmp_path / "part", everyone({step: steps[step] for step in (4, 5)}))
    half = [import_dump(format, tmp_path / "dump", output=tmp_path / name, sample=0.5) for name in ("a", "b")]
    assert half[0].num_sequences == half[1].num_sequences
    assert 30 < half[0].num_sequences < 90
    names = [
        connect(tmp_path / run).execute("SELECT step, seq_id FROM sequences ORDER BY ALL").fetchall() for run in "ab"
    ]
    assert names[0] == names[1]
    with pytest.raises(InvalidOption, match="sample"):
        import_dump(format, tmp_path / "dump", output=tmp_path / "x", sample=0.0)
    with pytest.raises(ImportFailed, match="selected 0 of 120 sequences"):
        import_dump(format, tmp_path / "dump", output=tmp_path / "x", sample=1e-12)


def test_fields_of_other_names_are_mapped(tmp_path):
    samples = make_samples(1)
    dumps.write_nemo_rl(tmp_path / "dump", {1: samples})
    path = tmp_path / "dump" / "train_data_step1.jsonl"
    path.write_text(path.read_text().replace("prev_logprobs", "policy_logprobs"))
    import_dump("nemo-rl", tmp_path / "dump", output=tmp_path / "run", map={"policy_logprobs": "train_logprobs"})
    check_stats(tmp_path / "run", samples)
    without = import_dump("nemo-rl", tmp_path / "dump", output=tmp_path / "one", map={"policy_logprobs": ""})
    assert without.passes == ("rollout",)
    with pytest.raises(ImportFailed, match="cannot be mapped to 'moon'"):
        import_dump("nemo-rl", tmp_path / "dump", output=tmp_path / "x", map={"rewards": "moon"})
    with pytest.raises(ImportFailed, match="no file has the field moon"):
        import_dump("nemo-rl", tmp_path / "dump", output=tmp_path / "y", map={"moon": "train_logprobs"})


@pytest.mark.parametrize("format", ["slime", "miles"])
def test_dumps_that_lie_under_other_names_are_recognised(tmp_path, format):
    WRITERS[format](tmp_path / "dump", make_steps(1))
    for place, path in (("rollout_data", "debug"), ("train_data", "debug/train")):
        shutil.copytree(tmp_path / "dump" / place, tmp_path / "other" / path, dirs_exist_ok=True)
    assert import_dump("auto", tmp_path / "other", output=tmp_path / "run").format == format
    check_stats(tmp_path / "run", make_samples(1))
    (tmp_path / "weights").mkdir()
    torch.save({"layer.weight": torch.ones(2)}, tmp_path / "weights" / "1.pt")
    with pytest.raises(ImportFailed, match=r"\.parquet"):
        import_dump("auto", tmp_path / "weights", output=tmp_path / "x")


@pytest.mark.parametrize("format", ["verl", "skyrl", "slime"])
def test_tensors_of_many_bytes_come_in(tmp_path, format):
    """From some size on they are looked at where they lie in the file, at any address."""
    steps = {1: make_samples(1, num=3000)}
    WRITERS[format](tmp_path / "dump", steps)
    import_dump(format, tmp_path / "dump", output=tmp_path / "run")
    check_stats(tmp_path / "run", steps[1])


def test_an_import_keeps_the_hash_of_what_it_read(tmp_path):
    dumps.write_rollouts(tmp_path / "dump", make_steps(1))
    import_dump("slime", tmp_path / "dump", output=tmp_path / "run")
    (state,) = Store(tmp_path / "run").writers()[0]
    content = (tmp_path / "dump" / "rollout_data" / "1.pt").read_bytes()
    assert state.sources == {"rollout_data/1.pt": sealed(content)}


KILLED = """
import os, signal, sys
from contextlib import contextmanager
from tim_trace import import_dump

@contextmanager
def progress(what, total):
    yield lambda units: os.kill(os.getpid(), signal.SIGKILL)

import_dump("nemo-rl", sys.argv[1], output=sys.argv[2], progress=progress)
"""


@pytest.mark.slow
def test_an_addition_that_is_killed_leaves_the_trace_as_it_was(tmp_path):
    dumps.write_nemo_rl(tmp_path / "dump", make_steps(1))
    import_dump("nemo-rl", tmp_path / "dump", output=tmp_path / "run")
    dumps.write_nemo_rl(tmp_path / "dump", make_steps(2))
    assert run(sys.executable, "-c", KILLED, tmp_path / "dump", tmp_path / "run").code == -9
    check_stats(tmp_path / "run", make_samples(1))
    assert import_dump("nemo-rl", tmp_path / "dump", output=tmp_path / "run").num_sequences == 6
    check_stats(tmp_path / "run", everyone(make_steps(1, 2)))
    assert not list((tmp_path / "run").glob(".tmp-*"))


def test_a_file_that_is_half_written_is_named_and_left(tmp_path):
    steps = make_steps(1, 2)
    dumps.write_rollouts(tmp_path / "dump", steps)
    path = tmp_path / "dump" / "rollout_data" / "2.pt"
    path.write_bytes(path.read_bytes()[:-100])
    imported = import_dump("slime", tmp_path / "dump", output=tmp_path / "run")
    assert imported.num_sequences == 6
    assert "2.pt is incomplete" in imported.held_back[0]
    with pytest.raises(ImportFailed, match="incomplete or damaged"):
        import_dump("slime", tmp_path / "dump", output=tmp_path / "x", partial=True)


def test_nothing_and_several_formats_are_no_guess(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ImportFailed, match="is empty"):
        import_dump("auto", tmp_path / "empty", output=tmp_path / "run")
    dumps.write_nemo_rl(tmp_path / "two", make_steps(1))
    dumps.write_skyrl(tmp_path / "two", make_steps(1))
    with pytest.raises(ImportFailed, match="skyrl and nemo-rl"):
        import_dump("auto", tmp_path / "two", output=tmp_path / "run")
    with pytest.raises(ImportFailed, match="unknown format 'moon'"):
        import_dump("moon", tmp_path / "two", output=tmp_path / "run")


def test_links_out_of_the_folder_and_special_files_are_not_read(tmp_path):
    dumps.write_nemo_rl(tmp_path / "elsewhere", make_steps(1))
    (tmp_path / "dump").mkdir()
    dumps.write_nemo_rl(tmp_path / "dump", make_steps(2))
    (tmp_path / "dump" / "train_data_step1.jsonl").symlink_to(tmp_path / "elsewhere" / "train_data_step1.jsonl")
    with pytest.raises(ImportFailed, match="link that points outside the folder"):
        import_dump("nemo-rl", tmp_path / "dump", output=tmp_path / "run")
    (tmp_path / "dump" / "train_data_step1.jsonl").unlink()
    os.mkfifo(tmp_path / "dump" / "train_data_step1.jsonl")
    with pytest.raises(ImportFailed, match="not a regular file"):
        import_dump("nemo-rl", tmp_path / "dump", output=tmp_path / "run")


def test_the_command_says_what_came_and_what_did_not(tmp_path):
    dumps.write_verl(tmp_path / "dump", make_steps(5), train=False)
    done = tim_trace("import", "auto", tmp_path / "dump", "-o", tmp_path / "run")
    assert done.code == 0
    assert "imported 6 sequences of verl" in done.stderr
    assert "no logprobs from pass train: the dump has no old_log_probs" in done.stderr
    done = tim_trace("import", "auto", tmp_path / "dump", "-o", tmp_path / "run")
    assert "1 files were already imported" in done.stderr


def test_every_format_says_what_it_is():
    for name, format in FORMATS.items():
        assert name == format.name
        assert format.writes
        assert format.files
        assert format.alignment
        assert format.columns


def test_json_of_the_wrong_form_is_one_sentence(tmp_path):
    for number, line in enumerate(
        ("[]", "1", "{", json.dumps({"token_ids": [[{}]], "token_loss_mask": [[1]]}), "\x00")
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "train_data_step1.jsonl").write_text(line + "\n")
        with pytest.raises(ImportFailed) as raised:
            import_dump("nemo-rl", folder, output=tmp_path / "run")
        assert "\n" not in str(raised.value)
        assert not (tmp_path / "run").exists()


def choices(num_tokens, seed):
    """[num_tokens, 3 layers, 2 slots]: no expert twice for a token."""
    draw = np.random.default_rng(seed)
    return np.array([[draw.permutation(200)[:2] for _ in range(3)] for _ in range(num_tokens)], np.int32)


def routing_of(run):
    """Name of a sequence -> the experts that its rollout recorded for each token."""
    query = "SELECT s.seq_id, routing, routing_start, len(prompt_ids) + len(response_ids) FROM scores AS s "
    query += "JOIN sequences USING (step, seq_id) WHERE \"pass\" = 'rollout' AND routing IS NOT NULL"
    rows = connect(run).execute(query).fetchall()
    found = read_routing(Store(run), [row[1:] for row in rows])
    return {row[0]: np.asarray(routing.expert_ids) for row, routing in zip(rows, found, strict=True)}


@pytest.mark.parametrize("as_tensor", rest_slow([False, True]))
@pytest.mark.parametrize("format", ["slime", "miles"])
def test_router_choices_of_rollouts_are_of_each_token_but_the_last(tmp_path, format, as_tensor):
    samples = make_samples(1)
    given = {s.index: choices(len(s.tokens) - 1, s.index) for s in samples}
    records = [dumps.rollout_sample(s) for s in samples]
    for record in records[:-1]:
        experts = given[record["index"]]
        record["rollout_routed_experts"] = torch.from_numpy(experts) if as_tensor else experts
    (tmp_path / "dump" / "rollout_data").mkdir(parents=True)
    more = {"metadata": {}} if format == "miles" else {}
    torch.save({"rollout_id": 1, "samples": records, **more}, tmp_path / "dump" / "rollout_data" / "1.pt")
    import_dump(format, tmp_path / "dump", output=tmp_path / "run")
    found = routing_of(tmp_path / "run")
    assert set(found) == {str(s.index) for s in samples[:-1]}
    for name, experts in found.items():
        np.testing.assert_array_equal(experts[:-1], given[int(name)])
        assert (experts[-1] == NOT_ROUTED).all()
    records[0]["rollout_routed_experts"] = given[samples[0].index][:-1]
    torch.save({"rollout_id": 1, "samples": records, **more}, tmp_path / "dump" / "rollout_data" / "1.pt")
    with pytest.raises(ImportFailed, match="Leave them out with --map rollout_routed_experts="):
        import_dump(format, tmp_path / "dump", output=tmp_path / "other")
    import_dump(format, tmp_path / "dump", output=tmp_path / "other", map={"rollout_routed_experts": ""})
    assert routing_of(tmp_path / "other") == {}


@pytest.mark.parametrize("is_scored", [False, True])
def test_router_choices_of_verl_are_read_until_the_trainer_has_scored(tmp_path, is_scored):
    samples = make_samples(1)
    tensors = dumps.verl_tensors(samples, train=is_scored)
    there = tensors["attention_mask"].bool().numpy()
    experts = np.zeros((*there.shape, 3, 2), np.int64)
    for row, sample in enumerate(samples):
        last = np.flatnonzero(there[row])[:-1]
        experts[row, last] = choices(len(sample.tokens) - 1, sample.index)
    tensors["routed_experts"] = torch.from_numpy(experts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dumps, "verl_tensors", lambda *_, **__: tensors)
        dumps.write_verl(tmp_path / "dump", {1: samples})
    import_dump("verl", tmp_path / "dump", output=tmp_path / "run")
    found = routing_of(tmp_path / "run")
    assert set(found) == (set() if is_scored else {str(row) for row in range(len(samples))})
    for name, ids in found.items():
        np.testing.assert_array_equal(ids[:-1], experts[int(name)][there[int(name)]][:-1])
        assert (ids[-1] == NOT_ROUTED).all()


@pytest.mark.parametrize("wrong", [np.full((2, 3, 2), 40_000), np.full((2, 3, 2), -2), np.zeros((2, 3, 2), np.float32)])
def test_what_is_no_expert_is_refused(wrong):
    with pytest.raises(ImportFailed, match=r"router choices must be integers"):
        routed(wrong, 3, "here")


@pytest.mark.parametrize(
    ("format", "steps", "ordered"),
    [
        ("slime", (3, 4), True),
        ("prime-rl", (3, None), False),
        ("slime", (4, 4), False),
        ("open-instruct", (3, 4), False),
    ],
)
def test_names_are_forgotten_behind_a_step_where_none_comes_twice(format, steps, ordered):
    parts = [Part(files=(str(number),), step=step) for number, step in enumerate(steps)]
    assert _are_ordered(FORMATS[format], parts) is ordered


def test_a_sequence_that_comes_twice_in_a_step_is_refused(tmp_path):
    samples = make_samples(3)
    dumps.write_nemo_rl(tmp_path / "dump", {3: samples})
    (file,) = (tmp_path / "dump").iterdir()
    records = [json.loads(line) | {"idx": 0} for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    with pytest.raises(ImportFailed, match="occurs twice"):
        import_dump("nemo-rl", tmp_path / "dump", output=tmp_path / "run")
