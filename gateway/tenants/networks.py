"""Networks that a key may be used from, and where a request comes from."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from litestar.types import HTTPScope

from gateway.errors import InvalidRequest
from gateway.settings import Settings, SettingsError

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

NETWORKS_MAX = 100
HOPS_MAX = 20
"""Of X-Forwarded-For, from the right: more proxies than that are nobody's set-up."""


def checked_networks(networks: Sequence[str]) -> list[str]:
    """In one spelling each. Raises InvalidRequest."""
    if not 1 <= len(networks) <= NETWORKS_MAX:
        raise InvalidRequest(
            f"Name 1 to {NETWORKS_MAX} networks, or leave them out: then the key works everywhere.",
            param="allowed_networks",
        )
    try:
        return sorted({str(ip_network(network.strip())) for network in networks})
    except ValueError:
        raise InvalidRequest(
            "A network is written like 10.0.0.0/8, 203.0.113.7 or 2001:db8::/32, without bits of a "
            "host behind the prefix.",
            param="allowed_networks",
        ) from None


@lru_cache(maxsize=1024)
def _parsed(network: str) -> Network:
    return ip_network(network)


def within(address: Address | None, networks: Iterable[str]) -> bool:
    """Whether one of the checked networks has the address; an unknown one is in none."""
    return address is not None and any(address in _parsed(network) for network in networks)


def parse_address(text: str) -> Address | None:
    """What proxies write, a port or brackets around it too. An IPv4 address that came over an IPv6
    socket is the IPv4 address."""
    text = text.strip()
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        return None
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


class Sources:
    """Finds the address that a request comes from: its connection's, or the one that proxies of
    ours say, which stand in `server.trusted_proxies`.

        X-Forwarded-For: whatever the client wrote, 198.51.100.9, 10.0.0.5 ← 10.0.0.7, connected
                                                    └ the answer   └──── trusted ────┘
    """

    def __init__(self, settings: Settings) -> None:
        """Raises SettingsError."""
        named = settings.server.trusted_proxies.replace(",", " ").split()
        try:
            self._trusted = [ip_network(network) for network in named]
        except ValueError:
            raise SettingsError(
                "server.trusted_proxies: expected networks like 10.0.0.0/8, with commas between"
            ) from None

    def address(self, scope: HTTPScope) -> Address | None:
        """None where nobody says, as behind a Unix socket, or a proxy names no address."""
        client = scope["client"]
        address = parse_address(client[0]) if client else None
        if not self._trusts(address):
            return address
        for hop in _forwarded_for(scope):
            address = parse_address(hop)
            if not self._trusts(address):
                break
        return address

    def _trusts(self, address: Address | None) -> bool:
        return address is not None and any(address in network for network in self._trusted)


def _forwarded_for(scope: HTTPScope) -> list[str]:
    """The nearest hop first."""
    lines = [value for name, value in scope["headers"] if name == b"x-forwarded-for"]
    hops = b",".join(lines).decode("latin-1").rsplit(",", HOPS_MAX)
    return [hop for hop in reversed(hops[-HOPS_MAX:]) if hop.strip()]
