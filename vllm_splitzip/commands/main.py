"""The `vllm-splitzip` command line."""

import argparse
import sys
from collections.abc import Sequence

from .. import __version__
from ..errors import SplitZipError
from . import analyze, calibrate, plan

COMMANDS = {
    "analyze": (analyze, "measure why a model's KV cache can be made smaller, and by how much"),
    "calibrate": (calibrate, "derive a codebook from a model's KV cache over real text"),
    "plan": (plan, "reckon which codec a link and a model are worth"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the process's exit status."""
    parser = argparse.ArgumentParser(prog="vllm-splitzip", description=__doc__)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (module, description) in COMMANDS.items():
        module.add_arguments(commands.add_parser(name, help=description, description=description))
    options = parser.parse_args(arguments)
    try:
        return COMMANDS[options.command][0].run(options)
    except SplitZipError as error:
        print(f"vllm-splitzip: {error}", file=sys.stderr)
        return 1
