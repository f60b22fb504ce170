"""The base classes of key and value caches in transformers."""

from __future__ import annotations

from qframework.compat.missing import explained

with explained():
    from transformers.cache_utils import Cache, CacheLayerMixin

__all__ = ["Cache", "CacheLayerMixin"]
