"""Linears of few rows, as in decoding: INT8 against FP16, with weights that are not in the L2 cache.

``linear`` rows time one product: calls take turns on copies of the weight that together exceed the L2 cache, inside one
CUDA graph. ``layers`` rows time the seven linears of a decoder layer, each reading the result of an earlier one, for
as many layers as exceed the cache; INT8 includes the four quantizations of their inputs. ``gbps`` counts weights once.

``qframework`` is ``int8_linear``, ``qframework_general`` the same with its tile for any number of rows.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.harness import (
    ROUNDOFF,
    Record,
    Results,
    UnavailableError,
    WrongResultError,
    add_device,
    argument_parser,
    comma_separated,
    integers,
    rows_within,
)
from benchmarks.timing import time_in_turns
from qframework import numerics
from qframework.kernels import int8_linear
from qframework.kernels.linear.arguments import Int8LinearArguments
from qframework.kernels.linear.launch import write_result
from qframework.kernels.linear.tile import Tile
from qframework.kernels.linear.tiles import general_tile
from qframework.kernels.quantize import dynamic_quantize
from qframework.kernels.runtime.chip import chip_of

COLD_BYTES = 200 * 2**20  # copies of a weight together: four times the L2 cache of an H100
PROVIDERS = ("torch_fp16", "qframework", "qframework_general")
REP_MS = 20.0


@dataclass(frozen=True)
class Layer:
    """Sizes of a decoder layer's linears."""

    name: str
    hidden: int
    queries: int
    keys: int
    intermediate: int

    @property
    def linears(self) -> tuple[tuple[int, int], ...]:
        """(N, K) of q, k, v, o, gate, up and down."""
        h, q, kv, i = self.hidden, self.queries, self.keys, self.intermediate
        return (q, h), (kv, h), (kv, h), (h, q), (i, h), (i, h), (h, i)


LAYERS = (Layer("llama-1b", 2048, 2048, 512, 8192), Layer("llama-8b", 4096, 4096, 1024, 14336))
HELD_OUT = (
    Layer("qwen3-4b", 2560, 4096, 1024, 9728),
    Layer("gemma-2b", 2304, 2048, 1024, 9216),
    Layer("odd", 1000, 1200, 200, 2744),
)
SMOKE = (Layer("tiny", 64, 48, 16, 96),)


class Weight:
    """A weight (N, K) in FP16 and in INT8, and copies of each."""

    def __init__(self, n: int, k: int, device: str, seed: int = 0) -> None:
        generator = torch.Generator(device).manual_seed(n + k + seed)
        self.half = torch.randn(n, k, generator=generator, device=device, dtype=torch.float16) * k**-0.5
        self.int8, self.scale = numerics.quantize_weight(self.half.float())

    @staticmethod
    def copies(weight: Tensor, cold_bytes: int) -> list[Tensor]:
        """The weight and as many clones as make up ``cold_bytes``."""
        count = max(1, -(-cold_bytes // (weight.numel() * weight.element_size())))
        return [weight, *(weight.clone() for _ in range(count - 1))]


def product(q: Tensor, q_scale: Tensor, weight: Tensor, scale: Tensor, tile: Tile | None = None) -> Tensor:
    """``int8_linear`` to FP16, with a given tile on a GPU."""
    if tile is None:
        return int8_linear(q, q_scale, weight, scale, out_dtype=torch.float16)
    x = Int8LinearArguments(q, q_scale, weight, scale, out_dtype=torch.float16)
    out = x.empty_result()
    write_result(x, out, tile)
    return out


def tile_of(provider: str, m: int, n: int, k: int, device: str) -> Tile | None:
    """The tile of a provider; None for the default one."""
    if provider != "qframework_general":
        return None
    if device == "cpu":
        raise UnavailableError("tiles are those of GPUs")
    return general_tile(m, n, k, *chip_of(torch.device(device)), "float", tma=k % 16 == 0 and n % 16 == 0)


def linear_calls(weight: Weight, x: Tensor, provider: str, cold_bytes: int) -> list[Callable[[], Tensor]]:
    """The product of ``x (M, K)`` with each copy of the weight; checks the first one."""
    if provider == "torch_fp16":
        return [functools.partial(F.linear, x, copy) for copy in weight.copies(weight.half, cold_bytes)]
    q, q_scale = dynamic_quantize(x)
    n, k = weight.int8.shape
    tile = tile_of(provider, len(x), n, k, x.device.type)
    check_product(product(q, q_scale, weight.int8, weight.scale, tile), q, q_scale, weight)
    copies = weight.copies(weight.int8, cold_bytes)
    return [functools.partial(product, q, q_scale, copy, weight.scale, tile) for copy in copies]


def check_product(out: Tensor, q: Tensor, q_scale: Tensor, weight: Weight) -> float:
    """Relative error against FP64; the sum is exact, the scales and the result are rounded."""

    def oracle() -> Tensor:
        return (q.double() @ weight.int8.double().t()) * q_scale.double() * weight.scale.double().reshape(1, -1)

    return rows_within(oracle, 1.5 * ROUNDOFF[torch.float16])(out)


def layer_call(layer: Layer, m: int, provider: str, device: str, seed: int) -> Callable[[], Tensor]:
    """All linears of a layer, in a row."""
    weights = [Weight(n, k, device, seed + i) for i, (n, k) in enumerate(layer.linears)]
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(m, layer.hidden, generator=generator, device=device, dtype=torch.float16)
    tiles = [tile_of(provider, m, n, k, device) for n, k in layer.linears]
    if provider == "torch_fp16":
        halves = [w.half for w in weights]

        def run_half() -> Tensor:
            query, _, _ = (F.linear(x, w) for w in halves[:3])
            y = F.linear(query, halves[3])
            gate, _ = (F.linear(y, w) for w in halves[4:6])
            return F.linear(gate, halves[6])

        return run_half
    pairs = [(w.int8, w.scale) for w in weights]

    def several(value: Tensor, which: range) -> list[Tensor]:
        q, scale = dynamic_quantize(value)
        return [product(q, scale, *pairs[i], tiles[i]) for i in which]

    def run() -> Tensor:
        query = several(x, range(3))[0]
        gate = several(several(query, range(3, 4))[0], range(4, 6))[0]
        return several(gate, range(6, 7))[0]

    return run


@torch.no_grad()
def measure_linear(m: int, n: int, k: int, provider: str, device: str, rep_ms: float, cold_bytes: int) -> Record:
    identity = Record(benchmark="few_rows", op="linear", shape=[m, n, k], provider=provider)
    weight = Weight(n, k, device)
    x = torch.randn(m, k, device=device, dtype=torch.float16)
    timing = time_in_turns(linear_calls(weight, x, provider, cold_bytes), device, rep_ms=rep_ms)
    size = n * k * (2 if provider == "torch_fp16" else 1)
    return replace(identity, gbps=size / timing.median_s / 1e9, **timing.fields())


@torch.no_grad()
def measure_layers(layer: Layer, m: int, provider: str, device: str, rep_ms: float, cold_bytes: int) -> Record:
    identity = Record(benchmark="few_rows", op="layers", model=layer.name, batch=m, provider=provider)
    size = sum(n * k for n, k in layer.linears) * (2 if provider == "torch_fp16" else 1)
    count = max(1, -(-cold_bytes // size))
    calls = [layer_call(layer, m, provider, device, 10 * i) for i in range(count)]
    expected = layer_call(layer, m, "torch_fp16", device, 0)().float()
    error = float((calls[0]().float() - expected).norm() / expected.norm())
    if not error < 0.05:  # three quantizations of inputs and weights, of about 0.01 each
        raise WrongResultError(f"the layer's result must be near FP16's, got a relative error of {error:.3g}", error)
    timing = time_in_turns(calls, device, rep_ms=rep_ms)
    return replace(identity, quantization_error=error, gbps=size / timing.median_s / 1e9, **timing.fields())


def run(
    results: Results, layers: Sequence[Layer], rows: Sequence[int], providers: Sequence[str], device: str, limit: float
) -> None:
    """Every distinct linear of ``layers`` and the layers themselves, until ``limit`` seconds have passed."""
    begun = time.monotonic()
    rep_ms, cold = (REP_MS, COLD_BYTES) if device == "cuda" and not results.smoke else (1.0, 1)
    for m in rows:
        for layer in layers:
            for provider in providers:
                if time.monotonic() - begun > limit:
                    print(f"stopped after {limit:g} s")
                    return
                of_layers = Record(benchmark="few_rows", op="layers", model=layer.name, batch=m, provider=provider)
                results.attempt(of_layers, functools.partial(measure_layers, layer, m, provider, device, rep_ms, cold))
                for n, k in dict.fromkeys(layer.linears):
                    of_linear = Record(benchmark="few_rows", op="linear", shape=[m, n, k], provider=provider)
                    results.attempt(
                        of_linear, functools.partial(measure_linear, m, n, k, provider, device, rep_ms, cold)
                    )
                if device == "cuda":
                    torch.cuda.empty_cache()


def speedups(records: Sequence[Record]) -> list[str]:
    """FP16's time divided by INT8's."""
    times = {(r.op, r.subject, r.provider): r.p50_ms for r in records if r.p50_ms}
    lines = []
    for (op, subject, provider), mine in times.items():
        other = times.get((op, subject, "torch_fp16"))
        if other and mine and provider != "torch_fp16":
            lines.append(f"{op:<8} {subject:<24} {provider:<20} {1e3 * mine:8.2f} us  {other / mine:5.2f} times FP16")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every provider; returns the exit status."""
    parser = argument_parser("few_rows", __doc__)
    parser.add_argument("--rows", type=integers, default=[1, 4, 16, 64], help="numbers of rows (default: 1,4,16,64)")
    parser.add_argument("--providers", type=comma_separated(PROVIDERS), default=list(PROVIDERS))
    parser.add_argument("--limit", type=float, default=1e9, help="start no layer after so many seconds")
    add_device(parser)
    arguments = parser.parse_args(argv)
    small = arguments.smoke or arguments.device == "cpu"
    results = Results.start("few_rows", arguments.device, arguments)
    layers = SMOKE if small else (*LAYERS, *HELD_OUT)
    run(
        results,
        layers,
        arguments.rows[:2] if small else arguments.rows,
        arguments.providers,
        arguments.device,
        arguments.limit,
    )
    for line in speedups(results.records):
        print(line)
    return results.exit_code


if __name__ == "__main__":
    sys.exit(main())
