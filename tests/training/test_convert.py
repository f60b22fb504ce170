"""Conversion to INT8 training and back, on tiny models of timm and transformers."""

from __future__ import annotations

import copy
import re
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training_models import MODELS, gpt2, inputs, llama, logits_of, loss_of, vit

from benchmarks.training_block import Block, saved_bytes
from qframework.errors import QFrameworkError, UnsupportedError
from qframework.kernels.blocks.format import BLOCK_SIZES, CanonicalSize
from qframework.training import (
    BlockTensor,
    conversion_report,
    convert_to_int8_training,
    fallbacks,
    restore_float,
)
from qframework.training.activation import Int8Activation, Int8GatedMLP
from qframework.training.linear import Int8Conv1D, Int8Linear
from qframework.training.norm import Int8LayerNorm, Int8RMSNorm

BLOCKS = {"vit": "blocks", "gpt2": "transformer.h", "llama": "model.layers"}
each_model = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(autouse=True)
def count_from_zero() -> Iterator[None]:
    fallbacks.clear()
    yield
    fallbacks.clear()


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return list(first) == list(second) and all(torch.equal(first[name], second[name]) for name in first)


# What conversion does


@each_model
def test_state_dicts_fit_both_ways(name: str) -> None:
    """Parameters stay the same objects, so that an existing optimizer keeps working."""
    model, other = MODELS[name](), MODELS[name]()
    before, parameters = state(model), dict(model.named_parameters())
    converted = convert_to_int8_training(model)
    assert converted is model
    assert same(state(model), before)
    assert all(parameter is parameters[key] for key, parameter in model.named_parameters())
    model.load_state_dict(other.state_dict())
    assert same(state(model), state(other))
    MODELS[name]().load_state_dict(model.state_dict())


@each_model
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_close_to_float_and_no_operator_falls_back(name: str, block_size: CanonicalSize) -> None:
    """A rounding step is max / 127; of normal values in a block the largest is about 3 to 4.5 times the deviation, so
    one quantization adds 0.01 of the values' norm. A logit has about 12 of them in each of 2 blocks behind it."""
    model, x = MODELS[name]().eval(), inputs(name)
    wanted = logits_of(model, x).detach()
    got = logits_of(convert_to_int8_training(model, block_size), x).detach()
    assert not isinstance(got, BlockTensor)
    error = float((got - wanted).norm() / wanted.norm())
    assert 1e-4 < error < 0.01 * (2 * 12) ** 0.5 * 2
    loss_of(model.train(), x).backward()
    assert fallbacks == {}


@pytest.mark.parametrize("block_size", [32, (1, 128)])
@each_model
def test_gradients_of_all_parameters_are_close_to_float(name: str, block_size: CanonicalSize) -> None:
    """In direction: each has the quantizations of forward and backward pass behind it, errors that do not line up."""
    # The gradient of a class token alone would hide what reaches the other tokens of its blocks.
    pooled = {"class_token": False, "global_pool": "avg"} if name == "vit" else {}
    model, x = MODELS[name](**pooled).eval(), inputs(name, batch=4)
    loss_of(model, x).backward()
    wanted = {key: parameter.grad.clone() for key, parameter in model.named_parameters()}
    model.zero_grad()
    loss_of(convert_to_int8_training(model, block_size), x).backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert type(parameter.grad) is Tensor, key
        assert parameter.grad.dtype == parameter.dtype
        cosine = torch.nn.functional.cosine_similarity(parameter.grad.flatten(), wanted[key].flatten(), dim=0)
        if not key.endswith(("attn.qkv.bias", "c_attn.bias")):  # a bias of keys has no gradient: what is there is noise
            assert cosine > 0.9, key


@each_model
def test_the_residual_stream_is_int8_and_the_rest_float(name: str) -> None:
    model, x = convert_to_int8_training(MODELS[name]()), inputs(name)
    first, last = model.get_submodule(BLOCKS[name])
    seen: dict[str, Any] = {}
    first.register_forward_hook(lambda module, args, out: seen.update(between=out))
    last.register_forward_hook(lambda module, args, out: seen.update(behind=out))
    for attention in (module for key, module in first.named_modules() if key in ("attn", "self_attn")):
        queries = next(child for child in attention.children() if isinstance(child, Int8Linear | Int8Conv1D))
        queries.register_forward_hook(lambda module, args, out: seen.update(queries=out, normed=args[0]))
    logits_of(model, x)
    assert isinstance(seen["between"], BlockTensor)
    assert isinstance(seen["normed"], BlockTensor)
    assert seen["between"].statistics is not None  # the addition made what the next normalization needs
    assert type(seen["behind"]) is type(seen["queries"]) is Tensor


def test_a_block_size_reaches_every_module_in_one_form() -> None:
    """In whatever form the block size is given."""
    for given, kept in (([1, 128], (1, 128)), ((64, 64), 64)):
        for make in (lambda: vit(init_values=0.1, drop_path_rate=0.1, proj_drop_rate=0.1), llama):
            model = convert_to_int8_training(make(), given)
            assert conversion_report(model).block_size == kept
            ours = [module for module in model.modules() if type(module).__module__.startswith("qframework.")]
            assert len(ours) >= 20
            assert all(module.block_size == kept and type(module.block_size) is type(kept) for module in ours)


def test_what_each_module_becomes() -> None:
    model = convert_to_int8_training(llama(), 64)
    layer = model.model.layers[0]
    assert isinstance(layer.input_layernorm, Int8RMSNorm)
    assert layer.input_layernorm.eps == model.config.rms_norm_eps
    assert isinstance(layer.mlp, Int8GatedMLP)
    assert (layer.mlp.kind, layer.mlp.block_size) == ("silu", 64)
    outputs = {key: module.output for key, module in layer.named_modules() if isinstance(module, Int8Linear)}
    floats = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}
    assert {key for key, output in outputs.items() if output == "float"} == floats
    assert set(outputs) - floats == {"self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
    assert type(model.lm_head) is nn.Linear
    assert type(model.model.norm).__name__ == "LlamaRMSNorm"
    model = convert_to_int8_training(gpt2())
    assert isinstance(model.transformer.h[0].mlp.act, Int8Activation)
    assert model.transformer.h[0].mlp.act.kind == "gelu_tanh"
    assert type(model.transformer.ln_f) is nn.LayerNorm


def test_blocks_of_32_have_the_name_of_the_paper() -> None:
    for block_size, expected in (("jetfire", 32), ([32, 32], 32), (128, 128)):
        assert conversion_report(convert_to_int8_training(vit(), block_size)).block_size == expected
    message = r"block_size must be one of 32, 64, 128, \(32, 128\), \(1, 128\), \(1, 256\), 'jetfire', got 'paper'"
    with pytest.raises(UnsupportedError, match=message):
        convert_to_int8_training(vit(), "paper")


def test_the_report_names_every_module() -> None:
    model = convert_to_int8_training(vit(init_values=0.1, drop_path_rate=0.1, qk_norm=True, norm_layer=nn.LayerNorm))
    report = conversion_report(model)
    assert report.blocks == ("blocks.0", "blocks.1")
    rows = {row.name: (row.before, row.after) for row in report.converted}
    assert rows["blocks.1.attn.qkv"] == ("Linear", "Int8Linear (float out)")
    assert rows["blocks.1.mlp.fc2"] == ("Linear", "Int8Linear (block out)")
    assert rows["blocks.1.ls2"] == ("LayerScale", "Int8LayerScale")
    assert rows["blocks.1.drop_path1"] == ("DropPath", "Int8DropPath")
    kept = {row.name: row.reason for row in report.kept}
    assert set(kept) == {f"blocks.{i}.attn.{name}" for i in (0, 1) for name in ("q_norm", "k_norm", "attn_drop")}
    assert set(kept.values()) == {"inside attention, which computes in 16 bits"}
    assert report.outside == ("head",)
    shown = str(report)
    assert "1 linears outside of blocks kept: head" in shown
    assert "INT8 training, per_block, blocks of 1 x 128" in shown
    assert "blocks of 1 x 128:" in str(conversion_report(convert_to_int8_training(vit(), [1, 128])))
    assert "2 Linear to Int8Linear (float out)" in shown
    loss_of(model, inputs("vit")).backward()
    assert fallbacks == {}


@each_model
@pytest.mark.parametrize("mode", ["per_tensor", "per_token"])
def test_the_baselines_convert_linears_only(name: str, mode: Any) -> None:
    model, x = MODELS[name]().eval(), inputs(name)
    wanted = logits_of(model, x).detach()
    convert_to_int8_training(model, mode=mode)
    report = conversion_report(model)
    assert {row.before for row in report.converted} <= {"Linear", "Conv1D"}
    assert not any(isinstance(module, Int8LayerNorm | Int8RMSNorm | Int8Linear) for module in model.modules())
    error = float((logits_of(model, x).detach() - wanted).norm() / wanted.norm())
    assert 1e-5 < error < 0.1  # a hundred times the rounding of float32, less than any of 8 bits
    loss_of(model, x).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("block_size", [32, (1, 128)])
def test_saved_tensors_of_a_model_take_one_byte_per_value(block_size: CanonicalSize) -> None:
    """The paper has 1.49 times less than 16 bits; with C channels a token keeps about 21 C bytes instead of 32 C.

    About 14 C of them are INT8 values, whose scales are 0.05 C in blocks of 32, and 0.4 C in those of (1, 128).
    """
    x = torch.randn(2, 64, 256)
    half = Block(256, 4).bfloat16()
    floats = saved_bytes(lambda: half(x.bfloat16()), list(half.parameters()))
    model = convert_to_int8_training(nn.Sequential(Block(256, 4)), block_size, keep_weights=False)
    with torch.autocast("cpu", torch.bfloat16):
        blocks = saved_bytes(lambda: model(x), list(model.parameters()))
    assert floats > 1.49 * blocks
    with torch.autocast("cpu", torch.bfloat16):
        restore_float(model)
        convert_to_int8_training(model, block_size)
        more = saved_bytes(lambda: model(x), list(model.parameters())) - blocks
    weights = 12 * 256 * 256
    assert weights <= more < 1.01 * weights


# The way back


@each_model
@pytest.mark.parametrize("mode", ["per_block", "per_token"])
def test_restored_models_are_the_float_ones(name: str, mode: Any) -> None:
    model, x = MODELS[name]().eval(), inputs(name)
    kinds, wanted = [type(module) for module in model.modules()], logits_of(model, x)
    convert_to_int8_training(model, mode=mode)
    assert not torch.equal(logits_of(model, x), wanted)
    assert restore_float(model) is model
    assert [type(module) for module in model.modules()] == kinds
    assert torch.equal(logits_of(model, x), wanted)
    assert not model.training
    convert_to_int8_training(model, mode=mode)  # once more


def test_restored_models_have_the_trained_weights_and_their_mode() -> None:
    model = convert_to_int8_training(llama())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    trained = state(model)
    assert same(state(restore_float(model.eval())), trained)
    assert not any(module.training for module in model.modules())


def test_replaced_parameters_are_not_kept_alive() -> None:
    """The model keeps only its current parameters alive and returns them."""
    model = convert_to_int8_training(gpt2())
    old = weakref.ref(model.transformer.h[0].mlp.c_fc.weight)
    model.load_state_dict({key: value + 1 for key, value in model.state_dict().items()}, assign=True)
    wanted = state(model)
    assert old() is None
    assert same(state(restore_float(model)), wanted)


def test_copies_and_pickles_are_converted_models(tmp_path: Any) -> None:
    model, x = convert_to_int8_training(vit()).eval(), inputs("vit")
    wanted = logits_of(model, x)
    torch.save(model, tmp_path / "model.pt")
    for other in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        assert torch.equal(logits_of(other, x), wanted)
        restore_float(other)
        assert not torch.equal(logits_of(other, x), wanted)
    assert torch.equal(logits_of(model, x), wanted)


def test_a_model_on_meta_is_converted() -> None:
    with torch.device("meta"):
        model = llama()
    convert_to_int8_training(model)
    assert len(conversion_report(model).converted) == 22
    assert all(parameter.is_meta for parameter in model.parameters())


# Choices and refusals


def test_modules_kept_in_float() -> None:
    model, x = vit(act_layer=nn.Mish), inputs("vit")
    with pytest.raises(
        UnsupportedError, match=r'got blocks\.\*\.mlp\.act \(Mish\)\. .*pass keep_float=\["blocks\.\*\.mlp\.act"\]$'
    ):
        convert_to_int8_training(model)
    assert not any(isinstance(module, Int8Linear) for module in model.modules())  # nothing was changed
    convert_to_int8_training(model, keep_float=["blocks.*.act", "blocks.0.attn"])
    kept = {row.name for row in conversion_report(model).kept if row.reason == "named in keep_float"}
    assert {"blocks.1.mlp.act", "blocks.0.attn.qkv", "blocks.0.attn.proj"} <= kept
    assert type(model.blocks[0].attn.qkv) is nn.Linear
    assert isinstance(model.blocks[1].attn.qkv, Int8Linear)
    loss_of(model, x).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_whole_block_kept_in_float() -> None:
    model, x = vit(depth=3), inputs("vit")
    convert_to_int8_training(model, keep_float=["blocks.1"])
    assert conversion_report(model).blocks == ("blocks.0", "blocks.2")
    assert type(model.blocks[1].norm1).__name__ == "LayerNorm"
    loss_of(model, x).backward()
    assert fallbacks == {}


@pytest.mark.parametrize("block_size", [0, 16, 48, 256, (128, 32), (1, 64), [1, 128, 128], "1x128"])
def test_other_block_sizes_are_refused(block_size: Any) -> None:
    with pytest.raises(
        UnsupportedError, match=rf"must be one of 32, 64, 128, \(32, 128\).*, got {re.escape(repr(block_size))}"
    ):
        convert_to_int8_training(vit(), block_size)


class Adapted(nn.Module):
    """A linear layer with an adapter beside it, as PEFT replaces it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_a, self.lora_b = nn.Linear(base.in_features, 4, bias=False), nn.Linear(4, base.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_b(self.lora_a(x.to(self.lora_a.weight.dtype)))


def test_adapters_are_added_after_the_conversion() -> None:
    model = vit()
    model.blocks[0].mlp.fc2 = Adapted(model.blocks[0].mlp.fc2)
    message = r"blocks\.0\.mlp\.fc2 \(Adapted\): it wraps a linear layer\. Convert the model first, then add adapters"
    with pytest.raises(UnsupportedError, match=message):
        convert_to_int8_training(model)

    model, exact = vit(), vit()
    exact.load_state_dict(model.state_dict())
    convert_to_int8_training(model)
    for each in (model, exact):
        torch.manual_seed(0)
        each.blocks[0].mlp.fc2 = Adapted(each.blocks[0].mlp.fc2).requires_grad_(False)
        each.blocks[0].mlp.fc2.lora_b.requires_grad_(True)
    gradients = []
    for each in (model, exact):
        loss_of(each, inputs("vit")).backward()
        gradients.append(each.blocks[0].mlp.fc2.lora_b.weight.grad)
    assert float((gradients[0] - gradients[1]).norm() / gradients[1].norm()) < 0.2


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(
        UnsupportedError, match="mode must be one of 'per_block', 'per_tensor', 'per_token', got 'per_row'"
    ):
        convert_to_int8_training(vit(), mode="per_row")  # type: ignore[arg-type]
    with pytest.raises(QFrameworkError, match=r"keep_float must match modules of VisionTransformer, got 'block\.0'"):
        convert_to_int8_training(vit(), keep_float=["block.0"])
    with pytest.raises(QFrameworkError, match=r"blocks must match modules of VisionTransformer, got 'layers\.\*'"):
        convert_to_int8_training(vit(), blocks=["layers.*"])
    for argument in ("keep_float", "blocks"):
        with pytest.raises(UnsupportedError, match=rf"{argument} must be a list of names, got '\*'\. Pass \['\*'\]"):
            convert_to_int8_training(vit(), **{argument: "*"})
    with pytest.raises(UnsupportedError, match=r"model must have transformer blocks, .* blocks=, if it has any$"):
        convert_to_int8_training(nn.Sequential(nn.Linear(4, 4), nn.GELU()))
    model = convert_to_int8_training(vit())
    with pytest.raises(QFrameworkError, match="converted already"):
        convert_to_int8_training(model)
    with pytest.raises(QFrameworkError, match="model must be converted"):
        restore_float(vit())
    with pytest.raises(QFrameworkError, match="wrapped"):
        convert_to_int8_training(torch.compile(vit()))  # type: ignore[arg-type]


class OddNorm(nn.RMSNorm):
    """Scales by 2 + weight."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, self.normalized_shape, 2 + self.weight, self.eps)


def test_a_norm_that_computes_something_else_is_named() -> None:
    model = vit()
    model.blocks[1].norm1, model.blocks[1].norm2 = OddNorm(32), OddNorm(32)
    with pytest.raises(UnsupportedError, match=r"blocks\.1\.norm1 \(OddNorm\), blocks\.1\.norm2 \(OddNorm\)"):
        convert_to_int8_training(model)


class Strangers(nn.Module):
    """Blocks that are not found by their structure: attention is called mixer and reads its weights itself."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(32)
            self.mixer = nn.MultiheadAttention(32, 2, batch_first=True)
            self.fc = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            return self.fc(x + self.mixer(y, y, y, need_weights=False)[0]).sigmoid() + x

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.Layer(), self.Layer()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_third_party_blocks_are_named_by_the_user_and_fall_back() -> None:
    model, x = Strangers(), torch.randn(2, 16, 32)
    wanted = model(x).detach()
    with pytest.raises(UnsupportedError, match="Name its blocks in blocks="):
        convert_to_int8_training(model)
    with pytest.raises(
        UnsupportedError, match=r"layers\.\*\.mixer \(MultiheadAttention\): it reads the weights of its"
    ):
        convert_to_int8_training(model, blocks=["layers.*"])
    convert_to_int8_training(model, blocks=["layers.*"], keep_float=["*.mixer"])
    got = model(x)
    assert float((got - wanted).norm() / wanted.norm()) < 0.05
    got.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert "aten::sigmoid" in fallbacks


def test_linears_whose_weights_are_read_are_named() -> None:
    """timm's Beit adds a bias to queries and values itself; Swin's attention has parameters and calls its linears."""
    import timm

    beit = timm.create_model("beit_base_patch16_224", img_size=32, depth=1, embed_dim=32, num_heads=2, num_classes=5)
    with pytest.raises(UnsupportedError, match=r"blocks\.\*\.attn\.qkv \(Linear\): the Attention around it reads its"):
        convert_to_int8_training(beit, skip_slower=False)
    convert_to_int8_training(beit, keep_float=["blocks.*.attn.qkv"], skip_slower=False)
    assert "blocks.0.attn.proj" in {row.name for row in conversion_report(beit).converted}
    fallbacks.clear()
    beit(torch.randn(1, 3, 32, 32)).sum().backward()
    assert "aten::addmm" not in fallbacks  # attention gets floats
    swin = timm.create_model("swin_tiny_patch4_window7_224", img_size=56, depths=(1, 1), embed_dim=16, num_heads=(1, 2))
    convert_to_int8_training(swin, skip_slower=False)
    assert "layers.1.blocks.0.attn.qkv" in {row.name for row in conversion_report(swin).converted}
    swin(torch.randn(1, 3, 56, 56)).sum().backward()
    assert all(parameter.grad is not None for parameter in swin.parameters())


def test_a_module_in_two_places_stays_one_module() -> None:
    model = vit()
    model.blocks[1].mlp = model.blocks[0].mlp
    convert_to_int8_training(model)
    assert model.blocks[1].mlp.fc1 is model.blocks[0].mlp.fc1
    restore_float(model)
    assert model.blocks[1].mlp.fc1 is model.blocks[0].mlp.fc1
    assert type(model.blocks[1].mlp.fc1) is nn.Linear


def test_hooks_of_the_float_modules_still_run() -> None:
    model, seen = vit(), []
    model.blocks[0].mlp.fc1.register_forward_hook(lambda module, args, out: seen.append(type(module).__name__))
    logits_of(convert_to_int8_training(model), inputs("vit"))
    logits_of(restore_float(model), inputs("vit"))
    assert seen == ["Int8Linear", "Linear"]
