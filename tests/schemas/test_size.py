import pytest
from tim_trace.schemas.errors import InvalidOption
from tim_trace.schemas.size import parse_size


@pytest.mark.parametrize(
    ("text", "size"), [("500MB", 500_000_000), ("1.5 GB", 1_500_000_000), ("12", 12), ("3k", 3000), ("7B", 7)]
)
def test_a_size_is_read(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MB", "a lot", "-1GB", "1PB"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(InvalidOption, match=r"e\.g\. 500MB"):
        parse_size(text)
