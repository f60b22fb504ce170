"""The dequantized weight of a layer that ``quantize_`` made: other code may compute with it, but not write to it.

It is a temporary tensor. A write, as when an adapter of PEFT is merged (``layer.weight.data += delta``), would be lost
without a word, so it is an error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qframework.compat import pytree
from qframework.compat.dispatch import memory_of, without_subclasses
from qframework.errors import UnsupportedError

_NO_WRITES = ("requires_grad_", "detach_", "share_memory_")
_OPERATORS = tuple(f"__i{each}__" for each in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"))


def read_only(weight: Tensor) -> Tensor:
    """``weight`` as a tensor that raises UnsupportedError when it, or a view of it, is written; itself in compilers."""
    return weight if torch.compiler.is_compiling() else weight.as_subclass(DequantizedWeight)


class DequantizedWeight(Tensor):
    """A tensor for reading. Results of operations are ordinary tensors, but for those that share its memory."""

    _is_hf_initialized = True  # transformers writes no initial values to such a tensor when a file lacks other weights

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        written = next(iter((*args, *kwargs.values())), None) if _writes(func) else kwargs.get("out")
        if any(isinstance(x, cls) for x in pytree.tree_leaves(written)):
            raise UnsupportedError(
                f"QuantizedLinear: weight must not be written, got {func.__name__} on a dequantized copy, which would "
                "change nothing. Merge adapters and change weights before quantize_"
            )
        with without_subclasses():
            if func is Tensor.__deepcopy__:
                return args[0].as_subclass(Tensor).clone()
            found = func(*args, **kwargs)
            memory = {memory_of(x) for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, cls)}
            return pytree.tree_map_only(Tensor, lambda x: _typed(x, memory), found)


def _writes(func: Any) -> bool:
    name = func.__name__
    if name == "__set__":
        return getattr(func.__self__, "__name__", None) == "data"
    in_place = name.endswith("_") and not name.endswith("__") and name not in _NO_WRITES
    return in_place or name in ("__setitem__", *_OPERATORS)


def _typed(x: Tensor, memory: set[int]) -> Tensor:
    """A result as what it must be: for reading only if it shares the weight's memory."""
    shares = x.layout == torch.strided and memory_of(x) in memory
    if shares == isinstance(x, DequantizedWeight):
        return x
    return x.as_subclass(DequantizedWeight if shares else Tensor)
