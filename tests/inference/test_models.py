from tests.inference.conftest import BASE, Api
from tests.live import Live, error_of


def test_s9_the_base_model_and_the_tenants_own_adapters_are_listed(api: Api, running: Live) -> None:
    adapter = api.upload("pirate")
    with running.client("other") as other:
        theirs = api.upload("pirate", other)
        listed = api.client.get("/v1/models").json()
        assert listed["object"] == "list"
        base, own = listed["data"]
        assert (base["id"], base["object"], base["owned_by"]) == (BASE, "model", "loragate")
        assert own == {
            "id": "pirate",
            "object": "model",
            "created": adapter["created_at"],
            "owned_by": "acme",
            "base_model": BASE,
        }
        assert theirs["id"] != adapter["id"]
        assert str(running.settings.data_dir) not in api.client.get("/v1/models").text
        other.delete("/v1/adapters/pirate")
    api.client.delete("/v1/adapters/pirate")


def test_one_model_is_retrieved_by_its_id(api: Api) -> None:
    api.upload("pirate")
    listed = {model["id"]: model for model in api.client.get("/v1/models").json()["data"]}
    for name in (BASE, "pirate"):
        assert api.client.get(f"/v1/models/{name}").json() == listed[name]
    api.client.delete("/v1/adapters/pirate")


def test_l6_what_is_not_there_is_not_found(api: Api, running: Live) -> None:
    api.upload("pirate")
    with running.client("stranger") as stranger:
        for name in ("pirate", "never-was", "a/b/c", "a%00b", "..%2f..%2fetc"):
            error = error_of(stranger.get(f"/v1/models/{name}"), 404)
            assert error["code"] == "model_not_found"
    api.client.delete("/v1/adapters/pirate")


def test_while_the_engine_is_loading_there_are_no_models(api: Api) -> None:
    api.engine.ready = False
    for path in ("/v1/models", f"/v1/models/{BASE}"):
        response = api.client.get(path)
        assert error_of(response, 503)["code"] == "engine_unavailable"
        assert response.headers["retry-after"]
