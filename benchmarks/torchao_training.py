"""torchao's training in INT8 and FP8, which the benchmarks of training compare with."""

from __future__ import annotations

from torch import nn
from torch.nn import functional as F

from benchmarks.harness import UnavailableError


def quantize_for_training(model: nn.Module) -> nn.Module:
    """Have torchao multiply in INT8, in all three products of every linear, a scale a row; in place.

    torchao 0.18 files its linear under ATen's operators, where a call of ``F.linear`` is not looked up, and so
    multiplies in 16 bit without a word; filed rightly, it does what it promises. With ``module_swap`` instead, Dynamo
    refuses to compile. Raises UnavailableError where torchao has none.
    """
    try:
        from torchao.prototype.quantized_training import Int8MixedPrecisionTrainingConfig
        from torchao.prototype.quantized_training.int8_mixed_precision import Int8MixedPrecisionTrainingLinearWeight
        from torchao.quantization import quantize_
    except ImportError as error:
        raise UnavailableError(f"torchao has no INT8 training: {error}") from error
    weight = Int8MixedPrecisionTrainingLinearWeight
    if F.linear not in weight._TORCH_FN_TABLE[weight]:
        weight.implements_torch_function(F.linear)(weight._ATEN_OP_TABLE[weight][F.linear])
    quantize_(model, Int8MixedPrecisionTrainingConfig())
    return model


def quantize_for_fp8_training(model: nn.Module) -> nn.Module:
    """Have torchao multiply in FP8 by cuBLAS, a scale a tensor, gradients in E5M2 and all else in E4M3; in place.

    Raises UnavailableError where torchao has none.
    """
    try:
        from torchao.float8 import convert_to_float8_training
    except ImportError as error:
        raise UnavailableError(f"torchao has no FP8 training: {error}") from error
    return convert_to_float8_training(model)
