"""Compiles and runs each case, in a process of its own, and prints what PyTorch's caches of compiled graphs did.

``python compile_once.py OUTPUTS CASE[+SEED][@VERSION] ...``: outputs go to a file of tensors; with a seed, the model
has other weights; with a version, the case is compiled as if by that version of the package. The last line is JSON:
``{case: {counter: number}}``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from lowered_models import Block, converted, example
from torch import Tensor, nn
from torch._dynamo.utils import counters

import qframework
from qframework.numerics import sqnr_db
from qframework.quantizer import dynamic_int8, static_int8


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 16).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))


class Operators(nn.Module):
    """A model that calls an operator of the package itself, which only its own backend decomposes."""

    def forward(self, x: Tensor) -> Tensor:
        q, scale = torch.ops.qframework.dynamic_quantize(x.relu(), "per_token")
        return q * scale


def _compiled(model: nn.Module, backend: str = "qframework", **options: Any) -> Callable[[Tensor], Tensor]:
    return torch.compile(model, backend=backend, options=options or None, fullgraph=True)


def _converted(config: Any) -> Callable[[Tensor], Tensor]:
    return _compiled(converted(Block(), example(), config))


DYNAMIC = {"linear": "int8_dynamic"}
CASES: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "static": lambda: _converted(static_int8()),
    "dynamic": lambda: _converted(dynamic_int8()),
    "following": lambda: _compiled(Block().eval(), **DYNAMIC),
    "frozen": lambda: _compiled(Block().eval(), **DYNAMIC, freeze_weights=True),
    "repeated blocks": lambda: _compiled(nn.Sequential(*(Block() for _ in range(9))).eval(), **DYNAMIC),
    "attention": lambda: _compiled(Attention().eval(), attention="sage_b"),
    "gradients": lambda: _compiled(Attention().eval(), attention="sage_b"),
    "inductor": lambda: _compiled(Block().eval(), "inductor"),
    "float": lambda: _compiled(Block().eval()),
    "inductor, our operators": lambda: _compiled(Operators().eval(), "inductor"),
    "our operators": lambda: _compiled(Operators().eval()),
}


def run(case: str, seed: int) -> tuple[Tensor, dict[str, int]]:
    """The output of a case, or the gradient of its input, and the counters of PyTorch's caches."""
    torch.compiler.reset()
    counters.clear()
    torch.manual_seed(seed)
    compiled, x = CASES[case](), example()
    with torch.set_grad_enabled(case == "gradients"):
        y = compiled(x.requires_grad_(case == "gradients"))
        if hasattr(compiled, "_orig_mod"):  # a converted model is its own reference; others are float
            assert sqnr_db(compiled._orig_mod(x), y) > (60 if case in ("static", "dynamic") else 25), case
    if case == "gradients":
        (y,) = torch.autograd.grad(y.square().sum(), x)
    caches = {**counters["inductor"], **counters["aot_autograd"]}
    return y, {name: number for name, number in caches.items() if "cache" in name}


if __name__ == "__main__":
    found, outputs = {}, {}
    for argument in sys.argv[2:]:
        case, _, version = argument.partition("@")
        if version:
            qframework.__version__ = version
        case, _, seed = case.partition("+")
        outputs[argument], found[argument] = run(case, int(seed or 0))
    torch.save(outputs, sys.argv[1])
    print(json.dumps(found))
