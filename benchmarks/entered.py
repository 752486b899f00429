"""List the product's files and functions that a command enters, on all threads.

python benchmarks/entered.py TRACE [VERB ...]
"""

import sys
import tempfile
import threading
from pathlib import Path

import tim_trace
from tim_trace import analysis

PRODUCT = str(Path(tim_trace.__file__).parent)
ROOMS = tuple(f"{PRODUCT}/{room}/" for room in ("schemas", "tracer", "replay", "analysis"))


def entered(verb):
    """Return the product's code objects that a call of `verb` runs, except those run by imports."""
    codes = set()

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(ROOMS) and code not in codes and not _is_of_import(frame):
            codes.add(code)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        verb()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return codes


def _is_of_import(frame):
    """Return True if the frame runs as part of importing a product module, such as a class body or a decorator."""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_code.co_filename.startswith(ROOMS):
            return True
        frame = frame.f_back
    return False


def main():
    trace, *names = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        verbs = {
            "info": lambda: analysis.info(trace),
            "stats": lambda: analysis.stats(trace),
            "check": lambda: analysis.check(trace),
            "diagnose": lambda: analysis.diagnose(trace),
            "report": lambda: analysis.report(trace, output=Path(folder, "report.html")),
        }
        for name in names or verbs:
            codes = entered(verbs[name])
            files = {code.co_filename for code in codes}
            print(f"{name}: {len(files)} files, {len(codes)} functions")


if __name__ == "__main__":
    main()
