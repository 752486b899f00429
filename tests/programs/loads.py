"""Loads recorded weights into a model, and prints the bytes of the model, of its largest tensor, and what loading took at most.

TRACE or -, a folder of checkpoints or -, `whole` or `lazy`.
"""

import sys
import threading
import time

from tim_trace.replay.backends import model as models
from tim_trace.replay.recorded import RecordedRun

trace, weights_from, how = sys.argv[1:]


def anonymous():
    """Bytes of this process that no file backs."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


run = RecordedRun(trace, weights_from=None if weights_from == "-" else weights_from)
small = dict(run.model["config"], hidden_size=8, intermediate_size=8, vocab_size=8)
models.build(run.model | {"config": small}, dtype="float32", attention="sdpa", device="cpu")  # what is imported once
before, most, is_done = anonymous(), 0, threading.Event()


def watch():
    global most
    while not is_done.is_set():
        most = max(most, anonymous())
        time.sleep(0.0005)


watcher = threading.Thread(target=watch)
watcher.start()
model = models.build(run.model, dtype="float32", attention="sdpa", device="cpu")
models.load(model, run.weights.load(0, is_lazy=how == "lazy"), None)
is_done.set()
watcher.join()
sizes = [parameter.numel() * 4 for parameter in model.parameters()]
print(sum(sizes), max(sizes), most - before, float(sum(p.detach().double().sum() for p in model.parameters())))
