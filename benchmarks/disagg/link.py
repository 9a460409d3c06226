"""Two network namespaces, and between them a link of a chosen rate whose traffic is counted.

    this machine ── control ── [ prefill ] ── link, shaped ── [ decode ] ── control ── this machine

The link is a veth pair with `tc tbf` on both ends. The control pairs are not shaped: through them
a proxy and clients outside reach the servers, and nothing of that crosses the link. Packets are
not forwarded, so the two sides have no other way to each other.

Needs root and the commands `ip` and `tc` (Debian: iproute2).
"""

import bisect
import contextlib
import fcntl
import os
import shutil
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from benchmarks.once import REPO_ROOT

BURST = "256kb"
LATENCY = "50ms"
"""Of the token bucket: what passes at once, and how long a packet may wait in its queue."""

SAMPLE_S = 0.002
EDGE = 0.005
"""Share of the bytes at either end that link seconds leave out: requests and acknowledgements."""


class LinkError(RuntimeError):
    """The link cannot be made here; the message says why and what to do."""


@dataclass(frozen=True)
class Side:
    """One end: a network namespace.

    Attributes
    ----------
    namespace
        Its name, as `ip netns` knows it.
    device
        Its end of the shaped link.
    address
        Its address on the link.
    control
        Its address for this machine.
    """

    namespace: str
    device: str
    address: str
    control: str

    @property
    def prefix(self) -> tuple[str, ...]:
        """A command that runs another one there."""
        return ("ip", "netns", "exec", self.namespace)


PREFILL = Side("splitzip-prefill", "sz-prefill", "10.203.0.1", "10.203.1.2")
DECODE = Side("splitzip-decode", "sz-decode", "10.203.0.2", "10.203.2.2")
_SIDES = (PREFILL, DECODE)


class Link:
    """Makes both namespaces; they are taken down at the end of the `with` block.

    Raises
    ------
    LinkError
        No root, no `ip` or `tc`, a kernel without them, or another run has the link.
    """

    def __init__(self) -> None:
        _check_rights()
        self._lock = (REPO_ROOT / "build" / "disagg.lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise LinkError("another run of this benchmark has the link") from error
        _take_down()  # What a killed run has left.
        self._holder: subprocess.Popen[bytes] | None = None
        try:
            self._put_up()
        except BaseException:
            self.close()
            raise
        self.rate: str | None = None

    def _put_up(self) -> None:
        for side in _SIDES:
            _run("ip", "netns", "add", side.namespace)
            _run("ip", "-n", side.namespace, "link", "set", "lo", "up")
        _run(
            *("ip", "-n", PREFILL.namespace, "link", "add", PREFILL.device, "type", "veth"),
            *("peer", "name", DECODE.device, "netns", DECODE.namespace),
        )
        for side in _SIDES:
            _give_address(side.namespace, side.device, side.address)
            outside = f"{side.device}-c"
            inside = "control"
            _run(
                *("ip", "link", "add", outside, "type", "veth"),
                *("peer", "name", inside, "netns", side.namespace),
            )
            _run("ip", "addr", "add", f"{side.control[:-1]}1/24", "dev", outside)
            _run("ip", "link", "set", outside, "up")
            _give_address(side.namespace, inside, side.control)
        # A process of the namespace: its /proc shows the counters that this one's does not.
        self._holder = subprocess.Popen([*DECODE.prefix, "sleep", "infinity"])
        self._counters = Path(f"/proc/{self._holder.pid}/net/dev")

    def shape(self, rate: str | None) -> None:
        """Set the rate of both directions, as `tc` writes it (20mbit); None: as fast as it goes."""
        for side in _SIDES:
            with contextlib.suppress(LinkError):  # There is none to delete the first time.
                _run("tc", "-n", side.namespace, "qdisc", "del", "dev", side.device, "root")
            if rate is not None:
                _run(
                    *("tc", "-n", side.namespace, "qdisc", "add", "dev", side.device, "root"),
                    *("tbf", "rate", rate, "burst", BURST, "latency", LATENCY),
                )
        self.rate = rate

    def read(self) -> tuple[int, int]:
        """Bytes that the decode side has received and sent over the link so far."""
        for line in self._counters.read_text().splitlines():
            device, _, counts = line.partition(":")
            if device.strip() == DECODE.device:
                fields = counts.split()
                return int(fields[0]), int(fields[8])
        raise LinkError(f"{self._counters} has no line for {DECODE.device}")

    def watch(self) -> "Traffic":
        """Counts what crosses from now on until the `with` block ends."""
        return Traffic(self)

    def close(self) -> None:
        """Take the namespaces down. A second call does nothing."""
        holder, self._holder = self._holder, None
        if holder is not None:
            holder.kill()
            holder.wait()
        _take_down()
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Traffic:
    """What crossed the link towards the decode side, sampled from its interface counters.

    Attributes
    ----------
    times, received, sent
        Monotonic time in seconds, and bytes since the beginning, of each sample.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self.times: list[float] = []
        self.received: list[int] = []
        self.sent: list[int] = []
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="traffic", daemon=True)

    @property
    def total_bytes(self) -> int:
        """Bytes of both directions, packet headers included."""
        return self.received[-1] + self.sent[-1]

    @property
    def seconds(self) -> float:
        """From the first to the last byte towards the decode side, without the `EDGE`s, for
        all of the bytes. Gaps in between count: the link was waited for."""
        total = self.received[-1]
        if not total:
            return 0.0
        first = bisect.bisect_right(self.received, total * EDGE)
        last = bisect.bisect_left(self.received, total * (1 - EDGE))
        if last <= first:
            return 0.0
        share = (self.received[last] - self.received[first - 1]) / total
        return (self.times[last] - self.times[first - 1]) / share

    def __enter__(self) -> Self:
        self._origin = self._link.read()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()

    def _sample(self) -> None:
        while True:
            ending = self._ending.wait(SAMPLE_S)
            received, sent = self._link.read()
            self.times.append(time.monotonic())
            self.received.append(received - self._origin[0])
            self.sent.append(sent - self._origin[1])
            if ending:
                return


def bits_per_second(rate: str) -> float:
    """A rate as `tc` writes it, in bits per second."""
    for suffix, factor in (("gbit", 1e9), ("mbit", 1e6), ("kbit", 1e3)):
        if rate.endswith(suffix):
            return float(rate.removesuffix(suffix)) * factor
    raise ValueError(f"{rate!r} is no rate; expected a number with kbit, mbit or gbit")


def _check_rights() -> None:
    if os.geteuid() != 0:
        raise LinkError(
            "network namespaces and shaped links need root: run it with sudo, "
            "or in a container with CAP_NET_ADMIN and CAP_SYS_ADMIN"
        )
    for command in ("ip", "tc"):
        if shutil.which(command) is None:
            raise LinkError(f"no command {command}: install iproute2")


def _give_address(namespace: str, device: str, address: str) -> None:
    _run("ip", "-n", namespace, "addr", "add", f"{address}/24", "dev", device)
    _run("ip", "-n", namespace, "link", "set", device, "up")


def _take_down() -> None:
    """Both namespaces; their devices go with them, and with those the peers outside."""
    for side in _SIDES:
        for command in (
            ("ip", "link", "del", f"{side.device}-c"),
            ("ip", "-n", side.namespace, "link", "del", side.device),
            ("ip", "netns", "del", side.namespace),
        ):
            with contextlib.suppress(LinkError):
                _run(*command)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LinkError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
