"""Compiles a repeated block once, because Inductor's work grows with the number of nodes.

From::

    x -> LayerNorm -> int8_linear -> ... -> int8_linear -> LayerNorm -> int8_linear -> ... -> int8_linear -> ...

To::

    x -> LayerNorm -> int8_linear -> ... -> int8_linear -> invoke_subgraph(block) -> invoke_subgraph(block) -> ...

where ``block`` is a separate graph, whose inputs are what differs from block to block (weights, scales) and what the
rest of the model computes for all of them (masks, rotary embeddings). Blocks are cut behind an ``int8_linear``: the
operator is opaque, so that Inductor stores all values that cross the cut anyway, and no fusion is lost. These are the
operator's result, which is contiguous, and perhaps the residual stream. Where a block's linears stay in float, as with
few rows, it is cut behind one with a bias, which is as opaque unless Inductor tunes products. Other blocks, such as the
first of a model, stay inline.

A subgraph becomes a function of the code that calls it, so that kernels are chosen and CUDA graphs captured as without
it. C++ wrappers cannot call one; options that say what a graph is, or hand it to other passes, leave it whole as well.
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from qframework.backend.block_layouts import make_rows_contiguous
from qframework.backend.group_weights import reads_grouped_weight
from qframework.backend.lowering import Lowering
from qframework.compat import pytree
from qframework.compat.dynamo import VALUE_KEYS, recorded_value
from qframework.graph.nodes import linear_call, operation
from qframework.graph.writes import writes_in_place

_LEAST_SAVED = 40  # nodes that Inductor need not compile; with fewer, a subgraph costs more than it saves
_LONGEST = 200  # nodes of a block
# Inductor's options under which blocks are outlined, by the beginning of their names: they choose kernels or checks, or
# say how the compiled code is called.
_WITH_BLOCKS = (
    "alignment_asserts",
    "coordinate_descent_",
    "epilogue_fusion",
    "max_autotune",
    "shape_padding",
    "size_asserts",
    "triton.cudagraph",
    "triton.enable_pdl",
)
_RANDOM = {"dropout", "alpha_dropout", "bernoulli", "normal", "rand", "randn", "rand_like", "randn_like", "randint"}
_int8_linear = torch.ops.qframework.int8_linear.default
# Operations besides int8_linear whose results may leave a block: they allocate them, and never alias an input.
_LEAVING = {"add", "sub", "mul", "layer_norm", "rms_norm", "linear"}


class Repeat(NamedTuple):
    """``times`` consecutive stretches of ``length`` calls that compute the same."""

    start: int
    length: int
    times: int

    @property
    def saved(self) -> int:
        return self.length * (self.times - 1)

    def stretches(self, calls: Sequence[Node]) -> list[list[Node]]:
        starts = range(self.start, self.start + self.times * self.length, self.length)
        return [list(calls[start : start + self.length]) for start in starts]


def outline_blocks(lowering: Lowering) -> None:
    """Replace repeated blocks by calls of one subgraph, unless Inductor cannot call one, or options rule it out."""
    from qframework.compat.inductor import can_call_subgraphs, tunes_products

    options = lowering.options.inductor
    if all(name.startswith(_WITH_BLOCKS) for name in options) and can_call_subgraphs():
        outline(lowering.gm, behind_floats=not tunes_products(options))


def outline(gm: GraphModule, behind_floats: bool = False) -> int:
    """Replace repeated blocks by calls of one subgraph, in place; returns how many there were.

    Blocks without an INT8 layer are cut ``behind_floats``, or stay.
    """
    blocks = _repeated(gm, behind_floats)
    if blocks and make_rows_contiguous(gm, blocks[0]):
        blocks = _repeated(gm, behind_floats)
    if not blocks:
        return 0
    name = _free_name(gm)
    for number, block in enumerate(blocks):
        if number == 0:
            gm.add_submodule(name, GraphModule(torch.nn.Module(), _as_graph(block)))
        _replace(gm, block, name)
    gm.graph.lint()
    gm.recompile()
    return len(blocks)


def _repeated(gm: GraphModule, behind_floats: bool) -> list[list[Node]]:
    """The nodes of each block that can be outlined; empty if there are none, or if outlining saves too little."""
    calls = [node for node in gm.graph.nodes if node.op.startswith("call")]
    kinds = _numbered([_kind(node) for node in calls])
    repeat = longest_repeat(kinds)
    if repeat.saved < _LEAST_SAVED or (cut := _at_the_best_cut(repeat, calls, kinds, behind_floats)) is None:
        return []
    blocks = _alike(cut.stretches(calls))
    if len(blocks) < 2 or len(blocks[0]) * (len(blocks) - 1) < _LEAST_SAVED:
        return []
    return blocks


# Repeats ---------------------------------------------------------------------------------------------------------


def _kind(node: Node) -> Any:
    """Equal for calls that compute the same function; unique for nodes that must stay inline."""
    fakes = _fakes(node)
    if fakes is None or operation(node) in _RANDOM or writes_in_place(node) or not all(map(_is_known, fakes)):
        return node
    literals = repr(map_arg((node.args, node.kwargs), lambda _: None))
    return node.op, node.target, literals, tuple(map(_like, fakes))


def _fakes(node: Node) -> list[Tensor] | None:
    """The tensors that a node returns; None if it returns anything else, or if it is unknown."""
    values = pytree.tree_leaves(recorded_value(node))
    return values if values and all(isinstance(value, Tensor) for value in values) else None


def _is_known(fake: Tensor) -> bool:
    return all(isinstance(size, int) for size in (*fake.shape, *fake.stride()))


def _like(fake: Tensor) -> tuple[Any, ...]:
    return tuple(fake.shape), fake.stride(), fake.dtype, fake.device


def _numbered(kinds: Sequence[Any]) -> list[int]:
    numbers: dict[Any, int] = {}
    return [numbers.setdefault(kind, len(numbers)) for kind in kinds]


def longest_repeat(kinds: Sequence[int]) -> Repeat:
    """The repeat that saves most nodes; of several, the one with the shortest stretch."""
    best = Repeat(0, 0, 0)
    for length in range(2, min(_LONGEST, len(kinds) // 2) + 1):
        same = 0
        for place in range(len(kinds) - length):
            same = same + 1 if kinds[place] == kinds[place + length] else 0
            found = Repeat(place - same + 1, length, same // length + 1)
            if found.times > 1 and found.saved > best.saved:
                best = found
    return best


def _at_the_best_cut(repeat: Repeat, calls: Sequence[Node], kinds: Sequence[int], behind_floats: bool) -> Repeat | None:
    """Shift the repeat so that its cuts lie behind an ``int8_linear``, and as few values as possible cross them.

    Behind a float linear if there is none, and such cuts are allowed. The shift may cost the last stretch. None if
    there is no such place: any other cut separates what Inductor would compute in one kernel.
    """
    place = {node: number for number, node in enumerate(calls)}
    last_use = [max((place.get(user, len(calls)) for user in node.users), default=-1) for node in calls]
    end = repeat.start + repeat.times * repeat.length
    while end < len(kinds) and kinds[end] == kinds[end - repeat.length]:
        end += 1

    def crossing(begin: int) -> int:
        cut = begin + repeat.length  # between two stretches
        found = [node for node, last in zip(calls[:cut], last_use, strict=False) if last >= cut]
        return sum(not reads_grouped_weight(node) for node in found)

    begins = range(repeat.start, repeat.start + repeat.length)
    behind = [begin for begin in begins if calls[begin + repeat.length - 1].target is _int8_linear]
    if not behind and behind_floats:
        behind = [begin for begin in begins if _is_opaque_float(calls[begin + repeat.length - 1])]
    if not behind:
        return None
    begin = min(behind, key=crossing)
    return Repeat(begin, repeat.length, (end - begin) // repeat.length)


def _is_opaque_float(node: Node) -> bool:
    """A float linear that Inductor leaves to a library. With a product without a bias, it joins a sum behind it."""
    call = linear_call(node)
    return call is not None and call.bias is not None


# Blocks ---------------------------------------------------------------------------------------------------------------


def _alike(blocks: Sequence[list[Node]]) -> list[list[Node]]:
    """The largest group of blocks with equal wiring that can be outlined."""
    wirings = [_wiring(block) for block in blocks]
    counts = Counter(wiring for wiring in wirings if wiring is not None)
    most = max(counts, key=counts.__getitem__, default=())
    return [block for block, wiring in zip(blocks, wirings, strict=True) if wiring == most]


def _wiring(block: Sequence[Node]) -> tuple[Any, ...] | None:
    """The sources of all operands, the inputs' layouts and the outputs; None if the block cannot be outlined."""
    inside = {node: number for number, node in enumerate(block)}
    inputs = {node: number for number, node in enumerate(_inputs(block))}
    operands = tuple((inside.get(x, -1), inputs.get(x, -1)) for node in block for x in node.all_input_nodes)
    outputs = _outputs(block)
    fakes = [_fakes(node) for node in inputs]
    if any(fake is None or len(fake) != 1 or not _is_known(fake[0]) for fake in fakes):
        return None
    if not all(map(_may_come_from_outside, inputs)) or len(_devices([*inputs, *block])) != 1:
        return None
    if not outputs or not all(map(_may_leave, outputs)):
        return None
    places = tuple((_like(fake[0]), _alignment(fake[0])) for fake in fakes if fake)
    return operands, places, tuple(inside[node] for node in outputs)


def _devices(nodes: Sequence[Node]) -> set[torch.device]:
    """Where tensors are. CUDA graphs end before a copy between devices, which a subgraph would hide."""
    return {fake.device for node in nodes for fake in _fakes(node) or ()}


def _alignment(fake: Tensor) -> Any:
    """Where a tensor begins in its memory, modulo 16 bytes: what Inductor's kernels for a subgraph assume of inputs."""
    return fake.storage_offset() * fake.element_size() % 16


def _may_come_from_outside(node: Node) -> bool:
    """Whether a value has a fixed layout, or one that Inductor keeps: without gaps and repeated elements."""
    if node.op in ("placeholder", "get_attr") or node.target is _int8_linear or reads_grouped_weight(node):
        return True
    fakes = _fakes(node)
    return fakes is not None and all(map(_is_dense, fakes))


def _is_dense(fake: Tensor) -> bool:
    """Whether the elements fill one stretch of memory, in any order of dimensions."""
    expected = 1
    for stride, size in sorted(zip(fake.stride(), fake.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size if size > 1 else 1
    return True


def _may_leave(node: Node) -> bool:
    """Whether a value can be a result of a block: memory of its own without gaps, where a view would alias an input.

    Inductor keeps the order of its dimensions, such as that of channels that come last in memory.
    """
    if node.target is _int8_linear:
        return True
    fakes = _fakes(node)
    return operation(node) in _LEAVING and fakes is not None and all(map(_is_dense, fakes))


def _inputs(block: Sequence[Node]) -> list[Node]:
    """The nodes outside a block that it reads, in reading order."""
    inside = set(block)
    return list(dict.fromkeys(x for node in block for x in node.all_input_nodes if x not in inside))


def _outputs(block: Sequence[Node]) -> list[Node]:
    """The nodes of a block that the rest of the graph reads."""
    inside = set(block)
    return [node for node in block if any(user not in inside for user in node.users)]


def _as_graph(block: Sequence[Node]) -> Graph:
    graph = Graph()
    copies: dict[Node, Node] = {}
    for number, node in enumerate(_inputs(block)):
        copies[node] = graph.placeholder(f"input_{number}")
        copies[node].meta = {k: v for k, v in node.meta.items() if k in VALUE_KEYS}
    for node in block:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in _outputs(block)))
    return graph


def _replace(gm: GraphModule, block: Sequence[Node], name: str) -> None:
    """Replace a block by a call of the subgraph."""
    outputs = _outputs(block)
    with gm.graph.inserting_after(block[-1]):
        subgraph = gm.graph.get_attr(name)
    with gm.graph.inserting_after(subgraph):
        call = gm.graph.call_function(torch.ops.higher_order.invoke_subgraph, (subgraph, name, *_inputs(block)))
    behind = call
    for number, node in enumerate(outputs):
        with gm.graph.inserting_after(behind):
            behind = gm.graph.call_function(operator.getitem, (call, number))
        behind.meta = dict(node.meta)
        node.replace_all_uses_with(behind, delete_user_cb=lambda user: user not in block)
    for node in reversed(block):
        gm.graph.erase_node(node)


def _free_name(gm: GraphModule) -> str:
    return next(name for number in itertools.count() if not hasattr(gm, name := f"repeated_block_{number}"))
