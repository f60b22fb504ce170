"""The errors qframework raises on purpose.

A message reads ``{operator or layer}: {argument} must {be|have ...}, got {value seen}``, followed by what to do where
that helps.
"""

import re
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


def export_error(what: str, error: Exception, dynamic_shapes: object, advice: str = "") -> QFrameworkError:
    """The error of ``what`` for an error of ``torch.export``, with what to do; ``advice`` is one sentence more."""
    unknown = re.match(r"Found <class '(?:.*\.)?(\w+)'> in output, which is not a known type", str(error).strip())
    if unknown:
        text = f"a model that returns a {unknown[1]}"
        todo = "Make it return tensors only: for a cache of transformers, set model.config.use_cache = False"
    elif "data-dependent" in str(error):
        line = re.search(r'raised this error:\s+File "([^<"]+", line \d+, in \w+)', str(error))
        where = f' in "{line[1]}' if line else ""
        text = f"a model whose code depends on the values of its tensors{where}: {first_line(error)}"
        todo = ""
    else:
        text = f"the model with these example_inputs and dynamic_shapes: {first_line(error)}"
        todo = "" if dynamic_shapes is None else "Pass dynamic_shapes=None for fixed shapes"
    said = f"{what}: torch.export cannot capture {text}".rstrip(".")
    return QFrameworkError(". ".join(filter(None, (said, todo, advice))))


def first_line(error: BaseException) -> str:
    """The kind of an error and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:1000]}"
