"""``qframework benchmark``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from qframework.cli import command
from qframework.cli.output import print_rows
from qframework.cli.targets import compiled, device_named, dtype_named, dtype_of, is_file, open_target

EXAMPLES = """\
[bold]Examples[/]

qframework benchmark vit_base_patch16_224 --batch-size 8

qframework benchmark vit.pt2 --device cuda --batch-size 256 --json
"""


def benchmark(
    target: command.Target,
    checkpoint: command.Checkpoint = None,
    batch_size: command.BatchSize = 8,
    repeats: Annotated[int, typer.Option(min=1, help="Timed calls; the result is their median.")] = 20,
    device: command.Device = "cpu",
    as_json: command.Json = False,
) -> None:
    """Measure images per second on random images: float eager, float compiled, static and dynamic INT8.

    A saved model is measured compiled. A timm model has random weights unless --checkpoint is given; speed is the same.
    """
    from rich.progress import track

    from qframework.evaluation import throughput

    candidates = _candidates(target, checkpoint, batch_size, device_named(device))
    rows = []
    for name, (module, images) in track(candidates.items(), "Measuring", console=Console(stderr=True)):
        speed = throughput(module, images, repeats=repeats)
        rows.append(
            {"configuration": name, "images_per_second": speed, "milliseconds_per_batch": 1e3 * batch_size / speed}
        )
    print_rows(f"{target}, batch {batch_size}, {device}", rows, as_json)


def _candidates(target: str, checkpoint: Path | None, batch_size: int, device: Any) -> dict[str, tuple[Any, Any]]:
    """The modules to measure by configuration, each with its input."""
    import torch

    from qframework.conversion import quantize
    from qframework.evaluation.models import input_size, load_classifier
    from qframework.quantizer import static_int8

    if is_file(target):
        module, description = open_target(target, checkpoint, pretrained=False)
        dtype = dtype_named(dtype_of(description))
        images = torch.randn(batch_size, *input_size(description), device=device, dtype=dtype)
        return {"saved, compiled": (compiled(module.to(device), description), images)}
    classifier = load_classifier(target, checkpoint)
    images = torch.randn(batch_size, *input_size(classifier.describe()), device=device)
    model = classifier.model.to(device)
    static = quantize(model, images, static_int8(), [images], skip=())
    dynamic = torch.compile(model, backend="qframework", options={"linear": "int8_dynamic"})
    return {
        "float, eager": (model, images),
        "float, compiled": (torch.compile(model), images),
        "static INT8": (torch.compile(static, backend="qframework"), images),
        "dynamic INT8": (dynamic, images),
    }
