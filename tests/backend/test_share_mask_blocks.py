"""Layers that attend with one mask share its blocks (share_mask_blocks.py)."""

from __future__ import annotations

import importlib.util

import pytest
import torch
import torch.nn.functional as F
from attention_models import SAGE, Capture, compiled, randomize

from qframework import sage_attention
from qframework.backend import lower_attention, share_mask_blocks
from qframework.graph.nodes import is_sage_attention
from qframework.kernels.attention.auto import Hopper
from qframework.kernels.attention.hopper import specialized
from qframework.numerics import sqnr_db

MASK_BLOCKS = torch.ops.qframework.mask_blocks.default
MASKED = torch.ops.qframework.masked_attention.default


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch):
    """A chip with few multiprocessors, so that small calls fill it."""
    for module in (lower_attention, share_mask_blocks):
        monkeypatch.setattr(module, "hopper_of", lambda device: Hopper(2, True))
    monkeypatch.setattr(lower_attention, "_why_not", lambda option, device: None)
    monkeypatch.setattr(specialized, "HAS_GLUON", True)


def operands(tokens: int = 400, dtype=torch.half):
    q, k, v = torch.randn(3, 2, 4, tokens, 64, dtype=dtype)
    keep = torch.arange(tokens) < torch.tensor([tokens, tokens // 3])[:, None]
    return q, k, v, keep


def layers(q, k, v, keep):
    mask = keep[:, None, None, :].expand(-1, 1, q.shape[2], -1)
    for _ in range(3):
        q = F.scaled_dot_product_attention(q, k, v, mask)
    return q


def targets(capture: Capture) -> list[object]:
    kinds = (MASK_BLOCKS, MASKED, SAGE)
    return [node.target for node in capture.graphs[-1].graph.nodes if node.target in kinds]


def test_the_blocks_are_found_once() -> None:
    given = operands()
    out, capture = compiled(layers, *given, attention="sage")
    assert targets(capture) == [MASK_BLOCKS, MASKED, MASKED, MASKED]
    assert sqnr_db(layers(*(x.float() if x.is_floating_point() else x for x in given)), out.float()) > 30
    (blocks,) = [node for node in capture.graphs[-1].graph.nodes if node.target is MASK_BLOCKS]
    assert blocks.args[1:] == ([2, 1, 1], 400, 400, False, 0)


@pytest.mark.parametrize("exported", [False, True])
def test_calls_that_a_model_makes_itself(exported: bool) -> None:
    class Layers(torch.nn.Module):
        def forward(self, q, k, v, keep):
            mask = keep[:, None, None, :]
            q = sage_attention(q, k, v, mask, variant="integer_exp")
            return torch.ops.qframework.sage_attention(q, k, v, attn_mask=mask, variant="integer_exp")[0]

    given = operands(512)
    model = torch.export.export(Layers(), given).module() if exported else Layers()
    out, capture = compiled(model, *given, attention="off")
    assert targets(capture) == [MASK_BLOCKS, MASKED, MASKED]
    torch.testing.assert_close(out, Layers()(*given))


@pytest.mark.parametrize(("variant", "sharing"), [("unquantized", True), ("integer_exp", True), ("sage2_int8", False)])
def test_the_log_sum_exp_comes_with_it(variant: str, sharing: bool) -> None:
    """Hopper's kernels store it beside values in 16 bit. No pass before them reads the keys that are seen."""

    def both(q, k, v, keep):
        mask = keep[:, None, None, :]
        sums = []
        for _ in range(2):
            q, lse = sage_attention(q, k, v, mask, variant=variant, return_lse=True)
            sums.append(lse)
        return q, *sums

    given = operands(512)
    found, capture = compiled(both, *given, attention="off")
    assert targets(capture) == [MASK_BLOCKS, MASKED, MASKED] * sharing
    blocks = [node.args[5] for node in capture.graphs[-1].graph.nodes if node.target is MASK_BLOCKS]
    assert blocks == [0] * sharing
    torch.testing.assert_close(found, both(*given))


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_layers_beside_sinks(softcap: float | None) -> None:
    sinks = torch.tensor([-1.0, 3.0, 0.5, 8.0])

    def both(q, k, v, keep, sinks):
        mask = keep[:, None, None, :]
        for _ in range(2):
            q = sage_attention(q, k, v, mask, variant="unquantized", sinks=sinks, softcap=softcap)
        return q

    given = operands(512)
    out, capture = compiled(both, *given, sinks, attention="off")
    assert targets(capture) == [MASK_BLOCKS, MASKED, MASKED]
    torch.testing.assert_close(out, both(*given, sinks))
    assert sqnr_db(both(*given, sinks.flip(0)).float(), out.float()) < 20


@pytest.mark.parametrize(("variant", "sharing"), [("unquantized", True), ("integer_exp", False)])
def test_soft_caps(variant: str, sharing: bool) -> None:
    """Hopper's kernel caps logits of floats."""

    def both(q, k, v, keep):
        mask = keep[:, None, None, :]
        for _ in range(2):
            q = sage_attention(q, k, v, mask, variant=variant, softcap=1.0)
        return q

    given = operands(512)
    out, capture = compiled(both, *given, attention="off")
    kept = list(filter(is_sage_attention, capture.graphs[-1].graph.nodes))
    assert (targets(capture), len(kept)) == (([MASK_BLOCKS, MASKED, MASKED], 0) if sharing else ([], 2))
    torch.testing.assert_close(out, both(*given))
    uncapped = sage_attention(*given[:3], given[3][:, None, None, :])
    assert sqnr_db(uncapped.float(), out.float()) < 20


def test_one_layer_alone_finds_its_own() -> None:
    def one(q, k, v, keep):
        return F.scaled_dot_product_attention(q, k, v, keep[:, None, None, :])

    assert targets(compiled(one, *operands(), attention="sage")[1]) == [SAGE]


def two_masks(q, k, v, keep):
    for _ in range(2):
        q = F.scaled_dot_product_attention(q, k, v, keep[:, None, None, :] & True)
    return q


def changed(q, k, v, keep):
    mask = keep[:, None, None, :] & keep[:, None, :, None]
    q = F.scaled_dot_product_attention(q, k, v, mask)
    mask[:, :, :, 3] = True
    return F.scaled_dot_product_attention(q, k, v, mask)


def of_floats(q, k, v, keep):
    mask = torch.zeros_like(keep, dtype=q.dtype).masked_fill(keep, -1.0)[:, None, None]
    for _ in range(2):
        q = F.scaled_dot_product_attention(q, k, v, mask)
    return q


@pytest.mark.parametrize("fn", [two_masks, changed, of_floats])
def test_other_masks_are_not_shared(fn) -> None:
    assert targets(compiled(fn, *operands(), attention="sage")[1]) == [SAGE, SAGE]


@pytest.mark.parametrize(
    ("given", "attention"),
    [(operands(128), "sage"), (operands(400, torch.float32), "sage"), (operands(), "sage_t"), (operands(), "sage_b")],
    ids=["short", "float32", "per token", "fp16 sums"],
)
def test_kernels_that_read_no_blocks_get_none(given, attention: str) -> None:
    assert targets(compiled(layers, *given, attention=attention)[1]) == [SAGE, SAGE, SAGE]


def test_quantized_keys_are_read_where_they_are_seen() -> None:
    _, capture = compiled(layers, *operands(512), attention="integer_exp")
    (blocks,) = [node for node in capture.graphs[-1].graph.nodes if node.target is MASK_BLOCKS]
    assert blocks.args[5] == 4


def test_gradients_keep_the_operator_that_has_them() -> None:
    q, k, v, keep = operands(512)
    capture = Capture("integer_exp")
    torch.compile(layers, backend=capture)(q.requires_grad_(), k, v, keep)
    assert targets(capture) == [SAGE, SAGE, SAGE]


def test_not_on_other_chips(monkeypatch) -> None:
    monkeypatch.setattr(share_mask_blocks, "hopper_of", lambda device: None)
    assert targets(compiled(layers, *operands(), attention="sage")[1]) == [SAGE, SAGE, SAGE]


def test_with_inductor() -> None:
    given = operands()
    with torch.no_grad():
        out = torch.compile(layers, backend="qframework", options={"attention": "sage"})(*given)
        assert sqnr_db(layers(*given).float(), out.float()) > 30


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_padded_texts_of_transformers() -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=128, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64,
        attn_implementation="sdpa",
    )  # fmt: skip
    model = randomize(transformers.BertModel(config)).half()
    ids = torch.randint(0, 50, (2, 400))
    kept = (torch.arange(400) < torch.tensor([[400], [150]])).long()
    capture = Capture("sage")
    with torch.no_grad():
        out = torch.compile(model, backend=capture)(ids, kept).last_hidden_state
        expected = model(ids, kept).last_hidden_state
    assert targets(capture) == [MASK_BLOCKS, MASKED, MASKED, MASKED]
    assert sqnr_db(expected[kept.bool()].float(), out[kept.bool()].float()) > 25
