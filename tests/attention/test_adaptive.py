"""adaptive.py, measure.py, model_inputs.py: what calibrate_attention measures, chooses, refuses and changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qframework
from qframework.attention import AttentionChoice, calibrate_attention
from qframework.attention.adaptive import HOPPER_ORDER, PAPER_ORDER, order_for, speed_order
from qframework.attention.measure import compare
from qframework.errors import CalibrationError, UnsupportedError

DIM, HEADS, TOKENS = 32, 2, 17


class Attention(nn.Module):
    """Self-attention; `spread` makes some rows of V so large that INT8 with one scale rounds the others to zero."""

    def __init__(self, spread: float = 0.0, calls: int = 1) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.spread, self.calls = spread, calls

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        if self.spread:
            v = torch.cat([v[:, :, :1] * self.spread, v[:, :, 1:]], dim=2)
        for _ in range(self.calls):
            v = F.scaled_dot_product_attention(q, k, v, mask)
        return v.transpose(1, 2).flatten(-2)


class Net(nn.Module):
    def __init__(self, *layers: Attention) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers or (Attention(), Attention()))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, mask)
        return x


@pytest.fixture
def data() -> list[Tensor]:
    return [torch.randn(3, TOKENS, DIM) for _ in range(2)]


def choose(model: nn.Module, data, *args, **kwargs) -> AttentionChoice:
    return calibrate_attention(model, data, *args, **{"verbose": False, "progress": False} | kwargs)


# What is measured --------------------------------------------------------------------------------------------------


def numpy_measures(out: Tensor, reference: Tensor) -> tuple[float, float, float]:
    a, b = out.double().numpy().ravel(), reference.double().numpy().ravel()
    cosine = a.dot(b) / np.linalg.norm(a) / np.linalg.norm(b)
    return cosine, np.abs(a - b).sum() / np.abs(b).sum(), np.sqrt(np.mean((a - b) ** 2))


def test_metrics_match_the_paper() -> None:
    reference = torch.randn(2, 3, 5, 7)
    out = 2 * reference + 0.1 * torch.randn(2, 3, 5, 7)
    got = compare(out, reference)
    assert (got.cosine, got.relative_l1, got.rmse) == pytest.approx(numpy_measures(out, reference), rel=1e-12)
    assert got.relative_l1 > 0.9, "a result twice too large passes for cosine similarity alone"


@pytest.mark.parametrize(
    ("out", "reference", "cosine"), [(0.0, 0.0, 1.0), (1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (-1.0, 1.0, -1.0)]
)
def test_metrics_of_constant_tensors(out: float, reference: float, cosine: float) -> None:
    got = compare(torch.full((4,), out), torch.full((4,), reference))
    assert got.cosine == pytest.approx(cosine)
    assert np.isfinite([got.relative_l1, got.rmse]).all(), "JSON holds no infinity"
    assert got.error == ""


def test_a_variant_that_overflows_never_passes() -> None:
    assert "NaN or infinity" in compare(torch.tensor([1.0, torch.inf]), torch.ones(2)).error


def test_every_layer_and_variant_is_measured_against_what_the_model_computes(data: list[Tensor]) -> None:
    """The numbers compare the operator with PyTorch's attention and are the worst over the batches."""
    model = Net()
    seen: dict[str, list[tuple[Tensor, ...]]] = {"layers.0": [], "layers.1": []}
    variants = ["sage_vb", "sage2_int4"]
    choice = choose(model, data, variants=variants)
    assert list(choice) == list(seen)
    with torch.no_grad():
        for x in data:
            for name, layer in zip(seen, model.layers, strict=True):
                seen[name].append(layer.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind(0))
                x = x + layer(x)
    for name, calls in seen.items():
        layer = choice.layers[name]
        assert (layer.calls, layer.query, layer.keys) == (2, (3, HEADS, TOKENS, DIM // HEADS), TOKENS)
        for variant in variants:
            numbers = []
            for q, k, v in calls:
                out, _ = torch.ops.qframework.sage_attention(q, k, v, variant=variant)
                numbers.append(numpy_measures(out, F.scaled_dot_product_attention(q, k, v)))
            cosine, relative_l1, rmse = zip(*numbers, strict=True)
            got = layer.measurements[variant]
            assert got.cosine == pytest.approx(min(cosine), rel=1e-9)
            assert got.relative_l1 == pytest.approx(max(relative_l1), rel=1e-6)
            assert got.rmse == pytest.approx(max(rmse), rel=1e-6)


def test_masks_scales_and_groups_reach_the_variants() -> None:
    """A variant that ignored an argument of the call would be far from the model's result."""

    class Model(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
            out = F.scaled_dot_product_attention(q, k, v, mask, scale=3.0, enable_gqa=True)
            return out + F.scaled_dot_product_attention(query=q, key=k, value=v, is_causal=True, enable_gqa=True)

    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu()
    q, k, v = torch.randn(2, 4, TOKENS, 16), torch.randn(2, 2, TOKENS, 16), torch.randn(2, 2, TOKENS, 16)
    choice = choose(Model(), [(q, k, v, mask)], variants=["sage_t"], threshold=0.99)
    assert dict(choice) == {"scaled_dot_product_attention": "sage_t", "scaled_dot_product_attention#1": "sage_t"}


# What is chosen ----------------------------------------------------------------------------------------------------


def test_each_layer_gets_the_fastest_passing_variant(data: list[Tensor]) -> None:
    """vB passes in the first layer; in the second V has an outlier that INT8 cannot represent, so B is chosen."""
    threshold = 0.99995
    choice = choose(Net(Attention(), Attention(spread=300.0)), data, threshold)
    first, second = (layer.measurements for layer in choice.layers.values())
    assert first["sage_vb"].cosine > threshold
    assert second["sage_vb"].cosine < threshold < second["sage_b"].cosine
    assert dict(choice) == {"layers.0": "sage_vb", "layers.1": "sage_b"}
    assert list(second) == list(PAPER_ORDER)


def test_the_first_passing_variant_is_chosen(data: list[Tensor]) -> None:
    for first, second in (("sage_t", "sage_vb"), ("sage_vb", "sage_t")):
        assert set(choose(Net(), data, variants=[first, second]).values()) == {first}


def test_bounds_apply_in_addition_to_the_threshold(data: list[Tensor]) -> None:
    model = Net()
    choice = choose(model, data, 0.5)
    assert choice["layers.0"] == "sage_vb"
    measured = choice.layers["layers.0"].measurements
    for number in ("relative_l1", "rmse"):
        bound = (getattr(measured["sage_vt"], number) * getattr(measured["sage_b"], number)) ** 0.5
        assert choose(model, data, 0.5, **{f"max_{number}": bound})["layers.0"] == "sage_b"


def test_a_layer_without_a_passing_variant_stays_float(data: list[Tensor]) -> None:
    model = Net()
    choice = choose(model, data, 1 - 1e-12)
    assert set(choice.values()) == {"off"}
    with torch.no_grad(), choice.apply(model):
        changed = model(data[0])
    with torch.no_grad():
        assert torch.equal(changed, model(data[0]))


def test_unsupported_layers_stay_float_with_a_reason() -> None:
    class Wide(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x)

    choice = choose(Wide(), [torch.randn(1, 1, 4, 300)])
    layer = choice.layers["scaled_dot_product_attention"]
    assert layer.variant == "off"
    assert all("head dimension" in measured.error for measured in layer.measurements.values())
    assert "-" in str(choice)


def test_speed_order() -> None:
    """All but Hopper keep the paper's order; FP8 variants need FP8, and INT4 is never faster."""
    assert speed_order("cpu") == PAPER_ORDER == ("sage_vb", "sage_vt", "sage_b", "sage_t")
    for capability in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)):
        order = order_for(capability)
        if capability != (9, 0):
            assert tuple(name for name in order if name in PAPER_ORDER) == PAPER_ORDER
        assert set(order) >= set(PAPER_ORDER)
        assert any("sage2" in name for name in order) == (capability >= (8, 9))
        assert not any("int4" in name for name in order)
    assert order_for((8, 9))[0] == "sage2pp_int8"
    assert "sage2pp_int8" not in order_for((9, 0))
    assert order_for((9, 0)) == HOPPER_ORDER


def test_equal_data_give_equal_choices(data: list[Tensor]) -> None:
    model = Net()
    assert choose(model, data).to_dict() == choose(model, data).to_dict()


# Names of layers ---------------------------------------------------------------------------------------------------


def test_calls_in_one_forward_are_separate_layers(data: list[Tensor]) -> None:
    shared = Attention(calls=2)
    choice = choose(Net(shared, shared), data)
    assert set(choice) == {"layers.0", "layers.0#1", "layers.1", "layers.1#1"}, "a shared module has two paths"
    assert [layer.calls for layer in choice.layers.values()] == [4, 4, 4, 4]
    assert choice.layers["layers.0#1"] == choice.layers["layers.1#1"] != choice.layers["layers.0"]


def test_multi_head_attention_and_encoder_layers() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(DIM, HEADS, batch_first=True), 2)
    choice = choose(encoder, [torch.randn(2, 5, DIM)])
    assert list(choice) == ["layers.0.self_attn", "layers.1.self_attn"]


def test_exported_graphs_have_the_same_layers(data: list[Tensor]) -> None:
    model = Net(Attention(), Attention(calls=2)).eval()
    exported = torch.export.export(model, (data[0],)).module()
    expected = choose(model, data)
    got = choose(exported, data)
    assert list(got) == ["layers.0", "layers.1", "layers.1#1"]
    assert dict(got) == dict(expected)
    for name in expected:
        for variant, measured in expected.layers[name].measurements.items():
            assert got.layers[name].measurements[variant].cosine == pytest.approx(measured.cosine, rel=1e-6)


# Batches and surroundings ------------------------------------------------------------------------------------------


def test_batches_of_every_kind(data: list[Tensor]) -> None:
    model, mask = Net(), torch.zeros(TOKENS, TOKENS)
    expected = choose(model, data).to_dict()
    labels = torch.zeros(3)
    assert choose(model, [(x, labels) for x in data]).to_dict() == expected
    assert choose(model, [[x] for x in data]).to_dict() == expected
    assert choose(model, [{"x": x} for x in data]).to_dict() == expected
    assert choose(model, iter(data)).to_dict() == expected
    assert choose(model, data, forward=lambda model, x: model(x)).to_dict() == expected
    assert choose(model, [{"x": x, "mask": mask} for x in data]).layers["layers.0"].calls == 2
    assert choose(model, data, batches=1).layers["layers.0"].calls == 1


def test_calibration_does_not_change_the_model(data: list[Tensor]) -> None:
    model = Net().train()
    model.layers[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    choose(model, data)
    assert (model.training, model.layers[0].training, model.layers[1].training) == (True, True, False)
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()] == hooks
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(RuntimeError):
        choose(model, [torch.randn(3, TOKENS, DIM + 1)])
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()] == hooks
    assert model.training


def test_layers_see_the_float_model(data: list[Tensor]) -> None:
    """The second layer is measured on the float output of the first layer, without errors of its variant."""
    model = Net()
    with torch.no_grad():
        expected = [model(x) for x in data]
    outputs: list[Tensor] = []
    choose(model, data, variants=["sage2_int4"], forward=lambda model, x: outputs.append(model(x)))
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))


def test_prints_the_table(data: list[Tensor], capsys: pytest.CaptureFixture[str]) -> None:
    choice = calibrate_attention(Net(), data, progress=False)
    printed = capsys.readouterr().out
    for word in ("layers.0", "layers.1", "sage_vb", "sage_t", "2 of 2 attention layers quantized", "threshold 0.998"):
        assert word in printed
        assert word in str(choice)
    choose(Net(), data)
    assert capsys.readouterr().out == ""


# Errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"threshold": 1.5}, CalibrationError, "threshold must be a cosine similarity between 0 and 1, got 1.5"),
        ({"variants": []}, CalibrationError, r"variants must be None or a list of names, got \[\]"),
        ({"variants": "sage_b"}, CalibrationError, "variants must be None or a list of names, got 'sage_b'"),
        ({"variants": ["sage_b", "sage_b"]}, CalibrationError, "variants must be different, got sage_b twice"),
        ({"variants": ["sage_z"]}, UnsupportedError, "variant must be .*sage_vb.*, got 'sage_z'"),
        ({"max_rmse": -1.0}, CalibrationError, "max_rmse must be None or a positive number, got -1.0"),
        ({"batches": 0}, CalibrationError, "batches must be None or a positive integer, got 0"),
    ],
)
def test_bad_settings(arguments: dict, error: type[Exception], message: str, data: list[Tensor]) -> None:
    with pytest.raises(error, match=message):
        choose(Net(), data, **arguments)


def test_no_data() -> None:
    with pytest.raises(CalibrationError, match="data must hold at least one batch, got none"):
        choose(Net(), [])


def test_no_attention() -> None:
    with pytest.raises(CalibrationError, match=r"must call F.scaled_dot_product_attention, got Linear"):
        choose(nn.Linear(DIM, DIM), [torch.randn(2, DIM)])


def test_nan_in_a_batch(data: list[Tensor]) -> None:
    data[1][0, 0, 0] = torch.nan
    with pytest.raises(CalibrationError, match="batch 1: inputs must be finite, got NaN or infinity"):
        choose(Net(), data)


def test_nan_in_a_layer_names_it(data: list[Tensor]) -> None:
    model = Net()
    with torch.no_grad():
        model.layers[1].qkv.bias[DIM] = torch.inf
    with pytest.raises(CalibrationError, match=r"batch 0: attention layer 'layers.1': key must be finite, got NaN"):
        choose(model, data)


def test_a_batch_that_does_not_fit(data: list[Tensor]) -> None:
    with pytest.raises(CalibrationError, match=r"batch 0: the batch must match Net.forward.*, got the keys 'y'"):
        choose(Net(), [{"y": data[0]}])
    with pytest.raises(CalibrationError, match=r"batch 0: a batch must be a tensor, .*, got int"):
        choose(Net(), [3])


def test_compiled_models_are_refused(data: list[Tensor]) -> None:
    with pytest.raises(CalibrationError, match="model must not be compiled"):
        choose(torch.compile(Net(), backend="eager"), data)


# Real models -------------------------------------------------------------------------------------------------------


def test_vit_on_digits() -> None:
    """A ViT and real images: every layer is quantized, and the features hardly change."""
    pytest.importorskip("timm")
    from qframework.evaluation.digits import load_digits, loader
    from qframework.evaluation.digits_vit import TrainingConfig, build_model

    model = build_model(TrainingConfig(embed_dim=32, depth=2, num_heads=2)).eval()
    images = load_digits().calibration
    choice = choose(model, loader(images, 64), batches=2)
    assert list(choice) == ["blocks.0.attn", "blocks.1.attn"]
    assert choice.layers["blocks.0.attn"].query == (64, 2, 16, 16)
    assert "off" not in choice.values()
    x = images.tensors[0][:32]
    with torch.no_grad():
        expected = model.forward_features(x)
        with choice.apply(model):
            got = model.forward_features(x)
    assert 0 < (got - expected).norm() < 0.02 * expected.norm()


def test_bert_with_padding() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    model = transformers.BertModel(config).eval()
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, 7:] = 0
    batch = {"input_ids": torch.randint(0, 50, (2, 12)), "attention_mask": mask}
    choice = choose(model, [batch])
    assert list(choice) == [f"encoder.layer.{i}.attention.self" for i in range(2)]
    assert "off" not in choice.values()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_on_a_gpu(dtype: torch.dtype) -> None:
    """This chip's variants run, agree with the CPU's measurements, and the choice compiles."""
    model = Net().eval()
    data = [torch.randn(3, 197, DIM)]
    expected = choose(model, data, variants=speed_order("cuda"))
    model.to(dtype)
    choice = choose(model, [data[0].to(dtype)], device="cuda", timed=False)
    assert list(choice.layers["layers.0"].measurements) == list(speed_order("cuda"))
    measured = choose(model, [data[0].to(dtype)], device="cuda").layers["layers.0"].measurements
    assert set(measured) == {"off", "unquantized", "integer_exp", *speed_order("cuda")}
    times = [each.seconds for each in measured.values()]
    assert times == sorted(times)
    assert times[0] > 1e-6
    assert "off" not in choice.values()
    for name, layer in choice.layers.items():
        for variant, measured in layer.measurements.items():
            assert measured.error == ""
            # both are 1 minus the noise of the same roundings; 16 bit inputs and results add their own
            other = expected.layers[name].measurements[variant].cosine
            assert 1 - measured.cosine < 2 * (1 - other) + 2e-5
    x = data[0].to("cuda", dtype)
    with torch.no_grad():
        with choice.apply(model):
            applied = model(x)
        compiled = torch.compile(model, backend="qframework", options={"attention": choice})(x)
    # both quantize the same numbers; Inductor's linears round differently
    assert (compiled - applied).norm() < 0.02 * applied.norm()


def test_variants_may_be_written_out(data: list[Tensor]) -> None:
    from qframework.kernels.attention.variants import AttentionVariant

    variant = AttentionVariant(8, "per_warp", "int8", smooth_v=True)
    choice = choose(Net(), data, variants=[variant])
    assert set(choice.values()) == {variant.spec}


def test_public_name() -> None:
    assert qframework.calibrate_attention is calibrate_attention
