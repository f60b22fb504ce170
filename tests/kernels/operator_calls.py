"""Arguments of every operator that has a CUDA implementation: small, random, new ones at every call, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

SIZE = [32, 32]


def ints(*shape: int) -> Tensor:
    return torch.randint(-127, 128, shape, dtype=torch.int8)


def blocks(rows: int = 40, columns: int = 64) -> tuple[Tensor, Tensor]:
    return ints(rows, columns), torch.rand(-(-rows // 32), -(-columns // 32)) + 0.1


def heads(*shape: int) -> Tensor:
    return torch.randn(*(shape or (1, 2, 40, 32))).half()


def rotation() -> tuple[Tensor, Tensor]:
    angles = torch.rand(40, 32)
    return angles.cos(), angles.sin()


def summands() -> tuple[Tensor, Tensor]:
    return torch.randn(3, 5, 64).half(), torch.randn(3, 5, 64).half()


def scale(*shape: int) -> Tensor:
    return torch.rand(shape or (1,)) + 0.1


def masked(mask: Tensor) -> tuple[Any, ...]:
    """Operands of ``masked_attention``; Hopper's kernel computes larger calls only."""
    return heads(), heads(), heads(), mask, *torch.ops.qframework.mask_blocks(mask, [1, 1, 40], 40, 40)


CALLS = {
    "attention_quantize": lambda: (heads(), None, 1.5, "per_token", "query"),
    "value_quantize": lambda: (heads(), "int8", 127.0),
    "quantized_attention": lambda: (
        *(ints(1, 2, 40, 32), scale(1, 2, 40) / 50, ints(1, 2, 40, 32), scale(1, 2, 40) / 50, heads()),
        *([None] * 6),
        *(False, 1.0, "8-per_token-fp16-fp32", None, False, torch.float16),
    ),
    "decode_attention": lambda: (
        *(heads(2, 4, 3, 32), ints(2, 2, 40, 32), ints(2, 2, 40, 32), scale(2, 2, 40, 2).bfloat16() / 50),
        *(torch.randint(3, 41, (2,), dtype=torch.int32), torch.rand(2, 1, 3, 40) > 0.3, True),
    ),
    "cache_append": lambda: (
        *(heads(2, 2, 3, 32), heads(2, 2, 3, 32), torch.randn(2, 2, 32)),
        *(
            ints(2, 2, 40, 32),
            ints(2, 2, 40, 32),
            scale(2, 2, 40, 2).bfloat16(),
            torch.tensor([5, 0], dtype=torch.int32),
        ),
    ),
    "int8_gradient_attention": lambda: (heads(), heads(), heads(), True),
    "int8_gradient_attention_backward": lambda: (
        *(heads(), None, heads(), heads(), heads(), heads(), torch.randn(1, 2, 40), torch.randn(1, 2, 1, 32)),
        *(True, None, "int8"),
    ),
    "sage_attention": lambda: (heads(), heads(), heads()),
    "mask_blocks": lambda: (torch.rand(2, 1, 40, 50) > 0.3, [2, 1, 40], 40, 50, False, 2),
    "masked_attention": lambda: (*masked(torch.rand(1, 1, 40, 40) > 0.3), False, None, False, "auto", True, True),
    "sage_attention_varlen": lambda: (
        *(heads(40, 2, 32), heads(40, 2, 32), heads(40, 2, 32)),
        *(torch.tensor([0, 15, 40], dtype=torch.int32), torch.tensor([0, 15, 40], dtype=torch.int32), 25, 25),
    ),
    "block_activation": lambda: (*blocks(), "gelu", SIZE),
    "block_activation_backward": lambda: (*blocks(), *blocks(), "gelu", SIZE),
    "block_dropout": lambda: (*blocks(), 0.5, torch.randint(0, 2**31, ()), SIZE),
    "block_add": lambda: (*blocks(), *blocks(), SIZE, True),
    "block_mul": lambda: (*blocks(), *blocks(), SIZE),
    "block_gated_activation": lambda: (*blocks(), *blocks(), "silu", SIZE),
    "block_gated_activation_backward": lambda: (*blocks(), *blocks(), *blocks(), "silu", SIZE),
    "block_linear": lambda: (*blocks(), *blocks(48, 64), torch.randn(48), SIZE, torch.int8),
    "block_linear_sum": lambda: ([*blocks(), *blocks(48, 64), *blocks(), *blocks(48, 64)], SIZE, torch.int8),
    "block_layer_norm": lambda: (*blocks(), torch.randn(64), torch.randn(64), 1e-5, SIZE),
    "block_rms_norm": lambda: (*blocks(), torch.randn(64), 1e-5, SIZE),
    "block_sum_rows": lambda: (*blocks(), SIZE),
    "block_layer_norm_backward": lambda: (*blocks(), *blocks(), torch.randn(64), torch.randn(40), scale(40), SIZE),
    "block_rms_norm_backward": lambda: (*blocks(), *blocks(), torch.randn(64), scale(40), SIZE),
    "block_norm_sums": lambda: (*blocks(), *blocks(), torch.randn(64), torch.randn(40), scale(40), SIZE),
    "block_norm_gradient": lambda: (
        *(*blocks(), *blocks(), torch.randn(64), None, scale(40), torch.randn(40, 2), *blocks(), SIZE),
    ),
    "block_quantize": lambda: (torch.randn(40, 64), SIZE, torch.randint(0, 2**31, ())),
    "block_quantize_both": lambda: (torch.randn(40, 64), SIZE),
    "block_quantize_parts": lambda: ([torch.randn(64, 64), torch.randn(128, 64)], False, True, SIZE),
    "block_dequantize": lambda: (*blocks(), SIZE, torch.float16),
    "block_transpose": lambda: (*blocks(), SIZE),
    "block_transpose_sum": lambda: (*blocks(), SIZE),
    "int8_linear": lambda: (
        *(ints(2, 20, 64), scale(2, 20, 1) / 100, ints(48, 64), scale(48), torch.randn(48).half()),
        *("gelu", torch.randn(2, 20, 48).half(), None, torch.float16),
    ),
    "int8_gated_linear": lambda: (
        *(ints(2, 20, 64), scale(2, 20, 1) / 100, ints(48, 64), scale(48), torch.randn(48).half()),
        *(ints(48, 64), scale(48), torch.randn(48).half(), "silu", None, torch.float16),
    ),
    "int8_grouped_linear": lambda: (
        *(ints(20, 64), scale(20, 1) / 100, ints(3, 48, 64), scale(3, 48), torch.tensor([5, 5, 18], dtype=torch.int32)),
        torch.float16,
    ),
    "mixed_attention": lambda: (*[ints(1, 2, 40, 32) for _ in range(3)], *[scale() / 50 for _ in range(3)]),
    "quantize": lambda: (torch.randn(3, 50), scale(), torch.tensor([-5], dtype=torch.int32)),
    "quantize_weights": lambda: ([torch.randn(4, 32), torch.randn(2, 64)],),
    "dynamic_quantize.alone": lambda: (torch.randn(3, 50), "per_token"),
    "dynamic_quantize": lambda: (torch.randn(3, 50), "per_tensor"),
    "transpose_rows": lambda: (ints(2, 20, 48), 64),
    "hadamard_quantize": lambda: (torch.randn(3, 5, 64).half(), scale(64), torch.randn(64), 32),
    "norm_quantize": lambda: (torch.randn(3, 5, 64).half(), scale(64), torch.randn(64), 1e-5, True, 0.0, scale()),
    "norm_dynamic_quantize": lambda: (torch.randn(3, 5, 64).half(), scale(64), torch.randn(64), 1e-5, True, 0.0),
    "norm": lambda: (torch.randn(3, 5, 64), None, torch.randn(64), 1e-5, False, 1.0, torch.randn(3, 5, 64)),
    "add_norm": lambda: (*summands(), None, torch.randn(64), 1e-5, False, 1.0),
    "add_norm_quantize": lambda: (*summands(), scale(64), torch.randn(64), 1e-5, True, 0.0, scale()),
    "add_norm_dynamic_quantize": lambda: (*summands(), scale(64), torch.randn(64), 1e-5, True, 0.0),
    "depthwise": lambda: (torch.randn(1, 5, 6, 32).half(), torch.randn(3, 3, 32).half(), torch.randn(32), "gelu"),
    "depthwise_quantize": lambda: (torch.randn(1, 5, 6, 32), torch.randn(3, 3, 32), None, "none", scale()),
    "rope_quantize": lambda: (heads(), *rotation(), False, 1.5, "per_token", "query"),
    "rope_mean": lambda: (heads(), *rotation()),
}


def effects(call: Callable[..., Any], arguments: Any) -> list[Tensor]:
    """What ``call`` returns for copies of ``arguments``, and the copies, into which it may write."""
    copies = tree_map_only(Tensor, torch.clone, arguments)
    return [x for x in tree_leaves((call(*copies), copies)) if isinstance(x, Tensor)]
