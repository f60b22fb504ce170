"""Whether Inductor's kernels start early, while the kernel before them ends (programmatic dependent launch).

It pays between kernels that say when the next may start: ours, and Inductor's own. Kernels of libraries, convolutions
and float products, never say so, and a kernel that starts early behind one takes longer. With five times as many of
them as of INT8 layers a model took 5 percent longer (SwiftFormer, ``other/2026-11-30-h200-early-launches.json``); with
as many as layers nothing changed, or 0.7 percent (EdgeNeXt, XCiT).
"""

from __future__ import annotations

from torch.fx import GraphModule

from qframework.graph.nodes import operation

_OF_LIBRARIES = frozenset(
    ("conv1d", "conv2d", "conv3d", "convolution", "linear", "addmm", "mm", "matmul", "bmm", "baddbmm", "einsum")
)
_MOST = 2  # kernels of libraries for each lowered layer


def starts_early(gm: GraphModule, lowered: int) -> bool:
    """Whether early launches pay in a graph, of which ``lowered`` layers have kernels of ours."""
    of_libraries = sum(operation(node) in _OF_LIBRARIES for node in gm.graph.nodes)
    return of_libraries <= _MOST * lowered
