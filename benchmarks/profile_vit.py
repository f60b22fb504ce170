"""The kernels of one forward pass of a vision transformer, and of one of its blocks: names, launches, milliseconds.

The kernels of a block are the difference between models of ``DEPTH + 1`` and ``DEPTH`` blocks, in which patch
embedding, head, first and last block cancel. Kernels whose names differ only in Inductor's numbers are added up.
Without a GPU, for ``--smoke``, PyTorch's operators replace kernels.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import profiler
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from benchmarks import models
from benchmarks.harness import argument_parser, comma_separated
from benchmarks.machine import describe_machine
from benchmarks.models import Forward
from benchmarks.tables import number, table
from benchmarks.vit_gpu import choose_device
from benchmarks.vit_gpu_cases import PROVIDERS, Subject, inference, prepare
from qframework.files import write_json

DEFAULT = ("qframework_static", "qframework_dynamic", "fp16_compiled")
DEPTH, SMOKE_DEPTH = 3, 1
WARM_UP, FORWARDS = 3, 5
NAME_WIDTH = 100


@dataclass(frozen=True)
class Kernel:
    """All launches of one kernel in one forward pass."""

    name: str
    launches: float
    ms: float


@dataclass(frozen=True)
class Profile:
    """The launches of a provider in one forward pass."""

    kernels: tuple[Kernel, ...]  # the longest first

    @classmethod
    def of(cls, found: Mapping[str, tuple[float, float]]) -> Profile:
        kernels = (Kernel(name, launches, ms) for name, (launches, ms) in found.items())
        return cls(tuple(sorted(kernels, key=lambda kernel: -kernel.ms)))

    @property
    def launches(self) -> float:
        return sum(kernel.launches for kernel in self.kernels)

    @property
    def ms(self) -> float:
        return sum(kernel.ms for kernel in self.kernels)

    def beyond(self, smaller: Profile) -> Profile:
        """The launches of this profile beyond those of ``smaller``."""
        before = {kernel.name: kernel for kernel in smaller.kernels}
        after = {kernel.name: kernel for kernel in self.kernels}
        none = Kernel("", 0.0, 0.0)
        pairs = {name: (after.get(name, none), before.get(name, none)) for name in {**after, **before}}
        return Profile.of(
            {
                name: (more.launches - less.launches, more.ms - less.ms)
                for name, (more, less) in pairs.items()
                if more.launches != less.launches
            }
        )

    def to_json(self) -> dict[str, Any]:
        kernels = [{**asdict(kernel), "ms": round(kernel.ms, 5)} for kernel in self.kernels]
        return {"launches": self.launches, "ms": round(self.ms, 4), "kernels": kernels}

    def __str__(self) -> str:
        rows = [
            [f"{kernel.launches:g}", number(kernel.ms), f"{100 * kernel.ms / (self.ms or 1):.1f}", _short(kernel.name)]
            for kernel in self.kernels
        ]
        rows.append([f"{self.launches:g}", number(self.ms), "100", "all"])
        return table(["launches", "ms", "%", "kernel"], rows)


def _short(name: str) -> str:
    return name if len(name) <= NAME_WIDTH else name[: NAME_WIDTH - 3] + "..."


def plain_name(name: str) -> str:
    """A kernel's name without the number that Inductor gives it in its graph."""
    return re.sub(r"_\d+$", "", name) if name.startswith("triton_") else name


def profile_forward(forward: Callable[[Any], Any], images: Any, device: str) -> Profile:
    """Mean of ``FORWARDS`` passes after ``WARM_UP`` passes of a compiled ``forward``, in an inference context."""
    for _ in range(WARM_UP):
        forward(images)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device == "cuda")
    with profiler.profile(activities=activities) as profiled:
        for _ in range(FORWARDS):
            forward(images)
        if device == "cuda":
            torch.cuda.synchronize()
    found: dict[str, tuple[float, float]] = {}
    for name, microseconds in _launches(profiled, device):
        launches, ms = found.get(plain_name(name), (0.0, 0.0))
        found[plain_name(name)] = launches + 1 / FORWARDS, ms + microseconds / 1e3 / FORWARDS
    return Profile.of({name: (round(launches, 3), ms) for name, (launches, ms) in found.items()})


def _launches(profiled: Any, device: str) -> Iterator[tuple[str, float]]:
    """Name and microseconds of all GPU activities, or of PyTorch's outermost operators on the CPU."""
    for event in profiled.events():
        on_gpu = event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
        if on_gpu if device == "cuda" else _is_outermost(event):
            yield event.name, event.time_range.elapsed_us()


def _is_outermost(event: Any) -> bool:
    """Whether an event is an operator, such as aten::add, that no other operator called."""
    if event.device_type != DeviceType.CPU or "::" not in event.name:
        return False
    parent = event.cpu_parent
    while parent is not None and "::" not in parent.name:  # a compiled region, say
        parent = parent.cpu_parent
    return parent is None


def profile_provider(name: str, model: str, batch: int, device: str, smoke: bool, **arguments: Any) -> Profile:
    """One provider's kernels; ``arguments`` go to timm. Checks the output first."""
    torch._dynamo.reset()
    provider = PROVIDERS[name]
    subject = Subject.build(model, batch, device, smoke, **arguments)
    images = subject.images.to(device, provider.dtype)
    module = prepare(subject, provider, images)
    forward: Forward = provider.compile(module) if provider.compile else module
    with inference(provider):
        models.accuracy(forward(images), subject.reference, provider.precision)
        return profile_forward(forward, images, device)


def profile_block(name: str, model: str, batch: int, device: str, smoke: bool) -> Profile:
    """The kernels of one block."""
    depth = SMOKE_DEPTH if smoke else DEPTH
    less, more = (profile_provider(name, model, batch, device, smoke, depth=n) for n in (depth, depth + 1))
    return more.beyond(less)


# Command line ---------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Print both tables of every provider; returns the exit status."""
    parser = profile_parser("profile_vit", __doc__, DEFAULT)
    parser.add_argument("--block-only", action="store_true", help="skip the whole model, which compiles longer")
    arguments = parser.parse_args(argv)

    def profile(name: str, model: str, batch: int, device: str) -> dict[str, Any]:
        found = {"block": profile_block(name, model, batch, device, arguments.smoke)}
        if not arguments.block_only:
            found["forward"] = profile_provider(name, model, batch, device, arguments.smoke)
        for part, kernels in found.items():
            print(f"{name}, {model}, batch {batch}: one {part}, {kernels.launches:g} kernels\n\n{kernels}", flush=True)
        return {part: kernels.to_json() for part, kernels in found.items()}

    profile_each(arguments, profile)
    return 0


def profile_parser(benchmark: str, description: str | None, providers: Sequence[str]) -> argparse.ArgumentParser:
    """The options of a profile: a model, a batch and the providers; ``--output`` takes all of them."""
    parser = argument_parser(benchmark, description, "document")
    parser.add_argument("--model", default="vit_base_patch16_224", help="a vision transformer of timm")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--providers", type=comma_separated(PROVIDERS), default=list(providers))
    return parser


def profile_each(arguments: argparse.Namespace, profile: Callable[[str, str, int, str], dict[str, Any]]) -> None:
    """Call ``profile`` with each provider, the model, the batch and the device, and write what it returns so far."""
    device = choose_device(arguments.smoke)
    model, batch = (models.SMOKE_MODEL, 2) if arguments.smoke else (arguments.model, arguments.batch)
    document: dict[str, Any] = {"machine": describe_machine(device), "model": model, "batch": batch, "providers": {}}
    for name in arguments.providers:
        document["providers"][name] = profile(name, model, batch, device)
        if arguments.output is not None:
            write_json(arguments.output, document)


if __name__ == "__main__":
    sys.exit(main())
