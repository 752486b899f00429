import errno
import threading

import pytest
from tim_trace.schemas.errors import DamagedTrace
from tim_trace.tracer.parquet_file import read_footer
from tim_trace.tracer.store import Store
from tim_trace.tracer.verified_file import FileChecksums, FileCursor, VerifiedFile
from xxhash import xxh3_64_digest


def test_a_thread_that_seeks_and_reads_gets_its_own_bytes_whatever_another_one_does_in_between(tmp_path):
    (tmp_path / "file").write_bytes(bytes(range(256)))
    cursor = FileCursor(
        VerifiedFile(Store(tmp_path), "file", 256, FileChecksums(blocks=xxh3_64_digest(bytes(range(256)))))
    )
    cursor.seek(7)
    other = threading.Thread(target=lambda: (cursor.seek(100), cursor.read(20)))
    other.start()
    other.join()
    assert cursor.read(3) == bytes([7, 8, 9])
    assert cursor.tell() == 10


def test_a_gap_before_a_footer_that_is_in_memory_holds_zeros_and_moves_nothing_else(tmp_path):
    content, tail = bytes(range(200)), b"footer of a file"
    (tmp_path / "file").write_bytes(content + tail)
    file = VerifiedFile(
        Store(tmp_path), "file", 216, FileChecksums(blocks=xxh3_64_digest(content), tail_bytes=16, tail=tail)
    )
    cursor, gap = FileCursor(file), file.shown_bytes - 216
    assert gap > 0
    shown = content + bytes(gap) + tail
    assert cursor.read() == shown
    for start, stop in [
        (0, 10),
        (190, 200),
        (190, 210),
        (200, 201),
        (200 + gap - 1, 200 + gap + 3),
        (200 + gap, 216 + gap),
    ]:
        cursor.seek(start)
        assert cursor.read(stop - start) == shown[start:stop], (start, stop)
    cursor.seek(-16, 2)
    assert cursor.read(100) == tail


def test_a_footer_that_the_disk_does_not_give_is_not_called_broken_parquet(tmp_path, monkeypatch):
    def read_range(*_):
        raise OSError(errno.EIO, "Input/output error", "x")

    monkeypatch.setattr(Store, "read_range", read_range)
    with pytest.raises(DamagedTrace, match=r"cannot be read \(Input/output error\)"):
        read_footer(Store(tmp_path), "x", 100)
