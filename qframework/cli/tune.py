"""``qframework tune``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from qframework.cli.command import (
    Batches,
    BatchSize,
    CalibrationData,
    Checkpoint,
    Data,
    Device,
    DType,
    Json,
    Limit,
    Model,
    Observer,
    Plot,
    Pretrained,
    RecipeName,
    failed_check,
)
from qframework.cli.output import check_outputs, print_rich
from qframework.cli.targets import load_subject, names, recipe_named

EXAMPLES = """\
[bold]Examples[/]

qframework tune digits --max-drop 0.5

qframework tune vit_base_patch16_224 --pretrained --data imagenet/val --calibration-data imagenet/train --max-drop 0.5

qframework quantize vit_base_patch16_224 --pretrained --data imagenet/train --config vit_base_patch16_224_tuned.json
"""


def tune(
    model: Model,
    max_drop: Annotated[float, typer.Option(min=0, help="Points of top-1 that may be lost.")] = 0.5,
    data: Data = "digits",
    calibration_data: CalibrationData = None,
    checkpoint: Checkpoint = None,
    pretrained: Pretrained = False,
    variants: Annotated[
        str | None, typer.Option(help="Of attention, to try: sage_b,sage2_int8 or off; those worth it if not given.")
    ] = None,
    observer: Observer = "minmax",
    recipe: RecipeName = "none",
    limit: Limit = None,
    batches: Batches = 8,
    batch_size: BatchSize = 32,
    eager: Annotated[bool, typer.Option("--eager", help="Compile nothing; speeds are estimates.")] = False,
    output: Annotated[Path | None, typer.Option(help="File to write; MODEL_tuned.json if not given.")] = None,
    plot: Plot = True,
    device: Device = "cpu",
    dtype: DType = "float32",
    as_json: Json = False,
) -> None:
    """Find the fastest choice for each layer, float, static, dynamic or a variant, that loses at most --max-drop.

    OUTPUT is for qframework quantize --config. Beside it stand a plot and a journal, from which an interrupted run, or
    one with another budget, goes on. Exit code 1: nothing quantized stays inside the budget; OUTPUT is what is nearest.
    """
    from qframework.quantizer import static_attention, static_int8
    from qframework.tuning.assignment import Meanings
    from qframework.tuning.journal import Journal
    from qframework.tuning.mixed_precision import tune as search
    from qframework.tuning.plots import require_matplotlib

    if plot:
        require_matplotlib()
    output = output or Path(f"{model}_tuned.json")
    beside = check_outputs(output, plot)
    meanings = Meanings(static=static_int8(observer=observer), static_attention=static_attention(observer=observer))
    subject = load_subject(model, data, calibration_data, checkpoint, pretrained, batch_size, limit, device, dtype)
    settings = {**subject.settings, "batches": batches, "observer": observer, "recipe": recipe, "eager": eager}
    result = search(
        subject.model,
        subject.images,
        subject.metric,
        subject.calibration,
        max_drop=max_drop,
        variants=None if variants is None else names(variants),
        meanings=meanings,
        recipe=recipe_named(recipe),
        batches=batches,
        compiled=not eager,
        journal=Journal(beside.journal, {"command": "tune", **settings}),
        show_progress=True,
    )
    subject.held_out.report_damaged()
    result.save(output)
    if plot:
        result.plot(beside.plot)
    if as_json:
        typer.echo(json.dumps(result.to_dict(), indent=2, allow_nan=False))
    else:
        print_rich(result.table())
    if not result.met:
        raise failed_check(
            f"no quantized assignment keeps the drop within {max_drop:g}; {output} holds the nearest, which loses "
            f"{result.chosen.drop:.2f}"
        )
