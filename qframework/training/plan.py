"""The plan of a conversion: what happens to each module of a model, decided before any module changes.

A module that is used in several places gets one decision for all of them.
"""

from __future__ import annotations

import fnmatch
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import nn
from torch.nn.parameter import is_lazy

from qframework.arguments import names_in
from qframework.compat.dynamo import is_compiled
from qframework.compat.modules import parameters
from qframework.errors import QFrameworkError, UnsupportedError
from qframework.kernels.blocks.format import CanonicalSize
from qframework.training.attention import AttentionGradient, Int8Attention
from qframework.training.find_blocks import (
    adapts,
    blocks_below,
    gives_blocks,
    in_attention,
    is_attention_name,
    list_items,
    reads_all,
    routers,
    units,
)
from qframework.training.replace import Replacement, gated_mlp, replacement, taken_name
from qframework.training.roles import (
    GATED,
    Role,
    is_converted,
    is_gated_mlp,
    linear_role,
    lookalike,
    obstacle,
    own_forward,
    role_of,
)

Mode = Literal["per_block", "per_tensor", "per_token"]
_ON_REQUEST = "named in keep_float"
_INSIDE_ATTENTION = "inside attention, which computes in 16 bits"
FASTER_FROM = 1024
"""Channels from which blocks were measured to train clearly faster in INT8 than in BF16, without CUDA graphs:
``benchmarks/training_widths.py`` computes it."""
FASTER_FROM_MANY = 2048
"""The same for blocks with more than four linears or a gated MLP, as in BERT and Llama, which launch more kernels."""
_FEW_LINEARS = 4  # one for queries, keys and values, one behind attention, two of the MLP
_NARROW = "too narrow to be faster in INT8"
_CHOOSES = "it chooses experts: rounding would change which of two nearly equal outputs is the largest"
MEANT = (_ON_REQUEST, _INSIDE_ATTENTION, _CHOOSES)
_OWN_FORWARD = "its forward was replaced on the module itself"
_OUTSIDE = "also used outside the converted blocks"
_WRAPS = "it wraps a linear layer. Convert the model first, then add adapters to it (get_peft_model of PEFT)"
_READS = "it reads the weights of its linears instead of calling them"
_READ = "the {} around it reads its weight instead of calling it"
_NO_MODULE = "no INT8 module computes the same"


@dataclass(frozen=True)
class Converted:
    """A module that now computes in INT8."""

    name: str
    before: str
    after: str


@dataclass(frozen=True)
class Kept:
    """A module inside a block that did not change."""

    name: str
    kind: str
    reason: str


@dataclass(frozen=True)
class _Place:
    """A place of a module in a block: its name in the model, and in the block, and what reads its weight there."""

    name: str
    local: str
    reader: nn.Module | None = None


@dataclass
class ConversionPlan:
    """Modules and what happens to them; ``floats`` are kept modules that need float inputs."""

    mode: Mode
    block_size: CanonicalSize
    blocks: dict[nn.Module, str] = field(default_factory=dict)
    narrow: list[str] = field(default_factory=list)  # blocks that are converted and not expected to be faster
    news: dict[nn.Module, Replacement] = field(default_factory=dict)
    names: dict[nn.Module, str] = field(default_factory=dict)
    kept: list[Kept] = field(default_factory=list)
    floats: list[nn.Module] = field(default_factory=list)
    obstacles: list[Kept] = field(default_factory=list)
    outside: tuple[str, ...] = ()  # linears that are in no block

    @property
    def all_narrow(self) -> bool:
        """Whether no block is left to convert, since those that nobody asked to keep would be slower in INT8."""
        return not self.blocks and any(row.reason.startswith(_NARROW) for row in self.kept)

    @property
    def converted(self) -> tuple[Converted, ...]:
        """The rows of a report."""
        return tuple(
            Converted(self.names[module], type(module).__name__, str(new)) for module, new in self.news.items()
        )


def make_plan(
    model: nn.Module,
    mode: Mode,
    block_size: CanonicalSize,
    blocks: Sequence[str] | None,
    keep_float: Sequence[str],
    attention: AttentionGradient = "float",
    skip_slower: bool = True,
) -> ConversionPlan:
    """Decide for every module of ``model``'s blocks.

    A plan without any block is one of a model whose blocks are all narrow.

    Raises:
        UnsupportedError: no block, nothing to convert, or modules that cannot be converted.
        QFrameworkError: ``model`` is converted or wrapped; a name in ``blocks`` or ``keep_float`` matches no module.
    """
    _check_model(model)
    blocks = None if blocks is None else _names_in(model, "blocks", blocks)
    keep_float = _names_in(model, "keep_float", keep_float)
    plan, everywhere = ConversionPlan(mode, block_size), _places(model)
    found = _find_blocks(model, blocks)
    plan.outside = _outside(found, everywhere)
    for block in found:
        asked = next((name for name in everywhere[block] if _matches(name, keep_float)), None)
        width, wanted = width_of(block), faster_from(block)
        narrow = mode == "per_block" and width < wanted
        if asked is not None:
            _keep(plan, block, asked, _ON_REQUEST)
        elif narrow and skip_slower:
            sizes = f"{width} of {wanted} channels; skip_slower=False converts it"
            _keep(plan, block, everywhere[block][0], f"{_NARROW}, {sizes}")
        else:
            plan.blocks[block] = everywhere[block][0]
            plan.narrow += [everywhere[block][0]] if narrow else []
    inside = {name for block in plan.blocks for name in everywhere[block]}
    choosing = {linear for block in plan.blocks for linear in routers(block)}
    for module, places in _units(plan.blocks, everywhere).items():
        asked = next((place.name for place in places if _matches(place.name, keep_float)), None)
        if asked is not None:
            _keep(plan, module, asked, _ON_REQUEST)
        elif module in choosing:
            _keep(plan, module, places[0].name, _CHOOSES)
        elif not isinstance(module, nn.Identity):
            _decide(plan, module, places, all(_ancestors(name) & inside for name in everywhere[module]))
        readers = {place.reader: None for place in places if place.reader is not None}
        plan.floats += [reader for reader in readers if reader not in plan.blocks and reader not in plan.floats]
    if mode == "per_block":
        _add_gated_mlps(plan, everywhere)
    if attention != "float":
        _add_attention(plan, everywhere, keep_float, attention)
    _raise_on_obstacles(plan, [name for places in everywhere.values() for name in places])
    return plan


def width_of(block: nn.Module) -> int:
    """Channels of the residual stream: what most of a block's linears read, 0 for a block without."""
    widths = [shape[0] for shape in _linear_shapes(block)]
    return statistics.mode(widths) if widths else 0


def _linear_shapes(block: nn.Module) -> list[tuple[int, int]]:
    """Inputs and outputs of a block's linears."""
    shapes = []
    for module in block.modules():
        role, weight = linear_role(module), parameters(module).get("weight")
        if role is not None and weight is not None and not is_lazy(weight):
            outputs, inputs = weight.shape if role == "linear" else reversed(weight.shape)
            shapes.append((inputs, outputs))
    return shapes


def faster_from(block: nn.Module) -> int:
    """The width from which blocks like this one were measured to be faster."""
    return FASTER_FROM_MANY if has_many_linears(block) else FASTER_FROM


def has_many_linears(block: nn.Module) -> bool:
    """Whether a block has more than four linears of the residual stream, or a gated MLP."""
    width = width_of(block)
    many = sum(width in shape for shape in _linear_shapes(block)) > _FEW_LINEARS
    return many or any(map(is_gated_mlp, block.modules()))


# Modules of a block


def _decide(plan: ConversionPlan, module: nn.Module, places: list[_Place], only_inside: bool) -> None:
    """Replace a module, keep it, or note why neither is possible."""
    read = any(place.reader is not None for place in places)
    name, role = places[0].name, None if own_forward(module) or read else role_of(module)
    attentions = [in_attention(place.local) for place in places]
    if not _exchangeable(role, places, attentions, plan.mode):
        if own_forward(module) and (plan.mode == "per_block" or linear_role(module) is not None):
            _keep(plan, module, name, _OWN_FORWARD)
        elif plan.mode == "per_block":
            _keep_or_object(plan, module, places, attentions)
        elif _has_matrices(module):  # between the baselines' linears everything is float
            plan.kept.append(Kept(name, type(module).__name__, _obstacle(module, places)))
        return
    assert role is not None
    output = "block" if all(gives_blocks(place.local) for place in places) else "float"
    new = replacement(module, role, output, plan.mode, plan.block_size)
    taken = taken_name(module, new)
    if not only_inside:
        _keep(plan, module, name, _OUTSIDE)
    elif taken is not None:
        _keep(plan, module, name, f"its attribute {taken!r} has another meaning in {new.kind.__name__}")
    elif (reason := obstacle(module)) is not None:
        plan.obstacles.append(Kept(name, type(module).__name__, reason))
    else:
        plan.news[module], plan.names[module] = new, name


def _exchangeable(role: Role | None, places: list[_Place], attentions: list[bool], mode: Mode) -> bool:
    if role in ("linear", "conv1d"):
        return True
    if role is None or mode != "per_block":
        return False
    return not any(inside and _stays(place.local, role) for place, inside in zip(places, attentions, strict=True))


def _keep_or_object(plan: ConversionPlan, module: nn.Module, places: list[_Place], attentions: list[bool]) -> None:
    if not any(attentions) and role_of(module) is None and (reason := lookalike(module)) is not None:
        _keep(plan, module, places[0].name, reason)
    elif not any(attentions) or (_has_matrices(module) and not isinstance(module, nn.Embedding)):
        plan.obstacles.append(Kept(places[0].name, type(module).__name__, _obstacle(module, places)))
    elif all(attentions):
        plan.kept.append(Kept(places[0].name, type(module).__name__, _INSIDE_ATTENTION))
    else:
        _keep(plan, module, places[0].name, _INSIDE_ATTENTION)


def _obstacle(module: nn.Module, places: list[_Place]) -> str:
    """Why no INT8 module can replace ``module``."""
    reader = next((place.reader for place in places if place.reader is not None), None)
    if reader is not None:
        return _READ.format(type(reader).__name__)
    return _WRAPS if adapts(module) else _READS if reads_all(module) else _NO_MODULE


def _keep(plan: ConversionPlan, module: nn.Module, name: str, reason: str) -> None:
    plan.kept.append(Kept(name, type(module).__name__, reason))
    plan.floats.append(module)


def _stays(path: str, role: str) -> bool:
    """Whether a module other than a linear stays in 16 bits inside attention: all but the last dropout."""
    return role != "dropout" or path.rsplit(".", 1)[-1] not in ("proj_drop", "resid_dropout", "dropout_o")


def _has_matrices(module: nn.Module) -> bool:
    """Whether a module has parameters of two or more dimensions, unlike a normalization."""
    return any(parameter.dim() > 1 for parameter in module.parameters())


def _add_gated_mlps(plan: ConversionPlan, everywhere: dict[nn.Module, list[str]]) -> None:
    """Add the gated MLPs whose parts are all replaced."""
    for block in plan.blocks:
        for module in block.modules():
            if module in plan.news or own_forward(module) or not is_gated_mlp(module):
                continue
            *linears, act_fn = (getattr(module, part) for part in GATED)
            new = gated_mlp(act_fn, plan.block_size)
            parts = all(part in plan.news for part in (*linears, act_fn))
            if parts and taken_name(module, new) is None:
                plan.news[module], plan.names[module] = new, everywhere[module][0]


def _add_attention(
    plan: ConversionPlan, everywhere: dict[nn.Module, list[str]], keep_float: Sequence[str], gradient: AttentionGradient
) -> None:
    """Add what holds attention in each block: its outermost modules with attention's name, or the block itself."""
    for block in plan.blocks:
        found = [module for name, module in block.named_modules() if _is_outermost_attention(name)] or [block]
        for module in found:
            name = everywhere[module][0]
            new = Replacement(Int8Attention, {"attention_gradient": gradient})
            if any(_matches(place, keep_float) for place in everywhere[module]):
                continue
            if own_forward(module):
                plan.kept.append(Kept(name, type(module).__name__, _OWN_FORWARD))
            elif module in plan.news or (taken := taken_name(module, new)) is not None:
                meaning = "it has another INT8 class" if module in plan.news else f"its attribute {taken!r} is taken"
                plan.kept.append(Kept(name, type(module).__name__, meaning))
            else:
                plan.news[module], plan.names[module] = new, name


def _is_outermost_attention(name: str) -> bool:
    """Whether ``name``, of a module in a block, is one of attention's and not inside of another one's."""
    *_, last = name.split(".")
    return is_attention_name(last) and not in_attention(name)


def _raise_on_obstacles(plan: ConversionPlan, names: Sequence[str]) -> None:
    if plan.obstacles:
        short = _patterns([row.name for row in plan.obstacles], names)
        rows = dict.fromkeys(_told(row, short[row.name]) for row in plan.obstacles)
        more = f" and {len(rows) - 8} more" if len(rows) > 8 else ""
        raise UnsupportedError(
            "convert_to_int8_training: modules in blocks must be linears, GPT-2's Conv1D, LayerNorm, RMSNorm, GELU, "
            f"SiLU, ReLU, Dropout, LayerScale or DropPath, got {', '.join(list(rows)[:8])}{more}. To leave them in 16 "
            f"bits, pass keep_float={_listed(short.values())}"
        )
    if not plan.news and not plan.all_narrow:
        kept = "".join(f"; {row.name} ({row.kind}) stays in float, {row.reason}" for row in plan.kept[:8])
        raise UnsupportedError(f"convert_to_int8_training: blocks must have modules to convert, got none{kept}")


def _told(row: Kept, name: str) -> str:
    return f"{name} ({row.kind})" + ("" if row.reason == _NO_MODULE else f": {row.reason}")


def _listed(names: Iterable[str]) -> str:
    """The names as a list to copy, each once."""
    return "[" + ", ".join(f'"{name}"' for name in dict.fromkeys(names)) + "]"


def _patterns(chosen: Sequence[str], names: Iterable[str]) -> dict[str, str]:
    """For each chosen name a pattern with ``*`` for numbers that fits no other of ``names``, or the name itself."""
    short = {}
    for name in chosen:
        pattern = ".".join("*" if part.isdigit() else part for part in name.split("."))
        others = set(fnmatch.filter(names, pattern)) - set(chosen)
        short[name] = name if others else pattern
    return short


# Blocks and names


def _check_model(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if is_converted(module):
            raise QFrameworkError(
                f"convert_to_int8_training: model must be a float model, got a {type(model).__name__} that is "
                f"converted already, in {name or 'itself'}. Call restore_float first"
            )
    wrapper = type(model).__name__
    if is_compiled(model) or wrapper in ("DistributedDataParallel", "FullyShardedDataParallel"):
        raise QFrameworkError(
            f"convert_to_int8_training: model must not be wrapped, got a {wrapper}. Convert it before wrapping"
        )


def _places(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Every name of every module."""
    places: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        places.setdefault(module, []).append(name)
    return places


def _units(blocks: Iterable[nn.Module], everywhere: dict[nn.Module, list[str]]) -> dict[nn.Module, list[_Place]]:
    """The modules that need a decision, with all their places in blocks."""
    found: dict[nn.Module, list[_Place]] = {}
    for block in blocks:
        for local, module, reader in units(block):
            places = found.setdefault(module, [])
            places += [_Place(f"{name}.{local}" if name else local, local, reader) for name in everywhere[block]]
    return found


def _outside(blocks: Iterable[nn.Module], everywhere: dict[nn.Module, list[str]]) -> tuple[str, ...]:
    """The names of linears that are in no block."""
    inside = {id(module) for block in blocks for module in block.modules()}
    outside = {each: names[0] for each, names in everywhere.items() if id(each) not in inside}
    return tuple(name for each, name in outside.items() if isinstance(each, nn.Linear) or linear_role(each))


def _ancestors(name: str) -> set[str]:
    """The names of all modules that contain a module; that of the model is empty."""
    parts = name.split(".") if name else []
    return {".".join(parts[:end]) for end in range(len(parts))}


def _matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether ``name`` or a module that contains it matches one of ``patterns``."""
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns for path in (*_ancestors(name), name))


def _names_in(model: nn.Module, argument: str, value: Sequence[str]) -> tuple[str, ...]:
    patterns = names_in(value, f"convert_to_int8_training: {argument}")
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise QFrameworkError(
                f"convert_to_int8_training: {argument} must match modules of {type(model).__name__}, got {pattern!r}"
            )
    return patterns


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The outermost blocks of a model in their order, each once."""
    return _find_blocks(model, None)


def _find_blocks(model: nn.Module, patterns: Sequence[str] | None) -> list[nn.Module]:
    """The outermost blocks in their order, each once."""
    if patterns is None:
        found = list(blocks_below(model))
    else:
        modules = dict(model.named_modules(remove_duplicate=False))
        fitting = [name for name in modules if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
        found = [modules[name] for name in fitting if not _ancestors(name) & set(fitting)]
    if not found:
        items = list_items(model)
        example = f", perhaps {_listed(_patterns(items, items).values())}" if items else ", if it has any"
        raise UnsupportedError(
            "convert_to_int8_training: model must have transformer blocks, which are modules with normalizations, "
            f"attention and linears beside it, got a {type(model).__name__} without. Name its blocks in blocks="
            + example
        )
    return list(dict.fromkeys(found))
