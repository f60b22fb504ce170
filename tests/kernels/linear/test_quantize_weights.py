"""quantize_weights quantizes each weight as a launch of its own would."""

from __future__ import annotations

import pytest
import torch

from qframework import numerics
from qframework.errors import UnsupportedError
from qframework.kernels.linear.quantize_weights import (
    QUANTIZE_WEIGHTS,
    QuantizeWeightsArguments,
    places,
    quantize_weights,
)

SHAPES = [
    [(48, 64)],
    [(5, 7), (1, 1), (3, 130)],
    [(16, 32)] * 8,
    [(9, 1040), (64, 16), (2, 3000)],
]


@pytest.fixture
def device():
    """Interpreted kernels read the CPU's memory."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def run(weights):
    return quantize_weights(weights) if weights[0].is_cuda else QUANTIZE_WEIGHTS.cuda(weights)


def made(shapes, dtype, device):
    weights = [torch.randn(shape, device=device).to(dtype) * 3**i for i, shape in enumerate(shapes)]
    weights[0][0] = 0
    weights[-1][-1, -1] = 300  # an outlier
    return weights


def assert_as_alone(weights, values, scales):
    for weight, (value, scale) in zip(weights, places([w.shape for w in weights]), strict=False):
        assert value % 128 == 0
        wanted, wanted_scale = numerics.quantize_weight(weight)
        assert torch.equal(values[value : value + weight.numel()].view_as(weight), wanted)
        assert torch.equal(scales[scale : scale + weight.shape[0]], wanted_scale)


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shapes", SHAPES)
def test_each_weight_is_quantized_independently(shapes, dtype, device):
    weights = made(shapes, dtype, device)
    assert_as_alone(weights, *run(weights))


@pytest.mark.interpreter
def test_strided_weights(device):
    weights = [torch.randn(32, 48, device=device).t(), torch.randn(20, 64, device=device)[:, ::2]]
    assert_as_alone(weights, *run(weights))


@pytest.mark.interpreter
def test_nan_and_infinity_affect_only_their_row(device):
    weights = [torch.randn(6, 40, device=device) for _ in range(2)]
    weights[1][2, 3], weights[1][4, 0] = float("nan"), float("inf")
    values, scales = run(weights)
    assert scales[6:].isfinite().tolist() == [True, True, False, True, False, True]
    assert_as_alone(weights[:1], values, scales)


def test_cpu_operator():
    weights = made(SHAPES[1], torch.float32, "cpu")
    assert_as_alone(weights, *quantize_weights(weights))
    torch.library.opcheck(torch.ops.qframework.quantize_weights.default, (weights,))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([], "weights must have 1 to 8 tensors, got 0"),
        ([torch.zeros(2, 2)] * 9, "weights must have 1 to 8 tensors, got 9"),
        ([torch.zeros(2, 2), torch.zeros(4)], r"weights\[1\] must have shape \(N, K\) .*, got \(4,\)"),
        ([torch.zeros(2, 2).int()], r"weights\[0\] must have dtype .*, got torch.int32"),
        (
            [torch.zeros(2, 2), torch.zeros(2, 2).half()],
            r"weights\[1\] must be torch.float32 on cpu .*, got torch.float16",
        ),
    ],
)
def test_errors_name_the_argument(weights, message):
    with pytest.raises(UnsupportedError, match=message):
        torch.ops.qframework.quantize_weights.default(weights) if weights else quantize_weights_ref_checked(weights)


def quantize_weights_ref_checked(weights):
    """The dispatcher finds no device in an empty list."""
    QuantizeWeightsArguments(weights).check()
