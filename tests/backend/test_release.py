"""A compiled INT8 model does not keep its float model alive, and its compilation does not collect old objects."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from lowered_models import Block, converted, example

from qframework.backend import compile as backend
from qframework.backend.release import collecting_new_objects, release_prepared_models


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


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    """As in a process of a user; conftest.py freezes what tests have in common."""
    gc.unfreeze()
    yield
    gc.collect()
    gc.freeze()


@pytest.mark.usefixtures("nothing_frozen")
def test_collections_inside_leave_out_what_exists_and_find_new_garbage() -> None:
    class Node:
        pass

    def circle() -> weakref.ref[Node]:
        node = Node()
        node.itself = node  # type: ignore[attr-defined]
        return weakref.ref(node)

    gc.collect()
    before = circle()
    with collecting_new_objects():
        inside = circle()
        gc.collect()
        assert before() is not None
        assert inside() is None
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert before() is None


@pytest.mark.usefixtures("nothing_frozen")
def test_what_somebody_froze_stays_frozen() -> None:
    def collected() -> bool:
        return any(found is kept for found in gc.get_objects())

    kept: list[None] = []
    assert collected()
    gc.freeze()
    with collecting_new_objects():
        assert not collected()
    assert not collected()


@pytest.mark.usefixtures("nothing_frozen")
def test_an_error_ends_it() -> None:
    with pytest.raises(ValueError, match="inside"), collecting_new_objects():
        raise ValueError("inside")
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("fresh_dynamo", "nothing_frozen")
def test_the_backend_compiles_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen: list[bool] = []
    run_passes = backend.run_passes

    def seen(lowering: object) -> None:
        frozen.append(gc.get_freeze_count() > 0)
        run_passes(lowering)

    monkeypatch.setattr(backend, "run_passes", seen)
    torch.compile(torch.nn.Linear(4, 4), backend="qframework")(torch.ones(2, 4))
    assert frozen == [True]
    assert gc.get_freeze_count() == 0
