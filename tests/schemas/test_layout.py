from tim_trace.schemas.layout import Segment


def test_a_segment_reads_back_from_its_name():
    segment = Segment("r0-p12-3f9a", 7)
    assert Segment.parse(segment.name) == segment
    assert segment.name == "r0-p12-3f9a-000007"


def test_another_name_is_no_segment():
    for name in ("", "README", "r0-p12-3f9a", "r0-7", "../r0-000001"):
        assert Segment.parse(name) is None
