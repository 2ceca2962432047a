"""Recording what a function launches, to launch it again as a whole."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Run = Callable[[], Tensor]
Record = Callable[[Run], Run]
"""From something to compute to what computes the same again, from what its inputs hold then."""


class CudaGraphs:
    """Records into CUDA graphs that share one pool of memory: they never run at the same time."""

    def __init__(self) -> None:
        self._pool: Any = torch.cuda.graph_pool_handle()

    def __call__(self, run: Run) -> Run:
        run()  # what compiles or allocates for good does so outside the graph
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = run()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay
