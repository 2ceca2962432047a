"""The compiled step for processors with fewer instructions: run by `test_narrow.py`, in a process
whose Numba compiles for such a one. Not collected with the other tests.
"""

import re
from typing import Any

import pytest
import torch
from numba.core.caching import NullCache

from gateway.engine.kernels import compiled_step, emitter
from tests.engine.model.random_decoders import in_dtype, random_weights
from tests.engine.model.test_compiled_decoder import ODD, Case, by_reference, compiled

forward: Any = compiled_step.forward


@pytest.fixture(autouse=True)
def _compiled_anew():
    """What comes from the cache can't be inspected."""
    forward._cache = NullCache()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_logits_are_right_and_need_no_instruction_that_is_missing(dtype: torch.dtype):
    assert not emitter.PAIR_PRODUCTS
    for name in "odd", "almost-even":
        case = Case(ODD[name], random_weights(ODD[name]), 5)
        rounded = in_dtype(case.weights, dtype)
        exact = torch.cat(by_reference(case, torch.float32, rounded))
        ours = (torch.cat(compiled(case, dtype, 2)) - exact).abs()
        if dtype == torch.float32:
            assert ours.max() < 2e-4
        else:
            op_by_op = (torch.cat(by_reference(case, dtype, rounded)) - exact).abs()
            assert ours.mean() <= 0.8 * op_by_op.mean()
    (code,) = forward.inspect_asm().values()
    assert "ymm" in code
    assert ("zmm" in code) == emitter.WIDE_REGISTERS
    assert not re.search(r"dpbf16ps|cvtneps2bf16|cvtne2ps2bf16|truncsfbf2", code)
