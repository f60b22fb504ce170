"""What Hopper's kernels for many small programs are compiled for, and the layouts of their products in registers."""

from __future__ import annotations

from typing import Literal, NamedTuple

from qframework.kernels.runtime.gluon import HAS_GLUON

BLOCK_N = 128  # keys of a whole block
HALF = BLOCK_N // 2
ROWS = 64  # queries of a warpgroup

Added = Literal["none", "float", "bool"]
"""What is added to logits: nothing, a float mask or bias, or 0 and -inf by a bool mask."""


class PieceForm(NamedTuple):
    """Compile-time sizes and formats."""

    block_d: int  # channels of Q and K, padded to a power of two
    block_dv: int
    warpgroups: int  # of a program
    first: int  # keys of the first piece
    second: int  # of the second piece, 0 for none
    halves: bool  # whole blocks in two halves: P V of one runs while the other's weights are computed
    masked: bool  # whether the last piece holds more than the last keys
    int8_values: bool
    whole_values: bool  # block_dv is the number of V's channels
    reuses_query: bool  # the result takes the place of its queries in shared memory
    added: Added = "none"
    step: int = 1  # strides of the bias are multiples of it; 0: the stride of keys is not 1
    columns: int = 0  # of factors of relative positions, a power of two; 0 for none
    rest_d: int = 0  # channels of a second slice of Q and K, a power of two, 0 for none
    rest_dv: int = 0
    causal: bool = False  # the pieces are the keys of the queries' own places
    clipped: bool = False  # causal queries may come after the last key
    block_n: int = BLOCK_N  # keys of a whole block
    several: bool = False  # tiles a program (streaming)
    queries: int = 2  # tiles of queries in shared memory (resident)
    by_mask: bool = False  # the blocks of a bool mask are visited (streaming, 16 bit)


if HAS_GLUON:
    from qframework.kernels.runtime.gluon import gl, gluon

    @gluon.constexpr_function
    def scores_layout(keys, int8, form):
        """Of Q K^T of so many keys."""
        return gl.NVMMADistributedLayout([3, 0], [form.warpgroups * 4, 1], [16, keys, 32 if int8 else 16])

    @gluon.constexpr_function
    def result_layout(channels, form):
        """Of P V of so many channels."""
        return gl.NVMMADistributedLayout([3, 0], [form.warpgroups * 4, 1], [16, channels, 16])
