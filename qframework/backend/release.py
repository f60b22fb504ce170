"""Frees the float model that PT2E keeps alive, and keeps collections of garbage short while a model is compiled.

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
    """Collections of garbage inside leave out what exists now: with exported graphs, tenths of a second each.

    Nor do they write to its memory, which forks share. Nothing changes where somebody froze objects already.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
