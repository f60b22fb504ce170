"""decode/decode.py and decode/triton.py: attention of a few queries to an INT8 cache, against FP64 attention."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from decode_oracle import P_ERROR, Cache, assert_exact, make_cache
from torch import Tensor

from qframework.errors import QFrameworkError, UnsupportedError
from qframework.kernels.attention.decode import decode as module
from qframework.kernels.attention.decode.decode import DECODE_ATTENTION, DecodePlan, choose_plan, decode_attention


def run(implementation: str, plan: DecodePlan | None = None) -> Any:
    """The implementation, with a plan where there is a choice."""
    if implementation == "cpu":
        return DECODE_ATTENTION.cpu
    if plan is None:
        return DECODE_ATTENTION.cuda

    def call(*arguments: Any, **named: Any) -> Tensor:
        record = module.DecodeAttentionArguments(*arguments, **named)
        record.check()
        return module.decode_attention_triton(record, plan)

    return call


# B, H, Hkv, N, capacity, D, Dv, lengths
SHAPES = {
    "one_key": (1, 3, 1, 1, 1, 64, 64, [1]),
    "127": (2, 8, 2, 1, 130, 64, 64, [127]),
    "odd_heads": (1, 6, 2, 3, 200, 80, 80, [199]),
    "wide": (1, 2, 1, 2, 150, 256, 256, [150]),
    "narrow_values": (1, 4, 4, 2, 300, 96, 32, [290]),
    "72": (1, 16, 1, 1, 140, 72, 72, [140]),
    "lengths": (3, 2, 2, 1, 260, 128, 128, [0, 130, 260]),
    "many_rows": (1, 16, 1, 16, 140, 64, 64, [139]),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_against_fp64(implementation, place, shape, dtype):
    batch, heads, kv, tokens, capacity, d, dv, lengths = SHAPES[shape]
    cache = make_cache(batch, kv, capacity, d, dv, lengths, place)
    query = torch.randn(batch, heads, tokens, d).to(place, dtype)
    got = run(implementation)(query, *cache)
    assert_exact(got, query, cache)
    assert got.stride() == (tokens * heads * dv, dv, heads * dv, 1)  # merging the heads is a view


@pytest.mark.interpreter
@pytest.mark.parametrize("length", [1, 127, 300])
@pytest.mark.parametrize("splits", [1, 2, 7, 90])
def test_splits(splits, length):
    """More splits than blocks of keys leave programs without work."""
    place = "cuda" if torch.cuda.is_available() else "cpu"
    cache = make_cache(1, 2, 300, 32, 32, [length], place)
    query = torch.randn(1, 4, 2, 32, device=place)
    assert_exact(run("triton", DecodePlan(splits, block_n=32))(query, *cache), query, cache)


@pytest.mark.interpreter
@pytest.mark.parametrize("units", [False, True])
@pytest.mark.parametrize("splits", [1, 3, 8, 19])
@pytest.mark.parametrize(("kv", "group", "tokens", "width"), [(2, 5, 9, 72), (1, 1, 33, 256), (3, 16, 1, 64)])
def test_shares_of_many_rows_add_up(kv: int, group: int, tokens: int, width: int, splits: int, units: bool) -> None:
    """Weighted by the powers of two of their maxima; a row that sees no key is zero, NaN stays in its row."""
    place, batch, rows = "cuda" if torch.cuda.is_available() else "cpu", 2, group * module.power_of_2(tokens)
    assert group * tokens >= module._MANY_ROWS
    out = torch.randn(batch * kv, splits, rows, width, device=place).to(torch.float16 if units else torch.float32)
    top, total = 6 * torch.randn(out.shape[:3], device=place), torch.rand(out.shape[:3], device=place) + 0.1
    top[:, 0, 2], total[:, 0, 2] = -math.inf, 0.0  # a share without keys, and a row without keys
    top[:, :, 5], total[:, :, 5] = -math.inf, 0.0
    top[0, splits - 1, 3] = math.nan
    unit = torch.rand(out.shape[:3], device=place) + 0.5 if units else total
    weights = torch.exp2(top.double() - top.double().nan_to_num(nan=0.0).amax(1, keepdim=True).clamp(min=-1e9))
    parts = out.double() * (weights * (unit.double() if units else 1.0))[..., None]
    expected = parts.sum(1) / (weights * total).sum(1).clamp(min=1e-30)[..., None]
    result = (
        torch.full((batch, kv * group, tokens, width), 7.0, device=place).transpose(1, 2).contiguous().transpose(1, 2)
    )
    module._combine(module.Shares(out, top, total, unit), result, group)
    expected = expected.view(batch, kv, group, -1, width)[:, :, :, :tokens].reshape(result.shape)
    torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert result.isnan().any()


def masks(kind: str, keys: int) -> Tensor:
    if kind == "padding":
        return (torch.arange(keys) >= torch.tensor([[0], [100]]))[:, None, None]
    mask = torch.rand(2, 4, 3, keys) > 0.5
    mask[0, 0, 1] = False  # a row that sees nothing
    mask[1, :, :, :140] = False  # whole blocks
    if kind == "bool":
        return mask
    return torch.where(mask, torch.randn(2, 4, 3, keys), -math.inf)


@pytest.mark.parametrize("kind", ["padding", "bool", "float"])
@pytest.mark.parametrize("causal", [False, True])
def test_masks(implementation, place, kind, causal):
    cache = make_cache(2, 2, 320, 32, 32, [310], place)
    query, mask = torch.randn(2, 4, 3, 32, device=place), masks(kind, 310).to(place)
    got = run(implementation)(query, *cache, mask, causal)
    assert_exact(got, query, cache, mask=mask, causal=causal)
    if kind != "padding":
        assert (got[0, 0, 1] == 0).all()


@pytest.mark.parametrize("window", [1, 40, 129, 1000])
@pytest.mark.parametrize("causal", [False, True])
def test_windows(implementation, place, window, causal):
    cache = make_cache(2, 1, 320, 32, 32, [310, 17], place)
    query = torch.randn(2, 2, 5, 32, device=place)
    got = run(implementation)(query, *cache, None, causal, window)
    assert_exact(got, query, cache, causal=causal, window=window)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("softcap", [1.0, 5.0, 50.0])
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("shape", ["127", "odd_heads", "wide", "72", "many_rows"])
def test_soft_caps(implementation, place, shape, mean, softcap, dtype):
    """Of the keys with their mean: behind a cap the softmax depends on it."""
    batch, heads, kv, tokens, capacity, d, dv, lengths = SHAPES[shape]
    cache = make_cache(batch, kv, capacity, d, dv, lengths, place)
    query = (2 * torch.randn(batch, heads, tokens, d)).to(place, dtype)
    options = {"softcap": softcap, "key_mean": torch.randn(batch, kv, d, device=place) if mean else None}
    assert_exact(run(implementation)(query, *cache, **options), query, cache, **options)


def test_soft_caps_with_masks_windows_and_shares(implementation, place):
    cache = make_cache(2, 2, 320, 32, 32, [310], place)
    query, options = torch.randn(2, 4, 3, 32, device=place), {"softcap": 2.0}
    options["key_mean"] = torch.randn(2, 2, 32, device=place)
    for kind in ("padding", "bool", "float"):
        mask = masks(kind, 310).to(place)
        got = run(implementation)(query, *cache, mask, True, **options)
        assert_exact(got, query, cache, mask=mask, causal=True, **options)
    for plan in (None, DecodePlan(7, block_n=32)):
        got = run(implementation, plan)(query, *cache, None, True, 40, 0.3, **options)
        assert_exact(got, query, cache, causal=True, window=40, scale=0.3, **options)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("shape", ["one_key", "127", "odd_heads", "wide", "72", "lengths", "many_rows"])
def test_sinks(implementation, place, shape, mean, dtype):
    """Of keys with their mean, beside which a sink is another share; a row that sees no key is zero."""
    batch, heads, kv, tokens, capacity, d, dv, lengths = SHAPES[shape]
    cache = make_cache(batch, kv, capacity, d, dv, lengths, place)
    query = torch.randn(batch, heads, tokens, d).to(place, dtype)
    options = {"sinks": torch.linspace(-3, 5, heads, dtype=dtype, device=place)}
    options["key_mean"] = torch.randn(batch, kv, d, device=place) if mean else None
    assert_exact(run(implementation)(query, *cache, **options), query, cache, **options)


@pytest.mark.parametrize("sizes", [(2, 4, 3), (1, 4, 1), (2, 1, 3)])
def test_sinks_of_tokens_with_masks_windows_caps_and_shares(implementation, place, sizes):
    cache = make_cache(2, 2, 320, 32, 32, [310], place)
    query, options = torch.randn(2, 4, 3, 32, device=place), {"sinks": 4 * torch.randn(sizes, device=place)}
    options["sinks"][0, 0, 0] = -math.inf
    for kind in ("padding", "bool", "float"):
        mask = masks(kind, 310).to(place)
        got = run(implementation)(query, *cache, mask, True, **options)
        assert_exact(got, query, cache, mask=mask, causal=True, **options)
    for plan in (None, DecodePlan(1, block_n=32), DecodePlan(7, block_n=32)):
        got = run(implementation, plan)(query, *cache, None, True, 40, 0.3, softcap=2.0, **options)
        assert_exact(got, query, cache, causal=True, window=40, scale=0.3, softcap=2.0, **options)


def test_a_mean_without_a_cap_changes_nothing(implementation, place):
    cache = make_cache(1, 2, 100, 32, 32, [90], place)
    query, mean = torch.randn(1, 4, 1, 32, device=place), torch.randn(1, 2, 32, device=place)
    assert torch.equal(run(implementation)(query, *cache), run(implementation)(query, *cache, key_mean=mean))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"softcap": 0.0}, r"softcap must be None or a positive number up to 16384, got 0\.0"),
        ({"key_mean": torch.zeros(1, 2, 31)}, r"key_mean must have shape \(1, 2, 32\), got \(1, 2, 31\)"),
        ({"key_mean": torch.zeros(1, 2, 32).half()}, "key_mean must have dtype float32, got torch.float16"),
        ({"sinks": torch.zeros(3)}, r"sinks must have shape \(4,\) or broadcast to \(1, 4, 1\), got \(3,\)"),
        ({"sinks": torch.zeros(4).long()}, "sinks must have dtype .*, got torch.int64"),
    ],
)
def test_what_is_no_cap_mean_or_sink_is_refused(options, reason):
    cache = make_cache(1, 2, 100, 32, 32, [90], "cpu")
    with pytest.raises(QFrameworkError, match=f"decode_attention: {reason}"):
        decode_attention(torch.randn(1, 4, 1, 32), *cache, **options)


def test_the_lowest_float_averages(implementation, place):
    """Not -inf: PyTorch averages all values of such a row, too."""
    cache = make_cache(1, 1, 140, 32, 32, [140], place)
    query = torch.randn(1, 2, 1, 32, device=place)
    mask = torch.full((1, 1, 1, 140), torch.finfo(torch.float32).min, device=place)
    got = run(implementation)(query, *cache, mask)
    mean = (cache.value.double() * cache.scales[..., 1:].double()).mean(2, keepdim=True)
    torch.testing.assert_close(got.double(), mean.expand_as(got), rtol=0, atol=2 * P_ERROR)


def test_nan_stays_with_the_queries_that_see_it(implementation, place):
    cache = make_cache(1, 1, 140, 32, 32, [140], place)
    cache.scales[0, 0, 30] = math.nan
    query = torch.randn(1, 2, 2, 32, device=place)
    mask = torch.ones(2, 140, dtype=torch.bool, device=place)
    mask[0, 30] = False
    got = run(implementation)(query, *cache, mask)
    assert got[:, :, 1].isnan().all()
    assert got[:, :, 0].isfinite().all()


def test_strided_operands(implementation, place):
    """Views of larger tensors, without lengths."""
    cache = make_cache(2, 4, 200, 64, 64, [200], place)
    key, value, scales = (x[:, 1:3, 20:150] for x in cache[:3])
    query = torch.randn(2, 3, 4, 70, device=place).transpose(1, 2)[..., 3:67]
    view = Cache(key, value, scales, torch.tensor([130], device=place))
    assert_exact(run(implementation)(query, key, value, scales), query, view)
    odd = torch.randint(-127, 128, (2, 2, 130, 65), dtype=torch.int8, device=place)[..., 1:]
    assert_exact(run(implementation)(query, odd, value, scales), query, view._replace(key=odd))


@pytest.mark.parametrize(("d", "dv"), [(72, 72), (40, 64), (128, 24)])
def test_padded_rows(implementation, place, d, dv):
    """Rows that are padded to 16 bytes are read whole; what lies in the padding does not matter."""
    whole = make_cache(2, 2, 300, -(-d // 16) * 16, -(-dv // 16) * 16, [290, 130], place)
    cache = whole._replace(key=whole.key[..., :d], value=whole.value[..., :dv])
    for x, width in ((whole.key, d), (whole.value, dv)):
        x[..., width:] = 127
    assert (module._readable(cache.key), module._readable(cache.value)) == (whole.key.shape[3], whole.value.shape[3])
    query = torch.randn(2, 4, 3, d, device=place)
    assert_exact(run(implementation)(query, *cache), query, cache)


def test_padding_that_is_no_whole_vector_is_not_read():
    x = torch.zeros(1, 1, 9, 80, dtype=torch.int8)
    assert module._readable(x[..., :72]) == 80
    assert module._readable(x[..., :64]) == 64
    assert module._readable(x[..., 8:]) == 72  # begins between vectors
    assert module._readable(torch.zeros(1, 1, 9, 76, dtype=torch.int8)[..., :72]) == 72
    assert module._readable(torch.zeros(1, 1, 9, 72, dtype=torch.int8)) == 72


def test_scale(implementation, place):
    cache = make_cache(1, 1, 140, 32, 32, [140], place)
    query = torch.randn(1, 2, 1, 32, device=place)
    assert_exact(run(implementation)(query, *cache, None, False, None, 0.05), query, cache, scale=0.05)


@pytest.mark.parametrize(("batch", "heads", "tokens", "capacity"), [(0, 2, 1, 40), (1, 2, 0, 40), (1, 2, 3, 0)])
def test_empty(implementation, place, batch, heads, tokens, capacity):
    cache = make_cache(max(batch, 1), 1, capacity, 32, 16, [capacity], place)
    query = torch.randn(batch, heads, tokens, 32, device=place)
    got = run(implementation)(query, *(x[:batch] for x in cache[:3]))
    assert got.shape == (batch, heads, tokens, 16)
    assert (got == 0).all()


@pytest.mark.parametrize("rows", [1, 4, 16, 64, 128])
@pytest.mark.parametrize("heads", [1, 8, 600])
@pytest.mark.parametrize("keys", [1, 5000, 65536])
@pytest.mark.parametrize("channels", [32, 72, 128, 256])
def test_plans_fill_the_chip_once(rows, heads, keys, channels):
    """Each multiprocessor has about 64 KB on their way, two blocks a program; no split has fewer than two blocks."""
    plan = choose_plan(rows, heads, keys, (channels, channels), 132)
    assert (plan.splits - 1) * 2 * plan.block_n < keys
    programs = plan.splits * heads * -(-rows // plan.block_m)
    in_flight = programs / 132 * 2 * plan.block_n * 2 * channels
    whole = plan.splits == -(-keys // (2 * plan.block_n))
    assert in_flight > 24 * 1024 or whole
    assert in_flight < 100 * 1024 or plan.splits == 1


# The operator ---------------------------------------------------------------------------------------------------------


def call(device: Any = "cpu") -> tuple[Any, ...]:
    cache = make_cache(2, 2, 140, 32, 32, [130, 140], device)
    return torch.randn(2, 4, 3, 32, device=device), *cache


def test_opcheck(device):
    mask = torch.rand(2, 1, 3, 140, device=device) > 0.3
    for more in ((), (mask, True), (mask.float(), False, None, 0.1), (None, True, 50)):
        torch.library.opcheck(torch.ops.qframework.decode_attention.default, (*call(device), *more))


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_whole(device):
    operands = call(device)
    compiled = torch.compile(lambda *x: decode_attention(*x).relu(), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*operands), decode_attention(*operands).relu(), rtol=0, atol=0)


@pytest.mark.gpu
def test_a_graph_follows_the_lengths():
    query, *rest = call("cuda")
    cache = Cache(*rest)
    cache.scales.nan_to_num_(0.01)
    decode_attention(query, *cache)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = decode_attention(query, *cache)
    for lengths in ([1, 1], [140, 3], [77, 130]):
        cache.lengths.copy_(torch.tensor(lengths))
        graph.replay()
        assert_exact(got, query, cache)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(2, 4, 3, 32, dtype=torch.int8)}, "query must have dtype"),
        ({"key": torch.zeros(2, 2, 140, 32)}, "key must have dtype int8, got torch.float32"),
        ({"key": torch.zeros(2, 2, 140, 30, dtype=torch.int8)}, r"key must have shape \(2, 2, 140, 32\)"),
        ({"value": torch.zeros(2, 2, 139, 32, dtype=torch.int8)}, r"value must have shape \(2, 2, 140, 32\)"),
        ({"value": torch.zeros(2, 2, 140, 31, dtype=torch.int8)}, "value must have 2, 4, ... 256 channels, got 31"),
        ({"scales": torch.zeros(2, 2, 140, dtype=torch.bfloat16)}, r"scales must have shape \(2, 2, 140, 2\)"),
        ({"query": torch.zeros(2, 3, 3, 32)}, "heads of key must divide the 3 of query, got 2"),
        ({"query": torch.zeros(4, 3, 32)}, "query must have shape"),
        ({"lengths": torch.zeros(3, dtype=torch.int32)}, r"lengths must have shape \(1,\) or \(2,\)"),
        ({"lengths": torch.zeros(2)}, "lengths must have dtype int32"),
        ({"window": 0}, "window must be positive or None, got 0"),
        ({"attn_mask": torch.zeros(2, 4, 3, 141)}, "at most 140 keys"),
        ({"attn_mask": torch.zeros(3, 1, 1, 140)}, "attn_mask must broadcast"),
        ({"attn_mask": torch.zeros(2, 1, 1, 140, dtype=torch.int32)}, "attn_mask must have dtype"),
        ({"query": torch.zeros(2, 4, 3, 32, requires_grad=True)}, "query must not require a gradient"),
    ],
)
def test_errors(change, message):
    names = ("query", "key", "value", "scales", "lengths")
    with pytest.raises((QFrameworkError, UnsupportedError), match=message):
        decode_attention(**(dict(zip(names, call(), strict=True)) | change))
