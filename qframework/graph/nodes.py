"""What a node of a captured graph means, in any dialect.

The backend sees three dialects: ``torch.nn.functional`` callables (Dynamo on a float module), ATen operators (Dynamo
on an exported module) and ``quantized_decomposed`` operators around ATen (PT2E).
"""

from __future__ import annotations

import operator
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.nn import functional as F

import qframework.compat.quantized_decomposed  # noqa: F401  (registers the operators of PT2E)
from qframework.compat.dispatch import (
    FakeTensor,
    enable_python_dispatcher,
    is_functorch_wrapped_tensor,
    is_gradtrackingtensor,
)
from qframework.compat.dynamo import is_attribute, is_static_input, recorded_value, source_name, value_key
from qframework.compat.modules import SPACES
from qframework.compat.operators import ASSERT_METADATA, BUILT_INS, OpOverload, OpOverloadPacket, schema
from qframework.compat.pytree import tree_leaves, tree_map_only
from qframework.numerics import FLOAT_DTYPES

aten = torch.ops.aten

_LINEAR = {F.linear, aten.linear.default}
_GELU = {F.gelu, aten.gelu.default}
_ACTIVATIONS = {
    **dict.fromkeys((F.relu, F.relu_, torch.relu, torch.relu_, aten.relu.default, aten.relu_.default), "relu"),
    **dict.fromkeys((F.silu, aten.silu.default, aten.silu_.default), "silu"),
}
_DROPOUT = {F.dropout, torch.dropout, torch.dropout_, aten.dropout.default, aten.dropout_.default}
_ADD = {operator.add, torch.add, aten.add.Tensor}
_ADD_IN_PLACE = {operator.iadd, aten.add_.Tensor}


RESHAPES = {"view", "reshape", "flatten", "unflatten"}
"""Operations that keep the order of all elements."""


# Operations that keep the values: casts, copies, and views of the same elements.
CASTS = {"to", "float", "half", "bfloat16", "double", "type_as", "type"}
COPIES = {"contiguous", "clone", "alias"}
VIEWS = {*RESHAPES, "view_as", "reshape_as", "unsqueeze", "squeeze"}


class LinearCall(NamedTuple):
    """The operands of a linear layer's node."""

    input: Node
    weight: Node
    bias: Node | None


# Synonyms of operations in Python, torch, torch.nn.functional and ATen; in-place forms have the same name.
_SAME_OPERATION = {
    "truediv": "div",
    "true_divide": "div",
    "divide": "div",
    "itruediv": "div",
    "multiply": "mul",
    "imul": "mul",
    "iadd": "add",
    "isub": "sub",
    "subtract": "sub",
    "__matmul__": "matmul",
    "__add__": "add",
    "__radd__": "add",
    "__mul__": "mul",
    "__rmul__": "mul",
    "__truediv__": "div",
    "_softmax": "softmax",
    "_to_copy": "to",
    "swapaxes": "transpose",
    "swapdims": "transpose",
    "_unsafe_view": "view",
    "numpy_T": "T",
}


def operation(node: Node) -> str | None:
    """One name for what a node computes: ``"matmul"`` for ``a @ b``, ``torch.matmul``, ``a.matmul(b)`` and ATen's.

    None for other libraries' operations. Arguments have the same order in all dialects, but not the same names.
    """
    if node.op == "call_method":
        name = str(node.target)
    elif node.op != "call_function":
        return None
    elif isinstance(node.target, OpOverload):
        space, _, name = schema(node.target).name.partition("::")
        if space != "aten":
            return None
    elif node.target is getattr:  # of Dynamo in PyTorch 2.11, where newer ones record operators without an overload
        name = str(node.args[1])
        if name not in ("T", "mT"):
            return None
    elif isinstance(node.target, OpOverloadPacket):
        name = node.target.__name__
        if getattr(aten, name, None) is not node.target:
            return None
    else:
        name = getattr(node.target, "__name__", "")
        if not any(getattr(space, name, None) is node.target for space in (torch, F, operator, BUILT_INS)):
            return None
    name = name if name.endswith("__") else name.rstrip("_")
    return _SAME_OPERATION.get(name, name)


def argument(node: Node, index: int, *names: str, default: Any = None) -> Any:
    """A node's argument by position or by any of its names."""
    if len(node.args) > index:
        return node.args[index]
    return next((node.kwargs[name] for name in names if name in node.kwargs), default)


def untransposed(node: Node) -> Node | None:
    """The tensor whose last two dimensions a node swaps, in any spelling; None for any other node."""
    source = node.args[0] if node.args else None
    if not isinstance(source, Node) or (fake := fake_value(source)) is None or fake.ndim < 2:
        return None
    name, last = operation(node), [fake.ndim - 1, fake.ndim - 2]
    if name == "mT" or (name in ("t", "T") and fake.ndim == 2):
        return source
    given = [*node.args[1]] if len(node.args) == 2 and isinstance(node.args[1], (list, tuple)) else node.args[1:]
    if node.kwargs or not all(isinstance(dim, int) for dim in given):
        return None
    dims = [dim % fake.ndim for dim in given]  # type: ignore[operator]
    swaps = name == "transpose" and sorted(dims) == last[::-1]
    return source if swaps or (name == "permute" and dims == [*range(fake.ndim - 2), *last]) else None


def traced_number(given: Any) -> Any:
    """The number behind a node if tracing fixed it or an attribute has it; anything else as it is.

    With ``dynamic=True``, a float attribute of a module is an input of the graph. A pass that writes the number into
    the graph needs ``fixed_number``. Arguments and sizes, which vary from call to call, stay nodes.
    """
    value = recorded_value(given) if isinstance(given, Node) else None
    if not isinstance(value, torch.SymFloat):
        return given
    number = value.node.maybe_as_float()
    if number is None and _depends_on_attributes(given) and isinstance(value.node.hint, (int, float)):
        number = float(value.node.hint)
    return given if number is None else number


def fixed_number(given: Any) -> Any:
    """The same, and Dynamo compiles the model anew for another number."""
    number = traced_number(given)
    if number is not given:
        float(recorded_value(given))  # adds the guard
    return number


def _depends_on_attributes(node: Node) -> bool:
    """Whether nothing but attributes in the user's code determines a node."""
    if node.op == "placeholder":
        return isinstance(recorded_value(node), Tensor) and is_attribute(node)  # a tensor holds a float, not a size
    return bool(node.all_input_nodes) and all(map(_depends_on_attributes, node.all_input_nodes))


def fix_numbers(nodes: Iterable[Node]) -> None:
    """Fix the numbers that these nodes read as inputs of the graph."""
    for node in nodes:
        for each in node.all_input_nodes:
            fixed_number(each)


def linear_call(node: Node) -> LinearCall | None:
    """The operands of a linear layer, None for any other node."""
    if node.op != "call_function" or node.target not in _LINEAR:
        return None
    return LinearCall(argument(node, 0, "input"), argument(node, 1, "weight"), argument(node, 2, "bias"))


def is_sage_attention(node: Node) -> bool:
    """Whether the node calls ``qframework::sage_attention``, which Dynamo records without its overload."""
    packet = torch.ops.qframework.sage_attention
    return node.op == "call_function" and node.target in (packet, packet.default)


def activation_name(node: Node) -> str | None:
    """``int8_linear``'s name of the activation this node computes, None for any other node."""
    if node.op != "call_function":
        return None
    if node.target in _GELU:
        approximate = argument(node, 1, "approximate", default="none")
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(approximate)
    return _ACTIVATIONS.get(node.target)


def is_inactive_dropout(node: Node) -> bool:
    """Whether the node is a dropout that returns its input unchanged."""
    if node.op != "call_function" or node.target not in _DROPOUT:
        return False
    training_name = "training" if node.target is F.dropout else "train"
    p, training = argument(node, 1, "p", default=0.5), argument(node, 2, training_name, default=True)
    return p == 0.0 or training is False


def added_to(node: Node, operand: Node) -> Node | None:
    """The tensor that ``node`` adds to ``operand``; None for any other node.

    Both must have the shape of the sum, and all three a dtype of the operators. ``x += operand`` does not count: it
    changes a tensor that other nodes may read.
    """
    if node.op != "call_function" or len(node.args) != 2 or set(node.kwargs) - {"alpha"}:
        return None
    in_place = node.target in _ADD_IN_PLACE
    if not (in_place or node.target in _ADD) or node.kwargs.get("alpha", 1) != 1:
        return None
    left, right = node.args
    other = right if left is operand else left
    if left is right or not isinstance(other, Node) or (in_place and left is not operand):
        return None
    fakes = [fake for n in (node, operand, other) if (fake := fake_value(n)) is not None]
    computable = len(fakes) == 3 and fakes[0].shape == fakes[1].shape == fakes[2].shape
    return other if computable and all(fake.dtype in FLOAT_DTYPES for fake in fakes) else None


def add_call(
    like: Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, value: Tensor | None = None
) -> Node:
    """Add a call at the graph's insertion point, in the module of ``like``, with its fake value or ``value``."""
    if value is None:  # before the node: the operator may refuse its operands
        with enable_python_dispatcher():  # its matmul takes symbolic sizes, which that of PyTorch 2.11 in C++ does not
            value = target(*_of_one_mode(map_arg(args, recorded_value)), **(kwargs or {}))
    node = like.graph.call_function(target, args, kwargs)
    node.meta = {name: like.meta[name] for name in ("nn_module_stack", "stack_trace") if name in like.meta}
    node.meta[value_key(like)] = value
    return node


def _of_one_mode(values: Any) -> Any:
    """Recorded values, all of them fake if one is: buffers that the lowering adds are recorded as plain tensors."""
    mode = next((x.fake_mode for x in tree_leaves(values) if isinstance(x, FakeTensor)), None)
    if mode is None:
        return values

    def fake(x: Tensor) -> Tensor:
        return x if isinstance(x, FakeTensor) else mode.from_tensor(x, static_shapes=True)

    return tree_map_only(Tensor, fake, values)


def fake_value(node: Node) -> Tensor | None:
    """The fake tensor that tracing recorded for a node; None if it recorded none."""
    value = recorded_value(node)
    return value if isinstance(value, Tensor) else None


def behind(node: Node, operations: Collection[str]) -> Node:
    """The first node before ``node``, or itself, that is none of these operations on one tensor."""
    while operation(node) in operations and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def needs_gradient(values: Iterable[Tensor | None]) -> bool:
    """Whether gradients are on and one of these values requires one."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in values)


def users(node: Node) -> list[Node]:
    """The nodes that read a value, except the assertions about its metadata that exports contain."""
    return [user for user in node.users if not is_assertion(user)]


def is_assertion(node: Node) -> bool:
    """``aten._assert_tensor_metadata``."""
    return node.target is ASSERT_METADATA


def why_not_plain(value: Tensor | None) -> str | None:
    """Why our operators do not support a tensor, regardless of its dtype; None if they do or if it is unknown."""
    if value is None:
        return None
    if is_functorch_wrapped_tensor(value):
        return "belongs to torch.vmap or another transform of torch.func, which INT8 operators do not support"
    if type(value) not in (Tensor, torch.nn.Parameter, FakeTensor) or value.layout != torch.strided:
        return f"must be a plain strided tensor, got a {type(value).__name__} of layout {value.layout}"
    return None


def plain_name(node: Node) -> str:
    """``"matmul"`` of ``matmul_3``, for reasons: they are then equal in repeated layers, and are logged once."""
    return re.sub(r"_\d+$", "", node.name)


# Key of a node's meta: sentences for a report on what stays in float and why.
_NOTES = "qframework_notes"


def add_note(node: Node, what: str) -> None:
    """Note why a layer, or a part of it, is not quantized: calibration did not reach it, say, or no kernel exists."""
    node.meta[_NOTES] = [*node.meta.get(_NOTES, ()), what]


def notes_of(node: Node) -> str:
    """The notes on a layer in one line, usually ``""``. Lost when the graph is captured again."""
    return "; ".join(node.meta.get(_NOTES, ()))


class Constants:
    """The real tensors behind a graph's attributes and parameter placeholders."""

    def __init__(self, gm: GraphModule, example_inputs: Sequence[Any]) -> None:
        self._gm = gm
        placeholders = (node for node in gm.graph.nodes if node.op == "placeholder")
        self._inputs = dict(zip(placeholders, enumerate(example_inputs), strict=False))

    def value(self, node: object) -> Tensor | None:
        """The tensor behind a parameter, buffer or attribute; None for activations, user inputs and fake tensors."""
        if not isinstance(node, Node):
            return None
        if node.op == "get_attr":
            tensor = operator.attrgetter(str(node.target))(self._gm)
        elif node in self._inputs and _is_module_state(node, self._inputs[node][1]):
            tensor = self._inputs[node][1]
        else:
            return None
        return tensor if isinstance(tensor, Tensor) and not isinstance(tensor, FakeTensor) else None

    def on_cpu(self, node: object) -> Tensor | None:
        """As ``value``, but on the CPU: on a GPU, the first comparison or reduction of a process loads its kernel."""
        value = self.value(node)
        return value if value is None or value.is_meta else value.detach().cpu()

    def input_index(self, node: Node) -> int | None:
        """Position of a placeholder among the graph's inputs, None for an attribute."""
        return self._inputs[node][0] if node in self._inputs else None


_DUAL = re.compile(r"(?<![a-z])dual(?![a-z])")  # torch.autograd.forward_ad.make_dual and what it calls, no residual


def differentiates(gm: GraphModule) -> bool:
    """Whether the graph itself computes derivatives, with ``torch.func`` or in forward mode."""
    for node in gm.graph.nodes:
        fake = fake_value(node)
        if fake is not None and is_gradtrackingtensor(fake):
            return True
        if node.op.startswith("call") and _DUAL.search(str(node.target)):
            return True
    return False


def _is_module_state(node: Node, value: Any) -> bool:
    return isinstance(value, torch.nn.Parameter) or is_static_input(node)


def layer_name(node: Node) -> str:
    """The module path of a layer's node, from its module stack or else from the names of its operands.

    Without a path, attention is called ``"scaled_dot_product_attention"``, and any other node has its own name.
    """
    for path, _ in reversed(list((node.meta.get("nn_module_stack") or {}).values())):
        if cleaned := _clean_path(path):
            return cleaned
    call = linear_call(node)
    for operand in (call.bias, call.weight) if call else ():
        if isinstance(operand, Node) and (name := _owner_path(operand)):
            return name
    is_sdpa = operation(node) == "scaled_dot_product_attention"
    return "scaled_dot_product_attention" if is_sdpa else node.name


_ROOT = re.compile(r"^(?:[LG]\['[^']*'\](?:\[\d+\])?|L__self__)(?:\.__self__)?\.?")
"""How Dynamo reached the model: as ``L['self']``, ``L['args'][0]`` of a decorated ``forward``, a global, ..."""


def _clean_path(path: str) -> str:
    path = _ROOT.sub("", path)
    path = re.sub(r"\[['\"]?([^'\"\]]+)['\"]?\]", r".\1", path)
    parts = [part for part in path.split(".") if part not in ("", *SPACES)]
    return ".".join(parts)


def state_path(node: Node) -> str | None:
    """``blocks.0.mlp.fc1.weight``, the path of a parameter or buffer in its module; None for any other node."""
    if node.op == "get_attr":
        return str(node.target)
    name = source_name(node)
    return None if name is None else _clean_path(name)


_ROWS = ("getitem", "slice", "narrow", "split", "split_with_sizes", "chunk", "tensor_split")


def _owner_path(node: Node) -> str | None:
    """``blocks.0.mlp.fc1`` from the placeholder or attribute of its bias or weight, or from some rows of it."""
    while operation(node) in _ROWS and node.args and isinstance(node.args[0], Node):
        node = node.args[0]
    path = state_path(node)
    if path is None:
        return None
    owner, _, leaf = path.rpartition(".")
    # nn.MultiheadAttention's own parameters: of in_proj, or of q_proj, k_proj and v_proj
    own = re.fullmatch(r"(\w+)_proj_(?:weight|bias)", leaf)
    if own:
        return f"{owner}.{own[1]}_proj" if owner else f"{own[1]}_proj"
    return owner if leaf in ("bias", "weight") else None
