"""One head of keys and values that broadcasts to all heads of the query (Falcon) is grouped-query attention."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from attention_models import compiled, error_bound, exported, product, qkv
from torch import Tensor, nn

import qframework
from qframework.numerics import sqnr_db
from qframework.quantizer import QuantizationConfig, static_attention

SCALE = 16**-0.5


class Fused(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


class SpelledOut(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (product(q, k) * SCALE).softmax(-1) @ v


def operands(tokens: int = 17) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv(heads=4, tokens=tokens)
    return q, k[:, :1].contiguous(), v[:, :1].contiguous()


@pytest.mark.parametrize("dialect", ["functional", "aten"])
@pytest.mark.parametrize("kind", [Fused, SpelledOut])
def test_a_head_that_broadcasts_is_one_group(kind: type[nn.Module], dialect: str) -> None:
    q, k, v = operands()
    expected = kind()(q, k, v)
    out, capture = compiled(exported(kind(), q, k, v) if dialect == "aten" else kind(), q, k, v)
    assert [call["enable_gqa"] for call in capture.calls] == [True], capture.attention
    assert (out - expected).abs().max() < error_bound(q, k, v, SCALE)
    assert "expand" not in capture.names()


@pytest.mark.parametrize("one", ["key", "value"])
def test_one_operand_alone_is_no_group(one: str) -> None:
    q, k, v = qkv()
    k, v = (k[:, :1], v) if one == "key" else (k, v[:, :1])
    out, capture = compiled(SpelledOut(), q, k, v)
    (report,) = capture.attention
    assert "does not fit logits" in report.reason
    torch.testing.assert_close(out, SpelledOut()(q, k, v))


def test_a_single_head_is_no_group() -> None:
    _, capture = compiled(Fused(), *qkv(heads=1))
    assert [call["enable_gqa"] for call in capture.calls] == [False]


class SharedHead(nn.Module):
    """Multi-query attention with projections."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.attend, self.query, self.pair, self.out = kind(), nn.Linear(64, 64), nn.Linear(64, 32), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        q = self.query(x).unflatten(-1, (4, 16)).transpose(1, 2)
        k, v = self.pair(x)[:, None].chunk(2, -1)
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("kind", [Fused, SpelledOut])
def test_static_attention_of_a_shared_head(kind: type[nn.Module]) -> None:
    """It failed to compile."""
    torch.manual_seed(0)
    model, x = SharedHead(kind).eval(), torch.randn(2, 17, 64) * 3
    config = QuantizationConfig(linear=None, attention=static_attention())
    quantized = qframework.quantize(model, x, config, [x])
    assert quantized.explain().attention_lowered == 1
    with torch.no_grad():
        out = torch.compile(quantized, backend="qframework")(x)
    assert sqnr_db(model(x), out) > 25
