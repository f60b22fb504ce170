"""Quantized attention for users: functions, a scope for unchanged models, and support for model libraries.

- :func:`sage_attention`, :func:`sage_attention_varlen`: replace ``F.scaled_dot_product_attention``.
- :class:`use_sage_attention`: quantizes every ``F.scaled_dot_product_attention`` inside the scope.
- :func:`calibrate_attention`: chooses the fastest variant that is accurate enough for each layer of a model, as an
  :class:`AttentionChoice`.
- :data:`fallbacks`: why and how often the scope fell back to PyTorch.
- :mod:`qframework.attention.transformers`: ``attn_implementation="qframework"``, which ``import qframework`` registers,
  before or after transformers; its ``register()`` registers other variants.

diffusers keeps its attention backends in a private registry that cannot be extended without patching it. Its default
backend calls ``F.scaled_dot_product_attention``, so :class:`use_sage_attention` works with it.
"""

from qframework.attention.adaptive import calibrate_attention
from qframework.attention.api import sage_attention, sage_attention_varlen
from qframework.attention.choice import AttentionChoice
from qframework.attention.drop_in import fallbacks, use_sage_attention

__all__ = [
    "AttentionChoice",
    "calibrate_attention",
    "fallbacks",
    "sage_attention",
    "sage_attention_varlen",
    "use_sage_attention",
]
