"""How much of analysis/ a verb goes through: the files and functions that it enters.

python benchmarks/entered.py runs/demo
"""

import sys
import tempfile
import threading
from pathlib import Path

import tim_trace
from tim_trace.analysis import diagnose, report

ANALYSIS = str(Path(tim_trace.__file__).parent / "analysis")


def entered(verb):
    """Code objects of analysis/ that a call of `verb` runs, on every thread; what imports run is left out."""
    codes = set()

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(ANALYSIS) and frame.f_code.co_name != "<module>":
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
    (trace,) = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        verbs = {
            "diagnose": lambda: diagnose(trace),
            "report": lambda: report(trace, output=Path(folder, "report.html")),
        }
        for name, verb in verbs.items():
            codes = entered(verb)
            files = {code.co_filename for code in codes}
            print(f"{name}: {len(files)} files, {len(codes)} functions")


if __name__ == "__main__":
    main()
