"""What traces of more and more writers cost to open and to ask, before and after `tim-trace compact`, on disk and on S3.

    python benchmarks/scale/measure.py -o runs/scale --writers 8 64 512

Each trace is made by many_writers.py, with 200 steps. Times are the least of three, in seconds; `bytes` is what the question
for one step reads over what the tokens of that step take in the files; requests are counted at s3fs, to a server on this
machine, each answered 20 ms later.
"""

import argparse
import asyncio
import os
import time
from collections import Counter
from functools import partial
from pathlib import Path

import fsspec
import numpy as np
import pyarrow.parquet as pq
from many_writers import write
from moto.server import ThreadedMotoServer
from tim_trace.analysis import compact
from tim_trace.analysis.trace.database import Database
from tim_trace.tracer.index import write_index
from tim_trace.tracer.store import Store

STEP = 100
DELAY_S = 0.02
ONE_STEP = f"SELECT count(*), avg(d) FROM pair('train', 'rollout') WHERE step = {STEP}"
COUNT = "SELECT count(*) FROM sequences"


def least(work, repeats=3):
    """Seconds of the fastest of several runs, and what the last one gave."""
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        found = work()
        taken.append(time.perf_counter() - start)
    return min(taken), found


def step_bytes(trace):
    """Bytes that the rows of the step take of their row groups, in the columns that the question needs."""
    total = 0.0
    for table, columns in (("scores", ("step", "seq_id", "pass", "logprobs")), ("sequences", ("step", "seq_id"))):
        for path in (trace / table).glob("*.parquet"):
            file = pq.ParquetFile(path)
            for number in range(file.num_row_groups):
                group = file.metadata.row_group(number)
                rows = file.read_row_group(number, columns=["step", "pass"] if table == "scores" else ["step"])
                here = np.asarray(rows["step"]) == STEP
                if table == "scores":
                    here &= np.isin(np.asarray(rows["pass"]), ["train", "rollout"])
                sizes = [group.column(index) for index in range(group.num_columns)]
                size = sum(c.total_compressed_size for c in sizes if c.path_in_schema.partition(".")[0] in columns)
                total += size * np.count_nonzero(here) / len(here)
    return total


def on_disk(trace):
    """Seconds to open and to ask for one step, and the bytes that the latter reads over those of the step."""
    opened, _ = least(lambda: Database(trace))
    read, original = [0], Store.read_range

    def counted(self, *arguments):
        content = original(self, *arguments)
        read[0] += len(content)
        return content

    asked = min(least(partial(Database(trace).ask, ONE_STEP), 1)[0] for _ in range(3))
    database = Database(trace)
    Store.read_range = counted
    try:
        database.ask(ONE_STEP)
    finally:
        Store.read_range = original
    return opened, asked, read[0] / step_bytes(trace)


def on_s3(trace, filesystem, name, requests):
    """Requests and seconds: to open, to open and count rows, and to ask an open trace for one step."""
    url = f"s3://bucket/{name}/run"
    filesystem.put(str(trace), url, recursive=True)
    found = []
    for question in (None, COUNT, ONE_STEP):
        database = Database(url) if question == ONE_STEP else None
        requests.clear()
        start = time.perf_counter()
        if question is None:
            Database(url)
        else:
            (database or Database(url)).ask(question)
        found += [sum(requests.values()), time.perf_counter() - start]
    filesystem.rm(url, recursive=True)
    return found


def counting(filesystem):
    """Count a file system's requests, and delay each."""
    requests, call = Counter(), type(filesystem)._call_s3

    async def delayed(self, method, *arguments, **options):
        requests[method] += 1
        await asyncio.sleep(DELAY_S)
        return await call(self, method, *arguments, **options)

    type(filesystem)._call_s3 = delayed
    return requests


def main(folder, writers, sequences, tokens):
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    os.environ |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
    os.environ["AWS_ENDPOINT_URL"] = f"http://{host}:{port}"
    filesystem = fsspec.filesystem("s3")
    filesystem.mkdir("bucket")
    requests = counting(filesystem)
    print("writers  state      files   open_s  step_s  bytes   open_req  s      count_req  s      step_req  s")
    for count in writers:
        trace = folder / str(count)
        if not trace.exists():
            write(trace, writers=count, steps=200, sequences=sequences, mean_tokens=tokens)
        for state in ("recorded", "compacted"):
            if state == "compacted":
                start = time.perf_counter()
                compact(trace)
                spent = time.perf_counter() - start
            write_index(trace)
            files = sum(1 for _ in trace.rglob("*.parquet"))
            opened, asked, share = on_disk(trace)
            remote = on_s3(trace, filesystem, f"{count}-{state}", requests)
            cells = "".join(
                f"{number:>9}  {taken:5.2f}" for number, taken in zip(remote[::2], remote[1::2], strict=True)
            )
            print(f"{count:7}  {state:9}  {files:5}  {opened:7.3f}  {asked:6.3f}  {share:5.2f}{cells}", flush=True)
        print(f"         compact took {spent:.1f} s")
    server.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, default=Path("runs/scale"))
    parser.add_argument("--writers", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--sequences", type=int, default=8, help="of a writer at each step")
    parser.add_argument("--tokens", type=int, default=64, help="of a response, about")
    given = parser.parse_args()
    main(given.output, given.writers, given.sequences, given.tokens)
