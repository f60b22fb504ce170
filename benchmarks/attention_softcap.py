"""Attention with a soft cap (Gemma 2): Inductor's kernels of transformers' eager form, FlexAttention, our variants.

Each shape runs in bfloat16 with causality, with Gemma 2's sliding window as a mask, or with neither. Every form is
compared with float64 in one head first. Calls run in CUDA graphs; microseconds are medians. ``auto`` is what
``sage_attention`` chooses, and what ``attention="sage"`` of the backend takes.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks import kernel_command
from qframework import sage_attention
from qframework.kernels.attention.hopper import specialized
from qframework.tuning.kernel_tiles import graph_microseconds

_CAP = 50.0
_VARIANTS = ("auto",)
# Relative errors; without the cap it is 0.03 to 0.05. Logits in bfloat16, as eager ones are, and in 8 bits are coarser.
_TOLERANCE = dict.fromkeys(("flex", "auto", "blocks known", "general kernel"), 0.015)
_COARSE = 0.1


class Shape(NamedTuple):
    """Sizes of one call; the window is Gemma 2's at its sizes."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    channels: int


SHAPES = (
    Shape(1, 8, 4, 2048, 2048, 256),  # Gemma 2 2B
    Shape(1, 8, 4, 1024, 1024, 256),
    Shape(1, 32, 16, 4096, 4096, 128),  # Gemma 2 27B
    Shape(1, 32, 16, 1024, 1024, 128),
    Shape(8, 8, 4, 512, 512, 256),
    Shape(1, 16, 8, 512, 512, 256),  # Gemma 2 9B
    Shape(1, 16, 8, 1024, 1024, 256),
    Shape(1, 8, 4, 8192, 8192, 256),
    Shape(1, 16, 8, 4096, 4096, 256),
    Shape(64, 12, 12, 256, 256, 64),  # VideoPrism's images
    *(Shape(b, 8, 4, 1, 4096, 256) for b in (1, 16)),  # decoding from a cache in 16 bit
    Shape(2, 12, 12, 3000, 3000, 80),  # no model's
    Shape(8, 8, 4, 128, 128, 256),
    Shape(3, 10, 2, 777, 777, 96),
)
SMOKE = (Shape(1, 4, 2, 40, 40, 16),)


class Case(NamedTuple):
    """Operands, and the mask if there is one."""

    shape: Shape
    query: Tensor  # (B, H, N, D)
    key: Tensor
    value: Tensor
    mask: Tensor | None  # (N, Nk) bool
    is_causal: bool


def draw(shape: Shape, what: str, device: torch.device) -> Case:
    """Normal values, with logits of a standard deviation of 10, so that some come near the cap."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(heads: int, tokens: int, size: float) -> Tensor:
        sizes = (shape.batch, heads, tokens, shape.channels)
        return size * torch.randn(sizes, generator=generator, device=device, dtype=torch.bfloat16)

    query, key = normal(shape.heads, shape.queries, 5.0), normal(shape.kv_heads, shape.keys, 2.0)
    mask = None
    if what == "window":
        at = torch.arange(shape.keys, device=device)
        distance = at[-shape.queries :, None] - at
        mask = (distance >= 0) & (distance < max(shape.keys // 2, 1))
    return Case(shape, query, key, normal(shape.kv_heads, shape.keys, 1.0), mask, what == "causal")


def eager(case: Case, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """As transformers writes it, with masks as numbers that are added."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    weights = query @ key.mT * query.shape[-1] ** -0.5
    weights = torch.tanh(weights / _CAP) * _CAP
    mask = case.mask
    if case.is_causal:
        mask = torch.ones(weights.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        hidden = torch.zeros(mask.shape, dtype=weights.dtype, device=mask.device)
        weights = weights + hidden.masked_fill(~mask, torch.finfo(weights.dtype).min)
    wide = torch.promote_types(query.dtype, torch.float32)
    return weights.softmax(-1, dtype=wide).to(query.dtype) @ value


def flex(case: Case) -> Callable[[], Tensor]:
    """FlexAttention with the cap, and blocks of the mask."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    blocks = None
    if case.is_causal or case.mask is not None:
        mask, sizes = case.mask, (case.shape.queries, case.shape.keys)

        def kept(batch: Any, head: Any, query: Any, key: Any) -> Any:
            return query >= key if mask is None else mask[query, key]

        blocks = create_block_mask(kept, None, None, *sizes, device=str(case.query.device))

    def capped(score: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
        return torch.tanh(score / _CAP) * _CAP

    run: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=False)
    options = {"score_mod": capped, "block_mask": blocks, "enable_gqa": case.shape.heads != case.shape.kv_heads}
    return functools.partial(run, case.query, case.key, case.value, **options)


def forms(case: Case, compiles: bool) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """What is timed, by name."""
    operands = operands_of(case)
    plain = functools.partial(eager, case)
    yield "eager", functools.partial(torch.compile(plain, dynamic=False) if compiles else plain, *operands)
    if compiles and case.mask is not None:  # where it is ahead of the eager form
        yield "flex", flex(case)
    for variant in _VARIANTS:
        yield (
            variant,
            functools.partial(
                sage_attention, *operands, case.mask, is_causal=case.is_causal, variant=variant, softcap=_CAP,
                enable_gqa=case.shape.heads != case.shape.kv_heads,
            ),
        )  # fmt: skip
    if case.mask is not None:
        yield "blocks known", with_blocks(case)
    yield "general kernel", functools.partial(general, case)


def general(case: Case) -> Tensor:
    """``auto`` by the kernel of all chips."""
    fits, specialized.fits = specialized.fits, lambda *call, **options: False
    try:
        return sage_attention(
            *operands_of(case), case.mask, is_causal=case.is_causal, variant="auto",
            softcap=_CAP + 1e-6,  # another number, since equal calls would repeat the recorded launches of `auto`
            enable_gqa=case.shape.heads != case.shape.kv_heads,
        )  # fmt: skip
    finally:
        specialized.fits = fits


def with_blocks(case: Case) -> Callable[[], Tensor]:
    """``auto`` as the layers of a compiled model call it, which find the blocks of their mask once."""
    assert case.mask is not None
    mask, shape = case.mask[None, None], case.shape
    blocks = torch.ops.qframework.mask_blocks(mask, [1, 1, shape.queries], shape.queries, shape.keys)
    return functools.partial(
        torch.ops.qframework.masked_attention, *operands_of(case), mask, *blocks,
        enable_gqa=shape.heads != shape.kv_heads, softcap=_CAP,
    )  # fmt: skip


def operands_of(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value."""
    return case.query, case.key, case.value


def error(case: Case, result: Tensor) -> float:
    """The relative error of the first head."""
    one = [x[:1, :1].double() for x in (case.query, case.key, case.value)]
    exact = eager(case, *one)
    return float((result[:1, :1].double() - exact).norm() / exact.norm())


@torch.no_grad()
def measure(shape: Shape, what: str, device: torch.device, compiles: bool = True) -> dict[str, Any]:
    """Microseconds and errors of all forms of a shape; wrong results are not timed."""
    case = draw(shape, what, device)
    times, errors, reasons = {}, {}, {}
    for name, run in forms(case, compiles):
        try:
            errors[name] = round(error(case, run()), 5)
        except (RuntimeError, NotImplementedError, ValueError) as failure:  # FlexAttention may not take odd sizes
            reasons[name] = str(failure).strip().split("\n")[0][:200]
            continue
        if errors[name] <= _TOLERANCE.get(name, _COARSE):
            times[name] = round(graph_microseconds([run]), 2) if compiles else 0
    torch._dynamo.reset()
    return {**shape._asdict(), "masking": what, "us": times, "errors": errors, "failed": reasons}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure on the GPU; returns the exit status."""
    kernel_command.run("benchmarks.attention_softcap", str(__doc__), _cases, measure, argv)
    return 0


def _cases(smoke: bool) -> Iterator[kernel_command.Case]:
    """Shapes with their masking; a single query attends to all keys."""
    for shape in SMOKE if smoke else SHAPES:
        for what in ("causal", "window", "none"):
            if shape.queries > 1 or what == "none":
                yield shape, what


if __name__ == "__main__":
    sys.exit(main())
