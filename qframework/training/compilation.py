"""What PyTorch must be told before it compiles a converted model."""

from __future__ import annotations

import functools
import logging

import torch

from qframework.compat.dynamo import switch_off_ddp_optimizer
from qframework.compat.operators import registered

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
    from qframework.compat.inductor import keep_whole

    names = [name.partition(".") for name in registered("qframework") if name.startswith(("block_", "check_finite"))]
    keep_whole([getattr(getattr(torch.ops.qframework, packet), overload or "default") for packet, _, overload in names])


def keep_graphs_whole() -> None:
    """Switch Dynamo's DDPOptimizer off, in this process, saying so once.

    It cuts the graph of a model in DistributedDataParallel where a bucket of gradients is full, and takes what passes
    from one part to the next for plain tensors: of a BlockTensor it would hand on the insides.
    """
    if switch_off_ddp_optimizer():
        log.info("torch._dynamo.config.optimize_ddp is False from here on: it cannot cut graphs of INT8 training")
