"""The cases of the benchmark of vision transformers on a GPU: the float model, and how each provider transforms it."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import models
from benchmarks.harness import UnavailableError
from benchmarks.models import Forward, Inputs, quantize_qframework, quantize_with_attention


@dataclass(frozen=True)
class Provider:
    """How a provider transforms the FP32 model: cast, ``quantize``, ``compile``."""

    dtype: torch.dtype = torch.float16
    precision: str = "float16"  # a key of models.SQNR_FLOOR_DB
    quantize: Callable[[nn.Module, Inputs], nn.Module] | None = None
    compile: Callable[[nn.Module], Forward] | None = None
    tf32: bool = False
    alone: bool = False  # times kernels to choose between them, so it must run alone
    optional: bool = False  # only run when named

    @property
    def label(self) -> str:
        """The dtypes for the table."""
        name = str(self.dtype).removeprefix("torch.")
        return {"int8": f"int8, {name}", "fp8": f"fp8, {name}", "tf32": "tf32"}.get(self.precision, name)


def _torchao() -> Any:
    try:
        from torchao import quantization
    except ImportError as error:
        raise UnavailableError(f"torchao is not installed: {error}") from error
    return quantization


def _quantize_int8(model: nn.Module, inputs: Inputs) -> nn.Module:
    """torchao's own dynamic INT8, without PT2E."""
    torchao = _torchao()
    torchao.quantize_(model, torchao.Int8DynamicActivationInt8WeightConfig())
    return model


def _quantize_fp8(model: nn.Module, inputs: Inputs, granularity: str) -> nn.Module:
    """torchao's dynamic FP8 with scales by ``PerRow`` or ``PerTensor``."""
    device = (inputs if isinstance(inputs, Tensor) else inputs[0]).device
    if device.type != "cuda" or torch.cuda.get_device_capability() < (8, 9):
        raise UnavailableError(f"FP8 needs a GPU of compute capability 8.9, runs on {device.type}")
    torchao = _torchao()
    scales = getattr(torchao, granularity)()
    torchao.quantize_(model, torchao.Float8DynamicActivationFloat8WeightConfig(granularity=scales))
    return model


_inductor = functools.partial(torch.compile, dynamic=False)
_max_autotune = functools.partial(_inductor, mode="max-autotune")


def _inductor_blocks(model: nn.Module) -> nn.Module:
    """The blocks of ``model`` by themselves, by one compilation for all that are alike; the rest of it stays eager."""
    for block in blocks_of(model):
        block.compile(dynamic=False)
    return model


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The longest list of at least four modules of one class."""
    lists = [list(part) for part in model.modules() if isinstance(part, nn.ModuleList | nn.Sequential)]
    alike = [modules for modules in lists if len(modules) >= 4 and len(set(map(type, modules))) == 1]
    if not alike:
        raise UnavailableError("it has no list of at least four blocks of one class")
    return max(alike, key=len)


def _qframework(graphs: bool = False, **options: Any) -> Callable[[nn.Module], Forward]:
    """Compiled by the backend with ``options``, under CUDA graphs if asked."""
    if graphs:
        options["triton.cudagraphs"] = True
    return functools.partial(torch.compile, backend="qframework", dynamic=False, options=options or None)


_OVERLAP = {"triton.enable_pdl": True}  # programmatic dependent launch for Inductor's kernels too
_LIVE: dict[str, Any] = {"linear": "int8_dynamic"}
_FROZEN: dict[str, Any] = {**_LIVE, "freeze_weights": True}
_int8 = functools.partial(Provider, precision="int8")
_static = functools.partial(quantize_qframework, preset="static_int8")
_dynamic = functools.partial(quantize_qframework, preset="dynamic_int8")
# torchao's PerRow supports only bfloat16 weights.
_fp8 = functools.partial(Provider, torch.bfloat16, "fp8")
_fp8_rowwise = functools.partial(_fp8, functools.partial(_quantize_fp8, granularity="PerRow"))
_fp8_tensorwise = functools.partial(_fp8, functools.partial(_quantize_fp8, granularity="PerTensor"))

PROVIDERS: dict[str, Provider] = {
    "fp32": Provider(torch.float32, "float32"),
    "tf32": Provider(torch.float32, "tf32", tf32=True, optional=True),
    "fp16": Provider(),
    "fp16_compiled": Provider(compile=_inductor),
    "fp16_compiled_graphs": Provider(compile=functools.partial(_inductor, mode="reduce-overhead")),
    "fp16_max_autotune": Provider(compile=_max_autotune, alone=True),
    "torchao_int8_dynamic": _int8(quantize=_quantize_int8, compile=_inductor),
    "torchao_fp8_rowwise": _fp8_rowwise(compile=_inductor),
    "torchao_fp8_tensorwise": _fp8_tensorwise(compile=_inductor),
    "torchao_fp8_rowwise_blocks": _fp8_rowwise(compile=_inductor_blocks, optional=True),
    "torchao_fp8_tensorwise_blocks": _fp8_tensorwise(compile=_inductor_blocks, optional=True),
    "torchao_fp8_rowwise_max_autotune": _fp8_rowwise(compile=_max_autotune, alone=True, optional=True),
    "torchao_fp8_tensorwise_max_autotune": _fp8_tensorwise(compile=_max_autotune, alone=True, optional=True),
    "qframework_float": Provider(compile=_qframework(), optional=True),  # attention alone
    "qframework_float_graphs": Provider(compile=_qframework(graphs=True), optional=True),
    "qframework_static": _int8(quantize=_static, compile=_qframework()),
    "qframework_static_sage": _int8(quantize=_static, compile=_qframework(attention="sage")),
    "qframework_static_int8_attention": _int8(quantize=quantize_with_attention, compile=_qframework()),
    "qframework_static_int8_attention_graphs": _int8(
        quantize=quantize_with_attention, compile=_qframework(graphs=True)
    ),
    "qframework_static_graphs": _int8(quantize=_static, compile=_qframework(graphs=True)),
    "qframework_static_sage_graphs": _int8(quantize=_static, compile=_qframework(graphs=True, attention="sage")),
    "qframework_dynamic": _int8(quantize=_dynamic, compile=_qframework()),
    "qframework_dynamic_sage": _int8(quantize=_dynamic, compile=_qframework(attention="sage")),
    "qframework_dynamic_graphs": _int8(quantize=_dynamic, compile=_qframework(graphs=True)),
    "qframework_dynamic_sage_graphs": _int8(quantize=_dynamic, compile=_qframework(graphs=True, attention="sage")),
    "qframework_static_overlap": _int8(quantize=_static, compile=_qframework(**_OVERLAP), optional=True),
    "qframework_static_graphs_overlap": _int8(quantize=_static, compile=_qframework(True, **_OVERLAP), optional=True),
    # A float model compiled by the backend, which quantizes weights at each call, or once.
    "qframework_dynamic_float": _int8(compile=_qframework(**_LIVE), optional=True),
    "qframework_dynamic_float_graphs": _int8(compile=_qframework(graphs=True, **_LIVE), optional=True),
    "qframework_dynamic_frozen": _int8(compile=_qframework(**_FROZEN), optional=True),
    "qframework_dynamic_frozen_graphs": _int8(compile=_qframework(graphs=True, **_FROZEN), optional=True),
}


@dataclass(frozen=True)
class Subject:
    """The float model and the reference of its providers, on the CPU to keep it out of their memory."""

    model: nn.Module
    images: Tensor  # (largest batch, 3, H, W) fp32; a smaller batch is its beginning
    reference: Tensor  # (largest batch, classes) fp32, computed on the device with TF32 off
    device: str

    @classmethod
    def build(cls, name: str, batch: int, device: str, smoke: bool, **arguments: Any) -> Subject:
        """``arguments`` go to timm."""
        with torch.device(device):
            model = models.build_model(name, smoke, **arguments)
        images = models.random_images(model, batch)
        with torch.inference_mode(), allow_tf32(False):
            reference = model(images.to(device)).cpu()
        return cls(model.cpu(), images, reference, device)


def prepare(subject: Subject, provider: Provider, images: Tensor) -> nn.Module:
    """A copy of the model on the device in the provider's dtype, quantized if the provider does so."""
    model = copy.deepcopy(subject.model).to(subject.device, provider.dtype)
    return model if provider.quantize is None else provider.quantize(model, images)


@contextlib.contextmanager
def allow_tf32(allowed: bool) -> Iterator[None]:
    """Allow or forbid TensorFloat-32 for matrix products and convolutions inside the block."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32
    kept = {name: getattr(cudnn, name) for name in ("enabled", "benchmark", "deterministic")}
    with cudnn.flags(**kept, allow_tf32=allowed):  # works even if global flags are frozen
        matmul.allow_tf32 = allowed
        try:
            yield
        finally:
            matmul.allow_tf32 = before


@contextlib.contextmanager
def inference(provider: Provider) -> Iterator[None]:
    """The context of a provider's calls. Exceeding Dynamo's recompile limit is an error, not a silent fall back."""
    import torch._dynamo.config as dynamo_config

    limits = dynamo_config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True)
    with torch.inference_mode(), allow_tf32(provider.tf32), limits:
        yield
