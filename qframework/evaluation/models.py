"""A classifier by name, with the images it is meant for: any timm model, or ``"digits"``."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qframework.errors import QFrameworkError
from qframework.evaluation import digits, digits_vit

DIGITS = "digits"
Batches = Iterable[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Classifier:
    """A model in eval mode and how its images are prepared.

    ``data_config`` is timm's (input_size, mean, std, interpolation, crop_pct, ...), JSON-able; empty for the digits.
    """

    name: str
    model: nn.Module
    data_config: dict[str, Any]

    def describe(self) -> dict[str, Any]:
        """What ``images_for`` needs, to be kept with a saved model."""
        return {"model": self.name, "data_config": self.data_config}


def load_classifier(name: str, checkpoint: Path | None = None, *, pretrained: bool = False) -> Classifier:
    """A timm model by name, or the digits ViT, which is trained when ``checkpoint`` does not hold it yet.

    Args:
        name: ``"digits"`` or a name of ``timm.list_models()``.
        checkpoint: weights of a timm model as ``timm.create_model(checkpoint_path=...)`` reads them; for the digits
            where the trained model is kept (default ``build/digits_vit.safetensors``).
        pretrained: download timm's weights; the only thing here that needs a network. With neither, they are random.

    Raises:
        QFrameworkError: timm has no such model, or the checkpoint does not fit it.
        FileNotFoundError: a timm model's checkpoint is missing.
    """
    if name == DIGITS:
        model = digits_vit.load_or_train(checkpoint or Path("build", "digits_vit.safetensors"))
        return Classifier(DIGITS, model, {})
    model = _timm_model(name, checkpoint, pretrained)
    return Classifier(name, model, _data_config(model))


def _timm_model(name: str, checkpoint: Path | None, pretrained: bool) -> nn.Module:
    import timm

    if not timm.is_model(name):
        close = difflib.get_close_matches(name, timm.list_models())
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        raise QFrameworkError(f"model {name!r} is unknown; {hint}accepted: 'digits' or a name of timm.list_models()")
    if checkpoint is not None and not checkpoint.is_file():
        raise FileNotFoundError(f"checkpoint {checkpoint} does not exist")
    try:
        return timm.create_model(name, pretrained=pretrained, checkpoint_path=str(checkpoint or "")).eval()
    except RuntimeError as error:  # what load_state_dict raises
        raise QFrameworkError(f"checkpoint {checkpoint} does not fit model {name!r}: {error}") from error


def _data_config(model: nn.Module) -> dict[str, Any]:
    from timm.data import resolve_model_data_config

    return resolve_model_data_config(model)


def images_for(description: Mapping[str, Any], data: str, *, batch_size: int, calibration: bool = False) -> Batches:
    """Batches of ``(images, labels)`` for a ``Classifier.describe()``, to evaluate or, shuffled, to calibrate with.

    Args:
        description: of the classifier the images are for.
        data: ``"digits"``, or a directory with one folder of images per class, in the order of the model's classes.
        batch_size: images in a batch; the last one may be smaller.
        calibration: images to calibrate with: of the digits, training images; of a folder, in shuffled order.

    Raises:
        QFrameworkError: ``data`` is neither, holds no image, or does not fit the model.
    """
    if data == DIGITS or description["model"] == DIGITS:
        if data != description["model"]:
            raise QFrameworkError(f"data {data!r} does not fit model {description['model']!r}; digits go with digits")
        sets = digits.load_digits()
        return digits.loader(sets.calibration if calibration else sets.held_out, batch_size)
    return _image_folder(Path(data), description["data_config"], batch_size, shuffle=calibration)


def _image_folder(root: Path, data_config: Mapping[str, Any], batch_size: int, shuffle: bool) -> Batches:
    from timm.data import create_transform
    from torch.utils.data import DataLoader
    from torchvision.datasets import ImageFolder

    if not root.is_dir():
        raise QFrameworkError(f"data {str(root)!r} is no directory; accepted: 'digits' or a folder of class folders")
    transform = create_transform(**data_config, is_training=False)
    try:
        images = ImageFolder(root, transform=transform)
    except FileNotFoundError as error:  # no class folder, or one without an image
        raise QFrameworkError(f"data {str(root)!r} does not hold one folder of images per class: {error}") from error
    # Shuffled by a fixed seed: calibration sees all classes, and the same images every time.
    return DataLoader(images, batch_size, shuffle=shuffle, generator=torch.Generator().manual_seed(0))


def input_size(description: Mapping[str, Any]) -> tuple[int, int, int]:
    """Channels, height and width of the images of a ``Classifier.describe()``."""
    if description["model"] == DIGITS:
        return 1, digits.IMAGE_SIZE, digits.IMAGE_SIZE
    channels, height, width = description["data_config"]["input_size"]
    return channels, height, width
