"""What this machine has, which kernels run on it, and what prevents the backend from working."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from typing import Any

import torch

from qframework.compat.cpp_compiler import cpp_compiler
from qframework.devices import one_thread
from qframework.errors import QFrameworkError
from qframework.kernels.attention.mixed import mixed_attention_choice
from qframework.kernels.linear.cpu import cpu_choice
from qframework.kernels.linear.local_tiles import read_tiles, this_chip, tile_path
from qframework.kernels.linear.tiles import has_table
from qframework.kernels.runtime.chip import MIN_CAPABILITY
from qframework.tuning.layer_times import FLOAT, STATIC, milliseconds
from qframework.tuning.layers import LinearOperands, TensorShape
from qframework.versions import installed_version

_ROUNDS = 8
_CLEARLY = 1.1  # times as long; less may be noise
_PACKAGES = ("qframework", "torch", "triton", "torchao", "torchvision", "timm", "scikit-learn")


def diagnose() -> dict[str, Any]:
    """What this machine has. Measures a linear on each device, which takes about a second.

    Returns:
        JSON-able: ``software``, ``cpu``, one section per GPU (``cuda:0``, ...), ``notes`` on what is slow, and
        ``problems`` that prevent the backend from working, both lists of sentences.
    """
    report: dict[str, Any] = {"software": _software(), "cpu": _cpu()}
    report |= {f"cuda:{index}": _gpu(index) for index in range(torch.cuda.device_count())}
    problems = _problems(report)
    notes = []
    for device in [name for name, section in report.items() if name != "software" and section.get("supported", True)]:
        try:
            speed = _speed(device)
        except (QFrameworkError, RuntimeError) as error:
            problems.append(f"int8_linear does not run on {device}: {str(error).strip().splitlines()[0]}")
        else:
            report[device] |= speed
            notes += _slower_than_float(device, speed)
    notes += [note for name, section in report.items() if name.startswith("cuda:") for note in _unmeasured(section)]
    report["notes"], report["problems"] = notes, problems
    return report


def _software() -> dict[str, str | None]:
    return {"python": platform.python_version(), **{name: installed_version(name) for name in _PACKAGES}}


def _cpu() -> dict[str, Any]:
    choice, attention = cpu_choice(), mixed_attention_choice()
    return {
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "int8_linear": choice.name,
        **{f"int8_linear_not_{name}": reason for name, reason in choice.rejected.items()},
        "mixed_attention": attention.name,
        **{f"mixed_attention_not_{name}": reason for name, reason in attention.rejected.items()},
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
        **(_tiles(torch.device("cuda", index)) if supported else {}),
    }


def _tiles(device: torch.device) -> dict[str, Any]:
    """Where the tiles of int8_linear come from."""
    chip = this_chip(device)
    path = tile_path(chip)
    shipped = "shipped table" if has_table(chip.capability) else "heuristic, no measured table of this chip"
    try:
        found = len(read_tiles(path, chip))
    except FileNotFoundError:
        return {"int8_linear_tiles": shipped}
    except (QFrameworkError, OSError) as error:
        return {"int8_linear_tiles": shipped, "int8_linear_tiles_not_read": str(error)}
    return {"int8_linear_tiles": f"{found} measured here, else {shipped}", "int8_linear_tiles_file": str(path)}


def _unmeasured(gpu: dict[str, Any]) -> list[str]:
    """A sentence if the chip has no measured table, and one if its file cannot be used."""
    notes = []
    if gpu.get("int8_linear_tiles", "").startswith("heuristic"):
        notes.append(f"{gpu['name']} has no measured table of tiles: 'qframework tune-kernels' measures one in minutes")
    if error := gpu.get("int8_linear_tiles_not_read"):
        notes.append(error)
    return notes


def _speed(device: str) -> dict[str, Any]:
    """The time of a linear of ViT-B's size, in INT8 and in the float dtype that people use on the device.

    The two take turns and the fastest of each counts, on a CPU in one thread, since the machine may be busy: threads
    that wait for each other would take as long as those of other processes let them.
    """
    rows, dtype = (8 * 1576, torch.float16) if device.startswith("cuda") else (197, torch.float32)
    shapes = ((rows, 768), (3072, 768), (3072,))
    operands = LinearOperands(*(TensorShape(shape, dtype) for shape in shapes))
    times: dict[str, list[float]] = {FLOAT: [], STATIC: []}
    with one_thread():
        for _ in range(_ROUNDS):
            for choice, found in times.items():
                found.append(milliseconds(operands, choice, device, repeats=5, summary=min))
    return {
        "linear": f"{rows} x 768 x 3072" + ("" if device.startswith("cuda") else ", one thread"),
        "float_dtype": str(dtype).removeprefix("torch."),
        "float_ms": min(times[FLOAT]),
        "int8_ms": min(times[STATIC]),
    }


def _slower_than_float(device: str, speed: dict[str, Any]) -> list[str]:
    if speed["int8_ms"] <= _CLEARLY * speed["float_ms"]:
        return []
    return [
        f"INT8 is slower than {speed['float_dtype']} on {device}: a linear ({speed['linear']}) takes "
        f"{speed['int8_ms']:.3g} ms in INT8 and {speed['float_ms']:.3g} ms in {speed['float_dtype']}"
    ]


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
