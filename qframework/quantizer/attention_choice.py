"""Scales per head for static attention, where that reduces the error of the model's output.

Heads differ in the sizes of their queries, keys and values. One scale for each costs a model little: the linear
before them writes INT8 with a scale for each channel anyway, and attention kernels read a scale for each head. As in
activation_choice.py, the float model runs once; at each attention it is run to the end from there, with queries, keys
and values quantized either way, and the output is compared with the float output.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from qframework.errors import UnsupportedError
from qframework.graph.nodes import fake_value
from qframework.quantizer.annotate_attention import attention_call, check_attention, is_attention
from qframework.quantizer.attention_config import PER_HEAD_OBSERVERS, AttentionConfig
from qframework.quantizer.calibration import Batch
from qframework.quantizer.observers import activation_observer, per_head_observer
from qframework.quantizer.output_error import (
    Parameters,
    Run,
    fake_quantized,
    first_examples,
    floats,
    held_out,
    observe,
    relative_error,
)
from qframework.quantizer.quantizer import QFrameworkQuantizer, layer_name, override_config

_EXAMPLES = 4


@dataclass
class _Attention:
    """An attention with one scale for each tensor, and the observers of its operands, by granularity and node."""

    node: Node
    config: AttentionConfig
    per_head: AttentionConfig
    observers: dict[str, dict[Node, Any]] = field(default_factory=dict)

    @property
    def operands(self) -> list[Node]:
        return list(dict.fromkeys(attention_call(self.node).operands().values()))


def choose_heads(
    exported: GraphModule, quantizer: QFrameworkQuantizer, data: Iterable[Batch], *, batches: int | None = None
) -> dict[str, str]:
    """Give static attention with one scale per tensor scales per head where the model's output gains, in place.

    The choice is recorded at the nodes of ``exported``, as by ``choose_activations``. Attention spelled out as matmul,
    softmax, matmul keeps its configuration, as does attention that no kernel supports per head.

    Args:
        exported: from ``torch.export.export(...).module()``.
        quantizer: the one the graph will be prepared with.
        data: calibration batches as ``calibrate`` takes them.
        batches: use only this many batches.

    Returns:
        ``"per_head"`` for each layer that changed.

    Raises:
        CalibrationError: no data, a batch that does not fit, or NaN or infinity in an operand.
    """
    found = list(_candidates(exported, quantizer))
    if not found:
        return {}
    judged, fitted = held_out(exported, data, batches)
    _observe(exported, found, fitted)
    return _choose(exported, found, first_examples(exported, judged or fitted, _EXAMPLES))


def _candidates(exported: GraphModule, quantizer: QFrameworkQuantizer) -> Iterable[_Attention]:
    for node in exported.graph.nodes:
        config = quantizer.config_for(node) if is_attention(node) else None
        if not isinstance(config, AttentionConfig) or not config.is_static or config.granularity != "per_tensor":
            continue
        if config.observer in PER_HEAD_OBSERVERS:
            per_head = replace(config, granularity="per_head")
            try:
                check_attention(node, layer_name(node), per_head)
            except UnsupportedError:
                continue
            yield _Attention(node, config, per_head)


def _observe(exported: GraphModule, found: list[_Attention], data: list[Batch]) -> None:
    watched: dict[Node, list[Any]] = {}
    for each in found:
        for granularity in ("per_tensor", "per_head"):
            each.observers[granularity] = {node: _observer(each, node, granularity) for node in each.operands}
            for node, observer in each.observers[granularity].items():
                watched.setdefault(node, []).append(observer)
    observe(exported, watched, data)


def _observer(each: _Attention, operand: Node, granularity: str) -> Any:
    name = layer_name(each.node)
    if granularity == "per_tensor":
        return activation_observer(each.config.activation(), name, ())(qscheme=torch.per_tensor_symmetric)
    fake = fake_value(operand)
    assert fake is not None
    return per_head_observer(each.config, name, fake.ndim - 3)(qscheme=torch.per_channel_symmetric)


@torch.no_grad()
def _choose(exported: GraphModule, found: list[_Attention], example: list[Any]) -> dict[str, str]:
    expected = floats(Run(exported).start(example).finish({}))
    run, chosen = Run(exported).start(example), {}
    for each in found:
        run.advance(each.node)
        if not all(observer.has_scale() for kind in each.observers.values() for observer in kind.values()):
            continue
        errors = {
            kind: relative_error(floats(run.finish({each.node: _attention(run, each.node, observers)})), expected)
            for kind, observers in each.observers.items()
        }
        if errors["per_head"] < errors["per_tensor"]:
            override_config(each.node, each.per_head)
            chosen[layer_name(each.node)] = "per_head"
    return chosen


def _attention(run: Run, node: Node, observers: dict[Node, Any]) -> Tensor:
    """The output of an attention with quantized operands."""

    def value(operand: Node) -> Any:
        x = run.value(operand)
        if operand not in observers:
            return x
        return fake_quantized(x, Parameters(observers[operand].broadcast_scale(x)))

    args: Any = map_arg(node.args, value)
    kwargs: Any = map_arg(node.kwargs, value)
    return node.target(*args, **kwargs)  # type: ignore[operator]
