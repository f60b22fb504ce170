"""The torch.compile backend ``"qframework"``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from qframework.backend.compile import fallbacks
from qframework.backend.explanation import explain
from qframework.backend.report import LayerReport, Report

if TYPE_CHECKING:
    from qframework.backend.compile import qframework_backend

__all__ = ["LayerReport", "Report", "explain", "fallbacks", "qframework_backend"]


def __getattr__(name: str) -> Any:
    """``qframework_backend``, which ``torch.compile`` looks up when it is called.

    Imports Inductor at the same time. Its compile processes take seconds to start, and so they start while Dynamo
    traces the first call, and Triton's driver does too, where the model is on a GPU by now.
    """
    if name != "qframework_backend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers {', '.join(__all__)}")
    from qframework.backend.compile import qframework_backend, watch_skipped_code
    from qframework.backend.warm_up import prepare_triton
    from qframework.compat.inductor import start_processes

    if torch.cuda.is_initialized():
        start_processes()
    prepare_triton()
    watch_skipped_code()
    return qframework_backend
