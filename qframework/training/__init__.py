"""INT8 training with an INT8 data flow (Jetfire): activations, gradients and weights in blocks with one scale each."""

from qframework.training.block_dispatch import fallbacks, reset_fallbacks
from qframework.training.block_tensor import BlockTensor, new_seed, quantize_blocks

__all__ = ["BlockTensor", "fallbacks", "new_seed", "quantize_blocks", "reset_fallbacks"]
