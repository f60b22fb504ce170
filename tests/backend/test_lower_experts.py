"""Experts in INT8: ``options={"experts": "int8_dynamic", "freeze_weights": True}``."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from qframework import explain, quantize
from qframework.backend.compile import lower
from qframework.backend.options import BackendOptions
from qframework.kernels.linear.grouped import MOST_EXPERTS
from qframework.numerics import quantize_weight, sqnr_db

OPTIONS: dict[str, Any] = {"experts": "int8_dynamic", "freeze_weights": True}
GROUPED = torch.ops.qframework.int8_grouped_linear.default
OPERATOR = "qframework::int8_grouped_linear after dynamic_quantize, weights quantized once"

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
transformers_missing = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)


class Experts(nn.Module):
    """Two products, with weights as most models of transformers store them, or as GPT-OSS does."""

    def __init__(self, transposed: bool, experts: int = 4) -> None:
        super().__init__()
        self.transposed = transposed
        generator = torch.Generator().manual_seed(0)
        up, down = (torch.randn(experts, *sizes, generator=generator).bfloat16() / 8 for sizes in ((48, 32), (32, 48)))
        self.up, self.down = (nn.Parameter(x.transpose(1, 2).contiguous() if transposed else x) for x in (up, down))

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        up, down = (each if self.transposed else each.transpose(-2, -1) for each in (self.up, self.down))
        return F.grouped_mm(F.silu(F.grouped_mm(x, up, offs=ends)), down, offs=ends)


def inputs(rows: int = 40, experts: int = 4) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    ends = torch.linspace(0, rows, experts + 1)[1:].int()
    return x, ends


def rounded(weight: Tensor, dim: int) -> Tensor:
    """A weight with a scale for each output channel, rounded to INT8."""
    rows = weight.float().movedim(dim, -1)
    q, scale = quantize_weight(rows.reshape(-1, rows.shape[-1]))
    return (q * scale.unsqueeze(-1)).view_as(rows).movedim(-1, dim)


def calls_of(model: nn.Module, operator: Any) -> list[Node]:
    """The calls of an operator in the lowered graph."""
    graphs = []

    def backend(gm: GraphModule, example: Any) -> Any:
        lower(gm, example, BackendOptions(**OPTIONS))
        graphs.append(gm.graph)
        return gm

    with torch.no_grad():
        torch.compile(model.eval(), backend=backend, fullgraph=True)(*inputs())
    return [*graphs[0].find_nodes(op="call_function", target=operator)]


@pytest.mark.parametrize("transposed", [False, True])
def test_experts_are_quantized(transposed: bool) -> None:
    model, (x, ends) = Experts(transposed).eval(), inputs()
    with torch.no_grad():
        layers = explain(model, (x, ends), options=OPTIONS).layers
        assert [(layer.operator, layer.lowered, layer.reason) for layer in layers] == [(OPERATOR, True, "")] * 2
        out = torch.compile(model, backend="qframework", options=OPTIONS)(x, ends)
        exact = model(x, ends)
        assert 30 < sqnr_db(exact.float(), out.float()) < 60
        # With weights that are rounded already, only the rounding of inputs is left.
        dim = 1 if transposed else 2
        for name in ("up", "down"):
            parameter = getattr(model, name)
            parameter.copy_(rounded(parameter, dim))
        again = torch.compile(model, backend="qframework", options=OPTIONS)(x, ends)
        assert sqnr_db(model(x, ends).float(), again.float()) > sqnr_db(exact.float(), out.float())


def test_beside_static_layers_of_a_converted_model() -> None:
    class Mixed(Experts):
        def __init__(self) -> None:
            super().__init__(False)
            self.fc = nn.Linear(32, 32).bfloat16()

        def forward(self, x: Tensor, ends: Tensor) -> Tensor:
            return super().forward(self.fc(x), ends)

    model, (x, ends) = Mixed().eval(), inputs()
    quantized = quantize(model, (x, ends), "static_int8", [(x, ends)], dynamic_shapes=None)
    with torch.no_grad():
        layers = explain(quantized, (x, ends), options=OPTIONS).layers
        assert [layer.lowered for layer in layers] == [True] * 3
        assert [layer.operator for layer in layers[1:]] == [OPERATOR] * 2
        out = torch.compile(quantized, backend="qframework", options=OPTIONS)(x, ends)
        assert sqnr_db(model(x, ends).float(), out.float()) > 30


def test_other_groups_need_no_compilation() -> None:
    model, (x, ends) = Experts(False).eval(), inputs()
    with torch.no_grad():
        run = torch.compile(model, backend="qframework", options=OPTIONS, fullgraph=True)
        run(x, ends)
        with torch.compiler.set_stance("fail_on_recompile"):
            for groups in ([0, 40, 40, 40], [1, 2, 3, 40], [10, 10, 10, 10]):
                given = torch.tensor(groups, dtype=torch.int32)
                some = slice(0, groups[-1])  # rows behind the last expert are zeros here and anything in PyTorch
                assert sqnr_db(model(x, given)[some].float(), run(x, given)[some].float()) > 30


def test_any_number_of_rows() -> None:
    model = Experts(False).eval()
    run = torch.compile(model, backend="qframework", options=OPTIONS, dynamic=True, fullgraph=True)
    with torch.no_grad():
        for rows in (40, 56, 80):
            assert sqnr_db(model(*inputs(rows)).float(), run(*inputs(rows)).float()) > 30


def test_a_shared_weight_is_quantized_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 32, 32).bfloat16() / 6)

        def forward(self, x: Tensor, ends: Tensor) -> Tensor:
            weight = self.weight.transpose(-2, -1)
            return F.grouped_mm(F.grouped_mm(x, weight, offs=ends), weight, offs=ends)

    calls = calls_of(Twice(), GROUPED)
    assert len(calls) == 2
    assert calls[0].args[2:4] == calls[1].args[2:4]


def test_an_input_of_two_products_is_quantized_once() -> None:
    """Gate and up projection of experts whose matrices are apart."""

    class Apart(Experts):
        def __init__(self) -> None:
            super().__init__(False)
            self.gate = nn.Parameter(self.up.detach().flip(0))

        def forward(self, x: Tensor, ends: Tensor) -> Tensor:
            gate, up = (F.grouped_mm(x, each.transpose(-2, -1), offs=ends) for each in (self.gate, self.up))
            return F.silu(gate) * up

    model = Apart()
    assert len(calls_of(model, GROUPED)) == 2
    torch._dynamo.reset()
    assert len(calls_of(model, torch.ops.qframework.dynamic_quantize.default)) == 1


def test_weights_that_the_graph_writes_stay_in_float() -> None:
    class Written(Experts):
        def forward(self, x: Tensor, ends: Tensor) -> Tensor:
            self.up.mul_(0.5)
            return super().forward(x, ends)

    model, (x, ends) = Written(False).eval(), inputs()
    with torch.no_grad():
        layers = explain(model, (x, ends), options=OPTIONS).layers
    assert [(layer.lowered, layer.reason) for layer in layers] == [(False, "the graph writes its weights"), (True, "")]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"experts": "int8_dynamic"}, "its weights would be quantized at each call"),
        ({"experts": "off", "freeze_weights": True}, "by a matrix of its own. Pass options="),
    ],
)
def test_experts_that_stay_in_float(options: dict[str, Any], reason: str) -> None:
    model, (x, ends) = Experts(False).eval(), inputs()
    with torch.no_grad():
        layers = explain(model, (x, ends), options=options).layers
        assert [layer.lowered for layer in layers] == [False, False]
        assert all(reason in layer.reason for layer in layers)
        out = torch.compile(model, backend="qframework", options=options)(x, ends)
        torch.testing.assert_close(out, model(x, ends))


def test_gradients_stay_exact() -> None:
    model, (x, ends) = Experts(False), inputs()
    run = torch.compile(model, backend="qframework", options=OPTIONS)
    run(x, ends).float().sum().backward()
    assert model.up.grad is not None
    assert model.up.grad.any()


def test_too_many_experts_say_so() -> None:
    experts = MOST_EXPERTS + 1
    model, (x, ends) = Experts(False, experts).eval(), inputs(experts, experts)
    with torch.no_grad():
        layers = explain(model, (x, ends), options=OPTIONS).layers
    assert all(f"at most {MOST_EXPERTS} experts, got {experts}" in layer.reason for layer in layers)


MODELS = {
    "Olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "GptOss": {"num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 16},
    "Qwen3Moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 16},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


@transformers_missing
@pytest.mark.parametrize(("name", "dtype"), [*((name, torch.bfloat16) for name in MODELS), ("Olmoe", torch.float16)])
def test_models_of_transformers(name: str, dtype: torch.dtype) -> None:
    """In float16 by an operator of transformers' own, which waits for the device."""
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = getattr(transformers, f"{name}Config")(
        **sizes, num_hidden_layers=2, vocab_size=100, pad_token_id=0, **MODELS[name]
    )
    config._experts_implementation = "grouped_mm"
    model = getattr(transformers, f"{name}Model")(config).to(dtype).eval().requires_grad_(False)
    ids = torch.randint(1, 100, (2, 24))
    with torch.no_grad():
        layers = [layer for layer in explain(model, (ids,), options=OPTIONS).layers if "grouped" in layer.operator]
        assert [layer.operator for layer in layers] == [OPERATOR] * 4, layers
        run = torch.compile(model, backend="qframework", options=OPTIONS)
        exact, found = (each(ids, use_cache=False).last_hidden_state.float() for each in (model, run))
        assert sqnr_db(exact, found) > 25
