"""Is the codec exact on this GPU, and how fast? One script, no vLLM, no network, 4 minutes.

python -m benchmarks.gpu_check [--out build/gpu_check.json] [--seconds 240]

Needs PyTorch, Triton, NumPy, numba and msgpack. Exactness comes first; if that fails nothing is
timed. With --tiny all of it is rehearsed on small inputs: its times mean nothing, but it runs on a
machine without a GPU, under TRITON_INTERPRET=1.
"""

import argparse
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent

BLOCK, TINY_BLOCK = (8, 16, 256), (2, 16, 32)
"""Heads, tokens, K and V of a token: a common model's block, and one for a rehearsal."""

REAL_RATE = 0.0015
"""Escapes per element in real KV of Gemma 3."""


def use_checkout() -> None:
    """Make the package importable from a checkout in which nothing was installed."""
    sys.path.insert(0, str(ROOT))
    name = "vllm_splitzip.kernels"
    if importlib.util.find_spec(name) is None:
        folder = ROOT / "kernels"
        spec = importlib.util.spec_from_file_location(
            name, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


def exactness(device: Any, tiny: bool) -> list[dict[str, Any]]:
    from benchmarks.gpu import exact as gpu_exact

    done = []
    for name, wrong in gpu_exact.checks(device, tiny):
        done.append({"check": name, "exact": wrong is None, "wrong": wrong})
        if wrong:
            print(f"NOT EXACT {name}: {wrong}")
    failed = sum(not row["exact"] for row in done)
    print(f"{len(done) - failed} of {len(done)} checks exact")
    return done


def timings(device: Any, tiny: bool) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """(section, what measures one of its rows), the most important first."""
    from vllm_splitzip.kernels import fast_decode, fast_encode

    from benchmarks.gpu import times as gpu_time
    from benchmarks.gpu import times_windowed as gpu_time_windowed
    from benchmarks.gpu.data import BOOKS, LAYOUTS
    from vllm_splitzip.codec.scheme import SCHEMES

    block = TINY_BLOCK if tiny else BLOCK

    def case(
        size: int, layout: str = "rows_first", rate: float = REAL_RATE, book: str = "zero-window"
    ) -> gpu_time.Case:
        return gpu_time.Case(size, LAYOUTS[layout], block, BOOKS[book], rate, device)

    def row(size: int, **what: Any) -> dict[str, Any]:
        return what | case(size, **what).measure(repeats=15)

    def beside_others(size: int) -> dict[str, Any]:
        repeats = 15 if size <= 1 << 30 else 7
        limit = gpu_time.measure_copy(size, repeats, device)
        coded = case(size)
        ours = coded.measure(repeats)
        fractions = {
            f"{what}_of_limit": ours[f"{what}_gbs"] / limit["limit_gbs"]
            for what in ("encode", "decode")
        }
        two_pass = gpu_time.measure_two_pass(coded, BOOKS["zero-window"], repeats)
        return ours | limit | fractions | two_pass

    def with_chunks(size: int, number: int) -> dict[str, Any]:
        kept = fast_encode.chunks_per_program
        fast_encode.chunks_per_program = fast_decode.chunks_per_program = lambda _: number
        try:
            return {"chunks_per_program": number} | row(size)
        finally:
            fast_encode.chunks_per_program = fast_decode.chunks_per_program = kept

    def with_windows(size: int, mode: str, name: str) -> dict[str, Any]:
        found = gpu_time_windowed.WindowedCase(size, "rows_first", block, mode, name, device)
        return found.measure(repeats=15)

    def sized(megabytes: int) -> int:
        return 1 << 12 if tiny else megabytes << 20

    for megabytes in (256,) if tiny else (256, 1, 4, 16, 64, 1024, 4096):
        yield "sizes", partial(beside_others, sized(megabytes))
    windowed = [(mode, name) for mode, schemes in SCHEMES.items() for name in schemes]
    for mode, name in windowed:
        yield "windowed modes", partial(with_windows, sized(256), mode, name)
    for megabytes in () if tiny else (1, 16, 1024):
        for mode in ("dense", "max"):
            yield "windowed modes", partial(with_windows, sized(megabytes), mode, "bf16")
    for rate in (0.1,) if tiny else (0, 0.0005, 0.005, 0.02, 0.1):
        yield "escapes", partial(row, sized(256), rate=rate)
    for layout in ("contiguous", "misaligned") if tiny else LAYOUTS:
        yield "layouts", partial(row, sized(256), layout=layout)
    for book in ("table",) if tiny else ("window", "table"):
        yield "codebooks", partial(row, sized(256), book=book)
    for megabytes in (256,) if tiny else (1024, 64, 16):
        for number in (2,) if tiny else (1, 2, 4, 8, 16):
            yield "chunks per program", partial(with_chunks, sized(megabytes), number)


def measure(device: Any, tiny: bool, deadline: float) -> dict[str, list[dict[str, Any]]]:
    import torch

    sections: dict[str, list[dict[str, Any]]] = {}
    for section, run in timings(device, tiny):
        if time.monotonic() > deadline:
            print("out of time: the rest is left out")
            break
        try:
            result = run()
        except torch.cuda.OutOfMemoryError:
            continue
        finally:
            torch.cuda.empty_cache()
        if section not in sections:
            print(f"\n{section}\n" + "  ".join(f"{name:>12}" for name in result))
        sections.setdefault(section, []).append(result)
        print("  ".join(f"{shown(value):>{max(12, len(name))}}" for name, value in result.items()))
    return sections


def shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a rehearsal on small inputs")
    parser.add_argument("--out", type=Path, default=ROOT / "build/gpu_check.json")
    parser.add_argument("--seconds", type=float, default=240, help="begin no measurement after it")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds - 15
    use_checkout()
    import torch
    import triton

    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        print(
            "no GPU that torch can use. A rehearsal without one: "
            "TRITON_INTERPRET=1 python -m benchmarks.gpu_check --tiny --seconds 3600"
        )
        return 2
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "no GPU"
    print(f"{name}, torch {torch.__version__}, triton {triton.__version__}")
    report: dict[str, Any] = {"device": name, "torch": torch.__version__}
    report |= {"triton": triton.__version__, "exact": exactness(device, options.tiny)}
    exact = all(row["exact"] for row in report["exact"])
    if exact:
        report |= measure(device, options.tiny, deadline)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1))
    print(f"written to {options.out}")
    return 0 if exact else 1


if __name__ == "__main__":
    sys.exit(main())
