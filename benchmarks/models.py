"""The vision transformers of ``vit_cpu`` and ``vit_gpu``: models, inputs, quantization, and the check of outputs.

torchao, timm and qframework's quantizer are imported where they are used, since ``--help`` and the report need none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import WrongResultError, require_shape
from qframework.graph.routers import chooses
from qframework.graph.small_linears import why_too_small
from qframework.numerics import sqnr_db

SEED = 0
SMOKE_MODEL = "vit_tiny_patch16_224"
SMOKE_ARGUMENTS: dict[str, Any] = {"depth": 1, "img_size": 32, "num_classes": 10}
# The minimum SQNR in dB of an image's logits; below it, a provider is wrong. Rounding once leaves 6 dB per bit: 144 dB
# for 24 bits, 66 dB for 11 and 48 dB for 8. A whole model leaves far less, but more than these values. Logits of zeros,
# or of another image, have 0 dB or less.
SQNR_FLOOR_DB = {"float32": 80.0, "tf32": 30.0, "float16": 30.0, "bfloat16": 20.0, "int8": 12.0, "fp8": 10.0}

# The maximum SQNR of a quantized result; above it, nothing was quantized. Rounding once to 8 bits leaves about 48 dB,
# to E4M3's four about 32.
SQNR_CEILING_DB = {"int8": 60.0, "fp8": 45.0}

Forward = Callable[..., Tensor]
Inputs = Tensor | tuple[Tensor, ...]


def build_model(name: str, smoke: bool = False, **arguments: Any) -> nn.Module:
    """timm's ``name`` in eval mode with seeded random weights; for a smoke run, one block on 32 x 32 images.

    ``arguments`` go to timm and override those of the smoke run.
    """
    import timm

    torch.manual_seed(SEED)
    model = timm.create_model(name, **{**(SMOKE_ARGUMENTS if smoke else {}), **arguments})
    return model.eval().requires_grad_(False)


def random_images(model: Any, batch: int) -> Tensor:
    """Seeded normal images ``(batch, 3, H, W)`` fp32 of ``model``'s size; larger batches start with smaller ones."""
    height, width = model.patch_embed.img_size
    generator = torch.Generator().manual_seed(SEED)
    return torch.stack([torch.randn(3, height, width, generator=generator) for _ in range(batch)])


def quantize_qframework(model: nn.Module, inputs: Inputs, preset: str, **arguments: Any) -> nn.Module:
    """Export, prepare, calibrate on ``inputs`` and convert with the preset ``static_int8`` or ``dynamic_int8``."""
    from qframework import quantizer

    configuration = getattr(quantizer, preset)(**arguments)
    return _quantize_pt2e(model, inputs, quantizer.QFrameworkQuantizer().set_global(configuration))


def quantize_with_attention(model: nn.Module, inputs: Inputs) -> nn.Module:
    """The same for linears and attention in static INT8."""
    from qframework.quantizer import QFrameworkQuantizer, QuantizationConfig, static_attention, static_int8

    configuration = QuantizationConfig(linear=static_int8(), attention=static_attention())
    return _quantize_pt2e(model, inputs, QFrameworkQuantizer().set_global(configuration))


def quantize_x86(model: nn.Module, inputs: Inputs, *, is_dynamic: bool) -> nn.Module:
    """The same with torchao's X86InductorQuantizer and its default configuration, which quantizes convolutions as well.

    It finds layers by ``source_fn_stack``, which torch 2.11 records only in a strict export; without it, it silently
    quantizes nothing.
    """
    from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as x86

    configuration = x86.get_default_x86_inductor_quantization_config(is_dynamic=is_dynamic)
    return _quantize_pt2e(model, inputs, x86.X86InductorQuantizer().set_global(configuration), strict=True)


def _quantize_pt2e(model: nn.Module, inputs: Inputs, quantizer: Any, strict: bool = False) -> nn.Module:
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    from qframework.quantizer import calibrate

    arguments = (inputs,) if isinstance(inputs, Tensor) else inputs
    prepared = prepare_pt2e(torch.export.export(model, arguments, strict=strict).module(), quantizer)
    calibrate(prepared, [arguments])
    converted = convert_pt2e(prepared)
    require_quantized(converted)
    return converted


def require_quantized(converted: Any) -> None:
    """Raise WrongResultError unless every linear of a converted graph has a dequantized weight.

    Small ones and those that choose, such as routers of experts, may stay in float.
    """
    linears = [
        node for node in converted.graph.nodes if node.target is torch.ops.aten.linear.default and not chooses(node)
    ]
    linears = [node for node in linears if why_too_small(node.args[0], node.args[1], dynamic=True) is None]
    floats = [node.name for node in linears if "dequantize" not in str(node.args[1].target)]
    if floats or not linears:
        raise WrongResultError(
            f"all linears must be quantized, got {len(floats)} of {len(linears)} in float: {', '.join(floats[:5])}"
        )


def accuracy(output: Tensor, reference: Tensor, precision: str) -> dict[str, Any]:
    """The ``error``, ``sqnr_db`` and ``worst_sqnr_db`` of logits ``(batch, classes)`` against FP32's.

    Raises WrongResultError if an image is below SQNR_FLOOR_DB[precision] or holds NaN, or if the batch exceeds
    SQNR_CEILING_DB.
    """
    require_shape(output, reference)
    output, reference = output.double().cpu(), reference.double().cpu()
    error = float((output - reference).norm() / reference.norm())
    worst = min(sqnr_db(expected, row) for row, expected in zip(output, reference, strict=True))
    floor = SQNR_FLOOR_DB[precision]
    if not worst >= floor:  # also NaN
        raise WrongResultError(f"SQNR of the worst image must be at least {floor:g} dB, got {worst:.1f} dB", error)
    overall, ceiling = sqnr_db(reference, output), SQNR_CEILING_DB.get(precision, float("inf"))
    if overall > ceiling:
        message = f"too exact for {precision}: SQNR must be at most {ceiling:g} dB, got {overall:.1f} dB"
        raise WrongResultError(message, error)
    return {"error": error, "sqnr_db": overall, "worst_sqnr_db": worst}
