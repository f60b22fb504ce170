"""The role of each module of a transformer block in the INT8 data flow, found by what it computes, not by its name.

Activations and normalizations are evaluated on a few numbers, so that a GELU of any class is found and an RMSNorm that
scales by ``1 + weight`` is not mistaken for one that scales by ``weight``. Names only say what is worth evaluating.
"""

from __future__ import annotations

import ast
import dis
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from types import CodeType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from qframework.compat.dispatch import is_traceable_wrapper_subclass
from qframework.compat.modules import parameters, submodules, with_parameters, with_submodules
from qframework.errors import UnsupportedError
from qframework.numerics import FLOAT_DTYPES

Role = Literal["linear", "conv1d", "layer_norm", "rms_norm", "activation", "dropout", "layer_scale", "drop_path"]
ORIGIN = "_float_origin"  # the attribute of a converted module that says what it was
GATED = ("gate_proj", "up_proj", "down_proj", "act_fn")
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
}
# As PyTorch defines them: if a library patches them later, modules may compute something else.
_LINEAR, _DROPOUT = nn.Linear.forward, nn.Dropout.forward
# GELU and its tanh approximation differ by up to 5e-4; FP32 formulas of the same function by less than this.
_SAME = 2e-5
# Inputs for activations, also far from zero, where some have a bound.
_NEAR = torch.linspace(-6, 6, 97, dtype=torch.float32, device="cpu")
_FAR = torch.logspace(-6, 6, 385, dtype=torch.float32, device="cpu")
# Since Python 3.12 the lowest bit of LOAD_ATTR says whether a method is loaded, in place of LOAD_METHOD.
_METHOD_FLAG = sys.version_info >= (3, 12)
# Values of ``training``, twice because some modules count their calls.
_MODES = (False, True, False, True)
# What an instance of a subclass of nn.Linear may hold besides what one of nn.Linear does.
_PLAIN = (bool, int, float, str, torch.dtype, torch.device)
# Magnitudes of inputs: small ones reveal an epsilon, large ones a bound.
_MAGNITUDES = (1.0, 1e-3, 1e-6, 1e4)
_DROP_PATHS = ("DropPath", "StochasticDepth")
_NORMS = ("LayerNorm", "RMSNorm")  # T5's RMSNorm is called T5LayerNorm
_ANY_SHAPE = (24,)  # of what a normalization without parameters is tried with


def role_of(module: nn.Module) -> Role | None:
    """The role of ``module``, or None if no INT8 module computes the same."""
    kind = _kind(module)
    if kind.endswith("LayerScale") and _computes(module, scale_name(module), _layer_scale):
        return "layer_scale"
    if kind.endswith(_DROP_PATHS) and _drops_paths(module):
        return "drop_path"
    if type(module).forward is _DROPOUT:
        return "dropout"
    if activation_kind(module) is not None:
        return "activation"
    return linear_role(module) or norm_role(module)


def lookalike(module: nn.Module) -> str | None:
    """Why ``module``, which has no role, only resembles a known module; None if it resembles none."""
    kind = _kind(module)
    near = _activation_like(module, _NEAR, modes=(False,))
    if near is not None:
        return f"it computes {near} near zero, but not for all inputs in both modes"
    if kind.endswith(_DROP_PATHS) and hasattr(module, "drop_prob"):
        return "it does not drop whole samples with probability drop_prob as timm's DropPath does"
    if not _may_normalize(module):
        return None
    for name, formula in (("LayerNorm", _layer_norm), ("RMSNorm", _rms_norm)):
        if _computes(module, "weight", formula, magnitudes=(1e3,)):
            return f"it computes {name} of large inputs, but not of small ones: its epsilon is not known"
    return None


def linear_role(module: nn.Module) -> Role | None:
    """``"linear"`` for nn.Linear and subclasses that compute the same, ``"conv1d"`` for GPT-2's Conv1D, or None."""
    if isinstance(module, nn.Linear):
        return "linear" if type(module).forward is _LINEAR or _is_linear(module) else None
    return "conv1d" if _kind(module) == "Conv1D" and hasattr(module, "nf") and _is_conv1d(module) else None


def _kind(module: nn.Module) -> str:
    """The name of a module's class, without parametrizations."""
    return parametrize.type_before_parametrizations(module).__name__


def norm_role(module: nn.Module) -> Role | None:
    """``"layer_norm"`` or ``"rms_norm"`` over the last dimension, with a weight or, as in OLMo, without; or None."""
    if not _may_normalize(module):
        return None
    if _computes(module, "weight", _layer_norm):
        return "layer_norm"
    return None if weight_offset(module) is None else "rms_norm"


def _may_normalize(module: nn.Module) -> bool:
    """Whether ``module`` may be a normalization, and may be evaluated: buffers might be written to."""
    if any(True for _ in module.children()):
        return False
    known = isinstance(module, nn.LayerNorm | nn.RMSNorm)
    return known or (any(name in _kind(module) for name in _NORMS) and not any(True for _ in module.buffers()))


def weight_offset(module: nn.Module) -> float | None:
    """What an RMSNorm adds to its weight: 0, or 1 as in Gemma; None if it is no RMSNorm."""
    return next((each for each in (0.0, 1.0) if _computes(module, "weight", partial(_rms_norm, offset=each))), None)


def scale_name(module: nn.Module) -> str:
    """The name of the only parameter of a LayerScale, ``gamma`` in timm and ``lambda1`` in transformers."""
    return next(iter(parameters(module)), "gamma")


def norm_eps(module: nn.Module) -> float:
    """The epsilon of a normalization; that of FP32 if it is None."""
    named = (value for name, value in vars(module).items() if "eps" in name.lower() and isinstance(value, (int, float)))
    eps = getattr(module, "eps", getattr(module, "variance_epsilon", next(named, None)))
    return torch.finfo(torch.float32).eps if eps is None else float(eps)


def activation_kind(module: nn.Module) -> str | None:
    """The name in ACTIVATIONS of the function that ``module``, without parameters or children, computes, or None."""
    return _activation_like(module, torch.cat([_NEAR, _FAR, -_FAR]))


def _activation_like(module: nn.Module, x: Tensor, modes: Sequence[bool] = _MODES) -> str | None:
    """``activation_kind`` for the inputs ``x`` only."""
    name = type(module).__name__.lower()
    if not any(part in name for part in ("gelu", "silu", "swish", "relu", "activation")):
        return None
    if any(True for _ in module.parameters()) or any(True for _ in module.children()):
        return None
    with _probing():
        wanted = ((kind, function(x)) for kind, function in ACTIVATIONS.items())
        return next((kind for kind, y in wanted if _gives(_probe(module), x, y, modes)), None)


def writes_input(module: nn.Module) -> bool:
    """Whether ``module`` writes its result to its input, as ``nn.ReLU(inplace=True)`` does."""
    with _probing():
        shape = next((parameter.shape for parameter in module.parameters()), (97,))
        x = _random_numbers()(2, *shape)
        parameters = {name: torch.full(each.shape, 2.0) for name, each in module.named_parameters(recurse=False)}
        given = x.clone()
        _forward(_probe(module, **parameters), given)
        return not torch.equal(given, x)


def _drops_paths(module: nn.Module) -> bool:
    """Whether ``module`` computes the same as Int8DropPath, for several probabilities and many samples."""
    drop_prob, scales = getattr(module, "drop_prob", 0), getattr(module, "scale_by_keep", True)
    if not hasattr(module, "drop_prob") or not isinstance(drop_prob, (int, float, type(None))):
        return False
    with _probing():
        torch.default_generator.manual_seed(0)  # of the CPU only; _probing restores it
        x = _random_numbers()(512, 3, 2)
        for p in (0.0, 0.25, 0.75):
            probe = _probe(module)
            probe.__dict__["drop_prob"] = p
            probe.training = False
            if not _same(_forward(probe, x.clone()), x):
                return False
            probe.training = True
            y, factor = _forward(probe, x.clone()), 1 / (1 - p) if scales else 1.0
            if not isinstance(y, Tensor) or y.shape != x.shape:
                return False
            kept = y.flatten(1).abs().sum(1) > 0
            # The share of 512 samples that is kept has a standard deviation of at most 0.02.
            if not _same(y, x * factor * kept.view(-1, 1, 1)) or abs(float(kept.float().mean()) - (1 - p)) > 0.1:
                return False
    return True


def is_gated_mlp(module: nn.Module) -> bool:
    """Whether ``module`` is ``down_proj(act_fn(gate_proj(x)) * up_proj(x))``, as in Llama, for small linears."""
    children = dict(module.named_children())
    if set(children) != set(GATED) or any(True for _ in module.parameters(recurse=False)):
        return False
    if activation_kind(children["act_fn"]) is None or not all(linear_role(children[name]) for name in GATED[:-1]):
        return False
    probe, act = _probe(module), nn.SiLU()
    with _probing():
        gate, up, down = (nn.Linear(*shape, dtype=torch.float32) for shape in ((3, 5), (3, 5), (5, 3)))
        with_submodules(probe, **dict(zip(GATED, (gate, up, down, act), strict=True)))
        unit = torch.linspace(-2, 2, 6, dtype=torch.float32).view(2, 3)
        tried = [unit * magnitude for magnitude in _MAGNITUDES]
        return all(_gives(probe, x, down(act(gate(x)) * up(x))) for x in tried)


# Evaluation of modules: on the CPU, with few values, and without side effects


@contextmanager
def _probing() -> Iterator[None]:
    """FP32 on the CPU; restores torch's generator afterwards."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.autocast("cpu", enabled=False):
        yield


def _random_numbers() -> Callable[..., Tensor]:
    """``torch.randn`` with a separate generator, since ``torch.manual_seed`` would also seed those of GPUs."""
    return partial(torch.randn, dtype=torch.float32, generator=torch.Generator("cpu").manual_seed(0))


def _probe(module: nn.Module, **own: Tensor) -> nn.Module:
    """A shallow copy of ``module`` with the parameters ``own`` and without parametrizations."""
    probe: nn.Module = object.__new__(parametrize.type_before_parametrizations(module))
    probe.__dict__.update(module.__dict__)
    with_parameters(probe, module, **own)
    return probe


def _forward(probe: nn.Module, x: Tensor) -> Any:
    """The result of ``forward`` of ``probe``'s class for ``x``, without hooks; None if it does not take one tensor."""
    try:
        return type(probe).forward(probe, x)
    except (TypeError, ValueError, RuntimeError, LookupError, AttributeError, AssertionError):
        return None


def _gives(probe: nn.Module, x: Tensor, wanted: Tensor | None, modes: Sequence[bool] = _MODES) -> bool:
    """Whether ``probe`` computes ``wanted`` from ``x`` in all ``modes``, and leaves ``x`` unchanged or ``wanted``."""
    for training in modes:
        probe.training, given = training, x.clone()
        if not _same(_forward(probe, given), wanted):
            return False
        if not torch.equal(given, x) and not _same(given, wanted):
            return False
    return True


def _computes(
    module: nn.Module,
    weight: str,
    formula: Callable[[nn.Module, Tensor | None, Tensor], Tensor | None],
    magnitudes: Sequence[float] = _MAGNITUDES,
) -> bool:
    """Whether ``module`` computes ``formula`` with a vector ``weight``, or None; tests it with random parameters."""
    shape = _vector(module, weight)
    if shape is None:
        return False
    with _probing():
        random = _random_numbers()
        made = {name: None if each is None else random(*shape) for name, each in parameters(module).items()}
        probe, unit = _probe(module, **made), random(2, 3, *shape)  # type: ignore[arg-type]
        tried = [unit * magnitude for magnitude in magnitudes]
        return all(_gives(probe, x, formula(probe, made.get(weight), x)) for x in tried)


def _vector(module: nn.Module, weight: str) -> tuple[int, ...] | None:
    """The shape of a module's vector ``weight``; of what it normalizes, or any, if it has no parameters at all."""
    own = parameters(module).get(weight)
    if own is not None:
        return None if is_lazy(own) or own.dim() != 1 else tuple(own.shape)
    if any(True for _ in module.parameters()) or getattr(module, weight, None) is not None:
        return None
    shape = getattr(module, "normalized_shape", _ANY_SHAPE)
    return tuple(shape) if isinstance(shape, Sequence) and len(shape) == 1 else None


def _is_linear(module: nn.Linear) -> bool:
    """Whether a subclass with a ``forward`` of its own computes ``x @ weight.T + bias``, as Falcon's does.

    Not one with anything more than nn.Linear has, which could change the result later, but numbers and names.
    """
    more = [value for name, value in vars(module).items() if name not in vars(nn.Linear(1, 1, device="meta"))]
    if any(True for _ in module.children()) or not all(value is None or isinstance(value, _PLAIN) for value in more):
        return False
    own = parameters(module)
    if set(own) != {"weight", "bias"} or any(True for _ in module.buffers()):
        return False
    with _probing():
        random = _random_numbers()
        weight, bias = random(3, 5), None if own["bias"] is None else random(3)
        probe = _probe(module, weight=weight, bias=bias)  # type: ignore[arg-type]
        probe.__dict__.update(in_features=5, out_features=3)
        tried = [random(*shape) * magnitude for shape in ((2, 5), (2, 4, 5)) for magnitude in (0.01, 1.0, 100.0)]
        cases = [(x, F.linear(x, weight, bias)) for x in tried]
        before = weight.clone()
        return all(_gives(probe, x, wanted) for x, wanted in cases) and torch.equal(weight, before)


def _is_conv1d(module: nn.Module) -> bool:
    """Whether ``module`` computes ``x @ weight + bias``."""
    with _probing():
        random = _random_numbers()
        weight, bias, x = random(3, 5), random(5), random(2, 3)
        probe = _probe(module, weight=weight, bias=bias)
        probe.__dict__.update(nf=5, nx=3)
        probe.__dict__.pop("weight", None)  # set if a hook computes it in each call
        return _gives(probe, x, x @ weight + bias)


def _layer_scale(module: nn.Module, gamma: Tensor | None, x: Tensor) -> Tensor | None:
    return None if gamma is None else gamma * x


def _layer_norm(module: nn.Module, weight: Tensor | None, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, parameters(module).get("bias"), norm_eps(module))


def _rms_norm(module: nn.Module, weight: Tensor | None, x: Tensor, offset: float = 0.0) -> Tensor:
    scale = 1.0 if weight is None else weight + offset
    return scale * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm_eps(module))


def _same(x: Any, y: Tensor | None) -> bool:
    if y is None or not isinstance(x, Tensor) or x.shape != y.shape or x.device != y.device:
        return False
    return bool(((x - y).abs() <= _SAME * (y.abs().amax().clamp(max=1) + y.abs())).all())


# Modules with a known role that cannot be converted


def obstacle(module: nn.Module) -> str | None:
    """Why an INT8 module cannot use the parameters of ``module``; None if it can."""
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            return f"{name} is not initialized: run the float model once first"
        if parameter.numel() == 0:
            return f"{name} has shape {tuple(parameter.shape)}, which is empty"
        if is_traceable_wrapper_subclass(parameter):
            return f"{name} is a {type(parameter).__name__}, not an ordinary tensor"
        if parameter.dtype not in FLOAT_DTYPES:
            return f"{name} has dtype {parameter.dtype}, not float32, float16 or bfloat16"
    return None


def is_converted(module: nn.Module) -> bool:
    """Whether ``convert_to_int8_training`` changed ``module``."""
    return ORIGIN in module.__dict__


def check_not_converted(model: nn.Module, argument: str) -> None:
    """Raise UnsupportedError, naming ``argument``, for a model that ``convert_to_int8_training`` changed."""
    name = next((name for name, module in model.named_modules() if is_converted(module)), None)
    if name is not None:
        raise UnsupportedError(
            f"{argument} must be a float model, got a {type(model).__name__} that convert_to_int8_training converted, "
            f"in {name or 'itself'}. Call qframework.training.restore_float(model) first"
        )


def own_forward(module: nn.Module) -> bool:
    """Whether ``forward`` was replaced on the module itself, as accelerate's hooks and some adapters do."""
    return "forward" in module.__dict__


def held(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """``named_children``, with children that have several names under each name."""
    return [(name, child) for name, child in submodules(module).items() if child is not None]


def reads_weights(module: nn.Module) -> bool:
    """Whether ``forward``, or a ``super`` method of it, reads the weight of a module instead of calling the module."""
    return any("weight" in code.co_names for code in _forwards(module))


def children_whose_weight_is_read(module: nn.Module, dtype: bool = True) -> set[str]:
    """The children whose weight ``forward`` reads, ``self.qkv.weight``; all where it reads weights in another way.

    Not those that it also calls, where only one of several paths reads the weight's values, as in Bloom, or another
    module's weight is read, as in adapters of PEFT; but those whose weight it gives to ``F.linear``. Code that asks
    for the dtype (T5's) does so on every path: with ``dtype``, its children count although it calls them.
    """
    read, kept, called = set[str](), set[str](), set[str]()
    for code in _forwards(module):
        steps = list(dis.get_instructions(code))
        called |= _called(steps)
        for owner, child, last, user in zip(steps, steps[1:], steps[2:], steps[3:], strict=False):
            if last.argval != "weight" or not last.opname.startswith("LOAD_ATTR"):
                continue
            if _is_self(child):  # the module's own weight
                continue
            if not _is_self(owner) or not child.opname.startswith("LOAD_ATTR"):
                read |= {name for name, _ in held(module)}
            else:
                (kept if user.argval == "dtype" else read).add(child.argval)
    return (kept if dtype else set()) | (read - called) | _multiplied_children(module)


def _multiplied_children(module: nn.Module) -> set[str]:
    """The children whose weight ``forward`` gives to ``F.linear``, on any of its paths; none if its source is unknown.

    timm's BEiT, EVA and Swin V2 compute ``F.linear(x, self.qkv.weight, bias)`` or ``self.qkv(x)``, as an option says.
    """
    return {child for code in _forwards(module) for child in _multiplied(code)}


@lru_cache(maxsize=1024)
def _multiplied(code: CodeType) -> frozenset[str]:
    """The names in ``linear(..., self.child.weight, ...)``."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, SyntaxError):  # no file with the source; a lambda in the middle of a line
        return frozenset()
    calls = [each for each in ast.walk(tree) if isinstance(each, ast.Call)]
    linears = [call for call in calls if getattr(call.func, "attr", getattr(call.func, "id", None)) == "linear"]
    given = [each for call in linears for each in (*call.args, *(keyword.value for keyword in call.keywords))]
    found = (re.fullmatch(r"self\.(\w+)\.weight", ast.unparse(each)) for each in given)
    return frozenset(match[1] for match in found if match)


def _called(steps: Sequence[dis.Instruction]) -> set[str]:
    """The names in ``self.child(...)``."""
    windows = zip(steps, steps[1:], steps[2:], steps[3:], strict=False)
    return {child.argval for before, owner, child, after in windows if _is_call(before, owner, child, after)}


def _is_call(before: dis.Instruction, owner: dis.Instruction, child: dis.Instruction, after: dis.Instruction) -> bool:
    """Whether ``owner`` and ``child`` begin ``self.child(...)``: loaded as a method is, or beside a null.

    The null is there with ``*args`` or ``**kwargs``: in front of the owner, since Python 3.13 behind the child.
    """
    if not _is_self(owner):
        return False
    if child.opname == "LOAD_METHOD":
        return True
    if child.opname != "LOAD_ATTR":
        return False
    if _METHOD_FLAG and (child.arg or 0) & 1:
        return True
    of_child = after.opname in ("LOAD_ATTR", "LOAD_METHOD")
    return after.opname == "PUSH_NULL" or (before.opname == "PUSH_NULL" and not of_child)


def _is_self(step: dis.Instruction) -> bool:
    names = step.argval if isinstance(step.argval, tuple) else (step.argval,)  # two in one instruction since 3.13
    return step.opname.startswith("LOAD_FAST") and names[-1] == "self"


def _forwards(module: nn.Module) -> Iterator[CodeType]:
    """The code of ``forward``, and of the ``super`` methods that it calls."""
    for forward in (vars(kind).get("forward") for kind in type(module).__mro__):
        code = getattr(inspect.unwrap(forward), "__code__", None) if forward is not None else None
        if code is not None:
            yield code
            if "super" not in code.co_names:
                return
