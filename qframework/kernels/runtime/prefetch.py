"""Prefetching into the L2 cache."""

from __future__ import annotations

from qframework.kernels.runtime.triton import INTERPRET, tl, triton

_INTERPRETED = tl.constexpr(INTERPRET)


@triton.jit
def prefetch(pointers):
    """Prefetch the 32 bytes around each pointer into L2."""
    if _INTERPRETED:
        pass
    else:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
        )
