"""What this machine has, which kernels run on it, and what prevents the backend from working."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from typing import Any

import torch

from qframework.compat.cpp_compiler import cpp_compiler
from qframework.kernels.linear.cpu import cpu_choice
from qframework.kernels.runtime.chip import MIN_CAPABILITY

_PACKAGES = ("qframework", "torch", "triton", "torchao", "torchvision", "timm", "scikit-learn")


def diagnose() -> dict[str, Any]:
    """JSON-able: ``software``, ``cpu``, one section per GPU (``cuda:0``, ...) and ``problems``, a list of sentences."""
    report: dict[str, Any] = {"software": _software(), "cpu": _cpu()}
    report |= {f"cuda:{index}": _gpu(index) for index in range(torch.cuda.device_count())}
    report["problems"] = _problems(report)
    return report


def _software() -> dict[str, str | None]:
    return {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> dict[str, Any]:
    choice = cpu_choice()
    return {
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "int8_linear": choice.name,
        **{f"int8_linear_not_{name}": reason for name, reason in choice.rejected.items()},
        "compiler": cpp_compiler(),
    }


def _gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    supported = not torch.version.hip and capability >= MIN_CAPABILITY
    return {
        "name": properties.name,
        "capability": f"sm_{capability[0]}{capability[1]}",
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "supported": supported,
        "int8_linear": "triton" if supported else "none: NVIDIA sm_80 or newer is needed",
    }


def _problems(report: dict[str, Any]) -> list[str]:
    problems = []
    backends = importlib.metadata.entry_points(group="torch_dynamo_backends")
    if "qframework" not in backends.names:
        problems.append("torch.compile does not know backend='qframework': install the package with pip")
    if report["cpu"]["compiler"] is None:
        problems.append("torch.compile finds no C++ compiler, which it needs on the CPU: install g++ or clang++")
    gpus = [name for name in report if name.startswith("cuda:")]
    if gpus and report["software"]["triton"] is None:
        problems.append("triton is not installed: the GPU cannot be used")
    return problems
