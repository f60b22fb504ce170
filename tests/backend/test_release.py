"""A compiled INT8 model does not keep the float model it was made from."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from models import Block, converted, example


@pytest.fixture
def no_collector():
    """Nothing is freed because the garbage collector happened to run."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("fresh_dynamo", "no_collector")
def test_float_weights_are_freed():
    model = Block().eval()
    references = [weakref.ref(p) for p in model.parameters() if p.ndim == 2]
    quantized = converted(model, example())
    del model
    gc.collect()  # what is alive is old from here on
    run = torch.compile(quantized, backend="qframework")
    with torch.no_grad():
        run(example())
    assert references
    assert not [reference for reference in references if reference() is not None]
