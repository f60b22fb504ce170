"""Where the time of a training step goes: its GPU kernels by kind, which ``training_models --profile`` records.

A record has the kind as ``op`` and the milliseconds of all its kernels in a step as ``p50_ms``. Two figures follow from
them: how much faster INT8 is without the parts that both precisions share (attention, optimizer), and how much faster
it could be at most, if its products took half of BF16's time, as the peak of the tensor cores allows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.harness import Record
from benchmarks.labels import label
from benchmarks.profile_vit import Profile, profile_forward
from benchmarks.tables import number, table

BENCHMARK = "training_profile"
# The first that a name contains decides.
KINDS = (
    ("attention", re.compile(r"fmha|flash|sdpa|attention", re.I)),
    ("optimizer", re.compile(r"multi_tensor|adam", re.I)),
    ("products in INT8", re.compile(r"_block_linear")),
    ("quantization and transposes", re.compile(r"_block_(quantize|dequantize|transpose|sum_rows)|_add_up_kernel")),
    ("other operators in INT8", re.compile(r"^_(block|norm|merge)_")),
    ("other products", re.compile(r"gemm|nvjet|cublas|cutlass|xmma", re.I)),
    ("Inductor's kernels", re.compile(r"^triton_")),
)
REST = "copies and all others"
PRODUCTS, SHARED = ("products in INT8", "other products"), ("attention", "optimizer")


def kind_of(kernel: str) -> str:
    """The kind of a kernel by its name."""
    return next((kind for kind, pattern in KINDS if pattern.search(kernel)), REST)


def by_kind(profile: Profile) -> dict[str, float]:
    """Milliseconds of each kind, in the order of KINDS."""
    found = dict.fromkeys([*(kind for kind, _ in KINDS), REST], 0.0)
    for kernel in profile.kernels:
        found[kind_of(kernel.name)] += kernel.ms
    return {kind: ms for kind, ms in found.items() if ms}


def profile_step(row: Record, step: Callable[[], Any], device: str) -> list[Record]:
    """A record for each kind of kernel in ``step``, as ``row`` otherwise, and the kernels on standard output."""
    profile = profile_forward(lambda _: step(), None, device)
    print(f"{row.model}, {row.provider}\n{profile}", flush=True)
    row = replace(row, benchmark=BENCHMARK, p20_ms=None, p80_ms=None, runs=None, error=None, first_call_s=None)
    return [replace(row, op=kind, p50_ms=ms) for kind, ms in by_kind(profile).items()]


def bounds(ours: dict[str, float], baseline: dict[str, float]) -> tuple[float, float]:
    """How much faster ``ours`` is without SHARED, and with them, if products were twice as fast as the baseline's."""

    def total(kinds: dict[str, float], without: Iterable[str] = ()) -> float:
        return sum(ms for kind, ms in kinds.items() if kind not in without)

    half = sum(baseline.get(kind, 0.0) for kind in PRODUCTS) / 2
    return total(baseline, SHARED) / total(ours, SHARED), total(baseline) / (total(ours, PRODUCTS) + half)


def section(records: Sequence[Record]) -> str:
    """A table for each model, milliseconds by kind and provider; empty without records of this benchmark."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for row in records:
        if row.benchmark == BENCHMARK and row.op and row.p50_ms:
            found.setdefault(row.subject, {}).setdefault(row.provider, {})[row.op] = row.p50_ms
    parts = [_table(subject, providers) for subject, providers in found.items()]
    return "\n".join(["Milliseconds of a step's kernels, by kind.\n", *parts]) if parts else ""


def _table(subject: str, providers: dict[str, dict[str, float]]) -> str:
    kinds = [kind for kind in [*(kind for kind, _ in KINDS), REST] if any(kind in each for each in providers.values())]
    lines = [[kind, *(number(each.get(kind)) for each in providers.values())] for kind in kinds]
    lines.append(["all", *(number(sum(each.values())) for each in providers.values())])
    text = f"{table([subject, *map(label, providers)], lines)}"
    if "qframework" in providers and "bf16" in providers:
        apart, most = bounds(providers["qframework"], providers["bf16"])
        text += (
            f"\nWithout attention and optimizer, the same in both, INT8 is {apart:.2f} times as fast as BF16. "
            f"With products at twice the speed of BF16's, the whole step would be {most:.2f} times as fast.\n"
        )
    return text
