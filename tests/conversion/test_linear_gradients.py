"""Models of ``quantize_`` that are asked for gradients (linear_module.py): no partial one is returned."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from qframework import quantize_
from qframework.compat.dispatch import LOSES_TANGENTS
from qframework.errors import QFrameworkError, UnsupportedError
from qframework.export.expand_int8_linear import expand_int8_linear
from qframework.quantizer import dynamic_int8, static_int8

X = torch.randn(8, 16)
REFUSED = "int8_linear: inference only, without a gradient"
CONFIGS = pytest.mark.parametrize(("config", "data"), [(dynamic_int8(), None), (static_int8(), [X])])
BACKENDS = pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])


class Block(nn.Module):
    """The gradient of the residual alone is 1."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc(self.norm(x)).relu()


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.block = nn.Embedding(8, 16), Block()

    def forward(self, ids: Tensor) -> Tensor:
        return self.block(self.tokens(ids))


def compiled(f, backend):
    torch._dynamo.reset()
    return f if backend is None else torch.compile(f, backend=backend)


@CONFIGS
@BACKENDS
@pytest.mark.parametrize("frozen", [True, False])
def test_no_gradient_passes_beside_a_layer(config, data, backend, frozen) -> None:
    block = quantize_(Block().eval(), config, data).requires_grad_(not frozen)
    model = compiled(block, backend)
    with torch.no_grad():
        expected = block(X)
        torch.testing.assert_close(model(X.clone().requires_grad_()), expected)
    x = X.clone().requires_grad_()
    y = model(x)
    torch.testing.assert_close(y, expected)
    with pytest.raises(QFrameworkError, match=REFUSED):
        y.sum().backward()
    assert x.grad is None
    assert frozen != model(X).requires_grad


@CONFIGS
@BACKENDS
def test_embeddings_alone_may_require_gradients(config, data, backend) -> None:
    """Inference without torch.no_grad(): nothing is refused until a backward pass runs."""
    ids = torch.arange(8)
    model = quantize_(Embedded().eval(), config, data and [ids]).requires_grad_(False)
    model.tokens.requires_grad_(True)
    y = compiled(model, backend)(ids)
    with torch.no_grad():
        torch.testing.assert_close(y, model(ids))
    with pytest.raises(QFrameworkError, match=REFUSED):
        y.sum().backward()
    assert model.tokens.weight.grad is None


@CONFIGS
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_vmap_hides_no_gradient(config, data, backend) -> None:
    model = quantize_(Block().eval(), config, data).requires_grad_(False)
    x = X.clone().requires_grad_()
    y = compiled(torch.vmap(model), backend)(x)
    torch.testing.assert_close(y.detach(), model(X))
    with pytest.raises(QFrameworkError, match=REFUSED):
        y.sum().backward()


@CONFIGS
@pytest.mark.parametrize("backend", [None, "inductor", "qframework"])
def test_no_tangent_is_lost(config, data, backend) -> None:
    """A model that was compiled before, whose code Inductor would otherwise run without the tangent."""
    model = compiled(quantize_(Block().eval(), config, data).requires_grad_(False), backend)
    expected = model(X)
    with forward_ad.dual_level():
        with pytest.raises((UnsupportedError, RuntimeError), match="got a forward-mode derivative"):
            model(forward_ad.make_dual(X, X))
        if backend is None or not LOSES_TANGENTS:
            torch.testing.assert_close(model(X), expected)
    with pytest.raises(UnsupportedError, match=r"quantize: the call must be .*, got torch\.func\.jvp"):
        torch.func.jvp(model, (X,), (X,))
    torch.testing.assert_close(model(X), expected)


@CONFIGS
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_derivatives_of_torch_func_are_refused(config, data, backend) -> None:
    model = quantize_(Block().eval(), config, data).requires_grad_(False)
    for derivative in (torch.func.grad(lambda x: model(x).sum()), torch.func.jacrev(model)):
        # Dynamo raises an error of its own around it.
        error = UnsupportedError if backend is None else (UnsupportedError, RuntimeError)
        with pytest.raises(error, match="int8_linear: the call must be a plain one, got a transform"):
            compiled(derivative, backend)(X)


@CONFIGS
def test_the_backend_compiles_the_same_graph_for_inputs_with_gradients(config, data, monkeypatch) -> None:
    from qframework.compat import inductor

    graphs: list[list[object]] = []

    def record(gm, *args):
        graphs.append([node.target for node in gm.graph.nodes if node.op == "call_function"])
        return gm.forward

    monkeypatch.setattr(inductor, "compile_graph", record)
    model = quantize_(Block().eval(), config, data).requires_grad_(False)
    fast = compiled(model, "qframework")
    with torch.no_grad():
        fast(X)
    y = fast(X.clone().requires_grad_())
    assert len(graphs) == 2
    assert graphs[0] == graphs[1]
    assert torch.ops.qframework.int8_linear.default in graphs[0]
    assert not y.requires_grad


CAPTURES = {
    "export": lambda model: torch.export.export(model, (X,)).module(),
    "strict export": lambda model: torch.export.export(model, (X,), strict=True).module(),
    "decomposed export": lambda model: torch.export.export(model, (X,)).run_decompositions().module(),
    "trace": lambda model: torch.jit.trace(model, X, check_trace=False),
}


@CONFIGS
@pytest.mark.parametrize(
    ("capture", "backend"),
    [*((capture, None) for capture in CAPTURES), ("export", "aot_eager"), ("export", "inductor")],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")
def test_captured_models_pass_on_no_gradient(config, data, capture, backend) -> None:
    block = quantize_(Block().eval(), config, data).requires_grad_(False)
    with torch.no_grad():
        model, expected = compiled(CAPTURES[capture](block), backend), block(X)
    x = X.clone().requires_grad_()
    y = model(x)
    torch.testing.assert_close(y, expected)
    with pytest.raises(QFrameworkError, match=REFUSED):
        y.sum().backward()
    assert x.grad is None
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected)
    assert not model(X).requires_grad


@CONFIGS
def test_files_hold_the_scales_themselves(config, data) -> None:
    model = quantize_(Block().eval(), config, data)
    gm = torch.export.export(model, (X,)).module()
    expand_int8_linear(gm)
    targets = [node.target for node in gm.graph.nodes]
    assert torch.ops.aten.linear.default in targets
    assert torch.ops.qframework.scale_of.default not in targets
