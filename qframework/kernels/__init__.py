"""Operators, each with a plain-torch reference, a Triton kernel for GPUs and a CPU implementation."""

from qframework.kernels.int8_linear import int8_linear
from qframework.kernels.int8_linear_cpu import cpu_implementation
from qframework.kernels.quantize import dequantize, dynamic_quantize, quantize

__all__ = ["cpu_implementation", "dequantize", "dynamic_quantize", "int8_linear", "quantize"]
