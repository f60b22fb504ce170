"""``qframework evaluate``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from qframework.cli import command
from qframework.cli.output import print_result
from qframework.cli.targets import (
    InDtype,
    check_model_and_data,
    compiled,
    device_and_dtype,
    dtype_named,
    dtype_of,
    float_original,
    is_file,
    open_target,
)
from qframework.errors import QFrameworkError

EXAMPLES = """\
[bold]Examples[/]

qframework evaluate digits.pt2

qframework evaluate vit.pt2 --pretrained --data imagenet/val --limit 5000 --min-top1 80

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
    compare: Annotated[
        bool, typer.Option("--compare/--no-compare", help="Also measure the float model of a saved one, and the drop.")
    ] = True,
    limit: command.Limit = None,
    min_top1: Annotated[float, typer.Option(min=0, max=100, help="Exit with 1 if top-1 is lower.")] = 0.0,
    device: command.Device = "auto",
    dtype: Annotated[
        Literal["auto", "float32", "float16", "bfloat16"],
        typer.Option(help="Of a float model; auto: float16 on a GPU, float32 on a CPU. A saved model keeps its own."),
    ] = "auto",
    as_json: command.Json = False,
) -> None:
    """Measure top-1 of a saved or a float model.

    For a saved model, the float model is measured beside it in the same dtype if its weights are at hand: the digits,
    or with --checkpoint or --pretrained.
    """
    from qframework.evaluation import top1
    from qframework.evaluation.models import images_for

    on, by_device = device_and_dtype(device, dtype)
    saved = is_file(target)
    if not saved:
        check_model_and_data(target, checkpoint, pretrained, data)
    module, description = open_target(target, checkpoint, pretrained)
    used = dtype_of(description) if saved else by_device
    if saved and dtype not in ("auto", used):
        raise QFrameworkError(f"--dtype must be that of the saved model, {used}, got {dtype}")
    loader = InDtype(images_for(description, data, batch_size=batch_size, limit=limit), used)
    original = float_original(description, checkpoint, pretrained) if saved and compare else None
    module = module.to(on) if saved else module.to(on, dtype_named(used))
    measured = module if eager else compiled(module, description, dynamic=True)
    accuracy = top1(measured, loader, device=on, show_progress=True)
    result: dict[str, Any] = {"target": target, "data": data, "device": str(on), "dtype": used, "top1": accuracy}
    if original is not None:
        in_float = top1(original.to(on, dtype_named(used)), loader, device=on, show_progress=True)
        result |= {"float_top1": in_float, "drop": in_float - accuracy}
    result["damaged_images"] = loader.report_damaged()
    print_result(f"{target} on {data}", result, as_json)
    if accuracy < min_top1:
        raise command.failed_check(f"top-1 {accuracy:.2f} % is below {min_top1} %")
