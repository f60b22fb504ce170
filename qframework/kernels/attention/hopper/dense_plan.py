"""Plans of dense attention on Hopper (dense.py): which of its kernels, how many programs, pieces of keys."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from qframework.kernels.attention.hopper import specialized
from qframework.kernels.attention.hopper.bias import NO_BIAS, DenseBias
from qframework.kernels.attention.hopper.piece_form import BLOCK_N, HALF, ROWS
from qframework.kernels.runtime.chip import chip_of
from qframework.kernels.runtime.launch import cdiv, power_of_2

MAX_CHANNELS = 64
_SHARED_BYTES = 227 * 1024  # of a multiprocessor, for all programs
_PROGRAM_BYTES = 2048  # of each for barriers and the system
_REGISTERS = {1: 168, 2: 248, 3: 168, 4: 128, 5: 96}  # per thread, with so many warpgroups at work on a multiprocessor
_FEW_TILES = 16  # INT8: up to so many of a head, programs that stay are faster
_FEW_HALF_TILES = 5  # the same in 16 bit, with more than 32 channels,
_ROUNDS = 2.9  # if each of these programs computes so many tiles, since fewer end unevenly,
_SOME_HALF_TILES, _MANY_ROUNDS = 8, 8.0  # and up to so many tiles of a head if it computes no more than these
_FEW_CAUSAL_TILES = 8  # the same for programs of two tiles under causality
_FEW_STAYING_TILES = 4  # up to so many, programs that stay are faster under causality as well, from _ROUNDS on
_LOADING = 0.7  # time to load a head's keys and values, in tiles of queries


class Pieces(NamedTuple):
    """How keys are split: ``first`` and ``second`` (0 for none) hold the last keys, after whole blocks of 128."""

    first: int
    second: int
    blocks: int
    masked: bool  # whether the last piece holds more than the last keys


class DensePlan(NamedTuple):
    """How a call is computed."""

    stream: bool
    warpgroups: int  # of a program
    registers: int  # of a thread
    parts: int  # programs of a head, or of the whole grid for windows and where keys stream
    windows: bool = False
    queries: int = 2  # tiles of queries in shared memory of a program, where keys do not stream


@functools.cache
def slices_of(channels: int) -> tuple[int, int]:
    """Slices of a head, powers of two; the second may be 0."""
    return specialized.slices(channels) if channels > MAX_CHANNELS else (max(power_of_2(channels), 32), 0)


@functools.cache
def split(keys: int) -> Pieces:
    """Pieces of 16, 32 or 64 keys that hold few more than the keys there are."""
    blocks, before_last = divmod(keys - 1, BLOCK_N)
    rest = before_last + 1
    first = min(max(power_of_2(rest // 2 + 1), 16), HALF)
    if first >= rest:
        return Pieces(first, 0, blocks, first > rest)
    second = max(power_of_2(rest - first), 16)
    if 2 * first <= HALF and second == first:
        first, second = 2 * first, 0
    return Pieces(first, second, blocks, first + second > rest)


def plan_masked(q: Tensor) -> DensePlan:
    """The plan for the blocks of a mask. Where a head has many tiles of queries, which differ, each has a program."""
    tiles, processors = cdiv(q.shape[2], 2 * ROWS), chip_of(q.device)[1]
    items = tiles * q.shape[1] * q.shape[0]
    stay = 32 < q.shape[3] <= MAX_CHANNELS and _half_programs_stay(items, tiles, processors)
    return DensePlan(True, 2, _REGISTERS[4], min(items, 2 * processors) if stay else items)


def plan_of(q: Tensor, k: Tensor, v: Tensor, bias: DenseBias = NO_BIAS, causal: bool = False) -> DensePlan:
    """The fastest plan for these operands."""
    (batch, heads, queries, channels), keys = q.shape, k.shape[2]
    int8, widest, processors = q.dtype == torch.int8, max(channels, v.shape[3]), chip_of(q.device)[1]
    windows = not int8 and max(queries, keys) <= ROWS and widest <= MAX_CHANNELS
    if windows and bias.mask is not None and bias.step < 2:  # pairs are loaded as fast as they are kept
        period = 1 if bias.sizes == (1, 1) else heads * bias.masks
        return plan_windows(batch * heads, queries, keys, widest, processors, bias.itemsize, period)
    return plan(batch * heads, queries, keys, widest, int8, processors, causal, bias.itemsize, bias.columns)


@functools.cache
def plan_windows(
    heads: int, queries: int, keys: int, channels: int, processors: int, itemsize: int, period: int
) -> DensePlan:
    """The launch of window_kernel.py for windows of up to 64 tokens.

    Args:
        heads: of all windows.
        queries: up to 64.
        keys: up to 64.
        channels: the most of a head.
        processors: of the GPU.
        itemsize: bytes of a number of the bias, 0 for none.
        period: after so many heads in memory, biases repeat.
    """
    pieces = split(keys)
    held, width = pieces.first + pieces.second, power_of_2(max(channels, 32))
    size = 2 * (2 * (ROWS + 2 * held) * width + ROWS * width) + ROWS * held * itemsize + _PROGRAM_BYTES
    at_once = min(_SHARED_BYTES // size, 4)
    slots = processors * at_once
    if period <= slots:
        slots -= slots % period
    return DensePlan(False, 1, _REGISTERS[at_once], min(slots, heads), True)


@functools.cache
def plan(
    heads: int,
    queries: int,
    keys: int,
    channels: int,
    int8: bool,
    processors: int,
    causal: bool = False,
    itemsize: int = 0,
    columns: int = 0,
) -> DensePlan:
    """The kernel without windows and its shape for ``heads`` heads of all sequences of a batch.

    The resident kernel needs three or four programs on a multiprocessor to hide their latency. A program takes several
    tiles of queries of a head where there are enough heads, since each program loads the head's keys and values.
    """
    items = cdiv(queries, 2 * ROWS) * heads
    if causal:
        programs = items if channels > MAX_CHANNELS else _causal_programs(items, items // heads, processors)
        return DensePlan(True, 2, _REGISTERS[4], programs)
    pieces = split(keys)
    element = 1 if int8 else 2
    held = pieces.first + pieces.second + pieces.blocks * BLOCK_N
    width = sum(slices_of(channels))
    tile = ROWS * width * element
    size = held * width * (element + 2) + 2 * tile + (held + 2 * ROWS) * columns * 2 + _PROGRAM_BYTES
    # With one tile less a second program fits. Relative positions would go to the general kernel else.
    waits = columns > 0 and size > _SHARED_BYTES // 2 >= size - tile
    at_once = max(min(_SHARED_BYTES // (size - tile if waits else size), 4), 1)
    added = itemsize > 0 or columns > 0
    if added:
        at_once = min(at_once, 4 if keys <= HALF else 3)  # a fourth would spill with more keys
    if at_once >= 3 or pieces.blocks == 0 or (added and at_once >= 2):
        slots = processors * at_once
        parts = min(
            range(1, cdiv(queries, ROWS) + 1),
            key=lambda n: (cdiv(heads * n, slots) * (cdiv(cdiv(queries, ROWS), n) + _LOADING), n),
        )
        return DensePlan(False, 1, _REGISTERS[at_once], parts, queries=1 if waits else 2)
    tiles = items // heads
    several = tiles <= _FEW_TILES if int8 else width >= 64 and _half_programs_stay(items, tiles, processors)
    return DensePlan(True, 2, _REGISTERS[4], min(items, 2 * processors) if several else items)


def _half_programs_stay(items: int, tiles: int, processors: int) -> bool:
    """Whether two programs on each multiprocessor that compute all tiles are faster than one for each, in 16 bit."""
    rounds = items / (2 * processors)
    return rounds >= _ROUNDS and (tiles <= _FEW_HALF_TILES or (tiles <= _SOME_HALF_TILES and rounds <= _MANY_ROUNDS))


def _causal_programs(items: int, tiles: int, processors: int) -> int:
    """Programs for ``items`` tiles, ``tiles`` of each head. Where tiles are short, a program's start counts."""
    if tiles <= 2 or (tiles <= _FEW_STAYING_TILES and items >= _ROUNDS * 2 * processors):
        return min(items, 2 * processors)
    if items > processors and (tiles <= _FEW_CAUSAL_TILES or items <= 2 * processors):
        return cdiv(items, 2)
    return items


def heads_in_turn(heads: int, tiles: int, programs: int, cached: int) -> int:
    """How many heads' first tiles come before their second ones, where these take less time.

    As many as the L2 cache holds, so that those that take longest begin first; but programs that compute many tiles
    each take all kinds of them in turn.
    """
    if programs * 3 > heads * tiles:
        return cached
    turns = (n for n in (8, 16, 32) if heads % n == 0 and math.gcd(programs, tiles * n) <= n)
    return next(turns, cached)
