"""Attention whose gradient is computed in 8 bit, for training (SageBwd).

Formula, with L the log-sum-exp of the logits and s the scale of the logits::

    S = s Q (K - mean(K))^T                               INT8, one scale for 128 queries and for 64 keys
    forward:  P = exp(S - L), O = P V                     by any variant with such queries and keys
    backward: delta = rowsum(O * dO) - dL
              P  = exp(S - L)                             S in INT8 again, from the same integers
              dP = dO V^T                                 in 16 bit: its error would be multiplied by P and summed
              dS = P * (dP - delta)
              dV = P^T dO,  dK = s dS^T Q,  dQ = s dS (K - mean(K))

The last three are products of integers with ``gradient="int8"``, and of 16-bit numbers with ``"mixed"``, in which Q and
K - mean(K) are their integers times their scales, in 16 bit: the gradient at the rounded Q and K. On Hopper cuDNN
computes that from O and L, but not with dropout or a gradient of L; the forward pass returns the rounded Q and K, which
are kept for it instead of Q and K. The forward pass is then the integer exponential where Hopper's kernel has it, the
only one that is faster than 16 bit there. Its L is less what its weights exceed exact ones by on average.

As integers, dO has one scale for 64 queries, Q and K - mean(K) have those of S. P and dS have one scale for each key
and each block of queries in dV and dK, and one for each query and each block of keys in dQ. That is finer than the
paper's one scale for a block, and costs less: the largest of a row needs no exchange between warps.

dQ has no term ``rowsum(dS) mean(K)``: exact rows of dS sum to zero, and what is left of the sums after rounding, times
a large mean, is all error. A gradient of L is one of the logits of K - mean(K), too, so rows then sum to dL rightly.

INT8 tensor cores of Hopper read both operands along the axis that is summed over. S and dP have it contiguous as it is.
The products for dV, dK and dQ sum over tokens: their right operands, integers of dO, Q and K, are copied with tokens
contiguous; their left ones, P and dS, are computed in registers and change places there. 16-bit tensor cores read
either order, which is why ``"mixed"`` needs no copies.

Layout: as ``sage_attention``. Float32 is multiplied in BF16 on a GPU and in float32 on a CPU.
Reference and CPU implementation: ``reference.py``.
Source: SageAttention3 (arXiv 2505.11594, section 4) and SageBwd (arXiv 2603.02170).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from qframework.compat.fused_attention import Backward, fused_backward, has_kernel, place_of_keys
from qframework.errors import QFrameworkError, UnsupportedError, either
from qframework.kernels.attention.arguments import (
    Canonical,
    SageAttentionArguments,
    canonical,
    check_dense,
    default_scale,
    empty_result,
    in_four_dimensions,
)
from qframework.kernels.attention.hopper import specialized
from qframework.kernels.attention.hopper.prepare import Rounded, prepare_triton
from qframework.kernels.attention.int8_gradient.forward import Dropout, forward_ref, forward_triton
from qframework.kernels.attention.int8_gradient.reference import GradientOperands, delta_ref, gradients_ref
from qframework.kernels.attention.int8_gradient.triton import delta_triton, gradients_triton
from qframework.kernels.attention.operands import LOG2_E, Bias, last_contiguous, query_memory_order
from qframework.kernels.attention.pipeline import (
    TORCH_STEPS,
    TRITON_STEPS,
    Steps,
    quantized_qk,
    quantized_values,
    reached,
)
from qframework.kernels.attention.round_tokens import round_tokens_ref, round_tokens_triton
from qframework.kernels.attention.variants import VARIANTS, AttentionVariant, resolve
from qframework.kernels.runtime.checks import check_dtype, check_same_device, check_shape
from qframework.kernels.runtime.chip import capability_of, check_device
from qframework.kernels.runtime.operator import LIBRARY, declare
from qframework.kernels.runtime.replay import recording
from qframework.numerics import FLOAT_DTYPES

Gradient = Literal["int8", "mixed"]
_QuantizedQK = tuple[Tensor, Tensor, Tensor, Tensor]
_INTEGER = VARIANTS["integer_exp"]
PER_BLOCK = AttentionVariant(8, "per_block", "fp16", "fp32")
"""What ``"auto"`` means here, but for the integer exponential on Hopper: P V in 16 bit."""

_NAME = "int8_gradient_attention"


def check_forward(variant: str) -> AttentionVariant:
    """The variant of the forward pass. Raises UnsupportedError for unsuitable ones."""
    chosen = PER_BLOCK if variant == "auto" else resolve(variant)
    if (chosen.qk_bits, chosen.granularity, chosen.smooth_q) != (8, "per_block", False):
        raise UnsupportedError(
            f"{_NAME}: variant must quantize Q and K to 8 bits per block, without smooth Q, as auto, sage_b and "
            f"sage_vb do, since the backward pass uses the same integers, got {variant!r}"
        )
    return chosen


def check_gradient(gradient: str) -> None:
    """Raise UnsupportedError unless ``gradient`` is one of Gradient."""
    if gradient not in get_args(Gradient):
        raise UnsupportedError(f"{_NAME}: gradient must be {either(get_args(Gradient))}, got {gradient!r}")


def check_dropout(operator: str, p: float, seed: Tensor | None, query: Tensor) -> None:
    """Raise QFrameworkError unless ``seed`` is one int64 on ``query``'s device, or None without dropout."""
    if not 0.0 <= p <= 1.0:
        raise QFrameworkError(f"{operator}: dropout_p must be between 0 and 1, got {p}")
    if (p > 0.0) != (seed is not None):
        raise QFrameworkError(f"{operator}: seed must be given with dropout and only then, got dropout_p={p}")
    if seed is not None:
        check_dtype(operator, "seed", seed, (torch.int64,))
        check_same_device(operator, query, seed=seed)
        check_shape(operator, "seed", seed, (1,))


class Int8GradientArguments(NamedTuple):
    """The arguments of ``qframework::int8_gradient_attention``; see :func:`qframework.sage_attention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    variant: str = "auto"
    gradient: str = "int8"
    smooth_k: bool = True
    dropout_p: float = 0.0
    seed: Tensor | None = None

    @property
    def dense(self) -> SageAttentionArguments:
        """The arguments that all dense attention operators share."""
        return SageAttentionArguments(*self[:3], None, self.is_causal, self.scale, self.enable_gqa)

    @property
    def forward(self) -> AttentionVariant:
        """The variant of the forward pass where Hopper's integer exponential is not what ``"auto"`` means.

        ``"int8"``, which no fast backward pass follows, and dropout have the exact exponential.
        """
        chosen = check_forward(self.variant)
        exact = self.gradient == "int8" or self.seed is not None
        return replace(chosen, exponential="exact") if exact else chosen

    @property
    def keeps_rounded(self) -> bool:
        """Whether the forward pass returns the rounded Q and K, as cuDNN's backward pass on this GPU reads them.

        No setting that may change until then decides it.
        """
        if self.gradient != "mixed" or self.seed is not None or default_scale(self.query, self.scale) <= 0:
            return False
        return self.query.is_cuda and has_kernel(*self[:4])

    def check(self) -> None:
        """Raise UnsupportedError or QFrameworkError, naming the argument."""
        check_dense(self.dense, _NAME, FLOAT_DTYPES)
        check_forward(self.variant)
        check_gradient(self.gradient)
        check_dropout(_NAME, self.dropout_p, self.seed, self.query)
        if self.seed is not None and self.forward.pv != "fp16":
            raise UnsupportedError(
                f"{_NAME}: variant must multiply P and V in 16 bit with dropout, as auto and sage_b do, got "
                f"{self.variant!r}"
            )
        lead = self.query.shape[: -3 if self.query.ndim > 3 else 1]
        for argument, x in (("key", self.key), ("value", self.value)):
            if x.shape[: len(lead)] != lead:
                raise QFrameworkError(
                    f"{_NAME}: {argument} must have query's batch dimensions {tuple(lead)}, got {tuple(x.shape)}"
                )

    def empty_result(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Uninitialized result, log-sum-exp, mean of the keys, and rounded Q and K, without elements if not kept."""
        key = self.key
        mean = key.new_empty((*key.shape[:-2], 1, key.shape[-1]), dtype=torch.float32)
        return (
            empty_result(self.query, self.value, self.query.dtype),
            self.query.new_empty(self.query.shape[:-1], dtype=torch.float32),
            mean,
            *(self._places() if self.keeps_rounded else (self.query.new_empty(0), key.new_empty(0))),
        )

    def _places(self) -> tuple[Tensor, Tensor]:
        """Uninitialized rounded Q and K."""
        query, key = (in_four_dimensions(x, self.query) for x in (self.query, self.key))
        batch, heads, tokens, channels = query.shape
        rounded = query_memory_order(batch, heads, tokens, channels, query, query.dtype)
        return rounded.view(self.query.shape), place_of_keys(key, query.is_contiguous()).view(self.key.shape)


class GradientSteps(NamedTuple):
    """The backward pass in one implementation."""

    forward: Steps
    delta: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    gradients: Callable[[GradientOperands], tuple[Tensor, Tensor, Tensor]]
    rounded: Callable[[Tensor, Tensor | None, float, float, str, Tensor | None], Tensor]
    fused: Callable[[Tensor, Tensor, Tensor, bool], Backward | None]  # another library's kernel for "mixed"


def attend(x: Int8GradientArguments, steps: GradientSteps) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The forward pass: the result, the log-sum-exp for keys without their mean, the mean, and rounded Q and K."""
    out, lse, mean, *kept = x.empty_result()
    q_kept, k_kept = kept
    found: Tensor | None
    call = canonical(x.dense)
    if call.q.numel() == 0 or call.k.numel() == 0 or x.value.shape[-1] == 0:
        return out.zero_(), lse.fill_(-torch.inf), mean.zero_(), q_kept.zero_(), k_kept.zero_()
    call = reached(call) if x.is_causal else call
    variant, bias, scale = x.forward, Bias(causal=x.is_causal), default_scale(x.query, x.scale)
    places = tuple(in_four_dimensions(t, x.query) for t in kept) if x.keeps_rounded else None
    if places is not None and _takes_integers(x, call):
        rounded = Rounded(places[0], places[1], mean.view(*call.k.shape[:2], 1, -1))
        operands = prepare_triton(call.q, call.k, call.v, _INTEGER, scale, x.smooth_k, rounded=rounded)
        result, found = steps.forward.attend(*operands, bias, _INTEGER, call.q.dtype, True, None)
        assert found is not None, "the log-sum-exp is asked for"
        return result.view(out.shape), found.view(lse.shape), mean, q_kept, k_kept
    qk, k_mean = quantized_qk(call.q, call.k, variant, scale, x.smooth_k, steps.forward, None)
    if places is not None:
        _rounded_qk(call, k_mean, scale, steps, places)
    if x.seed is not None:
        forward = forward_ref if steps.forward is TORCH_STEPS else forward_triton
        result, found = forward(qk, call.v, x.is_causal, Dropout(x.dropout_p, x.seed))
    else:
        values = quantized_values(call.v, variant, steps.forward, None)
        result, found = steps.forward.attend(qk, values, bias, variant, call.q.dtype, True, None)
    assert found is not None, "the log-sum-exp is asked for"
    mean = mean.zero_() if k_mean is None else k_mean.view(mean.shape)
    return result.view(out.shape), found.view(lse.shape), mean, q_kept, k_kept


def _takes_integers(x: Int8GradientArguments, call: Canonical) -> bool:
    """Whether the forward pass is Hopper's kernel with the integer exponential, which is faster than exact ones."""
    asked = x.variant == "auto" or x.forward == _INTEGER
    at = call.q.dtype, capability_of(call.q.device)
    return asked and specialized.fits(call.q, call.k, call.v, _INTEGER, *at)


class Int8GradientBackwardArguments(NamedTuple):
    """The arguments of ``qframework::int8_gradient_attention_backward``: the forward pass's and its results.

    ``query`` and ``key`` are the rounded ones, without K's mean, if they are kept (``rounded``). What then needs their
    integers quantizes them again, which finds the same ones but for the rounding to 16 bit.
    """

    grad_out: Tensor
    grad_lse: Tensor | None
    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    lse: Tensor
    k_mean: Tensor
    is_causal: bool
    scale: float | None
    gradient: str
    dropout_p: float = 0.0
    seed: Tensor | None = None
    rounded: bool = False

    @property
    def dense(self) -> SageAttentionArguments:
        """The arguments that all dense attention operators share."""
        return SageAttentionArguments(*self[2:5], None, self.is_causal, self.scale, True)

    def check(self) -> None:
        """Raise UnsupportedError or QFrameworkError, naming the argument."""
        name = f"{_NAME}_backward"
        check_dense(self.dense, name, FLOAT_DTYPES)
        check_gradient(self.gradient)
        check_dropout(name, self.dropout_p, self.seed, self.query)
        result = (*self.query.shape[:-1], self.value.shape[-1])
        for argument, x, shape in (
            ("grad_out", self.grad_out, result),
            ("out", self.out, result),
            ("lse", self.lse, result[:-1]),
            ("k_mean", self.k_mean, (*self.key.shape[:-2], 1, self.key.shape[-1])),
        ):
            check_shape(name, argument, x, shape)

    def empty_result(self) -> tuple[Tensor, Tensor, Tensor]:
        """Uninitialized gradients of query, key and value, in the order of their dimensions in memory."""
        query, key, value = (_dense_like(x) for x in (self.query, self.key, self.value))
        return query, key, value


def gradients(x: Int8GradientBackwardArguments, steps: GradientSteps) -> tuple[Tensor, Tensor, Tensor]:
    """The backward pass."""
    call = canonical(x.dense)
    if call.q.numel() == 0 or call.k.numel() == 0 or x.value.shape[-1] == 0:
        query, key, value = x.empty_result()
        return query.zero_(), key.zero_(), value.zero_()
    keys = call.k.shape[2]
    call = reached(call) if x.is_causal else call
    dq, dk, dv = _fused_gradients(x, call, steps) or steps.gradients(gradient_operands(x, call, steps))
    unreached = keys - call.k.shape[2]
    dk, dv = (F.pad(t, (0, 0, 0, unreached)) if unreached else t for t in (dk, dv))
    dq, dk, dv = (_ordered_as(like, t) for t, like in ((dq, x.query), (dk, x.key), (dv, x.value)))
    return dq, dk, dv


def _dense_like(x: Tensor) -> Tensor:
    """Uninitialized, without gaps: ``(..., H, N, D)`` with tokens before heads in memory where ``x`` has them so."""
    if x.ndim < 4 or x.stride(-3) >= x.stride(-2):
        return x.new_empty(x.shape)
    *lead, heads, tokens, channels = x.shape
    return x.new_empty((*lead, tokens, heads, channels)).transpose(-3, -2)


def _ordered_as(like: Tensor, x: Tensor) -> Tensor:
    """``x`` with the shape and dtype of ``like``, as :func:`_dense_like` has it in memory."""
    x = x.reshape(like.shape)
    turned = like.ndim >= 4 and like.stride(-3) < like.stride(-2)
    ready = x.dtype == like.dtype and (x.transpose(-3, -2) if turned else x).is_contiguous()
    return x if ready else _dense_like(like).copy_(x)


def _fused_gradients(
    x: Int8GradientBackwardArguments, call: Canonical, steps: GradientSteps
) -> tuple[Tensor, Tensor, Tensor] | None:
    """The gradients by another library's kernel, or None."""
    if x.gradient != "mixed" or x.seed is not None or x.grad_lse is not None:
        return None
    backward = steps.fused(call.q, call.k, call.v, x.is_causal)
    if backward is None:
        return None
    scale = default_scale(x.query, x.scale)
    shape = call.q.shape[:3]
    grad, out = (t.reshape(*shape, -1) for t in (x.grad_out, x.out))
    grad = last_contiguous(grad)  # of a sum it is one number, expanded
    return backward(grad, *_rounded_of(x, call, scale, steps), call.v, out, x.lse.reshape(shape), x.is_causal, scale)


def _mean_of(x: Int8GradientBackwardArguments, call: Canonical) -> Tensor | None:
    """What is to be subtracted from the keys."""
    return None if x.rounded else x.k_mean.reshape(*call.k.shape[:2], 1, -1)


def _rounded_of(
    x: Int8GradientBackwardArguments, call: Canonical, scale: float, steps: GradientSteps
) -> tuple[Tensor, Tensor]:
    """The rounded Q and K of the forward pass."""
    return (call.q, call.k) if x.rounded else _rounded_qk(call, _mean_of(x, call), scale, steps)


def _quantized(x: Int8GradientBackwardArguments, call: Canonical, scale: float, steps: GradientSteps) -> _QuantizedQK:
    """The integers of Q and K of the forward pass, and their scales."""
    k_mean = _mean_of(x, call)
    quantize = steps.forward.quantize
    q, q_scale = quantize(call.q, None, scale * LOG2_E, PER_BLOCK, "query", None, call.q.shape[2])
    return q, q_scale, *quantize(call.k, k_mean, 1.0, PER_BLOCK, "key", None, call.k.shape[2])


def _rounded_qk(
    call: Canonical,
    k_mean: Tensor | None,
    scale: float,
    steps: GradientSteps,
    places: tuple[Tensor, ...] | None = None,
) -> tuple[Tensor, Tensor]:
    """Q and K - mean(K), each its integers times their scales, in the dtype of the inputs; in ``places`` if given."""
    factor = scale * LOG2_E
    q_place, k_place = places or (None, None)
    query = steps.rounded(call.q, None, factor, 1.0 / factor, "query", q_place)
    return query, steps.rounded(call.k, k_mean, 1.0, 1.0, "key", k_place)


def gradient_operands(x: Int8GradientBackwardArguments, call: Canonical, steps: GradientSteps) -> GradientOperands:
    """What the passes over keys and queries read."""
    batch, heads, queries, _ = call.q.shape
    scale = default_scale(x.query, x.scale)
    grad, out = (t.reshape(batch, heads, queries, -1) for t in (x.grad_out, x.out))
    lse = x.lse.reshape(batch, heads, queries)
    grad_lse = None if x.grad_lse is None else x.grad_lse.reshape(lse.shape)
    quantized = _quantized(x, call, scale, steps)
    operands = GradientOperands(
        *(*quantized, call.v, grad),
        *(lse, steps.delta(out, grad, grad_lse), scale, x.is_causal),
        dropout_p=x.dropout_p,
        seed=x.seed,
    )
    if x.gradient == "mixed":
        q_float, k_float = _rounded_of(x, call, scale, steps)
        return operands._replace(q_float=q_float, k_float=k_float)
    # the same groups as keys: 64 tokens, and NaN where one is NaN
    grad_int8, grad_scale = steps.forward.quantize(grad, None, 1.0, PER_BLOCK, "key", None, queries)
    return operands._replace(grad_int8=grad_int8, grad_scale=grad_scale)


def _on_gpu(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Backward | None:
    """cuDNN's kernel; None where it does not compute the call, and in Triton's interpreter."""
    if not query.is_cuda:
        return None
    current = recording()
    if current is not None:
        current.refuse("PyTorch's settings decide which of its kernels are used")
    return fused_backward(query, key, value, is_causal)


_TORCH = GradientSteps(TORCH_STEPS, delta_ref, gradients_ref, round_tokens_ref, lambda *call: None)
_TRITON = GradientSteps(TRITON_STEPS, delta_triton, gradients_triton, round_tokens_triton, _on_gpu)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x = Int8GradientArguments(*inputs)
    out, lse, mean, *rounded = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(mean, *rounded)
    query, key = rounded if x.keeps_rounded else (x.query, x.key)
    ctx.save_for_backward(query, key, x.value, out, lse, mean, x.seed)
    ctx.settings = (x.is_causal, x.scale, x.gradient, x.dropout_p)
    ctx.rounded = x.keeps_rounded


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():
        raise UnsupportedError(
            f"{_NAME}: create_graph must be False, since there are no second derivatives, got True. Use "
            "backward='exact' of sage_attention"
        )
    passed = len(ctx.needs_input_grad)
    if grad_out is None and grad_lse is None:
        return (None,) * passed
    *tensors, seed = ctx.saved_tensors
    if grad_out is None:
        grad_out = torch.zeros_like(tensors[3])
    found = torch.ops.qframework.int8_gradient_attention_backward(
        grad_out, grad_lse, *tensors, *ctx.settings, seed, ctx.rounded
    )
    needed = (g if need else None for g, need in zip(found, ctx.needs_input_grad[:3], strict=True))
    return (*needed, *[None] * (passed - 3))


def attend_cpu(x: Int8GradientArguments) -> tuple[Tensor, ...]:
    """The forward pass by the reference of every step."""
    return attend(x, _TORCH)


def gradient_operands_cpu(x: Int8GradientBackwardArguments) -> GradientOperands:
    """The operands of the backward pass by the reference of every step; all keys must be reached."""
    return gradient_operands(x, canonical(x.dense), _TORCH)


def _attend_triton(x: Int8GradientArguments) -> tuple[Tensor, ...]:
    check_device(x.query.device)
    return attend(x, _TRITON)


INT8_GRADIENT_ATTENTION = declare(
    "int8_gradient_attention(Tensor query, Tensor key, Tensor value, bool is_causal=False, float? scale=None, "
    "bool enable_gqa=False, str variant='auto', str gradient='int8', bool smooth_k=True, "
    "float dropout_p=0.0, Tensor? seed=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    Int8GradientArguments,
    cpu=attend_cpu,
    cuda=_attend_triton,
    fake=Int8GradientArguments.empty_result,
)
INT8_GRADIENT_ATTENTION_BACKWARD = declare(
    "int8_gradient_attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, "
    "Tensor out, Tensor lse, Tensor k_mean, bool is_causal, float? scale, str gradient, float dropout_p=0.0, "
    "Tensor? seed=None, bool rounded=False) -> (Tensor, Tensor, Tensor)",
    Int8GradientBackwardArguments,
    cpu=lambda x: gradients(x, _TORCH),
    cuda=lambda x: gradients(x, _TRITON),
    fake=Int8GradientBackwardArguments.empty_result,
)
torch.library.register_autograd("qframework::int8_gradient_attention", _backward, setup_context=_save, lib=LIBRARY)
