"""INT8 linears of experts: one product whose rows, sorted by expert, meet a weight of their own for each group.

Formula, for the rows ``offsets[e - 1] <= m < offsets[e]`` of expert e::

    acc[m] = a[m] @ b[e].T                                  INT32, exact
    out[m] = acc[m] * a_scale[m] * b_scale[e]               float32, rounded once to out_dtype

Rows behind the last offset belong to no expert and are zeros. The groups are known on the device alone: the grid has a
program for every tile that any groups of so many rows could need, each finds its expert from the offsets, and those
that are left write the zeros.

Layout: ``a (T, K)`` row-major, ``b (E, N, K)`` K-major, ``out (T, N)``. Reference: ``int8_grouped_linear_ref``. The CPU
takes ``int8_linear`` for one expert after another. It stands for ``torch.nn.functional.grouped_mm``, with which
transformers computes experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qframework.errors import QFrameworkError, UnsupportedError
from qframework.kernels.runtime.ahead import launches_of
from qframework.kernels.runtime.checks import check_dtype, check_same_device, check_shape
from qframework.kernels.runtime.chip import capability_of, check_device
from qframework.kernels.runtime.launch import cdiv, launch, power_of_2
from qframework.kernels.runtime.operator import declare, refuse_backward
from qframework.kernels.runtime.overlap import wait_for_previous_kernel
from qframework.kernels.runtime.triton import tl, triton
from qframework.numerics import FLOAT_DTYPES, MAX_INT8_PRODUCTS

NAME = "int8_grouped_linear"
MOST_EXPERTS = 1024  # whose offsets each program reads at once


class Int8GroupedLinearArguments(NamedTuple):
    """The arguments of ``qframework::int8_grouped_linear``; see :func:`int8_grouped_linear`."""

    a: Tensor
    a_scale: Tensor
    b: Tensor
    b_scale: Tensor
    offsets: Tensor
    out_dtype: torch.dtype | None = None

    def empty_result(self) -> Tensor:
        """An uninitialized result."""
        return self.a.new_empty((self.a.shape[0], self.b.shape[1]), dtype=self.out_dtype or torch.float32)

    def check(self) -> None:
        """Raise UnsupportedError or QFrameworkError, naming the argument."""
        a, a_scale, b, b_scale, offsets, out_dtype = self
        check_same_device(NAME, a, a_scale=a_scale, b=b, b_scale=b_scale, offsets=offsets)
        for argument, x, dtype in (("a", a, torch.int8), ("b", b, torch.int8), ("offsets", offsets, torch.int32)):
            check_dtype(NAME, argument, x, (dtype,))
        check_dtype(NAME, "a_scale", a_scale, (torch.float32,))
        check_dtype(NAME, "b_scale", b_scale, (torch.float32,))
        if a.ndim != 2 or b.ndim != 3 or a.shape[1] != b.shape[2]:
            raise QFrameworkError(
                f"{NAME}: a and b must have shapes (T, K) and (E, N, K), got {tuple(a.shape)} and {tuple(b.shape)}"
            )
        experts, outputs, inputs = b.shape
        check_shape(NAME, "a_scale", a_scale, (a.shape[0], 1))
        check_shape(NAME, "b_scale", b_scale, (experts, outputs))
        check_shape(NAME, "offsets", offsets, (experts,))
        if inputs > MAX_INT8_PRODUCTS or experts > MOST_EXPERTS:
            raise UnsupportedError(
                f"{NAME}: K must be at most {MAX_INT8_PRODUCTS} and E at most {MOST_EXPERTS}, got {tuple(b.shape)}"
            )
        if out_dtype not in (None, *FLOAT_DTYPES):
            raise UnsupportedError(f"{NAME}: out_dtype must be float32, float16 or bfloat16, got {out_dtype}")


def int8_grouped_linear_ref(x: Int8GroupedLinearArguments) -> Tensor:
    """Reference of ``qframework::int8_grouped_linear``; the float64 accumulator is exact for every INT32 sum."""
    out = x.empty_result().zero_()
    for expert, (start, end) in enumerate(_groups(x)):
        acc = (x.a[start:end].double() @ x.b[expert].double().t()).float()
        out[start:end] = (acc * x.a_scale[start:end] * x.b_scale[expert]).to(out.dtype)
    return out


def int8_grouped_linear_cpu(x: Int8GroupedLinearArguments) -> Tensor:
    """``int8_grouped_linear`` on a CPU."""
    out = x.empty_result().zero_()
    for expert, (start, end) in enumerate(_groups(x)):
        if end > start:
            out[start:end] = torch.ops.qframework.int8_linear(
                x.a[start:end], x.a_scale[start:end], x.b[expert], x.b_scale[expert], out_dtype=out.dtype
            )
    return out


def _groups(x: Int8GroupedLinearArguments) -> list[tuple[int, int]]:
    """First row of each expert, and the row behind its last one. Reads the offsets."""
    ends: list[int] = x.offsets.tolist()
    starts = [0, *ends][: len(ends)]
    if any(not start <= end <= x.a.shape[0] for start, end in zip(starts, ends, strict=True)):
        raise QFrameworkError(
            f"{NAME}: offsets must not decrease, from 0 to a's {x.a.shape[0]} rows at most, got {ends}"
        )
    return list(zip(starts, ends, strict=True))


# GPU ------------------------------------------------------------------------------------------------------------------


class GroupedTile(NamedTuple):
    """The compile-time choices of the kernel."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


FEW_ROWS = GroupedTile(16, 128, 256, 4, 4)
SOME_ROWS = GroupedTile(64, 128, 128, 4, 4)
MANY_ROWS = GroupedTile(128, 256, 128, 8, 3)
_ROUNDS = 2 * 132 * MANY_ROWS.block_m * MANY_ROWS.block_n  # results of two tiles for each multiprocessor


def choose_tile(
    rows: int, experts: int, outputs: int, inputs: int, capability: tuple[int, int] | None = None
) -> GroupedTile:
    """A tile by the rows of an expert on average, for ``rows`` of all experts.

    On Hopper by measurement (``other/2026-11-30-h200-grouped-linear.json``), where it is 0.4 percent behind the fastest
    of eight tiles in the geometric mean of 32 cases, 4 at most:

    - up to 8 rows, reading weights decides. Most experts have a single tile of 16 rows, and long steps load ahead;
    - from 129 rows on, the largest tile. A group needs half a tile more than its rows, on average, and a row of tiles
      of 64 takes 1.2 times as long, so that those take longer from 128 rows on. Not where they are too few to keep all
      multiprocessors at work;
    - between, where nothing was measured, 64 rows, with which no case took longer than 1.15 times the fastest.

    On other chips by what fits shared memory, 163 KB and more or 99, and registers: as many rows as an expert has.

    Rows of no multiple of 16 bytes are loaded byte by byte, so that a thread spills kilobytes if a step is long.
    """
    mean = cdiv(rows, max(experts, 1))
    if inputs % 16:
        return GroupedTile(min(_tile_rows(mean), 64), 128, 64, 8, 4)
    if capability != (9, 0):
        block_m = _tile_rows(mean)
        large = capability in (None, (8, 0), (10, 0))
        return GroupedTile(block_m, 128, 128, 8 if block_m == 128 else 4, 4 if large else 3)
    if mean <= FEW_ROWS.block_m // 2:
        return FEW_ROWS
    return MANY_ROWS if mean > MANY_ROWS.block_m and rows * outputs >= _ROUNDS else SOME_ROWS


def _tile_rows(mean: int) -> int:
    return min(max(power_of_2(mean), 16), 128)


@triton.jit(do_not_specialize=["T"])
def _int8_grouped_linear_kernel(
    a_ptr,  # (T, K) int8
    a_scale_ptr,  # (T,) fp32
    b_ptr,  # (E, N, K) int8, contiguous
    b_scale_ptr,  # (E, N) fp32
    offsets_ptr,  # (E,) int32
    out_ptr,  # (T, N) float
    T,
    N,
    K,
    E,
    stride_a,
    EXPERTS: tl.constexpr,  # a power of two, at least E
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """Grid (cdiv(T, BLOCK_M) + E, cdiv(N, BLOCK_N)): first the tiles of all experts, then those without an expert."""
    wait_for_previous_kernel(OVERLAP)
    e = tl.arange(0, EXPERTS)
    # Offsets that decrease, or that are out of range, must not reach other memory.
    ends = tl.minimum(tl.maximum(tl.load(offsets_ptr + e, mask=e < E, other=0), 0), T)
    starts = tl.minimum(tl.maximum(tl.load(offsets_ptr + e - 1, mask=(e > 0) & (e < E), other=0), 0), T)
    tiles = tl.where(e < E, (tl.maximum(ends - starts, 0) + BLOCK_M - 1) // BLOCK_M, 0)
    upto = tl.cumsum(tiles, 0)
    tile = tl.program_id(0)
    expert = tl.sum(tl.where((upto <= tile) & (e < E), 1, 0), 0)
    here = e == expert
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = n < N
    if expert < E:
        first = tl.sum(tl.where(here, starts, 0), 0) + (tile - tl.sum(tl.where(here, upto - tiles, 0), 0)) * BLOCK_M
        end = tl.sum(tl.where(here, ends, 0), 0)
        m = first + tl.arange(0, BLOCK_M)
        rows = m < end
        k = tl.arange(0, BLOCK_K)
        a_ptrs = a_ptr + m.to(tl.int64)[:, None] * stride_a + k[None, :]
        # Columns past the edge repeat others; their results are not stored.
        b_ptrs = b_ptr + (expert.to(tl.int64) * N + n % N)[None, :] * K + k[:, None]
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
        for start in range(0, K, BLOCK_K):
            if EVEN_K:
                a = tl.load(a_ptrs, mask=rows[:, None], other=0)
                b = tl.load(b_ptrs)
            else:
                a = tl.load(a_ptrs, mask=rows[:, None] & (k[None, :] < K - start), other=0)
                b = tl.load(b_ptrs, mask=k[:, None] < K - start, other=0)
            acc = tl.dot(a, b, acc, out_dtype=tl.int32)
            a_ptrs += BLOCK_K
            b_ptrs += BLOCK_K
        a_scale = tl.load(a_scale_ptr + m, mask=rows, other=0.0)
        b_scale = tl.load(b_scale_ptr + expert * N + n, mask=columns, other=0.0)
        y = acc.to(tl.float32) * a_scale[:, None] * b_scale[None, :]
    else:
        last = tl.sum(tl.where(e == E - 1, ends, 0), 0)
        m = last + (tile - tl.sum(tiles, 0)) * BLOCK_M + tl.arange(0, BLOCK_M)
        rows = m < T
        y = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    out_ptrs = out_ptr + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=rows[:, None] & columns[None, :])


def int8_grouped_linear_triton(x: Int8GroupedLinearArguments, tile: GroupedTile | None = None) -> Tensor:
    """``int8_grouped_linear`` on a GPU, by default with the tile of :func:`choose_tile`.

    Offsets, which it cannot check without waiting for the GPU, are clamped.
    """
    check_device(x.a.device)
    (rows, inputs), (experts, outputs, _) = x.a.shape, x.b.shape
    out = x.empty_result()
    if not out.numel() or not experts:
        return out.zero_()
    a = x.a if x.a.stride(1) == 1 else x.a.contiguous()
    tile = tile or choose_tile(rows, experts, outputs, inputs, capability_of(a.device))
    launch(_int8_grouped_linear_kernel, (cdiv(rows, tile.block_m) + experts, cdiv(outputs, tile.block_n)))(
        a,
        x.a_scale.contiguous(),
        x.b.contiguous(),
        x.b_scale.contiguous(),
        x.offsets.contiguous(),
        out,
        rows,
        outputs,
        inputs,
        experts,
        a.stride(0),
        EXPERTS=power_of_2(experts),
        EVEN_K=inputs % tile.block_k == 0,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


INT8_GROUPED_LINEAR = declare(
    "int8_grouped_linear(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, Tensor offsets, "
    "ScalarType? out_dtype=None) -> Tensor",
    Int8GroupedLinearArguments,
    cpu=int8_grouped_linear_cpu,
    cuda=int8_grouped_linear_triton,
    fake=Int8GroupedLinearArguments.empty_result,
    warm_up=launches_of(int8_grouped_linear_triton),
)
refuse_backward(NAME)


def int8_grouped_linear(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    offsets: Tensor,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``a[m] @ b[e].T * a_scale[m] * b_scale[e]`` for the rows m of each expert e, in INT8 with exact INT32 sums.

    Args:
        a: ``(T, K)`` int8, rows sorted by expert.
        a_scale: ``(T, 1)`` fp32, dequantizes the rows of ``a``.
        b: ``(E, N, K)`` int8, the weights of up to 1,024 experts.
        b_scale: ``(E, N)`` fp32, dequantizes their output channels.
        offsets: ``(E,)`` int32, for each expert the row behind its last one, as ``grouped_mm`` takes them. Rows behind
            the last offset are zero. A GPU clamps what is out of range.
        out_dtype: float32 (default), float16 or bfloat16.

    Returns:
        ``(T, N)`` of ``out_dtype``.

    Raises:
        UnsupportedError: an unsupported dtype or device; K above 131,071, where INT32 can overflow.
        QFrameworkError: shapes or devices that do not match; on a CPU also offsets that decrease or exceed T.
    """
    result: Tensor = torch.ops.qframework.int8_grouped_linear(a, a_scale, b, b_scale, offsets, out_dtype)
    return result
