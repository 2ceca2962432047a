"""The walk of a request: from the model it names to the text that the engine makes.

    principal → model within the tenant → tokens → limits → engine → text, stop strings → usage

Every endpoint that generates walks it; limits, policies and accounting join it here.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NoReturn

from litestar import Request
from msgspec import Struct

from gateway.adapters import catalog
from gateway.adapters.store import AdapterStore
from gateway.db import Database
from gateway.engine.client import Engine, EngineFailure, TokenStream
from gateway.engine.messages import AdapterRef, Finished, ModelInfo, Submit, Tokens
from gateway.engine.tokenizer import TextStream, Tokenizer
from gateway.errors import (
    ApiError,
    EngineUnavailable,
    InvalidAdapter,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
)
from gateway.inference import fitting
from gateway.inference.ask import Ask, client_of
from gateway.inference.stops import StopStrings
from gateway.inference.tokenizers import TokenizerSource
from gateway.inference.wire import FinishReason, Usage
from gateway.settings import Settings
from gateway.tenants.keys import Principal
from gateway.tenants.limits.admission import Admission, admitted
from gateway.tenants.limits.limiter import Demand, Limiter
from gateway.tenants.usage.ledger import Record
from gateway.tenants.usage.meter import Meter

logger = logging.getLogger(__name__)

VERSION_HEADER = "x-loragate-adapter-digest"
"""Which version has answered."""


class Ending(Struct, frozen=True):
    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int

    @property
    def usage(self) -> Usage:
        total = self.prompt_tokens + self.completion_tokens
        return Usage(self.prompt_tokens, self.completion_tokens, total)


class Walk:
    """What one client's request needs on its way."""

    def __init__(
        self,
        principal: Principal,
        settings: Settings,
        engine: Engine,
        database: Database,
        store: AdapterStore,
        tokenizers: TokenizerSource,
        limiter: Limiter,
        meter: Meter,
    ) -> None:
        self.headers: dict[str, str] = {}
        """What the response should have, complete before the answer's first piece."""
        self.body_bytes_max = settings.server.body_bytes_max
        self._principal = principal
        self._first_token_s_max = settings.server.first_token_s_max
        self._engine, self._database, self._store = engine, database, store
        self._tokenizers = tokenizers
        self._limiter = limiter
        self._meter = meter

    @asynccontextmanager
    async def answer(self, ask: Ask) -> AsyncIterator["Answer"]:
        """Leaving it early cancels the work. Raises ApiError; so does the answer when iterated."""
        self._principal.require("inference")
        info = self._engine.info
        if info is None:
            raise EngineUnavailable("The engine is loading the base model.")
        async with self._model(ask, info) as (name, adapter):
            if adapter is not None:
                self.headers[VERSION_HEADER] = adapter.digest
            tokenizer = await self._tokenizers.get()
            fitting.check_length(tokenizer, ask, info)
            prompt = await fitting.tokens(tokenizer, self._tokenizers.long_encodes, ask, info)
            room = fitting.room(len(prompt), ask, info)
            submit = Submit(
                request_id=f"{ask.id_prefix}{secrets.token_hex(16)}",
                prompt=prompt,
                max_tokens=fitting.within_limit(room, len(prompt), ask, self._principal),
                sampling=ask.sampling,
                adapter=adapter,
                stop_token_ids=fitting.stop_token_ids(tokenizer, ask, info),
                fairness_key=self._principal.tenant_id,
                fairness_weight=self._principal.weight,
                cache_namespace=self._principal.tenant_id,
                first_token_s=self._first_token_s_max,
            )
            rates = self._meter.prices.rates(self._principal.tenant_id, name, info.name)
            demand = Demand(
                submit.request_id, self._principal, len(prompt), submit.max_tokens, rates
            )
            async with admitted(self._limiter, demand) as admission:
                self.headers.update(admission.headers)
                record = self._meter.ledger.open(
                    request_id=submit.request_id,
                    principal=self._principal,
                    model=name,
                    adapter_digest=None if adapter is None else adapter.digest,
                    rates=rates,
                )
                try:
                    async with self._engine.submit(submit, record) as stream:
                        yield Answer(
                            submit,
                            info,
                            stream,
                            record,
                            tokenizer,
                            admission,
                            ask.stop,
                            self._first_token_s_max,
                        )
                except EngineFailure as failure:
                    _raise(failure, ask)
                finally:
                    admission.computed(record.cached_tokens, record.completion_tokens)

    @asynccontextmanager
    async def _model(
        self, ask: Ask, info: ModelInfo
    ) -> AsyncIterator[tuple[str, AdapterRef | None]]:
        """The adapter that `model` means to this tenant, kept until the end, and its name, which
        `model` may not be; no adapter for the base."""
        model = ask.model
        if model == info.name:
            if not self._principal.may_use(model):
                raise ModelNotFound(model)
            yield info.name, None
            return
        async with catalog.leased(
            self._database,
            self._store,
            self._engine,
            self._principal.tenant_id,
            model,
            client_of(ask, self._principal),
        ) as version:
            if version is None or not self._principal.may_use(version.name):
                raise ModelNotFound(model)
            if version.base_digest != info.digest:
                raise InvalidAdapter(
                    f"The adapter {model!r} was uploaded for the base model {version.base_model}, "
                    f"but {info.name} is served now. Upload one that was trained for it.",
                    param="model",
                )
            yield version.name, self._store.ref(version.digest)


async def begin(request: Request[Any, Any, Any]) -> Walk:
    """The walk of whoever asks; the app's state has its parts.

    Not injected: with its eight parts, that cost as much as authenticating the request. Raises what
    the authenticator raises.
    """
    state = request.app.state
    walk: Walk = state.walk(await state.authenticator(request))
    return walk


class Answer:
    """The text of one answer in pieces, as they are sure; then its Ending. Iterate it once."""

    def __init__(
        self,
        submit: Submit,
        info: ModelInfo,
        stream: TokenStream,
        record: Record,
        tokenizer: Tokenizer,
        admission: Admission,
        stop: tuple[str, ...],
        first_token_s_max: float,
    ) -> None:
        self.id = submit.request_id
        self.fingerprint = f"fp_{info.digest[:12]}"
        self._prompt_tokens = len(submit.prompt)
        self._stream = stream
        self._record = record
        self._text = TextStream(tokenizer)
        self._admission = admission
        self._stops = StopStrings(stop)
        self._first_token_s_max = first_token_s_max

    async def __aiter__(self) -> AsyncIterator[str | Ending]:
        """Pieces are never empty, and never hold half a character or the start of a stop string."""
        event = await self._first()
        admission = self._admission
        while isinstance(event, Tokens):
            ids = await admission.granted(event.ids)
            if piece := self._stops.push(self._text.push(ids)):
                yield piece
            if self._stops.found:
                self._record.ends("stop")
                yield Ending("stop", self._prompt_tokens, admission.produced)
                return
            if len(ids) < len(event.ids):  # as if max_tokens had been what was granted
                self._record.ends("length")
                event = Finished(self.id, "length", self._prompt_tokens, admission.produced)
            else:
                event = await anext(self._stream)
        if piece := self._stops.push(self._text.flush()) + self._stops.flush():
            yield piece
        assert event.reason != "cancelled", "only who left is told so"
        reason: FinishReason = "stop" if self._stops.found else event.reason
        yield Ending(reason, event.prompt_tokens, event.completion_tokens)

    async def whole(self) -> tuple[str, Ending]:
        """All pieces together."""
        pieces: list[str] = []
        async for event in self:
            if isinstance(event, Ending):
                return "".join(pieces), event
            pieces.append(event)
        raise AssertionError("an answer has an ending")

    async def _first(self) -> Tokens | Finished:
        try:
            async with asyncio.timeout(self._first_token_s_max):
                return await anext(self._stream)
        except TimeoutError:
            raise Overloaded(
                "The engine is too busy: the request waited too long for its first token."
            ) from None


def _raise(failure: EngineFailure, ask: Ask) -> NoReturn:
    """The error that a client gets for what the engine says."""
    match failure.code:
        case "prompt_too_long":
            raise InvalidRequest(
                f"Too long for this model ({ask.prompt_param}): {failure.detail}",
                param=ask.prompt_param,
                code="context_length_exceeded",
            ) from failure
        case "adapter_failed":
            raise InvalidAdapter(
                f"The adapter {ask.model!r} cannot be loaded: {failure.detail}", param="model"
            ) from failure
        case "not_finite":
            raise InvalidAdapter(
                f"The numbers of {ask.model!r} overflow on this prompt.", param="model"
            ) from failure
        case "overloaded":
            raise Overloaded("The engine's queue is full. Try again in a moment.") from failure
        case "late":
            raise Overloaded(
                "The engine is too busy to begin the answer in time. Try again later, or send "
                "fewer or shorter requests at a time.",
                retry_after_s=failure.retry_after_s,
            ) from failure
        case "engine_lost":
            raise EngineUnavailable(
                "The engine stopped or is being started. Try again in a moment."
            ) from failure
        case "internal":
            logger.error("the engine failed: %s", failure.detail)
            raise ApiError("The engine failed on this request.") from failure
