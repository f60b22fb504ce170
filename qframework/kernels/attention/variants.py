"""AttentionVariant: what quantized attention quantizes and how; the published variants by name.

An :class:`AttentionVariant` sets how Q and K are quantized (bits and granularity) and in which formats P and V are
multiplied. A granularity is a grouping of tokens that share a scale, see :class:`TokenGroups`.

Sources: SageAttention (tables 6, T, B, vT and vB), SageAttention2 (per warp, per thread, INT4, FP8, smoothing),
SageAttention2++ (FP16 accumulator), QAttn (mixed precision).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from typing import Literal, get_args

import torch

from qframework.errors import UnsupportedError, either

Granularity = Literal["per_tensor", "per_head", "per_token", "per_block", "per_warp", "per_thread"]
ProductPV = Literal["fp16", "int8", "fp8", "int8_dequantized"]
Accumulator = Literal["fp32", "fp16"]
Exponential = Literal["exact", "integer"]
Role = Literal["query", "key"]

# Blocks of the papers' kernels: a block of queries, a block of keys, and the queries of one warp.
QUERY_BLOCK, KEY_BLOCK, WARP_QUERIES = 128, 64, 32
_WHOLE_HEAD = 2**30


@dataclass(frozen=True)
class TokenGroups:
    """Token ``n`` uses scale ``(n // span) * groups + (n % modulo) // divisor``."""

    span: int
    groups: int = 1
    modulo: int = 1
    divisor: int = 1

    def count(self, tokens: int) -> int:
        """The number of scales of a head; at least one, so that no tensor of scales is empty."""
        return max(-(-tokens // self.span), 1) * self.groups

    def index(self, tokens: int, device: torch.device | None = None) -> torch.Tensor:
        """The index of each token's scale, ``(tokens,)`` int64."""
        n = torch.arange(tokens, device=device)
        return (n // self.span) * self.groups + (n % self.modulo) // self.divisor


_GROUPS: dict[tuple[str, str], TokenGroups] = {
    ("per_token", "query"): TokenGroups(1),
    ("per_token", "key"): TokenGroups(1),
    ("per_block", "query"): TokenGroups(QUERY_BLOCK),
    ("per_block", "key"): TokenGroups(KEY_BLOCK),
    ("per_warp", "query"): TokenGroups(WARP_QUERIES),
    ("per_warp", "key"): TokenGroups(KEY_BLOCK),
    # What one thread holds of an mma tile: queries that are equal modulo 8, pairs of keys that are equal modulo 8.
    ("per_thread", "query"): TokenGroups(WARP_QUERIES, 8, 8, 1),
    ("per_thread", "key"): TokenGroups(KEY_BLOCK, 4, 8, 2),
}


def token_groups(granularity: str, role: str) -> TokenGroups:
    """The groups of ``granularity`` for queries or keys. Raises UnsupportedError."""
    if granularity in ("per_tensor", "per_head"):
        return TokenGroups(_WHOLE_HEAD)
    try:
        return _GROUPS[granularity, role]
    except KeyError:
        raise UnsupportedError(
            f"granularity must be {either(get_args(Granularity))}, and role {either(get_args(Role))}, got "
            f"{granularity!r} and {role!r}"
        ) from None


@dataclass(frozen=True)
class AttentionVariant:
    """One way to quantize attention.

    Args:
        qk_bits: 8, or 4, stored two to a byte; with 16, Q and K are not quantized and keep their dtype.
        granularity: which tokens of Q and of K share a scale. With 16 bits only ``"per_block"``, without effect.
        pv: formats of P and V. ``"fp16"``: both in V's 16-bit dtype (but see :func:`values_dtype`), float32 in TF32.
            ``"int8"``: P with the static scale 1/127, V per channel. ``"fp8"``: both E4M3, V per channel.
            ``"int8_dequantized"``: V in INT8 with one scale, P in 16 bit (QAttn).
        accumulator: ``"fp32"`` or ``"fp16"``, for the product of P and V within one block of keys; sums over blocks are
            always FP32. INT8 products are exact and take ``"fp32"`` only.
        smooth_q: subtract each query block's mean before quantizing and add its exact logits back (SageAttention2).
        smooth_v: subtract V's mean over tokens and add it to the output, which is exact since rows of P sum to one.
        exponential: ``"exact"``, or ``"integer"``: P = 2^x has a linear mantissa of 8 bits, read off the bits of a
            multiple of x (Schraudolph 1999). It is up to 6 percent too large, of which normalization leaves 2 percent.
            With P and V in 16 bit and FP32 sums only. A call that returns the log-sum-exp uses exact exponentials.

    Raises:
        UnsupportedError: an unknown value; an FP16 accumulator for INT8 values; the integer exponential with other
            formats of P and V; smooth Q or another granularity with 16 bits.
    """

    qk_bits: int = 8
    granularity: Granularity = "per_block"
    pv: ProductPV = "fp16"
    accumulator: Accumulator = "fp32"
    smooth_q: bool = False
    smooth_v: bool = False
    exponential: Exponential = "exact"

    def __post_init__(self) -> None:
        accepted = {
            "qk_bits": (16, 8, 4),
            "granularity": get_args(Granularity),
            "pv": get_args(ProductPV),
            "accumulator": get_args(Accumulator),
            "exponential": get_args(Exponential),
        }
        for name, values in accepted.items():
            if getattr(self, name) not in values:
                raise UnsupportedError(
                    f"AttentionVariant: {name} must be {either(values)}, got {getattr(self, name)!r}"
                )
        for name in ("smooth_q", "smooth_v"):
            if not isinstance(getattr(self, name), bool):
                raise UnsupportedError(f"AttentionVariant: {name} must be True or False, got {getattr(self, name)!r}")
        if self.accumulator == "fp16" and self.pv in ("int8", "int8_dequantized"):
            raise UnsupportedError(f"AttentionVariant: accumulator must be 'fp32' for pv={self.pv!r}, got 'fp16'")

        if self.exponential == "integer" and (self.pv, self.accumulator) != ("fp16", "fp32"):
            raise UnsupportedError(
                "AttentionVariant: pv must be 'fp16' and accumulator 'fp32' with exponential='integer', got "
                f"pv={self.pv!r} and accumulator={self.accumulator!r}"
            )
        if not self.quantizes_qk and (self.smooth_q or self.granularity != "per_block"):
            raise UnsupportedError(
                "AttentionVariant: smooth_q must be False and granularity 'per_block' with qk_bits=16, which quantizes "
                f"neither Q nor K, got smooth_q={self.smooth_q} and granularity={self.granularity!r}"
            )

    @property
    def quantizes_qk(self) -> bool:
        """Whether Q and K are quantized."""
        return self.qk_bits < 16

    @property
    def spec(self) -> str:
        """The variant as a string that :func:`resolve` reads, e.g. ``"8-per_block-fp16-fp32"``."""
        flags = [name for name in ("smooth_q", "smooth_v") if getattr(self, name)]
        flags += ["integer"] if self.exponential == "integer" else []
        return "-".join([str(self.qk_bits), self.granularity, self.pv, self.accumulator, *flags])

    @classmethod
    def from_spec(cls, spec: str) -> AttentionVariant:
        """The inverse of :attr:`spec`. Raises UnsupportedError."""
        parts = spec.split("-")
        flags = set(parts[4:])
        if len(parts) < 4 or not parts[0].isdigit() or not flags <= {"smooth_q", "smooth_v", "integer"}:
            raise _unknown(spec)
        bits, granularity, pv, accumulator = parts[:4]
        exponential = "integer" if "integer" in flags else "exact"
        smooth = ("smooth_q" in flags, "smooth_v" in flags)
        return cls(int(bits), granularity, pv, accumulator, *smooth, exponential)  # type: ignore[arg-type]


VARIANTS: dict[str, AttentionVariant] = {
    "sage_t": AttentionVariant(8, "per_token", "fp16", "fp16"),
    "sage_b": AttentionVariant(8, "per_block", "fp16", "fp16"),
    "sage_vt": AttentionVariant(8, "per_token", "int8"),
    "sage_vb": AttentionVariant(8, "per_block", "int8"),
    "sage2_int8": AttentionVariant(8, "per_thread", "fp8"),
    "sage2_int4": AttentionVariant(4, "per_thread", "fp8", smooth_q=True),
    "sage2pp_int8": AttentionVariant(8, "per_thread", "fp8", "fp16"),
    "sage2pp_int4": AttentionVariant(4, "per_thread", "fp8", "fp16", smooth_q=True),
    "qattn": AttentionVariant(8, "per_head", "int8_dequantized"),
    "unquantized": AttentionVariant(16),
    "integer_exp": AttentionVariant(8, exponential="integer"),
}


@functools.lru_cache(256)
def resolve(variant: str | AttentionVariant) -> AttentionVariant:
    """The variant for a name of :data:`VARIANTS`, a spec or a variant. Raises UnsupportedError, also for ``"auto"``."""
    if isinstance(variant, AttentionVariant):
        return variant
    if not isinstance(variant, str):
        raise _unknown(variant)
    if variant in VARIANTS:
        return VARIANTS[variant]
    return AttentionVariant.from_spec(variant)


def _unknown(variant: object) -> UnsupportedError:
    parts = ", ".join(field.name for field in fields(AttentionVariant))
    return UnsupportedError(
        f"variant must be auto, {', '.join(VARIANTS)} or an AttentionVariant({parts}), got {variant!r}"
    )


PAIRED = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)
"""Which of every 16 keys Hopper's kernel reads as its first, second, ... in FP8: a thread that holds two neighbours of
each eight logits multiplies four neighbours of each sixteen."""


def paired(variant: AttentionVariant) -> bool:
    """Whether Hopper's kernel multiplies the variant's values in FP8, which then are stored :data:`PAIRED`.

    Its sums are float32 for variants with FP16 sums as well: there they take no longer.
    """
    eights = variant.qk_bits == 8 and variant.pv == "fp8" and not (variant.smooth_q or variant.smooth_v)
    return eights and variant.granularity != "per_token"


# FP8 (E4M3): the largest number, and the ranges of P and V -----------------------------------------------------------

E4M3_MAX = 448.0
FP16_MAX = 65504.0
# SageAttention2++ eq. 1 and 3: sums of `keys` products fit float16 where keys * P_range * V_range <= 65504.
NARROW_P_RANGE, NARROW_V_RANGE = 224.0, 4.5
KEYS_PER_FP16_SUM = 64  # two mma steps of 32 keys are added in float16 before the float32 buffer (section 3.2)


def fp8_ranges(accumulator: str) -> tuple[float, float]:
    """``(P_range, V_range)``: the quantized values of 1 in P and of the largest magnitude of a channel of V."""
    return (E4M3_MAX, E4M3_MAX) if accumulator == "fp32" else (NARROW_P_RANGE, NARROW_V_RANGE)


def check_fp16_ranges(keys: int, p_range: float, v_range: float) -> None:
    """Raise UnsupportedError unless ``keys`` products of the two ranges fit float16 (SageAttention2++ eq. 1 and 3)."""
    if keys * p_range * v_range > FP16_MAX:
        raise UnsupportedError(
            f"sums of {keys} products must be at most {FP16_MAX:.0f} for FP16 accumulation, got "
            f"{keys * p_range * v_range:.0f} with P up to {p_range} and V up to {v_range}"
        )


check_fp16_ranges(KEYS_PER_FP16_SUM, NARROW_P_RANGE, NARROW_V_RANGE)


# Chips on which FP16 accumulation doubles the rate: GeForce and related ones.
FAST_FP16_SUMS = ((8, 6), (8, 9), (12, 0), (12, 1))


def values_dtype(variant: AttentionVariant, dtype: torch.dtype, capability: tuple[int, int] | None) -> torch.dtype:
    """The dtype in which V of ``dtype`` is multiplied: float16 instead of bfloat16 for variants with FP16 accumulators.

    ``capability`` is CUDA's, None for a CPU. The papers' kernels cast V to float16. From bfloat16 the cast takes two
    passes over V, which is worthwhile where FP16 accumulation is faster. On other GPUs P and V stay in bfloat16, with
    an FP32 accumulator.
    """
    if variant.pv != "fp16" or variant.accumulator != "fp16" or dtype != torch.bfloat16:
        return dtype
    return torch.float16 if capability is None or capability in FAST_FP16_SUMS else dtype


def fits_hopper(head_dim: int, qk_bits: int = 8) -> bool:
    """Whether the kernel for Hopper takes heads of so many channels: TMA needs rows of 16 bytes."""
    return (16 if qk_bits == 16 else 32) < head_dim <= 256 and head_dim * qk_bits % 128 == 0
