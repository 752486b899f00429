"""Damage to one file or folder of a trace, as disks, copies, people and editors do it.

A mutation is a function (random, trace, path, others) that changes the file or folder `trace / path`. It returns False
where it does not apply. `others` has other traces to take files from.
"""

import base64
import io
import itertools
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

BLOCK = 256 * 1024


@dataclass(frozen=True)
class Others:
    """Where files of other traces come from: `older` is this trace in an earlier state."""

    older: Path | None
    traces: list[Path]


TABLES = ("sequences", "scores", "metrics")


def kind_of(path):
    """What a file of a trace is, by its path in it."""
    parts = path.split("/")
    if parts[0] in ("dense", "weights") and len(parts) > 2:
        return f"{parts[0]} {'zarr.json' if parts[-1] == 'zarr.json' else 'chunk'}"
    if parts[0] == "journal":
        return "reserve" if parts[-1].startswith(".tmp-") else "journal"
    return parts[0]


def files_of(trace):
    """Paths of all files, sorted."""
    return sorted(str(file.relative_to(trace)) for file in trace.rglob("*") if file.is_file())


def overwrite(file, data):
    """Put bytes in the place of a file."""
    file.unlink()
    file.write_bytes(data)


# Bytes


def flip_bit(random, trace, path, others):
    data = bytearray((trace / path).read_bytes())
    if not data:
        return False
    data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    overwrite(trace / path, data)
    return True


def flip_bytes(random, trace, path, others):
    data = bytearray((trace / path).read_bytes())
    if not data:
        return False
    for _ in range(random.randint(2, 12)):
        data[random.randrange(len(data))] ^= random.randint(1, 255)
    overwrite(trace / path, data)
    return True


def flip_near_end(random, trace, path, others):
    """Where Parquet has its footer and a journal its last message."""
    data = bytearray((trace / path).read_bytes())
    if not data:
        return False
    data[-random.randint(1, min(len(data), 600))] ^= random.randint(1, 255)
    overwrite(trace / path, data)
    return True


def zero_range(random, trace, path, others):
    data = bytearray((trace / path).read_bytes())
    if not data:
        return False
    first = random.randrange(len(data))
    last = min(len(data), first + random.choice((1, 8, 64, 512, 4096)))
    data[first:last] = bytes(last - first)
    overwrite(trace / path, data)
    return True


def truncate_to_nothing(random, trace, path, others):
    overwrite(trace / path, b"")
    return True


def truncate_by_one(random, trace, path, others):
    overwrite(trace / path, (trace / path).read_bytes()[:-1])
    return True


def truncate_anywhere(random, trace, path, others):
    data = (trace / path).read_bytes()
    overwrite(trace / path, data[: random.randrange(len(data) or 1)])
    return True


def truncate_at_bound(random, trace, path, others):
    """At a block, a page of memory, 8 bytes, or the end of a journal's message."""
    data = (trace / path).read_bytes()
    if kind_of(path) == "journal" and random.random() < 0.7:
        bounds = message_ends(data)[:-1]
    else:
        unit = random.choice((8, 512, 4096, BLOCK))
        bounds = range(0, len(data), unit)
    if not bounds:
        return False
    overwrite(trace / path, data[: random.choice(bounds)])
    return True


def extend(random, trace, path, others):
    data = (trace / path).read_bytes()
    size = random.choice((1, 8, 64, 4096))
    tail = random.choice((bytes(size), random.randbytes(size), data[-size:], b"\n" * size))
    overwrite(trace / path, data + tail)
    return True


def repeat(random, trace, path, others):
    """The file twice, one after the other."""
    overwrite(trace / path, (trace / path).read_bytes() * 2)
    return True


# Files and folders


def delete(random, trace, path, others):
    (trace / path).unlink()
    return True


def delete_folder(random, trace, path, others):
    """One of the folders that the file lies in."""
    parents = [parent for parent in (trace / path).parents if trace in parent.parents]
    if not parents:
        return False
    shutil.rmtree(random.choice(parents))
    return True


def folder_in_place(random, trace, path, others):
    (trace / path).unlink()
    (trace / path).mkdir()
    if random.random() < 0.5:
        (trace / path / "x").write_text("x")
    return True


def link_in_place(random, trace, path, others):
    """A symbolic link to itself, to nothing, to a copy in the trace or to a copy outside of it."""
    file = trace / path
    data = file.read_bytes()
    file.unlink()
    target = random.choice(("itself", "nothing", "inside", "outside", "device"))
    if target == "itself":
        file.symlink_to(file.name)
    elif target == "nothing":
        file.symlink_to("not-there")
    elif target == "device":
        file.symlink_to("/dev/zero")
    else:
        copy = file.with_name(f"{file.name}.copy") if target == "inside" else trace.parent / f"copy-{file.name}"
        copy.write_bytes(data)
        file.symlink_to(os.path.relpath(copy, file.parent))
    return True


def pipe_in_place(random, trace, path, others):
    """A pipe that nobody writes to."""
    (trace / path).unlink()
    os.mkfifo(trace / path)
    return True


def rename(random, trace, path, others):
    (trace / path).rename(trace / other_name(random, trace, path))
    return True


def copy(random, trace, path, others):
    """The same content under another name: it would count twice."""
    shutil.copy2(trace / path, trace / other_name(random, trace, path))
    return True


def other_name(random, trace, path):
    """A name that is not there: of another segment, another writer, a copy or an editor's."""
    folder, _, name = path.rpartition("/")
    stem, dot, suffix = name.partition(".")
    names = [f"copy of {name}", f"{name}.bak", f"{name}~", f"{stem}-1{dot}{suffix}", f".{name}", name.upper()]
    names += [stem.replace("000000", "000001") + dot + suffix] * 3 if "000000" in stem else []
    writers = [file.stem for file in (trace / "writers").glob("*.json")]
    mine = [writer for writer in writers if stem.startswith(writer)]
    if mine:
        names += [name.replace(mine[0], writer) for writer in writers if writer != mine[0]]
        names += [name.replace(mine[0], writer).replace("000000", "000007") for writer in writers]
        names += [name.replace(mine[0], "r9-p1-00000000")]
    paths = [f"{folder}/{name}".lstrip("/") for name in names]
    paths += [f"{table}/{name}" for table in TABLES if table != folder and (trace / table).is_dir()]
    return random.choice([name for name in paths if not os.path.lexists(trace / name)])


def swap_same_kind(random, trace, path, others):
    return swap(random, trace, path, [name for name in files_of(trace) if kind_of(name) == kind_of(path)])


def swap_other_kind(random, trace, path, others):
    return swap(random, trace, path, [name for name in files_of(trace) if kind_of(name) != kind_of(path)])


def swap(random, trace, path, names):
    names = [name for name in names if (trace / name).read_bytes() != (trace / path).read_bytes()]
    if not names:
        return False
    other = random.choice(names)
    mine, theirs = (trace / path).read_bytes(), (trace / other).read_bytes()
    overwrite(trace / path, theirs)
    overwrite(trace / other, mine)
    return True


def replace_by_same_kind(random, trace, path, others):
    """The content of another file of the same kind in this trace."""
    names = [name for name in files_of(trace) if kind_of(name) == kind_of(path) and name != path]
    if not names:
        return False
    overwrite(trace / path, (trace / random.choice(names)).read_bytes())
    return True


def replace_by_other_trace(random, trace, path, others):
    """A file of the same kind of another trace, under this name."""
    other = random.choice(others.traces)
    names = [name for name in files_of(other) if kind_of(name) == kind_of(path)]
    if not names:
        return False
    overwrite(trace / path, (other / random.choice(names)).read_bytes())
    return True


def replace_by_older(random, trace, path, others):
    """The file as it was earlier in the run."""
    older = others.older and others.older / path
    if not older or not older.is_file() or older.read_bytes() == (trace / path).read_bytes():
        return False
    overwrite(trace / path, older.read_bytes())
    return True


def add_older(random, trace, path, others):
    """A file that the run has removed since, such as a journal."""
    names = [name for name in files_of(others.older or trace) if not os.path.lexists(trace / name)]
    if not names:
        return False
    name = random.choice(names)
    (trace / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(others.older / name, trace / name)
    return True


def add_other_trace(random, trace, path, others):
    """A file of the same kind of another trace, under its own name."""
    other = random.choice(others.traces)
    names = [name for name in files_of(other) if kind_of(name) == kind_of(path) and not os.path.lexists(trace / name)]
    if not names:
        return False
    name = random.choice(names)
    (trace / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(other / name, trace / name)
    return True


# JSON


def edit_json(random, trace, path, others):
    """Change, drop or add something; leave the checksum as it was."""
    return edit(random, trace, path, None)


def edit_json_hostile(random, trace, path, others):
    """The same, with the checksum that is right for it, and in the writers' account too."""
    if not edit(random, trace, path, resign):
        return False
    account(trace, path)
    return True


def break_json(random, trace, path, others):
    """Text that is no JSON, or hard on a parser."""
    if not path.endswith(".json"):
        return False
    data = (trace / path).read_bytes()
    text = data.decode()
    broken = [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"42",
        b"\xff\xfe" + data,
        b"\xef\xbb\xbf" + data,
        text.encode("utf-16"),
        data.replace(b'"', b'"\xff', 1),
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"checksum": ' + b"9" * 5000 + b"}",
        data.replace(b"{", b'{"checksum": 1, ', 1),
        data.replace(b"{", b'{"format_version": 3, "state": "open", ', 1),
        data.replace(b": null", b": NaN"),
        data.replace(b": 1", b": 1e999", 1),
        data.replace(b'"', b"'"),
        data.rstrip()[:-1] + b",}",
        b"// comment\n" + data,
    ]
    changed = random.choice([new for new in broken if new != data])
    overwrite(trace / path, changed)
    return True


def edit(random, trace, path, finish):
    if not path.endswith(".json"):
        return False
    try:
        document = json.loads((trace / path).read_bytes())
    except ValueError:
        return False
    before = json.dumps(document, sort_keys=True)
    places = list(places_of(document))
    if not places:
        return False
    for _ in range(20):
        holder, key = random.choice(places)
        change_value(random, holder, key)
        if json.dumps(document, sort_keys=True) != before:
            break
    else:
        return False
    if finish:
        finish(path, document)
    overwrite(trace / path, json.dumps(document, indent=1).encode("utf-8", "surrogatepass"))
    return True


def places_of(document):
    """Every (container, key) in a document; those of `versions` and of programs would crowd out the others."""
    if isinstance(document, dict):
        for key, value in document.items():
            yield document, key
            if key not in ("versions", "program", "command"):
                yield from places_of(value)
    elif isinstance(document, list):
        for index, value in enumerate(document[:8]):
            yield document, index
            yield from places_of(value)


def change_value(random, holder, key):
    value = holder[key]
    way = random.choice(("value", "value", "drop", "type", "add", "nest", "null", "huge", "rename"))
    if way == "value" and isinstance(value, bool):
        holder[key] = not value
    elif way == "value" and isinstance(value, int | float):
        holder[key] = random.choice((value + 1, value - 1, -value, 0, 1, value * 1000))
    elif way == "value" and isinstance(value, str):
        holder[key] = random.choice((value[:-1], value + "x", "", "../" + value, value.upper(), value + "\0", "\ud800"))
    elif way == "drop":
        del holder[key]
    elif way == "type":
        holder[key] = random.choice((str(value), [value], {"x": value}, True, 1.5, "1"))
    elif way == "add" and isinstance(holder, dict):
        holder[f"{key}x"] = value
    elif way == "nest":
        holder[key] = {key: value} if isinstance(holder, dict) else [holder[key]]
    elif way == "null":
        holder[key] = None
    elif way == "huge":
        holder[key] = random.choice((2**63, 2**64, -(2**63) - 1, 1e308, 10**400, 2**31, float("nan"), float("inf")))
    elif way == "rename" and isinstance(holder, dict):
        holder[str(key) + random.choice(("", "_", "é"))] = holder.pop(key)


def resign(path, document):
    """Give a document the checksum that docs/reference/trace-format.md says."""
    if path.startswith(("writers/", "weights/")) or path == "trace.json":
        document.pop("checksum", None)
        document["checksum"] = checksum(document)


def checksum(document):
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128_hexdigest(text.encode("utf-8", "surrogatepass"))


# Parquet


def rewrite_parquet(random, trace, path, others):
    """Other rows, columns or types, written by pyarrow as anybody would."""
    return rewrite(random, trace, path, hostile=False)


def rewrite_parquet_hostile(random, trace, path, others):
    """The same with the checksums that are right for it, in the file and in the writer's account."""
    if not rewrite(random, trace, path, hostile=True):
        return False
    account(trace, path)
    return True


def rewrite(random, trace, path, hostile):
    if not path.endswith(".parquet"):
        return False
    try:
        table = pq.ParquetFile(trace / path).read(use_threads=False)
    except (OSError, pa.ArrowException):
        return False
    kept = pq.read_metadata(trace / path).metadata or {}
    changed = change_table(random, table)
    if changed is None:
        return False
    sink = io.BytesIO()
    metadata = {key: value for key, value in kept.items() if key != b"ARROW:schema"}
    if not hostile and random.random() < 0.5:
        metadata = {}
    with pq.ParquetWriter(sink, changed.schema.remove_metadata(), compression="zstd") as writer:
        writer.write_table(changed.replace_schema_metadata(None))
        if hostile:
            body = sink.getvalue()
            digests = [xxhash.xxh3_64_digest(body[start : start + BLOCK]) for start in range(0, len(body), BLOCK)]
            metadata[b"tim-trace blocks"] = base64.b64encode(b"".join(digests))
        writer.add_key_value_metadata(metadata)
    data = sink.getvalue()
    overwrite(trace / path, data)
    if hostile and path.startswith("sums/"):
        kind = path.split("/")[1].split("-")[0]
        (trace / path).rename(trace / "sums" / f"{kind}-{xxhash.xxh3_64_hexdigest(footer_of(data))}.parquet")
    return True


def change_table(random, table):
    """Other rows, columns or types, or None where the drawn change is none."""
    way = random.choice(
        ("drop rows", "repeat rows", "shuffle", "drop column", "type", "value", "null", "add", "none left")
    )
    if way == "none left":
        return table.slice(0, 0) if len(table) else None
    if way == "drop rows":
        return table.slice(random.randrange(1, len(table) + 1)) if len(table) else None
    if way == "repeat rows":
        return pa.concat_tables([table, table.slice(random.randrange(len(table)))]) if len(table) else None
    if way == "shuffle":
        order = list(range(len(table)))
        random.shuffle(order)
        return table.take(order) if order != sorted(order) else None
    index = random.randrange(table.num_columns)
    name, column = table.column_names[index], table.column(index)
    if way == "drop column":
        return table.remove_column(index)
    if way == "add":
        return table.append_column(random.choice((f"{name}2", name.upper(), "run", "")), column)
    if way == "null":
        return table.set_column(index, name, pa.nulls(len(table), column.type))
    if way == "type":
        values = column.to_pylist()
        made = random.choice(("text", "list", "binary", "bool", "float", "dictionary", "null"))
        if made == "dictionary" and pa.types.is_string(column.type):
            return table.set_column(index, name, column.dictionary_encode())
        new = {
            "text": lambda: pa.array([None if value is None else str(value) for value in values], pa.string()),
            "list": lambda: pa.array([[7]] * len(values), pa.list_(pa.int64())),
            "binary": lambda: pa.array([b"\xff\0"] * len(values), pa.binary()),
            "bool": lambda: pa.array([True] * len(values)),
            "float": lambda: pa.array([float("nan")] * len(values)),
            "dictionary": lambda: pa.array([1] * len(values), pa.int64()).dictionary_encode(),
            "null": lambda: pa.nulls(len(values)),
        }[made]()
        return table.set_column(index, name, new)
    values = column.to_pylist()
    if not values:
        return None
    values[random.randrange(len(values))] = other_value(random, column.type)
    return table.set_column(index, name, pa.array(values, column.type))


def other_value(random, type_):
    if pa.types.is_list(type_):
        return [other_value(random, type_.value_type) for _ in range(random.choice((0, 1, 3, 40)))]
    if pa.types.is_integer(type_):
        top = 2 ** (type_.bit_width - 1)
        return random.choice((0, -1, 1, top - 1, -top))
    if pa.types.is_floating(type_):
        return random.choice((0.0, float("nan"), float("inf"), -float("inf"), 1e30, -5.0))
    if pa.types.is_string(type_):
        return random.choice(("", "x", "../../x", "train", "\0", "é" * 1000))
    return None


def footer_of(data):
    """The footer's bytes, as the account hashes them: the metadata, its length and the magic."""
    size = int.from_bytes(data[-8:-4], "little")
    return data[-8 - size :]


def account(trace, path):
    """Have the writers' states say of a file what is in it now."""
    file = trace / path
    for state in sorted((trace / "writers").glob("*.json")):
        try:
            document = json.loads(state.read_bytes())
            known = document["files"][path]
        except (ValueError, KeyError, TypeError, OSError):
            continue
        if not file.is_file() or not isinstance(known, dict):
            continue
        data = file.read_bytes()
        known |= {"num_bytes": len(data), "hash": xxhash.xxh3_128_hexdigest(data)}
        if path.endswith(".parquet"):
            known["footer"] = xxhash.xxh3_64_hexdigest(footer_of(data))
            table = pq.ParquetFile(io.BytesIO(data))
            known["num_rows"] = table.metadata.num_rows
        resign("writers/", document)
        overwrite(state, json.dumps(document, indent=1).encode())


# Journals


def message_ends(data):
    """Where the messages of an Arrow IPC stream end, the schema's first."""
    ends = []
    source = pa.BufferReader(data)
    try:
        reader = pa.ipc.open_stream(source)
        ends.append(source.tell())
        while True:
            reader.read_next_batch()
            ends.append(source.tell())
    except (StopIteration, OSError, pa.ArrowException):
        return ends


def drop_message(random, trace, path, others):
    """One record batch out of a journal's middle."""
    return edit_messages(random, trace, path, lambda messages, at: messages[:at] + messages[at + 1 :])


def repeat_message(random, trace, path, others):
    """One record batch twice."""
    return edit_messages(random, trace, path, lambda messages, at: messages[: at + 1] + messages[at:])


def edit_messages(random, trace, path, change):
    if kind_of(path) != "journal":
        return False
    data = (trace / path).read_bytes()
    ends = message_ends(data)
    if len(ends) < 3:
        return False
    messages = [data[first:last] for first, last in itertools.pairwise(ends)]
    at = random.randrange(len(messages) - 1)
    overwrite(trace / path, data[: ends[0]] + b"".join(change(messages, at)) + data[ends[-1] :])
    return True


MUTATIONS = {
    function.__name__.replace("_", " "): function
    for function in (
        flip_bit,
        flip_bytes,
        flip_near_end,
        zero_range,
        truncate_to_nothing,
        truncate_by_one,
        truncate_anywhere,
        truncate_at_bound,
        extend,
        repeat,
        delete,
        delete_folder,
        folder_in_place,
        link_in_place,
        pipe_in_place,
        rename,
        copy,
        swap_same_kind,
        swap_other_kind,
        replace_by_same_kind,
        replace_by_other_trace,
        replace_by_older,
        add_older,
        add_other_trace,
        edit_json,
        edit_json_hostile,
        break_json,
        rewrite_parquet,
        rewrite_parquet_hostile,
        drop_message,
        repeat_message,
    )
}
