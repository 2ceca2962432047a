"""Choosing the next token of one row of logits, compiled by Numba around the vector code of
`tiles_sampling`.

Which token is chosen is defined by `model.sampling`. Nothing is sorted but what the choice needs:
tokens are put into buckets by their logit, a bucket knows how many tokens and how much weight it
has, and only buckets in which a limit falls are sorted. A row's result depends on that row alone.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from gateway.engine.kernels.compiling import entry, piece
from gateway.engine.kernels.emitter import LANES
from gateway.engine.kernels.tiles_sampling import collect, extremes, weight_between

NOT_FINITE = -1
BEYOND = -2
"""Instead of a count or a token: more tokens have to be looked at."""

BUCKETS = 512
HEAD_NATS = 8.0
"""How far below the largest logit, in units of the temperature, tokens are first looked for:
far enough for most draws, and so near that only some hundred tokens of a trained model qualify."""
ALL_NATS = 52.0
"""Tokens further down weigh nothing: fewer than 2²⁰ of them together less than 2⁻⁵³ of the sum,
which no random number of 53 bits reaches."""
INSERTION_MAX = 40
"""Up to as many keys, insertion sort is faster than radix sort."""


class _Candidates(NamedTuple):
    """Tokens that may be drawn, in order of their index."""

    complete: bool
    """Others weigh nothing."""
    buckets_per_nat: float
    tokens_C: Any
    weights_C: Any
    buckets_C: Any
    sizes_B: Any
    """How many tokens a bucket has."""
    weights_B: Any
    """And the sum of their weights."""
    bits_V: Any
    """The row's logits as uint32."""
    keys: Any
    """Room for twice as many as there are tokens."""


@entry
def greedy(logits: Any, at: int, width: int) -> Any:
    """Index of the largest of the `width` float32 from logits[at], the lowest among equals;
    NOT_FINITE if one of them is."""
    return extremes(logits, at, width)[0]


def scratch_size(width: int) -> int:
    """Of the float64 array that `draw` needs for rows of up to `width`."""
    size: int = 4 * _padded.py_func(width) + 2 * BUCKETS  # type: ignore[attr-defined]
    return size


@piece
def _padded(width: int) -> int:
    """With room for what `collect` overwrites behind the last token."""
    return (width + 2 * LANES - 1) // LANES * LANES


@entry
def draw(
    logits: Any,
    at: int,
    width: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    random: float,
    scratch: Any,
) -> Any:
    """The token drawn from the `width` float32 from logits[at] with a number `random` in [0, 1);
    NOT_FINITE if one of them is. A top_k of 0 is none. `scratch` is as large as `scratch_size`
    says; what it holds does not matter, but no other thread may use it."""
    largest, smallest = extremes(logits, at, width)
    if largest == NOT_FINITE:
        return NOT_FINITE
    top, bottom = np.float64(logits[at + largest]), np.float64(smallest)
    k = min(top_k, width) if top_k > 0 else width
    nats_max = ALL_NATS
    if top_p >= 1 and min_p > 0:
        nats_max = min(ALL_NATS, 1 - math.log(min_p))
    nats = HEAD_NATS
    token = BEYOND
    while token == BEYOND:
        nats = min(nats, nats_max)
        candidates, rest = _collect(
            logits, at, width, temperature, top, bottom, nats, nats == nats_max, k == width,
            scratch,
        )  # fmt: skip
        token = _draw_from(candidates, rest, k, top_p, min_p, random)
        nats *= 2
    return token


@piece
def _collect(
    logits: Any,
    at: int,
    width: int,
    temperature: float,
    top: float,
    bottom: float,
    nats: float,
    complete: bool,
    sum_rest: bool,
    scratch: Any,
) -> Any:
    """The tokens that lie up to `nats` below the largest, and the weight of all others if
    `sum_rest`."""
    padded = _padded(width)
    integers = scratch[padded : 2 * padded].view(np.int32)
    tokens, buckets = integers[:padded], integers[padded:]
    weights = scratch[:padded]
    low = np.float32(top - nats * temperature)
    span = (top - max(bottom, np.float64(low))) / temperature
    per_nat = BUCKETS / span if span > 0 else 0.0
    count = collect(
        logits, at, width, low, top, temperature, per_nat, BUCKETS - 1.0, tokens, weights, buckets
    )
    of_buckets = scratch[4 * padded : 4 * padded + 2 * BUCKETS]
    sizes, sums = of_buckets[:BUCKETS].view(np.int64), of_buckets[BUCKETS:]
    sizes[:] = 0
    sums[:] = 0
    for c in range(count):
        sizes[buckets[c]] += 1
        sums[buckets[c]] += weights[c]
    complete = complete or count == width
    rest = 0.0
    if sum_rest and not complete:
        weightless = np.float32(top - ALL_NATS * temperature)
        rest = weight_between(logits, at, width, weightless, low, top, temperature)
    candidates = _Candidates(
        complete, per_nat, tokens[:count], weights[:count], buckets[:count], sizes, sums,
        logits[at : at + width].view(np.uint32), scratch[2 * padded : 4 * padded].view(np.uint64),
    )  # fmt: skip
    return candidates, rest


@piece
def _draw_from(
    candidates: Any, rest: float, k: int, top_p: float, min_p: float, random: float
) -> Any:
    """The token, or BEYOND."""
    width = len(candidates.bits_V)
    total = rest
    for weight in candidates.weights_B:
        total += weight
    nucleus = np.inf
    if top_p < 1:
        if k < width:
            count, total, _ = _prefix(candidates, k, np.inf, 0.0)
            if count == BEYOND:
                return BEYOND
        nucleus = top_p * total
    if k < width or top_p < 1 or min_p > 0:
        k, total, _ = _prefix(candidates, k, nucleus, min_p)
        if k == BEYOND:
            return BEYOND
    # a point that equals a border belongs to the token above it
    count, _, token = _prefix(candidates, k, np.nextafter(random * total, np.inf), 0.0)
    return BEYOND if count == BEYOND else token


@piece
def _prefix(candidates: Any, count_max: int, before_max: float, weight_min: float) -> Any:
    """(count, weight, last token) of the most likely tokens, equals in order of their index, up to
    the one that would be more than count_max, or has before_max or more before it, or weighs less
    than weight_min. The first always belongs to them. A count of BEYOND: others may."""
    # of the buckets before `edge`, whatever their place is rounded to, all weigh enough
    edge = BUCKETS
    if weight_min > 0:
        edge = int(min(-math.log(weight_min) * candidates.buckets_per_nat, BUCKETS)) - 1
    count, before, last = 0, 0.0, 0
    for bucket in range(BUCKETS):
        size, weight = candidates.sizes_B[bucket], candidates.weights_B[bucket]
        if size == 0:
            continue
        if count > 0 and (count == count_max or before >= before_max):
            return count, before, last
        if bucket < edge and count + size < count_max and before + weight < before_max:
            count, before = count + size, before + weight
            continue
        for key in _sorted(candidates, bucket):
            c = key & np.uint64(0xFFFFFFFF)
            weight = candidates.weights_C[c]
            enough = count == count_max or before >= before_max or weight < weight_min
            if count > 0 and enough:
                return count, before, last
            count, before, last = count + 1, before + weight, candidates.tokens_C[c]
    if candidates.complete or count == count_max or before >= before_max:
        return count, before, last
    return BEYOND, before, last


@piece
def _sorted(candidates: Any, bucket: int) -> Any:
    """Keys of the bucket's candidates, most likely first: the lower half is the place among
    them."""
    keys = candidates.keys
    count = 0
    for c in range(len(candidates.tokens_C)):
        if candidates.buckets_C[c] == bucket:
            bits = candidates.bits_V[candidates.tokens_C[c]]
            keys[count] = np.uint64(_descending(bits)) << np.uint64(32) | np.uint64(c)
            count += 1
    if count > INSERTION_MAX:
        half = len(keys) // 2
        return _radix_sorted(keys[:count], keys[half : half + count])
    for i in range(1, count):
        key, place = keys[i], i
        while place > 0 and keys[place - 1] > key:
            keys[place] = keys[place - 1]
            place -= 1
        keys[place] = key
    return keys[:count]


@piece
def _descending(bits: Any) -> Any:
    """Integers in the reverse order of the float32 of these bits; both zeros are equal."""
    if bits > np.uint32(0x80000000):
        return bits
    return np.uint32(0x7FFFFFFF) - (bits & np.uint32(0x7FFFFFFF))


@piece
def _radix_sorted(keys: Any, other: Any) -> Any:
    """One of both arrays, with the keys in order of their upper half; equals stay in order."""
    places = np.empty(256, dtype=np.int64)
    for shift in range(32, 64, 8):
        places[:] = 0
        for key in keys:
            places[(key >> np.uint64(shift)) & np.uint64(0xFF)] += 1
        if places.max() == len(keys):
            continue
        place = 0
        for digit in range(256):
            places[digit], place = place, place + places[digit]
        for key in keys:
            digit = (key >> np.uint64(shift)) & np.uint64(0xFF)
            other[places[digit]] = key
            places[digit] += 1
        keys, other = other, keys
    return keys
