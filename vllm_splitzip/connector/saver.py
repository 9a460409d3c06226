"""Layers into frames: coded as each layer's attention is done, handed on when all are in.

Coding reads a block's bits at once, so a block may be reused by vLLM as soon as the step is over:
nothing is pinned, and a preempted request leaves nothing behind.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from ..codec.codebook import Codebook
from ..codec.coded import Coded
from ..codec.modes import MODES, mode_for
from ..frame import Frame, Layer
from .auto import AutoCodec
from .counters import Counters
from .geometry import Geometry
from .keys import KeySpace
from .messages import SaveFrame
from .pages import Pages
from .streams import Streams
from .trace import OFF, Trace
from .writer import Writer

logger = logging.getLogger(__name__)

_Asked = tuple[str, Callable[[], Coded]]
"""The mode that a layer was asked to be coded in, and what it became."""


class Saver:
    """Codes the frames of one step. Called by the model runner's thread only.

    Parameters
    ----------
    pages
        All layers of this rank by name.
    mode
        Codec mode for layers whose number format it knows; others are stored raw.
    auto
        Chooses the mode instead, step by step.
    verify
        Share of frames that are decoded again and compared before they are handed on.
    """

    def __init__(
        self,
        geometry: Geometry,
        pages: Mapping[str, Pages],
        keys: KeySpace,
        writer: Writer,
        streams: Streams,
        counters: Counters,
        *,
        mode: str,
        book: Codebook,
        verify: float,
        trace: Trace = OFF,
        auto: AutoCodec | None = None,
    ) -> None:
        self._auto = auto
        self._trace = trace
        self._geometry = geometry
        self._pages = pages
        self._keys = keys
        self._writer = writer
        self._streams = streams
        self._counters = counters
        self._mode = mode
        self._book = book
        self._verify = verify
        self._verify_due = 0.0
        self._layers_by_part = [
            [name for name, layer in pages.items() if layer.group in part.groups]
            for part in geometry.parts
        ]
        self._names = list(pages)
        self._coded: dict[tuple[int, str], _Asked] = {}
        self._is_in_step = False
        self._probe: tuple[int, str] | None = None
        self._probe_mode = mode

    def save_layer(self, name: str, saves: Sequence[SaveFrame]) -> None:
        """Code one layer's blocks of all frames of this step, unless that has been done."""
        layer = self._pages.get(name)
        if layer is None:
            return  # Shares another layer's KV cache, which is saved under that one's name.
        if self._auto is not None and not self._is_in_step:
            self._choose(self._auto, len(saves))
        blocks_by_mode: dict[str, int] = {}
        start = time.perf_counter()
        with self._trace.span("encode", layer=name), self._streams.saving():
            for index, save in enumerate(saves):
                table = save.tables[layer.group]
                if table is not None and (index, name) not in self._coded:
                    mode, book = self._mode_for(layer, index)
                    self._coded[index, name] = mode, layer.encode(table, mode, book)
                    blocks_by_mode[mode] = blocks_by_mode.get(mode, 0) + len(table)
        seconds = time.perf_counter() - start
        self._counters.add(encode_seconds=seconds)
        if self._auto is not None:
            nbytes = {mode: n * layer.block_bytes for mode, n in blocks_by_mode.items()}
            self._auto.encoded(nbytes, seconds)

    def finish(self, saves: Sequence[SaveFrame]) -> None:
        """Code what no hook announced, and hand on every frame of this step."""
        for name in self._pages:
            self.save_layer(name, saves)
        self._streams.end_of_step()
        for index, save in enumerate(saves):
            for part in self._geometry.parts:
                if all(save.tables[group] is not None for group in part.groups):
                    self._hand_on(index, save, part.index)
        self._coded.clear()
        self._is_in_step = False

    def _choose(self, auto: AutoCodec, frames: int) -> None:
        """Begin a step with the mode that is worth it now."""
        self._is_in_step = True
        self._mode, layer, self._probe_mode = auto.next_step(frames, len(self._names))
        self._probe = (0, self._names[layer]) if layer is not None else None

    def _hand_on(self, index: int, save: SaveFrame, part: int) -> None:
        names = self._layers_by_part[part]
        coded = [self._coded[index, name] for name in names]
        build = partial(self._frame, save, names, coded)
        if self._is_due_for_verification() and not self._verified(build(), save):
            return
        raw_bytes = sum(
            self._pages[name].block_bytes * len(self._table(save, name)) for name in names
        )
        key = self._keys.object_key(save.key, part)
        self._writer.put(key, self._keys.key_bytes(key), build, raw_bytes)

    def _frame(self, save: SaveFrame, names: Sequence[str], coded: Sequence[_Asked]) -> Frame:
        """The frame of some layers, once they are coded. Called by the writer's thread."""
        layers = [
            self._frame_layer(save, name, result())
            for name, (_, result) in zip(names, coded, strict=True)
        ]
        if self._auto is not None:
            self._auto.became([mode for mode, _ in coded], layers)
        return Frame(save.units * self._geometry.unit_tokens, tuple(layers))

    def _frame_layer(self, save: SaveFrame, name: str, coded: Coded) -> Layer:
        pages = self._pages[name]
        return Layer(
            name=name,
            format=pages.format,
            shape=pages.frame_shape(len(self._table(save, name))),
            coded=coded,
            codebook=self._book if self._needs_codebook(coded.mode, pages.format) else None,
            packing=pages.packing,
        )

    def _table(self, save: SaveFrame, name: str) -> list[int]:
        table = save.tables[self._pages[name].group]
        assert table is not None
        return table

    def _mode_for(self, layer: Pages, index: int) -> tuple[str, Codebook | None]:
        is_probe = self._probe == (index, layer.name)
        mode = mode_for(self._probe_mode if is_probe else self._mode, layer.format)
        return mode, self._book if self._needs_codebook(mode, layer.format) else None

    @staticmethod
    def _needs_codebook(mode: str, format_name: str) -> bool:
        return MODES[mode].streams[format_name].needs_codebook

    def _is_due_for_verification(self) -> bool:
        self._verify_due += self._verify
        if self._verify_due < 1:
            return False
        self._verify_due -= 1
        return True

    def _verified(self, frame: Frame, save: SaveFrame) -> bool:
        for layer in frame.layers:
            table = self._table(save, layer.name)
            if not self._pages[layer.name].holds(layer.coded, layer.codebook, table):
                logger.error(
                    "layer %s did not decode to the bits it was coded from; its frame is not "
                    "stored. This is a fault of vllm-splitzip or of this machine: please report it",
                    layer.name,
                )
                self._counters.add(frames_dropped=1)
                return False
        return True
