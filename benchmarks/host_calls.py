"""Host time of one call of an operator, which limits small batches without CUDA graphs.

Many calls are issued without waiting for results, at sizes so small that the GPU keeps up. ``qframework`` is the
registered operator; ``qframework_as_written`` is its Python implementation, with the checks and choices that a replay
skips (qframework/kernels/runtime/replay.py). The peers do the same work with PyTorch in 16 bit. Without a GPU, the CPU
implementations run; their times are meaningless here.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.harness import (
    Record,
    Results,
    UnavailableError,
    WrongResultError,
    add_device,
    argument_parser,
    comma_separated,
)
from benchmarks.timing import Timing
from qframework.kernels.runtime.operator import OPERATORS

CALLS, SAMPLES, SMOKE_SAMPLES = 100, 50, 2
BLOCK_SIZE = [1, 128]
PEER = "torch_fp16"
PROVIDERS = ("qframework", "qframework_as_written", PEER)


def operators(device: str) -> dict[str, tuple[tuple[Any, ...], Callable[[], Any]]]:
    """By name: the operator's arguments, and the equivalent call of PyTorch in 16 bit."""

    def ints(*shape: int) -> torch.Tensor:
        return torch.randint(-127, 128, shape, dtype=torch.int8, device=device)

    floats = functools.partial(torch.rand, device=device)
    half = functools.partial(torch.randn, dtype=torch.float16, device=device)
    tokens, weight, bias = half(1, 197, 768), half(768, 768), half(768)
    q, k, v = (half(1, 12, 197, 64) for _ in range(3))
    x, y, w = half(128, 1024), half(128, 1024), half(1024, 1024)
    blocks = ints(128, 1024), floats(128, 8)
    return {
        "int8_linear": (
            (ints(1, 197, 768), floats(1), ints(768, 768), floats(768), bias, "none", tokens, None, torch.float16),
            lambda: F.linear(tokens, weight, bias),
        ),
        "dynamic_quantize": ((tokens, "per_token"), lambda: F.layer_norm(tokens, (768,))),
        "sage_attention": ((q, k, v), lambda: F.scaled_dot_product_attention(q, k, v)),
        "block_linear": (
            (*blocks, ints(1024, 1024), floats(32, 8), None, BLOCK_SIZE, torch.int8),
            lambda: F.linear(x, w),
        ),
        "block_add": ((*blocks, *blocks, BLOCK_SIZE, True), lambda: x + y),
        "block_activation": ((*blocks, "gelu", BLOCK_SIZE), lambda: F.gelu(x)),
    }


def provider(name: str, operator: str, device: str) -> Callable[[], Any]:
    """The timed call."""
    arguments, peer = operators(device)[operator]
    if name == PEER:
        return peer
    if name == "qframework":
        return functools.partial(getattr(torch.ops.qframework, operator).default, *arguments)
    if device == "cpu":
        raise UnavailableError("the implementation for GPUs needs one")
    return functools.partial(as_written(operator), *arguments)


def measure(operator: str, name: str, device: str, samples: int) -> Record:
    fn = provider(name, operator, device)
    if name == "qframework" and device == "cuda":
        check_replay(operator, fn.args, fn)  # type: ignore[attr-defined]
    timing = time_host(fn, device, samples)
    return replace(identify(operator, name), **timing.fields())


def check_replay(operator: str, arguments: tuple[Any, ...], fn: Callable[[], Any]) -> None:
    """Raise WrongResultError unless the fourth call, a replay, is bit-identical to the implementation."""
    for _ in range(3):
        fn()
    pairs = (tuple(torch.utils._pytree.tree_leaves(x)) for x in (fn(), as_written(operator)(*arguments)))
    if not all(torch.equal(mine, theirs) for mine, theirs in zip(*pairs, strict=True)):
        raise WrongResultError(f"{operator}: a replay must equal the implementation, got another result")


def as_written(operator: str) -> Callable[..., Any]:
    return OPERATORS[operator].cuda


def identify(operator: str, name: str) -> Record:
    shape = list(operators("meta")[operator][0][0].shape)
    return Record(benchmark="host_calls", op=operator, shape=shape, provider=name)


def time_host(fn: Callable[[], Any], device: str, samples: int) -> Timing:
    """Wall-clock time per call of ``CALLS`` calls issued without waiting, several times."""
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    for _ in range(3):  # compile, record, replay
        fn()
    times = []
    for _ in range(samples):
        synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            fn()
        times.append((time.perf_counter() - start) / CALLS * 1e3)
    synchronize()
    return Timing(tuple(times))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every provider of every operator; returns the exit status."""
    parser = argument_parser("host_calls", __doc__)
    names = list(operators("meta"))
    parser.add_argument("--operators", type=comma_separated(names), default=names, help=f"of {', '.join(names)}")
    add_device(parser)
    arguments = parser.parse_args(argv)
    results = Results.start("host_calls", arguments.device, arguments)
    samples = SMOKE_SAMPLES if arguments.smoke or arguments.device == "cpu" else SAMPLES
    with torch.inference_mode():
        for operator in arguments.operators:
            for name in PROVIDERS:
                timed = functools.partial(measure, operator, name, arguments.device, samples)
                results.attempt(identify(operator, name), timed)
    return results.exit_code


if __name__ == "__main__":
    sys.exit(main())
