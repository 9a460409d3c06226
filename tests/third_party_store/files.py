"""What backend and connector share."""

import os
import pickle
from pathlib import Path
from typing import Any


class Files:
    """One file per object, with the object's shape, dtype and format in front."""

    def __init__(self, config: Any) -> None:
        directory = config.extra_config.get("theirs.directory")
        if directory is None:
            raise ValueError("extra_config has no theirs.directory")
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)

    def path(self, key: Any) -> Path:
        return self.directory / key.to_string()

    def write(self, key: Any, obj: Any) -> None:
        partial = self.path(key).with_suffix(".partial")
        with open(partial, "wb") as file:
            pickle.dump((obj.get_shape(), obj.get_dtype(), obj.get_memory_format()), file)
            file.write(obj.byte_array)
        os.replace(partial, self.path(key))

    def read(self, key: Any, allocator: Any) -> Any | None:
        try:
            with open(self.path(key), "rb") as file:
                obj = allocator.allocate(*pickle.load(file))
                file.readinto(memoryview(obj.byte_array).cast("B"))
                return obj
        except FileNotFoundError:
            return None

    def delete(self, key: Any) -> bool:
        self.path(key).unlink(missing_ok=True)
        return True
