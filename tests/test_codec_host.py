"""Codec modes by name: what is refused before anything is coded or written."""

from dataclasses import replace

import numpy as np
import pytest

from vllm_splitzip.codec import host
from vllm_splitzip.codec.codebook import Codebook
from vllm_splitzip.codec.coded import Blocks
from vllm_splitzip.codec.packing import channels
from vllm_splitzip.errors import CodebookError, FrameLayoutError, UnknownModeError

BOOK = Codebook(bytes(range(115, 131)))


def blocks():
    rows = np.full((4, 2048), 0x3F80, np.uint16)
    return Blocks(rows, np.arange(4), "bf16", channels("tokens", (1, 16, 128)))


def test_unknown_names_are_refused():
    with pytest.raises(UnknownModeError, match="'zip'; known"):
        host.encode(blocks(), "zip", BOOK)
    with pytest.raises(UnknownModeError, match="'int4'; known"):
        host.encode(replace(blocks(), format="int4"), "raw", None)
    coded = host.encode(blocks(), "fast", BOOK)
    with pytest.raises(UnknownModeError, match="'zip'; known"):
        host.decode(replace(coded, mode="zip"), BOOK, blocks())


def test_a_codebook_that_is_needed_must_be_there():
    with pytest.raises(CodebookError, match="needs a codebook"):
        host.encode(blocks(), "fast", None)
    coded = host.encode(blocks(), "fast", BOOK)
    with pytest.raises(CodebookError, match="needs a codebook"):
        host.decode(coded, None, blocks())


@pytest.mark.parametrize(
    ("mode", "name"), [("fast", "fp16"), ("fast", "bytes"), ("dense", "bytes")]
)
def test_streams_of_another_format_are_not_decoded(mode, name):
    coded = replace(host.encode(blocks(), "fast", BOOK), mode=mode)
    target = replace(blocks(), format=name)
    before = target.pages.copy()
    with pytest.raises(FrameLayoutError, match=f"{mode} does not code format"):
        host.decode(coded, BOOK, target)
    assert np.array_equal(target.pages, before)
