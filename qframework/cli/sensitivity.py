"""``qframework sensitivity``."""

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
)
from qframework.cli.output import check_outputs, print_rich
from qframework.cli.targets import load_subject, names, recipe_named

EXAMPLES = """\
[bold]Examples[/]

qframework sensitivity digits

qframework sensitivity vit_small_patch16_224 --pretrained --data imagenet/val --limit 2000

qframework sensitivity digits --linear static,dynamic --attention static,sage_b --observer mse
"""


def sensitivity(
    model: Model,
    data: Data = "digits",
    calibration_data: CalibrationData = None,
    checkpoint: Checkpoint = None,
    pretrained: Pretrained = False,
    linear: Annotated[str, typer.Option(help="What to try on each linear: static,dynamic or off.")] = "static",
    attention: Annotated[
        str, typer.Option(help="What to try on each attention: static, variants (sage_b,sage2_int8), or off.")
    ] = "static",
    observer: Observer = "minmax",
    recipe: RecipeName = "none",
    limit: Limit = None,
    batches: Batches = 8,
    batch_size: BatchSize = 32,
    output: Annotated[Path | None, typer.Option(help="File to write; MODEL_sensitivity.json if not given.")] = None,
    plot: Plot = True,
    device: Device = "cpu",
    dtype: DType = "float32",
    as_json: Json = False,
) -> None:
    """Quantize each linear and each attention alone, and measure its SQNR and the drop of top-1.

    Beside OUTPUT stand a plot and a journal, from which an interrupted run goes on.
    """
    from qframework.quantizer import static_attention, static_int8
    from qframework.tuning.assignment import Meanings
    from qframework.tuning.journal import Journal
    from qframework.tuning.layer_sensitivity import sensitivity as measure
    from qframework.tuning.plots import require_matplotlib

    if plot:
        require_matplotlib()
    output = output or Path(f"{model}_sensitivity.json")
    beside = check_outputs(output, plot)
    meanings = Meanings(static=static_int8(observer=observer), static_attention=static_attention(observer=observer))
    subject = load_subject(model, data, calibration_data, checkpoint, pretrained, batch_size, limit, device, dtype)
    settings = {**subject.settings, "batches": batches, "observer": observer, "recipe": recipe}
    result = measure(
        subject.model,
        subject.images,
        subject.metric,
        subject.calibration,
        linear=names(linear),
        attention=names(attention),
        meanings=meanings,
        recipe=recipe_named(recipe),
        batches=batches,
        journal=Journal(beside.journal, {"command": "sensitivity", **settings}),
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
