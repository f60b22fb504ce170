"""Numbers that export kept as tensors become ``full``: ``torch.tensor(0.0)`` inside a forward pass.

From::

    get_attr lifted_tensor_0 -> lift_fresh_copy -> ...

To::

    full([], 0.0) -> lift_fresh_copy -> ...

Such a constant is an attribute that nothing can write. As a tensor it hides its number from index_values.py, so that a
mask built of it is not seen to be causal, and it stays on the CPU, for which ``prepare_pt2e`` refuses a model on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

LIFTED = "lifted_tensor_"  # torch.export's name of a constant tensor


def write_out_scalars(gm: GraphModule) -> None:
    """Replace every constant tensor without dimensions of an exported graph."""
    for node in list(gm.graph.find_nodes(op="get_attr")):
        owner, _, name = str(node.target).rpartition(".")
        if not name.startswith(LIFTED):
            continue
        module = gm.get_submodule(owner)
        value = getattr(module, name)
        if not isinstance(value, Tensor) or isinstance(value, nn.Parameter) or value.ndim > 0:
            continue
        with gm.graph.inserting_before(node):
            options: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
            number = gm.graph.call_function(torch.ops.aten.full.default, ([], value.item()), options)
        number.meta = dict(node.meta)
        node.replace_all_uses_with(number)
        gm.graph.erase_node(node)
        if not any(other.target == node.target for other in gm.graph.find_nodes(op="get_attr")):
            delattr(module, name)
