"""HTTP connections with deadlines for slow clients, sending or receiving.

uvicorn waits forever for the rest of a request, and for a client that stopped reading.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from bmforge.serve.settings import ServeConfig

__all__ = ["MAX_HEAD_BYTES", "DeadlineProtocol"]

MAX_HEAD_BYTES = 16 << 10
_WHOLE = (h11.DONE, h11.MUST_CLOSE, h11.CLOSED)


class DeadlineProtocol(H11Protocol):
    """HTTP/1.1 protocol that closes the connection of a client that is too slow.

    Args:
        limits: limits of the server.
        more: arguments from uvicorn.
    """

    def __init__(self, limits: ServeConfig, **more: Any) -> None:
        super().__init__(**more)
        self._limits = limits
        self._receiving: asyncio.TimerHandle | None = None
        self._sending: asyncio.TimerHandle | None = None
        self._unsent = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accept a connection, or reject it if there are too many."""
        super().connection_made(transport)  # type: ignore[arg-type]
        # Any data that the kernel does not take immediately counts as unsent.
        self.transport.set_write_buffer_limits(high=0)
        if len(self.connections) > self._limits.max_connections:
            self._turn_away(503, "Service Unavailable")
            return
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the deadlines."""
        self._stop_receiving()
        self._stop_sending()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read data; a request must be complete in time, and pipelining is not supported.

        With a second request in the buffer nothing more would be read, so that a disconnect would
        not be noticed.
        """
        if self._receiving is None and not self._is_answering():
            self._await_request()
        try:
            super().data_received(data)
        except h11.LocalProtocolError:  # invalid data after a response has begun
            self.transport.abort()
            return
        if self.conn.their_state in _WHOLE:
            self._stop_receiving()
            if self.conn.trailing_data[0].strip() and self._is_answering():
                self.transport.abort()

    def pause_writing(self) -> None:
        """Start the deadline for the client to read."""
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        """Stop the deadline; everything was sent."""
        self._stop_sending()
        super().resume_writing()

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_request(self) -> None:
        self._receiving = self.loop.call_later(self._limits.receive_s, self._give_up)

    def _stop_receiving(self) -> None:
        if self._receiving is not None:
            self._receiving.cancel()
            self._receiving = None

    def _give_up(self) -> None:
        self._receiving = None
        self._turn_away(408, "Request Timeout")

    def _turn_away(self, status: int, phrase: str) -> None:
        """Send an error if no response has begun, and close."""
        if self.transport.is_closing():
            return
        if self.cycle is None or not self.cycle.response_started:
            head = f"HTTP/1.1 {status} {phrase}\r\nconnection: close\r\n"
            self.transport.write(f"{head}retry-after: 1\r\ncontent-length: 0\r\n\r\n".encode())
        self.transport.close()

    def _await_reader(self) -> None:
        self._stop_sending()
        self._unsent = self.transport.get_write_buffer_size()
        self._sending = self.loop.call_later(self._limits.send_s, self._look_at_reader)

    def _stop_sending(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None

    def _look_at_reader(self) -> None:
        """Abort a client that has read nothing; a slow one gets more time."""
        if self.transport.get_write_buffer_size() < self._unsent:
            self._await_reader()
        else:
            self.transport.abort()
