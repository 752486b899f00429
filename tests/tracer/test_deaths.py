"""Work that is killed just before one of its changes to the disk: nothing that was there before is lost, and what is there
is right. `python tests/stress.py deaths --count 0` takes every such place."""

import json
import sys

import pytest
from builders import PROGRAMS, run

OLD, NEW = (3, 12), (5, 20)
"""Steps and sequences of the trace that was there, and of the one that takes its place."""


def deaths(tmp_path, work, seed, count):
    """Kill a work at `count` places, all with 0: what the whole work did and left, and what each death left."""
    tmp_path.mkdir(exist_ok=True)
    done = run(sys.executable, PROGRAMS / "deaths.py", work, tmp_path, seed, count)
    assert done.code == 0, done.stderr[-3000:]
    whole, *found = [json.loads(line) for line in done.stdout.splitlines()]
    return whole, found


def held(told):
    """Steps and sequences of a trace that is whole; None where it is not."""
    return (told["steps"], told["sequences"]) if told.get("is_whole") else None


def check_replacing(death, made):
    """Either trace is there; where neither is, a sentence says how to get at the old one, and the next command does."""
    there, then = death["there"], death["then"]
    if "error" in there:
        assert "no data is lost" in there["error"], death
        assert held(then) == OLD, death
        assert "a trace already exists there" in death["next"]
    else:
        assert held(there) in (OLD, *made), death
    for aside in death["aside"]:  # one whose removal had begun has no manifest any more
        assert held(aside) == OLD or "has no trace.json" in aside["error"], death
    assert not death["temporaries"], death


def check_import(death):
    check_replacing(death, [NEW])
    assert death["aside"] == [] or "error" in death["there"] or held(death["there"]) == NEW, death


def check_first_import(death):
    """All of it, or nothing that is in the way of the next one."""
    if "error" in death["there"]:
        assert death["next"] == "imported", death
    assert held(death["then"]) == NEW, death


def check_recorder(death):
    """Up to where it came; what it has is right to the last step that it flushed."""
    check_replacing(death, [(step, 4 * step) for step in range(NEW[0] + 1)])


def check_adopted(death):
    assert held(death["there"]) == OLD, death


def check_sums(death):
    assert held(death["there"]) == OLD, death
    assert death["there"]["mean_abs_d"] == check_sums.expected


def check_report(death):
    assert held(death["there"]) == OLD, death
    assert death["page"] is None or death["page"].rstrip().endswith("</html>"), death


def check_weights(death):
    """A version that a killed process kept is whole, or is not there."""
    assert "error" in death["there"] or death["there"]["is_whole"], death


CHECKS = {
    "import": check_import,
    "first-import": check_first_import,
    "record": check_recorder,
    "recorder": check_recorder,
    "adopt": check_adopted,
    "sums": check_sums,
    "report": check_report,
    "weights": check_weights,
}


def check_deaths(tmp_path, work, seed, count):
    """Returns how many deaths there were."""
    whole, found = deaths(tmp_path, work, seed, count)
    if work == "sums":
        check_sums.expected = whole["there"]["mean_abs_d"]
    if work == "record":
        started = [event for event, _ in whole["changes"]].index("subprocess.Popen")
        removed = [
            i for i, (event, path) in enumerate(whole["changes"]) if event == "os.remove" and ".tmp-replaced-" in path
        ]
        assert removed
        assert started < min(removed), "the old trace is removed once the command has started"
    for told in (whole, *found):
        CHECKS[work](told)
    return len(found)


COUNTS = {"import": 3, "first-import": 1, "record": 3, "recorder": 1, "adopt": 2, "sums": 1, "weights": 1}


@pytest.mark.slow
@pytest.mark.parametrize("work", COUNTS)
def test_what_was_there_is_there_when_a_process_is_killed(tmp_path, work):
    assert check_deaths(tmp_path, work, seed=7, count=COUNTS[work])
