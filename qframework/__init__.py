"""qframework: quantized transformers for PyTorch, in PyTorch's own workflow.

Importing registers the operators ``torch.ops.qframework.*`` and does nothing else; the rest loads at first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from qframework import kernels

if TYPE_CHECKING:
    from qframework import backend, evaluation, quantizer
    from qframework.backend.explain import explain
    from qframework.quantizer.calibrate import calibrate
    from qframework.serialization import load, save

__version__ = "0.1.0"
__all__ = ["backend", "calibrate", "evaluation", "explain", "kernels", "load", "quantizer", "save"]

_HOME_OF = {
    "calibrate": "qframework.quantizer",
    "explain": "qframework.backend",
    "load": "qframework.serialization",
    "save": "qframework.serialization",
}


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        return getattr(importlib.import_module(_HOME_OF[name]), name)
    if name in __all__:
        return importlib.import_module(f"qframework.{name}")
    raise AttributeError(f"module 'qframework' has no attribute {name!r}; it offers {', '.join(__all__)}")
