"""A float transformer into the INT8 data flow of Jetfire (sections 3 and 4), in place, and back.

Inside its blocks linears, normalizations, activations and dropout are exchanged for modules that pass INT8 blocks on;
the residual stream is INT8 from the input of the first block to the output of the last one. Attention, embeddings,
the last normalization and the head stay as they are. Parameters stay the same objects under the same names, so
optimizers made before, state dicts and checkpoints of either form fit the other.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from torch import nn

from qframework.arguments import check_module
from qframework.errors import QFrameworkError, UnsupportedError
from qframework.kernels._blocks import BlockSize, CanonicalSize, block_shape, check_block_size
from qframework.training.boundaries import BOUNDARIES, EnterBlocks, FloatInputs, LeaveBlocks
from qframework.training.check_finite import remove_checks, watch
from qframework.training.compilation import keep_graphs_whole, register_fallbacks
from qframework.training.linear import Int8Conv1D, Int8Linear
from qframework.training.replace import FLOAT_MODULE, float_again, gated_mlp, replacement
from qframework.training.roles import GATED, in_attention, is_block, is_gated_mlp, role_of, units

Mode = Literal["per_block", "per_tensor", "per_token"]
_REPORT = "_int8_training_report"
_ON_REQUEST = "named in keep_float"
_INSIDE_ATTENTION = "inside attention, which computes in 16 bits"


@dataclass(frozen=True)
class Converted:
    """A module that was exchanged."""

    name: str
    before: str
    after: str


@dataclass(frozen=True)
class Kept:
    """A module inside a block that stayed as it was."""

    name: str
    kind: str
    reason: str


@dataclass(frozen=True)
class ConversionReport:
    """What convert_to_int8_training did to a model; ``str`` of it is a summary."""

    mode: Mode
    block_size: CanonicalSize
    blocks: tuple[str, ...]
    converted: tuple[Converted, ...] = ()
    kept: tuple[Kept, ...] = ()

    def __str__(self) -> str:
        size = ", blocks of {} x {}".format(*block_shape(self.block_size)) if self.mode == "per_block" else ""
        lines = [f"INT8 training, {self.mode}{size}: {len(self.converted)} modules in {len(self.blocks)} blocks"]
        for before, after in dict.fromkeys((row.before, row.after) for row in self.converted):
            count = sum((row.before, row.after) == (before, after) for row in self.converted)
            lines.append(f"  {count:4} {before} to {after}")
        for kind, reason in dict.fromkeys((row.kind, row.reason) for row in self.kept):
            names = [row.name for row in self.kept if (row.kind, row.reason) == (kind, reason)]
            lines.append(f"  {len(names):4} {kind} kept, {reason}: {names[0]}" + (", ..." if len(names) > 1 else ""))
        return "\n".join(lines)


def convert_to_int8_training(
    model: nn.Module,
    block_size: BlockSize = 32,
    mode: Mode = "per_block",
    *,
    blocks: Sequence[str] | None = None,
    keep_float: Sequence[str] = (),
    check_finite: bool = False,
    stochastic_gradients: bool = False,
) -> nn.Module:
    """Exchange the modules of ``model``'s transformer blocks for INT8 ones, in place; returns ``model``.

    Convert before DistributedDataParallel, ``fully_shard`` and torch.compile; attention and what is outside the blocks
    compute in 16 bits under torch.autocast. conversion_report says what was done, restore_float undoes it. Per block,
    Dynamo's DDPOptimizer is off from then on, in the whole process: it cannot cut graphs between INT8 tensors.

    Args:
        model: with transformer blocks, such as timm's ViTs and transformers' GPT-2 and Llama types. Weights stay in
            their dtype: FP32, as the paper keeps its master weights.
        block_size: how many tokens and channels share a scale: 32, 64 or 128 of both, or (tokens, channels), (32, 128)
            or (1, 128). Products are the faster, the more channels; a token with outliers spoils those it shares with.
            docs/training.md says how to choose.
        mode: ``"per_block"``: Jetfire. For comparison, linears alone, 16-bit between them: ``"per_tensor"``, a scale
            for each operand; ``"per_token"``, SwitchBack: a scale for each row, the weights' gradients in 16 bits.
        blocks: names of the blocks, with ``*`` and ``?``, where they cannot be found by their structure
            (normalizations, attention, and linears beside it).
        keep_float: names of modules, with ``*`` and ``?``, that stay in 16 bits with all that is in them.
        check_finite: raise NonFiniteError with the layer's name where NaN or infinity appears in an activation or a
            gradient. It waits for the GPU at each layer; nothing is added where it is off.
        stochastic_gradients: round gradients without bias where they enter the INT8 data flow as floats: from
            attention, from what is kept in 16 bits, and behind the last block. Values far smaller than their block's
            largest, which otherwise become zeros, are right on average. From one INT8 operator to the next gradients
            are rounded to nearest as ever. The seeds are of torch's generator.

    Raises:
        UnsupportedError: another block size or mode; stochastic gradients in another mode than per_block; no block was
            found; a block holds modules that cannot be converted, which are named: pass them in ``keep_float``.
        QFrameworkError: the model is converted already, or wrapped by something that must come later; a name in
            ``blocks`` or ``keep_float`` fits no module.
    """
    check_module(model, "convert_to_int8_training: model")
    block_size = check_block_size("convert_to_int8_training", block_size)
    if mode not in get_args(Mode):
        raise UnsupportedError(f"mode={mode!r} is unknown; accepted: {', '.join(get_args(Mode))}")
    if stochastic_gradients and mode != "per_block":
        raise UnsupportedError(f"stochastic_gradients=True with mode={mode!r}; accepted: per_block")
    _check_model(model)
    plan = _Plan(mode, stochastic_gradients)
    for name, block in _find_blocks(model, blocks):
        plan.add(name, block, keep_float)
    _check_names(model, "keep_float", keep_float)
    plan.raise_on_obstacles()
    register_fallbacks()
    if mode == "per_block":
        keep_graphs_whole()
    report = _apply(model, plan, block_size)
    model.__dict__[_REPORT] = report
    if check_finite:
        watch(model)
    return model


def conversion_report(model: nn.Module) -> ConversionReport:
    """What convert_to_int8_training did to ``model``. Raises QFrameworkError where it was not called."""
    check_module(model, "conversion_report: model")
    report = model.__dict__.get(_REPORT)
    if report is None:
        raise QFrameworkError(f"{type(model).__name__} is not converted; accepted: a model of convert_to_int8_training")
    return report


def restore_float(model: nn.Module) -> nn.Module:
    """Undo convert_to_int8_training in place, keeping the parameters; returns ``model``.

    Raises:
        QFrameworkError: the model was not converted.
    """
    check_module(model, "restore_float: model")
    conversion_report(model)
    remove_checks(model)
    for module in list(model.modules()):
        _remove_boundaries(module)
        for name, child in list(module.named_children()):
            if FLOAT_MODULE in child.__dict__:
                module._modules[name] = float_again(child)
    del model.__dict__[_REPORT]
    return model


# Blocks


def _check_model(model: nn.Module) -> None:
    if _REPORT in model.__dict__:
        raise QFrameworkError(
            f"{type(model).__name__} is converted already; accepted: a float model, restore_float first"
        )
    wrapper = type(model).__name__
    if hasattr(model, "_orig_mod") or wrapper in ("DistributedDataParallel", "FullyShardedDataParallel"):
        raise QFrameworkError(
            f"model is wrapped ({wrapper}); accepted: the model itself, converted before it is wrapped"
        )


def _matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether ``name`` or a module that holds it fits one of ``patterns``."""
    parts = name.split(".")
    paths = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns for path in paths)


def _check_names(model: nn.Module, argument: str, patterns: Sequence[str]) -> None:
    names = [name for name, _ in model.named_modules()]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise QFrameworkError(f"{argument}: {pattern!r} fits no module of {type(model).__name__}")


def _find_blocks(model: nn.Module, patterns: Sequence[str] | None) -> list[tuple[str, nn.Module]]:
    """The outermost blocks in their order."""
    if patterns is not None:
        _check_names(model, "blocks", patterns)
        modules = dict(model.named_modules())
        fitting = [name for name in modules if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
        found = [(name, modules[name]) for name in fitting if not _inside(name, fitting)]
    else:
        found = list(_blocks_below(model, ""))
    if not found:
        raise UnsupportedError(
            f"{type(model).__name__} holds no transformer block: a module with normalizations, attention and linears "
            "beside it; accepted: such a model, or the names of its blocks in blocks="
        )
    return found


def _inside(name: str, others: Sequence[str]) -> bool:
    return any(name.startswith(f"{other}.") for other in others)


def _blocks_below(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        path = f"{prefix}.{name}" if prefix else name
        if is_block(child):
            yield path, child
        else:
            yield from _blocks_below(child, path)


# What will be done, all of it known before anything is changed


@dataclass
class _Plan:
    mode: Mode
    stochastic_gradients: bool = False
    blocks: dict[str, nn.Module] = field(default_factory=dict)
    exchanged: list[tuple[str, nn.Module]] = field(default_factory=list)
    kept: list[tuple[Kept, nn.Module]] = field(default_factory=list)
    obstacles: list[Kept] = field(default_factory=list)

    def add(self, name: str, block: nn.Module, keep_float: Sequence[str]) -> None:
        """Decide for a block and every module in it."""
        if _matches(name, keep_float):
            self.kept.append((Kept(name, type(block).__name__, _ON_REQUEST), block))
            return
        self.blocks[name] = block
        for path, module in units(block, name):
            if _matches(path, keep_float):
                self.kept.append((Kept(path, type(module).__name__, _ON_REQUEST), module))
            elif not isinstance(module, nn.Identity):
                self._add_unit(path, module, in_attention(path.removeprefix(f"{name}.")))

    def _add_unit(self, path: str, module: nn.Module, attention: bool) -> None:
        role, kind = role_of(module), type(module).__name__
        linear = role in ("linear", "conv1d")
        if linear or (self.mode == "per_block" and role is not None and not (attention and _stays(path, role))):
            self.exchanged.append((path, module))
        elif self.mode != "per_block":
            return
        elif attention and not _has_matrices(module):
            self.kept.append((Kept(path, kind, _INSIDE_ATTENTION), module))
        else:
            self.obstacles.append(Kept(path, kind, "no INT8 module computes the same"))

    def raise_on_obstacles(self) -> None:
        if not self.obstacles:
            return
        told = ", ".join(f"{row.name} ({row.kind})" for row in self.obstacles[:8])
        more = f" and {len(self.obstacles) - 8} more" if len(self.obstacles) > 8 else ""
        raise UnsupportedError(
            f"cannot convert {told}{more}; accepted: linears, GPT-2's Conv1D, LayerNorm, RMSNorm, GELU, SiLU, ReLU, "
            "Dropout, LayerScale and DropPath, or their names in keep_float=, which leaves them in 16 bits"
        )


def _stays(path: str, role: str) -> bool:
    """Whether a module inside attention that is no linear works on 16-bit values there: all but the last dropout."""
    return role != "dropout" or path.rsplit(".", 1)[-1] not in ("proj_drop", "resid_dropout", "dropout_o")


def _has_matrices(module: nn.Module) -> bool:
    """Whether a module holds matrices: more than the vectors of a normalization."""
    return any(parameter.dim() > 1 for parameter in module.parameters())


def _apply(model: nn.Module, plan: _Plan, block_size: CanonicalSize) -> ConversionReport:
    """Exchange modules wherever they are held: one that is used twice becomes one that is used twice."""
    news: dict[nn.Module, nn.Module] = {}
    converted = []
    for name, module in plan.exchanged:
        local = next(name.removeprefix(f"{block}.") for block in plan.blocks if name.startswith(f"{block}."))
        news[module] = new = replacement(module, local, plan.mode, block_size)
        if isinstance(new, Int8Linear | Int8Conv1D):  # the others' gradients come in blocks
            new.stochastic_gradients = plan.stochastic_gradients and new.output == "float"
        converted.append(Converted(name, type(module).__name__, _described(new)))
    for name, module in _gated_mlps(plan, news):
        news[module] = gated_mlp(module, news, block_size)
        converted.append(Converted(name, type(module).__name__, _described(news[module])))
    for parent in [module for module in model.modules() if module not in news]:
        for name, child in list(parent.named_children()):
            if child in news:
                parent._modules[name] = news[child]
    if plan.mode == "per_block":
        _set_boundaries(model, plan, block_size)
    kept = tuple(row for row, _ in plan.kept)
    return ConversionReport(plan.mode, block_size, tuple(plan.blocks), tuple(converted), kept)


def _gated_mlps(plan: _Plan, news: Mapping[nn.Module, nn.Module]) -> list[tuple[str, nn.Module]]:
    """Gated MLPs whose parts are all exchanged."""
    if plan.mode != "per_block":
        return []
    found = (
        (f"{block}.{name}", module) for block, held in plan.blocks.items() for name, module in held.named_modules()
    )
    return [
        (name, module)
        for name, module in found
        if is_gated_mlp(module) and all(getattr(module, part) in news for part in GATED)
    ]


def _described(module: nn.Module) -> str:
    output = getattr(module, "output", None)
    return type(module).__name__ + (f" ({output} out)" if isinstance(output, str) else "")


def _set_boundaries(model: nn.Module, plan: _Plan, block_size: BlockSize) -> None:
    """Blocks take floats in, the last block of each container and what is kept in float give floats or get them."""
    for block in plan.blocks.values():
        block.register_forward_pre_hook(EnterBlocks(block_size), with_kwargs=True)
    for container in model.modules():
        held = [child for child in container.children() if child in plan.blocks.values()]
        if held:
            held[-1].register_forward_hook(LeaveBlocks(plan.stochastic_gradients))
    for row, module in plan.kept:
        if row.reason == _ON_REQUEST:
            module.register_forward_pre_hook(FloatInputs(plan.stochastic_gradients), with_kwargs=True)


def _remove_boundaries(module: nn.Module) -> None:
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in list(hooks.items()):
            if isinstance(hook, BOUNDARIES):
                del hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
