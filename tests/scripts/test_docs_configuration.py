import pytest

from scripts.docs_configuration import PAGE, page, sections

ROWS = [row for rows in sections().values() for row in rows]


def test_the_configuration_page_is_current() -> None:
    assert PAGE.read_text() == page(), "run `make docs`"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: ".".join(row.path))
def test_every_setting_says_what_it_means(row: object) -> None:
    assert getattr(row, "meaning", "").endswith(".")


def test_secrets_have_no_default_to_show() -> None:
    assert {row.default for row in ROWS if row.kind == "secret"} == {"empty"}
