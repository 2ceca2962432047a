"""Vector code for the loops of `compiled`, written as LLVM IR so that the order of every sum is
said here and not chosen by a compiler.

All sums are of fused multiply-adds in float32, and how many rows or columns a tile has changes
none of them:

- `dots`: lane l of 16 adds up the products at k = l, l + 16, l + 32 …; then lanes are added in
  pairs, l and l + 8, l and l + 4, l and l + 2, 0 and 1.
- `outer`: a sum takes its products one after another, in order of k.

Elements are float32, or bfloat16 read as uint16 and widened. No instruction has a fast-math flag:
LLVM may neither reorder nor fuse. A machine without vectors of 16 floats takes several of its own.

Where an argument pair is called `at, step`, row i of a matrix begins at `at + i * step` of the flat
array; if `at` is an array of offsets, at `at[step + i]`.

Numba's cache on disk knows the file of a loop, not this one: a change here needs one there.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
TILE = 4 if binding.get_host_cpu_features().get("avx512f") else 2
"""Rows, columns or vectors of a tile: as many as the sums of TILE² vectors find registers."""

_INT, _FLOAT = ir.IntType(64), ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, LANES)
_INTS = ir.VectorType(ir.IntType(32), LANES)
_MASK = ir.VectorType(ir.IntType(1), LANES)
_ZERO = ir.Constant(_VECTOR, [0.0] * LANES)

_LOG2_E = 1.4426950408889634
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1,
        5.0000001201e-1)  # fmt: skip
"""exp(r) = 1 + r + r² · polynomial for |r| <= ln2 / 2: Cephes' expf, within 2 ulp."""
_ROUND = 1.5 * 2**23
"""Added to a small float it leaves the nearest integer in the low bits."""
_EXP_MIN = -86.0
"""Below, exp is taken for zero, which keeps powers of two out of the subnormals."""


class _Emitter:
    """The instructions of one intrinsic."""

    def __init__(self, context: Any, builder: Any) -> None:
        self.context, self.builder = context, builder

    def row(self, kind: Any, at: Any, step: Any, index: Any) -> Any:
        """Offset of row `index`, see `at, step` above."""
        if not isinstance(kind, types.Array):
            return self.builder.add(at, self.builder.mul(step, index))
        place = self.pointer(kind, at, self.builder.add(step, index))
        return self.builder.load(place, typ=_INT)

    def pointer(self, kind: Any, array: Any, offset: Any) -> Any:
        data = self.context.make_array(kind)(self.context, self.builder, array).data
        size = kind.dtype.bitwidth // 8
        return cgutils.pointer_add(self.builder, data, self.builder.mul(offset, _int(size)))

    def scalar(self, kind: Any, array: Any, offset: Any) -> Any:
        """The float32 there, in all lanes."""
        value = self.builder.load(self.pointer(kind, array, offset), typ=_FLOAT)
        return self.splat(value)

    def splat(self, value: Any) -> Any:
        one = self.builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), value, _int(0))
        return self.builder.shuffle_vector(one, one, ir.Constant(_INTS, [0] * LANES))

    def load(self, kind: Any, array: Any, offset: Any, live: Any = None) -> Any:
        """16 elements as float32; those that `live` masks out are not read and are 0."""
        wide = kind.dtype == types.float32
        element = _FLOAT if wide else ir.IntType(16)
        vector = ir.VectorType(element, LANES)
        pointer = self.builder.bitcast(self.pointer(kind, array, offset), vector.as_pointer())
        align = kind.dtype.bitwidth // 8
        if live is None:
            value = self.builder.load(pointer, align=align, typ=vector)
        else:
            zero = ir.Constant(vector, [0.0 if wide else 0] * LANES)
            name = f"llvm.masked.load.v{LANES}{'f32' if wide else 'i16'}.p0"
            arguments = [pointer, ir.Constant(ir.IntType(32), align), live, zero]
            value = self.call(name, vector, arguments)
        if wide:
            return value
        bits = self.builder.shl(self.builder.zext(value, _INTS), _ints(16))
        return self.builder.bitcast(bits, _VECTOR)

    def store(self, value: Any, kind: Any, array: Any, offset: Any, live: Any = None) -> None:
        """Up to 16 lanes of float32."""
        pointer = self.pointer(kind, array, offset)
        pointer = self.builder.bitcast(pointer, value.type.as_pointer())
        if live is None:
            self.builder.store(value, pointer, align=4)
        else:
            arguments = [value, pointer, ir.Constant(ir.IntType(32), 4), live]
            self.call(f"llvm.masked.store.v{LANES}f32.p0", ir.VoidType(), arguments)

    def call(self, name: str, result: Any, arguments: Sequence[Any]) -> Any:
        function_type = ir.FunctionType(result, [argument.type for argument in arguments])
        function = cgutils.get_or_insert_function(self.builder.module, function_type, name)
        return self.builder.call(function, arguments)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        return self.call(f"llvm.fma.v{LANES}f32", _VECTOR, [a, b, c])

    def first_lanes(self, count: Any) -> Any:
        """A mask of the first `count` lanes."""
        return self.between(_int(0), _int(0), count)

    def between(self, base: Any, first: Any, stop: Any) -> Any:
        """A mask of the lanes l with first <= base + l < stop."""
        low, high = (self._ints(self.builder.sub(value, base)) for value in (first, stop))
        lane = ir.Constant(_INTS, list(range(LANES)))
        return self.builder.and_(
            self.builder.icmp_signed(">=", lane, low), self.builder.icmp_signed("<", lane, high)
        )

    def _ints(self, value: Any) -> Any:
        low = self.builder.trunc(value, ir.IntType(32))
        one = self.builder.insert_element(ir.Constant(_INTS, ir.Undefined), low, _int(0))
        return self.builder.shuffle_vector(one, one, ir.Constant(_INTS, [0] * LANES))

    @contextmanager
    def each(self, start: Any, stop: Any, step: int, sums: list[Any]) -> Iterator[Any]:
        """A loop that carries `sums`: within it they are the values so far, to be replaced by the
        new ones; after it they are the last."""
        builder = self.builder
        before = builder.block
        check, body, after = (builder.append_basic_block(name) for name in ("", "", ""))
        builder.branch(check)
        builder.position_at_end(check)
        index = builder.phi(_INT)
        carried = [builder.phi(value.type) for value in sums]
        builder.cbranch(builder.icmp_signed("<", index, stop), body, after)
        for phi, value in zip([index, *carried], [start, *sums], strict=True):
            phi.add_incoming(value, before)
        builder.position_at_end(body)
        sums[:] = carried
        yield index
        following = builder.add(index, _int(step))
        for phi, value in zip([index, *carried], [following, *sums], strict=True):
            phi.add_incoming(value, builder.block)
        builder.branch(check)
        builder.position_at_end(after)
        sums[:] = carried

    def halves(self, a: Any, b: Any, width: int, half: int) -> Any:
        """Of every `width` lanes one half, first a's and then b's."""
        lanes: list[int] = []
        for first in range(half, LANES, width):
            lanes += range(first, first + width // 2)
            lanes += range(LANES + first, LANES + first + width // 2)
        return self.builder.shuffle_vector(a, b, ir.Constant(_INTS, lanes))

    def sums_of_lanes(self, vectors: list[Any]) -> Any:
        """Lane i of the result: all lanes of vector i, added in pairs."""
        vectors = vectors + [_ZERO] * (LANES - len(vectors))
        width = LANES
        while width > 1:
            pairs = zip(vectors[: len(vectors) // 2], vectors[len(vectors) // 2 :], strict=True)
            vectors = [
                self.builder.fadd(self.halves(a, b, width, 0), self.halves(a, b, width, width // 2))
                for a, b in pairs
            ]
            width //= 2
        return vectors[0]

    def exp(self, t: Any) -> Any:
        """Of t <= 0 or NaN."""
        builder = self.builder
        shifted = self.fma(t, _floats(_LOG2_E), _floats(_ROUND))
        power = builder.fsub(shifted, _floats(_ROUND))
        rest = self.fma(power, _floats(-_LN2_HIGH), t)
        rest = self.fma(power, _floats(-_LN2_LOW), rest)
        value = _floats(_EXP[0])
        for coefficient in _EXP[1:]:
            value = self.fma(value, rest, _floats(coefficient))
        value = self.fma(builder.fmul(value, rest), rest, builder.fadd(rest, _floats(1.0)))
        bits = builder.add(builder.bitcast(shifted, _INTS), _ints(127))
        factor = builder.bitcast(builder.shl(bits, _ints(23)), _VECTOR)
        small = builder.fcmp_ordered("<", t, _floats(_EXP_MIN))
        return builder.select(small, _ZERO, builder.fmul(value, factor))


def _int(value: int) -> Any:
    return ir.Constant(_INT, value)


def _ints(value: int) -> Any:
    return ir.Constant(_INTS, [value] * LANES)


def _floats(value: float) -> Any:
    return ir.Constant(_VECTOR, [value] * LANES)


def _literals(*values: Any) -> list[int]:
    return [value.literal_value for value in values]


Typed = tuple[Any, Callable[..., Any]]


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]  # numba has no types
def dots(
    _typing: Any,
    rows: Any,
    columns: Any,
    x: Any,
    x_at: Any,
    x_step: Any,
    w: Any,
    w_at: Any,
    w_step: Any,
    width: Any,
    out: Any,
    out_at: Any,
    out_step: Any,
) -> Typed:
    """out[m, n] = Σ over `width` of x[m, k] · w[n, k] for literal numbers of rows m and columns n,
    16 products at most. `out` is float32 and its rows lie out_step apart."""
    count_m, count_n = _literals(rows, columns)
    assert count_m * count_n <= LANES, "more sums than lanes"

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        emit = _Emitter(context, builder)
        _, _, x_, x_at_, x_step_, w_, w_at_, w_step_, width_, out_, out_at_, out_step_ = arguments
        x_rows = [emit.row(x_at, x_at_, x_step_, _int(m)) for m in range(count_m)]
        w_rows = [emit.row(w_at, w_at_, w_step_, _int(n)) for n in range(count_n)]
        sums = [_ZERO] * (count_m * count_n)
        whole = builder.and_(width_, _int(-LANES))

        def add(k: Any, live: Any = None) -> None:
            xs = [emit.load(x, x_, builder.add(row, k), live) for row in x_rows]
            ws = [emit.load(w, w_, builder.add(row, k), live) for row in w_rows]
            pairs = [(a, b) for a in xs for b in ws]
            sums[:] = [emit.fma(a, b, c) for (a, b), c in zip(pairs, sums, strict=True)]

        with emit.each(_int(0), whole, LANES, sums) as k:
            add(k)
        with emit.each(whole, width_, LANES, sums) as k:
            add(k, emit.first_lanes(builder.sub(width_, k)))
        total = emit.sums_of_lanes(sums)
        for m in range(count_m):
            lanes = ir.Constant(
                ir.VectorType(ir.IntType(32), count_n), [m * count_n + n for n in range(count_n)]
            )
            row = builder.shuffle_vector(total, total, lanes)
            emit.store(row, out, out_, emit.row(out_at, out_at_, out_step_, _int(m)))
        return context.get_dummy_value()

    given = rows, columns, x, x_at, x_step, w, w_at, w_step, width, out, out_at, out_step
    return types.void(*given), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def outer(
    _typing: Any,
    rows: Any,
    vectors: Any,
    resume: Any,
    x: Any,
    x_at: Any,
    x_step: Any,
    w: Any,
    w_at: Any,
    w_step: Any,
    start: Any,
    stop: Any,
    out: Any,
    out_at: Any,
    out_step: Any,
    width: Any,
) -> Typed:
    """out[m, c] (+)= Σ over k in [start, stop) of x[m, k] · w[k, c], for literal numbers of rows m
    and of vectors of 16 columns c, of which the first `width` exist. `resume` (literal): sums
    begin with what is in `out`, else with 0. `x` and `out` are float32."""
    count_m, count_v, resumes = _literals(rows, vectors, resume)

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        emit = _Emitter(context, builder)
        (_, _, _, x_, x_at_, x_step_, w_, w_at_, w_step_, start_, stop_, out_, out_at_, out_step_,
         width_) = arguments  # fmt: skip
        x_rows = [emit.row(x_at, x_at_, x_step_, _int(m)) for m in range(count_m)]
        tiles = [
            (emit.row(out_at, out_at_, out_step_, _int(m)), v)
            for m in range(count_m)
            for v in range(count_v)
        ]

        def run(masks: list[Any]) -> None:
            def here(row: Any, v: int) -> Any:
                return builder.add(row, _int(v * LANES))

            sums = [
                emit.load(out, out_, here(row, v), masks[v]) if resumes else _ZERO
                for row, v in tiles
            ]
            with emit.each(start_, stop_, 1, sums) as k:
                w_row = emit.row(w_at, w_at_, w_step_, k)
                ws = [emit.load(w, w_, here(w_row, v), masks[v]) for v in range(count_v)]
                xs = [emit.scalar(x, x_, builder.add(row, k)) for row in x_rows]
                pairs = [(a, b) for a in xs for b in ws]
                sums[:] = [emit.fma(a, b, c) for (a, b), c in zip(pairs, sums, strict=True)]
            for (row, v), value in zip(tiles, sums, strict=True):
                emit.store(value, out, out_, here(row, v), masks[v])

        full = builder.icmp_signed(">=", width_, _int(count_v * LANES))
        with builder.if_else(full) as (then, otherwise):
            with then:
                run([None] * count_v)
            with otherwise:
                run([emit.first_lanes(builder.sub(width_, _int(v * LANES)))
                     for v in range(count_v)])  # fmt: skip
        return context.get_dummy_value()

    given = (rows, vectors, resume, x, x_at, x_step, w, w_at, w_step, start, stop, out, out_at,
             out_step, width)  # fmt: skip
    return types.void(*given), generate


@intrinsic  # type: ignore[untyped-decorator]
def transpose(
    _typing: Any, x: Any, x_at: Any, x_step: Any, width: Any, out: Any, out_at: Any, out_step: Any
) -> Typed:
    """out[k, m] = x[m, k] of 16 rows m; `width` columns k, rounded up to 16 with zeros."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        emit = _Emitter(context, builder)
        x_, x_at_, x_step_, width_, out_, out_at_, out_step_ = arguments
        rows = [emit.row(x_at, x_at_, x_step_, _int(m)) for m in range(LANES)]
        whole = builder.and_(width_, _int(-LANES))

        def turn(k: Any, live: Any = None) -> None:
            vectors = [emit.load(x, x_, builder.add(row, k), live) for row in rows]
            for _ in range(4):
                pairs = list(zip(vectors[: LANES // 2], vectors[LANES // 2 :], strict=True))
                vectors = [zipped for a, b in pairs for zipped in _zip(builder, a, b)]
            for i, vector in enumerate(vectors):
                to = emit.row(out_at, out_at_, out_step_, builder.add(k, _int(i)))
                emit.store(vector, out, out_, to)

        with emit.each(_int(0), whole, LANES, []) as k:
            turn(k)
        with emit.each(whole, width_, LANES, []) as k:
            turn(k, emit.first_lanes(builder.sub(width_, k)))
        return context.get_dummy_value()

    return types.void(x, x_at, x_step, width, out, out_at, out_step), generate


def _zip(builder: Any, a: Any, b: Any) -> list[Any]:
    half = LANES // 2
    both = [[lane for i in range(half) for lane in (first + i, LANES + first + i)]
            for first in (0, half)]  # fmt: skip
    return [builder.shuffle_vector(a, b, ir.Constant(_INTS, lanes)) for lanes in both]


@intrinsic  # type: ignore[untyped-decorator]
def softmax(_typing: Any, row: Any, base: Any, first: Any, stop: Any) -> Typed:
    """exp(row[i] - largest) in place for first <= i < stop, i counted from `base`, and 0 for what
    else the same vectors of 16 hold. Returns the sum: lane l's of 16 adds up i = l, l + 16 …, then
    lanes in pairs. A NaN comes through; so does an infinity, as NaN."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        emit = _Emitter(context, builder)
        row_, base_, first_, stop_ = arguments
        start = builder.and_(first_, _int(-LANES))
        least = _floats(float("-inf"))
        largest = [least]
        with emit.each(start, stop_, LANES, largest) as i:
            values = emit.load(row, row_, builder.add(base_, i))
            larger = builder.fcmp_ordered(">", values, largest[0])
            larger = builder.and_(larger, emit.between(i, first_, stop_))
            largest[0] = builder.select(larger, values, largest[0])
        width = LANES
        while width > 1:
            a, b = (emit.halves(largest[0], least, width, half) for half in (0, width // 2))
            largest[0] = builder.select(builder.fcmp_ordered(">", a, b), a, b)
            width //= 2
        top = emit.splat(builder.extract_element(largest[0], _int(0)))
        sums = [_ZERO]
        with emit.each(start, stop_, LANES, sums) as i:
            at = builder.add(base_, i)
            weights = emit.exp(builder.fsub(emit.load(row, row_, at), top))
            weights = builder.select(emit.between(i, first_, stop_), weights, _ZERO)
            emit.store(weights, row, row_, at)
            sums[0] = builder.fadd(sums[0], weights)
        return builder.extract_element(emit.sums_of_lanes(sums), _int(0))

    return types.float32(row, base, first, stop), generate


@intrinsic  # type: ignore[untyped-decorator]
def silu_times(_typing: Any, x: Any, gate_at: Any, up_at: Any, width: Any, out: Any, at: Any) -> (
    Typed
):  # fmt: skip
    """out = gate / (1 + exp(-gate)) · up over `width` elements."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        emit = _Emitter(context, builder)
        x_, gate_at_, up_at_, width_, out_, at_ = arguments
        whole = builder.and_(width_, _int(-LANES))

        def compute(i: Any, live: Any = None) -> None:
            gate = emit.load(x, x_, builder.add(gate_at_, i), live)
            up = emit.load(x, x_, builder.add(up_at_, i), live)
            size = emit.call(f"llvm.fabs.v{LANES}f32", _VECTOR, [gate])
            power = emit.exp(builder.fneg(size))
            negative = builder.fcmp_ordered("<", gate, _ZERO)
            share = builder.fdiv(
                builder.select(negative, power, _floats(1.0)), builder.fadd(power, _floats(1.0))
            )
            value = builder.fmul(builder.fmul(gate, share), up)
            emit.store(value, out, out_, builder.add(at_, i), live)

        with emit.each(_int(0), whole, LANES, []) as i:
            compute(i)
        with emit.each(whole, width_, LANES, []) as i:
            compute(i, emit.first_lanes(builder.sub(width_, i)))
        return context.get_dummy_value()

    return types.void(x, gate_at, up_at, width, out, at), generate
