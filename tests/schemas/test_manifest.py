import json

import pytest
from tim_trace.schemas.checksums import whole_hash
from tim_trace.schemas.documents import Manifest, canonical_json, parse_manifest, to_document
from tim_trace.schemas.errors import DamagedTrace, NewerTrace
from tim_trace.schemas.layout import FORMAT_VERSION

MANIFEST = Manifest(
    run_id="r", created_at="2026-01-01T00:00:00+00:00", created_by="0.1.0", source="record", command=("python", "x.py")
)


def test_a_manifest_reads_back_as_it_was_written():
    assert parse_manifest(MANIFEST.to_json().encode(), "x") == MANIFEST


def test_a_newer_format_says_how_to_get_on():
    content = json.loads(MANIFEST.to_json()) | {"format_version": FORMAT_VERSION + 1}
    with pytest.raises(NewerTrace, match=f"run/trace.json: trace format {FORMAT_VERSION + 1}.*pip install --upgrade"):
        parse_manifest(json.dumps(content).encode(), "run/trace.json")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": "x", "format_version": 1}', '{"format": "tim-trace"}', "\0"]
)
def test_another_file_is_named(text):
    with pytest.raises(DamagedTrace, match="some/where"):
        parse_manifest(text.encode(), "some/where")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-8-sig"])
def test_the_same_text_in_another_encoding_is_not_what_was_written(encoding):
    with pytest.raises(DamagedTrace, match="some/where"):
        parse_manifest(MANIFEST.to_json().encode(encoding), "some/where")


def test_a_document_is_the_text_that_json_writes():
    values = {
        "a": {},
        "b": [],
        "c": (1, {"d": None}),
        "e": "é\u2028😀",
        "f": 1e-5,
        "g": float("nan"),
        "h": 1 << 70,
        "i": True,
    }
    text = to_document(values)
    assert text == json.dumps(json.loads(text), indent=1) + "\n"
    assert json.loads(text)["checksum"] == whole_hash(canonical_json(values).encode())


def test_fields_of_a_later_minor_release_are_passed_over():
    content = json.loads(MANIFEST.to_json()) | {"mood": "good"}
    del content["checksum"]
    assert parse_manifest(to_document(content).encode(), "x") == MANIFEST


def test_a_manifest_that_was_edited_is_refused():
    content = json.loads(MANIFEST.to_json()) | {"run_id": "another"}
    with pytest.raises(DamagedTrace, match="does not match its checksum"):
        parse_manifest(json.dumps(content).encode(), "x")
    del content["checksum"]
    with pytest.raises(DamagedTrace, match="its checksum is missing"):
        parse_manifest(json.dumps(content).encode(), "x")


def test_the_format_without_checksums_is_refused():
    content = json.loads(MANIFEST.to_json()) | {"format_version": 1}
    del content["checksum"]
    with pytest.raises(DamagedTrace, match=r"not a trace manifest"):
        parse_manifest(json.dumps(content).encode(), "x")
