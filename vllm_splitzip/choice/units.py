"""Rates as people write them: a number, a prefix, bytes or bits, per second."""

import math
import re

from ..errors import SettingError

_PREFIXES = {
    "": 1.0,
    "k": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "Ki": 2.0**10,
    "Mi": 2.0**20,
    "Gi": 2.0**30,
    "Ti": 2.0**40,
}
MOST = 1e15
"""Bytes per second that nothing does."""

_RATE = re.compile(r"(\d+(?:\.\d+)?|\.\d+) ?([kMGT]i?|Ki)?(B|bit)/s", re.ASCII)


def parse_rate(text: str) -> float:
    """Bytes per second of "50GB/s", "20 Mbit/s" and the like.

    Raises
    ------
    SettingError
        When it is anything else; "Gb/s" and "gbps" too, which may mean bits or bytes.
    """
    match = _RATE.fullmatch(text.strip())
    prefix = (match[2] or "") if match else "?"
    rate = 0.0
    if match and prefix in _PREFIXES:
        rate = float(match[1]) * _PREFIXES[prefix] / (8 if match[3] == "bit" else 1)
    if not 0 < rate <= MOST:
        raise SettingError(
            f"a rate is {text!r}; allowed: a number above 0 and at most {rate_text(MOST)}, and a "
            "unit, bytes or bits per second with a prefix of k, M, G, T, Ki, Mi, Gi or Ti, such as "
            "50GB/s or 20Mbit/s"
        )
    return rate


def rate_text(bytes_per_s: float) -> str:
    """A rate in the prefix that leaves one to three digits before the point."""
    if bytes_per_s == math.inf:
        return "any"
    prefix = next((each for each in "TGMk" if bytes_per_s >= _PREFIXES[each]), "")
    digits = bytes_per_s / _PREFIXES[prefix]
    return f"{digits:.3g} {prefix}B/s" if digits < 99.95 else f"{digits:.0f} {prefix}B/s"
