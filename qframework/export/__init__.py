"""Export quantized models out of PyTorch: ONNX files in QDQ form, and packages compiled ahead of time (AOTInductor)."""

from qframework.export.onnx_export import fallbacks, to_onnx
from qframework.export.package import load_package, to_package
from qframework.export.report import OnnxReport

__all__ = ["OnnxReport", "fallbacks", "load_package", "to_onnx", "to_package"]
