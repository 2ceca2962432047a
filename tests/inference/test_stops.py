import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.inference.stops import StopStrings


def first_stop(text: str, stops: tuple[str, ...]) -> str:
    """By the definition: character by character, up to where a stop string is complete."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))]
    return text


def in_pieces(text: str, stops: tuple[str, ...], cuts: list[int]) -> tuple[str, bool]:
    strings, out, start = StopStrings(stops), "", 0
    for end in [*sorted(cuts), len(text)]:
        out += strings.push(text[start:end])
        start = end
        if strings.found:
            return out, True
    return out + strings.flush(), strings.found


@given(
    st.text("ab", max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4),
    st.data(),
)
def test_the_cut_is_the_same_however_the_text_arrives(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=12))
    out, found = in_pieces(text, tuple(stops), cuts)
    assert out == first_stop(text, tuple(stops))
    assert found == any(stop in text for stop in stops)


def test_what_begins_a_stop_string_is_held_back_and_no_more() -> None:
    strings = StopStrings(("STOP",))
    assert strings.push("a ST") == "a "
    assert strings.push("A") == "STA"
    assert strings.push("S") == ""
    assert strings.flush() == "S"


@pytest.mark.parametrize("text", ["", "abc"])
def test_without_stop_strings_everything_passes(text: str) -> None:
    assert StopStrings(()).push(text) == text
