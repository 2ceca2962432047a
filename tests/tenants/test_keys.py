from datetime import timedelta

import pytest
from sqlalchemy import func, select

from gateway.db import Database, now
from gateway.errors import Conflict, InvalidRequest, NotFound, PermissionDenied
from gateway.settings import Secret
from gateway.tenants import directory, key_form, keys
from gateway.tenants.known_keys import known_key
from gateway.tenants.pepper import KeyHash
from gateway.tenants.tables import ApiKey, Tenant

KEY_HASH = KeyHash(Secret("0123456789abcdef0123456789abcdef"))


async def make_tenant(database: Database, slug: str = "acme") -> Tenant:
    async with database.session() as session:
        return await directory.create_tenant(session, slug)


async def test_a_tenant_is_found_by_its_slug(database: Database) -> None:
    made = await make_tenant(database)
    async with database.session() as session:
        found = await directory.tenant_by_slug(session, "acme")
        assert found.id == made.id
        assert (found.name, found.status, found.weight) == ("acme", "active", 1.0)
        assert found.created_at.tzinfo is not None
        assert abs(now() - found.created_at) < timedelta(minutes=1)
        with pytest.raises(NotFound, match="other"):
            await directory.tenant_by_slug(session, "other")


async def test_tenants_are_listed_by_slug(database: Database) -> None:
    for slug in ("zeta", "acme", "m-1"):
        await make_tenant(database, slug)
    async with database.session() as session:
        listed = [tenant.slug for tenant in await directory.list_tenants(session)]
    assert listed == ["acme", "m-1", "zeta"]


async def test_a_taken_slug_is_a_conflict_that_no_client_should_retry(database: Database) -> None:
    await make_tenant(database)
    with pytest.raises(Conflict, match="acme") as error:
        await make_tenant(database)
    assert error.value.headers() == {"x-should-retry": "false"}
    async with database.session() as session:
        assert await session.scalar(select(func.count()).select_from(Tenant)) == 1


@pytest.mark.parametrize("slug", ["", "Acme", "-a", "a-", "a b", "a/b", "ä", "a" * 64, "a\n"])
async def test_a_slug_that_is_unfit_for_urls_is_refused(slug: str, database: Database) -> None:
    with pytest.raises(InvalidRequest, match="slug"):
        await make_tenant(database, slug)


async def test_only_the_hash_of_a_key_is_stored(database: Database) -> None:
    tenant = await make_tenant(database)
    async with database.session() as session:
        issued = await keys.create_key(session, KEY_HASH, tenant.id, "ci")
    text = issued.text.reveal()
    async with database.session() as session:
        row = await session.get_one(ApiKey, issued.row.id)
    assert KEY_HASH.matches(text, row.hash)
    assert row.public_id == key_form.public_id(text)
    assert row.redacted == f"lg_sk_{row.public_id}_…{text[-4:]}"
    assert row.scopes == list(keys.TENANT_SCOPES)
    columns = [getattr(row, column.name) for column in ApiKey.__table__.columns]
    assert text[17:] not in " ".join(map(str, columns))


async def test_f13_an_issued_key_shows_in_no_text_form(database: Database) -> None:
    tenant = await make_tenant(database)
    async with database.session() as session:
        issued = await keys.create_key(session, KEY_HASH, tenant.id)
    assert issued.text.reveal() not in f"{issued} {issued!r} {issued.row!r} {vars(issued.row)}"


@pytest.mark.parametrize(
    ("scopes", "message"),
    [
        (["inference", "root"], "'root'"),
        ([], "at least one"),
        (["admin", "inference"], "Admin keys.*cannot call models"),
        (["admin"], "create --admin"),
    ],
)
async def test_scopes_that_cannot_be_are_refused(
    scopes: list[str], message: str, database: Database
) -> None:
    tenant = await make_tenant(database)
    async with database.session() as session:
        with pytest.raises(InvalidRequest, match=message):
            await keys.create_key(session, KEY_HASH, tenant.id, scopes=scopes)


async def test_f40_an_admin_key_cannot_call_models(database: Database) -> None:
    async with database.session() as session:
        issued = await keys.create_key(session, KEY_HASH, None, scopes=["inference"])
    assert issued.text.reveal().startswith("lg_admin_")
    async with database.reading() as connection:
        known = await known_key(connection, issued.row.public_id)
    assert known is not None
    assert (known.principal.tenant_id, set(known.principal.scopes)) == ("", {"admin"})
    for scope in keys.TENANT_SCOPES:
        with pytest.raises(PermissionDenied, match=scope):
            known.principal.require(scope)


async def test_f40_whatever_the_table_says_a_tenants_key_administers_nothing(
    database: Database,
) -> None:
    tenant = await make_tenant(database)
    async with database.session() as session:
        issued = await keys.create_key(session, KEY_HASH, tenant.id)
        operators = await keys.create_key(session, KEY_HASH, None)
        issued.row.scopes = ["inference", "admin"]
        operators.row.scopes = ["inference", "admin"]
    async with database.reading() as connection:
        theirs = await known_key(connection, issued.row.public_id)
        ours = await known_key(connection, operators.row.public_id)
    assert theirs is not None
    assert theirs.principal.scopes == {"inference"}
    assert ours is not None
    assert ours.principal.scopes == {"admin"}


async def test_an_expiry_in_the_past_is_refused(database: Database) -> None:
    tenant = await make_tenant(database)
    async with database.session() as session:
        with pytest.raises(InvalidRequest, match="past"):
            await keys.create_key(session, KEY_HASH, tenant.id, expires_at=now())


async def test_a_key_is_revoked_by_either_id_and_only_once(database: Database) -> None:
    tenant = await make_tenant(database)
    async with database.session() as session:
        one = await keys.create_key(session, KEY_HASH, tenant.id, "one")
        two = await keys.create_key(session, KEY_HASH, tenant.id, "two")
    async with database.session() as session:
        first = (await keys.revoke_key(session, tenant.id, one.row.id)).revoked_at
    async with database.session() as session:
        again = (await keys.revoke_key(session, tenant.id, one.row.public_id)).revoked_at
        assert again == first is not None
    async with database.session() as session:
        listed = {key.name: key for key in await keys.list_keys(session, tenant.id)}
        assert listed["one"].revoked_at == first
        assert listed["two"].revoked_at is None
        assert two.row.id == listed["two"].id


async def test_another_tenants_key_can_be_neither_listed_nor_revoked(database: Database) -> None:
    owner = await make_tenant(database, "owner")
    other = await make_tenant(database, "other")
    async with database.session() as session:
        issued = await keys.create_key(session, KEY_HASH, owner.id)
    async with database.session() as session:
        assert await keys.list_keys(session, other.id) == []
        for name in (issued.row.id, issued.row.public_id):
            with pytest.raises(NotFound):
                await keys.revoke_key(session, other.id, name)
