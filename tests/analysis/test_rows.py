import csv
import io

from tim_trace.analysis.rows import Rows, to_csv, to_text


def test_a_table_lines_up_and_numbers_stand_right():
    text = to_text(Rows(("name", "value"), [("a", 1.5), ("bcd", None), ("e", 12)]))
    assert text.splitlines() == ["name  value", "----  -----", "a       1.5", "bcd", "e        12"]


def test_one_wide_row_is_a_list():
    text = to_text(Rows(tuple("abcdefghi"), [(1, 2, 3, 4, 5, 6, 7, 8, 0.123456789)]))
    assert text.splitlines()[-1] == "i  0.123457"


def test_a_table_wider_than_the_terminal_is_cut_into_blocks_that_repeat_the_first_columns():
    columns = ("run", "step", *(f"column{i}" for i in range(8)))
    text = to_text(Rows(columns, [("r", 1, *range(8)), ("r", 2, *range(8))]), width=40)
    blocks = text.split("\n\n")
    assert len(blocks) == 3
    assert all(line.startswith(("run", "---", "r ")) for block in blocks for line in block.splitlines())
    assert max(len(line) for line in text.splitlines()) <= 40
    assert all(f"column{i}" in text for i in range(8))


def test_a_table_without_rows_shows_its_columns():
    assert to_text(Rows(("a", "b"), [])) == "a  b\n-  -"


def test_text_of_several_lines_is_one_cell_of_csv():
    cells = ["two\nlines", "a\rb", 'a "b", c', ""]
    lines = "".join(f"{line}\n" for line in to_csv(Rows(("a", "b", "c", "d"), [tuple(cells)])))
    assert list(csv.reader(io.StringIO(lines, newline=""))) == [["a", "b", "c", "d"], cells]
