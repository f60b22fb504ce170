"""Let go of the float model that PT2E keeps alive.

PT2E looks up a model's device through a memo, which holds every prepared model, float weights and all, for as long as
the process lives. A converted model would take the memory of both. Graphs and modules hold each other besides, so that
only Python's garbage collector finds what the memo let go of, and by then it is old: Dynamo collects young objects
alone.
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
