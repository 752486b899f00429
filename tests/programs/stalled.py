"""Train on while the file system does not answer: python stalled.py RUN CASE; each case ends by itself within the bound."""

import os
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from builders import add_step, make_batch
from tim_trace.cli import main
from tim_trace.schemas.errors import StorageStalled
from tim_trace.tracer import launch as launcher
from tim_trace.tracer.hooks.session import Order, Session
from tim_trace.tracer.recorder import Recorder

BOUND_S = 2.0
path, case = sys.argv[1], sys.argv[2]
stuck, held = threading.Event(), threading.Event()
nothing, _ = os.pipe()


def hold(name):
    """Have a call of the system not return while `stuck` is set, as where a server is gone that has the trace."""
    real = getattr(os, name)

    def call(*args, **options):
        if stuck.is_set() and (isinstance(args[0], int) or os.fspath(args[0]).startswith(path)):
            held.set()
            os.read(nothing, 1)
        return real(*args, **options)

    setattr(os, name, call)


def launch():
    """Have `tim-trace record` run a command that ends with code 3, where the file system answers no more from CASE on."""
    run, started, go = Path(path), Path(f"{path}-started"), Path(f"{path}-go")
    command = [sys.executable, __file__, path, "command", started, go]

    def stop_answering():
        while not (started.exists() and (run / "writers" / "record.json").exists()):
            time.sleep(0.05)
        stuck.set()
        if case == "record-sign":
            held.wait()
        with open(go, "w"):
            pass

    if case == "record-begin":
        go.touch()
        stuck.set()
    else:
        threading.Thread(target=stop_answering, daemon=True).start()
    launcher.SIGN_S = 0.1 if case == "record-sign" else 3600.0
    main(["record", "-o", path, "--max-wait", str(BOUND_S), "--", *map(str, command)])


def record():
    """Record a step as that command, and end with code 3 and without a word to the recorder."""
    order, (started, go) = Order.from_environment(), map(Path, sys.argv[3:])
    if order is not None:
        session = Session(order)
        add_step(session.recorder, 1, make_batch())
        session.recorder.flush()
    started.touch()
    while not go.exists():
        time.sleep(0.05)
    os._exit(3)


def weights(value):
    import torch

    return {"model": torch.full((1000,), value)}


of_launcher = ("stat", "scandir", "mkdir") if case.startswith("record") else ()
for name in ("writev", "fsync", "replace", "open", "utime", *of_launcher):
    hold(name)
begin = time.monotonic()
if case == "command":
    record()
elif case.startswith("record"):
    launch()
elif case == "open":
    stuck.set()
    try:
        Recorder(path, max_wait=BOUND_S)
    except StorageStalled as error:
        print(f"{path} did not respond within 2 s (file system" in str(error))
elif case == "session":
    Recorder(path).close()
    stuck.set()
    session = Session(Order(run=path, max_wait=BOUND_S))
    for _ in range(20):
        with session.guard("sequences"):
            session.recorder.add_metrics(1, {"loss": 1.0})
    print(not session.is_recording)
elif case == "exit":
    session = Session(Order(run=path, max_wait=BOUND_S))
    Recorder(path).close()
    add_step(session.recorder, 1, make_batch())
    session.recorder.flush()
    stuck.set()
    print(True)
else:
    recorder = Recorder(path, max_wait=BOUND_S, queue_bytes=1)
    add_step(recorder, 1, make_batch())
    recorder.add_weights(0, weights(0.0))
    assert recorder.flush() is True
    begin = time.monotonic()
    stuck.set()
    if case == "add":
        for step in range(2, 100):
            add_step(recorder, step, make_batch())
    elif case == "weights":
        for version in range(1, 5):
            recorder.add_weights(version, weights(float(version)))
    elif case == "close":
        add_step(recorder, 2, make_batch())
    else:
        assert case == "sync", case
        assert recorder.flush(sync=True) is False
    if case != "close":
        assert recorder.writer.state.state == "failed"
        assert recorder.waited_s >= BOUND_S
        add_step(recorder, 100, make_batch())
        assert recorder.flush() is False
        assert recorder.flush(sync=True) is False
    print(recorder.close() is False)
print(f"{time.monotonic() - begin:.1f}")
