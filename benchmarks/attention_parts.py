"""Attention on Hopper: share of quantization, variants against each other and cuDNN, packed sequences against dense.

``python -m benchmarks.attention_parts`` checks each call against float32 attention, then times calls replayed in CUDA
graphs, with the L2 cache flushed before each, interleaved in rounds. Times are medians in microseconds.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.attention_oracle import float32_attention
from qframework import calibrate_attention, sage_attention_varlen
from qframework.kernels.attention.hopper import packed as hopper_packed
from qframework.kernels.attention.hopper import specialized
from qframework.kernels.attention.hopper.prepare import can_prepare, prepare_triton
from qframework.kernels.attention.operands import Bias
from qframework.kernels.attention.pipeline import _attend_triton
from qframework.kernels.attention.variants import resolve
from qframework.outputs import output_file

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
FLUSH_BYTES = 128 * 2**20
KEY_BIAS = 2.0
# Forms of the kernel with a loading warp: changes to its Form; results must be equal.
FORMS: dict[str, dict[str, Any]] = {"as it is": {}, "two stages": {"stages": 2}, "three stages": {"stages": 3}}
MIXES = {
    "geometric": [8192, 4096, 4096, 2048, 2048, 2048, 1024, 1024, 1024, 1024, 512, 512, 512, 512, 512, 512],
    "odd": [7001, 5003, 3999, 3001, 2047, 1777, 1500, 1111, 999, 777, 555, 333, 222, 111],
    "equal": [4096] * 4,
}


class Runs:
    """Calls timed in turns: a CUDA graph of each, replayed after a flush of the L2 cache."""

    def __init__(self, calls: dict[str, Callable[[], Any]]) -> None:
        self.flushed = torch.zeros(FLUSH_BYTES // 4, device="cuda")
        self.graphs = {name: self._captured(fn) for name, fn in calls.items()}

    def _captured(self, fn: Callable[[], Any]) -> torch.cuda.CUDAGraph:
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                fn()
            torch.cuda.synchronize()
            graph.capture_begin()
            try:
                fn()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)
        return graph

    def times(self, rounds: int) -> dict[str, float]:
        """Medians in microseconds, from ``rounds`` rounds of all in turns after one that warms up."""
        found: dict[str, list[tuple[Any, Any]]] = {name: [] for name in self.graphs}
        for _ in range(rounds + 1):
            for name, graph in self.graphs.items():
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                self.flushed.sum()  # read, so that no write is left over
                start.record()
                graph.replay()
                end.record()
                found[name].append((start, end))
        torch.cuda.synchronize()
        return {
            name: round(statistics.median(a.elapsed_time(b) for a, b in pairs[1:]) * 1e3, 1)
            for name, pairs in found.items()
        }


def counted(fn: Callable[..., Any], used: list[int]) -> Callable[..., Any]:
    """``fn``, which adds a number to ``used`` in each call."""

    def run(*given: Any) -> Any:
        used.append(1)
        return fn(*given)

    return run


def normal(*sizes: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*sizes, device="cuda", dtype=dtype)


def relative_l1(out: Tensor, reference: Tensor) -> float:
    return round(float((out.float() - reference).abs().sum(dtype=torch.float64) / reference.abs().sum()), 5)


def dense_operands(
    batch: int, heads: int, key_heads: int, tokens: int, width: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Normal Q and V, and K with a bias of each channel."""
    q = normal(batch, heads, tokens, width, dtype=dtype)
    k = normal(batch, key_heads, tokens, width, dtype=dtype) + KEY_BIAS * normal(1, key_heads, 1, width, dtype=dtype)
    return q, k, normal(batch, key_heads, tokens, width, dtype=dtype)


def case_dense(shape: list[int], dtype: str, causal: bool, names: list[str], rounds: int) -> dict[str, Any]:
    """Whole calls of variants and of cuDNN, and their passes and kernels alone."""
    batch, heads, key_heads, tokens, width = shape
    q, k, v = dense_operands(batch, heads, key_heads, tokens, width, DTYPES[dtype])
    calls: dict[str, Callable[[], Any]] = {}
    errors = {}
    reference = float32_attention(q[:1, :1], k[:1, :1], v[:1, :1], causal)

    def cudnn() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=heads != key_heads)

    calls["cudnn"] = cudnn
    errors["cudnn"] = relative_l1(cudnn()[:1, :1], reference)
    problems = {}
    for name in names:
        variant = resolve(name)

        def whole(name=name) -> Tensor:
            given = {"is_causal": causal, "enable_gqa": heads != key_heads, "variant": name}
            return torch.ops.qframework.sage_attention(q, k, v, **given)[0]

        try:
            errors[name] = relative_l1(whole()[:1, :1], reference)
            calls[name] = whole
            if can_prepare(variant):
                operands = (q, k, v, variant, width**-0.5, True)
                prepared = prepare_triton(*operands)
                calls[f"{name} pass"] = functools.partial(prepare_triton, *operands)
                kernel = functools.partial(
                    _attend_triton, *prepared, Bias(causal=causal), variant, q.dtype, False, None
                )
                calls[f"{name} kernel"] = kernel
        except Exception as error:  # noqa: BLE001 - the other cases go on
            problems[name] = f"{type(error).__name__}: {error}"[:400]
    times = Runs(calls).times(rounds)
    return {"case": "dense", "shape": shape, "dtype": dtype, "causal": causal, "us": times, "error": errors} | (
        {"problems": problems} if problems else {}
    )


@contextlib.contextmanager
def changed_form(changes: dict[str, Any]) -> Iterator[None]:
    """Kernels launched inside the block are of a form with these changes."""
    original = specialized.form_of
    specialized.form_of = lambda *given, **named: original(*given, **named)._replace(**changes)
    try:
        yield
    finally:
        specialized.form_of = original


def case_forms(shape: list[int], name: str, rounds: int) -> dict[str, Any]:
    """The kernel alone of a variant that :func:`can_prepare` in the FORMS, and how far their results are apart."""
    batch, heads, tokens, width = shape
    q, k, v = dense_operands(batch, heads, heads, tokens, width, torch.float16)
    variant = resolve(name)
    prepared = prepare_triton(q, k, v, variant, width**-0.5, True)
    first = _attend_triton(*prepared, Bias(), variant, q.dtype, False, None)[0]
    calls: dict[str, Callable[[], Any]] = {}
    apart, problems = {}, {}
    for form, changes in FORMS.items():

        def call(changes=changes) -> Tensor:
            with changed_form(changes):
                return _attend_triton(*prepared, Bias(), variant, q.dtype, False, None)[0]

        try:
            out = call()
            apart[form] = relative_l1(out, first.float())
            if not torch.equal(out, first):
                problems[form] = "must equal the form in use"
            if apart[form] < 0.001:
                calls[form] = call
        except Exception as error:  # noqa: BLE001 - the other forms go on
            problems[form] = f"{type(error).__name__}: {error}"[:300]
    times = Runs(calls).times(rounds)
    return {"case": "forms", "shape": shape, "variant": name, "us": times, "apart": apart, "problems": problems}


Operands = tuple[Tensor, Tensor, Tensor]


def in_chunks(operands: Operands, heads: int) -> list[Operands]:
    """Q, K and V ``(B, H, N, D)`` of so many heads at a time, ``(1, heads, N, D)``; the last may be fewer."""
    q, k, v = (x.reshape(1, -1, *x.shape[2:]).split(heads, 1) for x in operands)
    return list(zip(q, k, v, strict=True))


def case_chunks(shape: list[int], dtype: str, name: str, rounds: int) -> dict[str, Any]:
    """Whole calls as calls of some heads each, on two streams in turns.

    What a pass writes may stay in the L2 cache, and multiprocessors that one kernel leaves idle at its end take up the
    pass and the kernel of the next heads.
    """
    batch, heads, tokens, width = shape
    operands = dense_operands(batch, heads, heads, tokens, width, DTYPES[dtype])
    variant = resolve(name)
    streams = [torch.cuda.Stream() for _ in range(2)]

    def prepared(part: Operands) -> tuple[Any, Any]:
        return prepare_triton(*part, variant, width**-0.5, True)

    def attended(given: tuple[Any, Any]) -> Tensor:
        return _attend_triton(*given, Bias(), variant, DTYPES[dtype], False, None)[0]

    def overlapped(parts: list[Operands]) -> list[Tensor]:
        main, results, kept = torch.cuda.current_stream(), [], []
        for stream in streams:
            stream.wait_stream(main)
        for part, stream in zip(parts, itertools.cycle(streams), strict=False):
            with torch.cuda.stream(stream):
                kept.append(prepared(part))  # alive until all is done: the streams share the allocator's memory
                results.append(attended(kept[-1]))
        for stream in streams:
            main.wait_stream(stream)
        return results

    (all_heads,) = in_chunks(operands, batch * heads)
    both = prepared(all_heads)
    whole = attended(both)
    calls: dict[str, Callable[[], Any]] = {
        "whole": lambda: attended(prepared(all_heads)),
        "pass alone": functools.partial(prepared, all_heads),
        "kernel alone": functools.partial(attended, both),
    }
    problems = {}
    for count in (64, 33, 32, 16, 8):
        parts, label = in_chunks(operands, count), f"{count} heads at a time"
        if torch.equal(torch.cat(overlapped(parts), 1), whole):
            calls[label] = functools.partial(overlapped, parts)
        else:
            problems[label] = "must equal all heads at once"
    times = Runs(calls).times(rounds)
    return {"case": "chunks", "shape": shape, "dtype": dtype, "variant": name, "us": times, "problems": problems}


def case_packed(mix: str, heads: int, width: int, causal: bool, variant: str, rounds: int) -> dict[str, Any]:
    """Packed sequences in one call, against dense calls of the same sequences one by one, and grouped by length."""
    lengths = MIXES[mix]
    dtype = torch.float16
    total = sum(lengths)
    q, k, v = (normal(total, heads, width, dtype=dtype) for _ in range(3))
    ends = list(itertools.accumulate(lengths))
    starts = torch.tensor([0, *ends], dtype=torch.int32, device="cuda")
    longest = max(lengths)

    def packed(name: str = variant) -> Tensor:
        return sage_attention_varlen(q, k, v, starts, starts, longest, longest, causal, variant=name)

    out = packed()
    worst = 0.0
    for start, end in zip([0, *ends], ends, strict=False):
        q_head, k_head, v_head = (x[start:end, :1].transpose(0, 1)[None] for x in (q, k, v))
        expected = float32_attention(q_head, k_head, v_head, causal)[0].transpose(0, 1)
        worst = max(worst, relative_l1(out[start:end, :1], expected))
    # The same work as one dense batch: sequences of one length whose squares add up alike.
    same = round((sum(n * n for n in lengths) / 4) ** 0.5)
    dense = dense_operands(4, heads, heads, same, width, dtype)
    aligned = -(-same // 128) * 128
    whole = dense_operands(4, heads, heads, aligned, width, dtype)

    def call(operands, name: str = variant) -> Callable[[], Tensor]:
        return lambda: torch.ops.qframework.sage_attention(*operands, is_causal=causal, variant=name)[0]

    groups = {n: dense_operands(lengths.count(n), heads, heads, n, width, dtype) for n in sorted(set(lengths))}
    calls = {
        "packed": packed,
        "dense": call(dense),
        "dense, whole blocks": call(whole),
        "dense, by length": lambda: [call(x)() for x in groups.values()],
    }
    times = Runs(calls).times(rounds)
    work = sum(n * n for n in lengths)
    return {
        "case": "packed", "mix": mix, "heads": heads, "width": width, "causal": causal, "variant": variant,
        "lengths": lengths, "dense_tokens": [same, aligned], "us": times, "error": worst,
        "of dense": round(times["dense"] / times["packed"] * work / (4 * same**2), 3),
        "of whole blocks": round(times["dense, whole blocks"] / times["packed"] * work / (4 * aligned**2), 3),
        "of dense by length": round(times["dense, by length"] / times["packed"], 3),
    }  # fmt: skip


def case_check(shape: list[int], causal: bool, masked: bool, name: str) -> dict[str, Any]:
    """A variant in Hopper's kernel against the general kernel: the relative L1 distance, and both from float32."""
    batch, heads, key_heads, queries, keys, width, values = shape
    q = normal(batch, heads, queries, width, dtype=torch.float16)
    k = normal(batch, key_heads, keys, width, dtype=torch.float16) + 1
    v = normal(batch, keys, key_heads, values, dtype=torch.float16).transpose(1, 2)
    q[0, 1, 5, 0] = torch.nan
    mask = None
    if masked:
        mask = torch.arange(keys, device="cuda") < torch.tensor([[[[keys - 37]]], [[[keys // 3]]]], device="cuda")
    given = {"attn_mask": mask, "is_causal": causal, "enable_gqa": heads != key_heads, "variant": name}
    used: list[int] = []
    launch, fits = specialized.attention_hopper, specialized.fits
    specialized.attention_hopper = counted(launch, used)
    try:
        out = torch.ops.qframework.sage_attention(q, k, v, **given)[0]
        specialized.fits = lambda *some, **named: False
        general = torch.ops.qframework.sage_attention(q, k, v, **given)[0]
    finally:
        specialized.attention_hopper, specialized.fits = launch, fits
    wide_q, wide_k, wide_v = (x.float().repeat_interleave(heads // x.shape[1], 1) for x in (q, k, v))
    exact = F.scaled_dot_product_attention(wide_q, wide_k, wide_v, mask, is_causal=causal)
    nans = [int(x.isnan().sum()) for x in (out, general)]
    out, general, exact = (x.nan_to_num(0) for x in (out, general, exact))
    return {
        "case": "check", "shape": shape, "causal": causal, "masked": masked, "variant": name, "on hopper": len(used),
        "nans": nans, "apart": relative_l1(out, general.float()),
        "error": [relative_l1(out, exact), relative_l1(general, exact)],
        "worst": [float((x.float() - exact).abs().max()) for x in (out, general)],
    }  # fmt: skip


def case_isolated(causal: bool) -> dict[str, Any]:
    """Packed sequences some of which hold NaN, are empty, or leave out tokens: against dense calls of each."""
    lengths_q, lengths_k = [700, 0, 1300, 129, 333, 1024, 5], [900, 40, 1100, 300, 333, 0, 2000]
    heads, key_heads, width = 24, 12, 64
    q = normal(sum(lengths_q) + 50, heads, width, dtype=torch.float16)
    k, v = (normal(sum(lengths_k) + 9, key_heads, width, dtype=torch.float16) for _ in range(2))
    starts_q, starts_k = (
        torch.tensor([0, *itertools.accumulate(x)], dtype=torch.int32, device="cuda") for x in (lengths_q, lengths_k)
    )
    v[900:940] = torch.nan  # the keys after the first sequence
    k[2040:2340] = torch.inf
    used: list[int] = []
    launch = hopper_packed.attention_packed
    hopper_packed.attention_packed = counted(launch, used)
    longest_q, longest_k = max(lengths_q), max(lengths_k)
    out = sage_attention_varlen(q, k, v, starts_q, starts_k, longest_q, longest_k, causal, variant="unquantized")
    hopper_packed.attention_packed = launch
    worst = 0.0
    for i, (a, b) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        qs, ks = int(starts_q[i]), int(starts_k[i])
        got = out[qs : qs + a].float()
        if i == 3:
            continue  # K is not finite there
        if a and b:
            parts = (q[qs : qs + a], k[ks : ks + b], v[ks : ks + b])
            one_q, one_k, one_v = (x.transpose(0, 1)[None].float() for x in parts)
            dense = F.scaled_dot_product_attention(one_q, one_k, one_v, is_causal=causal, enable_gqa=True)
            expected = dense[0].transpose(0, 1)
        else:
            expected = torch.zeros_like(got)
        worst = max(worst, float((got - expected).abs().nan_to_num(9.0).max()) if got.numel() else 0.0)
    return {
        "case": "isolated", "causal": causal, "on hopper": len(used), "worst": worst,
        "spare": float(out[sum(lengths_q) :].float().abs().nan_to_num(9.0).max()),
    }  # fmt: skip


def case_repeats(name: str, packed: bool) -> dict[str, Any]:
    """Calls beside products on another stream, which take multiprocessors away: how many differ from the first."""
    q, k, v = dense_operands(2, 32, 32, 1500, 128, torch.float16)
    starts = torch.tensor([0, 700, 700, 1500], dtype=torch.int32, device="cuda")

    def call() -> Tensor:
        if packed:
            one_q, one_k, one_v = (x[0].transpose(0, 1) for x in (q, k, v))
            return sage_attention_varlen(one_q, one_k, one_v, starts, starts, 800, 800, variant=name)
        return torch.ops.qframework.sage_attention(q, k, v, is_causal=True, variant=name)[0]

    first = call()
    other, x = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda", dtype=torch.float16)
    differ = 0
    for _ in range(100):
        with torch.cuda.stream(other):
            x = (x @ x).clamp(-1, 1)
        differ += not torch.equal(first, call())
    return {"case": "repeats", "variant": name, "packed": packed, "differ": differ}


def case_choice(tokens: int, heads: int, width: int) -> dict[str, Any]:
    """What calibrate_attention measures and chooses for one layer."""

    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v)

    began = time.monotonic()
    batch = dense_operands(2, heads, heads, tokens, width, torch.float16)
    choice = calibrate_attention(Layer(), [batch], device="cuda", verbose=False, progress=False)
    (layer,) = choice.layers.values()
    us = {name: round((each.seconds or 0) * 1e6, 1) for name, each in layer.measurements.items()}
    cosine = {name: round(each.cosine, 6) for name, each in layer.measurements.items()}
    return {
        "case": "choice", "shape": [2, heads, tokens, width], "chosen": layer.variant, "us": us, "cosine": cosine,
        "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip


def cases(names: list[str], rounds: int, part: str) -> list[tuple[Callable[..., dict[str, Any]], tuple[Any, ...]]]:
    """Most important first."""
    short = [[4, 32, 32, 4096, 64], [4, 32, 32, 4096, 128]]
    long = [[4, 32, 32, 8192, 64], [4, 32, 32, 8192, 128], [4, 32, 32, 16384, 64], [4, 32, 32, 16384, 128]]
    long += [[1, 32, 32, 32768, 64], [1, 32, 32, 32768, 128], [1, 16, 16, 4096, 80]]
    checked = [([2, 40, 40, 700, 1000, 64, 64], False, masked) for masked in (False, True)]
    checked += [([2, 40, 20, 1000, 1000, 128, 128], True, False), ([2, 40, 40, 900, 700, 80, 72], False, True)]
    fp8 = ("sage2_int8", "8-per_block-fp8-fp32", "8-per_thread-fp16-fp32", "integer_exp")
    repeated = [("sage2_int8", False), ("unquantized", True)]
    calls = ((4096, 16, 64), (1024, 16, 64))
    mixes = [
        ("geometric", 32, 64, False),
        ("odd", 16, 128, False),
        ("geometric", 16, 128, True),
        ("equal", 32, 64, False),
    ]
    parts: dict[str, list[tuple[Any, tuple[Any, ...]]]] = {
        "isolated": [(case_isolated, (causal,)) for causal in (False, True)],
        "dense": [(case_dense, (shape, "float16", False, names, rounds)) for shape in short],
        "packed": [(case_packed, (*mix, "unquantized", rounds)) for mix in mixes],
        "packed integer": [(case_packed, (*mixes[0], "integer_exp", rounds))],
        "bfloat16": [(case_dense, (shape, "bfloat16", False, names, rounds)) for shape in (*short, *long[:2])],
        "long": [(case_dense, (shape, "float16", False, names, rounds)) for shape in long],
        "causal": [(case_dense, ([4, 32, n, 8192, 128], "float16", True, names, rounds)) for n in (32, 8)],
        "repeats": [(case_repeats, given) for given in repeated],
        "choice": [(case_choice, given) for given in calls],
        "check": [(case_check, (*given, name)) for name in fp8 for given in checked],
        "chunks": [
            (case_chunks, ([4, 32, 4096, width], dtype, "integer_exp", rounds))
            for dtype in ("float16", "bfloat16")
            for width in (64, 128)
        ],
        "forms": [
            (case_forms, ([batch, 32, tokens, width], name, rounds))
            for batch, tokens, width in ((4, 4096, 64), (4, 4096, 128), (1, 16384, 64))
            for name in ("sage2_int8", "integer_exp")
        ],
    }
    return [case for name in (part.split(",") if part else parts) for case in parts[name]]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="where there is no GPU, only list the cases")
    parser.add_argument("--variants", default="integer_exp,sage2_int8,unquantized")
    parser.add_argument("--only", default="", help="parts in their order, separated by commas, e.g. dense,packed")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--limit", type=float, default=150.0, help="seconds after which no case is begun")
    parser.add_argument("--output", type=output_file, default=Path(os.environ.get("OUT", ".")) / "attention-parts.json")
    arguments = parser.parse_args(argv)
    variants = arguments.variants.split(",")
    if arguments.smoke and not torch.cuda.is_available():
        print("\n".join(f"{case.__name__} {given}" for case, given in cases(variants, 1, arguments.only)))
        return 0
    began = time.monotonic()
    rows: list[dict[str, Any]] = []
    device = torch.cuda.get_device_name()
    about = {"device": device, "torch": torch.__version__, "commit": os.environ.get("QFRAMEWORK_COMMIT", "")}
    about |= {"date": time.strftime("%Y-%m-%d"), "rounds": arguments.rounds}
    with torch.no_grad():
        for case, given in cases(variants, arguments.rounds, arguments.only):
            if time.monotonic() - began > arguments.limit:
                rows.append({"case": case.__name__, "given": str(given), "skipped": "out of time"})
                continue
            torch.manual_seed(0)
            try:
                rows.append(case(*given))
            except Exception as error:  # noqa: BLE001 - the other cases go on
                rows.append(
                    {"case": case.__name__, "given": str(given), "failed": f"{type(error).__name__}: {error}"[:600]}
                )
            print(json.dumps(rows[-1]), f"{time.monotonic() - began:.0f} s", flush=True)
            torch.cuda.empty_cache()
            arguments.output.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")
    return int(any("failed" in row or row.get("problems") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
