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
# Attention averages over tokens what clipping does to few of them, so that less room than for linears suffices.
_MARGINS = (0.0, 0.1, 0.2, 0.3, 0.5)


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
    exported: GraphModule,
    quantizer: QFrameworkQuantizer,
    data: Iterable[Batch],
    *,
    heads: bool = True,
    margins: bool = False,
    batches: int | None = None,
) -> dict[str, str]:
    """Give static attention with one scale per tensor scales per head where the model's output gains, in place.

    The choice is recorded at the nodes of ``exported``, as by ``choose_activations``. Attention spelled out as matmul,
    softmax, matmul keeps its configuration, as does attention that no kernel supports per head.

    Args:
        exported: from ``torch.export.export(...).module()``.
        quantizer: the one the graph will be prepared with.
        data: calibration batches as ``calibrate`` takes them.
        heads: whether to consider scales per head.
        margins: whether ranges from extremes may be wider than calibration data, where that reduces the error of the
            attention's own output on examples that ranges do not come from.
        batches: use only this many batches.

    Returns:
        ``"per_head"``, ``"per_head + 0.2"`` or ``"+ 0.2"`` for each layer that changed.

    Raises:
        CalibrationError: no data, a batch that does not fit, or NaN or infinity in an operand.
    """
    found = list(_candidates(exported, quantizer))
    if not found:
        return {}
    judged, fitted = held_out(exported, data, batches)
    _observe(exported, found, fitted)
    example = first_examples(exported, judged or fitted, _EXAMPLES)
    return _choose(exported, found, example, heads=heads, margins=margins and bool(judged))


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
def _choose(
    exported: GraphModule, found: list[_Attention], example: list[Any], *, heads: bool, margins: bool
) -> dict[str, str]:
    expected = floats(Run(exported).start(example).finish({}))
    run, chosen = Run(exported).start(example), {}
    for each in found:
        run.advance(each.node)
        if not all(observer.has_scale() for kind in each.observers.values() for observer in kind.values()):
            continue
        kind = _better_granularity(run, each, expected) if heads else "per_tensor"
        margin = _best_margin(run, each, kind) if margins and each.config.observer == "minmax" else 0.0
        config = each.per_head if kind == "per_head" else each.config
        if margin:
            config = replace(config, observer_args={"margin": margin})
        if config != each.config:
            override_config(each.node, config)
            names = ["per_head"] * (kind == "per_head") + [f"+ {margin}"] * bool(margin)
            chosen[layer_name(each.node)] = " ".join(names)
    return chosen


def _better_granularity(run: Run, each: _Attention, expected: list[Tensor]) -> str:
    """The granularity of less error at the model's output."""
    errors = {
        kind: relative_error(floats(run.finish({each.node: _attention(run, each.node, observers)})), expected)
        for kind, observers in each.observers.items()
    }
    return "per_head" if errors["per_head"] < errors["per_tensor"] else "per_tensor"


def _best_margin(run: Run, each: _Attention, kind: str) -> float:
    """The margin of least error at the output of the attention itself."""
    exact = _attention(run, each.node, {})
    errors = {
        margin: float((_attention(run, each.node, each.observers[kind], margin) - exact).double().square().sum())
        for margin in _MARGINS
    }
    return min(errors, key=errors.__getitem__)


def _attention(run: Run, node: Node, observers: dict[Node, Any], margin: float = 0.0) -> Tensor:
    """The output of an attention with quantized operands, those that have an observer."""

    def value(operand: Node) -> Any:
        x = run.value(operand)
        if operand not in observers:
            return x
        return fake_quantized(x, Parameters(observers[operand].broadcast_scale(x) * (1 + margin)))

    args: Any = map_arg(node.args, value)
    kwargs: Any = map_arg(node.kwargs, value)
    return node.target(*args, **kwargs)  # type: ignore[operator]
