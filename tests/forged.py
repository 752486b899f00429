"""Traces as a stranger makes them: changed, with checksums that fit again."""

import base64
import json

import pyarrow.parquet as pq
from tim_trace.schemas.checksums import BlockDigests, sealed, short_hash, whole_hash
from tim_trace.schemas.documents import CHECKSUM, to_document
from tim_trace.tracer.dense_store import FILES


def change_document(path, change):
    """Change a document of a trace, and give it the checksum of what it says now."""
    values = json.loads(path.read_bytes())
    has_checksum = values.pop(CHECKSUM, None) is not None
    values = change(values) or values
    path.write_text(to_document(values) if has_checksum else json.dumps(values))


def reseal(trace):
    """Let every account of a file fit the file."""
    for root in trace.glob("dense/*/zarr.json"):
        group = json.loads(root.read_bytes())
        if isinstance(group.get("attributes"), dict) and FILES in group["attributes"]:
            group["attributes"][FILES] = {
                path.relative_to(root.parent).as_posix(): _blocks(path.read_bytes())
                for path in sorted(root.parent.rglob("*"))
                if path.is_file() and path != root
            }
            root.write_text(json.dumps(group))
    for path in trace.glob("weights/*.json"):
        change_document(path, lambda values, path=path: _with_layout(trace, values))
    for path in trace.glob("writers/*.json"):
        change_document(path, lambda values: _with_accounts(trace, values))


def _blocks(content):
    digests = BlockDigests()
    digests.add(content)
    return {"num_bytes": len(content), "blocks": base64.b64encode(digests.blocks).decode()}


def _with_layout(trace, values):
    layout = trace / "weights" / str(values.get("segment")) / "zarr.json"
    return values | ({"layout_hash": whole_hash(layout.read_bytes())} if layout.is_file() else {})


def _with_accounts(trace, values):
    files = values.get("files")
    if not isinstance(files, dict):
        return values
    for name, record in files.items():
        path = trace / name
        if not isinstance(record, dict) or not path.is_file():
            continue
        content = path.read_bytes()
        own = sealed(content)
        record |= {"num_bytes": own.num_bytes, "hash": own.hash}
        if name.endswith(".parquet"):
            length = int.from_bytes(content[-8:-4], "little") + 8
            record["footer"] = short_hash(content[-length:])
            try:
                record["num_rows"] = pq.read_metadata(path).num_rows
            except Exception:
                continue
    return values


def rewrite_table(path, change, **options):
    """Write a table's file anew, as the trace's writers write one, with other rows or another schema."""
    from tim_trace.tracer.parquet_file import write_checked

    table = change(pq.ParquetFile(path).read())
    path.unlink()
    if table.column_names.count("step") > 1:  # the writers of a trace read the steps that they write
        pq.write_table(table, path)
    else:
        write_checked(path, f"{path.parent.name}/{path.name}", table.schema, [table], **options)
