"""Which of LMCache's remote backends can hold objects of any size, and why the others cannot."""

from __future__ import annotations

import re

from ..errors import SettingError

# They store each object with its length, and give back exactly that many bytes.
SUPPORTED = (
    "fs",
    "lm",
    "redis",
    "rediss",
    "unix",
    "redis-sentinel",
    "redis-cluster",
    "mooncakestore",
    "infinistore",
    "hf3fs",
    "eic",
    "sagemaker-hyperpod",
    "audit",
    "external",
)

_FIXED = (
    "LMCache's {scheme} backend stores objects of one fixed size and cannot give back a "
    "compressed frame's exact bytes"
)
_USE_REDIS = "use redis:// for the same server"
_USE_MOUNT = "mount the bucket and use fs://HOST:0/MOUNT/POINT"
_NO_DATA = "LMCache's {scheme} backend keeps no data; it is for LMCache's own tests"

REFUSED = {
    "s3": f"{_FIXED}; {_USE_MOUNT}",
    "resp": f"{_FIXED}; {_USE_REDIS}",
    "valkey": f"{_FIXED}; {_USE_REDIS}",
    "azure": f"{_FIXED}; {_USE_MOUNT}",
    "bigtable": f"{_FIXED}; use redis:// or fs://",
    "hfbucket": f"{_FIXED}; use redis:// or fs://",
    "mock": f"{_NO_DATA}; use fs://",
    "blackhole": f"{_NO_DATA}; use fs://",
}

_BUILT_IN_PLUGINS = ("fs", "redis", "mooncakestore", "hf3fs", "bigtable", "hfbucket")


def check_scheme(setting: str, url: str) -> str:
    """The scheme of `url`, when it can hold frames.

    Raises
    ------
    SettingError
        It cannot, or LMCache knows no such scheme.
    """
    scheme, colon, _ = url.partition("://")
    if colon and scheme in SUPPORTED:
        return scheme
    why = REFUSED.get(scheme, "LMCache has no backend for this scheme") if colon else "no scheme"
    raise SettingError(
        f"{setting}={redacted(url)!r}: {why.format(scheme=scheme)}. "
        f"Allowed: {', '.join(f'{name}://' for name in SUPPORTED)}"
    )


def check_plugin(name: str, has_module: bool) -> None:
    """Checks one entry of `remote_storage_plugins`, `TYPE` or `TYPE.INSTANCE`.

    Raises
    ------
    SettingError
        A type that LMCache has built in and that cannot hold frames, or one that
        it has not and for which no module is named.
    """
    kind = name.partition(".")[0]
    if has_module:
        return  # a third party's; whether it keeps exact bytes is for its author to say
    if kind in REFUSED:
        raise SettingError(f"remote_storage_plugins={name!r}: {REFUSED[kind].format(scheme=kind)}")
    if kind not in _BUILT_IN_PLUGINS:
        raise SettingError(
            f"remote_storage_plugins={name!r}: LMCache has no such backend built in, and "
            f"extra_config has no remote_storage_plugin.{name}.module_path and .class_name. "
            f"Built in: fs, redis, mooncakestore, hf3fs"
        )


def redacted(url: str) -> str:
    """`url` without the user name and password it may carry."""
    return re.sub(r"(?<=://)[^/\s]*@", "***@", url)


def explain(error: BaseException) -> str:
    """An error for a message: its kind, and what it says, without passwords."""
    return redacted(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
