"""Frees the float model that PT2E keeps alive.

PT2E caches each model's device in a memo that keeps every prepared model, with its float weights, alive until the
process ends: a converted model would need the memory of both. Graphs and modules also form reference cycles that only a
full garbage collection frees; the collections that Dynamo starts cover the youngest generation only.
"""

from __future__ import annotations

import gc

from qframework.compat.memos import empty_memos

# Less than this in float weights waits until Python collects by itself: tuning makes many candidates of a small model.
_WORTH_COLLECTING = 32 * 2**20


def release_prepared_models(of_bytes: int | None = None) -> None:
    """Empty the memos, and collect what they held; what is still in use is looked up once more.

    ``of_bytes`` is the size of what is to be freed, where the caller knows it: a little is left to Python's own
    collections.
    """
    held = empty_memos()
    if held and (of_bytes is None or of_bytes >= _WORTH_COLLECTING):  # a few tenths of a second, once for each model
        gc.collect()
