"""The operator that replaces an attention: shapes, masks, strides (write.py and replace.py of graph/attention/)."""

from __future__ import annotations

import pytest
import torch
from attention_models import compiled, error_bound, product, qkv, sage

SCALE = 16**-0.5
BIAS = torch.randn(2, 17, 17)
CAUSAL = torch.ones(17, 17, dtype=torch.bool).tril()
LOW = torch.finfo(torch.float32).min
LAST = torch.arange(17) < 3  # rows that see nothing
# Every key of the last rows is filled, so softmax weighs all keys equally, for any logits and any fill.
FILLS = {
    "lowest": lambda s: s.masked_fill(~LAST[:, None], LOW),
    "lowest of float16": lambda s: s.masked_fill(~LAST[:, None], -65504.0),
    "-1e4": lambda s: s.masked_fill(~LAST[:, None], -1e4),
    "biased": lambda s: (s + BIAS.to(s.dtype)).masked_fill(~LAST[:, None], -1e9),
    "twice": lambda s: s.masked_fill(~LAST[:, None], LOW).masked_fill(~CAUSAL, LOW),
    "where": lambda s: torch.where(LAST[:, None], s, torch.finfo(s.dtype).min),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FILLS)
def test_rows_that_are_filled_everywhere_have_equal_weights(name, dtype):
    if dtype == torch.float16 and name == "biased":
        name = "-1e4"  # float16 has no -1e9
    fill = FILLS[name] if dtype != torch.float16 or name != "lowest" else FILLS["where"]
    q, k, v = (x.to(dtype) for x in qkv())

    def attend(q, k, v):
        return fill(product(q, k) * SCALE).softmax(-1) @ v

    out, capture = compiled(attend, q, k, v)
    assert len(capture.calls) == 1, capture.attention
    rounding = {torch.float32: 2.0**-12, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}[dtype]
    expected = v.float().mean(2, keepdim=True)
    assert (out[:, :, 3:].float() - expected).abs().max() <= 2 * rounding * v.abs().max()


@pytest.mark.parametrize("batch", [1, 4])
def test_windows_keep_their_masks(batch):
    """Swin: the mask of each window is added in a view of the logits."""
    windows = 3
    q, k, v = qkv(batch * windows)
    mask = torch.randn(windows, 17, 17)

    def attend(q, k, v):
        logits = product(q * SCALE, k) + BIAS.unsqueeze(0)
        logits = logits.view(-1, windows, 2, 17, 17) + mask.unsqueeze(1).unsqueeze(0)
        return logits.view(-1, 2, 17, 17).softmax(-1) @ v

    out, capture = compiled(attend, q, k, v)
    assert capture.calls[0]["attn_mask"].meta["example_value"].shape == (1, windows, 2, 17, 17)
    assert (out - attend(q, k, v)).abs().max() < error_bound(q, k, v, SCALE)


def test_half_precision_with_softmax_in_float32():
    q, k, v = (x.half() for x in qkv())
    out, capture = compiled(lambda q, k, v: (product(q, k) * SCALE).float().softmax(-1).to(v.dtype) @ v, q, k, v)
    assert out.dtype == torch.float16
    assert (out - sage(q, k, v)).abs().max() < 2**-9 * v.abs().max()
    assert len(capture.calls) == 1


def test_views_of_the_result_that_need_its_old_strides():
    q, k, v = qkv()
    out, capture = compiled(lambda q, k, v: (product(q, k).softmax(-1) @ v).view(-1, 17 * 16), q, k, v)
    assert len(capture.calls) == 1
    torch.testing.assert_close(out, sage(q, k, v, scale=1.0).reshape(-1, 17 * 16))


def test_no_copy_where_the_heads_are_merged():
    q, k, v = qkv()
    _, capture = compiled(lambda q, k, v: (product(q, k).softmax(-1) @ v).transpose(1, 2).reshape(-1, 17, 32), q, k, v)
    assert "contiguous" not in capture.names()
