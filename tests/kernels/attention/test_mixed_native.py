"""mixed_attention in C++: as exact as it says for every shape and instruction set, and chosen where it is faster."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from instruction_sets import reason_against
from torch import Tensor

from qframework.kernels.attention import native
from qframework.kernels.runtime.native import NATIVE

module = sys.modules["qframework.kernels.attention.mixed"]
Arguments = module.MixedAttentionArguments

# Batch, heads, heads of keys, queries, keys, channels, width: one query or key, around a tile and a panel, odd numbers.
SHAPES = [
    (1, 1, 1, 1, 1, 1, 1), (1, 2, 2, 1, 300, 64, 64), (2, 1, 1, 40, 1, 5, 7), (1, 2, 2, 31, 32, 16, 8),
    (1, 2, 2, 33, 31, 63, 33), (1, 4, 2, 32, 33, 65, 31), (2, 3, 3, 197, 197, 64, 64), (1, 6, 2, 17, 257, 72, 80),
    (1, 2, 2, 257, 100, 128, 96), (1, 1, 1, 3, 4100, 256, 256),
]  # fmt: skip
PARTS_OF_P = 2.0**-15  # of P, where AMX splits it
LOGITS = 2.0**-17  # logits of up to 150 in float32, and the exponential


@pytest.fixture(params=["amx", "vnni", "avx512", "avx2"])
def instructions(request, monkeypatch):
    """Let every implementation use one instruction set."""
    if reason := reason_against(request.param, native._library):
        pytest.skip(f"{request.param}: {reason}")
    monkeypatch.setattr(native, "instructions_of", lambda _: request.param)
    return request.param


def tolerance(instructions: str) -> float:
    return LOGITS + (PARTS_OF_P if instructions == "amx" else 0)


def attend(tensors, scales, **named) -> Tensor:
    out = native.native_attention(Arguments(*tensors, *scales, **named), "amx")
    assert out is not None
    return out


def integers(*shape: int) -> Tensor:
    """Full range, in the memory order (B, N, H, D) of a model."""
    batch, heads, tokens, channels = shape
    return torch.randint(-128, 128, (batch, tokens, heads, channels), dtype=torch.int8).transpose(1, 2)


def operands(shape, per_head: bool = False):
    batch, heads, kv_heads, queries, keys, channels, width = shape
    tensors = integers(batch, heads, queries, channels), integers(batch, kv_heads, keys, channels)
    sizes = [(heads, 1, 1), (kv_heads, 1, 1), (kv_heads, 1, 1)] if per_head else [(1,), (), (1,)]
    return (*tensors, integers(batch, kv_heads, keys, width)), [torch.rand(size) * 0.01 + 0.01 for size in sizes]


def exact(tensors, scales, causal=False, scale=None, bias=0.0) -> tuple[Tensor, Tensor]:
    """``(out, sum_j p_j |v_j|)`` in float64."""
    q, k, v = (x.double() * s.double() for x, s in zip(tensors, scales, strict=True))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    logits = q @ k.mT * (scale if scale is not None else 1 / math.sqrt(q.shape[-1])) + bias
    if causal:
        logits = logits.masked_fill(~torch.ones(logits.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    p = torch.softmax(logits, -1).nan_to_num(0)  # without a key
    return p @ v, p @ v.abs()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_float64(instructions, shape, causal):
    for per_head in (False, True):
        tensors, scales = operands(shape, per_head)
        out = attend(tensors, scales, is_causal=causal, enable_gqa=True, out_dtype=torch.float32)
        expected, size = exact(tensors, scales, causal)
        assert out.transpose(1, 2).is_contiguous()
        assert ((out - expected).abs() <= tolerance(instructions) * size + 1e-9).all()


MASKS = {
    "keys": lambda b, h, n, m: (b, 1, 1, m),
    "queries": lambda b, h, n, m: (n, 1),
    "both": lambda b, h, n, m: (n, m),
    "heads": lambda b, h, n, m: (1, h, n, m),
    "all": lambda b, h, n, m: (b, h, n, m),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("form", MASKS)
def test_masks(instructions, form, causal):
    """Some rows have no key: they are zero. Float masks hold -inf and the lowest number, which is no -inf."""
    for shape in ((2, 4, 2, 37, 75, 32, 40), (2, 2, 2, 5, 32, 16, 8), (4, 1, 1, 33, 7, 8, 8)):
        tensors, scales = operands(shape, per_head=True)
        size = MASKS[form](*shape[:2], *shape[3:5])
        keep = torch.rand(size) < 0.7
        keep[..., 3 if size[-2] > 3 else 0, : 1 if size[-1] == 1 or causal else None] = size[-2] == 1
        lowest = torch.randn(size).masked_fill(~keep, torch.finfo(torch.float32).min)
        numbers = torch.randn(size).masked_fill(~keep, -math.inf)
        for mask in (keep, numbers, lowest, numbers.half(), numbers.double(), numbers.mT.contiguous().mT):
            bias = torch.zeros(size).masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else mask
            named = {"attn_mask": mask, "is_causal": causal, "enable_gqa": True, "out_dtype": torch.float32}
            expected, weight = exact(tensors, scales, causal, bias=bias.float().double())
            if mask is lowest:  # beside the lowest number float32 logits are lost, as in PyTorch's attention
                gone = expected.isnan() | (
                    bias.expand(expected.shape[0], expected.shape[1], *shape[3:5]).amax(-1, True) < -1e38
                )
                expected, weight = (x.masked_fill(gone, 0) for x in (expected, weight))
                out = attend(tensors, scales, **named).masked_fill(gone, 0)
            else:
                out = attend(tensors, scales, **named)
            assert ((out - expected).abs() <= tolerance(instructions) * weight + 1e-9).all()


def test_a_mask_for_each_window_of_every_image(instructions):
    """5-D (images, windows, heads, N, D) with a mask (1, windows, 1, N, N), as Swin's shifted windows have it."""
    tensors, scales = operands((6, 2, 2, 20, 20, 16, 16))
    mask = torch.randn(3, 1, 20, 20)
    windows = [x.unflatten(0, (2, 3)) for x in tensors]
    out = attend(windows, scales, attn_mask=mask[None], out_dtype=torch.float32).flatten(0, 1)
    expected, size = exact(tensors, scales, bias=mask.repeat(2, 1, 1, 1).double())
    assert ((out - expected).abs() <= tolerance(instructions) * size + 1e-9).all()


def test_nan_in_a_mask_stays_in_its_row(instructions):
    tensors, scales = operands((1, 1, 1, 5, 50, 16, 16))
    for key in (0, 17, 49):
        mask = torch.zeros(5, 50)
        mask[2, key] = math.nan
        out = attend(tensors, scales, attn_mask=mask)
        assert out.isnan().all(-1).flatten().tolist() == [row == 2 for row in range(5)]
        assert out[:, :, [0, 1, 3, 4]].isfinite().all()


def test_rows_of_the_lowest_number_weigh_all_keys_alike(instructions):
    tensors, scales = operands((1, 2, 2, 5, 50, 16, 16))
    mask = torch.full((5, 50), torch.finfo(torch.float32).min)
    out = attend(tensors, scales, attn_mask=mask, out_dtype=torch.float32)
    v = tensors[2].double() * scales[2]
    assert ((out - v.mean(2, True)).abs() <= (tolerance(instructions)) * v.abs().mean(2, True)).all()


@pytest.mark.parametrize("scale", [None, 0.01, 1e-9, 2.0])
def test_the_scale_of_logits(instructions, scale):
    """Of one key, of all keys alike, and so large that one key has all the weight."""
    tensors, scales = operands((1, 2, 2, 40, 70, 64, 64))
    out = attend(tensors, scales, scale=scale, out_dtype=torch.float32)
    expected, size = exact(tensors, scales, scale=scale)
    logits = 64 * 128**2 * float(scales[0] * scales[1]) * (scale or 0.125)
    assert ((out - expected).abs() <= (tolerance(instructions) + 2.0**-22 * logits) * size + 1e-9).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_results_are_float32_ones_rounded_once(instructions, dtype):
    tensors, scales = operands((2, 2, 2, 50, 77, 64, 40))
    wide = attend(tensors, scales, out_dtype=torch.float32)
    assert torch.equal(attend(tensors, scales, out_dtype=dtype), wide.to(dtype))


@pytest.mark.parametrize("per_head", [False, True])
def test_int8_results(instructions, per_head):
    tensors, scales = operands((2, 3, 3, 50, 77, 64, 72), per_head)
    out_scale = torch.rand(3, 1, 1) * 0.002 + 0.001 if per_head else torch.tensor(0.0015)
    out = attend(tensors, scales, out_scale=out_scale)
    expected, size = exact(tensors, scales)
    quotient = (expected / out_scale.double()).clamp(-127, 127)
    assert out.dtype == torch.int8
    assert ((out - quotient).abs() <= 0.5 + (tolerance(instructions) + 2.0**-22) * size / out_scale).all()
    assert (out.abs() == 127).any(), "nothing saturates: the test does not look at the edge"
    assert (out == -128).sum() == 0


def test_any_strides_and_batches_that_are_shared(instructions):
    tensors, scales = operands((2, 4, 4, 40, 50, 48, 48))
    expected = attend(tensors, scales, out_dtype=torch.float32)
    q, k, v = tensors
    apart = torch.stack([q, q, q], 3)[:, :, :, 1], k.mT.contiguous().mT, torch.cat([v, v], -1)[..., :48]
    assert [x.stride(-1) for x in apart] == [1, 50, 1]
    assert torch.equal(attend(apart, scales, out_dtype=torch.float32), expected)
    shared = q, k[:1], v[:1]
    repeated = q, k[:1].repeat(2, 1, 1, 1), v[:1].repeat(2, 1, 1, 1)
    assert torch.equal(attend(shared, scales), attend(repeated, scales))
    five = [x.unflatten(0, (2, 1)) for x in tensors]
    assert torch.equal(attend(five, scales, out_dtype=torch.float32).flatten(0, 1), expected)
    three = [x[:, 0] for x in tensors]
    assert torch.equal(attend(three, scales, out_dtype=torch.float32), expected[:, 0])


def test_threads_of_both_kinds(instructions):
    calls = [operands(shape) for shape in ((3, 4, 2, 100, 90, 64, 64), (1, 1, 1, 300, 50, 32, 32))]
    run = lambda call: attend(*call, enable_gqa=True, out_dtype=torch.float32)  # noqa: E731
    expected = [run(call) for call in calls]
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(run, calls * 8))
    finally:
        torch.set_num_threads(threads)
    assert all(map(torch.equal, found, expected * 8))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float16, torch.float32])
def test_nothing_beside_the_result_is_written(instructions, monkeypatch, dtype):
    for shape in ((1, 1, 1, 5, 3, 8, 7), (2, 3, 3, 33, 40, 16, 33), (1, 2, 2, 13, 8, 8, 64)):
        batch, heads, _, queries, _, _, width = shape
        count = batch * queries * heads * width
        memory = torch.full((count + 512,), 99, dtype=dtype)
        inside = memory[256:-256].view(batch, queries, heads, width).transpose(1, 2)
        monkeypatch.setattr(Arguments, "empty_result", lambda _, inside=inside: inside)
        (q, k, v), scales = operands(shape)
        out_scale = torch.ones(1) if dtype == torch.int8 else None
        attend((q, k, torch.ones_like(v)), [*scales[:2], torch.full((1,), 3.0)], out_scale=out_scale, out_dtype=None)
        assert (memory[256:-256].float() - 3).abs().max() <= 3 * tolerance(instructions)
        assert (memory[:256] == 99).all()
        assert (memory[-256:] == 99).all()


def test_calls_that_are_left_to_others(instructions):
    tensors, scales = operands((1, 2, 2, 4, 6, 8, 8))
    left = [
        {"rel_h": torch.zeros(1, 2, 4, 2), "rel_w": torch.zeros(1, 2, 4, 3)},
        {"scale": -1.0},
        {"scale": 0.0},
        {"key_scale": torch.tensor([math.nan])},
        {"out_scale": torch.tensor([-1.0])},
    ]
    names = "query", "key", "value", "query_scale", "key_scale", "value_scale"
    for change in left:
        arguments = dict(zip(names, (*tensors, *scales), strict=True)) | change
        assert native.native_attention(Arguments(**arguments), "amx") is None


def test_long_sequences_are_left_to_pytorch_without_amx(monkeypatch):
    short, long = (
        Arguments(*(torch.zeros(1, 1, n, 64, dtype=torch.int8) for n in (1, keys, keys)), *[torch.ones(1)] * 3)
        for keys in (4096, 4097)
    )
    monkeypatch.setattr(native, "_library", lambda _: pytest.fail("compiled"))
    monkeypatch.setattr(native, "instructions_of", lambda _: "avx2")
    assert native.native_attention(long, "multiply_add") is None
    with pytest.raises(pytest.fail.Exception, match="compiled"):
        native.native_attention(short, "multiply_add")


def test_the_operator_uses_it(monkeypatch):
    """And gives zeros for no keys and no values."""
    if module.mixed_attention_choice().name not in NATIVE:
        pytest.skip(f"PyTorch's attention is used here: {module.mixed_attention_choice().rejected}")
    calls = []
    kept = native.native_attention
    monkeypatch.setattr(module, "native_attention", lambda *args: calls.append(args[1]) or kept(*args))
    tensors, scales = operands((1, 2, 2, 4, 6, 8, 8))
    out = torch.ops.qframework.mixed_attention(*tensors, *scales)
    assert calls == [module.mixed_attention_choice().name]
    expected, size = exact(tensors, scales)
    assert ((out - expected).abs() <= 2.0**-10 * size).all()
    q, k, v = tensors
    assert (torch.ops.qframework.mixed_attention(q, k[:, :, :0], v[:, :, :0], *scales) == 0).all()
    assert torch.ops.qframework.mixed_attention(q[:, :, :0], k, v, *scales).shape == (1, 2, 0, 8)


def choice_in_a_process(**environment: str) -> list[str]:
    code = (
        "import logging; logging.basicConfig(level=logging.INFO)\n"
        "from qframework.kernels.attention.mixed import mixed_attention_choice as choice\n"
        "print(choice().name, choice().rejected)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()[-1].split(maxsplit=1)


def test_without_a_compiler_pytorch_computes_it(tmp_path):
    name, _ = choice_in_a_process(CXX="/no/such/compiler", TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    assert name == "torch"


@pytest.mark.parametrize("wrong", ["a result", "an error"])
def test_a_library_that_fails_is_not_used(monkeypatch, wrong, caplog):
    def broken(x, implementation):
        if wrong == "an error":
            raise RuntimeError("the C++ compiler failed")
        return module._torch_attention(x) * 1.01

    monkeypatch.setattr(module, "native_attention", broken)
    monkeypatch.setattr(module, "cpu_implementation", lambda: "vnni")
    with caplog.at_level("INFO"):
        choice = module.mixed_attention_choice.__wrapped__()
    assert choice.name == "torch"
    reason = {
        "a result": "it is not exact on this processor",
        "an error": "it is not available: the C++ compiler failed",
    }
    assert choice.rejected == {"vnni": reason[wrong]}
    assert reason[wrong] in caplog.text
