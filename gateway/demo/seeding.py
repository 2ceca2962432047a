"""Gives the demo its tenants, keys and adapters. What is there already stays as it is."""

import json
import os
from pathlib import Path

import httpx

from gateway.db import Database, async_url
from gateway.demo.client import Client
from gateway.demo.content import TENANTS, DemoTenant, adapters_folder
from gateway.demo.progress import StepFailed
from gateway.errors import NotFound
from gateway.settings import Settings
from gateway.tenants.directory import create_tenant, tenant_by_slug
from gateway.tenants.keys import create_key
from gateway.tenants.pepper import open_key_hash

KEYS_FILE = "demo-keys.json"
KEY_NAME = "demo"


async def seed(settings: Settings, base_url: str) -> dict[str, str]:
    """Make what is missing, and say so; the key of each tenant by its slug.

    Keys are shown once, so the demo keeps its own in a file that only this user can read.
    The database is the one of the server at `base_url`, which has migrated it.
    """
    file = settings.data_dir / KEYS_FILE
    keys = _read_keys(file)
    for tenant in TENANTS:
        if not await _is_accepted(base_url, keys.get(tenant.slug, "")):
            keys[tenant.slug] = await _issue_key(settings, tenant)
            _write_keys(file, keys)
            print(f"Made tenant {tenant.slug} and a key for it (kept in {file})", flush=True)
    for tenant in TENANTS:
        await _upload_adapters(base_url, tenant, keys[tenant.slug])
    return keys


async def _is_accepted(base_url: str, key: str) -> bool:
    if not key:
        return False
    async with Client(base_url, key) as client:
        try:
            await client.models()
        except httpx.HTTPStatusError as error:
            if error.response.status_code == httpx.codes.UNAUTHORIZED:
                return False
            raise
    return True


async def _issue_key(settings: Settings, tenant: DemoTenant) -> str:
    database = Database(async_url(settings.database.url.reveal(), settings.data_dir))
    try:
        async with database.session() as session:
            try:
                row = await tenant_by_slug(session, tenant.slug)
            except NotFound:
                row = await create_tenant(session, tenant.slug, tenant.name)
            issued = await create_key(session, open_key_hash(settings), row.id, KEY_NAME)
    finally:
        await database.close()
    return issued.text.reveal()


async def _upload_adapters(base_url: str, tenant: DemoTenant, key: str) -> None:
    """Names that are taken are left alone, whatever lies under them: it may be the user's own."""
    async with Client(base_url, key) as client:
        there = await client.adapters()
        for name in tenant.adapters:
            if name in there:
                continue
            try:
                await client.upload(name, adapters_folder() / name)
            except httpx.HTTPStatusError as error:
                raise StepFailed(
                    f"The adapter {name!r} was refused: {error.response.text}\nThe demo's adapters "
                    "belong to SmolLM2-135M-Instruct: if LORAGATE_MODEL or loragate.toml names "
                    "another base model, the demo cannot show them."
                ) from None
            print(f"Uploaded adapter {name} for tenant {tenant.slug}", flush=True)


def _read_keys(file: Path) -> dict[str, str]:
    try:
        kept = json.loads(file.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return {str(slug): str(key) for slug, key in kept.items()} if isinstance(kept, dict) else {}


def _write_keys(file: Path, keys: dict[str, str]) -> None:
    """Whole or not at all, and never readable for others."""
    draft = file.with_suffix(".draft")
    draft.unlink(missing_ok=True)
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        json.dump(keys, out, indent=2)
        out.flush()
        os.fsync(out.fileno())
    draft.replace(file)
