"""Lets ``use_sage_attention`` count the calls of diffusers' attention backends that it cannot quantize.

The scope intercepts PyTorch's function, which ``native`` and its relatives call. A model with
``set_attention_backend("flash")`` would otherwise run as without the scope, and nothing would say so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from qframework.attention.drop_in import attention_elsewhere
from qframework.compat.diffusers_attention import calls_pytorch, replace_backends


def counted(name: str, backend: Callable[..., Any]) -> Callable[..., Any]:
    """The backend; if it does not call PyTorch's function, with a count of its calls inside scopes."""
    if calls_pytorch(backend):
        return backend
    reason = f"diffusers' attention backend {name!r} does not call PyTorch's function"

    @functools.wraps(backend)
    def run(*args: Any, **kwargs: Any) -> Any:
        attention_elsewhere(reason)
        return backend(*args, **kwargs)

    return run


replace_backends(counted)
