"""qframework: quantized transformers for PyTorch, in PyTorch's own workflow.

Importing registers the operators ``torch.ops.qframework.*``, and with the libraries transformers and diffusers once
they are imported; the rest loads at first use.
"""

from __future__ import annotations

import importlib
import sys
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from qframework import import_hook
from qframework.compat import diffusers_modules, transformers_modules

if TYPE_CHECKING:
    from qframework import (
        attention,
        backend,
        conversion,
        errors,
        evaluation,
        export,
        kernels,
        numerics,
        quantizer,
        serialization,
        training,
        tuning,
    )
    from qframework.attention import calibrate_attention, sage_attention, sage_attention_varlen, use_sage_attention
    from qframework.backend.explanation import explain
    from qframework.conversion import quantize, quantize_
    from qframework.integrations.configuration import QFrameworkConfig as QFrameworkConfig
    from qframework.quantizer.calibration import calibrate
    from qframework.serialization import load, save
    from qframework.tuning import Plan, sensitivity, tune

__version__ = "0.1.0"
__all__ = [
    "Plan",
    "attention",
    "backend",
    "calibrate",
    "calibrate_attention",
    "conversion",
    "errors",
    "evaluation",
    "explain",
    "export",
    "kernels",
    "load",
    "numerics",
    "quantize",
    "quantize_",
    "quantizer",
    "sage_attention",
    "sage_attention_varlen",
    "save",
    "sensitivity",
    "serialization",
    "training",
    "tune",
    "tuning",
    "use_sage_attention",
]

_HOME_OF = {
    "Plan": "qframework.tuning",
    "QFrameworkConfig": "qframework.integrations.configuration",  # not in __all__: it needs transformers or diffusers
    "calibrate": "qframework.quantizer",
    "calibrate_attention": "qframework.attention",
    "explain": "qframework.backend",
    "load": "qframework.serialization",
    "quantize": "qframework.conversion",
    "quantize_": "qframework.conversion",
    "sage_attention": "qframework.attention",
    "sage_attention_varlen": "qframework.attention",
    "save": "qframework.serialization",
    "sensitivity": "qframework.tuning",
    "tune": "qframework.tuning",
    "use_sage_attention": "qframework.attention",
}


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        return getattr(importlib.import_module(_HOME_OF[name]), name)
    if name in __all__:
        return importlib.import_module(f"qframework.{name}")
    raise AttributeError(f"module 'qframework' has no attribute {name!r}; it offers {', '.join(__all__)}")


def _is_command() -> bool:
    """Whether this is the process of the command line, which shows its help without importing torch."""
    program = "".join(getattr(sys, "argv", [])[:1])
    if program == "-m":  # until Python has found the module, which may be another package that imports this one
        return ("-m", "qframework") in zip(sys.orig_argv, sys.orig_argv[1:], strict=False)
    return PurePath(program).stem == "qframework"


def _register_operators() -> None:
    importlib.import_module("qframework.kernels")


def _register_with(library: str) -> None:
    importlib.import_module("qframework.integrations.registration").register_with(library)


if _is_command():
    import_hook.when_imported("torch", _register_operators)
else:
    _register_operators()
import_hook.watch(transformers_modules.SAM, transformers_modules.SAM_HQ)
import_hook.when_imported(transformers_modules.MODELS, partial(_register_with, "transformers"))
import_hook.when_imported(diffusers_modules.QUANTIZERS, partial(_register_with, "diffusers"))
import_hook.when_imported(diffusers_modules.ATTENTION, partial(_register_with, "diffusers_attention"))
