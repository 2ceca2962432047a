"""Requests that wait to be admitted: by tenant, each tenant's in order of arrival.

Those whose adapter is still being read are parked, so that they hold up nobody and nothing looks
at them before it is there.
"""

from bisect import insort
from collections.abc import Collection, Iterator

from gateway.engine.scheduling.sequence import Sequence


class WaitingQueue:
    """First come, first served within a fairness key; the order between keys is the caller's.

    A request that was preempted comes back with its old order of arrival, so ahead of those that
    came after it.
    """

    def __init__(self) -> None:
        self._by_id: dict[str, Sequence] = {}
        self._ready: dict[str, _Line] = {}
        self._parked: dict[str, dict[str, Sequence]] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def get(self, request_id: str) -> Sequence | None:
        return self._by_id.get(request_id)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(list(self._by_id.values()))

    def push(self, sequence: Sequence, parked: bool = False) -> None:
        self._by_id[sequence.id] = sequence
        if parked:
            assert sequence.digest is not None
            self._parked.setdefault(sequence.digest, {})[sequence.id] = sequence
        else:
            self._ready.setdefault(sequence.key, _Line()).add(sequence)

    def park(self, sequence: Sequence) -> None:
        """A ready one has to wait for its adapter again."""
        self.take(sequence.id)
        self.push(sequence, parked=True)

    def parked(self, digest: str) -> list[Sequence]:
        """Those that wait for this adapter to be read."""
        return list(self._parked.get(digest, {}).values())

    def take(self, request_id: str) -> Sequence:
        sequence = self._by_id.pop(request_id)
        parked = self._parked.get(sequence.digest or "", {})
        if request_id in parked:
            del parked[request_id]
            if not parked:
                del self._parked[sequence.digest or ""]
            return sequence
        line = self._ready[sequence.key]
        line.remove(sequence)
        if not line:
            del self._ready[sequence.key]
        return sequence

    @property
    def ready_keys(self) -> Collection[str]:
        """Keys that have a request which could be admitted."""
        return self._ready.keys()

    def head(self, key: str, adapters: Collection[str]) -> Sequence:
        """The next of a key with ready requests. Among those that arrived together, one whose
        adapter is among `adapters`."""
        return self._ready[key].head(adapters)

    def line(self, key: str) -> list[Sequence]:
        """A key's ready requests, in order."""
        return self._ready[key].sequences() if key in self._ready else []


class _Line:
    """One key's ready requests by order of arrival; also by adapter, to find those of one."""

    def __init__(self) -> None:
        self._all: list[tuple[int, Sequence]] = []
        self._by_adapter: dict[str, list[tuple[int, Sequence]]] = {}

    def __len__(self) -> int:
        return len(self._all)

    def sequences(self) -> list[Sequence]:
        return [sequence for _, sequence in self._all]

    def add(self, sequence: Sequence) -> None:
        entry = sequence.arrived, sequence
        insort(self._all, entry)
        insort(self._by_adapter.setdefault(sequence.digest or "", []), entry)

    def remove(self, sequence: Sequence) -> None:
        entry = sequence.arrived, sequence
        self._all.remove(entry)
        own = self._by_adapter[sequence.digest or ""]
        own.remove(entry)
        if not own:
            del self._by_adapter[sequence.digest or ""]

    def head(self, adapters: Collection[str]) -> Sequence:
        first = self._all[0][1]
        if first.digest is None or first.digest in adapters:
            return first
        together = [
            own[0]
            for adapter in adapters
            if (own := self._by_adapter.get(adapter)) and own[0][1].tick == first.tick
        ]
        return min(together, default=self._all[0])[1]
