"""What a saved program's JSON may hold: rules, each of which returns the value that it accepts.

A rule is called with a value and its place, ``graph.nodes[3].target``. A record drops the fields that it does not
know, so that PyTorch receives only values that a rule has checked.
"""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from qframework.errors import FileFormatError
from qframework.serialization.expressions import PLAIN_TEXT, sympy_expression

Rule = Callable[[Any, str], Any]

# The numbers of torch's serialized dtypes.
DTYPES = {
    1: torch.uint8,
    2: torch.int8,
    3: torch.int16,
    4: torch.int32,
    5: torch.int64,
    6: torch.float16,
    7: torch.float32,
    8: torch.float64,
    9: torch.complex32,
    10: torch.complex64,
    11: torch.complex128,
    12: torch.bool,
    13: torch.bfloat16,
    28: torch.uint16,
    29: torch.float8_e4m3fn,
    30: torch.float8_e5m2,
    31: torch.float8_e4m3fnuz,
    32: torch.float8_e5m2fnuz,
    33: torch.float8_e8m0fnu,
    34: torch.uint32,
    35: torch.uint64,
}
DEVICE_TYPES = ("cpu", "cuda", "mps", "xpu", "meta")
_LARGEST = 2**63 - 1
_HIGHEST_RANK = 64  # that of PyTorch
# Names, other than Python's own, that the source which PyTorch generates relies on.
_NEEDED = {"self", "torch", "device", "inf", "nan", "NoneType", "fx_pytree", "pytree", "math", "operator", "_operator"}


def refuse(value: Any, where: str, expected: str) -> NoReturn:
    """Raise FileFormatError for the value at ``where``, which is not the ``expected`` one."""
    raise FileFormatError(f"{where} must be {expected}, got {repr(value)[:80]}")


# Rules that make rules


def record(**fields: Rule) -> Rule:
    """An object with these fields; those whose rule is ``optional`` may be missing."""

    def rule(value: Any, where: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            refuse(value, where, "an object")
        values = {}
        for name, field in fields.items():
            if name in value:
                values[name] = field(value[name], f"{where}.{name}")
            elif not isinstance(field, optional):
                refuse(sorted(value), where, f"an object with {name!r}")
        return values

    return rule


@dataclass(frozen=True)
class optional:
    """A value that ``rule`` accepts, null, or a missing field."""

    rule: Rule

    def __call__(self, value: Any, where: str) -> Any:
        return None if value is None else self.rule(value, where)


def variant(**cases: Rule) -> Rule:
    """An object with exactly one of these fields: ``{"as_int": 3}``."""

    def rule(value: Any, where: str) -> dict[str, Any]:
        if not isinstance(value, dict) or len(value) != 1 or next(iter(value)) not in cases:
            refuse(value, where, f"one of {', '.join(cases)}")
        ((name, content),) = value.items()
        return {name: cases[name](content, f"{where}.{name}")}

    return rule


def many(rule: Rule, most: int | None = None) -> Rule:
    """A list of up to ``most`` elements."""

    def each(value: Any, where: str) -> list[Any]:
        if not isinstance(value, list):
            refuse(value, where, "a list")
        if most is not None and len(value) > most:
            refuse(len(value), f"the length of {where}", f"at most {most}")
        return [rule(element, f"{where}[{index}]") for index, element in enumerate(value)]

    return each


def mapping(key: Rule, rule: Rule) -> Rule:
    """An object whose names ``key`` accepts and whose values ``rule`` accepts."""

    def each(value: Any, where: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            refuse(value, where, "an object")
        return {key(name, f"a name in {where}"): rule(element, f"{where}.{name}") for name, element in value.items()}

    return each


def text(pattern: str | re.Pattern[str], expected: str | None = None) -> Rule:
    """A string that ``pattern`` matches as a whole; ``expected`` describes it in errors."""
    compiled = re.compile(pattern)

    def rule(value: Any, where: str) -> str:
        if not isinstance(value, str) or compiled.fullmatch(value) is None:
            refuse(value, where, expected or f"a string like {compiled.pattern}")
        return value

    return rule


def one_of(choices: Collection[Any]) -> Rule:
    """One of these strings or integers."""

    def rule(value: Any, where: str) -> Any:
        if type(value) not in (str, int) or value not in choices:
            refuse(value, where, f"one of {', '.join(map(str, choices))}")
        return value

    return rule


# Rules for single values


def BOOL(value: Any, where: str) -> bool:
    """A bool."""
    if not isinstance(value, bool):
        refuse(value, where, "true or false")
    return value


def INT(value: Any, where: str) -> int:
    """An integer of 64 bits; a bool is not one."""
    if type(value) is not int or abs(value) > _LARGEST:
        refuse(value, where, "an integer of 64 bits")
    return value


def FLOAT(value: Any, where: str) -> float:
    """A number; infinity and NaN, which JSON lacks, are strings."""
    named = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
    if isinstance(value, str) and value in named:
        return named[value]
    if type(value) is float or (type(value) is int and abs(value) <= _LARGEST):
        return float(value)
    return refuse(value, where, "a number")


def NAME(value: Any, where: str) -> str:
    """The name of a variable in the Python source that PyTorch generates."""
    named = isinstance(value, str) and re.fullmatch(r"(?!__)[A-Za-z_]\w{0,500}", value, re.ASCII) is not None
    if not named or keyword.iskeyword(value):
        refuse(value, where, "a name of letters, digits and _")
    if value in _NEEDED:
        refuse(value, where, "a name that PyTorch's generated source does not need itself")
    return value


PLAIN = text(PLAIN_TEXT, "plain text without quotes")
# A module's or tensor's path; PyTorch quotes the parts that are not identifiers.
FQN = text(r"(?!__)[\w +:/@()-]{1,200}(?:\.(?!__)[\w +:/@()-]{1,200}){0,50}", "a path of names like blocks.0.weight")


def parsed_by(parse: Callable[[str], str], expected: str) -> Rule:
    """A string that ``parse`` accepts and rewrites; it raises FileFormatError for any other."""

    def rule(value: Any, where: str) -> str:
        if not isinstance(value, str):
            refuse(value, where, expected)
        try:
            return parse(value)
        except FileFormatError as error:
            raise FileFormatError(f"{where}: {error}") from error

    return rule


def symbolic(**plain: Rule) -> Rule:
    """A number, or an expression of sizes with its value when the model was exported."""
    hint = optional(variant(as_int=INT, as_bool=BOOL, as_float=FLOAT))
    return variant(as_expr=record(expr_str=parsed_by(sympy_expression, "an expression"), hint=hint), **plain)


SIZE = symbolic(as_int=INT)
DEVICE = record(type=one_of(DEVICE_TYPES), index=optional(one_of(range(64))))
TENSOR_META = record(
    dtype=one_of(DTYPES),
    sizes=many(SIZE, _HIGHEST_RANK),
    requires_grad=BOOL,
    device=DEVICE,
    strides=many(SIZE, _HIGHEST_RANK),
    storage_offset=SIZE,
    layout=one_of([7]),  # strided
)
