"""Quantized attention for users: functions, a scope that needs no change of the model, and model libraries.

- :func:`sage_attention`, :func:`sage_attention_varlen`: instead of ``F.scaled_dot_product_attention``.
- :class:`use_sage_attention`: every ``F.scaled_dot_product_attention`` inside the scope.
- :func:`calibrate_attention`: the fastest variant that is accurate enough, for each layer of a model, as an
  :class:`AttentionChoice`.
- :data:`fallbacks`: why and how often the scope left a call to PyTorch.
- :mod:`qframework.attention.transformers`: ``attn_implementation="qframework"``. Where transformers has been imported
  before this package, that is registered here; otherwise call its ``register()``.

diffusers keeps its attention backends in a private registry over a closed enumeration, which cannot be extended without
patching it. Its default backend calls ``F.scaled_dot_product_attention``, so :class:`use_sage_attention` serves it.
"""

import sys

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

if "transformers.modeling_utils" in sys.modules:
    from qframework.attention import transformers

    transformers.register()
