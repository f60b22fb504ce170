"""Quantized attention with a bool mask whose blocks are known: those of ``qframework::mask_blocks``, shared by layers.

Formula: that of ``qframework::sage_attention`` with the same mask. Hopper's kernel visits the given blocks; every other
kernel, and the CPU, read the mask. For inference: it has no gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qframework.errors import QFrameworkError
from qframework.kernels.attention.arguments import SageAttentionArguments, check_dense, check_softcap
from qframework.kernels.attention.mask_blocks import BLOCK, WORDS, MaskBlocks
from qframework.kernels.attention.pipeline import sage_attention_cpu, sage_attention_triton
from qframework.kernels.attention.variants import resolve
from qframework.kernels.runtime.ahead import launches_of
from qframework.kernels.runtime.checks import check_dtype, check_same_device, check_shape
from qframework.kernels.runtime.launch import cdiv
from qframework.kernels.runtime.operator import declare, refuse_backward
from qframework.numerics import FLOAT_DTYPES


class MaskedAttentionArguments(NamedTuple):
    """The arguments of ``qframework::masked_attention``: those of ``sage_attention``, with the blocks of its mask."""

    query: Tensor  # (B, H, N, D)
    key: Tensor
    value: Tensor
    attn_mask: Tensor  # bool
    bits: Tensor  # the fields of MaskBlocks for this mask, N queries and Nk keys, with causality if `is_causal`
    order: Tensor
    counts: Tensor
    seen: Tensor  # without elements: not known
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    variant: str = "auto"
    smooth_k: bool = True
    return_lse: bool = False
    softcap: float | None = None

    @property
    def plain(self) -> SageAttentionArguments:
        """The call without blocks."""
        settings = (self.is_causal, self.scale, self.enable_gqa, self.variant, self.smooth_k, self.return_lse)
        call = SageAttentionArguments(self.query, self.key, self.value, self.attn_mask, *settings)
        return call._replace(softcap=self.softcap)

    @property
    def blocks(self) -> MaskBlocks:
        """The blocks of the mask."""
        return MaskBlocks(self.bits, self.order, self.counts, self.seen if self.seen.numel() else None)

    def check(self) -> None:
        """Raise UnsupportedError or QFrameworkError, naming the argument."""
        name = "masked_attention"
        check_dense(self.plain, name, FLOAT_DTYPES)
        check_softcap(name, self.softcap)
        if self.variant != "auto":
            resolve(self.variant)
        check_dtype(name, "attn_mask", self.attn_mask, (torch.bool,))
        if self.query.ndim != 4:
            raise QFrameworkError(f"{name}: query must have 4 dimensions, got shape {tuple(self.query.shape)}")
        queries, keys = self.query.shape[2], self.key.shape[2]
        if self.is_causal and keys > queries:
            raise QFrameworkError(f"{name}: key must have at most query's {queries} tokens if causal, got {keys}")
        blocks = {"bits": self.bits, "order": self.order, "counts": self.counts, "seen": self.seen}
        check_same_device(name, self.query, **blocks)
        for argument, x in blocks.items():
            check_dtype(name, argument, x, (torch.int32,))
        tiles = self.order.shape[:3]
        if self.order.ndim != 4 or tiles[2] not in (1, cdiv(queries, BLOCK)):
            raise QFrameworkError(
                f"{name}: order must be mask_blocks' for {queries} queries, got shape {tuple(self.order.shape)}"
            )
        count = cdiv(keys, BLOCK)
        check_shape(name, "order", self.order, (*tiles, count))
        check_shape(name, "bits", self.bits, (*tiles, count, BLOCK, WORDS))
        check_shape(name, "counts", self.counts, (*tiles, 3))

    def empty_result(self) -> tuple[Tensor, Tensor]:
        """The uninitialized result and log-sum-exp, which has elements with ``return_lse`` only."""
        return self.plain.empty_result()


MASKED_ATTENTION = declare(
    "masked_attention(Tensor query, Tensor key, Tensor value, Tensor attn_mask, Tensor bits, Tensor order, "
    "Tensor counts, Tensor seen, bool is_causal=False, float? scale=None, bool enable_gqa=False, str variant='auto', "
    "bool smooth_k=True, bool return_lse=False, float? softcap=None) -> (Tensor, Tensor)",
    MaskedAttentionArguments,
    cpu=lambda x: sage_attention_cpu(x.plain),
    cuda=lambda x: sage_attention_triton(x.plain, x.blocks),
    fake=MaskedAttentionArguments.empty_result,
    warm_up=launches_of(lambda x: sage_attention_triton(x.plain, x.blocks)),
)
refuse_backward("masked_attention")
