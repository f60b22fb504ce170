"""Checks the expressions that a saved program holds as text, before PyTorch evaluates them.

Sizes are in the form of SymPy's ``srepr``, ``Mul(Integer(2), Symbol('s0', integer=True))``; conditions on inputs are
Python, ``L['x'].size()[0] % 2 == 0``. The checked text is written anew from its syntax tree.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable
from typing import Any

from qframework.errors import FileFormatError

SYMBOL = re.compile(r"(?:s|u|zf|zuf)\d{1,4}", re.ASCII)
# No quotes, backslashes or line ends: safe inside a Python string literal.
PLAIN_TEXT = re.compile(r"[\w .,:;<>=+*/%@()\[\]-]{0,1000}")
NOT_PLAIN = re.compile(r"[^\w .,:;<>=+*/%@()\[\]-]")
_LONGEST = 20_000
_LARGEST_INTEGER = 2**63
_LARGEST_EXPONENT = 4
# SymPy multiplies sums out and compares all pairs of arguments. Sizes of models stay far below these limits.
_MOST_CALLS, _MOST_ARGUMENTS, _MOST_TERMS = 128, 16, 64
_DEEPEST = 20
_MOST_DIGITS = 38  # before the point; float32 has no larger number
_NUMBER = re.compile(r"-?\d{1,40}(?:\.\d{1,40})?(?:e[+-]?\d{1,3})?", re.ASCII)
_POWERS = frozenset({"Pow", "FloatPow", "PowByNatural"})
_SYMPY_FUNCTIONS = _POWERS | {
    *("Add", "Mul", "Mod", "Max", "Min", "floor", "ceiling", "And", "Or", "Not", "Equality", "Unequality"),
    *("StrictLessThan", "LessThan", "StrictGreaterThan", "GreaterThan"),
    # torch.utils._sympy.functions
    *("FloorDiv", "ModularIndexing", "Where", "PythonMod", "CleanDiv", "CeilDiv", "CeilToInt", "FloorToInt"),
    *("IntTrueDiv", "FloatTrueDiv", "TruncToInt", "TruncToFloat", "RoundToInt", "RoundDecimal", "ToFloat", "Identity"),
    "IsNonOverlappingAndDenseIndicator",
}
_PYTHON_FUNCTIONS = frozenset(
    {
        *("max", "min", "abs", "round", "int", "float", "IsNonOverlappingAndDenseIndicator"),
        *("math.trunc", "math.floor", "math.ceil", "math.sqrt"),
        *("torch.sym_float", "torch.sym_int", "torch.sym_max", "torch.sym_min", "torch.sym_not", "torch.sym_ite"),
        *("torch.sym_sqrt", "torch._sym_sqrt"),
    }
)
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod, ast.Div)
_COMPARISONS = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)


def sympy_expression(text: str) -> str:
    """Check an expression of integers, symbols and arithmetic in SymPy's ``srepr``.

    Raises:
        FileFormatError: ``text`` is anything else.
    """
    return _checked(text, _is_small_sympy)


def condition(text: str) -> str:
    """Check a condition, in Python, on the sizes and values of inputs.

    Raises:
        FileFormatError: ``text`` is anything else.
    """
    return _checked(text, _is_python)


def _checked(text: str, understands: Callable[[ast.expr], bool]) -> str:
    try:
        if len(text) > _LONGEST:
            raise FileFormatError(f"an expression must have at most {_LONGEST} characters, got {len(text)}")
        tree = ast.parse(text, mode="eval").body
        if understands(tree):
            return ast.unparse(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        if isinstance(error, FileFormatError):
            raise
    raise FileFormatError(f"{text[:80]!r} is not an expression of integers, symbols and arithmetic")


def _is_small_sympy(node: ast.expr) -> bool:
    if not _is_sympy(node):
        return False
    calls = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
    limits = {
        "calls": (len(calls), _MOST_CALLS),
        "arguments of a call": (max((len(call.args) for call in calls), default=0), _MOST_ARGUMENTS),
        "levels": (_depth(node), _DEEPEST),
        "terms, multiplied out": (_terms(node)[1], _MOST_TERMS),
    }
    for what, (found, most) in limits.items():
        if found > most:
            raise FileFormatError(f"an expression must have at most {most} {what}, got {found}")
    return True


def _depth(node: ast.expr) -> int:
    return 1 + max(map(_depth, node.args), default=0) if isinstance(node, ast.Call) else 0


def _terms(node: ast.expr) -> tuple[int, int]:
    """How many terms multiplying out gives: of the expression as a factor, and at most anywhere inside it."""
    if not isinstance(node, ast.Call) or not node.args:
        return 1, 1
    factors, inside = zip(*map(_terms, node.args), strict=True)
    match node.func:
        case ast.Name(id=name) if name in _POWERS:
            whole = own = factors[0] ** math.ceil(_exponent(node.args[1]))
        case ast.Name(id="Add"):
            whole = own = sum(factors)
        case ast.Name(id="Mul"):
            whole = own = math.prod(factors)
        case _:  # rounds or compares: a single term outside, but (a // b) // c becomes a // (b * c)
            whole, own = math.prod(factors), math.prod(factors[1:])
    return own, max(whole, *inside)


def _is_sympy(node: ast.expr) -> bool:
    match node:
        case ast.Name(id="true" | "false"):
            return True
        case ast.Call(func=ast.Name(id="Symbol"), args=[ast.Constant(value=str(name))], keywords=assumptions):
            return SYMBOL.fullmatch(name) is not None and all(map(_is_assumption, assumptions))
        case ast.Call(func=ast.Name(id="Float"), args=[ast.Constant(value=str(digits))], keywords=precision):
            return _is_number(digits) and all(map(_is_precision, precision))
        case ast.Call(func=ast.Name(id="Integer"), args=[value], keywords=[]):
            return _integer(value) is not None
        case ast.Call(func=ast.Name(id="Rational"), args=[above, below], keywords=[]):
            return _integer(above) is not None and bool(_integer(below))
        case ast.Call(func=ast.Name(id=name), args=[base, exponent], keywords=[]) if name in _POWERS:
            return _is_small(exponent) and not _has_power(base) and _is_sympy(base)
        case ast.Call(func=ast.Name(id=name), args=[_, *_] as arguments, keywords=[]):
            return name in _SYMPY_FUNCTIONS - _POWERS and all(map(_is_sympy, arguments))
    return False


def _is_number(digits: str) -> bool:
    value = float(digits) if _NUMBER.fullmatch(digits) else math.inf
    return value == 0 or 10.0**-_MOST_DIGITS <= abs(value) < 10.0 ** (_MOST_DIGITS + 1)


def _is_assumption(keyword: ast.keyword) -> bool:
    known = keyword.arg in ("integer", "positive", "nonnegative", "real", "finite")
    return known and isinstance(keyword.value, ast.Constant) and keyword.value.value is True


def _is_precision(keyword: ast.keyword) -> bool:
    return keyword.arg in ("precision", "dps") and 0 < (_integer(keyword.value) or 0) <= 64


def _integer(node: ast.expr) -> int | None:
    match node:
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(value))):
            value = -value
        case ast.Constant(value=int(value)):
            pass
        case _:
            return None
    return None if isinstance(value, bool) or abs(value) > _LARGEST_INTEGER else value


def _is_small(node: ast.expr) -> bool:
    return _exponent(node) <= _LARGEST_EXPONENT


def _exponent(node: ast.expr) -> float:
    """The magnitude of a number, ``Integer(2)``, ``Float('0.5')`` or ``0.5``; infinity for anything else."""
    match node:
        case ast.Call(func=ast.Name(id="Float"), args=[ast.Constant(value=str(digits))]) if _is_sympy(node):
            return abs(float(digits))
        case ast.Call(func=ast.Name(id="Integer"), args=[value]) if _is_sympy(node):
            return abs(_integer(value) or 0)
        case ast.Call(func=ast.Name(id="Rational"), args=[above, below]) if _is_sympy(node):
            return max(abs(_integer(above) or 0), abs(_integer(below) or 0))
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=float(value) | int(value))):
            return abs(value)
        case ast.Constant(value=float(value) | int(value)):
            return abs(value)
    return math.inf


def _has_power(node: ast.expr) -> bool:
    """Whether the expression holds a power: a power of powers would grow without bound."""
    return any(
        isinstance(part, ast.Pow) or (isinstance(part, ast.Name) and part.id in _POWERS) for part in ast.walk(node)
    )


def _is_python(node: ast.expr) -> bool:
    match node:
        case ast.Constant(value=value):
            return isinstance(value, bool | float) or _integer(node) is not None
        case ast.BoolOp(values=parts):
            return all(map(_is_python, parts))
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=part):
            return _is_python(part)
        case ast.BinOp(left=base, op=ast.Pow(), right=exponent):
            return _is_small(exponent) and not _has_power(base) and _is_python(base)
        case ast.BinOp(left=left, op=op, right=right):
            return isinstance(op, _OPERATORS) and _is_python(left) and _is_python(right)
        case ast.Compare(left=left, ops=ops, comparators=rest):
            return all(isinstance(op, _COMPARISONS) for op in ops) and all(map(_is_python, [left, *rest]))
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return all(map(_is_python, [test, body, orelse]))
        case ast.Subscript(value=ast.Call(func=ast.Attribute(value=source, attr="size" | "stride"), args=[]), slice=at):
            return _is_input(source) and _integer(at) is not None and not node.value.keywords  # type: ignore[attr-defined]
        case ast.Call(func=ast.Attribute(value=source, attr="storage_offset"), args=[], keywords=[]):
            return _is_input(source)
        case ast.Call(func=function, args=[_, *_] as arguments, keywords=[]):
            return _dotted(function) in _PYTHON_FUNCTIONS and all(map(_is_python, arguments))
    return _is_input(node)


def _is_input(node: Any) -> bool:
    """``L['x']``, or an element of such an input: ``L['x']['mask'][0]``."""
    match node:
        case ast.Subscript(value=value, slice=ast.Constant(value=str(key))):
            known = PLAIN_TEXT.fullmatch(key) is not None
        case ast.Subscript(value=value, slice=index):
            known = _integer(index) is not None
        case _:
            return False
    return known and (_is_input(value) or (isinstance(value, ast.Name) and value.id == "L"))


def _dotted(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=ast.Name(id=module), attr=name):
            return f"{module}.{name}"
    return ""
