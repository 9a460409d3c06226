"""vLLM's own proxies in front of a prefill and a decode server, out of its source distributions.

No wheel holds them. Each is taken from the newest release that has it.

| name           | what it sends                                                               |
|----------------|-----------------------------------------------------------------------------|
| prefill-proxy  | one token to the prefill server, then the request to the decode server      |
| toy-proxy      | the same with `kv_transfer_params`, and those of the answer to the other    |
| proxy-demo     | as prefill-proxy; servers are checked and can be added while it runs        |

``python -m benchmarks.vllm_scripts [NAME ...]`` fetches the named scripts, or all, and prints
where they are.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.once import REPO_ROOT, build_once

# pip asks a source distribution for its metadata, for which vLLM's setup.py wants to know what
# it would build, and a version that says nothing of it.
PIP_ENVIRONMENT = {"VLLM_TARGET_DEVICE": "empty"}


class ScriptUnavailableError(RuntimeError):
    """A script could not be fetched; the message says at which step and what to do."""


@dataclass(frozen=True)
class Script:
    """A file of one release of vLLM."""

    version: str
    member: str
    sha256: str


SCRIPTS = {
    "prefill-proxy": Script(
        "0.23.0",
        "benchmarks/disagg_benchmarks/disagg_prefill_proxy_server.py",
        "c71f14447b4728f8128b485e10d9450313a07c9bf8f6e688a208dbadf313e752",
    ),
    "toy-proxy": Script(
        "0.32.0",
        "tests/v1/kv_connector/nixl_integration/toy_proxy_server.py",
        "1210e5525cc0c57f891734b682d3f8939aa7456a672bea16b44f03b6707136ff",
    ),
    "proxy-demo": Script(
        "0.32.0",
        "examples/disaggregated/disaggregated_serving/disagg_proxy_demo.py",
        "815d1b9fd38130551665c3cb3b81a3e764bc6eb64c94891d8812cb7c0cb023a8",
    ),
}


def ensure(name: str) -> Path:
    """The script, fetched on the first call.

    Raises
    ------
    KeyError
        No such script.
    ScriptUnavailableError
        It could not be fetched, or is not the file that it was.
    """
    if name not in SCRIPTS:
        raise KeyError(f"unknown script {name!r}; known: {', '.join(SCRIPTS)}")
    script = SCRIPTS[name]
    directory = REPO_ROOT / "build" / "vllm-scripts" / script.version
    wanted = [other for other in SCRIPTS.values() if other.version == script.version]
    build_once(directory, lambda scratch: _fetch(script.version, wanted, scratch))
    return directory / Path(script.member).name


def proxy_arguments(
    name: str, port: int, prefill: str, decode: str, model: str, host: str = "0.0.0.0"
) -> list[str]:
    """Command line of a script, to listen on `port` in front of two servers (host:port).

    `model` is the model's name or directory; `host` is where the toy proxy listens, the only one
    that can be told.
    """
    (prefill_host, prefill_port), (decode_host, decode_port) = (
        address.split(":") for address in (prefill, decode)
    )
    return {
        "prefill-proxy": [
            *("--port", str(port)),
            *("--prefill-url", f"http://{prefill}", "--decode-url", f"http://{decode}"),
        ],
        "toy-proxy": [
            *("--host", host, "--port", str(port)),
            *("--prefiller-host", prefill_host, "--prefiller-port", prefill_port),
            *("--decoder-host", decode_host, "--decoder-port", decode_port),
        ],
        "proxy-demo": [
            *("--port", str(port), "--model", model),
            *("--prefill", prefill, "--decode", decode),
        ],
    }[name]


def _fetch(version: str, scripts: Sequence[Script], out: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "vllm"]
    command += ["--no-build-isolation", "--disable-pip-version-check", "--dest", str(out)]
    command += [f"vllm=={version}"]
    environment = {**os.environ, **PIP_ENVIRONMENT, "VLLM_VERSION_OVERRIDE": version}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    archives = list(out.glob("*.tar.gz"))
    if done.returncode or not archives:
        raise ScriptUnavailableError(
            f"pip could not fetch the source of vLLM {version}:\n"
            + "\n".join(done.stderr.strip().splitlines()[-6:])
            + "\nCheck that pip works here and reaches an index that has it (PIP_INDEX_URL), and "
            "that setuptools-rust is installed (pip install '.[dev]')."
        )
    with tarfile.open(archives[0]) as archive:
        for script in scripts:
            file = archive.extractfile(f"vllm-{version}/{script.member}")
            content = b"" if file is None else file.read()
            digest = hashlib.sha256(content).hexdigest()
            if digest != script.sha256:
                raise ScriptUnavailableError(
                    f"{script.member} of vLLM {version} has sha256 {digest}, "
                    f"expected {script.sha256}"
                )
            (out / Path(script.member).name).write_bytes(content)
    archives[0].unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description="Fetch vLLM's proxies.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(SCRIPTS))
    for name in parser.parse_args().names or SCRIPTS:
        try:
            print(ensure(name))
        except (KeyError, ScriptUnavailableError) as error:
            sys.exit(error.args[0])


if __name__ == "__main__":
    main()
