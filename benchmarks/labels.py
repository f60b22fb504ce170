"""Names of providers for people, on plots and in tables; result files keep the short ones."""

from __future__ import annotations

import re

_HEADS = {
    "bf16": "BF16",
    "bf16_qframework": "BF16, backend qframework",
    "bf16_autocast_inductor": "BF16 autocast, compiled",
    "fp16": "FP16 eager",
    "fp16_compiled": "FP16 compiled",
    "fp16_max_autotune": "FP16 compiled, max-autotune",
    "fp32": "FP32 eager",
    "fp32_eager": "FP32 eager",
    "fp32_inductor": "FP32 compiled",
    "qframework_auto": "auto",
    "qframework_dynamic": "dynamic INT8",
    "qframework_float": "float linears",
    "qframework_gelu_int8_out": "static INT8, GELU, INT8 result",
    "qframework_int8_out": "static INT8, INT8 result",
    "qframework_mixed_static": "static INT8 in and out",
    "qframework_per_token": "static INT8, scales per token",
    "qframework_qattn": "QAttn dynamic",
    "qframework_residual": "static INT8, residual",
    "qframework_static": "static INT8",
    "qframework_unquantized": "16 bit",
    "scaled_mm_fp8": "FP8 (cuBLAS)",
    "scaled_mm_fp8_gelu_fp8": "FP8 (cuBLAS), bias, Inductor's GELU, FP8 result",
    "scaled_mm_fp8_residual": "FP8 (cuBLAS), bias, Inductor's residual",
    "sageattention": "SageAttention package",
    "tf32": "TF32 eager",
    "torch_bf16": "BF16 (cuBLAS)",
    "torch_cudnn": "cuDNN",
    "torch_efficient": "PyTorch memory-efficient",
    "torch_flash": "FlashAttention-2",
    "torch_fp16": "FP16 (cuBLAS)",
    "torch_int_mm": "torch._int_mm, no scales",
    "torch_math": "PyTorch math",
    "torchao_fp8_rowwise": "torchao FP8, scales per row",
    "torchao_fp8_tensorwise": "torchao FP8, scales per tensor",
    "torchao_int8_dynamic": "torchao dynamic INT8",
    "x86_inductor_dynamic": "X86InductorQuantizer, dynamic",
    "x86_inductor_static": "X86InductorQuantizer, static",
}
_BLOCKS = re.compile(r"qframework_(?:b|blocks_)?(\d+(?:x\d+)?)")
_ENDINGS = {
    "attention_off": "float attention",
    "bf16": "BF16",
    "bias": "bias",
    "compiled": "compiled",
    "eager": "eager",
    "float": "float weights",
    "frozen": "frozen weights",
    "graphs": "CUDA graphs",
    "int8_attention": "INT8 attention",
    "max_autotune": "max-autotune",
    "per_tensor": "scales per tensor",
    "precise": "exact sums",
    "rowwise": "scales per row",
    "sage": "SageAttention",
    "unfrozen": "not frozen",
}


def label(provider: str) -> str:
    """``"static INT8, CUDA graphs"`` for ``"qframework_static_graphs"``.

    A name that is not known keeps its own words, such as the variants of attention, which users type.
    """
    head, endings = provider, list[str]()
    while head not in _HEADS:
        ending = next((each for each in _ENDINGS if head.endswith(f"_{each}")), None)
        if ending is None:
            break
        head = head.removesuffix(f"_{ending}")
        endings.insert(0, _ENDINGS[ending])
    if found := _BLOCKS.fullmatch(head):
        return ", ".join([f"INT8 blocks of {found[1]}", *endings])
    return ", ".join([_HEADS.get(head, head.removeprefix("qframework_")), *endings])
