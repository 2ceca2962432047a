import time
from typing import Any

import pytest

from tests.adapters.conftest import Site
from tests.adapters.making import config, tensors, weights
from tests.live import Live, error_of


def upload(site: Site, *seeds: int, name: str = "pirate") -> list[dict[str, Any]]:
    responses = [site.upload(name, file=weights(tensors(seed=seed))) for seed in seeds]
    assert all(response.is_success for response in responses)
    return [response.json() for response in responses]


def put(site: Site, alias: str, name: str = "pirate", **body: Any) -> Any:
    return site.client.put(f"/v1/adapters/{name}/aliases/{alias}", json=body)


def versions_of(site: Site, name: str = "pirate") -> list[dict[str, Any]]:
    response = site.client.get(f"/v1/adapters/{name}/versions")
    assert response.status_code == 200
    found: list[dict[str, Any]] = response.json()["data"]
    return found


def test_versions_are_listed_newest_first(site: Site) -> None:
    one, two = upload(site, 0, 1)
    put(site, "prod", version="v1")
    listed = versions_of(site)
    assert listed == versions_of(site, one["id"])
    assert [(each["version"], each["aliases"]) for each in listed] == [
        (2, ["latest"]),
        (1, ["prod"]),
    ]
    for each, uploaded in zip(listed, (two, one), strict=True):
        for field in ("digest", "size_bytes", "rank", "targets", "base_model"):
            assert each[field] == uploaded[field]
        assert each["object"] == "adapter.version"


def test_an_alias_is_put_listed_moved_and_deleted(site: Site) -> None:
    one, two = upload(site, 0, 1)
    first = put(site, "prod", version=1)
    assert first.status_code == 200
    body = first.json()
    assert 0 <= time.time() - body.pop("updated_at") < 10
    assert body == {
        "object": "adapter.alias",
        "alias": "prod",
        "model": "pirate@prod",
        "versions": [{"version": 1, "digest": one["digest"], "percent": 100}],
    }
    moved = put(site, "prod", version=two["digest"][:8]).json()
    assert moved["versions"] == [{"version": 2, "digest": two["digest"], "percent": 100}]
    split = put(site, "prod", split={"v2": 10, "v1": 90}).json()
    assert [(share["version"], share["percent"]) for share in split["versions"]] == [
        (1, 90),
        (2, 10),
    ]
    listed = site.client.get("/v1/adapters/pirate/aliases").json()
    assert listed["object"] == "list"
    latest, prod = listed["data"]
    assert (latest["alias"], latest["updated_at"]) == ("latest", None)
    assert latest["versions"] == [{"version": 2, "digest": two["digest"], "percent": 100}]
    assert prod == split
    deleted = site.client.delete("/v1/adapters/pirate/aliases/prod")
    assert deleted.json() == {"alias": "prod", "object": "adapter.alias", "deleted": True}
    error_of(site.client.delete("/v1/adapters/pirate/aliases/prod"), 404)
    assert len(site.client.get("/v1/adapters/pirate/aliases").json()["data"]) == 1


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "version"),
        ({"version": "v1", "split": {"v1": 50, "v2": 50}}, 400, "split"),
        ({"split": {}}, 400, "split"),
        ({"split": {"v1": 100}}, 400, "split"),
        ({"split": {"v1": 50, "1": 50}}, 400, "split"),
        ({"split": {"v1": 50, "v2": 51}}, 400, "split"),
        ({"split": {"v1": 100, "v2": 0}}, 400, "split"),
        ({"split": {"v1": 200, "v2": -100}}, 400, "split"),
        ({"split": {"v1": 50.5, "v2": 49.5}}, 400, None),
        ({"split": {"v1": 10**30, "v2": 1}}, 400, None),
        ({"version": "v9"}, 404, "version"),
        ({"version": 0}, 404, "version"),
        ({"version": -1}, 404, "version"),
        ({"version": 10**18}, 404, "version"),
        ({"version": "prod"}, 404, "version"),
        ({"version": ""}, 404, "version"),
        ({"version": "00000000"}, 404, "version"),
        ({"version": "%" * 20}, 404, "version"),
        ({"version": "x" * 5000}, 404, "version"),
        ({"version": None}, 400, None),
        ({"number": 1}, 400, None),
    ],
)
def test_what_an_alias_cannot_mean_is_refused_and_changes_nothing(
    site: Site, body: dict[str, Any], status: int, param: str | None
) -> None:
    upload(site, 0, 1)
    kept = put(site, "prod", version=1).json()
    error = error_of(put(site, "prod", **body), status)
    if param is not None:
        assert error["param"] == param
    assert site.client.get("/v1/adapters/pirate/aliases").json()["data"][1] == kept


@pytest.mark.parametrize("alias", ["latest", "v1", "7", "deadbeef", "a b", "x" * 65, "%00", "%ff"])
def test_an_alias_that_cannot_be_one_is_refused(site: Site, alias: str) -> None:
    upload(site, 0)
    assert put(site, alias, version=1).status_code == 400
    assert site.client.delete(f"/v1/adapters/pirate/aliases/{alias}").status_code in (400, 404)


def test_a_version_that_an_alias_names_is_a_409_that_says_so(site: Site) -> None:
    one, _ = upload(site, 0, 1)
    put(site, "prod", version=1)
    response = site.client.delete("/v1/adapters/pirate/versions/v1")
    error = error_of(response, 409)
    assert "`prod`" in error["message"]
    assert response.headers["x-should-retry"] == "false"
    latest = error_of(site.client.delete("/v1/adapters/pirate/versions/2"), 409)
    assert "`latest`" in latest["message"]
    put(site, "prod", version=2)
    deleted = site.client.delete(f"/v1/adapters/pirate/versions/{one['digest'][:12]}")
    assert deleted.json() == {"version": 1, "object": "adapter.version", "deleted": True}
    assert site.engine.unloads == [one["digest"]]
    assert len(site.stored()) == 3
    error_of(site.client.delete("/v1/adapters/pirate/versions/v1"), 404)


def test_l6_another_tenants_versions_and_aliases_are_not_there(site: Site, running: Live) -> None:
    upload(site, 0, 1)
    put(site, "prod", version=1)
    with running.client("stranger") as stranger:
        for method, path, body in (
            ("GET", "versions", None),
            ("DELETE", "versions/1", None),
            ("GET", "aliases", None),
            ("PUT", "aliases/prod", {"version": 2}),
            ("DELETE", "aliases/prod", None),
        ):
            for name in ("pirate", "never-was"):
                response = stranger.request(method, f"/v1/adapters/{name}/{path}", json=body)
                message = error_of(response, 404)["message"]
                assert message.startswith(f"There is no adapter '{name}'.")
    assert [version["aliases"] for version in versions_of(site)] == [["latest"], ["prod"]]


def test_a_key_for_certain_adapters_has_their_versions_and_aliases_alone(
    site: Site, running: Live
) -> None:
    upload(site, 0, 1)
    upload(site, 0, name="judge")
    with running.client(site.tenant, allowed_adapters=["pirate"]) as limited:
        for name, status in (("pirate", 200), ("judge", 404)):
            path = f"/v1/adapters/{name}"
            for answer in (
                limited.put(f"{path}/aliases/prod", json={"version": 1}),
                limited.get(f"{path}/versions"),
                limited.get(f"{path}/aliases"),
                limited.delete(f"{path}/aliases/prod"),
            ):
                assert answer.status_code == status
        assert limited.delete("/v1/adapters/pirate/versions/1").status_code == 200
        error_of(limited.delete("/v1/adapters/judge/versions/1"), 404)


def test_one_adapter_tells_where_it_is_its_ranks_and_its_use(site: Site) -> None:
    site.upload("pirate")
    ranked = config(rank_pattern={"q_proj": 4, "v_proj": 2}, layers_to_transform=[0, 1])
    made = tensors(("q_proj",)) | tensors(("v_proj",), rank=2, seed=1)
    two = site.upload("pirate", ranked, weights(made)).json()
    put(site, "prod", version=1)
    shown = site.client.get("/v1/adapters/pirate").json()
    assert shown["ranks"] == {"q_proj": [4], "v_proj": [2]}
    assert (shown["digest"], shown["version"]) == (two["digest"], 2)
    assert (shown["where"], shown["last_used_at"], shown["requests_30d"]) == ("pool", None, 0)
    assert [version["version"] for version in shown["versions"]] == [2, 1]
    assert [alias["alias"] for alias in shown["aliases"]] == ["latest", "prod"]
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    for model in ("pirate", "pirate", "pirate@prod"):
        answer = site.client.post("/v1/chat/completions", json={"model": model, **body})
        assert answer.status_code == 200
    deadline = time.monotonic() + 10
    while sum(version["requests_30d"] for version in versions_of(site)) < 3:
        assert time.monotonic() < deadline, "the ledger never told of the requests"
        time.sleep(0.05)
    assert [version["requests_30d"] for version in versions_of(site)] == [2, 1]
    shown = site.client.get("/v1/adapters/pirate").json()
    assert shown["requests_30d"] == 2
    assert abs(shown["last_used_at"] - time.time()) < 20


def test_while_the_engine_is_away_an_adapter_is_shown_without_its_place(site: Site) -> None:
    site.upload("pirate")
    site.engine.ready = False
    shown = site.client.get("/v1/adapters/pirate").json()
    assert shown["where"] is None
    assert shown["ranks"] == {"q_proj": [4], "v_proj": [4]}


def test_uploads_make_room_for_themselves_and_the_engine_lets_go(site: Site) -> None:
    uploaded = upload(site, *range(12))
    assert [version["version"] for version in versions_of(site)] == list(range(12, 2, -1))
    assert site.engine.unloads == [each["digest"] for each in uploaded[:2]]
    assert len(site.stored()) == 3 * 10
