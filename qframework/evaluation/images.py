"""Images read from files, with damaged ones told from everything else that can go wrong."""

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


# What Pillow's decoders raise on bytes that are not what they claim to be. OSError is looked at more closely.
_DECODING = (SyntaxError, ValueError, EOFError, LookupError, TypeError, struct.error, zlib.error, OverflowError)


def read_image(path: Path, mode: Literal["RGB", "L"] = "RGB") -> Image:
    """The image, decoded as a whole and converted to ``mode``; not turned as EXIF says, as annotations are not either.

    Raises:
        DamagedImageError: cut off, empty, too large to be true, or of no format that Pillow knows.
        OSError: it cannot be read at all: it is not there, may not be opened, the disk fails.
    """
    from PIL import Image

    try:
        with Image.open(path) as image:
            return image.convert(mode)
    except OSError as error:
        if error.errno is not None:  # the system's: Pillow's own have no number
            raise
        raise DamagedImageError(_reason(error, path)) from error
    except (*_DECODING, Image.DecompressionBombError) as error:
        raise DamagedImageError(_reason(error, path)) from error


def _reason(error: Exception, path: Path) -> str:
    """In one line, without the path: it is kept beside it, and where data lies is no property of the data."""
    if path.stat().st_size == 0:
        return "the file is empty"
    text = " ".join(str(error).split()).replace(repr(str(path)), "the file").replace(str(path), "the file")
    return text or type(error).__name__
