"""GET /v1/models: the base model, and the adapters of the caller's tenant. No paths, no others'."""

from pathlib import Path
from typing import Annotated

from litestar import get
from litestar.params import PathParameter

from gateway.adapters import catalog
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
    models = [_base(info), *(_adapter(each, principal) for each in adapters if _fits(each, info))]
    return ModelList([model for model in models if principal.may_use(model.id)])


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
    async with database.session() as session:
        adapter = await catalog.find(session, principal.tenant_id, name)
    if adapter is None or not _fits(adapter, info) or not principal.may_use(adapter.name):
        raise ModelNotFound(name)
    return _adapter(adapter, principal)


def _info(engine: Engine) -> ModelInfo:
    if engine.info is None:
        raise EngineUnavailable("The engine is loading the base model.")
    return engine.info


def _fits(adapter: Adapter, info: ModelInfo) -> bool:
    """Whether it was uploaded for the base model that is served now."""
    return adapter.version.base_digest == info.digest


def _base(info: ModelInfo) -> Model:
    return Model(id=info.name, created=_made(Path(info.model_path)), owned_by="loragate")


def _adapter(adapter: Adapter, principal: Principal) -> Model:
    return Model(
        id=adapter.name,
        created=int(adapter.created_at.timestamp()),
        owned_by=principal.tenant_slug,
        base_model=adapter.version.base_model,
    )


def _made(path: Path) -> int:
    """Unix time of the model's file; 0 if it cannot be seen from here."""
    try:
        return int(path.stat().st_mtime)
    except OSError:
        return 0
