"""Connections to Redis, every limit of them set: nobody waits long for a store that is away."""

from redis.asyncio import Redis
from redis.asyncio.connection import BlockingConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from gateway.settings import Settings, SettingsError

CONNECT_S = 1.0
COMMAND_S = 0.5
"""A script of ours takes well under a millisecond. Past this, Redis counts as away."""


def connect(settings: Settings) -> Redis | None:
    """A client that connects when it is first used; None where no URL is set.

    Raises SettingsError, without the URL in it, since that may hold a password.
    """
    url = settings.redis.url.reveal()
    if not url:
        return None
    try:
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=settings.redis.pool_size,
            timeout=COMMAND_S,
            socket_connect_timeout=CONNECT_S,
            socket_timeout=COMMAND_S,
            retry=Retry(NoBackoff(), 1),  # a connection that a restart has cut is made anew, once
            health_check_interval=30,
        )
    except (ValueError, TypeError):
        raise SettingsError(
            "redis.url: expected redis://host:6379/0, or rediss:// for TLS"
        ) from None
    return Redis.from_pool(pool)
