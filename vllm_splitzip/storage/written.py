"""LMCache's settings as somebody wrote them, checked before LMCache reads them.

LMCache drops a setting that it does not know and replaces a value that it cannot convert, and says
so in a log that is kept quiet here.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import yaml
from lmcache.v1.config import _CONFIG_ALIASES, _DEPRECATED_CONFIGS, LMCacheEngineConfig
from lmcache.v1.config_base import _parse_quoted_string

from ..errors import SettingError
from .schemes import redacted

logger = logging.getLogger(__name__)

DEFINITIONS: dict[str, dict[str, Any]] = LMCacheEngineConfig._config_definitions

# Names that LMCache still takes, and what it calls them now: None is one that it ignores.
_OLD_NAMES = {name: _CONFIG_ALIASES.get(name) for name in _DEPRECATED_CONFIGS}

_PREFIX = "LMCACHE_"
# Variables that are no settings of its engine, and that LMCache 0.5.6 or one before it reads.
_OTHER_VARIABLES = {
    f"{_PREFIX}{name}"
    for name in (
        "CONFIG_FILE",
        "DEVICE_BACKEND",
        "DISABLE_BANNER",
        "FORCE_SKIP_SAVE",
        "GPU_STAGING_BUFFER_BYTES",
        "LOG_LEVEL",
        "MP_TRANSFER_MODE",
        "MQ_TIMEOUT",
        "OFFLOAD_RPC_PORT",
        "ROCM_ENABLE_BATCH_MEMCPY",
        "SERVER_URL",
        "TRACK_USAGE",
        "USE_EXPERIMENTAL",
        "USE_UPSTREAM_MP",
    )
}
_OTHER_PREFIXES = tuple(
    f"{_PREFIX}{name}_"
    for name in (
        "AEROSPIKE",
        "CONTROLLER",
        "COORDINATOR",
        "EC",
        "MUSA",
        "PLUGIN",
        "REQUEST_TELEMETRY",
        "RESP",
        "RUNTIME_PLUGIN",
        "USAGE_TRACK",
    )
)

_ALLOWED = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    list[int]: "a list of whole numbers",
    list[float]: "a list of numbers",
    list[str]: "a list of text",
    dict: "a mapping, or one as JSON",
}

_warned: set[str] = set()


@dataclass(frozen=True, slots=True)
class Written:
    """A setting: what it is called where it was written, and its value there."""

    label: str
    value: Any

    def __str__(self) -> str:
        text = redacted(repr(self.value))
        return f"{self.label}={text if len(text) <= 80 else text[:80] + '…'}"


def read_settings(extra: Mapping[str, Any]) -> dict[str, Written]:
    """LMCache's settings by their names, from LMCACHE_CONFIG_FILE, then LMCACHE_*, then the
    `lmcache.*` keys of `extra`; the last wins.

    Raises
    ------
    SettingError
        The file cannot be read, LMCache has no such setting, or it would not take the
        value for what it says.
    """
    found = {}
    for key, written in (*_of_file(), *_of_variables(), *_of_keys(extra)):
        name = _OLD_NAMES.get(key, key)
        if name is not None:
            _check(name, written)
            found[name] = written
    return found


def _of_file() -> Iterator[tuple[str, Written]]:
    path = os.environ.get(f"{_PREFIX}CONFIG_FILE")
    if not path:
        return
    try:
        with open(path, "rb") as file:
            settings = yaml.safe_load(file)
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:
        why = " ".join(str(error).split())
        raise SettingError(
            f"LMCACHE_CONFIG_FILE={path!r} cannot be read: {why}. Expected: YAML in UTF-8"
        ) from error
    if settings is None:
        return
    if not isinstance(settings, dict):
        raise SettingError(
            f"LMCACHE_CONFIG_FILE={path!r} holds {Written('YAML', settings)}. Expected: LMCache's "
            f"settings, each as 'name: value'"
        )
    for key, value in settings.items():
        written = Written(f"{path}: {key}", value)
        if str(key).lower() == "ec" or str(key).lower().startswith("ec_"):
            continue  # of LMCache's encoder cache
        if key not in DEFINITIONS and key not in _OLD_NAMES:
            raise _unknown(written, str(key), "")
        yield key, written


def _of_variables() -> Iterator[tuple[str, Written]]:
    for variable in sorted(os.environ):
        if not variable.startswith(_PREFIX):
            continue
        name = variable.removeprefix(_PREFIX).lower()
        if variable.isupper() and (name in DEFINITIONS or name in _OLD_NAMES):
            yield name, Written(variable, _parse_quoted_string(os.environ[variable]))
            continue
        known = variable in _OTHER_VARIABLES or variable.startswith(_OTHER_PREFIXES)
        if not known and variable not in _warned:
            # Not refused: it may be of a tool around LMCache.
            _warned.add(variable)
            names = [f"{_PREFIX}{name.upper()}" for name in DEFINITIONS]
            hint = _hint(variable.upper(), [*names, *_OTHER_VARIABLES])
            logger.warning("%s is not used: LMCache has no such setting.%s", variable, hint)


def _of_keys(extra: Mapping[str, Any]) -> Iterator[tuple[str, Written]]:
    prefix = "lmcache."
    for key, value in extra.items():
        if isinstance(key, str) and key.startswith(prefix):
            name, written = key.removeprefix(prefix), Written(key, value)
            if name not in DEFINITIONS:
                raise _unknown(written, name, prefix)
            yield name, written


def _unknown(written: Written, key: str, prefix: str) -> SettingError:
    bare = key.lower().removeprefix("lmcache").lstrip("._")
    current = _CONFIG_ALIASES.get(bare)
    hint = f" Did you mean {prefix}{current}?" if current else _hint(bare, DEFINITIONS, prefix)
    return SettingError(f"{written}: LMCache has no such setting.{hint}")


def _hint(name: str, names: Iterable[str], prefix: str = "") -> str:
    near = difflib.get_close_matches(name, list(names), n=1)
    return f" Did you mean {prefix}{near[0]}?" if near else ""


def _check(name: str, written: Written) -> None:
    """
    Raises
    ------
    SettingError
        LMCache would not take the value for what it says.
    """
    value, definition = written.value, DEFINITIONS[name]
    kind = definition["type"]
    if get_origin(kind) in (Union, UnionType):  # Optional
        kind = next(one for one in get_args(kind) if one is not NoneType)
    if value is None and definition["default"] is None:
        return
    allowed = _ALLOWED.get(kind, str(kind))
    if name == "local_disk":  # LMCache would make text, and a directory, of anything
        allowed = "the path of a directory, or several with commas between them"
        fits = isinstance(value, str)
    else:
        fits = _fits(kind, value)
    why = ""
    if fits:
        try:
            fits = isinstance(definition["env_converter"](value), dict | None) or kind is not dict
        except (ValueError, TypeError, ArithmeticError) as error:
            fits, why = False, f" ({error})"
    if not fits:
        if kind is dict:  # which may hold passwords
            written = Written(written.label, value if len(repr(value)) <= 24 else "…")
        raise SettingError(f"{written}{why}. Allowed: {allowed}")


def _fits(kind: Any, value: Any) -> bool:
    """False for what LMCache converts to something else than it says. Text of numbers and JSON is
    for its converters to refuse."""
    if kind is bool:
        return str(value).strip().lower() in ("true", "false", "1", "0")
    if isinstance(value, bool):
        return False
    if isinstance(value, str):
        return True
    if kind is int:
        return isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if kind in (float, str):
        return isinstance(value, int | float)
    if kind is dict:
        return isinstance(value, dict)
    (element,) = get_args(kind) or (None,)
    if isinstance(value, list):
        return all(
            isinstance(one, str) or (element is not str and _fits(element, one)) for one in value
        )
    return element is not str and isinstance(value, int | float) and _fits(element, value)
