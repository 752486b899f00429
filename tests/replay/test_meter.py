from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tim_trace.replay.meter import FORWARD_TOKENS, Meter, work
from tim_trace.schemas.errors import InvalidOption
from tim_trace.schemas.steps import parse_steps, select_steps


def rows(*lengths):
    return [SimpleNamespace(prompt_ids=[0] * prompt, response_ids=[0] * response) for prompt, response in lengths]


@given(st.lists(st.floats(0, 0.4), max_size=20), st.integers(0, 10_000))
def test_a_step_tells_all_of_its_work_and_no_more(shares, total):
    told = []
    meter = Meter(told.append, total)
    for share in shares:
        meter.add(share)
    assert sum(told) <= total
    assert sum(told) >= int(min(sum(shares), 1) * total) - 1
    meter.finish()
    assert sum(told) == total
    assert all(units > 0 for units in told)


def test_a_decode_counts_each_of_its_forwards():
    batch = rows((10, 30), (5, 20))
    assert work([batch], None) == FORWARD_TOKENS
    assert work([batch], 1) == 31 * FORWARD_TOKENS
    assert work([batch], 16) == 3 * FORWARD_TOKENS
    assert work([rows((200, 800))] * 4, None) == 4000


def test_steps_count_from_the_end_with_a_minus():
    recorded = [1, 2, 4, 8, 16]
    assert parse_steps("-1", recorded) == [16]
    assert parse_steps("-2:", recorded) == [8, 16]
    assert parse_steps("1,-2:", recorded) == [1, 8, 16]
    assert parse_steps(":-4", recorded) == [1, 2]
    assert parse_steps("-10:", recorded) == recorded
    assert select_steps("-10:", []) == []
    with pytest.raises(InvalidOption, match="matches no recorded step; recorded: 1 to 16"):
        parse_steps("3", recorded)
