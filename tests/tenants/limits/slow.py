"""A TCP proxy that holds back what passes it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class Proxy:
    def __init__(self, port: int) -> None:
        self.delay_s = 0.0
        self.silent = False
        """Take everything, pass nothing on."""
        self.open = 0
        self.open_max = 0
        self.port = 0
        self._target = port

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        self.open_max = max(self.open, self.open_max)
        back_reader, back_writer = await asyncio.open_connection("127.0.0.1", self._target)
        try:
            await asyncio.wait(
                [
                    asyncio.ensure_future(self._pass(reader, back_writer)),
                    asyncio.ensure_future(self._pass(back_reader, writer)),
                ],
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            self.open -= 1
            writer.close()
            back_writer.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(2**16):
                if self.silent:
                    continue
                await asyncio.sleep(self.delay_s / 2)
                writer.write(data)


@asynccontextmanager
async def proxy(port: int) -> AsyncIterator[Proxy]:
    """In front of a port of this machine; at its own, `port`."""
    one = Proxy(port)
    server = await asyncio.start_server(one.serve, "127.0.0.1", 0)
    one.port = server.sockets[0].getsockname()[1]
    try:
        yield one
    finally:
        server.close()
