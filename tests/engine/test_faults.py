"""Whatever goes wrong around it, the engine keeps its promises: random arrivals, cancels, unloads,
failing and hanging stores over tiny pools, and after every step nothing is lost or leaked."""

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.engine.engine import Engine
from gateway.engine.loop import serve
from gateway.engine.memory.buffer import Slab
from gateway.engine.messages import (
    AdapterRef,
    Cancel,
    Command,
    Events,
    Failed,
    Finished,
    Pin,
    Shutdown,
    Submit,
    Unload,
    Unpin,
)
from tests.engine.scheduling.simulation import NoForesight
from tests.engine.world import ADAPTERS, GREEDY, Driver, World, prompt


class Store(Executor):
    """Stands between the engine and its adapters' files, in place of the reading threads: reads
    at once, or fails, or hangs, when told to."""

    def __init__(self, engine: Engine) -> None:
        self._read: Callable[[AdapterRef], Slab] = engine.pager._reader._read
        engine.pager._reader._read = self.read
        engine.pager._reader._threads.shutdown()
        engine.pager._reader._threads = self  # type: ignore[assignment]
        self.reads: list[str] = []
        self.broken: set[str] = set()
        self.hanging: set[str] = set()
        self._held: list[Callable[[], None]] = []

    def read(self, ref: AdapterRef) -> Slab:
        self.reads.append(ref.digest)
        if ref.digest in self.broken:
            raise OSError("the disk is gone")
        return self._read(ref)

    def submit(self, read: Callable[..., Slab], /, ref: AdapterRef) -> Future[Slab]:  # type: ignore[override]
        future: Future[Slab] = Future()

        def run() -> None:
            try:
                future.set_result(read(ref))
            except OSError as error:
                future.set_exception(error)

        if ref.digest in self.hanging:
            self._held.append(run)
        else:
            run()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        pass

    def release(self) -> None:
        self.hanging.clear()
        held, self._held = self._held, []
        for run in held:
            run()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def running(world: World, pages: int, **options: Any) -> Iterator[tuple[Driver, Store, Clock]]:
    clock = Clock()
    engine = world.engine(pages, clock, **options)
    store = Store(engine)
    yield Driver(engine), store, clock
    engine.close()


def settle(driver: Driver) -> None:
    """All is over, and the memory is as it should be."""
    engine = driver.engine
    driver.finish()
    for _ in range(50):  # what is left of unloaded versions goes in bounded steps
        driver.step()
        engine.step()
    driver.check()
    assert engine.stats("").pages_kv == 0
    assert not engine.pager.wanted
    assert engine.radix.locked_pages == 0
    pinned = engine.pager.pinned_pages(None)
    assert engine.pager.held_pages == pinned
    engine.scheduler._memory.supply.secure(engine.pool.total - pinned, "kv")
    driver.check()
    assert engine.pool.free == engine.pool.total - pinned


def ref(world: World, index: int) -> AdapterRef:
    found = world.refs[index]
    assert found is not None
    return found


def random_actions(chance: random.Random) -> Iterator[tuple[Any, ...]]:
    """Most of them arrivals and steps, or little would be there to go wrong."""
    for _ in range(chance.randint(20, 60)):
        adapter = chance.randint(1, len(ADAPTERS))
        yield chance.choice(
            [
                *[
                    (
                        "submit",
                        chance.choice([0, 0, 1, 1, 1, adapter]),
                        chance.choice([1, 3, 4, 9, 16, 25]),  # length of the prompt
                        chance.randint(1, 20),  # tokens to generate
                        chance.choice(["t1", "t1", "t2"]),
                        chance.choice([None, None, 0.5, 100.0]),  # deadline
                    )
                ]
                * 8,
                *[("step", chance.randint(1, 8))] * 6,
                ("cancel", chance.randint(0, 30)),
                ("unload", adapter),
                ("break", adapter),
                ("mend",),
                ("hang", adapter),
                ("release",),
                ("time", chance.choice([0.1, 1.0, 61.0])),
                ("pin", adapter),
                ("unpin", adapter),
            ]
        )


@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    seed=st.integers(0, 2**32),
    pages=st.sampled_from([24, 60, 200]),
    step_tokens=st.sampled_from([8, 32]),
    host_mib=st.sampled_from([0, 64]),
    cached=st.booleans(),
    foreseen=st.booleans(),
)
def test_r2_r10_no_order_of_arrivals_cancels_unloads_and_faults_breaks_a_promise(
    world: World,
    seed: int,
    pages: int,
    step_tokens: int,
    host_mib: int,
    cached: bool,
    foreseen: bool,
):
    """R1, R4, R6, R7, M1, M4, too: each request ends exactly once; greedy answers are PEFT's;
    only requests for a version that failed or fits no pool are told so; nothing is left over."""
    options = {"step_tokens": step_tokens, "host_adapters_mib": host_mib}
    with running(world, pages, **options) as (driver, store, clock):
        engine = driver.engine
        if not foreseen:  # so that they push each other out
            engine.scheduler._admission._lengths = NoForesight()
        requests: dict[str, Submit] = {}
        cancelled = set()
        troubled = set()
        for action, *arguments in random_actions(random.Random(seed)):
            match action:
                case "submit":
                    adapter, length, count, tenant, first_token_s = arguments
                    request = Submit(
                        f"r{len(requests)}",
                        prompt(0, length),  # all are prefixes of the longest
                        count,
                        GREEDY,
                        world.refs[adapter],
                        fairness_key=tenant,
                        cache_namespace=tenant if cached else None,
                        first_token_s=first_token_s,
                    )
                    requests[request.request_id] = request
                    driver.submit(request)
                case "step":
                    for _ in range(arguments[0]):
                        driver.step()
                        clock.now += 0.01
                case "cancel":
                    engine.scheduler.cancel(f"r{arguments[0]}")
                    cancelled.add(f"r{arguments[0]}")
                case "unload":
                    engine.unload(ref(world, arguments[0]).digest)
                case "break":
                    store.broken.add(ref(world, arguments[0]).digest)
                    troubled.add(ref(world, arguments[0]).digest)
                case "mend":
                    store.broken.clear()
                case "hang":
                    store.hanging.add(ref(world, arguments[0]).digest)
                    troubled.add(ref(world, arguments[0]).digest)
                case "release":
                    store.release()
                case "time":
                    clock.now += arguments[0]
                case "pin" if pages == 200:  # a pinned one may be more than a tiny pool has left
                    engine.pager.pin(ref(world, arguments[0]).digest)
                case "unpin":
                    engine.pager.unpin(ref(world, arguments[0]).digest)
            driver.check()
        store.release()
        settle(driver)
        for name, request in requests.items():
            answer = driver.tokens[name]
            match driver.ends.get(name):
                case None:
                    assert name in cancelled
                case Finished() as end:
                    assert end.completion_tokens == len(answer)
                    assert len(answer) == request.max_tokens or pages < 60  # the pool's end
                    if not cached:
                        assert end.cached_tokens == 0
                case Failed(code="adapter_failed"):
                    assert request.adapter is not None
                    assert request.adapter.digest in troubled
                case Failed(code="late"):
                    assert request.first_token_s is not None
                    assert not answer
                case Failed(code="prompt_too_long"):
                    assert pages < 200
                case end:
                    pytest.fail(f"{end}")
            if answer:
                assert world.would_answer(request, answer)


def test_r7_an_unloaded_version_serves_those_who_have_it_even_when_they_are_preempted(
    world: World,
):
    """The store has it no longer; the pool is for few, so they push each other out."""
    adapter = ref(world, 1)
    with running(world, 24) as (driver, store, _):
        for index in range(20):  # after these, the engine expects short answers
            driver.submit(Submit(f"short-{index}", prompt(index, 6), 1, GREEDY))
            driver.submit(Submit(f"adapted-{index}", prompt(index, 6), 1, GREEDY, adapter))
        driver.finish()
        requests = [  # the last of them will have to give way
            Submit(str(index), prompt(index, 6), 20, GREEDY, adapter if index == 4 else None)
            for index in range(5)
        ]
        for request in requests:
            driver.submit(request)
        while "4" not in driver.engine.scheduler.running:
            driver.step()
        driver.engine.unload(adapter.digest)
        store.broken.add(adapter.digest)
        while "4" in driver.engine.scheduler.running:
            driver.step()
        assert "4" in driver.engine.scheduler.waiting
        settle(driver)
        for request in requests:
            assert isinstance(driver.ends[request.request_id], Finished)
            assert world.would_answer(request, driver.tokens[request.request_id])
        assert (driver.engine.pager.host_count, driver.engine.pager.resident_count) == (0, 0)


def test_m3_w3_what_an_unloaded_versions_last_request_computed_is_not_kept(world: World):
    adapter = ref(world, 2)
    with running(world, 200) as (driver, _, _):
        driver.submit(Submit("a", prompt(1, 20), 6, GREEDY, adapter, cache_namespace="t"))
        driver.engine.step()
        driver.engine.unload(adapter.digest)
        driver.finish()
        driver.submit(Submit("b", prompt(1, 20), 6, GREEDY, cache_namespace="t"))
        driver.finish()
        assert len(driver.engine.radix) == 6  # the base model's: 20 and 5 tokens
        end = driver.ends["b"]
        assert isinstance(end, Finished)
        assert end.cached_tokens == 0


def test_r4_r6_a_version_that_fails_ends_its_waiting_requests_and_is_tried_again(world: World):
    adapter = ref(world, 1)
    with running(world, 200) as (driver, store, _):
        store.broken.add(adapter.digest)
        for index in range(5):
            driver.submit(Submit(str(index), prompt(1, 4), 3, GREEDY, adapter))
        driver.submit(Submit("base", prompt(1, 4), 3, GREEDY))
        driver.finish()
        for index in range(5):
            end = driver.ends[str(index)]
            assert isinstance(end, Failed)
            assert end.code == "adapter_failed"
            assert "disk" not in end.detail
        assert isinstance(driver.ends["base"], Finished)
        assert len(store.reads) == 1
        store.broken.clear()
        driver.submit(Submit("again", prompt(1, 4), 3, GREEDY, adapter))
        settle(driver)
        assert driver.tokens["again"] == world.answer(adapter, prompt(1, 4), 3)


def test_r1_a_store_that_hangs_holds_up_its_own_requests_only_and_not_for_ever(world: World):
    """Four reads hang, as many as go on at a time; unloading and cancelling work meanwhile."""
    release = threading.Event()
    clock = Clock()
    engine = world.engine(200, clock)
    read = engine.pager._reader._read
    hanging = {ref(world, index).digest for index in range(1, 5)}

    def hang(asked: AdapterRef) -> Slab:
        if asked.digest in hanging:
            assert release.wait(30)
        return read(asked)

    engine.pager._reader._read = hang
    driver = Driver(engine)
    for index in range(1, 6):
        driver.submit(Submit(f"v{index}", prompt(1, 4), 3, GREEDY, ref(world, index)))
    driver.submit(Submit("base", prompt(1, 4), 3, GREEDY))
    for _ in range(5):
        driver.step()
    assert list(driver.ends) == ["base"]
    assert not engine.busy  # nothing to compute: it waits without turning
    engine.unload(ref(world, 1).digest)
    engine.scheduler.cancel("v1")
    clock.now += 61
    assert engine.busy
    driver.finish()
    assert sorted(driver.ends) == ["base", "v2", "v3", "v4", "v5"]
    driver.submit(Submit("still", prompt(1, 4), 3, GREEDY, ref(world, 2)))
    driver.finish()
    # those that hang do not count any more, so that the fifth was read
    assert driver.tokens["v5"] == world.answer(ref(world, 5), prompt(1, 4), 3)
    for name in ("v2", "v3", "v4", "still"):
        end = driver.ends[name]
        assert isinstance(end, Failed)
        assert "does not answer" in end.detail
    release.set()
    engine.pager._reader._threads.shutdown()
    driver.submit(Submit("at last", prompt(1, 4), 3, GREEDY, ref(world, 2)))
    settle(driver)
    assert driver.tokens["at last"] == world.answer(ref(world, 2), prompt(1, 4), 3)
    engine.close()


def test_m4_more_versions_than_the_pool_holds_wait_for_their_turn(world: World):
    """Each needs nearly all of the pool; none fails, and all are right."""
    with running(world, 44) as (driver, _, _):
        requests = []
        for turn in range(3):
            for index, adapter in enumerate(world.refs):
                requests.append(Submit(f"{turn}-{index}", prompt(turn, 5), 4, GREEDY, adapter))
                driver.submit(requests[-1])
            driver.step()
        settle(driver)
        for request in requests:
            assert world.would_answer(request, driver.tokens[request.request_id])
        assert driver.engine.pager.loads > len(ADAPTERS)


@pytest.mark.parametrize(
    "request_",
    [
        Submit("bad", [], 1, GREEDY),
        Submit("bad", [1], 0, GREEDY),
        Submit("bad", [-1], 1, GREEDY),
        Submit("bad", [256], 1, GREEDY),
        Submit("bad", [1], 1, GREEDY, fairness_weight=0.0),
        Submit("bad", [1], 1, GREEDY, fairness_weight=float("nan")),
        Submit("bad", [1], 1, GREEDY, first_token_s=float("nan")),
        Submit("runs", [1], 1, GREEDY),
        Submit("waits", [1], 1, GREEDY),
    ],
    ids=lambda request: f"{request.request_id}-{request.prompt}-{request.max_tokens}",
)
def test_r9_a_malformed_request_is_refused_at_the_door_and_the_loop_goes_on(
    world: World, request_: Submit
):
    engine = world.engine(200, running_max=1)
    commands: list[list[Command]] = [
        [Submit("runs", prompt(1, 4), 5, GREEDY), Submit("waits", prompt(2, 4), 5, GREEDY)],
        [request_],
        *([] for _ in range(20)),
        [Cancel("unknown"), Unload("unknown"), Pin("unknown"), Unpin("never pinned"), Shutdown()],
    ]
    said: list[Events] = []
    serve(engine, lambda wait: commands.pop(0), said.append)
    events = [event for batch in said for event in batch.events]
    refused = [event for event in events if isinstance(event, Failed)]
    assert [(end.request_id, end.code) for end in refused] == [(request_.request_id, "internal")]
    finished = [event.request_id for event in events if isinstance(event, Finished)]
    assert finished == ["runs", "waits"]
    engine.close()
