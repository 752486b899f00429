import pytest
from tim_trace.schemas.errors import InvalidOption
from tim_trace.schemas.steps import parse_steps, select_steps


def test_steps_count_from_the_end_with_a_minus():
    recorded = [1, 2, 4, 8, 16]
    assert parse_steps("-1", recorded) == [16]
    assert parse_steps("-2:", recorded) == [8, 16]
    assert parse_steps("1,-2:", recorded) == [1, 8, 16]
    assert parse_steps(":-4", recorded) == [1, 2]
    assert parse_steps("-10:", recorded) == recorded
    assert select_steps("-10:", []) == []
    with pytest.raises(InvalidOption, match=r"matches no recorded step \(recorded: 1 to 16\)"):
        parse_steps("3", recorded)
