"""Stores a tile of block_linear's kernel for Hopper by TMA, in 16 bit or as INT8 blocks with their scales."""

from __future__ import annotations

from qframework.kernels.blocks.primitives import _PUSH as PUSH
from qframework.kernels.blocks.primitives import pushed_to_int8, quantize_tile
from qframework.kernels.runtime.gluon import HAS_GLUON
from qframework.numerics import MIN_SCALE

if HAS_GLUON:
    from qframework.kernels.runtime.gluon import fence_async_shared, gl, gluon, tma, tma_store

    _MIN_SCALE = gl.constexpr(MIN_SCALE)

    @gluon.jit
    def store_half(values, out_desc, stage, start_m, start_n):
        tma.store_wait(0)  # until the previous half has left the buffer
        stage.store(values)
        fence_async_shared()
        tma_store(out_desc, [start_m, start_n], stage)

    @gluon.jit
    def _magnitude(x):
        """The magnitude as an integer, which has the same order as the float and keeps NaN."""
        return x.to(gl.int32, bitcast=True) & 0x7FFFFFFF

    @gluon.jit
    def store_int8(upper, lower, out_scale_ptr, out_desc, stage, start_m, start_n, M, N, BLOCK: gl.constexpr):
        """Store both halves in blocks: one block of 128 x 128 for both, or smaller ones within each."""
        if BLOCK[0] == 128:
            amax = gl.max(gl.max(gl.maximum(_magnitude(upper), _magnitude(lower)), 1), 0)
            scale = gl.div_rn(amax.to(gl.float32, bitcast=True), 127.0)
            scale = gl.where(scale < _MIN_SCALE, _MIN_SCALE, scale)
            inverse = gl.div_rn(1.0, scale)
            if (start_m < M) & (start_n < N):
                gl.store(out_scale_ptr + (start_m // 128) * gl.cdiv(N, 128) + start_n // 128, scale)
            store_half(pushed_to_int8(upper * inverse + PUSH), out_desc, stage, start_m, start_n)
            store_half(pushed_to_int8(lower * inverse + PUSH), out_desc, stage, start_m + 64, start_n)
        else:
            q, scale = quantize_tile(upper, BLOCK)
            _store_scales(scale, out_scale_ptr, start_m, start_n, M, N, BLOCK)
            store_half(gl.convert_layout(q, upper.type.layout), out_desc, stage, start_m, start_n)
            q, scale = quantize_tile(lower, BLOCK)
            _store_scales(scale, out_scale_ptr, start_m + 64, start_n, M, N, BLOCK)
            store_half(gl.convert_layout(q, upper.type.layout), out_desc, stage, start_m + 64, start_n)

    @gluon.jit
    def store_wide(left, right, out_scale_ptr, out_desc, stage, start_m, start_n, M, N, BLOCK: gl.constexpr):
        """Store 64 rows in blocks of one row and 256 columns, the columns of both halves."""
        amax = gl.max(gl.maximum(_magnitude(left), _magnitude(right)), 1)
        scale = gl.div_rn(amax.to(gl.float32, bitcast=True), 127.0)
        scale = gl.where(scale < _MIN_SCALE, _MIN_SCALE, scale)
        inverse = gl.div_rn(1.0, scale)[:, None]
        m = start_m + gl.arange(0, 64, layout=scale.type.layout)
        across = gl.cdiv(N, BLOCK[1])
        gl.store(out_scale_ptr + m * across + start_n // BLOCK[1], scale, mask=(m < M) & (start_n < N))
        store_half(pushed_to_int8(left * inverse + PUSH), out_desc, stage, start_m, start_n)
        store_half(pushed_to_int8(right * inverse + PUSH), out_desc, stage, start_m, start_n + 128)

    @gluon.jit
    def _store_scales(scale, scale_ptr, start_m, start_n, M, N, BLOCK: gl.constexpr):
        layout: gl.constexpr = scale.type.layout
        m = start_m // BLOCK[0] + gl.arange(0, scale.shape[0], layout=gl.SliceLayout(1, layout))
        n = start_n // BLOCK[1] + gl.arange(0, scale.shape[1], layout=gl.SliceLayout(0, layout))
        across = gl.cdiv(N, BLOCK[1])
        inside = (m < gl.cdiv(M, BLOCK[0]))[:, None] & (n < across)[None, :]
        gl.store(scale_ptr + m[:, None] * across + n[None, :], scale, mask=inside)
