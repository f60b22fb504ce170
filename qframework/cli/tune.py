"""``qframework tune``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qframework.cli import command
from qframework.cli.targets import Study, check_choices, check_observers, device_and_dtype, load_subject, names

EXAMPLES = """\
[bold]Examples[/]

qframework tune digits --max-drop 0.5

qframework tune vit_base_patch16_224 --pretrained --data imagenet/val --calibration-data imagenet/train --max-drop 0.5

qframework quantize vit_base_patch16_224 --pretrained --data imagenet/train --config vit_base_patch16_224_tuned.json
"""


def tune(
    model: command.Model,
    max_drop: Annotated[float, typer.Option(min=0, help="Maximum loss in points of top-1.")] = 0.5,
    data: command.Data = "digits",
    calibration_data: command.CalibrationData = None,
    checkpoint: command.Checkpoint = None,
    pretrained: command.Pretrained = False,
    variants: Annotated[
        str | None, typer.Option(help="Attention variants to try: sage_b,sage2_int8 or off; default: the fast ones.")
    ] = None,
    observer: command.Observer = "minmax",
    observers: Annotated[
        str, typer.Option(help="Others to choose from for each static layer: moving_average,mse,zero_point or off.")
    ] = "off",
    recipe: command.RecipeName = "none",
    limit: command.Limit = None,
    batches: command.Batches = 8,
    batch_size: command.BatchSize = 32,
    eager: Annotated[bool, typer.Option("--eager", help="Do not compile; speeds are then estimates.")] = False,
    output: Annotated[Path | None, typer.Option(help="File to write; default: MODEL_tuned.json.")] = None,
    plot: command.Plot = None,
    device: command.Device = "auto",
    dtype: command.DType = "auto",
    as_json: command.Json = False,
) -> None:
    """Find the fastest choice for each layer (float, static, dynamic or a variant) that loses at most --max-drop.

    OUTPUT is for qframework quantize --config. Also writes a plot and a journal beside it; with the journal, an
    interrupted run or one with another budget resumes. Exit code 1: no quantized assignment is within the budget, and
    OUTPUT holds the nearest one.
    """
    on, dtype = device_and_dtype(device, dtype)
    study = Study("tune", output or Path(f"{model}_tuned.json"), plot, observer, recipe, batches)
    chosen = None if variants is None else names(variants)
    check_choices(attention=chosen or ())
    others = names(observers)
    check_observers(others)
    subject = load_subject(model, data, calibration_data, checkpoint, pretrained, batch_size, limit, on, dtype)

    from qframework.tuning.mixed_precision import tune as search

    result = search(
        *subject.measured,
        max_drop=max_drop,
        variants=chosen,
        compiled=not eager,
        **study.arguments(subject, others, eager=eager),
    )
    study.finish(subject, result, as_json)
    if sentence := result.slower_than_float():
        typer.echo(f"qframework: {sentence}", err=True)
    if not result.met:
        raise command.failed_check(
            f"no quantized assignment keeps the drop within {max_drop:g}; {study.output} holds the nearest, which "
            f"loses {result.chosen.drop:.2f}"
        )
