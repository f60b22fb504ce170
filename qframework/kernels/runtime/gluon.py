"""Gluon, Triton's low-level dialect, if the installed Triton has every name that the kernels use.

Gluon is experimental and its names change between releases. Where one is missing, the package falls back to its plain
Triton kernels and logs a warning.
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
            barrier,
            fence_async_shared,
            gl,
            gluon,
            mbarrier,
            reinterpret,
            tma,
            tma_load,
            tma_store,
            warpgroup_mma,
            warpgroup_mma_wait,
        )
    except (QFrameworkError, ImportError, AttributeError) as error:
        logger.warning(
            "falling back to plain Triton kernels for Hopper, since Gluon lacks a name: %s",
            error,
        )
        HAS_GLUON = False

if HAS_GLUON:

    @gluon.jit
    def next_stage(slot, phase, STAGES: gl.constexpr):
        """The next stage of a ring buffer; the phase flips when the index wraps around."""
        wraps = slot == STAGES - 1
        return gl.where(wraps, 0, slot + 1), gl.where(wraps, phase ^ 1, phase)

    @gluon.jit
    def parts_of_rows(stages, PARTS: gl.constexpr):
        """``(S, N, K)`` of shared memory as ``(PARTS S, N / PARTS, K)``, in the same layout."""
        if PARTS > 1:
            shape: gl.constexpr = [stages.shape[0] * PARTS, stages.shape[1] // PARTS, stages.shape[2]]
            stages = reinterpret(stages, stages.dtype, shape, stages.layout)
        return stages

    @gluon.jit
    def parts_of_columns(stage, PARTS: gl.constexpr):
        """``(M, N)`` of shared memory as ``(PARTS, M, N / PARTS)``, where a line of its layout has ``N / PARTS``."""
        shape: gl.constexpr = [PARTS, stage.shape[0], stage.shape[1] // PARTS]
        return reinterpret(stage, stage.dtype, shape, stage.layout)


__all__ = [
    "HAS_GLUON",
    "TensorDescriptor",
    "barrier",
    "fence_async_shared",
    "gl",
    "gluon",
    "mbarrier",
    "next_stage",
    "parts_of_columns",
    "parts_of_rows",
    "reinterpret",
    "tma",
    "tma_load",
    "tma_store",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]
