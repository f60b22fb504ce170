"""Let go of the float model that PT2E keeps alive.

PT2E looks up a model's device through a memo, which holds every prepared model, float weights and all, for as long as
the process lives. A converted model would take the memory of both. Graphs and modules hold each other besides, so that
only Python's garbage collector finds what the memo let go of, and by then it is old: Dynamo collects young objects
alone.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

# Memos of torch and torchao, where they are loaded: module, function.
_MEMOS = (
    ("torch.ao.quantization.fx.utils", "assert_and_get_unique_device"),
    ("torchao.utils", "_assert_and_get_unique_device"),
)


# Less than this in float weights waits until Python collects by itself: tuning makes many candidates of a small model.
_WORTH_COLLECTING = 32 * 2**20


def release_prepared_models(of_bytes: int | None = None) -> None:
    """Empty the memos, and collect what they held; what is still in use is looked up once more.

    ``of_bytes`` is the size of what is to be freed, where the caller knows it: a little is left to Python's own
    collections.
    """
    memos: list[Any] = [getattr(sys.modules.get(module), function, None) for module, function in _MEMOS]
    full = [memo for memo in memos if hasattr(memo, "cache_info") and memo.cache_info().currsize]
    for memo in full:
        memo.cache_clear()
    if full and (of_bytes is None or of_bytes >= _WORTH_COLLECTING):  # a few tenths of a second, once for each model
        gc.collect()
