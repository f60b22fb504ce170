"""The tasks of examples/train_vit_digits.py, examples/train_gpt.py and the comparison of precisions."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from demos import python_text
from qframework.evaluation import digits, digits_vit
from qframework.evaluation.accuracy import label_ranks

_EVALUATION_BATCH = 128


@dataclass(frozen=True)
class DigitsTask:
    """Handwritten digits with a timm ViT, as in digits_vit; the seed also decides which digits are held out."""

    config: digits_vit.TrainingConfig = field(default_factory=digits_vit.TrainingConfig)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of model and data; the others belong to the run."""
        names = ("embed_dim", "depth", "num_heads", "patch_size", "position_std", "label_smoothing")
        return {"name": "digits", **{name: getattr(self.config, name) for name in names}}

    def build(self, seed: int) -> nn.Module:
        """The untrained ViT."""
        return digits_vit.build_model(self.config)

    def batch(self, seed: int, step: int, size: int) -> tuple[Tensor, Tensor]:
        """Images shifted by up to a pixel, with labels; each epoch uses every image once."""
        images, labels = _digits(seed).train.tensors
        chosen = _endless_order(len(images), seed, step * size, size)
        return digits_vit.shift_by_a_pixel(images[chosen]), labels[chosen]

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy with smoothed labels."""
        return F.cross_entropy(model(inputs).float(), targets, label_smoothing=self.config.label_smoothing)

    def evaluate(self, model: nn.Module, seed: int, device: torch.device) -> dict[str, float]:
        """``loss`` without label smoothing and ``top1`` in percent, on the held-out digits."""
        images, labels = (tensor.to(device) for tensor in _digits(seed).held_out.tensors)
        logits = torch.cat([model(part).float() for part in images.split(_EVALUATION_BATCH)])
        right = int((label_ranks(logits, labels) == 0).sum())
        return {"loss": float(F.cross_entropy(logits, labels)), "top1": 100 * right / len(labels)}


_digits = cache(digits.load_digits)  # read and split once


def _endless_order(items: int, seed: int, first: int, count: int) -> Tensor:
    """``count`` indices from position ``first`` of consecutive shuffled passes over ``items``."""
    passes = range(first // items, (first + count - 1) // items + 1)
    order = torch.cat([torch.randperm(items, generator=_generator(seed, number)) for number in passes])
    start = first - passes[0] * items
    return order[start : start + count]


@dataclass(frozen=True)
class TextTask:
    """Next-byte prediction on the sources of Python's standard library with transformers' GPT-2.

    Args:
        width: channels, a multiple of ``heads``.
        context: bytes per example.
        dropout: of embeddings and residual branches; attention has none.
        windows: number of validation examples, spread evenly over the held-out files.
        folder: of the sources; None uses the standard library.
        limit: maximum bytes of text.
    """

    width: int = 256
    depth: int = 6
    heads: int = 4
    context: int = 256
    dropout: float = 0.0
    windows: int = 128
    folder: str | None = None
    limit: int | None = None

    @property
    def text(self) -> python_text.Text:
        """The text to learn."""
        return python_text.load_text(self.folder, self.limit)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of model and data, with a digest of the text instead of its path."""
        shape = {name: value for name, value in asdict(self).items() if name not in ("folder", "limit")}
        return {"name": "gpt", **shape, "text": self.text.digest}

    def build(self, seed: int) -> nn.Module:
        """GPT-2 with a vocabulary of 256 bytes and tied embeddings."""
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=python_text.VOCABULARY,
            n_positions=self.context,
            n_embd=self.width,
            n_layer=self.depth,
            n_head=self.heads,
            resid_pdrop=self.dropout,
            embd_pdrop=self.dropout,
            attn_pdrop=0.0,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
        )
        return GPT2LMHeadModel(config)

    def batch(self, seed: int, step: int, size: int) -> tuple[Tensor, Tensor]:
        """Bytes ``(size, context)`` from random positions, and the byte after each of them."""
        windows = python_text.random_windows(self.text.train, size, self.context + 1, _generator(seed, step))
        return windows[:, :-1], windows[:, 1:]

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy of the next byte in nats."""
        logits = model(inputs).logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def evaluate(self, model: nn.Module, seed: int, device: torch.device) -> dict[str, float]:
        """``loss`` on held-out files, in nats per byte."""
        windows = python_text.even_windows(self.text.validation, self.windows, self.context + 1).to(device)
        parts = windows.split(_EVALUATION_BATCH)
        losses = [self.loss(model, part[:, :-1], part[:, 1:]).double() * len(part) for part in parts]
        return {"loss": torch.stack(losses).sum().item() / len(windows)}


def _generator(seed: int, number: int) -> torch.Generator:
    """A generator that is different for each seed and number."""
    return torch.Generator().manual_seed(seed * 1_000_003 + number)
