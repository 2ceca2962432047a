"""Random numbers made from a key and a counter, compiled by Numba.

Philox4x64-10: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (2011), section 3.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from gateway.engine.kernels.compiling import entry
from gateway.engine.kernels.tiles import Typed

ROUNDS = 10
_MULTIPLIERS = np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157)
_KEY_STEPS = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B)


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def _multiply_high(_typing: Any, a: Any, b: Any) -> Typed:
    """The upper half of the product of two uint64."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        wide, narrow = ir.IntType(128), ir.IntType(64)
        product = builder.mul(*(builder.zext(argument, wide) for argument in arguments))
        return builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), narrow)

    return types.uint64(types.uint64, types.uint64), generate


@entry
def uniform(key: Any, counter: Any) -> Any:
    """In [0, 1), with 53 bits: the first `random()` of numpy's
    Generator(Philox(key=key, counter=counter)). Both are taken modulo 2⁶⁴; of Python's integers
    Numba takes those of 63 bits and a sign, so that a larger one has to be a np.uint64."""
    zero = np.uint64(0)
    # numpy counts up before it draws
    x0, x1, x2, x3 = np.uint64(counter) + np.uint64(1), zero, zero, zero
    k0, k1 = np.uint64(key), zero
    for _ in range(ROUNDS):
        high0, low0 = _multiply_high(_MULTIPLIERS[0], x0), _MULTIPLIERS[0] * x0
        high1, low1 = _multiply_high(_MULTIPLIERS[1], x2), _MULTIPLIERS[1] * x2
        x0, x1, x2, x3 = high1 ^ x1 ^ k0, low1, high0 ^ x3 ^ k1, low0
        k0, k1 = k0 + _KEY_STEPS[0], k1 + _KEY_STEPS[1]
    return np.float64(x0 >> np.uint64(11)) * 2.0**-53
