"""Tokens are rearranged before a layer whose result is added to others, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lowered_models import converted
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.nn import functional as F

import qframework
from qframework.backend import compile as backend_compile
from qframework.backend import passes
from qframework.backend.options import parse_options
from qframework.backend.rearrange_early import rearrange_early
from qframework.backend.report import LayerReport
from qframework.graph.nodes import argument, fake_value
from qframework.quantizer import dynamic_int8, static_int8

INT8_LINEAR = torch.ops.qframework.int8_linear.default
WIDTH, HEADS = 32, 2
DYNAMIC = {"linear": "int8_dynamic", "freeze_weights": True}


def attend(qkv: Tensor) -> Tensor:
    """Softmax attention of ``(B, N, 3 C)``."""
    q, k, v = qkv.unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
    return (q @ k.transpose(-2, -1)).softmax(-1).matmul(v).transpose(1, 2).flatten(2)


class Windows(nn.Module):
    """A residual block of attention in windows of ``(B, *sizes, C)``: padded, shifted, and cut off again."""

    def __init__(self, window: tuple[int, ...], shift: int = 0, join: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.window, self.shift, self.join = window, shift, join
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.attend(self.norm(x)))

    def attend(self, x: Tensor) -> Tensor:
        batch, *sizes, channels = x.shape
        d, dims = len(sizes), tuple(range(1, len(sizes) + 1))
        padding = [-size % window for size, window in zip(sizes, self.window, strict=True)]
        x = F.pad(x, [0, 0, *(value for amount in reversed(padding) for value in (0, amount))])
        if self.shift:
            x = torch.roll(x, [-self.shift] * d, dims)
        split = [n for size, window in zip(x.shape[1:-1], self.window, strict=True) for n in (size // window, window)]
        outer, inner = range(1, 2 * d, 2), range(2, 2 * d + 1, 2)
        windows = x.reshape(batch, *split, channels).permute(0, *outer, *inner, 2 * d + 1)
        tokens = windows.flatten(1 + d, 2 * d).flatten(0, d)
        y = self.join(self.proj(attend(self.qkv(tokens))))
        y = y.view(windows.shape).permute(0, *(i for j in range(1, d + 1) for i in (j, j + d)), 2 * d + 1)
        y = y.contiguous().view(x.shape)
        if self.shift:
            y = torch.roll(y, [self.shift] * d, dims)
        for dim, size in enumerate(sizes, 1):
            y = y.narrow(dim, 0, size) if y.shape[dim] > size else y
        return y


IMAGES = {
    "windows": (Windows((4, 4)), (3, 8, 12, WIDTH), 3 * 96),
    "shifted": (Windows((4, 4), 2), (3, 8, 8, WIDTH), 3 * 64),
    "cut off": (Windows((4, 4)), (3, 6, 7, WIDTH), 3 * 42),
    "shifted and cut off": (Windows((5, 4), 1), (2, 6, 7, WIDTH), 2 * 42),
    "video": (Windows((2, 4, 4), 1), (2, 4, 8, 8, WIDTH), 2 * 256),
    "video, cut off": (Windows((2, 3, 4), 1), (2, 3, 8, 6, WIDTH), 2 * 144),
}


class Lowered:
    """A model's compiled result, INT8 layers and reports, without Inductor; checks what is recorded of each node."""

    def __init__(self, model: Callable[..., Any], x: Tensor, options: dict[str, Any], **compile_options: Any) -> None:
        self.layers: list[Node] = []
        self.reports: list[LayerReport] = []
        torch._dynamo.reset()
        with torch.no_grad():
            self.result = torch.compile(model, backend=self._backend(options), **compile_options)(x)

    def _backend(self, options: dict[str, Any]) -> Any:
        def backend(gm: GraphModule, inputs: Any) -> Any:
            self.reports += backend_compile.lower(gm, inputs, parse_options(None, options))
            self.layers += [node for node in gm.graph.nodes if node.target is INT8_LINEAR]
            return RecordsHold(gm).run

        return backend

    @property
    def with_residual(self) -> list[Node]:
        return [layer for layer in self.layers if argument(layer, 6, "residual") is not None]


class RecordsHold(torch.fx.Interpreter):
    def run_node(self, n: Node) -> Any:
        result, recorded = super().run_node(n), fake_value(n)
        if (
            isinstance(result, Tensor)
            and recorded is not None
            and all(isinstance(size, int) for size in recorded.shape)
        ):
            assert (result.shape, result.stride(), result.dtype) == (recorded.shape, recorded.stride(), recorded.dtype)
        return result


def with_and_without(
    monkeypatch: pytest.MonkeyPatch, model: Callable[..., Any], x: Tensor, options: dict[str, Any], **more: Any
) -> tuple[Lowered, Lowered]:
    done = Lowered(model, x, options, **more)
    monkeypatch.setattr(passes, "LOWERING", tuple(each for each in passes.LOWERING if each is not rearrange_early))
    return done, Lowered(model, x, options, **more)


def assert_moved(done: Lowered, before: Lowered, tokens: int) -> None:
    """The same values in the same order, with the residual and without the tokens that are cut off."""
    assert torch.equal(done.result, before.result)
    assert before.with_residual == []
    (layer,) = done.with_residual
    value = fake_value(layer)
    assert value is not None
    assert value.shape[:-1].numel() == tokens
    assert [(r.name, r.lowered) for r in done.reports] == [(r.name, r.lowered) for r in before.reports]
    assert any(r.name.endswith("proj") and "residual" in r.operator for r in done.reports)


@pytest.mark.parametrize("name", IMAGES)
def test_float_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, shape, tokens = IMAGES[name]
    assert_moved(*with_and_without(monkeypatch, model.eval(), torch.randn(shape), DYNAMIC), tokens)


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize(
    "config", [static_int8(), dynamic_int8(), dynamic_int8(activation="per_tensor")], ids=["static", "token", "tensor"]
)
def test_converted_model(name: str, config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, shape, tokens = IMAGES[name]
    gm, x = converted(model, torch.randn(shape), config), torch.randn(shape)
    assert_moved(*with_and_without(monkeypatch, gm, x, {}), tokens)


@pytest.mark.parametrize("config", [dynamic_int8(), dynamic_int8(activation="per_tensor"), static_int8()])
def test_layers_that_the_model_calls(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, shape, tokens = Windows((5, 4), 1).eval(), (2, 6, 7, WIDTH), 2 * 42
    qframework.quantize_(model, config, [torch.randn(shape)] if config == static_int8() else None)
    assert_moved(*with_and_without(monkeypatch, model, torch.randn(shape), {}), tokens)


def test_any_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that are symbols: one of them, as of a batch, is left to the reshape."""
    model, x = Windows((4, 4), 2).eval(), torch.randn(3, 8, 12, WIDTH)
    torch._dynamo.mark_dynamic(x, 0)
    done, before = with_and_without(monkeypatch, model, x, DYNAMIC)
    assert torch.equal(done.result, before.result)
    assert len(done.with_residual) == 1
    assert before.with_residual == []


class Layer(nn.Module):
    """``norm(change(linear(x)) + residual)``."""

    def __init__(
        self, change: Callable[[Tensor], Tensor], inputs: int = WIDTH, shape: tuple[int, ...] | None = None
    ) -> None:
        super().__init__()
        self.change, self.linear = change, nn.Linear(inputs, WIDTH)
        self.residual = nn.Buffer(torch.randn(shape or change(torch.zeros(2, 6, 4, WIDTH)).shape))

    def forward(self, x: Tensor) -> Tensor:
        total = self.change(self.linear(x * 2)) + self.residual
        return F.layer_norm(total, total.shape[-1:])


MOVED: dict[str, Callable[[Tensor], Tensor]] = {
    "no change": lambda x: x.contiguous().clone(),
    "view": lambda x: x.view(12, -1, WIDTH),
    "flatten": lambda x: x.flatten(0, 2),
    "unflatten": lambda x: x.unflatten(1, (3, 2)),
    "one more dimension": lambda x: x.unsqueeze(1).unsqueeze(-2),
    "one less": lambda x: x[:1].squeeze(0),
    "transpose": lambda x: x.transpose(1, -2),
    "swapaxes": lambda x: x.swapaxes(0, 1),
    "permute": lambda x: x.permute((2, 1, 0, -1)),
    "movedim": lambda x: x.movedim(0, 2),
    "dimensions merged across each other": lambda x: x.transpose(0, 1).reshape(3, 16, WIDTH),
    "roll": lambda x: x.roll((1, 2), (1, -2)),
    "roll along one": lambda x: x.roll(1, 1),
    "flip": lambda x: x.flip(1, 2),
    "slice": lambda x: x[:, 1:5, :-1],
    "slice with a step": lambda x: x[:, ::2],
    "slices of channels that keep all": lambda x: x[..., 1:, :WIDTH],
    "ellipsis": lambda x: x[1:, ..., 0:3, :],
    "narrow": lambda x: x.narrow(1, 2, 3),
    "select": lambda x: x[:, 2],
    "nothing padded": lambda x: F.pad(x, (0, 0, 0, 0)).roll(1, 0),
}


@pytest.mark.parametrize("name", MOVED)
@pytest.mark.parametrize("inputs", [WIDTH, 24])
def test_what_moves(name: str, inputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the input has fewer channels than the result."""
    layer, x = Layer(MOVED[name], inputs), torch.randn(2, 6, 4, inputs)
    done, before = with_and_without(monkeypatch, layer, x, DYNAMIC)
    assert torch.equal(done.result, before.result)
    assert (len(done.with_residual), len(before.with_residual)) == (1, 0)


def test_a_reshape_of_a_wide_input_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = Layer(MOVED["view"], 4 * WIDTH), torch.randn(2, 6, 4, 4 * WIDTH)
    done, before = with_and_without(monkeypatch, layer, x, DYNAMIC)
    assert torch.equal(done.result, before.result)
    assert (len(done.with_residual), len(before.with_residual)) == (1, 0)


class ReadTwice(Layer):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return F.layer_norm(self.change(y) + self.residual, (WIDTH,)) * y.mean()


class InputReadTwice(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        return F.layer_norm(self.change(self.linear(x)) + self.residual, (WIDTH,)) * x.mean()


class ResidualWritten(Layer):
    """The residual is written between the layer and the sum, and a part of it is read behind that."""

    def forward(self, x: Tensor) -> Tensor:
        residual = x.sin().contiguous()
        part = residual[:, :1]
        y = self.linear(x * 2)
        residual.mul_(2)
        return F.layer_norm(self.change(y) + residual, (WIDTH,)) + part


class StridesMatter(Layer):
    """The sum has the strides of the permuted result, and a view depends on them."""

    def forward(self, x: Tensor) -> Tensor:
        total = self.linear(x * 2).transpose(1, 2) + self.residual.transpose(1, 2)
        return total.transpose(1, 2).view(2, 24, WIDTH)


LEFT: dict[str, Callable[[], Layer]] = {
    "channels are permuted": lambda: Layer(lambda x: x[:, :4].transpose(2, 3).reshape(2, 4, 4, WIDTH).transpose(1, 2)),
    "channels are exchanged with as many tokens": lambda: Layer(lambda x: x.flatten(0, 2)[:WIDTH].transpose(0, 1)),
    "channels are split": lambda: Layer(lambda x: x.view(2, 6, 4, 2, 16).transpose(2, 3).reshape(2, 6, 4, WIDTH)),
    "channels are rolled": lambda: Layer(lambda x: x.roll(1, -1)),
    "tokens and channels are rolled": lambda: Layer(lambda x: x.roll((1, 1), (1, 3))),
    "all elements are rolled": lambda: Layer(lambda x: x.roll(1)),
    "channels are flipped": lambda: Layer(lambda x: x.flip(-1)),
    "channels are cut off": lambda: Layer(lambda x: x[..., :-1]),
    "tokens are padded": lambda: Layer(lambda x: F.pad(x, (0, 0, 0, 1)).transpose(0, 1)),
    "tokens are repeated": lambda: Layer(lambda x: x[:1].expand(3, -1, -1, -1)),
    "tokens are computed with": lambda: Layer(lambda x: x.transpose(0, 1).sigmoid()),
    "tokens are chosen by index": lambda: Layer(lambda x: x[[1, 0]]),
    "residual is broadcast": lambda: Layer(lambda x: x.transpose(0, 1), shape=(WIDTH,)),
    "result is read twice": lambda: ReadTwice(lambda x: x.transpose(1, 2)),
    "input is read twice": lambda: InputReadTwice(lambda x: x.transpose(1, 2)),
    "input is wider": lambda: Layer(lambda x: x.transpose(1, 2), 2 * WIDTH),
    "residual is written": lambda: ResidualWritten(lambda x: x.roll(1, 1)),
    "strides matter": lambda: StridesMatter(lambda x: x),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = LEFT[name]()
    done, before = with_and_without(monkeypatch, layer, torch.randn(2, 6, 4, layer.linear.in_features), DYNAMIC)
    assert torch.equal(done.result, before.result)
    assert len(done.layers) == 1
    assert done.with_residual == []
    assert [str(node.args) for node in done.layers] == [str(node.args) for node in before.layers]


def test_scales_of_positions_stay() -> None:
    """Static scales of each token belong to their places, and so does what they quantize."""
    gm = converted(Windows((4, 4)).eval(), torch.randn(3, 8, 12, WIDTH), static_int8(activation="per_token"))
    assert Lowered(gm, torch.randn(3, 8, 12, WIDTH), {}).with_residual == []


def test_a_layer_in_float_stays() -> None:
    """Float layers have no epilogue."""
    model, x = Windows((4, 4), 2).eval(), torch.randn(2, 8, 8, WIDTH)
    gm = converted(model, x, proj=None)
    names: list[list[str]] = []

    def backend(graph: GraphModule, inputs: Any) -> Any:
        backend_compile.lower(graph, inputs, parse_options(None, {}))
        names.append([node.name for node in graph.graph.nodes if "linear" in str(node.target) or "roll" in node.name])
        return graph.forward

    with torch.no_grad():
        torch.compile(gm, backend=backend)(x)
    (order,) = names
    assert [name.partition("_")[0] for name in order] == ["roll", "int8", "linear", "roll"]
