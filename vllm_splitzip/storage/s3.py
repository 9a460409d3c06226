"""LMCache's S3 connector, made to say what it keeps to itself.

It remembers sizes for ever, also that of an object that was not there, and answers every error
like an absent object; after three failed connections it never tries again.
"""

from __future__ import annotations

import asyncio
import contextlib
from contextvars import ContextVar
from typing import Any

_errors: ContextVar[list[str] | None] = ContextVar("errors", default=None)


class _Forgetful(dict[str, int]):
    def __setitem__(self, key: str, value: int) -> None:
        pass


class S3:
    """Calls of an S3Connector that raise ConnectionError when the server did not answer, or
    refused. An object that is not there is none."""

    def __init__(self, connector: Any) -> None:
        self.connector = connector
        connector.object_size_cache = _Forgetful()
        connector._update_connection_failures = _note
        connector._get_object_size_async = self._size

    async def exists(self, key: Any) -> bool:
        return await self._size(key.to_string()) > 0

    async def get(self, key: Any) -> Any | None:
        with _raising():
            return await self.connector.get(key)

    async def put(self, key: Any, obj: Any) -> None:
        with _raising():
            # Not `put`, whose queue runs it in another context than this one.
            await self.connector._put(key, obj)

    async def close(self) -> None:
        await self.connector.pq_executor.shutdown_async(wait=False)

    async def _size(self, name: str) -> int:
        """Bytes of the object, 0 when it is not there."""
        from awscrt import http, s3

        connector = self.connector
        headers = http.HttpHeaders([("Host", connector.s3_endpoint)])
        status, length = 0, 0

        def on_headers(status_code: int, headers: Any, **_: Any) -> None:
            nonlocal status, length
            status = status_code
            length = int({k.lower(): v for k, v in headers}.get("content-length", 0))

        request = s3.S3Request(
            client=connector.s3_client,
            type=s3.S3RequestType.DEFAULT,
            operation_name="HeadObject",
            request=http.HttpRequest("HEAD", connector._format_safe_path(name), headers),
            on_headers=on_headers,
            credential_provider=connector.credentials_provider,
            region=connector.s3_region,
        )
        try:
            await asyncio.wrap_future(request.finished_future)
        except Exception as error:
            if status == 404:
                return 0
            raise ConnectionError(f"HEAD: status {status}, {error}") from error
        return length


@contextlib.contextmanager
def _raising() -> Any:
    """
    Raises
    ------
    ConnectionError
        The connector noted an error within the block.
    """
    errors: list[str] = []
    token = _errors.set(errors)
    try:
        yield
    finally:
        _errors.reset(token)
    if errors:
        raise ConnectionError(errors[0])


def _note(message: str) -> bool:
    """In place of the method that counts failures."""
    errors = _errors.get()
    if errors is not None:
        errors.append(message)
    return True  # its kind is known, which keeps LMCache from logging it
