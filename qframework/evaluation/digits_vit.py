"""A timm VisionTransformer for the handwritten digits, trained in about a minute on two CPU cores and kept on disk."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qframework.evaluation import digits
from qframework.evaluation.progress import progress_bar
from qframework.serialization import atomic_write

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingConfig:
    """Everything the trained weights depend on; the checkpoint is kept only while all of it is unchanged.

    With 192 channels the INT8 weights, their scales and zero points and what stays in float make up about 27 percent
    of the FP32 bytes.
    """

    embed_dim: int = 192
    depth: int = 3
    num_heads: int = 3
    patch_size: int = 2
    position_std: float = 1.0
    epochs: int = 40
    batch_size: int = 32
    learning_rate: float = 7e-4
    warmup: float = 0.07
    weight_decay: float = 0.1
    label_smoothing: float = 0.1
    seed: int = 0


def build_model(config: TrainingConfig | None = None) -> nn.Module:
    """The untrained ViT: ``(B, 1, 8, 8)`` float32 to ``(B, 10)`` logits. Its weights come from the global generator."""
    from timm.models.vision_transformer import VisionTransformer

    config = config or TrainingConfig()
    model = VisionTransformer(
        img_size=digits.IMAGE_SIZE,
        patch_size=config.patch_size,
        in_chans=1,
        num_classes=digits.CLASSES,
        embed_dim=config.embed_dim,
        depth=config.depth,
        num_heads=config.num_heads,
        class_token=False,
        global_pool="avg",
        weight_init="jax",
    )
    # timm's 0.02 is lost beside the patches: positions this large are told apart from the first step on, which takes a
    # fifth of the epochs.
    nn.init.normal_(model.get_parameter("pos_embed"), std=config.position_std)
    return model


def train(config: TrainingConfig | None = None, *, show_progress: bool = True) -> nn.Module:
    """Train the ViT on the CPU from ``config.seed``; returned in eval mode. The caller's generators are not touched."""
    config = config or TrainingConfig()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = build_model(config).train()
        _fit(model, config, show_progress)
    return model.eval()


def _fit(model: nn.Module, config: TrainingConfig, show_progress: bool) -> None:
    images, labels = digits.load_digits(config.seed).train.tensors
    steps = -(-len(images) // config.batch_size)
    total = config.epochs * steps
    rate, decay = config.learning_rate, config.weight_decay
    optimizer = torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.98), weight_decay=decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate_factor(step, total, config.warmup))
    with progress_bar("Training the ViT on digits", total, show_progress) as advance:
        for _ in range(config.epochs):
            for chosen in torch.randperm(len(images)).split(config.batch_size):
                logits = model(shift_by_a_pixel(images[chosen]))
                loss = F.cross_entropy(logits, labels[chosen], label_smoothing=config.label_smoothing)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
                schedule.step()
                advance()


def _rate_factor(step: int, total: int, warmup: float) -> float:
    """Share of the learning rate at a step: up in a line over the first ``warmup`` of all steps, then down a cosine."""
    rising = max(1, round(warmup * total))
    if step < rising:
        return (step + 1) / rising
    return (1 + math.cos(math.pi * min(1.0, (step - rising) / max(1, total - rising)))) / 2


def shift_by_a_pixel(images: Tensor) -> Tensor:
    """Each image of ``(B, 1, H, W)`` moved by -1, 0 or 1 pixel along both axes; the background (-1) moves in."""
    batch, _, height, width = images.shape
    padded = F.pad(images, (1, 1, 1, 1), value=-1.0)
    top, left = torch.randint(0, 3, (2, batch, 1))
    rows = (top + torch.arange(height)).unsqueeze(2)
    columns = (left + torch.arange(width)).unsqueeze(1)
    return padded[torch.arange(batch).view(-1, 1, 1), 0, rows, columns].unsqueeze(1)


def load_or_train(path: str | Path, config: TrainingConfig | None = None, *, show_progress: bool = True) -> nn.Module:
    """The trained ViT in eval mode, from ``path`` if that file holds exactly this configuration, else trained and kept.

    A checkpoint of another configuration, or one that is damaged, is replaced; a warning says why.
    """
    config = config or TrainingConfig()
    path = Path(path)
    if path.exists():
        try:
            return _load(path, config)
        except _StaleCheckpoint as error:
            _logger.warning("%s: %s; training again", path, error)
    model = train(config, show_progress=show_progress)
    _save(model, path, config)
    return model


class _StaleCheckpoint(Exception):
    """The checkpoint cannot stand for the model that the configuration describes."""


def _save(model: nn.Module, path: Path, config: TrainingConfig) -> None:
    from safetensors.torch import save

    weights = model.state_dict()
    metadata = {"config": _fingerprint(config), "weights": _digest(weights)}
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        file.write(save(weights, metadata=metadata))


def _load(path: Path, config: TrainingConfig) -> nn.Module:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError) as error:
        raise _StaleCheckpoint(f"not a readable checkpoint ({error})") from error
    if metadata.get("config") != _fingerprint(config):
        raise _StaleCheckpoint(f"trained with {metadata.get('config')}, wanted {_fingerprint(config)}")
    if metadata.get("weights") != _digest(weights):
        raise _StaleCheckpoint("the weights are damaged: their SHA-256 differs from the recorded one")
    model = build_model(config)
    model.load_state_dict(weights)
    return model.eval()


def _fingerprint(config: TrainingConfig) -> str:
    return json.dumps(asdict(config), sort_keys=True)


def _digest(weights: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, weight in sorted(weights.items()):
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}".encode())
        digest.update(weight.detach().contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()
