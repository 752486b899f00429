"""The command line. Each command makes one API call and prints the result.

Data goes to stdout, progress and warnings to stderr. Exit codes: 0 success, 1 a finding, 2 incorrect usage or an
unreadable trace. Heavy modules are imported only when a command runs.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import Field, dataclass, fields
from functools import cached_property, wraps
from importlib import import_module
from importlib.util import find_spec
from threading import Timer
from typing import TYPE_CHECKING, Any, TextIO, TypeVar, get_args

import click

from . import analysis
from .analysis.frameworks.registry import FRAMEWORKS, DeclaredOption, declared_options
from .analysis.rows import (
    JSON_VERSION,
    MAIN_COLUMNS,
    Form,
    Rows,
    counted,
    printable,
    printable_lines,
    result_json,
    table,
    to_csv,
    to_json,
    to_text,
    wrapped,
)
from .replay.arm_option import GRADIENT, ArmOption
from .replay.arms import AS_RECORDED, Arm, names_for
from .schemas.errors import (
    ColumnsLeftOut,
    DamageWarning,
    InvalidQuery,
    NotInstalled,
    TimTraceError,
    TimTraceWarning,
    of_system,
    speaking_options,
    tell_damage,
)  # fmt: skip
from .schemas.layout import FORMAT_VERSION
from .schemas.lazy import telling_missing
from .schemas.passes import REPLAY_PREFIX, ROLLOUT, STANDARD, TRAIN
from .schemas.steps import ALL_STEPS
from .schemas.version import __version__

if TYPE_CHECKING:
    from .replay.results import ReplayedSteps
    from .schemas.results import Result
    from .tracer.importers.row_import import Imported
    from .tracer.launch import Recording

Answer = TypeVar("Answer")

SECTIONS = {
    "getting started": {
        "example": "Write an example trace: a recorded GRPO run whose reward drops.",
        "record": "Run a command and record its trainer and vLLM engines.",
        "import": "Convert another tool's files to a trace.",
        "diagnose": "Find out if a run collapsed, and if its mismatch is normal.",
        "report": "Write everything known about a run to a single HTML page.",
        "watch": "Watch a run and its first alerts while it is being recorded.",
        "replay": "Score recorded steps again under different numerics.",
        "sql": "Query traces with DuckDB SQL.",
        "stats": "Measure the mismatch by run, step or sequence.",
        "gate": "Fail CI if a run meets a failure condition.",
    },
    "inspecting and exporting traces": {
        "info": "Show what a trace contains, who wrote it, and what is missing.",
        "verify": "Verify every byte of a trace against its checksums.",
        "compact": "Merge a trace's many files into a few.",
        "query": "Run a named query, or list them all.",
        "export": "Write a run for pandas, TensorBoard or W&B.",
        "mcp": "Serve runs to coding agents (Model Context Protocol).",
    },
    "analyzing a run": {
        "check": "Find faults that make the comparison invalid.",
        "compare": "Find the first difference between two runs.",
        "corrections": "Show what each correction would mask or clip, and at what cost.",
        "objective": "Measure how the mismatch biases the training objective.",
        "dynamics": "Show when each series changed, and what changed first.",
        "attribute": "Determine whether and when a run collapsed, and why.",
    },
    "replaying in depth": {
        "triangulate": "Attribute the mismatch to trainer and engine.",
        "gradient": "Recompute gradients as recorded and under each arm.",
        "locate": "Find the layer and operator where two executions diverge.",
        "certify": "Search for a batch on which two executions differ bitwise.",
        "reproduce": "Write a short script that shows where two executions differ.",
        "weights": "List, verify and export recorded weights.",
    },
}
"""Commands in `--help`, by section. Help lines have at most 80 columns."""


_damage_told: list[str] = []

_left_out: list[str] = []


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Print TimTraceWarnings as plain sentences, without duplicates."""
    others = warnings.showwarning
    told: set[str] = set()
    _damage_told.clear()
    _left_out.clear()

    def show(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None,
        line: str | None = None,
    ) -> None:  # fmt: skip
        if issubclass(category, ColumnsLeftOut):
            _left_out.append(f"{message};")
        elif issubclass(category, TimTraceWarning):
            if str(message) not in told:
                _tell(_one_line(str(message)))
                _damage_told.extend([str(message)] if issubclass(category, DamageWarning) else [])
            told.add(str(message))
        else:
            others(message, category, filename, lineno, file, line)

    with warnings.catch_warnings():
        warnings.simplefilter("always", TimTraceWarning)
        # Hide NumPy's warnings about infinities in recorded values such as rewards.
        warnings.filterwarnings("ignore", r"(invalid value|overflow|divide by zero) encountered in ", RuntimeWarning)
        warnings.showwarning = show
        yield


def _let_go(error: BaseException | None) -> None:
    """Clear an error's frames. They can keep a DuckDB connection open, which prints an error at exit."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _print(text: str, *, nl: bool = True, color: bool | None = None) -> None:
    """Print to stdout. On failure, discard the buffer so that the interpreter does not write it at exit."""
    try:
        click.echo(text, nl=nl, color=color)
    except BrokenPipeError:  # e.g. `| head`: click exits quietly
        raise
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise of_system(error, "stdout") from error


_SUMMED_TOKENS = 1_000_000
"""Minimum number of response tokens for `record` to compute sums. In smaller runs, the first query computes them."""
_QUIET = f"{__name__}.quiet"


class _Place(click.Path):
    """Path with shell completion. Unlike click.Path, it never accesses the path, whose file system may hang."""

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> str | os.PathLike[str]:
        return value


class Commands(click.Group):
    """Command group that lists its commands by section and prints a TimTraceError as one line."""

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        for param in cmd.params:
            if isinstance(param, click.Option):
                param.show_default = True
            value = (param.metavar or param.human_readable_name).lstrip("[")
            if param.type is click.STRING and value.startswith(("RUN", "DIR", "FILE", "PATH")):
                param.type = _Place()
        cmd.params.append(
            click.Option(
                ["-q", "--quiet"], is_flag=True, expose_value=False, help="Hide progress bars.",
                callback=lambda ctx, option, value: ctx.meta.__setitem__(_QUIET, value),
            )
        )  # fmt: skip
        super().add_command(cmd, name)

    def invoke(self, ctx: click.Context) -> object:
        arguments = list(ctx.args)
        if sys.stdout is None:  # closed by the parent process
            sys.stdout = os.fdopen(os.open(os.devnull, os.O_RDONLY), "w")
        try:
            with _plain_warnings(), speaking_options(), telling_missing():
                return super().invoke(ctx)
        except BrokenPipeError:
            raise
        except click.UsageError as error:
            failure: click.ClickException = error
            if isinstance(error, click.NoSuchOption):  # --help resembles every short option
                near = [name for name in error.possibilities or () if name != "--help"]
                failure = click.NoSuchOption(error.option_name, possibilities=near, ctx=error.ctx)
            code = "UsageError"
        except (TimTraceError, OSError) as error:
            told = error if isinstance(error, TimTraceError) else of_system(error)
            failure, code = self._failure(ctx, told), type(told).__name__
            _let_go(error)
        if self._prints_json(ctx, arguments):
            with suppress(TimTraceError):  # stdout may be closed or on a full disk, so stderr gets the message too
                problem = {"code": code, "message": failure.format_message()}
                _print(json.dumps({"json_version": JSON_VERSION, "error": problem}))
        raise failure from None

    def _failure(self, ctx: click.Context, error: TimTraceError) -> click.ClickException:
        command, flag = self.commands.get(ctx.invoked_subcommand or ""), f"--{error.option or ''}".replace("_", "-")
        options = [] if command is None else [name for param in command.get_params(ctx) for name in param.opts]
        text = f"{flag}: {_told(error, error.message)}" if flag in options else _told(error, str(error))
        failure = click.ClickException(text)
        failure.exit_code = error.exit_code  # type: ignore[misc]  # click declares a class variable
        return failure

    def _prints_json(self, ctx: click.Context, arguments: Sequence[str]) -> bool:
        """Return True if the arguments contain --json and the command has this option or is unknown."""
        command = self.commands.get(ctx.invoked_subcommand or "")
        has_json = command is None or any("--json" in param.opts for param in command.params)
        return has_json and "--json" in arguments

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(len(name) for purposes in SECTIONS.values() for name in purposes)
        for title, purposes in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(f"{name:<{width}}", purpose) for name, purpose in purposes.items()])


class _FrameworkOption(click.Option):
    def __init__(self, declared: DeclaredOption):
        self.declared: list[DeclaredOption] = []
        flag, types = declared.name.replace("_", "-"), get_args(declared.type)
        is_switch = declared.type is bool
        super().__init__(
            [f"--{flag}"], is_flag=is_switch, default=False if is_switch else None, type=types or declared.type,
            metavar=declared.metavar,
        )  # fmt: skip


class _OfFrameworks(click.Command):
    """Command that accepts every framework's options. Its help lists them by framework."""

    @cached_property
    def _options(self) -> dict[str, _FrameworkOption]:  # deferred, because frameworks import DuckDB
        options: dict[str, _FrameworkOption] = {}
        for declared in declared_options():
            options.setdefault(declared.name, _FrameworkOption(declared)).declared.append(declared)
        return options

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*super().get_params(ctx), *self._options.values()]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Options": []}
        for option in self.get_params(ctx):
            record = option.get_help_record(ctx) if isinstance(option, click.Option) else None
            if isinstance(option, _FrameworkOption) and record is not None:
                for declared in option.declared:
                    title = f"with --like {declared.framework}"
                    sections.setdefault(title, []).append((record[0], declared.help))
            elif record is not None:
                sections["Options"].append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    as_json: bool = False
    as_csv: bool = False
    is_wide: bool = False
    is_brief: bool = False

    @property
    def width(self) -> int | None:
        return shutil.get_terminal_size().columns if sys.stdout.isatty() and not self.is_wide else None

    def answer(
        self, *, json: Callable[[], object], text: Callable[[int | None], str], rows: Callable[[], Rows] | None = None
    ) -> None:
        """Print a result in the requested format. JSON output also lists damaged files."""
        if self.as_json:
            value = json()
            found = value if isinstance(value, dict) else {"rows": value}
            _print(to_json({"json_version": JSON_VERSION, "damaged": list(_damage_told)} | found))
        elif self.as_csv:
            assert rows is not None
            for line in to_csv(rows()):
                _print(_harmless(line), color=True)  # without color, click would strip escape codes from recorded text
        else:
            _say(text(self.width))

    def result(
        self, found: Result, *, text: Mapping[str, object] | None = None, json: Form | None = None,
        rows: Mapping[str, object] | Rows | None = None,
    ) -> None:  # fmt: skip
        """Print a result as text, CSV or JSON. `found._text` names the text renderer, MODULE:NAME_text. CSV comes from
        `rows`, or from NAME_rows in MODULE. JSON has the form `json`, or NAME_FORM in MODULE."""
        module, _, function = found._text.partition(":")
        renderers = vars(import_module(module))
        rows_of = f"{function.removesuffix('_text')}_rows"
        self.answer(
            json=lambda: result_json(found, json), text=lambda width: renderers[function](found, width, **text or {}),
            rows=lambda: rows if isinstance(rows, Rows) else renderers[rows_of](found, **rows or {}),
        )  # fmt: skip

    def table(self, rows: Rows, name: str = "", *, text: Callable[[int | None], str] | None = None) -> None:
        piped = None if self.is_wide or name not in MAIN_COLUMNS else _PIPE_WIDTH
        shown = text or (lambda width: to_text(rows, width or piped, MAIN_COLUMNS.get(name, ())))
        self.answer(json=lambda: rows, text=shown, rows=lambda: rows)
        if name in _LEGENDS:
            self.hint(f"columns explained: {_LEGENDS[name]}")

    def hint(self, sentence: str) -> None:
        if sys.stdout.isatty() and not (self.as_json or self.as_csv):
            _tell(sentence)


_PIPE_WIDTH = 120
"""Width of tables with main columns, if the output is not a terminal (characters)."""
_LEGENDS = {"stats": "docs/reference/sql.md#statistics", "corrections": "docs/reference/sql.md#corrections"}
"""Explanations of a table's columns."""


_Verb = Callable[..., None]
_Decorator = Callable[[_Verb], _Verb]


def _option(flags: str, value: str | Sequence[str], help: str, **more: object) -> _Decorator:
    """Declare an option: its flags (and parameter name, if different), its value's metavar or choices, and its help."""
    more |= {"metavar": value} if isinstance(value, str) else {"type": click.Choice(value)}
    return click.option(*flags.split(), cls=click.Option, help=help, **more)


def _flag(flags: str, help: str) -> _Decorator:
    return click.option(*flags.split(), is_flag=True, help=help)


_CSV = _flag(
    "--csv as_csv",
    "Print CSV at full precision. Recorded text is not escaped, so a spreadsheet may run it as a formula.",
)  # fmt: skip
_BRIEF = _flag(
    "--brief is_brief",
    "Print a briefing for further analysis: summary, evidence, remaining suspects, and SQL for open questions.",
)  # fmt: skip
_WIDE = _flag("--wide is_wide", "Show all columns, regardless of the terminal's width.")


def _prints(
    *, csv: bool = True, wide: bool = True, brief: bool = False, json: str = "Print JSON at full precision."
) -> _Decorator:

    def add(function: _Verb) -> _Verb:
        @wraps(function)
        def command(**options: object) -> None:
            form = _Form(**{each.name: bool(options.pop(each.name)) for each in fields(_Form) if each.name in options})
            if form.as_json and (form.as_csv or form.is_brief):
                other = "--csv" if form.as_csv else "--brief"
                raise click.UsageError(f"--json and {other} cannot be combined; choose one")
            function(form=form, **options)

        taken = [option for option, is_taken in ((_CSV, csv), (_WIDE, wide), (_BRIEF, brief)) if is_taken]
        return _all(_flag("--json as_json", json), *taken)(command)

    return add


def _all(*options: _Decorator) -> _Decorator:
    """Combine options into one decorator. They appear in the help in this order."""

    def add(command: _Verb) -> _Verb:
        for option in reversed(options):
            command = option(command)
        return command

    return add


_steps = _option(
    "--steps", "STEPS",
    "Recorded steps: 3, 2:8, 2:8:2, -10: (the last ten), all, or a comma-separated list.", default="all",
)  # fmt: skip
_pair = _option("--pair", "A:B", "Passes to compare, where d = logprob(A) - logprob(B).", default="train:rollout")
_pair_and_steps = _all(_pair, _steps)
_control = _option("--control --baseline control", "RUN2", "Baseline run (same seeds, one deliberate change).")
_weights_from = _option("--weights-from", "DIR", "Folder with the run's checkpoints, if the trace has no weights.")
_model_factory = _option(
    "--model-factory", "MODULE:FUNCTION", "Function that builds the model, if transformers does not have its class."
)
_partial = _flag("--partial", "Use the readable part of a damaged trace.")
_confidence = _option("--confidence", "C", "Confidence level for intervals over groups.", default=0.95)
_timeout = _option("--timeout", "SECONDS", "Stop queries that take longer than this.", type=float)
_memory = _option("--memory", "SIZE", "Stop queries that need more memory than this, e.g. 500MB.")
_allow_kernel = _option(
    "--allow-kernel", "NAME",
    "Download a recorded attention kernel from the Hugging Face hub and run it, e.g. "
    "kernels-community/flash-attn2. Can be repeated.", multiple=True,
)  # fmt: skip


def _replays(command: _Verb) -> _Verb:
    """If a library is missing, first check for weights: without weights, installing the library would not help."""

    @wraps(command)
    def checked(trace: str, *, weights_from: str | None, **options: object) -> None:
        try:
            command(trace=trace, weights_from=weights_from, **options)
        except NotInstalled:
            from .replay.recorded import RecordedRun

            RecordedRun(trace, weights_from=weights_from).check_weights()
            raise

    return checked


def _by(*values: str, help: str = "What each row describes.") -> _Decorator:
    return _option("--by", values, help, default=values[0])


def _arm_option(field: Field[object]) -> _Decorator:
    described: ArmOption = field.metadata["option"]
    kind = {"int": int, "float": float, "bool": bool}.get(str(field.type).partition(" ")[0], str)
    choices = click.Choice(described.values) if described.values and not described.takes_numbers else kind
    metavar = "|".join(described.values) if described.takes_numbers else described.metavar
    return click.option(
        "--" + field.name.replace("_", "-"), is_flag=kind is bool, default=False if kind is bool else field.default or None,
        type=None if kind is bool else choices, metavar=metavar, help=described.help,
    )  # fmt: skip


def _address(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    from .tracer.cluster import check_address

    if value is not None:
        check_address(value)
    return value


_arm_a = _option("--arm", "CHANGES", "Execution a, in replay's --arm syntax.  [default: the recorded settings]")
_executions = _all(
    _option("--steps", "STEP", "One recorded step (-1 is the last).", default="-1"),
    _arm_a,
    _option("--against", "CHANGES", "Execution b, in replay's --arm syntax.", default="dtype=fp64"),
    _option(
        "--sequences", "WHICH",
        "N (the N sequences with the largest mismatch), random:N, or comma-separated names.", default="8",
    ),
)  # fmt: skip
_factories = _all(
    _option("--model-factory", "MODULE:FUNCTION", "Function that builds execution a's model."),
    _option("--against-factory", "MODULE:FUNCTION", "Function that builds execution b's model."),
)
_ray = _option(
    "--ray", "[ADDRESS]",
    "Distribute the work over a Ray cluster: auto or HOST:PORT. Without ADDRESS, start a local cluster.",
    is_flag=False, flag_value="local", callback=_address,
)  # fmt: skip
_gpus_per_arm = _option(
    "--gpus-per-arm", "N", "GPUs per Ray actor (can be a fraction).  [default: 1 if there is a GPU, else 0]", type=float
)
_model = _all(_model_factory, _weights_from, _allow_kernel)
_distributed = _all(_ray, _gpus_per_arm)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, message=f"tim-trace {__version__} (trace format {FORMAT_VERSION})")
def main() -> None:
    """Record, replay and query the training-inference mismatch of LLM RL runs.

    RUN is the folder written by `record -o` or `import -o`, or its URL (s3://... or any other fsspec URL).
    """


def _command(
    example: str, *, run: str = "RUN", cls: type[click.Command] = click.Command,
    context_settings: Mapping[str, bool] | None = None,
) -> Callable[[_Verb], click.Command]:  # fmt: skip
    """Make a command named after the function. Its first argument is `run`: one trace, several (RUN...) or "" for none.
    Its help ends with the example lines, which a test runs."""

    def add(function: _Verb) -> click.Command:
        if run.endswith("..."):
            function = click.argument("traces", nargs=-1, required=True, metavar=run)(function)
        elif run:
            function = click.argument("trace", metavar=run)(function)
        command = main.command(function.__name__.rstrip("_"), cls=cls, context_settings=context_settings)(function)
        command.epilog = "\b\nExample:\n" + "\n".join(f"  {line}" for line in example.strip().splitlines())
        return command

    return add


@_command("tim-trace example runs/example", run="")
@click.argument("path", metavar="DIR")
@_flag("--force", "Overwrite an existing trace.")
def example_(path: str, force: bool) -> None:
    """Write an example trace: a recorded GRPO run whose reward drops.

    The trace is included in tim-trace, so no GPU, torch or vLLM is needed. It has no weights, so it cannot be replayed.
    """
    written = analysis.example(path, force=force)
    page = shlex.quote(f"{path.rstrip('/')}.html")
    _tell(
        f"wrote {path}: a real GRPO run of {written.num_steps} steps whose reward drops\nnext: tim-trace diagnose {shlex.quote(path)}\n"
        f"      tim-trace report {shlex.quote(path)} -o {page}"
    )


@_command(
    "tim-trace record -o runs/demo -- python examples/grpo_addition.py --steps 20",
    run="",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@_option("-o --output", "RUN", "Folder or URL to write the trace to.", required=True)
@_option("--capture", "logprobs|topk:K|logits", "What each pass records per token.", default="logprobs")
@_option("--capture-fraction", "F", "With --capture topk:K or logits: share of sequences to capture.", default=1.0)
@_option(
    "--weights", ("auto", "delta", "none"),
    "Record every policy version's weights, bit for bit (auto: only if the model is below --weights-below).",
    default="auto",
)  # fmt: skip
@_option("--weights-below", "SIZE", "Maximum model size for --weights auto.", default="500MB")
@_option(
    "--weights-from", "DIR",
    "Use the Hugging Face checkpoints that the run saves in this folder, instead of recording weights.",
)  # fmt: skip
@_flag("--routing", "Record every token's router choices in a mixture-of-experts model.")
@_option(
    "--engine-weights", ("given", "held", "none"),
    "Record digests of the weights sent to vLLM (given), or also of vLLM's own weights at every version (held).",
    default="given",
)  # fmt: skip
@_flag("--resume", "Append to an existing trace (for a run that resumes from a checkpoint).")
@_option(
    "--max-wait", "SECONDS",
    "Maximum wait for an unresponsive file system. After that, COMMAND continues without recording.", default=60.0,
)  # fmt: skip
@_flag("--force", "Overwrite an existing trace (but no other files).")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="-- COMMAND ...")
def record(output: str, command: Sequence[str], **options: Any) -> None:
    """Run COMMAND and record its TRL and verl trainers and its vLLM engines.

    Every Python process that COMMAND starts is recorded, without code changes. Exits with COMMAND's exit code. RUN is a
    folder or a URL such as s3://bucket/run (uploaded while COMMAND runs). If training uses several nodes, run this
    command on each of them with the same folder.
    """
    if command:
        _tell(f"recording to {output if '://' in output else os.path.abspath(output)}")

    def at_end(recording: Recording) -> None:
        # A record-only installation has no DuckDB. The first query in a full installation then computes the sums.
        if recording.num_tokens >= _SUMMED_TOKENS and find_spec("duckdb"):
            from .analysis.trace.sums import summarize

            summarize(recording.folder, progress=_progress)
        elif recording.num_sequences:
            from .tracer.index import write_index

            write_index(recording.folder)

    recording = analysis.record(command, output=output, at_end=at_end, **options)
    _tell(_recorded(output, recording))
    if recording.is_stuck:  # sys.exit would wait for pool threads, which may also be stuck
        os._exit(recording.exit_code)
    sys.exit(recording.exit_code)


@_command(
    "tim-trace import parquet dump.parquet -o runs/imported\ntim-trace import auto outputs/token_exports -o runs/mine",
    run="",
)
@click.argument("format", metavar="FORMAT")
@click.argument("path", nargs=-1, required=True, metavar="PATH...")
@_option("-o --output", "RUN", "Folder to write the trace to.", required=True)
@_option(
    "--map", "THEIRS=OURS", "Import column or field THEIRS as OURS. THEIRS= skips it. Can be repeated.", multiple=True
)
@_steps
@_option("--sample", "F", "Share of sequences to import, selected by a hash of their names.", default=1.0)
@_flag("--partial", "Also import the readable part of incomplete steps and files.")
@_flag("--force", "Overwrite an existing trace.")
def import_(format: str, path: Sequence[str], output: str, map: Sequence[str], **options: object) -> None:
    """Convert another tool's files to a trace, or add new data to an existing trace.

    FORMAT is auto, parquet, verl, slime, miles, skyrl, prime-rl, nemo-rl, megatron-rl, megatron-lm, vllm, sglang,
    nemo-gym, open-instruct, torchtitan, or metrics for logged scalars without tokens (CSV, JSON, logs, TensorBoard,
    W&B). docs/reference/import-formats.md lists each format's files. Importing a folder again is incremental. Code in
    the files is never executed.

    To compare several engines on the same prompts, pass one path per engine. Each path becomes a pass, and sequences
    are matched by prompt.

    FORMAT parquet reads Parquet or JSON files with one row per sequence and the columns step, prompt_ids, response_ids,
    rollout_logprobs, train_logprobs and others (see docs/reference/trace-format.md). PATH is a file or a folder. For
    parquet, it can also be a pattern or a URL (s3://bucket/dump).
    """
    from .analysis.trace.sums import summarize
    from .tracer.importers.neutral import parse_map

    imported = _asked(analysis.import_dump, format, path, output=output, map=parse_map(map), **options)
    summarize(imported.folder, progress=_progress)
    _tell(_brought_in(output, imported))


@_command("tim-trace info runs/demo", run="RUN...")
@_prints(csv=False)
def info(traces: Sequence[str], form: _Form) -> None:
    """Summarize a trace: contents, writers, and missing or damaged data."""
    from .analysis.info_text import info_text

    found = [analysis.info(trace) for trace in traces]
    tell_damage(sentence for trace in found for sentence in trace.damaged)
    form.answer(
        json=lambda: found if len(found) > 1 else result_json(found[0]),
        text=lambda width: "\n\n".join(info_text(trace, width) for trace in found),
    )


@_command("tim-trace verify runs/demo")
@_flag("--format", "Also check files, fields, columns and rows against the trace format.")
@_prints()
def verify(trace: str, form: _Form, *, format: bool) -> None:
    """Verify every byte, row count, chunk and version of a trace against its checksums.

    The exit code is 2 if any part is damaged or missing, and 1 if the trace only deviates from the format. Other
    commands verify only the data that they read.
    """
    found = analysis.verify(trace, format=format, progress=_progress)
    form.result(found, rows=found.folders)
    if not found.is_whole:
        _tell(f"{trace}: damaged or missing parts: {len(found.damaged)} (listed above)")
        raise click.exceptions.Exit(2)
    if found.deviations:
        _tell(f"{trace}: deviations from the format: {len(found.deviations)} (listed above)")
        raise click.exceptions.Exit(1)


@_command("tim-trace compact runs/demo\ntim-trace compact runs/demo -o runs/merged")
@_option("-o --output", "RUN2", "Write the result to this folder or URL (s3://...) and leave RUN unchanged.")
@_option("--file-size", "SIZE", "Approximate size per merged file.", default="512MB")
@_flag("--force", "With --output: overwrite an existing trace in that folder.")
@_prints()
def compact(trace: str, form: _Form, **options: object) -> None:
    """Merge a trace's many files into a few, sorted by step and pass.

    Results stay the same, bit for bit. Afterwards, opening the trace, reading single steps and reading from object
    storage are faster. You can interrupt the command at any time: the trace stays complete, and the next call continues
    the merge.
    """
    found = _asked(analysis.compact, trace, **options)
    form.result(found, rows=found.tables)
    if options["output"]:
        _tell(f"wrote {options['output']}")


@_command("tim-trace sql runs/demo \"SELECT step, k3, max_abs_d FROM pair_steps('train', 'rollout')\"", run="")
@click.argument("arguments", nargs=-1, required=True, metavar="RUN... [QUERY]")
@_flag("--unsafe", "Allow the query to write, and to read other files.")
@_timeout
@_memory
@_option("--max-rows", "N", "Print at most N rows.", type=int)
@_prints()
def sql_(
    arguments: Sequence[str], unsafe: bool, timeout: float | None, memory: str | None, max_rows: int | None, form: _Form
) -> None:
    """Run a DuckDB SQL query on one or more traces.

    Views: sequences, scores, passes, metrics, steps, tokens, changes (everything that changed during a run), and
    operators and patches (results from locate). Table macros: pair('a', 'b'), pair_sequences, pair_steps and pair_runs,
    where d = logprob(a) - logprob(b) in nats, and pair_distributions for distributions recorded with --capture. Without
    QUERY, the query is read from stdin.
    """
    *traces, last = arguments
    is_trace = os.path.exists(last) or "://" in last.partition(" ")[0] or not (traces or " " in last)
    if is_trace and sys.stdin.isatty():
        raise click.UsageError('pass a query, e.g. "SELECT * FROM steps LIMIT 5", or pipe it in')
    query = sys.stdin.read() if is_trace else last
    paths = [*traces, last] if is_trace else traces
    with _ended_after(timeout):
        found = analysis.sql(paths, query, unsafe=unsafe, timeout=timeout, memory=memory, max_rows=max_rows)
    form.table(found)


@_command("tim-trace mcp runs/demo --timeout 30", run="RUN...")
@_option("--timeout", "SECONDS", "Maximum time per call.", default=60.0)
@_option("--memory", "SIZE", "Maximum memory per query.", default="1GB")
def mcp(traces: Sequence[str], timeout: float, memory: str) -> None:
    """Serve runs to coding agents through the Model Context Protocol, over stdin and stdout.

    Nothing is written, and only the given runs are read. Requires the mcp package: pip install 'tim-trace[mcp]'. To add
    the server to a client, see docs/start/agents.md.
    """
    analysis.mcp(list(traces), timeout=timeout, memory=memory)


@_command("tim-trace query by-probability runs/demo", run="")
@click.argument("name", required=False)
@click.argument("traces", nargs=-1, metavar="[RUN...]")
@_pair_and_steps
@_timeout
@_memory
@_flag("--sql as_sql", "Print the query's SQL instead of running it.")
@_prints()
def query_(
    name: str | None, traces: Sequence[str], pair: str, steps: str, timeout: float | None, memory: str | None,
    as_sql: bool, form: _Form,
) -> None:  # fmt: skip
    """List the named queries, or run a query on one or more traces.

    Each query starts with a comment on its units, source and interpretation. --sql prints the query and this comment.
    """
    from .analysis.queries.catalogue import listed, named_query
    from .analysis.trace.columns import parse_pair

    if name is None:
        form.table(listed())
    elif as_sql and steps != ALL_STEPS:
        raise click.UsageError("--sql prints the query for all steps; drop --steps")
    elif as_sql:
        _print(named_query(name).over(*parse_pair(pair)).rstrip())
    elif not traces:
        named_query(name)  # a wrong name comes first
        raise click.UsageError(f"query {name}: pass a trace, or print the query with --sql")
    else:
        with _ended_after(timeout):
            found = analysis.query(name, list(traces), pair=pair, steps=steps, timeout=timeout, memory=memory)
        form.table(found)


@_command("tim-trace stats runs/demo --by step\ntim-trace stats runs/demo --like verl", cls=_OfFrameworks, run="RUN...")
@_pair_and_steps
@_by("run", "step", "sequence", "layer", help="What each row describes (layer: router choices only).")
@_option(
    "--like", [*FRAMEWORKS],
    "Print this framework's metrics as it defines them. The framework's options are listed below.",
)  # fmt: skip
@_ray
@_prints()
def stats(
    traces: Sequence[str], pair: str, steps: str, like: str | None, ray: str | None, form: _Form, *, by: str,
    **options: object,
) -> None:  # fmt: skip
    """Measure how much the logprobs of two passes differ, per run, step or sequence.

    If the trace is local, finished and writable, stats stores per-sequence sums in it (sums/ and index/), so that the
    next call does not have to read tokens. docs/reference/sql.md explains the columns.
    """
    from .analysis.stats import likeness
    from .analysis.views import open_database

    database = open_database(list(traces), steps, ray=ray)
    rows = _asked(analysis.stats, database, held_back=ray, pair=pair, by=by, like=like, **options)
    form.table(rows, "" if like else "stats")
    for sentence in likeness(database, pair=pair, steps=ALL_STEPS, like=like, **options):
        _tell(sentence)
    form.hint(f"next: tim-trace diagnose {shlex.quote(traces[0])}")


@_command("tim-trace diagnose runs/demo")
@_pair_and_steps
@_control
@_flag("-v --verbose", "Also print all evidence, published figures, alerts and replays.")
@_prints(csv=False, wide=False, brief=True)
def diagnose(trace: str, verbose: bool, form: _Form, **options: object) -> None:
    """Report whether and why a run collapsed, whether the comparison is valid, and whether the mismatch is normal.

    Start here. Runs attribute and check, reports each side's precision, and compares metrics with published values and
    alert thresholds, computing each metric as its source defines it. Reports the effect of each replay in the trace,
    and suggests further replays. The exit code is 1 if the comparison is not valid.
    """
    found = _asked(analysis.diagnose, trace, **options)
    if form.is_brief:
        from .analysis.attribution.brief import attribution_brief
        from .analysis.diagnosis.text import checked_story

        since = found.broken.since if found.broken else None
        _say(attribution_brief(found.attribution, form.width, checked_story(found), since))
    else:
        from .analysis.diagnosis.text import SHORT_FORM

        form.result(found, text={"verbose": verbose}, json=None if verbose else SHORT_FORM)
    if found.checked is not None and not found.checked.is_valid:
        raise click.exceptions.Exit(1)


@_command("tim-trace check runs/demo")
@_pair_and_steps
@_partial
@_ray
@_prints(csv=False, wide=False)
def check(trace: str, form: _Form, **options: object) -> None:
    """Report whether two passes may be compared, or which fault makes the comparison invalid.

    The exit code is 1 if a fault was found, and 2 if the trace is damaged or incomplete, unless --partial is given.
    Detects faults in temperature, truncation, masks, units, padding, caches, adapters, quantisation and precision, and
    also shifted positions, wrong rows, placeholders, retokenised text, stale or partly synchronised weights, and router
    flips. Faults are listed by likelihood, each with its evidence, size, share of affected tokens and a command to
    confirm it.

    Without the engine's logprobs, check compares current:train if the policy versions of both were recorded.
    Otherwise, it covers only rewards, advantages, groups and the reference, and the exit code is 1.

    If a trace has passes from several engines, but neither a train nor a rollout pass, check compares all passes with
    each other, as compare does.
    """
    found = _asked(analysis.check, trace, held_back=options["ray"], **options)
    form.result(found)
    if not found.is_valid:
        raise click.exceptions.Exit(1)


@_command("tim-trace compare runs/demo runs/other\ntim-trace compare runs/demo --against rollout", run="")
@click.argument("a", metavar="RUN")
@click.argument("b", metavar="[RUN2]", required=False)
@_pair
@_option(
    "--against",
    "PASS",
    "Without RUN2: the reference pass.  [default: a pass from the largest class of bit-identical passes]",
)
@_steps
@_prints()
def compare(a: str, b: str | None, form: _Form, **options: object) -> None:
    """List the differences between two runs, or between all passes of one run.

    With RUN2, lists differences by the step where each begins, earliest first. Compares settings, sampling, numerics
    (contracts), prompts, responses, logprobs for identical tokens, rewards for identical responses, advantages for
    identical rewards, policy-version lags, and every series in dynamics. For a series, reports the first step where
    the difference exceeds noise, and its size in standard deviations.

    Without RUN2, groups the passes of RUN (from several engines, or from the trainer and the engine) into classes of
    bit-identical passes. Reports each class's distance from the reference, tokens at which one class is far from all
    others, and contradictions, such as passes with the same declared settings but different bits.
    """
    form.result(_asked(analysis.compare, a, b, **options))


@_command("tim-trace corrections runs/demo --by length", run="RUN...")
@_pair_and_steps
@_by("run", "step", "length", help="What each row describes (length: quartiles of sequence length).")
@_option("--token-threshold", "C", "Threshold for token-tis and token-mis.", default=2.0)
@_option("--sequence-threshold", "C", "Threshold for sequence-tis and sequence-mis.", default=2.0)
@_option("--icepop", "LOW_HIGH", "icepop keeps tokens whose ratio is in this range.", default="0.5_5.0")
@_option(
    "--geometric", "LOW_HIGH",
    "geometric keeps sequences whose geometric mean ratio is in this range.", default="0.999_1.002",
)  # fmt: skip
@_option("--veto", "R", "veto drops sequences in which any token's ratio is below R.", default=1e-4)
@_ray
@_prints()
def corrections(traces: Sequence[str], form: _Form, **options: object) -> None:
    """Show which recorded tokens each mismatch correction would have masked or clipped, and at what cost.

    The default thresholds are the published ones. verl's presets always use verl's own thresholds. Each row shows the
    rule as published, the ratio that it bounds (the inverse ratio for verl's k1), and the condition for keeping a
    token, where rho = exp(d). docs/reference/sql.md explains the columns, including when they are empty.
    """
    from .analysis.corrections import sentence

    rows = _asked(analysis.corrections, list(traces), held_back=options["ray"], **options)
    form.table(rows, "corrections")
    if options["by"] == "run":
        form.hint(sentence(rows))
    form.hint(f"next: tim-trace objective {shlex.quote(traces[0])} --loss correction=token_mask,correction_high=2")


@_command("tim-trace objective runs/demo\ntim-trace objective runs/demo --loss reinforce,correction=none --by step")
@_steps
@_option(
    "--loss", "KIND|FIELDS",
    "Override the recorded loss: its kind (ppo_clip, reinforce, gspo, rloo, cispo, sapo or vespo), its fields, or "
    "both, e.g. gspo,clip_high=0.01 or correction=token_mask,correction_high=2.",
)  # fmt: skip
@_confidence
@_by("run", "step", help="What each row describes (with run, the worst steps are also listed).")
@_ray
@_prints(json="Print JSON at full precision (with --by step, for every step).")
def objective(trace: str, by: str, form: _Form, **options: object) -> None:
    """Measure how the mismatch biases a run's training objective: the direction, size and location of the bias.

    Compares each token's contribution under the loss's ratio with its contribution under the correct ratio, current /
    rollout. Splits the result by the advantage's sign, and into clip decisions, corrections and policy drift. --loss
    overrides the recorded loss.
    """
    from .analysis.objective.text import RUN_FORM

    found = _asked(analysis.objective, trace, held_back=options["ray"], **options)
    form.result(found, text={"by": by}, rows={"by": by}, json=None if by == "step" else RUN_FORM)
    form.hint(f"next: tim-trace corrections {shlex.quote(trace)}")


@_command("tim-trace dynamics runs/demo")
@_pair_and_steps
@_prints()
def dynamics(trace: str, form: _Form, **options: str) -> None:
    """Report when each series of a run changed, and which changed first.

    Covers mismatch, rewards and their spread within groups, lengths, entropy, gradient norm, optimizer and policy lag.
    Each change in level or slope is reported with its step and an interval, and for k3 also with a growth rate.
    """
    form.result(_asked(analysis.dynamics, trace, **options))


@_command(
    "tim-trace replay runs/demo --steps 1:200:50 --dtype bf16 --arm attention=math --arm batch-size=1,mode=decode"
)
@_steps
@_option(
    "--sample", "F|N",
    "Score a random sample of whole groups: a share (below 1) or a number of sequences. A larger value in a later "
    "call extends the sample.",
)  # fmt: skip
@_all(*map(_arm_option, fields(Arm)))
@_option("--arm", "CHANGES", "Another arm, e.g. dtype=fp16,batch-size=1. Can be repeated.", multiple=True)
@_model
@_flag("--force", "Overwrite existing arms.")
@_flag("--dry-run", "Score only a few rows per arm, and print the remaining work and its estimated duration.")
@_distributed
@_prints(json="Print JSON, one row per step (with --dry-run, one row per arm).")
@_replays
def replay(trace: str, form: _Form, **options: object) -> None:
    """Score recorded steps again under different numerics, and write each arm as pass replay/<arm>.

    Without options, steps are replayed with the recorded settings. Every replay first checks that it reproduces the
    recorded bits. If not, the replay reports what differs on this machine. Steps that were already replayed under an
    arm are skipped.
    """
    from .analysis.replay_text import estimate_sentence, plan_rows, replay_text

    results = _asked(analysis.replay, trace, held_back=True, **options)
    if options["dry_run"]:
        form.table(plan_rows(results.plan), "replay_plan")
        _tell(estimate_sentence(results.plan))
        return
    form.table(table(results), text=lambda width: replay_text(results, width))
    for line in _replayed(trace, results):
        _tell(line)


@_command("tim-trace triangulate runs/demo --steps 1:200:50 --arm dtype=bf16")
@_steps
@_option("--reference", ("fp64", "fp32"), "Reference precision.", default="fp64")
@_option("--arm", "CHANGES", "A change to try, e.g. dtype=bf16. Can be repeated.", multiple=True)
@_option(
    "--predict", "[SIDE:]CHANGES",
    "Predict how much of the mismatch would remain at the run's other steps if both sides had this change. To "
    "change one side, write train:CHANGES or rollout:CHANGES. To change each side differently, write "
    "train:CHANGES/rollout:CHANGES. Can be repeated.", multiple=True,
)  # fmt: skip
@_option(
    "--engine", "CHANGES",
    "With --predict: the arm that reproduces the recorded engine.  [default: engine=vllm,mode=decode]",
)  # fmt: skip
@_model
@_distributed
@_by("side", "arm", "prediction", help="What each row of --csv describes.")
@_prints()
@_replays
def triangulate(trace: str, by: str, form: _Form, **options: object) -> None:
    """Attribute the mismatch to trainer and engine, and measure how much of it each individual change removes.

    Like replay, triangulate stores its replays in the trace.
    """
    form.result(_asked(analysis.triangulate, trace, held_back=True, **options), rows={"by": by})


@_command(
    "tim-trace gradient runs/demo --steps 10 --arm correction=none --arm dtype=bf16,batch-size=32,logprobs=current"
)
@_steps
@_option(
    "--arm", "CHANGES",
    "Another gradient to compute, e.g. dtype=bf16,correction=none (see above). Can be repeated. Options shared "
    "with replay: "
    f"{', '.join(names_for(GRADIENT))}.", multiple=True,
)  # fmt: skip
@_option("--loss", "FIELDS", "Override the recorded loss, e.g. kind=ppo_clip,clip_high=0.28.")
@_model
@_distributed
@_by("step", "module", "arm")
@_prints()
@_replays
def gradient(trace: str, by: str, form: _Form, **options: object) -> None:
    """Recompute the gradient of recorded steps, as recorded and under each arm, and compare the results.

    The gradient under the recorded settings is computed first, and its norm is compared with the norm that the trainer
    logged. An arm is one or more comma-separated changes: the options listed under --arm,
    logprobs=train|rollout|current|replay/NAME (used in the loss instead of the trainer's logprobs; rollout is bypass
    mode), correction=RULE (none, exact, token_exact, sequence_exact, token_truncate:2, token_mask:0.5_5,
    sequence_truncate:2 or sequence_mask:3), and name=NAME for the arm's name. correction=exact weights by the
    untruncated ratio train / rollout.

    bias is the norm of the difference from the recorded gradient. variance is the variance of the mean over
    micro-batches.
    """
    found = _asked(analysis.gradient, trace, held_back=True, **options)
    form.result(found, text={"by": by}, rows={"by": by})


@_command("tim-trace locate runs/demo --steps 10 --against attention=eager")
@_executions
@_option("--layers", "LAYERS", "Only these layers, e.g. 3 or 2:8 (the first is 0).")
@_option("--operators", "WORDS", "Only operators whose name contains one of these words, e.g. q_proj,rotary.")
@_option(
    "--patch", ("kinds", "none"),
    "kinds: prove the finding by running each kind of operator with the other execution's code.", default="kinds",
)  # fmt: skip
@_factories
@_weights_from
@click.option(
    "--keep/--no-keep", default=True,
    help="Store the result in the trace for sql and diagnose, replacing earlier results with the same options.",
)  # fmt: skip
@_by("kind", "operator", "layer", "patch", help="What each row of --csv describes.")
@_prints()
@_replays
def locate(trace: str, by: str, form: _Form, **options: object) -> None:
    """Find the operator where two executions of recorded tokens diverge, with proof.

    Unless --no-keep is given, locate stores its result in the trace (locate/).

    Each operator in both executions is compared with a float64 model on the same inputs, so errors from earlier
    operators do not count. The divergence is the first error that exceeds what rounding can cause. carried is the share
    of mean squared d caused by an operator's own error. removed is the share that disappears if the other execution's
    code computes the operator. The exit code is 1 if a divergence was found.
    """
    from .analysis.locate_text import next_command

    found = _asked(analysis.locate, trace, held_back=True, **options)
    form.result(found, rows={"by": by})
    if found.kept is not None:
        _tell(f'stored as {found.kept}: tim-trace sql {shlex.quote(trace)} "FROM operators"')
    if found.not_kept is not None:
        _tell(f"not stored in the trace: {found.not_kept}")
    if found.first is not None or found.kinds:
        _tell(f"next: {next_command(found).replace('RUN', shlex.quote(trace))}")
    if found.first is not None:
        raise click.exceptions.Exit(1)


@_command("tim-trace certify runs/demo --arm engine=exact --max-batch 2 --max-length 8 --minutes 1", run="RUN|MODEL")
@_arm_a
@_option("--against", "CHANGES", "Execution b, in --arm syntax.  [default: --arm, one sequence per batch]")
@_option("--max-batch", "B", "Maximum sequences per batch.", default=64)
@_option(
    "--max-length", "L",
    "Maximum tokens per prompt and per response.  [default: 256, or the model's limit if lower]", type=int,
)  # fmt: skip
@_option("--minutes", "M", "How long to search.", default=5.0)
@_option("--seed", "N", "Seed for token ids and random changes.", default=0)
@_factories
@_weights_from
@_option("-o --output", "DIR", "Folder for certificate.json or the counterexample's trace.", default="certify")
@_prints(csv=False, wide=False)
def certify(trace: str, form: _Form, **options: object) -> None:
    """Search for a batch on which two executions differ bitwise, or certify that a thorough search found none.

    MODEL is a Hugging Face model folder. The settings in an arm stay fixed. Unless the arm sets them, the search varies
    the padding side, cached decoding, chunks and threads (for vLLM: decoding, preemption, chunks and the prefix cache).
    The exit code is 1 if bits differ, or if time runs out before every planned batch has been tried.
    """
    found = _asked(analysis.certify, trace, held_back=True, **options)
    form.result(found)
    if not found.is_certified:
        raise click.exceptions.Exit(1)


@_command("tim-trace reproduce runs/demo --steps 10 --against attention=eager")
@_option("-o --output", "SCRIPT", "The script to write.", default="bug.py")
@_executions
@_factories
@_weights_from
@_prints(csv=False, wide=False)
@_replays
def reproduce(trace: str, form: _Form, **options: object) -> None:
    """Write a short script that shows the first difference between two executions.

    The difference is the one that locate reports for the same options. The script has at most 80 lines, needs only
    torch and transformers, prints the two values and exits with 1. Once the executions agree, it exits with 0. It
    contains the smallest module and the fewest tokens that show the difference. Weights and inputs are random if random
    values show the difference too. Otherwise, weights are stored in a .pt file next to the script (at most 1 MB). If
    the executions differ only by rounding, nothing is written.
    """
    form.result(_asked(analysis.reproduce, trace, held_back=True, **options))


@_command("tim-trace weights runs/demo --by module")
@_by("version", "module")
@_flag(
    "--engine",
    "Compare each tensor in the engine with the trainer's, and show the version last sent to the engine. Tensors "
    "that agree are only counted, except with --csv and --json.",
)  # fmt: skip
@_flag("--verify", "Reconstruct every version and verify its hashes.")
@_weights_from
@_option(
    "--export exported", "VERSION DIR", "Write a version to a folder for from_pretrained.", nargs=2, type=(int, str)
)
@_option(
    "--attach attached", "VERSION DIR",
    "Record weights from a Hugging Face model folder as a version, so an imported dump can be replayed.",
    nargs=2, type=(int, str),
)  # fmt: skip
@_option("--tokenizer", "DIR", "With --attach: folder with the tokenizer, if it is not in the attached folder.")
@_flag("--force", "With --attach: overwrite attached weights.")
@_prints()
def weights(
    trace: str, exported: tuple[int, str] | None, attached: tuple[int, str] | None, tokenizer: str | None, force: bool,
    weights_from: str | None, form: _Form, **options: object,
) -> None:  # fmt: skip
    """List the weight versions, with their size and the share of elements that changed.

    --attach reads a folder written by save_pretrained, including the model's config and tokenizer.
    """
    from .analysis.weights import OK, engine_weights_text

    if attached is None and (tokenizer is not None or force):
        raise click.UsageError("--tokenizer and --force require --attach; add --attach or drop the other options")
    if attached is not None and exported is not None:
        raise click.UsageError("--attach and --export cannot be combined; choose one")
    if attached is not None:
        with _library_output_held_back():
            found = analysis.attach(trace, *attached, tokenizer=tokenizer, force=force)
        tokens = " and its tokenizer" if found.has_tokenizer else ""
        tensors = f"{found.num_tensors:,} tensors ({found.num_bytes:,} bytes){tokens} from {found.folder}"
        _tell(f"attached {tensors} as version {found.version}\nnext: tim-trace replay {trace}")
        return
    if exported is not None:
        with _library_output_held_back():
            folder = analysis.export(trace, *exported, weights_from=weights_from)
        _tell(f"wrote version {exported[0]} to {folder}")
        return
    rows = _asked(analysis.weights, trace, held_back=True, weights_from=weights_from, **options)
    if options["engine"]:
        of = "module" if options["by"] == "module" else "tensor"
        form.table(rows, text=lambda width: engine_weights_text(rows, of, width))
        return
    form.table(rows, "weights")
    if any(row.get("verified", OK) != OK for row in rows.dicts()):
        raise click.exceptions.Exit(2)


@_command("tim-trace attribute runs/demo")
@_control
@_pair_and_steps
@_prints(csv=False, wide=False, brief=True)
def attribute(trace: str, form: _Form, **options: object) -> None:
    """Report whether and when a run collapsed or began to decline, what changed first, and the most likely cause.

    Each suspect (mismatch, staleness, optimizer, reward, pairing, entropy, length, ...) comes with a probability,
    evidence for and against it, and the cheapest replay or rerun that would confirm or rule it out. A single run gives
    observational evidence. Adding a baseline run gives a controlled experiment, which also shows when a run stopped
    learning.
    """
    from .analysis.attribution.brief import attribution_brief
    from .analysis.attribution.text import attribution_text

    found = _asked(analysis.attribute, trace, **options)
    render = attribution_brief if form.is_brief else attribution_text
    form.answer(json=lambda: result_json(found), text=lambda width: render(found, width))


@_command("tim-trace report runs/demo -o demo.html", run="RUN...")
@_option("-o --output", "FILE.html", "HTML file to write.")
@_option("--markdown", "FILE.md|-", "Markdown file to write for an issue or a chat (- prints it).")
@_option("--png", "DIR", "Folder for a PNG and a CSV file per figure.")
@_option("--svg", "DIR", "Folder for an SVG and a CSV file per figure.")
@_option("--pdf", "DIR", "Folder for a PDF and a CSV file per figure.")
@_option(
    "--width", "INCHES|NAME",
    "Figure width: inches, or column, aaai, acl, acm, iclr, icml, ieee, jmlr, nature, neurips.", default="column",
)  # fmt: skip
@_control
@_pair_and_steps
@_flag("--force", "Replace existing files.")
def report(
    traces: Sequence[str], output: str | None, markdown: str | None, png: str | None, svg: str | None, pdf: str | None,
    **options: object,
) -> None:  # fmt: skip
    """Write everything known about a run to a single HTML page, Markdown, or figures for papers.

    The report covers the first RUN, and its charts also show the other runs. The page works offline and contains the
    verdict, series, mismatch, tokens and provenance, plus the query behind each figure.
    """
    paths = [path for path in (output, markdown, png, svg, pdf) if path]
    if not paths:
        raise click.UsageError("choose an output: -o FILE.html, --markdown FILE.md, --png DIR, --svg DIR or --pdf DIR")
    is_printed = markdown == "-"
    files = {"output": output, "markdown": None if is_printed else markdown, "png": png, "svg": svg, "pdf": pdf}
    made = _asked(analysis.report, list(traces), **files, **options)
    if is_printed:
        from .analysis.report.markdown import report_markdown

        _print(report_markdown(made), nl=False)
    else:
        _say(wrapped(_one_line(made.verdicts[0].headline), "", _Form().width))
    for path in paths:
        if path != "-":
            size = f" ({os.path.getsize(path) / 1e6:.1f} MB)" if path.endswith(".html") else ""
            _tell(f"wrote {path}{size}")


@_command("tim-trace watch runs/demo --once")
@_option("--every", "SECONDS", "Seconds between updates.", default=5.0)
@_option(
    "--steps", "STEPS",
    "Steps to show (only the latest that fit): 3, 2:8, -10: (the last ten), all, or a comma-separated list.",
    default="-10:",
)  # fmt: skip
@_flag("--once", "Print the current view and exit (default if the output is not a terminal).")
@_pair
@_prints(wide=False, json="Print the current view as JSON at full precision.")
def watch(trace: str, once: bool, form: _Form, **options: object) -> None:
    """Show a run while it is being recorded: its latest steps, its series so far, and the first alerts.

    Waits for a run that does not exist yet, and ends when the recording ends. Ctrl-C closes only the view. Each alert
    is shown with the step where it first fired. Alerts are based on published thresholds and tim-trace's own rules
    (docs/evidence/alerts.md). They are not a verdict: use diagnose for that. Nothing is written to the trace.
    """
    from .analysis.watch.screen import can_redraw, show
    from .analysis.watch.watched import latest_rows

    is_one = once or form.as_json or form.as_csv or not can_redraw()
    views = _asked(analysis.watch, trace, once=is_one, **options)
    if form.as_json or form.as_csv:
        view = next(views)
        form.answer(json=lambda: result_json(view), text=str, rows=lambda: latest_rows(view))
    else:
        show(views, again=not is_one)


@_command("tim-trace export runs/demo --to parquet -o runs/demo-export")
@_option("--to", "[parquet|tensorboard|wandb]", "File format to write.", required=True)
@_option("-o --output", "DIR", "Folder to write the files to.", required=True)
@_pair_and_steps
@_flag("--force", "Replace existing files.")
def export_(trace: str, **options: object) -> None:
    """Write a run's sequences or per-step metrics in another tool's format.

    parquet: one file with one row per sequence (tokens, each pass's logprobs, d), and one file with the logged values.
    Both can be read with import parquet. tensorboard and wandb: the per-step mismatch and every logged number. wandb
    runs are written offline.
    """
    _tell(str(_asked(analysis.export_run, trace, **options)))


@_command("tim-trace gate runs/demo --fail-on 'tim.k3>1e-3' --fail-on 'verl.k3_kl>1e-3'")
@_option(
    "--fail-on", "CONDITION",
    "Fail on this condition: check, or a metric and a threshold, e.g. 'tim.k3>1e-3', 'verl.k3_kl>=0.05 any step' "
    "or 'tim.k3>1e-3 last 20 steps'. Can be repeated.", multiple=True,
)  # fmt: skip
@_option(
    "--certificate",
    "FILE",
    "Fail unless this certificate.json covers the run's settings, batch sizes and sequence lengths.",
)
@_pair
@_confidence
@_partial
@_option("--junit", "FILE.xml", "JUnit XML file to write for CI, with one test case per condition.")
@_option("--summary", "FILE.md", 'File to append a Markdown table to, e.g. "$GITHUB_STEP_SUMMARY".')
@_prints()
def gate(trace: str, fail_on: Sequence[str], form: _Form, **options: object) -> None:
    """Check a run against failure conditions, for the CI of training code.

    Like stats, gate stores per-sequence sums in the trace.

    A condition is either check (met if the check command finds a fault, or too few tokens), or a metric and a
    threshold. The metric is tim.NAME (a column in stats, or a per-step metric that alerts use) or verl.NAME (a column
    in stats --like verl). A condition covers all tokens in the run, each step separately (any step), or the last N
    steps together (last N steps). If only individual steps meet a condition, gate passes with a warning. The exit code
    is 1 if the gate fails, and 2 if the trace is damaged or incomplete, unless --partial is given. The verdict is
    `cannot tell` if the confidence interval over groups contains the threshold or cannot be computed.
    """
    from .analysis.gate.gate import gated_text

    found = _asked(analysis.gate, trace, fail_on=fail_on, **options)
    form.table(table(found.verdicts), "gate", text=lambda width: gated_text(found, width))
    for verdict in found.verdicts:
        if verdict.warns:
            _tell(f"warning: {verdict.condition}: {verdict.how}")
    if found.fails:
        raise click.exceptions.Exit(1)


@contextmanager
def _ended_after(timeout: float | None) -> Iterator[None]:
    """End the process if a query still runs 2 s after `timeout`: DuckDB cannot stop in the middle of an expression."""
    from .analysis.trace.limits import too_long

    def end() -> None:
        click.echo(f"Error: {too_long(timeout or 0)}", file=_stderr())
        os._exit(2)

    timer = Timer((timeout or 0) + 2, end)
    timer.daemon = True
    if timeout is not None:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _asked(verb: Callable[..., Answer], *arguments: object, held_back: object = False, **options: object) -> Answer:
    with _library_output_held_back() if held_back else nullcontext():
        return verb(*arguments, progress=_progress, **options)


def _tell(sentence: str) -> None:
    with suppress(OSError):  # if stderr is on a full disk, the recorded command must still continue
        click.echo(f"tim-trace: {printable_lines(sentence)}", file=_stderr())


def _harmless(line: str) -> str:
    return printable_lines(line) if sys.stdout.isatty() else line.encode(errors="backslashreplace").decode()


def _say(text: str) -> None:
    _print(printable_lines(text))
    if _left_out:
        _tell(f"{' '.join(dict.fromkeys(_left_out))} --wide shows every column; --json and --csv print every digit")
        _left_out.clear()


_MOST_TOLD = 4000


def _one_line(sentence: str) -> str:
    return printable(sentence if len(sentence) <= _MOST_TOLD else f"{sentence[:_MOST_TOLD]} ...")


def _told(error: TimTraceError, text: str) -> str:
    first, *others = text[: 4 * _MOST_TOLD].split("\n") if isinstance(error, InvalidQuery) else [text]
    return "\n  ".join([_one_line(first), *map(_one_line, others)])


_streams: list[TextIO] = []
"""The real stderr, while library output is hidden."""


def _stderr() -> TextIO:
    return _streams[-1] if _streams else sys.stderr


@contextmanager
def _library_output_held_back() -> Iterator[None]:
    from .replay.library_output import library_output_held_back

    with library_output_held_back() as stream:
        _streams.append(stream)
        try:
            yield
        finally:
            _streams.pop()


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    context = click.get_current_context(silent=True)
    is_quiet = context is not None and context.meta.get(_QUIET, False)
    if is_quiet or not _stderr().isatty() or not total:
        yield lambda units: None
        return
    from rich.console import Console
    from rich.progress import Progress

    console = Console(file=_stderr())
    with Progress(console=console, transient=True, redirect_stdout=False, redirect_stderr=False) as bar:
        task = bar.add_task(what, total=total)
        yield lambda units: bar.update(task, advance=units)


def _recorded(output: str, recording: Recording) -> str:
    if recording.note is not None:
        return str(recording.note)
    if not recording.is_there:
        return f"{output} was removed while the command ran, so the recording is lost; run the command again"
    if not recording.num_sequences and not recording.num_eval_sequences:
        return _nothing_recorded(output, recording)
    waited = sum(writer.waited_s for writer in recording.writers)
    slow = f"; training waited {waited:.1f} s for the disk" if waited >= 0.05 else ""
    evaluated = (
        f", {counted(recording.num_eval_sequences, 'evaluation sequence')}" if recording.num_eval_sequences else ""
    )
    return (
        f"recorded {counted(recording.num_sequences, 'sequence')}, "
        f"{counted(recording.num_tokens, 'response token')}{evaluated}{slow}\n"
        f"next: tim-trace info {output}"
    )


def _nothing_recorded(output: str, recording: Recording) -> str:
    if recording.exit_code:
        return f"nothing was recorded to {output}: the command failed first (exit code {recording.exit_code})"
    said = [sentence for writer in recording.writers for sentence in (*writer.not_recorded, writer.error)]
    if reasons := dict.fromkeys(filter(None, said)):
        return "\n".join([f"nothing was recorded to {output}:", *reasons])
    return (
        f"nothing was recorded to {output}: no process used TRL's GRPOTrainer or verl's PPOTrainer, or called vLLM's "
        "LLM.generate or AsyncLLM.generate. Start Python without -I, -E and -S in an environment with tim-trace "
        "installed. A custom training loop uses tim_trace.Recorder, which writes its own trace, without tim-trace record"
    )


def _replayed(trace: str, results: ReplayedSteps) -> Iterator[str]:
    if (sample := results.sample) is not None:
        where = f", in {len(sample.steps):,} of {counted(sample.num_steps, 'step')}"
        drawn = f"sampled {sample.num_drawn:,} of {counted(sample.num_groups, 'group')}"
        yield f"{drawn} (share {sample.share:.3g}, seed {sample.seed}){where}"
    broken = [result for result in results if result.not_held and result.arm == AS_RECORDED]
    if results.replayed_pass == ROLLOUT:
        yield "the trace has no `train` pass, so d compares the replay with the engine's logprobs"
    elif broken:
        from .analysis.replay_text import not_reproduced

        yield not_reproduced(broken)
    yield f"next: tim-trace stats {trace} --pair {REPLAY_PREFIX}{results[-1].arm}:{results.replayed_pass} --by step"


def _brought_in(output: str, imported: Imported) -> str:
    from .tracer.importers.columns import listed_names

    holes = imported.placeholders
    counts = {
        f"placeholders became NULL ({holes.clamped:,} values of -9999, {holes.masked_zeros:,} zeros outside the mask, "
        f"{holes.all_zero:,} in all-zero lists)": holes.total,
        "logprobs of 0 were kept, because another pass also gives these tokens probability 1": holes.certain,
        "invalid logprobs above 0 were kept unchanged": imported.num_above_zero,
    }
    parts = [f"{count:,} {what}" for what, count in counts.items() if count]
    if imported.ignored_columns:
        parts.append(f"ignored columns: {listed_names(imported.ignored_columns)}")
    if imported.num_known_files:
        parts.append(f"{imported.num_known_files:,} files were already imported and were not read again")
    parts += [f"skipped: {sentence}" for sentence in imported.held_back]
    parts += [f"no logprobs from pass {sentence}" for sentence in imported.missing]
    following = "diagnose"
    if imported.num_known_files and not imported.num_files:
        first = "nothing new was found"
    elif imported.format == "metrics":
        first = f"imported {counted(imported.num_metrics, 'logged value')}"
    else:
        many = len(imported.passes) > 2 and not {*STANDARD} & {*imported.passes}
        following = "diagnose" if {TRAIN, ROLLOUT} <= {*imported.passes} else "compare" if many else "info"
        of = "" if imported.format == "parquet" else f" of {imported.format}"
        noun = "pass" if len(imported.passes) == 1 else "passes"
        passes = f"{len(imported.passes)} passes" if many else f"{noun} {', '.join(imported.passes) or 'none'}"
        first = (
            f"imported {counted(imported.num_sequences, 'sequence')}{of}, "
            f"{counted(imported.num_tokens, 'response token')}, {counted(imported.num_metrics, 'metric')}, {passes}"
        )
    return "\n".join([first, *parts, *imported.notes, f"next: tim-trace {following} {output}"])
