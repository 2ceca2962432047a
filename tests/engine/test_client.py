"""The mailbox: who reads a request's events, and who is told what was computed."""

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.engine import client
from gateway.engine.client import EndReason, EngineClient, EngineFailure
from gateway.engine.messages import (
    Cancel,
    Command,
    Event,
    Failed,
    Finished,
    GetPlaces,
    Places,
    Ready,
    Sampling,
    Submit,
    Tokens,
)
from tests.fakes import model_info

GREEDY = Sampling(temperature=0)
PROMPT = [5, 6, 7]


class Noted:
    """An account that keeps what it was told."""

    def __init__(self) -> None:
        self.begun: tuple[int, int] | None = None
        self.tokens = 0
        self.ends: list[tuple[EndReason, int, int, int]] = []

    def begin(self, prompt_tokens: int, cached_tokens: int) -> None:
        assert self.begun is None
        assert not self.tokens
        self.begun = prompt_tokens, cached_tokens

    def produced(self, tokens: int) -> None:
        assert not self.ends
        self.tokens += tokens

    def finish(
        self, reason: EndReason, prompt_tokens: int, completion_tokens: int, cached_tokens: int
    ) -> None:
        self.ends.append((reason, prompt_tokens, completion_tokens, cached_tokens))


class ByHand(EngineClient):
    """An engine whose worker is the test."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Command] = []
        self.say(Ready(model_info()))

    async def send(self, command: Command) -> None:
        self.require()
        self.sent.append(command)

    def say(self, *events: Event) -> None:
        self._mailbox.deliver(list(events))

    def lose(self) -> None:
        self._mailbox.lose("it died")

    @property
    def in_flight(self) -> int:
        return self._mailbox.in_flight


def submit(name: str = "a") -> Submit:
    return Submit(name, PROMPT, 50, GREEDY)


async def test_a_query_gets_the_answer_to_it_among_others() -> None:
    engine = ByHand()
    asked = [asyncio.create_task(engine.places([digest])) for digest in "ab"]
    await asyncio.sleep(0)
    first, second = engine.sent
    assert isinstance(first, GetPlaces)
    assert isinstance(second, GetPlaces)
    engine.say(Places(second.query_id, {"b": "pool"}), Places(first.query_id, {"a": "host"}))
    assert await asyncio.gather(*asked) == [{"a": "host"}, {"b": "pool"}]
    waiting = asyncio.create_task(engine.places(["a"]))
    await asyncio.sleep(0)
    engine.lose()
    with pytest.raises(EngineFailure):
        await waiting
    with pytest.raises(EngineFailure):
        await engine.places(["a"])


async def test_f8_a_stream_that_is_left_is_counted_until_the_engine_says_that_it_stopped() -> None:
    engine, account = ByHand(), Noted()
    async with engine.submit(submit(), account) as stream:
        engine.say(Tokens("a", [1], cached_tokens=2), Tokens("a", [2]))
        assert await anext(stream) == Tokens("a", [1], cached_tokens=2)
    assert engine.sent[-1] == Cancel("a")
    assert account.ends == []
    engine.say(Tokens("a", [3]))
    assert engine.in_flight == 1
    engine.say(Finished("a", "cancelled", 3, 4, 2))
    assert account.begun == (3, 2)
    assert account.tokens == 3
    assert account.ends == [("cancelled", 3, 4, 2)]
    assert engine.in_flight == 0


async def test_an_end_that_crossed_the_cancel_is_the_end() -> None:
    engine, account = ByHand(), Noted()
    async with engine.submit(submit(), account):
        engine.say(Tokens("a", [1]), Finished("a", "length", 3, 1))
    assert not [command for command in engine.sent if isinstance(command, Cancel)]
    assert account.ends == [("length", 3, 1, 0)]
    assert engine.in_flight == 0


@pytest.mark.parametrize("left", [True, False])
async def test_of_a_lost_worker_counts_what_had_reached_us(left: bool) -> None:
    engine, account = ByHand(), Noted()
    async with engine.submit(submit(), account) as stream:
        engine.say(Tokens("a", [1, 2], cached_tokens=1))
        if not left:
            engine.lose()
            await anext(stream)
            with pytest.raises(EngineFailure, match="it died"):
                await anext(stream)
    if left:
        engine.lose()
    assert account.ends == [("failed", 3, 2, 1)]
    assert engine.in_flight == 0


async def test_a_request_that_failed_before_its_first_token_counts_nothing() -> None:
    engine, account = ByHand(), Noted()
    async with engine.submit(submit(), account) as stream:
        engine.say(Failed("a", "overloaded", "the queue is full"))
        with pytest.raises(EngineFailure):
            await anext(stream)
    assert account.begun is None
    assert account.ends == [("failed", 0, 0, 0)]
    assert engine.in_flight == 0


async def test_an_engine_that_is_not_there_tells_the_account_nothing() -> None:
    engine, account = ByHand(), Noted()
    engine.lose()
    with pytest.raises(EngineFailure):
        await engine.submit(submit(), account).__aenter__()
    assert account.ends == []
    assert engine.in_flight == 0


async def test_a_worker_that_forgets_to_acknowledge_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "ACKNOWLEDGE_S_MAX", 0.01)
    engine, account = ByHand(), Noted()
    async with engine.submit(submit(), account):
        engine.say(Tokens("a", [1]))
    await asyncio.sleep(0.05)
    assert account.ends == [("cancelled", 3, 1, 0)]
    assert engine.in_flight == 0
    engine.say(Finished("a", "cancelled", 3, 2))  # too late, and no fault
    assert len(account.ends) == 1


ACTIONS = ["open", "token", "leave", "end", "fail", "lose"]
actions = st.lists(st.tuples(st.integers(0, 5), st.sampled_from(ACTIONS)), max_size=60)


@settings(deadline=None)
@given(actions)
def test_every_request_ends_once_with_what_was_computed_and_nothing_is_left(
    steps: list[tuple[int, str]],
) -> None:
    asyncio.run(_walk(steps))


async def _walk(steps: list[tuple[int, str]]) -> None:
    """The worker of each name goes: open, tokens, an end; the reader may leave at any moment."""
    engine = ByHand()
    accounts: dict[str, tuple[Noted, int]] = {}  # what the worker produced for those that ended
    running: dict[str, tuple[Noted, int]] = {}  # at the worker
    readers: dict[str, client.TokenStream] = {}
    opened = 0
    names: dict[int, str] = {}

    async def leave(name: str) -> None:
        await readers.pop(name).__aexit__(None, None, None)

    for place, action in [*steps, *((place, "leave") for place in range(6)), (0, "lose")]:
        name = names.get(place, "")
        if action == "open" and name not in readers and name not in running:
            opened += 1
            name = names[place] = f"r{opened}"
            account = Noted()
            if engine.info is None:
                engine.say(Ready(model_info()))
            readers[name] = await engine.submit(submit(name), account).__aenter__()
            running[name] = account, 0
        elif action == "token" and name in running:
            account, produced = running[name]
            running[name] = account, produced + 1
            engine.say(Tokens(name, [1]))
        elif action == "leave" and name in readers:
            await leave(name)
        elif action == "end" and name in running:
            accounts[name] = running.pop(name)
            engine.say(Finished(name, "length", len(PROMPT), accounts[name][1]))
        elif action == "fail" and name in running:
            accounts[name] = running.pop(name)
            engine.say(Failed(name, "internal", "planned"))
        elif action == "lose":
            accounts |= running
            running.clear()
            engine.lose()
    assert len(accounts) == opened
    for account, produced in accounts.values():
        ((_, _, completion, _),) = account.ends
        assert completion == produced == account.tokens
    assert engine.in_flight == 0
