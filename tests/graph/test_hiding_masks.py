"""Float masks that only hide keys are lowered as the bool masks that they were made of (hiding_masks.py)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from attention_models import compiled, error_bound, product, qkv
from test_index_values import transformers_mask
from torch import Tensor

from qframework.graph.nodes import fake_value

LOW = torch.finfo(torch.float32).min
SCALE = 16**-0.5


def window(queries: int, keys: int, behind: int = 5, ahead: int = 1) -> Tensor:
    """Keys from so many places behind a query to so many ahead, both not included."""
    place = torch.arange(keys) - torch.arange(queries)[:, None]
    return (place < ahead) & (place > -behind)


def zeros() -> Tensor:
    return torch.tensor(0.0)


MADE = {
    "as transformers": lambda q, n: torch.where(transformers_mask(n, 2, window=5), zeros(), LOW),
    "of -inf": lambda q, n: torch.where(window(q, n), 0.0, -torch.inf),
    "hidden keys first": lambda q, n: torch.where(~window(q, n), -1e9, 0.0),
    "filled": lambda q, n: torch.zeros(q, n).masked_fill(~window(q, n), LOW),
    "of both sides": lambda q, n: torch.where(window(q, n, 3, 4), zeros(), LOW),
}
LEFT = {
    "a row may be hidden": lambda q, n: torch.where(window(q, n, 5, 0), zeros(), LOW),
    "weights are left": lambda q, n: torch.where(window(q, n), zeros(), -100.0),
    "numbers are added": lambda q, n: torch.where(window(q, n), torch.tensor(1.0), LOW),
    "it depends on the input": None,
}


def attention(make: Callable[[int, int], Tensor] | None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        queries, keys = q.shape[2], k.shape[2]
        mask = torch.where(v[..., 0].unsqueeze(-2) < 9, zeros(), LOW) if make is None else make(queries, keys)
        return (product(q, k) * SCALE + mask).softmax(-1) @ v

    return attend


def lowered(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The mask of the operator's call, whose result is checked."""
    out, capture = compiled(attend, q, k, v)
    (call,) = capture.calls
    assert (out - attend(q, k, v)).abs().max() < error_bound(q, k, v, SCALE)
    mask = fake_value(call["attn_mask"])
    assert mask is not None
    return mask


@pytest.mark.parametrize("form", MADE)
def test_windows_are_bool(form: str) -> None:
    assert lowered(attention(MADE[form]), *qkv()).dtype == torch.bool


@pytest.mark.parametrize("form", LEFT)
def test_other_masks_stay(form: str) -> None:
    assert lowered(attention(LEFT[form]), *qkv()).dtype == torch.float32


def test_more_queries_than_keys_stay() -> None:
    """The last queries have no key of their own place, and here none at all: their weights are equal."""
    q, k, v = qkv()
    attend = attention(MADE["of both sides"])
    assert lowered(attend, q, k, v).dtype == torch.bool
    few = k[:, :, :9], v[:, :, :9]
    assert attend(q, *few)[:, :, -1].allclose(few[1].mean(2))
    assert lowered(attend, q, *few).dtype == torch.float32


def test_a_mask_that_is_written_stays() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen = window(q.shape[2], k.shape[2])
        mask = torch.where(seen, zeros(), LOW)
        seen.fill_(False)
        return (product(q, k) * SCALE + mask).softmax(-1) @ v

    assert lowered(attend, *qkv()).dtype == torch.float32
