"""The next token of every row of logits, rows shared among a team of threads."""

from typing import Any

from gateway.engine.kernels.compiled_sampling import draw, greedy
from gateway.engine.kernels.compiling import entry
from gateway.engine.kernels.philox import uniform
from gateway.engine.kernels.team import done, take, wait

PHASES = 2


@entry
def choose(
    claims: Any, logits_SV: Any, width: int, limits_S4: Any, seeds_S2: Any, scratch_MX: Any,
    chosen_S: Any,
) -> None:  # fmt: skip
    """chosen_S: the token of each row, NOT_FINITE where its logits are not.

    limits_S4: float64 temperature (0: greedy), top-k (0: none), top-p and min-p; seeds_S2: uint64
    seed and position; scratch_MX: room for `draw`, for each thread.
    """
    thread = take(claims, 0)
    items = len(chosen_S)
    row = take(claims, 1)
    while row < items:
        temperature = limits_S4[row, 0]
        if temperature > 0:
            number = uniform(seeds_S2[row, 0], seeds_S2[row, 1])
            chosen_S[row] = draw(
                logits_SV, row * width, width, temperature, int(limits_S4[row, 1]),
                limits_S4[row, 2], limits_S4[row, 3], number, scratch_MX[thread],
            )  # fmt: skip
        else:
            chosen_S[row] = greedy(logits_SV, row * width, width)
        done(claims, 1)
        row = take(claims, 1)
    wait(claims, 1, items)
