"""Prefill here, decode there: the parameters that a proxy carries from one server to the other.

Their names are those that users of vLLM's NixlConnector and its proxies know. Frames are found by
content alone; the parameters only tell the decode side that frames are on their way, so that it
waits for them instead of computing. Without parameters nothing waits.
"""

from collections.abc import Mapping
from typing import Any


def is_prefill_for_another(parameters: Mapping[str, Any] | None) -> bool:
    """Whether another server will decode what is prefilled here."""
    return bool(parameters and parameters.get("do_remote_decode"))


def is_prefilled_elsewhere(parameters: Mapping[str, Any] | None) -> bool:
    """Whether another server has prefilled, and its frames may still be on their way."""
    return bool(parameters and parameters.get("do_remote_prefill"))


def parameters_for_decode(
    request_id: str, prompt_tokens: int, engine_id: str | None, *, are_stored: bool
) -> dict[str, Any]:
    """What the prefill side answers, for the decode side to be called with.

    Proxies pass all of it on, and some put addresses into it. Nothing of it is needed to find the
    frames, so none of it can be wrong. `are_stored` is whether this side's store takes frames
    now: if it does not, the decode side is not told to wait for any.
    """
    return {
        "do_remote_prefill": are_stored,
        "do_remote_decode": False,
        "remote_engine_id": engine_id,
        "remote_request_id": request_id,
        "remote_block_ids": [],
        "remote_host": None,
        "remote_port": None,
        "remote_num_tokens": prompt_tokens,
    }
