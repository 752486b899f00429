"""Measure the cost of opening and querying a trace with tens of thousands of merged files, like one of 10^12 tokens.

    python benchmarks/scale/many_files.py -o runs/scale/files --steps 1000 8400

Each step has a file of sequences and two of scores, one per pass, as `tim-trace compact` writes them for steps of 10^8
tokens, but with only a few rows: the measured cost grows with the number of files, not with their size. Seconds are
wall and CPU time, memory is the peak of a separate process; requests are counted in s3fs, to a server on this machine
that answers after 20 ms.
"""

import argparse
import resource
import sys
import time
import uuid
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from measure import COUNT, ONE_STEP, s3_server
from tim_trace import __version__
from tim_trace.analysis.info import info
from tim_trace.analysis.views import open_database
from tim_trace.schemas.documents import CLOSED, COMPACTION, Manifest, WriterState, now
from tim_trace.schemas.layout import SCORES, SEQUENCES, WRITERS, Segment
from tim_trace.tracer.create import whole_trace
from tim_trace.tracer.index import write_index
from tim_trace.tracer.liveness import this_process
from tim_trace.tracer.ragged import Ragged
from tim_trace.tracer.rows import BUILDERS
from tim_trace.tracer.seal import write_parquet
from tim_trace.tracer.whole_file import trace_file, write_part

SEQUENCES_A_STEP, TOKENS = 4, 16


def write(folder, steps):
    """Write the trace: for every step, a merged file of sequences and one per pass."""
    manifest = Manifest(run_id=str(uuid.UUID(int=1)), created_at=now(), created_by=__version__, source="recorder")
    writer = f"{COMPACTION}-00000000"
    files, rng = {}, np.random.default_rng(1)
    with whole_trace(folder, manifest, force=False) as building:
        for step in range(1, steps + 1):
            for number, (table, batch) in enumerate(_step(rng, step, writer)):
                relative = Segment(writer, (step - 1) * 2 + max(number - 1, 0)).parquet(table)
                with trace_file(building, relative) as temporary:
                    files[relative] = write_parquet(temporary, relative, table, [batch])
        state = WriterState(
            writer=writer, run_id=manifest.run_id, **this_process(), state=CLOSED, opened_at=now(), closed_at=now(),
            files=files, num_sequences=steps * SEQUENCES_A_STEP, num_tokens=steps * SEQUENCES_A_STEP * TOKENS,
        )  # fmt: skip
        write_part(building, f"{WRITERS}/{writer}.json", state.to_json().encode())
        write_index(building)


def _step(rng, step, writer):
    lengths = np.full(SEQUENCES_A_STEP, TOKENS)
    names = [f"{step}-{number}" for number in range(SEQUENCES_A_STEP)]
    known = {"step": step, "seq_id": names, "attempt": 1, "writer": writer}
    tokens = int(lengths.sum())
    ids = Ragged(rng.integers(0, 150_000, tokens, dtype=np.int32), lengths)
    columns = {"response_ids": ids, "prompt_ids": ids, "reward": rng.random(len(names))}
    columns |= {"num_response_tokens": lengths, "num_prompt_tokens": lengths}
    yield SEQUENCES, BUILDERS[SEQUENCES].batch(known | columns, len(names))
    rollout = -rng.exponential(0.5, tokens).astype(np.float32)
    trained = np.minimum(rollout + rng.normal(0, 0.02, tokens).astype(np.float32), 0)
    for name, values in (("rollout", rollout), ("train", trained)):
        columns = {"pass": name, "iteration": 0, "logprobs": Ragged(values, lengths)}
        yield SCORES, BUILDERS[SCORES].batch(known | columns, len(names))


def asked(trace, question):
    """Return wall and CPU seconds to open a trace and to query it, and this process's peak memory in megabytes."""
    start = time.perf_counter(), time.process_time()
    database = open_database(trace)
    opened = time.perf_counter() - start[0], time.process_time() - start[1]
    start = time.perf_counter(), time.process_time()
    if question == "info":
        info(database)
    elif question:
        database.ask(question)
    spent = time.perf_counter() - start[0], time.process_time() - start[1]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20 if sys.platform == "darwin" else 1 << 10)
    return *opened, *spent, peak


def on_disk(trace, steps, questions):
    print("files   question                  open_s    cpu   asked_s    cpu  peak_MB")
    for name, question in questions.items():
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            opened, opened_cpu, spent, cpu, peak = pool.submit(asked, trace, question).result()
        print(
            f"{3 * steps:6}  {name:24}  {opened:6.2f}  {opened_cpu:5.2f}  {spent:8.2f}  {cpu:5.2f}  {peak:7.0f}",
            flush=True,
        )


def on_s3(trace, steps, questions):
    """Measure requests by kind, and seconds, to open a trace and to query it once open."""
    server, filesystem, requests = s3_server()
    filesystem.put(str(trace), "s3://bucket/run", recursive=True)
    for name, question in {"open": None, **questions}.items():
        database = None if question is None else open_database("s3://bucket/run")
        requests.clear()
        start = time.perf_counter()
        if question is None:
            open_database("s3://bucket/run")
        else:
            database.ask(question)
        print(
            f"{3 * steps:6} files on S3  {name:10}  {time.perf_counter() - start:6.2f} s  {dict(requests)}", flush=True
        )
    server.stop()


def main(given):
    for steps in given.steps:
        trace = given.output / str(steps)
        if not trace.exists():
            write(trace, steps)
        write_index(trace)
        one_step = {"one step": ONE_STEP.format(steps // 2)}
        on_disk(trace, steps, {"count(*)": COUNT, **one_step} | ({"info": "info"} if given.info else {}))
        if steps <= given.remote:
            on_s3(trace, steps, {"count(*)": COUNT, **one_step})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, default=Path("runs/scale/files"))
    parser.add_argument("--steps", type=int, nargs="+", default=[1000, 8400], help="three files each")
    parser.add_argument("--remote", type=int, default=10_000, help="also query traces of up to this many steps on S3")
    parser.add_argument("--info", action="store_true", help="also measure `info`, which reads every file")
    main(parser.parse_args())
