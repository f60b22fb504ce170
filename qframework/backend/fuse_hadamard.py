"""Makes a Hadamard transform a part of the quantization that reads it.

From, on a GPU::

    x -> qframework::hadamard -> dynamic_quantize per token

To::

    x -> qframework::hadamard_quantize

which reads x once from memory and writes int8. On a CPU both are decomposed, and Inductor fuses what it can.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from qframework.backend.keep_quantize import is_per_token
from qframework.backend.lowering import Lowering, erase_unused
from qframework.graph.nodes import fake_value

_ours = torch.ops.qframework


def fuse_hadamard(lowering: Lowering) -> None:
    """Replace every such pair; a transform that something else reads stays for its other readers."""
    gm = lowering.gm
    for node in list(gm.graph.nodes):
        turned = node.args[0] if node.target is _ours.dynamic_quantize.default and is_per_token(node) else None
        if not isinstance(turned, Node) or turned.target is not _ours.hadamard.default or not _on_a_gpu(turned):
            continue
        with gm.graph.inserting_before(node):
            fused = gm.graph.call_function(_ours.hadamard_quantize.default, turned.args, turned.kwargs)
        fused.meta = dict(node.meta)
        node.replace_all_uses_with(fused)
        erase_unused(gm, node)


def _on_a_gpu(node: Node) -> bool:
    fake = fake_value(node)
    return fake is not None and fake.device.type == "cuda"
