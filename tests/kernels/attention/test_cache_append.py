"""decode/cache_append.py: tokens quantized into a cache, against float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from qframework.errors import QFrameworkError, UnsupportedError
from qframework.kernels.attention.decode.cache_append import CACHE_APPEND, cache_append, dequantized


def empty_cache(
    batch: int, heads: int, capacity: int, d: int, dv: int, place: Any = "cpu", padding: int = 0
) -> list[Tensor]:
    def full(width: int) -> Tensor:
        whole = torch.full((batch, heads, capacity, width + padding), 99, dtype=torch.int8, device=place)
        return whole[..., :width]

    scales = torch.full((batch, heads, capacity, 2), 7.0, dtype=torch.bfloat16, device=place)
    return [full(d), full(dv), scales, torch.zeros(2, dtype=torch.int32, device=place)]


def tokens(shape: tuple[int, ...], dtype: torch.dtype, place: Any) -> Tensor:
    """With a large mean, an outlier, and a token of zeros."""
    x = torch.randn(shape) + 20 * torch.randn(*shape[:2], 1, shape[3])
    x[..., 0, 0] = 300.0
    return x.to(place, dtype)


def check(x: Tensor, mean: Tensor | None, q: Tensor, scale: Tensor) -> None:
    """Scales are the smallest bf16 numbers that saturate nothing; each value is the nearest multiple."""
    exact = x.double() - (0 if mean is None else mean.double().unsqueeze(2))
    wanted = exact.abs().amax(-1) / 127
    scale = scale.double()
    assert (scale >= wanted * (1 - 2.0**-22)).all()
    assert (scale <= wanted * (1 + 2.0**-7) + 1e-17).all()
    steps = exact / scale.unsqueeze(-1)
    assert ((q.double() - steps).abs() <= 0.5 + 1e-4).all()
    assert q.abs().max() <= 127


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("sizes", [(1, 1, 1, 64, 64), (2, 3, 5, 80, 32), (1, 2, 70, 72, 128)])
@pytest.mark.parametrize("padding", [0, 8])
def test_appends(implementation, place, sizes, dtype, padding):
    batch, heads, count, d, dv = sizes
    key, value = (tokens((batch, heads, count, width), dtype, place) for width in (d, dv))
    mean = key.float().mean(2) if count > 1 else torch.zeros(batch, heads, d, device=place)
    cache = empty_cache(batch, heads, 100, d, dv, place, padding)
    cache[3][0] = 9
    run = CACHE_APPEND.cpu if implementation == "cpu" else CACHE_APPEND.cuda
    assert run(key, value, mean, *cache) is None
    new = slice(9, 9 + count)
    check(key, mean, cache[0][:, :, new], cache[2][:, :, new, 0])
    check(value, None, cache[1][:, :, new], cache[2][:, :, new, 1])
    assert cache[3].tolist() == [9 + count, 0]
    for x, untouched in zip(cache, (99, 99, 7.0), strict=False):
        assert (x[:, :, :9] == untouched).all()
        assert (x[:, :, 9 + count :] == untouched).all()
    for x in cache[:2]:
        assert padding == 0 or (x._base[..., x.shape[3] :] == 99).all()


def test_one_by_one_is_the_same(implementation, place):
    """Strided operands, in one call or in several."""
    run = CACHE_APPEND.cpu if implementation == "cpu" else CACHE_APPEND.cuda
    key, value = (torch.randn(2, 7, 3, 40, device=place).transpose(1, 2)[..., 2:34] for _ in range(2))
    mean = torch.randn(2, 3, 32, device=place)
    once, several = empty_cache(2, 3, 16, 32, 32, place), empty_cache(2, 3, 16, 32, 32, place)
    run(key, value, mean, *once)
    for part in (slice(0, 1), slice(1, 2), slice(2, 6), slice(6, 7)):
        run(key[:, :, part], value[:, :, part], mean, *several)
    for a, b in zip(once, several, strict=True):
        assert torch.equal(a, b)


def test_tokens_that_do_not_fit_are_dropped(implementation, place):
    run = CACHE_APPEND.cpu if implementation == "cpu" else CACHE_APPEND.cuda
    cache = empty_cache(1, 1, 8, 32, 32, place)
    behind = torch.zeros(1, 1, 8, 32, dtype=torch.int8, device=place)  # allocated after the cache
    cache[3][0] = 6
    x = torch.randn(1, 1, 5, 32, device=place)
    run(x, x, torch.zeros(1, 1, 32, device=place), *cache)
    assert cache[3].tolist() == [8, 0]
    check(x[:, :, :2], None, cache[1][:, :, 6:], cache[2][:, :, 6:, 1])
    assert (behind == 0).all()


def test_special_tokens(implementation, place):
    """Zeros have a scale; NaN and infinity give a NaN scale, to their token alone."""
    run = CACHE_APPEND.cpu if implementation == "cpu" else CACHE_APPEND.cuda
    x = torch.randn(1, 1, 4, 32, device=place)
    x[0, 0, 0], x[0, 0, 1, 3], x[0, 0, 2, 5] = 0.0, math.nan, math.inf
    cache = empty_cache(1, 1, 4, 32, 32, place)
    run(x, x, torch.zeros(1, 1, 32, device=place), *cache)
    assert cache[2][0, 0, :, 0].isnan().tolist() == [False, True, True, False]
    assert (cache[0][0, 0, 0] == 0).all()
    assert cache[2][0, 0, 0, 0] > 0


def test_dequantized(place):
    key = torch.randn(2, 2, 6, 32, device=place) + 10
    cache, mean = empty_cache(2, 2, 6, 32, 32, place), key.mean(2)
    CACHE_APPEND.cpu(key, key, mean, *cache) if key.device.type == "cpu" else CACHE_APPEND.cuda(key, key, mean, *cache)
    got = dequantized(cache[0], cache[2][..., 0], mean, torch.float32)
    assert ((got - key).abs() <= 0.51 * cache[2][..., :1].float() + 1e-5).all()
    assert dequantized(cache[1], cache[2][..., 1], None, torch.float16).dtype == torch.float16


def call(device: Any = "cpu") -> tuple[Any, ...]:
    x = torch.randn(2, 3, 4, 32, device=device)
    return x, x + 1, torch.randn(2, 3, 32, device=device), *empty_cache(2, 3, 10, 32, 32, device)


def test_opcheck(device):
    torch.library.opcheck(torch.ops.qframework.cache_append.default, call(device))


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_whole(device):
    operands, again = call(device), None
    again = [x.clone() for x in operands]

    def step(*x: Tensor) -> Tensor:
        cache_append(*x)
        return x[-1] + 1

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*operands), step(*again))
    for a, b in zip(operands, again, strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
def test_graphs_append_at_each_replay():
    operands = call("cuda")
    x, length = operands[0], operands[-1]
    cache_append(*operands)
    length.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cache_append(*operands)
    for step in range(2):
        x.normal_()
        graph.replay()
        assert length.tolist() == [4 * (step + 1), 0]
        new = slice(4 * step, 4 * step + 4)
        check(x, operands[2], operands[3][:, :, new], operands[5][:, :, new, 0])


@pytest.mark.parametrize(
    ("place", "change", "message"),
    [
        (0, torch.zeros(2, 3, 4, 32, dtype=torch.int8), "key must have dtype"),
        (0, torch.zeros(3, 4, 32), "key must have shape"),
        (1, torch.zeros(2, 3, 5, 32), r"value must have shape \(2, 3, 4, 32\)"),
        (2, torch.zeros(2, 3, 31), r"k_mean must have shape \(2, 3, 32\)"),
        (3, torch.zeros(2, 3, 10, 32), "k_cache must have dtype int8"),
        (4, torch.zeros(2, 3, 9, 32, dtype=torch.int8), r"v_cache must have shape \(2, 3, 10, 32\)"),
        (4, torch.zeros(2, 3, 10, 64, dtype=torch.int8)[..., ::2], "v_cache must be contiguous"),
        (5, torch.zeros(2, 3, 10, 1, dtype=torch.bfloat16), r"scales must have shape \(2, 3, 10, 2\)"),
        (6, torch.zeros(1, dtype=torch.int32), r"length must have shape \(2,\)"),
        (0, torch.zeros(2, 3, 4, 32, requires_grad=True), "key must not require a gradient"),
    ],
)
def test_errors(place, change, message):
    operands = list(call())
    operands[place] = change
    with pytest.raises((QFrameworkError, UnsupportedError), match=message):
        cache_append(*operands)
