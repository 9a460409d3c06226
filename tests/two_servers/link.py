"""A real TCP link in front of a server, that can be made slow while it is in use."""

import contextlib
import socket
import threading
import time

PIECE = 1 << 12


class Link:
    """Passes on what it is sent, every piece of it `delay_s` seconds late."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._delay_s = 0.0
        self._changed = threading.Condition()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def delay_s(self) -> float:
        """Seconds. May be set at any time, and counts for what is held back already too."""
        return self._delay_s

    @delay_s.setter
    def delay_s(self, seconds: float) -> None:
        with self._changed:
            self._delay_s = seconds
            self._changed.notify_all()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(("127.0.0.1", self._target))
                except OSError:
                    client.close()
                    continue
                for ends in ((client, server), (server, client)):
                    threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(PIECE):
                self._hold_back(time.monotonic())
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _hold_back(self, arrived: float) -> None:
        with self._changed:
            while (rest_s := arrived + self._delay_s - time.monotonic()) > 0:
                self._changed.wait(rest_s)
