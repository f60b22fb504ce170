"""Keeps our own kernel for a quantization per token that Inductor should not fuse with what computes its input.

From::

    int8_linear, attention, or a parameter -> dynamic_quantize          decomposed; Inductor reads long rows twice
    operations on long rows -> dynamic_quantize                         and computes the operations twice

To, on a GPU::

    int8_linear, attention, or a parameter -> dynamic_quantize.alone    a row of up to 8,192 values is read once
    operations -> dynamic_quantize.alone                                and their result is written in between

The result of an opaque operator, or what comes from memory, has nothing to fuse with. With our kernel, attention with
its projection and a residual took up to 18 percent less time for eleven shapes of 577 to 65,536 tokens and 128 to 1,280
channels, and 1 percent more for one of them (``other/2026-11-29-h200-behind-attention.json``). A long row that Inductor
computes has something to fuse with, but is not kept between the maximum for its scale and its integers.
"""

from __future__ import annotations

import math
import operator

import torch
from torch import Tensor
from torch.fx import Node

from qframework.backend.lowering import Lowering
from qframework.compat.operators import OpOverload
from qframework.graph.nodes import RESHAPES, argument, behind, fake_value, operation
from qframework.graph.shapes import traced_size

_ours = torch.ops.qframework

MANY_ROWS = 4096
"""Few rows gain little: GELU of 1,024 rows of 2,048 values takes 10 us in one kernel, 8 and a second launch in two."""

_ANY_LENGTH, _UP_TO_4096, _UP_TO_2048, _NONE = (1024, math.inf), (1024, 4096), (1024, 2048), (math.inf, 0.0)
PAYS = {"gelu": _ANY_LENGTH, "silu": _UP_TO_4096, "sigmoid": _UP_TO_4096, "tanh": _UP_TO_4096}
"""Values in a row above and up to which two kernels are faster than one, by the operation that takes longest.

Inductor keeps a row of 1,024 values. Measured on an H100 (``other/2026-11-27-h100-long-rows.json`` and ``-chains``): of
12,544 rows of 1,280 values, GELU takes 105 us in one kernel and 62 in two, SiLU 80 and 46, three additions and products
79 and 45; of 8,192 rows of 8,192 values GELU 232 and 192, SiLU 150 and 174. ReLU, one or two additions and products,
and norms are faster in one kernel, or as fast."""

RESHAPED = {*RESHAPES, "contiguous", "clone", "to"}
TURNS = {"transpose", "permute"}
_VIEWS = {*RESHAPED, *TURNS}
_KERNELS = {"scaled_dot_product_attention", "matmul", "bmm", "linear"}
_NORMS = {"layer_norm", "rms_norm", "group_norm", "instance_norm"}
_COUNTED = {"add": 1, "sub": 1, "mul": 1, "div": 1, "addcmul": 2, "addcdiv": 2, "lerp": 2}
_MANY_OPERATIONS = 3


def keep_dynamic_quantize(lowering: Lowering) -> None:
    """Replace every such ``dynamic_quantize`` by its ``alone`` overload, which is not decomposed."""
    for node in lowering.gm.graph.nodes:
        if node.target is _ours.dynamic_quantize.default and is_per_token(node) and _not_fused(node.args[0]):
            node.target = _ours.dynamic_quantize.alone


def is_per_token(node: Node) -> bool:
    """Whether a ``dynamic_quantize`` node has a scale for each token."""
    return argument(node, 1, "granularity") == "per_token"


def is_written_by_int8_linear(x: Node) -> bool:
    """Whether an INT8 layer computes ``x``, so that no kernel of Inductor can quantize it."""
    return x.target in (_ours.int8_linear.default, _ours.int8_gated_linear.default)


def is_written_by_a_kernel(x: Node) -> bool:
    """Whether ``x`` comes from memory or is the result of a kernel that is neither Inductor's nor an INT8 layer's.

    Attention is such a kernel. False if Inductor copies or converts the result.
    """
    source = behind(x, RESHAPED)
    while operation(source) in TURNS and isinstance(source.args[0], Node):
        turned = fake_value(source)
        if turned is None or not turned.is_contiguous():
            return False  # the kernel that copies it quantizes as well
        source = behind(source.args[0], RESHAPED)
    given, written = fake_value(x), fake_value(source)
    if given is not None and isinstance(written, Tensor) and given.dtype != written.dtype:
        return False
    if source.op in ("placeholder", "get_attr") or operation(source) in _KERNELS:
        return True
    if source.target is operator.getitem and isinstance(source.args[0], Node):
        source = source.args[0]
    ours = isinstance(source.target, OpOverload) and source.target.namespace == "qframework"
    return ours and not is_written_by_int8_linear(source)


def is_computed_twice(x: Node) -> bool:
    """Whether Inductor would compute ``x``, viewed in any way, once for the scale and again, which takes longer.

    So it is with many long rows. A norm computes the statistics of its rows in the same kernel, and is as fast.
    """
    fake = fake_value(x)
    if fake is None or fake.ndim == 0 or not has_many_rows(fake.shape):
        return False
    least, most = _pays(_chain(x, _elements(fake.shape)))
    return least < traced_size(fake.shape[-1]) <= most


def _pays(chain: list[Node]) -> tuple[float, float]:
    """The lengths of rows between which two kernels are faster for these operations."""
    names = [operation(node) or "" for node in chain]
    lengths = [PAYS[name] for name in names if name in PAYS]
    if sum(_COUNTED.get(name, 0) for name in names) >= _MANY_OPERATIONS:
        lengths.append(_UP_TO_2048)
    return max(lengths, key=lambda length: length[1], default=_NONE)


def _chain(x: Node, size: int) -> list[Node]:
    """The elementwise operations that compute ``x`` from tensors of ``size`` elements; none if a norm is among them.

    A norm that is written out is known by an operand with one value for each row.
    """
    found: list[Node] = []
    waiting = [behind(x, _VIEWS)]
    while waiting:
        node = waiting.pop()
        if operation(node) in _NORMS:
            return []
        if node in found or operation(node) not in (*PAYS, *_COUNTED):
            continue
        found.append(node)
        for operand in node.all_input_nodes:
            fake = fake_value(operand)
            if fake is not None and fake.ndim > 0 and traced_size(fake.shape[-1]) == 1:
                return []
            if fake is not None and _elements(fake.shape) == size:
                waiting.append(behind(operand, _VIEWS))
    return found


def has_many_rows(shape: torch.Size) -> bool:
    """Whether a tensor is known to have so many rows that kernels, not launches, decide."""
    return _elements(shape[:-1]) >= MANY_ROWS


def _elements(shape: torch.Size) -> int:
    """How many elements a tensor had when it was traced; 0 if a size is unknown."""
    return math.prod(map(traced_size, shape))


def _not_fused(x: object) -> bool:
    """Whether a kernel of our own should quantize ``x``, which is on a GPU."""
    fake = fake_value(x) if isinstance(x, Node) else None
    if not isinstance(x, Node) or fake is None or fake.device.type != "cuda":
        return False
    return is_written_by_a_kernel(x) or is_written_by_int8_linear(x) or is_computed_twice(x)
