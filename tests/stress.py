"""Long forms of tests that kill processes: `python tests/stress.py durability --seed 1 --count 60`.

durability: kill recording processes at random moments, and count what they had been told was recorded and is not there.
deaths: kill works that change a trace before each of their changes (--count 0), or before COUNT of them.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parent / "tracer"))

from builders import PROGRAMS, make_batch
from tim_trace.analysis.verify import verify
from tim_trace.analysis.views import connect
from tim_trace.schemas.errors import DamageWarning

ON_DISK_AFTER_S = 1.5
"""What was acknowledged longer ago than this survives."""
ROWS, LONGEST, BATCHES = 32, 200, 4


@dataclass
class Acknowledged:
    """What recording processes said before they were killed."""

    added: int = 0
    """Steps whose `add_*` returned."""
    due: int = 0
    """Those of them that have to be there."""
    flushed: int = 0
    """Those of them that a `flush()` came after."""
    lost: int = 0
    """Steps that have to be there and are not whole."""
    not_due_lost: int = 0
    """Steps that were added within the last ON_DISK_AFTER_S and are not there, which is allowed."""


def kill_recording(folder, *, writers, pause_s, flushes, after_s):
    """Start recording processes, kill them after some seconds, and compare the trace with what they said."""
    program = [sys.executable, PROGRAMS / "durable.py", folder, writers, pause_s, flushes]
    with subprocess.Popen([str(word) for word in program], stdout=subprocess.PIPE, start_new_session=True) as process:
        told = os.read(process.stdout.fileno(), 1 << 16)
        os.set_blocking(process.stdout.fileno(), False)
        deadline = time.monotonic() + after_s
        while time.monotonic() < deadline or (flushes and b"flushed" not in told and process.poll() is None):
            told += _available(process.stdout)
            time.sleep(0.001)
        killed_at = time.monotonic()
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.set_blocking(process.stdout.fileno(), True)
        told += process.stdout.read()
    lines = [line.split() for line in told.decode().splitlines(keepends=True) if line.endswith("\n")]
    return _compare(folder, [(int(w), int(step), float(at), kind) for w, step, at, kind in lines], killed_at)


def _available(pipe):
    return pipe.read() or b""


def _compare(folder, told, killed_at):
    due, added, flushed = set(), set(), set()
    for writer, step, at, kind in told:
        if kind == "added":
            added.add((writer, step))
            due |= {(writer, step)} if at < killed_at - ON_DISK_AFTER_S else set()
        else:
            flushed |= {(writer, earlier) for earlier in range(1, step + 1)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DamageWarning)  # a record that was being written when the process died
        there = _whole_steps(folder)
        assert verify(str(folder)).is_whole or all(
            "an incomplete record" in told for told in verify(str(folder)).damaged
        )
    wanted = due | flushed
    return Acknowledged(
        added=len(added), due=len(due), flushed=len(flushed), lost=len(wanted - there),
        not_due_lost=len(added - wanted - there),
    )  # fmt: skip


def _whole_steps(folder):
    """The (writer, step) that are there with every sequence, score and metric; fails where a value is another one."""
    batches = [make_batch(rows=ROWS, seed=seed, longest=LONGEST) for seed in range(BATCHES)]
    connection = connect(folder)
    query = f"""
        SELECT step % {BATCHES}, split_part(seq_id, '-', 2)::INT, response_ids, count(*) FROM all_sequences GROUP BY ALL
    """
    for seed, row, ids, _ in connection.execute(query).fetchall():
        assert ids == batches[seed]["response_ids"][row]
    query = f"""
        SELECT "pass", step % {BATCHES}, split_part(seq_id, '-', 2)::INT, logprobs, count(*) FROM all_scores GROUP BY ALL
    """
    for name, seed, row, values, _ in connection.execute(query).fetchall():
        assert values == batches[seed][name][row].tolist()
    query = f"""
        SELECT writer, step
        FROM (SELECT split_part(seq_id, '-', 1)::INT AS writer, step, count(*) AS n FROM all_sequences GROUP BY ALL)
        JOIN (SELECT split_part(seq_id, '-', 1)::INT AS writer, step, count(*) AS m FROM all_scores GROUP BY ALL)
             USING (writer, step)
        JOIN (SELECT replace(name, 'loss', '')::INT AS writer, step FROM all_metrics WHERE value = step) USING (writer, step)
        WHERE n = {ROWS} AND m = 2 * {ROWS}
    """
    return set(connection.execute(query).fetchall())


def durability(folder, seed, count):
    """Kill `count` recordings of one to three writers, fast and slow ones, with and without flushes."""
    draw = random.Random(seed)
    total = Acknowledged()
    for number in range(count):
        chosen = {
            "writers": draw.randint(1, 3), "pause_s": draw.choice([0, 0, 0.01, 0.3]), "flushes": draw.choice([0, 0, 1, 7]),
            "after_s": draw.uniform(1.0, 4.0),
        }  # fmt: skip
        found = kill_recording(folder / f"run{number}", **chosen)
        if found.lost:
            print(f"lost {found.lost}: {chosen} in {folder / f'run{number}'}", flush=True)
        for name in total.__dataclass_fields__:
            setattr(total, name, getattr(total, name) + getattr(found, name))
    return total


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["durability", "deaths"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--work", action="append", help="of deaths: one of them; may be repeated")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tim-trace-stress-") as name:
        folder = Path(name)
        if arguments.what == "durability":
            found = durability(folder, arguments.seed, arguments.count)
            print(f"{arguments.count} kills, seed {arguments.seed}: {found}")
            sys.exit(found.lost > 0)
        from test_deaths import CHECKS, check_deaths

        for work in arguments.work or CHECKS:
            print(
                f"{work}: {check_deaths(folder / work, work, arguments.seed, arguments.count)} deaths, nothing lost",
                flush=True,
            )


if __name__ == "__main__":
    main()
