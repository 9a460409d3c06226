"""What each of LMCache's backends can do with frames: keep them, keep them in pages, or not."""

from __future__ import annotations

import re
from urllib.parse import urlparse

from ..errors import SettingError

# They store each object with its length, and give back exactly that many bytes.
TRIED = (
    "fs",
    "lm",
    "redis",
    "redis-cluster",
    "unix",
    "mooncakestore",
    "audit",
    "external",
)

# They store objects of one size: frames are laid over pages. See paged.py.
PAGED = ("s3", "resp", "valkey")

# LMCache's code for them keeps lengths too, but nobody has run it with frames: they need hardware,
# or a service, that this project has not. A put is only believed once the object is seen.
UNTRIED = (
    "rediss",
    "infinistore",
    "hf3fs",
    "eic",
    "sagemaker-hyperpod",
)

SUPPORTED = (*TRIED, *PAGED, *UNTRIED)

_NO_DATA = "LMCache's {scheme} backend keeps no data; it is for LMCache's own tests. Use fs://"

REFUSED = {
    "azure": "LMCache's azure backend remembers for ever that an object was absent, so that what "
    "another engine stores later is never found. Mount the container and use fs://, or use s3://",
    "bigtable": "LMCache's bigtable backend answers an error like an absent object, and needs a "
    "Google Cloud instance to be tried with. Use redis:// or s3://",
    "hfbucket": "LMCache's hfbucket backend remembers object sizes for a time, answers an error "
    "like an absent object, and needs an account to be tried with. Use s3:// or fs://",
    "redis-sentinel": "LMCache's redis-sentinel backend never waits for the server's answers, and "
    "takes every look-up for a hit. Use redis:// with the master's address",
    "mock": _NO_DATA,
    "blackhole": _NO_DATA,
}

# Settings that make LMCache's engine add a backend of its own, and why none of them fits.
_ONE_SIZE = "its {kind} backend stores objects of one fixed size on {where}"
REFUSED_SETTINGS = {
    "enable_pd": "its PD backend pushes raw KV cache between GPUs. Start prefill and decode with a "
    "store that they share",
    "enable_p2p": "its P2P backend serves raw chunks that LMCache's own engine holds. Use a store "
    "that the engines share, such as redis://",
    "gds_path": _ONE_SIZE.format(kind="GDS (and WekaFS)", where="GPU memory")
    + ". Use local_disk, or fs:// on the same file system",
    "maru_path": _ONE_SIZE.format(kind="Maru", where="CXL memory") + ". Use local_disk",
    "remote_config_url": "it would fetch other settings at run time. Write them in the file",
    "retrieve_locations": "it names backends of LMCache's engine. Configure only those to be used",
    "store_location": "it names a backend of LMCache's engine. Configure only those to be used",
}
REFUSED_EXTRA = {
    "enable_nixl_storage": "LMCache's nixl backend stores objects of one fixed size in buffers "
    "that NIXL has registered. Use fs://, s3:// or mooncakestore://",
    "audit_backend_enabled": "it wraps the backends of LMCache's engine. Use remote_url audit://",
}

# How to write the URLs that LMCache takes apart wrongly, or refuses with no word of what it wants.
_FORMS = {
    "fs": "fs:///PATH[,/PATH...] or fs://HOST:PORT/PATH[,/PATH...], with absolute paths",
    "lm": "lm://HOST:PORT",
    "resp": "resp://HOST:PORT",
    "valkey": "valkey://HOST:PORT",
    "s3": "s3://BUCKET-HOST",
    "unix": "unix:///PATH of the server's socket",
}

PLUGIN = "plugin"  # the scheme of somebody else's remote connector ...
STORAGE_PLUGIN = "storage-plugin"  # ... and of somebody else's storage backend

_BUILT_IN_PLUGINS = ("fs", "redis", "mooncakestore", "hf3fs")


def check_scheme(setting: str, url: str) -> str:
    """The scheme of `url`, when it can hold frames.

    Raises
    ------
    SettingError
        It cannot, LMCache knows no such scheme, or a part of the address is missing.
    """
    scheme, colon, _ = url.partition("://")
    if colon and scheme in SUPPORTED:
        if scheme in _FORMS and not _is_whole(scheme, url):
            raise SettingError(
                f"{setting}={redacted(url)!r}: not a whole address. Allowed: {_FORMS[scheme]}"
            )
        return scheme
    why = REFUSED.get(scheme, "LMCache has no backend for this scheme") if colon else "no scheme"
    raise SettingError(
        f"{setting}={redacted(url)!r}: {why.format(scheme=scheme)}. "
        f"Allowed: {', '.join(f'{name}://' for name in SUPPORTED)}"
    )


def _is_whole(scheme: str, url: str) -> bool:
    try:
        parsed = urlparse(url)
        has_port = bool(parsed.hostname) and parsed.port is not None
    except ValueError:
        return False
    return {"s3": bool(parsed.netloc), "unix": len(parsed.path) > 1}.get(scheme, has_port)


def check_plugin(setting: str, name: str, has_module: bool) -> str:
    """The scheme of one entry of `remote_storage_plugins`, `TYPE` or `TYPE.INSTANCE`.

    Raises
    ------
    SettingError
        A type that LMCache has built in and that cannot hold frames, or one that
        it has not and for which no module is named.
    """
    kind = name.partition(".")[0]
    if has_module:
        return PLUGIN  # whether it keeps exact bytes is for its author to say
    if kind in REFUSED:
        raise SettingError(f"{setting}={name!r}: {REFUSED[kind].format(scheme=kind)}")
    if kind not in _BUILT_IN_PLUGINS:
        raise SettingError(
            f"{setting}={name!r}: LMCache has no such backend built in, and "
            f"extra_config has no remote_storage_plugin.{name}.module_path and .class_name. "
            f"Built in: {', '.join(_BUILT_IN_PLUGINS)}"
        )
    return kind


def redacted(url: str) -> str:
    """`url` without the user name and password it may carry."""
    return re.sub(r"(?<=://)[^/\s]*@", "***@", url)


def explain(error: BaseException) -> str:
    """An error for a message: its kind, and what it says, without passwords."""
    kind, text = type(error).__name__, str(error)
    if isinstance(error, AssertionError) and text:  # how LMCache checks some settings
        return redacted(text)
    return redacted(f"{kind}: {text}" if text else kind)
