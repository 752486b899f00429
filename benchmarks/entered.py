"""Files and functions of the product that a verb enters, on every thread.

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
    """Code objects of the product that a call of `verb` runs; what imports run is left out."""
    codes = set()

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(ROOMS) and frame.f_code.co_name != "<module>":
            codes.add(frame.f_code)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        verb()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return codes


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
