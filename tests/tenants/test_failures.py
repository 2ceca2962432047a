"""Guessing is slowed source by source, and nobody else is."""

from contextlib import suppress
from ipaddress import ip_address

import pytest

from gateway.errors import RateLimited
from gateway.tenants import failures
from gateway.tenants.failures import AT_ONCE, Failures
from tests.tenants.test_auth import Clock

HERE, THERE = ip_address("192.0.2.1"), ip_address("192.0.2.2")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def counted(clock: Clock) -> Failures:
    return Failures(clock)


def test_so_many_at_once_and_then_one_a_second(counted: Failures, clock: Clock) -> None:
    for _ in range(AT_ONCE):
        counted.check(HERE)
        counted.note(HERE)
    passed = 0
    for _ in range(100):  # ten seconds
        with suppress(RateLimited):
            counted.check(HERE)
            counted.note(HERE)
            passed += 1
        clock.seconds += 0.1
    assert passed in (9, 10)
    counted.check(THERE)
    counted.check(None)


def test_a_source_that_stops_is_let_in_again(counted: Failures, clock: Clock) -> None:
    for _ in range(2 * AT_ONCE):
        counted.note(HERE)
    with pytest.raises(RateLimited) as error:
        counted.check(HERE)
    wait_s = int(error.value.headers()["retry-after"])
    clock.seconds += wait_s - 0.5
    with pytest.raises(RateLimited):
        counted.check(HERE)
    clock.seconds += 0.6
    counted.check(HERE)


def test_what_came_at_once_is_waited_for_and_no_longer_than_a_minute(counted: Failures) -> None:
    """Many that were under way together have all passed the check."""
    for _ in range(50 * AT_ONCE):
        counted.note(HERE)
    with pytest.raises(RateLimited) as error:
        counted.check(HERE)
    assert int(error.value.headers()["retry-after"]) <= 60


def test_one_who_has_a_whole_ipv6_network_is_one_source(counted: Failures) -> None:
    for number in range(AT_ONCE):
        counted.note(ip_address(f"2001:db8:0:1::{number:x}"))
    with pytest.raises(RateLimited):
        counted.check(ip_address("2001:db8:0:1:ffff::1"))
    counted.check(ip_address("2001:db8:0:2::1"))


def test_many_sources_cannot_fill_the_memory(
    counted: Failures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "SOURCES_MAX", 5)
    for number in range(20):
        counted.note(ip_address(number))
    assert len(counted._counted) == 5
