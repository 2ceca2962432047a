"""The instructions of the vector code in `tiles`: LLVM IR, on vectors of 16 floats.

Elements of arrays are float32, or bfloat16 as uint16, which is widened where it is read. No
instruction has a fast-math flag: LLVM may neither reorder nor fuse. A machine without vectors of
16 floats takes several of its own.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target

LANES = 16
_FEATURES = cpu_target.target_context.codegen().magic_tuple()[2].split(",")
"""Of the processor that Numba compiles for: this machine's, but for what its settings say."""


def supports(feature: str) -> bool:
    """Of a processor, as LLVM calls it."""
    return f"+{feature}" in _FEATURES


WIDE_REGISTERS = supports("avx512f")
PAIR_PRODUCTS = supports("avx512bf16")
"""Whether there are instructions for sums of products of bfloat16 pairs, and for rounding to it."""


class _BFloat(ir.types.Type):  # type: ignore[misc]  # llvmlite has no types
    """LLVM's bfloat, which llvmlite does not know."""

    intrinsic_name = "bf16"

    def __str__(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


INT, FLOAT = ir.IntType(64), ir.FloatType()
VECTOR = ir.VectorType(FLOAT, LANES)
INTS = ir.VectorType(ir.IntType(32), LANES)
PAIRS = ir.VectorType(_BFloat(), 2 * LANES)
ZERO = ir.Constant(VECTOR, [0.0] * LANES)

_LOG2_E = 1.4426950408889634
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1,
        5.0000001201e-1)  # fmt: skip
"""exp(r) = 1 + r + r² · polynomial for |r| <= ln2 / 2: Cephes' expf, within 2 ulp."""
_ROUND = 1.5 * 2**23
"""Added to a small float it leaves the nearest integer in the low bits."""
_EXP_MIN = -86.0
"""Below, exp is taken for zero, which keeps powers of two out of the subnormals."""


class Emitter:
    """The instructions of one intrinsic."""

    def __init__(self, context: Any, builder: Any) -> None:
        self.context, self.builder = context, builder

    def row(self, kind: Any, at: Any, step: Any, index: Any) -> Any:
        """Offset of row `index`, see `at, step` above."""
        if not isinstance(kind, types.Array):
            return self.builder.add(at, self.builder.mul(step, index))
        place = self.pointer(kind, at, self.builder.add(step, index))
        return self.builder.load(place, typ=INT)

    def pointer(self, kind: Any, array: Any, offset: Any) -> Any:
        data = self.context.make_array(kind)(self.context, self.builder, array).data
        size = kind.dtype.bitwidth // 8
        return cgutils.pointer_add(self.builder, data, self.builder.mul(offset, integer(size)))

    def scalar(self, kind: Any, array: Any, offset: Any) -> Any:
        """The float32 there, in all lanes."""
        value = self.builder.load(self.pointer(kind, array, offset), typ=FLOAT)
        return self.splat(value)

    def splat(self, value: Any, lanes: int = LANES) -> Any:
        """The number in all lanes."""
        vector = ir.VectorType(value.type, lanes)
        one = self.builder.insert_element(ir.Constant(vector, ir.Undefined), value, integer(0))
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes)
        return self.builder.shuffle_vector(one, one, zeros)

    def load(self, kind: Any, array: Any, offset: Any, live: Any = None) -> Any:
        """16 elements as float32; those that `live` masks out are not read and are 0."""
        wide = kind.dtype == types.float32
        element = FLOAT if wide else ir.IntType(16)
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
        bits = self.builder.shl(self.builder.zext(value, INTS), integers(16))
        return self.builder.bitcast(bits, VECTOR)

    def store(self, value: Any, kind: Any, array: Any, offset: Any, live: Any = None) -> None:
        """Up to 16 lanes; where elements are bfloat16, rounded to the nearest, ties to even."""
        pointer = self.pointer(kind, array, offset)
        align = kind.dtype.bitwidth // 8
        if kind.dtype == types.uint16:
            value = self._narrow(value)
        pointer = self.builder.bitcast(pointer, value.type.as_pointer())
        if live is None:
            self.builder.store(value, pointer, align=align)
        else:
            arguments = [value, pointer, ir.Constant(ir.IntType(32), align), live]
            name = f"llvm.masked.store.v{value.type.count}{'f32' if align == 4 else 'i16'}.p0"
            self.call(name, ir.VoidType(), arguments)

    def _narrow(self, value: Any) -> Any:
        """The bits of 16 bfloat16."""
        halves = ir.VectorType(ir.IntType(16), LANES)
        if PAIR_PRODUCTS:
            narrow = self.builder.fptrunc(value, ir.VectorType(_BFloat(), LANES))
            return self.builder.bitcast(narrow, halves)
        # LLVM would call a function that no library here has
        bits = self.builder.bitcast(value, INTS)
        high = self.builder.lshr(bits, integers(16))
        odd = self.builder.and_(high, integers(1))
        rounded = self.builder.add(bits, self.builder.add(odd, integers(0x7FFF)))
        rounded = self.builder.lshr(rounded, integers(16))
        quiet = self.builder.or_(high, integers(0x40))
        is_nan = self.builder.fcmp_unordered("uno", value, value)
        return self.builder.trunc(self.builder.select(is_nan, quiet, rounded), halves)

    def pairs(self, kind: Any, array: Any, offset: Any, live: Any = None) -> Any:
        """32 bfloat16; those that `live` masks out are not read and are 0."""
        halves = ir.VectorType(ir.IntType(16), 2 * LANES)
        pointer = self.builder.bitcast(self.pointer(kind, array, offset), halves.as_pointer())
        if live is None:
            value = self.builder.load(pointer, align=2, typ=halves)
        else:
            zero = ir.Constant(halves, [0] * 2 * LANES)
            arguments = [pointer, ir.Constant(ir.IntType(32), 2), live, zero]
            value = self.call(f"llvm.masked.load.v{2 * LANES}i16.p0", halves, arguments)
        return self.builder.bitcast(value, PAIRS)

    def pair(self, kind: Any, array: Any, offset: Any) -> Any:
        """The two bfloat16 there, 16 times."""
        word = ir.IntType(32)
        pointer = self.builder.bitcast(self.pointer(kind, array, offset), word.as_pointer())
        both = self.splat(self.builder.load(pointer, align=2, typ=word))
        return self.builder.bitcast(both, PAIRS)

    def add_pairs(self, a: Any, b: Any, c: Any) -> Any:
        """c + a · b of 16 pairs. The instruction and what stands in for it round differently, so
        bits are those of a kind of machine."""
        if PAIR_PRODUCTS:
            return self.call("llvm.x86.avx512bf16.dpbf16ps.512", VECTOR, [c, a, b])
        low, high = self._widened(a), self._widened(b)
        return self.fma(low[1], high[1], self.fma(low[0], high[0], c))

    def _widened(self, pairs: Any) -> tuple[Any, Any]:
        """The first and the second of each pair, as float32."""
        words = self.builder.bitcast(pairs, INTS)
        first = self.builder.shl(words, integers(16))
        second = self.builder.and_(words, integers(-(1 << 16)))
        return self.builder.bitcast(first, VECTOR), self.builder.bitcast(second, VECTOR)

    def call(self, name: str, result: Any, arguments: Sequence[Any]) -> Any:
        function_type = ir.FunctionType(result, [argument.type for argument in arguments])
        function = cgutils.get_or_insert_function(self.builder.module, function_type, name)
        return self.builder.call(function, arguments)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        return self.call(f"llvm.fma.v{LANES}f32", VECTOR, [a, b, c])

    def first_lanes(self, count: Any, lanes: int = LANES) -> Any:
        """A mask of the first `count` of 16 or 32 lanes."""
        return self.between(integer(0), integer(0), count, lanes)

    def between(self, base: Any, first: Any, stop: Any, lanes: int = LANES) -> Any:
        """A mask of the lanes l with first <= base + l < stop."""
        words = ir.VectorType(ir.IntType(32), lanes)
        low, high = (
            self.builder.trunc(self.builder.sub(value, base), ir.IntType(32))
            for value in (first, stop)
        )
        low, high = (self.splat(value, lanes) for value in (low, high))
        lane = ir.Constant(words, list(range(lanes)))
        return self.builder.and_(
            self.builder.icmp_signed(">=", lane, low), self.builder.icmp_signed("<", lane, high)
        )

    @contextmanager
    def each(self, start: Any, stop: Any, step: int, sums: list[Any]) -> Iterator[Any]:
        """A loop that carries `sums`: within it they are the values so far, to be replaced by the
        new ones; after it they are the last."""
        builder = self.builder
        before = builder.block
        check, body, after = (builder.append_basic_block(name) for name in ("", "", ""))
        builder.branch(check)
        builder.position_at_end(check)
        index = builder.phi(INT)
        carried = [builder.phi(value.type) for value in sums]
        builder.cbranch(builder.icmp_signed("<", index, stop), body, after)
        for phi, value in zip([index, *carried], [start, *sums], strict=True):
            phi.add_incoming(value, before)
        builder.position_at_end(body)
        sums[:] = carried
        yield index
        following = builder.add(index, integer(step))
        for phi, value in zip([index, *carried], [following, *sums], strict=True):
            phi.add_incoming(value, builder.block)
        builder.branch(check)
        builder.position_at_end(after)
        sums[:] = carried

    def along(self, width: Any, compute: Callable[..., None]) -> None:
        """`compute(i)` for i = 0, 16 … of `width` elements; with a mask where fewer are left."""
        whole = self.builder.and_(width, integer(-LANES))
        with self.each(integer(0), whole, LANES, []) as i:
            compute(i)
        with self.each(whole, width, LANES, []) as i:
            compute(i, self.first_lanes(self.builder.sub(width, i)))

    def halves(self, a: Any, b: Any, width: int, half: int) -> Any:
        """Of every `width` lanes one half, first a's and then b's."""
        lanes: list[int] = []
        for first in range(half, LANES, width):
            lanes += range(first, first + width // 2)
            lanes += range(LANES + first, LANES + first + width // 2)
        return self.builder.shuffle_vector(a, b, ir.Constant(INTS, lanes))

    def sums_of_lanes(self, vectors: list[Any]) -> Any:
        """Lane i of the result: all lanes of vector i, added in pairs."""
        vectors = vectors + [ZERO] * (LANES - len(vectors))
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
        shifted = self.fma(t, floats(_LOG2_E), floats(_ROUND))
        power = builder.fsub(shifted, floats(_ROUND))
        rest = self.fma(power, floats(-_LN2_HIGH), t)
        rest = self.fma(power, floats(-_LN2_LOW), rest)
        value = floats(_EXP[0])
        for coefficient in _EXP[1:]:
            value = self.fma(value, rest, floats(coefficient))
        value = self.fma(builder.fmul(value, rest), rest, builder.fadd(rest, floats(1.0)))
        bits = builder.add(builder.bitcast(shifted, INTS), integers(127))
        factor = builder.bitcast(builder.shl(bits, integers(23)), VECTOR)
        small = builder.fcmp_ordered("<", t, floats(_EXP_MIN))
        return builder.select(small, ZERO, builder.fmul(value, factor))


def integer(value: int) -> Any:
    return ir.Constant(INT, value)


def integers(value: int) -> Any:
    return ir.Constant(INTS, [value] * LANES)


def floats(value: float) -> Any:
    return ir.Constant(VECTOR, [value] * LANES)


def literals(*values: Any) -> list[int]:
    return [value.literal_value for value in values]
