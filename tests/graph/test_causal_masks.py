"""Masks that are causal whatever the inputs become the flag (causal_masks.py)."""

from __future__ import annotations

import importlib.util

import pytest
import torch
import torch.nn.functional as F
from attention_models import Capture, compiled, error_bound, product, qkv, randomize
from test_index_values import CAUSAL_MASKS, float_mask, transformers_mask

from qframework import sage_attention
from qframework.graph.nodes import argument, is_sage_attention
from qframework.numerics import sqnr_db

N = 17
SDPA = "scaled_dot_product_attention"


def sdpa_calls(capture: Capture) -> list[tuple[object, bool]]:
    """Mask and flag of each call that was left to PyTorch."""
    nodes = [node for node in capture.graphs[-1].graph.nodes if getattr(node.target, "__name__", "") == SDPA]
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    calls = [{**dict(zip(names, node.args, strict=False)), **node.kwargs} for node in nodes]
    return [(call.get("attn_mask"), call.get("is_causal", False)) for call in calls]


MASKS = {
    **{name: mask for name, mask in CAUSAL_MASKS.items() if name not in ("either", "transformers")},
    "transformers": lambda n: transformers_mask(n, 2),
    "added": lambda n: torch.zeros(n, n).masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf),
    "added where": lambda n: torch.where(transformers_mask(n, 2), 0.0, torch.finfo(torch.float32).min),
    "older transformers": lambda n: float_mask(n).float(),
    "a window as long as the text": lambda n: transformers_mask(n, 2, window=n),  # Mistral with a short prompt
}


@pytest.mark.sample(1 / 2)
@pytest.mark.parametrize("option", ["off", "8-per_token-fp16-fp32"])
@pytest.mark.parametrize("form", MASKS)
def test_sdpa_gets_the_flag(form: str, option: str) -> None:
    q, k, v = qkv()

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, MASKS[form](q.shape[2]), 0.0)

    out, capture = compiled(attend, q, k, v, attention=option)
    if option == "off":
        assert sdpa_calls(capture) == [(None, True)]
        torch.testing.assert_close(out, attend(q, k, v))
    else:
        assert [(call["attn_mask"], call["is_causal"]) for call in capture.calls] == [(None, True)]
        assert (out - attend(q, k, v)).abs().max() < error_bound(q, k, v, q.shape[-1] ** -0.5)
    assert not any(name in capture.names() for name in ("arange", "ones", "tril", "full"))


@pytest.mark.parametrize("training", [False, True])
def test_scopes_of_autocast_write_no_mask(training: bool) -> None:
    """Rotary embeddings of transformers switch autocast off between the mask and its attention."""
    q, k, v = (x.requires_grad_(training) for x in qkv())

    def attend(q, k, v):
        mask = transformers_mask(q.shape[2], 2)
        with torch.autocast("cpu", enabled=False):
            q = q * 1.5
        return F.scaled_dot_product_attention(q, k, v, mask)

    capture = Capture("off")
    with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(training):
        out, expected = torch.compile(attend, backend=capture, fullgraph=True)(q, k, v), attend(q, k, v)
    assert "enter_autocast" in capture.names()
    assert sdpa_calls(capture) == [(None, True)]
    torch.testing.assert_close(out, expected, rtol=0.02, atol=0.02)
    if training:
        found, wanted = (torch.autograd.grad(y.float().sum(), (q, k, v)) for y in (out, expected))
        torch.testing.assert_close(found, wanted, rtol=0.05, atol=0.05)


def padding(x):
    return (x[:, 0, :, 0] > 0)[:, None, None]


OTHERS = {
    "window": lambda q, n: transformers_mask(n, 2, window=3),
    "a window that hides one key": lambda q, n: transformers_mask(n, 2, window=n - 1),
    "strict": lambda q, n: torch.arange(n)[:, None].gt(torch.arange(n) - 2),
    "later queries": lambda q, n: torch.ones(n, n, dtype=torch.bool).tril(2),
    "padding": lambda q, n: transformers_mask(n, 2) & padding(q),
    "a weak bias": lambda q, n: torch.full((n, n), -5.0).triu(1),
    "a bias": lambda q, n: torch.ones(n, n).tril(),
    "below": lambda q, n: torch.zeros(n, n).masked_fill(torch.ones(n, n, dtype=torch.bool).tril(-1), -torch.inf),
}


@pytest.mark.parametrize("form", OTHERS)
def test_other_masks_stay(form: str) -> None:
    q, k, v = qkv()

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, OTHERS[form](q, q.shape[2]))

    out, capture = compiled(attend, q, k, v, attention="off")
    ((mask, flag),) = sdpa_calls(capture)
    assert mask is not None
    assert not flag
    torch.testing.assert_close(out, attend(q, k, v))


def test_a_mask_that_hides_nothing_is_dropped() -> None:
    q, k, v = qkv()

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.arange(N)[None] >= torch.zeros(N, 1), scale=0.3)

    assert sdpa_calls(compiled(attend, q, k, v, attention="off")[1])[0][0] is not None  # of floats: unknown

    def attend_all(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=(torch.arange(N) >= 0)[None].expand(N, N), scale=0.3)

    out, capture = compiled(attend_all, q, k, v, attention="off")
    assert sdpa_calls(capture) == [(None, False)]
    torch.testing.assert_close(out, attend_all(q, k, v))


@pytest.mark.parametrize("keys", [9, 30])
def test_other_numbers_of_keys(keys: int) -> None:
    """The flag counts from the first query and the first key, as the masks here do."""
    q, _, _ = qkv()
    k, v = (torch.randn(2, 2, keys, 16) for _ in range(2))

    def attend(q, k, v):
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(q, k, v, mask)

    def from_the_end(q, k, v):
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        return F.scaled_dot_product_attention(q, k, v, mask)

    for function, flag in ((attend, True), (from_the_end, False)):
        torch.compiler.reset()
        out, capture = compiled(function, q, k, v, attention="off")
        assert sdpa_calls(capture)[0][1] == flag
        torch.testing.assert_close(out, function(q, k, v))


def test_a_mask_that_broadcasts_over_queries_stays() -> None:
    """One row of a causal mask hides all keys but one from every query."""
    q, k, v = qkv()

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, torch.ones(N, N, dtype=torch.bool).tril()[3:4])

    out, capture = compiled(attend, q, k, v, attention="off")
    assert sdpa_calls(capture)[0][0] is not None
    torch.testing.assert_close(out, attend(q, k, v))


@pytest.mark.parametrize("form", ["added", "filled", "with a bias"])
def test_spelled_out_attention_gets_the_flag(form: str) -> None:
    q, k, v = qkv()
    bias = torch.randn(1, 2, N, N)

    def attend(q, k, v):
        later = torch.ones(N, N, dtype=torch.bool).triu(1)
        logits = product(q, k) * 0.25
        if form == "filled":
            logits = logits.masked_fill(later, -1e9)
        else:
            logits = logits + torch.zeros(N, N).masked_fill(later, -1e9)
        logits = logits + bias if form == "with a bias" else logits
        return logits.softmax(-1) @ v

    out, capture = compiled(attend, q, k, v)
    (call,) = capture.calls
    assert call["is_causal"]
    assert (call["attn_mask"] is not None) == (form == "with a bias")
    assert (out - attend(q, k, v)).abs().max() < error_bound(q, k, v, 0.25)


def test_calls_of_the_package_get_the_flag() -> None:
    q, k, v = qkv()

    def attend(q, k, v):
        mask = torch.ones(N, N, dtype=torch.bool).tril()
        q = sage_attention(q, k, v, mask, variant="sage_b")
        return torch.ops.qframework.sage_attention(q, k, v, attn_mask=mask, variant="sage_b", smooth_k=False)[0]

    out, capture = compiled(attend, q, k, v, attention="off")
    nodes = [node for node in capture.graphs[-1].graph.nodes if is_sage_attention(node)]
    assert [argument(node, 3, "attn_mask") for node in nodes] == [None, None]
    assert [argument(node, 4, "is_causal") for node in nodes] == [True, True]
    torch.testing.assert_close(out, attend(q, k, v))


def test_a_mask_that_changes_between_layers() -> None:
    q, k, v = qkv()

    def attend(q, k, v):
        mask = torch.ones(N, N, dtype=torch.bool).tril()
        first = F.scaled_dot_product_attention(q, k, v, mask)
        mask[3, 2] = False
        return F.scaled_dot_product_attention(first, k, v, mask)

    out, capture = compiled(attend, q, k, v, attention="off")
    assert [flag for _, flag in sdpa_calls(capture)] == [True, False]
    torch.testing.assert_close(out, attend(q, k, v))


def test_any_length() -> None:
    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, transformers_mask(q.shape[2], q.shape[0]))

    capture = Capture("off")
    run = torch.compile(attend, backend=capture, fullgraph=True, dynamic=True)
    for tokens in (17, 30):
        operands = qkv(tokens=tokens)
        torch.testing.assert_close(run(*operands), attend(*operands))
    assert len(capture.graphs) == 1
    assert sdpa_calls(capture) == [(None, True)]


def test_a_window_of_a_text_of_any_length_stays() -> None:
    """A longer text may come."""

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, transformers_mask(q.shape[2], q.shape[0], window=20))

    capture = Capture("off")
    run = torch.compile(attend, backend=capture, fullgraph=True, dynamic=True)
    for tokens in (17, 30):
        operands = qkv(tokens=tokens)
        torch.testing.assert_close(run(*operands), attend(*operands))
    assert len(capture.graphs) == 1
    assert [(mask is None, flag) for mask, flag in sdpa_calls(capture)] == [(False, False)]


transformers_missing = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)


def unknown_number(program: torch.nn.Module) -> bool:
    """Whether a program's masks are filled with ``torch.tensor(0.0)``, as in "eager" of transformers before 5.24.

    Export makes an attribute of it, and Dynamo an input of the graph, whose value may change without a recompilation.
    """
    graph = getattr(program, "graph", None)
    return graph is not None and any("lift_fresh" in str(node.target) for node in graph.nodes)


@transformers_missing
@pytest.mark.sample(1 / 2)
@pytest.mark.parametrize("dialect", ["functional", "aten"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager", "qframework"])
@pytest.mark.parametrize("family", ["Llama", "GPT2"])
def test_prompts_of_transformers(family: str, implementation: str, dialect: str) -> None:
    import transformers

    torch.manual_seed(0)
    sizes = {
        "Llama": {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, "num_attention_heads": 2},
        "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 2},
    }[family]
    config = getattr(transformers, f"{family}Config")(
        **sizes, vocab_size=50, bos_token_id=1, eos_token_id=1, use_cache=False, attn_implementation=implementation
    )
    model = randomize(getattr(transformers, f"{family}Model")(config))
    ids = torch.randint(0, 50, (2, 9))
    capture = Capture()
    with torch.no_grad():
        program = model if dialect == "functional" else torch.export.export(model, (ids,)).module()
        out = torch.compile(program, backend=capture)(ids).last_hidden_state
        assert sqnr_db(model(ids).last_hidden_state, out) > 25
    found = [(call["attn_mask"] is None, call["is_causal"]) for call in capture.calls]
    if unknown_number(program):
        assert found == [(False, False)] * 2
    elif implementation == "eager" and any(name.endswith("attn.bias") for name, _ in model.named_buffers()):
        assert found == [(False, True)] * 2  # GPT-2 of transformers 5.0 has a second mask, in a buffer
    else:
        assert found == [(True, True)] * 2
