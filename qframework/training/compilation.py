"""What PyTorch must be told before it compiles a converted model."""

from __future__ import annotations

import functools
import logging

import torch
import torch._dynamo.config

log = logging.getLogger("qframework")

_FIXED = (2, 15)


@functools.cache
def register_fallbacks() -> None:
    """Register every operator of INT8 training with Inductor as one that it calls; nothing from PyTorch 2.15 on.

    As Inductor would itself, with the layout that each operator asks for. It imports Inductor.

    Where Inductor before 2.15 meets an operator that it does not know, it writes all the operator's operands out as
    text, for a log that nobody reads, with all that they were computed from. An INT8 tensor is two operands of one
    origin, so that this text doubles with every operator of a model, and takes hours from the second block on.
    """
    if tuple(map(int, torch.__version__.split(".")[:2])) >= _FIXED:
        return
    from torch._inductor.lowering import lowerings, make_fallback, tag_to_layout_constraint
    from torch._library.utils import get_layout_constraint_tag

    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, operator = name.partition("::")
        if namespace != "qframework" or not operator.startswith(("block_", "check_finite")):
            continue
        packet, _, overload = operator.partition(".")
        target = getattr(getattr(torch.ops.qframework, packet), overload or "default")
        if target not in lowerings:
            constraint = tag_to_layout_constraint(get_layout_constraint_tag(target, with_default=True))
            make_fallback(target, layout_constraint=constraint, warn=False)


def keep_graphs_whole() -> None:
    """Switch Dynamo's DDPOptimizer off, in this process, saying so once.

    It cuts the graph of a model in DistributedDataParallel where a bucket of gradients is full, and takes what passes
    from one part to the next for plain tensors: of a BlockTensor it would hand on the insides.
    """
    if torch._dynamo.config.optimize_ddp in (True, "ddp_optimizer"):
        torch._dynamo.config.optimize_ddp = False
        log.info("torch._dynamo.config.optimize_ddp is False from here on: it cannot cut graphs of INT8 training")
