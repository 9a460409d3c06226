"""Every error the package raises on purpose, one class per cause, all under one base."""


class SplitZipError(Exception):
    """Base of all errors raised by this package."""


class SettingError(SplitZipError, ValueError):
    """A setting is unknown or has a value that is not allowed."""


class UnsupportedModelError(SplitZipError, ValueError):
    """The model or engine configuration cannot be served losslessly; refused at start-up."""


class CodebookError(SplitZipError, ValueError):
    """A codebook is malformed: wrong number of entries, repeated or out-of-range exponents."""


class UnknownModeError(SplitZipError, ValueError):
    """A codec mode or number format that this version does not know."""


class FrameError(SplitZipError):
    """A frame cannot be decoded. Of the layer that is at fault nothing has been written."""


class FrameTruncatedError(FrameError):
    """The frame is shorter or longer than its header says."""


class FrameVersionError(FrameError):
    """Not a SplitZip frame, or one of a format version that this package does not read."""


class FrameChecksumError(FrameError):
    """The frame's checksum does not match its bytes."""


class FrameKeyError(FrameError):
    """The frame was stored under another key than the one it was fetched by."""


class FrameLayoutError(FrameError):
    """The frame's metadata contradicts itself, or the tensors it is to be decoded into."""


class StoreError(SplitZipError):
    """The store failed (down, timed out, refused). Callers treat it as a cache miss."""
