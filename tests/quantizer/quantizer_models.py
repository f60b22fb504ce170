"""Tiny models and helpers of the quantizer's tests."""

from __future__ import annotations

from collections import Counter

import timm
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from torchao.quantization.pt2e.quantizer import Quantizer

from qframework.quantizer import calibrate

ops = torch.ops
QUANTIZE = ops.quantized_decomposed.quantize_per_tensor.default
DEQUANTIZE = ops.quantized_decomposed.dequantize_per_tensor.default
DEQUANTIZE_CHANNEL = ops.quantized_decomposed.dequantize_per_channel.default
OUR_QUANTIZE = ops.qframework.quantize.default
OUR_DYNAMIC_QUANTIZE = ops.qframework.dynamic_quantize.default
OUR_DEQUANTIZE = ops.qframework.dequantize.default
LINEAR = ops.aten.linear.default


class Mlp(nn.Module):
    def __init__(self, dim: int = 8, hidden: int = 16) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.act = nn.GELU()
        self.drop = nn.Dropout(0.1)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.drop(self.act(self.fc1(x))))


class Attention(nn.Module):
    """Three projections of one tensor."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(dim, dim) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(self.q_proj(x), self.k_proj(x), self.v_proj(x))


class Net(nn.Module):
    """Residual blocks and a head: blocks.{0,1}.{attn.{q,k,v}_proj,mlp.{fc1,fc2}}, head."""

    def __init__(self, dim: int = 8, depth: int = 2) -> None:
        super().__init__()
        block = lambda: nn.ModuleDict({"attn": Attention(dim), "mlp": Mlp(dim, 2 * dim)})  # noqa: E731
        self.blocks = nn.ModuleList([block() for _ in range(depth)])
        self.head = nn.Linear(dim, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block["attn"](x)
            x = x + block["mlp"](x)
        return self.head(x)


def tiny_vit() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 10}
    return timm.create_model("vit_tiny_patch16_224", **sizes).eval()


def exported(model: nn.Module, *inputs: Tensor, strict: bool = False, dynamic_batch: bool = False) -> GraphModule:
    shapes = tuple({0: torch.export.Dim("batch")} for _ in inputs) if dynamic_batch else None
    return torch.export.export(
        model.eval().requires_grad_(False), inputs, dynamic_shapes=shapes, strict=strict
    ).module()


def quantized(model: nn.Module, quantizer: Quantizer, *inputs: Tensor, **export_options: bool) -> GraphModule:
    """Export, calibrate with ``inputs`` and convert a model."""
    prepared = prepare_pt2e(exported(model, *inputs, **export_options), quantizer)
    calibrate(prepared, [inputs])
    return convert_pt2e(prepared)


def count(model: GraphModule) -> Counter:
    return Counter(node.target for node in model.graph.nodes if node.op == "call_function")


def linears(model: GraphModule) -> list[Node]:
    return [node for node in model.graph.nodes if node.target == LINEAR]


def quantized_layers(model: GraphModule) -> set[str]:
    """Layers of a converted graph whose input is dequantized, by the name of the module in the export."""
    layers = set()
    for node in linears(model):
        if node.args[0].target in (DEQUANTIZE, OUR_DEQUANTIZE):
            layers.add(list(node.meta["nn_module_stack"].values())[-1][0])
    return layers
