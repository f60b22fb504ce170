"""The errors qframework raises on purpose.

Every message names the layer or argument, the value seen and what would be accepted.
"""


class QFrameworkError(ValueError):
    """Base of every error raised on purpose; a ``ValueError``, so callers need not know this package."""


class UnsupportedError(QFrameworkError):
    """No kernel can do what was asked: a dtype, granularity, shape, device or option."""


class CalibrationError(QFrameworkError):
    """Calibration was not run, saw no data, or saw NaN or infinity."""


class FileFormatError(QFrameworkError):
    """A file is damaged, foreign, or written by an incompatible version."""


class NonFiniteError(QFrameworkError):
    """Training met NaN or infinity in a layer that is watched."""
