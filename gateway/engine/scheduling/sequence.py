"""One request as the engine sees it while it runs."""

import math

from gateway.engine.memory.keys import Root, next_key
from gateway.engine.memory.pager import Resident
from gateway.engine.memory.pages import Owner
from gateway.engine.memory.radix import Block
from gateway.engine.messages import Submit


class Sequence:
    """`tokens` are the prompt and what was generated; `computed` of them have their KV in `pages`.

    The rest follows: `pending` tokens remain to be computed, one of them while decoding. After a
    preemption `computed` starts anew, from what is left of its prefix in the cache, and nothing
    else has changed.
    """

    __slots__ = (
        "_keys",
        "adapter",
        "admitted",
        "arrived",
        "cached",
        "charged",
        "computed",
        "deadline",
        "expected",
        "limit",
        "owner",
        "pages",
        "prefix",
        "request",
        "root",
        "tick",
        "tokens",
    )

    def __init__(
        self, request: Submit, arrived: int, tick: int = 0, deadline: float = math.inf
    ) -> None:
        self.request = request
        self.arrived = arrived
        """Order of arrival; a preempted sequence keeps its own."""
        self.tick = tick
        """Iteration before which it arrived; those with the same one came together."""
        self.deadline = deadline
        """When its first token is due; infinity: whenever."""
        self.tokens = list(request.prompt)
        self.computed = 0
        self.pages: list[int] = []
        """The first of them are those of `prefix`, the rest are its own."""
        self.prefix: list[Block] = []
        """Cached blocks that it reads."""
        self.cached = 0
        """Tokens that were not computed, thanks to the cache, when it was first admitted."""
        self.owner = Owner("kv", request.request_id, request.fairness_key)
        self.root = (
            None
            if request.cache_namespace is None
            else Root(request.cache_namespace, self.digest or "")
        )
        """Where its prefixes are kept; None: nowhere."""
        self.adapter: Resident | None = None
        """The leased adapter while running."""
        self.admitted = -1
        """Iteration in which it last began to run; -1: not yet."""
        self.charged = 0
        """Tokens charged to its tenant; what a preemption makes compute again is not charged."""
        self.limit = len(request.prompt) + request.max_tokens
        """Length at which it ends; lowered on admission to what the pool can ever hold."""
        self.expected = 0
        """Length at which it is expected to end; 0: not yet asked."""
        self._keys: list[bytes] = []

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def key(self) -> str:
        return self.request.fairness_key

    @property
    def has_deadline(self) -> bool:
        return self.deadline < math.inf

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def digest(self) -> str | None:
        return self.request.adapter.digest if self.request.adapter else None

    def block_keys(self, count: int, block_tokens: int) -> list[bytes]:
        """Identities of its first `count` blocks, which are full; none if it has no root."""
        if self.root is None:
            return []
        while len(self._keys) < count:
            start = len(self._keys) * block_tokens
            parent = self._keys[-1] if self._keys else self.root.key
            self._keys.append(next_key(parent, self.tokens[start : start + block_tokens]))
        return self._keys[:count]
