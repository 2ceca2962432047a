"""Vector code for the loops of `compiled_sampling`, as LLVM IR like `tiles`, whose conventions
hold here too.

A row is `width` float32 from x[at]. The *weight* of an element is its probability before it is
divided by the sum: exp(x / temperature - top / temperature), where `top` is the row's largest.
Weights are float64, as are their sums: lane l of 16 adds up i = l, l + 16 …, then lanes in pairs.
"""

import math
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from gateway.engine.kernels.emitter import LANES, Emitter, integer, integers, supports
from gateway.engine.kernels.tiles import Typed

_FLOAT, _DOUBLE = ir.FloatType(), ir.DoubleType()
_FLOATS, _DOUBLES = ir.VectorType(_FLOAT, LANES), ir.VectorType(_DOUBLE, LANES)
_LONG = ir.IntType(64)
_INTS, _LONGS = ir.VectorType(ir.IntType(32), LANES), ir.VectorType(_LONG, LANES)
_BITS = ir.IntType(LANES)

COMPRESSES = supports("avx512vl")
"""The machine can move chosen lanes to the front of a register; else lanes are stored singly."""
COMPRESSED = 8
"""Lanes moved at once: as many float64 as a register holds. LLVM 22 splits what is longer by way of
a store to an address that is less aligned than the instruction demands."""
CHAINS = 4
"""Vectors compared side by side: one would wait for the one before it."""

_LOG2_E = 1.4426950408889634
_LN2_HIGH, _LN2_LOW = 0.693147180369123816490, 1.90821492927058770002e-10
"""As in fdlibm: the last bits of the high part are 0, its product with a small integer is exact."""
_ROUND = 1.5 * 2**52
"""Added to a small float it leaves the nearest integer in the low bits."""
_DEGREE = 12
"""Of the Taylor polynomial of exp(r), |r| <= ln2 / 2; what is left out is less than an ulp."""


class _Row:
    """The elements of one row and their weights."""

    def __init__(self, emit: Emitter, kind: Any, x: Any, at: Any, width: Any) -> None:
        self.emit, self.builder = emit, emit.builder
        self.kind, self.x, self.at, self.width = kind, x, at, width

    def each(self, low: Any, high: Any, sums: list[Any], visit: Callable[..., None]) -> None:
        """Calls `visit(index, values, mask)` for those vectors of 16 that have elements
        low <= x < high; the mask says which. It replaces `sums`."""
        builder, emit = self.builder, self.emit
        lows, highs = emit.splat(low), emit.splat(high)
        whole = builder.and_(self.width, integer(-LANES))

        def look(index: Any, live: Any = None) -> None:
            values = emit.load(self.kind, self.x, builder.add(self.at, index), live)
            mask = builder.and_(
                builder.fcmp_ordered(">=", values, lows), builder.fcmp_ordered("<", values, highs)
            )
            if live is not None:
                mask = builder.and_(mask, live)
            bits = builder.bitcast(mask, _BITS)
            before, skipped = list(sums), builder.block
            with builder.if_then(builder.icmp_unsigned("!=", bits, ir.Constant(_BITS, 0))):
                visit(index, values, mask)
                after, visited = list(sums), builder.block
            sums[:] = [builder.phi(value.type) for value in before]
            for phi, old, new in zip(sums, before, after, strict=True):
                phi.add_incoming(old, skipped)
                phi.add_incoming(new, visited)

        with emit.each(integer(0), whole, LANES, sums) as i:
            look(i)
        with emit.each(whole, self.width, LANES, sums) as i:
            look(i, emit.first_lanes(builder.sub(self.width, i)))

    def scale(self, top: Any, temperature: Any) -> None:
        self.temperature = self.emit.splat(temperature)
        self.top = self.emit.splat(self.builder.fdiv(top, temperature))

    def exponents(self, values: Any) -> Any:
        scaled = self.builder.fdiv(self.builder.fpext(values, _DOUBLES), self.temperature)
        return self.builder.fsub(scaled, self.top)

    def exp(self, t: Any) -> Any:
        """Of -700 < t <= 0; anything for other t."""
        builder = self.builder
        shifted = self._fma(t, _doubles(_LOG2_E), _doubles(_ROUND))
        power = builder.fsub(shifted, _doubles(_ROUND))
        rest = self._fma(power, _doubles(-_LN2_HIGH), t)
        rest = self._fma(power, _doubles(-_LN2_LOW), rest)
        value = _doubles(1 / math.factorial(_DEGREE))
        for n in reversed(range(_DEGREE)):
            value = self._fma(value, rest, _doubles(1 / math.factorial(n)))
        bits = builder.add(builder.bitcast(shifted, _LONGS), ir.Constant(_LONGS, [1023] * LANES))
        factor = builder.shl(bits, ir.Constant(_LONGS, [52] * LANES))
        return builder.fmul(value, builder.bitcast(factor, _DOUBLES))

    def _fma(self, a: Any, b: Any, c: Any) -> Any:
        return self.emit.call(f"llvm.fma.v{LANES}f64", _DOUBLES, [a, b, c])


def _doubles(value: float) -> Any:
    return ir.Constant(_DOUBLES, [value] * LANES)


def _indices(emit: Emitter, first: Any) -> Any:
    """Of 16 elements from `first` on, as int32."""
    start = emit.splat(emit.builder.trunc(first, ir.IntType(32)))
    return emit.builder.add(start, ir.Constant(_INTS, list(range(LANES))))


def _lanes_ahead(builder: Any, vector: Any, distance: int) -> Any:
    lanes = [(lane + distance) % LANES for lane in range(LANES)]
    return builder.shuffle_vector(vector, vector, ir.Constant(_INTS, lanes))


def _append(emit: Emitter, columns: Any, mask: Any, count: Any) -> Any:
    """Of each column's (values, kind, array) those in `mask` are stored from array[count] on;
    returns the new count."""
    builder = emit.builder
    if not COMPRESSES:
        for lane in map(integer, range(LANES)):
            for values, kind, array in columns:
                place = emit.pointer(kind, array, count)
                builder.store(builder.extract_element(values, lane), place)
            count = builder.add(count, builder.zext(builder.extract_element(mask, lane), _LONG))
        return count
    for first in range(0, LANES, COMPRESSED):
        lanes = ir.Constant(
            ir.VectorType(ir.IntType(32), COMPRESSED), list(range(first, first + COMPRESSED))
        )
        part = builder.shuffle_vector(mask, mask, lanes)
        for values, kind, array in columns:
            some = builder.shuffle_vector(values, values, lanes)
            element = "f64" if values.type == _DOUBLES else "i32"
            name = f"llvm.experimental.vector.compress.v{COMPRESSED}{element}"
            some = emit.call(name, some.type, [some, part, ir.Constant(some.type, ir.Undefined)])
            emit.store(some, kind, array, count)
        bits = builder.bitcast(part, ir.IntType(COMPRESSED))
        count = builder.add(count, builder.zext(builder.ctpop(bits), _LONG))
    return count


class _Extremes:
    """Per lane the largest element and its index, the smallest, and the largest magnitude as bits,
    which for what is not finite are no less than those of infinity."""

    START = (
        ir.Constant(_FLOATS, [float("-inf")] * LANES),
        integers(0),
        ir.Constant(_FLOATS, [float("inf")] * LANES),
        integers(0),
    )

    def __init__(self, emit: Emitter) -> None:
        self.emit, self.builder = emit, emit.builder

    def of(self, values: Any, index: Any, live: Any) -> list[Any]:
        indices = _indices(self.emit, index)
        magnitude = self.builder.and_(self.builder.bitcast(values, _INTS), integers(0x7FFFFFFF))
        found = [values, indices, values, magnitude]
        if live is None:
            return found
        return [self.builder.select(live, a, b) for a, b in zip(found, self.START, strict=True)]

    def later(self, a: list[Any], b: list[Any]) -> list[Any]:
        """Of both, where all indices in b are the greater ones."""
        return self._merge(a, b, self.builder.fcmp_ordered(">", b[0], a[0]))

    def both(self, a: list[Any], b: list[Any]) -> list[Any]:
        builder = self.builder
        tie = builder.and_(
            builder.fcmp_ordered("==", b[0], a[0]), builder.icmp_signed("<", b[1], a[1])
        )
        return self._merge(a, b, builder.or_(builder.fcmp_ordered(">", b[0], a[0]), tie))

    def _merge(self, a: list[Any], b: list[Any], take: Any) -> list[Any]:
        builder = self.builder
        return [
            builder.select(take, b[0], a[0]),
            builder.select(take, b[1], a[1]),
            builder.select(builder.fcmp_ordered("<", b[2], a[2]), b[2], a[2]),
            builder.select(builder.icmp_signed(">", b[3], a[3]), b[3], a[3]),
        ]


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def extremes(_typing: Any, x: Any, at: Any, width: Any) -> Typed:
    """(index of the row's largest element, its smallest element): the lowest index among equals,
    and -1 if an element is NaN or infinite."""
    result = types.Tuple((types.int64, types.float32))

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emit = Emitter(context, builder)
        lanes = _Extremes(emit)
        x_, at_, width_ = arguments
        size, step = len(lanes.START), CHAINS * LANES
        state = list(lanes.START) * CHAINS
        whole = builder.and_(width_, integer(-step))
        with emit.each(integer(0), whole, step, state) as i:
            for chain in range(CHAINS):
                k = builder.add(i, integer(chain * LANES))
                found = lanes.of(emit.load(x, x_, builder.add(at_, k)), k, None)
                own = slice(chain * size, (chain + 1) * size)
                state[own] = lanes.later(state[own], found)
        best = state[:size]
        for chain in range(1, CHAINS):
            best = lanes.both(best, state[chain * size : (chain + 1) * size])
        with emit.each(whole, width_, LANES, best) as k:
            live = emit.first_lanes(builder.sub(width_, k))
            found = lanes.of(emit.load(x, x_, builder.add(at_, k), live), k, live)
            best[:] = lanes.later(best, found)
        distance = LANES // 2
        while distance:
            best = lanes.both(best, [_lanes_ahead(builder, part, distance) for part in best])
            distance //= 2
        _, index, smallest, magnitude = (builder.extract_element(part, integer(0)) for part in best)
        finite = builder.icmp_signed("<", magnitude, ir.Constant(ir.IntType(32), 0x7F800000))
        index = builder.select(finite, builder.sext(index, _LONG), integer(-1))
        return context.make_tuple(builder, signature.return_type, [index, smallest])

    return result(x, at, width), generate


@intrinsic  # type: ignore[untyped-decorator]
def collect(
    _typing: Any,
    x: Any,
    at: Any,
    width: Any,
    low: Any,
    top: Any,
    temperature: Any,
    per_nat: Any,
    bucket_max: Any,
    tokens: Any,
    weights: Any,
    buckets: Any,
) -> Typed:
    """Writes one after another, for the elements that are at least `low` (float32), their index
    to `tokens` (int32), weight to `weights` (float64) and bucket to `buckets` (int32), which is
    the exponent's distance from 0 times `per_nat`, rounded down, `bucket_max` (float64) at most.
    Returns how many; up to 15 places behind them are overwritten."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        emit = Emitter(context, builder)
        (x_, at_, width_, low_, top_, temperature_, per_nat_, bucket_max_, tokens_, weights_,
         buckets_) = arguments  # fmt: skip
        row = _Row(emit, x, x_, at_, width_)
        row.scale(top_, temperature_)
        per_nats, bucket_maxes = emit.splat(per_nat_), emit.splat(bucket_max_)
        count = [integer(0)]

        def visit(index: Any, values: Any, mask: Any) -> None:
            t = row.exponents(values)
            place = builder.fmul(builder.fneg(t), per_nats)
            # so ordered that a NaN becomes the last
            inside = builder.fcmp_ordered("<", place, bucket_maxes)
            place = builder.fptosi(builder.select(inside, place, bucket_maxes), _INTS)
            columns = [
                (_indices(emit, index), tokens, tokens_),
                (row.exp(t), weights, weights_),
                (place, buckets, buckets_),
            ]
            count[0] = _append(emit, columns, mask, count[0])

        row.each(low_, ir.Constant(_FLOAT, float("inf")), count, visit)
        return count[0]

    given = (x, at, width, low, top, temperature, per_nat, bucket_max, tokens, weights, buckets)
    return types.int64(*given), generate


@intrinsic  # type: ignore[untyped-decorator]
def weight_between(
    _typing: Any, x: Any, at: Any, width: Any, low: Any, high: Any, top: Any, temperature: Any
) -> Typed:
    """The sum of the weights of elements with low <= x < high (float32)."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        emit = Emitter(context, builder)
        x_, at_, width_, low_, high_, top_, temperature_ = arguments
        row = _Row(emit, x, x_, at_, width_)
        row.scale(top_, temperature_)
        sums = [_doubles(0.0)]

        def visit(_index: Any, values: Any, mask: Any) -> None:
            weights = builder.select(mask, row.exp(row.exponents(values)), _doubles(0.0))
            sums[0] = builder.fadd(sums[0], weights)

        row.each(low_, high_, sums, visit)
        total, distance = sums[0], LANES // 2
        while distance:
            total = builder.fadd(total, _lanes_ahead(builder, total, distance))
            distance //= 2
        return builder.extract_element(total, integer(0))

    return types.float64(x, at, width, low, high, top, temperature), generate
