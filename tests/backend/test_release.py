"""A compiled INT8 model does not keep its float model alive."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from lowered_models import Block, converted, example

from qframework.backend.release import release_prepared_models


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


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize(("of_bytes", "freed"), [(None, True), (32 * 2**20, True), (32 * 2**20 - 1, False)])
def test_small_models_are_left_to_pythons_collector(of_bytes, freed):
    """A collection takes longer than a small candidate of ``tune``; the memos must not hold it for that."""
    model = Block().eval()
    reference = weakref.ref(model.fc1.weight)
    kept = converted(model, example())
    del model
    gc.collect()
    assert reference() is not None, "a memo holds it"
    release_prepared_models(of_bytes)
    assert (reference() is None) == freed
    gc.collect()
    assert reference() is None
    assert kept is not None
