"""Models, data and devices that the commands work on: a saved model, a timm model or the digits ViT."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import typer

from qframework.cli.output import journal_and_plot, print_rich
from qframework.errors import QFrameworkError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from qframework.evaluation.models import Classifier
    from qframework.quantizer import Recipe

DTypeName: TypeAlias = Literal["float32", "float16", "bfloat16"]


def check_model_and_data(
    model: str, checkpoint: Path | None, pretrained: bool, data: str, *, calibration: bool = False
) -> None:
    """Raise QFrameworkError for an unknown model, random weights or unsuitable data, before anything is loaded."""
    from qframework.evaluation.models import (
        DIGITS,
        check_data_before_loading,
        check_data_exists,
        check_data_fits,
        check_model_name,
    )

    if model != DIGITS:  # before timm is imported
        check_data_exists(data)
    check_model_name(model)
    if model != DIGITS and checkpoint is None and not pretrained:
        raise QFrameworkError(f"model {model!r} would have random weights. Pass --checkpoint FILE or --pretrained")
    check_data_fits(model, data)
    if checkpoint is not None and model != DIGITS and not checkpoint.is_file():
        raise FileNotFoundError(f"checkpoint {checkpoint} does not exist")
    check_data_before_loading(model, data, calibration=calibration)


def first_images(batches: Iterable[tuple[Tensor, Tensor]], device: Any) -> Tensor:
    """The first batch on ``device``, of at least two images."""
    from qframework.evaluation.tasks import first_batch

    return first_batch(images for images, _ in batches).to(device)


def device_named(name: str) -> Any:
    """The device ``name``, checked to be present and supported by the kernels; for ``"auto"`` the fastest there is."""
    from qframework.devices import checked_device, default_device

    return default_device() if name == "auto" else checked_device(name, "--device")


def device_and_dtype(device: str, dtype: Literal["auto", DTypeName]) -> tuple[Any, DTypeName]:
    """The device, and the dtype that ``"auto"`` means on it."""
    on = device_named(device)
    if dtype != "auto":
        return on, dtype
    return on, "float16" if on.type == "cuda" else "float32"


def dtype_named(name: str) -> Any:
    """PyTorch's dtype of this name, such as ``"float16"``."""
    import torch

    return getattr(torch, name)


class InDtype:
    """Batches of ``(images, labels)`` with the images cast to a dtype; can be iterated over repeatedly."""

    def __init__(self, batches: Any, dtype: str) -> None:
        self._batches, self._dtype = batches, dtype_named(dtype)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return ((images.to(self._dtype), labels) for images, labels in self._batches)

    def __len__(self) -> int:
        return len(self._batches)

    def report_damaged(self) -> int:
        """The number of images that the last pass left out; also printed on standard error."""
        damaged = self._batches.damaged
        if damaged:
            some = "; ".join(f"{image.path} ({image.reason})" for image in damaged[:5])
            more = "; ..." if len(damaged) > 5 else ""
            typer.echo(f"qframework: {len(damaged)} damaged images left out: {some}{more}", err=True)
        return len(damaged)


def is_file(target: str) -> bool:
    """Whether a target is a saved model."""
    return target != "digits" and (Path(target).exists() or Path(target).suffix == ".pt2")


def open_target(target: str, checkpoint: Path | None, pretrained: bool) -> tuple[Any, dict[str, Any]]:
    """A saved or a float model, and its description for ``images_for``."""
    from qframework.evaluation.models import load_classifier
    from qframework.serialization import load, read_metadata

    if not is_file(target):
        classifier = load_classifier(target, checkpoint, pretrained=pretrained)
        return classifier.model, classifier.describe()
    description = read_metadata(target)["config"]
    if "data_config" not in description:
        raise QFrameworkError(
            f"{target} must be a file of 'qframework quantize', got one without the preparation of its images"
        )
    return load(target), description


def random_classifier(target: str, checkpoint: Path | None) -> Classifier:
    """A model with the weights of ``checkpoint``, else random ones: the digits are not trained."""
    from qframework.evaluation.digits_vit import build_model
    from qframework.evaluation.models import DIGITS, Classifier, load_classifier

    if target == DIGITS and checkpoint is None:
        return Classifier(DIGITS, build_model().eval(), {})
    return load_classifier(target, checkpoint)


def float_original(description: dict[str, Any], checkpoint: Path | None, pretrained: bool) -> nn.Module | None:
    """The float model that a saved model was quantized from, on the CPU; None, with a sentence, if it is not at hand.

    Args:
        description: of the saved model.
        checkpoint: the weights; for the digits, default where they are trained to.
        pretrained: take timm's weights.

    Raises:
        QFrameworkError: the weights are not those that were quantized.
    """
    from qframework.evaluation.checkpoint import state_digest
    from qframework.evaluation.models import DIGITS, DIGITS_WEIGHTS, load_classifier

    name = description["model"]
    if name == DIGITS and checkpoint is None:
        checkpoint = DIGITS_WEIGHTS if DIGITS_WEIGHTS.is_file() else None
    if checkpoint is None and not pretrained:
        typer.echo("qframework: no float top-1: pass --checkpoint FILE or --pretrained to compare with it", err=True)
        return None
    if checkpoint is not None and not checkpoint.is_file():
        raise FileNotFoundError(f"checkpoint {checkpoint} does not exist")
    original = load_classifier(name, checkpoint, pretrained=pretrained).model
    expected = description.get("weights_sha256")  # files of older versions have none
    if expected is not None and state_digest(original.state_dict()) != expected:
        raise QFrameworkError(
            f"{checkpoint or 'timm'} holds other weights of {name!r} than those that were quantized. Pass their "
            "--checkpoint, or --no-compare"
        )
    return original


def compiled(module: Any, description: dict[str, Any], *, dynamic: bool | None = None) -> Any:
    """Compile ``module`` with the options that were saved with it."""
    import torch

    return torch.compile(module, backend="qframework", dynamic=dynamic, options=description.get("options"))


class Subject(NamedTuple):
    """A float model on its device, and the images that its accuracy is measured on."""

    measured: tuple[nn.Module, Tensor, Callable[[Any], float], InDtype]
    """The model, a batch, the metric and the calibration data: the first arguments of ``sensitivity`` and ``tune``."""
    held_out: InDtype
    settings: dict[str, Any]
    """All that the metric depends on."""


class Study:
    """The files, arguments and printing that ``sensitivity`` and ``tune`` share.

    Raises:
        QFrameworkError: a file cannot be written, or the observer is unknown.
        ModuleNotFoundError: ``plot`` is True and matplotlib is missing. None draws the plot if it is installed.
    """

    def __init__(self, command: str, output: Path, plot: bool | None, observer: str, recipe: str, batches: int) -> None:
        from qframework.quantizer import static_attention, static_int8

        self.output = output
        self._linear, self._attention = static_int8(observer=observer), static_attention(observer=observer)
        plot = _can_plot() if plot is None else plot
        if plot:
            from qframework.tuning.plots import require_matplotlib

            require_matplotlib()
        self._journal, self._plot = journal_and_plot(output, plot)
        self._recipe, self._batches = recipe, batches
        self._settings = {"command": command, "batches": batches, "observer": observer, "recipe": recipe}

    def arguments(self, subject: Subject, observers: tuple[str, ...] = (), **settings: Any) -> dict[str, Any]:
        """The other arguments of both functions; ``settings`` must match those of an existing journal."""
        from qframework.tuning.assignment import OBSERVERS, Meanings
        from qframework.tuning.journal import Journal

        more = {name: OBSERVERS[name] for name in observers}
        settings = {**self._settings, **subject.settings, "observers": list(observers), **settings}
        return {
            "meanings": Meanings(static=self._linear, static_attention=self._attention, observers=more),
            "recipe": recipe_named(self._recipe),
            "batches": self._batches,
            "journal": Journal(self._journal, settings),
            "show_progress": True,
        }

    def finish(self, subject: Subject, result: Any, as_json: bool) -> None:
        """Write the result and its plot, and print the result."""
        subject.held_out.report_damaged()
        result.save(self.output)
        if self._plot is not None:
            result.plot(self._plot)
        if as_json:
            typer.echo(json.dumps(result.to_dict(), indent=2, allow_nan=False))
        else:
            print_rich(result.table())


def _can_plot() -> bool:
    """Whether matplotlib is installed; if not, says so on standard error."""
    import importlib.util

    if importlib.util.find_spec("matplotlib") is not None:
        return True
    typer.echo("qframework: no plot, since matplotlib is not installed: pip install matplotlib", err=True)
    return False


def load_subject(
    model: str,
    data: str,
    calibration_data: str | None,
    checkpoint: Path | None,
    pretrained: bool,
    batch_size: int,
    limit: int | None,
    on: Any,
    dtype: str,
) -> Subject:
    """A classifier, with top-1 on ``limit`` images of ``data`` as its metric."""
    import torch

    from qframework import __version__
    from qframework.evaluation import top1
    from qframework.evaluation.checkpoint import state_digest
    from qframework.evaluation.models import images_for, load_classifier

    check_model_and_data(model, checkpoint, pretrained, data)
    check_model_and_data(model, checkpoint, pretrained, calibration_data or data, calibration=True)
    classifier = load_classifier(model, checkpoint, pretrained=pretrained)
    describe = classifier.describe()
    held_out = InDtype(images_for(describe, data, batch_size=batch_size, limit=limit), dtype)
    calibration_data = calibration_data or data
    calibration = InDtype(images_for(describe, calibration_data, batch_size=batch_size, calibration=True), dtype)
    images = first_images(calibration, on)
    settings = {
        "model": model,
        "weights": state_digest(classifier.model.state_dict()),
        "data": data,
        "calibration_data": calibration_data,
        "limit": limit,
        "batch_size": batch_size,
        "device": torch.cuda.get_device_name(on) if on.type == "cuda" else str(on),
        "dtype": dtype,
        "versions": {"qframework": __version__, "torch": torch.__version__},
    }
    model_on_device = classifier.model.to(on, dtype_named(dtype))
    measured = (model_on_device, images, lambda module: top1(module, held_out, device=on), calibration)
    return Subject(measured, held_out, settings)


def recipe_named(name: str) -> Recipe | None:
    """The recipe ``"none"`` or ``"best"``."""
    from qframework.quantizer import Recipe

    return Recipe.best() if name == "best" else None


def check_choices(linear: tuple[str, ...] = (), attention: tuple[str, ...] = ()) -> None:
    """Raise UnsupportedError for a choice that no layer has, before a model is trained or downloaded."""
    from qframework.tuning.assignment import Meanings

    for choice in linear:
        Meanings().linear(choice)
    for choice in attention:
        Meanings().attention(choice)


def check_observers(observers: tuple[str, ...]) -> None:
    """Raise QFrameworkError for an observer that ``tune`` does not know by name."""
    from qframework.tuning.assignment import OBSERVERS

    for name in observers:
        if name not in OBSERVERS:
            raise QFrameworkError(f"--observers must be off or some of {', '.join(OBSERVERS)}, got {name!r}")


def names(listed: str) -> tuple[str, ...]:
    """The parts of ``"static,dynamic"``; none of ``"off"``."""
    return () if listed == "off" else tuple(dict.fromkeys(part.strip() for part in listed.split(",")))


def dtype_of(description: dict[str, Any]) -> str:
    """The dtype of a model's images; float32 for files of older versions, which do not name it."""
    return description.get("dtype", "float32")
