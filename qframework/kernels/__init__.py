"""Operators, each with a plain-torch reference, a Triton kernel for GPUs and a CPU implementation.

Import ``quantize``, ``dynamic_quantize`` and ``dequantize`` from their module, which shares its name with the first::

    from qframework.kernels.quantize import quantize
"""

import qframework.kernels.add_norm
import qframework.kernels.attention.backward
import qframework.kernels.attention.int8_gradient.int8_gradient
import qframework.kernels.attention.masked_attention
import qframework.kernels.attention.pipeline
import qframework.kernels.depthwise
import qframework.kernels.hadamard
import qframework.kernels.linear.gated
import qframework.kernels.norm
import qframework.kernels.packaged
import qframework.kernels.quantize
import qframework.kernels.transpose  # noqa: F401  (registers operators)
from qframework.kernels.attention.decode.cache_append import cache_append
from qframework.kernels.attention.decode.decode import decode_attention
from qframework.kernels.attention.mixed import mixed_attention
from qframework.kernels.attention.quantize_qk import attention_quantize
from qframework.kernels.attention.quantize_v import value_quantize
from qframework.kernels.attention.quantized_attention import quantized_attention
from qframework.kernels.attention.rope import rope_mean, rope_quantize
from qframework.kernels.blocks.activation import block_activation, block_activation_backward
from qframework.kernels.blocks.dropout import block_dropout
from qframework.kernels.blocks.elementwise import block_add, block_mul
from qframework.kernels.blocks.gated_activation import block_gated_activation, block_gated_activation_backward
from qframework.kernels.blocks.linear.block_linear import block_linear, block_linear_sum
from qframework.kernels.blocks.norm import block_layer_norm, block_rms_norm
from qframework.kernels.blocks.norm_backward import block_layer_norm_backward, block_rms_norm_backward
from qframework.kernels.blocks.quantize import (
    block_dequantize,
    block_quantize,
    block_quantize_both,
)
from qframework.kernels.blocks.quantize_parts import block_quantize_parts
from qframework.kernels.blocks.sum_rows import block_sum_rows
from qframework.kernels.blocks.transpose_blocks import block_transpose, block_transpose_sum
from qframework.kernels.linear.cpu import cpu_implementation
from qframework.kernels.linear.grouped import int8_grouped_linear
from qframework.kernels.linear.int8_linear import int8_linear
from qframework.kernels.linear.quantize_weights import quantize_weights
from qframework.kernels.linear.zero_point_bias import zero_point_bias

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
    "block_linear_sum",
    "block_mul",
    "block_quantize",
    "block_quantize_both",
    "block_quantize_parts",
    "block_rms_norm",
    "block_rms_norm_backward",
    "block_sum_rows",
    "block_transpose",
    "block_transpose_sum",
    "cache_append",
    "cpu_implementation",
    "decode_attention",
    "int8_grouped_linear",
    "int8_linear",
    "mixed_attention",
    "quantize_weights",
    "quantized_attention",
    "rope_mean",
    "rope_quantize",
    "value_quantize",
    "zero_point_bias",
]
