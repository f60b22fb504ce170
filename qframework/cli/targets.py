"""What a command works on: a saved model, a timm model or the digits ViT, and the device it runs on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from qframework.errors import QFrameworkError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from qframework.quantizer import Recipe


def refuse_random_weights(model: str, checkpoint: Path | None, pretrained: bool) -> None:
    """Raise where a timm model would be accurate or not by chance."""
    if model != "digits" and checkpoint is None and not pretrained:
        raise QFrameworkError(f"model {model!r} would have random weights; pass --checkpoint FILE or --pretrained")


def at_least_two(images: Any) -> Any:
    """PyTorch exports a batch of 1 as a constant, so a folder of one image is used twice."""
    return images if len(images) > 1 else images.repeat(2, *(1 for _ in images.shape[1:]))


def device_named(name: str) -> Any:
    """``name`` as a device that is there and that the kernels support."""
    import torch

    from qframework.kernels._common import check_device

    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise QFrameworkError(f"--device {name!r} is no device; accepted: cpu, cuda, cuda:0, ...") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise QFrameworkError(f"--device {name}: this machine has {torch.cuda.device_count()} CUDA devices")
    check_device(device)
    return device


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
    calibration: Any
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
) -> Subject:
    """A classifier whose top-1 on ``limit`` images of ``data`` counts; ``settings`` is all that it depends on."""
    from qframework import __version__
    from qframework.evaluation import top1
    from qframework.evaluation.checkpoint import weights_digest
    from qframework.evaluation.models import images_for, load_classifier

    on = device_named(device)
    refuse_random_weights(model, checkpoint, pretrained)
    classifier = load_classifier(model, checkpoint, pretrained=pretrained)
    describe = classifier.describe()
    held_out = images_for(describe, data, batch_size=batch_size, limit=limit)
    calibration = images_for(describe, calibration_data or data, batch_size=batch_size, calibration=True)
    images = at_least_two(next(iter(calibration))[0].to(on))
    settings = {
        "model": model,
        "weights": weights_digest(classifier.model.state_dict()),
        "data": data,
        "calibration_data": calibration_data or data,
        "limit": limit,
        "batch_size": batch_size,
        "device": _described(on),
        "versions": {"qframework": __version__, "torch": _torch_version()},
    }
    return Subject(
        classifier.model.to(on), images, lambda module: top1(module, held_out, device=on), calibration, settings
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
