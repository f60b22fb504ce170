"""A small quantized model that the tests save, and changes to the file it was saved to."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qframework import quantize
from qframework.quantizer import LinearConfig, static_int8

DYNAMIC_BATCH = ({0: torch.export.Dim.DYNAMIC},)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(F.gelu(self.fc1(x)))


def convert(config: LinearConfig | None = None) -> torch.fx.GraphModule:
    images = torch.randn(4, 5, 16)
    return quantize(nn.Sequential(Block(), Block()).eval(), images, config or static_int8(), [images])


def rewrite(path: Path, suffix: str, change) -> None:
    """Replace one member by ``change(its bytes)``, with a correct checksum; a new member starts as b""."""
    archive = zipfile.ZipFile(io.BytesIO(path.read_bytes()))
    members = {name: archive.read(name) for name in archive.namelist()}
    name = next((name for name in members if name.endswith(suffix)), f"archive{suffix}")
    members[name] = change(members.get(name, b""))
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def change_json(**values: object):
    return lambda data: json.dumps({**json.loads(data), **values}).encode()
