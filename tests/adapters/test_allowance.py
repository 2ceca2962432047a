"""What a tenant may store, by number and by bytes, however many uploads come at once."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gateway.db import Database, async_url
from gateway.tenants import directory
from gateway.tenants.announcements import ALONE_S
from gateway.tenants.limits.rows import change_limits, tenant_owner
from tests.adapters.conftest import Site
from tests.adapters.making import tensors, weights
from tests.live import error_of


@contextmanager
def limited(site: Site, **limits: int) -> Iterator[None]:
    """The tenant's limits, as soon as its keys are asked for again."""

    async def put(changes: dict[str, Any]) -> None:
        settings = site.live.settings
        database = Database(async_url(settings.database.url.reveal(), settings.data_dir))
        async with database.writing() as session:
            tenant = await directory.tenant_by_slug(session, site.tenant)
            await change_limits(session, tenant_owner(tenant.id), changes)
        await database.close()
        await asyncio.sleep(ALONE_S + 0.05)

    asyncio.run(put(dict(limits)))
    try:
        yield
    finally:
        asyncio.run(put(dict.fromkeys(limits)))


def test_the_tenants_own_number_of_adapters_holds_below_the_servers(site: Site) -> None:
    with limited(site, adapters_max=1):
        assert site.upload("one").status_code == 201
        response = site.upload("two")
        assert error_of(response, 429)["code"] == "insufficient_quota"
        assert response.headers["x-should-retry"] == "false"
        assert site.upload("one", file=weights(tensors(seed=1))).status_code == 201
    with limited(site, adapters_max=0):
        assert error_of(site.upload("three"), 429)["param"] == "name"


def test_the_bytes_of_all_adapters_together_are_limited(site: Site) -> None:
    size = site.upload("one").json()["size_bytes"]
    with limited(site, adapter_bytes_max=2 * size):
        assert site.upload("two", file=weights(tensors(seed=1))).status_code == 201
        site.engine.submits.clear()
        response = site.upload("three", file=weights(tensors(seed=2)))
        error = error_of(response, 429)
        assert (error["code"], error["param"]) == ("insufficient_quota", "weights")
        assert site.engine.submits == [], "no engine tries what can't be kept"
        # in the place of another there is room
        assert site.upload("two", file=weights(tensors(seed=3))).status_code == 201
        # and a name that has this content already takes none
        assert site.upload("two", file=weights(tensors(seed=3))).status_code == 200
    assert site.names() == ["one", "two"]
