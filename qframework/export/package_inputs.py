"""The inputs of a package of AOTInductor: a description that is written into it, and the check of each call.

AOTInductor's code reads an input's memory as the example's, whatever it gets: another shape, dtype or layout would give
wrong numbers without an error, and numbers that are no tensors are dropped, since they are constants of the code.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, TensorArgument

from qframework.arguments import described
from qframework.compat import pytree
from qframework.errors import UnsupportedError
from qframework.graph.shapes import traced_size

_ALIGNED = 16  # bytes: the code may load that much at once, as from the memory of PyTorch's allocators


def describe_inputs(program: ExportedProgram) -> str:
    """JSON that ``checked_call`` reads: each input's name and its shape, dtype and layout, or its constant value."""
    values = {node.name: node.meta.get("val") for node in program.graph.find_nodes(op="placeholder")}
    written = set(program.graph_signature.user_inputs_to_mutate.values())
    inputs: list[dict[str, Any]] = []
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.USER_INPUT:
            known: dict[str, Any] = {"name": spec.arg.name, "written": spec.arg.name in written}
            if isinstance(spec.arg, TensorArgument) and isinstance(values[spec.arg.name], Tensor):
                known |= _tensor(values[spec.arg.name])
            elif isinstance(spec.arg, ConstantArgument) and isinstance(spec.arg.value, int | float | str | None):
                known["constant"] = spec.arg.value
            inputs.append(known)
    limits = program.range_constraints.items()
    ranges = {str(symbol): (_bound(each.lower), _bound(each.upper)) for symbol, each in limits}
    return json.dumps({"inputs": inputs, "ranges": ranges})


def _tensor(x: Tensor) -> dict[str, Any]:
    order = sorted(range(x.ndim), key=lambda axis: -traced_size(x.stride()[axis]))
    shape = [size if isinstance(size, int) else str(size) for size in x.shape]
    return {"shape": shape, "dtype": str(x.dtype), "device": x.device.type, "order": order}


def _bound(value: Any) -> int | None:
    return int(value) if value.is_Integer else None


def checked_call(run: Callable[..., Any], structure: Any, description: str) -> Callable[..., Any]:
    """``run`` with inputs that are checked first, and copied where their layout in memory is another one.

    Args:
        run: the compiled function.
        structure: of its positional and keyword inputs, as PyTorch's pytree describes it.
        description: of ``describe_inputs``.
    """
    known = json.loads(description)
    inputs, ranges = known["inputs"], known["ranges"]
    positional, keywords = pytree.children(structure)
    count, names = len(pytree.children(positional)), keywords.context

    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) != count or set(kwargs) != set(names):
            raise UnsupportedError(
                f"package: inputs must be {_listed(count, names)}, as in the example that it was written with, got "
                f"{_listed(len(args), kwargs)}"
            )
        given = args, {name: kwargs[name] for name in names}
        if pytree.tree_structure(given) != structure:
            raise UnsupportedError(
                "package: inputs must be nested in tuples, lists and dictionaries like the example that it was written "
                f"with, {structure}, got {pytree.tree_structure(given)}"
            )
        sizes = _Sizes(ranges)
        leaves = pytree.tree_leaves(given)
        fitting = [_checked(x, each, sizes) for x, each in zip(leaves, inputs, strict=True)]
        sizes.check_expressions()
        args, kwargs = pytree.tree_unflatten(fitting, structure)
        result = run(*args, **kwargs)
        for x, copied, each in zip(leaves, fitting, inputs, strict=True):
            if each["written"] and copied is not x:
                x.copy_(copied)
        return result

    return call


def _listed(count: int, names: Iterable[str]) -> str:
    named = ", ".join(map(repr, names))
    return f"{count} positional and {f'the keywords {named}' if named else 'no keywords'}"


def _checked(x: Any, known: dict[str, Any], sizes: _Sizes) -> Any:
    """An input, or a copy in the layout that the code reads."""
    name = f"package: input {known['name']!r}"
    if "constant" in known:
        if isinstance(x, Tensor) or x != known["constant"]:
            raise UnsupportedError(f"{name} must be {known['constant']!r}, a constant of the code, got {described(x)}")
        return x
    if "shape" not in known:
        return x
    if not isinstance(x, Tensor) or x.layout != torch.strided:
        raise UnsupportedError(f"{name} must be a dense tensor, got {described(x)}")
    if str(x.dtype) != known["dtype"] or x.device.type != known["device"]:
        raise UnsupportedError(
            f"{name} must be {known['dtype']} on {known['device']}, got {x.dtype} on {x.device.type}"
        )
    sizes.check_shape(name, x.shape, known["shape"])
    x = x.resolve_conj().resolve_neg()
    order = known["order"]
    if not x.permute(order).is_contiguous():
        return x.permute(order).contiguous().permute(sorted(range(x.ndim), key=order.__getitem__))
    return x.clone() if x.data_ptr() % _ALIGNED else x


class _Sizes:
    """The sizes of the axes that vary, by their symbols, and the shapes that must agree with them."""

    def __init__(self, ranges: dict[str, tuple[int | None, int | None]]) -> None:
        self._ranges, self._found = ranges, dict[str, int]()
        self._expressions: list[tuple[str, torch.Size, list[Any], str, int]] = []

    def check_shape(self, name: str, shape: torch.Size, wanted: list[int | str]) -> None:
        if len(shape) != len(wanted) or not all(map(self._fits, shape, wanted)):
            self._refuse(name, shape, wanted)
        for size, each in zip(shape, wanted, strict=True):
            if isinstance(each, str) and not each.isidentifier():
                self._expressions.append((name, shape, wanted, each, size))

    def check_expressions(self) -> None:
        """Of symbols, such as ``2*s0``; their symbols are known when all shapes are."""
        for name, shape, wanted, text, size in self._expressions:
            if not self._solves(text, size):
                self._refuse(name, shape, wanted)

    def _fits(self, size: int, wanted: int | str) -> bool:
        if isinstance(wanted, int):
            return size == wanted
        if not wanted.isidentifier():
            return True
        low, high = self._ranges.get(wanted, (None, None))
        # 2 is what exports record of any axis that varies: their graphs hold for 0 and 1 too.
        inside = (low is None or low <= 2 or size >= low) and (high is None or size <= high)
        return inside and self._found.setdefault(wanted, size) == size

    def _solves(self, text: str, size: int) -> bool:
        import sympy  # type: ignore[import-untyped]

        expression = sympy.sympify(text).subs(self._found)
        unknown = expression.free_symbols
        if len(unknown) != 1:
            return bool(unknown) or expression == size
        symbol = next(iter(unknown))
        values = [int(x) for x in sympy.solve(expression - size, symbol) if x.is_integer and x.is_nonnegative]
        return bool(values) and self._found.setdefault(str(symbol), values[0]) in values

    def _refuse(self, name: str, shape: torch.Size, wanted: list[int | str]) -> None:
        limits = [
            f", {symbol} from {low if low and low > 2 else 0}{'' if high is None else f' to {high}'}"
            for symbol, (low, high) in self._ranges.items()
            if symbol in wanted
        ]
        known = [f", where {symbol} is {self._found[symbol]}" for symbol in self._found if symbol in wanted]
        raise UnsupportedError(
            f"{name} must have shape ({', '.join(map(str, wanted))}){''.join(limits)}, got {tuple(shape)}"
            f"{''.join(known)}. Only axes that dynamic_shapes named when the package was written may vary"
        )
