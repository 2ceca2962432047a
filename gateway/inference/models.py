"""GET /v1/models: the base model, and the adapters of the caller's tenant, each also under the
aliases that it was given. No paths, no others'.

Versions by number and `latest` are not listed, but can be asked for. What was uploaded for another
base model is not there.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from litestar import get
from litestar.params import PathParameter

from gateway.adapters import aliases, catalog
from gateway.adapters.aliases import Alias
from gateway.adapters.meaning import meaning_of
from gateway.adapters.names import Meaning
from gateway.adapters.references import DEFAULT
from gateway.adapters.tables import Adapter
from gateway.db import Database
from gateway.engine.client import Engine
from gateway.engine.messages import ModelInfo
from gateway.errors import EngineUnavailable, ModelNotFound
from gateway.inference.wire import Model, ModelList
from gateway.injection import Injected
from gateway.tenants.keys import Principal


@get("/v1/models", operation_id="listModels", summary="What `model` may be", tags=["Inference"])
async def list_models(
    principal: Injected[Principal], database: Injected[Database], engine: Injected[Engine]
) -> ModelList:
    principal.require("inference")
    info = _info(engine)
    async with database.session() as session:
        adapters = await catalog.list_of(session, principal.tenant_id)
        named = await aliases.of_tenant(session, principal.tenant_id)
    models = [_base(info)] if principal.may_use(info.name) else []
    for adapter in adapters:
        if principal.may_use(adapter.name):
            models += _models(adapter, named.get(adapter.id, []), info, principal)
    return ModelList(models)


def _models(
    adapter: Adapter, named: list[Alias], info: ModelInfo, principal: Principal
) -> Iterator[Model]:
    """Under its name alone, and under its aliases."""
    meanings = {"": [adapter.version]} | {
        "" if alias.row.name == DEFAULT else f"@{alias.row.name}": [
            version.version for version, _ in alias.shares
        ]
        for alias in named
    }
    for label, versions in meanings.items():
        if all(version.base_digest == info.digest for version in versions):
            yield Model(
                id=adapter.name + label,
                created=int(adapter.created_at.timestamp()),
                owned_by=principal.tenant_slug,
                base_model=info.name,
            )


@get(
    "/v1/models/{model:path}",
    operation_id="retrieveModel",
    summary="One model",
    tags=["Inference"],
)
async def retrieve_model(
    model: Annotated[str, PathParameter(description="The model's id.")],
    principal: Injected[Principal],
    database: Injected[Database],
    engine: Injected[Engine],
) -> Model:
    principal.require("inference")
    info, name = _info(engine), model.removeprefix("/")
    if name == info.name and principal.may_use(name):
        return _base(info)
    async with database.reading() as connection:
        meaning = await meaning_of(connection, principal.tenant_id, name)
    if meaning is None or not _fits(meaning, info) or not principal.may_use(meaning.version.name):
        raise ModelNotFound(name)
    async with database.session() as session:
        adapter = await catalog.find(session, principal.tenant_id, name.partition("@")[0])
    if adapter is None:  # it went meanwhile
        raise ModelNotFound(name)
    return Model(
        id=name if "@" in name else adapter.name,
        created=int(adapter.created_at.timestamp()),
        owned_by=principal.tenant_slug,
        base_model=info.name,
    )


def _info(engine: Engine) -> ModelInfo:
    if engine.info is None:
        raise EngineUnavailable("The engine is loading the base model.")
    return engine.info


def _fits(meaning: Meaning, info: ModelInfo) -> bool:
    """Whether it was uploaded for the base model that is served now."""
    return all(version.base_digest == info.digest for version in meaning.versions)


def _base(info: ModelInfo) -> Model:
    return Model(id=info.name, created=_made(Path(info.model_path)), owned_by="loragate")


def _made(path: Path) -> int:
    """Unix time of the model's file; 0 if it cannot be seen from here."""
    try:
        return int(path.stat().st_mtime)
    except OSError:
        return 0
