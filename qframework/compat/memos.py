"""PT2E's memos of a model's device, which keep every prepared model and its float weights until the process ends."""

from __future__ import annotations

import sys
from typing import Any

from qframework.compat.missing import note_missing

# Module and function. torchao 0.17 and 0.18 have their own beside that of torch.ao.
_MEMOS = (
    ("torch.ao.quantization.fx.utils", "assert_and_get_unique_device"),
    ("torchao.utils", "_assert_and_get_unique_device"),
)


def empty_memos() -> bool:
    """Empty the memos of loaded modules; returns whether any of them held a model."""
    held = False
    for module, function in _MEMOS:
        if module not in sys.modules:
            continue
        memo: Any = getattr(sys.modules[module], function, None)
        if not (hasattr(memo, "cache_info") and hasattr(memo, "cache_clear")):
            note_missing(f"{module}.{function}.cache_clear")
        elif memo.cache_info().currsize:
            memo.cache_clear()
            held = True
    return held
