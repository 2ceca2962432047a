"""The engine as a child process: the border, its failures and its restarts."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.engine.client import EngineFailure
from gateway.engine.local import LocalEngine
from gateway.engine.messages import EngineSettings, Finished, Sampling, Submit, Tokens
from gateway.engine.process import ProcessEngine
from tests.engine.tiny import CONFIGS, save_model

GREEDY = Sampling(temperature=0)
Client = ProcessEngine | LocalEngine


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> EngineSettings:
    folder = tmp_path_factory.mktemp("model")
    save_model(CONFIGS["llama"], folder)
    return EngineSettings(model=str(folder), pool_mib=1, block_tokens=4, threads=1)


@contextlib.asynccontextmanager
async def running(engine: Client) -> AsyncIterator[Client]:
    await engine.start()
    try:
        await asyncio.wait_for(engine.wait_ready(), 60)
        yield engine
    finally:
        await engine.close()


async def collect(engine: Client, request: Submit) -> tuple[list[int], Finished]:
    tokens: list[int] = []
    async with engine.submit(request) as stream:
        async for event in stream:
            if isinstance(event, Finished):
                return tokens, event
            tokens += event.ids
    raise AssertionError("a stream ended without Finished")


async def until_running(engine: Client, count: int) -> None:
    for _ in range(1000):
        if (await engine.stats()).running >= count:
            return
    raise AssertionError(f"{count} requests never ran at once")


async def until_idle(engine: Client) -> None:
    """Cancels travel behind the streams; one query later they have arrived."""
    stats = await engine.stats()
    assert (stats.running, stats.waiting, stats.pages_free) == (0, 0, stats.pages_total)


def submit(name: str, length: int = 5, count: int = 20) -> Submit:
    return Submit(name, list(range(3, 3 + length)), count, GREEDY)


async def test_both_borders_give_the_same_answers_to_concurrent_requests(settings: EngineSettings):
    answers = []
    for kind in (LocalEngine, ProcessEngine):
        async with running(kind(settings)) as engine:
            requests = [submit(str(i), length=3 + i % 4) for i in range(40)]
            answers.append(await asyncio.gather(*(collect(engine, r) for r in requests)))
            await until_idle(engine)
    assert answers[0] == answers[1]
    assert all(end.completion_tokens == len(tokens) == 20 for tokens, end in answers[0])


async def test_a_child_that_was_started_ahead_is_the_one_that_serves(settings: EngineSettings):
    engine = ProcessEngine(settings)
    with engine.ahead():
        ahead = engine.pid
        async with running(engine):
            assert (engine.pid, engine.starts) == (ahead, 1)
            assert (await collect(engine, submit("a")))[1].completion_tokens == 20


async def test_of_a_child_that_was_started_in_vain_nothing_is_left(settings: EngineSettings):
    engine = ProcessEngine(settings)
    with engine.ahead():
        child, folder = engine._child, engine._folder
    assert child is not None
    assert folder is not None
    assert await asyncio.wait_for(child.wait(), 10) == -signal.SIGKILL
    assert not folder.exists()


async def test_leaving_a_stream_early_frees_its_pages(settings: EngineSettings):
    async with running(ProcessEngine(settings)) as engine:
        async with engine.submit(submit("a", count=500)) as stream:
            assert isinstance(await anext(stream), Tokens)
            assert (await engine.stats()).running == 1
        await until_idle(engine)


async def test_a_cancelled_task_frees_its_pages(settings: EngineSettings):
    async with running(ProcessEngine(settings)) as engine:
        task = asyncio.create_task(collect(engine, submit("a", count=500)))
        await until_running(engine, 1)
        task.cancel()
        await asyncio.wait([task])
        await until_idle(engine)


async def test_a_killed_worker_fails_what_runs_and_is_replaced(settings: EngineSettings):
    async with running(ProcessEngine(settings)) as engine:
        assert isinstance(engine, ProcessEngine)
        before = await collect(engine, submit("before"))
        streams = [
            asyncio.create_task(collect(engine, submit(str(i), count=500))) for i in range(3)
        ]
        await until_running(engine, 3)
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        for stream in streams:
            with pytest.raises(EngineFailure) as failure:
                await asyncio.wait_for(stream, 10)
            assert failure.value.code == "engine_lost"
        with pytest.raises(EngineFailure, match="loading its model"):
            await engine.stats()
        await asyncio.wait_for(engine.wait_ready(), 60)
        assert await collect(engine, submit("before")) == before
        assert engine.starts == 2


@pytest.mark.parametrize("kind", [LocalEngine, ProcessEngine])
async def test_a_model_that_is_not_there_is_said_and_not_retried(
    kind: type[Client], tmp_path: Path
):
    engine = kind(EngineSettings(model=str(tmp_path / "nothing")))
    await engine.start()
    with pytest.raises(EngineFailure, match="nothing"):
        await asyncio.wait_for(engine.wait_ready(), 60)
    with pytest.raises(EngineFailure, match="nothing"):
        await engine.stats()
    await engine.close()
    if isinstance(engine, ProcessEngine):
        assert engine.starts == 1


async def test_requests_that_meet_a_dying_worker_are_told_so(settings: EngineSettings):
    """From its death on nobody waits for it, and nobody is cancelled in its stead."""
    async with running(ProcessEngine(settings)) as engine:
        assert isinstance(engine, ProcessEngine)
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        outcomes = []
        for index in range(200):
            try:
                await asyncio.wait_for(collect(engine, submit(str(index), count=1)), 10)
            except EngineFailure as failure:
                outcomes.append(failure.code)
            await asyncio.sleep(0.001)
        assert set(outcomes) == {"engine_lost"}
        assert engine._mailbox.in_flight == 0


async def test_a_worker_that_hangs_is_replaced(settings: EngineSettings):
    engine = ProcessEngine(settings, silence_s_max=0.5)
    async with running(engine):
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGSTOP)
        with pytest.raises(EngineFailure) as failure:
            await asyncio.wait_for(collect(engine, submit("a")), 20)
        assert failure.value.code == "engine_lost"
        await asyncio.wait_for(engine.wait_ready(), 60)
        assert (await collect(engine, submit("a")))[1].completion_tokens == 20


async def test_a_worker_that_keeps_dying_while_it_loads_is_given_up(
    settings: EngineSettings, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    engine = ProcessEngine(settings)
    await engine.start()
    with pytest.raises(EngineFailure, match="ended 3 times while loading"):
        await asyncio.wait_for(engine.wait_ready(), 60)
    await engine.close()


async def test_the_worker_ends_with_its_parent(settings: EngineSettings):
    """A gateway that is killed leaves no engine behind: its end of stdin closes."""
    engine = ProcessEngine(settings)
    async with running(engine):
        child = engine._child
        assert child is not None
        child.stdin.close()
        assert await asyncio.wait_for(child.wait(), 10) == 0


async def test_nothing_is_left_after_close(settings: EngineSettings):
    engine = ProcessEngine(settings)
    async with running(engine):
        pid = engine.pid
        folder = engine._folder
        assert folder is not None
        assert folder.stat().st_mode & 0o077 == 0
    assert pid is not None
    assert not folder.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_worker_at_rest_holds_weights_and_pool_and_little_more(base_model: Path):
    """Beside the base model's 135 million weights and the pool; what loading took is given back."""
    pool_mib, weights_mib, rest_mib = 64, 135 * 4, 480
    engine = ProcessEngine(
        EngineSettings(model=str(base_model), dtype="float32", pool_mib=pool_mib)
    )
    async with running(engine):
        rollup = await asyncio.to_thread(Path(f"/proc/{engine.pid}/smaps_rollup").read_text)
    (pss_kib,) = [int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")]
    assert pss_kib / 1024 < weights_mib + pool_mib + rest_mib
