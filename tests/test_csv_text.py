"""Rows as CSV."""

import csv
import io

import pytest

from gateway.csv_text import csv_lines


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r"])
def test_a_cell_of_an_export_is_never_a_formula(start: str) -> None:
    text = f'{start}HYPERLINK("x")'
    ((cell, number),) = csv.reader(io.StringIO(csv_lines([[text, -1]]), newline=""))
    assert cell == f"'{text}"
    assert number == "-1"
