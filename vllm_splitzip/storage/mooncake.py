"""LMCache's Mooncake connector: told where its master is, and made to say when it failed.

What a put or a look-up returned the connector throws away, and of what was passed to it as
`mooncakestore://HOST:PORT` it takes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import socket
from pathlib import Path
from typing import Any
from urllib.parse import ParseResult, urlparse

from ..errors import SettingError, StoreError
from .pool import StagingPool

FILE = "MOONCAKE_CONFIG_PATH"
NEVER_S = 1e9
_LEGACY = {  # names that LMCache hands on, and what Mooncake calls the same today
    "master_server_address": "master_server_addr",
    "device_name": "rdma_devices",
}


def fill_in(extra_config: dict[str, Any], url: str, label: str) -> None:
    """Adds to LMCache's `extra_config` what follows from the URL and from older names.

    Raises
    ------
    SettingError
        No master is named, or the file in MOONCAKE_CONFIG_PATH names it in a way that
        Mooncake does not read.
    """
    path = os.environ.get(FILE)
    if path is not None:  # LMCache then reads nothing else
        _check_file(path)
        return
    for old, new in _LEGACY.items():
        value = extra_config.get(f"mooncake_{old}", extra_config.get(old))
        if value:
            extra_config.setdefault(f"mooncake_{new}", value)
    given = extra_config.get("mooncake_master_server_addr")
    master = urlparse(url if given is None else f"mooncakestore://{given}")
    host, port = _address_of(master)
    if not host or not port:
        raise SettingError(
            f"{label}: no master. Allowed: mooncakestore://HOST:PORT of a mooncake_master, or "
            f"extra_config.mooncake_master_server_addr"
        )
    extra_config.setdefault("mooncake_master_server_addr", master.netloc)
    if not extra_config.get("metadata_server"):
        extra_config.setdefault("mooncake_metadata_server", "P2PHANDSHAKE")
    if not extra_config.get("local_hostname"):
        with contextlib.suppress(OSError):
            own = _own_address(host, port)
            extra_config.setdefault("mooncake_local_hostname", own)


def _address_of(url: ParseResult) -> tuple[str | None, int | None]:
    try:
        return url.hostname, url.port
    except ValueError:  # The port is no number, or none that there is.
        return None, None


def _check_file(path: str) -> None:
    try:
        found = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise SettingError(f"{FILE}={path!r} cannot be read: {error}") from error
    if not isinstance(found, dict) or not {
        "mooncake_master_server_addr",
        "mooncake_ipc_socket_path",
    } & set(found):
        raise SettingError(
            f"{FILE}={path!r} has no mooncake_master_server_addr, without which Mooncake asks "
            f"127.0.0.1:50051. Add it, or unset {FILE} and use extra_config"
        )


def _own_address(host: str, port: int) -> str:
    """This machine's address as seen from `host`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def master_of(extra_config: dict[str, Any]) -> str | None:
    """HOST:PORT, when it is LMCache's extra_config that names it."""
    master = extra_config.get("mooncake_master_server_addr")
    return None if FILE in os.environ or master is None else str(master)


class Mooncake:
    """Calls of a MooncakestoreConnector that raise when they failed."""

    def __init__(self, connector: Any, pool: StagingPool) -> None:
        """
        Raises
        ------
        ConnectionError
            Mooncake did not set itself up, which LMCache has logged at most.
        """
        self.connector = connector
        self._pool = pool
        # LMCache gives up a put after 1 s and goes on reading the object's memory. Deadlines are
        # RemoteTier's, which keeps the memory until the put has ended.
        connector.config.transfer_timeout = NEVER_S
        code = connector.store.is_exist("sz1")
        if code < 0:
            connector.store.close()
            raise ConnectionError(f"Mooncake answers {code}; its own log on stderr says why")

    async def exists(self, key: Any) -> bool:
        """
        Raises
        ------
        ConnectionError
            The master does not answer.
        """
        code = await asyncio.to_thread(self.connector.store.is_exist, key.to_string())
        if code < 0:
            raise ConnectionError(f"the Mooncake master answers {code}")
        return bool(code)

    async def get(self, key: Any) -> Any | None:
        """
        Raises
        ------
        ConnectionError
            The master does not answer, or the owner of the object's memory does not.
        StoreError
            There is no memory for the object.
        """
        if not await self.exists(key):
            return None
        failures = self._pool.failures
        (obj,) = await self.connector.batched_get([key])
        if obj is None and failures != self._pool.failures:
            raise StoreError("no memory for the object")  # LMCache has swallowed it
        if obj is None and await self.exists(key):
            raise LookupError(f"{key.to_string()} is there and cannot be had")
        return obj

    async def put(self, key: Any, obj: Any) -> None:
        """
        Raises
        ------
        OSError
            The object was not taken.
        """
        await self.connector.put(key, obj)
        if not await self.exists(key):
            raise OSError(errno.ENOSPC, "Mooncake did not take the object; its own log says why")

    def remove_sync(self, key: Any) -> bool:
        # A lease of some seconds protects what was read a moment ago.
        return bool(self.connector.store.remove(key.to_string(), True) == 0)

    async def close(self) -> None:
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self.connector._unregister_cpu_buffer()
        self.connector.store.close()
