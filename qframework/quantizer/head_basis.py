"""The basis of a head in which INT8 queries and keys with one scale each make the least error of the logits.

With an invertible matrix A ``(D, D)``, logits stay the same::

    q k^T = (q A) (k A^-T)^T

A scale of ``max / 127`` leaves errors of variance ``scale^2 / 12`` in every element, whatever the basis. Without what
is common to all keys of a query, which softmax does not see, the mean square error of the logits is in proportion to ::

    E(A) = max|q A|^2 trace(A^-1 C_k A^-T) + max|k A^-T|^2 trace(A^T C_q A)

with ``C_q`` the second moments of queries and ``C_k`` the covariance of keys. The first basis makes both moments equal
and diagonal (a balance, as of model reduction), then turns them by a random orthogonal matrix, which gives all channels
about the same range. Gradient descent on ``log E`` with maxima as norms of rising order p goes on from there. SpinQuant
(Liu et al., arXiv:2405.16406) learns orthogonal matrices, with the gradient of the whole model.
"""

from __future__ import annotations

import torch
from torch import Tensor

_STEPS, _RATE = 150, 0.02  # of Adam, with steps of about the rate in each element of a matrix near the identity
_FIRST_ORDER, _LAST_ORDER = 12.0, 48.0  # of the norms in place of maxima
_ROWS = 1024  # the longest of each head, for the maxima
_SMALLEST = 1e-4  # of the moments: shares of the largest below this count as this
_SEED = 0


def orthogonal_basis(size: int) -> Tensor:
    """A random orthogonal matrix ``(size, size)`` float64, always the same."""
    generator = torch.Generator().manual_seed(_SEED)
    return torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0]


def head_bases(query: Tensor, key: Tensor) -> Tensor:
    """A basis for each head: ``A (H, D, D)`` float64, with queries and keys of about the same size.

    Args:
        query: ``(H, n, D)`` float, rows of queries; of grouped queries all that share a head of keys.
        key: ``(H, m, D)``, rows of keys.
    """
    query, key = query.detach().double(), key.detach().double()
    of_queries, of_keys = _moments(query), _moments(key - key.mean(1, keepdim=True))
    start = balanced(of_queries, of_keys) @ orthogonal_basis(query.shape[-1]).to(query)
    inverse = torch.linalg.inv(start)
    return start @ _descended(
        _longest(query @ start),
        _longest(key @ inverse.mT),
        start.mT @ of_queries @ start,
        inverse @ of_keys @ inverse.mT,
    )


def balanced(of_queries: Tensor, of_keys: Tensor) -> Tensor:
    """``A`` with ``A^T C_q A = A^-1 C_k A^-T``, both diagonal, for positive definite ``C_q`` and ``C_k (H, D, D)``."""
    root = _power(of_queries, 0.5)
    values, vectors = torch.linalg.eigh(root @ of_keys @ root)
    return _power(of_queries, -0.5) @ vectors * values.clamp(min=torch.finfo(values.dtype).tiny).pow(0.25).unsqueeze(-2)


def _moments(rows: Tensor) -> Tensor:
    """Second moments ``(H, D, D)`` of rows ``(H, n, D)``, with directions that hardly occur made larger."""
    moments = rows.mT @ rows / max(rows.shape[1], 1)
    largest = torch.linalg.matrix_norm(moments, 2)
    largest = torch.where(largest > 0, largest, 1.0)
    return moments + _SMALLEST * largest[:, None, None] * torch.eye(rows.shape[-1]).to(rows)


def _power(symmetric: Tensor, exponent: float) -> Tensor:
    values, vectors = torch.linalg.eigh(symmetric)
    return vectors * values.clamp(min=torch.finfo(values.dtype).tiny).pow(exponent).unsqueeze(-2) @ vectors.mT


def _longest(rows: Tensor) -> Tensor:
    """The longest rows of each head, among which are those with the largest elements, in this basis and near it."""
    index = rows.norm(dim=-1).topk(min(_ROWS, rows.shape[1]), dim=1).indices
    return rows.gather(1, index.unsqueeze(-1).expand(-1, -1, rows.shape[-1]))


def _descended(query: Tensor, key: Tensor, of_queries: Tensor, of_keys: Tensor) -> Tensor:
    """The basis of least error found from the identity, by gradient descent in float32."""
    with torch.inference_mode(False), torch.enable_grad():
        query, key, of_queries, of_keys = (each.float().clone() for each in (query, key, of_queries, of_keys))
        one = torch.eye(query.shape[-1]).to(query)
        change = torch.zeros_like(of_queries, requires_grad=True)
        optimizer = torch.optim.Adam([change], lr=_RATE)
        for step in range(_STEPS):
            order = _FIRST_ORDER + (_LAST_ORDER - _FIRST_ORDER) * step / _STEPS
            basis = one + change
            inverse = torch.linalg.inv(basis)
            errors = _largest(query @ basis, order).square() * _trace(inverse, of_keys)
            errors = errors + _largest(key @ inverse.mT, order).square() * _trace(basis.mT, of_queries)
            optimizer.zero_grad()
            errors.clamp(min=torch.finfo(errors.dtype).tiny).log().sum().backward()
            optimizer.step()
        return (one + change).detach().double()


def _largest(rows: Tensor, order: float) -> Tensor:
    """The norm of an order near infinity of all elements of each head, ``(H,)``."""
    largest = rows.detach().abs().amax((1, 2), keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny)
    powers = (rows / largest).abs().pow(order).sum((1, 2))
    return largest.flatten() * powers.clamp(min=0.5).pow(1 / order)  # at least 1, but for zeros


def _trace(matrix: Tensor, moments: Tensor) -> Tensor:
    """``trace(M C M^T)`` of each head."""
    return (matrix @ moments * matrix).sum((1, 2))
