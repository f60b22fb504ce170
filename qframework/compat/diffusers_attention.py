"""The attention backends of diffusers (``set_attention_backend``): its registry, and which call PyTorch's function"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

from qframework.compat.missing import explained

__all__ = ["calls_pytorch", "replace_backends"]

Backend = Callable[..., Any]


@explained()
def replace_backends(replacement: Callable[[str, Backend], Backend]) -> None:
    """Put ``replacement(name, backend)`` in the place of each backend of the registry."""
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry

    backends = _AttentionBackendRegistry._backends
    for name, backend in list(backends.items()):
        backends[name] = replacement(name.value, backend)


def calls_pytorch(backend: Backend) -> bool:
    """Whether the code of a backend names ``F.scaled_dot_product_attention``."""
    return "scaled_dot_product_attention" in _names(backend.__code__)


def _names(code: CodeType) -> Iterator[str]:
    """The globals and attributes that a function and those defined in it use."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
