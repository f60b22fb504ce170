"""Checks that inputs of an exported model that were ``None`` still are.

``torch.export`` keeps the code for ``None``, such as attention without a mask, and checks all other constant inputs but
these: a mask would be ignored without a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.fx import GraphModule

from qframework.errors import UnsupportedError
from qframework.graph.writes import GUARDS


def check_none_inputs(gm: GraphModule, names: Iterable[str]) -> None:
    """Let the module that checks the inputs of an exported ``gm`` refuse values for these placeholders."""
    wanted, checks = set(names), getattr(gm, GUARDS, None)
    placeholders = [node.name for node in gm.graph.find_nodes(op="placeholder")]
    none = {place: name for place, name in enumerate(placeholders) if name in wanted}
    if none and checks is not None and not isinstance(checks, NoneInputs):
        setattr(gm, GUARDS, NoneInputs(checks, none))


class NoneInputs(nn.Module):
    """The checks of a graph's inputs, and those of inputs that must be None, by their place."""

    def __init__(self, checks: nn.Module, none: Mapping[int, str]) -> None:
        super().__init__()
        self.checks, self.none = checks, dict(none)
        self._is_impure = True  # as PyTorch marks its own checks: nothing uses the result, and they must stay

    def forward(self, *inputs: Any) -> None:
        for place, name in self.none.items():
            if inputs[place] is not None:
                raise UnsupportedError(
                    f"input {name!r} must be None, as in the example that the model was exported with: its graph "
                    "has no code for another value. Export it with one"
                )
        self.checks(*inputs)
