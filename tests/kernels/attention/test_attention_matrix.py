"""Every variant with every kind of mask, heads, layout, length, head dimension and dtype, against float64.

The set of cases holds every pair of values. Each is held twice: the kernel against the reference in float64 on the same
quantized operands (what the kernel adds), and against exact attention (what quantization costs, see the oracle).
In Triton's interpreter the same set runs with short lengths.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from attention_oracle import (
    assert_kernel_close,
    assert_lse_close,
    assert_within_prediction,
    exact_attention,
    predicted_error,
)
from covering import covering_set, pairs
from oracle import INTERPRETED, UNIT
from torch import Tensor

from qframework.kernels.attention import pipeline as module
from qframework.kernels.attention.arguments import canonical
from qframework.kernels.attention.operands import Bias
from qframework.kernels.attention.reference import quantized_attention_ref
from qframework.kernels.attention.tiles import attention_tile
from qframework.kernels.attention.variants import KEY_BLOCK, VARIANTS, resolve

LENGTHS = (1, 17, 33, 50, 64, 70, 130) if INTERPRETED else (1, 17, 50, 197, 577, 785, 1024)
# Granularities and smoothing that no named variant has.
SPECS = (
    "8-per_tensor-int8-fp32",
    "8-per_warp-fp8-fp32",
    "8-per_warp-fp8-fp32-smooth_v",
    "8-per_block-fp16-fp32-smooth_q",
    "4-per_token-int8-fp32-smooth_q-smooth_v",
    "4-per_warp-fp16-fp32-smooth_q",
)
FACTORS = {
    "variant": (*VARIANTS, *SPECS),
    "mask": ("none", "bool", "float", "causal", "rel"),
    "heads": ((2, 2), (4, 2), (3, 1)),
    "layout": ("hnd", "nhd", "3d", "5d", "poisoned"),
    "queries": LENGTHS,
    "keys": LENGTHS,
    "head_dim": (16, 32, 64, 72, 80, 96, 128, 256),
    "value_dim": ("same", "other"),
    "dtype": (torch.float16, torch.bfloat16, torch.float32),
    "smooth_k": (True, False),
    "lse": (True, False),  # without it, a call may quantize inside the kernel
}
CASES = covering_set(FACTORS, lambda case: case["layout"] != "3d" or case["heads"] == (2, 2))


def name_of(case) -> str:
    values = (str(value).removeprefix("torch.").replace(" ", "") for value in case.values())
    return "-".join(values)


@dataclass(frozen=True)
class Inputs:
    """Operands in the layout of the case, and the same as (B, H, N, D)."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    is_causal: bool = False
    rel_h: Tensor | None = None
    rel_w: Tensor | None = None
    enable_gqa: bool = False

    def four(self):
        """As the kernels see them."""
        return canonical(self)


def make_inputs(case, place) -> Inputs:
    """Normal values; K with a bias per channel as real keys have, the third of its size INT4 can bear unsmoothed."""
    queries, keys, dim, dtype = case["queries"], case["keys"], case["head_dim"], case["dtype"]
    heads, kv_heads = case["heads"]
    generator = torch.Generator().manual_seed(queries * 1000 + keys + dim)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    batch = 1 if queries * keys > 2**17 or INTERPRETED else 2
    lead = {"3d": (2 * batch,), "5d": (batch, 2)}.get(case["layout"], (batch,))
    head_lead, kv_lead = ((), ()) if case["layout"] == "3d" else ((heads,), (kv_heads,))
    value_dim = dim if case["value_dim"] == "same" else max(dim // 2 + 8, 8)
    bias = 0.3 * normal(*kv_lead, 1, dim)

    def operand(*shape: int, plus: Tensor | float = 0.0) -> Tensor:
        return laid_out((normal(*shape) + plus).to(dtype).to(place), case["layout"])

    query = operand(*lead, *head_lead, queries, dim)
    key = operand(*lead, *kv_lead, keys, dim, plus=bias)
    value = operand(*lead, *kv_lead, keys, value_dim)
    extras = added(case, (*lead, *head_lead), normal, generator, place, dtype)
    return Inputs(query, key, value, enable_gqa=heads != kv_heads, **extras)


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same values in another memory layout."""
    if layout == "nhd":
        return x.transpose(-3, -2).contiguous().transpose(-3, -2)
    if layout == "poisoned":  # every read past an edge gives NaN
        *lead, tokens, channels = x.shape
        around = x.new_full((*lead, tokens + 3, channels + 5), torch.nan)
        around[..., :tokens, :channels] = x
        return around[..., :tokens, :channels]
    return x


def added(case, lead, normal, generator, place, dtype) -> dict:
    """What the case adds to the logits; masks broadcast over heads or batch, and leave the first row nothing."""
    queries, keys = case["queries"], case["keys"]
    if case["mask"] == "causal":
        return {"is_causal": True}
    if case["mask"] == "rel":
        width = max(w for w in range(1, math.isqrt(keys) + 1) if keys % w == 0)
        parts = {"rel_h": normal(*lead, queries, keys // width), "rel_w": normal(*lead, queries, width)}
        return {name: part.to(dtype).to(place) for name, part in parts.items()}
    shape = [(queries, keys), (*[1] * (len(lead) - 1), lead[-1], queries, keys)][keys % 2]
    if case["mask"] == "bool":
        mask = torch.rand(shape, generator=generator) < 0.7
        mask[..., 0, :] = queries == 1
        return {"attn_mask": mask.to(place)}
    if case["mask"] == "float":
        mask = normal(*shape)
        mask[..., 0, :] = 0.0 if queries == 1 else -torch.inf
        return {"attn_mask": mask.to(dtype).to(place)}
    return {}


def attend(implementation: str, inputs: Inputs, variant: str, smooth_k: bool, return_lse: bool = True):
    """``(out, lse)`` of the operator, or of the function that launches the Triton kernels."""
    call = {"cpu": torch.ops.qframework.sage_attention, "triton": module.SAGE_ATTENTION.cuda}[implementation]
    return call(
        inputs.query, inputs.key, inputs.value, inputs.attn_mask, inputs.is_causal, None, inputs.enable_gqa, variant,
        smooth_k, return_lse, inputs.rel_h, inputs.rel_w,
    )  # fmt: skip


def reference_of(implementation: str, inputs: Inputs, variant, smooth_k: bool) -> Tensor:
    """The reference in float64 on what this implementation quantized, in the kernel's blocks of keys."""
    steps = {"cpu": module.TORCH_STEPS, "triton": module.TRITON_STEPS}[implementation]
    call = module.reached(inputs.four()) if inputs.is_causal else inputs.four()
    k, v = module._without_hidden(call.k, call.v, call.mask, variant, smooth_k)
    call = call._replace(k=k, v=v)
    qk, _ = module.quantized_qk(call.q, call.k, variant, call.q.shape[-1] ** -0.5, smooth_k, steps, None)
    values = module.quantized_values(call.v, variant, steps, None)
    bias = Bias(call.mask, call.rel_h, call.rel_w, inputs.is_causal)
    block_n = KEY_BLOCK
    if implementation == "triton":
        widest = max(call.q.shape[-1], call.v.shape[-1])
        mode = "fp32" if variant.pv == "fp16" and call.v.dtype == torch.float32 else variant.pv
        block_n = attention_tile(call.q.device, call.q.shape[2], widest, mode).block_n
    return quantized_attention_ref(qk, values, bias, variant, qk.factor, block_n=block_n, dtype=torch.float64)[0]


def test_the_set_holds_every_pair():
    held = {pair for case in CASES for pair in pairs(case)}
    names = list(FACTORS)
    for i, first in enumerate(names):
        for second in names[i + 1 :]:
            for x in FACTORS[first]:
                for y in FACTORS[second]:
                    possible = not ({first, second} == {"heads", "layout"} and "3d" in (x, y) and (2, 2) not in (x, y))
                    assert (((first, x), (second, y)) in held) == possible
    assert len(CASES) < 200


def kernel_error(variant, dtype: torch.dtype) -> tuple[float, float]:
    """``(rounding, flips)`` of ``assert_kernel_close``.

    The output is rounded once, and P's 16 bit now and then to the other side. FP16 accumulators round after each
    instruction instead of after each block, FP8 ones keep 14 bits, float32 values are multiplied in TF32. P in 8 bit
    has steps of 1/127, or of 2^-4 of itself, where the largest is exact in any case.
    """
    rounding = UNIT[dtype] + 2.0**-18
    if variant.accumulator == "fp16" or variant.pv in ("fp8", "int8_dequantized") or dtype == torch.float32:
        rounding += 2.0**-10
    if INTERPRETED and dtype == torch.bfloat16:  # truncated instead of rounded, and P is left in float32
        rounding += 2 * UNIT[dtype]
    flips = 2.0**-5 if variant.pv in ("int8", "fp8") else 2.0**-7 if variant.exponential == "integer" else 0.0
    return rounding, flips


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_matrix(implementation, place, case):
    variant, smooth_k, dtype = resolve(case["variant"]), case["smooth_k"], case["dtype"]
    if case["lse"]:
        variant = replace(variant, exponential="exact")
    inputs = make_inputs(case, place)
    before = [x.clone() for x in (inputs.query, inputs.key, inputs.value)]
    out, lse = attend(implementation, inputs, case["variant"], smooth_k, case["lse"])
    call = inputs.four()
    exact = exact_attention(call.q, call.k, call.v, call.mask, inputs.is_causal, None, call.rel_h, call.rel_w)
    predicted = predicted_error(exact, variant, smooth_k, dtype)
    reference = reference_of(implementation, inputs, variant, smooth_k)

    assert out.dtype == dtype
    assert out.shape == (*inputs.query.shape[:-1], inputs.value.shape[-1])
    if out.ndim > 3:
        assert out.transpose(-3, -2).is_contiguous(), "merging the heads is no view"
    got = out.reshape(exact.out.shape)
    assert_kernel_close(got, reference, exact, *kernel_error(variant, dtype))
    if not (INTERPRETED and dtype == torch.bfloat16 and not variant.quantizes_qk):  # truncates, see kernel_error
        assert_within_prediction(got, exact, predicted, variant.quantizes_qk)
    if case["lse"]:
        assert_lse_close(lse.reshape(exact.lse.shape), exact, predicted)
    else:
        assert lse.shape == (0,)
    assert all(torch.equal(x, y) for x, y in zip((inputs.query, inputs.key, inputs.value), before, strict=True))


@pytest.mark.parametrize("spoiled", [100.0, math.nan])
@pytest.mark.parametrize("variant", [name for name in FACTORS["variant"] if "per_tensor" not in name])
def test_heads_and_batch_entries_are_independent(implementation, place, variant, spoiled):
    """Whatever another batch entry or another key head holds, a head's result stays the same bit for bit."""
    tokens = 40 if INTERPRETED else 197

    def normal(heads: int) -> Tensor:
        return torch.randn(2, heads, tokens, 32, dtype=torch.float16).to(place)

    inputs = Inputs(normal(4), normal(2), normal(2), enable_gqa=True)
    before, _ = attend(implementation, inputs, variant, smooth_k=True)
    inputs.query[:, 2:] *= spoiled
    inputs.query[1] *= spoiled
    for x in (inputs.key, inputs.value):
        x[:, 1:] *= spoiled
        x[1] *= spoiled
    after, _ = attend(implementation, inputs, variant, smooth_k=True)
    assert torch.equal(after[0, :2], before[0, :2])
    assert not torch.equal(after[0, 2:], before[0, 2:])
    assert not torch.equal(after[1], before[1])


@pytest.mark.parametrize("variant", [name for name in FACTORS["variant"] if "smooth" not in resolve(name).spec])
def test_more_keys_behind_the_last_row_change_no_causal_row(implementation, place, variant):
    """Bit for bit: whole blocks of keys that no row sees are skipped, and the rest of a row's own block is masked.

    Keys and values of zero change no scale, but means are over all keys: nothing is smoothed here.
    """
    query, key, value = (torch.randn(1, 2, 66, 32).to(place) for _ in range(3))
    before, _ = attend(implementation, Inputs(query, key, value, is_causal=True), variant, smooth_k=False)
    longer = (torch.cat([x, x.new_zeros(1, 2, 94, 32)], 2) for x in (key, value))
    after, _ = attend(implementation, Inputs(query, *longer, is_causal=True), variant, smooth_k=False)
    assert torch.equal(after, before)
