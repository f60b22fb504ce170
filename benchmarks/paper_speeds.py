"""SageAttention's tables 10 and 11 on speed: what smoothing K costs, and its four kernels, at the paper's shapes.

    python -m benchmarks.paper_speeds --output benchmarks/results/papers/DATE-GPU-speeds.json

Shapes are those of table 7, without a mask. Whole calls are timed, from float16 to float16, with all providers of a
shape in the same process; ``tflops`` counts 4 B H N N D operations. The paper's adaptive choice (table 11) takes its
time from the kernels it mixes; ``auto`` and PyTorch's attention are timed beside them. Without a GPU only ``--smoke``
makes sense: it checks every provider on a tiny shape.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.attention_cases import Inputs, Shape, make_inputs, relative_l1
from benchmarks.harness import Record, Results, WrongResultError, add_device, argument_parser
from benchmarks.timing import time_provider
from qframework.attention import sage_attention

SHAPES: Mapping[str, Shape] = {  # SageAttention, arXiv:2410.02367, table 7
    "CogVideoX": Shape(2, 30, 1776, 64),
    "Llama 2": Shape(4, 32, 1536, 128),
    "UltraPixel": Shape(2, 32, 7285, 64),
    "Unidiffuser": Shape(4, 24, 1105, 64),
    "TIMM": Shape(12, 64, 197, 64),
}
SMOKE: Mapping[str, Shape] = {"tiny": Shape(1, 2, 37, 16)}
NOT_SMOOTHED = ", K not smoothed"
LARGEST_ERROR = 0.1  # relative L1 against float32 attention; 0.14 is what the paper prints for its worst kernel
# K of these operands has a bias for each channel, so that errors without smoothing are several times as large.
LARGEST_ERROR_NOT_SMOOTHED = 0.5
_KERNELS = ("sage_b", "sage_t", "sage_vb", "sage_vt", "auto")


def _sage(given: Inputs, variant: str, smooth_k: bool) -> Tensor:
    return sage_attention(given.query, given.key, given.value, variant=variant, smooth_k=smooth_k)


def _torch(given: Inputs) -> Tensor:
    return F.scaled_dot_product_attention(given.query, given.key, given.value)


PROVIDERS: Mapping[str, Callable[[Inputs], Tensor]] = {
    "torch": _torch,
    **{name: functools.partial(_sage, variant=name, smooth_k=True) for name in _KERNELS},
    **{name + NOT_SMOOTHED: functools.partial(_sage, variant=name, smooth_k=False) for name in ("sage_b", "sage_vb")},
}


@torch.no_grad()
def measure(identity: Record, given: Inputs, device: str, rep_ms: float) -> Record:
    """Check one provider against float32 attention, then time it."""
    call = functools.partial(PROVIDERS[identity.provider], given)
    begun = time.perf_counter()
    out = call()
    if device == "cuda":
        torch.cuda.synchronize()
    first_call_s = time.perf_counter() - begun
    error = relative_l1(out.float(), given.oracle)
    bound = LARGEST_ERROR_NOT_SMOOTHED if identity.provider.endswith(NOT_SMOOTHED) else LARGEST_ERROR
    if not error < bound:
        raise WrongResultError(f"relative L1 error must be below {bound}, got {error:.3g}", error)
    timing = time_provider(call, device, rep_ms=rep_ms)
    tflops = given.shape.operations / timing.median_s / 1e12
    return replace(identity, relative_l1=error, first_call_s=first_call_s, tflops=tflops, **timing.fields())


def run(results: Results, shapes: Mapping[str, Shape], device: str, seed: int, rep_ms: float) -> None:
    """A record for each shape and provider."""
    for model, shape in shapes.items():
        given = make_inputs(shape, device, seed)
        for provider in PROVIDERS:
            identity = Record(
                benchmark="paper_speeds", op="attention", shape=shape.sizes, model=model, provider=provider
            )
            results.attempt(identity, functools.partial(measure, identity, given, device, rep_ms))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every provider at every shape; returns the exit status."""
    parser = argument_parser("paper_speeds", __doc__)
    add_device(parser)
    parser.add_argument("--seed", type=int, default=0, help="of the operands (default: 0)")
    arguments = parser.parse_args(argv)
    small = arguments.smoke or arguments.device == "cpu"
    results = Results.start("paper_speeds", arguments.device, arguments)
    run(results, SMOKE if small else SHAPES, arguments.device, arguments.seed, 1.0 if small else 60.0)
    return results.exit_code


if __name__ == "__main__":
    sys.exit(main())
