"""INT8 training with an INT8 data flow (Jetfire): activations, gradients and weights in blocks with one scale each."""

from qframework.training.block_dispatch import fallbacks
from qframework.training.block_tensor import BlockTensor, new_seed, quantize_blocks
from qframework.training.convert import (
    ConversionReport,
    conversion_report,
    convert_to_int8_training,
    restore_float,
)
from qframework.training.sharding import gather_in_int8

__all__ = [
    "BlockTensor",
    "ConversionReport",
    "conversion_report",
    "convert_to_int8_training",
    "fallbacks",
    "gather_in_int8",
    "new_seed",
    "quantize_blocks",
    "restore_float",
]
