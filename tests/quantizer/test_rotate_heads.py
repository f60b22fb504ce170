"""Rotation of queries and keys, head by head: the same function, smaller errors, and attention that is left alone."""

from __future__ import annotations

import pytest
import torch
from quantizer_models import exported
from torch import Tensor, nn
from torch.nn import functional as F
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

from qframework.numerics import sqnr_db
from qframework.quantizer import (
    QFrameworkQuantizer,
    QuantizationConfig,
    Recipe,
    calibrate,
    dynamic_attention,
    static_attention,
)
from qframework.quantizer.rotate_heads import rotate_heads

HEADS, WIDTH, DIM, OUTLIER = 2, 16, 24, 8


class Fused(nn.Module):
    """Attention behind one linear for queries, keys and values, of which a few channels stand out."""

    key_heads = HEADS

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(DIM, (HEADS + 2 * self.key_heads) * WIDTH)
        self.proj = nn.Linear(HEADS * WIDTH, DIM)
        with torch.no_grad():
            self.qkv.weight[3] *= OUTLIER  # a query channel of the first head
            self.qkv.weight[HEADS * WIDTH + 5] *= OUTLIER  # a key channel

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        split = self.qkv(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2)
        query, key, value = split.split([HEADS, self.key_heads, self.key_heads], 1)
        return query, key, value

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.operands(x)
        y = F.scaled_dot_product_attention(query, key, value, enable_gqa=self.key_heads < HEADS)
        return self.proj(y.transpose(1, 2).flatten(2))


class Grouped(Fused):
    """All heads of queries share one of keys."""

    key_heads = 1


class Separate(Fused):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(DIM, HEADS * WIDTH, bias=False) for _ in range(3))
        with torch.no_grad():
            self.query.weight[3] *= OUTLIER
            self.key.weight[5] *= OUTLIER

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a, b, c = (f(x).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for f in (self.query, self.key, self.value))
        return a, b, c


class Rotary(Fused):
    """Something between the linear and attention that depends on channels."""

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = super().operands(x)
        factor = torch.linspace(0.5, 1, WIDTH)
        return query * factor, key * factor, value


class KeysAreRead(Fused):
    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = super().operands(x)
        return query, key, value + key.mean()


class KeysAreValues(Separate):
    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, _ = super().operands(x)
        return query, key, key


def data() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 9, DIM, generator=generator) for _ in range(3)]


def quantizer(attention=None) -> QFrameworkQuantizer:
    return QFrameworkQuantizer().set_global(QuantizationConfig(None, attention or static_attention("per_head")))


@pytest.mark.parametrize(("kind", "gain"), [(Fused, 1), (Grouped, 0.3), (Separate, 1)])  # values stay as they are
def test_the_function_stays_and_static_attention_gains(kind: type[nn.Module], gain: float) -> None:
    model = kind().eval()
    x = data()[1]
    errors = {}
    for flag in (False, True):
        graph = exported(model, data()[0])
        done = Recipe(rotate_heads=flag).before_prepare(graph, quantizer(), data())
        assert sqnr_db(model(x), graph(x)) > 100
        if flag:
            ((error),) = done["rotate_heads"].values()
            assert error < 0.5
        prepared = prepare_pt2e(graph, quantizer())
        calibrate(prepared, data())
        errors[flag] = sqnr_db(model(x), convert_pt2e(prepared)(x))
    assert errors[True] > errors[False] + gain


def test_only_rows_of_queries_and_keys_change() -> None:
    model = Fused().eval()
    graph = exported(model, data()[0])
    before = model.qkv.weight.detach().clone()
    assert rotate_heads(graph, quantizer(), data())
    after = graph.get_parameter("qkv.weight").detach()
    rows = [weight[: 2 * HEADS * WIDTH].double().reshape(2, HEADS, WIDTH, DIM) for weight in (before, after)]
    queries, keys = (torch.linalg.lstsq(old.mT, new.mT).solution for old, new in zip(*rows, strict=True))
    for head in range(HEADS):  # inverse to each other, and no rotation
        torch.testing.assert_close(
            queries[head] @ keys[head].mT, torch.eye(WIDTH, dtype=torch.double), rtol=0, atol=1e-4
        )
        assert float((queries[head] - keys[head]).abs().amax()) > 0.01
    values = slice(2 * HEADS * WIDTH, None)
    assert torch.equal(after[values], before[values])
    assert torch.equal(model.qkv.weight, before)  # the original model keeps its own


@pytest.mark.parametrize("kind", [Rotary, KeysAreRead, KeysAreValues])
def test_attention_that_cannot_be_turned_is_left(kind: type[nn.Module]) -> None:
    model = kind().eval()
    graph = exported(model, data()[0])
    assert rotate_heads(graph, quantizer(), data()) == {}
    assert torch.equal(graph(data()[1]), model(data()[1]))


def test_attention_that_gains_nothing_or_is_not_static_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    flipped = torch.eye(WIDTH, dtype=torch.double).flip(0).expand(HEADS, -1, -1)  # gains nothing
    with monkeypatch.context() as patched:
        patched.setattr("qframework.quantizer.rotate_heads.head_bases", lambda query, key: flipped)
        assert rotate_heads(exported(Fused().eval(), data()[0]), quantizer(), data()) == {}
    graph = exported(Fused().eval(), data()[0])
    assert rotate_heads(graph, quantizer(dynamic_attention("sage_b")), data()) == {}
    assert rotate_heads(graph, QFrameworkQuantizer(), data()) == {}
