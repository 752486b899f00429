"""Write the parts of docs/ that come from the code (every --help, column, threshold and public name), and llms.txt.

python docs/generate.py            # write them
python docs/generate.py --check    # fail when they are stale
"""

import ast
import inspect
import itertools
import json
import re
import string
import sys
import textwrap
from pathlib import Path

import click
import codes
import json_schemas
import msgspec
import pyarrow as pa
import tim_trace
from tim_trace import cli
from tim_trace.analysis.attribution.text import DIFFERENCES, EVIDENCE
from tim_trace.analysis.facts.read_series import AVERAGES, NAMES
from tim_trace.replay.arm_option import ENGINES, GRADIENT
from tim_trace.replay.arms import OPTIONS
from tim_trace.schemas.checksums import SealedFile
from tim_trace.schemas.documents import CHECKSUM, FORMAT, Manifest, WriterState
from tim_trace.schemas.layout import FORMAT_VERSION
from tim_trace.schemas.passes import STANDARD
from tim_trace.schemas.sums import KINDS
from tim_trace.schemas.tables import ARRAYS, TABLES
from tim_trace.tracer.importers.formats import FORMATS
from tim_trace.tracer.importers.row_import import KINDS as IMPORTED
from tim_trace.tracer.importers.row_import import OF_TOKENS, PASSES, REQUIRED, VERSIONS
from tim_trace.tracer.located import OperatorError, Patch

DOCS = Path(__file__).parent


def helps():
    """Yield each command's --help output under a heading."""
    names = ["tim-trace", *(f"tim-trace {name}" for names in cli.SECTIONS.values() for name in names)]
    for name in names:
        command = cli.main if name == "tim-trace" else cli.main.commands[name.split()[1]]
        context = click.Context(command, info_name=name, terminal_width=100, max_content_width=100)
        yield f"## {name}\n\n```\n{command.get_help(context)}\n```"


def table(spec):
    """Return the columns of a trace table as a Markdown table."""
    lines = [
        f"### {spec.name}",
        "",
        spec.doc,
        "",
        "| column | type | meaning | unit | elements | NULL means |",
        "|---|---|---|---|---|---|",
    ]
    for column in spec.columns:
        elements = column.alignment if "list" in str(column.type) or "map" in str(column.type) else ""
        cells = (
            f"`{column.name}`",
            f"`{_type(column.type)}`",
            column.doc,
            column.unit,
            elements,
            column.null or "never",
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def _type(type):
    return re.sub(r"<(element|item): ", "<", str(type)).replace(" ('entries')", "")


NOTES = {
    "seq_id": "default: the row's index among all imported rows, from 0",
    "response_mask": "true if the token contributes to the loss; default: true for all tokens",
    "advantage": "one value, or one per response token",
    "reward": "True is read as 1, False as 0",
    "rewards": "a map, a struct or a JSON object of reward function -> value",
    "split": "train (default) or eval",
    **dict.fromkeys(
        VERSIONS, "version of the weights that computed the pass's logprobs; default for `rollout`: `policy_version`"
    ),
    **dict.fromkeys(PASSES, "stored as a pass; at least one of the four passes is required"),
    **dict.fromkeys(OF_TOKENS, "stored with `train`, or with `current` or `rollout` if there is no `train` pass"),
    **{f"{STANDARD[0]}_{name}": "stored with the pass" for name in OF_TOKENS},
    **{
        f"{STANDARD[0]}_{name}": array.doc + (array.null and f"; if NULL, {array.null}")
        for name, array in ARRAYS.items()
    },
}
_SHOWN_TOGETHER = [[f"{other}_{name}" for other in STANDARD] for name in (*OF_TOKENS, *ARRAYS)]


def importable():
    """Return a Markdown table of the columns that `tim-trace import parquet` reads."""
    lines = ["| column | each cell | |", "|---|---|---|"]
    for name, kind in IMPORTED.items():
        names = next((names for names in _SHOWN_TOGETHER if name in names), [name])
        if name != names[0]:
            continue
        required = "required" if name in REQUIRED else ""
        notes = filter(None, (required, "" if kind.nullable else "never NULL", NOTES.get(name, "")))
        shown = ", ".join(f"`{each}`" for each in names)
        lines.append(f"| {shown} | {kind.wants.replace(' or, in every row, a ', ', or a ')} | {'; '.join(notes)} |")
    return "\n".join(lines)


def thresholds(*files):
    """Return a Markdown table of the thresholds (assignments with a docstring) in the given files of analysis/."""
    lines = ["| threshold | value | reason |", "|---|---|---|"]
    for file in files:
        source = (DOCS.parent / "analysis" / file).read_text(encoding="utf-8")
        for assigned, said in itertools.pairwise(ast.parse(source).body):
            if isinstance(assigned, ast.Assign) and isinstance(said, ast.Expr):
                name = ast.get_source_segment(source, assigned.targets[0])
                if file.endswith("thresholds.py") or (name.isupper() and not name.startswith("_")):
                    value = ast.get_source_segment(source, assigned.value)
                    value = value if len(value) < 40 else "see the file"
                    reason = " ".join(said.value.value.split()).replace("|", "\\|")
                    lines.append(f"| `{name}` | {value} | {reason} |")
    return "\n".join(lines)


UNITS = {
    "apart": "nats", "at_fall": "nats", "before_share": "0 to 1", "by_chance": "count",
    "correlation": "-1 to 1", "distance_after": "nats", "distance_before": "nats", "entropy": "nats",
    "factor": "ratio", "first": "nats", "from_value": "the series' unit", "lag": "updates",
    "lag_before": "updates", "last": "nats", "limit": "tokens", "mean": "the reward's unit",
    "mean_abs_d": "nats", "mean_before": "the reward's unit", "mean_difference": "the reward's unit",
    "num_agreeing": "count", "num_equal": "count", "num_openings": "count", "num_pairs": "count",
    "num_responses": "count", "order": "a reordering of the rewards", "outcome": "name",
    "outcome_after": "the outcome's unit", "outcome_before": "the outcome's unit", "ratio_before": "ratio",
    "ratio_since": "ratio", "reward_after": "the reward's unit", "reward_before": "the reward's unit",
    "series": "name", "setting": "name", "share": "0 to 1", "step": "step", "still_share": "0 to 1",
    "surprisal": "nats", "to_value": "the series' unit", "trainer_share": "0 to 1",
    "unequal_ordered_share": "0 to 1", "unequal_share": "0 to 1", "update_to_weight": "ratio",
    "version": "step, or number of steps",
}  # fmt: skip
"""Units of the numbers in `attribute`'s evidence."""


def evidence():
    """Return a Markdown table of the evidence codes of `attribute`."""
    lines = ["| code | numbers | sentence |", "|---|---|---|"]
    for code, sentence in (EVIDENCE | DIFFERENCES).items():
        names = dict.fromkeys(name for _, name, _, _ in string.Formatter().parse(sentence) if name)
        numbers = ", ".join(f"`{name}` ({UNITS[name]})" for name in names if name in UNITS)
        lines.append(f"| `{code}` | {numbers} | {codes.plain(sentence)} |")
    return "\n".join(lines)


def signature(public, name):
    """Return a function's signature without type annotations and without `progress`."""
    parameters = inspect.signature(public).parameters
    texts, stars = [], False
    for key, parameter in parameters.items():
        if key in ("self", "progress"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not stars:
            texts, stars = [*texts, "*"], True
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        texts.append(("**" if parameter.kind is parameter.VAR_KEYWORD else "") + key + default)
    return "\n".join(
        textwrap.wrap(f"{name}({', '.join(texts)})", 110, subsequent_indent="    ", break_long_words=False)
    )


def first_line(public):
    return inspect.getdoc(public).splitlines()[0]


def fields_of(public, column="default"):
    """Return a Markdown table of a dataclass's fields, with each field's default or type and its docstring."""
    body = ast.parse(textwrap.dedent(inspect.getsource(public))).body[0].body
    lines = [f"| field | {column} | meaning |", "|---|---|---|"]
    for assigned, said in itertools.pairwise(body):
        if isinstance(assigned, ast.AnnAssign):
            name = assigned.target.id
            told = said.value.value if isinstance(said, ast.Expr) else ""
            cell = ast.unparse(assigned.annotation) if column == "type" else repr(getattr(public(), name))
            cells = (f"`{name}`", f"`{cell}`", " ".join(told.split()))
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def public_names():
    """Yield the signature and first docstring line of every public name, and Recorder's methods with all their lines."""
    for name in tim_trace.__all__:
        public = getattr(tim_trace, name)
        yield f"### {name}\n\n{_coded(first_line(public))}\n\n```\n{signature(public, name)}\n```"
        if name == "Loss":
            yield fields_of(public)
        if name == "Recorder":
            methods = [(key, method) for key, method in vars(public).items() if inspect.isfunction(method)]
            for key, method in methods:
                if not key.startswith("_"):
                    called = signature(method, f"recorder.{key}")
                    first, _, rest = inspect.getdoc(method).partition("\n\n")
                    rest = re.sub(r"(?m)(^(>>>|\.\.\.) .*\n?)+", lambda block: f"```\n{block[0].rstrip()}\n```", rest)
                    yield f"#### Recorder.{key}\n\n{first}\n\n```\n{called}\n```" + f"\n\n{rest}" * bool(rest)


def formats():
    """Yield a section per `tim-trace import` format: its files, the fields of each column, and missing passes."""
    for format in FORMATS.values():
        lines = [
            f"### {format.name}",
            "",
            f"Written by {format.writes}: {_coded(format.files)}. "
            f"{re.sub(r'^[a-z]+(?= )', lambda word: word[0].capitalize(), _coded(format.alignment))}.",
            "",
            "| column | field |",
            "|---|---|",
        ]
        lines += [
            f"| `{ours}` | {', '.join(f'`{name}`' for name in theirs)} |" for ours, theirs in format.columns.items()
        ]
        if format.lacks:
            lines += ["", *(f"- No `{name}` pass: {note}." for name, note in format.lacks.items())]
        yield "\n".join(lines)


def _coded(text):
    """Put file patterns such as `*.jsonl` and `step_<N>` in backticks. As plain Markdown, they lose their * and <N>."""
    return re.sub(r"[\w./:-]*[<*][\w./:<>*-]*[\w>*]", lambda pattern: f"`{pattern[0]}`", text)


def logged_names():
    """Return a Markdown table of the names under which frameworks log each series."""
    lines = ["| series | logged as |", "|---|---|"]
    for series in dict.fromkeys((*AVERAGES, *NAMES)):
        names = (*NAMES.get(series, ()), *AVERAGES.get(series, ()))
        lines.append(f"| `{series}` | {', '.join(f'`{name}`' for name in names)} |")
    return "\n".join(lines)


def pages():
    """Return the generated texts by page and marker."""
    return {
        "reference/cli.md": {"help": "\n\n".join(helps())},
        "reference/attribute.md": {
            "evidence": evidence(),
            "thresholds": thresholds("facts/series.py", "facts/thresholds.py"),
        },
        "start/import.md": {"names": logged_names()},
        "start/write-traces.md": {"required": required(), "fields": json_fields()},
        "reference/import-formats.md": {"formats": "\n\n".join(formats())},
        "reference/python.md": {"names": "\n\n".join(public_names())},
        "reference/arms.md": {"options": arms()},
        "reference/json.md": {"schemas": json_schemas.table(), "codes": codes.table()},
        "reference/check.md": {
            "thresholds": thresholds(
                "check/check.py", "check/faults/kinds.py", "check/finding.py", "check/pair_data.py"
            )
        },
        "reference/trace-format.md": {
            "tables": "\n\n".join(
                f"### {spec.name}\n\n{spec.doc}" if spec.name.startswith("eval_") else table(spec)
                for spec in TABLES.values()
            ),
            "sums": "\n\n".join(table(spec) for spec in KINDS.values()),
            "importable": importable(),
            "located": "\n\n".join(
                f"### {title}\n\n{first_line(kind)}\n\n{fields_of(kind, 'type')}"
                for title, kind in (("operators", OperatorError), ("patches", Patch))
            ),
        },
    }


def arms():
    """Return a Markdown table of the replay arm options, with each option's engines and incompatible settings."""
    lines = ["| option | values | what it does | engines | incompatible with | gradient |", "|---|---|---|---|---|---|"]
    for name, described in OPTIONS.items():
        refused = [
            f"{', '.join(f'`{value}`' for value in values)} (engine {user})"
            for user, values in described.refused.items()
            if user in ENGINES
        ]
        clashes = [clash_text(clash) for clash in described.clashes]
        values = ", ".join(f"`{value}`" for value in described.values) or described.metavar or ""
        engines = ", ".join(engine for engine in ENGINES if engine in described.users)
        excluded = "; ".join(refused + clashes)
        cells = (f"`{name.replace('_', '-')}`", values, described.help, engines, excluded)
        lines.append(f"| {' | '.join(cells)} | {'yes' if GRADIENT in described.users else ''} |")
    return "\n".join(lines)


def clash_text(clash):
    """Return the values and the option that cannot be combined, for example "`packed` with `mode` decode"."""
    other = " ".join([f"`{clash.other.replace('_', '-')}`", " or ".join(clash.others)]).strip()
    own = f"{' or '.join(f'`{value}`' for value in clash.values)} with " if clash.values else ""
    return own + other + (f" (engine {clash.engine})" if clash.engine else "")


def required():
    """Return a Markdown table of the required and optional columns in each table's files."""
    lines = ["| table | required columns | optional columns |", "|---|---|---|"]
    for spec in TABLES.values():
        cells = (
            ", ".join(f"`{column.name}`" for column in spec.columns if bool(column.null) is is_optional)
            for is_optional in (False, True)
        )
        lines.append(f"| `{spec.name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def json_fields():
    """Return the fields of trace.json and of a writer's state as Markdown tables."""
    kinds = (("trace.json", Manifest), ("writers/WRITER.json", WriterState), ("Each entry of files", SealedFile))
    return "\n\n".join(f"### {title}\n\n{fields_of(kind, 'type')}" for title, kind in kinds)


def format_files():
    """Return the schemas of a trace's files by name: JSON Schemas as text, Arrow schemas as IPC messages."""
    found = {f"{name}.arrow": spec.schema.serialize().to_pybytes() for name, spec in TABLES.items()}
    for name, kind, constants in (
        ("trace.json", Manifest, {"format": FORMAT, "format_version": FORMAT_VERSION}), ("writer.json", WriterState, {}),
    ):  # fmt: skip
        # msgspec 0.23 writes empty objects as defaults, earlier releases do not.
        (schema,), components = msgspec.json.schema_components([kind], ref_template="#/$defs/{name}")
        definitions = {key: value for key, value in components.items() if key != kind.__name__}
        schema = components[kind.__name__] | {"$schema": "https://json-schema.org/draft/2020-12/schema"}
        schema["properties"] |= {key: {"const": value} for key, value in constants.items()}
        schema["properties"][CHECKSUM] = {"type": "string", "pattern": "^[0-9a-f]{32}$"}
        schema["required"] = [*schema.get("required", ()), *constants]
        for each in (schema, *definitions.values()):
            for field in each.get("properties", {}).values():
                if field.get("default") == {}:
                    del field["default"]
        found[name] = json.dumps(schema | ({"$defs": definitions} if definitions else {}), indent=1) + "\n"
    return found


def is_stale(path, new):
    if not path.exists():
        return True
    if isinstance(new, bytes):  # compare schemas: the bytes may depend on the pyarrow release
        return not pa.ipc.read_schema(pa.py_buffer(path.read_bytes())).equals(pa.ipc.read_schema(pa.py_buffer(new)))
    return path.read_text(encoding="utf-8") != new


def llms():
    """Return llms.txt (llmstxt.org): the pages in the site's navigation, each with its first sentence."""
    site = (DOCS.parent / "mkdocs.yml").read_text(encoding="utf-8")
    lines = ["# tim-trace", "", f"> {re.search('site_description: (.+)', site)[1]}"]
    for indent, name, page in re.findall(r"^( +)- ([^:]+): ?(\S+\.md)?$", site.partition("\nnav:\n")[2], re.MULTILINE):
        if not page:
            lines += ["", f"## {name}", ""]
        else:
            lines += [""] * (len(indent) == 2) + [f"- [{title(page)}]({page}): {summary(page)}"]
    return "\n".join(lines) + "\n"


def title(page):
    return (DOCS / page).read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def summary(page):
    """Return the first sentence of a page's first paragraph of prose."""
    text = re.sub(
        r"^```.*?^```$|^<!--.*?-->$", "", (DOCS / page).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    paragraphs = [part for part in text.split("\n\n")[1:] if re.match(r"\n*[\w`*]", part)]
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)|\*\*", r"\1", " ".join(paragraphs[0].split()))
    return re.match(r".+?[.?:](?= [A-Z`]|$)|.+", plain)[0].rstrip(":")


def filled(text, parts):
    """Return a page's text with each generated part replaced by the new one in `parts`."""
    for marker, content in parts.items():
        before, begin, rest = text.partition(f"<!-- begin {marker} -->\n")
        _, end, after = rest.partition(f"<!-- end {marker} -->")
        if not (begin and end):
            sys.exit(f"the page has no markers for {marker}")
        text = f"{before}{begin}{content}\n{end}{after}"
    return text


def main():
    written = {DOCS / name: parts for name, parts in pages().items()}
    fresh = {path: filled(path.read_text(encoding="utf-8"), parts) for path, parts in written.items()}
    fresh[DOCS / "llms.txt"] = llms()
    fresh |= {DOCS / "reference" / "format" / name: content for name, content in format_files().items()}
    fresh |= {DOCS / "reference" / "json" / name: text for name, text in json_schemas.documents().items()}
    stale = [path for path, new in fresh.items() if is_stale(path, new)]
    if stale and "--check" in sys.argv:
        sys.exit(f"stale: {', '.join(path.name for path in stale)}; update them with: make docs")
    for path in stale:
        path.parent.mkdir(exist_ok=True)
        new = fresh[path]
        path.write_bytes(new if isinstance(new, bytes) else new.encode())


if __name__ == "__main__":
    main()
