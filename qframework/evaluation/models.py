"""Classifiers by name, any timm model or ``"digits"``, and batches of the images they take."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.data import TensorDataset

from qframework.errors import QFrameworkError
from qframework.evaluation import digits, digits_vit
from qframework.evaluation.image_folder import (
    FolderBatches,
    Sample,
    TensorBatches,
    check_class_folders,
    class_index,
    folder_samples,
)

DIGITS = "digits"
DIGITS_WEIGHTS = Path("build", "digits_vit.safetensors")
LabelledBatches = FolderBatches | TensorBatches
Item = TypeVar("Item")


@dataclass(frozen=True)
class Classifier:
    """A model in eval mode and how its images are prepared.

    ``data_config`` is timm's (input_size, mean, std, interpolation, crop_pct, ...), JSON-able; empty for the digits.
    """

    name: str
    model: nn.Module
    data_config: dict[str, Any]

    @property
    def classes(self) -> int | None:
        """Number of classes; None if the model does not say."""
        return getattr(self.model, "num_classes", None) or None

    def describe(self) -> dict[str, Any]:
        """What ``images_for`` needs; saved with a quantized model."""
        return {"model": self.name, "data_config": self.data_config, "classes": self.classes}


def load_classifier(name: str, checkpoint: Path | None = None, *, pretrained: bool = False) -> Classifier:
    """A timm model by name, or the digits ViT, which is trained unless ``checkpoint`` holds it.

    Args:
        name: ``"digits"`` or a name of ``timm.list_models()``.
        checkpoint: weights for ``timm.create_model(checkpoint_path=...)``; for the digits, the file that the trained
            model is saved to (default ``build/digits_vit.safetensors``).
        pretrained: download timm's weights. Without weights or a checkpoint, a timm model is random.

    Raises:
        QFrameworkError: timm has no such model, or the checkpoint does not fit it.
        FileNotFoundError: the checkpoint of a timm model does not exist.
    """
    if name == DIGITS:
        model = digits_vit.load_or_train(checkpoint or DIGITS_WEIGHTS)
        return Classifier(DIGITS, model, {})
    from timm.data import resolve_model_data_config

    check_model_name(name)
    model = timm_model("model", name, checkpoint, pretrained)
    return Classifier(name, model, resolve_model_data_config(model))


def check_model_name(name: str) -> None:
    """Raise QFrameworkError unless ``name`` is ``"digits"`` or a model of timm."""
    if name == DIGITS:
        return
    import timm

    if not timm.is_model(name):
        message = f"model must be 'digits' or a name of timm.list_models(), got {name!r}"
        raise QFrameworkError(message + did_you_mean(name, timm.list_models()))


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """The end of an error message that suggests names close to ``name``; empty if there are none."""
    close = difflib.get_close_matches(name, known)
    return f". Did you mean {' or '.join(close)}?" if close else ""


def timm_model(what: str, name: str, checkpoint: Path | None, pretrained: bool, **settings: Any) -> nn.Module:
    """``timm.create_model`` in eval mode; errors name the model as ``what``.

    Raises:
        QFrameworkError: the checkpoint does not fit the model.
        FileNotFoundError: the checkpoint does not exist.
    """
    import timm

    if checkpoint is not None and not checkpoint.is_file():
        raise FileNotFoundError(f"checkpoint {checkpoint} does not exist")
    try:
        return timm.create_model(name, pretrained=pretrained, checkpoint_path=str(checkpoint or ""), **settings).eval()
    except RuntimeError as error:  # from load_state_dict
        if checkpoint is None:
            raise
        model = timm.create_model(name, **settings)
        state = timm.models.load_state_dict(str(checkpoint))
        found = differences(state, model.state_dict())
        raise QFrameworkError(f"checkpoint {checkpoint} does not fit {what} {name!r}: {found or error}") from error


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """What keeps the state dict ``found`` from being loaded as ``wanted``, with up to three names of each kind."""
    shapes = [
        f"{name} {tuple(found[name].shape)} instead of {tuple(wanted[name].shape)}"
        for name in wanted
        if name in found and found[name].shape != wanted[name].shape
    ]
    kinds = {
        "missing": [name for name in wanted if name not in found],
        "unknown": [name for name in found if name not in wanted],
        "of another shape": shapes,
    }
    return "; ".join(f"{len(names)} {kind}: {_first(names)}" for kind, names in kinds.items() if names)


def _first(names: Sequence[str]) -> str:
    return ", ".join([*names[:3], *(["..."] if len(names) > 3 else [])])


def check_data_fits(model: str, data: str) -> None:
    """Raise QFrameworkError unless model and data set are both ``"digits"``, or the data set is an existing folder."""
    if (data == DIGITS) != (model == DIGITS):
        raise QFrameworkError(f"data {data!r} does not fit model {model!r}: the digits need the model 'digits'")
    check_data_exists(data)


def check_data_exists(data: str) -> None:
    """Raise QFrameworkError unless the data set is ``"digits"`` or an existing folder."""
    if data != DIGITS and not (data and Path(data).is_dir()):
        raise QFrameworkError(f"data must be 'digits' or a folder of class folders, got {data!r}")


def check_data_before_loading(model: str, data: str, *, calibration: bool = False) -> None:
    """Check data for a model that is not built yet, so that nothing is trained or downloaded in vain.

    Args:
        model: ``"digits"`` or a name of ``timm.list_models()``.
        data: ``"digits"`` or a folder with one folder of images per class.
        calibration: whether any classes do.

    Raises:
        QFrameworkError: there is no such folder, a class folder holds no image, or the classes are not the model's.
    """
    check_data_fits(model, data)
    if data == DIGITS:
        return
    import timm

    check_class_folders(Path(data))
    config = timm.get_pretrained_cfg(model)
    if not calibration and config is not None:
        class_index(Path(data), config.num_classes or None)


def images_for(
    description: Mapping[str, Any],
    data: str,
    *,
    batch_size: int,
    calibration: bool = False,
    limit: int | None = None,
    class_names: Sequence[str] | None = None,
    workers: int = 0,
) -> LabelledBatches:
    """Batches of ``(images, labels)`` for a classifier, to evaluate it or to calibrate.

    Damaged images of a folder are left out; ``damaged`` of the batches lists them with reasons.

    Args:
        description: ``Classifier.describe()``.
        data: ``"digits"``, or a folder with one folder of images per class, in the order of the model's classes or
            named after ImageNet's identifiers (``n01440764``).
        batch_size: images in a batch; the last one may be smaller.
        calibration: choose images to calibrate with: the training images of the digits, or the images of a folder in
            shuffled order, with any classes.
        limit: maximum number of images: spread evenly over all, or the first of the shuffled ones.
        class_names: the names of the class folders in the order of the model's classes.
        workers: processes that read a folder's images; 0 reads them in this process.

    Raises:
        QFrameworkError: ``data`` does not exist, holds no image, or does not fit the model.
    """
    check_data_fits(description["model"], data)
    if data == DIGITS:
        sets = digits.load_digits()
        chosen = sets.calibration if calibration else sets.held_out
        kept = _chosen(range(len(chosen)), limit, spread=not calibration)
        return TensorBatches(TensorDataset(*(tensor[list(kept)] for tensor in chosen.tensors)), batch_size)
    root = Path(data)
    index = None if calibration else class_index(root, description.get("classes"), class_names)
    samples = folder_samples(root, index)
    if calibration:
        # Shuffled with a fixed seed, so that calibration sees all classes and always the same images.
        order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0)).tolist()
        samples = [samples[place] for place in order]
    samples = list(_chosen(samples, limit, spread=not calibration))
    return _folder_batches(root, samples, description["data_config"], batch_size, workers)


def _folder_batches(
    root: Path, samples: Sequence[Sample], data_config: Mapping[str, Any], batch_size: int, workers: int
) -> FolderBatches:
    from timm.data import create_transform

    transform = create_transform(**data_config, is_training=False)
    grey = data_config["input_size"][0] == 1
    return FolderBatches(root, samples, transform, batch_size, grey=grey, workers=workers)


def _chosen(items: Sequence[Item], limit: int | None, *, spread: bool) -> Sequence[Item]:
    """``limit`` items: evenly spaced, or the first ones."""
    if limit is not None and limit < 1:
        raise QFrameworkError(f"images_for: limit must be None or a positive number of images, got {limit}")
    if limit is None or limit >= len(items):
        return items
    return [items[place * len(items) // limit] for place in range(limit)] if spread else items[:limit]


def input_size(description: Mapping[str, Any]) -> tuple[int, int, int]:
    """Channels, height and width of the images of a ``Classifier.describe()``."""
    if description["model"] == DIGITS:
        return 1, digits.IMAGE_SIZE, digits.IMAGE_SIZE
    channels, height, width = description["data_config"]["input_size"]
    return channels, height, width
