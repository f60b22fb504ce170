"""The aims of attention on Hopper: whole calls as models have them, beside all of PyTorch's kernels, and their passes.

``python -m benchmarks.attention_rows`` compares each call with float64 attention, then times the calls of a case in
turns: CUDA graphs, the L2 cache flushed before each. Each run has new data. Times are medians in microseconds.
``benchmarks.report`` makes a page of the newest file.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.attention_parts import MIXES, Runs
from qframework import numerics, sage_attention, sage_attention_varlen
from qframework.kernels.attention.hopper.prepare import prepare_triton
from qframework.kernels.attention.variants import resolve
from qframework.outputs import output_file

Kind = Literal[
    "plain", "causal", "padding", "causal mask", "band", "bias", "window bias", "factors", "static", "packed"
]
KEY_BIAS = 2.0
BAND = 256
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CHECKED_ROWS = 128  # queries of the first head of the first and last sequence that are compared with float64
PEERS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}  # fmt: skip


class Case(NamedTuple):
    """Calls that are compared. Packed cases have the name of a mix of lengths."""

    row: str
    batch: int
    heads: int
    key_heads: int
    tokens: int
    width: int
    kind: Kind = "plain"
    ours: tuple[str, ...] = ("auto",)
    mix: str = ""

    @property
    def name(self) -> str:
        heads = f"{self.heads}" if self.heads == self.key_heads else f"{self.heads}/{self.key_heads}"
        if self.mix:
            return f"{len(MIXES[self.mix])} sequences, {heads} heads, {self.width} channels"
        kind = "" if self.kind in ("plain", "static") else f", {self.kind}"
        return f"{self.batch} x {heads} x {self.tokens:,} x {self.width}{kind}"


LONG_TOKENS = 8192  # from which the memory-efficient kernel, never the fastest without a mask, is left out
LONG = ("auto", "integer_exp", "sage2_int8", "sage2pp_int8", "unquantized")
HEADS = (32, 40, 48, 72, 80, 96, 112, 160, 192, 256)
ROWS: dict[str, list[Case]] = {
    "static": [Case("static", b, h, h, n, 64, "static") for b, h, n in ((512, 12, 197), (128, 16, 577), (64, 16, 785))],
    "short": [Case("short", b, h, h, n, 64) for b, h, n in ((512, 12, 197), (128, 16, 577), (64, 16, 785))],
    "long": [
        Case("long", b, 32, 32, n, d, ours=LONG)
        for d in (64, 128)
        for b, n in ((4, 4096), (4, 8192), (4, 16384), (1, 32768))
    ],
    "causal": [
        *[Case("causal", 4, 32, g, 2048, d, "causal") for d in (64, 128) for g in (32, 8)],
        *[Case("causal", 4, 32, g, 8192, d, "causal") for d in (64, 128) for g in (32, 8)],
        *[Case("causal", 4, 32, 8, 4096, d) for d in (64, 128)],
        *[Case("causal", 8, 32, 32, 1024, d, "causal") for d in (64, 128)],
    ],
    "masks": [
        Case("masks", b, h, g, n, d, kind)
        for b, h, g, n, d in ((32, 16, 16, 512, 64), (4, 32, 8, 2048, 64), (4, 32, 8, 2048, 128))
        for kind in ("padding", "causal mask", "band")
    ],
    "heads": [Case("heads", 4, 16, 16, 4096, d) for d in HEADS],
    "windows": [
        Case("windows", 4096, 4, 4, 49, 32, "window bias"), Case("windows", 4096, 3, 3, 64, 32, "window bias"),
        Case("windows", 400, 12, 12, 196, 64, "bias"), Case("windows", 400, 16, 16, 196, 80, "bias"),
        Case("windows", 400, 12, 12, 196, 64, "factors"), Case("windows", 400, 16, 16, 196, 80, "factors"),
    ],
    "factors": [Case("factors", b, 16, 16, 4096, 80, "factors") for b in (1, 4, 8)],
    "packed": [
        Case("packed", 1, heads, heads, 0, width, "packed", mix=mix)
        for heads, width, mix in ((32, 64, "geometric"), (16, 128, "geometric"), (16, 128, "odd"))
    ],
}  # fmt: skip
Calls = dict[str, Callable[[], Any]]


class Operands(NamedTuple):
    """What a call has: the mask is bool or float, ``rel`` the factors of relative positions."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None = None
    causal: bool = False
    rel: tuple[Tensor, Tensor] | None = None


def normal(*sizes: int) -> Tensor:
    return torch.randn(*sizes, device=DEVICE, dtype=torch.float16)


def operands_of(case: Case) -> Operands:
    """Normal Q and V, and K with a bias of each channel, in float16."""
    shape = (case.batch, case.key_heads, case.tokens, case.width)
    q = normal(case.batch, case.heads, case.tokens, case.width)
    k = normal(*shape) + KEY_BIAS * normal(1, case.key_heads, 1, case.width)
    return Operands(q, k, normal(*shape), **_added(case))


def _added(case: Case) -> dict[str, Any]:
    place = torch.arange(case.tokens, device=DEVICE)
    if case.kind == "causal":
        return {"causal": True}
    if case.kind == "padding":
        lengths = torch.linspace(case.tokens // 2, case.tokens, case.batch, device=DEVICE).long()
        return {"mask": place < lengths.view(-1, 1, 1, 1)}
    if case.kind == "causal mask":
        return {"mask": (place[None, :] <= place[:, None])[None, None]}
    if case.kind == "band":
        return {"mask": ((place[None, :] - place[:, None]).abs() < BAND)[None, None]}
    if case.kind == "bias":  # of each head
        return {"mask": normal(1, case.heads, case.tokens, case.tokens)}
    if case.kind == "window bias":  # of each head, and 64 windows of an image
        return {"mask": normal(64, case.heads, case.tokens, case.tokens)}
    if case.kind == "factors":
        side = math.isqrt(case.tokens)
        of_axis = (case.batch, case.heads, case.tokens, side)
        return {"rel": (normal(*of_axis), normal(*of_axis))}
    return {}


def attention_rows(x: Operands, b: int) -> Tensor:
    """Float64 attention of the last CHECKED_ROWS queries of the first head of sequence ``b``."""
    first = max(x.q.shape[2] - CHECKED_ROWS, 0)
    logits = x.q[b, 0, first:].double() @ x.k[b, 0].double().T * x.q.shape[3] ** -0.5
    if x.rel is not None:
        height, width = (r[b, 0, first:].double() for r in x.rel)
        logits += (height[:, :, None] + width[:, None, :]).flatten(1)
    if x.causal:
        place = torch.arange(x.k.shape[2], device=DEVICE)
        logits.masked_fill_(place[None, :] > place[first:, None], -math.inf)
    if x.mask is not None:
        one = x.mask[b % x.mask.shape[0], 0]
        one = one.expand(x.q.shape[2], -1)[first:]
        logits = logits.masked_fill(~one, -math.inf) if one.dtype == torch.bool else logits + one.double()
    return logits.softmax(-1) @ x.v[b, 0].double()


def error_of(out: Tensor, x: Operands) -> float:
    """Relative L1 error of those rows of the first and the last sequence."""
    first = max(x.q.shape[2] - CHECKED_ROWS, 0)
    expected = torch.cat([attention_rows(x, b) for b in (0, x.q.shape[0] - 1)])
    got = torch.cat([out[b, 0, first:].double() for b in (0, x.q.shape[0] - 1)])
    return round(float((got - expected).abs().sum() / expected.abs().sum()), 5)


def ours_of(case: Case, x: Operands) -> Calls:
    """Whole calls, and what the case compares them with."""
    grouped = case.heads != case.key_heads
    calls: Calls = {}
    for name in case.ours:
        calls[name] = functools.partial(_ours, x, name, grouped)
    if case.kind in ("padding", "causal mask", "band"):
        plain = Operands(x.q, x.k, x.v, None, case.kind == "causal mask")
        calls["auto, no mask"] = functools.partial(_ours, plain, "auto", grouped)
    for name in {"integer_exp", "sage2_int8"} & set(case.ours):
        given = (x.q, x.k, x.v, resolve(name), case.width**-0.5, True)
        calls[f"{name}, pass"] = functools.partial(prepare_triton, *given)
    return calls


def _ours(x: Operands, name: str, grouped: bool) -> Tensor:
    if x.rel is not None:
        rel = {"rel_h": x.rel[0], "rel_w": x.rel[1]}
        return torch.ops.qframework.sage_attention(x.q, x.k, x.v, variant=name, **rel)[0]
    if x.mask is not None and 1 < x.mask.shape[0] < x.q.shape[0]:  # windows of images
        images = x.q.shape[0] // x.mask.shape[0]
        q, k, v = (t.unflatten(0, (images, -1)) for t in (x.q, x.k, x.v))
        return sage_attention(q, k, v, x.mask[None], variant=name).flatten(0, 1)
    return sage_attention(x.q, x.k, x.v, x.mask, is_causal=x.causal, enable_gqa=grouped, variant=name)


def peers_of(case: Case, x: Operands) -> Calls:
    """PyTorch's kernels, which get a ready mask whose rows start at multiples of 16 bytes."""
    grouped = case.heads != case.key_heads
    mask = x.mask
    if x.rel is not None:
        mask = (x.rel[0][..., :, None] + x.rel[1][..., None, :]).flatten(-2)
    if mask is not None:
        if mask.shape[0] not in (1, case.batch):
            mask = mask.repeat(case.batch // mask.shape[0], 1, 1, 1)
        mask = _aligned(mask)

    def call(backend: SDPBackend) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(x.q, x.k, x.v, mask, is_causal=x.causal, enable_gqa=grouped)

    peers = [name for name in PEERS if name != "efficient" or case.tokens < LONG_TOKENS]
    return {name: functools.partial(call, PEERS[name]) for name in peers}


def _aligned(mask: Tensor) -> Tensor:
    keys = mask.shape[-1]
    return F.pad(mask, (0, -keys % 16))[..., :keys] if keys % 16 else mask


def static_calls(case: Case, x: Operands) -> Calls:
    """INT8 in and out with one scale per tensor."""
    int8, scales = zip(*((numerics.quantize(t, s), s) for t in (x.q, x.k, x.v) for s in [_scale(t)]), strict=True)
    real = Operands(*((t.float() * s).half() for t, s in zip(int8, scales, strict=True)))
    out_scale = _scale(_ours(real, "unquantized", False))
    call = functools.partial(torch.ops.qframework.mixed_attention, *int8, *scales, out_scale=out_scale)
    calls: Calls = {"auto": call}
    calls["error"] = lambda: error_of(call().float() * out_scale, real)
    return calls


def _scale(x: Tensor) -> Tensor:
    return numerics.dynamic_scale(x, "per_tensor").reshape(1)


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """One row of the result: times, errors, and what refused or was wrong."""
    if case.mix:
        return measure_packed(case, rounds)
    x = operands_of(case)
    errors: dict[str, float] = {}
    problems: dict[str, str] = {}
    own = static_calls(case, x) if case.kind == "static" else ours_of(case, x)
    if "error" in own:
        errors["auto"] = own.pop("error")()
    calls: Calls = {}
    for name, call in {**own, **peers_of(case, x)}.items():
        try:
            out = call()
            if name not in errors and isinstance(out, Tensor) and name != "auto, no mask":
                errors[name] = error_of(out, x)
            if not errors.get(name, 0.0) < 0.1:
                problems[name] = f"wrong: relative error {errors[name]}"
                continue
            calls[name] = call
        except Exception as error:  # noqa: BLE001 - the others go on
            problems[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"[:160]
        out = None
    return {"us": Runs(calls).times(rounds) if rounds else {}, "error": errors, "refused": problems}


def measure_packed(case: Case, rounds: int) -> dict[str, Any]:
    """Packed sequences, and a dense call of as much work; ``work`` is that of the packed by that of the dense call."""
    lengths = MIXES[case.mix]
    q, k, v = (normal(sum(lengths), case.heads, case.width) for _ in range(3))
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=DEVICE)
    longest, tokens = max(lengths), round((sum(n * n for n in lengths) / 4) ** 0.5)
    dense = operands_of(case._replace(batch=4, tokens=tokens, mix="", kind="plain"))
    call = functools.partial(sage_attention_varlen, q, k, v, starts, starts, longest, longest)
    last = slice(sum(lengths) - lengths[-1], sum(lengths))
    last_q, last_k, last_v = (t[last].transpose(0, 1)[None] for t in (q, k, v))
    one = Operands(last_q, last_k, last_v)
    error = error_of(call()[last].transpose(0, 1)[None], one)
    calls: Calls = {"packed": call, "dense": functools.partial(_ours, dense, "auto", False)}
    times = Runs(calls).times(rounds) if rounds else {}
    return {
        "us": times,
        "error": {"packed": error},
        "refused": {},
        "work": round(sum(n * n for n in lengths) / (4 * tokens**2), 4),
    }


def compile_ahead(rows: Sequence[str], jobs: int, limit: float) -> None:
    """Call every case once in several processes, which leave compiled kernels in Triton's cache."""
    command = [sys.executable, "-m", "benchmarks.attention_rows", "--rounds", "0", "--limit", str(limit), "--only"]
    waiting = [f"{row}:{part}/{n}" for row in rows for n in [min(len(ROWS[row]), 3)] for part in range(n)]
    running: list[subprocess.Popen[bytes]] = []
    end = time.monotonic() + limit
    while (waiting or running) and time.monotonic() < end:
        while waiting and len(running) < jobs:
            running.append(subprocess.Popen([*command, waiting.pop(0)], stdout=subprocess.DEVNULL))
        time.sleep(0.2)
        running = [one for one in running if one.poll() is None]
    for one in running:
        one.kill()


def chosen(only: str) -> Iterator[Case]:
    """Cases of rows separated by commas, each maybe one of several parts, as ``heads:0/3``."""
    for name in only.split(",") if only else ROWS:
        row, _, part = name.partition(":")
        first, _, step = part.partition("/")
        yield from ROWS[row][int(first or 0) :: int(step or 1)]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="only list the cases")
    parser.add_argument("--only", default="", help=f"rows, of {', '.join(ROWS)}")
    parser.add_argument("--rounds", type=int, default=9, help="0: only call each")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--add-run", action="store_true", help="number the runs after those in --output")
    parser.add_argument("--jobs", type=int, default=0, help="processes that compile ahead")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which no case is begun")
    parser.add_argument("--output", type=output_file, default=Path(os.environ.get("OUT", ".")) / "attention-rows.json")
    given = parser.parse_args(argv)
    cases = list(chosen(given.only))
    if given.smoke:
        print("\n".join(f"{case.row}: {case.name}" for case in cases))
        return 0
    began = time.monotonic()
    if given.jobs:
        compile_ahead(list(dict.fromkeys(case.row for case in cases)), given.jobs, given.limit / 2)
        print(f"compiled after {time.monotonic() - began:.0f} s", flush=True)
    about: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    about |= {
        "commit": os.environ.get("QFRAMEWORK_COMMIT", ""),
        "date": time.strftime("%Y-%m-%d"),
        "rounds": given.rounds,
    }
    document: dict[str, Any] = {"about": about, "rows": []}
    if given.add_run:
        document = json.loads(given.output.read_text())
    rows = document["rows"]
    before = max((row["run"] for row in rows), default=0)
    failed = False
    for run, case in itertools.product(range(before + 1, before + 1 + given.runs), cases):
        if time.monotonic() - began > given.limit:
            print(f"stopped in run {run} after {given.limit:g} s")
            return 1
        torch.manual_seed(run)
        row: dict[str, Any] = {"run": run, "row": case.row, "case": case.name}
        try:
            with torch.no_grad():
                row |= measure(case, given.rounds)
        except Exception as error:  # noqa: BLE001 - the other cases go on
            row["failed"] = f"{type(error).__name__}: {error}"[:400]
            failed = True
        torch.cuda.empty_cache()
        if not given.rounds and ("failed" in row or "auto" in row["refused"]):
            print(json.dumps(row), flush=True)
        if given.rounds:
            rows.append(row)
            print(json.dumps(row), f"{time.monotonic() - began:.0f} s", flush=True)
            given.output.write_text(json.dumps(document, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
