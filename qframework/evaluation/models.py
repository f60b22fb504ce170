"""A classifier by name, with the images it is meant for: any timm model, or ``"digits"``."""

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
from qframework.evaluation.image_folder import FolderBatches, Sample, TensorBatches, class_index, folder_samples

DIGITS = "digits"
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
        """How many classes it tells apart; None where the model does not say."""
        return getattr(self.model, "num_classes", None) or None

    def describe(self) -> dict[str, Any]:
        """What ``images_for`` needs, to be kept with a saved model."""
        return {"model": self.name, "data_config": self.data_config, "classes": self.classes}


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


def check_model_name(name: str) -> None:
    """Raise QFrameworkError unless ``name`` is ``"digits"`` or timm's."""
    import timm

    if name != DIGITS and not timm.is_model(name):
        close = difflib.get_close_matches(name, timm.list_models())
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        raise QFrameworkError(f"model {name!r} is unknown; {hint}accepted: 'digits' or a name of timm.list_models()")


def _timm_model(name: str, checkpoint: Path | None, pretrained: bool) -> nn.Module:
    import timm

    check_model_name(name)
    if checkpoint is not None and not checkpoint.is_file():
        raise FileNotFoundError(f"checkpoint {checkpoint} does not exist")
    try:
        return timm.create_model(name, pretrained=pretrained, checkpoint_path=str(checkpoint or "")).eval()
    except RuntimeError as error:  # what load_state_dict raises
        raise QFrameworkError(f"checkpoint {checkpoint} does not fit model {name!r}: {error}") from error


def _data_config(model: nn.Module) -> dict[str, Any]:
    from timm.data import resolve_model_data_config

    return resolve_model_data_config(model)


def check_data_fits(model: str, data: str) -> None:
    """Raise QFrameworkError where one of a model's and a data set's name is ``"digits"`` and the other is not.

    Any other data set is a folder, which must be there.
    """
    if (data == DIGITS) != (model == DIGITS):
        raise QFrameworkError(f"data {data!r} does not fit model {model!r}; digits go with digits")
    if data != DIGITS and not (data and Path(data).is_dir()):
        raise QFrameworkError(f"data {data!r} is no directory; accepted: 'digits' or a folder of class folders")


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
    """Batches of ``(images, labels)`` for a ``Classifier.describe()``, to evaluate or, shuffled, to calibrate with.

    Damaged images of a folder are left out; the batches' ``damaged`` says which and why.

    Args:
        description: of the classifier the images are for.
        data: ``"digits"``, or a directory with one folder of images per class, in the order of the model's classes or
            named after ImageNet's identifiers (``n01440764``).
        batch_size: images in a batch; the last one may be smaller.
        calibration: images to calibrate with: of the digits, training images; of a folder, in shuffled order and
            whatever its classes.
        limit: use only so many images, spread evenly over all, or when calibrating the first of the shuffled ones.
        class_names: the names of the class folders in the order of the model's classes.
        workers: processes that read a folder's images; 0: this one.

    Raises:
        QFrameworkError: ``data`` is neither, holds no image, or does not fit the model.
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
        # By a fixed seed: calibration sees all classes, and the same images every time.
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
    """The first ``limit`` items, or so many at equal distances."""
    if limit is not None and limit < 1:
        raise QFrameworkError(f"limit={limit}; accepted: None or a positive number of images")
    if limit is None or limit >= len(items):
        return items
    return [items[place * len(items) // limit] for place in range(limit)] if spread else items[:limit]


def input_size(description: Mapping[str, Any]) -> tuple[int, int, int]:
    """Channels, height and width of the images of a ``Classifier.describe()``."""
    if description["model"] == DIGITS:
        return 1, digits.IMAGE_SIZE, digits.IMAGE_SIZE
    channels, height, width = description["data_config"]["input_size"]
    return channels, height, width
