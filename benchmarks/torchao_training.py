"""torchao's INT8 and FP8 training, the peers in the benchmarks of training."""

from __future__ import annotations

from torch import nn
from torch.nn import functional as F

from benchmarks.harness import UnavailableError


def quantize_for_training(model: nn.Module) -> nn.Module:
    """Convert all three products of every linear to torchao's INT8 with a scale per row, in place.

    torchao 0.18 registers its linear for ATen's operators but not for ``F.linear``, so it silently multiplies in 16
    bit; this function registers it for ``F.linear``. Dynamo cannot compile the alternative ``module_swap``. Raises
    UnavailableError if torchao has no INT8 training.
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
    """Convert to torchao's FP8 products by cuBLAS, with a scale per tensor, gradients in E5M2 and the rest in E4M3.

    Works in place. Raises UnavailableError if torchao has no FP8 training.
    """
    try:
        from torchao.float8 import convert_to_float8_training
    except ImportError as error:
        raise UnavailableError(f"torchao has no FP8 training: {error}") from error
    return convert_to_float8_training(model)
