"""From the bytes of an upload to an adapter that answers.

    receive → check → store → self-test → commit

A draft folder holds the files until `store`; on every way out before `commit`, what was written is
removed again.
"""

import asyncio
import errno
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from msgspec import Struct
from sqlalchemy.exc import IntegrityError

from gateway.adapters import catalog
from gateway.adapters.allowance import Allowance
from gateway.adapters.parts import Received, receive
from gateway.adapters.peft_format import Manifest, version_digest
from gateway.adapters.store import AdapterStore
from gateway.adapters.tables import AdapterVersion
from gateway.db import Database
from gateway.engine.client import Engine, EngineFailure
from gateway.engine.messages import AdapterRef, FailureCode, ModelInfo, Sampling, Submit
from gateway.errors import ApiError, EngineUnavailable, InvalidAdapter, Overloaded
from gateway.settings import Settings

UPLOADS_MAX = 64
"""At once in this process: each may hold a file of the largest size on disk."""
PLACE_TRIES = 5
"""A try fails only if the same tenant makes the same name at the same moment."""
STORAGE_RETRY_S = 60.0


class Uploaded(Struct, frozen=True):
    placed: catalog.Placed
    warnings: list[str]


class Upload:
    """What an upload needs; one instance serves any number."""

    def __init__(
        self, settings: Settings, database: Database, store: AdapterStore, engine: Engine
    ) -> None:
        self._bytes_max = settings.adapters.upload_bytes_max
        self._test_s_max = settings.server.first_token_s_max
        self._database, self._store, self._engine = database, store, engine

    async def run(
        self,
        tenant_id: str,
        allowance: Allowance,
        chunks: AsyncIterator[bytes],
        content_type: str,
    ) -> Uploaded:
        """From the multipart body of a request. Raises the ApiError that says what is wrong with
        the upload, or with us."""
        return await self.take_in(
            tenant_id,
            allowance,
            lambda draft: receive(chunks, content_type, draft, self._bytes_max),
        )

    async def take_in(
        self,
        tenant_id: str,
        allowance: Allowance,
        fill: Callable[[Path], Awaitable[Received]],
    ) -> Uploaded:
        """From the files that `fill` puts into a draft. Raises as `run` does."""
        info = self._engine.info
        if info is None:
            raise EngineUnavailable(
                "Adapters are checked against the base model, which is being loaded."
            )
        try:
            async with self._draft() as draft:
                received = await fill(draft)
                await self._check_name(tenant_id, allowance, received.name, info)
                return await self._keep(tenant_id, allowance, received, draft, info)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise Overloaded(
                "The adapter store is full. Tell the operator, or try again later.",
                code="storage_full",
                retry_after_s=STORAGE_RETRY_S,
            ) from error

    @asynccontextmanager
    async def _draft(self) -> AsyncIterator[Path]:
        if self._store.uploads >= UPLOADS_MAX:
            raise Overloaded("Too many uploads are under way. Send it again in a moment.")
        self._store.uploads += 1
        try:
            draft = await asyncio.to_thread(self._store.begin)
            try:
                yield draft
            finally:
                await asyncio.to_thread(self._store.discard, draft)
        finally:
            self._store.uploads -= 1

    async def _check_name(
        self, tenant_id: str, allowance: Allowance, name: str, info: ModelInfo
    ) -> None:
        """Before the files are looked at: cheap, and what people get wrong most often."""
        catalog.check_name(name, info.name)
        allowance.check_name(name)
        await self._check_room(tenant_id, allowance, name, 0)

    async def _check_room(
        self, tenant_id: str, allowance: Allowance, name: str, size_bytes: int, digest: str = ""
    ) -> None:
        async with self._database.session() as session:
            await catalog.check_room(session, tenant_id, name, size_bytes, allowance, digest)

    async def _keep(
        self,
        tenant_id: str,
        allowance: Allowance,
        received: Received,
        draft: Path,
        info: ModelInfo,
    ) -> Uploaded:
        manifest = await self._store.sandbox.check(
            draft, info, self._bytes_max, received.weights_sha256
        )
        digest = version_digest(manifest)
        # again where it is placed; here so that no engine tries what can't be kept
        await self._check_room(tenant_id, allowance, received.name, manifest.size_bytes, digest)
        kept = False
        async with catalog.lease(self._database, self._store, self._engine, digest):
            try:
                ref = await asyncio.to_thread(self._store.put, draft, digest, manifest)
                await self._self_test(tenant_id, ref, info)
                placed = await self._place(
                    tenant_id, allowance, received.name, _version(digest, manifest, info)
                )
                kept = True
            finally:
                if not kept:
                    self._store.leases.retire(digest)
        for retired in placed.retired:
            await catalog.collect(self._database, self._store, self._engine, retired)
        return Uploaded(placed, manifest.warnings)

    async def _self_test(self, tenant_id: str, ref: AdapterRef, info: ModelInfo) -> None:
        """Load the adapter and run it once: it is ready when it has answered, not before."""
        request = Submit(
            request_id=f"selftest-{uuid.uuid4().hex}",
            prompt=[info.eos_token_ids[0] if info.eos_token_ids else 0],
            max_tokens=1,
            sampling=Sampling(temperature=0.0),
            adapter=ref,
            fairness_key=tenant_id,
        )
        try:
            async with (
                asyncio.timeout(self._test_s_max),
                self._engine.submit(request) as stream,
            ):
                async for _ in stream:
                    pass
        except TimeoutError:
            raise Overloaded("The engine was too busy to test the adapter.") from None
        except EngineFailure as failure:
            raise _test_error(failure.code, failure.detail) from failure

    async def _place(
        self, tenant_id: str, allowance: Allowance, name: str, version: AdapterVersion
    ) -> catalog.Placed:
        for _ in range(PLACE_TRIES):
            try:
                async with self._database.session() as session:
                    placed = await catalog.place(session, tenant_id, name, version, allowance)
                    if not await asyncio.to_thread(self._store.has, version.digest):
                        raise _changed_elsewhere()  # collected by another process: roll back
                    return placed
            except IntegrityError:
                continue
            finally:
                self._store.names.changed(tenant_id)
        raise _changed_elsewhere()


def _changed_elsewhere() -> ApiError:
    return Overloaded("The adapter was changed elsewhere at the same moment. Send it again.")


def _version(digest: str, manifest: Manifest, info: ModelInfo) -> AdapterVersion:
    return AdapterVersion(
        digest=digest,
        size_bytes=manifest.size_bytes,
        rank_max=manifest.rank_max,
        targets=manifest.targets,
        base_digest=info.digest,
        base_model=info.name,
    )


def _test_error(code: FailureCode, detail: str) -> ApiError:
    match code:
        case "adapter_failed":
            return InvalidAdapter(f"The engine cannot load this adapter: {detail}", param="weights")
        case "not_finite":
            return InvalidAdapter(
                "The base model's numbers overflow with this adapter. Its values or its "
                "lora_alpha are too large.",
                param="weights",
            )
        case "overloaded" | "late":
            return Overloaded("The engine is too busy to test the adapter. Send it again.")
        case _:
            return EngineUnavailable("The engine stopped while it tested the adapter.")
