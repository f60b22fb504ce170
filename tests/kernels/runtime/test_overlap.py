"""Programmatic dependent launch: kernels start early, but access memory only after the previous kernel is done."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from qframework import kernels
from qframework.kernels.runtime import launch as _launch
from qframework.kernels.runtime import overlap as _overlap
from qframework.kernels.runtime.launch import OPTIONS, launch

CAN, CANNOT = ("cuda", 90), ("cuda", 89)


class Kernel:
    """Records how it was launched, through Triton and past it."""

    def __init__(self, *arg_names):
        self.arg_names = arg_names
        self.through, self.past = [], []

    def __getitem__(self, grid):
        def first(*arguments, **named):
            self.through.append((arguments, named))
            return {(1, 1, 1): lambda *arguments: self.past.append(arguments)}

        return first


@pytest.fixture
def chip(monkeypatch):
    """``chip(target)`` makes Triton's target the current device's."""

    def use(target):
        monkeypatch.setattr(_overlap, "current_target", lambda: SimpleNamespace(backend=target[0], arch=target[1]))
        monkeypatch.setattr(_overlap, "INTERPRET", False)
        monkeypatch.setattr(_overlap, "gdc_wait", object())
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
        monkeypatch.setattr(_launch, "_compiled", {})

    return use


@pytest.mark.parametrize("target", [CAN, ("cuda", 120), CANNOT], ids=str)
def test_constants_and_options_of_first_and_repeated_launches(chip, target):
    chip(target)
    can = target[0] == "cuda" and target[1] >= 90
    options = OPTIONS | ({"launch_pdl": True} if can else {})
    kernel, x = Kernel("x", "n", "BLOCK", "OVERLAP"), torch.zeros(8)
    for _ in range(2):
        launch(kernel, (1,))(x, 16, BLOCK=64, num_warps=4)
    assert kernel.through == [((x, 16), {"BLOCK": 64, "num_warps": 4, "OVERLAP": can} | options)]
    assert kernel.past == [(x, 16, 64, can)]


def test_a_kernel_without_the_parameter_is_launched_normally(chip):
    chip(CAN)
    kernel = Kernel("x", "BLOCK")
    launch(kernel, (1,))(torch.zeros(8), BLOCK=64)
    assert [named for _, named in kernel.through] == [{"BLOCK": 64} | OPTIONS]


def functions() -> dict[str, tuple[ast.FunctionDef, list[ast.FunctionDef]]]:
    """The package's kernels by module and name, each with the functions that it hands ``OVERLAP``."""
    package = Path(kernels.__file__).parent
    trees = {path: ast.parse(path.read_text()) for path in sorted(package.rglob("*.py"))}
    defined = {path: {node.name: node for node in walk(tree, ast.FunctionDef)} for path, tree in trees.items()}
    found = {}
    for path, tree in trees.items():
        known = dict(defined[path])
        for imported in walk(tree, ast.ImportFrom):
            source = package.parents[1] / f"{imported.module.replace('.', '/')}.py"
            for alias in imported.names:
                if alias.name in defined.get(source, {}):
                    known[alias.name] = defined[source][alias.name]
        for name, function in defined[path].items():
            if name.startswith("_") and name.endswith("_kernel"):
                handed = {ast.unparse(call.func) for call in calls(function) if is_handed(call)} & set(known)
                found[f"{path.stem}.{name}"] = function, [known[each] for each in sorted(handed)]
    return found


def walk(tree: ast.AST, kind: type) -> list:
    return [node for node in ast.walk(tree) if isinstance(node, kind)]


def calls(function: ast.FunctionDef) -> list[ast.Call]:
    return walk(function, ast.Call)


def is_handed(call: ast.Call) -> bool:
    """Whether the last argument is ``OVERLAP``."""
    return bool(call.args) and ast.unparse(call.args[-1]) == "OVERLAP"


def test_every_kernel_opts_in():
    for name, (function, handed) in functions().items():
        assert function.args.args[-1].arg == "OVERLAP", name
        assert isinstance(function.args.defaults[-1], ast.Constant), name
        waits = [ast.unparse(call) for each in (function, *handed) for call in calls(each)]
        assert waits.count("wait_for_previous_kernel(OVERLAP)") == 1, name
    assert len(functions()) > 20


def chain(m: int):
    """24 products, each of the previous result, in two buffers per width, which they read and overwrite."""
    from qframework.kernels.linear.arguments import Int8LinearArguments
    from qframework.kernels.linear.launch import write_result

    widths = [768, *(3072, 768, 768, 768) * 6]
    buffers = {n: [torch.empty(m, n, dtype=torch.int8, device="cuda") for _ in range(2)] for n in (768, 3072)}
    x = last = torch.empty(m, 768, dtype=torch.int8, device="cuda")
    steps = []
    for i, (k, n) in enumerate(itertools.pairwise(widths)):
        weight = torch.randint(-127, 128, (n, k), dtype=torch.int8, device="cuda")
        scales = torch.ones(1, device="cuda"), torch.full((n,), 1 / (73 * 73 * k**0.5), device="cuda")
        out_scale = torch.full((1,), 0.015, device="cuda")
        operands = Int8LinearArguments(last, scales[0], weight, scales[1], out_scale=out_scale)
        out = next(buffer for buffer in buffers[n][:: 1 - 2 * (i % 2)] if buffer is not last)
        steps.append((operands, out))
        last = out

    def run(one_at_a_time: bool = False) -> None:
        for operands, out in steps:
            write_result(operands, out)
            if one_at_a_time:
                torch.cuda.synchronize()

    return x, run, last


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 197, 1576, 12608])
def test_kernels_wait_for_one_another(m):
    x, run, last = chain(m)
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(10):
        x.random_(-127, 128)
        run(one_at_a_time=True)
        expected = last.clone()
        assert expected.count_nonzero() > expected.numel() / 2
        for again in (run, graph.replay):
            last.zero_()
            again()
            assert_close(last, expected, rtol=0, atol=0)


@pytest.mark.gpu
def test_kernels_wait_for_others():
    """Kernels of torch write their operands and read their results."""
    from qframework.kernels.quantize import dynamic_quantize

    x = torch.randn(197, 768, device="cuda", dtype=torch.half)
    for _ in range(200):
        y = x * 2
        q, scale = dynamic_quantize(y)
        back = q.float() * scale.reshape(-1, 1)
        y.zero_()
        assert float((back - 2 * x.float()).abs().max()) <= float(scale.max()) * 0.51
