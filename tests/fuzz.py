"""Damage traces at random and hold what every verb then says against what docs/reference/trace-format.md promises.

    python tests/fuzz.py --cases 5000 --seed 1
    python tests/fuzz.py --seed 1 --only 77      # one case again, with what it did and what came of it

A verb over a damaged trace gives the answer over the undamaged one (right); or one that names what is damaged, on stderr
and under `damaged`, and is exactly the answer over a trace without the named files (said); or one line of error and exit
code 2 (refused). Everything else is a failure. Of an edit that carries the right checksums, only this is asked: no
traceback, no crash, no hang, no flood of memory, nothing written.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import stat
import sys
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import numcodecs
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from fuzz_bases import RUN, build_bases
from fuzz_mutations import MUTATIONS, Others, files_of, kind_of, message_ends, resign
from fuzz_runner import Runner
from json_output import validator

LIMIT_S = 60
PIPE_LIMIT_S = 15  # where a pipe lies in the trace: to wait for it is the one failure to look for
PEAK_BYTES = 2 * 2**30
MOST_REFERENCES = 48  # of one case
OUTCOMES = ("right", "said", "refused", "hostile", "FAILED")
FOREIGN = ("replace by other trace", "trace.json")
FOLDERS = "writers|sequences|scores|metrics|passes|dense|weights|sums|index|journal|tokenizer"
COPIES = ("sums", "index")  # made of the other files: they may go, and are made anew
MAY_GO = ("reserve", *COPIES)
SUBJECT = re.compile(rf"(?:^|[\s('\"])(?:{RUN}/([^\s:;,'\"]+)|((?:{FOLDERS})/[^\s:;,'\"]+))", re.MULTILINE)

COUNTS = {
    "all_sequences": (
        "SELECT count(*) AS n, sum(num_response_tokens) AS a, sum(len(prompt_ids)) AS b,"
        " sum(list_sum(response_ids)) AS c FROM all_sequences"
    ),
    "all_scores": (
        "SELECT count(*) AS n, sum(len(logprobs)) AS a, sum(iteration) AS b, sum(policy_version) AS c FROM all_scores"
    ),
    "all_metrics": "SELECT count(*) AS n, sum(step) AS a, sum(length(name)) AS b, sum(length(text)) AS c FROM all_metrics",
}
QUERIES = [
    "SELECT count(*) AS n, sum(num_response_tokens) AS tokens FROM sequences",
    "SELECT step, count(*) AS n, sum(reward) AS reward FROM sequences GROUP BY step ORDER BY step",
    "SELECT pass, step, count(*) AS n, sum(len(logprobs)) AS tokens FROM scores GROUP BY ALL ORDER BY ALL",
    "SELECT step, name, value, text FROM metrics ORDER BY step, name",
    "SELECT * FROM passes ORDER BY ALL",
    "SELECT * FROM steps ORDER BY step",
    "SELECT step, seq_id, position, token_id, d FROM tokens ORDER BY ALL",
    "SELECT count(*) AS n, max(abs(d)) AS largest FROM tokens",
    "SELECT step, seq_id, position, logprob_a, logprob_b, d FROM pair('train', 'rollout') ORDER BY ALL",
    "SELECT * FROM pair_sequences('train', 'rollout') ORDER BY ALL",
    "SELECT * FROM pair_steps('train', 'rollout') ORDER BY step",
    "SELECT * FROM pair_runs('train', 'rollout')",
    "SELECT step, seq_id, prompt_ids, response_ids, advantage FROM sequences ORDER BY step, seq_id",
    "SELECT step, seq_id, pass, logprobs FROM scores ORDER BY ALL",
    "SELECT max(step) AS step FROM sequences",
    "SELECT 1 AS one",
]
DENSE_QUERIES = [
    "SELECT step, seq_id, position, tv_low, tv_high, argmax_flip FROM pair_distributions('train', 'rollout') ORDER BY ALL",
    "SELECT * FROM pair_distribution_steps('train', 'rollout') ORDER BY step",
    "SELECT step, seq_id, position, tv FROM pair_distributions('train', 'train') ORDER BY ALL",
    "SELECT * FROM pair_routing('train', 'train') ORDER BY ALL",
    "SELECT count(*) AS n, sum(num_layers) AS layers FROM pair_routing_tokens('train', 'train')",
]
# What watch says of the recording and not of the numbers; of a damaged writer nobody knows whether it ended.
WATCH_VARIES = ("age_s", "rate_from", "steps_per_minute", "notes", "state", "is_over", "exit_code")
NAMED = [
    "by-probability",
    "by-length",
    "ess",
    "worst-tokens",
    "by-prompt",
    "unique-responses",
    "entropy",
]
FRAMEWORKS = ["verl", "trl", "slime", "nemo-rl", "prime-rl", "openrlhf"]


def draw_verb(draw, base):
    """Arguments of a verb that only reads, the more often the quicker it is."""
    dense, weights = base == "dense", base == "weights"
    verbs = [
        (20, lambda: ["sql", RUN, draw.choice(list(COUNTS.values()))]),
        (16, lambda: ["sql", RUN, draw.choice(QUERIES)]),
        (16, lambda: ["verify", RUN]),
        (7, lambda: ["info", RUN]),
        (6, lambda: ["stats", RUN, "--by", draw.choice(["run", "step", "sequence"])]),
        (2, lambda: ["stats", RUN, "--like", draw.choice(FRAMEWORKS)]),
        (3, lambda: ["query", draw.choice(NAMED), RUN]),
        (6, lambda: ["check", RUN]),
        (2, lambda: ["check", RUN, "--partial"]),
        (4, lambda: ["diagnose", RUN]),
        (2, lambda: ["corrections", RUN, "--by", draw.choice(["run", "step", "length"])]),
        (2, lambda: ["objective", RUN]),
        (2, lambda: ["dynamics", RUN]),
        (2, lambda: ["attribute", RUN]),
        (4, lambda: ["watch", RUN]),
        (2, lambda: ["gate", RUN, "--fail-on", draw.choice(["tim.k3>1e-3", "tim.max_abs_d>10", "check"])]),
        (1, lambda: ["gate", RUN, "--fail-on", "tim.k3>1e-3", "--partial"]),
        (0.4, lambda: ["report", RUN, "-o", "../report.html", "--force"]),
        (25 * weights, lambda: ["weights", RUN]),
        (8 * weights, lambda: ["weights", RUN, "--by", "module"]),
        (25 * weights, lambda: ["weights", RUN, "--verify"]),
        (12 * weights, lambda: ["weights", RUN, "--export", str(draw.randrange(4)), "../exported"]),
        (40 * dense, lambda: ["sql", RUN, draw.choice(DENSE_QUERIES)]),
        (8 * dense, lambda: ["stats", RUN, "--by", "layer", "--pair", "train:train"]),
    ]
    arguments = draw.choices([verb for _, verb in verbs], [weight for weight, _ in verbs])[0]()
    if arguments[0] == "report" or "--export" in arguments:
        return arguments
    if arguments[0] == "watch":
        return [*arguments, draw.choice(["--json", "--json", "--once"])]
    return arguments if draw.random() < 0.12 else [*arguments, "--json"]


@dataclass
class Case:
    """One case: what was damaged, how, and which verb was asked."""

    number: int
    base: str
    arguments: list[str]
    damages: list[tuple[str, str]] = field(default_factory=list)  # mutation, path
    outcome: str = ""
    reason: str = ""
    ended: object = None
    unseen: bool = False  # check or gate judged a damaged trace, rightly

    @property
    def hostile(self):
        """Whether nothing in the trace can tell the damage."""
        return any("hostile" in mutation for mutation, _ in self.damages)

    def says(self):
        damages = "; ".join(f"{mutation}: {path}" for mutation, path in self.damages)
        return f"case {self.number}: {self.base}: {damages}: tim-trace {' '.join(map(repr, self.arguments))}"


class Failed(Exception):
    """What a verb did against the promise."""


class Fuzzer:
    """Bases, their undamaged answers, and cases over them."""

    def __init__(self, folder, seed, bases=None):
        self.folder, self.seed = Path(folder), seed
        self.bases = Path(bases or self.folder / "bases")
        self.names = build_bases(self.bases)
        self.files = {name: files_of(self.bases / name / RUN) for name in self.names}
        self.runner = Runner(self.folder / "runner", self.warm())
        self.answers = {}
        self.unsteady = 0  # answers that were equal but for the last digits: DuckDB adds in any order
        (self.folder / "case").mkdir(exist_ok=True)

    def warm(self):
        """One command of each verb, so that the runner has imported what they need; the bases stay as they are."""
        copy = self.folder / "warm"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(self.bases / "dense" / RUN, copy / "dense" / RUN)
        shutil.copytree(self.bases / "weights" / RUN, copy / "weights" / RUN)
        draw = random.Random(0)
        verbs = {("sql",): (["sql", RUN, DENSE_QUERIES[0]], copy / "dense")}
        for base in ("dense", "weights"):
            for _ in range(1000):
                arguments = draw_verb(draw, base)
                verbs.setdefault((arguments[0],), (arguments, copy / base))
        return list(verbs.values())

    def close(self):
        self.runner.close()

    # Cases

    def case(self, number):
        """Draw a case, carry it out and judge it."""
        draw = random.Random(f"{self.seed}/{number}")
        base = draw.choice(self.names)
        trace = self.folder / "case" / RUN
        for other in (self.folder / "case").iterdir():
            shutil.rmtree(other) if other.is_dir() and not other.is_symlink() else other.unlink()
        shutil.copytree(self.bases / base / RUN, trace, symlinks=True)
        case = Case(number, base, draw_verb(draw, base))
        wanted = draw.choices((1, 2, 3), (85, 10, 5))[0]
        while len(case.damages) < wanted:
            self.damage(draw, case, trace)
        before = fingerprint(trace)
        limit_s = PIPE_LIMIT_S if any(mutation.startswith("pipe") for mutation, _ in case.damages) else LIMIT_S
        case.ended = without_error(self.runner.run(case.arguments, trace.parent, limit_s, leaves=number % 8 == 0))
        try:
            self.judge(case, trace, before)
        except Failed as failure:
            case.outcome, case.reason = "FAILED", str(failure)
        return case

    def damage(self, draw, case, trace):
        """One mutation of one file; kinds of files and mutations come equally often."""
        older = self.bases / case.base / "older"
        traces = [self.bases / name / RUN for name in self.names if name != case.base]
        others = Others(older if older.is_dir() else None, traces)
        kinds = defaultdict(list)
        for path in self.files[case.base]:
            if os.path.isfile(trace / path) and not os.path.islink(trace / path):
                kinds[kind_of(path)].append(path)
        for _ in range(100):
            if not kinds:
                break
            path = draw.choice(kinds[draw.choice(sorted(kinds))])
            mutation = draw.choice(list(MUTATIONS))
            if mutation == "pipe in place" and draw.random() < 0.8:
                continue
            if MUTATIONS[mutation](draw, trace, path, others):
                case.damages.append((mutation, path))
                return
        case.damages.append(("nothing", "trace.json"))

    # Judgement

    def judge(self, case, trace, before):
        ended = case.ended
        self.judge_process(case)
        written = changes(before, fingerprint(trace))
        if written:
            raise Failed(f"wrote into the trace: {', '.join(written)}")
        lists_damage = case.arguments[0] == "verify" or ("--verify" in case.arguments and bool(ended.stdout))
        if case.hostile:
            if ended.code == 2 and not lists_damage:
                judge_error(ended)
            case.outcome = "hostile"
        elif case.arguments[0] == "verify":
            self.judge_verify(case, trace)
        elif ended.code == 2 and lists_damage:
            self.judge_versions(case)
        elif ended.code == 2:
            judge_error(ended)
            case.outcome = "refused"
        else:
            self.judge_answer(case, trace)

    def judge_process(self, case):
        ended = case.ended
        if ended.code is not None and ended.code < 0:
            raise Failed(f"died of {signal.Signals(-ended.code).name}")
        if ended.code is None:
            raise Failed("hangs")
        if "Traceback (most recent call last)" in ended.stderr:
            raise Failed(f"traceback: {ended.stderr.strip().splitlines()[-1][:200]}")
        if re.search(r"terminate called|Assertion|Fatal Python error|panicked at", ended.stderr):
            raise Failed(f"abort: {ended.stderr[:200]}")
        if ended.code not in (0, 1, 2):
            raise Failed(f"exit code {ended.code}")
        if ended.peak_bytes > PEAK_BYTES:
            raise Failed(f"took {ended.peak_bytes / 2**30:.1f} GiB of memory")

    def judge_verify(self, case, trace):
        """verify has to name every file whose damage matters."""
        ended = case.ended
        lost = self.changed(case, trace)
        if ended.code == 1:
            raise Failed("verify: exit code 1")
        passed_over = subjects(ended.stdout)
        lost -= {path for path in lost if path.startswith(COPIES) and path in passed_over}
        if ended.code == 0:
            if lost:
                raise Failed(f"verify found nothing wrong with {sorted(lost)[0]}")
            case.outcome = "right"
            return
        text = ended.stdout + ended.stderr
        if not ended.stdout:
            judge_error(ended)
            named = subjects(text)
            blamed = lost | {path for _, path in case.damages}
            # Without its trace.json a folder is none, and the error names the folder.
            if "trace.json" not in lost and not any(covers(name, path) for name in named for path in blamed):
                raise Failed(f"verify: the error names none of {sorted(lost)[:2]}")
            case.outcome = "refused"
            return
        named = (
            subjects("\n".join(json.loads(ended.stdout)["damaged"])) if "--json" in case.arguments else subjects(text)
        )
        unnamed = [path for path in sorted(lost) if not any(covers(name, path) for name in named)]
        # What a writer wrote is in its state alone: of a file that is gone with it nobody can know, and the state is named.
        unknown = {path for path in unnamed if not (trace / path).exists() and state_of(path) in named & lost}
        unnamed = [path for path in unnamed if path not in unknown]
        if unnamed:
            raise Failed(f"verify does not name {unnamed[0]}")
        case.outcome = "said" if lost else "right"

    def judge_versions(self, case):
        """weights --verify lists every version: those that it calls right are those of the whole trace, the others named."""
        ended = case.ended
        if "Error: " in ended.stderr or not subjects(ended.stdout + ended.stderr):
            raise Failed(
                f"weights --verify: exit code 2 with a table and no file named: {ended.stderr.strip()[-300:]!r}"
            )
        if "--json" in case.arguments:
            whole = self.reference(case, frozenset(), ())["rows"]
            rows = parse(case.arguments, ended)[0]["rows"]
            if other := [row for row in rows if row["verified"] == "ok" and row not in whole]:
                raise Failed(f"weights --verify: calls right what is not that of the whole trace: {other[0]}")
        case.outcome = "said"

    def judge_answer(self, case, trace):
        """An answer is the full one, or exactly that of the rest, and then it says so."""
        ended, is_json = case.ended, "--json" in case.arguments
        answer, damaged = parse(case.arguments, ended)
        words = [line for line in ended.stderr.splitlines() if line.startswith("tim-trace: ") and f"{RUN}/" in line]
        told = subjects("\n".join([*damaged, *words]))
        unsaid = ""
        if is_json and damaged and not words:
            unsaid = "missing word: `damaged` says what stderr does not"
        elif is_json and words and not damaged:
            unsaid = "missing word: stderr says what `damaged` does not"
        elif (
            not told
            and case.arguments[0] in ("info", "watch")
            and "damaged" in ended.stdout.replace('"damaged": []', "").replace(str(self.folder), "")
        ):
            unsaid = "missing word: said among the answer alone, neither on stderr nor under `damaged`"
            told = subjects(ended.stdout) if case.arguments[0] == "info" else self.changed(case, trace)
        if case.arguments[0] in ("check", "gate") and "--partial" not in case.arguments and told:
            raise Failed(f"{case.arguments[0]} judges a trace that it knows to be damaged, exit code {ended.code}")
        cuts = self.silent_cuts(case, trace)
        if self.compare(case, answer, self.reference(case, frozenset(), cuts)):
            if unsaid:
                raise Failed(unsaid)
            case.outcome = "right"
            case.unseen = case.arguments[0] in ("check", "gate")
            return
        if not told:
            raise Failed("silent: another answer, and no word about damage")
        for removed, kept in itertools.islice(self.rests(case, trace, told, cuts), MOST_REFERENCES):
            if self.compare(case, answer, self.reference(case, removed, kept)):
                if unsaid:
                    raise Failed(unsaid)
                case.outcome = "said"
                return
        # Under the trace.json of another run nothing of this run counts, and `info` is that of the other, with no rows.
        if case.arguments[0] == "info" and all(each == FOREIGN for each in case.damages):
            case.outcome = "said"
            return
        raise Failed(f"other rest: said {', '.join(sorted(told))[:150]}, and the numbers are of no rest without that")

    def compare(self, case, answer, reference):
        if case.arguments[0] == "report":
            return True  # The page holds times; its numbers are those of the other verbs.
        if reference is not None and answer != reference and not differences(reference, answer, exact=False):
            self.unsteady += 1
            return True
        return reference is not None and answer == reference

    def changed(self, case, trace):
        """Files of the base whose content is not there any more."""
        return {path for path in self.files[case.base] if matters(self.bases / case.base / RUN, trace, path)}

    def silent_cuts(self, case, trace):
        """Journals that end after another message than they did: so does that of a process that died earlier."""
        cuts = []
        for path in self.files[case.base]:
            file = trace / path
            if kind_of(path) == "journal" and file.is_file() and not file.is_symlink():
                ends = message_ends((self.bases / case.base / RUN / path).read_bytes())
                data = file.read_bytes()
                if len(data) in ends[:-1] and (self.bases / case.base / RUN / path).read_bytes().startswith(data):
                    cuts.append((path, ends.index(len(data))))
        return tuple(cuts)

    def rests(self, case, trace, told, cuts):
        """What may be left of a trace without the files that are told: (paths removed, journals cut), likely ones first."""
        known = self.files[case.base]
        exact = {path for path in known if path in told and kind_of(path) not in MAY_GO}
        yield frozenset(exact - {"trace.json"}), cuts
        choices = []
        for path in known:
            if not any(covers(name, path) for name in told) or kind_of(path) in MAY_GO:
                continue
            if path == "trace.json":  # without it a folder is no trace
                continue
            if kind_of(path) == "journal":
                ends = message_ends((self.bases / case.base / RUN / path).read_bytes())
                file = trace / path
                now = len(message_ends(file.read_bytes())) - 1 if file.is_file() else -1
                order = sorted(range(len(ends)), key=lambda count, now=now: abs(count - now))
                choices.append([("cut", path, count) for count in order] + [("remove", path)])
            elif kind_of(path) == "writers":
                writer = path.split("/")[1].removesuffix(".json")
                changed = [
                    other
                    for other in known
                    if writer in other and other != path and matters(self.bases / case.base / RUN, trace, other)
                ]
                choices.append([("keep",), ("remove", *changed), ("remove", path)])
            else:
                choices.append([("remove", path), ("keep",)])
        for combination in itertools.product(*choices):
            removed = {path for choice in combination if choice[0] == "remove" for path in choice[1:]}
            kept = dict(cuts) | {choice[1]: choice[2] for choice in combination if choice[0] == "cut"}
            yield frozenset(removed), tuple(sorted(kept.items()))

    def reference(self, case, removed, cuts):
        """The answer over the base without some files and with journals that end earlier; None where there is none."""
        key = (case.base, tuple(case.arguments), removed, cuts)
        if key not in self.answers:
            folder = self.reference_trace(case.base, removed, cuts)
            ended = self.runner.run(case.arguments, folder, LIMIT_S)
            answer, _ = parse(case.arguments, ended) if ended.code in (0, 1) else (None, [])
            self.answers[key] = answer
            self.check_count(case, answer, folder / RUN)
        return self.answers[key]

    @cache  # noqa: B019
    def reference_trace(self, base, removed, cuts):
        """A folder with a whole trace in which some files were never written, accounts and checksums included."""
        folder = self.folder / "references" / xxhash.xxh3_64_hexdigest(repr((base, sorted(removed), cuts)).encode())
        if folder.exists():
            return folder
        trace = folder / RUN
        shutil.copytree(self.bases / base / RUN, trace)
        gone = set(removed)
        for path in removed:
            if path.startswith("writers/"):
                writer = path.split("/")[1].removesuffix(".json")
                gone |= {other for other in self.files[base] if writer in other}
            elif path.startswith("dense/"):
                gone |= {other for other in self.files[base] if other.startswith("/".join(path.split("/")[:2]) + "/")}
        for path in gone:
            (trace / path).unlink(missing_ok=True)
        for path, count in cuts:
            if (trace / path).exists():
                os.truncate(trace / path, message_ends((trace / path).read_bytes())[count])
        for state in (trace / "writers").glob("*.json"):
            document = json.loads(state.read_bytes())
            document["files"] = {path: known for path, known in document["files"].items() if path not in gone}
            document["journals"] = [path for path in document["journals"] if path not in gone]
            resign("writers/", document)
            state.write_text(json.dumps(document, indent=1))
        return folder

    def check_count(self, case, answer, trace):
        """Count the rows of a whole trace with pyarrow alone: the references have to be right themselves."""
        table = next((name for name, query in COUNTS.items() if query in case.arguments), None)
        if table and "--json" in case.arguments:
            expected = count_rows(trace, table.removeprefix("all_"))
            if answer is None or list(answer["rows"][0].values()) != expected:
                raise Failed(f"a whole trace has {expected} in {table}, and the answer is {answer}")


def count_rows(trace, table):
    """What COUNTS asks of a table, from its files."""
    parts = [pq.ParquetFile(file).read(use_threads=False) for file in sorted((trace / table).glob("*.parquet"))]
    sealed = {file.stem for file in (trace / table).glob("*.parquet")}
    for file in sorted((trace / "journal").glob(f"*.{table}.arrows")):
        if file.name.split(".")[0] not in sealed:
            reader = pa.ipc.open_stream(pa.BufferReader(file.read_bytes()))
            batches = []
            try:
                while True:
                    batches.append(reader.read_next_batch())
            except StopIteration:
                parts.append(pa.Table.from_batches(batches, reader.schema))
    rows = [row for part in parts for row in part.to_pylist()]
    columns = {
        "sequences": lambda row: (row["num_response_tokens"], len(row["prompt_ids"]), sum(row["response_ids"])),
        "scores": lambda row: (len(row["logprobs"]), row["iteration"], row["policy_version"]),
        "metrics": lambda row: (row["step"], len(row["name"]), None if row["text"] is None else len(row["text"])),
    }[table]
    values = [[value for value in column if value is not None] for column in zip(*map(columns, rows), strict=True)]
    return [len(rows), *(sum(column) if column else None for column in values or [[], [], []])]


def parse(arguments, ended):
    """The answer without what changes by itself, and the damage that it tells."""
    if "--json" not in arguments:
        text = re.sub(r"last record .* ago|\d+ steps per minute[^\n]*\n|(note: [^\n]*\n)([^\n]+\n)*", "", ended.stdout)
        if arguments[0] == "info":
            text = "\n".join(
                line for line in text.splitlines() if re.match(r"steps|sequences|tokens|metrics|rollout", line)
            )
        return text, []
    try:
        answer = json.loads(ended.stdout)
    except ValueError as error:
        raise Failed(f"--json gave no JSON: {error}") from None
    if not isinstance(answer, dict) or "damaged" not in answer:
        raise Failed("--json has no `damaged`")
    problem = next(validator(arguments[0]).iter_errors(answer), None)
    if problem is not None:
        raise Failed(f"--json does not fit its schema at {problem.json_path}: {problem.message[:300]}")
    damaged = answer.pop("damaged")
    if arguments[0] == "watch":
        answer = {name: value for name, value in answer.items() if name not in WATCH_VARIES}
    if arguments[0] == "info":
        wanted = ("run_id", "first_step", "last_step", "num_steps", "num_sequences", "num_prompt_tokens")
        wanted += ("num_response_tokens", "num_metrics", "num_captured", "capture")
        passes = [
            {key: value for key, value in one.items() if key.startswith(("num_", "name"))} for one in answer["passes"]
        ]
        answer = {name: answer[name] for name in wanted} | {"passes": passes}
    return answer, damaged


def without_error(ended):
    """With --json an error is also JSON on stdout, in the words of stderr. Everything else is judged without it."""
    if (
        ended.code == 2
        and ended.stdout.startswith('{"json_version": 1, "error": ')
        and json.loads(ended.stdout)["error"]["message"] in ended.stderr
    ):
        return replace(ended, stdout="")
    return ended


def judge_error(ended):
    """An error is one line that begins with `Error: `; before it may stand words about damage."""
    lines = [line for line in ended.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("Error: ")]
    others = [line for line in lines if not line.startswith(("Error: ", "tim-trace: "))]
    if len(errors) != 1 or others or lines[-1] != errors[0]:
        missing = "missing word: " if not lines else ""
        raise Failed(f"{missing}exit code 2 without one line of error: {ended.stderr.strip()[-300:]!r}")


def subjects(text):
    """Paths in the trace that a text names."""
    return {(first or second).rstrip(".)") for first, second in SUBJECT.findall(text)}


def state_of(path):
    """The file that says what the writer of a table's file or journal wrote."""
    segment = path.split("/")[-1].partition(".")[0]
    return f"writers/{segment.rpartition('-')[0]}.json"


def covers(name, path):
    """Whether a named file or folder stands for a path: of Zarr, one name stands for its group."""
    if path == name or path.startswith(name.rstrip("/") + "/"):
        return True
    if path.startswith(("dense/", "weights/")):
        group = "/".join(path.split("/")[:2]).removesuffix(".json")
        group = re.sub(r"(-\d{6})\.\d+$", r"\1", group)
        return name == group or name.startswith((f"{group}/", f"{group}."))
    return False


def matters(base, trace, path):
    """Whether a file of the base is gone or holds something else."""
    if kind_of(path) == "reserve":
        return False
    file = trace / path
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            return not path.startswith(COPIES)
        before, now = (base / path).read_bytes(), file.read_bytes()
    except OSError:
        return not path.startswith(COPIES)
    if now == before:
        return False
    if path.endswith(".json"):
        try:
            return json.loads(now) != json.loads(before) or now.isascii() != before.isascii()
        except (ValueError, RecursionError):
            return True
    if kind_of(path) == "journal":
        return not (len(now) in message_ends(before) and before.startswith(now)) and batches(now) != batches(before)
    if kind_of(path) == "weights chunk":
        try:
            return numcodecs.Blosc().decode(now) != numcodecs.Blosc().decode(before)
        except (RuntimeError, ValueError, OSError):
            return True
    return True


def batches(data):
    """All rows of a journal and what follows them, or None where pyarrow cannot read it."""
    ends = message_ends(data)
    try:
        reader = pa.ipc.open_stream(pa.BufferReader(data))
        rows = [reader.read_next_batch().to_pylist() for _ in range(len(ends) - 1)]
    except (OSError, ValueError, pa.ArrowException):
        return None
    return repr((ends, rows, data[ends[-1] :] if ends else data))


def fingerprint(trace):
    """What is in a folder: of each path its kind and content; links are not followed."""
    found = {}
    for path in sorted(trace.rglob("*")):
        mode = path.lstat().st_mode
        name = str(path.relative_to(trace))
        if stat.S_ISREG(mode):
            found[name] = xxhash.xxh3_64_hexdigest(path.read_bytes())
        elif not name.startswith(COPIES):
            found[name] = os.readlink(path) if stat.S_ISLNK(mode) else stat.S_IFMT(mode)
    return found


def changes(before, after):
    """Paths that differ, but for what is made of the others."""
    return [
        name
        for name in sorted(before.keys() | after.keys())
        if before.get(name) != after.get(name) and not name.startswith(COPIES)
    ]


def differences(full, answer, place="", most=12, exact=True):
    """Where two answers differ, the first few places; without `exact`, by more than the order of a sum can."""
    if isinstance(full, dict) and isinstance(answer, dict) and full.keys() == answer.keys():
        pairs = [(full[key], answer[key], f"{place}.{key}") for key in full]
    elif isinstance(full, list) and isinstance(answer, list) and len(full) == len(answer):
        pairs = [(one, other, f"{place}[{row}]") for row, (one, other) in enumerate(zip(full, answer, strict=True))]
    else:
        if not exact and isinstance(full, float) and isinstance(answer, float):
            return [] if math.isclose(full, answer, rel_tol=1e-12, abs_tol=1e-13) else [place]
        return [] if full == answer else [f"{place}: {str(full)[:200]} != {str(answer)[:200]}"]
    return [line for one, other, where in pairs for line in differences(one, other, where, most, exact)][:most]


def table_of(cases):
    """Kind of file x mutation -> counts of outcomes, as text."""
    counts = defaultdict(Counter)
    for case in cases:
        mutation, path = case.damages[0]
        counts[kind_of(path), "several" if len(case.damages) > 1 else mutation][case.outcome] += 1
    lines = [f"{'kind':<18} {'mutation':<24} " + " ".join(f"{name:>8}" for name in OUTCOMES)]
    for (kind, mutation), found in sorted(counts.items()):
        lines.append(f"{kind:<18} {mutation:<24} " + " ".join(f"{found[name] or '':>8}" for name in OUTCOMES))
    total = Counter(case.outcome for case in cases)
    lines.append(f"{'all':<18} {len(cases):<24} " + " ".join(f"{total[name]:>8}" for name in OUTCOMES))
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seconds", type=float, help="stop after so long, whatever is left")
    parser.add_argument("--only", type=int, nargs="+", help="these cases alone, with all that they printed")
    parser.add_argument("--folder", type=Path, help="where to work; what is there stays, and the bases are made once")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tim-trace-fuzz-") as temporary:
        fuzzer = Fuzzer(options.folder or temporary, options.seed)
        try:
            return run_cases(fuzzer, options)
        finally:
            fuzzer.close()


def run_cases(fuzzer, options):
    if options.only:
        return any([show_case(fuzzer, fuzzer.case(number)) for number in options.only])
    cases, began = [], time.monotonic()
    for number in range(options.first, options.first + options.cases):
        case = fuzzer.case(number)
        if case.outcome == "FAILED":
            print(f"FAILED {case.says()}\n       {case.reason}", flush=True)
        cases.append(case)
        if options.seconds and time.monotonic() - began > options.seconds:
            break
        if number % 250 == 249:
            print(f"{number + 1} cases after {time.monotonic() - began:.0f} s", flush=True)
    print(table_of(cases))
    reasons = Counter(
        (re.split(r"[:,]", case.reason)[0], case.arguments[0]) for case in cases if case.outcome == "FAILED"
    )
    for (reason, verb), count in reasons.most_common():
        print(f"{count:>5} {verb}: {reason}")
    print(f"{fuzzer.unsteady} comparisons were equal but for the last digits of sums")
    unseen = sum(case.unseen for case in cases)
    print(f"check and gate judged {unseen} damaged traces, and rightly: they did not read what was damaged")
    return any(case.outcome == "FAILED" for case in cases)


def show_case(fuzzer, case):
    """Print all there is of a case, and whether it failed."""
    ended = case.ended
    print(f"\n{case.says()}\nexit code {ended.code}, {ended.seconds:.2f} s, {ended.peak_bytes >> 20} MiB")
    print(ended.stdout[:3000], ended.stderr[-4000:], f"{case.outcome} {case.reason}", sep="\n")
    if ended.code in (0, 1) and "--json" in case.arguments and not case.hostile:
        with contextlib.suppress(Failed):
            full, answer = fuzzer.reference(case, frozenset(), ()), parse(case.arguments, ended)[0]
            print("against the undamaged trace:", *differences(full, answer), sep="\n  ")
    return case.outcome == "FAILED"


if __name__ == "__main__":
    sys.exit(main())
