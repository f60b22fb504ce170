"""A model of two linears and a quantizer for it, which the tests of this folder share."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from qframework.conversion.exported import FloatAndConverted, export_model, quantize_copy
from qframework.quantizer import QFrameworkQuantizer, static_int8


class TinyMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


def quantizer(config=None) -> QFrameworkQuantizer:
    return QFrameworkQuantizer().set_global(config or static_int8())


def both(
    model: nn.Module, x: Tensor, quantizer: QFrameworkQuantizer, *data: object, **steps: object
) -> FloatAndConverted:
    """A model in float and converted, exported for any batch size."""
    return quantize_copy(export_model(model, x), quantizer, *data, **steps)
