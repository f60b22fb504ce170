"""What each module of a transformer block is for the INT8 data flow, told by what it computes rather than by its name.

An activation or a normalization is taken for what it does to a few numbers, so that a GELU under any class is found and
an RMSNorm that scales by ``1 + weight`` is not mistaken for one that scales by ``weight``. Names decide one thing only:
what lies inside attention, which computes in 16 bits.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

Role = Literal["linear", "conv1d", "layer_norm", "rms_norm", "activation", "dropout", "layer_scale", "drop_path"]
GATED = ("gate_proj", "up_proj", "down_proj", "act_fn")
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
}
# GELU and its tanh approximation are up to 5e-4 apart; FP32 formulas of one function less than this.
_SAME = 2e-5
_ATTENTION = ("attn", "attention", "self_attn", "crossattention", "cross_attn")
# The last linear of attention: its result goes on as INT8. Those before it give queries, keys and values, in 16 bits.
_ATTENTION_OUTPUTS = ("proj", "o_proj", "out_proj", "c_proj", "dense", "wo", "to_out", "o", "out")


def in_attention(name: str) -> bool:
    """Whether ``name``, of a module inside a block, lies inside attention."""
    return any(part in _ATTENTION for part in name.split(".")[:-1])


def gives_blocks(name: str) -> bool:
    """Whether what the linear ``name`` gives goes on as INT8: all but queries, keys and values."""
    return not in_attention(name) or any(part in _ATTENTION_OUTPUTS for part in name.split(".")[-2:])


def is_block(module: nn.Module) -> bool:
    """Whether a module is a transformer block: normalizations, attention with a linear, linears beside it."""
    children = dict(module.named_children())
    if not any("norm" in type(child).__name__.lower() for child in children.values()):
        return False
    attentions = [child for name, child in children.items() if name in _ATTENTION]
    others = [child for name, child in children.items() if name not in _ATTENTION]
    return any(map(_has_linear, attentions)) and any(map(_has_linear, others))


def _has_linear(module: nn.Module) -> bool:
    return any(linear_role(child) for child in module.modules())


def role_of(module: nn.Module) -> Role | None:
    """What ``module`` is, None where there is no INT8 module that computes the same."""
    if parametrize.is_parametrized(module):
        return None
    kind = type(module).__name__
    if kind == "LayerScale" and isinstance(getattr(module, "gamma", None), nn.Parameter):
        return "layer_scale"
    if kind in ("DropPath", "StochasticDepth") and hasattr(module, "drop_prob"):
        return "drop_path"
    if type(module).forward is nn.Dropout.forward:
        return "dropout"
    if activation_kind(module) is not None:
        return "activation"
    return linear_role(module) or norm_role(module)


def linear_role(module: nn.Module) -> Role | None:
    """``"linear"`` for nn.Linear and its subclasses that compute the same, ``"conv1d"`` for GPT-2's, else None."""
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return "linear"
    weight = getattr(module, "weight", None)
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf") and isinstance(weight, Tensor):
        return "conv1d" if weight.dim() == 2 else None
    return None


def norm_role(module: nn.Module) -> Role | None:
    """``"layer_norm"`` or ``"rms_norm"`` over the last dimension with a weight, else None."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, nn.Parameter) or weight.dim() != 1 or any(True for _ in module.children()):
        return None
    if isinstance(module, nn.LayerNorm) and _computes(module, _layer_norm):
        return "layer_norm"
    if "RMSNorm" in type(module).__name__ and _computes(module, _rms_norm):
        return "rms_norm"
    return None


def norm_eps(module: nn.Module) -> float:
    """The epsilon of a normalization; that of FP32 where nn.RMSNorm leaves it open."""
    eps = getattr(module, "eps", getattr(module, "variance_epsilon", None))
    return torch.finfo(torch.float32).eps if eps is None else float(eps)


def activation_kind(module: nn.Module) -> str | None:
    """The name in ACTIVATIONS of what ``module``, which has no parameters and no children, computes; else None."""
    name = type(module).__name__.lower()
    if not any(part in name for part in ("gelu", "silu", "swish", "relu", "activation")):
        return None
    if any(True for _ in module.parameters()) or any(True for _ in module.children()):
        return None
    x = torch.linspace(-6, 6, 97)
    try:
        with torch.no_grad():
            y = module(x.clone())
    except (TypeError, ValueError, RuntimeError):  # not a function of one tensor
        return None
    return next((kind for kind, function in ACTIVATIONS.items() if _same(y, function(x))), None)


def is_gated_mlp(module: nn.Module) -> bool:
    """Whether ``module`` is ``down_proj(act_fn(gate_proj(x)) * up_proj(x))``, as in Llama; tried on small linears."""
    children = dict(module.named_children())
    if set(children) != set(GATED) or any(True for _ in module.parameters(recurse=False)):
        return False
    if activation_kind(children["act_fn"]) is None or not all(linear_role(children[name]) for name in GATED[:-1]):
        return False
    probe = copy.copy(module)
    gate, up, down = nn.Linear(3, 5), nn.Linear(3, 5), nn.Linear(5, 3)
    probe._modules = dict(zip(GATED, (gate, up, down, children["act_fn"]), strict=True))
    x = torch.linspace(-2, 2, 6).view(2, 3)
    with torch.no_grad():
        try:
            return _same(probe(x), down(children["act_fn"](gate(x)) * up(x)))
        except (TypeError, ValueError, RuntimeError, AttributeError):
            return False


def _computes(module: nn.Module, formula: Callable[[nn.Module, Tensor], Tensor]) -> bool:
    """Whether a copy of ``module`` with random parameters gives what ``formula`` gives; also on meta."""
    probe = copy.deepcopy(module).to_empty(device="cpu").float()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in probe.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
        x = torch.randn(3, probe.get_parameter("weight").shape[0], generator=generator)
        try:
            return _same(probe(x), formula(probe, x))
        except (TypeError, ValueError, RuntimeError, AttributeError):
            return False


def _layer_norm(module: nn.Module, x: Tensor) -> Tensor:
    weight = module.get_parameter("weight")
    return F.layer_norm(x, weight.shape, weight, module.bias, norm_eps(module))  # type: ignore[arg-type]


def _rms_norm(module: nn.Module, x: Tensor) -> Tensor:
    return module.get_parameter("weight") * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm_eps(module))


def _same(x: Tensor, y: Tensor) -> bool:
    return isinstance(x, Tensor) and x.shape == y.shape and bool(((x - y).abs() <= _SAME * (1 + y.abs())).all())


def units(block: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The smallest modules of a block, exchanged or kept as one: leaves, and what reads the weights of its linears.

    Names start with ``prefix``. nn.MultiheadAttention is one of those: it calls no linear.
    """
    for name, child in block.named_children():
        path = f"{prefix}.{name}" if prefix else name
        if reads_weights(child) or not any(True for _ in child.children()):
            yield path, child
        else:
            yield from units(child, path)


def reads_weights(module: nn.Module) -> bool:
    """Whether ``forward`` takes a weight from a module, instead of calling it."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "weight" in code.co_names
