"""Decoding for Hopper where many rows share a key head: which calls, how they are divided, and the launch.

The kernel is hopper_kernel.py; decode.py adds the shares of its programs and has all other calls.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from qframework.kernels.attention.decode.arguments import DecodeAttentionArguments, Shares
from qframework.kernels.attention.decode.hopper_kernel import ROWS, RowsForm
from qframework.kernels.attention.hopper import specialized
from qframework.kernels.attention.operands import LOG2_E
from qframework.kernels.runtime.chip import capability_of, chip_of
from qframework.kernels.runtime.gluon import HAS_GLUON
from qframework.kernels.runtime.launch import cdiv, launch, power_of_2

# The general kernel reads the keys once for every 16 rows. With 17 to 32 it is faster where a multiprocessor has few
# bytes of them to read, or none of the measured widths.
FEW_ROWS, MANY_ROWS = 16, 32
LEAST_BYTES, MEASURED_CHANNELS = 200 * 1024, 128
_SHARED = 228 * 1024  # bytes of a multiprocessor, of which the system takes some for each program
_SYSTEM = 1024
_LARGEST = 227 * 1024  # of a program
_BESIDES = 320  # of each warpgroup of a program, for barriers and reductions
_REGISTERS = 255  # of a thread, with two warpgroups on a multiprocessor
# Times of a block, and of a program's beginning and end with its share of the sum, with so many programs on a
# multiprocessor; in times of a block with two.
_BLOCK, _PROGRAM = {1: 0.7, 2: 1.0}, {1: 0.5, 2: 2.5}
_MAX_STAGES = 4
_MAX_SPLITS = 256
_MASKED_QUERIES = 16  # of which each key has a bit

if HAS_GLUON:
    from qframework.kernels.attention.decode.hopper_kernel import kernel


class RowsPlan(NamedTuple):
    """How a call is divided and compiled."""

    splits: int
    block_n: int = 128  # keys of a block
    stages: int = 2
    warpgroups: int = 1
    programs: int = 2  # on a multiprocessor at once


def fits(x: DecodeAttentionArguments) -> bool:
    """Whether the kernel computes this call on its device, faster than the general one.

    It reads bool masks that are the same for all heads, and for all queries or one of up to 16 for each.
    """
    if x.softcap is not None or x.sinks is not None:
        return False
    if not HAS_GLUON or capability_of(x.query.device) != (9, 0) or x.rows <= FEW_ROWS:
        return False
    (batch, kv, capacity, width), channels = x.value.shape, x.key.shape[3]
    keys = capacity if x.window is None else min(capacity, x.window + x.query.shape[2])
    if not worth(x.rows, batch * kv * keys, (channels, width), chip_of(x.query.device)[1]):
        return False
    mask = x.mask
    if mask is not None and (mask.dtype != torch.bool or _differs(mask, 1) or _mask_kind(x) is None):
        return False
    words = x.scales.stride(3) == 1 and x.scales.stride(2) == 2 and all(s % 2 == 0 for s in x.scales.stride()[:2])
    aligned = x.scales.data_ptr() % 4 == 0 and x.query.stride(3) == 1
    return words and aligned and all(specialized.addressable(cache) for cache in (x.key, x.value))


def worth(rows: int, tokens: int, channels: tuple[int, int], multiprocessors: int) -> bool:
    """Whether the kernel is the faster one for so many rows of a key head, and ``tokens`` of all key heads together."""
    if rows > MANY_ROWS:
        return True
    large = tokens * sum(channels) >= LEAST_BYTES * multiprocessors
    return rows > FEW_ROWS and large and max(channels) <= MEASURED_CHANNELS


def _mask_kind(x: DecodeAttentionArguments) -> str | None:
    """What the mask is the same for, as in ``RowsForm.masked``; None if there are too many queries."""
    if x.mask is None:
        return "none"
    if not _differs(x.mask, 2):
        return "keys"
    return "rows" if x.query.shape[2] <= _MASKED_QUERIES else None


def _differs(x: Tensor, dimension: int) -> bool:
    """Whether ``x`` may have different values along ``dimension``."""
    return x.shape[dimension] > 1 and x.stride(dimension) != 0


@functools.cache
def choose_rows_plan(
    rows: int, heads: int, keys: int, channels: tuple[int, int], multiprocessors: int, row_mask: bool = False
) -> RowsPlan:
    """A plan for ``rows`` queries of each of ``heads`` key heads of the batch, with K's and V's ``channels``.

    ``row_mask`` says that a mask differs between queries. As many splits as end soonest.
    """
    widths = block_widths(*channels)
    form = _form(rows, widths, row_mask)
    room = min(_SHARED // form.programs - _SYSTEM, _LARGEST)
    stages = max(
        n for n in range(2, _MAX_STAGES + 1) if program_bytes(widths, form._replace(stages=n), row_mask) <= room
    )
    programs, blocks = heads * cdiv(rows, ROWS * form.warpgroups), cdiv(keys, form.block_n)

    def time(splits: int) -> tuple[float, int]:
        at_once = min(form.programs, cdiv(programs * splits, multiprocessors))
        rounds = cdiv(programs * splits, form.programs * multiprocessors)
        return rounds * (cdiv(blocks, splits) * _BLOCK[at_once] + _PROGRAM[at_once]), splits

    most = min(blocks, _MAX_SPLITS, 4 * cdiv(form.programs * multiprocessors, programs))
    return form._replace(splits=min(range(1, max(most, 1) + 1), key=time), stages=stages)


def _form(rows: int, widths: tuple[int, int], row_mask: bool) -> RowsPlan:
    """How programs share a multiprocessor: two, or two warpgroups of one that convert the same values."""
    if max(widths) > 128:
        return RowsPlan(1, 64, warpgroups=2, programs=1) if rows > ROWS else RowsPlan(1, 32)
    return RowsPlan(1, 64 if row_mask and sum(widths) > 128 else 128)


def block_widths(channels: int, width: int) -> tuple[int, int]:
    """Channels of K and V in a block: powers of two of at least 32."""
    return max(32, power_of_2(channels)), max(32, power_of_2(width))


def program_bytes(widths: tuple[int, int], plan: RowsPlan, row_mask: bool = False) -> int:
    """Bytes of shared memory of a program."""
    queries = 2 * plan.warpgroups * ROWS * widths[0]
    words = 8 if row_mask else 4
    return queries + plan.block_n * (plan.stages * sum(widths) + 2 * widths[1] + words) + plan.warpgroups * _BESIDES


def plan_of(x: DecodeAttentionArguments) -> RowsPlan:
    """The plan for a call."""
    (batch, _, tokens, channels), (_, kv, capacity, width) = x.query.shape, x.value.shape
    keys = capacity if x.window is None else min(capacity, x.window + tokens)
    row_mask = _mask_kind(x) == "rows"
    return choose_rows_plan(x.rows, batch * kv, keys, (channels, width), chip_of(x.query.device)[1], row_mask)


def attend_rows(x: DecodeAttentionArguments, plan: RowsPlan, shares: Shares) -> None:
    """Write the shares, or with one split the result."""
    (batch, _, tokens, channels), (_, kv, capacity, width) = x.query.shape, x.value.shape
    block_d, block_dv = block_widths(channels, width)
    mask = None if x.mask is None else x.mask.view(torch.int8)
    form = RowsForm(
        block_d,
        block_dv,
        channels,
        width,
        plan.block_n,
        plan.stages,
        plan.warpgroups,
        queries=power_of_2(tokens),
        lengths=x.lengths is not None,
        causal=x.is_causal and tokens > 1,
        window=x.window is not None,
        masked=_mask_kind(x) or "none",
        split=plan.splits > 1,
    )
    launch(kernel, (cdiv(x.rows, ROWS * plan.warpgroups), plan.splits, batch * kv))(
        specialized.describe(x.key, plan.block_n, block_d),
        specialized.describe(x.value, plan.block_n, block_dv),
        x.query,
        x.scales,
        x.scales if x.lengths is None else x.lengths,
        x.scales if mask is None else mask,
        *shares,
        kv,
        x.group,
        tokens,
        capacity,
        0 if mask is None else mask.shape[3],
        plan.splits,
        x.window or 0,
        x.logit_scale * LOG2_E,
        *x.query.stride()[:3],
        *(stride // 2 for stride in x.scales.stride()[:2]),
        x.lengths.stride(0) if x.lengths is not None and x.lengths.shape[0] > 1 else 0,
        *((0, 0, 0) if mask is None else (mask.stride(0), mask.stride(2), mask.stride(3))),
        V_LAYOUT=specialized.layout(plan.block_n, block_dv, torch.float16),
        FORM=form,
        num_warps=4 * plan.warpgroups,
        maxnreg=_REGISTERS,
    )
