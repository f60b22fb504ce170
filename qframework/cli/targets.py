"""What a command works on: a saved model, a timm model or the digits ViT, and the device it runs on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qframework.errors import QFrameworkError


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
