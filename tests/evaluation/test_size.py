"""Bytes of weights, against counts by hand."""

from __future__ import annotations

import torch
from mlp_helpers import TinyMLP, both, quantizer
from torch import nn

from qframework.evaluation import weight_bytes


def test_weight_bytes_counts_parameters_and_buffers() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    assert weight_bytes(model) == 4 * (15 + 5) + 4 * (4 * 5) + 8


def test_weight_bytes_counts_a_shared_weight_once() -> None:
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    assert weight_bytes(nn.Sequential(first, second)) == 4 * 16


def test_weight_bytes_counts_what_a_view_keeps_alive() -> None:
    model = nn.Module()
    model.register_buffer("view", torch.zeros(100)[:1])
    assert weight_bytes(model) == 400


def test_converted_model_keeps_no_float_weight() -> None:
    images = torch.randn(4, 16)
    converted = both(TinyMLP().eval(), images, quantizer(), [images]).converted
    weights, rows = 2 * 16 * 32, 32 + 16
    # int8 weights; per output channel a float32 scale, an int64 zero point and a float32 bias
    assert weight_bytes(converted) == weights + rows * (4 + 8 + 4)
