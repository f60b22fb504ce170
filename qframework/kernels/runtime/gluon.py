"""Gluon where this Triton has all of it that kernels here use: Triton's dialect with layouts and barriers by hand.

It is experimental, and its names change from release to release. Where one is missing, kernels in plain Triton take the
place of those in Gluon, and a warning says so.
"""

from __future__ import annotations

import importlib.util
import logging

from qframework.kernels.runtime.triton import HAS_TRITON, INTERPRET

logger = logging.getLogger(__name__)

HAS_GLUON = HAS_TRITON and not INTERPRET and importlib.util.find_spec("triton.experimental.gluon") is not None

if HAS_GLUON:
    try:
        from triton.experimental import gluon
        from triton.experimental.gluon import language as gl
        from triton.experimental.gluon.language.nvidia.hopper import (
            fence_async_shared,
            mbarrier,
            tma,
            warpgroup_mma,
            warpgroup_mma_wait,
        )
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        # Triton 3.6 has the older names only, 3.9 the newer ones only.
        tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
        tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
    except (ImportError, AttributeError) as error:
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
