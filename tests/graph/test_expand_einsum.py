"""``einsum`` becomes ``matmul`` where it is one matrix product for each entry of its batch."""

from __future__ import annotations

import pytest
import torch
from attention_models import compiled, qkv


@pytest.mark.parametrize(
    "equation",
    ["bhid,bhjd->bhij", "b h i d, b h j d -> b h j i", "bhid,bhjd->hbij", "bhdi,bhdj->ijbh"],
)
def test_a_product_of_matrices_becomes_matmul(equation):
    q, k, _ = qkv()
    out, capture = compiled(lambda q, k: torch.einsum(equation, q, k), q, k)
    assert "einsum" not in capture.names()
    assert capture.names().count("matmul") == 1
    torch.testing.assert_close(out, torch.einsum(equation, q, k))


@pytest.mark.parametrize("equation", ["bhid,bhjd->bij", "bhid,bhje->bhij", "bhid,bhjd->bhi", "...id,...jd->...ij"])
def test_einsums_that_are_not_matrix_products_stay(equation):
    q, k, _ = qkv()
    out, capture = compiled(lambda q, k: torch.einsum(equation, q, k), q, k)
    assert "einsum" in capture.names()
    torch.testing.assert_close(out, torch.einsum(equation, q, k))


def test_an_einsum_that_broadcasts_stays():
    q, k, _ = qkv()
    _, capture = compiled(lambda q, k: torch.einsum("bhid,bhjd->bhij", q, k[:1]), q, k)
    assert "einsum" in capture.names()
