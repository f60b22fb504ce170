"""FloatView: a view of a BlockTensor that splits its blocks, such as ``x[:, :3]``.

It is a view of a float copy of the whole tensor, which all such views of the same blocks share. Writes to a view are
quantized into the blocks, and changes of the blocks are read before a view is used, so that a view and its tensor hold
the same values, as in PyTorch. This does not hold across the boundary of a compiled graph.
"""

from __future__ import annotations

import weakref
from typing import Any, NoReturn

import torch
from torch import Tensor

from qframework.compat.dispatch import (
    FunctionalTensor,
    disabled_torch_function,
    make_subclass,
    make_wrapper_subclass,
    writes,
)
from qframework.compat.operators import SWAP_MEMORY, OpOverload, schema
from qframework.compat.pytree import tree_leaves, tree_map_only
from qframework.errors import UnsupportedError
from qframework.graph.writes import written_arguments
from qframework.training.block_tensor import BlockTensor, blocks_of, float_of, overwrite, refuse_data

aten = torch.ops.aten


class FloatCopy:
    """``x`` dequantized, for as long as a view of it exists."""

    def __init__(self, x: BlockTensor) -> None:
        self.x, self.value, self.writes = x, float_of(x), x.memory.writes

    def read(self) -> None:
        """Update the copy if the blocks changed."""
        if self.writes != self.x.memory.writes:
            self.value.copy_(float_of(self.x))
            self.writes = self.x.memory.writes

    def write(self) -> None:
        """Quantize the copy into the blocks."""
        self.writes = self.x.memory.writes + 1
        overwrite(self.x, blocks_of(self.value, self.x.block_size))


class TracedCopy(FloatCopy):
    """A copy in a graph that AOTAutograd traces. Its views are plain tensors, which the graph can return.

    Writes to them are detected by their version counters the next time that the blocks are needed.
    """

    def __init__(self, x: BlockTensor) -> None:
        super().__init__(x)
        self.views: list[tuple[Tensor, int]] = []

    def flush(self) -> None:
        """Write changes of the views to the blocks."""
        if any(writes(view) != version for view, version in self.views):
            self.views = [(view, writes(view)) for view, _ in self.views]
            self.write()


def view_of(func: OpOverload, x: BlockTensor, *args: Any, **kwargs: Any) -> Any:
    """The result of a view operator on ``x``, as a view of the shared float copy of its blocks."""
    copy = x.memory.traced or (None if x.memory.copy is None else x.memory.copy())
    if copy is None:
        traced = isinstance(x.q, FunctionalTensor)
        copy = TracedCopy(x) if traced else FloatCopy(x)
        x.memory.traced, x.memory.copy = copy if traced else None, weakref.ref(copy)
    copy.read()
    result = func(copy.value.view(x.shape), *args, **kwargs)
    if not isinstance(copy, TracedCopy):
        return views_in(result, copy)
    copy.views += [(view, writes(x)) for view in tree_leaves(result)]
    return result


class FloatView(Tensor):
    """A view of a FloatCopy that writes changes back to the blocks."""

    inside: Tensor
    shared: FloatCopy | None  # None for an input of a compiled graph, which cannot write to it

    @staticmethod
    def __new__(cls, view: Tensor, copy: FloatCopy | None) -> FloatView:
        if type(view) is Tensor:
            self = make_subclass(cls, view)
        else:  # while a graph is traced
            self = make_wrapper_subclass(
                cls,
                view.shape,
                strides=view.stride(),
                storage_offset=view.storage_offset(),
                dtype=view.dtype,
                device=view.device,
            )
        self.inside, self.shared = view, copy
        return self

    __torch_function__ = disabled_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        views = _views((args, kwargs))
        for view in views:
            if view.shared is not None:
                view.shared.read()
        written = _views(list(written_arguments(func, args, kwargs)))
        for view in written:
            _check_write(func, view)
        if func in REPLACES_MEMORY or (
            written and torch.Tag.inplace_view in func.tags and func is not aten.detach_.default
        ):
            refuse_memory(func, views[0])
        plain_args, plain_kwargs = tree_map_only(FloatView, lambda view: view.inside, (args, kwargs))
        result = func(*plain_args, **plain_kwargs)
        for copy in dict.fromkeys(view.shared for view in written):
            copy.write()  # type: ignore[union-attr]
        if returns_views(func) and isinstance(args[0], FloatView):
            return views_in(result, args[0].shared)
        return written[0] if written and returns_operand(func) else result

    @property
    def data(self) -> Tensor:
        return Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: Tensor) -> None:
        refuse_data(self)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        if self.shared is not None:
            self.shared.read()
        return ["inside"], None

    @staticmethod
    def __tensor_unflatten__(inside: dict[str, Tensor], context: None, size: Any, stride: Any) -> FloatView:
        return FloatView(inside["inside"], None)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"FloatView({self.inside!r})"

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.clone().__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)

    def numpy(self, *, force: bool = False) -> Any:
        """A copy whose changes are not written back."""
        return self.clone().numpy(force=force)

    def tolist(self) -> Any:
        return self.clone().tolist()

    def __dlpack__(self, **options: Any) -> Any:
        return self.clone().__dlpack__(**options)


def returns_views(func: OpOverload) -> bool:
    """Whether ``func`` returns views of an argument that it does not write to."""
    return any(each.alias_info is not None and not each.alias_info.is_write for each in schema(func).returns)


def returns_operand(func: OpOverload) -> bool:
    """Whether ``func`` returns the argument that it writes to."""
    aliases = [each.alias_info for each in schema(func).returns]
    return len(aliases) == 1 and aliases[0] is not None and aliases[0].is_write


def refuse_memory(func: OpOverload, x: Tensor, *_: Any, **__: Any) -> NoReturn:
    """Raise UnsupportedError for ``func``, which would replace the memory or shape of ``x`` in place."""
    raise UnsupportedError(
        f"{func.name()}: a {type(x).__name__} of shape {tuple(x.shape)} must keep its memory and shape. Use copy_, "
        "which writes values, or an operator that returns a new tensor"
    )


REPLACES_MEMORY = (SWAP_MEMORY, aten.set_.source_Tensor)  # the first: ``x.data = y``


def _check_write(func: OpOverload, view: FloatView) -> None:
    if view.shared is None:
        raise UnsupportedError(
            f"{func.name()}: a compiled graph must not write to its input, a view of a BlockTensor, got one of shape "
            f"{tuple(view.shape)}. Write to it outside of the graph, or create the view inside"
        )


def _views(values: Any) -> list[FloatView]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, FloatView)]


def views_in(result: Any, copy: FloatCopy | None) -> Any:
    """The results of a view operator as views of ``copy``."""
    return tree_map_only(Tensor, lambda view: FloatView(view, copy), result)
