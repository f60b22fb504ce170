"""The torch.compile backend ``"qframework"``."""

from qframework.backend.compile import fallbacks, qframework_backend
from qframework.backend.explain import explain
from qframework.backend.report import LayerReport, Report

__all__ = ["LayerReport", "Report", "explain", "fallbacks", "qframework_backend"]
