"""A small SAM-type model, trained on :mod:`demos.shapes` with box prompts and kept on disk.

It is transformers' SamModel in a small configuration: its image encoder has windows, padded ones among them, global
attention and decomposed relative positions as SAM's own. ``examples/train_sam_shapes.py`` trains and measures it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from demos import shapes
from qframework.errors import QFrameworkError
from qframework.evaluation import checkpoint
from qframework.evaluation.progress import progress_bar
from qframework.evaluation.schedule import warmup_cosine

if TYPE_CHECKING:
    from transformers import SamModel

    from qframework.evaluation.tasks import BoxSegmentation

# Mean and standard deviation of SAM's image processor, of pixels between 0 and 1.
PIXEL_MEAN, PIXEL_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
UPSCALING = 4  # pixels of SAM's masks along a side of one patch


@dataclass(frozen=True)
class SamTrainingConfig:
    """Everything the trained weights depend on; a checkpoint with other values is trained again."""

    image_size: int = 96
    patch_size: int = 8
    window_size: int = 5
    embed_dim: int = 128
    depth: int = 4
    num_heads: int = 2
    global_blocks: tuple[int, ...] = (1, 3)
    decoder_dim: int = 64
    images: int = 3000
    epochs: int = 28
    batch_size: int = 8
    boxes: int = 4
    learning_rate: float = 1e-3
    warmup: float = 0.05
    weight_decay: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "global_blocks", tuple(self.global_blocks))
        if self.image_size % self.patch_size:
            raise QFrameworkError(
                f"SamTrainingConfig: image_size must be a multiple of patch_size {self.patch_size}, got "
                f"{self.image_size}"
            )


def build_model(config: SamTrainingConfig | None = None) -> SamModel:
    """The untrained model. Its weights come from the global generator.

    Raises:
        ModuleNotFoundError: transformers is not installed (``pip install transformers``).
    """
    from transformers import SamConfig, SamMaskDecoderConfig, SamModel, SamPromptEncoderConfig, SamVisionConfig

    config = config or SamTrainingConfig()
    sizes = {"image_size": config.image_size, "patch_size": config.patch_size}
    vision = SamVisionConfig(
        **sizes,
        hidden_size=config.embed_dim,
        output_channels=config.decoder_dim,
        num_hidden_layers=config.depth,
        num_attention_heads=config.num_heads,
        window_size=config.window_size,
        global_attn_indexes=list(config.global_blocks),
        num_pos_feats=config.decoder_dim // 2,
    )
    prompt = SamPromptEncoderConfig(**sizes, hidden_size=config.decoder_dim)
    decoder = SamMaskDecoderConfig(
        hidden_size=config.decoder_dim,
        mlp_dim=4 * config.decoder_dim,
        num_attention_heads=4,
        iou_head_hidden_dim=config.decoder_dim,
    )
    model = SamModel(SamConfig(vision_config=vision, prompt_encoder_config=prompt, mask_decoder_config=decoder))
    _initialize(model)
    return model.eval()


@torch.no_grad()
def _initialize(model: SamModel) -> None:
    """Initialize for training: transformers starts the encoder at 1e-10 and leaves positions to a checkpoint."""
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            nn.init.trunc_normal_(module.weight, std=module.weight[0].numel() ** -0.5)
        elif isinstance(module, nn.ConvTranspose2d):
            nn.init.trunc_normal_(module.weight, std=module.weight.shape[0] ** -0.5)
    nn.init.normal_(model.vision_encoder.pos_embed, std=0.5)
    nn.init.normal_(model.shared_image_embedding.positional_embedding)
    for layer in model.vision_encoder.layers:
        nn.init.normal_(layer.attn.rel_pos_h, std=0.02)
        nn.init.normal_(layer.attn.rel_pos_w, std=0.02)


# Data -----------------------------------------------------------------------------------------------------------------


class Batch(NamedTuple):
    """Images, prompts and the wanted masks.

    ``pixel_values (B, 3, S, S)`` float32, normalized; ``boxes (B, K, 4)`` float32, left, top, right, bottom in pixels;
    ``masks (B, K, M, M)`` float32, the share of each of SAM's mask pixels that the object covers.
    """

    pixel_values: Tensor
    boxes: Tensor
    masks: Tensor

    def to(self, device: torch.device | str) -> Batch:
        return Batch(*(tensor.to(device) for tensor in self))


def normalize(images: Tensor) -> Tensor:
    """Normalize ``(B, 3, H, W)`` uint8 as SAM's image processor does, to float32."""
    mean, std = (torch.tensor(values, device=images.device).view(3, 1, 1) for values in (PIXEL_MEAN, PIXEL_STD))
    return (images.float() / 255 - mean) / std


class _TrainingSet:
    """All training images and masks in memory, as uint8."""

    def __init__(self, config: SamTrainingConfig, advance: Any) -> None:
        self._config = config
        self._images: list[Tensor] = []
        self._boxes: list[Tensor] = []
        self._masks: list[Tensor] = []
        for scene in shapes.scenes(config.images, "train", size=config.image_size, seed=config.seed):
            self._images.append(torch.from_numpy(scene.image).permute(2, 0, 1))
            self._boxes.append(torch.tensor([shape.box for shape in scene.shapes], dtype=torch.float32))
            masks = torch.from_numpy(np.stack([shape.mask for shape in scene.shapes])).float()
            small = F.avg_pool2d(masks.unsqueeze(1), config.patch_size // UPSCALING).squeeze(1)
            self._masks.append((255 * small).round().to(torch.uint8))
            advance()

    def epoch(self) -> Iterator[Batch]:
        """Every image once, mirrored and transposed at random, with ``config.boxes`` of its objects as prompts."""
        for chosen in torch.randperm(len(self._images)).split(self._config.batch_size):
            yield self._moved(self._batch(chosen.tolist()))

    def _batch(self, chosen: list[int]) -> Batch:
        objects = [torch.randint(len(self._boxes[i]), (self._config.boxes,)) for i in chosen]
        images = torch.stack([self._images[i] for i in chosen])
        boxes = torch.stack([self._boxes[i][which] for i, which in zip(chosen, objects, strict=True)])
        masks = torch.stack([self._masks[i][which] for i, which in zip(chosen, objects, strict=True)])
        colours = images[:, torch.randperm(3)]
        return Batch(normalize(colours), _shaken(boxes, self._config.image_size), masks.float() / 255)

    def _moved(self, batch: Batch) -> Batch:
        """Mirror, flip and transpose the whole batch, each with probability one half."""
        images, boxes, masks = batch
        size = self._config.image_size
        for dim, (low, high) in ((-1, (0, 2)), (-2, (1, 3))):
            if torch.rand(()) < 0.5:
                images, masks = images.flip(dim), masks.flip(dim)
                boxes = boxes.clone()
                boxes[..., [low, high]] = size - boxes[..., [high, low]]
        if torch.rand(()) < 0.5:
            images, masks, boxes = images.mT, masks.mT, boxes[..., [1, 0, 3, 2]]
        return Batch(images, boxes, masks)


def _shaken(boxes: Tensor, size: int, share: float = 0.05) -> Tensor:
    """Boxes with normal noise of 5 percent of the box on each side, as if drawn by hand."""
    extent = (boxes[..., 2:] - boxes[..., :2]).repeat(1, 1, 2)
    return (boxes + share * extent * torch.randn_like(boxes)).clamp(0, size)


# Training -------------------------------------------------------------------------------------------------------------


def train(
    config: SamTrainingConfig | None = None, *, device: torch.device | str = "cpu", show_progress: bool = True
) -> SamModel:
    """Train from ``config.seed``; returns the model on the CPU in eval mode. Leaves the CPU's generator alone."""
    config = config or SamTrainingConfig()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = build_model(config).to(device).train()
        _fit(model, config, torch.device(device), show_progress)
    return model.cpu().eval()


def _fit(model: SamModel, config: SamTrainingConfig, device: torch.device, show_progress: bool) -> None:
    with progress_bar("Drawing shapes", config.images, show_progress) as advance:
        data = _TrainingSet(config, advance)
    total = config.epochs * -(-config.images // config.batch_size)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, config.learning_rate, weight_decay=config.weight_decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup_cosine(step, total, config.warmup))
    with progress_bar("Training SAM on shapes", total, show_progress) as advance:
        for _ in range(config.epochs):
            for batch in data.epoch():
                loss = _loss(model, batch.to(device))
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                nn.utils.clip_grad_norm_(parameters, 1.0)
                optimizer.step()
                schedule.step()
                advance()


def _loss(model: SamModel, batch: Batch) -> Tensor:
    """Cross entropy and dice loss of the masks, and the error of the predicted mask quality."""
    output = model(pixel_values=batch.pixel_values, input_boxes=batch.boxes, multimask_output=False)
    logits, quality = output.pred_masks[:, :, 0], output.iou_scores[:, :, 0]
    probability, wanted = logits.sigmoid(), batch.masks
    overlap = (probability * wanted).sum((-1, -2))
    dice = 1 - (2 * overlap + 1) / ((probability + wanted).sum((-1, -2)) + 1)
    with torch.no_grad():
        found, real = logits > 0, wanted > 0.5
        iou = (found & real).sum((-1, -2)) / (found | real).sum((-1, -2)).clamp(min=1)
    entropy = F.binary_cross_entropy_with_logits(logits, wanted)
    return 2 * entropy + dice.mean() + 0.1 * F.mse_loss(quality, iou)


def load_or_train(
    path: str | Path,
    config: SamTrainingConfig | None = None,
    *,
    device: torch.device | str = "cpu",
    show_progress: bool = True,
) -> SamModel:
    """The trained model in eval mode on the CPU; see ``checkpoint.load_or_train``.

    Args:
        path: of the checkpoint.
        config: what to train.
        device: where to train.
        show_progress: draw progress bars on stderr.
    """
    return checkpoint.load_or_train(
        path,
        config or SamTrainingConfig(),
        build_model,
        lambda wanted: train(wanted, device=device, show_progress=show_progress),
    )


def save_pretrained(model: SamModel, folder: str | Path) -> None:
    """Write the model and its processor for transformers' ``from_pretrained``."""
    from transformers import SamImageProcessor, SamProcessor

    side = model.config.vision_config.image_size
    mask_side = side // model.config.vision_config.patch_size * UPSCALING
    model.save_pretrained(folder)
    images = SamImageProcessor(
        size={"longest_edge": side},
        pad_size={"height": side, "width": side},
        mask_size={"longest_edge": mask_side},
        mask_pad_size={"height": mask_side, "width": mask_side},
    )
    SamProcessor(images).save_pretrained(folder)


# Measuring ------------------------------------------------------------------------------------------------------------


def box_segmentation(
    folder: str | Path,
    config: SamTrainingConfig | None = None,
    *,
    images: int = 200,
    calibration_images: int = 64,
    device: torch.device | str = "cpu",
    show_progress: bool = True,
) -> BoxSegmentation:
    """The task of segmenting held-out shapes with this model, from files as other models and sets have them.

    ``folder`` gets the trained model (``model``, read by ``from_pretrained``), and ``held_out`` and ``calibration``,
    sets in COCO format; what it holds already is written again, but for the training.

    Args:
        folder: below it everything is kept; the checkpoint is ``folder / "sam.safetensors"``.
        config: what to train.
        images: held-out images.
        calibration_images: of the training split.
        device: where to train.
        show_progress: draw progress bars on stderr.
    """
    from qframework.evaluation.coco import read_instances
    from qframework.evaluation.sam import load_sam
    from qframework.evaluation.tasks import BoxSegmentation

    folder, config = Path(folder), config or SamTrainingConfig()
    model = load_or_train(folder / "sam.safetensors", config, device=device, show_progress=show_progress)
    save_pretrained(model, folder / "model")
    size, seed = config.image_size, config.seed
    held_out = shapes.write_coco(folder / "held_out", images, size=size, seed=seed)
    known = shapes.write_coco(folder / "calibration", calibration_images, "train", size=size, seed=seed)
    return BoxSegmentation(
        load_sam(str(folder / "model")),
        held_out.parent / "images",
        read_instances(held_out),
        read_instances(known),
        calibration_root=known.parent / "images",
        batch_size=16,
    )
