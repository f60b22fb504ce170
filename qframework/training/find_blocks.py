"""The transformer blocks of a model, found by their structure, and the modules in them that need a decision.

A block has normalizations, attention, and linears or experts beside it.

Names decide what is attention, which computes in 16 bits: those that end in ``attn`` or ``attention``, such as
``self_attn``, ``encoder_attn``, ``attn1`` or ``SelfAttention``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import zip_longest

from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from qframework.compat.modules import parameters
from qframework.training.roles import (
    children_whose_weight_is_read,
    held,
    linear_role,
    reads_weights,
)

_ROUTER = re.compile(r"(router|gate|gating)$", re.IGNORECASE)
_ATTENTION = re.compile(r"(attn|attention)\d*$", re.IGNORECASE)
# The last linear of attention returns INT8. Those before it return queries, keys and values in 16 bits.
_ATTENTION_OUTPUTS = (
    *("proj", "o_proj", "out_proj", "output_proj", "c_proj", "post_proj", "projection", "projection_layer"),
    *("o", "wo", "out", "output", "attention_out", "out_layer", "out_lin", "linear_out", "to_out", "to_add_out"),
    *("dense", "final"),
)


def is_attention_name(part: str) -> bool:
    """Whether models call attention in a block so."""
    return _ATTENTION.search(part) is not None


def in_attention(name: str) -> bool:
    """Whether ``name``, of a module inside a block, is inside attention.

    BERT's ``attention.output`` is not: its dropout, sum and normalization follow attention's last linear.
    """
    parts = name.split(".")[:-1]
    return any(is_attention_name(part) and after != "output" for part, after in zip_longest(parts, parts[1:]))


def gives_blocks(name: str) -> bool:
    """Whether the linear ``name`` returns INT8: all but those for queries, keys and values."""
    return not in_attention(name) or any(part.lower() in _ATTENTION_OUTPUTS for part in name.split(".")[-2:])


def blocks_below(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost blocks inside ``module``, in their order.

    Where these parts are not direct children of one module, as in BERT and T5, a block is an item of a list that holds
    them all and no other block.
    """
    for name, child in held(module):
        if _is_block(child):
            yield child
            continue
        inside = list(blocks_below(child))
        yield from inside or ([child] if name.isdigit() and _holds_parts(child) else [])


def _is_block(module: nn.Module) -> bool:
    """Whether a module's children are normalizations, attention with a linear, and linears or experts beside it."""
    children = dict(module.named_children())
    if not any(map(_is_norm, children.values())):
        return False
    attentions = [child for name, child in children.items() if is_attention_name(name)]
    others = [child for name, child in children.items() if not is_attention_name(name)]
    return any(map(_has_linear, attentions)) and any(_has_linear(child) or _has_experts(child) for child in others)


def _holds_parts(block: nn.Module) -> bool:
    """Whether a module holds the parts of a block, at any depth."""
    names = {name: module for name, module in block.named_modules() if name}
    inside = [in_attention(name) for name, module in names.items() if linear_role(module) is not None]
    return any(inside) and not all(inside) and any(map(_is_norm, names.values()))


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


def _has_linear(module: nn.Module) -> bool:
    return any(linear_role(child) for child in module.modules())


def _has_experts(module: nn.Module) -> bool:
    return any(map(owns_experts, module.modules()))


def owns_experts(module: nn.Module) -> bool:
    """Whether a module holds matrices of several experts in one parameter, as mixtures of experts do."""
    if _is_norm(module) or hasattr(module, "kernel_size"):  # of images, or a convolution
        return False
    own = [each for each in parameters(module).values() if each is not None and not is_lazy(each)]
    return any(each.dim() == 3 and min(each.shape) > 1 for each in own)


def routers(block: nn.Module) -> Iterator[nn.Module]:
    """The linears whose largest outputs say which experts compute a token: what holds them says how many there are."""
    for holder in block.modules():
        counts = {value for name, value in vars(holder).items() if "experts" in name and type(value) is int}
        named = _ROUTER.search(type(holder).__name__) is not None
        for _, child in held(holder):
            weight = parameters(child).get("weight") if linear_role(child) == "linear" else None
            if weight is None or is_lazy(weight):
                continue
            outputs, inputs = weight.shape
            if outputs in counts or (named and outputs < inputs):
                yield child


def units(block: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module, nn.Module | None]]:
    """The smallest modules of a block that are replaced or kept as a whole, with their names after ``prefix``.

    Leaves, and modules that compute with weights themselves. Third is the module that reads the weight of a leaf
    instead of calling it, if one does, as BEiT's attention reads that of its queries, keys and values.
    """
    read = weights_read(block)
    for name, child in held(block):
        path = f"{prefix}.{name}" if prefix else name
        if name in read or _is_whole(child, path) or not any(True for _ in child.children()):
            yield path, child, block if name in read else None
        else:
            yield from units(child, path)


def _is_whole(module: nn.Module, path: str) -> bool:
    """Whether a module with others inside computes with weights itself, such as a linear with a parametrization."""
    own = "weight" in parameters(module) or parametrize.is_parametrized(module)
    return own or adapts(module) or reads_all(module) or (owns_experts(module) and not in_attention(path))


def weights_read(module: nn.Module) -> set[str]:
    """The children whose weight ``forward`` reads instead of calling them, on one of its paths at least.

    Reading the dtype of a weight is harmless, since master weights keep theirs. PyTorch's encoder layer calls its
    linears while it trains.
    """
    if isinstance(module, nn.TransformerEncoderLayer):
        return set()
    return children_whose_weight_is_read(module, dtype=False)


def reads_all(module: nn.Module) -> bool:
    """Whether ``forward`` calls no linear of the module, but reads their weights, as nn.MultiheadAttention does."""
    linears = {name for name, child in held(module) if _has_linear(child)}
    return bool(linears) and linears <= weights_read(module)


def adapts(module: nn.Module) -> bool:
    """Whether a module adds to the result of a linear inside of it, or that it is, and reads weights, as in PEFT."""
    linears = [name for name, child in held(module) if linear_role(child) is not None]
    return bool(linears) and (isinstance(module, nn.Linear) or ("base_layer" in linears and reads_weights(module)))


def list_items(model: nn.Module) -> list[str]:
    """Names of the innermost items of lists with a normalization and a linear, which may be blocks."""
    found = {
        name
        for name, module in model.named_modules()
        if name.rpartition(".")[2].isdigit() and _has_linear(module) and any(map(_is_norm, module.modules()))
    }
    return [name for name in sorted(found) if not any(other.startswith(f"{name}.") for other in found)]
