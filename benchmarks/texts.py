"""Real texts that every machine with this project's environment has.

Two sets of different origin: what is calibrated on texts of the interpreter and of NumPy is
measured on texts that PyTorch, transformers and vLLM bring along. Both hold English prose, code,
documentation and markup, the most diverse first, so that a prefix of a set is a fair sample.
"""

import importlib.metadata
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_CHARS = 64 * 1024  # of each text: more than 10,000 tokens of English


def calibration() -> dict[str, str]:
    """Texts to derive codebooks from, by name; each gives 2,048 tokens or more."""
    return _read(
        {
            "python-reference": _language_reference,
            "argparse.py": lambda: _file("argparse"),
            "gpl-3": _gpl,
            "ndarraytypes.h": lambda: _file("numpy", "_core/include/numpy/ndarraytypes.h"),
            "fromnumeric.py": lambda: _file("numpy", "_core/fromnumeric.py"),
            "statistics.py": lambda: _file("statistics"),
            "turtle.py": lambda: _file("turtle"),
            "base_events.py": lambda: _file("asyncio", "base_events.py"),
        }
    )


def held_out() -> dict[str, str]:
    """Texts to measure on, by name; each gives 2,048 tokens or more."""
    return _read(
        {
            "opticks": lambda: _file("tvm_ffi", "3rdparty/libbacktrace/Isaac.Newton-Opticks.txt"),
            "transformer.py": lambda: _file("torch", "nn/modules/transformer.py"),
            "regex-manual": lambda: _description("regex"),
            "intrusive_ptr.h": lambda: _file("torch", "include/c10/util/intrusive_ptr.h"),
            "openai-readme": lambda: _description("openai"),
            "graph-breaks.json": lambda: _file("torch", "_dynamo/graph_break_registry.json"),
            "psf-licence": lambda: _licence("typing_extensions"),
            "ode.py": lambda: _file("sympy", "solvers/ode/ode.py"),
        }
    )


def prompts(
    tokenizer: "PreTrainedTokenizerBase",
    lengths: Sequence[int],
    texts: Mapping[str, str] | None = None,
) -> list[list[int]]:
    """Token ids of one prompt for each of ``lengths`` (in tokens), from the held-out texts.

    Prompt ``i`` comes from text ``i`` modulo their number and goes on where the last prompt of
    that text ended, so no two prompts share a prefix longer than what the tokenizer puts in front
    (<bos>), which counts towards the length.
    """
    texts = held_out() if texts is None else texts
    prefix: list[int] = tokenizer("")["input_ids"]
    names = list(texts)
    rest: dict[str, list[int]] = {}
    result = []
    for index, length in enumerate(lengths):
        name = names[index % len(names)]
        if name not in rest:
            rest[name] = tokenizer(texts[name], add_special_tokens=False)["input_ids"]
        take = length - len(prefix)
        if take > len(rest[name]):
            raise ValueError(f"{name}: {take} tokens wanted, {len(rest[name])} left")
        result.append(prefix + rest[name][:take])
        rest[name] = rest[name][take:]
    return result


def _read(sources: Mapping[str, Callable[[], str]]) -> dict[str, str]:
    return {name: read()[:MAX_CHARS] for name, read in sources.items()}


def _file(module: str, relative: str = "") -> str:
    """Text of a file beside a top-level module, or of the module itself, without importing it."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(f"no module {module}: install the project's development extras")
    origin = Path(spec.origin)
    return (origin.parent / relative if relative else origin).read_text(encoding="utf-8")


def _description(distribution: str) -> str:
    """Long description of an installed distribution: its README as published."""
    return importlib.metadata.metadata(distribution)["Description"]


def _licence(distribution: str) -> str:
    files = importlib.metadata.files(distribution) or []
    return next(file for file in files if file.name.startswith("LICENSE")).read_text("utf-8")


def _gpl() -> str:
    """The GPL, which NumPy's wheels carry for libgfortran."""
    licence = _licence("numpy")
    return licence[licence.index("GNU GENERAL PUBLIC LICENSE") :]


def _language_reference() -> str:
    """The longest chapters of the Python language reference, as ``help()`` has them."""
    from pydoc_data.topics import topics

    return "\n\n".join(sorted(topics.values(), key=len, reverse=True))
