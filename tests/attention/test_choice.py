"""choice.py, layer_scope.py, choice_table.py: AttentionChoice applied, compiled, exported, saved and printed."""

from __future__ import annotations

import copy
import json
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from test_adaptive import DIM, TOKENS, Attention, Net, choose
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import qframework
from qframework.attention import AttentionChoice, use_sage_attention
from qframework.errors import FileFormatError, QFrameworkError, UnsupportedError
from qframework.kernels.attention.variants import VARIANTS

BY_HAND = {"layers.0": "sage_vb", "layers.1": "off", "layers.2": "sage2_int4"}


class Operators(TorchDispatchMode):
    """The variants of sage_attention that ran, None for PyTorch's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[str | None] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        if name == "qframework.sage_attention.default":
            values = [*args, *(kwargs or {}).values()]
            self.ran.append(next(value for value in values if isinstance(value, str)))
        elif "scaled_dot_product" in name:
            self.ran.append(None)
        return func(*args, **(kwargs or {}))


def ran(model: nn.Module, x: Tensor) -> list[str | None]:
    with Operators() as operators, torch.no_grad():
        model(x)
    return operators.ran


def specs(*names: str) -> list[str | None]:
    return [None if name == "off" else VARIANTS[name].spec for name in names]


@pytest.fixture
def model() -> Net:
    return Net(*(Attention() for _ in range(3))).eval()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(3, TOKENS, DIM)


def test_is_a_mapping() -> None:
    choice = AttentionChoice(BY_HAND)
    assert dict(choice) == BY_HAND
    assert choice["layers.2"] == "sage2_int4"
    assert choice == BY_HAND
    assert "2 of 3 attention layers quantized" in str(choice)


def test_unknown_variants_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="sage_z"):
        AttentionChoice({"layers.0": "sage_z"})


# Applied -----------------------------------------------------------------------------------------------------------


def test_each_layer_runs_its_variant(model: Net, x: Tensor) -> None:
    keys = list(model.state_dict())
    assert ran(model, x) == [None] * 3
    applied = AttentionChoice(BY_HAND).apply(model)
    assert ran(model, x) == specs("sage_vb", "off", "sage2_int4")
    assert list(model.state_dict()) == keys
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert ran(twin, x) == specs("sage_vb", "off", "sage2_int4")
    applied.remove()
    applied.remove()
    assert ran(model, x) == [None] * 3


def test_other_models_and_the_process_are_untouched(model: Net, x: Tensor) -> None:
    other, attention = Net(), torch.nn.functional.scaled_dot_product_attention
    with AttentionChoice(BY_HAND).apply(model):
        assert ran(other, x) == [None] * 2
        assert torch.nn.functional.scaled_dot_product_attention is attention


def test_calls_of_one_forward_have_their_own_variants(x: Tensor) -> None:
    model = Net(Attention(calls=3))
    with AttentionChoice({"layers.0": "sage_b", "layers.0#1": "off"}).apply(model):
        for _ in range(2):
            assert ran(model, x) == specs("sage_b", "off", "sage_b"), "a call that is not listed is like the first"


def test_off_applies_inside_a_scope_and_inside_another_layer(x: Tensor) -> None:
    model = Net()
    with AttentionChoice({"layers.0": "off", "layers.1": "sage_t"}).apply(model), use_sage_attention("sage_b"):
        assert ran(model, x) == specs("off", "sage_t")
    # the model itself is a layer here, and its children are others
    choice = AttentionChoice({"scaled_dot_product_attention": "sage_b", "layers.0": "off", "layers.1": "sage_t"})
    with choice.apply(model):
        assert ran(model, x) == specs("off", "sage_t")


def test_the_scope_ends_when_forward_raises(model: Net, x: Tensor) -> None:
    with AttentionChoice(BY_HAND).apply(model):
        with pytest.raises(RuntimeError):
            model(x[..., :-1])
        assert torch._C._len_torch_function_stack() == 0
        assert ran(model, x) == specs("sage_vb", "off", "sage2_int4")


@pytest.mark.parametrize("choice", [{"0": "sage_b"}, {"0": "sage_b", "0#1": "off"}], ids=["one", "by call"])
def test_an_error_before_forward_does_not_leave_an_outer_scope(choice: dict[str, str], x: Tensor) -> None:
    def refuse(*_: Any) -> None:
        raise ValueError("refused")

    layer = nn.Sequential(Attention())
    layer[0].register_forward_pre_hook(refuse)
    AttentionChoice(choice).apply(layer)
    with use_sage_attention("off"):
        before = torch.overrides._get_current_function_mode()
        with pytest.raises(ValueError, match="refused"):
            layer(x)
        assert torch.overrides._get_current_function_mode() is before


def test_threads(model: Net, x: Tensor) -> None:
    results: list[Tensor] = []
    with torch.no_grad(), AttentionChoice(BY_HAND).apply(model):
        expected = model(x)

        def work() -> None:
            with torch.no_grad():
                results.extend(model(x) for _ in range(5))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(results) == 20
    assert all(torch.equal(result, expected) for result in results)


def test_gradients_flow(model: Net, x: Tensor) -> None:
    model(x).square().sum().backward()
    exact = model.layers[0].qkv.weight.grad.clone()
    model.zero_grad()
    with AttentionChoice({"layers.0": "sage_b"}).apply(model):
        model(x).square().sum().backward()
    got = model.layers[0].qkv.weight.grad
    assert 0 < (got - exact).norm() < 0.02 * exact.norm()


def test_missing_layers_are_named(model: Net) -> None:
    with pytest.raises(QFrameworkError, match=r"must have the module 'layers.7', got Net without it"):
        AttentionChoice({"layers.7": "sage_b"}).apply(model)
    assert not model.layers[0]._forward_hooks


def test_compiled_models_are_refused(model: Net) -> None:
    with pytest.raises(QFrameworkError, match="apply: model must not be compiled"):
        AttentionChoice(BY_HAND).apply(torch.compile(model, backend="eager"))


# Compiled, exported, saved -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", [BY_HAND, {"layers.0": "sage_b", "layers.1": "sage_b", "layers.2": "sage_vt"}])
def test_compiles_in_one_graph_either_way(model: Net, x: Tensor, choice: dict[str, str], fresh_dynamo: None) -> None:
    """Applied and then compiled, or given to the backend: the same variants, the same numbers as eagerly."""
    choice = AttentionChoice(choice)
    with torch.no_grad():
        given = torch.compile(model, backend="qframework", fullgraph=True, options={"attention": choice})
        by_option = given(x)
        report = qframework.explain(given, (x,))
        with choice.apply(model):
            eager = model(x)
            applied = torch.compile(model, backend="qframework", fullgraph=True)(x)
    torch.testing.assert_close(by_option, eager, rtol=0, atol=2e-5)
    torch.testing.assert_close(applied, eager, rtol=0, atol=2e-5)
    lowered = {layer.name: layer.operator for layer in report.layers if layer.name in choice and layer.lowered}
    assert lowered == {
        name: f"qframework::sage_attention ({variant})" for name, variant in choice.items() if variant != "off"
    }


def test_calls_with_their_own_variants_compile(x: Tensor, fresh_dynamo: None) -> None:
    model = Net(Attention(calls=2)).eval()
    with torch.no_grad(), AttentionChoice({"layers.0": "sage_vb", "layers.0#1": "sage_t"}).apply(model):
        expected = model(x)
        got = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-6)


def test_export_keeps_the_choice(model: Net, x: Tensor) -> None:
    with AttentionChoice(BY_HAND).apply(model):
        exported = torch.export.export(model, (x,)).module()
    assert ran(exported, x) == specs("sage_vb", "off", "sage2_int4")


def test_exported_graphs_are_rewritten_and_restored(model: Net, x: Tensor) -> None:
    exported = torch.export.export(model, (x,)).module()
    before = exported.code
    with AttentionChoice(BY_HAND).apply(exported):
        assert ran(exported, x) == ["sage_vb", None, "sage2_int4"]
    assert exported.code == before
    assert ran(exported, x) == [None] * 3
    with pytest.raises(QFrameworkError, match=r"the graph must have the attention layers 'layers.7', got 'layers.0'"):
        AttentionChoice({"layers.7": "sage_b"}).apply(exported)


def test_a_shared_module_in_every_form(x: Tensor, fresh_dynamo: None) -> None:
    """One module with two paths: hooks, a graph and the backend agree."""
    shared = Attention()
    model = Net(shared, shared).eval()
    choice = choose(model, [x], variants=["sage_b"])
    exported = torch.export.export(model, (x,)).module()
    with choice.apply(model), choice.apply(exported):
        assert ran(model, x) == specs("sage_b", "sage_b")
        assert ran(exported, x) == ["sage_b", "sage_b"]
    compiled = torch.compile(model, backend="qframework", options={"attention": choice})
    assert (
        sum(
            layer.operator == "qframework::sage_attention (sage_b)"
            for layer in qframework.explain(compiled, (x,)).layers
        )
        == 2
    )


def test_a_module_that_is_used_in_a_loop(x: Tensor) -> None:
    class Loop(Net):
        def forward(self, x: Tensor) -> Tensor:
            return self.layers[0](self.layers[0](x))

    exported = torch.export.export(Loop(Attention()).eval(), (x,)).module()
    AttentionChoice({"layers.0": "sage_b"}).apply(exported)
    assert ran(exported, x) == ["sage_b", "sage_b"]


def test_saved_and_loaded_with_the_model(model: Net, x: Tensor, tmp_path: Path) -> None:
    """The graph holds the operators and the file the measurements."""
    exported = torch.export.export(model, (x,)).module()
    choice = choose(exported, [x])
    choice.apply(exported)
    path = tmp_path / "model.pt2"
    qframework.save(exported, path, (x,), config={"attention": choice.to_dict()})
    loaded = qframework.load(path)
    assert ran(loaded, x) == list(choice.values())
    with torch.no_grad():
        assert torch.equal(loaded(x), exported(x))
    from qframework.serialization import read_metadata

    kept = AttentionChoice.from_dict(read_metadata(path)["config"]["attention"])
    assert kept.to_dict() == choice.to_dict()


def test_json(model: Net, x: Tensor, tmp_path: Path) -> None:
    choice = choose(model, [x])
    choice.save(tmp_path / "choice.json")
    loaded = AttentionChoice.load(tmp_path / "choice.json")
    assert loaded.layers == choice.layers
    assert loaded.criteria == choice.criteria == {"threshold": 0.998}
    assert str(loaded) == str(choice)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "choice.json is not an attention choice"),
        ("[]", "choice.json: not an attention choice: it has no format number"),
        ('{"format": 99, "layers": {}}', "format must be at most 2, got 99"),
        ('{"format": 1}', "KeyError: 'layers'"),
        ('{"format": 1, "layers": {"a": {"variant": "sage_b", "speed": 1}}}', "unknown entries: speed"),
        ('{"format": 1, "layers": {"a": {}}}', "not an attention choice: TypeError"),
    ],
)
def test_invalid_files_are_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "choice.json"
    path.write_text(text)
    with pytest.raises(FileFormatError, match=message):
        AttentionChoice.load(path)


def test_a_variant_of_a_newer_version(tmp_path: Path) -> None:
    path = tmp_path / "choice.json"
    path.write_text(json.dumps({"format": 1, "layers": {"a": {"variant": "sage9"}}}))
    with pytest.raises(UnsupportedError, match="sage9"):
        AttentionChoice.load(path)


def test_tables(model: Net, x: Tensor) -> None:
    from qframework.attention.choice_table import text

    choice = choose(model, [x])
    detailed = text(choice.table(details=True))
    for number in ("relative L1", "RMSE", "cosine", *(f"layers.{i}" for i in range(3))):
        assert number in detailed
    assert detailed.count("yes") == 3
