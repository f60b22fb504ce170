"""Whether INT8 with scales per token pays for a linear layer on Hopper, by estimated times.

Up to some thousand rows, a product takes 2 to 10 us in either precision, so that what quantizes its input decides, and
what quantizes its weight if each call does. Layers that read the same tensor share its quantization. Estimates of
products were fitted to 256 linears (tile_costs.py); those of quantizations are differences of the kernels of eight
whole models at batch 1 (``other/2026-11-27-h100-batch-1.json``):

- a norm, or operations on rows that Inductor keeps in registers, quantize their result in the same kernel;
- what no kernel of Inductor computes, such as attention or another INT8 layer, needs a kernel of its own;
- longer rows of operations are computed twice;
- a norm or operations on rearranged channels, as behind a convolution, become up to five kernels instead of one, and
  rows that are columns in memory, as those of gMLP's layers over tokens, take as long (not measured by themselves);
- a convolution with a kernel of our own (lower_depthwise.py) writes floats, since a scale for each pixel costs it more
  than it saves. Its rows are many, and traffic with memory decides.

Of more rows, traffic with memory decides. Norms and operations save some of it, since they write integers. What no
kernel of Inductor computes is read and written once more. ``other/2026-11-29-h200-dynamic-linears.json`` has layers
between their neighbours, of 6,272 to 100,352 rows. Those that read an input of the graph and add no residual took up to
1.6 times as long in INT8 with 192 to 512 inputs. Of 81 layers there, estimates by the memory's rate decide 11 wrongly,
seven of them at a cost of 9 percent at most, four of 128 and 768 inputs at 12 to 27. GELU between two layers lost up to
15 percent with 12,544 rows of up to 1,024 values, and won with longer ones. Products won at any length.

Layers that read the same quantized tensor take less time as one product (merge_linears.py). Of 64 measured triples of
equal layers, all saved time, 14 to 70 percent of it, and the estimates of that share are -14 to +8 percentage points
off.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node

from qframework.backend import keep_quantize
from qframework.backend.align_rows import swaps_last
from qframework.backend.lower_depthwise import has_own_kernel
from qframework.backend.quantized_linear import find_epilogue
from qframework.graph.nodes import LinearCall, argument, behind, fake_value, linear_call, operation
from qframework.graph.norms import norm_call
from qframework.graph.shapes import Size, traced_size
from qframework.kernels.linear.tile import MAX_FEW_ROWS
from qframework.kernels.linear.tile_costs import MEMORY, half_us, int8_us, memory_us
from qframework.kernels.runtime.chip import capability_of, chip_of, memory_rate_of

_MOST_ROWS = 32768  # of rearranged channels
_FEW_VALUES = 4096 * 1024  # of the input, up to which more rows than were measured take as little time
_FEW_OF_ACTIVATIONS = 16384  # rows, up to which an activation's kernel takes twice as long if it also quantizes
_LONGEST = 1024  # values of a row that Inductor keeps in registers
_WITH_A_NORM, _WITH_OPERATIONS, _OF_CHANNELS = 0.45, 1.0, 5.9  # us more than without quantization
_OF_A_ROW = 1 / 2200  # us, added to the first two of them
_TWICE, _TWICE_FEW = 4.5, 2.0  # the second up to 64 rows
_ALONE = 1.4  # us, and 3 bytes of memory's traffic for a value
_WEIGHT, _WEIGHT_BYTES = 0.3, 2.3e6
_ACTIVATION = 1.9  # us of a kernel that INT8 saves, since its epilogue computes the activation
_SHARE = 0.84  # of the memory's rate that kernels reach
_BYTES = 2.5e6  # in a us: a sum that the next norm's kernel would write and read otherwise
_LEAST_SAVED = 0.2  # of the time of separate products, by estimate: below, they may save nothing
_OPERATIONS = {"add", "sub", "mul", "div", "relu", "gelu", "silu", "sigmoid", "tanh", "dropout", "pow", "addcmul"}
_VIEWS = keep_quantize.RESHAPED
_ELEMENTWISE = {*_VIEWS, *_OPERATIONS, *keep_quantize.TURNS}
_COPIES, _TWO_OPERANDS = {"contiguous", "clone", "dropout"}, {"mul", "add", "sub"}
_CONVOLUTIONS = {"conv1d", "conv2d", "conv3d", "convolution"}


class LinearGain(NamedTuple):
    """Microseconds of the layers that share an input: their float products, their INT8 products, and quantizations."""

    float_us: float
    int8_us: float
    quantize_us: float  # of their input, and of their weights if each call quantizes them

    @property
    def pays(self) -> bool:
        """Whether INT8 takes less time."""
        return self.int8_us + self.quantize_us < self.float_us


def reason_of_estimate(linear: Node, frozen: bool) -> str | None:
    """Why INT8 would take longer than the float layer by estimate; None if not, or if nothing like it was measured.

    Args:
        linear: the layer.
        frozen: whether its weight is quantized once, and not at each call.
    """
    call = linear_call(linear)
    gain = None if call is None else _gain(linear, call, frozen)
    if gain is None or gain.pays:
        return None
    weight = "" if frozen else " and weight, which options={'freeze_weights': True} quantizes once,"
    return (
        f"INT8 would be slower: by estimate {gain.float_us:.1f} us in float, {gain.int8_us:.1f} us in "
        f"INT8 and {gain.quantize_us:.1f} us for quantizing its input{weight} on this GPU"
    )


def _gain(linear: Node, call: LinearCall, frozen: bool) -> LinearGain | None:
    x = fake_value(call.input)
    processors = None if x is None else _multiprocessors(x.device)
    if x is None or processors is None or x.dtype.itemsize != 2:
        return None
    memory = memory_of(x.device)
    rows, inputs = math.prod(map(traced_size, x.shape[:-1])), traced_size(x.shape[-1])
    if not inputs or not 0 < rows < _most_rows(call.input, inputs):
        return None
    in_float = in_int8 = 0.0
    joined = 0  # outputs of layers that are one product (merge_linears.py)
    quantize = 0.0 if is_quantized(call.input) else _input_us(call.input, rows, inputs, memory)
    for each in [user for user in call.input.users if (read := linear_call(user)) and read.input is call.input]:
        fake = fake_value(each)
        outputs = 0 if fake is None else traced_size(fake.shape[-1])
        if not outputs:
            return None
        in_float += half_us(rows, outputs, inputs, memory) + _behind_float_us(each, rows * outputs, memory)
        quantize += 0.0 if frozen else _WEIGHT + 3 * outputs * inputs / _WEIGHT_BYTES
        if frozen and find_epilogue(each).end is each:
            joined += outputs
        else:
            in_int8 += int8_us(rows, outputs, inputs, processors, memory)
    in_int8 += int8_us(rows, joined, inputs, processors, memory) if joined else 0.0
    return LinearGain(in_float, in_int8, quantize)


def pays_to_join(x: Tensor, outputs: Sequence[Size]) -> bool:
    """Whether layers save enough time as one product to be worth a copy of their weights.

    They must save a fifth of their time, and as much as reading the copy from memory once takes, so that long weights
    are not copied for the time of a launch. False without estimates: on other devices, and for unknown sizes.

    Args:
        x: ``(..., K)`` int8, which all of them read.
        outputs: the number of outputs of each.
    """
    processors = _multiprocessors(x.device)
    rows, inputs = math.prod(map(traced_size, x.shape[:-1])), traced_size(x.shape[-1])
    sizes = [traced_size(size) for size in outputs]
    if processors is None or not all((rows, inputs, *sizes)):
        return False
    apart = sum(int8_us(rows, size, inputs, processors) for size in sizes)
    saved = apart - int8_us(rows, sum(sizes), inputs, processors)
    return saved >= max(_LEAST_SAVED * apart, memory_us(sum(sizes) * inputs))


def _behind_float_us(linear: Node, results: int, memory: float) -> float:
    """What other kernels take for the epilogue that INT8 would have."""
    epilogue = find_epilogue(linear)
    activation = max(_ACTIVATION, memory_us(4 * results, memory)) if epilogue.activation != "none" else 0.0
    return activation + (4 * results / _BYTES if epilogue.residual is not None else 0.0)


def _multiprocessors(device: torch.device) -> int | None:
    """Of a Hopper GPU; None for every other device."""
    return chip_of(device)[1] if capability_of(device) == (9, 0) else None


def has_estimates(device: torch.device) -> bool:
    """Whether times on a device are estimated, on Hopper GPUs alone."""
    return _multiprocessors(device) is not None


def memory_of(device: torch.device) -> float:
    """Bytes that kernels move in a microsecond."""
    rate = memory_rate_of(device)
    return MEMORY if rate is None else _SHARE * rate


def is_quantized(x: Node) -> bool:
    """Whether another layer has it quantized already."""
    return any(user.target is torch.ops.qframework.dynamic_quantize.default for user in x.users)


def _most_rows(x: Node, channels: int) -> float:
    """From how many rows of ``x`` on nothing was measured."""
    convolution = _convolution_behind(x)
    if convolution is not None:
        return math.inf if has_own_kernel(convolution) else _MOST_ROWS
    few = max(keep_quantize.MANY_ROWS, _FEW_VALUES / channels)
    if channels > _LONGEST or reads_columns(x):
        return few
    if keep_quantize.is_written_by_a_kernel(x):
        return math.inf
    return max(few, _FEW_OF_ACTIVATIONS) if operation(behind(x, _VIEWS)) in keep_quantize.PAYS else few


def _input_us(x: Node, rows: int, channels: int, memory: float) -> float:
    """What quantizing ``x (rows, channels)`` takes beside what is computed anyway."""
    if (convolution := _convolution_behind(x)) is not None:
        return alone_us(rows, channels, memory) if has_own_kernel(convolution) else _OF_CHANNELS
    if reads_columns(x):
        return _OF_CHANNELS
    x = behind(x, _VIEWS)
    if norm_call(x) is not None:
        return _WITH_A_NORM + _OF_A_ROW * rows
    if operation(x) in _OPERATIONS and channels <= _LONGEST:
        return _WITH_OPERATIONS + _OF_A_ROW * rows
    if operation(x) in _OPERATIONS:
        return _TWICE if rows > MAX_FEW_ROWS else _TWICE_FEW
    return alone_us(rows, channels, memory)


def reads_columns(x: Node) -> bool:
    """Whether a layer reads columns of what is before it as rows, or its sum or product with such a linear's result."""
    before = behind(x, _COPIES)
    return swaps_last(before) or (operation(before) in _TWO_OPERANDS and any(map(_turns_linear, before.args)))


def _turns_linear(x: Any) -> bool:
    if not isinstance(x, Node) or not swaps_last(behind(x, _COPIES)):
        return False
    source = argument(behind(x, _COPIES), 0, "input", "self")
    return linear_call(source) is not None or keep_quantize.is_written_by_int8_linear(source)


def alone_us(rows: int, channels: int, memory: float) -> float:
    """What a quantization takes in a kernel of its own."""
    return _ALONE + memory_us(3 * rows * channels, memory)


def _convolution_behind(x: Node) -> Node | None:
    """The convolution from whose result a norm or operations compute ``x``, and from no other large tensor."""
    x = behind(x, _VIEWS)
    norm = norm_call(x)
    if norm is None and operation(x) not in _OPERATIONS:
        return None
    x = x if norm is None else norm.input
    while operation(x) in _ELEMENTWISE and isinstance(x.args[0], Node) and not _joins(x):
        x = x.args[0]
    return x if operation(x) in _CONVOLUTIONS else None


def _joins(node: Node) -> bool:
    """Whether a node computes its result from several tensors that are as large, as a residual stream is."""
    fakes = [fake_value(each) for each in (node, *node.all_input_nodes)]
    sizes = [0 if fake is None else math.prod(map(traced_size, fake.shape)) for fake in fakes]
    return sizes[1:].count(sizes[0]) > 1
