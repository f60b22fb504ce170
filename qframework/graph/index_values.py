"""Finds the nodes of a graph whose values follow from indices alone, whatever the inputs: positions and masks.

``index_values(gm)`` runs the graph on the formulas of index_formulas.py: ``arange``, constants, arithmetic,
comparisons, views and indexing. All other operations and the inputs have none. A formula is what was computed:
:func:`fixed_until` tells whether something wrote into the tensor or its sources since.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from qframework.graph.index_formulas import (
    Formula,
    Line,
    Number,
    Piecewise,
    as_line,
    as_piecewise,
    at_least_zero,
    both,
    chosen,
    constant,
    equals_zero,
    negated,
    padded,
    reindexed,
    within,
)
from qframework.graph.nodes import argument, fake_value, operation
from qframework.graph.shapes import same
from qframework.graph.writes import written_between

_INTEGERS = (torch.int64, torch.int32)
_LARGEST = 2**20  # of the numbers in a line: with any index it stays in int32
Values = dict[Node, Formula]


def index_values(gm: GraphModule) -> Values:
    """The formula of each node that has one."""
    values: Values = {}
    for node in gm.graph.nodes:
        fake = fake_value(node)
        rule = _RULES.get(operation(node) or "")
        if fake is None or fake.is_complex() or rule is None:
            continue
        formula = rule(node, values)
        formula = None if formula is None else _stored(formula, fake)
        if formula is not None:
            values[node] = formula
    return values


def fixed_until(node: Node, end: Node, values: Values, since: Node | None = None) -> bool:
    """Whether nothing before ``end`` writes into a node of ``values`` or into the values that it was computed from.

    ``since`` is a node before which that is known.
    """
    sources = {node}
    waiting = [node]
    while waiting:
        new = [x for x in waiting.pop().all_input_nodes if x in values and x not in sources]
        sources.update(new)
        waiting += new
    return written_between(since or min(sources), end, sources) is None


def _stored(formula: Formula, fake: Tensor) -> Formula | None:
    """``formula`` as a tensor like ``fake`` holds it; None if that differs by more than rounding of constants."""
    if isinstance(formula, Line) and formula.is_constant:
        formula = constant(formula.start)
    if isinstance(formula, Line):
        small = all(abs(number) <= _LARGEST for number in (*formula.steps, formula.start))
        if fake.dtype not in _INTEGERS or not small or len(formula.steps) > fake.ndim:
            return None
        return _broadcasting(formula, fake)
    if any(len(line.steps) > fake.ndim for line in formula.lines):
        return None
    rounded = formula.map(lambda number: torch.tensor(number).to(fake.dtype).item())
    if rounded is None:
        return None
    placed = as_piecewise(reindexed(rounded, lambda line: _broadcasting(line, fake)))
    return None if placed is None else within(placed, [n if type(n) is int else None for n in fake.shape])


def _broadcasting(line: Line, fake: Tensor) -> Line:
    """All dimensions, without steps along those of size 1."""
    steps = padded(line, fake.ndim).steps
    return Line(tuple(0 if same(n, 1) else step for step, n in zip(steps, fake.shape, strict=True)), line.start)


# Operations: of a node and the formulas before it ---------------------------------------------------------------------

_Rule = Callable[[Node, Values], Formula | None]


def _of(value: Any, values: Values) -> Formula | None:
    """The formula of an argument: a node's, or that of a number."""
    if isinstance(value, Node):
        return values.get(value)
    return constant(value) if isinstance(value, int | float) else None


def _input(node: Node, values: Values) -> Formula | None:
    return _of(argument(node, 0, "input", "self"), values)


def _two(node: Node, values: Values) -> tuple[Formula | None, Formula | None]:
    return _input(node, values), _of(argument(node, 1, "other"), values)


def _arange(node: Node, values: Values) -> Formula | None:
    given = node.args
    named_end = "end" in node.kwargs
    start = node.kwargs.get("start", given[0] if len(given) > 1 or (named_end and given) else 0)
    step = node.kwargs.get("step", given[2] if len(given) > 2 else 1)
    return Line((step,), start) if type(start) is int and type(step) is int else None


def _filled(place: int, *names: str) -> _Rule:
    """A tensor of the number that is the ``place``-th argument."""

    def rule(node: Node, values: Values) -> Formula | None:
        found = as_piecewise(_of(argument(node, place, *names), values))
        return found if found is not None and found.is_constant else None

    return rule


def _always(number: Number) -> _Rule:
    return lambda node, values: constant(number)


def _sum(sign: int) -> _Rule:
    """``x + y`` or ``x - y``: of lines, or of a piecewise and a number."""

    def rule(node: Node, values: Values) -> Formula | None:
        x, y = _two(node, values)
        if argument(node, 2, "alpha", default=1) != 1:
            return None
        a, b = as_line(x), as_line(y)
        if a is not None and b is not None:
            return a + b.times(sign)
        return _with_number(x, y, lambda left, right: left + sign * right)

    return rule


def _product(node: Node, values: Values) -> Formula | None:
    x, y = _two(node, values)
    for one, other in ((x, y), (y, x)):
        a, b = as_line(one), as_line(other)
        if a is not None and b is not None and b.is_constant:
            return a.times(b.start)
    p, q = as_piecewise(x), as_piecewise(y)
    if p is not None and q is not None and p.outside == q.outside == 0 and not (p.is_constant or q.is_constant):
        return chosen(p.lines | q.lines, p.inside * q.inside, 0)
    return _with_number(x, y, operator.mul)


def _with_number(
    x: Formula | None, y: Formula | None, function: Callable[[Number, Number], Number]
) -> Piecewise | None:
    """``function`` of a piecewise tensor and a constant, in either order."""
    p, q = as_piecewise(x), as_piecewise(y)
    if p is None or q is None:
        return None
    if q.is_constant:
        return p.map(lambda number: function(number, q.inside))
    return q.map(lambda number: function(p.inside, number)) if p.is_constant else None


def _comparison(function: Callable[[Number, Number], bool], of_lines: Callable[[Line], Piecewise]) -> _Rule:
    """``function``; of lines, ``of_lines`` of their difference."""

    def rule(node: Node, values: Values) -> Formula | None:
        x, y = _two(node, values)
        a, b = as_line(x), as_line(y)
        if a is not None and b is not None:
            return of_lines(a - b)
        return _with_number(x, y, function)

    return rule


_COMPARISONS: dict[str, _Rule] = {
    "ge": _comparison(operator.ge, at_least_zero),
    "gt": _comparison(operator.gt, lambda line: at_least_zero(line.shifted(-1))),
    "le": _comparison(operator.le, lambda line: at_least_zero(line.times(-1))),
    "lt": _comparison(operator.lt, lambda line: at_least_zero(line.times(-1).shifted(-1))),
    "eq": _comparison(operator.eq, equals_zero),
    "ne": _comparison(operator.ne, lambda line: negated(equals_zero(line))),
}


def _bools(node: Node, values: Values) -> tuple[Piecewise, Piecewise] | None:
    """Two bool operands; None for integers, whose bits would be combined."""
    found = []
    for operand in (argument(node, 0, "input", "self"), argument(node, 1, "other")):
        fake, choice = fake_value(operand) if isinstance(operand, Node) else None, as_piecewise(_of(operand, values))
        if choice is None or not (isinstance(operand, bool) or (fake is not None and fake.dtype == torch.bool)):
            return None
        found.append(choice)
    return found[0], found[1]


def _and(node: Node, values: Values) -> Formula | None:
    operands = _bools(node, values)
    return None if operands is None else both(*operands)


def _or(node: Node, values: Values) -> Formula | None:
    operands = _bools(node, values)
    neither = None if operands is None else both(*map(negated, operands))
    return None if neither is None else negated(neither)


def _not(node: Node, values: Values) -> Formula | None:
    operand, choice = argument(node, 0, "input", "self"), as_piecewise(_input(node, values))
    fake = fake_value(operand) if isinstance(operand, Node) else None
    return None if choice is None or fake is None or fake.dtype != torch.bool else negated(choice)


def _negative(node: Node, values: Values) -> Formula | None:
    x = _input(node, values)
    if isinstance(x, Line):
        return x.times(-1)
    return None if x is None else x.map(operator.neg)


def _selected(mask: Formula | None, x: Formula | None, y: Formula | None) -> Formula | None:
    """``x`` where the mask is True, else ``y``; both constant, or what the mask hides is."""
    where, p, q = as_piecewise(mask), as_piecewise(x), as_piecewise(y)
    if where is None or p is None or q is None:
        return None
    if not where.inside:
        p, q = q, p
    if not q.is_constant:
        return None
    if p.is_constant:
        return chosen(where.lines, p.inside, q.inside)
    return chosen(where.lines | p.lines, p.inside, q.inside) if p.outside == q.inside else None


def _where(node: Node, values: Values) -> Formula | None:
    condition, x, y = (argument(node, i, name) for i, name in enumerate(("condition", "input", "other")))
    return _selected(_of(condition, values), _of(x, values), _of(y, values))


def _masked_fill(node: Node, values: Values) -> Formula | None:
    mask, value = argument(node, 1, "mask"), argument(node, 2, "value")
    return _selected(_of(mask, values), _of(value, values), _input(node, values))


def _triangle(sign: int) -> _Rule:
    """``tril`` (1) or ``triu`` (-1)."""

    def rule(node: Node, values: Values) -> Formula | None:
        x, diagonal = as_piecewise(_input(node, values)), argument(node, 1, "diagonal", default=0)
        fake = fake_value(node)
        if x is None or fake is None or type(diagonal) is not int or not (x.is_constant or x.outside == 0):
            return None
        line = Line((0,) * (fake.ndim - 2) + (sign, -sign), sign * diagonal)
        return chosen(x.lines | {line}, x.inside, 0)

    return rule


def _same_elements(node: Node, values: Values) -> Formula | None:
    """A copy, a cast or an expansion, which :func:`_stored` brings to the result's dtype and shape."""
    return _input(node, values)


def _reshaped(node: Node, values: Values) -> Formula | None:
    """A view that adds or removes dimensions of size 1."""
    x = _input(node, values)
    source, result = argument(node, 0, "input", "self"), fake_value(node)
    before = fake_value(source) if isinstance(source, Node) else None
    if x is None or before is None or result is None or before.dtype != result.dtype:  # view(dtype) reads bits
        return None
    old, new = ([d for d, n in enumerate(fake.shape) if not same(n, 1)] for fake in (before, result))
    if len(old) != len(new) or not all(same(before.shape[a], result.shape[b]) for a, b in zip(old, new, strict=True)):
        return x if isinstance(x, Piecewise) and x.is_constant else None
    return reindexed(x, lambda line: _moved(line, dict(zip(new, old, strict=True)), result.ndim))


def _moved(line: Line, sources: dict[int, int], ndim: int) -> Line:
    """``line`` with its step along ``sources[d]`` as that along d, and none along others."""
    return Line(tuple(line.steps[sources[d]] if d in sources else 0 for d in range(ndim)), line.start)


def _permuted(node: Node, values: Values) -> Formula | None:
    x, fake = _input(node, values), fake_value(node)
    if x is None or fake is None:
        return None
    order = list(range(fake.ndim))
    if fake.ndim < 2:
        return x
    if operation(node) == "permute":
        given: Any = node.args[1:] or (node.kwargs.get("dims"),)
        given = given[0] if len(given) == 1 and isinstance(given[0], list | tuple) else given
        order = [dim % fake.ndim for dim in given]
    else:
        a, b = argument(node, 1, "dim0", default=0), argument(node, 2, "dim1", default=1)  # t() has none
        order[a], order[b] = order[b], order[a]
    return reindexed(x, lambda line: _moved(line, dict(enumerate(order)), fake.ndim))


def _indexed(node: Node, values: Values) -> Formula | None:
    """``x[...]`` with ``None``, slices, numbers, and ``...``, or with one tensor for each dimension."""
    x, source, items = _input(node, values), argument(node, 0, "input", "self"), argument(node, 1, "indices")
    before = fake_value(source) if isinstance(source, Node) else None
    if operation(node) == "index":
        items = tuple(items)
    elif not isinstance(items, tuple):
        items = (items,)
    if x is None or before is None:
        return None
    if items and all(isinstance(item, Node) for item in items):
        return _gathered(x, before.ndim, [_positions(item, values) for item in items])
    if not all(item is None or item is Ellipsis or isinstance(item, int | slice) for item in items):
        return None
    kept = sum(item is not None and item is not Ellipsis for item in items)
    if Ellipsis in items:
        place = items.index(Ellipsis)
        items = (*items[:place], *[slice(None)] * (before.ndim - kept), *items[place + 1 :])
    else:
        items = (*items, *[slice(None)] * (before.ndim - kept))
    return _sliced(x, items)


def _sliced(x: Formula, items: Sequence[Any]) -> Formula | None:
    """``x[items]``: an item for each dimension, and ``None`` for each new one. Starts from the end are unknown."""
    sources, starts, dim, out = {}, {}, 0, 0
    for item in items:
        if item is None:
            out += 1
            continue
        start = item.start or 0 if isinstance(item, slice) else item
        whole = isinstance(item, slice) and item.step in (None, 1)
        if type(start) is not int or start < 0 or not (whole or type(item) is int):
            return None
        starts[dim] = start
        if whole:
            sources[out] = dim
            out += 1
        dim += 1

    def function(line: Line) -> Line:
        shift = sum(line.steps[dim] * start for dim, start in starts.items())
        return _moved(line, sources, out).shifted(shift)

    return reindexed(x, function)


def _slice(node: Node, values: Values) -> Formula | None:
    """ATen's ``slice`` and ``select`` of one dimension."""
    x, fake = _input(node, values), fake_value(argument(node, 0, "self"))
    if x is None or fake is None:
        return None
    dim, start = argument(node, 1, "dim", default=0) % fake.ndim, argument(node, 2, "start", "index")
    item = start if operation(node) == "select" else slice(start, None, argument(node, 4, "step", default=1))
    return _sliced(x, [item if d == dim else slice(None) for d in range(fake.ndim)])


def _positions(node: Node, values: Values) -> Line | None:
    """Integers that index a tensor; not a bool mask."""
    fake = fake_value(node)
    return as_line(values.get(node)) if fake is not None and fake.dtype in _INTEGERS else None


def _gathered(x: Formula, ndim: int, indices: Sequence[Line | None]) -> Formula | None:
    """``x[indices]``, one tensor of indices for each dimension, none negative."""
    if len(indices) != ndim or any(line is None or not line.never_negative for line in indices):
        return None

    def function(line: Line) -> Line:
        total = Line((), line.start)
        for step, index in zip(line.steps, indices, strict=True):
            assert index is not None
            total = total + index.times(step)
        return total

    return reindexed(x, function)


def _continues(first: Line, size: Any, then: Line, dim: int) -> bool:
    """Whether ``first``, of ``size`` elements along ``dim``, followed by ``then`` is ``first`` with more elements."""
    alike = all(a == b for d, (a, b) in enumerate(zip(first.steps, then.steps, strict=True)) if d != dim)
    step = then.steps[dim]
    if not alike or type(size) is not int or not (size == 1 or first.steps[dim] == step):
        return False
    return first.start + size * step == then.start


def _joined(parts: Sequence[Any], dim: int, values: Values) -> Line | None:
    """``cat(parts, dim)`` where each part continues the one before."""
    total: Line | None = None
    size = 0
    for part in parts:
        fake, line = (fake_value(part), as_line(values.get(part))) if isinstance(part, Node) else (None, None)
        if fake is None or line is None:
            return None
        line, dim = padded(line, fake.ndim), dim % fake.ndim
        if total is None:
            total = line
        elif _continues(total, size, line, dim):
            total = Line(line.steps, total.start)
        else:
            return None
        size = size + fake.shape[dim]
    return total


def _cat(node: Node, values: Values) -> Formula | None:
    parts, dim = argument(node, 0, "tensors"), argument(node, 1, "dim", default=0)
    return _joined(parts, dim, values) if isinstance(parts, list | tuple) else None


def _diff(node: Node, values: Values) -> Formula | None:
    x, fake = argument(node, 0, "input", "self"), fake_value(node)
    order, dim, prepend, append = (
        argument(node, i + 1, name, default=default)
        for i, (name, default) in enumerate((("n", 1), ("dim", -1), ("prepend", None), ("append", None)))
    )
    if order != 1 or fake is None:
        return None
    line = _joined([part for part in (prepend, x, append) if part is not None], dim, values)
    return None if line is None else constant(line.steps[dim])


def _cumsum(node: Node, values: Values) -> Formula | None:
    x, fake = as_line(_input(node, values)), fake_value(node)
    if x is None or fake is None or not x.is_constant:
        return None
    steps = [0] * fake.ndim
    steps[argument(node, 1, "dim")] = x.start
    return Line(tuple(steps), x.start)


_RULES: dict[str, _Rule] = {
    "arange": _arange,
    "full": _filled(1, "fill_value"),
    "full_like": _filled(1, "fill_value"),
    "new_full": _filled(2, "fill_value"),
    "scalar_tensor": _filled(0, "s"),
    "tensor": _filled(0, "data"),
    **dict.fromkeys(("ones", "ones_like", "new_ones"), _always(1)),
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros"), _always(0)),
    "add": _sum(1),
    "sub": _sum(-1),
    "mul": _product,
    "neg": _negative,
    **_COMPARISONS,
    **{f"__{name}__": rule for name, rule in _COMPARISONS.items()},  # as Dynamo of torch 2.11 records them
    **dict.fromkeys(("and", "iand", "__and__", "bitwise_and", "logical_and"), _and),
    **dict.fromkeys(("or", "ior", "__or__", "bitwise_or", "logical_or"), _or),
    **dict.fromkeys(("invert", "__invert__", "bitwise_not", "logical_not"), _not),
    "where": _where,
    "masked_fill": _masked_fill,
    "tril": _triangle(1),
    "triu": _triangle(-1),
    **dict.fromkeys(
        ("to", "bool", "int", "long", "float", "half", "bfloat16", "type_as", "type", "clone", "contiguous", "detach",
         "alias", "expand", "expand_as", "broadcast_to", "lift_fresh_copy"), _same_elements,
    ),
    **dict.fromkeys(("view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten", "atleast_2d"), _reshaped),
    **dict.fromkeys(("transpose", "permute", "t"), _permuted),
    **dict.fromkeys(("getitem", "index"), _indexed),
    **dict.fromkeys(("slice", "select"), _slice),
    "cat": _cat,
    "diff": _diff,
    "cumsum": _cumsum,
}  # fmt: skip
