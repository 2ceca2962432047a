"""Reading GGUF files: metadata, the list of tensors, and dequantised rows. Needs no torch.

The arithmetic of the quantised types is the `gguf` package's.
"""

import mmap
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from gguf import quants
from numpy.typing import NDArray

from gateway.engine.model.errors import ModelError
from gateway.engine.model.gguf_header import Header, Metadata, TensorInfo


class GgufFile:
    """An open GGUF file. The data stays on disk until rows are asked for."""

    def __init__(
        self,
        path: Path,
        data: mmap.mmap,
        metadata: Metadata,
        tensors: dict[str, TensorInfo],
    ) -> None:
        self.path = path
        self.metadata = metadata
        self.tensors = tensors
        self._data = data

    @classmethod
    def open(cls, path: Path) -> Self:
        """Map the file and read its header. Raises ModelError."""
        try:
            with path.open("rb") as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise ModelError(f"{path} cannot be read as a GGUF file: {error}.") from error
        try:
            metadata, tensors = Header(path, data).read()
        except BaseException:
            data.close()
            raise
        return cls(path, data, metadata, tensors)

    def rows(self, name: str, first: int, count: int) -> NDArray[np.float32]:
        """Rows `first` to `first + count` of a tensor (its last dimension is a row), dequantised.

        Shape (count, row length), float32; a new array.
        """
        tensor = self.tensors[name]
        width = tensor.shape[-1]
        row_bytes = tensor.size // prod(tensor.shape[:-1])
        packed = np.frombuffer(
            self._data, np.uint8, count * row_bytes, tensor.start + first * row_bytes
        ).reshape(count, row_bytes)
        # Quantised values of a strange file may overflow float32; the result is then infinite.
        with np.errstate(over="ignore", invalid="ignore"):
            values = quants.dequantize(packed, tensor.kind)
        # For the float32 type it is a view of the file; the caller gets memory of its own.
        return np.array(values, dtype=np.float32).reshape(count, width)

    def close(self) -> None:
        self._data.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
