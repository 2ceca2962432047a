"""The engine's own process: `python -m gateway.engine.worker ENDPOINT`, settings on stdin.

Stdin stays open as the sign that the parent lives: when it ends, so does the worker.
"""

import logging
import os
import signal
import sys
import threading

import msgspec
import zmq

from gateway.engine.engine import Engine
from gateway.engine.loop import IDLE_S, serve
from gateway.engine.messages import Command, EngineSettings, Events, Ready, StartFailed
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
    with Border(sys.argv[1]) as border:
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


class Border:
    """The worker's end of the socket, and a pipe on which other threads wake the loop."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)  # what is in flight is bounded by the engine's own queue
        self._socket.connect(endpoint)
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_read, zmq.POLLIN)
        self._decoder = msgspec.msgpack.Decoder(Command)
        self._encoder = msgspec.msgpack.Encoder()

    def __enter__(self) -> "Border":
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close(linger=1000)
        self._context.term()

    def wake(self) -> None:
        try:
            os.write(self._wake_write, b"!")
        except BlockingIOError:
            return  # the pipe is full of calls that are not yet answered

    def receive(self, wait: bool) -> list[Command]:
        ready = dict(self._poller.poll(int(IDLE_S * 1000) if wait else 0))
        if self._wake_read in ready:
            os.read(self._wake_read, 4096)
        commands: list[Command] = []
        if self._socket in ready:
            try:
                while True:
                    commands.append(self._decoder.decode(self._socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                pass
        return commands

    def send(self, events: Events) -> None:
        self._socket.send(self._encoder.encode(events))


def _exit_with_parent() -> None:
    # Not sys.stdin: its lock, held by this thread, would make the interpreter's shutdown fail.
    while os.read(0, 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
