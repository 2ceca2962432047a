"""Triton's interpreter, for machines without a GPU."""

import os
from typing import Any


def use_interpreter() -> None:
    """Run all Triton kernels of this process on the CPU. Before Triton is first imported."""
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.language as tl
    from triton.runtime import interpreter

    dot = interpreter.InterpreterBuilder.create_dot

    def dot_of_values(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        """Triton 3.7's interpreter multiplies the bit patterns of bfloat16 as if they were
        integers; their values in float32 have the same products and sums."""
        if a.dtype.scalar == tl.bfloat16:
            a, b = self.cast_impl(a, tl.float32), self.cast_impl(b, tl.float32)
        return dot(self, a, b, *rest)

    interpreter.InterpreterBuilder.create_dot = dot_of_values
