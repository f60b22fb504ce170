"""A compiled INT8 model does not keep the float model it was made from."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from models import Block, converted, example


@pytest.mark.usefixtures("fresh_dynamo")
def test_float_weights_are_freed():
    model = Block().eval()
    references = [weakref.ref(p) for p in model.parameters() if p.ndim == 2]
    quantized = converted(model, example())
    del model
    run = torch.compile(quantized, backend="qframework")
    with torch.no_grad():
        run(example())
    gc.collect()
    assert references
    assert not [reference for reference in references if reference() is not None]
