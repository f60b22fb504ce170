"""Numbers that export kept as tensors become ``full``: ``torch.tensor(0.0)`` inside a forward pass.

From::

    get_attr -> lift_fresh_copy -> ...

To::

    full([], 0.0) -> lift_fresh_copy -> ...

Export reads its constants by ``lift_fresh_copy``, so that nothing writes them; it reads a model's own buffers directly.
As a tensor a number is unknown to index_values.py, so that a mask built of it is not recognized as causal. It also
stays on the CPU, and ``prepare_pt2e`` refuses a model whose tensors are on two devices.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

_LIFT = torch.ops.aten.lift_fresh_copy.default


def write_out_scalars(gm: GraphModule) -> None:
    """Replace every constant tensor without dimensions of an exported graph."""
    for node in list(gm.graph.find_nodes(op="get_attr")):
        if not node.users or any(user.target is not _LIFT for user in node.users):
            continue
        owner, _, name = str(node.target).rpartition(".")
        module = gm.get_submodule(owner)
        value = getattr(module, name)
        if not isinstance(value, Tensor) or value.ndim > 0:
            continue
        with gm.graph.inserting_before(node):
            options: dict[str, Any] = {"dtype": value.dtype, "device": value.device}
            number = gm.graph.call_function(torch.ops.aten.full.default, ([], value.item()), options)
        number.meta = dict(node.meta)
        node.replace_all_uses_with(number)
        gm.graph.erase_node(node)
        if not any(other.target == node.target for other in gm.graph.find_nodes(op="get_attr")):
            delattr(module, name)
