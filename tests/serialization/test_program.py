"""The program in a saved model: what ``torch.export`` writes is kept, anything else is refused, and nothing is run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile_files import CODE, OFFSET, PROGRAM, X, changed, code_ran, write
from program_changes import call, check_refused, node, operand, rename, structure, tensor
from saved_models import rewrite
from torch import Tensor, nn
from torch.utils._pytree import tree_structure, treespec_dumps

import qframework
from qframework.errors import FileFormatError
from qframework.serialization import grammar


def test_sizes_of_convolutions_and_odd_names_are_kept(tmp_path: Path) -> None:
    class Stem(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module("x(1)", nn.Sequential(*(nn.Conv2d(3, 3, 3, stride=2) for _ in range(4))))

        def forward(self, x: Tensor) -> Tensor:
            return self.get_submodule("x(1)")(x).flatten(2).transpose(1, 2).reshape(-1, 3)

    dynamic = torch.export.Dim.DYNAMIC
    shapes = ({0: dynamic, 2: dynamic, 3: dynamic},)
    stem, x = Stem(), torch.rand(2, 3, 95, 101)
    qframework.save(torch.export.export(stem, (x,), dynamic_shapes=shapes), tmp_path / "m.pt2", ())
    loaded = qframework.load(tmp_path / "m.pt2")
    x = torch.rand(3, 3, 80, 70)
    torch.testing.assert_close(loaded(x), stem(x))


def test_tuples_of_pytorch_are_kept(tmp_path: Path) -> None:
    class Largest(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, torch.return_types.topk]:
            return x + 1, torch.topk(x, 2)

    x = torch.rand(5)
    try:
        treespec_dumps(tree_structure(torch.topk(x, 2)))
    except NotImplementedError as error:
        pytest.skip(f"this PyTorch cannot save them: {error}")
    qframework.save(torch.export.export(Largest(), (x,)), tmp_path / "m.pt2", ())
    loaded = qframework.load(tmp_path / "m.pt2")
    torch.testing.assert_close(loaded(x), Largest()(x))
    assert type(loaded(x)[1]) is torch.return_types.topk


def test_conditions_on_inputs_are_kept(tmp_path: Path) -> None:
    class Pair(nn.Module):
        def forward(self, x: Tensor, y: dict[str, Tensor]) -> Tensor:
            if x.shape[0] == 2 * y["a"].shape[0]:
                return x.sum() + y["a"].sum()
            return x

    x, y = torch.randn(4, 3), {"a": torch.randn(2, 3)}
    shapes = {"x": {0: torch.export.Dim.DYNAMIC}, "y": {"a": {0: torch.export.Dim.DYNAMIC}}}
    qframework.save(torch.export.export(Pair(), (x, y), dynamic_shapes=shapes), tmp_path / "m.pt2", ())
    model = qframework.load(tmp_path / "m.pt2")
    assert torch.equal(model(x, y), Pair()(x, y))
    with pytest.raises((AssertionError, RuntimeError)):
        model(torch.randn(5, 3), y)


def test_a_program_that_pytorch_cannot_read_is_refused(saved: Path) -> None:
    rewrite(saved, "/models/model.json", lambda data: data.replace(b"torch.ops.aten.linear", b"torch.ops.aten.lineal"))
    with pytest.raises(FileFormatError, match=r"model\.pt2: PyTorch .* cannot load the program.*written by qframework"):
        qframework.load(saved)


def expression(text: str) -> Callable[[Any], None]:
    return lambda program: tensor(program).update(sizes=[{"as_expr": {"expr_str": text, "hint": {"as_int": 2}}}])


PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "expression": expression(CODE),
    "expression in a range": lambda p: p["range_constraints"].update({CODE: {"min_val": 2, "max_val": None}}),
    "counter of symbols": lambda p: p["range_constraints"].update({"u9999999999": {"min_val": 2, "max_val": None}}),
    "guard": lambda p: p.update(guards_code=[CODE]),
    "name of a submodule": lambda p: rename(p, "submod_1", f"a\n    {CODE}\n    b"),
    "module stack": lambda p: node(p)["metadata"].update(nn_module_stack=f'a,b,c"\n{CODE}\n"'),
    "operator as a value": lambda p: operand(p, as_operator="torch.hub.load"),
    "custom object": lambda p: operand(p, as_custom_obj={"name": "x", "class_fqn": "__torch__.torch.classes.a.B"}),
    "custom object as an input": lambda p: p["graph_module"]["signature"]["input_specs"].append(
        {"custom_obj": {"arg": {"name": "x", "class_fqn": "a"}, "custom_obj_name": "x"}}
    ),
    "enumeration from a module": lambda p: call(p).update(
        out_spec=structure("builtins.dict", json.dumps({"__enum__": True, "fqn": "canary_module:A", "name": "A"}))
    ),
    "enumeration as a key": lambda p: call(p).update(
        out_spec=structure("builtins.dict", json.dumps([{"__enum__": True, "fqn": "canary_module:A", "name": "A"}]))
    ),
    "enumeration in a tuple": lambda p: call(p).update(
        out_spec=structure("builtins.tuple", json.dumps({"__enum__": True, "fqn": "canary_module:A", "name": "A"}))
    ),
    "default from a module": lambda p: call(p).update(
        out_spec=structure(
            "collections.defaultdict",
            json.dumps({"default_factory_module": "canary_module", "default_factory_name": "A", "dict_context": ["a"]}),
        )
    ),
    "named tuple": lambda p: call(p).update(out_spec=structure("collections.namedtuple", '"canary_module.A"')),
    "unknown container": lambda p: call(p).update(out_spec=structure("canary_module.A", "null")),
    "key with quotes": lambda p: call(p).update(
        in_spec=call(p)["in_spec"].replace('\\"by\\"', '\\"it\'s \\\\\\"by\\"')
    ),
    "keyword with code": lambda p: call(p).update(
        in_spec=call(p)["in_spec"].replace('\\"offset\\"', json.dumps(json.dumps(f"a={CODE}"))[1:-1])
    ),
    "other protocol": lambda p: call(p).update(out_spec=call(p)["out_spec"].replace("[1,", "[2,", 1)),
    "deep structure": lambda p: call(p).update(out_spec="[" * 50_000),
    "no call": lambda p: p["graph_module"].update(module_call_graph=[]),
    "verifier": lambda p: p.update(verifiers=["canary_module"]),
    "no verifier": lambda p: p.update(verifiers=[]),
}


@pytest.mark.usefixtures("canary_module")
@pytest.mark.parametrize("attack", PROGRAMS.values(), ids=PROGRAMS)
def test_programs_that_save_does_not_write_are_refused(tmp_path: Path, attack: Callable[[Any], Any]) -> None:
    check_refused(tmp_path, attack)


@pytest.mark.usefixtures("canary_module")
def test_metadata_of_nodes_is_dropped(tmp_path: Path) -> None:
    def change(program: Any) -> None:
        for each in program["graph_module"]["graph"]["nodes"]:
            each["metadata"].update(
                stack_trace=f'"""\n{CODE}\n',
                source_fn_stack="a,torch.hub.load",
                torch_fn=CODE,
                custom="[",
                from_node="[",
            )
        program["graph_module"]["metadata"] = {"custom": "["}
        program["unknown"] = {"a": CODE}

    write(tmp_path / "m.pt2", changed(PROGRAM, change))
    model = qframework.load(tmp_path / "m.pt2")
    model(X, offset=OFFSET)
    assert not code_ran()
    assert not any("source_fn_stack" in each.meta or "stack_trace" in each.meta for each in model.graph.nodes)


GRAD = "torch.ops.higher_order.wrap_with_set_grad_enabled"


def by_position(**value: Any) -> dict[str, Any]:
    return {"name": "", "arg": value, "kind": 1}


def graph(*nodes: Any) -> dict[str, Any]:
    empty: dict[str, Any] = {"tensor_values": {}, "sym_int_values": {}, "sym_bool_values": {}}
    return {"inputs": [], "outputs": [], "nodes": list(nodes), **empty}


def scope(*inputs: Any, target: str = GRAD) -> dict[str, Any]:
    return {"target": target, "inputs": list(inputs), "outputs": [], "metadata": {}}


def wrapped(inside: Any, name: str = "submod_7") -> dict[str, Any]:
    return by_position(as_graph={"name": name, "graph": inside})


def nested(depth: int) -> dict[str, Any]:
    inner = scope(target="torch.ops.aten.relu.default")  # has no operand
    for _ in range(depth):
        inner = scope(by_position(as_bool=True), wrapped(graph(inner)))
    return inner


FLAG = by_position(as_bool=True)


SCOPES: dict[str, Any] = {
    "a tensor's method": scope(FLAG, wrapped(graph(), "tofile")),
    "a module's method": scope(FLAG, wrapped(graph(), "to_folder")),
    "no graph": scope(FLAG),
    "a tensor for a graph": scope(FLAG, by_position(as_tensor={"name": "x"})),
    "two graphs": scope(FLAG, wrapped(graph()), wrapped(graph(), "submod_8")),
    "graph first": scope(wrapped(graph()), FLAG),
    "graph by name": scope(FLAG, {**wrapped(graph()), "name": "wrapped_func"}),
    "text": scope(FLAG, wrapped(graph()), by_position(as_string="/tmp/x")),
    "graph of an operator": scope(wrapped(graph()), target="torch.ops.aten.relu.default"),
    "autocast of a file": scope(
        *(by_position(as_string="/tmp/x"), by_position(as_none=True), FLAG, FLAG, wrapped(graph())),
        target="torch.ops.higher_order.wrap_with_autocast",
    ),
    "deep": nested(20),
}


@pytest.mark.parametrize("node", SCOPES.values(), ids=SCOPES)
def test_scopes_that_export_does_not_write_are_refused(tmp_path: Path, node: Any) -> None:
    def change(program: Any) -> None:
        program["graph_module"]["graph"]["nodes"].insert(0, node)

    write(tmp_path / "m.pt2", changed(PROGRAM, change))
    with pytest.raises(FileFormatError, match=r"as_graph|inputs|nested at most") as caught:
        qframework.load(tmp_path / "m.pt2")
    assert len(str(caught.value)) < 2000
    assert isinstance(caught.value.__cause__, FileFormatError)  # PyTorch never saw it


def test_generated_source_that_hides_a_name_it_needs_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for names that the list lacks."""
    monkeypatch.setattr(grammar, "_NEEDED", set())
    write(tmp_path / "m.pt2", changed(PROGRAM, lambda p: rename(p, "linear", "self")))
    with pytest.raises(FileFormatError, match="'self'"):
        qframework.load(tmp_path / "m.pt2")
