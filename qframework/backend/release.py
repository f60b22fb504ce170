"""Frees the float model that PT2E keeps alive, and keeps garbage collections short while a model is compiled.

PT2E caches each model's device in a memo that keeps every prepared model, with its float weights, alive until the
process ends: a converted model would then need the memory of both. Graphs and modules also form reference cycles that
only a full garbage collection frees; Dynamo's own collections cover only the youngest generation.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from qframework.compat.memos import empty_memos

# Bytes of float weights below which Python's own collections suffice: tuning makes many candidates of a small model.
_WORTH_COLLECTING = 32 * 2**20


def release_prepared_models(of_bytes: int | None = None) -> None:
    """Empty the memos, and collect the models that they held.

    ``of_bytes`` is the size of the model to free, if known: small ones are left to Python's own collections.
    """
    held = empty_memos()
    if held and (of_bytes is None or of_bytes >= _WORTH_COLLECTING):  # takes a few tenths of a second
        gc.collect()


@contextlib.contextmanager
def collecting_new_objects() -> Iterator[None]:
    """Garbage collections inside skip the objects that exist now, which take a full one tenths of a second.

    They also leave the memory of these objects alone, which forks share. Does nothing if objects are frozen already.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
