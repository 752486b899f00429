import shutil
import sys

import numpy as np
import pytest
import torch
import zarr
from builders import PROGRAMS, run
from tim_trace.schemas.errors import DamagedTrace, InvalidRecord, WeightsMissing
from tim_trace.tracer.store import Store
from tim_trace.tracer.weights import chunks
from tim_trace.tracer.weights.reader import WeightReader
from tim_trace.tracer.weights.writer import WeightWriter


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


def same(loaded, expected):
    return loaded.keys() == expected.keys() and all(
        loaded[name].bits.shape == value.shape and loaded[name].bits.tobytes() == value.tobytes()
        for name, value in expected.items()
    )


def test_every_version_comes_back_bit_for_bit_in_any_order(tmp_path):
    expected = record(tmp_path)
    reader = WeightReader(Store(tmp_path))
    assert reader.versions == list(range(12))
    for version in [*range(12), 11, 0, 7, 3, 4, 2, 9, 8]:
        assert same(reader.load(version), expected[version]), version
    assert same(WeightReader(Store(tmp_path)).load(8), expected[8])


def test_what_was_loaded_is_the_caller_s_to_change(tmp_path):
    expected = record(tmp_path, 2)
    reader = WeightReader(Store(tmp_path))
    reader.load(0)["embed.weight"].bits[:] = 0
    assert same(reader.load(1), expected[1])


def test_a_version_is_kept_once(tmp_path):
    tensors = make_model()
    writer = WeightWriter(tmp_path, "p1-abc", lambda *_: None)
    writer.snapshot(3, tensors)
    writer.snapshot(3, tensors)
    writer.close()
    assert WeightReader(Store(tmp_path)).versions == [3]


def test_tied_tensors_are_stored_once(tmp_path):
    record(tmp_path, 1)
    reader = WeightReader(Store(tmp_path))
    layout = reader.layout(reader.parts[0][0])
    assert layout.tied == {"head.weight": "embed.weight"}
    assert layout.num_elements["float32"] == 40 * 8 + 24


def test_changed_elements_are_counted(tmp_path):
    record(tmp_path, 7, rows=3)
    reader = WeightReader(Store(tmp_path))
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
        reader = WeightReader(Store(tmp_path / name))
        assert [reader.parts[version][0].is_keyframe for version in range(8)] == kinds, name
        assert all(same(reader.load(version), expected[version]) for version in (7, 0, 6, 3))


def test_unchanged_weights_cost_nothing(tmp_path):
    tensors = make_model()
    writer = WeightWriter(tmp_path, "p1-abc", lambda *_: None)
    writer.snapshot(0, tensors)
    writer.snapshot(1, tensors)
    writer.close()
    reader = WeightReader(Store(tmp_path))
    assert reader.parts[1][0].num_bytes == 0
    assert reader.parts[1][0].chain != reader.parts[0][0].chain
    assert same(reader.load(1), {name: bits(tensor) for name, tensor in tensors.items()})


def test_zarr_reads_the_arrays(tmp_path, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 256)
    expected = record(tmp_path, 3)
    group = zarr.open_group(tmp_path / "weights" / "p1-abc-000000", mode="r")
    array = group["float32"]
    assert array.attrs["dtype"] == "float32"
    row = array[0] ^ array[1] ^ array[2]
    assert row[:320].tobytes() == expected[2]["embed.weight"].tobytes()
    assert group["bfloat16"].dtype == np.uint16


def test_weights_of_several_chunks_come_back(tmp_path, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 100)
    expected = record(tmp_path)
    reader = WeightReader(Store(tmp_path))
    assert len(reader.parts[0][0].chunks["float32"]) > 10
    assert all(same(reader.load(version), expected[version]) for version in range(12))


def test_a_new_layout_begins_with_a_keyframe(tmp_path):
    tensors = make_model()
    writer = WeightWriter(tmp_path, "p1-abc", lambda *_: None)
    writer.snapshot(0, tensors)
    tensors["adapter"] = torch.ones(2)
    writer.snapshot(1, tensors)
    writer.close()
    reader = WeightReader(Store(tmp_path))
    assert reader.parts[1][0].is_keyframe
    assert set(reader.load(1)) == set(tensors)
    assert "adapter" not in reader.load(0)


def chunk(folder, segment, dtype, row):
    return folder / "weights" / segment / dtype / "c" / str(row) / "0"


def test_a_damaged_or_missing_delta_names_itself_and_gives_no_wrong_weights(tmp_path):
    (tmp_path / "whole").mkdir()
    record(tmp_path / "whole")
    for name, damage in {
        "missing": lambda path: path.unlink(),
        "torn": lambda path: path.write_bytes(path.read_bytes()[:-5]),
        "other": lambda path: path.write_bytes(chunk(tmp_path / "whole", "p1-abc-000001", "float32", 1).read_bytes()),
    }.items():
        folder = tmp_path / name
        shutil.copytree(tmp_path / "whole", folder)
        damage(chunk(folder, "p1-abc-000001", "float32", 2))
        reader = WeightReader(Store(folder))
        for version in (7, 8, 9):
            with pytest.raises(DamagedTrace, match=r"p1-abc-000001.*version 7"):
                reader.load(version)
        for version in (0, 4, 5, 6, 10, 11):
            reader.load(version)


def test_a_version_that_is_missing_is_named_with_what_there_is(tmp_path):
    record(tmp_path, 4)
    with pytest.raises(WeightsMissing, match=r"no weights of version 9; it has 4 of them, 0 to 3"):
        WeightReader(Store(tmp_path)).load(9)
    (tmp_path / "weights" / "p1-abc-000000.1.json").unlink()
    reader = WeightReader(Store(tmp_path))
    with pytest.raises(WeightsMissing, match="row 1 of weights/p1-abc-000000 is missing"):
        reader.load(2)
    reader.load(0)


def test_a_version_file_that_cannot_be_read_is_named(tmp_path):
    record(tmp_path, 2)
    (tmp_path / "weights" / "p1-abc-000000.1.json").write_text("{")
    reader = WeightReader(Store(tmp_path))
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
    reader = WeightReader(Store(tmp_path / "run"))
    assert reader.versions == [0, 1, 2]
    assert all(len(parts) == 2 for parts in reader.parts.values())
    for version in (2, 0, 1):
        whole = torch.load(tmp_path / f"{version}.pt")
        assert same(reader.load(version), {name: bits(tensor) for name, tensor in whole.items()})
    next((tmp_path / "run" / "weights").glob("r1-*.1.json")).unlink()
    with pytest.raises(WeightsMissing, match=r"version 1: .* has \d+ of \d+ elements; a writer's part is missing"):
        WeightReader(Store(tmp_path / "run")).load(1)
