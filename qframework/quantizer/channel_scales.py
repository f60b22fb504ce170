"""Scales of channels for inputs that no layer before them can scale, as a product with a constant in the graph.

From::

    x -> linear(W)

to the same function, with ``c = 1 / s``::

    x -> mul(c) -> linear(W * s)

Quantized with one scale S, ``round(x * c / S)`` is ``x`` quantized with a separate scale ``S / c`` for each channel. A
matrix product cannot undo scales of channels, but the weights here do. After a linear and its activation, the backend
computes the product before static quantization in the linear's epilogue (qframework/backend/fold_channel_scale.py);
elsewhere the compiler fuses it with the operation that it reads, or with dynamic quantization.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from qframework.graph.attention_patterns import COPIES, VIEWS
from qframework.graph.attributes import add_attribute, attribute
from qframework.graph.channel_groups import Parameter, find_channel_groups, multiply, only_reader
from qframework.graph.nodes import fake_value, is_inactive_dropout, operation
from qframework.quantizer.annotate_linear import is_linear
from qframework.quantizer.calibration import Batch
from qframework.quantizer.channel_statistics import channel_statistics
from qframework.quantizer.config import LinearConfig
from qframework.quantizer.quantizer import QFrameworkQuantizer, layer_name
from qframework.quantizer.smooth import CalibratedLinear, search_smoothing

_ATTENTION = {"scaled_dot_product_attention", "matmul", "bmm", "sage_attention"}
_KEPT_META = ("val", "nn_module_stack", "stack_trace", "torch_fn", "source_fn_stack")
# A product must reduce the squared error by at least this share.
_GAIN = 0.05


def scale_channels(
    exported: GraphModule,
    quantizer: QFrameworkQuantizer,
    data: Iterable[Batch],
    *,
    strengths: Sequence[float],
    samples: int = 1024,
    batches: int | None = None,
) -> dict[str, float]:
    """Multiply the inputs of linears by a constant per channel where that reduces their error, in place.

    Considered are static inputs with one scale and dynamic ones with a scale per token. Excluded are inputs that a
    layer before can scale, which ``smooth`` does at no cost, and outputs of attention, which static attention writes in
    INT8.

    Args:
        exported: from ``torch.export.export(...).module()``. It gets new parameters; those of the original model stay.
        quantizer: the one the graph will be prepared with.
        data: calibration batches as ``calibrate`` takes them.
        strengths: candidates for the strength ``a`` of the scales, as in ``smooth``.
        samples: rows of calibration data on which errors are measured.
        batches: use only this many batches.

    Returns:
        The strength of each linear that now reads a product, by its layer's name.

    Raises:
        CalibrationError: no data, a batch that does not fit, or NaN or infinity in an activation.
    """
    readers = _readers(exported, quantizer)
    statistics = channel_statistics(exported, data, readers, samples, batches) if readers else {}
    found: dict[str, float] = {}
    for x, linears in readers.items():
        channels = torch.arange(statistics[x].amax.numel())
        layers = [CalibratedLinear.of(exported, node, config, channels, statistics[x]) for node, config in linears]
        free = torch.ones(channels.numel(), dtype=torch.bool, device=layers[0].weight.device)
        smoothing = search_smoothing(layers, free, strengths, gain=_GAIN)
        if smoothing is not None:
            _scale(exported, x, [node for node, _ in linears], smoothing.scales)
            found.update((layer.name, smoothing.strength) for layer in layers)
    exported.recompile()
    return found


def _readers(exported: GraphModule, quantizer: QFrameworkQuantizer) -> dict[Node, list[tuple[Node, LinearConfig]]]:
    """The linears that may be scaled, by their input."""
    scaled = {consumer.linear for group in find_channel_groups(exported) for consumer in group.consumers}
    found: dict[Node, list[tuple[Node, LinearConfig]]] = {}
    for node in exported.graph.nodes:
        config = quantizer.config_for(node) if is_linear(node) and node not in scaled else None
        if not isinstance(config, LinearConfig):
            continue
        x, granularity = node.args[0], config.activation.granularity
        if (
            granularity == ("per_token" if config.activation.dynamic else "per_tensor")
            and not _is_attention(x)
            and only_reader(exported, node)
        ):
            found.setdefault(x, []).append((node, config))
    return found


def _is_attention(node: Node) -> bool:
    """Whether a node is attention's result, or a view of it."""
    passes_on = COPIES | VIEWS | {"transpose", "permute", "getitem"}
    while operation(node) in passes_on or is_inactive_dropout(node):
        node = node.all_input_nodes[0]
    return operation(node) in _ATTENTION or "sage_attention" in str(node.target)


def _scale(exported: GraphModule, x: Node, linears: Sequence[Node], scales: Tensor) -> None:
    """Let ``linears`` read ``x / scales``, and multiply the columns of their weights."""
    fake = fake_value(x)
    assert fake is not None
    constant = (1.0 / scales.double()).to(fake.dtype).to(attribute(exported, linears[0].args[1]).device)  # type: ignore[arg-type]
    first = min(linears)
    with exported.graph.inserting_before(first):
        factor = add_attribute(exported, f"{layer_name(first)}.channel_scale", constant)
        factor.meta["val"] = fake.new_empty(constant.shape)
        product = exported.graph.call_function(torch.ops.aten.mul.Tensor, (x, factor))
    product.meta = {key: x.meta[key] for key in _KEPT_META if key in x.meta}
    for linear in linears:
        linear.replace_input_with(x, product)
        weight: Node = linear.args[1]  # type: ignore[assignment]
        # the inverse of the constant as rounded to its dtype
        multiply(exported, Parameter(str(weight.target), 1), 1.0 / constant.double())
