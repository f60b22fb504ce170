"""int8_linear's Triton kernel and its launch. The operator, its formula and its checks are in int8_linear.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qframework.kernels._common import check_device, round_to_int8, row_scale
from qframework.kernels._launch import Launch, cdiv
from qframework.kernels._triton import TensorDescriptor, tl, triton
from qframework.kernels.int8_linear_arguments import check_arguments, flat_out_scale, is_per_channel, result_dtype
from qframework.kernels.int8_linear_tiles import Epilogue, Tile, chip_of, tile_for


@triton.jit
def _gelu(x):
    """``x Phi(x)`` as ``max(x, 0) - |x| 2^q(|x|)``: the logarithm of erfc is smooth enough for a polynomial.

    Off by less than 1e-6, and less than 1e-5 of itself where |x| < 1. Coefficients: a minimax fit on [0, 6] with
    q(0) = -1; beyond, 2^q only falls.
    """
    t = tl.minimum(tl.abs(x), 16.0, propagate_nan=tl.PropagateNan.ALL)  # infinity times 0 would be NaN
    q = -0.00048810212 * t + 0.0071987184
    q = q * t - 0.052146632
    q = q * t - 0.45959583
    q = q * t - 1.1510005
    q = q * t - 1.0
    return tl.maximum(x, 0.0) - t * tl.exp2(q)


@triton.jit
def _activate(y, ACTIVATION: tl.constexpr, EXACT: tl.constexpr):
    """EXACT: to float32's own precision, which 16 and 8 bit cannot hold."""
    if ACTIVATION == "gelu":
        y = 0.5 * y * (1.0 + tl.math.erf(y * 0.7071067811865476)) if EXACT else _gelu(y)
    elif ACTIVATION == "gelu_tanh":  # 0.5 * (1 + tanh(u)) = sigmoid(2 u)
        y = y * tl.sigmoid(1.5957691216057308 * (y + 0.044715 * y * y * y))
    elif ACTIVATION == "relu":
        y = tl.maximum(y, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACTIVATION == "silu":
        y = y * tl.sigmoid(y)
    return y


@triton.jit
def _reciprocal(x):
    """``1 / x``, approximate and one Newton step: the exact division is a call that spills the accumulator."""
    y = 1.0 / x
    off = 1.0 - x * y
    return tl.where(tl.abs(off) < 0.5, y + y * off, y)  # 0, infinity and what is too small have no better one


@triton.jit
def _finish(
    acc,  # (BLOCK_M, columns) int32
    m,  # rows
    n,  # columns
    column_scale,  # of b, (columns,) or one
    bias,  # (columns,)
    a_scale_ptr,
    residual_ptr,
    out_scale_ptr,
    M,
    N,
    PA,
    PO,
    stride_rm,
    out_dtype: tl.constexpr,
    A_SCALE: tl.constexpr,
    B_PER_CHANNEL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    OUT_SCALE: tl.constexpr,
):
    """The epilogue: dequantize, bias, activation, residual, requantize."""
    y = acc.to(tl.float32)
    if A_SCALE == "tensor":
        column_scale *= tl.load(a_scale_ptr)
    else:
        y *= _row_scale(a_scale_ptr, m, M, PA, A_SCALE)[:, None]
    y = y * column_scale[None, :] if B_PER_CHANNEL else y * column_scale
    if HAS_BIAS:
        y += bias.to(tl.float32)[None, :]
    y = _activate(y, ACTIVATION, EXACT=out_dtype == tl.float32)
    if HAS_RESIDUAL:
        mask = (m < M)[:, None] & (n < N)[None, :]
        pointers = residual_ptr + m.to(tl.int64)[:, None] * stride_rm + n[None, :]
        y += tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    if OUT_SCALE == "none":
        out = y.to(out_dtype)
    elif OUT_SCALE == "tensor":
        out = round_to_int8(y * _reciprocal(tl.load(out_scale_ptr)))
    elif OUT_SCALE == "channel":
        out = round_to_int8(y * _reciprocal(tl.load(out_scale_ptr + n, mask=n < N, other=1.0))[None, :])
    else:
        out = round_to_int8(y * _reciprocal(_row_scale(out_scale_ptr, m, M, PO, OUT_SCALE))[:, None])
    return out


@triton.jit
def _row_scale(scale_ptr, m, M, P, KIND: tl.constexpr):
    """One for each row, or one for each of P positions, which repeat."""
    return tl.load(scale_ptr + m, mask=m < M, other=1.0) if KIND == "row" else tl.load(scale_ptr + m % P)


@triton.jit
def _column_vectors(b_scale_ptr, bias_ptr, n, N, B_PER_CHANNEL: tl.constexpr, HAS_BIAS: tl.constexpr):
    scale = tl.load(b_scale_ptr + n, mask=n < N, other=0.0) if B_PER_CHANNEL else tl.load(b_scale_ptr)
    return scale, tl.load(bias_ptr + n, mask=n < N, other=0.0) if HAS_BIAS else scale


@triton.jit
def _halves(x):
    """The left and the right half of the columns."""
    return x.reshape(x.shape[0], 2, x.shape[1] // 2).permute(0, 2, 1).split()


@triton.jit(do_not_specialize=["M", "PA", "PO"])
def _int8_linear_kernel(
    a_ptr,  # (M, K) int8; a descriptor with TMA, like b
    a_scale_ptr,  # (PA,) fp32, PA is 1, M or the number of positions
    b_ptr,  # (N, K) int8
    b_scale_ptr,  # (N,) or (1,) fp32
    bias_ptr,  # (N,) float
    residual_ptr,  # (M, N) float
    out_scale_ptr,  # (PO,) fp32, likewise; (N,) with OUT_SCALE "channel"
    out_ptr,  # (M, N) float or int8; a descriptor with TMA_STORE
    M,
    N,
    K,
    PA,
    PO,
    stride_am,
    stride_bn,
    stride_rm,
    stride_om,
    A_SCALE: tl.constexpr,  # "tensor", "row" or "position"
    B_PER_CHANNEL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    OUT_SCALE: tl.constexpr,  # "none", "tensor", "row", "position" or "channel"
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    PERSISTENT: tl.constexpr,
    SUBTILES: tl.constexpr,
    TMA: tl.constexpr,
    TMA_STORE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """out = epilogue(a @ b.T), tile by tile of out. Grid: any number of programs; each takes every such tile.

    Tiles go through GROUP_M rows of tiles before the next column of tiles, so that tiles of b stay in L2. A persistent
    program's loops over tiles and over K are one pipeline: it loads its next tile while it finishes this one.
    """
    out_dtype: tl.constexpr = out_ptr.dtype if TMA_STORE else out_ptr.dtype.element_ty
    k = tl.arange(0, BLOCK_K)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=PERSISTENT):
        group = tile // (GROUP_M * tiles_n)
        rows_in_group = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
        within = tile % (GROUP_M * tiles_n)
        start_m = (group * GROUP_M + within % rows_in_group) * BLOCK_M
        start_n = (within // rows_in_group) * BLOCK_N
        m = start_m + tl.arange(0, BLOCK_M)
        n = start_n + tl.arange(0, BLOCK_N)
        if EARLY:  # memory answers while the tensor cores work
            column_scale, bias = _column_vectors(b_scale_ptr, bias_ptr, n, N, B_PER_CHANNEL, HAS_BIAS)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
        if TMA:
            for start in range(0, K, BLOCK_K):
                acc = tl.dot(a_ptr.load([start_m, start]), b_ptr.load([start_n, start]).T, acc, out_dtype=tl.int32)
        else:
            # Rows past the edge wrap around instead of being masked: their results are never stored.
            a_ptrs = a_ptr + (m % M).to(tl.int64)[:, None] * stride_am + k[None, :]
            b_ptrs = b_ptr + (n % N).to(tl.int64)[None, :] * stride_bn + k[:, None]
            for start in range(0, K, BLOCK_K):
                if EVEN_K:
                    a = tl.load(a_ptrs)
                    b = tl.load(b_ptrs)
                else:
                    a = tl.load(a_ptrs, mask=k[None, :] < K - start, other=0)
                    b = tl.load(b_ptrs, mask=k[:, None] < K - start, other=0)
                acc = tl.dot(a, b, acc, out_dtype=tl.int32)
                a_ptrs += BLOCK_K
                b_ptrs += BLOCK_K

        # Parts of a tile are finished one after the other, so that the operands of the next keep their shared memory.
        width: tl.constexpr = BLOCK_N // SUBTILES
        if SUBTILES == 1:
            parts = (acc,)
        elif SUBTILES == 2:
            parts = _halves(acc)
        else:
            left, right = _halves(acc)
            parts = _halves(left) + _halves(right)
        for part in tl.static_range(SUBTILES):
            n = start_n + part * width + tl.arange(0, width)
            if not EARLY:
                column_scale, bias = _column_vectors(b_scale_ptr, bias_ptr, n, N, B_PER_CHANNEL, HAS_BIAS)
            out = _finish(
                parts[part], m, n, column_scale, bias, a_scale_ptr, residual_ptr, out_scale_ptr,
                M, N, PA, PO, stride_rm,
                out_dtype, A_SCALE, B_PER_CHANNEL, ACTIVATION, HAS_BIAS, HAS_RESIDUAL, OUT_SCALE,
            )  # fmt: skip
            if TMA_STORE:
                out_ptr.store([start_m, start_n + part * width], out)
            else:
                rows = m.to(tl.int64)[:, None] * stride_om
                tl.store(out_ptr + rows + n[None, :], out, mask=(m < M)[:, None] & (n < N)[None, :])


# a, a_scale, b, b_scale, bias, residual, out_scale
Operands = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


class Plan:
    """Everything about a launch that follows from shapes, strides, dtypes and devices alone."""

    def __init__(self, operands: Operands, activation: str, out_dtype: torch.dtype) -> None:
        a, a_scale, b, b_scale, bias, residual, out_scale = operands
        check_device(a.device)
        n, k = b.shape
        row_scale("int8_linear", "a_scale", a_scale, a.shape)
        if out_scale is not None:
            flat_out_scale(out_scale, torch.Size((*a.shape[:-1], n)))
        self.shape = torch.Size((*a.shape[:-1], n))
        self.out_dtype = out_dtype
        self.sizes = (a.shape[:-1].numel(), n, k)
        self.periods = (a_scale.numel(), 1 if out_scale is None else out_scale.numel())
        rows = (rows_apart(a), rows_apart(b), n if residual is None else rows_apart(residual))
        vectors = [t for t in (a_scale, b_scale, bias, out_scale) if t is not None]
        self.in_place = None not in rows and all(t.is_contiguous() for t in vectors)
        self.strides = tuple(row or 0 for row in (*rows, n))
        self.epilogue = epilogue_of(activation, residual is not None, out_scale is not None)
        self.flags = (
            *(self._kind(a_scale), b_scale.numel() > 1, activation, bias is not None, residual is not None),
            "none" if out_scale is None else self._kind(out_scale),
        )
        steps = (self.strides[0], self.strides[1], n * out_dtype.itemsize)
        self.tma = self.in_place and k > 0 and all(step > 0 and step % 16 == 0 for step in steps)
        self.wide = 4 in (out_dtype.itemsize, 0 if residual is None else residual.dtype.itemsize)
        self._launches: dict[bool, tuple[Launch, Tile]] = {}

    def _kind(self, scale: Tensor) -> str:
        m, n, _ = self.sizes
        if scale.numel() == 1:
            return "tensor"
        if is_per_channel(scale, n):
            return "channel"
        return "row" if scale.numel() == m else "position"

    def launch(self, device: torch.device, aligned: bool) -> tuple[Launch, Tile]:
        """For operands that all begin at multiples of 16 bytes, or for any."""
        if aligned not in self._launches:
            tile = tile_for(device, *self.sizes, self.epilogue, self.tma and aligned, self.wide)
            self.use(tile, device, aligned)
        return self._launches[aligned]

    def use(self, tile: Tile, device: torch.device, aligned: bool = True) -> None:
        """Launch with ``tile`` from now on."""
        m, n, k = self.sizes
        tiles = cdiv(m, tile.block_m) * cdiv(n, tile.block_n)
        programs = min(tiles, tile.programs * chip_of(device)[1]) if tile.programs else tiles
        constants = (*self.flags, *tile_constants(tile, k).values())
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        self._launches[aligned] = Launch(_int8_linear_kernel, (programs, 1, 1), constants, aligned, **options), tile


def tile_constants(tile: Tile, k: int) -> dict[str, Any]:
    """What the kernel is compiled for because of its tile, in the order of its arguments."""
    return {
        "EVEN_K": tile.tma or k % tile.block_k == 0,  # descriptors give zeros past the edge
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "GROUP_M": tile.group_m,
        "PERSISTENT": tile.programs > 0,
        "SUBTILES": tile.subtiles,
        "TMA": tile.tma,
        "TMA_STORE": tile.tma_store,
        "EARLY": tile.programs == 0 and tile.subtiles == 1,
    }


def epilogue_of(activation: str, residual: bool, int8: bool) -> Epilogue:
    """What the table of tiles calls an epilogue."""
    if residual:
        return "all" if activation != "none" or int8 else "residual"
    if activation != "none":
        return "activation" if int8 else "activation_float"
    return "int8" if int8 else "float"


def rows_apart(x: Tensor) -> int | None:
    """Elements from one row of ``(..., C)`` to the next, or None where rows are not evenly apart or not contiguous."""
    if x.ndim > 1 and x.numel() > 0:
        try:
            x = x.view(-1, x.shape[-1])
        except RuntimeError:  # no view holds the rows: a copy is needed
            return None
        return x.stride(0) if x.stride(1) == 1 or x.shape[1] == 1 else None
    return x.shape[-1] if x.is_contiguous() else None


_PLANS: dict[tuple[Any, ...], Plan] = {}
_MAX_PLANS = 8192  # beyond, shapes hardly repeat: begin anew rather than grow for ever


def int8_linear_triton(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None = None,
    activation: str = "none",
    residual: Tensor | None = None,
    out_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``int8_linear`` in Triton; what was checked and chosen for operands holds for others like them."""
    operands = (a, a_scale, b, b_scale, bias, residual, out_scale)
    key = (activation, out_dtype, *[None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in operands])
    plan = _PLANS.get(key)
    if plan is None:
        check_arguments(a, a_scale, b, b_scale, bias, activation, residual, out_scale, out_dtype)
        if len(_PLANS) >= _MAX_PLANS:
            _PLANS.clear()
        plan = _PLANS[key] = Plan(operands, activation, result_dtype(out_scale, out_dtype))
    out = torch.empty(plan.shape, dtype=plan.out_dtype, device=a.device)
    if out.numel() == 0:
        return out
    if not plan.in_place:
        a, a_scale, b, b_scale, bias, residual, out_scale = _contiguous(operands)
        return int8_linear_triton(a, a_scale, b, b_scale, bias, activation, residual, out_scale, out_dtype)
    run_plan(plan, operands, out)
    return out


def run_plan(plan: Plan, operands: Operands, out: Tensor) -> None:
    """Launch ``plan`` on operands like those it was made for."""
    launch, arguments = _launch_and_arguments(plan, operands, out, out.device)
    launch(*arguments)


def warm_up_int8_linear(
    device: torch.device,
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    activation: str,
    residual: Tensor | None,
    out_scale: Tensor | None,
    out_dtype: torch.dtype | None,
) -> Any:
    """Compile what ``int8_linear_triton`` launches on ``device`` for operands like these, which may lie on "meta".

    Returns what ``Launch.warm_up`` returns, None where nothing is launched.
    """
    check_arguments(a, a_scale, b, b_scale, bias, activation, residual, out_scale, out_dtype)
    operands = (a, a_scale, b, b_scale, bias, residual, out_scale)
    plan = Plan(operands, activation, result_dtype(out_scale, out_dtype))
    if not plan.in_place:
        operands = _contiguous(operands)
        plan = Plan(operands, activation, plan.out_dtype)
    out = torch.empty(plan.shape, dtype=plan.out_dtype, device=a.device)
    if out.numel() == 0:
        return None
    launch, arguments = _launch_and_arguments(plan, operands, out, device)
    return launch.warm_up(*arguments)


def _contiguous(operands: Operands) -> Operands:
    """Operands as the kernel can read them; matrices whose rows are evenly apart stay where they are."""
    a, a_scale, b, b_scale, bias, residual, out_scale = operands
    a, b = (t if rows_apart(t) is not None else t.contiguous() for t in (a, b))
    if residual is not None and rows_apart(residual) is None:
        residual = residual.contiguous()
    bias, out_scale = (t if t is None else t.contiguous() for t in (bias, out_scale))
    return a, a_scale.contiguous(), b, b_scale.contiguous(), bias, residual, out_scale


def _launch_and_arguments(
    plan: Plan, operands: Operands, out: Tensor, device: torch.device
) -> tuple[Launch, tuple[Any, ...]]:
    a, a_scale, b, b_scale, bias, residual, out_scale = operands
    pointers = [t for t in operands if t is not None]
    aligned = not any(t.data_ptr() % 16 for t in pointers)
    launch, tile = plan.launch(device, aligned)
    m, n, k = plan.sizes
    vectors = (bias if bias is not None else b_scale, residual if residual is not None else out)
    a_ref: Any = a
    b_ref: Any = b
    out_ref: Any = out
    if tile.tma:
        row, column, *_ = plan.strides
        a_ref = TensorDescriptor(a, (m, k), (row, 1), (tile.block_m, tile.block_k))
        b_ref = TensorDescriptor(b, (n, k), (column, 1), (tile.block_n, tile.block_k))
    if tile.tma_store:
        out_ref = TensorDescriptor(out, (m, n), (n, 1), (tile.block_m, tile.block_n // tile.subtiles))
    scales = out_scale if out_scale is not None else a_scale
    return launch, (a_ref, a_scale, b_ref, b_scale, *vectors, scales, out_ref, m, n, k, *plan.periods, *plan.strides)
