"""sage_attention and sage_attention_varlen: shapes, layouts, masks, strides, errors."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from attention_helpers import Operators, assert_within, exact_attention, expected_error, heads
from torch import Tensor

from qframework import sage_attention
from qframework.errors import QFrameworkError, UnsupportedError
from qframework.kernels.attention.variants import VARIANTS, AttentionVariant


def check(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, is_causal: bool = False) -> None:
    """Check that the function returns exact attention up to the noise of 8 bits."""
    out = sage_attention(query, key, value, mask, is_causal=is_causal)
    expected, _, p = exact_attention(query, key, value, mask, is_causal)
    assert out.shape == expected.shape
    assert out.dtype == query.dtype
    assert_within(out, expected, expected_error(query, key, value, p))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(3, 40, 16), (2, 3, 40, 16), (2, 2, 3, 40, 16)], ids=["3-D", "4-D", "5-D"])
def test_ranks_and_dtypes(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    query, key, value = (heads(*shape, dtype=dtype, device=device) for _ in range(3))
    check(query, key, value)


@pytest.mark.parametrize("head_dim", [1, 3, 8, 17, 64, 80, 100, 256])
def test_head_dims(head_dim: int, device: torch.device) -> None:
    query, key, value = (heads(1, 2, n, head_dim, device=device) for n in (33, 70, 70))
    check(query, key, value)


def test_value_of_another_head_dim(device: torch.device) -> None:
    check(heads(2, 2, 20, 16, device=device), heads(2, 2, 30, 16, device=device), heads(2, 2, 30, 40, device=device))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("nq", "nk"), [(1, 1), (1, 77), (77, 1), (50, 197), (197, 50), (130, 130)])
def test_lengths(nq: int, nk: int, causal: bool, device: torch.device) -> None:
    """Causal is aligned top left: with more keys than queries, no query attends to the last keys."""
    query, key, value = (heads(1, 2, n, 32, device=device) for n in (nq, nk, nk))
    check(query, key, value, is_causal=causal)


MASKS = {
    "bool": lambda: torch.rand(2, 3, 20, 30) > 0.5,
    "bool by key": lambda: torch.rand(2, 1, 1, 30) > 0.3,
    "float": lambda: torch.randn(2, 3, 20, 30),
    "float (N, N)": lambda: torch.randn(20, 30),
    "float by query": lambda: torch.randn(3, 20, 1),
    "alibi": lambda: -0.1 * torch.arange(30.0).repeat(3, 1, 1),
    "-inf": lambda: torch.zeros(20, 30).masked_fill(torch.rand(20, 30) > 0.6, -math.inf),
    "scalar": lambda: torch.tensor(0.5),
}


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("kind", MASKS)
def test_masks(kind: str, causal: bool, device: torch.device) -> None:
    query, key, value = (heads(2, 3, n, 16, device=device) for n in (20, 30, 30))
    check(query, key, value, MASKS[kind]().to(device), causal)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_fully_masked_row_is_zero(kind: str, device: torch.device) -> None:
    query, key, value = (heads(1, 2, n, 16, device=device) for n in (20, 30, 30))
    mask = torch.ones(20, 30, dtype=torch.bool, device=device)
    mask[3] = False
    if kind == "float":
        mask = torch.zeros(20, 30, device=device).masked_fill(~mask, -math.inf)
    out, lse = sage_attention(query, key, value, mask, return_lse=True)
    assert torch.equal(out[:, :, 3], torch.zeros_like(out[:, :, 3]))
    assert bool((lse[:, :, 3] == -math.inf).all())
    check(query, key, value, mask)


@pytest.mark.parametrize("shape", [(0, 2, 5, 8), (2, 0, 5, 8), (2, 2, 0, 8)], ids=str)
def test_empty(shape: tuple[int, ...]) -> None:
    x = heads(*shape)
    out, lse = sage_attention(x, x, x, return_lse=True)
    assert out.shape == shape
    assert lse.shape == shape[:-1]


def test_no_keys_give_zeros() -> None:
    """As in PyTorch: an empty sum."""
    query, key = heads(1, 2, 5, 8), heads(1, 2, 0, 8)
    assert torch.equal(sage_attention(query, key, key), torch.zeros_like(query))


@pytest.mark.parametrize("key_heads", [1, 2])
def test_grouped_heads_equal_repeated_ones(key_heads: int, device: torch.device) -> None:
    query = heads(2, 4, 20, 16, device=device)
    key, value = (heads(2, key_heads, 30, 16, device=device) for _ in range(2))
    grouped = sage_attention(query, key, value, enable_gqa=True)
    key, value = (x.repeat_interleave(4 // key_heads, 1) for x in (key, value))
    torch.testing.assert_close(grouped, sage_attention(query, key, value), rtol=0, atol=1e-6)


def test_grouped_heads_of_3d_tensors() -> None:
    """Dimension 0 is that of the heads, as in PyTorch."""
    query, key, value = heads(4, 20, 16), heads(2, 30, 16), heads(2, 30, 16)
    out, lse = sage_attention(query, key, value, enable_gqa=True, return_lse=True)
    repeated = [x.repeat_interleave(2, 0) for x in (key, value)]
    expected, expected_lse = sage_attention(query, *repeated, return_lse=True)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-6)


def test_leading_dimensions_broadcast() -> None:
    query, key, value = heads(3, 20, 16), heads(2, 3, 30, 16), heads(1, 3, 30, 16)
    expected = sage_attention(query.expand(2, 3, 20, 16), key, value.expand(2, 3, 30, 16))
    assert torch.equal(sage_attention(query, key, value), expected)


@pytest.mark.parametrize("ndim", [3, 4, 5])
def test_layouts(ndim: int, device: torch.device) -> None:
    """NHD is HND with heads and tokens exchanged, in its result too; the log-sum-exp is the same."""
    lead = (2, 2)[: ndim - 3]
    query, key, value = (heads(*lead, 3, n, 16, device=device) for n in (20, 30, 30))
    expected, expected_lse = sage_attention(query, key, value, return_lse=True)
    nhd = [x.transpose(-3, -2).contiguous() for x in (query, key, value)]
    out, lse = sage_attention(*nhd, tensor_layout="NHD", return_lse=True)
    assert torch.equal(out.transpose(-3, -2), expected)
    assert torch.equal(lse, expected_lse)


def test_heads_merge_without_a_copy() -> None:
    """The memory order is (..., N, H, D), so that merging the heads is a view."""
    out = sage_attention(*(heads(2, 3, 20, 16) for _ in range(3)))
    assert out.transpose(-3, -2).is_contiguous()


def test_strides_do_not_matter() -> None:
    qkv = heads(2, 20, 3, 3, 16).permute(2, 0, 3, 1, 4)  # the strides of a fused projection
    sliced = [x[..., ::2] for x in heads(3, 2, 3, 20, 32)]
    for tensors in (qkv, sliced):
        assert torch.equal(sage_attention(*tensors), sage_attention(*(x.contiguous() for x in tensors)))


@pytest.mark.parametrize("smooth_k", [True, False])
@pytest.mark.parametrize("causal", [False, True])
def test_log_sum_exp(smooth_k: bool, causal: bool, device: torch.device) -> None:
    """Natural logarithm in float32, of the logits before smoothing; its error is at most that of a logit."""
    query, key, value = (heads(2, 2, n, 16, device=device) for n in (20, 30, 30))
    key = key + 3.0  # a mean that smoothing subtracts
    _, lse = sage_attention(query, key, value, is_causal=causal, smooth_k=smooth_k, return_lse=True)
    _, expected, _ = exact_attention(query, key, value, is_causal=causal)
    assert lse.dtype == torch.float32
    steps = (query.abs().max() / 127, (key - key.mean(-2, keepdim=True) if smooth_k else key).abs().max() / 127)
    noise = (steps[0] ** 2 * key.square().sum(-1).max() + steps[1] ** 2 * query.square().sum(-1).max()) / 12 / 16
    assert (lse - expected).abs().max() < 6 * noise.sqrt()


def test_smooth_k_removes_a_common_mean_from_the_error() -> None:
    query, key, value = (heads(1, 2, 100, 32) for _ in range(3))
    key = key + 10 * torch.randn(32)
    exact = exact_attention(query, key, value)[0]
    error = [float((sage_attention(query, key, value, smooth_k=smooth) - exact).norm()) for smooth in (True, False)]
    assert 5 * error[0] < error[1]


def test_scale_and_its_alias() -> None:
    query, key, value = (heads(1, 2, 20, 16) for _ in range(3))
    out = sage_attention(query, key, value, scale=0.1)
    assert torch.equal(out, sage_attention(query, key, value, sm_scale=0.1))
    expected, _, p = exact_attention(query, key, value, scale=0.1)
    assert_within(out, expected, expected_error(query, key, value, p, 0.1))


@pytest.mark.parametrize("variant", [*VARIANTS, AttentionVariant(8, "per_warp", "fp16")], ids=str)
def test_variants_reach_the_operator(variant: str | AttentionVariant) -> None:
    query, key, value = (heads(1, 2, 50, 32) for _ in range(3))
    spec = variant if isinstance(variant, str) else variant.spec
    expected, _ = torch.ops.qframework.sage_attention(query, key, value, variant=spec)
    assert torch.equal(sage_attention(query, key, value, variant=variant), expected)


def test_inputs_are_never_changed() -> None:
    tensors = [heads(1, 2, 20, 16) for _ in range(3)] + [torch.randn(20, 20)]
    before = [x.clone() for x in tensors]
    for variant in VARIANTS:
        sage_attention(*tensors, variant=variant)
    assert all(torch.equal(x, y) for x, y in zip(tensors, before, strict=True))


def test_padding_does_not_leak() -> None:
    """NaN in other batch entries and heads changes nothing."""
    query, key, value = (heads(2, 2, n, 16) for n in (20, 30, 30))
    clean = sage_attention(query, key, value)
    for x in (query, key, value):
        x[1] = math.nan
        x[0, 1] = math.nan
    assert torch.equal(sage_attention(query, key, value)[0, 0], clean[0, 0])


def test_autocast_casts_as_it_does_for_pytorch(device: torch.device) -> None:
    """Under autocast a model may pass bfloat16 results of a linear together with float32 results of a rotation."""
    query, key, value = (heads(1, 2, 20, 16, device=device) for _ in range(3))
    with torch.autocast(device.type, torch.bfloat16):
        out = sage_attention(query.bfloat16(), key, value, torch.randn(20, 20, device=device))
        reference = F.scaled_dot_product_attention(query.bfloat16(), key, value)
    assert out.dtype == reference.dtype == torch.bfloat16


# Errors ---------------------------------------------------------------------------------------------------------------

X = torch.zeros(2, 4, 8, 16)
BAD = {
    "dropout": ({"dropout_p": 0.1}, UnsupportedError, r"dropout_p must be 0\.0 with backward='exact', got 0\.1"),
    "two scales": (
        {"scale": 0.1, "sm_scale": 0.1},
        QFrameworkError,
        r"scale or its alias sm_scale must be None, got 0\.1 and 0\.1",
    ),
    "layout": ({"tensor_layout": "BSHD"}, UnsupportedError, "tensor_layout must be HND or NHD, got 'BSHD'"),
    "variant": ({"variant": "sage9"}, UnsupportedError, "variant must be auto, sage_t.*, got 'sage9'"),
    "no variant": ({"variant": 5}, UnsupportedError, "variant must be auto, sage_t.*, got 5"),
    "dtype": ({"query": X.double()}, UnsupportedError, "query must have dtype float32.*, got torch.float64"),
    "mixed dtypes": (
        {"key": X.half()},
        QFrameworkError,
        "key must have query's dtype torch.float32, got torch.float16",
    ),
    "mask dtype": (
        {"attn_mask": torch.zeros(8, 8, dtype=torch.int32)},
        UnsupportedError,
        "attn_mask must have dtype bool",
    ),
    "mask shape": (
        {"attn_mask": torch.zeros(8, 9)},
        QFrameworkError,
        r"attn_mask must have a shape that broadcasts to .*, got \(8, 9\)",
    ),
    "device": ({"key": X.to("meta")}, QFrameworkError, "key must be on the input's device cpu, got meta"),
    "heads": ({"key": X[:, :2], "value": X[:, :2]}, QFrameworkError, "must have 4 heads as query, .*, got 2 and 2"),
    "groups": ({"key": X[:, :3], "value": X[:, :3], "enable_gqa": True}, QFrameworkError, "divisor of 4, got 3 and 3"),
    "head dim": ({"key": X[..., :8]}, QFrameworkError, "key must have query's head dimension 16, got 8"),
    "large head dim": (
        dict.fromkeys(("query", "key", "value"), torch.zeros(1, 1, 2, 257)),
        UnsupportedError,
        "head dimension from 1 to 256, got 257",
    ),
    "tokens": ({"value": X[:, :, :7]}, QFrameworkError, "value must have as many tokens as key, 8, got 7"),
    "batch": ({"key": torch.zeros(3, 4, 8, 16), "value": torch.zeros(3, 4, 8, 16)}, QFrameworkError, "batch"),
    "rank": (
        dict.fromkeys(("query", "key", "value"), torch.zeros(8, 16)),
        UnsupportedError,
        r"query must have 3 dimensions .* to 5 .*, got shape \(8, 16\)",
    ),
    "no tensor": ({"key": X.numpy()}, UnsupportedError, "key must be a tensor, got array"),
    "nested": (
        {"value": torch.nested.nested_tensor([X[0], X[0]])},
        UnsupportedError,
        "value must be a dense tensor, got a nested one. Pad it, or pass its values and offsets",
    ),
    "NHD rank": (
        {**dict.fromkeys(("query", "key", "value"), torch.zeros(8, 16)), "tensor_layout": "NHD"},
        QFrameworkError,
        r"query must have at least 3 dimensions, got shape \(8, 16\)",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_named(what: str) -> None:
    changed, error, message = BAD[what]
    with pytest.raises(error, match=message):
        sage_attention(**{"query": X, "key": X, "value": X, **changed})


def test_unknown_arguments_raise_a_type_error() -> None:
    with pytest.raises(TypeError, match="qk_quant_gran"):
        sage_attention(X, X, X, qk_quant_gran="per_warp")  # type: ignore[call-overload]


# torch.compile --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fresh_dynamo")
def test_one_graph_for_every_length() -> None:
    """No graph breaks, and no recompilation with dynamic shapes."""
    graphs = []

    def count(module, inputs):
        graphs.append(module)
        return module.forward

    compiled = torch.compile(sage_attention, fullgraph=True, dynamic=True, backend=count)
    for batch, nq, nk in ((2, 20, 30), (4, 33, 70), (5, 64, 65)):
        query, key, value = (heads(batch, 3, n, 16) for n in (nq, nk, nk))  # 3: no size equal to another by chance
        mask = torch.randn(nq, nk)
        assert torch.equal(compiled(query, key, value, mask), sage_attention(query, key, value, mask))
    assert len(graphs) == 1


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_inductor_gives_what_eager_gives(layout: str, device: torch.device) -> None:
    query, key, value = (heads(2, 20, 20, 16, device=device) for _ in range(3))

    def function(query, key, value):
        out, lse = sage_attention(
            query * 2, key, value, tensor_layout=layout, variant=AttentionVariant(), return_lse=True
        )
        return out + 1, lse

    for actual, expected in zip(
        torch.compile(function, fullgraph=True)(query, key, value), function(query, key, value), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


def test_one_operator_runs() -> None:
    with Operators() as operators:
        sage_attention(X, X, X)
    assert operators.calls == ["sage_attention"]
