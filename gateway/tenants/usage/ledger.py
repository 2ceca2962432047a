"""What every request used, counted as the engine tells it and written off the request path.

Each `FLUSH_EVERY_S` what has changed is appended to a journal on this machine's disk and synced;
from there it goes into the database as soon as that takes it. So a crash loses one such interval at
most, whether the database is there or not, and a database that is away for hours costs disk, not
memory. Entries may come to the database twice, or late: counts there only rise.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ParamSpec, TypeVar

import msgspec
from sqlalchemy.exc import DBAPIError, IntegrityError

from gateway.background import in_background
from gateway.db import Database, now
from gateway.engine.client import EndReason
from gateway.errors import DatabaseUnavailable
from gateway.tenants.keys import Principal
from gateway.tenants.usage import entries
from gateway.tenants.usage.entries import Entry
from gateway.tenants.usage.journal import Journal
from gateway.tenants.usage.rates import Rates, cost_nanos

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger(__name__)

FLUSH_EVERY_S = 1.0
RETRY_S = 1.0
"""After the database was found to be away."""
CHANGED_MAX = 100_000
"""Requests whose news are kept in memory while the disk takes nothing; the oldest are given up."""


class Record:
    """One request's account; the engine's client tells it what is computed."""

    __slots__ = (
        "_adapter_digest",
        "_began",
        "_duration_ms",
        "_first_token_ms",
        "_key_id",
        "_ledger",
        "_model",
        "_prompt",
        "_rates",
        "_reason",
        "_started_at",
        "_tenant_id",
        "cached_tokens",
        "completion_tokens",
        "is_noted",
        "request_id",
    )

    def __init__(
        self,
        ledger: "Ledger",
        request_id: str,
        principal: Principal,
        model: str,
        adapter_digest: str | None,
        rates: Rates,
    ) -> None:
        self.request_id = request_id
        self._ledger = ledger
        self._tenant_id = principal.tenant_id
        self._key_id = principal.key_id
        self._model = model
        self._adapter_digest = adapter_digest
        self._rates = rates
        self._started_at = now()
        self._began = time.perf_counter()
        self._prompt = 0
        self.cached_tokens = self.completion_tokens = 0
        """As far as the engine has told."""
        self._first_token_ms: float | None = None
        self._duration_ms: float | None = None
        self._reason: str | None = None
        self.is_noted = False
        """Whether the ledger knows that there are news."""

    def begin(self, prompt_tokens: int, cached_tokens: int) -> None:
        self._prompt, self.cached_tokens = prompt_tokens, cached_tokens
        self._first_token_ms = self._since_start_ms()

    def produced(self, tokens: int) -> None:
        self.completion_tokens += tokens
        self._note()

    def ends(self, reason: EndReason) -> None:
        """How the answer ends for its client, where the engine can only say that it was cancelled:
        at a stop string, say."""
        self._reason = reason

    def finish(
        self, reason: EndReason, prompt_tokens: int, completion_tokens: int, cached_tokens: int
    ) -> None:
        """The engine's own counts. A request that it refused leaves no entry."""
        self._prompt, self.cached_tokens = prompt_tokens, cached_tokens
        self.completion_tokens = completion_tokens
        if self._reason is None or reason != "cancelled":
            self._reason = reason
        self._duration_ms = self._since_start_ms()
        if prompt_tokens or completion_tokens or reason != "failed":
            self._note()

    def entry(self) -> Entry:
        """As it stands now; whatever changes from here on is news again."""
        self.is_noted = False
        ended = self._duration_ms is not None
        return Entry(
            request_id=self.request_id,
            tenant_id=self._tenant_id,
            key_id=self._key_id,
            model=self._model,
            started_at=self._started_at,
            adapter_digest=self._adapter_digest,
            prompt_tokens=self._prompt,
            cached_tokens=self.cached_tokens,
            completion_tokens=self.completion_tokens,
            cost_nanos=cost_nanos(
                self._rates, self._prompt, self.cached_tokens, self.completion_tokens
            ),
            first_token_ms=self._first_token_ms,
            duration_ms=self._duration_ms,
            finish_reason=self._reason if ended else None,
        )

    def _note(self) -> None:
        if not self.is_noted:
            self.is_noted = True
            self._ledger.note(self)

    def _since_start_ms(self) -> float:
        return (time.perf_counter() - self._began) * 1000


class Ledger:
    """One for each gateway. `written` is told what has arrived in the database."""

    def __init__(
        self,
        database: Database,
        folder: Path,
        written: Callable[[Sequence[Entry]], None] = lambda _: None,
    ) -> None:
        self._database = database
        self._folder = folder
        self._written = written
        self._changed: list[Record] = []
        self._journals: list[Journal] = []
        """Ours, then those that were left behind."""
        self._disk = asyncio.Lock()
        """Of the journals: one at a time, each in a thread."""
        self._writer = asyncio.Lock()
        self._news = asyncio.Event()

    def open(
        self,
        *,
        request_id: str,
        principal: Principal,
        model: str,
        adapter_digest: str | None,
        rates: Rates,
    ) -> Record:
        """Costs nothing until something was computed."""
        return Record(self, request_id, principal, model, adapter_digest, rates)

    def note(self, record: Record) -> None:
        self._changed.append(record)

    async def save(self) -> None:
        """Put what has changed into the journal. What the disk does not take stays changed."""
        if not self._changed:
            return
        changed, self._changed = self._changed, []
        snapshot = [record.entry() for record in changed]
        try:
            await self._on_disk(self._journals[0].append, snapshot)
        except OSError as error:
            log.error("usage of %d requests stays in memory: %s", len(changed), error)
            self._keep(changed)
        except BaseException:  # cancelled; if it was appended nevertheless, twice does no harm
            self._keep(changed)
            raise
        else:
            self._news.set()

    async def write(self) -> None:
        """Bring into the database what the journals have. Raises DatabaseUnavailable, OSError."""
        async with self._writer:
            for journal in list(self._journals):
                await self._drain(journal)
                if journal is not self._journals[0]:
                    self._journals.remove(journal)
                    await self._on_disk(journal.close)

    async def _drain(self, journal: Journal) -> None:
        while journal.waiting_bytes:
            found, place = await self._on_disk(journal.head)
            await self._write(found)
            await self._on_disk(journal.take, place)

    async def _on_disk(self, act: Callable[P, T], *args: P.args, **more: P.kwargs) -> T:
        """In a thread, one at a time; whoever is cancelled leaves it to end by itself."""

        async def run() -> T:
            async with self._disk:
                return await asyncio.to_thread(act, *args, **more)

        return await asyncio.shield(asyncio.ensure_future(run()))

    async def flush(self) -> None:
        """All there is, into the database. Raises as `write` does."""
        await self.save()
        await self.write()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Take over what dead processes left; save and write until the end, and then once more.

        Raises OSError.
        """
        left = await self._on_disk(Journal.left_behind, self._folder)
        self._journals = [await self._on_disk(Journal.create, self._folder), *left]
        self._news.set()
        try:
            async with in_background(self._save_forever(), self._write_forever()):
                yield
        finally:
            await self._save_and_close()

    async def _save_and_close(self) -> None:
        await self.save()
        try:
            await self.write()
        except (DatabaseUnavailable, DBAPIError, OSError) as error:
            log.warning("usage waits in %s for the next start: %s", self._folder, error)
        if self._changed:
            log.error("usage of %d requests is lost: the disk did not take it", len(self._changed))
        for journal in self._journals:
            await self._on_disk(journal.close)

    async def _save_forever(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_EVERY_S)
            await self.save()

    async def _write_forever(self) -> None:
        away = False
        while True:
            await self._news.wait()
            self._news.clear()
            try:
                await self.write()
            except (DatabaseUnavailable, DBAPIError, OSError) as error:
                if not away:
                    log.warning("usage stays on disk until the database takes it: %s", error)
                away = True
                self._news.set()
                await asyncio.sleep(RETRY_S)
            else:
                if away:
                    log.info("the database has taken all usage")
                away = False

    async def _write(self, found: list[Entry]) -> None:
        if not found:
            return
        newest = list({entry.request_id: entry for entry in found}.values())
        try:
            await entries.write(self._database, newest)
        except IntegrityError:
            newest = await self._one_by_one(newest)
        self._written(newest)

    async def _one_by_one(self, newest: list[Entry]) -> list[Entry]:
        """One that the database will never take must not hold up all others."""
        taken = []
        for entry in newest:
            try:
                await entries.write(self._database, [entry])
            except IntegrityError as error:
                told = msgspec.json.encode(entry).decode()
                log.error("the database does not take this usage: %s: %s", error.orig, told)
            else:
                taken.append(entry)
        return taken

    def _keep(self, changed: list[Record]) -> None:
        """Changed still; some have changed again meanwhile, and are noted anyway."""
        again = [record for record in changed if not record.is_noted]
        self._changed = again + self._changed
        lost = max(0, len(self._changed) - CHANGED_MAX)
        for record in self._changed[:lost]:
            record.is_noted = False  # should it go on, it is noted with all that it had
        for record in again[lost:]:
            record.is_noted = True
        if lost:
            del self._changed[:lost]
            log.error("the usage of %d requests is given up", lost)
