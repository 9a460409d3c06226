"""Servers in processes of their own: vLLM's API server, a proxy in front of two, a store.

A server may run behind a command that puts it elsewhere, such as `ip netns exec NAME`. Whether it
is ready is read from the kernel, so that it need not be reachable from here.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from benchmarks.engine import EngineFailedError, end_of_log, engine_environment
from benchmarks.once import REPO_ROOT

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 60.0
POLL_S = 0.1

_LISTEN = "0A"
"""State of a listening socket in /proc/net/tcp."""


class Server:
    """A command that listens on a TCP port. It is started at once; `wait_ready` waits for it.

    It can be killed and started again. As a context manager it is stopped at the end.

    Parameters
    ----------
    command
        Program and arguments.
    port
        Where it will listen.
    log
        File that everything it prints is appended to.
    environment
        Its whole environment; None: as an engine is to see this process's.
    prefix
        Command that runs `command`, for instance ("ip", "netns", "exec", "prefill").
    """

    def __init__(
        self,
        command: Sequence[str],
        port: int,
        log: Path,
        *,
        environment: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        self.port = port
        self.log = log
        self._command = [*prefix, *command]
        self._environment = dict(engine_environment() if environment is None else environment)
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start the process. Nothing happens when it was started and not ended by `kill`."""
        if self._process is not None:
            return
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=REPO_ROOT,
                env=self._environment,
                start_new_session=True,
            )

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> Self:
        """Wait until it listens. Raises EngineFailedError, after killing it, if it does not."""
        deadline = time.monotonic() + timeout_s
        while not self._listens():
            ended = None if self._process is None else self._process.poll()
            if self._process is None or ended is not None or time.monotonic() > deadline:
                self.kill()
                what = "did not listen in time" if ended is None else f"ended with status {ended}"
                raise EngineFailedError(
                    f"{' '.join(self._command)} {what}. The end of its log, {self.log}:\n"
                    f"{end_of_log(self.log)}"
                )
            time.sleep(POLL_S)
        return self

    def processes(self) -> list[psutil.Process]:
        """The process and all that descend from it, as far as they are alive."""
        if self._process is None:
            return []
        with suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self._process.pid)
            return [parent, *parent.children(recursive=True)]
        return []

    def rss_bytes(self) -> int:
        """Resident memory of the process tree in bytes. Shared pages count for each process."""
        total = 0
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
        return total

    def stop(self) -> None:
        """Ask it to end, and wait until all of its processes are gone."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)  # vLLM's server tells its own processes.
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        """End the whole process tree at once, as a power cut would, if it is not gone already."""
        process, self._process = self._process, None
        if process is None:
            return
        tree: list[psutil.Process] = []
        with suppress(psutil.NoSuchProcess):
            tree = psutil.Process(process.pid).children(recursive=True)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for child in tree:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        process.wait()
        psutil.wait_procs(tree, timeout=STOP_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.stop()
        else:
            self.kill()

    def _listens(self) -> bool:
        """Whether the port is open in the network namespace of the process itself."""
        assert self._process is not None
        for family in ("tcp", "tcp6"):
            with suppress(OSError):
                table = Path(f"/proc/{self._process.pid}/net/{family}").read_text()
                for line in table.splitlines()[1:]:
                    _, local, _, state, *_ = line.split()
                    if state == _LISTEN and int(local.rpartition(":")[2], 16) == self.port:
                        return True
        return False


class VllmServer(Server):
    """vLLM's OpenAI-compatible server, listening on all addresses of its network namespace.

    Parameters
    ----------
    model
        Directory of the model.
    kv_transfer
        Content of `--kv-transfer-config`; None: no connector.
    arguments
        More arguments by name, as in the command line without its dashes: True is a flag alone,
        a mapping is written as JSON.
    extra_environment
        Variables on top of those that every engine gets.
    """

    def __init__(
        self,
        model: Path,
        port: int,
        log: Path,
        *,
        kv_transfer: Mapping[str, Any] | None = None,
        arguments: Mapping[str, Any] | None = None,
        extra_environment: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        given: dict[str, Any] = {"model": str(model), "port": port, **(arguments or {})}
        if kv_transfer is not None:
            given["kv-transfer-config"] = kv_transfer
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        for name, value in given.items():
            command.append(f"--{name}")
            if isinstance(value, Mapping):
                command.append(json.dumps(value))
            elif value is not True:
                command.append(str(value))
        super().__init__(
            command, port, log, environment=engine_environment(extra_environment), prefix=prefix
        )


class ProxyServer(Server):
    """A proxy script, run as it is.

    Parameters
    ----------
    script
        The file.
    arguments
        Of its command line.
    """

    def __init__(
        self,
        script: Path,
        port: int,
        log: Path,
        arguments: Sequence[str],
        *,
        prefix: Sequence[str] = (),
    ) -> None:
        super().__init__([sys.executable, str(script), *arguments], port, log, prefix=prefix)
