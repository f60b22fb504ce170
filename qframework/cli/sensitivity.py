"""``qframework sensitivity``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qframework.cli import command
from qframework.cli.targets import Study, check_choices, device_and_dtype, load_subject, names

EXAMPLES = """\
[bold]Examples[/]

qframework sensitivity digits

qframework sensitivity vit_small_patch16_224 --pretrained --data imagenet/val --limit 2000

qframework sensitivity digits --linear static,dynamic --attention static,sage_b --observer mse
"""


def sensitivity(
    model: command.Model,
    data: command.Data = "digits",
    calibration_data: command.CalibrationData = None,
    checkpoint: command.Checkpoint = None,
    pretrained: command.Pretrained = False,
    linear: Annotated[str, typer.Option(help="Choices to try on each linear: static,dynamic or off.")] = "static",
    attention: Annotated[
        str, typer.Option(help="Choices to try on each attention: static, variants (sage_b,sage2_int8), or off.")
    ] = "static",
    observer: command.Observer = "minmax",
    recipe: command.RecipeName = "none",
    limit: command.Limit = None,
    batches: command.Batches = 8,
    batch_size: command.BatchSize = 32,
    output: Annotated[Path | None, typer.Option(help="File to write; default: MODEL_sensitivity.json.")] = None,
    plot: command.Plot = None,
    device: command.Device = "auto",
    dtype: command.DType = "auto",
    as_json: command.Json = False,
) -> None:
    """Quantize each linear and each attention alone, and measure its SQNR and the drop of top-1.

    Also writes a plot and a journal beside OUTPUT; with the journal, an interrupted run resumes.
    """
    on, dtype = device_and_dtype(device, dtype)
    study = Study("sensitivity", output or Path(f"{model}_sensitivity.json"), plot, observer, recipe, batches)
    linears, attentions = names(linear), names(attention)
    check_choices(linears, attentions)
    subject = load_subject(model, data, calibration_data, checkpoint, pretrained, batch_size, limit, on, dtype)

    from qframework.tuning.layer_sensitivity import sensitivity as measure

    result = measure(*subject.measured, linear=linears, attention=attentions, **study.arguments(subject))
    study.finish(subject, result, as_json)
