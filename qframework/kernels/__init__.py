"""Operators, each with a plain-torch reference, a Triton kernel for GPUs and a CPU implementation."""

import qframework.kernels.sage_attention
import qframework.kernels.sage_attention_backward  # noqa: F401  both register operators
from qframework.kernels.attention_quantize import attention_quantize
from qframework.kernels.block_activation import block_activation, block_activation_backward
from qframework.kernels.block_dropout import block_dropout
from qframework.kernels.block_elementwise import block_add, block_mul
from qframework.kernels.block_gated_activation import block_gated_activation, block_gated_activation_backward
from qframework.kernels.block_linear import block_linear
from qframework.kernels.block_norm import block_layer_norm, block_rms_norm
from qframework.kernels.block_norm_backward import block_layer_norm_backward, block_rms_norm_backward
from qframework.kernels.block_quantize import block_dequantize, block_quantize, block_quantize_both, block_transpose
from qframework.kernels.block_sum_rows import block_sum_rows
from qframework.kernels.int8_linear import int8_linear
from qframework.kernels.int8_linear_cpu import cpu_implementation
from qframework.kernels.mixed_attention import mixed_attention
from qframework.kernels.quantize import dequantize, dynamic_quantize, quantize
from qframework.kernels.quantize_weights import quantize_weights
from qframework.kernels.quantized_attention import quantized_attention
from qframework.kernels.rope_quantize import rope_mean, rope_quantize
from qframework.kernels.value_quantize import value_quantize

__all__ = [
    "attention_quantize",
    "block_activation",
    "block_activation_backward",
    "block_add",
    "block_dequantize",
    "block_dropout",
    "block_gated_activation",
    "block_gated_activation_backward",
    "block_layer_norm",
    "block_layer_norm_backward",
    "block_linear",
    "block_mul",
    "block_quantize",
    "block_quantize_both",
    "block_rms_norm",
    "block_rms_norm_backward",
    "block_sum_rows",
    "block_transpose",
    "cpu_implementation",
    "dequantize",
    "dynamic_quantize",
    "int8_linear",
    "mixed_attention",
    "quantize",
    "quantize_weights",
    "quantized_attention",
    "rope_mean",
    "rope_quantize",
    "value_quantize",
]
