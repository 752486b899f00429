import pytest
from tim_trace.schemas.errors import InvalidRecord
from tim_trace.schemas.passes import check_pass, check_pass_name


def test_standard_passes_replays_and_declared_ones_are_known():
    for name in ("rollout", "train", "current", "reference", "replay/fp16", "replay/bs=1"):
        assert check_pass(name) == name
    assert check_pass("teacher", {"teacher"}) == "teacher"


def test_an_unknown_pass_names_the_known_ones_and_the_way_to_add_it():
    with pytest.raises(
        InvalidRecord,
        match=r"'trian' is unknown; did you mean 'train'\? Use one of rollout, train.*add_contract\('trian'",
    ):
        check_pass("trian")


@pytest.mark.parametrize("name", ["", "/", "replay/", "../x", "a b", "a//b"])
def test_a_name_that_could_leave_its_folder_is_refused(name):
    with pytest.raises(InvalidRecord):
        check_pass_name(name)
