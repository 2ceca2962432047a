"""What crashes leave behind, and that it goes: each change is killed at each of its steps."""

import asyncio
import os
import signal
import traceback
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, select
from sqlalchemy.engine import URL, Engine
from sqlalchemy.ext.asyncio import AsyncSession

from gateway.adapters import catalog, janitor
from gateway.adapters.janitor import Janitor
from gateway.adapters.store import AdapterStore
from gateway.adapters.tables import AdapterVersion, NamedVersion
from gateway.db import Database
from tests.adapters.world import World, made

STEPS_MAX = 200


@pytest.fixture
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is too young to have been left behind."""
    monkeypatch.setattr(janitor, "LEFT_S", -1.0)


def sweeping(world: World) -> Janitor:
    return Janitor(world.database, world.store, world.engine)


async def test_a_folder_without_a_row_is_removed(world: World, no_patience: None) -> None:
    kept = (await world.place(world.acme, "pirate")).adapter.version_digest
    left = world.stored(1).digest
    assert await sweeping(world).sweep() == [left]
    assert not world.store.has(left)
    assert world.store.has(kept)
    assert world.engine.unloads == [left]
    assert await sweeping(world).sweep() == []


async def test_a_row_that_no_adapter_has_is_removed_with_its_folder(
    world: World, no_patience: None
) -> None:
    version = world.stored(1)
    digest = version.digest
    async with world.database.session() as session:
        session.add(version)
    await sweeping(world).sweep()
    assert await world.digests() == set()
    assert not world.store.has(digest)


async def test_what_was_put_there_lately_stays_as_it_may_be_another_process_upload(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = world.stored(1).digest
    assert await sweeping(world).sweep() == []
    assert world.store.has(digest)
    folder = Path(world.store.ref(digest).folder)
    os.utime(folder, (0, 0))
    world.stored(1)  # the same content comes again, and makes it young
    assert await sweeping(world).sweep() == []
    os.utime(folder, (0, 0))
    assert await sweeping(world).sweep() == [digest]


async def test_what_is_being_uploaded_stays(world: World, no_patience: None) -> None:
    digest = world.stored(1).digest
    async with catalog.lease(world.database, world.store, world.engine, digest):
        await sweeping(world).sweep()
        assert world.store.has(digest)
        await world.place(world.acme, "pirate", seed=1)
    assert world.store.has(digest)
    assert await sweeping(world).sweep() == []


async def test_versions_in_use_and_other_files_are_left_alone(
    world: World, no_patience: None
) -> None:
    for seed in range(3):
        await world.place(world.acme, "pirate", seed)
    await world.place(world.other, "mine", 0)
    folder = Path(world.store.ref("0" * 64).folder).parent.parent
    (folder / "ab").mkdir(exist_ok=True)
    (folder / "ab" / "notes").write_text("the operator's")
    draft = world.store.begin()
    assert await sweeping(world).sweep() == []
    assert len(await world.digests()) == 3
    assert draft.is_dir()
    assert (folder / "ab" / "notes").exists()


# --- killed at each step --------------------------------------------------------------------------


def killed_at(step: int, work: Callable[[], Awaitable[None]]) -> bool:
    """Do the work in a process of its own, killed before its `step`th statement, commit, rename or
    removal. False: it ended before."""
    child = os.fork()
    if child == 0:
        try:
            _count_down(step)
            asyncio.run(_awaited(work))
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), "the change failed by itself"
    return status != 0


async def _awaited(work: Callable[[], Awaitable[None]]) -> None:
    await work()


def _count_down(step: int) -> None:
    left = step

    def tick(*_: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    for name in ("before_cursor_execute", "commit"):
        event.listen(Engine, name, tick)
    for module, function in ((os, "fsync"), (os, "rename"), (os, "rmdir"), (os, "unlink")):
        original = getattr(module, function)

        def ticking(*arguments: Any, _original: Any = original, **options: Any) -> Any:
            tick()
            return _original(*arguments, **options)

        setattr(module, function, ticking)


def in_new_world(
    url: URL, folder: Path, tenants: Sequence[str], change: Callable[[World], Awaitable[None]]
) -> Callable[[], Awaitable[None]]:
    """The change, by a process that has just started."""

    async def work() -> None:
        database = Database(url)
        try:
            store = AdapterStore(folder)
            store.open()
            await change(World(database, store, *tenants))
        finally:
            await database.close()

    return work


async def upload(world: World) -> None:
    """As an upload does it, once its bytes have come."""
    version = world.stored(1)
    digest = version.digest
    async with catalog.lease(world.database, world.store, world.engine, digest):
        placed = await world.place(world.acme, "pirate", 1)
    for retired in placed.retired:
        await world.collect(retired)


async def flip(world: World) -> None:
    await world.alias(world.acme, "pirate", "prod", "v2")


async def delete_a_version(world: World) -> None:
    await world.remove_version(world.acme, "pirate", "v1")


async def delete(world: World) -> None:
    async with world.database.writing() as session:
        removed = await catalog.remove(session, world.acme, "pirate")
    for digest in removed.version_digests:
        await world.collect(digest)


@pytest.mark.parametrize(
    ("change", "seeds", "before", "after"),
    [
        (upload, (0,), {"pirate": 0}, {"pirate": 1, "pirate@1": 0}),
        (flip, (0, 1), {"pirate@prod": 0}, {"pirate@prod": 1}),
        (delete_a_version, (0, 1), {"pirate@1": 0, "pirate": 1}, {"pirate@1": None, "pirate": 1}),
        (delete, (0, 1), {"pirate": 1, "pirate@1": 0}, {"pirate": None, "pirate@1": None}),
    ],
)
async def test_a_change_that_is_killed_at_any_step_leaves_old_or_new_and_nothing_else(
    change: Callable[[World], Awaitable[None]],
    seeds: Sequence[int],
    before: dict[str, int],
    after: dict[str, int | None],
    database: Database,
    tmp_path: Path,
    no_patience: None,
) -> None:
    world = await made(database, tmp_path / "store")
    digests = [world.stored(seed).digest for seed in range(2)]
    tenants = (world.acme, world.other)
    seen = []
    for step in range(STEPS_MAX):
        for seed in seeds:
            await world.place(world.acme, "pirate", seed)
        if change is flip:
            await world.alias(world.acme, "pirate", "prod", "v1")
        await database.close()  # a forked process must not have its connections
        killed = await asyncio.to_thread(
            killed_at, step, in_new_world(database.engine.url, tmp_path / "store", tenants, change)
        )
        await sweeping(world).sweep()
        world.store.names.changed(world.acme)
        for outcome in (before, after):
            meant = {model: await world.meaning(world.acme, model) for model in outcome}
            got = {model: None if v is None else v.digest for model, v in meant.items()}
            if got == {m: None if n is None else digests[n] for m, n in outcome.items()}:
                seen.append(outcome is after)
                break
        else:
            pytest.fail(f"killed at step {step}, it left {got}")
        await check(world)
        async with database.writing() as session:
            names = [adapter.name for adapter in await catalog.list_of(session, world.acme)]
            for name in names:
                await catalog.remove(session, world.acme, name)
        if not killed:
            break
    assert not killed
    assert not seen[0]
    assert seen[-1]
    assert seen == sorted(seen), "once it has happened, it has"


async def check(world: World) -> None:
    """Each row has its folder and each folder its row, and every row is somebody's."""
    async with world.database.session() as session:
        rows = set(await session.scalars(select(AdapterVersion.digest)))
        named = {
            digest
            for adapter in await catalog.list_of(session, world.acme)
            for digest in (await _digests(session, adapter.id))
        }
    assert rows == named
    assert set(world.store.untouched(-1.0)) == rows


async def _digests(session: AsyncSession, adapter_id: str) -> list[str]:
    query = select(NamedVersion.version_digest).where(NamedVersion.adapter_id == adapter_id)
    return list(await session.scalars(query))
