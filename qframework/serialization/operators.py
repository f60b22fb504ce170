"""The operators that a saved program may call. Each is looked up only after its name was checked."""

from __future__ import annotations

import importlib
import re
from typing import Any

import torch

from qframework.compat.operators import OpOverload, on_tensors, schema
from qframework.serialization.grammar import refuse

# The module that registers the operators of a namespace.
_NAMESPACES = {
    "aten": None,
    "qframework": "qframework.kernels",
    "quantized_decomposed": "qframework.compat.quantized_decomposed",
}
_OPERATOR = re.compile(rf"torch\.ops\.({'|'.join(_NAMESPACES)})\.(\w+)\.(\w+)", re.ASCII)
# Arithmetic on sizes.
PYTHON_OPERATORS = {
    *(f"_operator.{name}" for name in ("eq", "ne", "le", "ge", "lt", "gt", "neg", "pos", "and_", "or_")),
    *(f"_operator.{name}" for name in ("add", "sub", "mul", "floordiv", "truediv", "mod", "pow")),
    *(f"torch.{name}" for name in ("sym_not", "sym_int", "sym_float", "sym_ite", "sym_max", "sym_min")),
    *("torch.sym_sqrt", "torch._sym_sqrt", "math.trunc"),
}
# torch.no_grad and torch.autocast around a part of the graph.
_SCOPES = {"torch.ops.higher_order.wrap_with_set_grad_enabled", "torch.ops.higher_order.wrap_with_autocast"}
# ATen operators whose names start with _ are private, and some read memory unchecked. Export emits these.
_PRIVATE = {
    *("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "_assert_async", "_assert_scalar", "_assert_tensor_metadata"),
    *("_cdist_forward", "_conj", "_convolution", "_fft_c2c", "_fft_c2r", "_fft_r2c", "_functional_assert_async"),
    *("_functional_assert_scalar", "_functional_sym_constrain_range", "_functional_sym_constrain_range_for_size"),
    *("_fused_rms_norm", "_int_mm", "_is_all_true", "_is_any_true", "_local_scalar_dense", "_log_softmax"),
    *("_native_batch_norm_legit", "_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training"),
    *("_native_multi_head_attention", "_pad_circular", "_pad_enum", "_pdist_forward", "_prelu_kernel", "_reshape_copy"),
    *("_safe_softmax", "_scaled_mm", "_shape_as_tensor", "_softmax", "_stack", "_to_copy", "_trilinear"),
    *("_unsafe_view", "_weight_int8pack_mm", "_weight_norm", "_weight_norm_interface"),
    *("_scaled_dot_product_attention_math", "_scaled_dot_product_cudnn_attention"),
    *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention"),
    *("_scaled_dot_product_flash_attention_for_cpu", "_transformer_encoder_layer_fwd"),
    *("_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d"),
    "_upsample_nearest_exact3d",
    *(f"__{way}{name}__" for way in ("", "i") for name in ("and", "or", "xor", "lshift", "rshift")),
}
# String arguments of ATen that take one of a few words. Others name files: from_file(filename).
_STRING_ARGUMENTS = {
    *("approximate", "assert_msg", "equation", "indexing", "interpolation", "mode", "norm", "ord", "p", "pad_mode"),
    *("padding", "padding_side", "reduce", "rounding_mode", "side", "UPLO", "driver"),
}


def TARGET(value: Any, where: str) -> str:
    """The name of an operator that a program may call; its library is imported."""
    if not isinstance(value, str) or not (value in PYTHON_OPERATORS or value in _SCOPES or _is_allowed(value)):
        refuse(value, where, f"an operator of {', '.join(_NAMESPACES)} that touches only tensors")
    return value


def _is_allowed(target: str) -> bool:
    parts = _OPERATOR.fullmatch(target)
    if parts is None:
        return False
    namespace, name, overload = parts.groups()
    if module := _NAMESPACES[namespace]:
        importlib.import_module(module)
    operator = getattr(getattr(getattr(torch.ops, namespace), name, None), overload, None)
    if not isinstance(operator, OpOverload) or str(operator) != f"{namespace}.{name}.{overload}":
        return False
    return namespace != "aten" or _is_harmless(name, operator)


def _is_harmless(name: str, operator: OpOverload) -> bool:
    # TorchScript also registers Python's builtins, and save, under aten.
    computes = on_tensors(operator.name())
    public = not name.startswith("_") or name in _PRIVATE
    strings = {argument.name for argument in schema(operator).arguments if "str" in str(argument.type)}
    return computes and public and strings <= _STRING_ARGUMENTS
