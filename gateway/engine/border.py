"""The worker's side of the border: commands in, events out. Needs no torch."""

import os

import msgspec
import zmq

from gateway.engine.messages import Command, Events


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

    def receive(self, wait_s: float) -> list[Command]:
        """What has come; if nothing has, the next to come, or none after `wait_s` or a `wake`."""
        ready = dict(self._poller.poll(int(wait_s * 1000)))
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
