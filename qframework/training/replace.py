"""The INT8 module for each float one, with the same parameters, and the way back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from qframework.errors import UnsupportedError
from qframework.training.linear import Int8Conv1D, Int8Linear
from qframework.training.linear_baselines import PerTensorConv1D, PerTensorLinear, PerTokenConv1D, PerTokenLinear
from qframework.training.roles import gives_blocks, role_of
from qframework.training.scale import Int8DropPath, Int8LayerScale

# Under this name an INT8 module keeps the float module it stands for, without its parameters; no submodule.
FLOAT_MODULE = "_float_module"


def replacement(module: nn.Module, name: str, mode: str, block_size: int) -> nn.Module:
    """The INT8 module for ``module``, which lies at ``name`` inside its block.

    Args:
        module: of a role that roles.role_of knows.
        name: tells linears that give queries, keys and values.
        mode: per_block, per_tensor or per_token.
        block_size: of per_block.
    """
    role = role_of(module)
    if role is None:
        raise UnsupportedError(f"{name} ({type(module).__name__}): no INT8 module computes the same")
    if mode == "per_block":
        return _standing_for(_MAKERS[role](module, name, block_size), module)
    return _standing_for(_BASELINES[mode, role].from_float(module), module)


def _standing_for(new: nn.Module, module: nn.Module) -> nn.Module:
    """``new`` with the mode and hooks of ``module``, which it keeps without its parameters: they are ``new``'s now."""
    new.train(module.training)
    for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
        getattr(new, hooks).update(getattr(module, hooks))
    module._parameters.update(dict.fromkeys(module._parameters))
    new.__dict__[FLOAT_MODULE] = module
    return new


def float_again(new: nn.Module) -> nn.Module:
    """The float module that ``new`` stands for, with the parameters and the mode that ``new`` has now."""
    module: nn.Module = new.__dict__[FLOAT_MODULE]
    module._parameters.update(new._parameters)
    return module.train(new.training)


def _linear(module: Any, name: str, block_size: int) -> nn.Module:
    kind = Int8Linear if isinstance(module, nn.Linear) else Int8Conv1D
    return kind.from_float(module, block_size, "block" if gives_blocks(name) else "float")


def _layer_scale(module: Any, name: str, block_size: int) -> nn.Module:
    return Int8LayerScale(module.gamma, block_size)


def _drop_path(module: Any, name: str, block_size: int) -> nn.Module:
    return Int8DropPath(module.drop_prob, getattr(module, "scale_by_keep", True), block_size)


_MAKERS: dict[str, Callable[[Any, str, int], nn.Module]] = {
    "linear": _linear,
    "conv1d": _linear,
    "layer_scale": _layer_scale,
    "drop_path": _drop_path,
}
_BASELINES: dict[tuple[str, str], Any] = {
    ("per_tensor", "linear"): PerTensorLinear,
    ("per_tensor", "conv1d"): PerTensorConv1D,
    ("per_token", "linear"): PerTokenLinear,
    ("per_token", "conv1d"): PerTokenConv1D,
}
