"""Requests that wait to be admitted: by tenant, each tenant's in order."""

from collections import OrderedDict
from collections.abc import Iterator

from gateway.engine.scheduling.sequence import Sequence


class WaitingQueue:
    """First come, first served within a fairness key; the order between keys is the caller's."""

    def __init__(self) -> None:
        self._by_id: dict[str, Sequence] = {}
        self._by_key: dict[str, OrderedDict[str, Sequence]] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def __iter__(self) -> Iterator[Sequence]:
        return iter(list(self._by_id.values()))

    def push(self, sequence: Sequence) -> None:
        self._insert(sequence)

    def push_back(self, sequence: Sequence) -> None:
        """Return one that was taken out, ahead of all others of its key."""
        self._insert(sequence).move_to_end(sequence.id, last=False)

    def take(self, request_id: str) -> Sequence:
        sequence = self._by_id.pop(request_id)
        own = self._by_key[sequence.key]
        del own[request_id]
        if not own:
            del self._by_key[sequence.key]
        return sequence

    @property
    def keys(self) -> list[str]:
        return list(self._by_key)

    def of(self, key: str) -> list[Sequence]:
        return list(self._by_key[key].values())

    def _insert(self, sequence: Sequence) -> OrderedDict[str, Sequence]:
        self._by_id[sequence.id] = sequence
        own = self._by_key.setdefault(sequence.key, OrderedDict())
        own[sequence.id] = sequence
        return own
