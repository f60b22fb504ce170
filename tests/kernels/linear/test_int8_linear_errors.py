"""What int8_linear and zero_point_bias refuse, and with which message."""

from __future__ import annotations

import pytest
import torch
from test_int8_linear import make_case

from qframework.errors import QFrameworkError
from qframework.kernels import int8_linear, zero_point_bias

ZERO = torch.tensor([1], dtype=torch.int32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"out_zero_point": ZERO}, "int8_linear: out_zero_point must be None without out_scale, got a tensor"),
        ({"out_zero_point": ZERO.long(), "out_scale": torch.ones(1)}, "out_zero_point must have dtype int32, got"),
        ({"out_zero_point": ZERO.expand(2), "out_scale": torch.ones(1)}, r"shape \(\) or \(1,\), got \(2,\)"),
    ],
)
def test_wrong_zero_points(arguments, message):
    with pytest.raises(QFrameworkError, match=message):
        int8_linear(ZERO.char().expand(2, 4), torch.ones(1), ZERO.char().expand(3, 4), torch.ones(3), **arguments)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, torch.ones(4), r"zero_point_bias: bias must have shape \(3,\), got \(4,\)"),
        (1, torch.ones(3), r"zero_point_bias: a_scale must have shape \(\) or \(1,\), got \(3,\)"),
        (2, ZERO.float(), "zero_point_bias: zero_point must have dtype int32, got torch.float32"),
        (3, torch.ones(3, 4), "zero_point_bias: b must have dtype int8, got torch.float32"),
        (3, ZERO.char(), r"zero_point_bias: b must have shape \(N, K\), got \(1,\)"),
        (4, torch.ones(2), "zero_point_bias: b_scale must have shape"),
    ],
)
def test_wrong_operands_of_the_bias_of_a_zero_point(place, value, message):
    operands = [None, torch.ones(1), ZERO, ZERO.char().expand(3, 4), torch.ones(3)]
    operands[place] = value
    with pytest.raises(QFrameworkError, match=message):
        zero_point_bias(*operands)


def test_has_no_gradient():
    a, a_scale, b, b_scale, bias, _ = make_case(torch.device("cpu"), (2, 5, 24), 8)
    out = int8_linear(a, a_scale, b, b_scale, bias.requires_grad_())
    with pytest.raises(QFrameworkError, match="int8_linear: inference only"):
        out.sum().backward()


BAD_INPUT = {
    r"a and b must have shapes .*, got \(2, 5, 24\) and \(8, 23\)": {"b": torch.zeros(8, 23, dtype=torch.int8)},
    r"a must have dtype int8, got torch.float32": {"a": torch.zeros(2, 5, 24)},
    r"b must have dtype int8, got torch.uint8": {"b": torch.zeros(8, 24, dtype=torch.uint8)},
    r"b_scale must have shape \(8,\) or \(1,\), got \(7,\)": {"b_scale": torch.ones(7)},
    r"b_scale must have dtype float32, got torch.float64": {"b_scale": torch.ones(8, dtype=torch.float64)},
    r"bias must have shape \(8,\), got \(9,\)": {"bias": torch.ones(9)},
    r"bias must have dtype float32, float16 or bfloat16, got torch.int32": {"bias": torch.ones(8, dtype=torch.int32)},
    r"residual must have shape \(2, 5, 8\), got \(2, 5\)": {"residual": torch.ones(2, 5)},
    r"activation must be none, gelu, .* or silu, got 'swish'": {"activation": "swish"},
    r"a_scale must have shape \(1,\), .*, got \(3, 1\)": {"a_scale": torch.ones(3, 1)},
    r"out_scale must have shape \(1,\), \(8,\) per channel, .*, got \(5, 8\)": {"out_scale": torch.ones(5, 8)},
    r"out_scale must have shape .*, got \(7,\)": {"out_scale": torch.ones(7)},
    r"out_dtype must be float32, float16 or bfloat16, .* got torch.float64": {"out_dtype": torch.float64},
    r"out_dtype must be int8 or None .* torch.float16": {
        "out_scale": torch.ones(1),
        "out_dtype": torch.float16,
    },
    r"b_scale must be positive .*, got 0.0": {"b_scale": torch.zeros(8)},
    r"out_scale must be positive .*, got -1.0": {"out_scale": -torch.ones(1)},
    r"out_scale must be positive .*, got 0.0": {"out_scale": torch.arange(8.0)},
}


@pytest.mark.parametrize("message", BAD_INPUT)
def test_bad_input(message):
    a, a_scale, b, b_scale, bias, _ = make_case(torch.device("cpu"), (2, 5, 24), 8)
    arguments = {"a": a, "a_scale": a_scale, "b": b, "b_scale": b_scale, "bias": bias} | BAD_INPUT[message]
    with pytest.raises(QFrameworkError, match=message):
        int8_linear(**arguments)


@pytest.mark.gpu
def test_devices_must_agree():
    a, a_scale, b, b_scale, bias, _ = make_case(torch.device("cuda"), (2, 5, 24), 8)
    with pytest.raises(QFrameworkError, match="b must be on the input's device cuda:0, got cpu"):
        int8_linear(a, a_scale, b.cpu(), b_scale, bias)
