"""Versions and aliases in the catalogue, on both databases."""

import asyncio
import hashlib
import math
from collections import Counter

import pytest

from gateway.adapters import aliases, catalog, versions
from gateway.adapters.names import Meaning, Version
from gateway.adapters.versions import VERSIONS_MAX
from gateway.errors import Conflict, InvalidRequest, NotFound, RateLimited
from tests.adapters.world import World


async def placed(world: World, count: int, name: str = "pirate") -> list[str]:
    """Digests of so many versions of acme's name."""
    return [
        (await world.place(world.acme, name, seed)).adapter.version_digest for seed in range(count)
    ]


async def digest_of(world: World, model: str, client: str = "") -> str | None:
    version = await world.meaning(world.acme, model, client)
    return None if version is None else version.digest


async def test_each_upload_of_other_content_is_a_new_version_and_the_name_moves(
    world: World,
) -> None:
    one, two = await placed(world, 2)
    assert await world.numbers(world.acme, "pirate") == [2, 1]
    for model in ("pirate", "pirate@latest", "pirate@2", "pirate@v2", f"pirate@{two[:8]}"):
        assert await digest_of(world, model) == two
    for model in ("pirate@1", "pirate@v1", f"pirate@{one}", f"pirate@{one[:8]}"):
        assert await digest_of(world, model) == one


async def test_the_same_content_again_is_the_same_version_and_the_name_moves_back(
    world: World,
) -> None:
    one, _ = await placed(world, 2)
    again = await world.place(world.acme, "pirate", seed=0)
    assert (again.number, again.changed) == (1, True)
    assert await digest_of(world, "pirate") == one
    assert await world.numbers(world.acme, "pirate") == [2, 1]
    assert (await world.place(world.acme, "pirate", seed=2)).number == 3


async def test_an_id_takes_aliases_and_versions_too(world: World) -> None:
    adapter = (await world.place(world.acme, "pirate")).adapter
    await world.alias(world.acme, "pirate", "prod", "v1")
    for label in ("", "@prod", "@1"):
        assert await digest_of(world, adapter.id + label) == adapter.version_digest


@pytest.mark.parametrize("label", ["prod", "3", "v9", "default", "00000000", "", "a b", "' OR 1"])
async def test_what_the_name_does_not_have_means_nothing(world: World, label: str) -> None:
    await placed(world, 2)
    assert await digest_of(world, f"pirate@{label}") is None


async def test_l6_another_tenants_aliases_and_versions_mean_nothing(world: World) -> None:
    (digest,) = await placed(world, 1)
    await world.alias(world.acme, "pirate", "prod", "v1")
    for label in ("", "@prod", "@1", f"@{digest}", "@latest"):
        assert await world.meaning(world.other, f"pirate{label}") is None


async def test_the_default_alias_is_what_the_name_alone_means(world: World) -> None:
    one, two = await placed(world, 2)
    await world.alias(world.acme, "pirate", "default", "v1")
    assert await digest_of(world, "pirate") == await digest_of(world, "pirate@default") == one
    assert await digest_of(world, "pirate@latest") == two
    await world.place(world.acme, "pirate", seed=2)
    assert await digest_of(world, "pirate") == one


async def test_an_alias_moves_and_is_put_back(world: World) -> None:
    one, two = await placed(world, 2)
    for label, digest in (("v1", one), ("v2", two), (one[:10], one), ("latest", two)):
        await world.alias(world.acme, "pirate", "prod", label)
        assert await digest_of(world, "pirate@prod") == digest


async def test_a_version_that_something_means_cannot_be_deleted(world: World) -> None:
    one, two = await placed(world, 2)
    await placed(world, 3)
    await world.alias(world.acme, "pirate", "prod", "v1")
    await world.alias(world.acme, "pirate", "canary", "v1", "v2", newer=10)
    for label, said in (("v3", "`latest`"), ("v1", "`canary`, `prod`"), ("v2", "`canary`")):
        with pytest.raises(Conflict, match=said) as refused:
            await world.remove_version(world.acme, "pirate", label)
        assert refused.value.headers() == {"x-should-retry": "false"}
    assert {one, two} <= await world.digests()


async def test_a_deleted_version_leaves_engine_and_store_and_its_number_is_not_given_again(
    world: World,
) -> None:
    one, two, _ = await placed(world, 3)
    assert await world.remove_version(world.acme, "pirate", "v2") == two
    assert not world.store.has(two)
    assert world.store.has(one)
    assert world.engine.unloads == [two]
    assert await digest_of(world, "pirate@2") is None
    with pytest.raises(NotFound):
        await world.remove_version(world.acme, "pirate", "v2")
    assert (await world.place(world.acme, "pirate", seed=1)).number == 4


async def test_a_deleted_version_stays_for_the_other_tenant_that_has_it(world: World) -> None:
    one, _ = await placed(world, 2)
    await world.place(world.other, "mine", seed=0)
    await world.remove_version(world.acme, "pirate", "v1")
    assert world.store.has(one)
    assert world.engine.unloads == []
    await world.collect(await world.remove(world.other, "mine"))
    assert not world.store.has(one)
    assert world.engine.unloads == [one]


async def test_r7_a_deleted_version_drains_before_it_goes(world: World) -> None:
    one, _ = await placed(world, 2)
    leased = catalog.leased(world.database, world.store, world.engine, world.acme, "pirate@1")
    async with leased as version:
        assert version is not None
        await world.remove_version(world.acme, "pirate", "1")
        assert world.store.has(one)
        assert await digest_of(world, "pirate@1") is None
    assert not world.store.has(one)
    assert world.engine.unloads == [one]


async def test_the_oldest_version_that_nothing_means_makes_room(world: World) -> None:
    digests = await placed(world, VERSIONS_MAX)
    await world.alias(world.acme, "pirate", "prod", "v1")
    more = await world.place(world.acme, "pirate", seed=VERSIONS_MAX)
    assert more.retired == (digests[1],)
    kept = [VERSIONS_MAX + 1, *range(VERSIONS_MAX, 2, -1), 1]
    assert await world.numbers(world.acme, "pirate") == kept


async def test_versions_that_aliases_use_never_make_room(world: World) -> None:
    await placed(world, VERSIONS_MAX)
    for number in range(1, VERSIONS_MAX + 1):
        await world.alias(world.acme, "pirate", f"a{number}", f"v{number}")
    with pytest.raises(RateLimited, match="versions of 'pirate' that aliases use") as refused:
        await world.place(world.acme, "pirate", seed=VERSIONS_MAX)
    assert refused.value.code == "insufficient_quota"
    assert await world.numbers(world.acme, "pirate") == list(range(VERSIONS_MAX, 0, -1))


async def test_old_versions_go_before_an_upload_is_refused_for_its_bytes(world: World) -> None:
    size = (await world.place(world.acme, "pirate")).adapter.version.size_bytes
    room = 2 * size + size // 2
    assert (await world.place(world.acme, "pirate", 1, bytes_max=room)).retired == ()
    assert len((await world.place(world.acme, "pirate", 2, bytes_max=room)).retired) == 1
    assert await world.numbers(world.acme, "pirate") == [3, 2]
    await world.alias(world.acme, "pirate", "prod", "v2")
    await world.alias(world.acme, "pirate", "test", "v3")
    with pytest.raises(RateLimited, match="bytes"):
        await world.place(world.acme, "pirate", 3, bytes_max=room)
    # what it has already costs nothing
    assert (await world.place(world.acme, "pirate", 1, bytes_max=room)).number == 2


async def test_a_split_needs_two_versions_and_a_hundred_percent(world: World) -> None:
    await placed(world, 2)
    wrong: list[list[tuple[str, int]]] = [
        [("v1", 50), ("v1", 50)],
        [("v1", 50), ("1", 50)],
        [("v1", 90), ("v2", 9)],
        [("v1", 100), ("v2", 0)],
        [("v1", 101), ("v2", -1)],
        [("v1", 50)],
    ]
    for shares in wrong:
        with pytest.raises(InvalidRequest) as refused:
            await world.put(world.acme, "pirate", "prod", shares)
        assert refused.value.param == "split"
    assert await digest_of(world, "pirate@prod") is None


async def test_a_split_shares_the_clients_and_each_stays_where_it_is(world: World) -> None:
    one, two = await placed(world, 2)
    clients = [f"user {number}" for number in range(2000)]
    await world.alias(world.acme, "pirate", "prod", "v1", "v2", newer=30)
    first = {client: await digest_of(world, "pirate@prod", client) for client in clients}
    world.store.names.changed(world.acme)
    assert first == {client: await digest_of(world, "pirate@prod", client) for client in clients}
    got = Counter(first.values())
    sigma = math.sqrt(len(clients) * 0.3 * 0.7)
    assert abs(got[two] - len(clients) * 0.3) < 4 * sigma
    assert got[one] + got[two] == len(clients)


OLDER, NEWER = (Version("pirate", digest * 64, "", "") for digest in "12")


def test_whoever_has_the_newer_version_keeps_it_while_its_share_grows() -> None:
    clients = [str(number) for number in range(1000)]
    before: set[str] = set()
    for percent in (1, 10, 50, 99):
        split = Meaning(OLDER, NEWER, newer_percent=percent, salt="a")
        now = {client for client in clients if split.version_for(client) is NEWER}
        assert before < now
        before = now


def test_two_splits_share_the_clients_independently() -> None:
    def newer(salt: str) -> set[int]:
        split = Meaning(OLDER, NEWER, newer_percent=50, salt=salt)
        return {at for at in range(2000) if split.version_for(str(at)) is NEWER}

    assert 400 < len(newer("a") & newer("b")) < 600


def test_a_clients_place_is_the_documented_one() -> None:
    """SHA-256 of the alias and the client, so that it can be foreseen, in any process."""
    split = Meaning(OLDER, NEWER, newer_percent=37, salt="id@prod")
    for client in map(str, range(200)):
        is_newer = place_of("id@prod", client) < 37
        assert split.version_for(client) is (NEWER if is_newer else OLDER)


def place_of(salt: str, client: str) -> int:
    return int(hashlib.sha256(f"{salt}\0{client}".encode()).hexdigest()[:16], 16) % 100


async def test_flips_deletes_and_requests_at_once_never_miss(world: World) -> None:
    """Requests get one of the versions that the alias had, whose files are there while they run."""
    digests = set(await placed(world, 3))
    await world.alias(world.acme, "pirate", "prod", "v1")
    flipping = True

    async def flip() -> None:
        nonlocal flipping
        for number in range(12):
            await world.alias(world.acme, "pirate", "prod", f"v{number % 2 + 1}")
        flipping = False

    async def ask() -> int:
        asked = 0
        while flipping:
            leased = catalog.leased(
                world.database, world.store, world.engine, world.acme, "pirate@prod"
            )
            async with leased as version:
                assert version is not None
                assert version.digest in digests
                await asyncio.sleep(0.001)
                assert world.store.has(version.digest)
            asked += 1
        return asked

    asking = [asyncio.create_task(ask()) for _ in range(8)]
    await flip()
    assert min(await asyncio.gather(*asking)) > 0


async def test_a_version_is_deleted_once_by_many_at_once(world: World) -> None:
    await placed(world, 3)

    async def remove() -> bool:
        try:
            await world.remove_version(world.acme, "pirate", "v1")
        except NotFound:
            return False
        return True

    assert sum(await asyncio.gather(*(remove() for _ in range(4)))) == 1


async def test_an_alias_set_while_its_version_is_deleted_is_one_or_the_other(world: World) -> None:
    for seed in range(4):
        await placed(world, 2)
        number = (await world.place(world.acme, "pirate", seed=10 + seed)).number
        await world.place(world.acme, "pirate", seed=20 + seed)
        results = await asyncio.gather(
            world.alias(world.acme, "pirate", "prod", f"v{number}"),
            world.remove_version(world.acme, "pirate", f"v{number}"),
            return_exceptions=True,
        )
        failed = [result for result in results if isinstance(result, BaseException)]
        assert len(failed) == 1, results
        assert isinstance(failed[0], NotFound | Conflict)
        kept = number in await world.numbers(world.acme, "pirate")
        assert kept == isinstance(failed[0], Conflict)


async def test_the_versions_list_says_what_means_each(world: World) -> None:
    await placed(world, 3)
    await world.alias(world.acme, "pirate", "prod", "v1")
    await world.alias(world.acme, "pirate", "canary", "v3", "v1", newer=50)
    async with world.database.session() as session:
        adapter = await catalog.get(session, world.acme, "pirate", None)
        listed = await versions.list_of(session, adapter)
        named = await aliases.list_of(session, adapter)
    assert [(each.row.number, each.aliases) for each in listed] == [
        (3, ["canary", "latest"]),
        (2, []),
        (1, ["canary", "prod"]),
    ]
    shares = {alias.row.name: [(row.number, p) for row, p in alias.shares] for alias in named}
    assert shares == {"canary": [(1, 50), (3, 50)], "prod": [(1, 100)]}
