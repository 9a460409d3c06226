"""Frames: the self-describing objects that are stored and sent. Byte layout: `header.py`."""

from .frame import Frame, Layer
from .serial import pack, unpack

__all__ = ["Frame", "Layer", "pack", "unpack"]
