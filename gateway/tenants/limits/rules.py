"""What a tenant or a key may do at most, as the request path knows it: read with the key, cached
with it, never written back."""

from typing import Literal

from msgspec import Struct


class Limits(Struct, frozen=True):
    """None: no limit of this kind."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    request_tokens_max: int | None = None
    adapters_max: int | None = None
    adapter_bytes_max: int | None = None


class BudgetRule(Struct, frozen=True):
    """What may be spent in a period, in UTC."""

    id: str
    owner: str
    """`tenant:<id>` or `key:<id>`."""
    period: Literal["day", "month"]
    amount_nanos: int
    hard: bool
