"""A float transformer into the INT8 data flow of Jetfire (sections 3 and 4), in place, and back.

Inside its blocks linears, normalizations, activations and dropout get classes that pass INT8 blocks on; the residual
stream is INT8 from the input of the first block to the output of the last one. Attention, embeddings, the last
normalization and the head stay as they are. Modules and parameters stay the same objects under the same names, so
optimizers made before, state dicts and checkpoints of either form fit the other.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import zip_longest
from typing import get_args

from torch import nn

from qframework.arguments import check_module
from qframework.compat.modules import remove_hooks
from qframework.errors import QFrameworkError, UnsupportedError
from qframework.kernels.blocks.format import BlockSize, CanonicalSize, block_shape, check_block_size
from qframework.training.boundaries import BOUNDARIES, EnterBlocks, FloatInputs, LeaveBlocks, WriteBack
from qframework.training.check_finite import remove_checks, watch
from qframework.training.compilation import keep_graphs_whole, register_fallbacks
from qframework.training.plan import MEANT, ConversionPlan, Converted, Kept, Mode, make_plan
from qframework.training.replace import become, check_unchanged, float_again, is_converted
from qframework.training.roles import held

log = logging.getLogger("qframework")
_REPORT = "_int8_training_report"


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
    """Make the modules of ``model``'s transformer blocks compute in INT8, in place; returns ``model``.

    Convert before DistributedDataParallel, ``fully_shard`` and torch.compile; attention and what is outside the blocks
    compute in 16 bits under torch.autocast. conversion_report says what was done and what stayed in float,
    restore_float undoes it. Modules keep their hooks, attributes and sharing; a conversion that fails changes nothing.
    Per block, Dynamo's DDPOptimizer is off from then on, in the whole process: it cannot cut graphs between INT8
    tensors.

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
            found, or nothing in one to convert; a block holds modules that cannot be converted, which are named: pass
            them in ``keep_float``.
        QFrameworkError: the model is converted already, or wrapped by something that must come later; a name in
            ``blocks`` or ``keep_float`` fits no module.
    """
    check_module(model, "convert_to_int8_training: model")
    block_size = check_block_size("convert_to_int8_training", block_size)
    if mode not in get_args(Mode):
        raise UnsupportedError(f"mode={mode!r} is unknown; accepted: {', '.join(get_args(Mode))}")
    if stochastic_gradients and mode != "per_block":
        raise UnsupportedError(f"stochastic_gradients=True with mode={mode!r}; accepted: per_block")
    plan = make_plan(model, mode, block_size, blocks, keep_float)
    register_fallbacks()
    with ExitStack() as undo:
        undo.callback(_undo, model)
        _apply(model, plan, stochastic_gradients)
        if check_finite:
            watch(model)
        undo.pop_all()
    if mode == "per_block":
        keep_graphs_whole()
    _log_kept(model, plan.kept)
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
        QFrameworkError: the model was not converted, or the class of a module has been changed since; nothing is done.
    """
    check_module(model, "restore_float: model")
    conversion_report(model)
    for name, module in model.named_modules():
        if is_converted(module):
            check_unchanged(name, module)
    _undo(model)
    return model


def _apply(model: nn.Module, plan: ConversionPlan, stochastic_gradients: bool) -> None:
    model.__dict__[_REPORT] = ConversionReport(
        plan.mode, plan.block_size, tuple(plan.blocks.values()), plan.converted, tuple(plan.kept)
    )
    for module, new in plan.news.items():
        try:
            become(module, new)
        except TypeError as error:
            raise UnsupportedError(
                f"{plan.names[module]} ({type(module).__name__}): its class cannot be exchanged, {error}; accepted: "
                "its name in keep_float=, which leaves it in 16 bits"
            ) from error
        if stochastic_gradients and new.settings.get("output") == "float":  # the others' gradients come in blocks
            module.__dict__["stochastic_gradients"] = True
    if plan.mode == "per_block":
        _set_boundaries(model, plan, stochastic_gradients)


def _set_boundaries(model: nn.Module, plan: ConversionPlan, stochastic: bool) -> None:
    """Blocks take floats in; those without a block behind them, and what is kept in float, give floats or get them."""
    for block in plan.blocks:
        _around(block, EnterBlocks(plan.block_size))
    for block in _last_blocks(model, plan.blocks):
        block.register_forward_hook(LeaveBlocks(stochastic))
    for module in plan.floats:
        if getattr(module, "inplace", False):  # it writes to its input, which a float copy would hide
            continue
        _around(module, FloatInputs(stochastic), prepend=True)


def _around(module: nn.Module, hook: EnterBlocks | FloatInputs, prepend: bool = False) -> None:
    module.register_forward_pre_hook(hook, with_kwargs=True, prepend=prepend)
    module.register_forward_hook(WriteBack(hook.lent), always_call=True)


def _last_blocks(model: nn.Module, blocks: Container[nn.Module]) -> list[nn.Module]:
    """Blocks that anything else than a block follows in one of the modules that hold them; each once."""
    found = [model] if model in blocks else []
    for container in model.modules():
        children = [child for _, child in held(container)]
        for child, following in zip_longest(children, children[1:]):
            if child in blocks and following not in blocks:
                found.append(child)
    return list(dict.fromkeys(found))


def _undo(model: nn.Module) -> None:
    """Make ``model`` what it was before a conversion, also one that ended early."""
    remove_checks(model)
    for module in model.modules():
        remove_hooks(module, BOUNDARIES)
        if is_converted(module):
            float_again(module)
    model.__dict__.pop(_REPORT, None)


def _log_kept(model: nn.Module, kept: list[Kept]) -> None:
    """Say what stays in float though nobody asked for it; modules inside attention are meant to."""
    rows = [row for row in kept if row.reason not in MEANT]
    if rows:
        told = "; ".join(f"{row.name} ({row.kind}), {row.reason}" for row in rows[:8])
        log.warning("%s: %d modules stay in float: %s", type(model).__name__, len(rows), told)
