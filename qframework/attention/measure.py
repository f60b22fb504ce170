"""Measures the error of each variant against float attention in each attention layer of a running model."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from qframework.attention.api import sage_attention
from qframework.attention.drop_in import why_not
from qframework.attention.layer_choice import OFF, Measurement
from qframework.attention.layer_scope import AttentionCalls, attention_nodes, join_name
from qframework.errors import CalibrationError, QFrameworkError

Clock = Callable[[Mapping[str, Callable[[], object]]], Mapping[str, float]]
"""Seconds of each call, by its name."""

_MASKED = -1e4  # a float mask with less leaves a key out


class Recorder(AttentionCalls):
    """A scope in which attention stays PyTorch's and every variant is compared with it.

    With ``clock`` the time of each variant and of PyTorch's attention is measured too, once for calls that are alike.
    """

    def __init__(self, variants: Sequence[str], clock: Clock | None = None) -> None:
        super().__init__()
        self.variants, self.clock = tuple(variants), clock
        self._times: dict[Any, dict[str, float]] = {}
        self.next_layer: Callable[[], str] = lambda: join_name("", 0)
        self.layers: dict[str, RecordedLayer] = {}

    def attend(self, func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        name = self.next_layer()
        with torch.DisableTorchFunction():
            out = func(*args, **kwargs)
            call = _Call(*args, **kwargs)
            for argument, tensor in (*call.inputs().items(), ("output", out)):
                if not bool(torch.isfinite(tensor).all()):
                    raise CalibrationError(f"attention layer {name!r}: {argument} must be finite, got NaN or infinity")
            layer = self.layers.setdefault(name, RecordedLayer(call))
            layer.calls += 1
            for variant in self.variants:
                layer.record(variant, _measure(call, variant, out))
            if self.clock is not None:
                layer.add(self._seconds(call, layer, lambda: func(*args, **kwargs), self.clock))
        return out

    def _seconds(
        self, call: _Call, layer: RecordedLayer, pytorch: Callable[[], object], clock: Clock
    ) -> Mapping[str, float]:
        """Times of PyTorch's attention and of the variants that can compute the call."""
        if call.signature not in self._times:
            working = [name for name in self.variants if not layer.measured[name].error]
            calls = {name: functools.partial(call.quantized, name) for name in working}
            self._times[call.signature] = dict(clock({OFF: pytorch, **calls}))
        return self._times[call.signature]


class _Call:
    """The arguments of one ``F.scaled_dot_product_attention``."""

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        self.query, self.key, self.value, self.mask = query, key, value, attn_mask
        self.dropout_p, self.is_causal, self.scale, self.enable_gqa = dropout_p, is_causal, scale, enable_gqa

    @functools.cached_property
    def signature(self) -> tuple[Any, ...]:
        """Equal for calls that take the same time: what a mask leaves out counts, what tensors hold does not."""
        operands = [x for x in (self.query, self.key, self.value, self.mask) if x is not None]
        kept = None
        if self.mask is not None:
            kept = int((self.mask if self.mask.dtype == torch.bool else self.mask > _MASKED).sum())
        sizes = [(tuple(x.shape), x.stride(), x.dtype, x.device) for x in operands]
        return (*sizes, kept, self.is_causal, self.scale, self.enable_gqa)

    def inputs(self) -> dict[str, Tensor]:
        return {"query": self.query, "key": self.key, "value": self.value}

    def quantized(self, variant: str) -> Tensor:
        """The call with a quantized variant. Raises QFrameworkError."""
        reason = why_not(self.query, self.key, self.value, self.mask, self.dropout_p, self.is_causal)
        if reason is not None:
            raise QFrameworkError(reason)
        out = sage_attention(
            self.query,
            self.key,
            self.value,
            self.mask,
            0.0,
            self.is_causal,
            self.scale,
            self.enable_gqa,
            variant=variant,
        )
        assert isinstance(out, Tensor)
        return out


class RecordedLayer:
    """Shapes and measurements of one layer."""

    def __init__(self, call: _Call) -> None:
        self.query, self.keys, self.calls = tuple(call.query.shape), call.key.shape[-2], 0
        self.measured: dict[str, Measurement] = {}
        self.seconds: dict[str, float] = {}  # of all calls

    def add(self, seconds: Mapping[str, float]) -> None:
        """Add the times of a call. What did not run in all calls has none."""
        if self.calls == 1:
            self.seconds = dict(seconds)
            return
        self.seconds = {name: time + seconds[name] for name, time in self.seconds.items() if name in seconds}

    def fastest_first(self) -> dict[str, Measurement]:
        """The measurements with times, PyTorch's attention among them; without times in the order given."""
        if not self.seconds:
            return self.measured
        measured = {OFF: Measurement(), **self.measured}
        order = sorted(measured, key=lambda name: self.seconds.get(name, math.inf))
        times = {name: time / self.calls for name, time in self.seconds.items()}
        return {name: replace(measured[name], seconds=times.get(name)) for name in order}

    def record(self, variant: str, measured: Measurement) -> None:
        before = self.measured.get(variant)
        self.measured[variant] = measured if before is None else before.worse(measured)


def _measure(call: _Call, variant: str, reference: Tensor) -> Measurement:
    try:
        out = call.quantized(variant)
    except QFrameworkError as error:
        return Measurement(error=" ".join(str(error).split()))
    return compare(out, reference)


def compare(out: Tensor, reference: Tensor) -> Measurement:
    """Cosine similarity, relative L1 and RMSE of two tensors, in float64 (SageAttention section 3.3 and Table 9)."""
    a, b = out.double().flatten(), reference.double().flatten()
    difference = a - b
    sums = torch.stack([a @ b, a @ a, b @ b, difference.abs().sum(), b.abs().sum(), difference @ difference]).tolist()
    if not all(map(math.isfinite, sums)):
        return Measurement(error="the output holds NaN or infinity")
    dot, a_square, b_square, l1, b_l1, square = sums
    if b_square == 0.0:  # every row is masked, or V is zero
        return Measurement(1.0 if a_square == 0.0 else 0.0, 0.0 if l1 == 0.0 else sys.float_info.max, math.sqrt(square))
    cosine = dot / math.sqrt(a_square * b_square) if a_square else 0.0
    return Measurement(min(cosine, 1.0), l1 / b_l1, math.sqrt(square / max(a.numel(), 1)))


@contextlib.contextmanager
def named_calls(model: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Within the context, hooks tell the recorder the layer of each call."""
    names = _GraphNames(model) if isinstance(model, GraphModule) else _ModuleNames()
    recorder.next_layer = names.next
    handles = []
    for path, module in model.named_modules():
        if path and isinstance(model, GraphModule):
            continue
        handles.append(module.register_forward_pre_hook(lambda *_, path=path: names.enter(path)))
        handles.append(module.register_forward_hook(lambda *_: names.leave(), always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _ModuleNames:
    """Names by the innermost running module and the index of the call in its forward."""

    def __init__(self) -> None:
        self._running: list[list[Any]] = []
        self._outside = 0

    def enter(self, path: str) -> None:
        self._running.append([path, 0])

    def leave(self) -> None:
        self._running.pop()

    def next(self) -> str:
        if not self._running:
            return join_name("", 0)  # the `forward` argument calls attention itself
        path, index = self._running[-1]
        self._running[-1][1] += 1
        return join_name(path, index)


class _GraphNames:
    """Names by the order of the attention nodes of an exported graph."""

    def __init__(self, gm: GraphModule) -> None:
        self._names = list(attention_nodes(gm.graph))
        self._index = 0

    def enter(self, path: str) -> None:
        self._index = 0

    def leave(self) -> None:
        pass

    def next(self) -> str:
        self._index += 1
        return self._names[self._index - 1] if self._index <= len(self._names) else join_name("", self._index - 1)
