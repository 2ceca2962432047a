"""Uploads in parts: interrupted at any point and continued, they are the adapter sent at once."""

import asyncio
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import update

from gateway.adapters.resumable import rows, uploads
from gateway.adapters.resumable.spool import Spool
from gateway.adapters.resumable.tables import AdapterUpload
from gateway.adapters.resumable.uploads import Uploads
from gateway.db import Database, async_url, now
from gateway.settings import Settings
from tests.adapters.conftest import ADAPTERS_MAX, UPLOAD_BYTES_MAX, Site
from tests.adapters.crashing import STEPS, settings_of
from tests.adapters.packing import files, tarred, zipped
from tests.databases import free_port
from tests.live import error_of
from tests.serving import issue_key

ARCHIVE = tarred(files())
PART = 20_000
CUT = [ARCHIVE[start : start + PART] for start in range(0, len(ARCHIVE), PART)]


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def begin(client: httpx.Client, key: str | None = None, **body: Any) -> httpx.Response:
    headers = {} if key is None else {"idempotency-key": key}
    told = {"name": "pirate", "bytes": len(ARCHIVE)} | body
    return client.post("/v1/uploads", json=told, headers=headers)


def put(
    client: httpx.Client, upload_id: str, number: int, content: bytes, told: str = ""
) -> httpx.Response:
    headers = {"x-content-sha256": told or sha256(content)}
    path = f"/v1/uploads/{upload_id}/parts/{number}"
    return client.put(path, content=content, headers=headers)


def finish(client: httpx.Client, upload_id: str, **body: Any) -> httpx.Response:
    return client.post(f"/v1/uploads/{upload_id}/complete", json=body)


@pytest.fixture
def upload_id(site: Site) -> Iterator[str]:
    made: str = begin(site.client).json()["id"]
    yield made
    site.client.post(f"/v1/uploads/{made}/cancel")


def test_parts_in_any_order_become_the_adapter_of_the_two_files(site: Site, upload_id: str) -> None:
    whole = site.upload().json()["digest"]
    assert len(CUT) > 3
    for number, part in reversed(list(enumerate(CUT, 1))):
        answer = put(site.client, upload_id, number, part)
        assert answer.json() == {
            "object": "upload.part",
            "number": number,
            "bytes": len(part),
            "sha256": sha256(part),
        }
    progress = site.client.get(f"/v1/uploads/{upload_id}").json()
    assert progress["received_bytes"] == progress["bytes"] == len(ARCHIVE)
    assert [part["number"] for part in progress["parts"]] == list(range(1, len(CUT) + 1))
    assert progress["expires_at"] - progress["created_at"] == 24 * 3600
    answer = finish(site.client, upload_id, sha256=sha256(ARCHIVE))
    assert answer.status_code == 200, answer.text
    assert answer.json()["digest"] == whole
    assert len(site.stored()) == 3


def test_completing_again_answers_the_same_while_the_adapter_is_there(
    site: Site, upload_id: str
) -> None:
    for number, part in enumerate(CUT, 1):
        put(site.client, upload_id, number, part)
    first, second = finish(site.client, upload_id), finish(site.client, upload_id)
    assert (first.status_code, second.status_code) == (201, 200)
    assert first.json() == second.json()
    assert site.client.get(f"/v1/uploads/{upload_id}").json()["status"] == "completed"
    site.client.delete("/v1/adapters/pirate")
    error_of(finish(site.client, upload_id), 409)
    error_of(put(site.client, upload_id, 9, b"x"), 409)
    assert site.stored() == []


def test_the_same_key_and_body_find_the_open_upload(site: Site) -> None:
    first, second = begin(site.client, "k"), begin(site.client, "k")
    assert (first.status_code, second.status_code) == (201, 200)
    assert first.json() == second.json()
    error_of(begin(site.client, "k", bytes=7), 409)
    assert begin(site.client).json()["id"] != first.json()["id"]
    with site.live.client("other") as other:
        assert begin(other, "k").json()["id"] != first.json()["id"]
    site.client.post(f"/v1/uploads/{first.json()['id']}/cancel")
    assert begin(site.client, "k").status_code == 201


def test_a_part_may_be_sent_again_but_not_changed(site: Site, upload_id: str) -> None:
    assert put(site.client, upload_id, 1, CUT[0]).status_code == 200
    assert put(site.client, upload_id, 1, CUT[0]).status_code == 200
    error_of(put(site.client, upload_id, 1, CUT[1]), 409)
    assert len(site.stored()) == 1


def test_a_part_that_arrives_damaged_is_not_kept(site: Site, upload_id: str) -> None:
    error = error_of(put(site.client, upload_id, 1, CUT[0], sha256(b"other")), 400)
    assert error["param"] == "x-content-sha256"
    assert site.stored() == []
    error_of(put(site.client, upload_id, 1, CUT[0], "nonsense"), 400)
    path = f"/v1/uploads/{upload_id}/parts/1"
    error_of(site.client.put(path, content=b"x"), 400)


@pytest.mark.parametrize("number", [0, -1, 10_001, "x", 2**70])
def test_a_number_that_no_part_has_is_refused(site: Site, upload_id: str, number: Any) -> None:
    assert put(site.client, upload_id, number, b"x").status_code in (400, 404)
    assert site.stored() == []


def test_no_more_comes_than_was_announced(site: Site, upload_id: str) -> None:
    error_of(put(site.client, upload_id, 1, ARCHIVE + b"x"), 413)
    put(site.client, upload_id, 1, ARCHIVE)
    error_of(put(site.client, upload_id, 2, b"x"), 413)
    assert len(site.stored()) == 1


def test_what_is_incomplete_is_not_completed(site: Site, upload_id: str) -> None:
    assert "in parts none" in error_of(finish(site.client, upload_id), 400)["message"]
    put(site.client, upload_id, 2, CUT[1])
    put(site.client, upload_id, 3, ARCHIVE[len(CUT[1]) :])
    assert "in parts 2, 3." in error_of(finish(site.client, upload_id), 400)["message"]


def test_what_is_refused_ends_the_upload_and_says_so_again(site: Site) -> None:
    archive = zipped({"README.md": b"x"})
    upload_id = begin(site.client, bytes=len(archive)).json()["id"]
    put(site.client, upload_id, 1, archive)
    first = error_of(finish(site.client, upload_id), 422)
    assert first["message"] in error_of(finish(site.client, upload_id), 422)["message"]
    progress = site.client.get(f"/v1/uploads/{upload_id}").json()
    assert (progress["status"], progress["failure"]) == ("failed", first["message"])
    assert site.stored() == []


@pytest.mark.parametrize("when", ["create", "complete"])
def test_a_whole_that_is_not_the_announced_one_is_refused(site: Site, when: str) -> None:
    told = {"sha256": sha256(b"other")}
    upload_id = begin(site.client, **(told if when == "create" else {})).json()["id"]
    put(site.client, upload_id, 1, ARCHIVE)
    error = error_of(finish(site.client, upload_id, **(told if when == "complete" else {})), 422)
    assert error["param"] in ("sha256", "archive")
    assert site.stored() == []


def test_a_busy_engine_leaves_the_upload_open(site: Site, upload_id: str) -> None:
    put(site.client, upload_id, 1, ARCHIVE)
    site.engine.ready = False
    error_of(finish(site.client, upload_id), 503)
    site.engine.ready = True
    assert finish(site.client, upload_id).status_code == 201


@pytest.mark.parametrize("scoped", [False, True])
def test_anothers_upload_looks_like_none(site: Site, upload_id: str, scoped: bool) -> None:
    """Another tenant's; or the tenant's own, for a key of other adapters."""
    options: dict[str, Any] = {"allowed_adapters": ["else"]} if scoped else {}
    with site.live.client("acme" if scoped else "other", **options) as other:
        absent = upload_id[:-4] + "0000"
        for ask in (
            lambda it: other.get(f"/v1/uploads/{it}"),
            lambda it: put(other, it, 1, b"x"),
            lambda it: finish(other, it),
            lambda it: other.post(f"/v1/uploads/{it}/cancel"),
        ):
            theirs, nobodys = ask(upload_id), ask(absent)
            error_of(theirs, 404)
            assert theirs.text.replace(upload_id, absent) == nobodys.text
        if scoped:
            error_of(begin(other), 403)
    assert site.client.get(f"/v1/uploads/{upload_id}").json()["status"] == "pending"


def test_open_uploads_are_counted(site: Site) -> None:
    with site.live.client("many") as client:
        made = [begin(client).json()["id"] for _ in range(rows.OPEN_MAX)]
        assert error_of(begin(client), 429)["code"] == "too_many_uploads"
        client.post(f"/v1/uploads/{made[0]}/cancel")
        assert begin(client).status_code == 201


def test_quotas_hold_before_the_first_byte(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    error_of(begin(site.client, name="a b"), 400)
    error_of(begin(site.client, bytes=UPLOAD_BYTES_MAX + uploads.OTHER_BYTES_MAX + 1), 413)
    error_of(begin(site.client, bytes=0), 400)
    for number in range(ADAPTERS_MAX):
        site.upload(f"other{number}")
    assert error_of(begin(site.client), 429)["code"] == "insufficient_quota"
    assert begin(site.client, name="other0").status_code == 201
    monkeypatch.setattr(Spool, "free_bytes", lambda _: uploads.RESERVE_BYTES)
    assert error_of(begin(site.client, name="other0"), 503)["code"] == "storage_full"


def test_quotas_hold_while_it_comes(
    site: Site, upload_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(site.client, upload_id, 1, CUT[0])
    for number in range(ADAPTERS_MAX):
        site.upload(f"other{number}")
    assert error_of(put(site.client, upload_id, 2, CUT[1]), 429)["code"] == "insufficient_quota"
    site.client.delete("/v1/adapters/other0")
    monkeypatch.setattr(Spool, "free_bytes", lambda _: uploads.RESERVE_BYTES)
    assert error_of(put(site.client, upload_id, 2, CUT[1]), 503)["code"] == "storage_full"
    monkeypatch.undo()
    assert put(site.client, upload_id, 2, CUT[1]).status_code == 200


async def _expire(settings: Settings, upload_id: str) -> None:
    database = Database(async_url("", settings.data_dir))
    try:
        async with database.session() as session:
            gone = {"expires_at": now() - timedelta(seconds=1)}
            await session.execute(
                update(AdapterUpload).where(AdapterUpload.id == upload_id).values(gone)
            )
    finally:
        await database.close()


async def _clear(settings: Settings) -> None:
    database = Database(async_url("", settings.data_dir))
    try:
        await Uploads(settings, database).clear()
    finally:
        await database.close()


def test_an_expired_upload_is_gone_with_its_parts(site: Site) -> None:
    upload_id = begin(site.client, "key").json()["id"]
    put(site.client, upload_id, 1, CUT[0])
    asyncio.run(_clear(site.live.settings))
    assert len(site.stored()) == 1
    asyncio.run(_expire(site.live.settings, upload_id))
    error_of(site.client.get(f"/v1/uploads/{upload_id}"), 404)
    assert begin(site.client, "key").status_code == 201
    asyncio.run(_clear(site.live.settings))
    assert site.stored() == []


@contextmanager
def gateway(folder: Path, step: str = "") -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    port = free_port()
    command = [sys.executable, "-m", "tests.adapters.crashing", str(folder), str(port)]
    process = subprocess.Popen([*command, step] if step else command)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            assert process.poll() is None, "the gateway did not start"
            try:
                httpx.get(f"{url}/health/live")
                break
            except httpx.TransportError:
                time.sleep(0.05)
        yield url, process
    finally:
        process.kill()
        process.wait()


def drive(client: httpx.Client) -> httpx.Response:
    """As a client that knows nothing of before but its key: go on where it was."""
    answer = begin(client, "the key")
    assert answer.is_success, answer.text
    there = {part["number"] for part in answer.json()["parts"]}
    upload_id = answer.json()["id"]
    for number, part in enumerate(CUT, 1):
        if number not in there:
            assert put(client, upload_id, number, part).status_code == 200
    return finish(client, upload_id)


@pytest.mark.parametrize("step", [*STEPS, "spool.keep+", "rows.end+", "spool.remove+"])
def test_killed_at_any_step_it_goes_on_after_a_restart(tmp_path: Path, step: str) -> None:
    settings = settings_of(tmp_path)
    with gateway(tmp_path, step) as (url, process):
        key = asyncio.run(issue_key(settings)).text.reveal()
        headers = {"authorization": f"Bearer {key}"}
        with httpx.Client(base_url=url, headers=headers, timeout=30.0) as client:
            with pytest.raises(httpx.TransportError):
                drive(client)
            assert process.wait(10) == -9
    with (
        gateway(tmp_path) as (url, _),
        httpx.Client(base_url=url, headers=headers, timeout=30.0) as client,
    ):
        answer = drive(client)
        assert answer.is_success, answer.text
        assert client.get("/v1/adapters").json()["data"][0]["digest"] == answer.json()["digest"]
        store = tmp_path / "data" / "adapters"
        assert len(list(store.glob("??/*/*"))) == 3
        for folder in store.glob("uploads/*"):
            os.utime(folder, (0, 0))  # an hour later
        asyncio.run(_clear(settings))
        assert list(store.glob("uploads/*")) == []
