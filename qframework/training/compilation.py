"""PyTorch settings that compiling a converted model needs."""

from __future__ import annotations

import functools
import logging

import torch

from qframework.compat.dynamo import hashes_hide_local_tensors, switch_off_ddp_optimizer, switch_off_graph_cache
from qframework.compat.operators import registered
from qframework.kernels.runtime.call_site import overload_of, register_call_sites

log = logging.getLogger("qframework")

_FIXED = (2, 15)
_PREFIXES = ("block_", "check_finite", "int8_gradient_")


@functools.cache
def register_fallbacks() -> None:
    """Let Inductor call every operator of INT8 training as a whole, on GPUs past the dispatcher (``call_site``).

    It imports Inductor, and registers what Inductor would register itself, with each operator's own layout constraint.
    For an unknown operator, Inductor before 2.15 formats every input for a log message, with everything that the input
    was computed from. An INT8 tensor is two inputs of the same origin, so the message doubles in length with every
    operator, and compilation takes hours from the second block on.
    """
    register_call_sites()
    if tuple(map(int, torch.__version__.split(".")[:2])) >= _FIXED:
        return
    from qframework.compat.inductor import keep_whole

    keep_whole([overload_of(name) for name in registered("qframework") if name.startswith(_PREFIXES)])


def keep_graphs_whole() -> None:
    """Disable Dynamo's DDPOptimizer in this process, and log it once.

    It splits the graph of a model in DistributedDataParallel at gradient buckets and assumes that only plain tensors
    cross the boundary; for a BlockTensor it would pass on the inner tensors.
    """
    if switch_off_ddp_optimizer():
        log.info("torch._dynamo.config.optimize_ddp is now False: it cannot split graphs of INT8 training")


def forget_graphs() -> None:
    """Disable AOTAutograd's cache in this process where it would confuse sharded weights, and log it once.

    Its key for a DTensor leaves out the class of the local tensor. An optimizer's compiled step of plain shards would
    be called with a ShardedWeight, whose wrapper has no memory: the process would crash.
    """
    if hashes_hide_local_tensors() and switch_off_graph_cache():
        log.info(
            "torch._functorch.config.enable_autograd_cache is now False: it takes sharded weights for plain tensors"
        )
