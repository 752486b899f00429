"""Every verb of the command line with its defaults: what is required, and nothing else."""

import re
import sys

WORDS = {
    "example": "{new}",
    "record": "-o {new} -- {python} -c pass",
    "import": "parquet {dump} -o {new}",
    "diagnose": "{run}",
    "report": "{run} -o {new}.html",
    "watch": "{run}",
    "replay": "{run}",
    "sql": "{run} FROM\tsteps",
    "stats": "{run}",
    "gate": "{run} --fail-on check",
    "info": "{run}",
    "verify": "{run}",
    "compact": "{run} -o {new}",
    "query": "by-probability {run}",
    "mcp": "{run}",
    "export": "{run} --to parquet -o {new}",
    "check": "{run}",
    "compare": "{run} {run}",
    "corrections": "{run}",
    "objective": "{run}",
    "dynamics": "{run}",
    "attribute": "{run}",
    "triangulate": "{run}",
    "gradient": "{run}",
    "locate": "{run}",
    "certify": "{run} --minutes 0.2 --max-batch 2 --max-length 4 -o {new}",
    "reproduce": "{run} -o {new}.py",
    "weights": "{run}",
}
"""What each is given; a tab stands for a space in a word."""
FINDINGS = {"certify", "check", "compare", "diagnose", "gate", "locate"}
"""Verbs whose exit code is 1 where they find something."""
HEAVY = {"replay", "triangulate", "gradient", "locate", "certify", "reproduce"}


def words_of(verb, **places):
    return [
        verb, *(word.format(python=sys.executable, **places).replace("\t", " ") for word in WORDS[verb].split(" ")),
    ]  # fmt: skip


def answer(verb, *more, refuses=False, **places):
    """Run a verb here. It ends as documented, without a traceback and without a warning of a library.

    `refuses`: whether it may say in one line, with exit code 2, that it cannot answer.
    """
    from builders import in_process  # deferred: programs/every_verb.py runs where the tests' libraries are missing

    done = in_process([*words_of(verb, **places), *more])
    assert done.code in ({0, 1} if verb in FINDINGS else {0}) | ({2} if refuses else set()), done.stderr
    assert done.code != 2 or re.search(r"^Error: [^\n]+\n\Z", done.stderr, re.MULTILINE), done.stderr
    assert not re.search(r"Traceback|Warning", done.stderr), done.stderr
    return done
