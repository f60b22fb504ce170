"""rope.py and rotation.py against NumPy in float64, on the CPU and in Triton, and as operands of attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracle import UNIT, assert_int8_close, numpy64

import qframework.kernels as kernels
from qframework.errors import QFrameworkError, UnsupportedError
from qframework.kernels.attention.operands import LOG2_E, Bias, QuantizedQK
from qframework.kernels.attention.pipeline import SAGE_ATTENTION, TRITON_STEPS, quantized_values
from qframework.kernels.attention.quantize_qk import ATTENTION_QUANTIZE
from qframework.kernels.attention.quantized_attention import quantized_attention_triton
from qframework.kernels.attention.rope import ROPE_MEAN, ROPE_QUANTIZE
from qframework.kernels.attention.rotation import rope_ref
from qframework.kernels.attention.variants import resolve

U32 = UNIT[torch.float32]
GRANULARITIES = ["per_tensor", "per_head", "per_token", "per_block", "per_warp", "per_thread"]
# D, rotary_dim, columns of the tables
ROTATIONS = {
    "transformers": (64, 64, 64),
    "flash": (64, 64, 32),
    "partial": (80, 32, 32),
    "partial_flash": (80, 20, 10),
    "odd_rest": (37, 6, 3),
    "two": (2, 2, 1),
    "wide": (256, 256, 128),  # blocks of queries are read twice
}


def rope_quantize(implementation, *args, **kwargs):
    run = kernels.rope_quantize if implementation == "cpu" else ROPE_QUANTIZE.cuda
    return run(*args, **kwargs)


def rope_mean(implementation, *args, **kwargs):
    return (kernels.rope_mean if implementation == "cpu" else ROPE_MEAN.cuda)(*args, **kwargs)


def problem(rotation, tokens=70, dtype=torch.float16, device="cpu", batch=2, heads=3):
    """x in the memory order of a projection's output, with outlier rows and a row of zeros; angles of every size."""
    channels, _, columns = ROTATIONS[rotation]
    x = torch.randn(batch, tokens, heads, channels)
    x[:, tokens // 2] *= 20
    x[0, 0, 0] = 0
    angle = torch.randn(tokens, columns) * 3
    return x.to(device, dtype).transpose(1, 2), angle.cos().to(device), angle.sin().to(device)


def oracle_rotation(x, cos, sin, interleaved, rotary_dim):
    """The rotated x and the largest error that float32 may make, from each channel's partner by index."""
    x, cos, sin = numpy64(x), numpy64(cos), numpy64(sin)
    half = rotary_dim // 2
    result, error = x.copy(), np.zeros_like(x)
    for pair in range(half):
        a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + half)
        columns = (a, b) if cos.shape[-1] == rotary_dim else (pair, pair)
        for channel, other, sign, column in ((a, b, -1, columns[0]), (b, a, 1, columns[1])):
            own, turned = x[..., channel] * cos[..., column], sign * x[..., other] * sin[..., column]
            result[..., channel] = own + turned
            # two products and a sum, or a product and a fused one: no term is rounded more than twice
            error[..., channel] = 2 * U32 * (np.abs(own) + np.abs(turned))
    return result, error


def group_of(granularity, role, n):
    """The scale of token n by the papers' words, one group after the other."""
    if granularity in ("per_tensor", "per_head"):
        return 0
    if granularity == "per_token":
        return n
    if granularity == "per_block":
        return n // (128 if role == "query" else 64)
    if granularity == "per_warp":
        return n // (32 if role == "query" else 64)
    return (n // 32) * 8 + n % 8 if role == "query" else (n // 64) * 4 + (n % 8) // 2


def check(q, scale, y, error, granularity, role):
    """Scales are each group's largest magnitude over 127, integers the rounded quotients."""
    batch, heads, tokens, _ = y.shape
    group = np.array([group_of(granularity, role, n) for n in range(tokens)])
    amax, slack = np.zeros(scale.shape), np.zeros(scale.shape)
    for g in set(group):
        amax[:, :, g] = np.abs(y[:, :, group == g]).max((2, 3))
        slack[:, :, g] = error[:, :, group == g].max((2, 3))
    if granularity == "per_tensor":
        amax[:], slack[:] = amax.max(), slack.max()
    assert scale.dtype == torch.float32
    assert scale.shape == (batch, heads, 1 if granularity in ("per_tensor", "per_head") else scale.shape[2])
    used = np.isin(np.arange(scale.shape[2]), group)
    exact = np.maximum(amax / 127, 2.0**-60)
    off = np.abs(numpy64(scale) - exact)
    assert (off <= 3 * U32 * exact + slack / 127)[:, :, used].all()
    rows = numpy64(scale)[:, :, group, None]
    assert_int8_close(q, y, error, np.broadcast_to(rows, y.shape))


@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("role", ["query", "key"])
def test_matches_the_oracle(implementation, place, rotation, interleaved, role):
    x, cos, sin = problem(rotation, device=place)
    rotary_dim = ROTATIONS[rotation][1]
    factor = 0.37 if role == "query" else 1.0
    got = rope_quantize(implementation, x, cos, sin, interleaved, factor, "per_thread", role, rotary_dim=rotary_dim)
    y, error = oracle_rotation(x, cos, sin, interleaved, rotary_dim)
    y = y * np.float64(np.float32(factor))
    check(*got, y, error * factor + U32 * np.abs(y), "per_thread", role)


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("role", ["query", "key"])
@pytest.mark.parametrize(("rotation", "tokens"), [("flash", 1), ("flash", 17), ("flash", 200), ("wide", 200)])
def test_every_granularity(implementation, place, granularity, role, rotation, tokens):
    x, cos, sin = problem(rotation, tokens, torch.bfloat16, place, heads=2)
    q, scale = rope_quantize(implementation, x, cos, sin, False, 1.0, granularity, role)
    y, error = oracle_rotation(x, cos, sin, False, x.shape[3])
    check(q, scale, y, error, granularity, role)
    assert scale.shape == kernels.attention_quantize(x.cpu(), None, 1.0, granularity, role)[1].shape


@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.parametrize("per_block", [False, True])
def test_the_mean_is_subtracted_after_the_rotation(implementation, place, interleaved, per_block):
    x, cos, sin = problem("partial", 150, torch.float32, place)
    mean = torch.randn(2, 3, 2 if per_block else 1, 80, device=place)
    q, scale = rope_quantize(implementation, x, cos, sin, interleaved, 0.5, "per_block", "query", mean, 32)
    y, error = oracle_rotation(x, cos, sin, interleaved, 32)
    rows = numpy64(mean).repeat([128, 22], axis=2) if per_block else numpy64(mean)
    error = error + U32 * (np.abs(y) + np.abs(rows))
    check(q, scale, (y - rows) * 0.5, error * 0.5, "per_block", "query")


@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.parametrize("rotation", ["transformers", "partial_flash", "odd_rest"])
@pytest.mark.parametrize("tokens", [1, 300])
def test_mean_of_the_rotated_keys(implementation, place, rotation, interleaved, tokens):
    x, cos, sin = problem(rotation, tokens, device=place)
    rotary_dim = ROTATIONS[rotation][1]
    got = rope_mean(implementation, x, cos, sin, interleaved, rotary_dim)
    rotated, error = oracle_rotation(x, cos, sin, interleaved, rotary_dim)
    assert got.shape == (2, 3, 1, x.shape[3])
    assert got.dtype == torch.float32
    # at most 128 additions in a block and 3 blocks, each rounding a sum of magnitudes once, then the division
    allowed = error.mean(2, keepdims=True) + 132 * U32 * np.abs(rotated).mean(2, keepdims=True)
    assert (np.abs(numpy64(got) - rotated.mean(2, keepdims=True)) <= allowed).all()


def test_every_form_of_the_tables(implementation, place):
    """One table for all, one for each batch entry, with a dimension of heads, expanded, in another dtype, strided."""
    x, cos, sin = problem("flash", device=place)

    def run(cos, sin):
        return rope_quantize(implementation, x, cos, sin, False, 1.0, "per_token", "key")

    expected = run(cos, sin)
    doubled = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
    strided = tuple(torch.stack([table, table], -1)[..., 0] for table in (cos, sin))
    forms = [doubled, strided, (cos[None], sin[None]), (cos[None, None], sin[None, None])]
    forms += [tuple(t.expand(2, 70, 32) for t in (cos, sin)), tuple(t.expand(2, 3, 70, 32) for t in (cos, sin))]
    for form in forms:
        for got, wanted in zip(run(*form), expected, strict=True):
            assert torch.equal(got, wanted)
    other = torch.stack([cos, cos.flip(0)]), torch.stack([sin, sin.flip(0)])
    q, _ = run(*other)
    assert torch.equal(q[0], expected[0][0])
    assert not torch.equal(q[1], expected[0][1])


def test_interleaved_tables_may_differ_within_a_pair(implementation, place):
    """A full-width table is read channel by channel, not assumed to repeat."""
    x, cos, sin = problem("transformers", 20, torch.float32, place)
    for interleaved in (False, True):
        q, scale = rope_quantize(implementation, x, cos, sin, interleaved, 1.0, "per_head", "key")
        check(q, scale, *oracle_rotation(x, cos, sin, interleaved, 64), "per_head", "key")


def test_strides_do_not_matter_and_x_is_left_alone(implementation, place):
    x, cos, sin = problem("flash", device=place)
    before = x.clone()
    expected = rope_quantize(implementation, x.contiguous(), cos, sin, False, 0.3, "per_warp", "query")
    for other in (x, x.transpose(2, 3).contiguous().transpose(2, 3)):
        got = rope_quantize(implementation, other, cos, sin, False, 0.3, "per_warp", "query")
        assert torch.equal(got[0], expected[0])
        assert torch.equal(got[1], expected[1])
    assert torch.equal(x, before)


def test_nan_and_infinity_reach_the_scale(implementation, place):
    x, cos, sin = problem("flash", device=place)
    x[0, 1, 3, 5], x[1, 0, 40, 0] = torch.nan, torch.inf
    _, scale = rope_quantize(implementation, x, cos, sin, False, 1.0, "per_token", "key")
    bad = torch.zeros(2, 3, 70, dtype=torch.bool, device=place)
    bad[0, 1, 3] = bad[1, 0, 40] = True
    assert torch.equal(scale.isnan(), bad)


def test_empty(implementation, place):
    x, cos, sin = problem("flash", 1, device=place)
    q, scale = rope_quantize(implementation, x[:, :, :0], cos[:0], sin[:0], False, 1.0, "per_block", "query")
    assert q.shape == (2, 3, 0, 64)
    assert scale.shape == (2, 3, 1)
    assert rope_mean(implementation, x[:, :, :0], cos[:0], sin[:0]).count_nonzero() == 0


def test_rotation_of_transformers():
    """rope_ref is what transformers computes for Llama (half-split)."""
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    x, cos, sin = problem("flash", dtype=torch.float32)
    cos, sin = torch.cat([cos, cos], -1)[None], torch.cat([sin, sin], -1)[None]
    expected, _ = llama.apply_rotary_pos_emb(x, x, cos, sin)
    torch.testing.assert_close(rope_ref(x, cos, sin), expected, rtol=0, atol=8 * U32 * float(x.abs().max()))


@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.parametrize("name", ["sage_t", "sage_b", "sage_vb", "sage2_int8", "8-per_tensor-fp16-fp32"])
@pytest.mark.parametrize("smooth_k", [False, True])
def test_results_are_operands_of_quantized_attention(implementation, place, interleaved, name, smooth_k):
    """Fused rotation, then quantized attention, is the rotation in float32 followed by sage_attention."""
    _, cos, sin = problem("flash", 150, device=place)
    query, key, value = torch.randn(3, 1, 2, 150, 64, device=place).unbind()
    key = key + 4 * torch.randn(1, 2, 1, 64, device=place)  # a bias of each channel, which rotates
    variant, scale = resolve(name), 64**-0.5
    mean = rope_mean(implementation, key, cos, sin, interleaved) if smooth_k else None
    queries = (query, None, scale * LOG2_E, variant.granularity, "query")
    keys = (key, mean, 1.0, variant.granularity, "key")
    fused, apart = [], []
    for x, x_mean, factor, *groups in (queries, keys):
        fused += rope_quantize(implementation, x, cos, sin, interleaved, factor, *groups, x_mean)
        rotated = rope_ref(x, cos, sin, interleaved)
        quantize = kernels.attention_quantize if implementation == "cpu" else ATTENTION_QUANTIZE.cuda
        apart += quantize(rotated, x_mean, factor, *groups)
    for got, wanted in zip(fused[::2], apart[::2], strict=True):
        flips = (got.int() - wanted.int()).abs()
        assert flips.max() <= 1
        assert flips.float().mean() < 2e-4, "the last bit of float32 moves an integer only at a tie"
    rotated = [rope_ref(x, cos, sin, interleaved) for x in (query, key)]
    if implementation == "cpu":
        values = values_of(value, variant)
        got, _ = kernels.quantized_attention(*fused, *values, variant=name, out_dtype=torch.float32)
        expected, _ = torch.ops.qframework.sage_attention(*rotated, value, variant=name, smooth_k=smooth_k)
    else:
        qk = QuantizedQK(*fused, 64)
        values = quantized_values(value, variant, TRITON_STEPS, None)
        got, _ = quantized_attention_triton(qk, values, Bias(), variant, 1.0, torch.float32)
        expected, _ = SAGE_ATTENTION.cuda(*rotated, value, scale=scale, variant=name, smooth_k=smooth_k)
    exact = torch.nn.functional.scaled_dot_product_attention(*(x.double() for x in (*rotated, value)))
    quantization = (expected - exact).square().mean().sqrt()
    # Rounding has a variance of 1/12 step squared everywhere, a flip adds 1 for a 2e-4 of the integers: 5 percent.
    # The mean of the keys is summed in another order, which flips a few more.
    assert (got - expected).square().mean().sqrt() < 0.1 * quantization


def values_of(value, variant):
    """V as quantized_attention takes it, and its scale."""
    if variant.pv == "fp16":
        return value, None
    return kernels.value_quantize(value, variant.pv, 127.0 if variant.pv == "int8" else 448.0)[:2]


def bad_calls():
    x, cos, sin = problem("flash")
    whole = (False, 1.0, "per_block", "query")
    yield "rank", (x[0], cos, sin, *whole), UnsupportedError, r"x must have shape \(B, H, N, D\), got \(3, 70, 64\)"
    yield "dtype", (x.double(), cos, sin, *whole), UnsupportedError, "x must have dtype float32, .*, got torch.float64"
    yield "tables", (x, cos, sin[:-1], *whole), QFrameworkError, "cos and sin must have the same shape"
    yield "tokens", (x, cos[1:], sin[1:], *whole), QFrameworkError, r"cos must have shape \(N, W\).*N = 70"
    yield (
        "width",
        (x, cos[:, :7], sin[:, :7], *whole),
        QFrameworkError,
        "rotary_dim must be given .* 7 or 14",
    )
    yield (
        "rotary_dim",
        (x, cos, sin, *whole, None, 48),
        QFrameworkError,
        "rotary_dim must be .* 32 columns .*, got 48",
    )
    yield "too wide", (x, cos, sin, *whole, None, 66), QFrameworkError, "must be even, at most 64 .*, got 66"
    mean = torch.zeros(2, 3, 5, 64)
    yield "mean", (x, cos, sin, *whole, mean), QFrameworkError, r"mean must have shape .*, got \(2, 3, 5, 64\)"
    yield (
        "mean dtype",
        (x, cos, sin, *whole, mean.half()),
        UnsupportedError,
        "mean must have dtype float32",
    )
    yield "granularity", (x, cos, sin, False, 1.0, "per_row", "query"), UnsupportedError, "got 'per_row' and 'query'"
    yield "role", (x, cos, sin, False, 1.0, "per_block", "value"), UnsupportedError, "got 'per_block' and 'value'"


@pytest.mark.parametrize(("arguments", "error", "message"), [pytest.param(*case, id=i) for i, *case in bad_calls()])
def test_errors_name_the_argument(arguments, error, message):
    with pytest.raises(error, match=message):
        kernels.rope_quantize(*arguments)


def test_backward_raises_an_error():
    x, cos, sin = problem("flash", dtype=torch.float32)
    x = x.detach().requires_grad_()
    for result in (
        kernels.rope_mean(x, cos, sin),
        kernels.rope_quantize(x, cos, sin, False, 1.0, "per_head", "key")[1],
    ):
        with pytest.raises(QFrameworkError, match="rope_quantize and rope_mean: inference only"):
            result.sum().backward()


@pytest.mark.parametrize("interleaved", [False, True])
def test_opcheck(interleaved):
    x, cos, sin = problem("partial", 33, torch.float32)
    mean = torch.randn(2, 3, 1, 80)
    for granularity in ("per_tensor", "per_thread"):
        arguments = (x, cos, sin, interleaved, 0.5, granularity, "key", mean, 32)
        torch.library.opcheck(torch.ops.qframework.rope_quantize.default, arguments)
    torch.library.opcheck(torch.ops.qframework.rope_mean.default, (x, cos, sin, interleaved, 32))


def test_compiles_in_one_graph(fresh_dynamo):
    x, cos, sin = problem("flash", dtype=torch.float32)

    def keys(x, cos, sin):
        mean = kernels.rope_mean(x, cos, sin)
        return kernels.rope_quantize(x, cos, sin, False, 1.0, "per_warp", "key", mean)

    compiled = torch.compile(keys, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (70, 50, 64):
        for got, expected in zip(
            compiled(x[:, :, :tokens], cos[:tokens], sin[:tokens]),
            keys(x[:, :, :tokens], cos[:tokens], sin[:tokens]),
            strict=True,
        ):
            assert torch.equal(got, expected)
            assert got.stride() == expected.stride()
