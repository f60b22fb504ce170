"""Hadamard transforms of dynamic inputs that no layer before can change, as behind a GELU.

From::

    x -> linear(W, b)

to the same function, with H the block-diagonal Hadamard matrix over sqrt(B), ``H H = 1``::

    x -> hadamard: (x * f) H - c -> linear(W diag(1 / f) H, b + W diag(1 / f) H c)

Behind an activation most values are near one end of their range, and few are large. Without its mean, ``c``, and
spread over blocks of channels, a token's largest value is a third as large for the same energy, so that scales per
token lose much less. f divides channels by ``sqrt(rms(x) / rms(W))`` of mean-free inputs, which makes the error of the
output least if rounding errors of turned channels are alike. Static inputs gain nothing: their scales follow the
largest of all tokens, and zero points serve them better.

The transform is a part of quantization on a GPU (qframework/kernels/hadamard.py). Inputs behind norms are left to
``rotate``, which costs nothing, and the outputs of attention are too narrow in each head.
QuaRot (Ashkboos et al., arXiv:2404.00456) turns the inputs of down projections by one Hadamard matrix of their width,
without means and scales of channels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from qframework.graph.attributes import add_attribute, attribute, replace_attribute
from qframework.graph.channel_groups import find_channel_groups, find_shift_groups
from qframework.graph.nodes import fake_value, linear_call, operation
from qframework.kernels.hadamard import BLOCK_SIZES, turn_blocks
from qframework.numerics import dynamic_scale
from qframework.quantizer.annotate_linear import is_linear
from qframework.quantizer.calibration import Batch
from qframework.quantizer.channel_scales import is_attention_output, is_channel_scale
from qframework.quantizer.channel_statistics import channel_statistics
from qframework.quantizer.config import LinearConfig
from qframework.quantizer.linear_bias import add_to_bias
from qframework.quantizer.output_error import Parameters, Run, fake_quantized, first_examples, floats, relative_error
from qframework.quantizer.quantizer import QFrameworkQuantizer, layer_name

# A transform must reduce the squared error of the model's output by this share.
_GAIN = 0.1
_EXAMPLES = 4
_LARGEST_FACTOR = 32.0
_KEPT_META = ("nn_module_stack", "stack_trace", "torch_fn", "source_fn_stack")


class Transform(NamedTuple):
    """``(x * factor) H - offset``, ``(K,)`` float32 each, in blocks of ``block_size`` channels."""

    factor: Tensor
    offset: Tensor
    block_size: int

    @classmethod
    def fit(cls, rows: Tensor, weights: list[Tensor]) -> Transform:
        """The one for inputs like ``rows (n, K)`` of linears with these weights ``(N, K)``."""
        mean = rows.float().mean(0)
        spread, size = (rows - mean).square().mean(0).sqrt(), torch.cat(weights).float().square().mean(0).sqrt()
        ratio = (spread.clamp(min=1e-30) / size.clamp(min=1e-30)).log2() / 2
        most = math.log2(_LARGEST_FACTOR)
        factor = torch.exp2((ratio.median() - ratio).clamp(-most, most))
        block_size = block_size_of(rows.shape[-1])
        assert block_size is not None
        return cls(factor, turn_blocks(mean * factor, block_size), block_size)

    def weight(self, weight: Tensor) -> Tensor:
        """What a linear has instead of ``weight (N, K)``, float64."""
        return turn_blocks(weight.double() / self.factor.double(), self.block_size)

    def fake_quantized(self, x: Tensor) -> Tensor:
        """``x`` transformed, quantized with scales per token, and back."""
        turned = turn_blocks(x.float() * self.factor, self.block_size) - self.offset
        rounded = fake_quantized(turned, Parameters(dynamic_scale(turned, "per_token")))
        return (turn_blocks(rounded + self.offset, self.block_size) / self.factor).to(x.dtype)


def block_size_of(channels: int) -> int | None:
    """The largest block size that divides ``channels``; None if there is none, or just one block."""
    return next((size for size in reversed(BLOCK_SIZES) if channels % size == 0 and channels > size), None)


@torch.no_grad()
def turn_dynamic_inputs(
    exported: GraphModule,
    quantizer: QFrameworkQuantizer,
    data: Iterable[Batch],
    *,
    samples: int = 1024,
    batches: int | None = None,
    chosen: Mapping[str, int] | None = None,
) -> dict[str, int]:
    """Transform the inputs with scales per token behind activations where the model's output gains, in place.

    Args:
        exported: from ``torch.export.export(...).module()``. It gets new parameters; those of the original model stay.
        quantizer: the one the graph will be prepared with.
        data: calibration batches as ``calibrate`` takes them.
        samples: rows of calibration data for means and scales.
        batches: use only this many batches.
        chosen: a former result for this graph, whose inputs are transformed without a search.

    Returns:
        The block size for each linear whose input is transformed, by its layer's name.

    Raises:
        CalibrationError: no data, a batch that does not fit, or NaN or infinity in an activation.
    """
    readers = _readers(exported, quantizer)
    if chosen is not None:
        readers = {x: linears for x, linears in readers.items() if layer_name(linears[0]) in chosen}
    if not readers:
        return {}
    statistics = channel_statistics(exported, data, readers, samples, batches)
    found = {
        x: Transform.fit(statistics[x].rows, [_weight(exported, node) for node in linears])
        for x, linears in readers.items()
    }
    taken = _that_help(exported, data, readers, found) if chosen is None else list(found)
    done: dict[str, int] = {}
    for x in taken:
        _insert(exported, x, readers[x], found[x])
        done.update((layer_name(node), found[x].block_size) for node in readers[x])
    exported.recompile()
    return done


def can_turn(x: Node, linears: list[Node], behind: set[Node]) -> bool:
    """Whether the input ``x`` of ``linears`` may be transformed, were it dynamic; ``behind`` are ``behind_norms``."""
    return _may_turn(x) and all(_own_weight(node) and node not in behind for node in linears)


def _readers(exported: GraphModule, quantizer: QFrameworkQuantizer) -> dict[Node, list[Node]]:
    """The linears with a scale for each token whose input may be transformed, by their input."""
    behind = behind_norms(exported)
    found: dict[Node, list[Node]] = {}
    for node in exported.graph.nodes:
        config = quantizer.config_for(node) if is_linear(node) and node not in behind and node.users else None
        activation = config.activation if isinstance(config, LinearConfig) else None
        if activation is not None and activation.dynamic and activation.granularity == "per_token":
            x: Node = node.args[0]
            if _own_weight(node) and _may_turn(x):
                found.setdefault(x, []).append(node)
    return found


def behind_norms(exported: GraphModule) -> set[Node]:
    """The linears that read a norm."""
    groups = [*find_channel_groups(exported), *find_shift_groups(exported)]
    norms = [group for group in groups if group.is_norm and not is_channel_scale(group.producer)]
    return {consumer.linear for group in norms for consumer in group.consumers}


def _may_turn(x: Node) -> bool:
    fake = fake_value(x)
    if fake is None or not isinstance(fake.shape[-1], int) or block_size_of(fake.shape[-1]) is None:
        return False
    turned = operation(x) == "hadamard"
    return x.op == "call_function" and not is_attention_output(x) and not is_norm(x) and not turned


def is_norm(x: Node) -> bool:
    """Whether an operator that normalizes computes ``x``."""
    return "norm" in (operation(x) or "")


def _own_weight(linear: Node) -> bool:
    """Whether a linear reads a parameter that no other node reads."""
    call = linear_call(linear)
    return call is not None and call.weight.op == "get_attr" and len(call.weight.users) == 1


def _weight(exported: GraphModule, linear: Node) -> Tensor:
    call = linear_call(linear)
    assert call is not None
    return attribute(exported, call.weight).detach()


def _that_help(
    exported: GraphModule, data: Iterable[Batch], readers: dict[Node, list[Node]], found: dict[Node, Transform]
) -> list[Node]:
    """The inputs whose transforms reduce the error of the model's output enough."""
    example = first_examples(exported, data, _EXAMPLES)
    expected = floats(Run(exported).start(example).finish({}))
    run, taken = Run(exported).start(example), []
    for x in sorted(found, key=lambda x: readers[x][0]):
        run.advance(readers[x][0])
        value = run.value(x)
        plain = fake_quantized(value, Parameters(dynamic_scale(value, "per_token")))
        before, after = (
            relative_error(floats(run.finish(_outputs(run, readers[x], seen))), expected)
            for seen in (plain, found[x].fake_quantized(value))
        )
        if after < (1 - _GAIN) * before:
            taken.append(x)
    return taken


def _outputs(run: Run, linears: list[Node], x: Tensor) -> dict[Node, Tensor]:
    outputs = {}
    for node in linears:
        call = linear_call(node)
        assert call is not None
        bias = None if call.bias is None else run.value(call.bias)
        outputs[node] = torch.nn.functional.linear(x, run.value(call.weight), bias)
    return outputs


def _insert(exported: GraphModule, x: Node, linears: list[Node], transform: Transform) -> None:
    """Let ``linears`` read the transformed ``x``; a product with a constant before becomes part of the transform."""
    source, scaled = _unscaled(exported, x)
    fake = fake_value(x)
    assert fake is not None
    first = min(linears)
    device = _weight(exported, first).device
    constants = [
        each.to(device, fake.dtype) for each in (transform.factor * scaled.to(transform.factor), transform.offset)
    ]
    with exported.graph.inserting_before(first):
        names = (f"{layer_name(first)}.hadamard_factor", f"{layer_name(first)}.hadamard_offset")
        nodes = [add_attribute(exported, name, each) for name, each in zip(names, constants, strict=True)]
        for node, each in zip(nodes, constants, strict=True):
            node.meta["val"] = fake.new_empty(each.shape)
        turned = exported.graph.call_function(
            torch.ops.qframework.hadamard.default, (source, *nodes, transform.block_size)
        )
    turned.meta = {key: x.meta[key] for key in _KEPT_META if key in x.meta} | {"val": fake}
    rounded = transform._replace(factor=constants[0].double() / scaled.double().to(device))  # as their dtype holds them
    for linear in linears:
        weight = _weight(exported, linear)
        linear.replace_input_with(x, turned)
        new = rounded.weight(weight)
        add_to_bias(exported, linear, new @ constants[1].double())
        call = linear_call(linear)
        assert call is not None
        replace_attribute(exported, call.weight, linear, new)
    if not x.users:
        exported.graph.erase_node(x)


def _unscaled(exported: GraphModule, x: Node) -> tuple[Node, Tensor]:
    """What a product of ``scale_channels`` reads, and its constant; ``x`` and ones for any other node."""
    fake = fake_value(x)
    assert fake is not None
    if is_channel_scale(x):
        return x.args[0], attribute(exported, x.args[1]).detach().float()  # type: ignore[arg-type, return-value]
    return x, torch.ones(fake.shape[-1])
