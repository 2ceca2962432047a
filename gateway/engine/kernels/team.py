"""A team of threads that run one compiled function together.

Each thread runs the whole function. The work of a phase is cut into items; whoever is free takes
the next one, and a phase is over when all its items are done:

    item = take(claims, phase)
    while item < items:
        …
        done(claims, phase)
        item = take(claims, phase)
    wait(claims, phase, items)

So nobody waits for a thread that has no item in hand: one that comes late, or that the system has
set aside, costs its share of the work and no more. Which thread has which item changes no result.
"""

import platform
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from gateway.engine.kernels.emitter import INT, integer

CLAIMS = 16
"""Words of a phase: items taken; in another cache line items done, and when all were."""
_TAKEN, DONE, OVER = 0, CLAIMS // 2, CLAIMS // 2 + 1
X86 = platform.machine() == "x86_64"
SPINS = 2000
"""Looks at the counter before a waiting thread lets others have its core: some 20 microseconds."""
Claims = np.ndarray[Any, np.dtype[np.int64]]
Typed = tuple[Any, Callable[..., Any]]


class Team:
    """`threads` of them, the caller of `run` included; the others live as long as the process."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._helpers = [_Helper(index) for index in range(1, threads)]

    def run(self, phases: int, function: Callable[..., None], *arguments: Any) -> Claims:
        """`function(claims, *arguments)` on all threads. Returns when the work is done; another
        thread may still be about to find that nothing is left. The result holds the time stamps."""
        # a straggler may look at the counters once more, so they are never used again
        claims = np.zeros((phases, CLAIMS), dtype=np.int64)
        for helper in self._helpers:
            helper.start(function, claims, *arguments)
        function(claims, *arguments)
        return claims


@cache
def team(threads: int) -> Team:
    """The one of this process; its threads wait without work."""
    return Team(threads)


class _Helper:
    def __init__(self, index: int) -> None:
        self._job: tuple[Any, ...] | None = None
        self._wake = threading.Semaphore(0)
        threading.Thread(target=self._work, name=f"compute-{index}", daemon=True).start()

    def start(self, *job: Any) -> None:
        self._job = job
        self._wake.release()

    def _work(self) -> None:
        while True:
            self._wake.acquire()
            self._run()  # by itself, so that an idle thread keeps none of the arrays alive

    def _run(self) -> None:
        job, self._job = self._job, None
        if job is not None:  # else it was done along with the one before
            function, *arguments = job
            function(*arguments)


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def take(_typing: Any, claims: Any, phase: Any) -> Typed:
    """The next item of the phase, from 0; there may be none of this number."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        place = _place(context, builder, claims, arguments[0], arguments[1], _TAKEN)
        return builder.atomic_rmw("add", place, integer(1), "monotonic")

    return types.int64(claims, phase), generate


@intrinsic  # type: ignore[untyped-decorator]
def done(_typing: Any, claims: Any, phase: Any) -> Typed:
    """One item more is done: what it wrote is there for whoever has waited."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        place = _place(context, builder, claims, arguments[0], arguments[1], DONE)
        builder.atomic_rmw("add", place, integer(1), "release")
        return context.get_dummy_value()

    return types.void(claims, phase), generate


@intrinsic  # type: ignore[untyped-decorator]
def wait(_typing: Any, claims: Any, phase: Any, items: Any) -> Typed:
    """Until all items are done. Notes the processor's time stamp, on x86."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        claims_, phase_, items_ = arguments
        place = _place(context, builder, claims, claims_, phase_, DONE)
        names = "check", "spin", "yield", "next", "over"
        check, spin, give_way, following, over = map(builder.append_basic_block, names)
        before = builder.block
        builder.branch(check)
        builder.position_at_end(check)
        spins = builder.phi(INT)
        spins.add_incoming(integer(0), before)
        finished = builder.load_atomic(place, "acquire", 8, typ=INT)
        builder.cbranch(builder.icmp_signed(">=", finished, items_), over, spin)
        builder.position_at_end(spin)
        if X86:
            _call(builder, "llvm.x86.sse2.pause", ir.VoidType())
        patient = builder.icmp_signed("<", spins, integer(SPINS))
        builder.cbranch(patient, following, give_way)
        builder.position_at_end(give_way)
        _call(builder, "sched_yield", ir.IntType(32))
        builder.branch(following)
        builder.position_at_end(following)
        spins.add_incoming(builder.add(spins, integer(1)), following)
        builder.branch(check)
        builder.position_at_end(over)
        if X86:
            # the first to see it: one that comes late must not say that it was later
            over_at = _place(context, builder, claims, claims_, phase_, OVER)
            stamp = builder.load(over_at, typ=INT)
            first = builder.icmp_signed("==", stamp, integer(0))
            now = _call(builder, "llvm.readcyclecounter", INT)
            builder.store(builder.select(first, now, stamp), over_at)
        return context.get_dummy_value()

    return types.void(claims, phase, items), generate


def _place(context: Any, builder: Any, kind: Any, claims: Any, phase: Any, counter: int) -> Any:
    data = context.make_array(kind)(context, builder, claims).data
    offset = builder.add(builder.mul(phase, integer(CLAIMS)), integer(counter))
    return builder.gep(builder.bitcast(data, INT.as_pointer()), [offset], source_etype=INT)


def _call(builder: Any, name: str, result: Any) -> Any:
    function_type = ir.FunctionType(result, [])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), [])
