"""HTTP connections with deadlines for clients that send or receive too slowly.

Without deadlines uvicorn waits forever for an incomplete request, and for a client that stopped
reading.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from bmforge.serve.errors import RequestError, error_body
from bmforge.serve.settings import MAX_HEAD_BYTES, ServeConfig

__all__ = ["DeadlineProtocol"]

_WHOLE = (h11.DONE, h11.MUST_CLOSE, h11.CLOSED)
_MAX_PIPELINED_BYTES = 1 << 20
_PROBE_S = 0.5
_PHRASES = {
    400: "Bad Request",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}


class DeadlineProtocol(H11Protocol):
    """HTTP/1.1 protocol that closes connections of clients that are too slow.

    Args:
        limits: limits of the server.
        more: further arguments, passed by uvicorn.
    """

    def __init__(self, limits: ServeConfig, **more: Any) -> None:
        super().__init__(**more)
        self._timeouts, self._most_connections = limits.timeouts, limits.load.max_connections
        self._receiving: asyncio.TimerHandle | None = None
        self._sending: asyncio.TimerHandle | None = None
        self._probing: asyncio.TimerHandle | None = None
        self._unsent = 0
        self._pipelined = bytearray()
        self._is_half_closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept a connection, or reject it if there are too many."""
        super().connection_made(transport)  # type: ignore[arg-type]
        # Data that the kernel does not accept immediately counts as unsent. With 0, a TLS transport
        # would also count an empty buffer as unsent.
        self.transport.set_write_buffer_limits(high=1)
        if len(self.connections) > self._most_connections:
            self._reject(503, "the server has too many open connections. Retry later.")
            return
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the deadlines."""
        self._stop_receiving()
        self._stop_sending()
        self._stop_probing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Process received data; a request must be complete before its deadline.

        Pipelined requests wait in a bounded buffer while an earlier request is being answered.
        """
        if self._has_whole_request():
            self._pipelined += data
            if len(self._pipelined) > _MAX_PIPELINED_BYTES:
                self.transport.abort()
            return
        if self._receiving is None:
            self._await_request()
        try:
            super().data_received(data)
        except h11.LocalProtocolError:  # invalid data after a response has begun
            self.transport.abort()
            return
        if self.conn.their_state in _WHOLE:
            self._stop_receiving()

    def handle_events(self) -> None:
        """Handle parsed events, and keep reading so that a disconnect is noticed."""
        super().handle_events()
        if self.conn.their_state is h11.DONE and self._is_answering():
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        """Continue with the next pipelined request, or close the connection if there is none.

        h11 may hold the beginning of the next request, received in one packet with the end of the
        last one. The application then already handles that request, and the rest of the request's
        body is in the buffer.
        """
        self._stop_probing()
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if not self._has_whole_request():
            if self._pipelined:
                data, self._pipelined = bytes(self._pipelined), bytearray()
                self.data_received(data)
            elif self._is_answering() and self._receiving is None:
                self._await_request()
        if self._is_half_closed and not self._is_answering():
            self.transport.close()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection if the client has finished sending but still reads (half-closed).

        A connection that the client has closed cannot be distinguished from a half-closed one until
        something is sent. The server therefore sends interim responses until the answer begins; if
        the connection is closed, the client's operating system rejects them.

        Returns:
            True if the connection stays open.
        """
        self._is_half_closed = True
        if self._has_whole_request() and self.cycle.scope["http_version"] == "1.1":
            self._probe()
            return True
        is_cut = self.conn.their_state is h11.SEND_BODY or bool(self.conn.trailing_data[0])
        if is_cut and not self._has_whole_request():
            self._reject(
                400,
                (
                    "the request is incomplete, because the client stopped sending. Send the whole "
                    "request again."
                ),
            )
        return False

    def _probe(self) -> None:
        """Send ``100 Continue``, which clients ignore, repeatedly until the answer begins."""
        self._probing = None
        if not self._is_answering() or self.transport.is_closing():
            return
        if not self.cycle.response_started:
            interim = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
            self.transport.write(self.conn.send(interim) or b"")
        self._probing = self.loop.call_later(_PROBE_S, self._probe)

    def _stop_probing(self) -> None:
        if self._probing is not None:
            self._probing.cancel()
            self._probing = None

    def send_400_response(self, msg: str) -> None:
        """Respond to data that is not valid HTTP, in OpenAI's error format."""
        problem = sys.exception()
        status = getattr(problem, "error_status_hint", 400)
        reason = (
            f"the request line and headers have more than {MAX_HEAD_BYTES} bytes. Send fewer or "
            "shorter headers."
            if status == 431
            else f"the request is not valid HTTP/1.1 ({problem})."
        )
        self._reject(status if status in _PHRASES else 400, reason)

    def pause_writing(self) -> None:
        """Start the deadline by which the client must read the buffered data."""
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        """Stop the deadline, since all data was sent."""
        self._stop_sending()
        super().resume_writing()

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _has_whole_request(self) -> bool:
        return self._is_answering() and self.conn.their_state in _WHOLE

    def _await_request(self) -> None:
        self._receiving = self.loop.call_later(self._timeouts.receive_s, self._give_up)

    def _stop_receiving(self) -> None:
        if self._receiving is not None:
            self._receiving.cancel()
            self._receiving = None

    def _give_up(self) -> None:
        self._receiving = None
        self._reject(
            408,
            (
                f"the request did not arrive completely within {self._timeouts.receive_s:g} s. "
                "Send the whole request again."
            ),
        )

    def _reject(self, status: int, message: str) -> None:
        """Send an error in OpenAI's format, if no response has begun, and close the connection."""
        if self.transport.is_closing():
            return
        if not self._is_answering() or not self.cycle.response_started:
            body = json.dumps(error_body(RequestError(message, status=status))).encode()
            head = (
                f"HTTP/1.1 {status} {_PHRASES[status]}\r\nconnection: close\r\nretry-after: 1\r\n"
                f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()

    def _await_reader(self) -> None:
        self._stop_sending()
        self._unsent = self.transport.get_write_buffer_size()
        self._sending = self.loop.call_later(self._timeouts.send_s, self._check_reader)

    def _stop_sending(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None

    def _check_reader(self) -> None:
        """Disconnect the client if it has read nothing since the last check."""
        if self.transport.get_write_buffer_size() < self._unsent:
            self._await_reader()
        else:
            # `close` would wait until the buffered data is sent, which this client never reads.
            self.transport.abort()
