"""The compile-time choices of int8_linear's kernels, and the tiles of Hopper's own kernel."""

from __future__ import annotations

from typing import Literal, NamedTuple

# "activation" has an INT8 result, "activation_float" a 16-bit one; "all" also adds a residual.
Epilogue = Literal["float", "residual", "int8", "activation", "activation_float", "all"]
Specialized = Literal["", "pingpong", "cooperative"]


class Tile(NamedTuple):
    """The compile-time choices of the kernel, and its grid."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    # Persistent programs of each multiprocessor: one multiplies while another stores. 0: one program for each tile.
    programs: int = 0
    subtiles: int = 1  # parts of a tile's columns whose epilogues run one after the other
    tma: bool = False  # loads operands through tensor descriptors
    tma_store: bool = False  # stores the result through one
    group_m: int = 8  # rows of tiles before the next column of tiles
    specialized: Specialized = ""  # the kernel of hopper.py, and how its warpgroups share the work


class FewRowsTile(NamedTuple):
    """The compile-time choices of the kernels for few rows, see few_rows.py."""

    block_m: int  # at least the number of rows
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    parts: int = 1  # programs that share the inner size of a tile
    ahead: int = 0  # channels of the weight to prefetch before the previous kernel is done


MAX_FEW_ROWS = 64  # of the kernels for few rows
PINGPONG = Tile(128, 128, 128, 4, 5, programs=1, tma=True, tma_store=True, group_m=4, specialized="pingpong")
COOPERATIVE = PINGPONG._replace(block_m=256, num_stages=4, group_m=1, specialized="cooperative")
# A warpgroup has 64 rows and all columns. With three stages, there is room for a residual.
WIDE = COOPERATIVE._replace(block_m=128, block_n=256, num_stages=3, group_m=8)
WIDE_160 = WIDE._replace(block_n=160, num_stages=5)
WIDE_192 = WIDE._replace(block_n=192, num_stages=4)
THIRDS = COOPERATIVE._replace(block_m=192)  # three warpgroups of 64 rows
# One warpgroup, for problems that are too small to give every multiprocessor a larger tile.
FLAT_160 = WIDE._replace(block_m=64, block_n=160, num_stages=6, programs=0)
FLAT_192 = FLAT_160._replace(block_n=192)
