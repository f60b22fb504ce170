"""PyTorch settings that compiling a converted model needs."""

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

    Registers what Inductor would register itself, with each operator's own layout constraint. Imports Inductor.

    For an operator that it does not know, Inductor before 2.15 formats every input for a log message, together with
    everything that the input was computed from. An INT8 tensor is two inputs of the same origin, so the message doubles
    in length with every operator, and compilation takes hours from the second block on.
    """
    if tuple(map(int, torch.__version__.split(".")[:2])) >= _FIXED:
        return
    from qframework.compat.inductor import keep_whole

    names = [name.partition(".") for name in registered("qframework") if name.startswith(("block_", "check_finite"))]
    keep_whole([getattr(getattr(torch.ops.qframework, packet), overload or "default") for packet, _, overload in names])


def keep_graphs_whole() -> None:
    """Switch Dynamo's DDPOptimizer off, in this process, saying so once.

    It splits the graph of a model in DistributedDataParallel at gradient buckets and assumes that only plain tensors
    cross the boundary: of a BlockTensor it would pass on the inner tensors.
    """
    if switch_off_ddp_optimizer():
        log.info("torch._dynamo.config.optimize_ddp is False from here on: it cannot cut graphs of INT8 training")
