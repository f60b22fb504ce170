"""Gluon, Triton's experimental dialect with explicit layouts and barriers, for the Hopper kernels."""

from __future__ import annotations

from qframework.compat.missing import explained

with explained():
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

    # Triton 3.6 has only the older names; in 3.9 they raise an error that says they were removed.
    _old_load = not hasattr(tma, "async_load") and hasattr(tma, "async_copy_global_to_shared")
    _old_store = not hasattr(tma, "async_store") and hasattr(tma, "async_copy_shared_to_global")
    tma_load = tma.async_copy_global_to_shared if _old_load else tma.async_load
    _old_barrier = not hasattr(gl, "barrier") and hasattr(gl, "thread_barrier")
    barrier = gl.thread_barrier if _old_barrier else gl.barrier
    tma_store = tma.async_copy_shared_to_global if _old_store else tma.async_store
    # Of memory that is shared by a program; public since Triton 3.9.
    _old_reinterpret = not hasattr(gl.shared_memory_descriptor, "reinterpret")
    reinterpret = (
        gl.shared_memory_descriptor._reinterpret if _old_reinterpret else gl.shared_memory_descriptor.reinterpret
    )

__all__ = [
    "TensorDescriptor",
    "barrier",
    "fence_async_shared",
    "gl",
    "gluon",
    "mbarrier",
    "reinterpret",
    "tma",
    "tma_load",
    "tma_store",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]
