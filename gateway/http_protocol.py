"""uvicorn's HTTP protocol with an end to the head of a request. By itself it would keep headers for
as long as they come, from anybody, before any key is looked at."""

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.errors import ApiError

HEAD_BYTES_MAX = 64 * 1024
"""Of a request's line and headers, beyond the part of them that came first."""


class HeadTooLarge(ApiError):
    status, type, code = 431, "invalid_request_error", "request_header_fields_too_large"

    def __init__(self) -> None:
        super().__init__(f"The request's headers are larger than {HEAD_BYTES_MAX} bytes.")


class HttpProtocol(HttpToolsProtocol):
    _in_head = False
    _head_bytes = 0

    def data_received(self, data: bytes) -> None:
        was_in_head = self._in_head
        super().data_received(data)
        if was_in_head and self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES_MAX:
                self._refuse(HeadTooLarge())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def _refuse(self, error: ApiError) -> None:
        body = msgspec.json.encode(error.body())
        head = (
            f"HTTP/1.1 {error.status} Request Header Fields Too Large\r\n"
            "content-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self._in_head = False
        self.headers.clear()
        self.transport.write(head.encode() + body)
        self.transport.close()
