"""Rotation of residual streams: the same function, no outlier channels, and reasons where it is left out."""

from __future__ import annotations

import copy

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.export import Dim
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

import qframework
from qframework.evaluation.outliers import transplant_outliers
from qframework.graph.nodes import fake_value
from qframework.graph.residual_stream import find_residual_streams
from qframework.numerics import sqnr_db
from qframework.quantizer import QFrameworkQuantizer, calibrate, dynamic_int8, static_int8
from qframework.quantizer.rotate import fold_layer_scales, orthogonal, rotate, rotate_stream

QUANTIZER = QFrameworkQuantizer().set_global(static_int8())
IMAGES = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))
# Float32 rounds each product of K terms to 2^-24 and each of a dozen layers adds such errors: 100 dB leave a factor of
# about 150 above 2^-24, and any transformation that is not exact is below 60.
EXACT_DB = 100.0


def vit(**kwargs) -> nn.Module:
    """A small vision transformer with every parameter of its norms and scales away from its initial value."""
    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 3, "num_heads": 3, "num_classes": 7}
    model = timm.models.vision_transformer.VisionTransformer(**(sizes | kwargs)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or "token" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def graph_of(model: nn.Module, *inputs: Tensor, **kwargs):
    return torch.export.export(model, inputs or (IMAGES,), kwargs or None).module()


class Decoder(nn.Module):
    """Pre-norm blocks with RMSNorm, an embedding, gates, no biases, and a head that shares the embedding's weight."""

    def __init__(self, dim: int = 32, depth: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, dim)
        linear = lambda a, b: nn.Linear(a, b, bias=False)  # noqa: E731
        norm = lambda: nn.RMSNorm(dim, eps=1e-6)  # noqa: E731
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {"n": norm(), "gate": linear(dim, 48), "up": linear(dim, 48), "down": linear(48, dim), "m": norm()}
                | {"q": linear(dim, dim), "k": linear(dim, dim), "v": linear(dim, dim), "o": linear(dim, dim)}
            )
            for _ in range(depth)
        )
        self.norm, self.head = norm(), linear(dim, 11)
        self.head.weight = self.embed.weight
        with torch.no_grad():
            for block in self.blocks:
                block["n"].weight.copy_(torch.rand(dim) + 0.2)
                block["m"].weight.copy_(torch.rand(dim) + 0.2)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            y = block["m"](x)
            y = nn.functional.scaled_dot_product_attention(block["q"](y), block["k"](y), block["v"](y), is_causal=True)
            x = x + block["o"](y)
            y = block["n"](x)
            x = x + block["down"](nn.functional.silu(block["gate"](y)) * block["up"](y))
        return self.head(self.norm(x))


@pytest.mark.parametrize("size", [2, 7, 48])
def test_the_matrix_is_orthogonal_and_keeps_the_vector_of_ones(size: int) -> None:
    q, one = orthogonal(size), torch.ones(size, dtype=torch.float64)
    assert torch.allclose(q @ q.T, torch.eye(size, dtype=torch.float64), atol=1e-13)
    assert torch.allclose(q @ one, one, atol=1e-13)
    assert size == 2 or float(q.abs().max()) < 0.98


@pytest.mark.parametrize(
    "model",
    [
        vit(),
        vit(init_values=0.3),
        vit(class_token=False, global_pool="avg"),
        vit(reg_tokens=2, pre_norm=False, qkv_bias=False),
        vit(num_classes=0, depth=12),
    ],
    ids=["class token", "layer scale", "average", "registers", "features"],
)
def test_vision_transformers_compute_the_same(model: nn.Module) -> None:
    graph = graph_of(model)
    fold_layer_scales(graph)
    (stream,) = find_residual_streams(graph)
    rotate_stream(graph, stream, orthogonal(stream.size))
    assert sqnr_db(model(IMAGES), graph(IMAGES)) > EXACT_DB


def test_tokens_are_turned_back_for_any_batch_size() -> None:
    """The last norm's tokens leave the model in the old basis: a product with a symbolic number of rows."""
    model = vit(num_classes=0, depth=2)
    model.forward = model.forward_features
    graph = torch.export.export(model, (IMAGES,), dynamic_shapes=({0: Dim.DYNAMIC},)).module()
    (stream,) = find_residual_streams(graph)
    rotate_stream(graph, stream, orthogonal(stream.size))
    (turned,) = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.matmul.default)
    assert not isinstance(fake_value(turned).shape[0], int)
    assert tuple(fake_value(turned).shape[1:]) == (17, 48)
    assert sqnr_db(model(IMAGES[:3]), graph(IMAGES[:3])) > EXACT_DB


def test_a_decoder_with_a_shared_embedding_computes_the_same_and_keeps_its_parameters() -> None:
    model, ids = Decoder().eval(), torch.arange(10).reshape(2, 5)
    before = copy.deepcopy(model.state_dict())
    graph = graph_of(model, ids)
    (stream,) = find_residual_streams(graph)
    rotate_stream(graph, stream, orthogonal(stream.size))
    assert sqnr_db(model(ids), graph(ids)) > EXACT_DB
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Shared(nn.Module):
    """Blocks of one linear without bias that reads and writes the stream, the same for both blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.linear, self.last = nn.Linear(16, 16), nn.Linear(16, 16, bias=False), nn.Linear(16, 3)
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(3))
        with torch.no_grad():
            for parameter in self.norms.parameters():
                parameter.add_(torch.randn_like(parameter))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for norm in self.norms[:2]:
            x = x + self.linear(norm(x))
        return self.last(self.norms[2](x)) + self.last(x)


def test_a_linear_that_reads_and_writes_the_stream_in_several_places() -> None:
    model, x = Shared().eval(), torch.randn(2, 5, 16)
    graph = graph_of(model, x)
    (stream,) = find_residual_streams(graph)
    assert len(stream.linears) == 1
    rotate_stream(graph, stream, orthogonal(16))
    assert sqnr_db(model(x), graph(x)) > EXACT_DB


def test_the_stream_is_rotated_and_the_norms_have_no_gain() -> None:
    graph = graph_of(vit())
    q = orthogonal(48)
    (stream,) = find_residual_streams(graph)
    norm, before = stream.norms[0], {}

    class Record(torch.fx.Interpreter):
        def run_node(self, n):
            value = super().run_node(n)
            if n is norm.node.args[0]:
                before["x"] = value
            return value

    Record(graph).run(IMAGES)
    x = before["x"]
    rotate_stream(graph, stream, q)
    Record(graph).run(IMAGES)
    assert sqnr_db(x @ q.float(), before["x"]) > EXACT_DB
    assert bool((getattr(graph.blocks, "0").norm1.weight == 1).all())
    assert bool((getattr(graph.blocks, "0").norm1.bias == 0).all())


def converted(graph):
    prepared = prepare_pt2e(graph, QUANTIZER)
    calibrate(prepared, [IMAGES], progress=False)
    return convert_pt2e(prepared)


def test_outlier_channels_stop_mattering() -> None:
    model = transplant_outliers(vit(), IMAGES, channels=3, factor=100.0)
    plain, rotated = graph_of(model), graph_of(model)
    (done,) = rotate(rotated, QUANTIZER, [IMAGES])
    assert done.reason == ""
    assert done.error < 0.1
    (done,) = rotate(graph_of(model), QUANTIZER, [IMAGES], strengths=(0.5,))
    assert done.error > 0.5  # smoothing is enough for them
    gain = sqnr_db(model(IMAGES), converted(rotated)(IMAGES)) - sqnr_db(model(IMAGES), converted(plain)(IMAGES))
    assert gain > 6


def test_a_rotated_model_compiles_to_as_many_operators_and_without_layer_scales() -> None:
    model = vit(init_values=0.3, depth=1)
    reports = {}
    for name in ("plain", "rotated"):
        graph = graph_of(model)
        if name == "rotated":
            fold_layer_scales(graph)
            rotate_stream(graph, *find_residual_streams(graph), orthogonal(48))
        simulated = converted(graph)
        compiled = torch.compile(simulated, backend="qframework")
        with torch.no_grad():
            assert sqnr_db(simulated(IMAGES), compiled(IMAGES)) > 40
        reports[name] = qframework.explain(compiled, IMAGES)
    assert reports["rotated"].lowered == reports["plain"].lowered == 5
    assert reports["rotated"].total == reports["plain"].total


def test_smoothing_still_finds_the_norms() -> None:
    from qframework.graph.channel_groups import find_channel_groups

    graph = graph_of(vit())
    before = sum(group.is_norm for group in find_channel_groups(graph))
    rotate(graph, QUANTIZER, [IMAGES])
    assert sum(group.is_norm for group in find_channel_groups(graph)) == before


class PostNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)  # noqa: E731
        self.first, self.layers = nn.Linear(16, 16), nn.ModuleList(layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer.norm1(x + layer.self_attn(x, x, x, need_weights=False)[0])
            x = layer.norm2(x + layer.linear2(torch.relu(layer.linear1(x))))
        return x


def test_post_norm_models_stay_as_they_are_with_a_reason() -> None:
    x = torch.randn(2, 5, 16)
    model = PostNorm().eval()
    graph = graph_of(model, x)
    before = graph(x)
    done = rotate(graph, QUANTIZER, [x])
    assert done
    assert all("between bases at run time" in each.reason and "post-norm" in each.reason for each in done)
    assert torch.equal(graph(x), before)


def test_reasons() -> None:
    none = QFrameworkQuantizer().set_global(None)
    (done,) = rotate(graph_of(vit()), none, [IMAGES])
    assert done.reason == "no linear that reads it is quantized"
    (done,) = rotate(graph_of(vit()), QFrameworkQuantizer().set_global(dynamic_int8()), [IMAGES])
    assert done.error != 1.0 or not done.reason


@pytest.mark.parametrize("gamma", [1.0, -2.0, 0.0])
def test_layer_scales_are_folded_into_linears(gamma: float) -> None:
    model = vit(init_values=gamma or 1e-3)
    if gamma == 0.0:
        with torch.no_grad():
            model.blocks[0].ls1.gamma.zero_()
    graph = graph_of(model)
    products = lambda: sum(n.target == torch.ops.aten.mul.Tensor for n in graph.graph.nodes)  # noqa: E731
    before = products()
    assert fold_layer_scales(graph) == 6
    assert products() == before - 6
    assert sqnr_db(model(IMAGES), graph(IMAGES)) > EXACT_DB
