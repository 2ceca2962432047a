"""The engine's own process: `python -m gateway.engine.worker ENDPOINT`, settings on stdin.

Stdin stays open as the sign that the parent lives: when it ends, so does the worker.
"""

import logging
import os
import signal
import sys
import threading

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
        border.send(Events([Ready(engine.info)]))
        try:
            serve(engine, border.receive, border.send)
        finally:
            engine.close()


def _exit_with_parent() -> None:
    # Not sys.stdin: its lock, held by this thread, would make the interpreter's shutdown fail.
    while os.read(0, 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
