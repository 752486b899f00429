"""Record under `tim-trace record` from a process and from its children, forked and spawned."""

import multiprocessing
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from builders import add_step, make_batch
from tim_trace.tracer.hooks.session import Order, Session

session = Session(Order.from_environment())


def work(name):
    add_step(session.recorder, 1, make_batch(), seq_ids=[f"{name}-{row}" for row in range(4)])


if __name__ == "__main__":
    work("parent")
    for method in ("fork", "spawn"):
        child = multiprocessing.get_context(method).Process(target=work, args=(method,))
        child.start()
        child.join()
        assert child.exitcode == 0
    add_step(session.recorder, 2, make_batch(), seq_ids=[f"parent-{row}" for row in range(4)])
