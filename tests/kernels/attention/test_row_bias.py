"""row_bias.py, and exact products when PyTorch may round float32 products to TF32 or bfloat16 (numerics.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from qframework.kernels.attention import pipeline as module
from qframework.kernels.attention.backward import BackwardArguments, _sage_attention_backward
from qframework.kernels.attention.mixed import _torch_attention
from qframework.kernels.attention.mixed_arguments import MixedAttentionArguments
from qframework.kernels.attention.row_bias import row_bias_ref, row_bias_triton
from qframework.kernels.blocks.linear.block_linear import BLOCK_LINEAR
from qframework.kernels.blocks.quantize import block_quantize
from qframework.quantizer import weight_rounding
from qframework.quantizer.config import static_int8
from qframework.quantizer.smooth import CalibratedLinear

PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "matmul", "linear", "einsum", "scaled_dot_product", "convolution")


class Recorded(TorchDispatchMode):
    """Records the dtypes of PyTorch's products and the sizes of float32 copies.

    Products of integers up to 127 are exact in bfloat16 and not recorded, nor are calls inside operators.
    """

    def __init__(self) -> None:
        super().__init__()
        self.products: list[tuple[str, torch.dtype]] = []
        self.copies: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        if func.namespace == "aten" and any(product in name for product in PRODUCTS):
            tensors = [x for x in args if isinstance(x, Tensor)]
            if not all(bool((x == x.round().clamp(-127, 127)).all()) for x in tensors):
                self.products += [(name, x.dtype) for x in tensors]
        if name == "_to_copy" and result.dtype == torch.float32:
            self.copies.append(result.numel())
        return result


@pytest.fixture
def rounded() -> Iterator[None]:
    """Allow rounding of float32 products: to TF32 on a GPU, to bfloat16 on a CPU that supports it."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision(before)


def operands(tokens: int = 40) -> list[Tensor]:
    return [torch.randn(1, 2, tokens, 16) for _ in range(3)]


def smooth_q() -> None:
    module.SAGE_ATTENTION.cpu(*operands(), variant="sage2_int4")


def float_values() -> None:
    module.SAGE_ATTENTION.cpu(*operands(), variant="sage_b")


def static_attention() -> None:
    q, k, v = (torch.randint(-127, 128, (1, 2, 40, 16), dtype=torch.int8) for _ in range(3))
    scale = torch.tensor([0.02])
    _torch_attention(MixedAttentionArguments(q, k, v, scale, scale, scale, attn_mask=torch.randn(40, 40)))


def log_sum_exp() -> None:
    needed = [True, True, False, False, False, False]
    masks = None, None, None
    ones = torch.ones(1, 2, 40)
    _sage_attention_backward(BackwardArguments(None, ones, *operands(), *masks, False, None, False, None, needed))


def hessian() -> None:
    weight_rounding._outer_product([torch.randn(50, 16)], None, True)


def smoothing() -> None:
    rows = torch.randn(50, 16)
    layer = CalibratedLinear("fc", torch.randn(8, 16), torch.arange(16), static_int8(), rows, rows.abs().amax(0))
    layer.error(torch.ones(16))


def block_product() -> None:
    a, a_scale = block_quantize(torch.randn(32, 32), 32)
    BLOCK_LINEAR.cpu(a, a_scale, a, a_scale, None, (32, 32), torch.float32)


@pytest.mark.usefixtures("rounded")
@pytest.mark.parametrize(
    "call", [smooth_q, float_values, static_attention, log_sum_exp, hessian, smoothing, block_product]
)
def test_exact_products_ignore_the_matmul_precision_setting(call):
    with Recorded() as recorded:
        call()
    assert recorded.products, "nothing was multiplied"
    assert {dtype for _, dtype in recorded.products} == {torch.float64}, recorded.products


def test_products_stay_in_float32_where_that_is_exact():
    """float64 would take twice the time."""
    with Recorded() as recorded:
        smooth_q()
    assert {dtype for _, dtype in recorded.products} == {torch.float32}


# Smooth Q's exact logits ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 16), (2, 3, 3, 70, 72), (1, 20, 1, 130, 17)])
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_row_bias(implementation, place, shape, mean, dtype):
    """Keys have a mean of 100 standard deviations."""
    batch, blocks, heads_kv, keys, channels = shape
    q_mean = torch.randn(batch, 2 * heads_kv, blocks, channels, device=place)
    wide = torch.randn(batch, keys, heads_kv, channels + 3) + 100
    k = wide.to(dtype).to(place).transpose(1, 2)[..., :channels]  # strided
    k_mean = k.float().mean(2, keepdim=True) if mean else None
    got = {"cpu": row_bias_ref, "triton": row_bias_triton}[implementation](q_mean, k, k_mean)
    centred = k.double() - (k_mean.double() if k_mean is not None else 0)
    terms = q_mean.double()[..., None, :] * centred.repeat_interleave(2, 1)[:, :, None]
    assert ((got - terms.sum(-1)).abs() <= 2.0**-23 * (4 + channels) * terms.abs().sum(-1)).all()


@pytest.mark.interpreter
def test_row_bias_of_packed_keys():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lengths = [5, 0, 80]
    starts = torch.tensor([0, 5, 5, 85], dtype=torch.int32, device=device)
    k, q_mean = torch.randn(85, 2, 16, device=device), torch.randn(3, 2, 2, 16, device=device)
    got = row_bias_triton(q_mean, k, None, starts, 80)
    for i, keys in enumerate(k.split(lengths)):
        expected = row_bias_ref(q_mean[i : i + 1], keys.transpose(0, 1)[None], None)
        torch.testing.assert_close(got[i : i + 1, ..., : lengths[i]], expected, rtol=1e-5, atol=1e-5)
        assert (got[i, ..., lengths[i] :] == 0).all()


@pytest.mark.interpreter
@pytest.mark.parametrize("packed", [False, True])
def test_smooth_q_copies_no_keys(packed):
    """The kernel reads keys with their strides and calls no product of PyTorch."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v = (x.half().to(device) for x in operands(200))
    with Recorded() as recorded:
        if packed:
            starts = torch.tensor([0, 90, 200], dtype=torch.int32, device=device)
            rows = (x[0].transpose(0, 1) for x in (q, k, v))
            module.SAGE_ATTENTION_VARLEN.cuda(*rows, starts, starts, 110, 110, variant="sage2_int4")
        else:
            module.SAGE_ATTENTION.cuda(q, k, v, variant="sage2_int4")
    assert not recorded.products
    assert all(size < k.numel() for size in recorded.copies)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tf32_changes_no_bit(dtype):
    q, k, v = (x.to("cuda", dtype) for x in operands(1000))
    results = []
    for precision in ("highest", "high", "medium"):
        torch.set_float32_matmul_precision(precision)
        results.append(torch.ops.qframework.sage_attention(q, k, v, variant="sage2_int4")[0])
    torch.set_float32_matmul_precision("highest")
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
