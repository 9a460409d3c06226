"""For `remote_storage_plugins`: LMCache takes a connector, or an adapter that makes one."""

from typing import Any

from lmcache.v1.storage_backend.connector import ConnectorAdapter, ConnectorContext
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

from .files import Files


class Connector(RemoteConnector):
    def __init__(self, loop: Any, local_cpu_backend: Any, config: Any) -> None:
        super().__init__(config, local_cpu_backend.metadata)
        self.files = Files(config)
        self.allocator = local_cpu_backend

    async def exists(self, key: Any) -> bool:
        return self.exists_sync(key)

    def exists_sync(self, key: Any) -> bool:
        return self.files.path(key).exists()

    async def get(self, key: Any) -> Any | None:
        return self.files.read(key, self.allocator)

    async def put(self, key: Any, memory_obj: Any) -> None:
        self.files.write(key, memory_obj)

    def remove_sync(self, key: Any) -> bool:
        return self.files.delete(key)

    async def list(self) -> list[str]:
        return [path.name for path in self.files.directory.iterdir()]

    async def close(self) -> None:
        pass


class Adapter(ConnectorAdapter):
    def __init__(self) -> None:
        super().__init__("plugin://theirs")

    def create_connector(self, context: ConnectorContext) -> RemoteConnector:
        return Connector(context.loop, context.local_cpu_backend, context.config)
