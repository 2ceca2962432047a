"""`loragate demo --check`: the demo conversation, and whether each answer is what it must be."""

import asyncio
from collections.abc import Coroutine
from itertools import count
from typing import Any

import httpx
from msgspec import Struct

from gateway.demo.client import Client
from gateway.demo.content import ACME, BASE_NAME, GLOBEX, QUESTIONS, TENANTS, shows_style

COLUMNS = 72
DETAIL_CHARACTERS = 1000
WRONG_KEY = "lg_sk_0000000000_" + 49 * "0"


class Answer(Struct, frozen=True):
    tenant: str
    model: str
    question: str
    pieces: list[str]
    """One for a whole response, several for a stream."""
    streamed: bool

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class Finding(Struct, frozen=True):
    fact: str
    holds: bool
    detail: str = ""


async def converse(base_url: str, keys: dict[str, str]) -> list[Answer]:
    """Every question to every model of every tenant, all at once, every second one streaming."""
    turn = count()
    async with (
        Client(base_url, keys[ACME.slug]) as acme,
        Client(base_url, keys[GLOBEX.slug]) as glo,
    ):
        clients = {ACME.slug: acme, GLOBEX.slug: glo}
        asked = [
            _ask(clients[tenant.slug], tenant.slug, model, question, next(turn) % 2 == 0)
            for tenant in TENANTS
            for model in (*tenant.adapters, BASE_NAME)
            for question in QUESTIONS
        ]
        return await asyncio.gather(*asked)


async def _ask(client: Client, tenant: str, model: str, question: str, stream: bool) -> Answer:
    if stream:
        pieces = await client.ask_streaming(model, question)
    else:
        pieces = [await client.ask(model, question)]
    return Answer(tenant, model, question, pieces, stream)


def judge(answers: list[Answer]) -> list[Finding]:
    """An adapter's answers show its style, the base model's none, and streams come in pieces."""
    findings = []
    for tenant in TENANTS:
        for adapter in tenant.adapters:
            texts = [answer.text for answer in answers if answer.model == adapter]
            odd = [text for text in texts if not shows_style(adapter, text)]
            fact = f"{tenant.slug}/{adapter} answers in its style"
            findings.append(Finding(fact, bool(texts) and not odd, " | ".join(odd)))
    odd = [
        answer.text
        for answer in answers
        if answer.model == BASE_NAME
        for tenant in TENANTS
        for adapter in tenant.adapters
        if shows_style(adapter, answer.text)
    ]
    findings.append(Finding("the base model answers in none of them", not odd, " | ".join(odd)))
    whole = [answer.model for answer in answers if answer.streamed and len(answer.pieces) < 2]
    findings.append(Finding("streams arrive piece by piece", not whole, ", ".join(whole)))
    return findings


async def check_borders(base_url: str, keys: dict[str, str]) -> list[Finding]:
    """What a tenant must not reach."""
    foreign = ACME.adapters[0]
    question = QUESTIONS[0]
    async with (
        Client(base_url, keys[GLOBEX.slug]) as globex,
        Client(base_url, WRONG_KEY) as stranger,
    ):
        return [
            await _refused(
                f"{GLOBEX.slug} gets 404 when it asks {ACME.slug}'s adapter {foreign}",
                globex.ask(foreign, question),
                httpx.codes.NOT_FOUND,
            ),
            await _refused(
                f"{GLOBEX.slug} gets 404 when it looks at {ACME.slug}'s adapter {foreign}",
                globex.adapter(foreign),
                httpx.codes.NOT_FOUND,
            ),
            await _refused(
                "a wrong key gets 401", stranger.ask(foreign, question), httpx.codes.UNAUTHORIZED
            ),
        ]


async def _refused(fact: str, request: Coroutine[Any, Any, object], status: int) -> Finding:
    try:
        await request
    except httpx.HTTPStatusError as error:
        got = error.response.status_code
        return Finding(fact, got == status, f"got {got}: {error.response.text}")
    return Finding(fact, False, "it was answered")


def table(answers: list[Answer]) -> str:
    """Each question, and below it the first line of each model's answer."""
    lines = []
    for question in QUESTIONS:
        lines += ["", question]
        for answer in answers:
            if answer.question == question:
                name = f"{answer.tenant}/{answer.model}"
                lines.append(f"  {name:<30}  {_first_line(answer.text)}")
    return "\n".join([*lines, ""])


def report(findings: list[Finding]) -> str:
    return "\n".join(
        f"OK      {finding.fact}"
        if finding.holds
        else f"FAILED  {finding.fact}: {finding.detail[:DETAIL_CHARACTERS]}"
        for finding in findings
    )


def _first_line(text: str) -> str:
    line = next((line for line in text.splitlines() if line.strip()), "(nothing)")
    return line if len(line) <= COLUMNS else line[: COLUMNS - 1] + "…"
