"""A small transformer whose layers can all be quantized, and a timer with fixed times."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qframework.tuning.mixed_precision import Timer

TOKENS, CHANNELS = 6, 16


class Attention(nn.Module):
    """Two heads; spelled out as matmul, softmax, matmul where asked for."""

    def __init__(self, spelled_out: bool = False) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(CHANNELS, 3 * CHANNELS), nn.Linear(CHANNELS, CHANNELS)
        self.spelled_out = spelled_out

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        if self.spelled_out:
            out = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1) @ v
        else:
            out = F.scaled_dot_product_attention(q, k, v)
        return self.proj(out.transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    """``(B, TOKENS, CHANNELS)`` to ``(B, 4)``; ``outlier`` multiplies one token in front of ``fc1``."""

    def __init__(self, spelled_out: bool = False, outlier: float = 1.0) -> None:
        super().__init__()
        self.attn = Attention(spelled_out)
        self.fc1, self.fc2 = nn.Linear(CHANNELS, 32), nn.Linear(32, CHANNELS)
        self.head = nn.Linear(CHANNELS, 4)
        self.register_buffer("factor", torch.ones(TOKENS, 1))
        self.factor[0] = outlier

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        hidden = self.fc1(x * self.factor) / self.factor
        return self.head((x + self.fc2(F.gelu(hidden))).mean(1))


NAMES = [
    ("linear", "attn.qkv"),
    ("attention", "attn"),
    ("linear", "attn.proj"),
    ("linear", "fc1"),
    ("linear", "fc2"),
    ("linear", "head"),
]


def transformer(**arguments) -> Transformer:
    """One with weights from the global generator, in eval mode."""
    return Transformer(**arguments).eval()


def images(batch: int = 8) -> Tensor:
    """A batch of inputs."""
    return torch.randn(batch, TOKENS, CHANNELS)


class Table(Timer):
    """Every layer takes the time of its choice; every model takes 100 ms."""

    TIMES: ClassVar = {"float": 10.0, "static": 4.0, "dynamic": 6.0, "sage_b": 5.0, "sage_vb": 20.0}

    def __init__(self, batch: Tensor, **times: float) -> None:
        super().__init__(batch)
        self.times = self.TIMES | times
        self.calls = 0

    def layer(self, operands, choice: str) -> float:
        self.calls += 1
        return self.times[choice]

    def model(self, module) -> float:
        self.calls += 1
        return len(self._images) / 0.1
