"""The files that commands read and write, looked at before any work is done."""

from collections.abc import Sequence
from pathlib import Path

from ..errors import SplitZipError

PICTURES = (".png", ".svg", ".pdf")


def check_texts(option: str, files: Sequence[Path]) -> None:
    """Raises SplitZipError when a text cannot be read."""
    for file in files:
        try:
            with file.open("rb"):
                pass
        except OSError as error:
            raise SplitZipError(f"{option} names {str(file)!r}: {error.strerror}") from error


def names_of(option: str, files: Sequence[Path]) -> dict[str, Path]:
    """Files by a name that tells them apart. Raises SplitZipError when one is there twice."""
    if len({file.resolve() for file in files}) < len(files):
        raise SplitZipError(f"{option} names a file twice; each counts once")
    names = [file.name for file in files]
    if len(set(names)) < len(names):
        names = [str(file) for file in files]
    return dict(zip(names, files, strict=True))


def check_output(option: str, file: Path | None) -> None:
    """Raises SplitZipError when a file cannot be written there."""
    if file is None:
        return
    if file.is_dir():
        raise SplitZipError(f"{option} is {str(file)!r}, a directory; expected a file to write")
    if not file.absolute().parent.is_dir():
        raise SplitZipError(f"{option} is {str(file)!r}, in a directory that does not exist")


def check_picture(option: str, file: Path | None) -> None:
    """Raises SplitZipError when no picture can be drawn there."""
    if file is None:
        return
    check_output(option, file)
    if file.suffix.lower() not in PICTURES:
        raise SplitZipError(f"{option} is {str(file)!r}; it can end in {', '.join(PICTURES)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise SplitZipError("a picture needs matplotlib: pip install matplotlib") from error
