"""Reads images from files, and tells damaged images from other I/O errors."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from qframework.errors import FileFormatError

if TYPE_CHECKING:
    from PIL.Image import Image


class DamagedImage(NamedTuple):
    """An image that was skipped, and why."""

    path: str
    reason: str


class DamagedImageError(FileFormatError):
    """A file that cannot be decoded as an image."""


# What Pillow's decoders raise on malformed data, besides OSError.
_DECODING = (SyntaxError, ValueError, EOFError, LookupError, TypeError, struct.error, zlib.error, OverflowError)


def read_image(path: Path, mode: Literal["RGB", "L"] = "RGB") -> Image:
    """The whole image converted to ``mode``. EXIF orientation is ignored, since annotations ignore it too.

    Raises:
        DamagedImageError: the file is truncated, empty, implausibly large or of an unknown format.
        OSError: the file cannot be read: it does not exist, permission is denied, the disk fails.
    """
    from PIL import Image

    try:
        with Image.open(path) as image:
            return image.convert(mode)
    except OSError as error:
        if error.errno is not None:  # errors of the system; Pillow's own have no number
            raise
        raise DamagedImageError(_reason(error, path)) from error
    except (*_DECODING, Image.DecompressionBombError) as error:
        raise DamagedImageError(_reason(error, path)) from error


def _reason(error: Exception, path: Path) -> str:
    """One line without the path, so that results do not depend on where the data is."""
    if path.stat().st_size == 0:
        return "the file is empty"
    text = " ".join(str(error).split()).replace(repr(str(path)), "the file").replace(str(path), "the file")
    return text or type(error).__name__
