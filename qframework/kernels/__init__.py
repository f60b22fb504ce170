"""Operators, each with a plain-torch reference, a Triton kernel for GPUs and a CPU implementation."""

import qframework.kernels.sage_attention
import qframework.kernels.sage_attention_backward  # noqa: F401  both register operators
from qframework.kernels.attention_quantize import attention_quantize
from qframework.kernels.block_linear import block_linear
from qframework.kernels.block_quantize import block_dequantize, block_quantize, block_quantize_both, block_transpose
from qframework.kernels.int8_linear import int8_linear
from qframework.kernels.int8_linear_cpu import cpu_implementation
from qframework.kernels.mixed_attention import mixed_attention
from qframework.kernels.quantize import dequantize, dynamic_quantize, quantize
from qframework.kernels.quantized_attention import quantized_attention
from qframework.kernels.rope_quantize import rope_mean, rope_quantize
from qframework.kernels.value_quantize import value_quantize

__all__ = [
    "attention_quantize",
    "block_dequantize",
    "block_linear",
    "block_quantize",
    "block_quantize_both",
    "block_transpose",
    "cpu_implementation",
    "dequantize",
    "dynamic_quantize",
    "int8_linear",
    "mixed_attention",
    "quantize",
    "quantized_attention",
    "rope_mean",
    "rope_quantize",
    "value_quantize",
]
