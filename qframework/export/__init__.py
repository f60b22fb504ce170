"""Export quantized models out of PyTorch: ONNX files with QuantizeLinear and DequantizeLinear (QDQ)."""

from qframework.export.onnx_export import fallbacks, to_onnx
from qframework.export.report import OnnxReport

__all__ = ["OnnxReport", "fallbacks", "to_onnx"]
