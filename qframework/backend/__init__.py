"""The torch.compile backend ``"qframework"``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qframework.backend.compile import fallbacks
from qframework.backend.explanation import explain
from qframework.backend.report import LayerReport, Report

if TYPE_CHECKING:
    from qframework.backend.compile import qframework_backend

__all__ = ["LayerReport", "Report", "explain", "fallbacks", "qframework_backend"]


def __getattr__(name: str) -> Any:
    """``qframework_backend``, which ``torch.compile`` asks for when it is called.

    With it comes Inductor, as it does for PyTorch's own backend: the processes that compile its kernels take seconds to
    start, and do so while Dynamo traces the first call instead of after it.
    """
    if name != "qframework_backend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it offers {', '.join(__all__)}")
    import qframework.compat.inductor  # noqa: F401
    from qframework.backend.compile import qframework_backend

    return qframework_backend
