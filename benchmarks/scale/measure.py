"""What traces of more and more writers cost to open and to ask, before and after `tim-trace compact`, on disk and on S3.

    python benchmarks/scale/measure.py -o runs/scale --writers 8 64 512

Each trace is made by many_writers.py, with 200 steps. Times are the least of three, in seconds; `cpu` beside them is CPU time,
which other work on the machine changes less. `bytes` is what the question for one step reads over what the tokens of that step
take in the files; requests are counted at s3fs, to a server on this machine, each answered 20 ms later. The exponents at the end
say how open and question grow with the number of writers: the slope of the logarithms, by least squares.

    python benchmarks/scale/measure.py -o runs/long --writers 512 --steps 10000 --sequences 1 --tokens 12 --at-once 1000 --seals 2
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
from tim_trace.analysis.views import open_database
from tim_trace.tracer.index import write_index
from tim_trace.tracer.store import Store

DELAY_S = 0.02
ONE_STEP = "SELECT count(*), avg(d) FROM pair('train', 'rollout') WHERE step = {}"
COUNT = "SELECT count(*) FROM sequences"


def least(work, repeats=3):
    """Least wall and least CPU seconds of several runs."""
    taken = []
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        taken.append((time.perf_counter() - wall, time.process_time() - cpu))
    return np.min(taken, axis=0)


def step_bytes(trace, step):
    """Bytes that the rows of the step take of their row groups, in the columns that the question needs."""
    total = 0.0
    for table, columns in (("scores", ("step", "seq_id", "pass", "logprobs")), ("sequences", ("step", "seq_id"))):
        for path in (trace / table).glob("*.parquet"):
            file = pq.ParquetFile(path)
            for number in range(file.num_row_groups):
                group = file.metadata.row_group(number)
                rows = file.read_row_group(number, columns=["step", "pass"] if table == "scores" else ["step"])
                here = np.asarray(rows["step"]) == step
                if table == "scores":
                    here &= np.isin(np.asarray(rows["pass"]), ["train", "rollout"])
                sizes = [group.column(index) for index in range(group.num_columns)]
                size = sum(c.total_compressed_size for c in sizes if c.path_in_schema.partition(".")[0] in columns)
                total += size * np.count_nonzero(here) / len(here)
    return total


def on_disk(trace, step):
    """Seconds to open and to ask for one step, wall and CPU, and the bytes that the latter reads over those of the step."""
    opened, question = least(lambda: open_database(trace)), ONE_STEP.format(step)
    read, original = [0], Store.read_range

    def counted(self, *arguments):
        content = original(self, *arguments)
        read[0] += len(content)
        return content

    asked = np.min([least(partial(open_database(trace).ask, question), 1) for _ in range(3)], axis=0)
    database = open_database(trace)
    Store.read_range = counted
    try:
        database.ask(question)
    finally:
        Store.read_range = original
    return opened, asked, read[0] / step_bytes(trace, step)


def on_s3(trace, filesystem, name, requests, step):
    """Requests and seconds: to open, to open and count rows, and to ask an open trace for one step."""
    url = f"s3://bucket/{name}/run"
    filesystem.put(str(trace), url, recursive=True)
    found, one_step = [], ONE_STEP.format(step)
    for question in (None, COUNT, one_step):
        database = open_database(url) if question == one_step else None
        requests.clear()
        start = time.perf_counter()
        if question is None:
            open_database(url)
        else:
            (database or open_database(url)).ask(question)
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


def s3_server():
    """An S3 server on this machine, a file system of it with an empty `bucket`, and the requests that are made."""
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    os.environ |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
    os.environ["AWS_ENDPOINT_URL"] = f"http://{host}:{port}"
    filesystem = fsspec.filesystem("s3")
    filesystem.mkdir("bucket")
    requests = counting(filesystem)
    return server, filesystem, requests


def exponent(writers, seconds):
    """How seconds grow with the number of writers."""
    return np.polyfit(np.log(writers), np.log(seconds), 1)[0]


def main(given):
    server, filesystem, requests = s3_server()
    middle = given.steps // 2
    flush_every = given.seals and given.steps // given.seals
    head = "writers  state      files   open_s    cpu  step_s    cpu  bytes   open_req  s      count_req  s      step_req  s"
    print(head)
    found = {"recorded": [], "compacted": []}
    for count in given.writers:
        trace = given.output / str(count)
        if not trace.exists():
            write(
                trace, writers=count, steps=given.steps, sequences=given.sequences, mean_tokens=given.tokens,
                flush_every=flush_every, at_once=given.at_once,
            )  # fmt: skip
        for state in found:
            if state == "compacted":
                wall, cpu = least(partial(compact, trace), 1)
            write_index(trace)
            files = sum(1 for _ in trace.rglob("*.parquet"))
            opened, asked, share = on_disk(trace, middle)
            found[state].append((*opened, *asked))
            remote = on_s3(trace, filesystem, f"{count}-{state}", requests, middle)
            times = "  ".join(f"{seconds:6.3f}" for seconds in (*opened, *asked))
            cells = "".join(
                f"{number:>9}  {taken:5.2f}" for number, taken in zip(remote[::2], remote[1::2], strict=True)
            )
            print(f"{count:7}  {state:9}  {files:5}  {times}  {share:5.2f}{cells}", flush=True)
        print(f"         compact took {wall:.1f} s, {cpu:.1f} s of CPU")
    if len(given.writers) > 1:
        for state, times in found.items():
            slopes = "  ".join(f"{exponent(given.writers, seconds):6.2f}" for seconds in zip(*times, strict=True))
            print(f"exponent {state:9}         {slopes}")
    server.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, default=Path("runs/scale"))
    parser.add_argument("--writers", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--sequences", type=int, default=8, help="of a writer at each step")
    parser.add_argument("--tokens", type=int, default=64, help="of a response, about")
    parser.add_argument("--at-once", type=int, help="see many_writers.py")
    parser.add_argument("--seals", type=int, help="see many_writers.py")
    main(parser.parse_args())
