"""The border between the gateway and a worker: both ends of a ZeroMQ pair. Needs no torch."""

import asyncio
import os
from collections.abc import Callable

import msgspec
import zmq

from gateway.engine.messages import Command, Event, Events

EVENTS, POLLIN, NOBLOCK, FD = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.NOBLOCK), int(zmq.FD)
"""Plain numbers: the package's own are enums, whose operators cost more than the call."""


class GatewayEnd:
    """The gateway's end, which `deliver`s events as they arrive; used on its event loop only.

    zmq.asyncio, with a future and several polls for each message, cost more than all else that
    the gateway does with a token. ZeroMQ's descriptor tells of changes, not of states: whoever has
    used the socket must see to it that nothing is left in it.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        deliver: Callable[[list[Event]], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._deliver = deliver
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Events)
        self.broken: asyncio.Future[None] = self._loop.create_future()
        """Has an exception once a message came that can't be understood or delivered."""
        self._socket = context.socket(zmq.PAIR)
        self._socket.set_hwm(0)  # a living worker takes everything
        self._socket.bind(endpoint)
        self._descriptor = int(self._socket.get(FD))
        self._loop.add_reader(self._descriptor, self._drain)

    def send(self, command: Command) -> None:
        """Never waits. Raises zmq.ZMQError if there is no worker."""
        self._socket.send(self._encoder.encode(command), NOBLOCK)
        self._loop.call_soon(self._drain)

    def close(self) -> None:
        self._loop.remove_reader(self._descriptor)
        self._socket.close(linger=0)
        self.broken.cancel()

    def _drain(self) -> None:
        if self._socket.closed:
            return
        try:
            # asked first: the exception of a socket that has nothing costs several times as much
            while int(self._socket.get(EVENTS)) & POLLIN:
                message = self._socket.recv(NOBLOCK)
                self._deliver(self._decoder.decode(message).events)
        except Exception as error:
            if not self.broken.done():
                self.broken.set_exception(error)


class WorkerEnd:
    """The worker's end, and a pipe on which other threads wake the loop."""

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

    def __enter__(self) -> "WorkerEnd":
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
