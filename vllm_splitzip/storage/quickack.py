"""A socket that acknowledges at once what it receives.

LMCache's server writes the header of an answer and its body apart. With Nagle's algorithm the end
of the body waits for the acknowledgement of what went before, and the client's kernel delays that
by 40 ms.
"""

from __future__ import annotations

import contextlib
import socket
from typing import Any


class QuickAckSocket(socket.socket):
    """Takes over the connection of another socket, which is left closed."""

    def __init__(self, connected: socket.socket) -> None:
        super().__init__(fileno=connected.detach())
        self.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def recv(self, *args: Any) -> bytes:
        self._acknowledge_at_once()
        return super().recv(*args)

    def recv_into(self, *args: Any) -> int:
        self._acknowledge_at_once()
        return super().recv_into(*args)

    def _acknowledge_at_once(self) -> None:
        # The kernel goes back to delaying by itself. Only Linux has the option.
        if hasattr(socket, "TCP_QUICKACK"):
            with contextlib.suppress(OSError):
                self.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
