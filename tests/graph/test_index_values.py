"""Formulas of tensors that follow from their indices (index_formulas.py, index_values.py)."""

from __future__ import annotations

import itertools

import pytest
import torch

from qframework.graph.index_formulas import Line, Piecewise
from qframework.graph.index_values import fixed_until, index_values
from qframework.graph.nodes import fake_value, operation


def elements(formula, shape) -> torch.Tensor:
    """What a formula says, one element at a time."""

    def at(line, index):
        return line.start + sum(step * i for step, i in zip(line.steps, index, strict=True))

    def element(index):
        if isinstance(formula, Line):
            return at(formula, index)
        return formula.inside if all(at(line, index) >= 0 for line in formula.lines) else formula.outside

    found = [element(index) for index in itertools.product(*map(range, shape))]
    return torch.tensor(found, dtype=torch.float64).reshape(shape)


def formulas(function, *inputs, dynamic=False):
    """Each node of the graph with a formula, what it is, and what running the graph gives."""
    found = []

    def backend(gm, example_inputs):
        found.append((gm, index_values(gm)))
        return torch.fx.Interpreter(gm).run

    torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)(*inputs)
    return found[-1]


def check(function, *inputs, dynamic=False) -> Piecewise | Line | None:
    """The formula of the result; those of all nodes are compared with their values."""
    gm, values = formulas(function, *inputs, dynamic=dynamic)

    class Compare(torch.fx.Interpreter):
        def run_node(self, node):
            value = super().run_node(node)
            if node in values:
                expected = value.double()
                torch.testing.assert_close(elements(values[node], value.shape), expected, rtol=0, atol=0)
            return value

    tensors, sizes = iter(inputs), iter(s for x in inputs for s in x.shape)
    placeholders = gm.graph.find_nodes(op="placeholder")
    Compare(gm).run(*(next(sizes if fake_value(node) is None else tensors) for node in placeholders))
    (out,) = gm.graph.output_node().args[0]
    return values.get(out)


N = 6
Q, K = Line((1, 0), 0), Line((0, 1), 0)
CAUSAL = Q - K


def transformers_mask(n: int, batch: int, window: int = 0) -> torch.Tensor:
    """As transformers builds it for prompts that are not packed: positions, indices of packed sequences, both."""
    positions = torch.arange(n).add(0).unsqueeze(0)
    expanded = positions.expand(batch, -1)
    packed = (torch.diff(expanded, prepend=expanded[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    rows = torch.arange(batch)[:, None, None, None]
    queries, keys = torch.arange(n)[None, None, :, None], torch.arange(n)[None, None, None, :]
    kept = queries.new_ones((), dtype=torch.bool)
    kept = kept & (expanded[rows, keys] <= expanded[rows, queries]).to(queries.device)
    if window:
        kept = kept & (expanded[rows, keys] > expanded[rows, queries] - window)
    kept = kept & (packed[rows, queries] == packed[rows, keys])
    return kept.expand(batch, -1, n, n)


def float_mask(n: int) -> torch.Tensor:
    """As older versions of transformers build it, without writes in place."""
    lowest = torch.finfo(torch.float16).min
    mask = torch.full((n, n), lowest, dtype=torch.float16).triu(1)
    return (mask * (torch.arange(n) > torch.arange(n).reshape(-1, 1)))[None, None]


CAUSAL_MASKS = {
    "compared": lambda n: torch.arange(n)[None, :] <= torch.arange(n)[:, None],
    "reshaped": lambda n: torch.arange(n).view(-1, 1).ge(torch.arange(0, n, 1)),
    "below": lambda n: torch.arange(n)[None, :] < torch.arange(1, n + 1)[:, None],
    "at least a matrix": lambda n: torch.atleast_2d(torch.arange(n)) <= torch.atleast_2d(torch.arange(n)[:, None]),
    "triangle": lambda n: torch.ones(n, n, dtype=torch.bool).tril(),
    "inverted": lambda n: ~torch.ones(n, n).triu(diagonal=1).bool(),
    "float": lambda n: torch.ones(n, n).tril() == 1,
    "part of a larger one": lambda n: torch.ones(2 * n, 2 * n, dtype=torch.bool).tril()[:n, :n],
    "later part": lambda n: torch.ones(2 * n, 2 * n, dtype=torch.bool).tril()[3 : n + 3, 3 : n + 3],
    "transposed": lambda n: torch.ones(n, n, dtype=torch.bool).triu().t(),
    "permuted": lambda n: torch.ones(n, n, dtype=torch.bool).triu().permute(1, 0),
    "where": lambda n: torch.where(torch.arange(n)[:, None] >= torch.arange(n), True, False),
    "filled": lambda n: torch.ones(n, n).masked_fill(torch.arange(n)[:, None] < torch.arange(n), 0.0) > 0.5,
    "either": lambda n: torch.arange(n)[:, None].gt(torch.arange(n)) | torch.zeros(n, n, dtype=torch.bool),
    "transformers": lambda n: transformers_mask(n, 3),
}


@pytest.mark.parametrize(("window", "lines"), [(N - 1, 2), (N, 1), (N + 1, 1)])
def test_lines_that_hold_everywhere_are_dropped(window: int, lines: int) -> None:
    assert len(check(lambda: transformers_mask(N, 2, window)).lines) == lines


def test_what_holds_nowhere_is_a_constant() -> None:
    assert check(lambda: torch.arange(N)[:, None] - torch.arange(N) > N) == Piecewise(frozenset(), False, False)
    mixed = check(lambda: (torch.arange(N) > 2) & (torch.arange(N)[:, None] >= N))
    assert mixed == Piecewise(frozenset(), False, False)


def test_bounds_of_a_line() -> None:
    line = Line((0, 3, -2), 5)
    assert line.bounds((4, 5, 6)) == (5 - 10, 5 + 12)
    assert line.bounds((None, 5, None)) == (-torch.inf, 5 + 12)
    assert line.bounds((7, None, 1)) == (5, torch.inf)


@pytest.mark.parametrize("form", CAUSAL_MASKS)
def test_masks_are_causal(form: str) -> None:
    found = check(lambda: CAUSAL_MASKS[form](N))
    strictly = 1 if form == "either" else 0
    assert isinstance(found, Piecewise)
    (line,) = found.lines if found.inside else [line.times(-1).shifted(-1) for line in found.lines]
    assert (line.steps[-2:], line.start) == ((1, -1), -strictly)
    assert not any(line.steps[:-2])


def test_a_mask_for_any_length() -> None:
    def mask(x):
        return transformers_mask(x.shape[1], x.shape[0])

    found = check(mask, torch.zeros(2, N), dynamic=True)
    assert isinstance(found, Piecewise)
    assert found.lines == {Line((0, 0, 1, -1), 0)}


def test_a_window_has_two_lines() -> None:
    found = check(lambda: transformers_mask(N, 2, window=3))
    assert isinstance(found, Piecewise)
    assert found.lines == {Line((0, 0, 1, -1), 0), Line((0, 0, -1, 1), 2)}


def test_complex_numbers_have_none() -> None:
    """Lumina's rotary positions begin with complex zeros."""
    _, values = formulas(lambda x: torch.zeros(3, dtype=torch.complex64) + x, torch.randn(3))
    assert not values


def test_fills_are_rounded_to_their_dtype() -> None:
    found = check(lambda: float_mask(N))
    assert found == Piecewise(frozenset({Line((0, 0, -1, 1), -1)}), -65504.0, 0.0)
    found = check(lambda: (torch.full((N, N), -3e38).triu(1)).half())
    assert found == Piecewise(frozenset({Line((-1, 1), -1)}), -torch.inf, 0.0)


OTHER_VALUES = {
    "steps": lambda: torch.arange(3, 20, 4)[1:] - 2 * torch.arange(4)[None].flip(0)[0],
    "end": lambda: torch.arange(2, end=9),
    "backwards": lambda: torch.arange(9, 0, -2).neg(),
    "joined": lambda: torch.cat([torch.arange(4), torch.arange(4, 7)]),
    "not joined": lambda: torch.cat([torch.arange(4), torch.arange(5, 7)]),
    "differences": lambda: torch.arange(0, 12, 3).diff(prepend=torch.tensor([5])),
    "picked": lambda: torch.arange(12).view(3, 4)[1, 2:],
    "column": lambda: torch.arange(5)[:, None].expand(5, 3)[torch.arange(3), torch.arange(3)],
    "from the end": lambda: torch.arange(9)[-3:],
    "by a mask": lambda: torch.arange(4)[torch.ones(4, dtype=torch.bool)],
    "by a list": lambda: torch.arange(4)[[2, 0]],
    "bits": lambda: torch.arange(4) & 2,
    "bits of a number": lambda: torch.full((4,), 1.0).view(torch.int32),
    "inverted bits": lambda: ~torch.zeros(3, dtype=torch.int64),
    "rounded": lambda: torch.arange(300).to(torch.uint8),
    "infinite": lambda: torch.full((3,), -torch.inf) * torch.zeros(3),
    "three numbers": lambda: torch.ones(4, 4).tril() + torch.ones(4, 4).triu(),
    "two masks": lambda: torch.ones(4, 4).tril(1) * torch.ones(4, 4).triu(-1) * 3,
    "not both": lambda: ~((torch.arange(4)[:, None] > torch.arange(4)) & (torch.arange(4) > 1)) & (torch.arange(4) > 0),
    "sums of bools": lambda: torch.ones(3, dtype=torch.bool).cumsum(0),
    "all but some": lambda: torch.where(torch.arange(4) > 1, torch.ones(4), torch.arange(4) > 2),
    "beyond the first": lambda: torch.arange(5) >= 0,
    "weighted": lambda: torch.add(torch.arange(4), torch.arange(4), alpha=2),
}


@pytest.mark.parametrize("case", OTHER_VALUES)
def test_formulas_equal_the_values(case: str) -> None:
    check(OTHER_VALUES[case])


KNOWN = {"steps": False, "end": True, "backwards": True, "joined": True, "not joined": False, "two masks": True}


@pytest.mark.parametrize("case", KNOWN)
def test_what_has_a_formula(case: str) -> None:
    assert (check(OTHER_VALUES[case]) is not None) == KNOWN[case]


def test_inputs_and_random_numbers_have_none() -> None:
    assert check(lambda x: (x > 0) & (torch.arange(4) > 1), torch.randn(4)) is None
    _, values = formulas(lambda: torch.rand(4) > torch.arange(4))
    assert [operation(node) for node in values] == ["arange"]


@pytest.mark.parametrize("place", ["itself", "view", "source"])
def test_a_write_ends_a_value(place: str) -> None:
    def written(x):
        ones = torch.ones(4, 4)
        mask = ones.tril()
        if place == "source":
            mask = ones.view(4, 4)
        y = x + mask
        {"itself": mask, "view": mask[1], "source": ones}[place].zero_()
        return y * mask

    gm, values = formulas(written, torch.randn(4, 4))
    first, last = (next(node for node in gm.graph.nodes if operation(node) == name) for name in ("add", "mul"))
    mask = first.args[1]
    assert mask in values
    assert fixed_until(mask, first, values)
    assert not fixed_until(mask, last, values)
