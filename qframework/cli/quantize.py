"""``qframework quantize``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from qframework.cli import command
from qframework.cli.output import print_result
from qframework.cli.targets import InDtype, check_model_and_data, device_and_dtype, first_images, recipe_named
from qframework.errors import QFrameworkError
from qframework.outputs import check_output_file

if TYPE_CHECKING:
    from torch import Tensor, nn

    from qframework.conversion.exported import FloatAndConverted
    from qframework.quantizer import AttentionConfig, LinearConfig
    from qframework.tuning.plan import Plan

EXAMPLES = """\
[bold]Examples[/]

qframework quantize digits --output digits.pt2

qframework quantize vit_base_patch16_224 --pretrained --data imagenet/train --batches 16 --output vit.pt2

qframework quantize vit_base_patch16_224 --checkpoint vit.safetensors --data imagenet/train --dynamic

qframework quantize vit_base_patch16_224 --pretrained --data imagenet/train --attention static --output vit.pt2

qframework quantize vit_base_patch16_224 --pretrained --data imagenet/train --config vit_tuned.json
"""


def quantize(
    context: typer.Context,
    model: command.Model,
    data: command.Data = "digits",
    checkpoint: command.Checkpoint = None,
    pretrained: command.Pretrained = False,
    static: Annotated[
        bool, typer.Option("--static/--dynamic", help="Activation scales from calibration, or computed at run time.")
    ] = True,
    observer: command.Observer = "minmax",
    activation: Annotated[
        Literal["per_tensor", "per_token"] | None,
        typer.Option(help="Granularity of activations; default: per_tensor if static, per_token if dynamic."),
    ] = None,
    weight: Annotated[
        Literal["per_channel", "per_tensor"], typer.Option(help="Granularity of weights.")
    ] = "per_channel",
    attention: Annotated[
        str, typer.Option(help="off, static (calibrated with --observer), auto, or a variant such as sage_b.")
    ] = "off",
    recipe: command.RecipeName = "none",
    config: Annotated[
        Path | None, typer.Option(help="A file of [bold]qframework tune[/], instead of the options above.")
    ] = None,
    batches: command.Batches = 8,
    batch_size: command.BatchSize = 32,
    output: Annotated[Path | None, typer.Option(help="File to write; default: MODEL_int8.pt2.")] = None,
    device: command.Device = "auto",
    dtype: command.DType = "auto",
    as_json: command.Json = False,
) -> None:
    """Quantize the linear layers of a classifier, and with --attention its attention, and save it."""
    output = output or Path(f"{model}_int8.pt2")
    check_output_file(output, "--output")
    on, dtype = device_and_dtype(device, dtype)
    if config is not None:
        _refuse_beside_config(context)
    configs = _configs(static, observer, activation, weight, attention)
    check_model_and_data(model, checkpoint, pretrained, data, calibration=True)

    # torchao and what needs it, which takes seconds: after the checks
    from qframework.conversion.exported import BATCH_IS_DYNAMIC, export_model, quantize_copy
    from qframework.evaluation.checkpoint import state_digest
    from qframework.evaluation.models import images_for, load_classifier
    from qframework.serialization import save
    from qframework.tuning.plan import Plan

    chosen = _plan(configs, recipe) if config is None else Plan.load(config)
    classifier = load_classifier(model, checkpoint, pretrained=pretrained)
    digest = state_digest(classifier.model.state_dict())
    loader = InDtype(images_for(classifier.describe(), data, batch_size=batch_size, calibration=True), dtype)
    images = first_images(loader, on)
    float_model = classifier.model.to(images.device, images.dtype)
    quantized = quantize_copy(
        export_model(float_model, images),
        chosen.quantizer,
        loader if chosen.needs_calibration else None,
        recipe=chosen.recipe,
        batches=batches,
        show_progress=True,
    )
    loader.report_damaged()
    kept = {**classifier.describe(), "dtype": dtype, "weights_sha256": digest, **chosen.to_dict()}
    save(quantized.converted, output, (images,), dynamic_shapes=BATCH_IS_DYNAMIC, config=kept)
    result = {"model": model, "output": str(output), "device": str(on), "dtype": dtype}
    print_result(f"{model}, quantized", result | _measured(float_model, quantized, images), as_json)


def _measured(float_model: nn.Module, quantized: FloatAndConverted, images: Tensor) -> dict[str, Any]:
    """How many layers run in INT8, bytes of weights, and the layer with the largest error."""
    from qframework.backend import explain
    from qframework.evaluation import layer_sqnr, weight_bytes

    report = explain(quantized.converted, (images,))
    sqnr = layer_sqnr(*quantized, images)
    worst = min(sqnr, key=sqnr.__getitem__)
    return {
        "lowered_linears": report.lowered,
        "linears": report.total,
        "lowered_attentions": report.attention_lowered,
        "attentions": report.attention_total,
        "weight_bytes_fp32": weight_bytes(float_model),
        "weight_bytes": weight_bytes(quantized.converted),
        "worst_layer": worst,
        "worst_sqnr_db": sqnr[worst] if math.isfinite(sqnr[worst]) else None,
    }


_INSTEAD_OF_CONFIG = ("static", "observer", "activation", "weight", "attention", "recipe")


def _refuse_beside_config(context: typer.Context) -> None:
    """Raise QFrameworkError if an option was given that --config replaces."""
    sources = {name: context.get_parameter_source(name) for name in _INSTEAD_OF_CONFIG}
    given = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    if given:
        names = ", ".join("--static/--dynamic" if name == "static" else f"--{name}" for name in given)
        raise QFrameworkError(f"--config must be given without {names}, which it replaces")


def _plan(configs: list[LinearConfig | AttentionConfig], recipe: str) -> Plan:
    from qframework.quantizer import QFrameworkQuantizer
    from qframework.tuning.plan import Plan

    quantizer = QFrameworkQuantizer()
    for config in configs:
        quantizer.set_global(config)
    return Plan(quantizer, {}, recipe_named(recipe))


def _configs(
    static: bool, observer: str, activation: Any, weight: Any, attention: str
) -> list[LinearConfig | AttentionConfig]:
    linear = _linear_config(static, observer, activation, weight)
    return [linear] if attention == "off" else [linear, _attention_config(attention, observer)]


def _linear_config(static: bool, observer: str, activation: Any, weight: Any) -> LinearConfig:
    from qframework.quantizer import dynamic_int8, static_int8

    if static:
        return static_int8(activation=activation or "per_tensor", weight=weight, observer=observer)
    if observer != "minmax":
        raise QFrameworkError(
            f"--observer must be minmax with --dynamic, whose scales are computed at run time, got {observer}"
        )
    return dynamic_int8(activation=activation or "per_token", weight=weight)


def _attention_config(attention: str, observer: str) -> AttentionConfig:
    from qframework.quantizer import dynamic_attention, static_attention

    return static_attention(observer=observer) if attention == "static" else dynamic_attention(attention)
