"""Small models of several libraries, and ONNX Runtime on the CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import timm
import torch
import transformers
from torch import Tensor, nn

INT8_PRODUCTS = ("MatMulIntegerToFloat", "QLinearMatMul")


def vit() -> tuple[nn.Module, Any]:
    model = timm.models.VisionTransformer(img_size=32, patch_size=8, embed_dim=64, depth=1, num_heads=2, num_classes=10)
    return randomized(model), (torch.randn(4, 3, 32, 32),)


def swin() -> tuple[nn.Module, Any]:
    model = timm.models.SwinTransformer(
        img_size=28, patch_size=4, embed_dim=32, depths=(2,), num_heads=(2,), window_size=4, num_classes=10
    )
    return randomized(model), (torch.randn(4, 3, 28, 28),)


def bert() -> tuple[nn.Module, Any]:
    config = transformers.BertConfig(
        vocab_size=100, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=128
    )
    mask = torch.ones(4, 16, dtype=torch.int64)
    mask[1, 9:], mask[3, 4:] = 0, 0
    return randomized(transformers.BertModel(config)), {
        "input_ids": torch.randint(100, (4, 16)),
        "attention_mask": mask,
    }


def gpt2() -> tuple[nn.Module, Any]:
    config = transformers.GPT2Config(
        vocab_size=100, n_positions=32, n_embd=64, n_layer=1, n_head=2, use_cache=False, bos_token_id=0, eos_token_id=0
    )
    return randomized(transformers.GPT2LMHeadModel(config)), {"input_ids": torch.randint(100, (4, 16))}


def clip() -> tuple[nn.Module, Any]:
    config = transformers.CLIPVisionConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, image_size=32, patch_size=8
    )
    return randomized(transformers.CLIPVisionModel(config)), {"pixel_values": torch.randn(4, 3, 32, 32)}


def beit() -> tuple[nn.Module, Any]:
    """Biases that are put together from parameters, and attention with a parameter as its mask."""
    model = timm.models.beit.Beit(
        img_size=32, patch_size=8, embed_dim=64, depth=1, num_heads=2, num_classes=10, use_rel_pos_bias=True
    )
    return randomized(model), (torch.randn(4, 3, 32, 32),)


def hiera() -> tuple[nn.Module, Any]:
    """Attention with a dimension for windows besides that of images."""
    model = timm.models.hiera.Hiera(
        img_size=(64, 64), embed_dim=32, num_heads=1, stages=(1, 1), q_pool=1, mask_unit_size=(4, 4), num_classes=10
    )
    return randomized(model), (torch.randn(4, 3, 64, 64),)


def randomized(model: nn.Module) -> nn.Module:
    """In eval mode, with biases and norms that are not 0 and 1, so that leaving one out changes the output."""
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def in_half(model: nn.Module, inputs: Any) -> tuple[nn.Module, Any]:
    return model.half(), mapped(inputs, lambda x: x.half() if x.is_floating_point() else x)


def mapped(inputs: Any, function: Any) -> Any:
    if isinstance(inputs, Mapping):
        return {name: function(x) for name, x in inputs.items()}
    return tuple(map(function, inputs))


@torch.no_grad()
def output(model: nn.Module, inputs: Any) -> Tensor:
    """The first output of a model, in float32."""
    out = model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)
    return (out if isinstance(out, Tensor) else next(iter(out.values()))).float()


class Session:
    """A file in ONNX Runtime on the CPU, and the operators of the graph that it runs."""

    def __init__(self, path: Path) -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = 1
        optimized = path.with_suffix(".optimized")
        options.optimized_model_filepath = str(optimized)
        self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.operators = Counter(node.op_type for node in onnx.load(optimized).graph.node)

    def __call__(self, inputs: Any) -> Tensor:
        names = [value.name for value in self._session.get_inputs()]
        named = inputs if isinstance(inputs, Mapping) else dict(zip(names, inputs, strict=True))
        return torch.from_numpy(self._session.run(None, {name: x.numpy() for name, x in named.items()})[0]).float()

    @property
    def int8_products(self) -> int:
        return sum(self.operators[name] for name in INT8_PRODUCTS)
