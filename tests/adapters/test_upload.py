import errno
import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway import connection
from gateway.adapters import upload
from gateway.adapters.names import Names
from gateway.adapters.store import AdapterStore
from gateway.engine.messages import FailureCode, Submit
from tests.adapters.conftest import ADAPTERS_MAX, UPLOAD_BYTES_MAX, Site
from tests.adapters.making import config, embedding_tensors, tensors, weights
from tests.fakes import Script
from tests.live import Live, error_of


def fails(code: FailureCode) -> Callable[[Submit], Script]:
    """An engine script that fails requests with an adapter."""

    def script(request: Submit) -> Script:
        return Script([[65]], failure=(code, "because") if request.adapter else None)

    return script


def test_an_upload_answers_with_the_adapter(site: Site) -> None:
    before = time.time()
    response = site.upload("pirate")
    assert response.status_code == 201, response.text
    adapter = response.json()
    assert 0 <= adapter.pop("created_at") - int(before) <= 5
    assert len(adapter.pop("id")) == 36
    assert len(adapter.pop("digest")) == 64
    assert adapter == {
        "object": "adapter",
        "name": "pirate",
        "version": 1,
        "size_bytes": sum(path.stat().st_size for path in content(site)),
        "rank": 4,
        "targets": ["q_proj", "v_proj"],
        "base_model": "smollm2-135m-instruct",
        "status": "ready",
        "warnings": [],
    }


def test_an_adapter_on_the_embeddings_is_taken(site: Site) -> None:
    options = {"target_modules": ["lm_head", "embed_tokens"], "layers_to_transform": None, "r": 1}
    response = site.upload("heads", config(**options), weights(embedding_tensors(rank=1)))
    assert response.status_code == 201, response.text
    assert response.json()["targets"] == ["embed_tokens", "lm_head"]


def content(site: Site) -> list[Path]:
    folder = site.live.settings.data_dir / "adapters"
    return [folder / path for path in site.stored() if "manifest" not in path]


def test_l1_ready_means_that_the_engine_has_answered_with_it(site: Site) -> None:
    adapter = site.upload().json()
    (request,) = site.engine.submits
    assert request.adapter is not None
    assert request.adapter.digest == adapter["digest"]
    assert request.max_tokens == 1
    folder = Path(request.adapter.folder)
    assert {path.name for path in folder.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "manifest.json",
    }


def test_l2_an_adapter_is_listed_got_and_deleted_by_name_or_id(site: Site) -> None:
    one, two = site.upload("one").json(), site.upload("two").json()
    listed = site.client.get("/v1/adapters").json()
    assert listed["object"] == "list"
    assert [adapter["name"] for adapter in listed["data"]] == ["one", "two"]
    del one["warnings"], two["warnings"]
    assert listed["data"] == [one, two]
    assert one.items() <= site.client.get("/v1/adapters/one").json().items()
    assert two.items() <= site.client.get(f"/v1/adapters/{two['id']}").json().items()
    deleted = site.client.delete("/v1/adapters/one")
    assert deleted.json() == {"id": one["id"], "object": "adapter", "deleted": True}
    assert deleted.status_code == 200
    error = error_of(site.client.get("/v1/adapters/one"), 404)
    assert (error["code"], error["type"]) == ("not_found", "invalid_request_error")
    error_of(site.client.delete("/v1/adapters/one"), 404)
    assert site.names() == ["two"]
    assert site.client.delete(f"/v1/adapters/{two['id']}").status_code == 200
    assert site.stored() == []


def test_only_a_delete_that_found_something_changes_names(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed: list[str] = []
    site.upload("one")
    monkeypatch.setattr(Names, "changed", lambda _, tenant_id: changed.append(tenant_id))
    error_of(site.client.delete("/v1/adapters/other"), 404)
    assert changed == []
    assert site.client.delete("/v1/adapters/one").status_code == 200
    assert len(changed) == 1


def test_deleting_the_last_use_of_a_version_unloads_it(site: Site) -> None:
    digest = site.upload("one").json()["digest"]
    site.upload("two")
    site.client.delete("/v1/adapters/one")
    assert site.engine.unloads == []
    site.client.delete("/v1/adapters/two")
    assert site.engine.unloads == [digest]
    assert site.stored() == []


def test_l5_the_same_upload_again_answers_200_with_the_same_adapter(site: Site) -> None:
    first, second = site.upload(), site.upload()
    assert (first.status_code, second.status_code) == (201, 200)
    assert first.json() == second.json()
    assert len(site.stored()) == 3


def test_w2_a_name_that_moves_gets_a_new_digest_and_keeps_the_old_version(site: Site) -> None:
    first = site.upload().json()
    moved = site.upload(file=weights(tensors(seed=1)))
    assert moved.status_code == 201
    second = moved.json()
    assert second["id"] == first["id"]
    assert second["digest"] != first["digest"]
    assert (first["version"], second["version"]) == (1, 2)
    assert site.names() == ["pirate"]
    assert len(site.stored()) == 6
    assert site.engine.unloads == []
    assert site.client.delete("/v1/adapters/pirate").status_code == 200
    assert site.stored() == []
    assert sorted(site.engine.unloads) == sorted([first["digest"], second["digest"]])


def test_files_may_come_under_their_own_names(site: Site) -> None:
    files: dict[str, Any] = {
        "name": (None, "pirate"),
        "adapter_config.json": ("x", json.dumps(config()).encode()),
        "adapter_model.safetensors": ("y", weights()),
    }
    assert site.client.post("/v1/adapters", files=files).status_code == 201


def test_files_are_known_by_their_filename_too(site: Site) -> None:
    files: list[tuple[str, Any]] = [
        ("name", (None, "pirate")),
        ("file", ("adapter_config.json", json.dumps(config()).encode())),
        ("file2", ("adapter_model.safetensors", weights())),
    ]
    assert site.client.post("/v1/adapters", files=files).status_code == 201


def test_the_parts_may_come_in_any_order(site: Site) -> None:
    files: dict[str, Any] = {
        "weights": ("adapter_model.safetensors", weights()),
        "config": ("adapter_config.json", json.dumps(config()).encode()),
        "name": (None, "pirate"),
    }
    assert site.client.post("/v1/adapters", files=files).status_code == 201


def test_f12_an_adapter_of_zeros_is_stored_with_a_warning(site: Site) -> None:
    made = {n: t * 0 if ".lora_B." in n else t for n, t in tensors().items()}
    assert "All lora_B are zero" in site.upload(file=weights(made)).json()["warnings"][0]


@pytest.mark.parametrize(
    ("code", "status", "words"),
    [
        ("adapter_failed", 422, "cannot load this adapter: because"),
        ("not_finite", 422, "overflow with this adapter"),
        ("overloaded", 503, "too busy"),
        ("engine_lost", 503, "stopped while it tested"),
        ("internal", 503, "stopped while it tested"),
    ],
)
def test_r4_an_adapter_that_fails_its_self_test_is_not_kept(
    site: Site, code: FailureCode, status: int, words: str
) -> None:
    site.engine.script = fails(code)
    response = site.upload()
    assert words in error_of(response, status)["message"]
    assert ("retry-after" in response.headers) == (status == 503)
    assert site.names() == []
    assert site.stored() == []


def test_a_failed_self_test_leaves_the_same_content_of_others_alone(site: Site) -> None:
    site.upload("one")
    site.engine.script = fails("not_finite")
    error_of(site.upload("two"), 422)
    assert site.names() == ["one"]
    assert len(site.stored()) == 3


def test_while_the_engine_is_not_there_an_upload_is_told_to_come_back(site: Site) -> None:
    site.engine.ready = False
    response = site.upload()
    assert error_of(response, 503)["code"] == "engine_unavailable"
    assert response.headers["retry-after"]


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("name", "name is missing"),
        ("config", "adapter_config.json is missing"),
        ("weights", "adapter_model.safetensors is missing"),
    ],
)
def test_f23_a_missing_part_is_named(site: Site, part: str, words: str) -> None:
    files: dict[str, Any] = {
        "name": (None, "pirate"),
        "config": ("adapter_config.json", b"{}"),
        "weights": ("adapter_model.safetensors", b""),
    }
    del files[part]
    error = error_of(site.client.post("/v1/adapters", files=files), 400)
    assert words in error["message"]
    assert error["param"] == part


@pytest.mark.parametrize(
    "name",
    ["", " ", "a/b", "../../etc/passwd", "a b", "ä", "x" * 65, "a\0b", "SmolLM2-135m-instruct"],
)
def test_s3_a_name_that_cannot_be_used_is_refused(site: Site, name: str) -> None:
    error = error_of(site.upload(name), 400)
    assert error["param"] == "name"
    assert site.stored() == []


def test_a_name_of_megabytes_is_refused(site: Site) -> None:
    assert error_of(site.upload("x" * 2**20), 413)["param"] == "name"


def test_a_part_that_is_not_known_is_refused_by_name(site: Site) -> None:
    error = error_of(site.upload(readme=("README.md", b"hello")), 400)
    assert "readme" in error["message"]
    assert site.stored() == []


def test_a_part_that_is_sent_twice_is_refused(site: Site) -> None:
    files = [("name", (None, "one")), ("name", (None, "two"))]
    assert "sent twice" in error_of(site.client.post("/v1/adapters", files=files), 400)["message"]


def test_s2_a_pickle_is_refused_by_its_filename(site: Site) -> None:
    error = error_of(site.upload(weights=("adapter_model.bin", b"\x80\x02")), 400)
    assert "safe_serialization=True" in error["message"]


@pytest.mark.parametrize(
    ("content_type", "body", "status"),
    [
        ("application/json", b"{}", 415),
        ("text/plain", b"hello", 415),
        ("", b"hello", 415),
        ("multipart/form-data", b"hello", 400),
        ("multipart/form-data; boundary=", b"hello", 400),
        ("multipart/form-data; boundary=x", b"", 400),
        ("multipart/form-data; boundary=x", b"hello", 400),
        ("multipart/form-data; boundary=x", b"--x\r\n", 400),
        ("multipart/form-data; boundary=x", b"--x\r\nnonsense\r\n\r\nabc\r\n--x--\r\n", 400),
        ("multipart/form-data; boundary=x", b"--x--\r\n", 400),
        (
            "multipart/form-data; boundary=x",
            b'--x\r\nContent-Disposition: form-data; name="name"\r\n\r\ncut sh',
            400,
        ),
        (
            "multipart/form-data; boundary=x",
            b"--x\r\nContent-Disposition: form-data\r\n\r\nabc\r\n--x--\r\n",
            400,
        ),
        ("multipart/form-data; boundary=x", b"--x\r\n" + b"a: b\r\n" * 100 + b"\r\n", 400),
        ("multipart/form-data; boundary=x", b"--x\r\nA: " + b"b" * 10_000 + b"\r\n\r\n", 400),
    ],
)
def test_what_is_not_a_multipart_upload_is_refused(
    site: Site, content_type: str, body: bytes, status: int
) -> None:
    response = site.client.post(
        "/v1/adapters", content=body, headers={"content-type": content_type}
    )
    error_of(response, status)
    assert site.stored() == []


def test_too_many_parts_are_refused(site: Site) -> None:
    body = b'--x\r\nContent-Disposition: form-data; name="name"\r\n\r\na\r\n' * 20
    headers = {"content-type": "multipart/form-data; boundary=x"}
    error_of(site.client.post("/v1/adapters", content=body, headers=headers), 400)


def test_f17_a_file_over_the_limit_is_refused_with_the_limit(site: Site) -> None:
    error = error_of(site.upload(file=b"\0" * (UPLOAD_BYTES_MAX + 1)), 413)
    assert str(UPLOAD_BYTES_MAX) in error["message"]
    assert site.stored() == []


def test_a_body_over_the_limit_is_refused_by_its_length(site: Site) -> None:
    error_of(site.upload(file=b"\0" * (UPLOAD_BYTES_MAX + 2**21)), 413)
    assert site.stored() == []


def test_a_body_without_length_is_cut_at_the_limit(site: Site) -> None:
    def endless() -> Iterator[bytes]:
        yield b'--x\r\nContent-Disposition: form-data; name="weights"\r\n\r\n'
        for _ in range(UPLOAD_BYTES_MAX // 2**16 + 64):
            yield b"\0" * 2**16

    headers = {"content-type": "multipart/form-data; boundary=x"}
    response = site.client.post("/v1/adapters", content=endless(), headers=headers)
    error_of(response, 413)
    assert site.stored() == []


def test_an_endless_preamble_is_cut_at_the_limit(site: Site) -> None:
    body = b"p" * (UPLOAD_BYTES_MAX + 2**23)
    headers = {"content-type": "multipart/form-data; boundary=x"}
    chunks = (body[start : start + 2**16] for start in range(0, len(body), 2**16))
    error_of(site.client.post("/v1/adapters", content=chunks, headers=headers), 413)


def test_a_config_over_the_limit_is_refused(site: Site) -> None:
    assert error_of(site.upload(config_json=b" " * (2**20 + 1)), 413)["param"] == "config"
    assert site.stored() == []


def test_f17_the_tenants_number_of_adapters_is_limited(site: Site) -> None:
    for number in range(ADAPTERS_MAX):
        assert site.upload(f"name-{number}").status_code == 201
    response = site.upload("one-more")
    assert error_of(response, 429)["code"] == "insufficient_quota"
    assert response.headers["x-should-retry"] == "false"
    assert site.upload("name-0", file=weights(tensors(seed=1))).status_code == 201


def test_a_client_that_leaves_during_an_upload_leaves_nothing(site: Site) -> None:
    url = httpx.URL(site.live.url)
    key = site.client.headers["authorization"]
    head = (
        f"POST /v1/adapters HTTP/1.1\r\nHost: x\r\nAuthorization: {key}\r\n"
        "Content-Type: multipart/form-data; boundary=x\r\nContent-Length: 1000000\r\n\r\n"
        '--x\r\nContent-Disposition: form-data; name="weights"\r\n\r\n'
    )
    with socket.create_connection((url.host, url.port or 80)) as leaving:
        leaving.sendall(head.encode() + b"\0" * 100_000)
        wait_until(lambda: site.stored() != [])
    wait_until(lambda: site.stored() == [])


def wait_until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_client_that_sends_nothing_more_is_given_up(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "SILENCE_S", 0.2)

    def stopping() -> Iterator[bytes]:
        yield b'--x\r\nContent-Disposition: form-data; name="weights"\r\n\r\nabc'
        time.sleep(1.0)

    headers = {"content-type": "multipart/form-data; boundary=x"}
    response = site.client.post("/v1/adapters", content=stopping(), headers=headers)
    assert "nothing came for" in error_of(response, 400)["message"]
    assert site.stored() == []


def test_a_full_disk_is_told_to_come_back_and_leaves_nothing(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(AdapterStore, "put", full)
    response = site.upload()
    assert error_of(response, 503)["code"] == "storage_full"
    assert response.headers["retry-after"] == "60"
    monkeypatch.undo()
    assert site.stored() == []
    assert site.upload().status_code == 201


def test_too_many_uploads_at_once_are_told_to_come_back(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "UPLOADS_MAX", 0)
    response = site.upload()
    assert "Too many uploads" in error_of(response, 503)["message"]
    assert response.headers["retry-after"]


def test_the_same_content_uploaded_by_many_at_once_is_stored_once(site: Site) -> None:
    names = [f"name-{number}" for number in range(ADAPTERS_MAX)]
    with ThreadPoolExecutor(8) as threads:
        responses = list(threads.map(site.upload, names * 4))
    assert {response.status_code for response in responses} <= {200, 201}
    assert len({response.json()["digest"] for response in responses}) == 1
    assert len({response.json()["id"] for response in responses}) == ADAPTERS_MAX
    assert sorted(site.names()) == names
    assert len(site.stored()) == 3


def test_uploads_and_deletes_of_one_content_at_once_leave_all_or_nothing(site: Site) -> None:
    def round_trip(number: int) -> set[int]:
        uploaded = site.upload(f"name-{number % ADAPTERS_MAX}").status_code
        deleted = site.client.delete(f"/v1/adapters/name-{number % ADAPTERS_MAX}").status_code
        return {uploaded, deleted}

    with ThreadPoolExecutor(6) as threads:
        statuses = set().union(*threads.map(round_trip, range(18)))
    assert statuses <= {200, 201, 404}
    assert len(site.stored()) == (3 if site.names() else 0)


@pytest.mark.parametrize(
    ("scopes", "method", "path"),
    [
        (("inference", "adapters:read"), "POST", "/v1/adapters"),
        (("inference", "adapters:read"), "DELETE", "/v1/adapters/pirate"),
        (("inference", "adapters:write"), "GET", "/v1/adapters"),
        (("inference", "adapters:write"), "GET", "/v1/adapters/pirate"),
    ],
)
def test_s10_each_route_asks_for_its_scope(
    site: Site, scopes: tuple[str, ...], method: str, path: str
) -> None:
    site.upload()
    with site.live.client(site.tenant, scopes=scopes) as limited:
        if method == "POST":
            response = site.upload("other", client=limited)
        else:
            response = limited.request(method, path)
    assert error_of(response, 403)["code"] == "permission_denied"
    assert site.names() == ["pirate"]


def test_s10_without_a_key_there_is_nothing(site: Site) -> None:
    with httpx.Client(base_url=site.live.url) as nobody:
        for response in (
            site.upload(client=nobody),
            nobody.get("/v1/adapters"),
            nobody.get("/v1/adapters/pirate"),
            nobody.delete("/v1/adapters/pirate"),
        ):
            assert error_of(response, 401)["code"] == "invalid_api_key"
    assert site.stored() == []


def test_l6_another_tenants_adapter_is_as_good_as_not_there(site: Site, running: Live) -> None:
    adapter = site.upload().json()
    with running.client("stranger") as stranger:
        for name in ("pirate", adapter["id"], "never-was", "00000000-0000-0000-0000-000000000000"):
            one = error_of(stranger.get(f"/v1/adapters/{name}"), 404)
            two = error_of(stranger.delete(f"/v1/adapters/{name}"), 404)
            assert one == two
            assert one["message"].replace(name, "…") == (
                "There is no adapter '…'. GET /v1/adapters lists what there is."
            )
        assert stranger.get("/v1/adapters").json()["data"] == []
    assert site.names() == ["pirate"]


@pytest.mark.parametrize(
    "name", ["a%00b", "%2e%2e%2fetc", "%ff", "x" * 5000, "a%20b", "%F0%9F%98%80"]
)
def test_s3_odd_names_in_a_path_are_not_found(site: Site, name: str) -> None:
    for method in ("GET", "DELETE"):
        assert site.client.request(method, f"/v1/adapters/{name}").status_code in (400, 404)
