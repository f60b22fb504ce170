"""The cases of the benchmark of operators between blocks: operands, and one case for each provider and direction.

Every provider gets the same float operands ``(tokens, hidden)``, converted to its own format outside the timed region.
Results are compared with torch in FP64, forward and through autograd, on the operands that the provider sees. A result
in blocks may be off by half a step of its block, a result in FP16 by a few roundings.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.harness import ROUNDOFF, WrongResultError, relative_error
from qframework.kernels.blocks.dropout import factor_of, keep_mask_ref
from qframework.kernels.blocks.format import BLOCK_SIZES, BlockSize, block_size_name, spread_scale

Shape = tuple[int, int]
Blocks = tuple[Tensor, Tensor]
EPS, P, SEED = 1e-5, 0.1, 1234
STEP = 0.51  # steps of a block that a right result may be off: half, plus float32 rounding
# Half the relative error of NVIDIA's tanh, 2^-11, and of GELU's fit of erf.
HALF_TANH = (2.0**-11 + 4e-5) / 2
FLOAT32 = 1e-4  # of the largest value: error of polynomials and of sums in another order
ops = torch.ops.qframework


class Operator(NamedTuple):
    """A function of float tensors, and the same from blocks to blocks."""

    function: Callable[..., Tensor]
    inputs: int  # tensors (tokens, hidden); parameters (hidden,) come after them
    parameters: int
    forward: Callable[..., tuple[Tensor, ...]]  # of inputs in blocks, parameters, statistics or seed, block size
    backward: Callable[..., tuple[Tensor, ...]] | None
    moved: tuple[int, int]  # tensors (tokens, hidden) that are read or written, forward and backward


@dataclass(frozen=True)
class Given:
    """Float operands."""

    inputs: tuple[Tensor, ...]
    gradient: Tensor
    parameters: tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    """The timed function, and the check of its result: a relative error, or WrongResultError."""

    fn: Callable[[], Sequence[Tensor]]
    check: Callable[[Sequence[Tensor]], float]
    dtype: str


def _activation(kind: str) -> dict[str, Any]:
    return {
        "forward": lambda x, _, size: ops.block_activation(*x, kind, size),
        "backward": lambda dy, x, _, size: ops.block_activation_backward(*dy, *x, kind, size),
        "moved": (2, 3),
    }


def _layer_norm(x: Blocks, w: Tensor, b: Tensor, saved: Any, size: BlockSize) -> tuple[Tensor, ...]:
    return ops.block_layer_norm(*x, w, b, EPS, size, saved.statistics)


def _layer_norm_alone(x: Blocks, w: Tensor, b: Tensor, saved: Any, size: BlockSize) -> tuple[Tensor, ...]:
    return ops.block_layer_norm(*x, w, b, EPS, size, None)


def _layer_norm_backward(
    dy: Blocks, x: Blocks, w: Tensor, b: Tensor, saved: Any, size: BlockSize
) -> tuple[Tensor, ...]:
    return ops.block_layer_norm_backward(*dy, *x, w, saved.mean, saved.rstd, size)


def _float_layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], w, b, EPS)


OPERATORS = {
    "gelu": Operator(F.gelu, 1, 0, **_activation("gelu")),
    "silu": Operator(F.silu, 1, 0, **_activation("silu")),
    "swiglu": Operator(
        lambda gate, up: F.silu(gate) * up,
        2,
        0,
        lambda gate, up, _, size: ops.block_gated_activation(*gate, *up, "silu", size),
        lambda dy, gate, up, _, size: ops.block_gated_activation_backward(*dy, *gate, *up, "silu", size),
        (3, 5),
    ),
    "layer_norm": Operator(_float_layer_norm, 1, 2, _layer_norm, _layer_norm_backward, (2, 3)),
    "layer_norm_alone": Operator(_float_layer_norm, 1, 2, _layer_norm_alone, None, (2, 3)),
    "rms_norm": Operator(
        lambda x, w: F.rms_norm(x, x.shape[-1:], w, EPS),
        1,
        1,
        lambda x, w, saved, size: ops.block_rms_norm(*x, w, EPS, size, saved.statistics),
        lambda dy, x, w, saved, size: ops.block_rms_norm_backward(*dy, *x, w, saved.rms_rstd, size),
        (2, 3),
    ),
    "dropout": Operator(
        lambda x: F.dropout(x, P),
        1,
        0,
        lambda x, saved, size: ops.block_dropout(*x, P, saved.seed, size),
        lambda dy, x, saved, size: ops.block_dropout(*dy, P, saved.seed, size),
        (2, 2),
    ),
    "add": Operator(torch.add, 2, 0, lambda x, y, _, size: ops.block_add(*x, *y, size, False), None, (3, 0)),
    "add_statistics": Operator(torch.add, 2, 0, lambda x, y, _, size: ops.block_add(*x, *y, size, True), None, (3, 0)),
}


@functools.lru_cache(maxsize=1)
def operands(shape: Shape, device: str) -> Given:
    """Normal values with different magnitudes per channel, as in activations, and small gradients."""
    generator = torch.Generator(device).manual_seed(SEED)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device)

    channels = (0.5 * random(shape[1])).exp()
    inputs = random(*shape) * channels + 0.1, random(*shape) * channels
    return Given(inputs, 1e-3 * random(*shape), (1 + 0.1 * random(shape[1]), 0.1 * random(shape[1])))


def exact(operator: Operator, name: str, inputs: Sequence[Tensor], given: Sequence[Tensor], dy: Tensor | None) -> Any:
    """In FP64, the result, or with ``dy`` the gradients of inputs and parameters."""
    leaves = [x.detach().double().requires_grad_(dy is not None) for x in (*inputs, *given)]
    if name == "dropout":
        seed = torch.tensor([SEED], device=inputs[0].device)
        y = torch.where(keep_mask_ref(seed, inputs[0].shape, P), leaves[0] * factor_of(P), 0.0)
    else:
        y = operator.function(*leaves)
    return [y] if dy is None else list(torch.autograd.grad(y, leaves, dy.double()))


class _Saved:
    """Values that the backward pass needs, and the statistics that an addition passes to a normalization."""

    def __init__(self, x: Blocks, block_size: BlockSize) -> None:
        q, _ = x
        value = q.float() * spread_scale(x[1], q.shape, block_size)
        variance, self.mean = torch.var_mean(value, -1, correction=0)
        self.statistics = torch.stack((self.mean, variance), -1)
        self.rstd = torch.rsqrt(variance + EPS)
        self.rms_rstd = torch.rsqrt(value.square().mean(-1) + EPS)
        self.seed = torch.tensor([SEED], device=q.device)


def in_blocks(name: str, direction: str, given: Given, block_size: BlockSize) -> Case:
    """The operator from blocks to blocks."""
    operator = OPERATORS[name]
    inputs: list[Blocks] = [ops.block_quantize(x, block_size) for x in given.inputs[: operator.inputs]]
    dy: Blocks = ops.block_quantize(given.gradient, block_size)
    parameters, saved = given.parameters[: operator.parameters], _Saved(inputs[0], block_size)
    floats = [_values(*x, block_size) for x in inputs]

    def forward() -> Sequence[Tensor]:
        return operator.forward(*inputs, *parameters, saved, block_size)

    def backward() -> Sequence[Tensor]:
        assert operator.backward is not None
        return operator.backward(dy, *inputs, *parameters, saved, block_size)

    def check(results: Sequence[Tensor]) -> float:
        gradient = _values(*dy, block_size) if direction == "backward" else None
        right = exact(operator, name, floats, parameters, gradient)
        count = 1 if direction == "forward" else operator.inputs
        off = [HALF_TANH * each for each in times_tanh(name, floats, gradient)]
        errors = [_block_error(results[2 * i], results[2 * i + 1], right[i], block_size, off[i]) for i in range(count)]
        if direction == "backward":
            sums = zip(results[2 * count :], right[count:], strict=True)
            errors += [_sum_error(result, each) for result, each in sums]
        return max(errors[:count])

    return Case(
        forward if direction == "forward" else backward, check, f"int8, blocks of {block_size_name(block_size)}"
    )


def times_tanh(name: str, inputs: Sequence[Tensor], dy: Tensor | None) -> list[Tensor]:
    """The magnitude of x in ``x / 2 (1 + tanh)`` for each result, which the error of tanh is multiplied with."""
    nothing = torch.zeros(())
    if name not in ("gelu", "silu", "swiglu"):
        return [nothing] * len(inputs)
    if dy is None:
        return [functools.reduce(torch.mul, inputs).abs()]
    return {"gelu": [dy.abs()], "silu": [nothing], "swiglu": [nothing, (dy * inputs[0]).abs()]}[name]


def _values(q: Tensor, scale: Tensor, block_size: BlockSize) -> Tensor:
    return q.double() * spread_scale(scale, q.shape, block_size).double()


def _block_error(q: Tensor, scale: Tensor, right: Tensor, block_size: BlockSize, computed: Tensor) -> float:
    """The relative error; ``computed`` is the tolerance of each value before rounding."""
    off = (_values(q, scale, block_size) - right).abs()
    allowed = STEP * spread_scale(scale, q.shape, block_size).double() + FLOAT32 * right.abs().amax() / 127 + computed
    outside = int((~(off <= allowed)).sum())
    error = relative_error(_values(q, scale, block_size), right)
    if outside:
        raise WrongResultError(f"values must be at most half a step off, but {outside} of {q.numel()} are more", error)
    return error


def _sum_error(result: Tensor, right: Tensor) -> float:
    error = relative_error(result, right)
    if not error <= FLOAT32:
        raise WrongResultError(f"error of a parameter's gradients must be at most {FLOAT32:g}, got {error:.3g}", error)
    return error


def in_float16(name: str, direction: str, given: Given, compiled: bool) -> Case:
    """torch's own function, eager or compiled by Inductor; the backward pass is autograd's."""
    operator = OPERATORS[name]
    inputs = [x.half().requires_grad_() for x in given.inputs[: operator.inputs]]
    parameters = [x.half().requires_grad_() for x in given.parameters[: operator.parameters]]
    dy = given.gradient.half()
    function = torch.compile(operator.function, dynamic=False) if compiled else operator.function

    def forward() -> Sequence[Tensor]:
        with torch.no_grad():
            return [function(*inputs, *parameters)]

    if direction == "forward":
        return Case(forward, _float_check(name, inputs, parameters, None), "float16")
    with torch._functorch.config.patch(donated_buffer=False):  # the backward pass runs many times
        y = function(*inputs, *parameters)

    def backward() -> Sequence[Tensor]:
        return torch.autograd.grad(y, [*inputs, *parameters], dy, retain_graph=True)

    return Case(backward, _float_check(name, inputs, parameters, dy), "float16")


def _float_check(
    name: str, inputs: Sequence[Tensor], parameters: Sequence[Tensor], dy: Tensor | None
) -> Callable[[Sequence[Tensor]], float]:
    def check(results: Sequence[Tensor]) -> float:
        if name == "dropout":
            return _dropout_error(results[0], inputs[0].detach() if dy is None else dy)
        right = exact(OPERATORS[name], name, inputs, parameters, dy)
        errors = [relative_error(result.detach(), each.detach()) for result, each in zip(results, right, strict=True)]
        if not max(errors) <= 8 * ROUNDOFF[torch.float16]:
            raise WrongResultError(f"off by {max(errors):.3g}", max(errors))
        return max(errors)

    return check


def _dropout_error(result: Tensor, x: Tensor) -> float:
    """torch draws its own mask: kept values must be x / (1 - p), and a share of about p of each row zero."""
    kept = result != 0
    error = relative_error(result[kept], x[kept].double() / (1 - P))
    dropped = 1 - kept.double().mean(-1)
    deviation = (P * (1 - P) / result.shape[-1]) ** 0.5
    if not error <= 8 * ROUNDOFF[torch.float16] or float((dropped - P).abs().amax()) > 7 * deviation:
        raise WrongResultError(f"off by {error:.3g}, up to {float(dropped.amax()):.3g} of a row are zero", error)
    return error


def provider_of(block_size: BlockSize) -> str:
    """Our provider in blocks of that size: ``qframework_b32``, ``qframework_b1x128``."""
    return f"qframework_b{block_size_name(block_size)}"


PROVIDERS: dict[str, Callable[[str, str, Given], Case]] = {
    **{provider_of(size): functools.partial(in_blocks, block_size=size) for size in BLOCK_SIZES},
    "torch_fp16": functools.partial(in_float16, compiled=False),
    "inductor_fp16": functools.partial(in_float16, compiled=True),
}
