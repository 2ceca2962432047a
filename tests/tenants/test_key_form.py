import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.telemetry import redact
from gateway.tenants import key_form


def test_a_key_has_the_form_that_scanners_look_for() -> None:
    made = key_form.make()
    text = made.text.reveal()
    prefix, kind, public, rest = text.split("_")
    assert (prefix, kind, public) == ("lg", "sk", made.public_id)
    assert len(public) == 10
    assert len(rest) == 43 + 6
    assert rest.isalnum()
    assert made.last4 == text[-4:]
    assert key_form.public_id(text) == made.public_id


@pytest.mark.parametrize(
    ("kind", "environment", "prefix"),
    [
        ("sk", "", "lg_sk_"),
        ("admin", "", "lg_admin_"),
        ("sk", "test", "lg_test_sk_"),
        ("admin", "eu1", "lg_eu1_admin_"),
        ("sk", "z" * 12, f"lg_{'z' * 12}_sk_"),
    ],
)
def test_the_prefix_names_environment_and_kind(
    kind: key_form.Kind, environment: str, prefix: str
) -> None:
    made = key_form.make(kind, environment)
    text = made.text.reveal()
    assert made.prefix == prefix
    assert text.startswith(f"{prefix}{made.public_id}_")
    assert key_form.public_id(text) == made.public_id
    assert key_form.is_admin(text) is (kind == "admin")
    assert redact(f"it is {text}!") == f"it is {prefix}{made.public_id}…!"
    other = text.replace("_sk_", "_admin_") if kind == "sk" else text.replace("_admin_", "_sk_")
    assert key_form.public_id(other) is None, "the checksum covers the kind"


def test_the_checksum_is_base62_of_crc32_of_all_before_it() -> None:
    body = key_form.make().text.reveal()[:-6]
    number = 0
    for character in key_form.checksum(body):
        number = number * 62 + key_form.ALPHABET.index(character)
    assert number == zlib.crc32(body.encode())


def test_keys_differ_in_both_parts() -> None:
    keys = [key_form.make() for _ in range(200)]
    assert len({key.public_id for key in keys}) == 200
    assert len({key.text.reveal()[17:60] for key in keys}) == 200


def test_every_single_typo_is_found_without_the_database() -> None:
    text = key_form.make().text.reveal()
    for place in range(len(text)):
        for other in ("0", "z", "é", " "):
            if text[place] != other:
                assert key_form.public_id(text[:place] + other + text[place + 1 :]) is None


def test_two_characters_swapped_are_found() -> None:
    text = key_form.make().text.reveal()
    for a in range(len(text) - 1):
        if text[a] != text[a + 1]:
            swapped = text[:a] + text[a + 1] + text[a] + text[a + 2 :]
            assert key_form.public_id(swapped) is None


@given(st.text())
def test_any_other_text_is_no_key(text: str) -> None:
    assert key_form.public_id(text) is None
    assert key_form.public_id("lg_sk_" + text) is None


@pytest.mark.parametrize("wrap", ["{}\n", " {}", "{}{}", '"{}"', "{}\x00"])
def test_a_key_with_anything_around_it_is_no_key(wrap: str) -> None:
    text = key_form.make().text.reveal()
    assert key_form.public_id(wrap.replace("{}", text)) is None


def test_f13_a_new_key_shows_in_no_text_form() -> None:
    made = key_form.make()
    assert made.text.reveal() not in f"{made} {made!r}"
