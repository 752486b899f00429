"""Runs commands of tim-trace in forked children of one process that has imported it, with limits on time and memory."""

import contextlib
import importlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

LOADED = ("tim_trace", "duckdb", "pyarrow", "zarr", "numcodecs", "numpy", "fsspec", "rich")
ADDRESS_SPACE = 24 * 2**30  # bytes; DuckDB reserves more than it uses, so that the peak is measured, too


@dataclass(frozen=True)
class Ended:
    """A command that ended: `code` is None where it ran into the time limit; below 0 it is a signal."""

    code: int | None
    stdout: str
    stderr: str
    seconds: float
    peak_bytes: int


class Runner:
    """A process that has imported tim-trace and forks for each command.

    `modules` are imported before the fork, and so is what the commands of `warm` import, each run once.
    """

    def __init__(self, folder, warm=(), modules=(), address_space=ADDRESS_SPACE):
        self.folder, self.address_space = Path(folder), address_space
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "stdin").touch()
        environment = os.environ | {"NO_COLOR": "1", "COLUMNS": "160", "TERM": "dumb"}
        for name in ("RANK", "WORLD_SIZE", "PYTHONWARNINGS"):
            environment.pop(name, None)
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        found = set()
        for arguments, cwd in warm:
            self.ask(arguments=list(arguments), cwd=str(cwd), modules=str(self.folder / "modules"), limit_s=120)
            with contextlib.suppress(FileNotFoundError):
                found |= set((self.folder / "modules").read_text().split())
        self.ask(load=[*modules, *sorted(name for name in found if name.split(".")[0] in LOADED)])

    def ask(self, **question):
        question |= {name: str(self.folder / name) for name in ("stdin", "stdout", "stderr")}
        question["address_space"] = self.address_space
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError("the process that forks is gone")
        return json.loads(answer)

    def run(self, arguments, cwd, limit_s=60, leaves=False, env=None, stdin=""):
        """Run a command; with `leaves`, take the interpreter down as the real program does, which costs some time."""
        (self.folder / "stdin").write_text(stdin)
        answer = self.ask(arguments=list(arguments), cwd=str(cwd), limit_s=limit_s, leaves=leaves, env=env)
        stdout, stderr = ((self.folder / name).read_text(errors="replace") for name in ("stdout", "stderr"))
        return Ended(answer["code"], stdout, stderr, answer["seconds"], answer["peak_bytes"])

    def close(self):
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def serve():
    """Answer questions on stdin until it ends."""
    for line in sys.stdin:
        question = json.loads(line)
        if "load" in question:
            for name in question["load"]:
                with contextlib.suppress(Exception):
                    importlib.import_module(name)
            answer = {}
        else:
            child = os.fork()
            if not child:
                be_child(question)
            answer = wait_for(child, question["limit_s"])
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def be_child(question):
    os.setsid()
    os.chdir(question["cwd"])
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    os.dup2(os.open(question["stdin"], os.O_RDONLY), 0)
    os.dup2(os.open(question["stdout"], flags), 1)
    os.dup2(os.open(question["stderr"], flags), 2)
    if question.get("env") is not None:
        os.environ.clear()
        os.environ.update(question["env"])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (question["address_space"], question["address_space"]))
    from tim_trace.cli import main

    try:
        main(question["arguments"], prog_name="tim-trace")
    except SystemExit as exit:
        if not question.get("leaves"):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(exit.code if isinstance(exit.code, int) else bool(exit.code))
        raise
    finally:
        if "modules" in question:
            Path(question["modules"]).write_text("\n".join(sys.modules))


def wait_for(child, limit_s):
    """Wait for a child; kill it and what it started when the time is over."""
    began = time.monotonic()
    handle = os.pidfd_open(child)
    ended = bool(select.select([handle], [], [], limit_s)[0])
    os.close(handle)
    if not ended:
        os.killpg(child, signal.SIGKILL)
    _, status, usage = os.wait4(child, 0)
    code = os.waitstatus_to_exitcode(status) if ended else None
    return {"code": code, "seconds": time.monotonic() - began, "peak_bytes": usage.ru_maxrss * 1024}


if __name__ == "__main__":
    import tim_trace.cli  # noqa: F401

    serve()
