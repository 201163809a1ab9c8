"""Memory budget for the bodies of requests that are being received and parsed."""

from __future__ import annotations

import asyncio

__all__ = ["BodyBudget"]


class BodyBudget:
    """Memory budget for the bodies of requests that are received at the same time.

    A request reserves the size of its body before the body is read. If the budget is used up, the
    request waits; TCP flow control then leaves the data with the client.

    Args:
        total_bytes: maximum size in bytes of all bodies together.

    Attributes:
        reserved_bytes: size in bytes of the bodies that are being received or parsed.
    """

    def __init__(self, total_bytes: int) -> None:
        self._total, self.reserved_bytes = total_bytes, 0
        self._by_client: dict[str, int] = {}
        self._released = asyncio.Event()

    async def reserve(self, client: str, size: int) -> None:
        """Wait until the budget has space for a body, and reserve the body's size.

        A client can reserve at most half of the budget, so that it cannot block all others. A body
        is always admitted if nothing else is reserved.

        Args:
            client: name of the client, see `client_of`.
            size: size of the body in bytes.
        """
        while not self._has_room(client, size):
            # There is no `await` between the check and `clear`, so no release can be missed.
            self._released.clear()
            await self._released.wait()
        self.reserved_bytes += size
        self._by_client[client] = self._by_client.get(client, 0) + size

    def release(self, client: str, size: int) -> None:
        """Release the reserved size of a body."""
        self.reserved_bytes -= size
        self._by_client[client] -= size
        if not self._by_client[client]:
            del self._by_client[client]
        self._released.set()

    def _has_room(self, client: str, size: int) -> bool:
        own = self._by_client.get(client, 0)
        # A first body is exempt from the share, as it may be larger than half of the budget.
        fits_client = own == 0 or own + size <= self._total // 2
        return self.reserved_bytes == 0 or (
            fits_client and self.reserved_bytes + size <= self._total
        )
