"""The kernels of attention's 8-bit gradient compile for every supported chip without a GPU, and fit its memory."""

from __future__ import annotations

import re

import pytest
import torch
from test_compile_attention import FP16_PRODUCT, POINTERS, SHARED_KIB, Recorder, compile_launch
from test_compile_targets import CHIPS, stack_bytes

from qframework.kernels.attention import round_tokens
from qframework.kernels.attention.int8_gradient import forward as int8_gradient_forward
from qframework.kernels.attention.int8_gradient import triton as int8_gradient_triton
from qframework.kernels.attention.int8_gradient.forward import Dropout, choose_forward_tile, forward_triton
from qframework.kernels.attention.int8_gradient.reference import GradientOperands
from qframework.kernels.attention.int8_gradient.triton import (
    choose_gradient_tiles,
    delta_triton,
    gradients_triton,
    tokens_last,
)
from qframework.kernels.attention.operands import QuantizedQK
from qframework.kernels.runtime.triton import HAS_TRITON, INTERPRET

pytestmark = pytest.mark.skipif(INTERPRET or not HAS_TRITON, reason="interpreted kernels cannot be compiled")

KERNELS = {
    "_key_pass_kernel": int8_gradient_triton,
    "_query_pass_kernel": int8_gradient_triton,
    "_delta_kernel": int8_gradient_triton,
    "_tokens_last_kernel": int8_gradient_triton,
    "_round_tokens_kernel": round_tokens,
    "_dropout_attention_kernel": int8_gradient_forward,
}
# Bytes that a thread may spill, 256 on other chips; the most is Triton 3.6's. Blackwell's tiles and heads of more than
# 128 channels are not tuned yet.
MAX_STACK, WIDE_STACK = {"sm_90": 128, "sm_100": 448}, 672


def operands(channels: int, int8: bool, causal: bool, dtype: torch.dtype, tokens: int = 1024) -> GradientOperands:
    def zeros(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(1, 2, *shape, dtype=dtype)

    rows = [zeros(tokens, dtype=torch.float32) for _ in range(2)]
    q8, k8, grad8 = (zeros(tokens, channels, dtype=torch.int8) for _ in range(3))
    q_scale, k_scale = zeros(tokens // 128, dtype=torch.float32), zeros(tokens // 64, dtype=torch.float32)
    floats = [zeros(tokens, channels) for _ in range(4)]
    x = GradientOperands(q8, q_scale, k8, k_scale, *floats[:2], *rows, 0.125, causal)
    if int8:
        return x._replace(grad_int8=grad8, grad_scale=k_scale)
    return x._replace(q_float=floats[2], k_float=floats[3])


@pytest.fixture
def recorded(monkeypatch):
    launches: list = []
    for name, module in KERNELS.items():
        monkeypatch.setattr(module, name, Recorder(getattr(module, name), launches))
    return launches


@pytest.mark.sample(1 / 16)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("int8", [True, False])
@pytest.mark.parametrize(
    ("channels", "dtype"), [(64, torch.float16), (80, torch.bfloat16), (128, torch.float16), (256, torch.bfloat16)]
)
@pytest.mark.parametrize("chip", CHIPS)
def test_passes(recorded, chip, channels, dtype, int8, causal, tmp_path):
    """INT8 products for S, and dP in 16 bit; with ``int8`` those of dV, dK and dQ in INT8, too."""
    tiles = choose_gradient_tiles(channels, int8, CHIPS[chip][1])
    gradients_triton(operands(channels, int8, causal, dtype), tiles)
    assert [launch.kernel.__name__ for launch in recorded] == [
        *["_tokens_last_kernel"] * (3 * int8),
        *list(KERNELS)[:2],
    ]
    for launch in recorded[-2:]:
        compiled = compile_launch(chip, launch)
        assert compiled.metadata.shared <= SHARED_KIB.get(chip, 99) * 1024
        assert stack_bytes(compiled, tmp_path) <= (MAX_STACK.get(chip, 256) if channels <= 128 else WIDE_STACK)
        ptx = compiled.asm["ptx"]
        assert re.search(CHIPS[chip][2], ptx)
        assert re.search(FP16_PRODUCT.get(chip, r"mma\.sync\S*\.f16\.f16").replace("f16", "b?f16"), ptx)


def test_dv_dk_and_dq_are_products_of_integers_on_hopper(recorded):
    """With tokens contiguous in memory, so that tensor cores read them without a transposition in registers."""
    counts = {}
    for int8 in (True, False):
        gradients_triton(operands(64, int8, False, torch.float16), choose_gradient_tiles(64, int8, (9, 0)))
        ttgir = [compile_launch("sm_90", launch).asm["ttgir"] for launch in recorded[-2:]]
        counts[int8] = [len(re.findall(r"warp_group_dot %.*xi8", text)) for text in ttgir]
        recorded.clear()
    assert counts[True][0] == 3 * counts[False][0]
    assert counts[True][1] == 2 * counts[False][1]


@pytest.mark.sample(1 / 3)
@pytest.mark.parametrize("has_lse", [False, True])
@pytest.mark.parametrize("chip", CHIPS)
def test_delta(recorded, chip, has_lse, tmp_path):
    out = torch.zeros(1, 2, 1024, 128, dtype=torch.bfloat16)
    delta_triton(out, out, torch.zeros(1, 2, 1024) if has_lse else None)
    (launch,) = recorded
    assert stack_bytes(compile_launch(chip, launch), tmp_path) == 0


@pytest.mark.sample(1 / 4)
@pytest.mark.parametrize("channels", [64, 72, 80, 136, 256])
@pytest.mark.parametrize("chip", CHIPS)
def test_copies_of_operands(recorded, chip, channels, tmp_path):
    """Integers with tokens contiguous, and rounded queries and keys: nothing is spilled."""
    x = operands(channels, True, False, torch.bfloat16)
    tokens_last(x.q)
    round_tokens.round_tokens_triton(x.v, None, 0.2, 5.0, "query")
    round_tokens.round_tokens_triton(x.v, torch.zeros(1, 2, 1, channels), 1.0, 1.0, "key")
    assert len(recorded) == 3
    for launch in recorded:
        assert stack_bytes(compile_launch(chip, launch), tmp_path) == 0


MORE = [pytest.param(chip, channels, True, marks=pytest.mark.full) for chip in CHIPS for channels in (128, 256)]


@pytest.mark.parametrize(("chip", "channels", "causal"), [("sm_90", 64, False), *MORE])
def test_dropout(recorded, monkeypatch, chip, channels, causal, tmp_path):
    """The forward pass, and with the same mask both passes of the backward."""
    monkeypatch.setattr(int8_gradient_forward, "_INTERPRETED", choose_forward_tile(channels))
    x = operands(channels, False, causal, torch.bfloat16)
    seed = torch.zeros(1, dtype=torch.int64)
    monkeypatch.setitem(POINTERS, torch.int64, "*i64")
    forward_triton(QuantizedQK(x.q, x.q_scale, x.k, x.k_scale, channels), x.v, causal, Dropout(0.1, seed))
    tiles = choose_gradient_tiles(channels, False, CHIPS[chip][1])
    gradients_triton(x._replace(dropout_p=0.1, seed=seed), tiles)
    assert len(recorded) == 3
    for launch in recorded:
        compiled = compile_launch(chip, launch)
        assert compiled.metadata.shared <= SHARED_KIB.get(chip, 99) * 1024
        assert stack_bytes(compiled, tmp_path) <= (MAX_STACK.get(chip, 256) if channels <= 128 else WIDE_STACK)
