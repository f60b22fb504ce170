"""``qframework evaluate``."""

from __future__ import annotations

from typing import Annotated

import typer

from qframework.cli import command
from qframework.cli.output import print_result
from qframework.cli.targets import (
    InDtype,
    check_model_and_data,
    compiled,
    device_named,
    dtype_of,
    is_file,
    open_target,
)

EXAMPLES = """\
[bold]Examples[/]

qframework evaluate digits.pt2

qframework evaluate vit.pt2 --data imagenet/val --min-top1 80

qframework evaluate vit_base_patch16_224 --pretrained --data imagenet/val
"""


def evaluate(
    target: command.Target,
    data: command.Data = "digits",
    checkpoint: command.Checkpoint = None,
    pretrained: command.Pretrained = False,
    batch_size: command.BatchSize = 128,
    eager: Annotated[
        bool, typer.Option("--eager", help="Do not compile; a saved model then simulates INT8 in float.")
    ] = False,
    min_top1: Annotated[float, typer.Option(min=0, max=100, help="Exit with 1 if top-1 is lower.")] = 0.0,
    device: command.Device = "cpu",
    as_json: command.Json = False,
) -> None:
    """Measure top-1 of a saved or a float model."""
    from qframework.evaluation import top1
    from qframework.evaluation.models import images_for

    on = device_named(device)
    if not is_file(target):
        check_model_and_data(target, checkpoint, pretrained, data)
    module, description = open_target(target, checkpoint, pretrained)
    loader = InDtype(images_for(description, data, batch_size=batch_size), dtype_of(description))
    module = module.to(on)
    measured = module if eager else compiled(module, description, dynamic=True)
    accuracy = top1(measured, loader, device=on, show_progress=True)
    damaged = loader.report_damaged()
    result = {"target": target, "data": data, "top1": accuracy, "damaged_images": damaged}
    print_result(f"{target} on {data}", result, as_json)
    if accuracy < min_top1:
        raise command.failed_check(f"top-1 {accuracy:.2f} % is below {min_top1} %")
