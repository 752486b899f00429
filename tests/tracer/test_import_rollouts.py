"""What engines sampled, as Megatron-RL and prime-rl store it: values as written, and hostile files refused in a line."""

import random
import subprocess
import sys

import dumps
import msgspec
import numpy as np
import pytest
from builders import in_process
from dumps import expected, make_samples, make_steps
from tim_trace import check, connect, import_dump, info, stats
from tim_trace.schemas.errors import ImportFailed, NothingToCompare
from tim_trace.tracer.importers.formats import FORMATS
from tim_trace.tracer.routing import read_routing
from tim_trace.tracer.store import Store

WRITE = {
    "bank": dumps.write_rollout_bank, "micro-batches": dumps.write_micro_batches, "traces": dumps.write_traces,
}  # fmt: skip
FORMAT = {"bank": "megatron-rl", "micro-batches": "prime-rl", "traces": "prime-rl"}


def as_stored(kind, values):
    """A pass's float32 logprobs after the writer stored them."""
    if kind == "bank":
        return values.astype(np.float16).astype(np.float32)
    return np.float32([round(float(value), 4) for value in values]) if kind == "traces" else values.astype(np.float32)


def rows_of(run):
    """Tokens of a sequence -> its columns and the engine's logprobs, NaN where there is none."""
    query = "SELECT sequences.*, logprobs FROM sequences JOIN scores USING (step, seq_id) WHERE \"pass\" = 'rollout'"
    cursor = connect(run).execute(query)
    names = [column[0] for column in cursor.description]
    found = [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
    for row in found:
        row["logprobs"] = np.array([np.nan if value is None else value for value in row["logprobs"]], np.float32)
    return {tuple(row["prompt_ids"] + row["response_ids"]): row for row in found}


@pytest.mark.parametrize("kind", WRITE)
def test_values_are_those_of_the_file(tmp_path, kind):
    steps = make_steps(3, 4)
    WRITE[kind](tmp_path / "dump", steps)
    imported = import_dump("auto", tmp_path / "dump", output=tmp_path / "run")
    samples = steps[3] + steps[4]
    assert (imported.format, imported.num_sequences) == (FORMAT[kind], len(samples))
    assert imported.num_tokens == sum(len(s.response) for s in samples)
    found = rows_of(tmp_path / "run")
    for step, some in steps.items():
        for sample in some:
            row = found[tuple(sample.tokens.tolist())]
            assert (row["step"], row["prompt_ids"]) == (step, sample.prompt.tolist())
            assert row["response_mask"] == sample.mask.tolist()
            wanted = np.where(sample.mask, as_stored(kind, sample.rollout), np.nan)
            assert np.array_equal(row["logprobs"], wanted.astype(np.float32), equal_nan=True)


@pytest.mark.parametrize("kind", WRITE)
def test_steps_are_chosen_and_a_folder_that_grew_adds_what_is_new(tmp_path, kind):
    steps = make_steps(3, 4, 5)
    WRITE[kind](tmp_path / "dump", steps)
    import_dump(FORMAT[kind], tmp_path / "dump", output=tmp_path / "part", steps="4:")
    assert connect(tmp_path / "part").execute("SELECT DISTINCT step FROM sequences ORDER BY 1").fetchall() == [
        (4,),
        (5,),
    ]
    WRITE[kind](tmp_path / "two", {step: steps[step] for step in (3, 4)})
    import_dump("auto", tmp_path / "two", output=tmp_path / "run")
    WRITE[kind](tmp_path / "five", {5: steps[5]})
    for path in (tmp_path / "five").rglob("*"):
        target = tmp_path / "two" / path.relative_to(tmp_path / "five")
        if path.is_dir():
            target.mkdir(exist_ok=True)
        elif path.name == "MANIFEST.json":
            (tmp_path / "two" / path.name).write_bytes((tmp_path / "dump" / path.name).read_bytes())
        elif not target.exists():
            path.replace(target)
    assert import_dump("auto", tmp_path / "two", output=tmp_path / "run").num_sequences == len(steps[5])
    assert len(rows_of(tmp_path / "run")) == len(steps[3] + steps[4] + steps[5])


# Megatron-RL


def test_groups_rewards_and_turns_of_a_bank_come_in(tmp_path):
    steps = make_steps(7, num=12, masked=False)
    dumps.write_rollout_bank(tmp_path / "bank", steps, turns=3)
    import_dump("auto", tmp_path / "bank", output=tmp_path / "run")
    found = rows_of(tmp_path / "run")
    assert len(found) == 4
    for at in range(0, 12, 3):
        turns = steps[7][at : at + 3]
        row = found[tuple(np.concatenate([s.tokens for s in turns]).tolist())]
        assert (row["group_id"], row["reward"]) == (f"gen-000006/{at // 6}", steps[7][at - at % 6].reward)
        wanted = np.concatenate([np.concatenate([np.full(len(s.prompt), np.nan), s.rollout]) for s in turns])[
            len(turns[0].prompt) :
        ]
        assert row["response_mask"] == (~np.isnan(wanted)).tolist()
        assert np.array_equal(row["logprobs"], wanted.astype(np.float16).astype(np.float32), equal_nan=True)


def test_turns_that_were_tokenized_anew_are_sequences_of_their_own(tmp_path):
    one, two = make_samples(1, num=2, masked=False)
    rows = write_groups(tmp_path / "bank", [[[part[0] for part in map(dumps.bank_turns, ([one], [two]))]]])
    import_dump("auto", rows, output=tmp_path / "run")
    assert set(rows_of(tmp_path / "run")) == {tuple(s.tokens.tolist()) for s in (one, two)}


def test_an_end_token_after_the_last_logprob_has_none(tmp_path):
    (one,) = make_samples(1, num=1, masked=False)
    tokens, logprobs, mask = dumps.bank_turns([one])[0]
    import_dump(
        "auto", write_groups(tmp_path / "bank", [[[([*tokens, 9], logprobs, [*mask, True])]]]), output=tmp_path / "run"
    )
    ((_, row),) = rows_of(tmp_path / "run").items()
    assert np.isnan(row["logprobs"]).tolist() == [False] * len(one.rollout) + [True]


def test_rollouts_of_text_are_counted(tmp_path):
    def as_text(record):
        if only_text or record["uid"].endswith("/1"):
            record["kind"] = "inline"

    only_text = False
    turn = (range(3, 9), [-0.5] * 4, [0, 0, 1, 1, 1, 1])
    groups = [[[turn]], [[turn], [turn]], [[turn]]]
    write_groups(tmp_path / "bank", groups, edit=as_text)
    imported = import_dump("megatron-rl", tmp_path / "bank", output=tmp_path / "run")
    assert imported.num_sequences == 2
    assert imported.notes == ("skipped 2 rollouts that are text without token ids",)
    only_text = True
    write_groups(tmp_path / "text", groups, edit=as_text)
    with pytest.raises(ImportFailed, match=r"contains no rows \(skipped 4 rollouts that are text without token ids\)"):
        import_dump("megatron-rl", tmp_path / "text", output=tmp_path / "none")


def write_groups(folder, groups, *, edit=lambda record: None):
    """A bank of one segment whose groups are lists of rollouts, each a list of turns (tokens, logprobs, mask)."""
    place = folder / "generations" / "generation-0" / "gen-000000"
    place.mkdir(parents=True)
    content, lines = {"tok": b"", "lp": b"", "mask": b""}, []
    for number, group in enumerate(groups):
        record = {
            "format_version": 2,
            "uid": f"gen-000000/{number}",
            "collection_iter": 0,
            "kind": "token",
            "group": {"rollouts": [{"reward": 0.5}] * len(group)},
        }
        slices = []
        for index, (key, dtype) in enumerate((("tok", np.int32), ("lp", np.float16), ("mask", np.uint8))):
            slices.append(
                np.asarray([value for turns in group for turn in turns for value in turn[index]], dtype).tobytes()
            )
            record[key] = {
                "offset": len(content[key]),
                "bytes": len(slices[-1]),
                "lengths": [[len(turn[index]) for turn in turns] for turns in group],
            }
            content[key] += slices[-1]
        edit(record)
        lines.append(dumps.sealed_record(record, slices))
    dumps.write_lines(place / "ledger.log", lines)
    for key, name in (("tok", "tokens.bin"), ("lp", "logprobs.bin"), ("mask", "masks.bin")):
        (place / name).write_bytes(content[key])
    return folder


def test_segments_that_the_manifest_does_not_name_are_left_out(tmp_path):
    dumps.write_rollout_bank(tmp_path / "bank", make_steps(1, 2))
    generations = tmp_path / "bank" / "generations"
    (generations / "generation-0123").rename(generations / "generation-old")
    steps = make_steps(3)
    dumps.write_rollout_bank(tmp_path / "bank", steps)
    import_dump("auto", tmp_path / "bank", output=tmp_path / "run")
    assert set(rows_of(tmp_path / "run")) == {tuple(s.tokens.tolist()) for s in steps[3]}


def test_the_trace_says_that_the_file_rounds(tmp_path):
    dumps.write_rollout_bank(tmp_path / "bank", make_steps(1))
    import_dump("auto", tmp_path / "bank", output=tmp_path / "run")
    (note,) = (each.note for each in info(str(tmp_path / "run")).passes if each.name == "rollout")
    assert note == "logprobs rounded to float16 in the imported file"
    with pytest.raises(NothingToCompare, match="only the engine's logprobs"):
        check(tmp_path / "run")


OTHER = "does not follow rollout bank version 2"
BREAK_RECORD = {
    "version": (lambda record: record.update(format_version=3), OTHER), "kind": (lambda record: record.update(kind=[]), OTHER),
    "no rollouts": (lambda record: record.update(group=[]), OTHER), "rollouts": (lambda record: record["group"].update(rollouts=[1]), OTHER),
    "too few": (lambda record: record["group"].update(rollouts=[{}]), "do not add up to"),
    "negative": (lambda record: record["tok"].update(offset=-4), OTHER),
    "overlap": (lambda record: record["tok"].update(offset=0), "is before the previous group's end"),
    "far": (lambda record: record["lp"].update(offset=2**62), "ends before byte"),
    "huge": (lambda record: record["mask"].update(bytes=2**62), "do not add up to"),
    "odd": (lambda record: record["tok"].update(bytes=record["tok"]["bytes"] + 1), "do not add up to"),
    "flag": (lambda record: record["mask"].update(bytes=True), OTHER), "no slice": (lambda record: record.update(tok=[]), OTHER),
    "no lengths": (lambda record: record["tok"].pop("lengths"), "do not add up to"),
    "texts": (lambda record: record["tok"].update(lengths=[["a"], [1]]), OTHER),
    "below zero": (lambda record: record["tok"].update(lengths=[[-1], [1]]), OTHER),
    "sum": (lambda record: record["lp"].update(lengths=[[2**62], [1]]), "do not add up to"),
    "beyond 64 bits": (lambda record: record["lp"].update(lengths=[[2**70], [1]]), "do not add up to"),
    "reward": (lambda record: record["group"].update(rollouts=[{"reward": "x"}] * 2), "expected a number"),
    "uid": (lambda record: record.update(uid=[]), "expected text"),
    "no step": (lambda record: record.update(uid="x", collection_iter=None), OTHER),
}  # fmt: skip


@pytest.mark.parametrize("name", BREAK_RECORD)
def test_a_hostile_ledger_is_one_sentence_and_no_trace(tmp_path, name):
    edit, sentence = BREAK_RECORD[name]
    groups = [[dumps.bank_turns([s]) for s in make_samples(step, num=2)] for step in (1, 2)]
    bank = write_groups(
        tmp_path / "bank", groups, edit=lambda record: edit(record) if record["uid"].endswith("1") else None
    )
    refused(bank, tmp_path / "run", sentence)


BREAK_BANK = {
    "changed": ("logprobs.bin", lambda content: bytes([content[0] ^ 1]) + content[1:], "does not match its checksum"),
    "cut": ("masks.bin", lambda content: content[:-1], "masks.bin ends before byte"),
    "gone": ("tokens.bin", lambda content: None, "tokens.bin is missing"),
    "no json": ("ledger.log", lambda content: b"\xff\n" + content, "line 1 is not JSON"),
    "no object": ("ledger.log", lambda content: b"[1]\n" + content, "line 1 is not an object"),
    "deep": ("ledger.log", lambda content: b"[" * 99_999 + b"\n" + content, "line 1 is not JSON"),
    "manifest": ("MANIFEST.json", lambda content: b"{", "not JSON"),
    "list": ("MANIFEST.json", lambda content: b"[]", "does not follow rollout bank version 2"),
    "newer": ("MANIFEST.json", lambda content: content.replace(b": 2,", b": 3,"), "does not follow rollout bank version 2"),
    "nothing": ("MANIFEST.json", lambda content: b'{"format_version": 2}', "missing required field `active_generation`"),
    "outside": ("MANIFEST.json", lambda content: content.replace(b"generation-0123", b"../../x"), "contains no"),
}  # fmt: skip


@pytest.mark.parametrize("name", BREAK_BANK)
def test_a_damaged_bank_is_one_sentence_and_no_trace(tmp_path, name):
    file, edit, sentence = BREAK_BANK[name]
    dumps.write_rollout_bank(tmp_path / "bank", make_steps(1))
    (path,) = (tmp_path / "bank").rglob(file)
    content = edit(path.read_bytes())
    path.unlink() if content is None else path.write_bytes(content)
    refused(tmp_path / "bank", tmp_path / "run", sentence)


def test_a_sidecar_that_is_a_link_out_of_the_bank_is_not_followed(tmp_path):
    dumps.write_rollout_bank(tmp_path / "bank", make_steps(1))
    (path,) = (tmp_path / "bank").rglob("tokens.bin")
    path.rename(tmp_path / "tokens.bin")
    path.symlink_to(tmp_path / "tokens.bin")
    refused(tmp_path / "bank", tmp_path / "run", "is a link that points outside the folder")


def test_a_group_that_is_being_written_waits(tmp_path):
    dumps.write_rollout_bank(tmp_path / "bank", make_steps(1))
    (path,) = (tmp_path / "bank").rglob("ledger.log")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]) + lines[2][:40])
    assert import_dump("auto", tmp_path / "bank", output=tmp_path / "run").num_sequences == 4
    path.write_bytes(b"".join(lines))
    assert import_dump("auto", tmp_path / "bank", output=tmp_path / "run").num_sequences == 2


def refused(dump, run, sentence, format="auto"):
    done = in_process(["import", format, str(dump), "-o", str(run)])
    assert done.code == 2
    assert sentence in done.stderr
    assert done.stderr.startswith("Error: ")
    assert done.stderr.count("\n") == 1
    assert not run.exists()


# prime-rl


def test_micro_batches_hold_temperature_reference_and_router_choices(tmp_path):
    steps = make_steps(2)
    draw = np.random.default_rng(0)
    chosen = {
        s.index: np.stack([draw.permutation(8)[:2] for _ in range(2 * len(s.tokens))])
        .reshape(-1, 2, 2)
        .astype(np.uint8)
        for s in steps[2]
    }
    dumps.write_micro_batches(tmp_path / "dump", steps, experts=lambda s: chosen[s.index])
    import_dump("auto", tmp_path / "dump", output=tmp_path / "run")
    found = rows_of(tmp_path / "run")
    query = """SELECT seq_id, logprobs FROM scores WHERE "pass" = 'reference'"""
    reference = dict(connect(tmp_path / "run").execute(query).fetchall())
    routing = routing_of(tmp_path / "run")
    for sample in steps[2]:
        row = found[tuple(sample.tokens.tolist())]
        assert (row["temperature"], row["advantage"]) == (0.75, pytest.approx(sample.advantage))
        assert reference[row["seq_id"]] == [
            float(v) if m else None for v, m in zip(sample.reference, sample.mask, strict=True)
        ]
        assert np.array_equal(routing[row["seq_id"]], chosen[sample.index])


def routing_of(run):
    query = "SELECT s.seq_id, routing, routing_start, len(prompt_ids) + len(response_ids) FROM scores AS s "
    query += "JOIN sequences USING (step, seq_id) WHERE \"pass\" = 'rollout' AND routing IS NOT NULL"
    rows = connect(run).execute(query).fetchall()
    found = read_routing(Store(run), [row[1:] for row in rows])
    return {row[0]: np.asarray(routing.expert_ids) for row, routing in zip(rows, found, strict=True)}


def test_traces_hold_both_sides_rewards_and_the_policy(tmp_path):
    steps = make_steps(5)
    dumps.write_traces(tmp_path / "dump", steps)
    import_dump("auto", tmp_path / "dump", output=tmp_path / "run")
    for sample in steps[5]:
        sample.rollout, sample.train = (as_stored("traces", values) for values in (sample.rollout, sample.train))
        row = rows_of(tmp_path / "run")[tuple(sample.tokens.tolist())]
        assert row["reward"] == 2 * sample.reward + 0.5
        assert dict(row["rewards"]) == {"correct": sample.reward, "format": 0.5}
        assert (row["temperature"], row["finish_reason"], row["group_id"], row["policy_version"]) == (
            0.75,
            "stop",
            "g",
            4,
        )
    found = stats(tmp_path / "run").dicts()[0]
    for name, value in expected(steps[5]).items():
        assert found[name] == pytest.approx(value, rel=1e-12), name


def test_a_node_that_several_branches_share_is_trained_once(tmp_path):
    """The graph and the branches are those that verifiers 0.4.1.dev86 gives (Trace.branches, token_ids, sampled_mask)."""
    user = {"mask": [False], "sampled": False, "logprobs": []}
    nodes = [
        user | {"token_ids": [1]}, {"parent": 0, "sampled": True, "token_ids": [2, 3], "mask": [False, True], "logprobs": [-0.5]},
        user | {"parent": 1, "token_ids": [4]}, {"parent": 2, "sampled": True, "token_ids": [5], "mask": [True], "logprobs": [-0.25]},
        user | {"parent": 1, "token_ids": [6]}, {"parent": 4, "sampled": True, "token_ids": [7], "mask": [True], "logprobs": [-0.75]},
        user | {"parent": 3, "token_ids": [8], "semantic_parents": [{"node": 3, "type": "compaction_attempt"}]},
    ]  # fmt: skip
    record = dumps.episode_record(make_samples(1, num=1), 2, nodes=nodes, calls=[])
    frozen = dumps.episode_record(make_samples(2, num=1), 2, agent={"trainable": False})
    dumps.write_lines(tmp_path / "dump/step_2/train/effective/traces.jsonl", [record, frozen])
    import_dump("auto", tmp_path / "dump", output=tmp_path / "run")
    ((_, row),) = rows_of(tmp_path / "run").items()
    assert (row["prompt_ids"], row["response_ids"]) == ([1, 2], [3, 6, 7])
    assert row["response_mask"] == [True, False, True]
    nodes[-1]["semantic_parents"] = []
    dumps.write_lines(tmp_path / "dump/step_2/train/effective/traces.jsonl", [record])
    import_dump("auto", tmp_path / "dump", output=tmp_path / "run", force=True)
    assert {row["response_mask"].count(True) for row in rows_of(tmp_path / "run").values()} == {1, 2}


def test_the_form_with_the_trainer_s_logprobs_is_taken(tmp_path):
    steps = make_steps(3)
    for write in (dumps.write_traces, dumps.write_micro_batches, dumps.write_prime_rl):
        write(tmp_path / "dump", steps)
        assert import_dump("auto", tmp_path / "dump", output=tmp_path / "run", force=True).num_sequences == len(
            steps[3]
        )
    assert "train" in import_dump("auto", tmp_path / "dump", output=tmp_path / "run", force=True).passes


def broken_batch(**changes):
    """A file of one micro-batch with other fields."""
    batch = dumps.micro_batch(make_samples(1, num=2))
    for name, value in changes.items():
        setattr(batch, name, value)
    return msgspec.msgpack.encode([batch])


ROUTED = dumps.RoutedExperts
BINARY = {
    "empty": (b"", "cannot be decoded as prime-rl micro-batches"), "zeros": (bytes(99), "cannot be decoded as prime-rl micro-batches"),
    "junk": (b"\xc1" * 99, "cannot be decoded as prime-rl micro-batches"), "deep": (b"\x91" * 99_999, "cannot be decoded as prime-rl micro-batches"),
    "bomb": (b"\xdd\xff\xff\xff\xff" + b"\x90" * 99, "fewer micro-batches than"), "small": (b"\xdc\x00\x40" + b"\x90" * 64, "fewer micro-batches than"),
    "cut": (broken_batch()[:-9], "cannot be decoded as prime-rl micro-batches"), "more": (broken_batch() + b"\x00", "cannot be decoded as prime-rl micro-batches"),
    "texts": (broken_batch(input_ids=["a"]), "Expected `int`, got `str`"), "nulls": (broken_batch(advantages=[None]), "Expected `float`, got `None`"),
    "object": (broken_batch(loss_mask={"a": 1}), "Expected `array`, got `object`"), "big": (broken_batch(input_ids=[2**63]), "expected a list of numbers"),
    "short mask": (broken_batch(loss_mask=[True]), "loss_mask must have one entry per token"),
    "long": (broken_batch(inference_logprobs=[-1.0] * 99), "rollout_logprobs must have one entry per token"),
    "negative": (broken_batch(input_ids=[-1] * len(msgspec.msgpack.decode(broken_batch())[0][0])), "expected a list of token ids"),
    "dtype": (broken_batch(routed_experts=ROUTED(b"", [0, 1, 1], "object")), "routed_experts has"),
    "shape": (broken_batch(routed_experts=ROUTED(b"", [2**40, 2**40, 1], "uint8")), "routed_experts has 0 bytes"),
    "flat": (broken_batch(routed_experts=ROUTED(b"\0", [1], "uint8")), "routed_experts has"),
    "few": (broken_batch(routed_experts=ROUTED(b"\0", [1, 1, 1], "uint8")), "routed_experts must have one entry per token"),
}  # fmt: skip


@pytest.mark.parametrize("name", BINARY)
def test_hostile_micro_batches_are_one_sentence_and_no_trace(tmp_path, name):
    content, sentence = BINARY[name]
    path = tmp_path / "dump" / "step_1" / "rank_0.bin"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    refused(tmp_path / "dump", tmp_path / "run", sentence)


def trace_with(**node):
    nodes = [
        {"token_ids": [1], "mask": [False]},
        {"parent": 0, "sampled": True, "token_ids": [2], "mask": [True], "logprobs": [-1.0]} | node,
    ]
    return {"traces": [{"nodes": nodes}]}


EPISODES = {
    "text": ({"traces": "x"}, "expected a list of objects"), "numbers": ({"traces": [1]}, "expected a list of objects"),
    "none": ({}, "contains no rows"), "nodes": ({"traces": [{"nodes": {"a": 1}}]}, "expected a list of objects"),
    "cycle": (trace_with(parent=1), "expected the index of an earlier node"), "later": (trace_with(parent=9), "expected the index of an earlier node"),
    "flag": (trace_with(parent=False), "expected the index of an earlier node"), "below": (trace_with(parent=-1), "expected the index of an earlier node"),
    "mask": (trace_with(mask=[True, True]), "mask has 2 entries for 1 token_ids"), "two": (trace_with(mask=[2]), "expected a list with only 0 and 1"),
    "logprobs": (trace_with(logprobs=[-1.0, -2.0]), "rollout_logprobs has 2 values for 1 sampled tokens"),
    "words": (trace_with(logprobs=["a"]), "expected a list of numbers"), "ids": (trace_with(token_ids=[-1]), "expected a list of token ids"),
    "links": (trace_with(semantic_parents=[[]]), "expected a list of objects"), "run": (trace_with() | {"run": 1}, "expected an object"),
    "version": (trace_with() | {"run": {"work": {"policy": {"end": "x"}}}}, "expected a whole number"),
    "rewards": ({"traces": [{"nodes": [], "rewards": {"a": 1}}]}, "expected an object"),
    "score": ({"traces": [{"nodes": [], "rewards": {"a": {"score": "x"}}}]}, "expected a number"),
    "sampling": ({"traces": [trace_with()["traces"][0] | {"calls": [{"node": 1, "sampling": []}]}]}, "expected an object"),
}  # fmt: skip


@pytest.mark.parametrize("name", EPISODES)
def test_hostile_traces_are_one_sentence_and_no_trace(tmp_path, name):
    record, sentence = EPISODES[name]
    dumps.write_lines(tmp_path / "dump/step_1/train/effective/traces.jsonl", [record])
    refused(tmp_path / "dump", tmp_path / "run", sentence)


def test_a_graph_whose_branches_repeat_a_long_prefix_is_refused(tmp_path):
    """500,000 tokens once in the file, but in each of 5,000 branches."""
    nodes = [{"token_ids": [1] * 500_000, "mask": [0] * 500_000}]
    nodes += [{"parent": 0, "sampled": True, "token_ids": [1], "mask": [1]}] * 5_000
    dumps.write_lines(tmp_path / "dump/step_1/train/effective/traces.jsonl", [{"traces": [{"nodes": nodes}]}])
    refused(tmp_path / "dump", tmp_path / "run", "more than 64 times the file size in memory")


# Any damage


def damaged(chance, content):
    """A copy with bytes changed, removed, doubled or cut off."""
    at, size = chance.randrange(max(len(content), 1)), chance.randrange(1, 9)
    return chance.choice(
        [
            content[:at], content[at:], content[:at] + content[at + size :], content[:at] + chance.randbytes(size) + content[at + size :],
            content[:at] + content[at : at + 99] + content[at:], b"",
        ]
    )  # fmt: skip


@pytest.mark.parametrize("kind", WRITE)
def test_damage_by_chance_is_refused_or_gives_numbers(tmp_path, kind):
    chance, refusals = random.Random(kind), 0
    WRITE[kind](tmp_path / "dump", make_steps(3))
    files = [path for path in sorted((tmp_path / "dump").rglob("*")) if path.is_file() and "all" not in path.parts]
    for case in range(40):
        path = chance.choice(files)
        content = path.read_bytes()
        path.write_bytes(damaged(chance, content))
        done = in_process(["import", FORMAT[kind], str(tmp_path / "dump"), "-o", str(tmp_path / f"run{case}")])
        assert (done.code, done.stderr.count("\n")) == (2, 1) or done.code == 0, done.stderr
        assert (tmp_path / f"run{case}").exists() == (done.code == 0)
        refusals += done.code == 2
        path.write_bytes(content)
    assert refusals > 8


_PEAK = """
import resource, sys
from tim_trace import import_dump
import_dump(sys.argv[1], sys.argv[2], output=sys.argv[3])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", WRITE)
def test_memory_does_not_grow_with_the_number_of_steps(tmp_path, kind):
    peaks = []
    for num in (2, 12):
        WRITE[kind](tmp_path / str(num), {step: make_samples(step, num=600) for step in range(1, num + 1)})
        arguments = [FORMAT[kind], str(tmp_path / str(num)), str(tmp_path / f"run{num}")]
        done = subprocess.run([sys.executable, "-c", _PEAK, *arguments], capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout) * 1024)
    assert peaks[1] < peaks[0] + (24 << 20)


def test_the_formats_name_their_options():
    assert "--rl-durable-rollout-bank" in FORMATS["megatron-rl"].writes
    assert "rank_<r>.bin" in FORMATS["prime-rl"].files
