"""One request as the engine sees it while it runs."""

from gateway.engine.memory.pager import Resident
from gateway.engine.memory.pages import Owner
from gateway.engine.messages import Submit


class Sequence:
    """`tokens` are the prompt and what was generated; `computed` of them have their KV in `pages`.

    The rest follows: `pending` tokens remain to be computed, one of them while decoding. After a
    preemption `computed` is 0 again and nothing else has changed.
    """

    __slots__ = (
        "adapter",
        "admitted",
        "arrived",
        "charged",
        "computed",
        "limit",
        "owner",
        "pages",
        "request",
        "tokens",
    )

    def __init__(self, request: Submit, arrived: int) -> None:
        self.request = request
        self.arrived = arrived
        """Order of arrival; a preempted sequence keeps its own."""
        self.tokens = list(request.prompt)
        self.computed = 0
        self.pages: list[int] = []
        self.owner = Owner("kv", request.request_id)
        self.adapter: Resident | None = None
        """The leased adapter while running."""
        self.admitted = 0
        """Iteration in which it last began to run."""
        self.charged = 0
        """Tokens charged to its tenant; what a preemption makes compute again is not charged."""
        self.limit = len(request.prompt) + request.max_tokens
        """Length at which it ends; lowered on admission to what the pool can ever hold."""

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def key(self) -> str:
        return self.request.fairness_key

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def digest(self) -> str | None:
        return self.request.adapter.digest if self.request.adapter else None
