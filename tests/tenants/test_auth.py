"""From the Authorization header to a Principal, on both databases."""

import asyncio
import logging
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import event, update

from gateway.db import Database, now
from gateway.errors import DatabaseUnavailable, InvalidKey, PermissionDenied, RateLimited
from gateway.settings import Keys, Secret, Settings, SettingsError
from gateway.tenants import auth, directory, key_cache, key_form, keys, known_keys
from gateway.tenants.announcements import ALONE_S, Announcer, Changed
from gateway.tenants.auth import Authenticator, bootstrap_key
from gateway.tenants.failures import AT_ONCE
from gateway.tenants.key_cache import STALE_S, KeyCache
from gateway.tenants.last_used import LastUsed
from gateway.tenants.networks import Sources
from gateway.tenants.pepper import KeyHash
from gateway.tenants.tables import ApiKey, Tenant
from tests.databases import Postgres, stopped

KEY_HASH = KeyHash(Secret("0123456789abcdef0123456789abcdef"))


class Clock:
    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


class Setup:
    """A tenant with a key, and an authenticator whose time stands still."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.clock = Clock()
        self.last_used = LastUsed(database, self.clock)
        self.announcer = Announcer(None, self.clock)
        self.cache = KeyCache(database, self.announcer, self.clock)
        self.authenticator = Authenticator(
            self.cache, KEY_HASH, self.last_used, Sources(Settings()), clock=self.clock
        )
        self.statements = 0
        event.listen(database.engine.sync_engine, "before_cursor_execute", self._count)

    def _count(self, *_: object) -> None:
        self.statements += 1

    async def make(self) -> "Setup":
        async with self.database.session() as session:
            self.tenant = await directory.create_tenant(session, "acme")
            self.issued = await keys.create_key(session, KEY_HASH, self.tenant.id, "test")
        self.key = self.issued.text.reveal()
        self.statements = 0
        return self

    async def ask(self, key: str | None = None, source: str = "192.0.2.1") -> keys.Principal:
        return await self.send(f"Bearer {key or self.key}", source)

    async def send(self, header: str | None, source: str = "192.0.2.1") -> keys.Principal:
        scope: Any = {"client": (source, 1234), "headers": []}
        return await self.authenticator.authenticate(header, scope)

    async def change_key(self, **values: object) -> None:
        async with self.database.session() as session:
            await session.execute(update(ApiKey).values(**values))

    async def change_tenant(self, **values: object) -> None:
        async with self.database.session() as session:
            await session.execute(update(Tenant).values(**values))


@pytest.fixture
async def setup(database: Database) -> Setup:
    return await Setup(database).make()


async def test_a_good_key_is_its_tenant_with_the_scopes_of_the_key(setup: Setup) -> None:
    principal = await setup.ask()
    assert principal == keys.Principal(
        setup.tenant.id,
        "acme",
        setup.issued.row.id,
        frozenset(keys.TENANT_SCOPES),
        1.0,
        public_id=setup.issued.row.public_id,
    )


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "Bearer  "])
async def test_the_scheme_is_read_in_any_case(scheme: str, setup: Setup) -> None:
    assert (await setup.send(f"{scheme} {setup.key}")).tenant_slug == "acme"


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (None, "No API key was sent"),
        ("", "No API key was sent"),
        ("Basic dTpw", "another scheme than Bearer"),
        ("{key}", "another scheme than Bearer"),
        ("Bearer", "no API key of this server"),
        ("Bearer ", "no API key of this server"),
        ("Bearer sk-proj-12345", "no API key of this server"),
        ("Bearer {key}x", "no API key of this server"),
        ("Bearer {key} {key}", "no API key of this server"),
        ("Bearer \xff\x00", "no API key of this server"),
    ],
)
async def test_what_cannot_be_a_key_never_reaches_the_database(
    header: str | None, message: str, setup: Setup
) -> None:
    with pytest.raises(InvalidKey, match=message) as error:
        await setup.send(header and header.replace("{key}", setup.key))
    assert setup.statements == 0
    assert (error.value.status, error.value.code) == (401, "invalid_api_key")
    assert error.value.headers() == {"www-authenticate": "Bearer"}
    assert setup.key not in error.value.message


async def test_a_wrong_checksum_never_reaches_the_database(setup: Setup) -> None:
    wrong = setup.key[:-1] + ("a" if setup.key[-1] != "a" else "b")
    with pytest.raises(InvalidKey, match="mistyped"):
        await setup.ask(wrong)
    assert setup.statements == 0


async def test_an_unknown_key_and_a_wrong_secret_look_the_same(setup: Setup) -> None:
    unknown = key_form.make().text.reveal()
    body = f"lg_sk_{setup.issued.row.public_id}_{unknown[17:60]}"
    messages = []
    for key in (unknown, body + key_form.checksum(body)):
        with pytest.raises(InvalidKey) as error:
            await setup.ask(key)
        messages.append(error.value.message)
    assert messages == [auth.WRONG_KEY] * 2


async def test_a_revoked_key_is_told_so(setup: Setup) -> None:
    await setup.change_key(revoked_at=now())
    with pytest.raises(InvalidKey, match="revoked"):
        await setup.ask()


async def test_an_expired_key_is_told_so(setup: Setup) -> None:
    await setup.change_key(expires_at=now() - timedelta(seconds=1))
    with pytest.raises(InvalidKey, match="expired"):
        await setup.ask()


async def test_a_key_expires_even_while_it_is_cached(setup: Setup) -> None:
    await setup.change_key(expires_at=now() + timedelta(milliseconds=300))
    await setup.ask()
    await asyncio.sleep(0.35)
    with pytest.raises(InvalidKey, match="expired"):
        await setup.ask()


async def test_a_suspended_tenant_is_refused_and_not_taken_for_unknown(setup: Setup) -> None:
    await setup.change_tenant(status="suspended")
    with pytest.raises(PermissionDenied, match="suspended") as error:
        await setup.ask()
    assert error.value.code == "tenant_suspended"


async def test_a_deleted_tenants_key_is_unknown(setup: Setup) -> None:
    await setup.change_tenant(status="deleted")
    with pytest.raises(InvalidKey, match="Incorrect"):
        await setup.ask()


async def test_the_reason_is_told_only_to_who_has_the_secret(setup: Setup) -> None:
    await setup.change_key(revoked_at=now())
    body = f"lg_sk_{setup.issued.row.public_id}_{'0' * 43}"
    with pytest.raises(InvalidKey, match="Incorrect"):
        await setup.ask(body + key_form.checksum(body))


async def test_the_database_is_asked_once_in_a_while(setup: Setup) -> None:
    for _ in range(50):
        await setup.ask()
    asked = setup.statements
    setup.clock.seconds += ALONE_S - 0.01
    await setup.ask()
    assert setup.statements == asked
    setup.clock.seconds += 0.02
    await setup.ask()
    assert setup.statements > asked


async def test_many_requests_at_once_ask_the_database_once(setup: Setup) -> None:
    await asyncio.gather(*(setup.ask() for _ in range(100)))
    asked = setup.statements
    setup.clock.seconds += ALONE_S
    await asyncio.gather(*(setup.ask() for _ in range(100)))
    assert setup.statements == 2 * asked


async def test_a_request_that_is_cancelled_takes_no_other_with_it(setup: Setup) -> None:
    first = asyncio.create_task(setup.ask())
    second = asyncio.create_task(setup.ask())
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).tenant_slug == "acme"


async def test_f15_a_revocation_is_known_within_the_cache_time(setup: Setup) -> None:
    await setup.ask()
    async with setup.database.session() as session:
        await keys.revoke_key(session, setup.tenant.id, setup.issued.row.id)
    setup.clock.seconds += ALONE_S
    with pytest.raises(InvalidKey, match="revoked"):
        await setup.ask()
    assert ALONE_S <= 1


async def test_f15_an_unknown_key_costs_the_database_one_question_in_a_while(setup: Setup) -> None:
    unknown = key_form.make().text.reveal()
    for _ in range(20):
        with pytest.raises(InvalidKey):
            await setup.ask(unknown)
    assert setup.statements == 1


async def test_inventing_keys_cannot_fill_the_memory(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_cache, "KEYS_MAX", 5)
    await setup.ask()
    asked = setup.statements
    for _ in range(12):
        with pytest.raises(InvalidKey):
            await setup.ask(key_form.make().text.reveal())
    assert len(setup.cache._absent) == 5
    assert setup.statements == asked + 12
    await setup.ask()
    assert setup.statements == asked + 12, "a good key was pushed out"


async def test_f16_a_lost_database_is_503_and_never_401(
    postgres_database: Database, postgres_server: Postgres, caplog: pytest.LogCaptureFixture
) -> None:
    setup = await Setup(postgres_database).make()
    await setup.ask()
    with stopped(postgres_server), caplog.at_level(logging.DEBUG):
        setup.clock.seconds += STALE_S - 0.01
        await setup.ask()  # known, so still good
        setup.clock.seconds += 1
        for key in (setup.key, key_form.make().text.reveal()):
            with pytest.raises(DatabaseUnavailable) as error:
                await setup.ask(key)
            assert error.value.headers() == {"retry-after": "2"}
            assert key not in caplog.text
    assert (await setup.ask()).tenant_slug == "acme"  # without a restart of ours


async def test_the_last_use_is_written_later_and_at_most_once_a_minute(setup: Setup) -> None:
    async def last_used() -> object:
        async with setup.database.session() as session:
            return (await session.get_one(ApiKey, setup.issued.row.id)).last_used_at

    await setup.ask()
    assert await last_used() is None
    await setup.last_used.flush()
    first = await last_used()
    assert first is not None
    setup.clock.seconds += 59
    await setup.ask()
    await setup.last_used.flush()
    assert await last_used() == first
    setup.clock.seconds += 2
    await setup.ask()
    await setup.last_used.flush()
    assert await last_used() != first


async def test_a_refused_key_is_not_used(setup: Setup) -> None:
    await setup.change_key(revoked_at=now())
    with pytest.raises(InvalidKey):
        await setup.ask()
    setup.statements = 0
    await setup.last_used.flush()
    assert setup.statements == 0


async def test_the_last_use_is_written_at_the_end(setup: Setup) -> None:
    async with setup.last_used.running():
        await setup.ask()
    async with setup.database.session() as session:
        assert (await session.get_one(ApiKey, setup.issued.row.id)).last_used_at is not None


# --- guessing -------------------------------------------------------------------------------------


def wrong_secret(setup: Setup) -> str:
    body = f"{setup.key[:17]}{'0' * 43}"
    return body + key_form.checksum(body)


async def exhaust(setup: Setup, source: str = "192.0.2.1") -> None:
    for _ in range(AT_ONCE):
        with pytest.raises(InvalidKey):
            await setup.ask(key_form.make().text.reveal(), source)


@pytest.mark.parametrize("kind", ["unknown", "wrong secret", "junk", "typo"])
async def test_many_wrong_keys_from_one_source_are_429_and_no_question_to_the_database(
    kind: str, setup: Setup
) -> None:
    def guess() -> str:
        unknown = key_form.make().text.reveal()
        return {
            "unknown": unknown,
            "wrong secret": wrong_secret(setup),
            "junk": "sk-proj-123",
            "typo": unknown[:-1],
        }[kind]

    for _ in range(AT_ONCE):
        with pytest.raises(InvalidKey):
            await setup.ask(guess())
    asked = setup.statements
    for _ in range(10):
        with pytest.raises(RateLimited) as error:
            await setup.ask(guess())
        assert int(error.value.headers()["retry-after"]) >= 1
    assert setup.statements == asked
    with pytest.raises(InvalidKey):
        await setup.ask(guess(), source="192.0.2.99")


async def test_a_right_key_that_is_known_works_from_a_source_that_guesses(setup: Setup) -> None:
    await setup.ask(source="192.0.2.99")
    await exhaust(setup)
    await setup.ask()
    setup.clock.seconds += ALONE_S + 0.01  # no longer believed: it is asked for again
    setup.announcer._forget(Changed(everything=True))
    await setup.ask()
    with pytest.raises((RateLimited, InvalidKey)):
        await setup.ask(wrong_secret(setup))


async def test_a_right_key_that_is_new_here_waits_its_turn_at_a_source_that_guesses(
    setup: Setup,
) -> None:
    await exhaust(setup)
    with pytest.raises(RateLimited):
        await setup.ask()
    setup.clock.seconds += 1.01
    assert (await setup.ask()).tenant_slug == "acme"


async def test_what_is_right_but_refused_is_no_guess(setup: Setup) -> None:
    await setup.change_key(revoked_at=now())
    for _ in range(2 * AT_ONCE):
        with pytest.raises(InvalidKey, match="revoked"):
            await setup.ask()
    for _ in range(2 * AT_ONCE):
        with pytest.raises(InvalidKey, match="No API key"):
            await setup.send(None)


# --- networks -------------------------------------------------------------------------------------


async def test_a_key_works_only_from_its_networks(setup: Setup) -> None:
    await setup.change_key(allowed_networks=["192.0.2.0/28", "2001:db8::/32"])
    for source in ("192.0.2.1", "2001:db8::7", "::ffff:192.0.2.15"):
        await setup.ask(source=source)
    for source in ("192.0.2.16", "2001:db9::1", "::1", "nowhere"):
        with pytest.raises(PermissionDenied) as error:
            await setup.ask(source=source)
        assert error.value.code == "network_not_allowed"


# --- the operator ---------------------------------------------------------------------------------


async def test_the_admin_key_of_the_settings_needs_no_database(
    postgres_database: Database, postgres_server: Postgres
) -> None:
    setup = await Setup(postgres_database).make()
    key = key_form.make("admin").text.reveal()
    admin = bootstrap_key(Settings(keys=Keys(admin=Secret(key))), KEY_HASH)
    setup.authenticator._bootstrap = admin
    with stopped(postgres_server):
        principal = await setup.ask(key)
    assert (principal.tenant_id, set(principal.scopes)) == ("", {"admin"})
    await setup.last_used.flush()
    body = f"{key[:20]}{'0' * 43}"
    with pytest.raises(InvalidKey):
        await setup.ask(body + key_form.checksum(body))


@pytest.mark.parametrize("key", ["secret", "{sk}", "{admin}x", " {admin}"])
def test_f13_an_admin_key_of_another_form_stops_the_start_and_is_not_shown(key: str) -> None:
    made = {kind: key_form.make(kind).text.reveal() for kind in ("sk", "admin")}
    text = key.format(**made)
    with pytest.raises(SettingsError, match=r"keys\.admin") as error:
        bootstrap_key(Settings(keys=Keys(admin=Secret(text))), KEY_HASH)
    assert text not in str(error.value)


# --- what is heard --------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["keys", "tenants", "everything"])
async def test_f15_what_is_announced_is_asked_again(what: str, setup: Setup) -> None:
    await setup.ask()
    asked = setup.statements
    told = {
        "keys": Changed(keys=(setup.issued.row.public_id,)),
        "tenants": Changed(tenants=(setup.tenant.id,)),
        "everything": Changed(everything=True),
    }[what]
    await setup.announcer.tell(Changed(keys=("0123456789",), tenants=("another",)))
    await setup.ask()
    assert setup.statements == asked
    await setup.announcer.tell(told)
    await setup.ask()
    assert setup.statements > asked


@pytest.mark.parametrize("meanwhile", [0, 1])
async def test_f15_an_answer_that_was_under_way_does_not_revive_what_was_forgotten(
    meanwhile: int, setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, go_on = asyncio.Event(), asyncio.Event()
    ask = known_keys.known_key

    async def slow(*arguments: Any) -> Any:
        known = await ask(*arguments)
        read.set()
        await go_on.wait()
        return known

    monkeypatch.setattr(key_cache, "known_key", slow)
    first = asyncio.create_task(setup.ask())
    await read.wait()
    await setup.change_key(revoked_at=now())
    await setup.announcer.tell(Changed(keys=(setup.issued.row.public_id,)))
    others = [asyncio.create_task(setup.ask()) for _ in range(meanwhile)]
    await asyncio.sleep(0)
    go_on.set()
    await first  # it was asked before the revocation
    for asked in (*others, setup.ask()):
        with pytest.raises(InvalidKey, match="revoked"):
            await asked


async def test_f15_a_revoked_key_is_not_served_from_memory_while_the_database_is_away(
    postgres_database: Database, postgres_server: Postgres
) -> None:
    setup = await Setup(postgres_database).make()
    await setup.ask()
    await setup.announcer.tell(Changed(keys=(setup.issued.row.public_id,)))
    with stopped(postgres_server), pytest.raises(DatabaseUnavailable):
        await setup.ask()
