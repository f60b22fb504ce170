"""Convert a float transformer to the INT8 data flow of Jetfire (sections 3 and 4), in place, and back.

Inside its blocks, linears, normalizations, activations and dropout get classes that pass on INT8 blocks; the residual
stream is INT8 from the input of the first block to the output of the last. Attention, embeddings, the last
normalization and the head do not change. Modules and parameters stay the same objects under the same names, so existing
optimizers keep working, and state dicts and checkpoints of either form fit the other.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import zip_longest
from typing import TypeGuard, get_args

from torch import nn

from qframework.arguments import check_module
from qframework.compat.modules import remove_hooks
from qframework.errors import QFrameworkError, UnsupportedError, either
from qframework.kernels.blocks.format import (
    DEFAULT_BLOCK_SIZE,
    BlockSize,
    CanonicalSize,
    PaperName,
    block_shape,
    named_block_size,
)
from qframework.training.attention import AttentionGradient
from qframework.training.boundaries import BOUNDARIES, EnterBlocks, FloatInputs, LeaveBlocks, WriteBack
from qframework.training.check_finite import remove_checks, watch
from qframework.training.compilation import keep_graphs_whole, register_fallbacks
from qframework.training.plan import MEANT, ConversionPlan, Converted, Kept, Mode, make_plan
from qframework.training.replace import become, check_unchanged, float_again
from qframework.training.roles import held, is_converted

log = logging.getLogger("qframework")
_REPORT = "_int8_training_report"
_NESTED = "_int8_training_nested"  # of an nn.TransformerEncoder that made nested tensors before its conversion
_FAST_PATH = "_int8_training_fast_path"  # of an nn.TransformerEncoderLayer, its `activation_relu_or_gelu` before


@dataclass(frozen=True)
class ConversionReport:
    """What convert_to_int8_training did to a model; ``str`` of it is a summary."""

    mode: Mode
    block_size: CanonicalSize
    blocks: tuple[str, ...]
    converted: tuple[Converted, ...] = ()
    kept: tuple[Kept, ...] = ()
    narrow: tuple[str, ...] = ()
    """Converted blocks of fewer channels than INT8 is faster with, where ``skip_slower`` is False."""
    outside: tuple[str, ...] = ()
    """Linears that are in no block, such as the head: they stay in float."""

    def __str__(self) -> str:
        size = ", blocks of {} x {}".format(*block_shape(self.block_size)) if self.mode == "per_block" else ""
        lines = [f"INT8 training, {self.mode}{size}: {len(self.converted)} modules in {len(self.blocks)} blocks"]
        for before, after in dict.fromkeys((row.before, row.after) for row in self.converted):
            count = sum((row.before, row.after) == (before, after) for row in self.converted)
            lines.append(f"  {count:4} {before} to {after}")
        for kind, reason in dict.fromkeys((row.kind, row.reason) for row in self.kept):
            names = [row.name for row in self.kept if (row.kind, row.reason) == (kind, reason)]
            lines.append(f"  {len(names):4} {kind} kept, {reason}: {names[0]}" + (", ..." if len(names) > 1 else ""))
        if self.outside:
            told = ", ".join(self.outside[:4]) + (", ..." if len(self.outside) > 4 else "")
            lines.append(f"  {len(self.outside):4} linears outside of blocks kept: {told}")
        if self.narrow:
            first = self.narrow[0] + (", ..." if len(self.narrow) > 1 else "")
            lines.append(f"  {len(self.narrow)} blocks too narrow to be faster in INT8: {first}")
        return "\n".join(lines)


def convert_to_int8_training(
    model: nn.Module,
    block_size: BlockSize | PaperName = DEFAULT_BLOCK_SIZE,
    mode: Mode = "per_block",
    *,
    blocks: Sequence[str] | None = None,
    keep_float: Sequence[str] = (),
    check_finite: bool = False,
    stochastic_gradients: bool = False,
    attention: AttentionGradient = "float",
    skip_slower: bool = True,
    keep_weights: bool | None = None,
) -> nn.Module:
    """Make the modules of ``model``'s transformer blocks compute in INT8, in place, and return ``model``.

    Convert before DistributedDataParallel, ``fully_shard`` and torch.compile. Attention, but see ``attention``, and
    modules outside the blocks compute in 16 bits under torch.autocast. conversion_report lists what was converted and
    what stayed in float; restore_float undoes the conversion. Modules keep their hooks, attributes and sharing. A
    conversion that fails changes nothing. Mode ``"per_block"`` disables Dynamo's DDPOptimizer in the whole process,
    since it cannot split graphs between INT8 tensors.

    Args:
        model: a model with transformer blocks, such as timm's ViTs and transformers' GPT-2 and Llama types. Weights
            keep their dtype, which should be FP32, as in the paper.
        block_size: how many tokens and channels share a scale: (tokens, channels), (1, 128), (1, 256) or (32, 128), or
            32, 64 or 128 of both; ``"jetfire"`` is the paper's, 32. More channels make products faster; with more
            tokens, an outlier token affects more others: in blocks of 128 a GPT diverged. docs/training.md says how to
            choose.
        mode: ``"per_block"`` is Jetfire. Two baselines convert linears only, with 16 bits between them:
            ``"per_tensor"`` with one scale per operand; ``"per_token"``, SwitchBack, with one scale per token and per
            channel of weights, and weight gradients in 16 bits.
        blocks: names of the blocks, with ``*`` and ``?``, if they cannot be found by their structure (normalizations,
            attention, and linears beside it).
        keep_float: names of modules, with ``*`` and ``?``, that stay in 16 bits with everything inside them.
        check_finite: raise NonFiniteError with the layer's name if NaN or infinity appears in an activation or a
            gradient. Synchronizes with the GPU at each layer; adds nothing if False.
        stochastic_gradients: round gradients without bias where they enter the INT8 data flow as floats: from
            attention, from modules kept in 16 bits, and after the last block. Values far smaller than the largest of
            their block, which otherwise become zeros, are then right on average. Between INT8 operators gradients are
            still rounded to nearest. Seeds come from torch's generator.
        attention: ``"float"``, or ``"int8"`` or ``"mixed"`` to compute attention's gradient in 8 bit, as the argument
            ``backward`` of :func:`~qframework.attention.sage_attention` does, wherever a block calls
            ``F.scaled_dot_product_attention`` without a mask. In every mode. Neither is faster than cuDNN's attention
            at a shape measured; see docs/attention.md.
        skip_slower: leave blocks in 16 bits that are too narrow to be faster in INT8: those with fewer channels than
            :data:`~qframework.training.plan.FASTER_FROM`, or with a gated MLP or more than four linears
            :data:`~qframework.training.plan.FASTER_FROM_MANY`. The log and the report name them, and a model of such
            blocks alone does not change. False converts them too, which saves memory for activations and, under CUDA
            graphs, also time: from 768 channels on. The baselines convert all blocks.
        keep_weights: keep the transposes of weights in INT8 from the forward to the backward pass, one byte for each
            weight, instead of quantizing each weight twice. None keeps them unless FSDP2 spreads the weight over
            several processes, each of which would keep those of the whole model. In mode ``"per_block"`` only.

    Raises:
        UnsupportedError: an unknown block size, mode or attention; stochastic gradients in a mode other than
            per_block; no block found, or nothing in it to convert; a block with modules that cannot be converted
            and must be named in ``keep_float``.
        QFrameworkError: the model is converted already, or wrapped by something that must come later; a name in
            ``blocks`` or ``keep_float`` matches no module.
    """
    check_module(model, "convert_to_int8_training: model")
    size = named_block_size("convert_to_int8_training", block_size)
    if mode not in get_args(Mode):
        modes = ", ".join(map(repr, get_args(Mode)))
        raise UnsupportedError(f"convert_to_int8_training: mode must be one of {modes}, got {mode!r}")
    if stochastic_gradients and mode != "per_block":
        raise UnsupportedError(
            f"convert_to_int8_training: mode must be 'per_block' for stochastic_gradients=True, got {mode!r}"
        )
    if attention not in get_args(AttentionGradient):
        raise UnsupportedError(
            f"convert_to_int8_training: attention must be {either(get_args(AttentionGradient))}, got {attention!r}"
        )
    plan = make_plan(model, mode, size, blocks, keep_float, attention, skip_slower)
    if plan.blocks:
        register_fallbacks()
    with ExitStack() as undo:
        undo.callback(_undo, model)
        _apply(model, plan, stochastic_gradients, keep_weights)
        if check_finite:
            watch(model)
        undo.pop_all()
    if plan.blocks and mode == "per_block":
        keep_graphs_whole()
    _log_kept(model, plan.kept)
    return model


def conversion_report(model: nn.Module) -> ConversionReport:
    """What convert_to_int8_training did to ``model``. Raises QFrameworkError for a model that is not converted."""
    check_module(model, "conversion_report: model")
    report = model.__dict__.get(_REPORT)
    if report is None:
        raise QFrameworkError(
            "conversion_report: model must be converted by convert_to_int8_training, got a "
            f"{type(model).__name__} that is not"
        )
    return report


def restore_float(model: nn.Module) -> nn.Module:
    """Undo convert_to_int8_training in place, keeping the parameters, and return ``model``.

    Raises:
        QFrameworkError: the model is not converted, or the class of a module was changed since; the model stays as it
            is.
    """
    check_module(model, "restore_float: model")
    conversion_report(model)
    for name, module in model.named_modules():
        if is_converted(module):
            check_unchanged(name, module)
    _undo(model)
    return model


def _apply(model: nn.Module, plan: ConversionPlan, stochastic_gradients: bool, keep_weights: bool | None) -> None:
    model.__dict__[_REPORT] = ConversionReport(
        plan.mode,
        plan.block_size,
        tuple(plan.blocks.values()),
        plan.converted,
        tuple(plan.kept),
        tuple(plan.narrow),
        plan.outside,
    )
    for module, new in plan.news.items():
        try:
            become(module, new)
        except TypeError as error:
            raise UnsupportedError(
                f"convert_to_int8_training: {plan.names[module]} ({type(module).__name__}) must have a class that can "
                f"change: {error}. To leave it in 16 bits, name it in keep_float="
            ) from error
        if stochastic_gradients and new.settings.get("output") == "float":  # the others' gradients come in blocks
            module.__dict__["stochastic_gradients"] = True
        if "keep_weight" in new.settings:
            module.__dict__["keep_weight"] = keep_weights
    for encoder in model.modules():
        if _makes_nested(encoder) and any(each in plan.news for each in encoder.modules()):
            encoder.use_nested_tensor, encoder.__dict__[_NESTED] = False, True
    for layer in model.modules():
        if isinstance(layer, nn.TransformerEncoderLayer) and any(each in plan.news for each in layer.modules()):
            # no fast path in evaluation, which reads the weights of the linears instead of calling them
            layer.__dict__[_FAST_PATH], layer.activation_relu_or_gelu = layer.activation_relu_or_gelu, 0
    if plan.blocks and plan.mode == "per_block":
        _set_boundaries(model, plan, stochastic_gradients)


def _makes_nested(module: nn.Module) -> TypeGuard[nn.TransformerEncoder]:
    """Whether ``module`` makes nested tensors of padded inputs in evaluation, which INT8 layers do not take."""
    return isinstance(module, nn.TransformerEncoder) and bool(module.use_nested_tensor)


def _set_boundaries(model: nn.Module, plan: ConversionPlan, stochastic: bool) -> None:
    """Add hooks: blocks accept floats; blocks without a block after them return floats; float modules get floats."""
    for block in plan.blocks:
        _around(block, EnterBlocks(plan.block_size))
    for block in _last_blocks(model, plan.blocks):
        block.register_forward_hook(LeaveBlocks(stochastic))
    for module in plan.floats:
        if getattr(module, "inplace", False):  # a float copy would hide writes to its input
            continue
        _around(module, FloatInputs(stochastic), prepend=True)


def _around(module: nn.Module, hook: EnterBlocks | FloatInputs, prepend: bool = False) -> None:
    module.register_forward_pre_hook(hook, with_kwargs=True, prepend=prepend)
    module.register_forward_hook(WriteBack(hook.lent), always_call=True)


def _last_blocks(model: nn.Module, blocks: Container[nn.Module]) -> list[nn.Module]:
    """Blocks that are not followed by a block in one of the modules that contain them, each once."""
    found = [model] if model in blocks else []
    for container in model.modules():
        children = [child for _, child in held(container)]
        for child, following in zip_longest(children, children[1:]):
            if child in blocks and following not in blocks:
                found.append(child)
    return list(dict.fromkeys(found))


def _undo(model: nn.Module) -> None:
    """Restore ``model`` as it was before a conversion, also an incomplete one."""
    remove_checks(model)
    for module in model.modules():
        if module.__dict__.pop(_NESTED, False):
            module.use_nested_tensor = True  # type: ignore[assignment]
        if _FAST_PATH in module.__dict__:
            module.activation_relu_or_gelu = module.__dict__.pop(_FAST_PATH)
        remove_hooks(module, BOUNDARIES)
        if is_converted(module):
            float_again(module)
    model.__dict__.pop(_REPORT, None)


def _log_kept(model: nn.Module, kept: list[Kept]) -> None:
    """Log the modules that unexpectedly stay in float: not those in keep_float and inside attention."""
    unexpected = [row for row in kept if row.reason not in MEANT]
    for reason in dict.fromkeys(row.reason for row in unexpected):
        rows = [row for row in unexpected if row.reason == reason]
        told = ", ".join(f"{row.name} ({row.kind})" for row in rows[:8]) + (", ..." if len(rows) > 8 else "")
        log.warning("%s: %d modules stay in float, %s: %s", type(model).__name__, len(rows), reason, told)
