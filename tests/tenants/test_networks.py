"""Where a request comes from, and whether that is where a key may be used."""

from typing import Any

import pytest

from gateway.errors import InvalidRequest
from gateway.settings import Server, Settings, SettingsError
from gateway.tenants.networks import NETWORKS_MAX, Sources, checked_networks, parse_address, within


def address(
    *forwarded: str, peer: str | None = "10.0.0.7", trusted: str = "10.0.0.0/8, fd00::/8"
) -> str:
    sources = Sources(Settings(server=Server(trusted_proxies=trusted)))
    scope: Any = {
        "client": None if peer is None else (peer, 1234),
        "headers": [(b"x-forwarded-for", line.encode("latin-1")) for line in forwarded],
    }
    return str(sources.address(scope))


def test_without_a_trusted_proxy_only_the_connection_counts() -> None:
    assert address("203.0.113.9", trusted="") == "10.0.0.7"
    assert address("203.0.113.9", peer="198.51.100.1") == "198.51.100.1"
    assert address("203.0.113.9", peer=None) == "None"


@pytest.mark.parametrize(
    ("forwarded", "found"),
    [
        (("203.0.113.9",), "203.0.113.9"),
        (("192.0.2.1, 203.0.113.9",), "203.0.113.9"),  # the left one is the client's own word
        (("192.0.2.1, 203.0.113.9, 10.0.0.5",), "203.0.113.9"),
        (("192.0.2.1", "203.0.113.9", "10.0.0.5,fd00::1"), "203.0.113.9"),
        (("10.0.0.3, 10.0.0.5",), "10.0.0.3"),
        (("203.0.113.9:4711",), "203.0.113.9"),
        (("[2001:db8::1]:4711, 10.0.0.5:80",), "2001:db8::1"),
        (("::ffff:203.0.113.9",), "203.0.113.9"),
        (("192.0.2.1, unknown",), "None"),
        (("192.0.2.1, \xff",), "None"),
        (("",), "10.0.0.7"),
        ((", ,",), "10.0.0.7"),
        ((), "10.0.0.7"),
        ((",".join(["10.0.0.1"] * 10_000) + "," + "10.0.0.2",), "10.0.0.1"),
    ],
)
def test_behind_trusted_proxies_the_last_hop_that_is_none_of_them_counts(
    forwarded: tuple[str, ...], found: str
) -> None:
    assert address(*forwarded) == found


def test_a_proxy_on_a_dual_stack_socket_is_trusted_by_its_ipv4_address() -> None:
    assert address("203.0.113.9", peer="::ffff:10.0.0.7") == "203.0.113.9"


@pytest.mark.parametrize("trusted", ["10.0.0.1/8", "proxy.internal", "10.0.0.0/8;10.0.0.0/8"])
def test_proxies_that_cannot_be_are_named_at_the_start(trusted: str) -> None:
    with pytest.raises(SettingsError, match=r"server\.trusted_proxies"):
        address(trusted=trusted)


def test_networks_are_kept_in_one_spelling_each() -> None:
    given = [" 10.0.0.0/8", "10.0.0.0/255.0.0.0", "203.0.113.7", "2001:DB8:0::/32"]
    assert checked_networks(given) == ["10.0.0.0/8", "2001:db8::/32", "203.0.113.7/32"]


@pytest.mark.parametrize(
    "given", [[], [""], ["10.0.0.1/8"], ["10.0.0.0/33"], ["x"], ["10.0.0.0/8"] * (NETWORKS_MAX + 1)]
)
def test_networks_that_cannot_be_are_refused(given: list[str]) -> None:
    with pytest.raises(InvalidRequest) as error:
        checked_networks(given)
    assert error.value.param == "allowed_networks"


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("10.255.0.1", True),
        ("11.0.0.1", False),
        ("2001:db8::5", True),
        ("fe80::1%eth0", False),
        ("::ffff:10.0.0.1", True),
        ("nowhere", False),
    ],
)
def test_an_address_is_within_a_network_or_not(text: str, inside: bool) -> None:
    assert within(parse_address(text), ["10.0.0.0/8", "2001:db8::/32"]) is inside
