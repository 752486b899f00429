"""Replay a trace in a process that may take so much memory and no more."""

import resource
import sys
import warnings
from pathlib import Path

import torch  # noqa: F401  what is loaded before counts not
from tim_trace.replay.engine import replay

trace, arm, megabytes = sys.argv[1], sys.argv[2], int(sys.argv[3])
warnings.simplefilter("always")
replay(trace, steps="1")
status = Path("/proc/self/status").read_text()
taken = int(status.split("VmSize:")[1].split()[0]) << 10
resource.setrlimit(resource.RLIMIT_AS, (taken + (megabytes << 20), resource.RLIM_INFINITY))
for result in replay(trace, steps="1", arm=[arm]):
    print(result.arm, result.num_tokens, result.max_abs_d)
