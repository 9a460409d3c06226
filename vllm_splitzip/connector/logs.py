"""The package's log lines appear where vLLM's do, in its form and at its level."""

import logging


def log_with_vllm() -> None:
    """Give the package's logger vLLM's handlers, unless the user gave it some."""
    ours, theirs = logging.getLogger("vllm_splitzip"), logging.getLogger("vllm")
    if not ours.handlers:
        for handler in theirs.handlers:
            ours.addHandler(handler)
        ours.setLevel(theirs.level)
        ours.propagate = theirs.propagate
