import pytest

from gateway.adapters.references import Reference, check_alias, is_version, number_in, parse
from gateway.errors import InvalidRequest


@pytest.mark.parametrize(
    ("model", "name", "label"),
    [
        ("pirate", "pirate", ""),
        ("pirate@prod", "pirate", "prod"),
        ("pirate@latest", "pirate", "latest"),
        ("pirate@3", "pirate", "3"),
        ("pirate@v3", "pirate", "v3"),
        ("pirate@0123abcd", "pirate", "0123abcd"),
    ],
)
def test_a_model_is_an_adapter_and_what_stands_behind_the_at(
    model: str, name: str, label: str
) -> None:
    assert parse(model) == Reference(name, label)


@pytest.mark.parametrize(
    "model", ["pirate@", "pirate@0", "pirate@a b", "pirate@prod@x", "pirate@%", "pirate@ä", "@@"]
)
def test_what_cannot_be_an_alias_or_a_version_means_nothing(model: str) -> None:
    assert parse(model) is None


def test_numbers_and_digests_are_versions_and_nothing_else_is() -> None:
    assert [number_in(label) for label in ("1", "v12", "V9", "01", "v", "1.0", "12345678")] == [
        1,
        12,
        9,
        None,
        None,
        None,
        None,
    ]
    assert is_version("12345678")  # the beginning of a digest
    assert is_version("f" * 64)
    assert not any(is_version(label) for label in ("abcdef", "F" * 8, "prod", "f" * 65, ""))


@pytest.mark.parametrize("alias", ["prod", "canary-2", "v1.0", "A", "default", "deadbee"])
def test_a_plain_alias_is_accepted(alias: str) -> None:
    check_alias(alias)


@pytest.mark.parametrize(
    "alias", ["latest", "v1", "V2", "3", "deadbeef", "", "a/b", "a@b", "-x", "a" * 65, "a\n", "é"]
)
def test_an_alias_that_means_something_else_is_refused(alias: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_alias(alias)
    assert refused.value.param == "alias"
