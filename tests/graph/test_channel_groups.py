"""Groups of channels are found, and folding scales into them keeps a model's function."""

from __future__ import annotations

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qframework.errors import QFrameworkError
from qframework.graph.channel_groups import ChannelGroup, find_channel_groups, find_shift_groups, fold

DIM, HEADS, TOKENS = 8, 2, 5


class Net(nn.Module):
    """A forward function over named layers."""

    def __init__(self, forward, **layers: nn.Module) -> None:
        super().__init__()
        self.run = forward
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


class SpelledOutRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def fc(inputs: int = DIM, outputs: int = DIM) -> nn.Linear:
    return nn.Linear(inputs, outputs)


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(-2, -3)


def attend(qkv: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    return F.scaled_dot_product_attention(*map(heads, qkv)).transpose(-2, -3).flatten(-2)


def spelled_out(qkv: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    q, k, v = map(heads, qkv)
    return ((q @ k.transpose(-1, -2)).softmax(-1) @ v).transpose(-2, -3).reshape(-1, TOKENS, DIM)


def packed(qkv: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*qkv.unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind(0))


def windows(x: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 0, 1)).roll(1, 1).reshape(-1, 3, 2, DIM).permute(1, 0, 2, 3)


LN = nn.LayerNorm
# name: (model, consumers of each group by producer)
FOUND = {
    "layer norm": (Net(lambda m, x: m.fc(m.norm(x)), norm=LN(DIM), fc=fc()), {"norm": ["fc"]}),
    "no bias": (Net(lambda m, x: m.fc(m.norm(x)), norm=LN(DIM, bias=False), fc=fc()), {"norm": ["fc"]}),
    "rms norm": (Net(lambda m, x: m.fc(m.norm(x)), norm=nn.RMSNorm(DIM), fc=fc()), {"norm": ["fc"]}),
    "spelled out": (Net(lambda m, x: m.fc(m.norm(x)), norm=SpelledOutRMSNorm(), fc=fc()), {"norm": ["fc"]}),
    "two readers": (
        Net(lambda m, x: (lambda y: m.a(y) + F.gelu(m.b(y)))(m.norm(x)), norm=LN(DIM), a=fc(), b=fc()),
        {"norm": ["a", "b"]},
    ),
    "windows": (Net(lambda m, x: m.fc(windows(m.norm(x))), norm=LN(DIM), fc=fc()), {"norm": ["fc"]}),
    "pooled": (Net(lambda m, x: m.fc(m.norm(x).mean(1)), norm=LN(DIM), fc=fc()), {"norm": ["fc"]}),
    "token": (Net(lambda m, x: m.fc(m.norm(x)[:, 0]), norm=LN(DIM), fc=fc()), {"norm": ["fc"]}),
    "relu": (Net(lambda m, x: m.b(F.relu(m.a(x))), a=fc(DIM, 6), b=fc(6)), {"a": ["b"]}),
    "relu in place": (Net(lambda m, x: m.b(F.relu_(m.a(x))), a=fc(DIM, 6), b=fc(6)), {"a": ["b"]}),
    "gate": (Net(lambda m, x: m.c(F.silu(m.a(x)) * m.b(x)), a=fc(), b=fc(), c=fc()), {"b": ["c"]}),
    "packed gate": (
        Net(lambda m, x: m.c((lambda g, u: F.silu(g) * u)(*m.a(x).chunk(2, -1))), a=fc(DIM, 12), c=fc(6)),
        {"a": ["c"]},
    ),
    "values": (
        Net(lambda m, x: m.o(attend((m.q(x), m.k(x), m.v(x)))), q=fc(), k=fc(), v=fc(), o=fc()),
        {"v": ["o"]},
    ),
    "spelled-out attention": (
        Net(lambda m, x: m.o(spelled_out((m.q(x), m.k(x), m.v(x)))), q=fc(), k=fc(), v=fc(), o=fc()),
        {"v": ["o"]},
    ),
    "packed qkv": (
        Net(lambda m, x: m.o(packed(m.a(x)).transpose(1, 2).flatten(-2)), a=fc(DIM, 3 * DIM), o=fc()),
        {"a": ["o"]},
    ),
    "multi-head attention": (
        Net(lambda m, x: m.a(x, x, x, need_weights=False)[0], a=nn.MultiheadAttention(DIM, HEADS, batch_first=True)),
        {"a": ["a.out_proj"]},
    ),
}

LEFT = {
    "residual": Net(lambda m, x: (lambda y: y + m.fc(y))(m.norm(x)), norm=LN(DIM), fc=fc()),
    "gelu": Net(lambda m, x: m.b(F.gelu(m.a(x))), a=fc(), b=fc()),
    "output": Net(lambda m, x: (lambda y: (y, m.fc(y)))(m.norm(x)), norm=LN(DIM), fc=fc()),
    "square": Net(lambda m, x: m.b((lambda y: y * y)(m.a(x))), a=fc(), b=fc()),
    "product of both": Net(lambda m, x: m.b((lambda y: F.relu(y) * y)(m.a(x))), a=fc(), b=fc()),
    "padded with ones": Net(lambda m, x: m.fc(F.pad(m.norm(x), (0, 0, 0, 1), value=1.0)), norm=LN(DIM), fc=fc()),
    "rolled channels": Net(lambda m, x: m.fc(m.norm(x).roll(1, 2)), norm=LN(DIM), fc=fc()),
    "tokens mixed in": Net(lambda m, x: m.fc(m.norm(x).transpose(1, 2)), norm=LN(DIM), fc=fc(TOKENS)),
    "norm used twice": Net(lambda m, x: m.a(m.norm(x)) + m.norm(x + 1), norm=LN(DIM), a=fc()),
    "linear used twice": Net(lambda m, x: m.a(m.norm(x)) + m.a(x), norm=LN(DIM), a=fc()),
    "no parameter": Net(lambda m, x: m.fc(m.norm(x)), norm=LN(DIM, elementwise_affine=False), fc=fc()),
    "added in place": Net(
        lambda m, x: (lambda y, z: (z.add_(1.0), m.b(y))[1])(*(lambda y: (y, y.view(-1, DIM)))(m.a(x))), a=fc(), b=fc()
    ),
    "queries": Net(lambda m, x: m.o(F.scaled_dot_product_attention(m.v(x), m.v(x), x)), v=fc(), o=fc()),
}


def graph_of(model: nn.Module, dtype: torch.dtype = torch.float64) -> tuple[torch.fx.GraphModule, Tensor]:
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    x = torch.randn(3, TOKENS, DIM, dtype=dtype)
    model = model.to(dtype).eval()
    return torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},)).module(), x


def random_scales(group: ChannelGroup) -> Tensor:
    scales = torch.exp(torch.randn(group.size, dtype=torch.float64))
    return torch.where(group.free, scales, 1.0)


def owner(name: str) -> str:
    return name.rpartition(".")[0]


@pytest.mark.parametrize("name", FOUND)
def test_group_is_found_and_folding_keeps_the_function(name: str) -> None:
    model, expected = FOUND[name]
    gm, x = graph_of(model)
    before = gm(x)
    groups = find_channel_groups(gm)
    names = {owner(g.parameters[0].name): [owner(c.weight.name) for c in g.consumers] for g in groups}
    assert names == expected
    old = {name: value.clone() for name, value in model.state_dict().items()}
    for group in groups:
        weight = gm.get_parameter(group.consumers[0].weight.name)
        fold(gm, group, random_scales(group))
        assert not torch.equal(gm.get_parameter(group.consumers[0].weight.name), weight)
    # every factor is rounded twice, at 2^-53, in sums of at most 24 terms
    torch.testing.assert_close(gm(x), before, rtol=1e-12, atol=1e-13)
    assert all(torch.equal(value, old[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("name", LEFT)
def test_channels_with_other_readers_are_not_free(name: str) -> None:
    gm, _ = graph_of(LEFT[name])
    assert find_channel_groups(gm) == []


# name of a model in FOUND: consumers of the constant of each producer, and how many attentions read it as keys
SHIFTS = {
    "layer norm": ({"norm": ["fc"]}, 0),
    "two readers": ({"norm": ["a", "b"]}, 0),
    "pooled": ({"norm": ["fc"]}, 0),
    "token": ({"norm": ["fc"]}, 0),
    "values": ({"k": [], "v": ["o"]}, 1),
    "packed qkv": ({"a": ["o"]}, 1),
    "no bias": ({}, 0),
    "rms norm": ({}, 0),
    "windows": ({}, 0),  # padded with zeros
    "relu": ({}, 0),
    "gate": ({}, 0),
    "spelled-out attention": ({}, 0),
}


@pytest.mark.parametrize("name", SHIFTS)
def test_constants_move_through_sums_and_views(name: str) -> None:
    gm, _ = graph_of(FOUND[name][0])
    groups = find_shift_groups(gm)
    names = {owner(g.parameters[0].name): [owner(c.weight.name) for c in g.consumers] for g in groups}
    assert (names, sum(len(group.keys) for group in groups)) == SHIFTS[name]


def test_only_the_values_of_packed_qkv_are_free() -> None:
    gm, _ = graph_of(FOUND["packed qkv"][0])
    (group,) = find_channel_groups(gm)
    assert group.free.tolist() == [False] * 2 * DIM + [True] * DIM
    assert group.consumers[0].channels.tolist() == list(range(2 * DIM, 3 * DIM))


def test_fold_against_numpy() -> None:
    gm, x = graph_of(FOUND["layer norm"][0])
    (group,) = find_channel_groups(gm)
    assert group.is_norm
    gain, shift, weight = (gm.get_parameter(n).detach().numpy() for n in ("norm.weight", "norm.bias", "fc.weight"))
    scales = np.geomspace(0.1, 10, DIM)
    fold(gm, group, torch.from_numpy(scales))
    rows = x.numpy().reshape(-1, DIM)
    centred = rows - rows.mean(1, keepdims=True)
    normal = centred / np.sqrt(centred.var(1, keepdims=True) + 1e-5)
    wanted = (normal * (gain / scales) + shift / scales) @ (weight * scales).T + gm.get_parameter(
        "fc.bias"
    ).detach().numpy()
    np.testing.assert_allclose(gm(x).detach().numpy().reshape(-1, DIM), wanted, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(gm.get_parameter("fc.weight").detach().numpy(), weight * scales, rtol=1e-15)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_that_are_not_positive_factors_are_refused(scale: float) -> None:
    gm, _ = graph_of(FOUND["layer norm"][0])
    (group,) = find_channel_groups(gm)
    with pytest.raises(QFrameworkError, match="scales must be positive and finite"):
        fold(gm, group, torch.full((DIM,), scale))


SMALL = {"embed_dim": 32, "depth": 2, "num_heads": 2}
# name: (settings, groups from a norm, groups from a linear)
MODELS = {
    "vit_tiny_patch16_224": ({"img_size": 32, "patch_size": 8, **SMALL}, 5, 2),
    "eva02_tiny_patch14_224": ({"img_size": 28, "embed_dim": 48, "depth": 1, "num_heads": 3}, 2, 1),
    "swin_tiny_patch4_window7_224": ({"img_size": 56, "embed_dim": 24, "depths": (2, 2), "num_heads": (2, 4)}, 10, 4),
    "samvit_base_patch16": ({"img_size": 64, "global_attn_indexes": (1,), **SMALL}, 4, 2),
}


@pytest.mark.parametrize("name", MODELS)
def test_folding_keeps_the_function_of_real_architectures(name: str) -> None:
    settings, norms, linears = MODELS[name]
    torch.manual_seed(0)
    model = timm.create_model(name, **settings).double().eval()
    x = torch.randn(2, 3, settings["img_size"], settings["img_size"], dtype=torch.float64)
    gm = torch.export.export(model, (x,)).module()
    before = gm(x)
    groups = find_channel_groups(gm)
    assert [sum(g.is_norm for g in groups), sum(not g.is_norm for g in groups)] == [norms, linears]
    for group in groups:
        fold(gm, group, random_scales(group))
    torch.testing.assert_close(gm(x), before, rtol=1e-10, atol=1e-11)  # two roundings a layer, some amplified by norms
