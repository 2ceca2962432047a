"""The rounds: each peer started in turn, measured under its loads, and stopped again."""

from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct
from tokenizers import Tokenizer

from benchmarks.peers import agreement
from benchmarks.peers.child import Failed
from benchmarks.peers.layout import Layout
from benchmarks.peers.loads import BLOCKS, Load
from benchmarks.peers.results import Answer, Cell, Results
from benchmarks.peers.running import Peer, Running

CELL_S = 12.0
"""What a cell takes beside the seconds that count, about."""


class Turn(Struct, frozen=True):
    """One start of a peer, and what is measured with it."""

    round: int
    peer: Peer
    kinds: tuple[str, ...]
    loads: list[Load]


def turns_of(
    peers: Sequence[Peer], loads: Sequence[Load], rounds: int, results: Results
) -> list[Turn]:
    """All that is still to be measured. Loads that are alike are near each other in time, and every
    other round has the peers in reverse, so that a machine that slows down favours none."""
    return [
        turn
        for round in range(rounds)
        for block in BLOCKS
        for peer in (peers if round % 2 == 0 else peers[::-1])
        for kinds in peer.starts
        if set(kinds) <= set(block)
        for turn in _turn(round, peer, kinds, loads, results)
    ]


def _turn(
    round: int, peer: Peer, kinds: tuple[str, ...], loads: Sequence[Load], results: Results
) -> Iterator[Turn]:
    """None, if everything was measured before."""
    to_do = [
        load
        for load in loads
        if load.kind in kinds and not results.has(round, peer.name, load.name)
    ]
    if to_do:
        yield Turn(round, peer, kinds, to_do)


def estimate_s(turns: Iterable[Turn], seconds: float) -> float:
    return sum(turn.peer.start_s + len(turn.loads) * (seconds + CELL_S) for turn in turns)


def measure(turn: Turn, seconds: float, layout: Layout, results: Results) -> None:
    """Never raises for what a peer does; its cells then say why they are empty."""
    name, left = turn.peer.name, list(turn.loads)
    _say(f"round {turn.round + 1}: {name} for {', '.join(turn.kinds)}")
    try:
        with turn.peer.started(turn.kinds) as running:
            if turn.kinds != ("base",) and name not in results.answers:
                _ask(name, running, layout, results)
            while left:
                _cell(turn, running, left[0], seconds, results)
                del left[0]
    except Failed as failure:
        _say(f"  failed: {failure}")
        for load in left:
            results.add(Cell(turn.round, name, load.name, failure=str(failure)))


def _cell(turn: Turn, running: Running, load: Load, seconds: float, results: Results) -> None:
    name = turn.peer.name
    try:
        reading = running.measure(load, seconds, turn.round)
    except Failed as failure:
        results.add(Cell(turn.round, name, load.name, failure=str(failure)))
        _say(f"  {load.name}: failed: {failure}")
        return
    cell = Cell(turn.round, name, load.name, reading)
    results.add(cell)
    first = "" if reading.first_token_s is None else f", first token {reading.first_token_s:.2f} s"
    noise = f", NOISY: {reading.other_cores:.1f} cores used by others" if cell.is_noisy else ""
    _say(f"  {load.name}: {reading.tokens_per_s:.1f} tokens/s{first}{noise}")


def _ask(name: str, running: Running, layout: Layout, results: Results) -> None:
    """How it goes on from the common prompt. A server that can't say is measured all the same."""
    tokenizer = Tokenizer.from_file(str(layout.hf_model / "tokenizer.json"))
    prompt = tokenizer.encode(agreement.PROMPT, add_special_tokens=False).ids
    try:
        results.add_answer(Answer(name, running.go_on(prompt, agreement.TOKENS)))
    except Failed as failure:
        _say(f"  {failure}")


def _say(line: str) -> None:
    print(line, flush=True)
