"""Pickles of strangers: read as data, and nothing in them is called, whatever they name."""

import builtins
import collections
import copyreg
import fractions
import importlib
import io
import operator
import os
import pickle
import resource
import struct
import subprocess
import sys
import zipfile

import dumps
import numpy as np
import pytest
import torch
from dumps import ONE_SIDED, WRITERS, make_steps
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tim_trace import import_dump, stats
from tim_trace.schemas.errors import ImportFailed, TimTraceError
from tim_trace.tracer.importers.arrays import settled
from tim_trace.tracer.importers.formats import FORMATS
from tim_trace.tracer.importers.pickles import VIEWED_BYTES, Budget, Foreign, load
from tim_trace.tracer.importers.torch_files import read_pickled

PROTOCOLS = range(2, pickle.HIGHEST_PROTOCOL + 1)


def read(tmp_path, content):
    path = tmp_path / "file.pkl"
    path.write_bytes(content)
    return read_pickled(path)


def plain(value):
    value = settled(value)
    if isinstance(value, np.ndarray):
        return ("array", str(value.dtype), value.tolist())
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(plain, value))
    return value


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=40,
)


@given(VALUES, st.sampled_from(PROTOCOLS))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_plain_values_are_what_pickle_makes_of_them(tmp_path, value, protocol):
    assert read(tmp_path, pickle.dumps(value, protocol)) == value


ARRAYS = [
    np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(6).reshape(2, 3).T, np.array([1, 2], ">i4"), np.zeros((0, 3)),
    np.array(["a", None, 3], dtype=object), np.array(["ab", "c"]), np.array(True), np.arange(8, dtype=np.float16)[::2],
]  # fmt: skip


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_numpy_arrays_and_numbers_are_what_pickle_makes_of_them(tmp_path, protocol):
    for array in ARRAYS:
        found = settled(read(tmp_path, pickle.dumps(array, protocol)))
        assert found.dtype.kind == array.dtype.kind
        assert found.shape == array.shape
        assert found.tolist() == array.tolist()
    assert read(tmp_path, pickle.dumps(np.float32(0.1), protocol)) == np.float32(0.1)


TENSORS = {
    name: torch.arange(6).reshape(2, 3).to(getattr(torch, name))
    for name in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
}


@pytest.mark.parametrize("form", ["zip", "legacy", "pickle"])
def test_tensors_are_what_torch_makes_of_them(tmp_path, form):
    base = torch.randn(4, 5)
    given_tensors = {
        **TENSORS, "transposed": base.T, "part": base[1:, ::2], "shared": base, "expanded": torch.ones(3, 1).expand(3, 4),
        "empty": torch.empty(0, 3), "scalar": torch.tensor(2.5), "parameter": torch.nn.Parameter(base),
    }  # fmt: skip
    path = tmp_path / "file.pt"
    if form == "pickle":
        path.write_bytes(pickle.dumps(given_tensors))
    else:
        torch.save(given_tensors, path, _use_new_zipfile_serialization=form == "zip")
    found = read_pickled(path)
    for name, tensor in given_tensors.items():
        array = settled(found[name])
        wanted = tensor.detach().float() if tensor.dtype == torch.bfloat16 else tensor.detach()
        assert array.dtype == wanted.numpy().dtype, name
        assert np.array_equal(array, wanted.numpy()), name


class Calls:
    """Pickled as a call of a function of the machine."""

    def __init__(self, function, *arguments):
        self._call = function, arguments

    def __reduce__(self):
        return self._call


def hostile(tmp_path):
    """Name -> a value whose pickle would leave a file, or read one."""
    mark = f"touch {tmp_path}/was-run"
    calls = {
        "os.system": Calls(os.system, mark),
        "eval": Calls(eval, f"__import__('os').system({mark!r})"),
        "exec": Calls(exec, f"__import__('os').system({mark!r})"),
        "subprocess": Calls(subprocess.Popen, mark, 0, None, None, None, None, None, True, True),
        "getattr": Calls(getattr, Calls(__import__, "os"), "system"),
        "open": Calls(open, f"{tmp_path}/was-run", "w"),
        "partial": Calls(builtins.map, Calls(eval, "1"), [1]),
        "torch.load": Calls(torch.load, f"{tmp_path}/other"),
        "np.load": Calls(np.load, f"{tmp_path}/other"),
        "numpy.memmap": Calls(np.memmap, f"{tmp_path}/was-run", "uint8", "w+", 0, (4,)),
        "import_module": Calls(importlib.import_module, "antigravity"),
        "pickle.loads": Calls(pickle.loads, pickle.dumps(Calls(os.system, mark))),
    }
    calls["nested"] = [1, {"a": (2, calls["os.system"])}]
    calls["of a call"] = Calls(operator.methodcaller("system", mark), Calls(__import__, "os"))
    calls["default"] = collections.defaultdict(os.getcwd)
    calls["state"] = WithState(mark)
    calls["named"] = WithNames()
    calls["named"].mark = mark
    calls["dict"], calls["list"], calls["array"] = DictOfTheirs(a=mark), ListOfTheirs([mark]), ArrayOfTheirs(2)
    calls["key"] = {calls["os.system"]: 1, (1, calls["eval"]): 2}
    return calls


class WithState:
    """Its class is installed here, and its methods would run a command."""

    def __init__(self, mark):
        self.mark = mark

    def __setstate__(self, state):
        os.system(state["mark"])


class WithNames:
    def __new__(cls, *, mark=None):
        os.system(mark or "true")
        return object.__new__(cls)

    def __getnewargs_ex__(self):
        return (), {"mark": self.mark}


class DictOfTheirs(dict):
    def __setitem__(self, key, value):
        os.system(value)

    def __hash__(self):
        raise AssertionError


class ListOfTheirs(list):
    def append(self, value):
        os.system(value)

    extend = append


class ArrayOfTheirs(np.ndarray):
    def __setstate__(self, state):
        raise AssertionError


@pytest.mark.parametrize("form", ["pickle", "zip", "legacy", "inside", "array"])
def test_nothing_that_a_pickle_names_is_called(tmp_path, form):
    for name, value in hostile(tmp_path).items():
        path = tmp_path / "file.pt"
        if form == "pickle":
            path.write_bytes(pickle.dumps(value))
        elif form == "inside":
            path.write_bytes(pickle.dumps(Calls(torch.storage._load_from_bytes, pickle.dumps(value))))
        elif form == "array":
            path.write_bytes(pickle.dumps(np.array([value, 1], dtype=object)))
        else:
            torch.save({"samples": value}, path, _use_new_zipfile_serialization=form == "zip")
        settled(read_pickled(path))
        assert not (tmp_path / "was-run").exists(), name
        assert "antigravity" not in sys.modules


RUN = b"cos\nsystem\n(X\x04\x00\x00\x00true"
"""`os.system` and its argument, without the call."""


@pytest.mark.parametrize(
    "content",
    [
        RUN + b"tR.",  # REDUCE
        RUN + b"t\x81.",  # NEWOBJ
        RUN + b"t}\x92.",  # NEWOBJ_EX
        RUN + b"tR}b.",  # BUILD
        b"cos\nsystem\nX\x04\x00\x00\x00trueb.",  # BUILD of a function
        b"cos\nsystem\nX\x04\x00\x00\x00trueR.",  # arguments that are no tuple
        RUN + b"tRX\x04\x00\x00\x00true\x85R.",  # a call of what a call returned
        b"cos\nsystem\nX\x04\x00\x00\x00truea.",  # APPEND
        b"cos\nsystem\n(X\x04\x00\x00\x00truee.",  # APPENDS
        b"cos\nsystem\nX\x01\x00\x00\x00aK\x01s.",  # SETITEM
        b"}cos\nsystem\nK\x01s.",  # a key
        b"\x8c\x02os\x8c\x06system\x93X\x04\x00\x00\x00true\x85R.",  # STACK_GLOBAL
        b"cnumpy\nndarray\ncos\nsystem\n\x85R.",  # an argument of an allowed class
        b"ccollections\ndefaultdict\ncos\nsystem\n\x85RX\x01\x00\x00\x00aK\x01s.",
    ],
)
def test_no_opcode_calls_what_is_named(tmp_path, content, monkeypatch):
    monkeypatch.setattr(os, "system", lambda *_: pytest.fail("called"))
    monkeypatch.setattr(importlib, "import_module", lambda *_: pytest.fail("imported"))
    read(tmp_path, b"\x80\x04" + content)


@pytest.mark.parametrize(
    "content",
    [
        b"(ios\nsystem\n.",  # INST
        b"(cos\nsystem\nX\x04\x00\x00\x00trueo.",  # OBJ
        b"\x82\x01.", b"\x83\x01\x00.", b"\x84\x01\x00\x00\x00.",  # EXT1, EXT2, EXT4
        b"X\x01\x00\x00\x00aQ.", b"Pa\n.",  # persistent ids
        b"X\x04\x00\x00\x00truecos\nsystem\nR.",  # a call of text
        b"K\x01}b.",  # state of a number
        b"cbuiltins\nlist\n)}\x92.",  # an allowed class with named arguments
    ],
)  # fmt: skip
def test_opcodes_that_no_framework_writes_are_refused(tmp_path, content):
    copyreg.add_extension("os", "system", 1)
    try:
        with pytest.raises(ImportFailed, match=r"not a pickle of arrays and plain values"):
            read(tmp_path, b"\x80\x02" + content)
    finally:
        copyreg.remove_extension("os", "system", 1)


def test_a_stand_in_holds_a_name_and_a_state(tmp_path):
    found = read(tmp_path, pickle.dumps([WithState("a"), WithState, fractions.Fraction(1, 2), slice(1), object()]))
    assert [type(each) for each in found] == [Foreign] * 5
    assert [str(each).rpartition(".")[2] for each in found] == ["WithState", "WithState", "Fraction", "slice", "object"]
    assert found[0].attributes == {"mark": "a"}
    assert found[1].attributes is None
    assert [slot for slot in Foreign.__slots__] == ["module", "name", "state"]
    odd = read(tmp_path, b"\x80\x02ca\x1bb\n" + b"c" * 500 + b"\n.")
    assert str(odd).isprintable()
    assert len(str(odd)) <= 120


def test_tensors_beside_an_unknown_dtype_are_read(tmp_path):
    given = {"complex": torch.zeros(2, dtype=torch.complex64), "float8": torch.zeros(2).to(torch.float8_e4m3fn)}
    torch.save({**given, "known": torch.ones(2)}, tmp_path / "file.pt")
    pickled = pickle.dumps({**given, "known": torch.ones(2)})
    for content in ((tmp_path / "file.pt").read_bytes(), pickled):
        found = read(tmp_path, content)
        assert settled(found["known"]).tolist() == [1.0, 1.0]
        assert str(found["complex"]) == "torch.ComplexFloatStorage"
        assert str(found["float8"]) == "torch.float8_e4m3fn"


def test_the_config_of_a_framework_in_a_dump_hinders_nothing(tmp_path):
    WRITERS["slime"](tmp_path / "dump", make_steps(1))
    import_dump("slime", tmp_path / "dump", output=tmp_path / "clean")
    metadata = {"config": WithState(f"touch {tmp_path}/was-run"), "time": fractions.Fraction(1, 2)}
    change_samples(tmp_path / "dump", lambda sample: sample | {"metadata": metadata})
    import_dump("slime", tmp_path / "dump", output=tmp_path / "run")
    assert figures(tmp_path / "run") == figures(tmp_path / "clean")
    change_samples(tmp_path / "dump", lambda sample: Bag(sample))  # the samples themselves are objects
    import_dump("slime", tmp_path / "dump", output=tmp_path / "objects")
    assert figures(tmp_path / "objects") == figures(tmp_path / "clean")
    assert not (tmp_path / "was-run").exists()


def figures(run):
    return [{**row, "run": None} for row in stats(run).dicts()]


class Bag:
    """An object with a sample's fields as attributes."""

    def __init__(self, fields):
        self.__dict__.update(fields)


def change_samples(folder, change):
    (path,) = (folder / "rollout_data").iterdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WithState, "__setstate__", lambda self, state: self.__dict__.update(state))
        record = torch.load(path, weights_only=False)
        fields = [sample if isinstance(sample, dict) else sample.__dict__ for sample in record["samples"]]
        torch.save(record | {"samples": [change(sample) for sample in fields]}, path)


@pytest.mark.parametrize("column", ["tokens", "rollout_log_probs", "reward", "status"])
def test_a_needed_field_that_is_an_object_is_named_with_the_way_out(tmp_path, column):
    WRITERS["slime"](tmp_path / "dump", make_steps(1))
    change_samples(tmp_path / "dump", lambda sample: sample | {column: Bag({})})
    with pytest.raises(
        ImportFailed, match=rf"sample 0: field '{column}', needed for .*, is an object of .*Bag, .*--map {column}="
    ):
        import_dump("slime", tmp_path / "dump", output=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    if column != "tokens":
        import_dump("slime", tmp_path / "dump", output=tmp_path / "run", map={column: ""})
    change_samples(tmp_path / "dump", lambda sample: sample | {column: [Bag({}), 1]})
    with pytest.raises(ImportFailed, match=rf"sample 0: field '{column}' is a list of 2.*"):
        import_dump("slime", tmp_path / "dump", output=tmp_path / "run", force=True)


@pytest.mark.parametrize("protocol", range(3, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("num_bytes", [VIEWED_BYTES - 1, VIEWED_BYTES, VIEWED_BYTES + 1])
def test_many_bytes_are_what_pickle_makes_of_them_and_no_key(tmp_path, protocol, num_bytes):
    content = os.urandom(num_bytes)
    assert [bytes(item) for item in read(tmp_path, pickle.dumps([content, b"x"], protocol))] == [content, b"x"]
    array = np.frombuffer(content, np.uint8)
    assert plain(read(tmp_path, pickle.dumps(array, protocol))) == ("array", "uint8", array.tolist())
    if num_bytes >= VIEWED_BYTES:
        with pytest.raises(ImportFailed, match="a memoryview key"):
            read(tmp_path, pickle.dumps({content: 1}, protocol))


def test_objects_are_no_bytes_of_a_tensor(tmp_path):
    """NumPy would give their addresses."""
    tensor = {"format": "numpy", "data": np.array([1, "x"], object), "shape": (2,), "dtype": "torch.int64"}
    place = tmp_path / "dump" / "dumped_data"
    place.mkdir(parents=True)
    batch = dumps.TrainingInputBatch(batch_dict={"sequences": tensor})
    members = {"TrainingInputBatch": dumps.TrainingInputBatch, "_rebuild_tensor_batch": dumps._rebuild_tensor_batch}
    with dumps.classes_of(skyrl__backends__skyrl_train__training_batch=members):
        (place / "global_step_1_training_input.pkl").write_bytes(pickle.dumps(batch))
    with pytest.raises(ImportFailed, match="an object array where bytes are expected"):
        import_dump("skyrl", tmp_path / "dump", output=tmp_path / "run")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "neither a pickle"),
        (b"\x80\x04", "incomplete pickle"),
        (b"\x80\x04N", "incomplete pickle"),
        (b"\x80\x09N.", "protocol 9"),
        (b"(dp0\n.", "neither a pickle"),
        (b"\x80\x02\x82\x01.", "opcode 0x82"),
        (b"\x80\x02(i__main__\nX\n.", "opcode 0x69"),
        (b"\x80\x02}]Ns.", "a list key"),
        (b"\x80\x02Nb.", "incomplete pickle"),
        (b"\x80\x02h\x07.", "never set"),
        (b"\x80\x02Q.", "incomplete pickle|opcode"),
        (b"\x80\x02NN.", "values are left on the stack"),
        (b"\x80\x02(N.", "values are left on the stack"),
        (b"\x80\x02Na.", "incomplete pickle"),
        (b"\x80\x02\x8aA" + b"\xff" * 65 + b".", "512 bits"),
        (b"\x80\x02ctorch\nFloatStorage\n(K\x01tR.", "other than a class or function"),
        (b"\x80\x02cnumpy\ndtype\n(X\x02\x00\x00\x00V8tR.", None),
        (b"\x80\x02ccollections\nOrderedDict\n(]NatR.", "malformed dictionary"),
        (b"\x80\x04\x8c\x02" + b"\xff\xff" + b".", "not a pickle of arrays"),
    ],
)
def test_what_is_no_pickle_of_plain_data_is_one_sentence(tmp_path, content, message):
    if message is None:
        read(tmp_path, content)
        return
    with pytest.raises(ImportFailed, match=message) as raised:
        read(tmp_path, content)
    assert "\n" not in str(raised.value)


def test_a_storage_whose_bytes_changed_is_refused(tmp_path):
    torch.save({"a": torch.arange(64, dtype=torch.int64)}, tmp_path / "whole.pt")
    content = (tmp_path / "whole.pt").read_bytes()
    place = content.index(np.arange(64).tobytes())
    for damaged in (
        content[: place + 8] + b"\x07" + content[place + 9 :],
        content.replace(b"PK\x03\x04", b"PK\x03\x05").replace(b"PK\x03\x05", b"PK\x03\x04", 1),
    ):
        with pytest.raises(ImportFailed, match=r"incomplete or damaged torch\.save file"):
            read(tmp_path, damaged)


def test_a_legacy_tar_and_a_compressed_zip_are_refused(tmp_path):
    with pytest.raises(ImportFailed, match="neither a pickle"):
        read(tmp_path, b"pickle".ljust(257, b"\0") + b"ustar" + b"\0" * 300)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps([0] * 1000))
    with pytest.raises(ImportFailed, match="is compressed or encrypted"):
        read(tmp_path, buffer.getvalue())
    with zipfile.ZipFile(buffer := io.BytesIO(), "w") as archive:
        archive.writestr("../../climbs/data.pkl", b"x")
    with pytest.raises(ImportFailed, match=r"without data.pkl"):
        read(tmp_path, buffer.getvalue())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file.pkl"]


def lists_in_lists():
    """A billion numbers in 200 bytes: each list holds the one before twice."""
    return (
        b"\x80\x02]K\x01aq\x00"
        + b"".join(b"]h" + bytes([n]) + b"ah" + bytes([n]) + b"aq" + bytes([n + 1]) for n in range(40))
        + b"0" * 40
        + b"."
    )


BOMBS = {
    "memo": b"\x80\x02N" + b"r\xff\xff\xff\xff" + b".",
    "bytes": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"x.",
    "text": b"\x80\x04\x8d" + struct.pack("<Q", (1 << 63) - 1) + b"x.",
    "frame": b"\x80\x04\x95" + struct.pack("<Q", 1 << 50) + b"N.",
    "buffer": b"\x80\x02cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R.",
    "deep": b"\x80\x02" + b"K\x01" + b"\x85" * 2_000_000 + b".",
    "deep key": b"\x80\x02}K\x01" + b"\x85" * 2_000_000 + b"Ns.",
    "marks": b"\x80\x02" + b"(" * 5_000_000 + b".",
    "shared": lists_in_lists(),
    "names": b"\x80\x04X\x40\x42\x0f\x00" + b"a" * 1_000_000 + b"q\x00" + b"0h\x00h\x00\x93" * 2_000_000 + b".",
    "calls": b"\x80\x02ca\nb\nq\x00" + b"h\x00)R" * 2_000_000 + b"t.",
    "states": b"\x80\x02]q\x01ca\nb\nq\x00" + b"h\x00)Rh\x01b" * 1_000_000 + b".",
    "array": pickle.dumps(np.zeros(2)).replace(b"K\x02\x85", b"\x8a\x06\xff\xff\xff\xff\xff\x7f\x85"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(BOMBS))
def test_a_bomb_takes_no_memory(tmp_path, name):
    path = tmp_path / "bomb.pkl"
    path.write_bytes(BOMBS[name])
    program = f"""
import resource
from pathlib import Path
from tim_trace.schemas.errors import ImportFailed
from tim_trace.tracer.importers.torch_files import read_pickled
from tim_trace.tracer.importers.arrays import settled
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    settled(read_pickled(Path({str(path)!r})))
except (ImportFailed, ValueError) as error:
    print(error)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) < 600 << 10  # KiB


def test_tensors_that_claim_more_than_they_have_are_refused(tmp_path):
    path = tmp_path / "file.pt"
    for tensor in (torch.ones(1).expand(200_000, 200_000), torch.ones(1).expand(1 << 40)):
        torch.save(tensor, path)
        found = read_pickled(path)
        with pytest.raises(ImportFailed, match="64 times the file size"):
            found.array()


def test_samples_that_share_one_long_list_are_refused(tmp_path):
    tokens = list(range(200_000))
    logprobs = [-0.5] * len(tokens)
    sample = {"tokens": tokens, "response_length": len(tokens), "rollout_log_probs": logprobs, "index": None}
    (tmp_path / "rollout_data").mkdir()
    torch.save({"samples": [dict(sample) for _ in range(2000)]}, tmp_path / "rollout_data" / "1.pt")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ImportFailed, match="64 times the file size"):
        import_dump("slime", tmp_path, output=tmp_path / "run")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2 << 20


def error_of(format, folder, run):
    try:
        import_dump(format, folder, output=run, force=True)
    except TimTraceError as error:
        return str(error)
    return ""


def write_scalars(folder, _steps):
    folder.mkdir()
    (folder / "a.csv").write_text("step,loss,reward\n1,0.5,1.0\n2,0.25,1e-3\n")


EVERY = {**WRITERS, **ONE_SIDED, "metrics": write_scalars}


@pytest.mark.slow
@pytest.mark.parametrize("format", list(EVERY))
def test_random_damage_is_an_error_or_an_import_and_nothing_else(tmp_path, format):
    EVERY[format](tmp_path / "dump", make_steps(1, num=3))
    files = [path for path in (tmp_path / "dump").rglob("*") if path.is_file() and path.stat().st_size]
    draw = np.random.default_rng(0)
    outside = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for round in range(60):
        path = files[round % len(files)]
        content = bytearray(outside[path])
        if round % 3 == 0:
            content = content[: draw.integers(0, len(content))]
        else:
            for place in draw.integers(0, len(content), 1 + round % 4):
                content[place] = draw.integers(0, 256)
        path.write_bytes(content)
        assert "\n" not in error_of(format, tmp_path / "dump", tmp_path / "run")
        path.write_bytes(outside[path])
    there = {
        path: path.read_bytes()
        for path in tmp_path.rglob("*")
        if path.is_file() and tmp_path / "run" not in path.parents
    }
    assert there == outside


def test_every_format_has_a_dump_to_damage():
    assert set(EVERY) == set(FORMATS)


def test_a_hostile_dump_of_each_pickled_format_is_refused(tmp_path):
    evil = Calls(os.system, f"touch {tmp_path}/was-run")
    places = {
        "verl": "7/gen_batch.dp", "slime": "rollout_data/1.pt", "miles": "train_data/1_0.pt",
        "skyrl": "dumped_data/global_step_1_training_input.pkl",
    }  # fmt: skip
    for format, name in places.items():
        path = tmp_path / format / name
        path.parent.mkdir(parents=True)
        for content in (evil, {"samples": [evil]}, {"rollout_data": evil}, {"rollout_data": {"tokens": evil}}):
            path.write_bytes(pickle.dumps(content))
            with pytest.raises(ImportFailed):
                import_dump(format, tmp_path / format, output=tmp_path / "run")
            assert not (tmp_path / "run").exists()
    assert not (tmp_path / "was-run").exists()


def test_a_column_of_a_batch_that_is_an_object_is_named(tmp_path):
    tensors = dumps.verl_tensors(make_steps(1)[1])
    for number, (batch, others) in enumerate(
        [
            (tensors | {"old_log_probs": Bag({})}, {}),
            (tensors, {"uid": np.array([Bag({})] * 6, dtype=object)}),
            (tensors, {"uid": Bag({})}),
        ]
    ):
        path = tmp_path / f"{number}" / "1" / "gen_batch.dp"
        path.parent.mkdir(parents=True)
        with dumps.classes_of(verl__protocol={"DataProto": dumps.DataProto}):
            path.write_bytes(pickle.dumps(dumps.DataProto(batch, others, {"config": Bag({})})))
        with pytest.raises(ImportFailed, match=r"an object of .*Bag, which cannot be read.*--map (old_log_probs|uid)="):
            import_dump("verl", tmp_path / f"{number}", output=tmp_path / "run")
    with pytest.MonkeyPatch.context() as patch:
        encoded = dumps.skyrl_tensor
        patch.setattr(dumps, "skyrl_tensor", lambda value: Bag({}) if value.dtype == torch.float32 else encoded(value))
        dumps.write_skyrl(tmp_path / "skyrl", make_steps(1))
    with pytest.raises(ImportFailed, match=r"'rollout_logprobs', needed for rollout_logprobs, is an object of .*Bag"):
        import_dump("skyrl", tmp_path / "skyrl", output=tmp_path / "run")


@pytest.mark.slow
def test_reading_a_dump_needs_no_torch(tmp_path):
    dumps.write_verl(tmp_path / "verl", make_steps(1))
    dumps.write_rollouts(tmp_path / "slime", make_steps(1))
    program = f"""
import sys
sys.modules["torch"] = None
from tim_trace import import_dump, stats
for name in ("verl", "slime"):
    assert import_dump(name, {str(tmp_path)!r} + "/" + name, output={str(tmp_path)!r} + "/run-" + name).num_sequences == 6
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_runs_of_numbers_are_what_python_reads(tmp_path, protocol):
    draw = np.random.default_rng(protocol)
    kinds = [
        lambda: int(draw.integers(0, 256)), lambda: int(draw.integers(256, 65536)), lambda: int(draw.integers(-(2**31), 2**31)),
        lambda: float(draw.normal()), lambda: None, lambda: True, lambda: 2**40, lambda: float("inf"), lambda: "text",
    ]  # fmt: skip
    numbers = [
        [kinds[kind]() for kind in draw.integers(0, draw.integers(1, 10), size)] for size in (1, 7, 999, 1000, 5001)
    ]
    content = pickle.dumps(numbers, protocol)
    found, end = load(content, {}, "here", Budget("here", len(content)))
    assert end == len(content)
    assert repr(found) == repr(numbers)
    for cut in draw.integers(1, len(content), 60):
        with pytest.raises(ImportFailed, match=r"incomplete pickle|not a pickle of arrays"):
            load(content[:cut], {}, "here", Budget("here", len(content)))
