"""Measure the cost of checksums: writing, opening and reading a trace with and without them."""

import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import duckdb
import pyarrow.parquet as pq
from comparison import Comparison, in_turn, ratios
from steps import make_step, record
from tim_trace.analysis.stats import stats
from tim_trace.analysis.verify import verify
from tim_trace.analysis.views import connect
from tim_trace.schemas.checksums import SealedFile
from tim_trace.tracer.recorder import Recorder
from tim_trace.tracer.verified_file import VerifiedFile

NUM_STEPS = 16
ROUNDS = 9
SCAN = "SELECT pass, sum(list_sum(logprobs)), count(*) FROM scores GROUP BY pass"


def compare():
    """Measure a trace of 16 million tokens."""
    steps = [make_step(number % 4) for number in range(NUM_STEPS)]
    short = [make_step(number % 4, longest=180) for number in range(NUM_STEPS)]
    with tempfile.TemporaryDirectory() as folder:
        trace, bare = (Path(folder, name) for name in ("trace", "bare"))
        for what, recorded in (("long responses", steps), ("short responses", short)):
            taken = in_turn(
                ROUNDS,
                checked=lambda recorded=recorded: _record(recorded, trace),
                bare=lambda recorded=recorded: _record_bare(recorded, bare),
            )
            yield _at_most_three_percent(f"time to record, {what}", taken)
        _record(steps, trace)
        opened, alone = connect(trace), duckdb.connect()
        alone.execute(f"CREATE VIEW scores AS FROM '{trace}/scores/*.parquet'")
        taken = in_turn(
            ROUNDS, checked=lambda: opened.execute(SCAN).fetchall(), bare=lambda: alone.execute(SCAN).fetchall()
        )
        what = "time to sum 48 million logprobs in SQL a second time, over that of DuckDB alone"
        yield Comparison(what=what, values=ratios(taken["checked"], taken["bare"]))
        taken = in_turn(ROUNDS, checked=lambda: _scan(trace), bare=lambda: _scan_bare(trace))
        yield _at_most_three_percent("time to open the trace and sum 48 million logprobs in SQL", taken)
        taken = in_turn(ROUNDS, checked=lambda: _stats(trace), bare=lambda: _stats_bare(trace))
        yield _at_most_three_percent("time of `stats`, reading tokens", taken)
        taken = in_turn(3, verify=lambda: verify(trace), scan=lambda: _scan(trace))
        yield Comparison(what="time of `verify` over that sum", values=ratios(taken["verify"], taken["scan"]))


def _at_most_three_percent(what, taken):
    return Comparison(what=f"{what}, over that without", values=ratios(taken["checked"], taken["bare"]), at_most=1.03)


def _record(steps, folder):
    with Recorder(folder, force=True) as recorder:
        for number, step in enumerate(steps, 1):
            record(recorder, number, step)


def _record_bare(steps, folder):
    """Record without any checksums of journals, blocks or files."""
    with (
        patch("tim_trace.tracer.journal._checksum", lambda *parts: bytes(16)),
        patch("tim_trace.tracer.seal.write_checked", _write_bare),
    ):
        _record(steps, folder)


def _write_bare(path, identity, schema, parts, **options):
    num_rows = 0
    with pq.ParquetWriter(path, schema, **options) as writer:
        for part in parts:
            writer.write_table(part, row_group_size=max(part.num_rows, 1))
            num_rows += part.num_rows
    return SealedFile(num_bytes=path.stat().st_size, hash="0" * 32, num_rows=num_rows, footer="0" * 16)


@contextmanager
def _uncompared():
    """Read blocks without comparing checksums."""
    with patch.object(VerifiedFile, "_read", lambda self, start, stop: self._fetch(start, stop)):
        yield


def _open(folder):
    return connect(folder).execute("SELECT count(*) FROM scores").fetchall()


def _scan(folder):
    return connect(folder).execute(SCAN).fetchall()


def _scan_bare(folder):
    with _uncompared():
        return _scan(folder)


def _stats(folder):
    shutil.rmtree(folder / "sums", ignore_errors=True)
    return stats(folder)


def _stats_bare(folder):
    with _uncompared():
        return _stats(folder)
