"""The cases of the attention benchmark: inputs, the oracle, and one case for each provider.

Inputs are float16: normal Q and V, and K with a bias per channel, as in real models. All providers get the same values;
``qframework_mixed_static`` gets them in INT8. ``attention_oracle`` defines which results are right.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.attention_oracle import (
    Rows,
    attention_rows,
    attention_within,
    float32_attention,
    float_noise,
    predicted_noise,
)
from benchmarks.harness import Check, UnavailableError, one_step_apart
from qframework import numerics
from qframework.kernels.attention.auto import choose_variant
from qframework.kernels.attention.hopper import specialized
from qframework.kernels.attention.hopper.prepare import can_prepare, prepare_triton
from qframework.kernels.attention.operands import Bias, QuantizedQK, Values
from qframework.kernels.attention.pipeline import TORCH_STEPS, TRITON_STEPS, quantized_qk, quantized_values
from qframework.kernels.attention.variants import VARIANTS, AttentionVariant, resolve
from qframework.kernels.runtime.chip import capability_of

KEY_BIAS = 2.0  # standard deviation over channels; the signal has 1
MATH_BYTES = 2**33  # limit for the float32 logits of all heads, which SDPA's unfused path keeps
PER_WARP = "8-per_warp-fp8-fp32"  # chosen by "auto" for long sequences, unless FP16 sums make FP8 faster


@dataclass(frozen=True)
class Shape:
    """``B, H, N, D``; as many keys as queries."""

    batch: int
    heads: int
    tokens: int
    head_dim: int
    causal: bool = False

    @property
    def sizes(self) -> list[int]:
        return [self.batch, self.heads, self.tokens, self.head_dim]

    @property
    def name(self) -> str:
        """The name on the command line: ``4x32x8192x128-causal``."""
        return "x".join(map(str, self.sizes)) + "-causal" * self.causal

    @property
    def operations(self) -> float:
        """4 B H N N D, or half of it with a causal mask."""
        return 4.0 * self.batch * self.heads * self.tokens**2 * self.head_dim / (2 if self.causal else 1)


@dataclass(frozen=True)
class Inputs:
    """Seeded inputs of one shape; ``(B, H, N, D)`` float16."""

    shape: Shape
    query: Tensor
    key: Tensor
    value: Tensor

    @functools.cached_property
    def rows(self) -> Rows:
        return attention_rows(self.query, self.key, self.value, self.shape.causal)

    @property
    def oracle(self) -> Tensor:
        return self.rows.out

    def check(self, variant: AttentionVariant | None) -> Check:
        """The check of results of ``variant``, or with None, of float16 attention."""
        if variant is None:
            return attention_within(lambda: self.rows, float_noise)
        operands = (self.query, self.key, self.value)
        return attention_within(lambda: self.rows, lambda rows: predicted_noise(*operands, rows, variant))


@dataclass(frozen=True)
class Case:
    """One provider at one shape: the timed function, the check, and the conversion of outputs to real values."""

    fn: Callable[[], Tensor]
    check: Check
    dtype: str
    to_real: Callable[[Tensor], Tensor] = Tensor.float


def make_inputs(shape: Shape, device: str, seed: int) -> Inputs:
    """Seeded inputs, equal for all providers of a run."""
    generator = torch.Generator(device).manual_seed(seed + sum(shape.sizes))

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, device=device, dtype=torch.float16)

    bias = KEY_BIAS * normal(1, shape.heads, 1, shape.head_dim)
    return Inputs(shape, normal(*shape.sizes), normal(*shape.sizes) + bias, normal(*shape.sizes))


def relative_l1(value: Tensor, reference: Tensor) -> float:
    """``sum |value - reference| / sum |reference|``, the measure of the papers (SageAttention 4.3)."""
    return float((value - reference).abs().sum(dtype=torch.float64) / reference.abs().sum(dtype=torch.float64))


# Peers --------------------------------------------------------------------------------------------------------------


def _torch_sdpa(given: Inputs, backend: SDPBackend) -> Case:
    shape = given.shape
    if backend == SDPBackend.MATH and 4 * shape.batch * shape.heads * shape.tokens**2 > MATH_BYTES:
        raise UnavailableError(f"the logits of all heads take more than {MATH_BYTES / 2**30:g} GiB")
    if given.query.device.type == "cpu" and backend not in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
        raise UnavailableError(f"{backend.name} runs on a GPU only")

    def fn() -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(given.query, given.key, given.value, is_causal=shape.causal)

    return Case(fn, given.check(None), "float16")


def _sageattention(given: Inputs) -> Case:
    """The package ``sageattention``, with the kernel of ``sage_b``.

    It takes head dimensions 64, 96 and 128; others are padded in the timed call.
    """
    if given.query.device.type != "cuda":
        raise UnavailableError("sageattention runs on a GPU only")
    try:
        from sageattention import sageattn
    except ImportError as error:
        raise UnavailableError(f"pip install sageattention==1.0.6 ({error})") from error
    head_dim, causal = given.shape.head_dim, given.shape.causal
    padding = next(size - head_dim for size in (64, 96, 128) if size >= head_dim)
    key = given.key.clone()  # it subtracts K's mean in place

    def fn() -> Tensor:
        if not padding:
            return sageattn(given.query, key, given.value, tensor_layout="HND", is_causal=causal)
        query, padded_key, value = (F.pad(tensor, (0, padding)) for tensor in (given.query, key, given.value))
        scale = head_dim**-0.5
        out = sageattn(query, padded_key, value, tensor_layout="HND", is_causal=causal, sm_scale=scale)
        return out[..., :head_dim]

    return Case(fn, given.check(resolve("sage_b")), "float16, Q K int8")


# qframework ---------------------------------------------------------------------------------------------------------


def _sage(given: Inputs, name: str) -> Case:
    """A variant through the public operator, from float16 tensors to a float16 tensor."""
    shape = given.shape
    query, key, value = given.query, given.key, given.value
    chosen = name
    if name == "auto":
        chosen = choose_variant(query, key, value, shape.tokens, plain=True)

    def fn() -> Tensor:
        return torch.ops.qframework.sage_attention(query, key, value, is_causal=shape.causal, variant=name)[0]

    variant = resolve(chosen)
    kind = "int" if variant.quantizes_qk else "fp"
    return Case(fn, given.check(variant), f"float16, Q K {kind}{variant.qk_bits}, PV {variant.pv}")


def parts_of(given: Inputs, provider: str) -> dict[str, Callable[[], object]]:
    """The parts of a variant's call by the ``op`` of their record; empty for other providers."""
    name = provider.removeprefix("qframework_")
    if name not in (*VARIANTS, PER_WARP):
        return {}
    variant, steps = resolve(name), TRITON_STEPS if given.query.device.type == "cuda" else TORCH_STEPS
    bias, scale = Bias(causal=given.shape.causal), given.shape.head_dim**-0.5
    operands = (given.query, given.key, given.value)
    prepares = can_prepare(variant) and specialized.fits(
        *operands, variant, torch.float16, capability_of(operands[0].device)
    )

    def quantize() -> tuple[QuantizedQK, Values]:
        if prepares:
            return prepare_triton(*operands, variant, scale, True)
        qk, _ = quantized_qk(given.query, given.key, variant, scale, True, steps, None)
        return qk, quantized_values(given.value, variant, steps, None)

    qk, values = quantize()
    kernel = functools.partial(steps.attend, qk, values, bias, variant, torch.float16, False, None)
    return {"attention_quantize": quantize, "attention_kernel": kernel}


def _mixed_static(given: Inputs) -> Case:
    """QAttn static: int8 in and out, one scale per tensor."""
    int8, scales = zip(*(_quantized(tensor) for tensor in (given.query, given.key, given.value)), strict=True)
    out_scale = numerics.dynamic_scale(given.oracle, "per_tensor").reshape(1)
    causal = given.shape.causal

    def fn() -> Tensor:
        return torch.ops.qframework.mixed_attention(*int8, *scales, is_causal=causal, out_scale=out_scale)

    def oracle() -> Tensor:
        real_query, real_key, real_value = (q.float() * scale for q, scale in zip(int8, scales, strict=True))
        return (
            (float32_attention(real_query, real_key, real_value, causal) / out_scale)
            .round()
            .clamp(numerics.QMIN, numerics.QMAX)
        )

    # P in 16 bit is off by 2^-11 of up to 127 steps, which crosses a tie for few values.
    check = one_step_apart(oracle, fraction=0.05)
    return Case(fn, check, "int8 to int8", lambda q: q.float() * out_scale)


def _quantized(tensor: Tensor) -> tuple[Tensor, Tensor]:
    scale = numerics.dynamic_scale(tensor, "per_tensor").reshape(1)
    return numerics.quantize(tensor, scale), scale


_FIRST = ("sage_b", PER_WARP, "sage_vb", "sage2_int8", "sage2pp_int8")
_LAST = tuple(name for name in VARIANTS if name not in _FIRST)


def _variants(names: Iterable[str]) -> dict[str, Callable[[Inputs], Case]]:
    return {f"qframework_{name}": functools.partial(_sage, name=name) for name in names}


# The most important providers come first, in case a run is cut short.
PROVIDERS: dict[str, Callable[[Inputs], Case]] = {
    "torch_flash": functools.partial(_torch_sdpa, backend=SDPBackend.FLASH_ATTENTION),
    "torch_cudnn": functools.partial(_torch_sdpa, backend=SDPBackend.CUDNN_ATTENTION),
    "sageattention": _sageattention,
    **_variants(["auto"]),
    "qframework_mixed_static": _mixed_static,
    **_variants(_FIRST),
    **_variants(_LAST),
    "torch_efficient": functools.partial(_torch_sdpa, backend=SDPBackend.EFFICIENT_ATTENTION),
    "torch_math": functools.partial(_torch_sdpa, backend=SDPBackend.MATH),
}
