"""Bases of heads: the balance, and errors of logits with INT8 operands on rows that the bases were not fitted to."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qframework.numerics import dequantize, quantize, scale_from_amax
from qframework.quantizer.head_basis import balanced, head_bases, orthogonal_basis

HEADS, DIM = 2, 16


def operands(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Correlated queries and keys with long tails, whose large directions differ."""
    draw = torch.Generator().manual_seed(0)
    mixes = [torch.randn(HEADS, DIM, DIM, generator=draw) * torch.logspace(0, -2, DIM) for _ in range(2)]
    generator = torch.Generator().manual_seed(seed)
    query, key = (torch.randn(HEADS, rows, DIM, generator=generator).pow(3) @ mix.mT for mix in mixes)
    return query, key + 1


def logit_error(known: tuple[Tensor, Tensor], rows: tuple[Tensor, Tensor], basis: Tensor) -> float:
    """Relative; scales from ``known`` and ``rows``."""
    changes = basis, torch.linalg.inv(basis).mT
    rounded = []
    for seen, values, change in zip(known, rows, changes, strict=True):
        scale = scale_from_amax(torch.cat([seen @ change, values @ change], 1).abs().amax((1, 2), keepdim=True))
        rounded.append(dequantize(quantize(values @ change, scale), scale, values.dtype))
    exact, found = (a @ b.mT for a, b in (rows, rounded))
    wrong, exact = (x - x.mean(-1, keepdim=True) for x in (found - exact, exact))
    return float(wrong.square().sum() / exact.square().sum())


def test_the_balance_makes_both_moments_equal_and_diagonal() -> None:
    of_queries, of_keys = (x.mT.double() @ x.double() for x in operands(200, 1))
    basis = balanced(of_queries, of_keys)
    inverse = torch.linalg.inv(basis)
    first, second = basis.mT @ of_queries @ basis, inverse @ of_keys @ inverse.mT
    near = 1e-9 * float(first.abs().amax())
    torch.testing.assert_close(first, second, rtol=0, atol=near)
    torch.testing.assert_close(first, torch.diag_embed(first.diagonal(dim1=1, dim2=2)), rtol=0, atol=near)


def test_the_basis_makes_less_error_than_a_rotation_on_other_rows() -> None:
    fitted, others = operands(1500, 1), operands(1500, 2)
    one = torch.eye(DIM).expand(HEADS, -1, -1)
    turned = orthogonal_basis(DIM).float().expand(HEADS, -1, -1)
    moments = (x.mT.double() @ x.double() for x in (fitted[0], fitted[1] - fitted[1].mean(1, keepdim=True)))
    start = balanced(*moments).float() @ turned
    errors = [logit_error(fitted, others, basis) for basis in (one, turned, start, head_bases(*fitted).float())]
    assert errors[3] < 0.5 * min(errors[:2]), errors
    assert errors[3] < 0.8 * errors[2], errors  # what the descent gains


@pytest.mark.parametrize("rows", [1, 3])
def test_few_or_equal_rows_have_an_invertible_basis(rows: int) -> None:
    query, key = operands(rows, 3)
    for given in ((query, key), (query, torch.zeros_like(key)), (torch.zeros_like(query), key)):
        basis = head_bases(*given)
        assert basis.isfinite().all()
        one = torch.eye(DIM, dtype=basis.dtype).expand(HEADS, -1, -1)
        torch.testing.assert_close(basis @ torch.linalg.inv(basis), one, rtol=0, atol=1e-6)


def test_under_inference_mode() -> None:
    with torch.inference_mode():
        basis = head_bases(*operands(40, 1))
    torch.testing.assert_close(basis, head_bases(*operands(40, 1)))
