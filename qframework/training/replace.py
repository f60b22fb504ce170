"""The INT8 module for each float one, with the same parameters, and the way back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from qframework.errors import UnsupportedError
from qframework.kernels._blocks import BlockSize
from qframework.training.activation import Int8Activation, Int8GatedMLP
from qframework.training.dropout import Int8Dropout
from qframework.training.linear import Int8Conv1D, Int8Linear
from qframework.training.linear_baselines import PerTensorConv1D, PerTensorLinear, PerTokenConv1D, PerTokenLinear
from qframework.training.norm import Int8LayerNorm, Int8RMSNorm
from qframework.training.roles import GATED, activation_kind, gives_blocks, norm_eps, role_of
from qframework.training.scale import Int8DropPath, Int8LayerScale

# Under this name an INT8 module keeps the float module it stands for, without its parameters; no submodule.
FLOAT_MODULE = "_float_module"
_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def replacement(module: nn.Module, name: str, mode: str, block_size: BlockSize) -> nn.Module:
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
    for hooks in _HOOKS:
        getattr(new, hooks).update(getattr(module, hooks))
    module._parameters.update(dict.fromkeys(module._parameters))
    new.__dict__[FLOAT_MODULE] = module
    return new


def float_again(new: nn.Module) -> nn.Module:
    """The float module that ``new`` stands for, with the parameters and the mode that ``new`` has now."""
    module: nn.Module = new.__dict__[FLOAT_MODULE]
    module._parameters.update(new._parameters)
    for name, child in new.named_children():
        if FLOAT_MODULE in child.__dict__:
            module._modules[name] = float_again(child)
    return module.train(new.training)


def gated_mlp(module: nn.Module, news: Mapping[nn.Module, nn.Module], block_size: BlockSize) -> nn.Module:
    """The INT8 module for a gated MLP whose linears have theirs in ``news``."""
    children = dict(module.named_children())
    kind = activation_kind(children.pop(GATED[-1]))
    assert kind is not None  # roles.is_gated_mlp asked for it
    gate, up, down = (news[children[name]] for name in GATED[:-1])
    return _standing_for(Int8GatedMLP(gate, up, down, kind, block_size), module)


def _linear(module: Any, name: str, block_size: BlockSize) -> nn.Module:
    kind = Int8Linear if isinstance(module, nn.Linear) else Int8Conv1D
    return kind.from_float(module, block_size, "block" if gives_blocks(name) else "float")


def _layer_norm(module: Any, name: str, block_size: BlockSize) -> nn.Module:
    return Int8LayerNorm.from_float(module, block_size)


def _rms_norm(module: Any, name: str, block_size: BlockSize) -> nn.Module:
    return Int8RMSNorm.from_float(module, block_size, norm_eps(module))


def _activation(module: Any, name: str, block_size: BlockSize) -> nn.Module:
    return Int8Activation(str(activation_kind(module)), block_size)


def _dropout(module: Any, name: str, block_size: BlockSize) -> nn.Module:
    return Int8Dropout(module.p, block_size)


def _layer_scale(module: Any, name: str, block_size: BlockSize) -> nn.Module:
    return Int8LayerScale(module.gamma, block_size)


def _drop_path(module: Any, name: str, block_size: BlockSize) -> nn.Module:
    return Int8DropPath(module.drop_prob, getattr(module, "scale_by_keep", True), block_size)


_MAKERS: dict[str, Callable[[Any, str, BlockSize], nn.Module]] = {
    "linear": _linear,
    "conv1d": _linear,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "activation": _activation,
    "dropout": _dropout,
    "layer_scale": _layer_scale,
    "drop_path": _drop_path,
}
_BASELINES: dict[tuple[str, str], Any] = {
    ("per_tensor", "linear"): PerTensorLinear,
    ("per_tensor", "conv1d"): PerTensorConv1D,
    ("per_token", "linear"): PerTokenLinear,
    ("per_token", "conv1d"): PerTokenConv1D,
}
