"""Vector code for the loops of `pieces`, written as LLVM IR so that the order of every sum is
said here and not chosen by a compiler.

All sums are of fused multiply-adds in float32, and how many rows or columns a tile has changes
none of them:

- `dots`: lane l of 16 adds up the products at k = l, l + 16, l + 32 …; then lanes are added in
  pairs, l and l + 8, l and l + 4, l and l + 2, 0 and 1.
- `outer` and `product`: a sum takes its products one after another, in order of k.

Elements are float32, or bfloat16 as uint16. `product`, and `dots` of two bfloat16, take bfloat16 in
pairs where the processor has an instruction for it; else it is widened. No instruction has a
fast-math flag: LLVM may neither reorder nor fuse. A machine without vectors of 16 floats takes
several of its own.

Where an argument pair is called `at, step`, row i of a matrix begins at `at + i * step` of the flat
array; if `at` is an array of offsets, at `at[step + i]`.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from gateway.engine.kernels.emitter import (
    FLOAT,
    LANES,
    PAIR_PRODUCTS,
    VECTOR,
    WIDE_REGISTERS,
    ZERO,
    Emitter,
    floats,
    integer,
    literals,
)

TILE = 4 if WIDE_REGISTERS else 2
"""Rows, columns or vectors of a tile: as many as the sums of TILE² vectors find registers."""
PANEL_VECTORS = 2
PANEL = PANEL_VECTORS * LANES
"""Columns of a packed matrix that lie together, see `product`."""
PANEL_ROWS = 8 if WIDE_REGISTERS else 2
"""Rows of a tile of `product`."""

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
    count_m, count_n = literals(rows, columns)
    assert count_m * count_n <= LANES, "more sums than lanes"

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        emit = Emitter(context, builder)
        _, _, x_, x_at_, x_step_, w_, w_at_, w_step_, width_, out_, out_at_, out_step_ = arguments
        x_rows = [emit.row(x_at, x_at_, x_step_, integer(m)) for m in range(count_m)]
        w_rows = [emit.row(w_at, w_at_, w_step_, integer(n)) for n in range(count_n)]
        sums = [ZERO] * (count_m * count_n)
        paired = PAIR_PRODUCTS and x.dtype == w.dtype == types.uint16
        step = 2 * LANES if paired else LANES
        load, multiply = (emit.pairs, emit.add_pairs) if paired else (emit.load, emit.fma)
        whole = builder.and_(width_, integer(-step))

        def add(k: Any, live: Any = None) -> None:
            xs = [load(x, x_, builder.add(row, k), live) for row in x_rows]
            ws = [load(w, w_, builder.add(row, k), live) for row in w_rows]
            pairs = [(a, b) for a in xs for b in ws]
            sums[:] = [multiply(a, b, c) for (a, b), c in zip(pairs, sums, strict=True)]

        with emit.each(integer(0), whole, step, sums) as k:
            add(k)
        with emit.each(whole, width_, step, sums) as k:
            add(k, emit.first_lanes(builder.sub(width_, k), step))
        total = emit.sums_of_lanes(sums)
        for m in range(count_m):
            lanes = ir.Constant(
                ir.VectorType(ir.IntType(32), count_n), [m * count_n + n for n in range(count_n)]
            )
            row = builder.shuffle_vector(total, total, lanes)
            emit.store(row, out, out_, emit.row(out_at, out_at_, out_step_, integer(m)))
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
    count_m, count_v, resumes = literals(rows, vectors, resume)

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        emit = Emitter(context, builder)
        (_, _, _, x_, x_at_, x_step_, w_, w_at_, w_step_, start_, stop_, out_, out_at_, out_step_,
         width_) = arguments  # fmt: skip
        x_rows = [emit.row(x_at, x_at_, x_step_, integer(m)) for m in range(count_m)]
        tiles = [
            (emit.row(out_at, out_at_, out_step_, integer(m)), v)
            for m in range(count_m)
            for v in range(count_v)
        ]

        def run(masks: list[Any]) -> None:
            def here(row: Any, v: int) -> Any:
                return builder.add(row, integer(v * LANES))

            sums = [
                emit.load(out, out_, here(row, v), masks[v]) if resumes else ZERO
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

        full = builder.icmp_signed(">=", width_, integer(count_v * LANES))
        with builder.if_else(full) as (then, otherwise):
            with then:
                run([None] * count_v)
            with otherwise:
                run([emit.first_lanes(builder.sub(width_, integer(v * LANES)))
                     for v in range(count_v)])  # fmt: skip
        return context.get_dummy_value()

    given = (rows, vectors, resume, x, x_at, x_step, w, w_at, w_step, start, stop, out, out_at,
             out_step, width)  # fmt: skip
    return types.void(*given), generate


@intrinsic(prefer_literal=True)  # type: ignore[untyped-decorator]
def product(
    _typing: Any,
    rows: Any,
    x: Any,
    x_at: Any,
    x_step: Any,
    w: Any,
    w_at: Any,
    steps: Any,
    out: Any,
    out_at: Any,
    out_step: Any,
    width: Any,
) -> Typed:
    """out[m, n] = Σ x[m, k] · w[n, k] for a literal number of rows m and the columns n of one
    panel, of which the first `width` exist.

    The panel lies at w_at as [step][column][products of a step], zeros where a column or product
    does not exist: one product of a step in float32, two in bfloat16, which both x and w are.
    """
    (count,) = literals(rows)

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        emit = Emitter(context, builder)
        _, x_, x_at_, x_step_, w_, w_at_, steps_, out_, out_at_, out_step_, width_ = arguments
        per_step = 1 if w.dtype == types.float32 else 2
        x_rows = [emit.row(x_at, x_at_, x_step_, integer(m)) for m in range(count)]
        sums = [ZERO] * (count * PANEL_VECTORS)
        with emit.each(integer(0), steps_, 1, sums) as k:
            of_step = builder.add(w_at_, builder.mul(k, integer(PANEL * per_step)))
            at = [builder.add(of_step, integer(v * LANES * per_step)) for v in range(PANEL_VECTORS)]
            x_k = [builder.add(row, builder.mul(k, integer(per_step))) for row in x_rows]
            if per_step == 1:
                ws, xs = [emit.load(w, w_, i) for i in at], [emit.scalar(x, x_, i) for i in x_k]
                multiply = emit.fma
            else:
                ws, xs = [emit.pairs(w, w_, i) for i in at], [emit.pair(x, x_, i) for i in x_k]
                multiply = emit.add_pairs
            terms = [(a, b) for a in xs for b in ws]
            sums[:] = [multiply(b, a, c) for (a, b), c in zip(terms, sums, strict=True)]

        def save(masks: list[Any]) -> None:
            for index, value in enumerate(sums):
                m, v = divmod(index, PANEL_VECTORS)
                row = emit.row(out_at, out_at_, out_step_, integer(m))
                emit.store(value, out, out_, builder.add(row, integer(v * LANES)), masks[v])

        full = builder.icmp_signed(">=", width_, integer(PANEL))
        with builder.if_else(full) as (then, otherwise):
            with then:
                save([None] * PANEL_VECTORS)
            with otherwise:
                save([emit.first_lanes(builder.sub(width_, integer(v * LANES)))
                      for v in range(PANEL_VECTORS)])  # fmt: skip
        return context.get_dummy_value()

    given = rows, x, x_at, x_step, w, w_at, steps, out, out_at, out_step, width
    return types.void(*given), generate


@intrinsic  # type: ignore[untyped-decorator]
def scaled(
    _typing: Any, x: Any, at: Any, width: Any, factor: Any, by: Any, by_at: Any, out: Any,
    out_at: Any,
) -> Typed:  # fmt: skip
    """out[i] = (x[i] · factor) · by[i] of `width` elements; `x` and `by` are float32."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        emit = Emitter(context, builder)
        x_, at_, width_, factor_, by_, by_at_, out_, out_at_ = arguments
        factors = emit.splat(factor_)

        def compute(i: Any, live: Any = None) -> None:
            value = builder.fmul(emit.load(x, x_, builder.add(at_, i), live), factors)
            value = builder.fmul(value, emit.load(by, by_, builder.add(by_at_, i), live))
            emit.store(value, out, out_, builder.add(out_at_, i), live)

        emit.along(width_, compute)
        return context.get_dummy_value()

    return types.void(x, at, width, factor, by, by_at, out, out_at), generate


@intrinsic  # type: ignore[untyped-decorator]
def added(
    _typing: Any, x: Any, at: Any, y: Any, y_at: Any, width: Any, out: Any, out_at: Any
) -> Typed:
    """out[i] = x[i] + y[i] of `width` elements."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        emit = Emitter(context, builder)
        x_, at_, y_, y_at_, width_, out_, out_at_ = arguments

        def compute(i: Any, live: Any = None) -> None:
            first = emit.load(x, x_, builder.add(at_, i), live)
            second = emit.load(y, y_, builder.add(y_at_, i), live)
            emit.store(builder.fadd(first, second), out, out_, builder.add(out_at_, i), live)

        emit.along(width_, compute)
        return context.get_dummy_value()

    return types.void(x, at, y, y_at, width, out, out_at), generate


@intrinsic  # type: ignore[untyped-decorator]
def rotated(
    _typing: Any, x: Any, at: Any, half: Any, turn: Any, turn_at: Any, out: Any, out_at: Any
) -> Typed:
    """Rotary embedding of one head: out[i] = x[i]·cos[i] - x[i+half]·sin[i] and out[i+half] =
    x[i+half]·cos[i] + x[i]·sin[i]; cos of `half` angles lie at turn[turn_at:], then their sin."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        emit = Emitter(context, builder)
        x_, at_, half_, turn_, turn_at_, out_, out_at_ = arguments

        def compute(i: Any, live: Any = None) -> None:
            low = builder.add(at_, i)
            cos_at = builder.add(turn_at_, i)
            first = emit.load(x, x_, low, live)
            second = emit.load(x, x_, builder.add(low, half_), live)
            cos = emit.load(turn, turn_, cos_at, live)
            sin = emit.load(turn, turn_, builder.add(cos_at, half_), live)
            to = builder.add(out_at_, i)
            turned = builder.fsub(builder.fmul(first, cos), builder.fmul(second, sin))
            emit.store(turned, out, out_, to, live)
            turned = builder.fadd(builder.fmul(second, cos), builder.fmul(first, sin))
            emit.store(turned, out, out_, builder.add(to, half_), live)

        emit.along(half_, compute)
        return context.get_dummy_value()

    return types.void(x, at, half, turn, turn_at, out, out_at), generate


@intrinsic  # type: ignore[untyped-decorator]
def copied(_typing: Any, x: Any, at: Any, width: Any, out: Any, out_at: Any) -> Typed:
    """out[i] = x[i] of `width` elements, in the dtype of `out`."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        emit = Emitter(context, builder)
        x_, at_, width_, out_, out_at_ = arguments

        def compute(i: Any, live: Any = None) -> None:
            value = emit.load(x, x_, builder.add(at_, i), live)
            emit.store(value, out, out_, builder.add(out_at_, i), live)

        emit.along(width_, compute)
        return context.get_dummy_value()

    return types.void(x, at, width, out, out_at), generate


@intrinsic  # type: ignore[untyped-decorator]
def element(_typing: Any, x: Any, at: Any) -> Typed:
    """x[at] as float32."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        emit = Emitter(context, builder)
        if x.dtype == types.float32:
            return builder.load(emit.pointer(x, *arguments), typ=FLOAT)
        bits = builder.load(emit.pointer(x, *arguments), typ=ir.IntType(16))
        bits = builder.shl(builder.zext(bits, ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
        return builder.bitcast(bits, FLOAT)

    return types.float32(x, at), generate


@intrinsic  # type: ignore[untyped-decorator]
def sum_of_squares(_typing: Any, x: Any, at: Any, width: Any) -> Typed:
    """Σ x[i]² of `width` elements, in the order of `dots`."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        emit = Emitter(context, builder)
        x_, at_, width_ = arguments
        sums = [ZERO]
        whole = builder.and_(width_, integer(-LANES))
        with emit.each(integer(0), whole, LANES, sums) as i:
            value = emit.load(x, x_, builder.add(at_, i))
            sums[0] = emit.fma(value, value, sums[0])
        with emit.each(whole, width_, LANES, sums) as i:
            live = emit.first_lanes(builder.sub(width_, i))
            value = emit.load(x, x_, builder.add(at_, i), live)
            sums[0] = emit.fma(value, value, sums[0])
        return builder.extract_element(emit.sums_of_lanes(sums), integer(0))

    return types.float32(x, at, width), generate


@intrinsic  # type: ignore[untyped-decorator]
def softmax(_typing: Any, row: Any, base: Any, first: Any, stop: Any, scale: Any) -> Typed:
    """exp(scale · (row[i] - largest)) in place for first <= i < stop, i counted from `base`, and 0
    for what else the same vectors of 16 hold. Returns the sum: lane l's of 16 adds up i = l, l + 16
    …, then lanes in pairs. A NaN comes through; so does an infinity, as NaN."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        emit = Emitter(context, builder)
        row_, base_, first_, stop_, scale_ = arguments
        start = builder.and_(first_, integer(-LANES))
        least = floats(float("-inf"))
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
        top = emit.splat(builder.extract_element(largest[0], integer(0)))
        scales = emit.splat(scale_)
        sums = [ZERO]
        with emit.each(start, stop_, LANES, sums) as i:
            at = builder.add(base_, i)
            below = builder.fsub(emit.load(row, row_, at), top)
            weights = emit.exp(builder.fmul(below, scales))
            weights = builder.select(emit.between(i, first_, stop_), weights, ZERO)
            emit.store(weights, row, row_, at)
            sums[0] = builder.fadd(sums[0], weights)
        return builder.extract_element(emit.sums_of_lanes(sums), integer(0))

    return types.float32(row, base, first, stop, scale), generate


@intrinsic  # type: ignore[untyped-decorator]
def silu_times(_typing: Any, x: Any, gate_at: Any, up_at: Any, width: Any, out: Any, at: Any) -> (
    Typed
):  # fmt: skip
    """out = gate / (1 + exp(-gate)) · up over `width` elements."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        emit = Emitter(context, builder)
        x_, gate_at_, up_at_, width_, out_, at_ = arguments

        def compute(i: Any, live: Any = None) -> None:
            gate = emit.load(x, x_, builder.add(gate_at_, i), live)
            up = emit.load(x, x_, builder.add(up_at_, i), live)
            size = emit.call(f"llvm.fabs.v{LANES}f32", VECTOR, [gate])
            power = emit.exp(builder.fneg(size))
            negative = builder.fcmp_ordered("<", gate, ZERO)
            share = builder.fdiv(
                builder.select(negative, power, floats(1.0)), builder.fadd(power, floats(1.0))
            )
            value = builder.fmul(builder.fmul(gate, share), up)
            emit.store(value, out, out_, builder.add(at_, i), live)

        emit.along(width_, compute)
        return context.get_dummy_value()

    return types.void(x, gate_at, up_at, width, out, at), generate
