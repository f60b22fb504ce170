"""``torch.export`` for the callers of this package: with one kind of error, and inputs that stay as they are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qframework.compat import pytree
from qframework.errors import export_error


def export_program(
    what: str, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any, advice: str = ""
) -> torch.export.ExportedProgram:
    """``torch.export.export``, whose errors become the QFrameworkError of ``export_error``.

    ``torch.export`` marks axes that vary on the tensors themselves, and leaves the marks there when it fails:
    ``torch.compile`` would then refuse to make these axes constants. So it gets aliases of the inputs.
    """
    args, kwargs = pytree.tree_map_only(Tensor, _alias, (args, kwargs))
    try:
        return torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes)
    except Exception as error:  # PyTorch passes on errors of the model's own code, and raises many kinds itself
        raise export_error(what, error, dynamic_shapes, advice) from error


def _alias(x: Tensor) -> Tensor:
    return x.detach().requires_grad_(x.requires_grad)
