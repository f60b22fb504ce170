"""The command line: ``qframework quantize | evaluate | benchmark | doctor``.

Exit codes: 0 success, 1 a check failed, 2 bad usage or bad input, said in one line on standard error. Results go to
standard output, as a table or with ``--json`` as JSON; progress goes to standard error.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup

from qframework import __version__
from qframework.errors import QFrameworkError

if TYPE_CHECKING:
    from qframework.quantizer import AttentionConfig, LinearConfig

CHECK_FAILED, BAD_INPUT = 1, 2
_state = {"debug": False}


class _Commands(TyperGroup):
    """Turns what a user can mend into one line and exit code 2; anything else is a bug and keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (QFrameworkError, OSError, ModuleNotFoundError) as error:
            if _state["debug"]:
                raise
            # No markup and no wrapping: the message may hold brackets and should stay one line for grep.
            Console(stderr=True, markup=False, highlight=False, soft_wrap=True).print(f"qframework: {_one_line(error)}")
            raise typer.Exit(BAD_INPUT) from error


app = typer.Typer(
    cls=_Commands,
    name="qframework",
    help="Quantized transformers for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

Model = Annotated[str, typer.Argument(help="A timm model, or [bold]digits[/]: the ViT of handwritten digits.")]
Target = Annotated[str, typer.Argument(help="A file of [bold]qframework quantize[/], a timm model, or digits.")]
Checkpoint = Annotated[
    Path | None, typer.Option(help="Weights of the timm model; for digits where the trained model is kept.")
]
Pretrained = Annotated[bool, typer.Option("--pretrained", help="Download timm's weights.")]
Data = Annotated[str, typer.Option(help="A folder with one folder of images per class, or digits.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")]
BatchSize = Annotated[int, typer.Option(min=2, help="Images in a batch.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"qframework {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of every error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    _state["debug"] = debug
    # torchao 0.18 says at import that PyTorch 2.15 deprecates something it does; users cannot mend that.
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)


@app.command(
    epilog="""\
[bold]Examples[/]

qframework quantize digits --output digits.pt2

qframework quantize vit_base_patch16_224 --pretrained --data imagenet/train --batches 16 --output vit.pt2

qframework quantize vit_base_patch16_224 --checkpoint vit.safetensors --data imagenet/train --dynamic

qframework quantize vit_base_patch16_224 --pretrained --data imagenet/train --attention static --output vit.pt2
"""
)
def quantize(
    model: Model,
    data: Data = "digits",
    checkpoint: Checkpoint = None,
    pretrained: Pretrained = False,
    static: Annotated[
        bool, typer.Option("--static/--dynamic", help="Activation scales: calibrated or computed.")
    ] = True,
    observer: Annotated[
        str, typer.Option(help="Static only: minmax, moving_average, percentile, mse or entropy.")
    ] = "minmax",
    activation: Annotated[
        Literal["per_tensor", "per_token"] | None,
        typer.Option(help="Granularity of activations; per_tensor if static, per_token if dynamic."),
    ] = None,
    weight: Annotated[
        Literal["per_channel", "per_tensor"], typer.Option(help="Granularity of weights.")
    ] = "per_channel",
    attention: Annotated[
        str, typer.Option(help="off, static (calibrated, with the observer of --observer), auto, or a variant: sage_b.")
    ] = "off",
    batches: Annotated[int, typer.Option(min=1, help="Batches to calibrate with.")] = 8,
    batch_size: BatchSize = 32,
    output: Annotated[Path | None, typer.Option(help="File to write; MODEL_int8.pt2 if not given.")] = None,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Quantize the linear layers of a classifier, and its attention where --attention says so, and save it."""
    from qframework.backend import explain
    from qframework.evaluation import layer_sqnr, quantize_model, weight_bytes
    from qframework.evaluation.models import images_for, load_classifier
    from qframework.evaluation.pt2e import BATCH_IS_DYNAMIC
    from qframework.quantizer import QFrameworkQuantizer
    from qframework.serialization import save

    quantizer = QFrameworkQuantizer().set_global(_linear_config(static, observer, activation, weight))
    if attention != "off":
        quantizer.set_global(_attention_config(attention, observer))
    classifier = load_classifier(model, checkpoint, pretrained=pretrained)
    _refuse_random_weights(model, checkpoint, pretrained)
    loader = images_for(classifier.describe(), data, batch_size=batch_size, calibration=True)
    images = _at_least_two(next(iter(loader))[0].to(_device(device)))
    float_model = classifier.model.to(images.device)
    calibration = loader if static or attention == "static" else None
    quantized = quantize_model(float_model, images, quantizer, calibration, batches=batches, show_progress=True)
    output = output or Path(f"{model}_int8.pt2")
    kept = {**classifier.describe(), "quantizer": quantizer.to_dict()}
    save(quantized.converted, output, (images,), dynamic_shapes=BATCH_IS_DYNAMIC, config=kept)
    report = explain(quantized.converted, (images,))
    sqnr = layer_sqnr(*quantized, images)
    worst = min(sqnr, key=sqnr.__getitem__)
    result = {
        "model": model,
        "output": str(output),
        "lowered_linears": report.lowered,
        "linears": report.total,
        "lowered_attentions": report.attention_lowered,
        "attentions": report.attention_total,
        "weight_bytes_fp32": weight_bytes(float_model),
        "weight_bytes": weight_bytes(quantized.converted),
        "worst_layer": worst,
        "worst_sqnr_db": sqnr[worst],
    }
    _print_result(f"{model}, quantized", result, as_json)


@app.command(
    epilog="""\
[bold]Examples[/]

qframework evaluate digits.pt2

qframework evaluate vit.pt2 --data imagenet/val --min-top1 80

qframework evaluate vit_base_patch16_224 --pretrained --data imagenet/val
"""
)
def evaluate(
    target: Target,
    data: Data = "digits",
    checkpoint: Checkpoint = None,
    pretrained: Pretrained = False,
    batch_size: BatchSize = 128,
    eager: Annotated[
        bool, typer.Option("--eager", help="Do not compile; a saved model then computes in float.")
    ] = False,
    min_top1: Annotated[float, typer.Option(min=0, max=100, help="Exit with 1 when top-1 is below.")] = 0.0,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Measure top-1 of a saved or a float model."""
    from qframework.evaluation import top1
    from qframework.evaluation.models import images_for

    on = _device(device)
    if not _is_file(target):
        _refuse_random_weights(target, checkpoint, pretrained)
    module, description = _open(target, checkpoint, pretrained)
    loader = images_for(description, data, batch_size=batch_size)
    module = module.to(on)
    accuracy = top1(module if eager else _compiled(module), loader, device=on, show_progress=True)
    _print_result(f"{target} on {data}", {"target": target, "data": data, "top1": accuracy}, as_json)
    if accuracy < min_top1:
        raise _failed_check(f"top-1 {accuracy:.2f} % is below {min_top1} %")


@app.command(
    epilog="""\
[bold]Examples[/]

qframework benchmark vit_base_patch16_224 --batch-size 8

qframework benchmark vit.pt2 --device cuda --batch-size 256 --json
"""
)
def benchmark(
    target: Target,
    checkpoint: Checkpoint = None,
    batch_size: BatchSize = 8,
    repeats: Annotated[int, typer.Option(min=1, help="Timed calls, of which the median counts.")] = 20,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Measure images per second on random images: float eager, float compiled, static and dynamic INT8.

    A saved model is measured compiled. Without --checkpoint a timm model has random weights, which are as fast.
    """
    import torch
    from rich.progress import track

    from qframework.evaluation import throughput

    candidates = _candidates(target, checkpoint, batch_size, torch.device(_device(device)))
    rows = []
    for name, (module, images) in track(candidates.items(), "Measuring", console=Console(stderr=True)):
        speed = throughput(module, images, repeats=repeats)
        rows.append(
            {"configuration": name, "images_per_second": speed, "milliseconds_per_batch": 1e3 * batch_size / speed}
        )
    _print_rows(f"{target}, batch {batch_size}, {device}", rows, as_json)


@app.command(
    epilog="""\
[bold]Examples[/]

qframework doctor

qframework doctor --json
"""
)
def doctor(as_json: Json = False) -> None:
    """Show what this machine has and which kernels will run; exit with 1 when the backend cannot work."""
    from qframework.diagnosis import diagnose

    report = diagnose()
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        for section, values in report.items():
            if isinstance(values, Mapping):
                _print_table(section, values)
    if report["problems"]:
        raise _failed_check("; ".join(report["problems"]))


def main() -> None:
    """Entry point of the ``qframework`` command."""
    app()


def _linear_config(static: bool, observer: str, activation: Any, weight: Any) -> LinearConfig:
    from qframework.quantizer import dynamic_int8, static_int8

    if static:
        return static_int8(activation=activation or "per_tensor", weight=weight, observer=observer)
    if observer != "minmax":
        raise QFrameworkError(f"--observer {observer} needs --static: dynamic scales come from the data")
    return dynamic_int8(activation=activation or "per_token", weight=weight)


def _attention_config(attention: str, observer: str) -> AttentionConfig:
    from qframework.quantizer import dynamic_attention, static_attention

    return static_attention(observer=observer) if attention == "static" else dynamic_attention(attention)


def _refuse_random_weights(model: str, checkpoint: Path | None, pretrained: bool) -> None:
    if model != "digits" and checkpoint is None and not pretrained:
        raise QFrameworkError(f"model {model!r} would have random weights; pass --checkpoint FILE or --pretrained")


def _at_least_two(images: Any) -> Any:
    """PyTorch exports a batch of 1 as a constant, so a folder of one image is used twice."""
    return images if len(images) > 1 else images.repeat(2, *(1 for _ in images.shape[1:]))


def _device(name: str) -> Any:
    """``name`` as a device that is there and that the kernels support."""
    import torch

    from qframework.kernels._common import check_device

    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise QFrameworkError(f"--device {name!r} is no device; accepted: cpu, cuda, cuda:0, ...") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise QFrameworkError(f"--device {name}: this machine has {torch.cuda.device_count()} CUDA devices")
    check_device(device)
    return device


def _is_file(target: str) -> bool:
    return target != "digits" and (Path(target).exists() or Path(target).suffix == ".pt2")


def _open(target: str, checkpoint: Path | None, pretrained: bool) -> tuple[Any, dict[str, Any]]:
    """A saved or a float model and what ``images_for`` needs to know of it."""
    from qframework.evaluation.models import load_classifier
    from qframework.serialization import load, read_metadata

    if not _is_file(target):
        classifier = load_classifier(target, checkpoint, pretrained=pretrained)
        return classifier.model, classifier.describe()
    description = read_metadata(target)["config"]
    if "data_config" not in description:
        raise QFrameworkError(
            f"{target} does not say how its images are prepared; accepted: a file of 'qframework quantize'"
        )
    return load(target), description


def _compiled(module: Any) -> Any:
    import torch

    return torch.compile(module, backend="qframework", dynamic=True)


def _candidates(target: str, checkpoint: Path | None, batch_size: int, device: Any) -> dict[str, tuple[Any, Any]]:
    """Configurations to measure, each with its input."""
    import torch

    from qframework.evaluation import quantize_model
    from qframework.evaluation.models import input_size, load_classifier
    from qframework.quantizer import QFrameworkQuantizer, static_int8

    if _is_file(target):
        module, description = _open(target, checkpoint, pretrained=False)
        images = torch.randn(batch_size, *input_size(description), device=device)
        return {"saved, compiled": (torch.compile(module.to(device), backend="qframework"), images)}
    classifier = load_classifier(target, checkpoint)
    images = torch.randn(batch_size, *input_size(classifier.describe()), device=device)
    model = classifier.model.to(device)
    static = quantize_model(model, images, QFrameworkQuantizer().set_global(static_int8()), [images])
    dynamic = torch.compile(model, backend="qframework", options={"linear": "int8_dynamic"})
    return {
        "float, eager": (model, images),
        "float, compiled": (torch.compile(model), images),
        "static INT8": (torch.compile(static.converted, backend="qframework"), images),
        "dynamic INT8": (dynamic, images),
    }


def _failed_check(message: str) -> typer.Exit:
    typer.echo(f"qframework: check failed: {message}", err=True)
    return typer.Exit(CHECK_FAILED)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _print_result(title: str, result: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(result, indent=2))
    else:
        _print_table(title, result)


def _print_table(title: str, values: Mapping[str, Any]) -> None:
    table = Table(title=title, show_header=False, title_justify="left")
    for name, value in values.items():
        table.add_row(name.replace("_", " "), _format(value))
    Console(markup=False, highlight=False).print(table)


def _print_rows(title: str, rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    table = Table(title=title)
    for name in rows[0]:
        table.add_column(name.replace("_", " "))
    for row in rows:
        table.add_row(*map(_format, row.values()))
    Console(markup=False, highlight=False).print(table)


def _format(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


if __name__ == "__main__":
    main()
