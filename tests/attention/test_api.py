"""sage_attention and sage_attention_varlen: shapes, layouts, masks, strides, errors."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from attention_helpers import Operators, assert_within, exact_attention, expected_error, heads
from torch import Tensor
from torch.autograd import forward_ad

from qframework import sage_attention, sage_attention_varlen, use_sage_attention
from qframework.attention import api, fallbacks
from qframework.errors import QFrameworkError, UnsupportedError
from qframework.kernels.attention.auto import pytorch_is_faster
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


# Packed sequences -----------------------------------------------------------------------------------------------------


def packed(lengths_q: list[int], lengths_k: list[int], q_heads: int = 4, k_heads: int = 2) -> tuple[Tensor, ...]:
    query = heads(sum(lengths_q), q_heads, 16)
    key, value = (heads(sum(lengths_k), k_heads, 16) for _ in range(2))
    starts = [torch.tensor([0, *n], dtype=torch.int32).cumsum(0, dtype=torch.int32) for n in (lengths_q, lengths_k)]
    return query, key, value, *starts


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_varlen_sequences_attend_only_to_themselves(causal: bool) -> None:
    lengths_q, lengths_k = [5, 1, 0, 40], [9, 3, 2, 33]
    query, key, value, starts_q, starts_k = packed(lengths_q, lengths_k)
    out = sage_attention_varlen(query, key, value, starts_q, starts_k, 40, 33, causal)
    one_by_one = [
        sage_attention(q, k, v, is_causal=causal, enable_gqa=True, tensor_layout="NHD")
        for q, k, v in zip(query.split(lengths_q), key.split(lengths_k), value.split(lengths_k), strict=True)
    ]
    torch.testing.assert_close(out, torch.cat(one_by_one), rtol=0, atol=1e-6)


WRONG_OFFSETS = {  # offsets of queries and keys, which have 14 and 11 tokens
    "decreasing": ([0, 9, 5], [0, 7, 11], r"cu_seqlens_q\[2\] must be from 9 to 14, got 5"),
    "negative": ([0, 5, 14], [0, -3, 11], r"cu_seqlens_k\[1\] must be from 0 to 11, got -3"),
    "out of range": ([0, 5, 14], [0, 7, 12], r"cu_seqlens_k\[2\] must be from 7 to 11, got 12"),
    "not from 0": ([1, 5, 14], [0, 7, 11], r"cu_seqlens_q\[0\] must be 0, got 1"),
    "too long": (
        [0, 14, 14],
        [0, 7, 11],
        r"sequence 0 of cu_seqlens_q must have at most max_seqlen_q=9 tokens, got 14",
    ),
}


@pytest.mark.parametrize("what", WRONG_OFFSETS)
def test_varlen_names_invalid_offsets(what: str) -> None:
    starts_q, starts_k, message = WRONG_OFFSETS[what]
    query, key, value, *_ = packed([5, 9], [7, 4])
    starts = (torch.tensor(x, dtype=torch.int32) for x in (starts_q, starts_k))
    with pytest.raises(QFrameworkError, match=message):
        sage_attention_varlen(query, key, value, *starts, 9, 7)


def test_varlen_gives_zeros_after_the_last_sequence() -> None:
    query, key, value, starts_q, starts_k = packed([5, 9], [7, 4])
    shorter = torch.tensor([0, 5, 8], dtype=torch.int32)
    out = sage_attention_varlen(query, key, value, shorter, starts_k, 9, 7)
    assert (out[8:] == 0).all()
    torch.testing.assert_close(out[:5], sage_attention_varlen(query, key, value, starts_q, starts_k, 9, 7)[:5])


def test_varlen_takes_both_names_of_the_scale() -> None:
    arguments = (*packed([5, 9], [7, 4]), 9, 7)
    expected = sage_attention_varlen(*arguments, scale=0.3)
    assert torch.equal(sage_attention_varlen(*arguments, sm_scale=0.3), expected)
    with pytest.raises(QFrameworkError, match=r"sage_attention_varlen: scale or its alias sm_scale must be None"):
        sage_attention_varlen(*arguments, scale=0.3, sm_scale=0.3)


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


def test_offsets_that_are_no_tensors_are_named() -> None:
    x = torch.zeros(8, 4, 16)
    with pytest.raises(UnsupportedError, match=r"cu_seqlens_k must be a tensor, got .* of type list"):
        sage_attention_varlen(x, x, x, torch.tensor([0, 8], dtype=torch.int32), [0, 8], 8, 8)  # type: ignore[arg-type]


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


@pytest.mark.usefixtures("fresh_dynamo")
def test_varlen_compiles_without_a_break() -> None:
    arguments = (*packed([5, 9], [7, 4]), 9, 7)
    compiled = torch.compile(sage_attention_varlen, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*arguments), sage_attention_varlen(*arguments))


def test_one_operator_runs() -> None:
    with Operators() as operators:
        sage_attention(X, X, X)
    assert operators.calls == ["sage_attention"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("none",), True),
        (("float",), True),
        (("factors",), False),
        (("bool", True), True),
        (("float", True), False),
    ],
)
def test_on_a_cpu_pytorch_is_faster(given: tuple, expected: bool) -> None:
    """But for relative positions, and gradients of rows of the lowest float, which PyTorch's kernels get wrong."""
    masking, *gradients = given
    assert pytorch_is_faster(torch.zeros(1, 2, 9, 16), 9, 16, masking, None, *gradients) == expected


class TestLeftToPyTorch:
    """``"auto"`` where PyTorch's attention is said to be the faster one."""

    @pytest.fixture(autouse=True)
    def faster(self, monkeypatch):
        seen = []
        monkeypatch.setattr(api, "pytorch_is_faster", lambda *call: seen.append(call) or True)
        return seen

    def operands(self, dtype=torch.float16):
        return [torch.randn(2, 3, 9, 16, dtype=dtype) for _ in range(3)]

    @pytest.mark.parametrize("layout", ["HND", "NHD"])
    def test_is_pytorchs(self, layout):
        operands = self.operands()
        given = [x.transpose(1, 2) for x in operands] if layout == "NHD" else operands
        out = sage_attention(*given, is_causal=True, scale=0.2, tensor_layout=layout)
        expected = F.scaled_dot_product_attention(*operands, is_causal=True, scale=0.2)
        assert torch.equal(out, expected.transpose(1, 2) if layout == "NHD" else expected)

    @pytest.mark.parametrize("kind", ["bool", "float"])
    def test_a_query_without_keys_gives_zeros(self, kind, faster):
        mask = torch.rand(2, 1, 9, 9) > 0.3
        mask[0, 0, 4] = False
        given = mask if kind == "bool" else torch.zeros(2, 1, 9, 9).masked_fill(~mask, -torch.inf)
        out = sage_attention(*self.operands(), attn_mask=given)
        assert [call[3] for call in faster] == [kind]
        assert (out[0, :, 4] == 0).all()
        assert out.isfinite().all()

    @pytest.mark.parametrize("mask", [torch.linspace(-2, 2, 9), torch.arange(9) > 2, torch.tensor(1.0)], ids=str)
    def test_masks_of_fewer_than_two_dimensions(self, mask):
        operands = self.operands(torch.float32)
        expected = sage_attention(*operands, attn_mask=mask.expand(2, 3, 9, 9))
        torch.testing.assert_close(sage_attention(*operands, attn_mask=mask), expected)

    def test_a_repeated_call_is_not_decided_again(self, faster):
        """And is counted, until something that may decide it changes."""
        fallbacks.clear()
        query, key, value = self.operands(torch.float32)
        expected = F.scaled_dot_product_attention(query, key, value, scale=0.2)
        for _ in range(3):
            assert torch.equal(sage_attention(query, key, value, scale=0.2), expected)
        assert len(faster) == 1
        assert sum(fallbacks.values()) == 3
        fewer = value[:, :, :7]
        with pytest.raises(QFrameworkError, match="tokens"):
            sage_attention(query, key, fewer)
        changes = [
            lambda: sage_attention(query, key, value, is_causal=True),
            lambda: sage_attention(query.half(), key.half(), value.half()),
            lambda: sage_attention(query[:, :, :5], key, value),
            lambda: sage_attention(query, key, value, torch.ones(9, 9, dtype=torch.bool)),
            lambda: sage_attention(query.requires_grad_(), key, value),
        ]
        for made, change in enumerate(changes, start=2):
            change()
            assert len(faster) == made + 1  # one for the call that was refused

    def test_repeated_calls_see_what_surrounds_them(self, faster):
        """Autocast, which changes what is decided on, transforms and forward derivatives."""
        query, key, value = self.operands(torch.float32)
        sage_attention(query, key, value)
        with torch.autocast("cpu", torch.bfloat16):
            assert sage_attention(query, key, value).dtype == torch.bfloat16
        assert [call[0].dtype for call in faster] == [torch.float32, torch.bfloat16]
        with pytest.raises(UnsupportedError, match="transform"):
            torch.func.vmap(lambda x: sage_attention(x, key, value))(query[None])
        with forward_ad.dual_level(), pytest.raises(UnsupportedError, match="derivative"):
            sage_attention(forward_ad.make_dual(query, query), key, value)

    def test_only_so_many_kinds_are_remembered(self, monkeypatch):
        monkeypatch.setattr(api, "_MAX_KINDS", 2)
        for tokens in range(1, 9):
            sage_attention(*[x[:, :, :tokens] for x in self.operands()])
        assert len(api._LEFT_TO_PYTORCH) <= 2

    def test_scopes_do_not_intercept_it(self):
        operands = self.operands()
        with use_sage_attention():
            out = F.scaled_dot_product_attention(*operands)
        assert torch.equal(out, F.scaled_dot_product_attention(*operands))

    def test_gradients_are_pytorchs(self, faster):
        operands = [x.requires_grad_() for x in self.operands(torch.float32)]
        sage_attention(*operands).square().sum().backward()
        assert faster[0][5] is True
        assert all(x.grad is not None for x in operands)

    def test_is_said_once_and_counted(self, caplog, no_fallbacks_yet):
        for _ in range(3):
            sage_attention(*self.operands())
        assert dict(fallbacks) == {"PyTorch's attention is faster on this cpu device": 3}
        assert len([record for record in caplog.records if "'auto' takes it" in record.getMessage()]) == 1

    def test_arguments_are_checked_as_ever(self):
        query, key, value = self.operands()
        with pytest.raises(QFrameworkError, match="key must have query's head dimension 16, got 8"):
            sage_attention(query, key[..., :8], value)

    @pytest.mark.parametrize("given", [{"variant": "sage_b"}, {"return_lse": True}])
    def test_variants_and_sums_are_not(self, given, faster):
        sage_attention(*self.operands(), **given)
        assert not faster
