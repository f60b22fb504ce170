"""Whether INT8 with scales per token pays for the linears of experts on Hopper, by estimated times.

A product takes the sum of what its weights, its multiplications and its results take:

- weights of experts that have rows, at the memory's rate. Which those are is known when the model runs; the estimate is
  for rows that choose an expert at random;
- results, which INT8 writes after scaling them, in the same loop.

INT8 also quantizes its input, in a kernel of its own. Costs were fitted to 32 cases on an H200, eight products with 2
to 8 rows an expert or 256 to 1,024 (``other/2026-11-30-h200-grouped-linear.json``), by least squares of relative
errors. Estimates are within 11 percent (standard deviation) in both precisions, above all since fewer experts have
rows where groups are uneven. Both gain from that alike: how many times as fast INT8 is, is within 9 percent. It is 2.5
to 3.4 times as fast with few rows, as it reads half the bytes, and 1.0 to 1.5 times with many, least with short rows,
whose quantization and results weigh most. In 32 cases of 16 to 256 rows that it was not fitted to (``-2.json``), of 1.3
to 2.6 times as fast, the estimate is 15 percent below to 27 above. Other Hopper GPUs, of which none was timed, differ
by the memory's rate.

PyTorch's ``grouped_mm`` takes bfloat16 alone. In float16 transformers waits for the GPU and multiplies the rows of one
expert after the other, which is not faster than the estimate for bfloat16.
"""

from __future__ import annotations

from typing import NamedTuple

from torch.fx import Node

from qframework.backend.linear_gain import LinearGain, alone_us, has_estimates, is_quantized, memory_of
from qframework.graph.nodes import fake_value
from qframework.graph.rewrites.expand_products import is_grouped
from qframework.graph.shapes import traced_size
from qframework.kernels.linear.tile_costs import memory_us

LEAST_GAIN = 1.1  # a smaller gain is not worth the rounding, and estimates may be wrong by as much

NOT_TIMED = (
    "INT8 products of experts were timed against grouped_mm on Hopper alone, with rows of multiples of 16 channels in "
    "16 bit. Pass options={'experts': 'int8_dynamic'} to use them here"
)


class ExpertSizes(NamedTuple):
    """Sizes of one product when the graph was captured, 0 if unknown."""

    rows: int  # of all experts
    experts: int
    outputs: int
    inputs: int


class GroupedCost(NamedTuple):
    """What a product of experts takes."""

    weights: float  # times of reading them from memory
    products: float  # us of 1e9 multiplications
    results: float  # us of 1e6

    def us(self, sizes: ExpertSizes, itemsize: int, memory: float) -> float:
        """Microseconds by estimate."""
        rows, experts, outputs, inputs = sizes
        read = experts * (1 - (1 - 1 / experts) ** rows)  # experts that have rows
        weights = memory_us(int(read * outputs * inputs * itemsize), memory)
        results = rows * outputs
        return self.weights * weights + self.products * results * inputs / 1e9 + self.results * results / 1e6


_HALF = GroupedCost(1.274, 2.169, 0.244)
_INT8 = GroupedCost(0.873, 1.761, 1.365)


def reason_against_experts(product: Node, x: Node, experts: int) -> str | None:
    """Why a product of experts had better stay in float; None where INT8 is faster by estimate.

    Args:
        product: a call of ``grouped_mm``.
        x: its input ``(rows, channels)``.
        experts: their number.
    """
    fake, out = fake_value(x), fake_value(product)
    if fake is None or out is None or fake.dtype.itemsize != 2 or not has_estimates(fake.device):
        return NOT_TIMED
    sizes = ExpertSizes(traced_size(fake.shape[0]), experts, traced_size(out.shape[-1]), traced_size(fake.shape[-1]))
    if not all(sizes) or sizes.inputs % 16:
        return NOT_TIMED
    sharing = sum(map(is_grouped, x.users))  # each carries a part of the quantization
    gain = gain_of_experts(sizes, memory_of(fake.device), 0.0 if is_quantized(x) else 1 / sharing)
    if gain.float_us >= LEAST_GAIN * (gain.int8_us + gain.quantize_us):
        return None
    return (
        f"INT8 would gain less than {LEAST_GAIN - 1:.0%}: by estimate {gain.float_us:.1f} us in float, "
        f"{gain.int8_us:.1f} us in INT8 and {gain.quantize_us:.1f} us for quantizing its input on this GPU. Pass "
        "options={'experts': 'int8_dynamic'} to use it all the same"
    )


def gain_of_experts(sizes: ExpertSizes, memory: float, share: float = 1.0) -> LinearGain:
    """Estimated times on Hopper.

    Args:
        sizes: the product's.
        memory: bytes that kernels move in a microsecond.
        share: of the quantization of the input, which several products may read.
    """
    quantize = share * alone_us(sizes.rows, sizes.inputs, memory)
    return LinearGain(_HALF.us(sizes, 2, memory), _INT8.us(sizes, 1, memory), quantize)
