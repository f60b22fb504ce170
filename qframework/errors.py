"""The errors qframework raises on purpose.

A message reads ``{operator or layer}: {argument} must {be|have ...}, got {value seen}``, followed by what to do where
that helps.
"""

from collections.abc import Iterable


def either(values: Iterable[object]) -> str:
    """``"a, b or c"``, for messages."""
    *first, last = map(str, values)
    return f"{', '.join(first)} or {last}" if first else last


class QFrameworkError(ValueError):
    """Base of every error raised on purpose; a ``ValueError``, so callers need not know this package."""


class UnsupportedError(QFrameworkError):
    """No kernel can do what was asked: a dtype, granularity, shape, device or option."""


class CalibrationError(QFrameworkError):
    """Calibration was not run, saw no data, or saw NaN or infinity."""


class FileFormatError(QFrameworkError):
    """A file is damaged, of another format, or written by an incompatible version."""


class NonFiniteError(QFrameworkError):
    """Training produced NaN or infinity in a monitored layer."""
