"""The ``qframework`` command: its options, its exit codes, and the options that its subcommands share."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup

from qframework import __version__
from qframework.compat.logs import silence_torchao_at_import
from qframework.errors import QFrameworkError

CHECK_FAILED, BAD_INPUT = 1, 2
_state = {"debug": False}


class _Commands(TyperGroup):
    """Prints errors that a user can fix as one line, with exit code 2; other errors keep their traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (QFrameworkError, OSError, ModuleNotFoundError) as error:
            if _state["debug"]:
                raise
            # No markup, since the message may hold brackets, and no wrapping, so that grep finds one line.
            Console(stderr=True, markup=False, highlight=False, soft_wrap=True).print(f"qframework: {one_line(error)}")
            raise typer.Exit(BAD_INPUT) from error


class Command(TyperCommand):
    """Imports torch before anything of the package that needs it, which registers the operators."""

    def invoke(self, ctx: Any) -> Any:
        importlib.import_module("torch")
        return super().invoke(ctx)


app = typer.Typer(
    cls=_Commands,
    name="qframework",
    help="Quantized transformers for PyTorch.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _devices() -> list[str]:
    """What the shell completes ``--device`` to."""
    import torch

    gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    return ["auto", "cpu", *(["cuda", *gpus] if gpus else [])]


def _models(incomplete: str) -> list[str]:
    """What the shell completes a model to. ``digits`` needs no import of timm, which takes seconds."""
    if "digits".startswith(incomplete):
        return ["digits"]
    import timm

    return timm.list_models(f"{incomplete}*")


def _targets(incomplete: str) -> list[str]:
    """The same, and saved models in the folder that is being typed."""
    folder = Path(incomplete).parent if not incomplete.endswith("/") else Path(incomplete)
    files = [str(path) for path in folder.glob("*.pt2")] if folder.is_dir() else []
    return [name for name in files if name.startswith(incomplete)] + _models(incomplete)


Model = Annotated[
    str,
    typer.Argument(help="A timm model, or [bold]digits[/]: the ViT of handwritten digits.", autocompletion=_models),
]
Target = Annotated[
    str,
    typer.Argument(help="A file of [bold]qframework quantize[/], a timm model, or digits.", autocompletion=_targets),
]
Checkpoint = Annotated[
    Path | None,
    typer.Option(help="Weights of the timm model; for digits, where the trained model is saved."),
]
Pretrained = Annotated[bool, typer.Option("--pretrained", help="Download timm's weights.")]
Data = Annotated[str, typer.Option(help="A folder with one folder of images per class, or digits.")]
Device = Annotated[
    str, typer.Option(help="auto (cuda if there is one, else cpu), cpu, cuda, cuda:1, ...", autocompletion=_devices)
]
BatchSize = Annotated[int, typer.Option(min=2, help="Images in a batch.")]
CalibrationData = Annotated[str | None, typer.Option(help="Data to calibrate with; default: --data.")]
Batches = Annotated[int, typer.Option(min=1, help="Batches to calibrate with.")]
Limit = Annotated[
    int | None, typer.Option("--limit", min=1, help="Measure top-1 on at most this many images, spread evenly.")
]
Observer = Annotated[
    str,
    typer.Option(
        help="Static only: minmax, moving_average, percentile, mse or entropy.",
        autocompletion=lambda: ["minmax", "moving_average", "percentile", "mse", "entropy"],
    ),
]
RecipeName = Annotated[
    Literal["none", "best"], typer.Option("--recipe", help="Steps around the calibration that preserve accuracy.")
]
Plot = Annotated[
    bool | None,
    typer.Option("--plot/--no-plot", help="Plot the result beside OUTPUT; default: if matplotlib is installed."),
]
DType = Annotated[
    Literal["auto", "float32", "float16", "bfloat16"],
    typer.Option(help="Of everything that is not INT8; auto: float16 on a GPU, float32 on a CPU."),
]
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
    silence_torchao_at_import()


def failed_check(message: str) -> typer.Exit:
    """Print that a check failed; the caller raises the returned exit."""
    typer.echo(f"qframework: check failed: {message}", err=True)
    return typer.Exit(CHECK_FAILED)


def one_line(error: BaseException) -> str:
    """The message of an error without line breaks."""
    return " ".join(str(error).split())
