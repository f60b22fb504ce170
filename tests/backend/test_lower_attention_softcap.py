"""Graphs of models of transformers whose eager attention caps its logits."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from attention_models import SAGE, Capture
from softcap_models import CAP, FAMILIES, model_of

from qframework.numerics import sqnr_db

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)


def without_cap(gm):
    for node in gm.graph.nodes:
        if node.target is SAGE:
            node.args = node.args[:12]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_attention_becomes_one_call_with_its_cap(family):
    model, inputs, counted, attentions = model_of(family)
    capture = Capture()
    with torch.no_grad():
        plain = model(**inputs).last_hidden_state[counted]
        y = torch.compile(model, backend=capture)(**inputs).last_hidden_state[counted]
        torch.compiler.reset()
        other = torch.compile(model, backend=Capture(edit=without_cap))(**inputs).last_hidden_state[counted]
    assert len(capture.calls) == attentions
    assert {call["softcap"] for call in capture.calls} == {CAP}
    assert all(report.lowered for report in capture.attention), capture.attention
    assert "tanh" not in capture.names()
    assert "softmax" not in capture.names()
    assert sqnr_db(plain, y) > 25
    assert sqnr_db(plain, other) < 15
