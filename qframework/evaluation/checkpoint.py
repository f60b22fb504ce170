"""Checkpoints of models trained here: loaded only if file and configuration match exactly, else trained again."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from qframework.errors import FileFormatError
from qframework.files import atomic_write, open_regular
from qframework.outputs import check_output_file

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_logger = logging.getLogger(__name__)
Model = TypeVar("Model", bound=nn.Module)
Config = TypeVar("Config", bound="DataclassInstance")


def load_or_train(
    path: str | Path, config: Config, build: Callable[[Config], Model], train: Callable[[Config], Model]
) -> Model:
    """The trained model in eval mode: loaded from ``path`` if it holds this configuration, else trained and saved.

    A checkpoint of another configuration or with damaged weights is replaced, with a warning. A file that this function
    did not write is left alone.

    Args:
        path: a safetensors file; it and its folder need not exist.
        config: a dataclass of JSON-able fields, everything the weights depend on.
        build: the untrained model of ``config``.
        train: the trained model of ``config``.

    Raises:
        FileFormatError: ``path`` is not a regular file, or this function did not write it.
        QFrameworkError: the model has to be trained and ``path`` cannot be written.
    """
    path = Path(path)
    if path.exists() and not _is_empty(path):
        try:
            return _load(path, config, build)
        except _StaleCheckpoint as error:
            _logger.warning("%s: %s; training again", path, error)
    check_output_file(path, "checkpoint", make_folder=True)
    model = train(config).eval()
    _save(model, path, config)
    return model


class _StaleCheckpoint(Exception):
    """The checkpoint does not hold the model that the configuration describes."""


def _save(model: nn.Module, path: Path, config: DataclassInstance) -> None:
    from safetensors.torch import save

    # Copied because safetensors refuses tied weights, which share memory.
    weights = {
        name: weight.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, weight in model.state_dict().items()
    }
    metadata = {"config": _fingerprint(config), "weights": state_digest(weights)}
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        file.write(save(weights, metadata=metadata))


def _is_empty(path: Path) -> bool:
    try:
        with open_regular(path) as file:  # opening a FIFO would block
            return not file.read(1)
    except FileFormatError as error:
        raise FileFormatError(f"checkpoint: {error}") from error


def _load(path: Path, config: Config, build: Callable[[Config], Model]) -> Model:
    metadata, weights = _read(path)
    if metadata["config"] != _fingerprint(config):
        raise _StaleCheckpoint(f"trained with {metadata['config']}, wanted {_fingerprint(config)}")
    if metadata["weights"] != state_digest(weights):
        raise _StaleCheckpoint("the weights are damaged: their SHA-256 differs from the recorded one")
    model = build(config)
    model.load_state_dict(weights)
    return model.eval()


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
            metadata = file.metadata() or {}
    except SafetensorError as error:
        raise _not_ours(path, str(error)) from error
    if not {"config", "weights"} <= metadata.keys():
        raise _not_ours(path, "no configuration in its metadata")
    return metadata, weights


def _not_ours(path: Path, reason: str) -> FileFormatError:
    return FileFormatError(
        f"checkpoint: path must be a checkpoint of a model trained here or a new file, got {path} ({reason}), which is "
        "left as it is"
    )


def _fingerprint(config: DataclassInstance) -> str:
    return json.dumps(asdict(config), sort_keys=True)


def state_digest(weights: Mapping[str, Tensor]) -> str:
    """SHA-256 of the names, dtypes, shapes and bytes of a ``state_dict()`` on any device."""
    digest = hashlib.sha256()
    for name, weight in sorted(weights.items()):
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        plain = weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8)  # NumPy knows no bfloat16
        digest.update(plain.numpy().tobytes())
    return digest.hexdigest()
