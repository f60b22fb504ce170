"""Every subpackage counts its fallbacks by reason, logs each message once, and starts again after clear()."""

from __future__ import annotations

import importlib
import logging

import pytest
import torch
import torch.nn.functional as F

from qframework import use_sage_attention
from qframework.fallbacks import Fallbacks
from qframework.training import quantize_blocks

ROOMS = ("attention", "backend", "training")


def fall_back(room: str) -> None:
    """Run something that a subpackage leaves in float."""
    x = torch.randn(1, 2, 4, 8)
    if room == "attention":
        with use_sage_attention():
            F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
    elif room == "training":
        quantize_blocks(x).sum()
    else:
        weight = torch.randn(4, 8)
        run = torch.compile(F.linear, backend="qframework", options={"linear": "int8_dynamic"})
        torch._dynamo.reset()
        run(x, weight)


@pytest.mark.parametrize("room", ROOMS)
def test_fallbacks_are_counted_by_reason_and_logged_once(room: str, caplog: pytest.LogCaptureFixture) -> None:
    fallbacks = importlib.import_module(f"qframework.{room}").fallbacks
    assert type(fallbacks) is Fallbacks
    fallbacks.clear()
    with caplog.at_level(logging.WARNING, logger="qframework"):
        fall_back(room)
        fall_back(room)
        ((reason, count),) = fallbacks.items()
        assert count == 2
        assert [record.getMessage().count(reason) for record in caplog.records] == [1]
        fallbacks.clear()
        assert not fallbacks
        fall_back(room)
    assert fallbacks == {reason: 1}
    assert len(caplog.records) == 2
    fallbacks.clear()


def test_one_reason_may_be_logged_for_several_layers(caplog: pytest.LogCaptureFixture) -> None:
    fallbacks = Fallbacks()
    for layer in ("a", "b", "a"):
        fallbacks.note("too wide", f"layer {layer!r}: too wide")
    assert fallbacks == {"too wide": 3}
    assert [record.getMessage().split(":")[1].strip() for record in caplog.records] == ["layer 'a'", "layer 'b'"]


def test_subpackages_have_separate_counters() -> None:
    counters = [importlib.import_module(f"qframework.{room}").fallbacks for room in ROOMS]
    assert len({id(counter) for counter in counters}) == len(ROOMS)
