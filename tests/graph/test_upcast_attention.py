"""Attention whose queries and keys are cast to float32 for the logits, as in GPT-J and GPT-Neo."""

from __future__ import annotations

import pytest
import torch
from attention_models import Capture, compiled

from qframework.numerics import sqnr_db

EXACT = "unquantized"


def heads(dtype):
    torch.manual_seed(0)
    return [torch.randn(2, 3, 40, 16).to(dtype) for _ in range(3)]


def attend(q, k, v):
    return (q.float() @ k.to(torch.float32).transpose(-1, -2) / 4).softmax(-1).to(v.dtype) @ v


FORMS = {
    "cast before it is transposed": attend,
    "cast behind": lambda q, k, v: (q.float() @ k.mT.float() / 4).softmax(-1).to(v.dtype) @ v,
    "scaled behind the cast": lambda q, k, v: (
        ((q.float() * 0.25) @ k.float().transpose(2, 3)).softmax(-1).to(v.dtype) @ v
    ),
    "transposed by an attribute": lambda q, k, v: (q.float() @ k.float().mT / 4).softmax(-1).to(v.dtype) @ v,
    "cast twice": lambda q, k, v: (
        (q.float().float() @ k.type_as(torch.ones(1)).float().transpose(2, 3) / 4).softmax(-1).to(v.dtype) @ v
    ),
    "tokens before heads": lambda q, k, v: (
        ((q.mT.float().contiguous().mT @ k.transpose(1, 2).type(torch.float32).permute(0, 2, 3, 1)) / 4)
        .softmax(-1)
        .to(v.dtype)
        @ v
    ),
    "einsum": lambda q, k, v: torch.einsum(
        "bhnm,bhmd->bhnd", (torch.einsum("bhnd,bhmd->bhnm", q.float(), k.float()) / 4).softmax(-1).to(v.dtype), v
    ),
    "both scaled behind casts": lambda q, k, v: (
        ((q.float() * 0.5) @ (k.float() / 2).transpose(2, 3)).softmax(-1).to(v.dtype) @ v
    ),
    "the result in float32, cast": lambda q, k, v: ((q.float() @ k.float().mT / 4).softmax(-1) @ v.float()).to(v.dtype),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_kernels_get_what_was_cast(form, dtype):
    """Kernels compute logits in float32; they would quantize operands in float32 where they leave 16 bits as they are.

    Where values are cast too, the model computes P V in float32: this stays.
    """
    q, k, v = heads(dtype)
    y, capture = compiled(FORMS[form], q, k, v, attention=EXACT)
    (call,) = capture.calls
    wanted = dtype if "result" not in form else torch.float32
    assert [call[name].meta["example_value"].dtype for name in ("query", "key", "value")] == [wanted] * 3
    assert call["scale"] == 0.25
    assert y.dtype == dtype
    assert sqnr_db(attend(*(x.double() for x in (q, k, v))), y.double()) > (55 if dtype is torch.float16 else 40)


def test_other_dtypes_stay():
    """bfloat16 keys beside FP16 queries, FP32 values: all are computed in float32."""
    q, k, v = heads(torch.float16)
    for operands in ((q, k.bfloat16(), v), (q, k, v.float()), (q.float(), k, v)):
        y, capture = compiled(attend, *operands, attention=EXACT)
        (call,) = capture.calls
        dtypes = {call[name].meta["example_value"].dtype for name in ("query", "key", "value")}
        assert dtypes == {torch.float32}
        assert sqnr_db(attend(*(x.double() for x in operands)), y.double()) > 55


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_logits_in_float64_stay(dtype):
    """Kernels have none."""

    def attend_in_float64(q, k, v):
        return (q.double() @ k.double().transpose(-1, -2) / 4).softmax(-1).to(v.dtype) @ v

    y, capture = compiled(attend_in_float64, *heads(dtype))
    assert not capture.calls
    assert torch.equal(y, attend_in_float64(*heads(dtype)))


def attend_cast(q, k, v):
    return (q @ k / 4).softmax(-1).to(v.dtype) @ v


def query_written(q, k, v):
    wide = q.float()
    q.zero_()
    return attend_cast(wide, k.float().transpose(-1, -2), v)


def keys_written_behind_the_transposition(q, k, v):
    wide = k.float().transpose(-1, -2)
    k.zero_()
    return attend_cast(q.float(), wide, v)


def view_of_keys_written(q, k, v):
    wide = k.float()
    k[:, :, :10] = 0
    return attend_cast(q.float(), wide.transpose(-1, -2), v)


def cast_written(q, k, v):
    wide = q.to(torch.float32, copy=True)
    wide[..., 0] = 0
    return attend_cast(wide, k.float().transpose(-1, -2), v)


WRITES = [query_written, keys_written_behind_the_transposition, view_of_keys_written, cast_written]


@pytest.mark.parametrize("model", WRITES)
def test_what_is_written_behind_the_cast(model):
    """The cast is a copy: what is written into one of both is not in the other."""
    expected = model(*heads(torch.float16))
    y, capture = compiled(model, *heads(torch.float16), attention=EXACT)
    assert len(capture.calls) == 1
    assert sqnr_db(expected.double(), y.double()) > 55


def keys_cast_without_gradients(q, k, v):
    with torch.no_grad():
        wide = k.mT.float()
    return attend_cast(q.float(), wide, v)


def keys_transposed_without_gradients(q, k, v):
    with torch.no_grad():
        turned = k.transpose(-1, -2)
    return attend_cast(q, turned, v)


def query_scaled_without_gradients(q, k, v):
    with torch.no_grad():
        q = q * 0.5
    return attend_cast(q, k.transpose(-1, -2), v)


def weights_without_gradients(q, k, v):
    with torch.no_grad():
        weights = (q @ k.mT / 4).softmax(-1)
    return weights @ v


def mask_without_gradients(q, k, v):
    logits = q @ k.mT / 4
    with torch.no_grad():
        mask = torch.ones(40, 40, dtype=q.dtype).tril()
    return (logits + mask).softmax(-1) @ v


@pytest.mark.parametrize(
    ("model", "calls"),
    [
        (attend, 1),
        (mask_without_gradients, 1),
        (keys_cast_without_gradients, 1),
        (keys_transposed_without_gradients, 0),
        (query_scaled_without_gradients, 0),
        (weights_without_gradients, 0),
    ],
)
def test_scopes_without_gradients_cut_the_same_gradients(model, calls):
    capture = Capture(EXACT)

    def gradients(run):
        inputs = [x.requires_grad_() for x in heads(torch.float16)]
        run(*inputs).float().square().sum().backward()
        return [x.grad for x in inputs]

    wanted, found = gradients(model), gradients(torch.compile(model, backend=capture, fullgraph=True))
    assert [x is None for x in found] == [x is None for x in wanted]
    assert len(capture.calls) == calls


@pytest.mark.parametrize("architecture", ["gptj", "gpt_neo"])
def test_models(architecture):
    import transformers

    if architecture == "gptj":
        sizes = {"n_embd": 64, "n_layer": 1, "n_head": 2, "rotary_dim": 16, "vocab_size": 99, "n_positions": 64}
        config = transformers.GPTJConfig(**sizes, bos_token_id=None, eos_token_id=None)
        model = transformers.GPTJModel._from_config(config, attn_implementation="eager")
    else:
        sizes = {"hidden_size": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 99, "window_size": 16}
        config = transformers.GPTNeoConfig(
            **sizes, attention_types=[[["global", "local"], 1]], max_position_embeddings=64
        )
        model = transformers.GPTNeoModel(config)
    model = model.eval().half()
    tokens = torch.randint(0, 99, (2, 40))

    def run(tokens):
        return model(tokens, use_cache=False).last_hidden_state

    with torch.no_grad():
        wanted = run(tokens)
    y, capture = compiled(run, tokens, attention=EXACT)
    assert capture.calls
    assert {call["query"].meta["example_value"].dtype for call in capture.calls} == {torch.float16}
    assert sqnr_db(wanted.double(), y.double()) > 50
