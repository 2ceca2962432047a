from collections.abc import AsyncIterator

import pytest

from gateway.tenants.limits.counters import Counters
from tests.tenants.limits.stores import Clock, Kind, store


@pytest.fixture(params=["local", "redis"])
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


@pytest.fixture
def store_url(kind: Kind, request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue("redis_url")) if kind == "redis" else ""


@pytest.fixture
async def counting(kind: Kind, store_url: str) -> AsyncIterator[tuple[Counters, Clock]]:
    async with store(kind, store_url) as found:
        yield found
