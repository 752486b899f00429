import shutil
import sys

import numpy as np
import pytest
import torch
import zarr
from builders import PROGRAMS, ROOT, run
from forged import change_document
from peft import LoraConfig, get_peft_model
from tim_trace.analysis.info import info
from tim_trace.analysis.query import sql
from tim_trace.schemas.documents import Manifest, WriterState
from tim_trace.schemas.errors import DamagedTrace, InvalidRecord, WeightsMissing
from tim_trace.tracer.create import new_trace
from tim_trace.tracer.recorder import Recorder
from tim_trace.tracer.store import Store
from tim_trace.tracer.weights import chunks
from tim_trace.tracer.weights.chunks import added, apply_changes, changes_of, decode_changes, write_changes
from tim_trace.tracer.weights.identity import dtypes
from tim_trace.tracer.weights.layout import model_parameters, model_tensors
from tim_trace.tracer.weights.reader import WeightReader
from tim_trace.tracer.weights.writer import WeightWriter
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import LlamaConfig, LlamaForCausalLM


def reader_of(folder):
    """A reader of the weights in a folder, whose writers kept no state."""
    store = Store(folder)
    return WeightReader(store, [WriterState(writer=name.rpartition("-")[0]) for name in store.folders("weights")])


def make_model(seed=0):
    """Tensors of several dtypes and shapes; the head is tied to the embedding."""
    draw = torch.Generator().manual_seed(seed)
    embedding = torch.randn(40, 8, generator=draw)
    return {
        "embed.weight": embedding,
        "layer.weight": torch.randn(8, 8, generator=draw).to(torch.bfloat16),
        "layer.half": torch.randn(3, 5, generator=draw).to(torch.float16),
        "counter": torch.tensor(3),
        "mask": torch.tensor([True, False]),
        "transposed": torch.randn(4, 6, generator=draw).T,
        "head.weight": embedding,
    }


def step(tensors, seed):
    """Change a few elements in place, as an optimizer does."""
    draw = torch.Generator().manual_seed(seed)
    for name in ("embed.weight", "layer.weight"):
        flat = tensors[name].view(-1)
        flat[torch.randint(len(flat), (3,), generator=draw)] += 0.5


def bits(tensor):
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    tensor = tensor.contiguous()
    return tensor.view(kinds[tensor.element_size()]).numpy().copy()


def record(folder, num_versions=12, rows=5, model=None, most=None):
    """Record versions 0, 1, 2, ... and return the bits of each."""
    tensors, expected = model or make_model(), {}
    writer = WeightWriter(folder, "p1-abc", lambda *_: None, versions_a_keyframe=rows, most_a_keyframe=most or rows)
    for version in range(num_versions):
        if version:
            step(tensors, version)
        writer.snapshot(version, tensors)
        expected[version] = {name: bits(tensor) for name, tensor in tensors.items()}
    writer.close()
    assert writer.error is None, writer.error
    return expected


def record_large(folder, num_versions):
    """Versions all of whose elements change."""
    expected = {}
    writer = WeightWriter(folder, "p1-abc", lambda *_: None)
    for version in range(num_versions):
        tensors = {"a": torch.randn(600, generator=torch.Generator().manual_seed(version))}
        writer.snapshot(version, tensors)
        expected[version] = {"a": bits(tensors["a"])}
    writer.close()
    return expected


def same(loaded, expected):
    return loaded.keys() == expected.keys() and all(
        loaded[name].bits.shape == value.shape and loaded[name].bits.tobytes() == value.tobytes()
        for name, value in expected.items()
    )


def test_every_version_comes_back_bit_for_bit_in_any_order(tmp_path):
    expected = record(tmp_path)
    reader = reader_of(tmp_path)
    assert reader.versions == list(range(12))
    for version in [*range(12), 11, 0, 7, 3, 4, 2, 9, 8]:
        assert same(reader.load(version), expected[version]), version
    assert same(reader_of(tmp_path).load(8), expected[8])


def test_a_version_is_a_few_steps_away_from_its_keyframe(tmp_path):
    expected = record(tmp_path, 90, most=80, model=make_model() | {"frozen": torch.zeros(9000)})
    reader = reader_of(tmp_path)
    for version, (part,) in reader.parts.items():
        row = version % 80
        assert part.row == row
        # Base 4: 3 rows of each length of step at most.
        assert part.base_row == (row - max(4**n for n in range(4) if row % 4**n == 0) if row else None)
    for version in [*range(90), *np.random.default_rng(0).permutation(90)]:
        assert same(reader.load(version), expected[version]), version
    assert len(reader._path(reader.parts[63][0])) == 10


def test_many_changes_on_the_way_begin_a_segment(tmp_path):
    # Each version changes 50 of 1,000 elements, other ones: 7 steps of them are 350.
    tensors, expected = {"a": torch.zeros(1000, dtype=torch.bfloat16)}, {}
    writer = WeightWriter(tmp_path, "p1-abc", lambda *_: None)
    for version in range(12):
        tensors["a"][50 * version : 50 * version + 50] += 1
        writer.snapshot(version, tensors)
        expected[version] = {"a": bits(tensors["a"])}
    writer.close()
    reader = reader_of(tmp_path)
    assert [version for version in range(12) if reader.parts[version][0].is_keyframe] == [0, 8]
    assert all(same(reader.load(version), expected[version]) for version in range(12))


def test_updates_of_few_and_of_many_elements_come_back(tmp_path):
    draw = torch.Generator().manual_seed(3)
    tensors, expected = {"a": torch.randn(500, generator=draw)}, {}
    writer = WeightWriter(tmp_path, "p1-abc", lambda *_: None)
    for version, number in enumerate([0, 2, 2, 400, 3, 400, 400, 2, 2, 0, 5]):
        tensors["a"][:number] += torch.randn(number, generator=draw)
        writer.snapshot(version, tensors)
        expected[version] = {"a": bits(tensors["a"])}
    writer.close()
    assert writer.error is None
    reader = reader_of(tmp_path)
    assert [reader.parts[version][0].base_row for version in range(5)] == [None, 0, 1, None, 0]
    assert all(same(reader.load(version), expected[version]) for version in [*range(11), 3, 8, 2, 10])


def test_traces_whose_rows_all_follow_each_other_are_read():
    reader = reader_of(ROOT / "tests" / "data" / "weights-v1")
    assert reader.versions == list(range(6))
    for version in (5, 0, 3, 2, 4, 1):
        loaded = reader.load(version)
        assert reader.parts[version][0].base_row is None
        assert (loaded["head.weight"].bits == loaded["embed.weight"].bits).all()
    before, after = (reader_of(ROOT / "tests" / "data" / "weights-v1").load(version) for version in (2, 3))
    changed = {name: int((before[name].bits != after[name].bits).sum()) for name in before if name != "head.weight"}
    assert changed == reader.parts[3][0].num_changed


@pytest.mark.parametrize("dtype", ["bool", "bfloat16", "float32", "float64"])
def test_changes_come_back(tmp_path, dtype):
    draw = np.random.default_rng(4)
    kind = chunks.bits_type(dtype)
    for number in (1, 5, 900):
        bits_C = draw.integers(0, np.iinfo(kind).max, 3000, kind, endpoint=True)
        other_C = bits_C.copy()
        places = draw.choice(3000, number, replace=False)
        other_C[places] = draw.integers(0, np.iinfo(kind).max, number, kind, endpoint=True)
        found = changes_of(bits_C ^ other_C, other_C)
        write_changes(tmp_path / "changes", found)
        encoded = (tmp_path / "changes").read_bytes()
        places_K, differences_K = decode_changes(encoded, dtype, 3000)
        assert (places_K == found[0]).all()
        moved_C = bits_C.copy()
        apply_changes(moved_C, (places_K, differences_K))
        assert (moved_C == other_C).all()
        apply_changes(moved_C, (places_K, differences_K), undo=True)
        assert (moved_C == bits_C).all()
        for wrong in (encoded[:-3], encoded[:20], b"", encoded[:8] + encoded[9:]):
            with pytest.raises(ValueError, match=r"contain|match|incomplete"):
                decode_changes(wrong, dtype, 3000)
        claiming = bytearray(encoded)
        claiming[12:16] = (1 << 31).to_bytes(4, "little")  # what blosc would make room for
        with pytest.raises(ValueError, match=r"must contain a whole number of \d+-byte values, at most 6,000"):
            decode_changes(bytes(claiming), dtype, 3000)
        with pytest.raises(ValueError, match=r"contain|beyond"):
            decode_changes(encoded, dtype, int(places_K[-1]))


def test_changes_that_take_each_other_back_are_none():
    there, back = ((np.array([4, 9]), np.array(by, np.uint16)) for by in ([1, 2], [65535, 5]))
    places, differences = added([there, back])
    assert (places.tolist(), differences.tolist(), differences.dtype) == ([9], [7], np.uint16)


def test_a_row_that_is_said_to_change_a_later_one_is_refused(tmp_path):
    record(tmp_path, 3)
    change_document(tmp_path / "weights" / "p1-abc-000000.1.json", lambda values: values | {"base_row": 2})
    with pytest.raises(DamagedTrace, match="row 1 is recorded as a change to row 2, which is not an earlier row"):
        reader_of(tmp_path).load(1)


def test_what_was_loaded_is_the_caller_s_to_change(tmp_path):
    expected = record(tmp_path, 2)
    reader = reader_of(tmp_path)
    reader.load(0)["embed.weight"].bits[:] = 0
    assert same(reader.load(1), expected[1])


def test_a_version_is_kept_once(tmp_path):
    tensors = make_model()
    writer = WeightWriter(tmp_path, "p1-abc", lambda *_: None)
    writer.snapshot(3, tensors)
    writer.snapshot(3, tensors)
    writer.close()
    assert reader_of(tmp_path).versions == [3]


def test_tied_tensors_are_stored_once(tmp_path):
    record(tmp_path, 1)
    reader = reader_of(tmp_path)
    layout = reader.layout(reader.parts[0][0])
    assert layout.tied == {"head.weight": "embed.weight"}
    assert layout.num_elements["float32"] == 40 * 8 + 24


def test_changed_elements_are_counted(tmp_path):
    record(tmp_path, 7, rows=3)
    reader = reader_of(tmp_path)
    records = {version: parts[0] for version, parts in reader.parts.items()}
    assert records[0].num_changed is None
    for version in range(1, 7):
        changed = records[version].num_changed
        assert 1 <= changed["embed.weight"] <= 3, version
        assert changed["transposed"] == 0
    assert [records[version].is_keyframe for version in range(7)] == [True, False, False] * 2 + [True]


def test_a_keyframe_comes_again_once_the_deltas_outweigh_it_or_are_many(tmp_path):
    large = {"a": torch.zeros(60_000)}  # all of which changes, at random
    for name, model, kinds in (
        ("small", make_model(), [True, *[False] * 6, True]),
        ("large", large, [True, False, False, True, False, False, True, False]),
    ):
        tensors = model
        (tmp_path / name).mkdir()
        writer = WeightWriter(tmp_path / name, "p1-abc", lambda *_: None, versions_a_keyframe=3, most_a_keyframe=7)
        expected = {}
        for version in range(8):
            if name == "large":
                tensors["a"].copy_(torch.randn(60_000, generator=torch.Generator().manual_seed(version)))
            elif version:
                step(tensors, version)
            writer.snapshot(version, tensors)
            expected[version] = {key: bits(tensor) for key, tensor in tensors.items()}
        writer.close()
        reader = reader_of(tmp_path / name)
        assert [reader.parts[version][0].is_keyframe for version in range(8)] == kinds, name
        assert all(same(reader.load(version), expected[version]) for version in (7, 0, 6, 3))


def test_unchanged_weights_cost_nothing(tmp_path):
    tensors = make_model()
    writer = WeightWriter(tmp_path, "p1-abc", lambda *_: None)
    writer.snapshot(0, tensors)
    writer.snapshot(1, tensors)
    writer.close()
    reader = reader_of(tmp_path)
    assert reader.parts[1][0].num_bytes == 0
    assert reader.parts[1][0].chain != reader.parts[0][0].chain
    assert same(reader.load(1), {name: bits(tensor) for name, tensor in tensors.items()})


def test_zarr_reads_the_arrays(tmp_path, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 256)
    expected = record(tmp_path, 3)
    group = zarr.open_group(tmp_path / "weights" / "p1-abc-000000", mode="r")
    array = group["float32"]
    assert array.attrs["dtype"] == "float32"
    assert array[0][:320].tobytes() == expected[0]["embed.weight"].tobytes()
    assert not array[1:3].any()  # few elements changed: they lie beside the array
    assert group["bfloat16"].dtype == np.uint16


def test_zarr_reads_the_rows_in_which_much_changed(tmp_path, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 256)
    expected = record_large(tmp_path, 3)
    array = zarr.open_group(tmp_path / "weights" / "p1-abc-000000", mode="r")["float32"]
    assert (array[0] ^ array[1] ^ array[2]).tobytes() == expected[2]["a"].tobytes()


def test_weights_of_several_chunks_come_back(tmp_path, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 100)
    expected = record(tmp_path)
    reader = reader_of(tmp_path)
    assert len(reader.parts[0][0].chunks["float32"]) > 10
    assert all(same(reader.load(version), expected[version]) for version in range(12))


@pytest.mark.parametrize("most_held", [0, 1 << 40])
def test_tensors_that_are_read_one_by_one_are_the_same_bits_in_any_order(tmp_path, monkeypatch, most_held):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 64)
    expected = record(tmp_path)
    reader = reader_of(tmp_path)
    reader.most_held = most_held
    for version in [11, 10, 0, 3, 4, 4, 9, 2]:
        assert same(reader.load(version, is_lazy=True), expected[version])
        assert (len(reader._held) > 1) == (most_held > 0 and version != 11)
    found = reader.load(5, is_lazy=True)
    assert found["head.weight"] is found["embed.weight"]  # tied
    reader.load(6)
    assert np.array_equal(
        found["embed.weight"].bits.view(np.int32), expected[5]["embed.weight"]
    )  # though another one is held


def test_a_damaged_chunk_is_named_when_its_tensor_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 64)
    record(tmp_path, num_versions=1)
    (path,) = tmp_path.glob("weights/*/float32/c/0/0")
    path.unlink()
    found = reader_of(tmp_path).load(0, is_lazy=True)
    assert found["counter"].bits == 3
    with pytest.raises(DamagedTrace, match="the keyframe for version 0 is missing or damaged"):
        found["embed.weight"].bits  # noqa: B018


def test_a_new_layout_begins_with_a_keyframe(tmp_path):
    tensors = make_model()
    writer = WeightWriter(tmp_path, "p1-abc", lambda *_: None)
    writer.snapshot(0, tensors)
    tensors["adapter"] = torch.ones(2)
    writer.snapshot(1, tensors)
    writer.close()
    reader = reader_of(tmp_path)
    assert reader.parts[1][0].is_keyframe
    assert set(reader.load(1)) == set(tensors)
    assert "adapter" not in reader.load(0)


def changes(folder, segment, dtype, row):
    return folder / "weights" / segment / dtype / "changes" / str(row) / "0"


def test_a_damaged_or_missing_delta_names_itself_and_gives_no_wrong_weights(tmp_path):
    (tmp_path / "whole").mkdir()
    record(tmp_path / "whole")
    for name, damage in {
        "missing": lambda path: path.unlink(),
        "torn": lambda path: path.write_bytes(path.read_bytes()[:-5]),
        "other": lambda path: path.write_bytes(changes(tmp_path / "whole", "p1-abc-000001", "float32", 1).read_bytes()),
    }.items():
        folder = tmp_path / name
        shutil.copytree(tmp_path / "whole", folder)
        damage(changes(folder, "p1-abc-000001", "float32", 2))
        reader = reader_of(folder)
        for version in (7, 8):
            with pytest.raises(DamagedTrace, match=r"p1-abc-000001.*version 7"):
                reader.load(version)
        for version in (0, 4, 5, 6, 9, 10, 11):  # row 4 of the segment is made from row 0
            reader.load(version)


def test_a_version_that_is_missing_is_named_with_what_there_is(tmp_path):
    record(tmp_path, 4)
    with pytest.raises(WeightsMissing, match=r"no weights of version 9; it has 4 versions, 0 to 3"):
        reader_of(tmp_path).load(9)
    (tmp_path / "weights" / "p1-abc-000000.1.json").unlink()
    reader = reader_of(tmp_path)
    with pytest.raises(WeightsMissing, match="row 1 in weights/p1-abc-000000 is missing"):
        reader.load(2)
    reader.load(0)


def test_a_version_file_that_cannot_be_read_is_named(tmp_path):
    record(tmp_path, 2)
    (tmp_path / "weights" / "p1-abc-000000.1.json").write_text("{")
    reader = reader_of(tmp_path)
    assert reader.versions == [0]
    assert "p1-abc-000000.1.json" in reader.damaged[0]


def test_a_dtype_that_cannot_be_kept_is_named(tmp_path):
    writer = WeightWriter(tmp_path, "p1-abc", lambda *_: None)
    with pytest.raises(InvalidRecord, match="'wave' is complex64"):
        writer.snapshot(0, {"wave": torch.zeros(2, dtype=torch.complex64)})
    writer.close()


@pytest.mark.slow
def test_each_process_keeps_its_shard_and_the_whole_comes_back(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", PROGRAMS / "shards.py"]
    done = run(*command, tmp_path / "run", tmp_path)
    assert done.code == 0, done.stderr
    reader = reader_of(tmp_path / "run")
    assert reader.versions == [0, 1, 2]
    assert all(len(parts) == 2 for parts in reader.parts.values())
    for version in (2, 0, 1):
        whole = torch.load(tmp_path / f"{version}.pt")
        expected = {name: bits(tensor) for name, tensor in whole.items()}
        assert same(reader_of(tmp_path / "run").load(version, is_lazy=True), expected)
        assert same(reader.load(version), expected)
    next((tmp_path / "run" / "weights").glob("r1-*.1.json")).unlink()
    with pytest.raises(
        WeightsMissing, match=r"version 1: .* has only \d+ of \d+ elements, because some writers' files are missing"
    ):
        reader_of(tmp_path / "run").load(1)
    with pytest.raises(WeightsMissing, match=r"because some writers' files are missing"):
        reader_of(tmp_path / "run").load(1, is_lazy=True)


KINDS = (
    "fsdp2", "full", "full-flat", "grad_op", "grad_op-flat", "none", "full-offload", "full-flat-offload", "full-FULL",
    "full-SHARDED", "full-flat-LOCAL", "full-half", "full-verl", "full-flat-verl",
)  # fmt: skip
"""Ways of sharding of tests/programs/fsdp_shards.py."""
MANIFEST = Manifest(
    run_id="r", created_at="", created_by="", source="record", command=(), capture="logprobs", capture_fraction=1.0
)


@pytest.mark.slow
def test_shards_of_fsdp_are_recorded_without_a_collective_and_where_one_recorder_stops_the_others_go_on(tmp_path):
    for kind in KINDS:
        with new_trace(tmp_path / kind / "run", MANIFEST, force=False):
            pass
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = run(*command, PROGRAMS / "fsdp_shards.py", tmp_path, *KINDS)
    assert done.code == 0, done.stderr
    for kind in KINDS:
        store = Store(tmp_path / kind / "run")
        reader = WeightReader(store, store.writers()[0])
        assert (kind, reader.versions) == (kind, [0, 1, 2, 3])
        for version in (1, 0):
            whole = torch.load(tmp_path / kind / f"{version}.pt")
            assert same(reader.load(version), {name: bits(tensor) for name, tensor in whole.items()}), kind
        if kind != "none":  # every process holds all of it, and the first one records it
            with pytest.raises(
                WeightsMissing,
                match=r"version 3: .* has only \d+ of \d+ elements, because some writers' files are missing",
            ):
                reader.load(3)


@pytest.mark.parametrize("fault", ["_copy", "WeightWriter._write"])
def test_weights_that_run_out_of_memory_end_alone(tmp_path, monkeypatch, capsys, fault):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(f"tim_trace.tracer.weights.writer.{fault}", full)
    with Recorder(tmp_path / "run") as recorder:
        for version in range(3):
            recorder.add_weights(version, make_model())
            recorder.add_metrics(version, {"loss": 0.5})
    assert capsys.readouterr().err.count("no longer recorded: weights (OutOfMemoryError: CUDA out of memory)") == 1
    found = info(str(tmp_path / "run"))
    assert found.state == "finished"
    assert "not recorded: weights, after an error (OutOfMemoryError: CUDA out of memory)" in found.missing
    assert sql(tmp_path / "run", "SELECT count(*) FROM metrics").rows == [(3,)]


def test_a_model_s_tensors_are_those_of_its_state_dict():
    torch.manual_seed(0)
    for tied in (False, True):
        config = LlamaConfig(
            vocab_size=11, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, tie_word_embeddings=tied,
        )  # fmt: skip
        model = LlamaForCausalLM(config)
        if tied:
            model = get_peft_model(model, LoraConfig(target_modules=["q_proj"], modules_to_save=["norm"]))
        model = checkpoint_wrapper(model) if not tied else model
        wanted, found = model.state_dict(keep_vars=True), model_tensors(model)
        assert list(found) == list(wanted)
        assert all(found[name] is wanted[name] for name in wanted)
        assert [id(p) for p in model_parameters(model)] == [id(p) for p in model.parameters()]


def test_parameters_of_zero_3_count_with_their_whole_size():
    layer = torch.nn.Linear(2, 3)
    for parameter, count in ((layer.weight, 6), (layer.bias, 3)):
        parameter.data, parameter.ds_id, parameter.ds_numel = torch.empty(0), 1, count
    assert dtypes(layer) == {"float32": 9}
