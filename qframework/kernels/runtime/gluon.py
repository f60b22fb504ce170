"""Gluon, Triton's low-level dialect, if this Triton has every name that the kernels use.

It is experimental, and its names change from release to release. Where one is missing, kernels in plain Triton take the
place of those in Gluon, and a warning says so.
"""

from __future__ import annotations

import logging

from qframework.errors import QFrameworkError
from qframework.kernels.runtime.triton import HAS_TRITON, INTERPRET

logger = logging.getLogger(__name__)

HAS_GLUON = HAS_TRITON and not INTERPRET

if HAS_GLUON:
    try:
        from qframework.compat.gluon import (
            TensorDescriptor,
            fence_async_shared,
            gl,
            gluon,
            mbarrier,
            tma,
            tma_load,
            tma_store,
            warpgroup_mma,
            warpgroup_mma_wait,
        )
    except (QFrameworkError, ImportError, AttributeError) as error:
        logger.warning("this Triton's Gluon lacks what kernels for Hopper need, plain ones take their place: %s", error)
        HAS_GLUON = False

if HAS_GLUON:

    @gluon.jit
    def next_stage(slot, phase, STAGES: gl.constexpr):
        """The stage of a ring after this one; its phase changes with every round."""
        wraps = slot == STAGES - 1
        return gl.where(wraps, 0, slot + 1), gl.where(wraps, phase ^ 1, phase)


__all__ = [
    "HAS_GLUON",
    "TensorDescriptor",
    "fence_async_shared",
    "gl",
    "gluon",
    "mbarrier",
    "next_stage",
    "tma",
    "tma_load",
    "tma_store",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]
