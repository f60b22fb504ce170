"""Attention's launches, found with tensors on "meta", are those of a call with tensors in memory on the same chip."""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from qframework import numerics
from qframework.kernels.attention import auto
from qframework.kernels.attention.mixed import MIXED_ATTENTION
from qframework.kernels.attention.pipeline import SAGE_ATTENTION
from qframework.kernels.runtime import ahead, chip, launch
from qframework.kernels.runtime.gluon import HAS_GLUON

pytestmark = pytest.mark.skipif(not HAS_GLUON, reason="Hopper's kernels need Gluon")
CUDA = torch.device("cuda", 0)


def half(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float16)


def sage(variant: str, *shape: int, keys: int = 0, key_heads: int = 0, **more: Any) -> tuple[Any, tuple, dict]:
    batch, heads, tokens, width = shape
    key = half(batch, key_heads or heads, keys or tokens, width)
    return SAGE_ATTENTION, (half(*shape), key, key.clone()), {"variant": variant, **more}


def static(*shape: int, **more: Any) -> tuple[Any, tuple, dict]:
    operands = [torch.zeros(shape, dtype=torch.int8) for _ in range(3)]
    return MIXED_ATTENTION, (*operands, *[torch.ones(1)] * 3), {"out_scale": torch.ones(1), **more}


def fused(batch: int, tokens: int, heads: int, width: int) -> tuple[Any, tuple, dict]:
    """Slices of a fused qkv, whose rows are further apart than their channels."""
    qkv = half(batch, tokens, 3, heads, width).permute(2, 0, 3, 1, 4)
    return SAGE_ATTENTION, tuple(qkv), {"variant": "unquantized"}


PADDING = torch.ones(2, 1, 1, 700, dtype=torch.bool)
CASES = {
    "resident": (sage("unquantized", 64, 12, 197, 64), ["_resident_attention_kernel"]),
    "streaming": (sage("auto", 16, 16, 577, 64), ["_streaming_attention_kernel"]),
    "fused qkv": (fused(16, 577, 16, 64), ["_streaming_attention_kernel"]),
    "loading warp": (sage("unquantized", 2, 40, 700, 128), ["_specialized_attention_kernel"]),
    "causal, grouped": (sage("auto", 4, 32, 2048, 128, key_heads=8, is_causal=True, enable_gqa=True), None),
    "integer": (sage("integer_exp", 2, 40, 700, 64), None),
    "FP8": (sage("sage2_int8", 2, 40, 700, 80), None),
    "padding": (sage("unquantized", 2, 40, 700, 128, attn_mask=PADDING), None),
    "bias": (sage("unquantized", 2, 40, 1100, 64, attn_mask=half(1, 40, 1100, 1100)), None),
    "general": (sage("sage_b", 1, 2, 50, 24), None),
    "soft cap": (sage("auto", 2, 40, 700, 128, softcap=50.0), ["_specialized_attention_kernel"]),
    "soft cap, few tiles": (sage("auto", 2, 4, 200, 128, softcap=50.0), ["_quantized_attention_kernel"]),
    "soft cap, integer": (sage("integer_exp", 2, 40, 700, 64, softcap=50.0), None),
    "soft cap, wide": (sage("sage_b", 2, 8, 700, 256, softcap=50.0, attn_mask=PADDING), None),
    "static": (static(16, 16, 577, 64), ["_streaming_attention_kernel"]),
    "static, wide": (static(2, 4, 300, 72), ["_quantized_attention_kernel"]),
}


def named(kernel: Any, grid: tuple[int, ...]) -> Any:
    """Stands for ``launch.warm_up``: the kernel's name, what Triton specializes on, and constants."""
    return lambda *arguments, **constants: (
        kernel.fn.__name__,
        tuple(map(launch.specialization, arguments)),
        tuple(constants.items()),
    )


def meta(x: Any) -> Any:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") if torch.is_tensor(x) else x


@pytest.mark.parametrize("name", CASES)
def test_launches_on_meta_are_those_in_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (operator, operands, settings), expected = CASES[name]
    monkeypatch.setattr(chip, "_chip_of", lambda device: ((9, 0), 132))
    monkeypatch.setattr(launch, "warm_up", named)
    record = operator.arguments(*map(meta, operands), **{key: meta(value) for key, value in settings.items()})
    found = operator.warm_up(CUDA, record)
    assert found
    assert expected is None or [each[0] for each in found] == expected

    in_memory: list[Any] = []
    monkeypatch.setattr(launch, "collected", lambda: in_memory)
    for module in (chip, auto):
        monkeypatch.setattr(module, "stood_for", lambda device: CUDA)
    operator.cuda(*operands, **settings)
    assert found == in_memory


def test_meta_stands_for_a_gpu_inside_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chip, "_chip_of", lambda device: ((9, 0), 132))
    on_meta = torch.device("meta")
    seen = ahead.launches_of(lambda record: ahead.collected().append(chip.capability_of(record)))(CUDA, on_meta)
    assert seen == [(9, 0)]
    assert chip.capability_of(on_meta) is None
    assert ahead.collected() is None
    with pytest.raises(ZeroDivisionError):
        ahead.launches_of(lambda record: 1 / 0)(CUDA, on_meta)
    assert ahead.collected() is None


class Attention(nn.Module):
    """Self-attention behind a fused linear."""

    def __init__(self, heads: int, channels: int) -> None:
        super().__init__()
        self.heads, self.channels = heads, channels
        self.qkv = nn.Linear(heads * channels, 3 * heads * channels)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, self.channels)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, mask)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("variant", "heads", "channels", "batch", "tokens", "masked"),
    [
        ("integer_exp", 16, 64, 4, 2048, False),
        ("unquantized", 16, 64, 16, 577, False),
        ("sage_vb", 4, 40, 2, 300, False),
        ("unquantized", 16, 128, 4, 1024, True),
        ("sage2_int8", 16, 64, 4, 2048, False),
    ],
)
def test_no_launch_of_a_compiled_model_compiles(
    variant: str, heads: int, channels: int, batch: int, tokens: int, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads beside Inductor compile all attention kernels, and the results are PyTorch's."""
    import triton

    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("qframework.kernels"):
            for kernel in [value for value in vars(module).values() if hasattr(value, "device_caches")]:
                monkeypatch.setattr(kernel, "device_caches", defaultdict(kernel.create_binder))
    monkeypatch.setattr(launch, "_compiled", {})
    torch._dynamo.reset()
    ahead_of_launch: dict[str, bool] = {}

    def listener(*, src: Any, **_: Any) -> None:  # a hook of the JIT would write constants as JSON; layouts cannot be
        if src.fn.__module__.startswith("qframework"):
            ahead_of_launch[src.fn.__name__] = threading.current_thread() is not threading.main_thread()

    monkeypatch.setattr(triton.knobs.compilation, "listener", listener)
    model = Attention(heads, channels).cuda().half().eval()
    x = torch.randn(batch, tokens, heads * channels, device="cuda", dtype=torch.float16)
    mask = (torch.arange(tokens, device="cuda") < tokens - 100).view(1, 1, 1, -1) if masked else None
    with torch.no_grad():
        found = torch.compile(model, backend="qframework", options={"attention": variant})(x, mask)
        assert numerics.sqnr_db(model(x, mask).float(), found.float()) > 20
    assert ahead_of_launch
    assert all(ahead_of_launch.values()), ahead_of_launch
