"""Expands ``F.multi_head_attention_forward`` and PyTorch's fused encoder layer, each one node, into their operations.

From::

    query, key, value, weights -> multi_head_attention_forward -> getitem 0 -> ...

To::

    query, key, value, weights -> linear -> scaled_dot_product_attention -> linear -> ...

so that later passes find the linears and the attention of ``nn.MultiheadAttention``. Where the attention weights are
read too (``getitem 1``), two products and a softmax take the place of ``scaled_dot_product_attention``.

``nn.TransformerEncoderLayer`` in inference is one node as well, ``_transformer_encoder_layer_fwd``. It becomes its
linears, norms and attention.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from inspect import signature
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from qframework.compat.dispatch import FakeTensor
from qframework.compat.dynamo import value_key
from qframework.compat.graphs import make_fx
from qframework.graph.nodes import fake_value, linear_call, operation, why_not_plain

_FUSED_LAYER = "_transformer_encoder_layer_fwd"


def expand_multi_head_attention(gm: GraphModule) -> None:
    """Replace, in place, every ``multi_head_attention_forward`` and every fused encoder layer."""
    for node in list(gm.graph.nodes):
        if node.target is F.multi_head_attention_forward and (outputs := _outputs(node)) is not None:
            _expand(gm, node, outputs, _attend)
        elif operation(node) == _FUSED_LAYER:
            _expand(gm, node, {0: node}, _encode)


def _attend(outputs: dict[int, Node], *args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
    call = signature(F.multi_head_attention_forward).bind(*args, **kwargs)
    return F.multi_head_attention_forward(**{**call.arguments, "need_weights": 1 in outputs})


def _encode(
    outputs: dict[int, Node],
    src: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    norm_weight_2: Tensor,
    norm_bias_2: Tensor,
    ffn_weight_1: Tensor,
    ffn_bias_1: Tensor,
    ffn_weight_2: Tensor,
    ffn_bias_2: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
) -> tuple[Tensor]:
    """``_transformer_encoder_layer_fwd`` of ``src`` ``(B, N, C)``, in its operations.

    The mask hides keys where it is True, or is added: ``(N, N)`` with type 0, ``(B, N)`` with type 1,
    ``(B, heads, N, N)`` with type 2. PyTorch's kernel hides every key to which a mask adds anything but zero; here it
    is added, as in the layer without that kernel.
    """

    def attend(x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        projections = (qkv_weight, qkv_bias, None, None, False, 0.0, proj_weight, proj_bias)
        y, _ = F.multi_head_attention_forward(
            x, x, x, embed_dim, num_heads, *projections, training=False, need_weights=False,
            key_padding_mask=mask if mask_type == 1 else None, attn_mask=of_heads if mask_type != 1 else None,
        )  # fmt: skip
        return y.transpose(0, 1)

    def feed_forward(x: Tensor) -> Tensor:
        hidden = F.linear(x, ffn_weight_1, ffn_bias_1)
        return F.linear(F.gelu(hidden) if use_gelu else F.relu(hidden), ffn_weight_2, ffn_bias_2)

    def norm_1(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)

    def norm_2(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)

    of_heads = mask.flatten(0, 1) if mask is not None and mask_type == 2 else mask
    if norm_first:
        x = src + attend(norm_1(src))
        return (x + feed_forward(norm_2(x)),)
    x = norm_1(src + attend(src))
    return (norm_2(x + feed_forward(x)),)


def _outputs(node: Node) -> dict[int, Node] | None:
    """The ``getitem`` of each result that is read: 0 is the output, 1 the attention weights; None for other readers."""
    items = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    if len(items) != len(node.users) or 0 not in items:
        return None
    return {index: items[index] for index in (0, 1) if index in items and (index == 0 or items[index].users)}


def _expand(gm: GraphModule, node: Node, outputs: dict[int, Node], function: Callable[..., tuple[Any, ...]]) -> None:
    inputs = [operand for operand in node.all_input_nodes if fake_value(operand) is not None]
    fakes, recorded = [fake_value(operand) for operand in inputs], [fake_value(output) for output in outputs.values()]
    modes = [fake.fake_mode for fake in fakes if isinstance(fake, FakeTensor)]
    if not modes or len(inputs) != len(node.all_input_nodes) or any(map(why_not_plain, fakes)):
        return

    def run(*values: Any) -> tuple[Tensor, ...]:
        of = dict(zip(inputs, values, strict=True))
        args: Any
        kwargs: Any
        args, kwargs = map_arg((node.args, node.kwargs), of.__getitem__)
        results = function(outputs, *args, **kwargs)
        return tuple(result for index, result in enumerate(results) if index in outputs and result is not None)

    with modes[0]:
        traced = make_fx(run, pre_dispatch=True)(*fakes)
    results: Any = traced.graph.output_node().args[0]
    values = [fake_value(result) for result in results]
    pairs = zip(values, recorded, strict=True)
    if all(x is not None and y is not None and x.dtype == y.dtype for x, y in pairs):  # differ under autocast
        copies = dict(zip(traced.graph.find_nodes(op="placeholder"), inputs, strict=True))
        _inline(gm, node, dict(zip(outputs.values(), results, strict=True)), traced, copies)


def _inline(
    gm: GraphModule, node: Node, results: dict[Node, Node], traced: GraphModule, copies: dict[Node, Node]
) -> None:
    """Copy a traced graph before ``node`` and replace each of its outputs by its result."""
    key = value_key(next(iter(results)))
    with gm.graph.inserting_before(node):
        for each in traced.graph.nodes:
            if each.op not in ("placeholder", "output"):
                new = copies[each] = gm.graph.node_copy(each, copies.__getitem__)
                kept = ("stack_trace",) if linear_call(new) else ("stack_trace", "nn_module_stack")
                new.meta = {name: node.meta[name] for name in kept if name in node.meta} | {key: each.meta.get("val")}
    for output, result in results.items():
        output.replace_all_uses_with(copies[result])
    for read in [*node.users, node]:
        gm.graph.erase_node(read)
