"""Times one layer alone, by the operators that a compiled model launches for it.

=========  ============================================================================
choice     what is timed
=========  ============================================================================
float      ``linear``, ``scaled_dot_product_attention``, in plain torch with a soft cap
static     ``int8_linear``, ``mixed_attention``, whose inputs the layers before quantize, with any observer
dynamic    ``dynamic_quantize`` and ``int8_linear``
a variant  ``sage_attention``
=========  ============================================================================

Operands are random and have the layer's shapes. Operations that a compiled model fuses with the layer are not included.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import qframework.kernels  # noqa: F401  registers the operators
from qframework.attention.plain import plain_attention
from qframework.quantizer.layer_costs import costs_on
from qframework.tuning.layers import AttentionOperands, LinearOperands, Operands, TensorShape

FLOAT, STATIC, DYNAMIC = "float", "static", "dynamic"

_WARM_UP = 2
_GRAPH_CALLS = 20
_HOST_MS = 500.0


def kind_of(choice: str) -> str:
    """What a choice runs: ``"static"`` for ``"static mse"``, which names an observer; other choices as they are."""
    return STATIC if choice.startswith(f"{STATIC} ") else choice


@torch.no_grad()
def milliseconds(
    operands: Operands,
    choice: str,
    device: torch.device | str,
    *,
    repeats: int = 20,
    summary: Callable[[Iterable[float]], float] = median,
) -> float:
    """Median time of one call in milliseconds.

    On a GPU, calls are replayed in a CUDA graph, which leaves out launch overhead.

    Args:
        operands: shapes and dtypes of the layer's operands.
        choice: ``"float"``, ``"static"``, alone or with an observer, ``"dynamic"`` or a variant of attention.
        device: where to run.
        repeats: number of timed calls; on a GPU, of graphs of several calls.
        summary: of the calls' times; ``min`` where the machine may be busy.

    Raises:
        UnsupportedError, QFrameworkError: no kernel supports the call.
    """
    device, choice = torch.device(device), kind_of(choice)
    make = _Operands(device)
    fn = make.linear(operands, choice) if isinstance(operands, LinearOperands) else make.attention(operands, choice)
    for _ in range(_WARM_UP):
        fn()
    if device.type != "cuda":
        return _on_host(fn, repeats, summary)
    with torch.cuda.device(device):
        return _in_graph(fn, repeats, summary)


def zero_point_milliseconds(operands: Operands, device: str) -> float:
    """What a zero point of a linear's input takes in the layer before, by the rule of quantizer/layer_costs.py.

    Args:
        operands: of the linear.
        device: the type of device that it runs on, such as ``"cuda"``.
    """
    assert isinstance(operands, LinearOperands)
    *rows, inputs = operands.input.shape
    return 1e3 * costs_on(device, operands.input.dtype).zero_point(math.prod(rows), inputs)


class _Operands:
    """Makes seeded random operands, and the calls that use them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._generator = torch.Generator(device).manual_seed(0)

    def linear(self, call: LinearOperands, choice: str) -> Callable[[], Any]:
        """The call of a linear layer."""
        bias = self._optional(call.bias)
        if choice == FLOAT:
            x, weight = self._float(call.input), self._float(call.weight)
            return lambda: F.linear(x, weight, bias)
        ops, dtype = torch.ops.qframework, call.input.dtype
        b, b_scale = self._int8(call.weight), self._scale(call.weight.shape[0])
        if choice == STATIC:
            a, a_scale = self._int8(call.input), self._scale(1)
            return lambda: ops.int8_linear(a, a_scale, b, b_scale, bias, "none", None, None, dtype)
        x = self._float(call.input)
        quantize = ops.dynamic_quantize.alone

        def dynamic() -> Tensor:
            q, scale = quantize(x, "per_token")
            return ops.int8_linear(q, scale, b, b_scale, bias, "none", None, None, dtype)

        return dynamic

    def attention(self, call: AttentionOperands, choice: str) -> Callable[[], Any]:
        """The call of an attention."""
        ops, flags = torch.ops.qframework, {"is_causal": call.is_causal, "enable_gqa": call.enable_gqa}
        mask, rel_h, rel_w = (self._optional(each) for each in (call.mask, call.rel_h, call.rel_w))
        if choice == STATIC:
            integers = [self._int8(each) for each in (call.query, call.key, call.value)]
            scales = [self._scale(1) for _ in range(3)]
            dtype = call.query.dtype
            return lambda: ops.mixed_attention(
                *integers, *scales, mask, **flags, out_dtype=dtype, rel_h=rel_h, rel_w=rel_w
            )
        query, key, value = (self._float(each) for each in (call.query, call.key, call.value))
        softcap = call.softcap
        if choice != FLOAT:
            return lambda: ops.sage_attention(
                query, key, value, mask, **flags, variant=choice, rel_h=rel_h, rel_w=rel_w, softcap=softcap
            )
        bias = _dense_bias(mask, rel_h, rel_w)
        bias = bias if bias is None or bias.dtype == torch.bool else bias.to(query.dtype)
        if softcap is not None:
            capped = bias, 0.0, call.is_causal, None, call.enable_gqa, softcap
            return lambda: plain_attention(query, key, value, *capped)
        return lambda: F.scaled_dot_product_attention(query, key, value, bias, **flags)

    def _optional(self, like: TensorShape | None) -> Tensor | None:
        return None if like is None else self._float(like)

    def _float(self, like: TensorShape) -> Tensor:
        if like.dtype == torch.bool:
            return torch.ones(like.shape, dtype=torch.bool, device=self._device)
        return torch.randn(like.shape, generator=self._generator, device=self._device).to(like.dtype)

    def _int8(self, like: TensorShape) -> Tensor:
        return torch.randint(-127, 128, like.shape, generator=self._generator, device=self._device, dtype=torch.int8)

    def _scale(self, count: int) -> Tensor:
        return torch.full((count,), 0.01, device=self._device)


def _dense_bias(mask: Tensor | None, rel_h: Tensor | None, rel_w: Tensor | None) -> Tensor | None:
    """The dense bias ``(..., N, Nk)`` of float attention: the mask plus the relative positions of both axes."""
    if rel_h is None or rel_w is None:
        return mask
    relative = (rel_h.unsqueeze(-1) + rel_w.unsqueeze(-2)).flatten(-2)
    if mask is None:
        return relative
    return relative.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else relative + mask


def _on_host(fn: Callable[[], Any], repeats: int, summary: Callable[[Iterable[float]], float]) -> float:
    """Several calls; fewer for slow ones, since the references of attention take seconds."""
    once = _wall_ms(fn)
    return summary(_wall_ms(fn) for _ in range(max(3, min(repeats, int(_HOST_MS / once)))))


def _wall_ms(fn: Callable[[], Any]) -> float:
    start = time.perf_counter()
    fn()
    return (time.perf_counter() - start) * 1e3


def _in_graph(fn: Callable[[], Any], repeats: int, summary: Callable[[Iterable[float]], float]) -> float:
    """Time per call of several calls in one CUDA graph."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_GRAPH_CALLS):
            fn()
    graph.replay()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return summary(start.elapsed_time(end) for start, end in events) / _GRAPH_CALLS
