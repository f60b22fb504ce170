"""Shared by tests of attention in graphs: lowering without Inductor, error bounds, modules with one attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional as F

from qframework.backend.compile import lower
from qframework.backend.options import BackendOptions
from qframework.backend.report import LayerReport, Report

SAGE = torch.ops.qframework.sage_attention.default
# INT8 Q and K with a scale per token; P, V and all sums in float32 where V is: its error is that of Q and K alone.
VARIANT = "8-per_token-fp16-fp32"


class Capture:
    """A backend that lowers and keeps the graphs and their reports; what it made of a graph runs in eager mode."""

    def __init__(self, attention: str = VARIANT, edit: Callable[[GraphModule], None] | None = None) -> None:
        self.options = BackendOptions(attention=attention)
        self.edit = edit
        self.graphs: list[GraphModule] = []
        self.reports: list[list[LayerReport]] = []

    def __call__(self, gm: GraphModule, example_inputs: Any) -> Callable[..., Any]:
        reports = lower(gm, example_inputs, self.options)
        self.graphs.append(gm)
        self.reports.append(reports)
        if self.edit is not None:
            self.edit(gm)
            gm.recompile()
        return gm.forward

    @property
    def attention(self) -> list[LayerReport]:
        """Rows on attention in the last graph."""
        return Report(self.reports[-1]).of("attention").layers

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The operator's calls in the last graph, by argument."""
        names = [argument.name for argument in SAGE._schema.arguments]
        nodes = [node for node in self.graphs[-1].graph.nodes if node.target is SAGE]
        return [dict(zip(names, node.args, strict=False)) for node in nodes]

    def names(self) -> str:
        """All targets of the last graph, to search in."""
        return " ".join(str(node.target) for node in self.graphs[-1].graph.nodes if node.op.startswith("call"))


def compiled(model: Callable[..., Any], *inputs: Any, attention: str = VARIANT) -> tuple[Any, Capture]:
    """What the lowered model gives, and what was captured on the way."""
    capture = Capture(attention)
    with torch.no_grad():
        return torch.compile(model, backend=capture, fullgraph=True)(*inputs), capture


def exported(model: nn.Module, *inputs: Tensor) -> nn.Module:
    """The ATen dialect, with a batch of any size."""
    batch = torch.export.Dim("batch", min=1, max=512)
    return torch.export.export(model.eval(), inputs, dynamic_shapes=tuple({0: batch} for _ in inputs)).module()


def error_bound(q: Tensor, k: Tensor, v: Tensor, scale: float) -> float:
    """How far quantizing Q and K per token can move any output.

    A rounding error is half a step s, so that a logit moves by at most
    e = scale * (|q|_1 s_k / 2 + |k|_1 s_q / 2 + D s_q s_k / 4); each weight then moves by a factor within exp(+-2 e).
    The last term is what float32 (and V's rounding) may add.
    """
    k = k - k.mean(-2, keepdim=True)
    s_q, s_k = (x.abs().amax(-1) / 127 for x in (q, k))
    one_q, one_k = q.abs().sum(-1), k.abs().sum(-1)
    e = one_q.amax() * s_k.amax() / 2 + one_k.amax() * s_q.amax() / 2 + q.shape[-1] * s_q.amax() * s_k.amax() / 4
    return float((torch.exp(2 * e * scale) - 1 + 2**-9) * v.abs().amax())


def randomize(model: nn.Module) -> nn.Module:
    """Weights with which attention matters: initial ones make it a mean, and layer scales hide it."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(noise * 1.5 / parameter[0].numel() ** 0.5)
            else:
                parameter.copy_(noise * 0.2 + (0 if "bias" in name else 1))
    return model.eval()


class Attention(nn.Module):
    """Multi-head attention with a learned bias."""

    def __init__(self, dim=32, heads=2, tokens=17):
        super().__init__()
        self.qkv, self.proj, self.heads = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), heads
        self.bias = nn.Parameter(torch.randn(heads, tokens, tokens))

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, self.bias)
        return self.proj(out.transpose(1, 2).flatten(2))


def product(q, k):
    """The logits, not scaled."""
    return q @ k.transpose(-2, -1)


def qkv(batch: int = 2, heads: int = 2, tokens: int = 17, dim: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, batch, heads, tokens, dim, generator=generator)
    return q, k, v


def sage(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
    """The operator itself."""
    return SAGE(q, k, v, **{"variant": VARIANT, **kwargs})[0]
