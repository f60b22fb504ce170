"""Let go of the float model that PT2E keeps alive.

PT2E looks up a model's device through a memo, which holds every prepared model, float weights and all, for as long as
the process lives. A converted model would take the memory of both.
"""

from __future__ import annotations

import sys

# Memos of torch and torchao, where they are loaded: module, function.
_MEMOS = (
    ("torch.ao.quantization.fx.utils", "assert_and_get_unique_device"),
    ("torchao.utils", "_assert_and_get_unique_device"),
)


def release_prepared_models() -> None:
    """Empty the memos; what is still in use is looked up once more."""
    for module, function in _MEMOS:
        memo = getattr(sys.modules.get(module), function, None)
        if clear := getattr(memo, "cache_clear", None):
            clear()
