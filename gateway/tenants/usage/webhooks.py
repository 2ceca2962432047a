"""Messages to other people's servers: signed, and never to where only this machine can reach."""

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import SplitResult, urlsplit

import httpx

from gateway.errors import InvalidRequest
from gateway.settings import Secret, Settings
from gateway.telemetry import redact

log = logging.getLogger(__name__)

TIMEOUT_S = 10.0
"""For a whole delivery, the name's look-up included."""
CONNECTIONS_MAX = 32
URL_CHARACTERS_MAX = 2000
SIGNATURE_HEADER = "X-Loragate-Signature"
UNRESOLVED = "The webhook's host name cannot be resolved."

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
AddressInfo = tuple[Any, Any, int, str, tuple[Any, ...]]
"""As socket.getaddrinfo answers."""


def signature(secret: Secret, timestamp: int, body: bytes) -> str:
    """`t=<unix time>,v1=<hex>`: HMAC-SHA256 under the secret, of the time, a dot and the body. The
    receiver computes the same, and takes no message that is older than some minutes."""
    mac = hmac.new(secret.reveal().encode(), f"{timestamp}.".encode() + body, hashlib.sha256)
    return f"t={timestamp},v1={mac.hexdigest()}"


async def check_setting(url: str, settings: Settings) -> None:
    """Whether a budget may have this webhook; it may have none. Raises InvalidRequest."""
    if not url:
        return
    if not settings.usage.webhook_secret:
        raise InvalidRequest(
            "Webhooks are signed, and this server has no secret for that: set usage.webhook_secret "
            "first.",
            param="webhook_url",
        )
    if len(url) > URL_CHARACTERS_MAX:
        raise InvalidRequest(
            f"A webhook's URL has at most {URL_CHARACTERS_MAX} characters.", param="webhook_url"
        )
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await _reachable(_split(url), settings.usage.webhook_local)
    except WebhookRefused as refused:
        raise InvalidRequest(str(refused), param="webhook_url") from None
    except TimeoutError:
        raise InvalidRequest(UNRESOLVED, param="webhook_url") from None
    if redact(url) != url:
        raise InvalidRequest("A webhook's URL must not hold an API key.", param="webhook_url")


class WebhookRefused(Exception):
    """Where a message must not go, or cannot; the text says why."""


class Webhooks:
    """Delivers. Redirects are not followed, and no proxy of the environment is asked."""

    def __init__(self, secret: Secret, *, local: bool) -> None:
        self._secret = secret
        self._local = local
        self._http = httpx.AsyncClient(
            timeout=TIMEOUT_S,
            follow_redirects=False,
            trust_env=False,
            limits=httpx.Limits(max_connections=CONNECTIONS_MAX),
        )

    async def send(self, url: str, body: bytes, timestamp: int) -> str:
        """Returns why it has not arrived; empty if it has."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await self._send(url, body, timestamp)
        except TimeoutError:
            return f"no answer within {TIMEOUT_S:.0f} s"
        except (httpx.HTTPError, httpx.InvalidURL, WebhookRefused) as error:
            return f"{type(error).__name__}: {error}"

    async def _send(self, url: str, body: bytes, timestamp: int) -> str:
        if not self._secret:
            return "usage.webhook_secret is not set"
        parts = _split(url)
        # to the address that was checked, whatever the name means a moment later
        address = await _reachable(parts, self._local)
        target = httpx.URL(url)
        async with self._http.stream(
            "POST",
            target.copy_with(host=str(address)),
            content=body,
            headers={
                "host": target.netloc.decode(),
                "content-type": "application/json",
                SIGNATURE_HEADER: signature(self._secret, timestamp, body),
            },
            extensions={"sni_hostname": target.host},
        ) as response:
            return "" if response.is_success else f"it answered {response.status_code}"

    async def close(self) -> None:
        await self._http.aclose()


def _split(url: str) -> SplitResult:
    try:
        if not (url.isascii() and url.isprintable()) or " " in url:
            raise ValueError
        parts = urlsplit(url)
        port_is_fine = parts.port != 0
    except ValueError:
        raise WebhookRefused("The URL cannot be read.") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_is_fine:
        raise WebhookRefused("A webhook's URL begins with https:// or http:// and names a host.")
    if parts.username is not None or parts.password is not None:
        raise WebhookRefused("A webhook's URL holds no credentials: its messages are signed.")
    return parts


async def _reachable(parts: SplitResult, local: bool) -> Address:
    """The address of its host. Raises WebhookRefused if any of them is one that it must not be."""
    assert parts.hostname is not None
    try:
        found = await _looked_up(parts.hostname, parts.port or 443)
    except (OSError, UnicodeError):
        raise WebhookRefused(UNRESOLVED) from None
    addresses = [_plain(ipaddress.ip_address(where[0])) for *_, where in found]
    if not local and any(_is_near(address) for address in addresses):
        raise WebhookRefused(
            "The webhook's host is this machine, or reachable only from it. Name another one, or "
            "set usage.webhook_local."
        )
    return addresses[0]


async def _looked_up(host: str, port: int) -> list[AddressInfo]:
    """In a thread of its own: with a name server that hangs, look-ups would take all of the shared
    ones, on which the usage is saved and long prompts are tokenized."""
    executor = ThreadPoolExecutor(1)
    try:
        ask = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        return await asyncio.get_running_loop().run_in_executor(executor, ask)
    finally:
        executor.shutdown(wait=False)


def _plain(address: Address) -> Address:
    """::ffff:127.0.0.1 is 127.0.0.1."""
    return getattr(address, "ipv4_mapped", None) or address


def _is_near(address: Address) -> bool:
    return (
        address.is_loopback
        or address.is_link_local
        or address.is_unspecified
        or address.is_multicast
        or address.is_reserved
        or _is_ours(address)
    )


def _is_ours(address: Address) -> bool:
    """Only an address of this machine can be bound."""
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.bind((str(address), 0))
        return True
    return False
