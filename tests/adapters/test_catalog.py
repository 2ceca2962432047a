import asyncio

import pytest

from gateway.adapters import catalog
from gateway.adapters.allowance import Allowance
from gateway.adapters.tables import AdapterVersion
from gateway.errors import InvalidRequest, NotFound, RateLimited
from tests.adapters.world import World


async def test_a_placed_adapter_is_found_by_name_and_by_id(world: World) -> None:
    placed = await world.place(world.acme, "pirate")
    assert placed.changed
    assert placed.number == 1
    async with world.database.session() as session:
        for name in ("pirate", placed.adapter.id):
            found = await catalog.find(session, world.acme, name)
            assert found is not None
            assert found.id == placed.adapter.id
            assert found.version.targets == ["q_proj", "v_proj"]


async def test_l6_another_tenants_adapter_is_not_found(world: World) -> None:
    placed = await world.place(world.acme, "pirate")
    async with world.database.session() as session:
        for name in ("pirate", placed.adapter.id):
            assert await catalog.find(session, world.other, name) is None
        assert await catalog.list_of(session, world.other) == []
        with pytest.raises(NotFound):
            await catalog.remove(session, world.other, placed.adapter.id)


@pytest.mark.parametrize(
    "name", ["", "a\0b", "../x", "a/b", "a b", "ä", "x" * 65, ".", "-x", "' OR 1=1 --", "a\n"]
)
async def test_s3_what_cannot_be_a_name_is_not_even_looked_up(world: World, name: str) -> None:
    async with world.database.session() as session:
        assert await catalog.find(session, world.acme, name) is None
    with pytest.raises(InvalidRequest, match="cannot be used"):
        catalog.check_name(name, "base")


@pytest.mark.parametrize("name", ["a", "Pirate-2.1_x", "9" * 64])
def test_a_plain_name_is_accepted(name: str) -> None:
    catalog.check_name(name, "base")


def test_a_name_that_means_something_else_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="base model's"):
        catalog.check_name("SmolLM2", "smollm2")
    with pytest.raises(InvalidRequest, match="form of an id"):
        catalog.check_name("0190163d-8694-739b-aea5-966c26f8ad91", "base")


async def test_l5_the_same_content_again_changes_nothing(world: World) -> None:
    first = await world.place(world.acme, "pirate")
    second = await world.place(world.acme, "pirate")
    assert not second.changed
    assert second.adapter.id == first.adapter.id


async def test_a_name_moves_to_other_content(world: World) -> None:
    first = await world.place(world.acme, "pirate", seed=0)
    second = await world.place(world.acme, "pirate", seed=1)
    assert second.changed
    assert (first.number, second.number) == (1, 2)
    assert second.retired == ()
    assert second.adapter.id == first.adapter.id
    assert second.adapter.version_digest != first.adapter.version_digest


async def test_same_content_of_two_tenants_is_stored_once_and_kept_for_the_second(
    world: World,
) -> None:
    one = await world.place(world.acme, "pirate")
    two = await world.place(world.other, "buccaneer")
    digest = one.adapter.version_digest
    assert two.adapter.version_digest == digest
    await world.collect(await world.remove(world.acme, "pirate"))
    assert await world.digests() == {digest}
    assert world.store.has(digest)
    assert world.engine.unloads == []
    await world.collect(await world.remove(world.other, "buccaneer"))
    assert await world.digests() == set()
    assert not world.store.has(digest)
    assert world.engine.unloads == [digest]


async def test_collecting_twice_or_what_is_used_does_no_harm(world: World) -> None:
    digest = (await world.place(world.acme, "pirate")).adapter.version_digest
    await world.collect(digest)
    assert world.store.has(digest)
    await world.remove(world.acme, "pirate")
    await world.collect(digest)
    await world.collect(digest)
    assert await world.digests() == set()


async def test_r7_a_version_in_use_goes_when_its_last_request_ends(world: World) -> None:
    digest = (await world.place(world.acme, "pirate")).adapter.version_digest
    leased = catalog.leased(world.database, world.store, world.engine, world.acme, "pirate")
    async with leased as version:
        assert version is not None
        await world.collect(await world.remove(world.acme, "pirate"))
        assert world.store.has(digest)
        assert world.engine.unloads == []
    assert not world.store.has(digest)
    assert world.engine.unloads == [digest]


async def test_a_version_that_was_uploaded_again_while_it_was_retiring_stays(world: World) -> None:
    digest = (await world.place(world.acme, "pirate")).adapter.version_digest
    async with catalog.leased(world.database, world.store, world.engine, world.acme, "pirate"):
        await world.collect(await world.remove(world.acme, "pirate"))
        await world.place(world.acme, "pirate")
    assert world.store.has(digest)
    assert await world.digests() == {digest}


async def test_a_name_that_is_not_there_is_leased_as_nothing(world: World) -> None:
    leased = catalog.leased(world.database, world.store, world.engine, world.acme, "nobody")
    async with leased as version:
        assert version is None


async def test_f17_the_number_of_adapters_is_limited_but_not_their_replacement(
    world: World,
) -> None:
    await world.place(world.acme, "one", adapters_max=2)
    await world.place(world.acme, "two", adapters_max=2)
    with pytest.raises(RateLimited, match="2 adapters") as caught:
        await world.place(world.acme, "three", adapters_max=2)
    assert caught.value.code == "insufficient_quota"
    assert caught.value.headers() == {"x-should-retry": "false"}
    await world.place(world.acme, "two", seed=1, adapters_max=2)
    await world.place(world.other, "three", adapters_max=2)


async def test_f1_uploads_at_once_never_pass_the_limits_together(world: World) -> None:
    versions = await asyncio.to_thread(lambda: [world.stored(seed) for seed in range(6)])
    fields = ("digest", "size_bytes", "rank_max", "targets", "base_digest", "base_model")

    async def place(tenant: str, number: int, allowance: Allowance) -> bool:
        stored = versions[number]
        version = AdapterVersion(**{field: getattr(stored, field) for field in fields})
        try:
            async with world.database.session() as session:
                await catalog.place(session, tenant, f"name-{number}", version, allowance)
        except RateLimited:
            return False
        return True

    for tenant, allowance, room in (
        (world.acme, Allowance(adapters_max=2), 2),
        (world.other, Allowance(adapters_max=100, bytes_max=3 * versions[0].size_bytes), 3),
    ):
        placed = await asyncio.gather(*(place(tenant, number, allowance) for number in range(6)))
        assert sum(placed) == room


async def test_many_placing_and_collecting_the_same_content_lose_nothing(world: World) -> None:
    digest = (await asyncio.to_thread(world.stored, 0)).digest

    async def place_and_remove(number: int) -> None:
        await world.place(world.acme, f"name-{number}")
        if number % 2:
            await world.collect(await world.remove(world.acme, f"name-{number}"))

    async with catalog.lease(world.database, world.store, world.engine, digest):
        await asyncio.gather(*(place_and_remove(number) for number in range(8)))
    async with world.database.session() as session:
        names = [adapter.name for adapter in await catalog.list_of(session, world.acme)]
    assert sorted(names) == ["name-0", "name-2", "name-4", "name-6"]
    assert world.store.has(digest)
