"""``from_pretrained(quantization_config=QFrameworkConfig())`` of diffusers, on models in folders, without a network"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

pytest.importorskip("diffusers")
pytest.importorskip("accelerate")

import diffusers
from diffusers_models import MODELS, ONE_TEXT, cast, output

from qframework import QFrameworkConfig, quantize_
from qframework.conversion import QuantizedLinear
from qframework.errors import CalibrationError, FileFormatError, UnsupportedError
from qframework.integrations.diffusers import QFrameworkDiffusersQuantizer, as_pretrained
from qframework.quantizer import dynamic_int8, static_int8

SHARD = "20KB"


def built(name: str) -> tuple[Any, dict[str, Any]]:
    """A float model and its inputs."""
    torch.manual_seed(0)
    build, inputs = MODELS[name]
    return build().eval(), inputs()


def saved(model: Any, folder: Path, size: str = SHARD) -> Path:
    model.save_pretrained(folder, max_shard_size=size)
    return folder


def loaded(model: Any, folder: Path, *names: str, **arguments: Any) -> Any:
    """``model`` saved in float and loaded in INT8, with ``names`` in float, or the default."""
    config = QFrameworkConfig(modules_to_not_convert=names or None)
    return type(model).from_pretrained(saved(model, folder), quantization_config=config, **arguments)


def layers(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}


def in_float(model: Any) -> list[str]:
    return model.config.quantization_config.modules_to_not_convert  # type: ignore[no-any-return]


def equal(x: Tensor, y: Tensor) -> None:
    torch.testing.assert_close(x, y, rtol=0, atol=0)


# Loading and saving ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_a_loaded_model_is_that_of_quantize_(name: str, tmp_path: Path) -> None:
    """To the bit, after quantization while loading and after saving and loading the quantized model."""
    model, batch = built(name)
    exact = output(model, batch)
    quantized = loaded(model, tmp_path / "float")
    assert len(list((tmp_path / "float").glob("*.safetensors"))) > 1
    kept = in_float(quantized)
    quantize_(model, dynamic_int8(), filter_fn=lambda module, layer: layer not in kept)
    assert layers(quantized) == layers(model)
    assert len(layers(quantized)) >= 14

    expected = output(model, batch)
    equal(output(quantized, batch), expected)
    again = type(model).from_pretrained(saved(quantized, tmp_path / "int8"))
    assert layers(again) == layers(model)
    equal(output(again, batch), expected)

    # Each value is rounded to within 1/254 of a maximum: a few layers of that are 1 percent, and no layer is skipped.
    assert 1e-4 < (expected - exact).norm() / exact.norm() < 0.01


@pytest.mark.parametrize("name", ["DiT", "Wan"])
def test_only_linear_layers_change(name: str, tmp_path: Path) -> None:
    """Convolutions, normalizations and embeddings are those of the float model."""
    model, _ = built(name)
    quantized = loaded(model, tmp_path)
    changed = layers(quantized)
    for path, module in model.named_modules():
        if path not in changed:
            assert type(quantized.get_submodule(path)) is type(module)
    state = quantized.state_dict()
    for path, value in model.state_dict().items():
        if path.removesuffix(".weight") not in changed:
            equal(state[path], value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    model, batch = built("SD3")
    first = loaded(model, tmp_path / "float", torch_dtype=dtype)
    second = type(model).from_pretrained(saved(first, tmp_path / "int8"), torch_dtype=dtype)
    for each in (first, second):
        layer = each.transformer_blocks[0].attn.to_q
        assert (layer.dtype, layer.bias.dtype, layer.weight_scale.dtype) == (dtype, dtype, torch.float32)
        assert output(each, cast(batch, dtype)).dtype == dtype
    # Scales are float32, and are not rounded to the dtype of the model on their way through a file.
    scale = model.transformer_blocks[0].attn.to_q.weight.to(dtype).float().abs().amax(1) / 127
    torch.testing.assert_close(second.transformer_blocks[0].attn.to_q.weight_scale, scale, rtol=2e-7, atol=0)
    equal(output(first, cast(batch, dtype)), output(second, cast(batch, dtype)))


def test_modules_that_diffusers_keeps_in_float32(tmp_path: Path) -> None:
    model, batch = built("Wan")
    config = QFrameworkConfig(modules_to_not_convert=[])
    quantized = type(model).from_pretrained(
        saved(model, tmp_path), quantization_config=config, torch_dtype=torch.bfloat16
    )
    embedder = "condition_embedder.time_embedder"
    assert in_float(quantized) == [f"{embedder}.linear_1", f"{embedder}.linear_2"]
    assert quantized.get_submodule(f"{embedder}.linear_1").weight.dtype == torch.float32
    assert quantized.blocks[0].norm2.weight.dtype == torch.float32
    assert output(quantized, cast(batch, torch.bfloat16)).dtype == torch.bfloat16


def test_float_weights_are_freed_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = built("LTX")
    seen: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    create = QFrameworkDiffusersQuantizer.create_quantized_param

    def watched(self: Any, model: Any, value: Tensor, *arguments: Any, **settings: Any) -> None:
        alive.append(sum(reference() is not None for reference in seen))
        seen.append(weakref.ref(value))
        create(self, model, value, *arguments, **settings)

    monkeypatch.setattr(QFrameworkDiffusersQuantizer, "create_quantized_param", watched)
    quantized = loaded(model, tmp_path, torch_dtype=torch.bfloat16)  # so that each value is a tensor of its own
    assert len(seen) == len(layers(quantized)) == 25
    assert max(alive) == 0
    assert all(reference() is None for reference in seen)


def test_a_quantized_checkpoint_is_loaded_without_float_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = built("Flux")
    folder = saved(loaded(model, tmp_path / "float"), tmp_path / "int8")
    monkeypatch.setattr(
        "qframework.conversion.in_place.replace_layer", lambda *_: pytest.fail("a weight was quantized")
    )
    again = type(model).from_pretrained(folder)
    matrices = {name.removesuffix(".weight") for name, each in again.named_parameters() if each.ndim == 2}
    assert matrices == set(in_float(again))


@pytest.mark.parametrize("device_map", ["cpu", {"": "cpu"}, "auto"])
def test_device_map(device_map: Any, tmp_path: Path) -> None:
    model, batch = built("PixArt")
    expected = output(loaded(model, tmp_path / "float"), batch)
    quantized = loaded(model, tmp_path / "float", device_map=device_map)
    equal(output(quantized, batch), expected)
    again = type(model).from_pretrained(saved(quantized, tmp_path / "int8"), device_map=device_map)
    equal(output(again, batch), expected)


def test_device_map_auto_counts_one_byte_for_a_quantized_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import diffusers.models.model_loading_utils as loading

    model, _ = built("PixArt")
    asked: dict[str, Any] = {}

    def infer(model: nn.Module, special_dtypes: Any = None, **arguments: Any) -> dict[str, str]:
        asked.update(arguments, special_dtypes=special_dtypes)
        return {"": "cpu"}

    monkeypatch.setattr(loading, "infer_auto_device_map", infer)
    quantized = loaded(model, tmp_path, device_map="sequential", torch_dtype=torch.bfloat16)
    assert asked["dtype"] == torch.int8
    assert set(asked["special_dtypes"].values()) == {torch.bfloat16}
    weights = {f"{layer}.weight" for layer in layers(quantized)}
    assert set(asked["special_dtypes"]) == {name for name, _ in model.named_parameters()} - weights


FRESH = """
import sys
import {first}
import {second}
from diffusers import DiTTransformer2DModel
from qframework.conversion import QuantizedLinear
model = DiTTransformer2DModel.from_pretrained(sys.argv[1])
assert sum(isinstance(module, QuantizedLinear) for module in model.modules()) == 14
"""
# diffusers alone, as if transformers were not installed.
ALONE = """
import importlib.abc, importlib.util, sys
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name.startswith("transformers") else found(name, *more)
sys.modules["transformers"] = None
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "first", "second"),
    [
        ("", "qframework", "diffusers"),
        (ALONE, "diffusers.models", "qframework"),
    ],
)
def test_a_new_process_loads_a_quantized_model(before: str, first: str, second: str, tmp_path: Path) -> None:
    folder = saved(loaded(built("DiT")[0], tmp_path / "float"), tmp_path / "int8")
    command = [sys.executable, "-c", before + FRESH.format(first=first, second=second), str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_a_float_checkpoint_in_a_single_file(tmp_path: Path) -> None:
    model, batch = built("LTX")
    expected = output(loaded(model, tmp_path / "float"), batch)
    arguments = {"config": str(tmp_path / "float"), "quantization_config": QFrameworkConfig()}
    save_file(model.state_dict(), tmp_path / "single.safetensors")
    quantized = type(model).from_single_file(str(tmp_path / "single.safetensors"), **arguments)
    equal(output(quantized, batch), expected)

    save_file(quantized.state_dict(), tmp_path / "single.safetensors")
    arguments["quantization_config"] = quantized.config.quantization_config
    again = type(model).from_single_file(str(tmp_path / "single.safetensors"), **arguments)
    assert layers(again) == layers(quantized)
    equal(output(again, batch), expected)


def test_auto_model_and_files_read_in_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads would replace layers while other threads set their biases: the files are read one by one."""
    model, batch = built("Wan")
    expected = output(loaded(model, tmp_path), batch)
    monkeypatch.setattr("diffusers.models.modeling_utils.HF_ENABLE_PARALLEL_LOADING", True)
    monkeypatch.setattr(
        "diffusers.models.modeling_utils._load_shard_files_with_threadpool", lambda *_, **__: pytest.fail("threads")
    )
    again = diffusers.AutoModel.from_pretrained(str(tmp_path), quantization_config=QFrameworkConfig())
    equal(output(again, batch), expected)


# Layers that stay in float --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "kept"),
    [
        (["proj_out"], {"proj_out", "single_transformer_blocks.0.proj_out", "single_transformer_blocks.1.proj_out"}),
        (["transformer_blocks.1.attn"], {f"transformer_blocks.1.attn.{name}" for name in
            ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")}),
    ],
)  # fmt: skip
def test_modules_to_not_convert(names: list[str], kept: set[str], tmp_path: Path) -> None:
    model, batch = built("Flux")
    quantized = loaded(model, tmp_path / "float", *names)
    assert set(in_float(quantized)) == kept
    assert len(layers(quantized)) == 48 - len(kept)
    again = type(model).from_pretrained(saved(quantized, tmp_path / "int8"))
    assert layers(again) == layers(quantized)
    equal(output(again, batch), output(quantized, batch))


def test_by_default_the_layers_that_layerwise_casting_skips(tmp_path: Path) -> None:
    """The same as diffusers chooses, which stores all other weights in FP8."""
    for name in ("Flux", "HunyuanVideo", "CogVideoX", "Wan"):
        model, _ = built(name)
        quantized = loaded(model, tmp_path / name)
        model.enable_layerwise_casting(torch.float8_e4m3fn, torch.float32)
        linears = {path: module for path, module in model.named_modules() if isinstance(module, nn.Linear)}
        cast = {path for path, module in linears.items() if module.weight.dtype == torch.float8_e4m3fn}
        assert layers(quantized) == cast
        assert 0 < len(cast) < len(linears)


def test_one_configuration_serves_several_models(tmp_path: Path) -> None:
    config = QFrameworkConfig()
    for name in ("DiT", "Wan"):
        model, _ = built(name)
        assert layers(type(model).from_pretrained(saved(model, tmp_path / name), quantization_config=config))
    assert config == QFrameworkConfig()


# Pipelines ------------------------------------------------------------------------------------------------------------


def pipeline() -> Any:
    torch.manual_seed(0)
    sizes = {"sample_size": 8, "patch_size": 2, "num_embeds_ada_norm": 1000}
    transformer = diffusers.DiTTransformer2DModel(**ONE_TEXT, **sizes, in_channels=4, out_channels=8)
    vae = diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, latent_channels=4)
    return diffusers.DiTPipeline(transformer.eval(), vae.eval(), diffusers.DDIMScheduler())


def generated(pipe: Any) -> Tensor:
    pipe.set_progress_bar_config(disable=True)
    seed = torch.Generator().manual_seed(0)
    images = pipe([1, 5], num_inference_steps=2, guidance_scale=2.0, generator=seed, output_type="np").images
    return torch.tensor(images)


MAPPING = {"quant_mapping": {"transformer": QFrameworkConfig(modules_to_not_convert=[])}}
BACKEND = {"quant_backend": "qframework", "quant_kwargs": {"modules_to_not_convert": None}}


@pytest.mark.parametrize(
    ("settings", "counts"),
    [
        (MAPPING, (20, 0)),
        ({**BACKEND, "components_to_quantize": "transformer"}, (14, 0)),
        (BACKEND, (14, 8)),
    ],
)
def test_a_pipeline(settings: Any, counts: tuple[int, int], tmp_path: Path) -> None:
    exact = pipeline()
    exact.save_pretrained(tmp_path / "float")
    config = diffusers.PipelineQuantizationConfig(**settings)
    quantized = diffusers.DiTPipeline.from_pretrained(tmp_path / "float", quantization_config=config)
    quantized.save_pretrained(tmp_path / "int8")
    again = diffusers.DiTPipeline.from_pretrained(tmp_path / "int8")
    for each in (quantized, again):
        assert (len(layers(each.transformer)), len(layers(each.vae))) == counts
    images = generated(quantized)
    equal(generated(again), images)
    expected = generated(exact)
    assert 0 < (images - expected).norm() / expected.norm() < 0.03


def test_a_pipeline_with_a_text_encoder_of_transformers(tmp_path: Path) -> None:
    """One configuration for a model of each library, which leave different layers in float."""
    transformers = pytest.importorskip("transformers")
    text = transformers.T5Config(vocab_size=99, d_model=24, d_kv=12, d_ff=48, num_layers=1, num_heads=2)
    encoder, parts = transformers.T5EncoderModel(text), pipeline()
    pipe = diffusers.PixArtAlphaPipeline(None, encoder, parts.vae, built("PixArt")[0], parts.scheduler)
    pipe.save_pretrained(tmp_path)
    both = QFrameworkConfig()
    config = diffusers.PipelineQuantizationConfig(quant_mapping={"transformer": both, "text_encoder": both})
    quantized = diffusers.PixArtAlphaPipeline.from_pretrained(tmp_path, tokenizer=None, quantization_config=config)
    assert len(layers(quantized.transformer)) == 22
    assert layers(quantized.text_encoder)


# Devices and offloading -----------------------------------------------------------------------------------------------


def test_moving_and_copying(tmp_path: Path) -> None:
    model, batch = built("DiT")
    quantized = loaded(model, tmp_path)
    expected = output(quantized, batch)
    equal(output(quantized.to("cpu"), batch), expected)
    equal(output(copy.deepcopy(quantized), batch), expected)
    on_meta = copy.deepcopy(quantized).to("meta")
    assert {tensor.device.type for tensor in on_meta.state_dict().values()} == {"meta"}
    for change in (lambda: quantized.to(torch.float16), quantized.half, quantized.float):
        with pytest.raises(ValueError, match="quantized"):
            change()


@pytest.mark.parametrize(("kind", "blocks"), [("block_level", 1), ("leaf_level", None)])
def test_group_offloading(kind: str, blocks: int | None, tmp_path: Path) -> None:
    """Offloaded to files, so that the weights are gone in between, which needs no GPU."""
    model, batch = built("CogVideoX")
    quantized = loaded(model, tmp_path / "float")
    expected, number = output(quantized, batch), len(layers(quantized))
    cpu, folder = torch.device("cpu"), tmp_path / "offloaded"
    quantized.enable_group_offload(cpu, cpu, kind, blocks, offload_to_disk_path=str(folder))
    equal(output(quantized, batch), expected)
    stored = [value for file in folder.glob("*.safetensors") for value in load_file(file).values()]
    assert sum(value.dtype == torch.int8 for value in stored) == number


def test_sequential_offloading(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model, batch = built("DiT")
    quantized = loaded(model, tmp_path)
    expected = output(quantized, batch)
    accelerate.cpu_offload(quantized, torch.device("cpu"), offload_buffers=True)
    assert quantized.transformer_blocks[0].attn1.to_q.weight_int8.is_meta
    equal(output(quantized, batch), expected)


# Static scales --------------------------------------------------------------------------------------------------------


def test_static_scales_are_saved_and_loaded(tmp_path: Path) -> None:
    model, batch = built("LTX")
    quantize_(model, static_int8(), [batch])
    again = type(model).from_pretrained(saved(model, tmp_path), torch_dtype=torch.bfloat16)
    layer, same = (each.transformer_blocks[0].attn1.to_q for each in (model, again))
    equal(same.input_scale, layer.input_scale)
    again = type(model).from_pretrained(tmp_path)
    assert layers(again) == layers(model)
    equal(output(again, batch), output(model, batch))


def test_as_pretrained_refuses_a_float_model() -> None:
    with pytest.raises(UnsupportedError, match=r"must have been quantized by quantize_, got a DiT\w+ in float"):
        as_pretrained(built("DiT")[0], QFrameworkConfig())


# Errors ---------------------------------------------------------------------------------------------------------------


EVERY_LINEAR = ["transformer_blocks", "proj_out_1", "proj_out_2"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"quantization_config": QFrameworkConfig(static_int8())}, "must have a dynamic activation.*quantize_"),
        (
            {"quantization_config": QFrameworkConfig(modules_to_not_convert=["attn3"])},
            r"must name modules of DiT\w+, got 'attn3'",
        ),
        (
            {"quantization_config": QFrameworkConfig(modules_to_not_convert=EVERY_LINEAR)},
            "needs a model with linear layers .* got none in DiT",
        ),
        ({"torch_dtype": torch.float64}, "torch_dtype must be .* got torch.float64"),
        ({"torch_dtype": torch.float8_e4m3fn}, "torch_dtype must be .* got torch.float8_e4m3fn"),
        ({"device_map": {"": "disk"}}, "device_map must map to GPUs and 'cpu' for quantized models"),
        ({"device_map": {"": "cpu", "pos_embed": 0}}, "must not split .* call its enable_group_offload"),
        ({"device_map": {"": "cuda:0", "pos_embed": "cpu"}}, "must not split .* call its enable_group_offload"),
    ],
)
def test_models_and_arguments_that_do_not_fit(arguments: Any, message: str, tmp_path: Path) -> None:
    model, _ = built("DiT")
    with pytest.raises(UnsupportedError, match=message):
        type(model).from_pretrained(saved(model, tmp_path), **{"quantization_config": QFrameworkConfig(), **arguments})


@pytest.fixture(params=["float", "int8"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A file of a DiT, in float to be quantized while it is loaded, or in INT8, and the arguments to load it."""
    model, _ = built("DiT")
    folder, arguments = saved(model, tmp_path / "float", "1GB"), {"quantization_config": QFrameworkConfig()}
    if request.param == "int8":
        quantized = type(model).from_pretrained(folder, **arguments)
        folder, arguments = saved(quantized, tmp_path / "int8", "1GB"), {}
    return folder / "diffusion_pytorch_model.safetensors", arguments


def load(checkpoint: tuple[Path, dict[str, Any]], change: Any) -> None:
    file, arguments = checkpoint
    state = load_file(file)
    change(state, next(name for name in state if name.startswith("transformer_blocks.1.attn1.to_k.weight")))
    save_file(state, file, metadata={"format": "pt"})
    diffusers.DiTTransformer2DModel.from_pretrained(file.parent, **arguments)


def test_a_weight_that_is_missing(checkpoint: Any) -> None:
    with pytest.raises(FileFormatError, match=r"must hold the weights .* got none for transformer_blocks.1.attn1.to_k"):
        load(checkpoint, lambda state, name: state.pop(name))


def test_a_weight_of_another_shape(checkpoint: Any) -> None:
    with pytest.raises(ValueError, match=r"transformer_blocks\.1\.attn1\.to_k.* shape .*32.* got .*16"):
        load(checkpoint, lambda state, name: state.update({name: state[name][:16].contiguous()}))


def test_weights_that_are_not_finite_name_the_layer(tmp_path: Path) -> None:
    model, _ = built("DiT")
    model.transformer_blocks[0].ff.net[2].weight.data[0, 0] = torch.nan
    with pytest.raises(CalibrationError, match=r"layer 'transformer_blocks.0.ff.net.2': the weight must be finite"):
        loaded(model, tmp_path)


def test_the_configuration_in_the_file(tmp_path: Path) -> None:
    model, _ = built("DiT")
    folder = saved(loaded(model, tmp_path / "float"), tmp_path / "int8")
    written = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert written["quant_method"] == "qframework"
    assert QFrameworkConfig.from_dict(written).linear == dynamic_int8()
    assert all(isinstance(model.get_submodule(name), nn.Linear) for name in written["modules_to_not_convert"])
