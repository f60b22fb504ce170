"""The header of every result file: which machine, which versions, which commit, when."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import qframework

REPOSITORY = Path(__file__).resolve().parents[1]
# What decides which integer and 16-bit instructions a CPU kernel may use.
CPU_FLAGS = (
    "avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16",
    "asimddp", "i8mm", "bf16", "sve",
)  # fmt: skip
# Written by the report, so a regenerated page or a new result does not make the measured code dirty.
GENERATED = tuple(
    f":!{path}"
    for path in (
        "benchmarks/results", "docs/performance.md", "docs/accuracy.md", "docs/training-results.md", "docs/assets",
    )
)  # fmt: skip


def describe_machine(device: str) -> dict[str, Any]:
    """What a reader needs to repeat a measurement on ``device`` ("cpu" or "cuda"); unknown values are None."""
    commit, dirty = git_state()
    return {
        **_describe_device(device),
        **_describe_cpu(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "torchao": _version("torchao"),
        "timm": _version("timm"),
        "python": platform.python_version(),
        "qframework": qframework.__version__,
        "commit": commit,
        "dirty": dirty,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def git_state() -> tuple[str | None, bool | None]:
    """Commit and whether the sources differ from it.

    QFRAMEWORK_COMMIT, "abc123" or "abc123-dirty", wins over git: whoever copies a tree to another machine knows what it
    is, and a repository there may be at another commit, which says nothing about the files measured.
    """
    if named := os.environ.get("QFRAMEWORK_COMMIT"):
        return named.removesuffix("-dirty"), named.endswith("-dirty")
    commit = _output("git", "-C", str(REPOSITORY), "rev-parse", "--short=12", "HEAD")
    if commit is None:
        return None, None
    return commit, bool(_output("git", "-C", str(REPOSITORY), "status", "--porcelain", "--", ".", *GENERATED))


def _describe_device(device: str) -> dict[str, Any]:
    if device == "cpu":
        return {"device": _cpu_model(), "capability": torch.backends.cpu.get_cpu_capability(), "driver": None}
    major, minor = torch.cuda.get_device_capability()
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")
    return {"device": torch.cuda.get_device_name(), "capability": f"sm_{major}{minor}", "driver": driver}


def _describe_cpu() -> dict[str, Any]:
    flags = _cpuinfo("flags", "Features").split()
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu_flags": [flag for flag in CPU_FLAGS if flag in flags],
    }


def _cpu_model() -> str:
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def _cpuinfo(*keys: str) -> str:
    """First value of one of ``keys`` in /proc/cpuinfo, empty where there is none."""
    path = Path("/proc/cpuinfo")
    for line in path.read_text().splitlines() if path.exists() else ():
        key, _, value = line.partition(":")
        if key.strip() in keys:
            return value.strip()
    return ""


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    """Standard output of ``command``, or None where it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
