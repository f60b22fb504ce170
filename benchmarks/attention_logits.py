"""Attention whose logits have a soft cap (Gemma 2) or sinks (GPT-OSS): Inductor's kernels of transformers' eager form,
FlexAttention, our kernels.

Each shape runs in bfloat16 with causality, with a sliding window as a mask, or with neither. Every form is compared
with float64 in one head first. Calls run in CUDA graphs; microseconds are medians. ``auto`` is what
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
from qframework.attention.api import beside_sinks
from qframework.kernels.attention.hopper import dense as hopper_dense
from qframework.kernels.attention.hopper import specialized
from qframework.tuning.kernel_tiles import graph_microseconds

_CAP = 50.0
_VARIANTS = ("auto",)
# Relative errors; without the cap it is 0.03 to 0.05. Logits in bfloat16, as eager ones are, and in 8 bits are coarser.
_TOLERANCE = dict.fromkeys(("flex", "auto", "blocks known", "general kernel"), 0.015)
_COARSE = 0.1


class Shape(NamedTuple):
    """Sizes of one call, which has a soft cap unless it has sinks."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    channels: int
    sinks: bool = False
    window: int = 0  # 0: half of the keys


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
    *(Shape(1, 64, 8, n, n, 64, True, 128) for n in (512, 1024, 2048, 4096, 8192)),  # GPT-OSS
    Shape(8, 64, 8, 1024, 1024, 64, True, 128),
    Shape(1, 16, 8, 2048, 2048, 128, True, 512),  # Granite SWA's heads
    *(Shape(b, 64, 8, 1, 4096, 64, True) for b in (1, 16)),
    Shape(4, 12, 12, 500, 500, 80, True),  # no model's
    Shape(3, 10, 2, 777, 777, 96, True, 300),
)
SMOKE = (Shape(1, 4, 2, 40, 40, 16), Shape(1, 4, 2, 40, 40, 16, True, 9))


class Case(NamedTuple):
    """Operands, and the mask if there is one."""

    shape: Shape
    query: Tensor  # (B, H, N, D)
    key: Tensor
    value: Tensor
    mask: Tensor | None  # (N, Nk) bool
    is_causal: bool
    sinks: Tensor | None  # (heads,)

    @property
    def options(self) -> dict[str, Any]:
        """What ``sage_attention`` takes beside operands and masks."""
        extra: dict[str, Any] = {"softcap": _CAP} if self.sinks is None else {"sinks": self.sinks}
        return {"enable_gqa": self.shape.heads != self.shape.kv_heads, **extra}


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
        mask = (distance >= 0) & (distance < (shape.window or max(shape.keys // 2, 1)))
    value = normal(shape.kv_heads, shape.keys, 1.0)
    # The first head, which is compared, has one as large as the largest logit of a row.
    sinks = torch.linspace(30.0, 0.0, shape.heads, device=device) if shape.sinks else None
    return Case(shape, query, key, value, mask, what == "causal", sinks)


def eager(case: Case, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """As transformers writes it, with masks as numbers that are added."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    weights = query @ key.mT * query.shape[-1] ** -0.5
    if case.sinks is None:
        weights = torch.tanh(weights / _CAP) * _CAP
    mask = case.mask
    if case.is_causal:
        mask = torch.ones(weights.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        hidden = torch.zeros(mask.shape, dtype=weights.dtype, device=mask.device)
        weights = weights + hidden.masked_fill(~mask, torch.finfo(weights.dtype).min)
    if case.sinks is not None:
        sinks = case.sinks[: query.shape[1]].to(query.dtype).view(1, -1, 1, 1).expand(*weights.shape[:-1], 1)
        combined = torch.cat([weights, sinks], -1)
        combined = combined - combined.max(-1, keepdim=True).values
        return combined.softmax(-1, dtype=combined.dtype)[..., :-1] @ value
    wide = torch.promote_types(query.dtype, torch.float32)
    return weights.softmax(-1, dtype=wide).to(query.dtype) @ value


def flex(case: Case) -> Callable[[], Tensor]:
    """FlexAttention with the cap or the sinks, and blocks of the mask."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    blocks = None
    if case.is_causal or case.mask is not None:
        mask, sizes = case.mask, (case.shape.queries, case.shape.keys)

        def kept(batch: Any, head: Any, query: Any, key: Any) -> Any:
            return query >= key if mask is None else mask[query, key]

        blocks = create_block_mask(kept, None, None, *sizes, device=str(case.query.device))

    def capped(score: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
        return torch.tanh(score / _CAP) * _CAP

    def beside(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        options: dict[str, Any] = {"block_mask": blocks, "enable_gqa": case.shape.heads != case.shape.kv_heads}
        if case.sinks is None:
            return flex_attention(query, key, value, score_mod=capped, **options)
        out, lse = flex_attention(query, key, value, return_lse=True, **options)
        return (out * torch.sigmoid(lse - case.sinks[:, None])[..., None]).to(query.dtype)

    return functools.partial(torch.compile(beside, dynamic=False), case.query, case.key, case.value)


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
                sage_attention, *operands, case.mask, is_causal=case.is_causal, variant=variant, **case.options
            ),
        )  # fmt: skip
    if case.mask is not None:
        yield "blocks known", functools.partial(with_blocks, case, blocks_of(case))
    yield "general kernel", functools.partial(general, case)


def general(case: Case) -> Tensor:
    """``auto`` by the kernel of all chips."""
    fits, dense_fits = specialized.fits, hopper_dense.fits
    specialized.fits = lambda *call, **options: False
    hopper_dense.fits = lambda *call, **options: False
    try:
        return sage_attention(
            *operands_of(case), case.mask, is_causal=case.is_causal, variant="auto", **case.options,
            scale=case.shape.channels**-0.5 * (1 + 1e-6),  # equal calls would repeat the recorded launches of `auto`
        )  # fmt: skip
    finally:
        specialized.fits, hopper_dense.fits = fits, dense_fits


def blocks_of(case: Case) -> tuple[Tensor, ...]:
    """The mask and its blocks, as ``masked_attention`` takes them."""
    assert case.mask is not None
    mask, shape = case.mask[None, None], case.shape
    return mask, *torch.ops.qframework.mask_blocks(mask, [1, 1, shape.queries], shape.queries, shape.keys)


def with_blocks(case: Case, blocks: tuple[Tensor, ...]) -> Tensor:
    """``auto`` as the layers of a compiled model call it, which find the blocks of their mask once."""
    grouped, beside = case.shape.heads != case.shape.kv_heads, case.sinks is not None
    out, lse = torch.ops.qframework.masked_attention(
        *operands_of(case), *blocks, enable_gqa=grouped, return_lse=beside, softcap=None if beside else _CAP
    )
    return out if case.sinks is None else beside_sinks(out, lse, case.sinks)


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
    kernel_command.run("benchmarks.attention_logits", str(__doc__), _cases, measure, argv)
    return 0


def _cases(smoke: bool) -> Iterator[kernel_command.Case]:
    """Shapes with their masking; a single query attends to all keys."""
    for shape in SMOKE if smoke else SHAPES:
        for what in ("causal", "window", "none"):
            if shape.queries > 1 or what == "none":
                yield shape, what


if __name__ == "__main__":
    sys.exit(main())
