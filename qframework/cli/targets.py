"""What a command works on: a saved model, a timm model or the digits ViT, and the device it runs on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from qframework.errors import QFrameworkError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from qframework.quantizer import Recipe


def check_model_and_data(model: str, checkpoint: Path | None, pretrained: bool, *data: str | None) -> None:
    """Raise, before anything is loaded, for an unknown model, one of random weights, and data that does not fit."""
    from qframework.evaluation.models import check_data_fits, check_model_name

    check_model_name(model)
    if model != "digits" and checkpoint is None and not pretrained:
        raise QFrameworkError(f"model {model!r} would have random weights; pass --checkpoint FILE or --pretrained")
    for each in data:
        if each is not None:
            check_data_fits(model, each)


def first_images(batches: Iterable[tuple[Tensor, Tensor]], device: Any) -> Tensor:
    """The first batch; PyTorch exports a batch of 1 as a constant, so a folder of one image is used twice."""
    for images, _ in batches:
        images = images.to(device)
        return images if len(images) > 1 else images.repeat(2, *(1 for _ in images.shape[1:]))
    raise QFrameworkError("the data holds no image that can be read")


def device_named(name: str) -> Any:
    """``name`` as a device that is there and that the kernels support."""
    from qframework.devices import checked_device

    return checked_device(name, "--device")


def dtype_named(name: str) -> Any:
    """``"float16"`` as PyTorch's dtype."""
    import torch

    return getattr(torch, name)


class InDtype:
    """Batches of ``(images, labels)`` with the images in a dtype, each time they are gone through."""

    def __init__(self, batches: Any, dtype: str) -> None:
        self._batches, self._dtype = batches, dtype_named(dtype)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return ((images.to(self._dtype), labels) for images, labels in self._batches)

    def __len__(self) -> int:
        return len(self._batches)

    def report_damaged(self) -> int:
        """How many images the last pass left out; said on standard error."""
        damaged = self._batches.damaged
        if damaged:
            some = "; ".join(f"{image.path} ({image.reason})" for image in damaged[:5])
            more = "; ..." if len(damaged) > 5 else ""
            typer.echo(f"qframework: {len(damaged)} damaged images left out: {some}{more}", err=True)
        return len(damaged)


def is_file(target: str) -> bool:
    """Whether a target names a saved model."""
    return target != "digits" and (Path(target).exists() or Path(target).suffix == ".pt2")


def open_target(target: str, checkpoint: Path | None, pretrained: bool) -> tuple[Any, dict[str, Any]]:
    """A saved or a float model and what ``images_for`` needs to know of it."""
    from qframework.evaluation.models import load_classifier
    from qframework.serialization import load, read_metadata

    if not is_file(target):
        classifier = load_classifier(target, checkpoint, pretrained=pretrained)
        return classifier.model, classifier.describe()
    description = read_metadata(target)["config"]
    if "data_config" not in description:
        raise QFrameworkError(
            f"{target} does not say how its images are prepared; accepted: a file of 'qframework quantize'"
        )
    return load(target), description


def compiled(module: Any, description: dict[str, Any], *, dynamic: bool | None = None) -> Any:
    """``module`` compiled with the options that were kept with it."""
    import torch

    return torch.compile(module, backend="qframework", dynamic=dynamic, options=description.get("options"))


class Subject(NamedTuple):
    """A float model on its device, with what its accuracy is measured on and calibrated with."""

    model: nn.Module
    images: Tensor
    metric: Callable[[Any], float]
    calibration: InDtype
    held_out: InDtype
    settings: dict[str, Any]


def load_subject(
    model: str,
    data: str,
    calibration_data: str | None,
    checkpoint: Path | None,
    pretrained: bool,
    batch_size: int,
    limit: int | None,
    device: str,
    dtype: str,
) -> Subject:
    """A classifier whose top-1 on ``limit`` images of ``data`` counts; ``settings`` is all that it depends on."""
    from qframework import __version__
    from qframework.evaluation import top1
    from qframework.evaluation.checkpoint import state_digest
    from qframework.evaluation.models import images_for, load_classifier

    on = device_named(device)
    check_model_and_data(model, checkpoint, pretrained, data, calibration_data)
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
        "device": _described(on),
        "dtype": dtype,
        "versions": {"qframework": __version__, "torch": _torch_version()},
    }
    return Subject(
        classifier.model.to(on, dtype_named(dtype)),
        images,
        lambda module: top1(module, held_out, device=on),
        calibration,
        held_out,
        settings,
    )


def _described(device: Any) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def _torch_version() -> str:
    import torch

    return torch.__version__


def recipe_named(name: str) -> Recipe | None:
    """``"none"`` or ``"best"``."""
    from qframework.quantizer import Recipe

    return Recipe.best() if name == "best" else None


def names(listed: str) -> tuple[str, ...]:
    """``"static,dynamic"`` as its parts; ``"off"`` as none."""
    return () if listed == "off" else tuple(dict.fromkeys(part.strip() for part in listed.split(",")))


def dtype_of(description: dict[str, Any]) -> str:
    """The dtype of a model's images; files of older versions do not name it."""
    return description.get("dtype", "float32")
