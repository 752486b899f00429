import pytest
from tim_trace.schemas.capture import Capture
from tim_trace.schemas.errors import InvalidOption


def test_levels_read_back_as_they_are_written():
    for text in ("logprobs", "topk:20", "logits"):
        assert str(Capture.parse(text)) == text


@pytest.mark.parametrize("text", ["topk", "topk:0", "topk:x", "logits:3", "all", ""])
def test_another_level_is_refused_with_the_way_to_write_it(text):
    with pytest.raises(InvalidOption, match="topk:"):
        Capture.parse(text)


@pytest.mark.parametrize("fraction", [-0.1, 1.1])
def test_a_fraction_outside_of_0_to_1_is_refused(fraction):
    with pytest.raises(InvalidOption, match="between 0 and 1"):
        Capture.parse("logits", fraction)


def test_the_choice_depends_on_nothing_but_step_and_name():
    capture = Capture.parse("logits", 0.3)
    chosen = [capture.selects(step, f"s{i}") for step in range(20) for i in range(50)]
    assert chosen == [capture.selects(step, f"s{i}") for step in range(20) for i in range(50)]
    # 1,000 draws of 0.3: five standard deviations are 73.
    assert 227 < sum(chosen) < 373


def test_a_larger_fraction_keeps_what_a_smaller_one_kept():
    few, many = Capture.parse("logits", 0.2), Capture.parse("logits", 0.6)
    assert all(many.selects(1, f"s{i}") for i in range(200) if few.selects(1, f"s{i}"))


def test_fraction_1_keeps_all_and_0_none():
    assert all(Capture.parse("topk:1").selects(1, f"s{i}") for i in range(200))
    assert not any(Capture.parse("topk:1", 0.0).selects(1, f"s{i}") for i in range(200))
    assert not Capture.parse("logprobs").selects(1, "s")
