"""Segment Anything with box prompts: transformers' SamModel, split into image encoder and decoder.

The encoder takes nearly all of the time and is quantized; prompts and masks stay in float32. One of timm's ``samvit_*``
encoders can replace it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from qframework.compat.dispatch import FakeTensorMode
from qframework.compat.modules import with_submodules
from qframework.errors import QFrameworkError
from qframework.evaluation.models import did_you_mean, timm_model

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import SamImageProcessor, SamModel

_BOXES_AT_ONCE = 32  # bounds memory: their masks are scaled up to the size of the image in float32


class SamEncoder(nn.Module):
    """transformers' encoder as a function of one tensor: ``(B, 3, S, S)`` to ``(B, C, S / patch, S / patch)``."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.encoder(pixel_values, return_dict=True).last_hidden_state


class TimmSamEncoder(nn.Module):
    """timm's ``samvit_*`` as the same function, with its neck and without pooling and head."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.encoder.forward_features(pixel_values)  # type: ignore[operator]


class Picture(NamedTuple):
    """An encoder input ``pixel_values (3, S, S)`` float32, and the image's size before and after scaling."""

    pixel_values: Tensor
    original_size: tuple[int, int]
    scaled_size: tuple[int, int]


def prepare_picture(processor: SamImageProcessor, image: Image) -> Picture:
    """Scale, normalize and pad an RGB image of any size for the encoder."""
    made = processor(image, return_tensors="pt")
    (original,), (scaled,) = made["original_sizes"].tolist(), made["reshaped_input_sizes"].tolist()
    return Picture(made["pixel_values"][0], tuple(original), tuple(scaled))


@dataclass(frozen=True)
class Sam:
    """A model in eval mode, in parts.

    Attributes:
        name: the name it was loaded by, for results.
        encoder: ``(B, 3, S, S)`` to image embeddings; the part that is quantized.
        decoder: the SamModel without its encoder: embeddings and boxes to masks.
        processor: scales, pads and normalizes images.
    """

    name: str
    encoder: nn.Module
    decoder: SamModel
    processor: SamImageProcessor

    @property
    def image_size(self) -> int:
        """Height and width of the encoder's input in pixels."""
        return self.processor.pad_size["height"]

    @torch.no_grad()
    def masks(self, embedding: Tensor, boxes: Tensor, picture: Picture) -> Tensor:
        """The mask of each box.

        Args:
            embedding: ``(C, S / patch, S / patch)``, the encoder's output for one image.
            boxes: ``(K, 4)`` float32: left, top, right, bottom in pixels of the original image.
            picture: the image, for its sizes.

        Returns:
            ``(K, H, W)`` bool on the device of ``embedding``, in the original size.
        """
        (height, width), (scaled_height, scaled_width) = picture.original_size, picture.scaled_size
        factors = torch.tensor([scaled_width / width, scaled_height / height], device=embedding.device).repeat(2)
        scaled = boxes.to(embedding.device) * factors
        masks = [self._masks(embedding.float(), some, picture) for some in scaled.split(_BOXES_AT_ONCE)]
        return torch.cat(masks)

    def _masks(self, embedding: Tensor, boxes: Tensor, picture: Picture) -> Tensor:
        output = self.decoder(
            image_embeddings=embedding.unsqueeze(0), input_boxes=boxes.unsqueeze(0), multimask_output=False
        )
        sizes = [picture.original_size], [picture.scaled_size]
        (masks,) = self.processor.post_process_masks(output.pred_masks, *sizes)
        return masks[:, 0]


def sam_image_size(name: str) -> int:
    """Height and width of a SamModel's encoder input in pixels, from its configuration file.

    Raises:
        QFrameworkError: there is no such model, or it is not a SAM model.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise QFrameworkError(f"SAM {name!r} cannot be loaded: {error}") from error
    if config.model_type != "sam":
        raise QFrameworkError(f"model {name!r} must have the type 'sam', got {config.model_type!r}")
    return config.vision_config.image_size


def load_sam(name: str, encoder: nn.Module | None = None, *, encoder_name: str = "") -> Sam:
    """A SamModel with its image processor.

    Args:
        name: a folder of ``save_pretrained``, or a name on the Hugging Face hub, which needs a network.
        encoder: replaces the model's own: ``(B, 3, S, S)`` to embeddings of the same shape; see ``load_timm_encoder``.
        encoder_name: its name in results.

    Raises:
        QFrameworkError: there is no such model, it is not a SAM model, or the encoder does not fit it.
        ModuleNotFoundError: transformers is not installed (``pip install transformers``).
    """
    model = _load_model(name)
    vision, prompt = model.config.vision_config, model.config.prompt_encoder_config
    processor = _processor(name, vision.image_size)
    parts = encoder or SamEncoder(model.vision_encoder)
    # Without the encoder, which the decoder would otherwise keep in memory and move to the device.
    decoder = copy.copy(model)
    with_submodules(decoder, vision_encoder=None)
    grid = prompt.image_embedding_size
    _check_encoder(parts, vision.image_size, (prompt.hidden_size, grid, grid), encoder_name or name)
    return Sam(f"{name} with {encoder_name}" if encoder_name else name, parts.eval(), decoder, processor)


def _load_model(name: str) -> SamModel:
    from transformers import SamModel

    sam_image_size(name)  # refuses other models, for which transformers would use random weights
    try:
        model, info = SamModel.from_pretrained(name, output_loading_info=True)
    except (OSError, ValueError, RuntimeError) as error:  # no weights, or wrong shapes
        raise QFrameworkError(f"SAM {name!r} cannot be loaded: {error}") from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise QFrameworkError(f"SAM {name!r} lacks {len(missing)} of its weights, such as {missing[0]}")
    return model.eval()


def _processor(name: str, size: int) -> SamImageProcessor:
    """The processor saved with the model, or SAM's default at the model's image size."""
    from transformers import SamImageProcessor

    if Path(name).is_dir() and not any(Path(name, file).is_file() for file in _PROCESSOR_FILES):
        return SamImageProcessor(size={"longest_edge": size}, pad_size={"height": size, "width": size})
    try:
        processor = SamImageProcessor.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise QFrameworkError(f"the image processor of SAM {name!r} cannot be loaded: {error}") from error
    if (processor.pad_size["height"], processor.pad_size["width"]) != (size, size):
        raise QFrameworkError(f"SAM {name!r}: images must be padded to {size} x {size}, got {dict(processor.pad_size)}")
    return processor


_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


@torch.no_grad()
def _check_encoder(encoder: nn.Module, size: int, expected: Sequence[int], name: str) -> None:
    """Raise QFrameworkError unless the encoder's output has the expected shape; computes on fake tensors."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        try:
            shape = tuple(encoder(torch.empty(1, 3, size, size)).shape[1:])
        except (RuntimeError, AssertionError, ValueError, TypeError) as error:
            raise QFrameworkError(f"encoder {name!r} does not take images of {size} x {size}: {error}") from error
    if shape != tuple(expected):
        raise QFrameworkError(f"encoder {name!r} must give embeddings of shape {tuple(expected)}, got {shape}")


def load_timm_encoder(
    name: str, image_size: int, checkpoint: Path | None = None, *, pretrained: bool = False
) -> TimmSamEncoder:
    """One of timm's ``samvit_*`` encoders.

    Args:
        name: one of ``timm.list_models("samvit*")``, with or without a tag (``samvit_base_patch16.sa1b``).
        image_size: height and width of its images in pixels.
        checkpoint: weights for ``timm.create_model(checkpoint_path=...)``.
        pretrained: download timm's weights. Without weights or a checkpoint, the encoder is random.

    Raises:
        QFrameworkError: timm has no such model, or the checkpoint does not fit it.
        FileNotFoundError: the checkpoint does not exist.
    """
    import timm

    if not timm.is_model(name) or not name.startswith("samvit"):
        known = timm.list_models("samvit*")
        message = f"encoder must be one of {', '.join(known)}, got {name!r}"
        raise QFrameworkError(message + did_you_mean(name, known))
    model = timm_model("encoder", name, checkpoint, pretrained, img_size=image_size, num_classes=0)
    return TimmSamEncoder(model).eval()
