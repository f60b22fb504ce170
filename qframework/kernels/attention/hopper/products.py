"""The two products of a block of keys in specialized_kernel.py, and its result.

Channels are one or two slices. Products are started in flight; who waits for them says so.
"""

from __future__ import annotations

from qframework.kernels.attention.hopper.softmax import ROWS
from qframework.kernels.attention.operands import LINEAR_EXCESS, LOG2_E
from qframework.kernels.runtime.gluon import HAS_GLUON

if HAS_GLUON:
    from qframework.kernels.attention.hopper.softmax import fp8_operand
    from qframework.kernels.runtime.gluon import (
        fence_async_shared,
        gl,
        gluon,
        tma_store,
        warpgroup_mma,
        warpgroup_mma_wait,
    )

    _ROWS, _NATURAL, _LINEAR_EXCESS = (gl.constexpr(x) for x in (ROWS, 1 / LOG2_E, LINEAR_EXCESS))

    @gluon.jit
    def products_of(q, shared, slot, no_scores, FORM: gl.constexpr):
        """Q K^T of the keys in ``slot``, in flight."""
        D: gl.constexpr = FORM.block_d
        REST: gl.constexpr = FORM.rest_d
        BLOCK_N: gl.constexpr = FORM.block_n
        k = shared[2].index(slot).reshape((BLOCK_N, D)).permute((1, 0))
        products = warpgroup_mma(q[0], k, no_scores, use_acc=False, is_async=True)
        if REST > 0:
            k = shared[3].index(slot).reshape((BLOCK_N, REST)).permute((1, 0))
            products = warpgroup_mma(q[1], k, products, is_async=True)
        return products

    @gluon.jit
    def start_values(weights, shared, slot, acc, acc_rest, FORM: gl.constexpr):
        """P V of the values in ``slot``, in flight: added to both slices, or in FP8 instead of ``acc_rest``."""
        DV: gl.constexpr = FORM.block_dv
        REST_DV: gl.constexpr = FORM.rest_dv
        BLOCK_N: gl.constexpr = FORM.block_n
        FP8: gl.constexpr = FORM.fp8
        if FP8:  # tensor cores sum FP8 products in 22 bits: each block starts at zero
            v = shared[4].index(slot).reshape((DV, BLOCK_N)).permute((1, 0))
            OPERAND: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 4)
            values_rest = warpgroup_mma(fp8_operand(weights, OPERAND), v, acc_rest, use_acc=False, is_async=True)
            values = acc
        else:
            v = shared[4].index(slot).reshape((BLOCK_N, DV))
            values = warpgroup_mma(weights, v, acc, is_async=True)
            values_rest = acc_rest
        if REST_DV > 0:
            LAYOUT: gl.constexpr = gl.DotOperandLayout(0, acc_rest.type.layout, 2)
            v = shared[5].index(slot).reshape((BLOCK_N, REST_DV))
            values_rest = warpgroup_mma(gl.convert_layout(weights, LAYOUT), v, acc_rest, is_async=True)
        return values, values_rest

    @gluon.jit
    def finish_values(values, values_rest, weights, FORM: gl.constexpr):
        """Both slices of the accumulator, and the weights, which P V reads until here.

        Without this use of theirs, new weights get their registers, and ptxas serializes.
        """
        REST_DV: gl.constexpr = FORM.rest_dv
        FP8: gl.constexpr = FORM.fp8
        if FP8:
            acc_rest, weights = warpgroup_mma_wait(0, deps=(values_rest, weights))
            acc = values
        elif REST_DV > 0:
            acc, acc_rest, weights = warpgroup_mma_wait(0, deps=(values, values_rest, weights))
        else:
            acc, weights = warpgroup_mma_wait(0, deps=(values, weights))
            acc_rest = values_rest
        return acc, acc_rest, weights

    @gluon.jit
    def added_values(before, product, pending):
        """``before`` times the factor of each row that its sums were behind, and ``product``, which has it already."""
        return before * gl.convert_layout(pending, gl.SliceLayout(1, before.type.layout))[:, None] + product

    @gluon.jit
    def rescaled(acc, acc_rest, rescale, FORM: gl.constexpr):
        REST_DV: gl.constexpr = FORM.rest_dv
        acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, acc.type.layout))[:, None]
        if REST_DV > 0:
            acc_rest = acc_rest * gl.convert_layout(rescale, gl.SliceLayout(1, acc_rest.type.layout))[:, None]
        return acc, acc_rest

    @gluon.jit
    def store_result(result, sums, v_scale_ptr, tile, desc, place):
        """The accumulator divided by the sums of its rows, times scales of channels if any, through shared memory."""
        result = result * (1.0 / gl.convert_layout(sums, gl.SliceLayout(1, result.type.layout)))[:, None]
        if v_scale_ptr is not None:
            d = gl.arange(0, result.shape[1], layout=gl.SliceLayout(0, result.type.layout))
            result = result * gl.load(v_scale_ptr + d, mask=d < desc.shape[len(desc.shape) - 1], other=0.0)[None, :]
        tile.reshape((result.shape[0], result.shape[1])).store(result.to(desc.dtype))
        fence_async_shared()
        tma_store(desc, place, tile)

    @gluon.jit
    def store_lse(lse_ptr, sums, top, rows, FORM: gl.constexpr):
        """The natural log-sum-exp of a warpgroup's first ``rows`` queries, from maxima in base 2.

        Of a query without keys -inf: its maximum is finite, its sum 0.
        """
        row = gl.arange(0, _ROWS, layout=top.type.layout)
        EXCESS: gl.constexpr = _LINEAR_EXCESS if FORM.integer else 0.0
        lse = (top + gl.log2(gl.convert_layout(sums, top.type.layout)) - EXCESS) * _NATURAL
        gl.store(lse_ptr + row, lse, mask=row < rows)
