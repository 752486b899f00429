import csv
import io

import pytest
from tim_trace.analysis.rows import Rows, to_csv, to_text
from tim_trace.schemas.errors import ColumnsLeftOut


def test_a_table_lines_up_and_numbers_stand_right():
    text = to_text(Rows(("name", "value"), [("a", 1.5), ("bcd", None), ("e", 12)]))
    assert text.splitlines() == ["name  value", "----  -----", "a       1.5", "bcd", "e        12"]


def test_one_wide_row_is_a_list():
    text = to_text(Rows(tuple("abcdefghi"), [(1, 2, 3, 4, 5, 6, 7, 8, 0.123456789)]))
    assert text.splitlines()[-1] == "i  0.123457"


def wide(num_rows, columns=(*"abcdefghijkl",)):
    return Rows(
        ("run", "step", *columns), [("demo", step, *(0.123456789 * step for _ in columns)) for step in range(num_rows)]
    )


@pytest.mark.parametrize("width", [20, 40, 80, 120])
def test_a_wide_table_has_a_line_a_row_and_keeps_its_main_columns(width):
    with pytest.warns(ColumnsLeftOut, match=r"of 14 columns left out \(") as warned:
        lines = to_text(wide(100), width, main=("step", "l", "k")).splitlines()
    assert len(lines) == 102
    assert max(map(len, lines)) <= width
    assert lines[0].split()[0] == "step"
    assert lines[0].split()[-1] == "l"
    assert "run" in str(warned[0].message) or width < 80
    assert lines[2 + 99].split()[-1] == "12.2222"


def test_a_table_that_fits_has_all_columns_and_no_warning():
    assert to_text(wide(100), 300) == to_text(wide(100))


def test_numbers_are_never_cut_and_the_last_text_is():
    rows = Rows(("value", "how"), [(1.23456789e-10, "a long reason " * 5)] * 6)
    with pytest.warns(ColumnsLeftOut, match="values in how truncated"):
        lines = to_text(rows, 40).splitlines()
    assert lines[-1] == "1.23457e-10  a long reason a long reaso~"


def test_a_long_name_has_several_lines_so_that_the_values_decide_the_width():
    columns = ("rollout_corr/training_log_ppl", "rollout_corr/rollout_log_ppl", "training/rollout_probs_diff_mean")
    lines = to_text(Rows(columns, [(1.5, 2.5, 3.5)] * 6), 60).splitlines()
    assert [line.split() for line in lines[:3]] == [
        ["rollout_", "rollout_", "training/"], ["corr/", "corr/", "rollout_"], ["training_", "rollout_log_", "probs_diff_"],
    ]  # fmt: skip
    assert lines[-1].split() == ["1.5", "2.5", "3.5"]


def test_a_few_rows_that_do_not_fit_stand_side_by_side_as_lists():
    lines = to_text(wide(2), 40).splitlines()
    assert lines[0].split() == ["run", "demo", "demo"]
    assert lines[-1].split() == ["l", "0", "0.123457"]


def test_text_of_two_columns_a_character_lines_up():
    lines = to_text(Rows(("token", "n"), [("\u8a13\u7df4", 1), ("ab", 22)])).splitlines()
    assert lines[2:] == ["\u8a13\u7df4    1", "ab     22"]


def test_a_table_without_rows_shows_its_columns():
    assert to_text(Rows(("a", "b"), [])) == "a  b\n-  -"


def test_text_of_several_lines_is_one_cell_of_csv():
    cells = ["two\nlines", "a\rb", 'a "b", c', ""]
    lines = "".join(f"{line}\n" for line in to_csv(Rows(("a", "b", "c", "d"), [tuple(cells)])))
    assert list(csv.reader(io.StringIO(lines, newline=""))) == [["a", "b", "c", "d"], cells]
