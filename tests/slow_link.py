"""A real TCP link of a chosen rate in front of a server."""

import contextlib
import socket
import threading
import time

PIECE = 1 << 14


class SlowLink:
    """Passes on what it is sent, each direction at `bytes_per_s`; all connections share it."""

    def __init__(self, port: int, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._target = port
        self._free_at = {True: 0.0, False: 0.0}
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                # Little may be under way in the kernel's buffers, or a short put seems faster.
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, PIECE)
                server = socket.create_connection(("127.0.0.1", self._target))
                for ends in ((client, server, True), (server, client, False)):
                    threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, is_upwards: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(PIECE):
                with self._lock:
                    begin = max(time.monotonic(), self._free_at[is_upwards])
                    end = begin + len(data) / self.bytes_per_s
                    self._free_at[is_upwards] = end
                time.sleep(max(0.0, end - time.monotonic()))
                target.sendall(data)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def close(self) -> None:
        self._listener.close()
