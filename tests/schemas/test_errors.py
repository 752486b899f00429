import ast
import pickle
import re

import pytest
from builders import ROOT, tim_trace
from tim_trace.schemas.errors import ImportFailed, InvalidOption, TimTraceError, TraceNotFound


@pytest.mark.parametrize("kind", [InvalidOption, ImportFailed, TraceNotFound, TimTraceError])
def test_an_error_carries_the_option_that_is_at_fault(kind):
    error = kind("got 'hour'; use run", option="by")
    assert (error.option, error.message, str(error)) == ("by", "got 'hour'; use run", "by: got 'hour'; use run")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.option, str(again)) == (kind, "by", str(error))
    plain = kind("by: is a folder's name")
    assert (plain.option, plain.message, str(plain)) == (None, "by: is a folder's name", "by: is a folder's name")


def test_a_message_is_not_read_for_an_option(tmp_path):
    done = tim_trace("stats", "pair: none", cwd=tmp_path)
    assert done.code == 2
    assert done.stderr.startswith("Error: pair: none")


def test_no_message_of_an_invalid_option_spells_the_option_out():
    for folder in ("schemas", "tracer", "replay", "analysis"):
        for path in (ROOT / folder).rglob("*.py"):
            source = path.read_text()
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "InvalidOption":
                    text = ast.get_source_segment(source, node.args[0])
                    assert not re.match(r'f?"(?!report|record)[a-z_-]+: ', text), f"{path}:{node.lineno} {text}"
