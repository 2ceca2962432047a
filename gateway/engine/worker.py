"""The engine's own process: `python -m gateway.engine.worker ENDPOINT`, settings on stdin.

Stdin stays open as the sign that the parent lives: when it ends, so does the worker.
"""

import ctypes
import logging
import os
import signal
import sys
import threading
from contextlib import suppress

import msgspec

from gateway.engine.border import WorkerEnd
from gateway.engine.engine import Engine
from gateway.engine.loop import serve
from gateway.engine.messages import EngineSettings, Events, Ready, StartFailed
from gateway.engine.model.errors import ModelError

log = logging.getLogger("gateway.engine.worker")


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the gateway's to handle, by draining
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineSettings)
    threading.Thread(target=_exit_with_parent, name="parent-watch", daemon=True).start()
    with WorkerEnd(sys.argv[1]) as border:
        try:
            engine = Engine(settings, wake=border.wake)
        except ModelError as error:
            border.send(Events([StartFailed(str(error))]))
            return
        _give_back_freed_memory()
        border.send(Events([Ready(engine.info)]))
        try:
            serve(engine, border.receive, border.send)
        finally:
            engine.close()


def _give_back_freed_memory() -> None:
    """To the system: what loading took beside the weights would stay with the process, several
    hundred MiB of it. Only glibc keeps it, and has a call for that."""
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _exit_with_parent() -> None:
    # Not sys.stdin: its lock, held by this thread, would make the interpreter's shutdown fail.
    while os.read(0, 4096):
        _give_back_freed_memory()
    os._exit(0)


if __name__ == "__main__":
    main()
