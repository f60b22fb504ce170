"""A timm VisionTransformer for the handwritten digits: trained once on one core, then loaded from disk."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qframework.devices import one_thread
from qframework.errors import QFrameworkError
from qframework.evaluation import checkpoint, digits
from qframework.evaluation.progress import progress_bar
from qframework.evaluation.schedule import warmup_cosine


@dataclass(frozen=True)
class TrainingConfig:
    """Everything the trained weights depend on; a checkpoint with other values is trained again.

    With 192 channels, the quantized model takes about 27 percent of the FP32 bytes, scales and float layers included.
    ``shifted`` is the share of the training images that are shifted by up to a pixel.
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
    shifted: float = 1.0
    seed: int = 0


# "small" trains in seconds; "deep" has twice the blocks for errors to accumulate.
SIZES = {
    "small": TrainingConfig(embed_dim=96, depth=2, learning_rate=1.5e-3),
    "base": TrainingConfig(),
    "deep": TrainingConfig(embed_dim=96, depth=6),
}
# As accurate as "base" after a third of its epochs, since half of the images stay where they are.
QUICK = TrainingConfig(epochs=12, batch_size=16, learning_rate=5e-4, shifted=0.5)


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
    # timm's 0.02 is small next to the patches. Larger position embeddings train in a fifth of the epochs.
    nn.init.normal_(model.get_parameter("pos_embed"), std=config.position_std)
    return model


def train(config: TrainingConfig | None = None, *, show_progress: bool = True) -> nn.Module:
    """Train the ViT on the CPU from ``config.seed``, in eval mode at the end; leaves the caller's generators alone.

    ``config`` defaults to QUICK.
    """
    config = config or QUICK
    # The matrices are small: beside other processes, threads that wait for each other take ten times as long.
    with torch.random.fork_rng(devices=[]), one_thread():
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
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup_cosine(step, total, config.warmup))
    with progress_bar("Training the ViT on digits", total, show_progress) as advance:
        for _ in range(config.epochs):
            for chosen in torch.randperm(len(images)).split(config.batch_size):
                logits = model(shift_by_a_pixel(images[chosen], config.shifted))
                loss = F.cross_entropy(logits, labels[chosen], label_smoothing=config.label_smoothing)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
                schedule.step()
                advance()


def shift_by_a_pixel(images: Tensor, share: float = 1.0) -> Tensor:
    """Images of ``(B, 1, H, W)`` shifted by -1, 0 or 1 pixel along both axes and filled with background (-1).

    ``share``: the probability of an image to be shifted; the others stay as they are.
    """
    batch, _, height, width = images.shape
    padded = F.pad(images, (1, 1, 1, 1), value=-1.0)
    top, left = torch.randint(0, 3, (2, batch, 1))
    if share < 1:
        kept = torch.rand(batch, 1) >= share
        top, left = top.masked_fill(kept, 1), left.masked_fill(kept, 1)
    rows = (top + torch.arange(height)).unsqueeze(2)
    columns = (left + torch.arange(width)).unsqueeze(1)
    return padded[torch.arange(batch).view(-1, 1, 1), 0, rows, columns].unsqueeze(1)


def load_or_train(path: str | Path, config: TrainingConfig | None = None, *, show_progress: bool = True) -> nn.Module:
    """The trained ViT of ``config``, by default QUICK, in eval mode; see ``checkpoint.load_or_train``."""
    return checkpoint.load_or_train(
        path, config or QUICK, build_model, lambda wanted: train(wanted, show_progress=show_progress)
    )


def sized(size: str, seed: int = 0) -> TrainingConfig:
    """The configuration of one of SIZES; ``seed`` also decides which digits are held out.

    Raises:
        QFrameworkError: there is no such size.
    """
    if size not in SIZES:
        raise QFrameworkError(f"sized: size must be one of {', '.join(SIZES)}, got {size!r}")
    return replace(SIZES[size], seed=seed)
