"""FSDP2 that gathers the weights of converted linears in INT8: one byte for each value instead of two or four.

A linear needs its weight in blocks. Gathering floats and quantizing the whole, and quantizing each process's rows and
gathering the blocks, give the same blocks if no block crosses two processes. So each weight that divides evenly becomes
a ``ShardedWeight``, for which ``fully_shard`` calls ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` (PyTorch's
extension for all-gathers in other formats). What the processes hold, and optimizer and checkpoints see, stays float.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn

from qframework.arguments import check_module
from qframework.compat.dispatch import disabled_torch_function, make_wrapper_subclass
from qframework.compat.operators import PIN_MEMORY, TO_COPY
from qframework.compat.pytree import tree_map_only
from qframework.errors import QFrameworkError
from qframework.kernels.blocks.format import CanonicalSize, block_shape, operand_size
from qframework.training.block_tensor import BlockTensor, overwrite, wrap_blocks
from qframework.training.compilation import forget_graphs
from qframework.training.linear import Int8Conv1D, Int8Linear

aten = torch.ops.aten
_KEEP_THE_KIND = {
    aten.detach.default,
    aten.alias.default,
    aten.clone.default,
    aten.empty_like.default,
    aten.new_zeros.default,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.view.default,
    aten.as_strided.default,
    aten.copy_.default,
    TO_COPY,
    PIN_MEMORY,
}
"""What ``fully_shard`` makes a process's part with; results of other operators are plain tensors."""


class ShardedWeight(Tensor):
    """A float weight, or a process's rows of one, that FSDP2 gathers in INT8 blocks.

    Args:
        value: ``(rows, columns)`` fp32, fp16 or bf16; during ``fully_shard`` also flat.
        block_size: rows and columns that share a scale, a size of ``operand_size``.
    """

    value: Tensor
    block_size: CanonicalSize

    @staticmethod
    def __new__(cls, value: Tensor, block_size: CanonicalSize) -> ShardedWeight:
        strides: dict[str, Any] = {"strides": value.stride(), "storage_offset": value.storage_offset()}
        self = make_wrapper_subclass(cls, value.shape, dtype=value.dtype, device=value.device, **strides)
        self.value, self.block_size = value, block_size
        return self

    __torch_function__ = disabled_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        sizes: list[CanonicalSize] = []

        def value_of(weight: ShardedWeight) -> Tensor:
            sizes.append(weight.block_size)
            return weight.value

        its_args, its_kwargs = tree_map_only(ShardedWeight, value_of, (args, kwargs or {}))
        result = func(*its_args, **its_kwargs)
        if func is aten.copy_.default:
            return args[0]
        return tree_map_only(Tensor, lambda x: cls(x, sizes[0]), result) if func in _KEEP_THE_KIND else result

    def __tensor_flatten__(self) -> tuple[list[str], CanonicalSize]:
        return ["value"], self.block_size

    @staticmethod
    def __tensor_unflatten__(
        inside: dict[str, Tensor], context: CanonicalSize, size: Any, stride: Any
    ) -> ShardedWeight:
        return ShardedWeight(inside["value"], context)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardedWeight(shape={tuple(self.shape)}, block_size={self.block_size}, dtype={self.dtype})"

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, Tensor], torch.Size]:
        """This process's blocks, and the shape of its rows."""
        rows = block_shape(self.block_size)[0]
        if mesh.size() == 1 or self.value.shape[0] % rows:
            raise QFrameworkError(
                f"gather_in_int8: processes must be the number that fully_shard divides weights over, got a weight of "
                f"{self.value.shape[0]} rows in each of {mesh.size()} processes, with {rows} rows in a block"
            )
        return torch.ops.qframework.block_quantize(self.value, self.block_size), self.value.shape

    def fsdp_post_all_gather(
        self, gathered: Sequence[Tensor], metadata: torch.Size, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[BlockTensor, tuple[Tensor, ...]] | None:
        """The whole weight in blocks; later calls fill the memory of ``out``, which ``gathered`` are parts of."""
        q, scale = gathered
        if out is not None:
            assert isinstance(out, BlockTensor)
            if out.q.data_ptr() != q.data_ptr() or out.scale.data_ptr() != scale.data_ptr():
                overwrite(out, wrap_blocks(q, scale, self.block_size, dtype))
            out.memory.copy = None  # a float copy of the weight before the last step
            return None
        return wrap_blocks(q, scale, self.block_size, dtype), (q, scale)


def gather_in_int8(model: nn.Module, processes: int | None = None) -> nn.Module:
    """Let ``fully_shard`` gather the weights of ``model``'s INT8 linears in INT8; in place, and returns ``model``.

    Call it between convert_to_int8_training and ``fully_shard``, before the optimizer is made: weights become new
    parameters. Results are those without it but for one thing: in blocks of (1, 128) and (32, 128) a weight's transpose
    is quantized from the gathered blocks instead of from the master weight. A weight stays as it is, and is gathered in
    floats, if its rows do not divide into whole blocks for each process, or if another module uses it too. One process
    gathers nothing, and nothing changes. From torch 2.14 on it switches AOTAutograd's cache off in the whole process,
    which would take such weights for plain tensors.

    Args:
        model: converted in mode ``"per_block"``, on its device.
        processes: that ``fully_shard`` will divide each weight over; None: all of ``torch.distributed``'s.

    Raises:
        QFrameworkError: a model without INT8 linears, or no process group and no ``processes``; in the first forward
            pass, another number of processes than ``processes``.
    """
    check_module(model, "gather_in_int8: model")
    linears = [module for module in model.modules() if isinstance(module, Int8Linear | Int8Conv1D)]
    if not linears:
        raise QFrameworkError(
            "gather_in_int8: model must have INT8 linears of mode 'per_block', got none. Call convert_to_int8_training "
            "first"
        )
    if processes is None and not distributed.is_initialized():
        raise QFrameworkError(
            "gather_in_int8: processes must be given, or torch.distributed initialized, got neither. Pass processes="
        )
    shards = distributed.get_world_size() if processes is None else processes
    users = _users(model)
    if shards > 1:
        forget_graphs()
    for module in linears:
        weight, size = module.weight, operand_size(module.block_size)
        if shards > 1 and users[weight] == 1 and weight.shape[0] % (shards * block_shape(size)[0]) == 0:
            module.weight = nn.Parameter(ShardedWeight(weight.detach(), size), weight.requires_grad)
    return model


def _users(model: nn.Module) -> dict[Tensor, int]:
    """How many modules hold each parameter."""
    found: dict[Tensor, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            found[parameter] = found.get(parameter, 0) + 1
    return found
