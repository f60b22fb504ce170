"""Expressions and conditions in a saved program: arithmetic is kept, anything else is refused."""

from __future__ import annotations

import pytest
from hostile_files import CODE, code_ran
from hypothesis import given, settings
from hypothesis import strategies as st

from qframework.errors import FileFormatError
from qframework.serialization.expressions import condition, sympy_expression


def symbol(index: int) -> str:
    return f"Symbol('s{index}', integer=True)"


EXPRESSIONS = [
    CODE,
    f"Symbol({CODE!r})",
    f"Integer({CODE})",
    f"Add(Symbol('s77', integer=True), {CODE})",
    f"Symbol('s77', integer={CODE})",
    f"Symbol('s77', **{{'integer': {CODE}}})",
    f"Add(*[{CODE}])",
    f"[{CODE} for _ in (1,)]",
    f"(lambda: {CODE})()",
    f"f'{{{CODE}}}'",
    f"Symbol('s77') if {CODE} else Integer(1)",
    "Symbol('s77').__class__",
    "Symbol('s77').subs(1, 2)",
    "Symbol('__import__')",
    "Function('f')(Integer(1))",
    "Lambda(Symbol('s1'), Integer(1))",
    "Integer('3')",
    "Integer(2.5)",
    "Integer(True)",
    "Float('nan')",
    "Float(__import__('os'))",
    "Pow(Integer(10), Integer(1000000000))",
    "Pow(Pow(Pow(Integer(10), Integer(8)), Integer(8)), Integer(8))",
    "Pow(Integer(10), Symbol('s77'))",
    "LShift(Integer(1), Integer(10000000000))",
    "Integer(" + "9" * 30 + ")",
    "9**9**9",
    "Symbol('u99999999999999')",
    "Add(" * 3000 + "Integer(1)" + ")" * 3000,
    "Integer(1)" + " " * 100_000,
    "floor(Float('1e999'))",
    "floor(Float('1e-99'))",
    "Pow(Integer(2), Integer(5))",
    f"Max({', '.join(map(symbol, range(17)))})",
    f"Mul({', '.join(f'Max({symbol(i)}, Add({symbol(i + 1)}, Integer(1)))' for i in range(15))})",
    f"Mod(Mul({', '.join(f'Add({symbol(i)}, {symbol(i + 9)})' for i in range(7))}), Integer(7))",
    f"Mod(Pow(Add({', '.join(map(symbol, range(10)))}), Integer(4)), Integer(7))",
    "FloorDiv(" * 21 + symbol(1) + ", Integer(3))" * 21,
    "5!",
    "",
    "\0",
]


CONDITIONS = [
    CODE,
    f"L['x'].size()[0] == 2 or {CODE}",
    f"L['x'].size()[{CODE}] == 2",
    f"L[{CODE}].size()[0] == 2",
    f"max(1, {CODE})",
    f'True, "{{x}}") or {CODE}  #',
    f'1 == 1, ""); {CODE}; torch._assert(True, "',
    f"1\n  {CODE}",
    "L['x'].__class__",
    "L['x'].size(0)",
    "L['x'].size(*[1])[0]",
    "L['x'].item()",
    "L['x'](1)",
    "L['x\"'].size()[0]",
    "torch.load(L['x'])",
    "torch.hub.load(1)",
    "math.factorial(100)",
    "open(1)",
    "eval(1)",
    "__import__(1)",
    "x := 1",
    "(x := 1)",
    "9**9**9 == 1",
    "'a' * 10",
    "L",
    "not-an-expression +",
    "(" * 5000 + "1" + ")" * 5000,
]


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_expressions_that_are_no_arithmetic_are_refused(text: str) -> None:
    with pytest.raises(FileFormatError):
        sympy_expression(text)
    assert not code_ran()


@pytest.mark.parametrize("text", CONDITIONS)
def test_conditions_that_are_no_arithmetic_are_refused(text: str) -> None:
    with pytest.raises(FileFormatError):
        condition(text)
    assert not code_ran()


def test_expressions_and_conditions_that_export_writes_are_kept() -> None:
    for text in (
        "Mul(Integer(2), Symbol('s77', positive=True, integer=True))",
        "Add(FloorDiv(Symbol('s27', integer=True), Integer(-4)), Integer(1))",
        "TruncToInt(Mul(Float('0.5', precision=53), ToFloat(Symbol('s27', positive=True, integer=True))))",
        "FloatPow(ToFloat(Symbol('s27', positive=True, integer=True)), Float('-0.5', precision=53))",
        "StrictLessThan(Symbol('u1', integer=True), Integer(10))",
    ):
        assert sympy_expression(text) == text
        assert sympy_expression(f"({text}  # comment\n)") == text
    for text in (
        "math.trunc(torch.sym_float(L['x'].size()[1]) ** 0.5) == 4",
        "2 * L['x'].size()[0] == L['y']['mask'].size()[0] + L['flat_args'][1].stride()[1]",
        "L['x'].size()[0] % (L['x'].size()[0] // 2) == 0 and (not L['n'] > 3)",
    ):
        assert condition(text) == text


@settings(max_examples=300, derandomize=True, deadline=None, database=None)
@given(st.text(alphabet="L['x'].size()[0]=<>+-*/%andotr m,torch.sym_xlda:{}!#\"\\\n", max_size=60))
def test_text_that_is_no_condition_is_refused(text: str) -> None:
    try:
        kept = condition(text)
    except FileFormatError:
        return
    assert condition(kept) == kept
    assert not set(kept) & set('"\\\n#{}:')
