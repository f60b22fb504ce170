"""int8_store.py: keys and values of a layer in INT8, and the tensors that stand for them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from qframework.attention import int8_store as module
from qframework.attention.int8_store import STEP, Int8Store, StoredTensor, store_of
from qframework.errors import QFrameworkError, UnsupportedError


def tokens(count: int, batch: int = 2, heads: int = 2, channels: int = 32) -> Tensor:
    return torch.randn(batch, heads, count, channels) + 5


def filled(*counts: int, max_length: int | None = None, window: int | None = None) -> tuple[Int8Store, Tensor, Tensor]:
    """A store to which tokens were appended in these steps, and all of them in float."""
    store, parts = Int8Store(max_length, window), [(tokens(n), tokens(n)) for n in counts]
    for key, value in parts:
        store.append(key, value)
    key, value = (torch.cat(each, 2) for each in zip(*parts, strict=True))
    return store, key, value


def assert_rounded(actual: Tensor, exact: Tensor) -> None:
    """Within a step of INT8 for the largest values that occur, about 12 with a mean and 5 without."""
    assert actual.shape == exact.shape
    assert 0 < (actual - exact).abs().max() < 12 / 127


@pytest.mark.parametrize("counts", [(7,), (1, 1, 1), (40, 1, 3, 1), (250, 1, 10, 300)])
def test_floats_are_what_was_appended(counts):
    store, key, value = filled(*counts)
    assert store.total == store.stored == sum(counts)
    assert_rounded(store.floats("value"), value)
    assert (store.floats("key") - key).abs().max() < 24 / 127  # one token may be a poor mean


def test_the_mean_of_the_first_tokens_stays():
    """So that a large mean costs no bits, then or later."""
    store = Int8Store()
    for count in (50, 1):
        store.append(tokens(count) + 1000, tokens(count))
        assert (store.floats("key")[..., -1, :] - 1005).abs().max() < 6
        step = (store.floats("key")[:, :, -1] * 1e3).frac().abs()
        assert step.max() > 0
    assert store._cache[2][..., :51, 0].float().max() < 8 / 127


def test_attention():
    """Equal to attention of the dequantized tensors, with and without a mask."""
    store, _, _ = filled(40, 1)
    query, mask = torch.randn(2, 4, 3, 32), torch.rand(2, 1, 3, 41) > 0.3
    key, value = store.floats("key"), store.floats("value")
    causal = torch.ones(3, 41, dtype=torch.bool).tril(38)
    for got, wanted in (
        (store.attend(query), causal),
        (store.attend(query, mask), mask & causal),
        (store.attend(query, mask, is_causal=False), mask),
        (store.attend(query, is_causal=False), None),
    ):
        expected = F.scaled_dot_product_attention(query, key, value, wanted, enable_gqa=True)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_memory_is_half_of_16_bit():
    for channels, most in ((64, 0.52), (128, 0.51)):
        store = Int8Store(max_length=4096)
        x = torch.zeros(1, 2, 4096, channels)
        store.append(x, x)
        assert store.bytes <= most * 4 * x.numel()


def test_rows_begin_at_multiples_of_16_bytes():
    """Also after the store grew, and for sequences that a beam search selects."""
    store = Int8Store()
    for count in (STEP - 1, 5):
        store.append(tokens(count, channels=72), tokens(count, channels=40))
    store.select(torch.tensor([1, 0, 1]))
    for which, row, channels in (("key", 80, 72), ("value", 48, 40)):
        buffer = store._buffer(which)
        assert buffer.shape[-1] == channels
        assert buffer.stride()[2:] == (row, 1)
        assert store.floats(which).shape == (3, 2, STEP + 4, channels)
    assert store.bytes >= 3 * 2 * 2 * STEP * (80 + 48 + 4)


def test_growth():
    store, _, value = filled(STEP - 1, 1)
    before = store.bytes
    store.append(tokens(1), tokens(1))
    assert before < store.bytes < 2.1 * before
    assert_rounded(store.floats("value")[:, :, :STEP], value)


def test_max_length():
    store, _, _ = filled(10, max_length=20)
    before = store.bytes
    store.append(tokens(10), tokens(10))
    assert store.bytes == before
    with pytest.raises(QFrameworkError, match="tokens must be at most max_length, 20, got 21"):
        store.append(tokens(1), tokens(1))


def test_another_batch_is_refused():
    store, _, _ = filled(10)
    with pytest.raises(QFrameworkError, match=r"batch and heads of key must be \(2, 2\), got \(3, 2\)"):
        store.append(tokens(1, batch=3), tokens(1, batch=3))


# Windows --------------------------------------------------------------------------------------------------------------


def test_old_tokens_are_dropped():
    store, key, value = filled(100, *[1] * 90, window=40)
    assert store.total == 190
    assert 39 <= store.stored <= 39 + module._slack(40) + 1
    assert_rounded(store.floats("value"), value[:, :, -store.stored :])
    query = torch.randn(2, 4, 1, 32)
    expected = F.scaled_dot_product_attention(query, key[:, :, -40:], value[:, :, -40:], enable_gqa=True)
    assert (store.attend(query) - expected).abs().max() < 0.1
    assert store.bytes < 2 * 40 * 2 * (64 + 4) * 2


def test_remaining_says_what_the_next_tokens_join():
    store, _, _ = filled(30, window=40)
    for _ in range(60):
        remaining = store.remaining
        store.append(tokens(2), tokens(2))
        assert store.stored == remaining + 2


def test_crop():
    store, key, value = filled(30, 5)
    store.crop(3)
    assert store.total == 32
    store.append(key[:, :, 32:], value[:, :, 32:])
    assert_rounded(store.floats("value"), value)
    with pytest.raises(QFrameworkError, match="tokens must be at most 35, got 36"):
        store.crop(36)


def test_crop_of_a_window():
    store, _, _ = filled(100, 1, window=40)
    store.crop(1)
    with pytest.raises(UnsupportedError, match="older keys were dropped"):
        store.crop(30)
    store = Int8Store(window=40)
    store.keeps_past = True
    for count in (100, 10):
        store.append(tokens(count), tokens(count))
    store.crop(10)
    assert (store.total, store.stored) == (100, 39)


def test_select():
    store, key, value = filled(20)
    store.select(torch.tensor([1, 1, 0]))
    assert store.batch == 3
    assert_rounded(store.floats("value"), value[[1, 1, 0]])
    assert_rounded(store.floats("key"), key[[1, 1, 0]])
    store.append(tokens(1, batch=3), tokens(1, batch=3))


def test_clear():
    store, _, _ = filled(20, max_length=64)
    store.clear()
    assert (store.total, store.batch, store.max_length) == (0, None, 64)
    store.append(tokens(3, batch=1), tokens(3, batch=1))


# StoredTensor ---------------------------------------------------------------------------------------------------------


def test_tensors_are_dequantized_where_they_are_used():
    store, key, _ = filled(20)
    stored = store.tensor("key")
    assert (stored.shape, stored.dtype, stored.device) == (key.shape, key.dtype, key.device)
    assert type(stored * 1) is Tensor
    assert torch.equal(stored * 1, store.floats("key"))
    assert torch.equal(stored[:, :, 3:], store.floats("key")[:, :, 3:])
    assert torch.equal(torch.cat([stored, key], 2)[:, :, :20], store.floats("key"))
    query = torch.randn(2, 2, 1, 32)
    got = F.scaled_dot_product_attention(query, stored, store.tensor("value"))
    torch.testing.assert_close(got, store.attend(query), rtol=1e-5, atol=1e-6)
    assert "StoredTensor(key" in repr(stored)


def test_store_of():
    store, key, value = filled(20)
    other, _, _ = filled(20)
    assert store_of(store.tensor("key"), store.tensor("value")) is store
    assert store_of(store.tensor("key"), other.tensor("value")) is None
    assert store_of(key, value) is None
    assert isinstance(store.tensor("key"), StoredTensor)
