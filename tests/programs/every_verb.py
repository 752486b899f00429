"""Run every verb (as it is and with --json) and every public function on the example trace.

The Python that runs this may have nothing but tim-trace and its dependencies. One line of JSON per call: `call`, `code`
(0, or the exit code; for a function 0 or 2), `error` (the last line of stderr), `seconds`, and `libraries` (imported by a
command; None for a function).
"""

import inspect
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import tim_trace
from tim_trace import cli
from verbs import WORDS, words_of

LIBRARIES = {
    "bokeh", "duckdb", "jinja2", "matplotlib", "numcodecs", "numpy", "pandas", "pyarrow", "ray", "rich", "s3fs", "scipy", "torch",
    "zarr",
}  # fmt: skip
CALL = f"""
import atexit, json, sys
atexit.register(lambda: open(sys.argv[1], "w").write(json.dumps(sorted({LIBRARIES!r} & {{*sys.modules}}))))
from tim_trace.cli import main
main(sys.argv[2:])
"""
FUNCTIONS = {
    "compare": ("{run}", "{run}"),
    "query": ("by-probability", "{run}"),
    "sql": ("{run}", "FROM steps"),
    "mcp": (["{run}"],),
    "import_dump": ("parquet", "{dump}"),
    "import_parquet": ("{dump}",),
    "record": ([sys.executable, "-c", "pass"],),
    "example": ("{new}",),
    "attach": ("{run}", 0, "{new}"),
    "export": ("{run}", 0, "{new}"),
}
"""What a function is given other than one run; `output` comes beside."""
OPTIONS = {"gate": {"fail_on": ["check"]}, "export_run": {"to": "parquet"}}


def main():
    with tempfile.TemporaryDirectory() as folder:
        run, dump = Path(folder) / "example", Path(folder) / "dump" / "sequences.parquet"
        first = {"example": run, "export": dump.parent}
        for verb in (*first, *sorted(WORDS.keys() - first.keys())):
            options = {name for option in cli.main.commands[verb].params for name in option.opts}
            for more in ([], ["--json"]) if "--json" in options else ([],):
                new = first.get(verb, Path(folder) / "-".join(["new", verb, *more]))
                called(" ".join([verb, *more]), [*words_of(verb, run=run, dump=dump, new=new), *more])
        called("--help", ["--help"])
        for name in sorted({*tim_trace.__all__} - {"Loss", "Recorder"}):
            in_python(name, {"run": run, "dump": dump, "new": Path(folder) / f"python-{name}"})


def called(call, words):
    """Print what a command did."""
    with tempfile.NamedTemporaryFile() as imported:
        begin = time.monotonic()
        command = [sys.executable, "-c", CALL, imported.name, *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=600)
        seconds, libraries = time.monotonic() - begin, json.loads(imported.read() or "[]")
    tell(call, done.returncode, (done.stderr.strip().splitlines() or [""])[-1], seconds, libraries)


def in_python(name, places):
    """Print what a public function did."""

    def filled(value):
        return [filled(each) for each in value] if isinstance(value, list | tuple) else str(value).format(**places)

    begin, code, error = time.monotonic(), 0, ""
    try:
        function = getattr(tim_trace, name)
        given = [value if isinstance(value, int) else filled(value) for value in FUNCTIONS.get(name, ("{run}",))]
        options = {"output": filled("{new}")} if "output" in inspect.signature(function).parameters else {}
        function(*given, **options, **OPTIONS.get(name, {}))
    except tim_trace.schemas.errors.TimTraceError as raised:
        code, error = 2, f"{type(raised).__name__}: {raised}"
    tell(f"tim_trace.{name}", code, error, time.monotonic() - begin, None)


def tell(call, code, error, seconds, libraries):
    line = {"call": call, "code": code, "error": error, "seconds": round(seconds, 2), "libraries": libraries}
    print(json.dumps(line), flush=True)


main()
