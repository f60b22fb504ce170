"""transformers.py: models that cap their logits, against the same models with eager attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attention_helpers import Operators
from torch import nn

pytest.importorskip("transformers")

from softcap_models import CAP, FAMILIES, TEXT, model_of

from qframework.attention import fallbacks, left_to_pytorch
from qframework.attention.transformers import attention_function, register
from qframework.kernels.attention.auto import pytorch_is_faster
from qframework.numerics import sqnr_db


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch, auto_is_a_variant: None) -> Iterator[None]:
    register()
    register("qframework_sage_b", variant="sage_b")
    monkeypatch.setattr(left_to_pytorch, "pytorch_is_faster", pytorch_is_faster)
    fallbacks.clear()
    yield
    fallbacks.clear()


def run(family: str, implementation: str, changes: dict[str, Any] | None = None) -> torch.Tensor:
    model, inputs, counted, _ = model_of(family, implementation)
    for module in model.modules():
        if hasattr(module, "attn_logit_softcapping") and changes:
            module.attn_logit_softcapping = changes["softcap"]
    with torch.no_grad():
        return model(**inputs).last_hidden_state[counted]


@pytest.mark.parametrize("family", FAMILIES)
def test_models_with_a_cap(family: str) -> None:
    """A variant in every layer, with the cap; "auto" on a CPU is plain torch and exact."""
    eager = run(family, "eager")
    with Operators() as operators:
        out = run(family, "qframework_sage_b")
    assert operators.count() >= model_of(family)[3]
    assert sqnr_db(eager, out) > 25
    assert sqnr_db(eager, run(family, "qframework")) > 90
    assert sqnr_db(eager, run(family, "eager", {"softcap": None})) < 15


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("implementation", ["qframework", "qframework_sage_b"])
def test_compiled_without_a_break(implementation: str) -> None:
    model, inputs, _, _ = model_of("Gemma2", implementation)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        expected = model(**inputs).last_hidden_state
        torch.testing.assert_close(compiled(**inputs).last_hidden_state, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("implementation", ["qframework", "qframework_sage_b"])
def test_training(implementation: str) -> None:
    """The gradient of exact attention with the cap."""
    found = []
    for name in (implementation, "eager"):
        model, inputs, counted, _ = model_of("Gemma2", name)
        out = model.train()(**inputs).last_hidden_state[counted]
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    assert sqnr_db(found[1], found[0]) > (12 if "sage" in implementation else 90)


def causal_lm(implementation: str) -> nn.Module:
    import transformers

    _, _, _, _ = model_of("Gemma2")
    config = transformers.Gemma2Config(**TEXT, attn_implementation=implementation)
    model = transformers.Gemma2ForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise * 1.5 / parameter.shape[-1] ** 0.5)
    return model


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generating(cache: str) -> None:
    tokens = torch.randint(3, 40, (2, 12), generator=torch.Generator().manual_seed(0))
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "use_cache": True,
                "cache_implementation": cache, "disable_compile": True}  # fmt: skip
    settings |= {"return_dict_in_generate": True, "output_logits": True}
    expected, actual = (causal_lm(name).generate(tokens, **settings) for name in ("eager", "qframework"))
    assert torch.equal(actual.sequences, expected.sequences)
    assert sqnr_db(torch.stack(expected.logits), torch.stack(actual.logits)) > 80


@torch.no_grad()
@pytest.mark.parametrize("reason", ["dropout", "dtype torch.float64"])
def test_calls_that_fall_back_keep_their_cap(reason: str) -> None:
    """To plain torch: PyTorch's attention takes none."""
    q, k, v = 3 * torch.randn(3, 1, 2, 30, 16, dtype=torch.float64 if "64" in reason else torch.float32)
    attend, dropout = attention_function("sage_b", True), 0.2 if reason == "dropout" else 0.0
    logits = CAP * torch.tanh(q @ k.mT / 4 / CAP)
    weights = logits.masked_fill(torch.ones(30, 30, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
    torch.manual_seed(0)
    expected = (torch.dropout(weights, dropout, dropout > 0) @ v).transpose(1, 2)
    torch.manual_seed(0)
    actual, _ = attend(nn.Module(), q, k, v, None, dropout=dropout, softcap=CAP)
    torch.testing.assert_close(actual, expected)
    assert fallbacks == {reason: 1}
