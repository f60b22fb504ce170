"""What ``tune`` finds for DINOv2 ViT-S/14: patch correspondences kept against speed on a GPU, in three steps.

    python -m benchmarks.pretrained_front times --output TIMES.json                    on a GPU, random weights
    python -m benchmarks.pretrained_front search --times TIMES.json --output FRONT.json      on a CPU, trained weights
    python -m benchmarks.pretrained_front whole --front FRONT.json --output WHOLE.json  on a GPU, random weights
    python -m benchmarks.pretrained_front recipes --choices CHOICES.json --output SPEEDS.json    the same, of recipes

Speed does not depend on the values of weights, so that the GPU needs no trained ones: ``times`` measures every kind of
layer in every choice, and ``search`` runs ``tune`` with these times and correspondences as the metric; those of the
front and of uniform configurations it measures again, on other crops that nothing was chosen by. Speeds of the search
are estimates: the float model's time with those of its layers replaced. ``whole`` compiles and times the float
model, the uniform configurations and the front under CUDA graphs; of those whose kernels are equal, since only the
observers of static layers differ, it times one. ``recipes`` times plain static INT8 and what recipes
chose for trained weights: inputs with scales per token or zero points, layers in float, attention with scales per head.
What recipes move into weights is left out, and margins, which cost nothing.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import argument_parser
from benchmarks.machine import describe_machine
from benchmarks.pretrained_front_cases import (
    BATCH,
    FULL,
    MEANINGS,
    SCHEMA,
    SMALL_BATCH,
    SMOKE,
    VARIANTS,
    Settings,
    call_name,
    read,
)
from benchmarks.pretrained_front_search import search, wanted_whole
from qframework.conversion.exported import export_model, quantize_exported
from qframework.errors import FileFormatError, QFrameworkError
from qframework.evaluation.speed import throughput
from qframework.files import write_json
from qframework.quantizer import (
    ActivationConfig,
    LinearConfig,
    QFrameworkQuantizer,
    QuantizationConfig,
    dynamic_int8,
    static_attention,
    static_int8,
)
from qframework.tuning.assignment import Assignment
from qframework.tuning.layer_times import DYNAMIC, FLOAT, STATIC, milliseconds
from qframework.tuning.layers import LinearOperands, Operands, find_layers

_GRAPHS: dict[str, Any] = {"triton.cudagraphs": True}


def _choices(operands: Operands) -> tuple[str, ...]:
    return (FLOAT, STATIC, *((DYNAMIC,) if isinstance(operands, LinearOperands) else VARIANTS))


@torch.no_grad()
def times(settings: Settings, device: str, repeats: int = 20) -> dict[str, Any]:
    """Milliseconds for a batch of every kind of call in every choice, and images per second of the float model."""
    model, images = _on(settings, device)
    calls = {
        call_name(call): call for layer in find_layers(export_model(model, images), images) for call in layer.calls
    }
    found: dict[str, dict[str, float]] = {}
    for name, call in calls.items():
        found[name] = {choice: milliseconds(call, choice, device, repeats=repeats) for choice in _choices(call)}
        print(name, {choice: round(value, 4) for choice, value in found[name].items()}, flush=True)
    speed = throughput(_compiled(model, None, device), images, repeats=repeats)
    return {"batch": settings.batch, "milliseconds": found, "float_images_per_second": speed}


@torch.no_grad()
def whole(
    settings: Settings,
    device: str,
    wanted: Mapping[str, Assignment],
    limit: float,
    save: Callable[[dict[str, float]], None] = lambda found: None,
    turns: int = 5,
) -> dict[str, float]:
    """Images per second of the float model and of assignments; none is begun after ``limit`` seconds.

    The median of ``turns``, since a GPU's clock changes; ``save`` gets the medians so far after each measurement.
    """
    begun = time.monotonic()
    model, images = _on(settings, device)
    exported = export_model(model, images)
    calls: dict[str, Callable[[Tensor], Tensor]] = {}
    found: dict[str, list[float]] = {}

    def measure(name: str) -> None:
        found.setdefault(name, []).append(throughput(calls[name], images))
        save({each: statistics.median(speeds) for each, speeds in found.items()})

    for name, assignment in ({"float": None} | dict(wanted)).items():
        if time.monotonic() - begun > limit:
            print(f"{name}: left out after {limit:g} s", flush=True)
            continue
        if assignment is None:
            calls[name] = _compiled(model, None, device)
        else:
            data = [images[:SMALL_BATCH]] if assignment.is_calibrated else None
            quantized = quantize_exported(copy.deepcopy(exported), assignment.quantizer(MEANINGS), data)
            calls[name] = _compiled(quantized, assignment.options(), device)
        measure(name)
    for _ in range(turns - 1):
        for name in calls:
            measure(name)
    speeds = {name: statistics.median(each) for name, each in found.items()}
    for name, speed in speeds.items():
        print(f"{name}: {speed:.0f} images/s", flush=True)
    return speeds


def chosen_by(recipe: Mapping[str, Mapping[str, str]]) -> QFrameworkQuantizer:
    """Static INT8 with what a recipe chose, ``{"activations": {layer: name}, "attention": {layer: name}}``."""
    quantizer = QFrameworkQuantizer().set_global(QuantizationConfig(static_int8(), static_attention()))
    for layer, name in recipe.get("attention", {}).items():
        if name.startswith("per_head"):
            quantizer.set_module_name(layer, static_attention("per_head"))
    zero_point = LinearConfig(ActivationConfig(symmetric=False))
    configs = {"dynamic": dynamic_int8(), "float": None, "zero_point": zero_point}
    for layer, name in recipe.get("activations", {}).items():
        kind = name.partition(" ")[0]
        if kind in configs:
            quantizer.set_module_name(layer, configs[kind])
    return quantizer


@torch.no_grad()
def recipe_speeds(
    settings: Settings, device: str, choices: Mapping[str, Any], limit: float, turns: int = 5
) -> dict[str, list[float]]:
    """Images per second of plain static INT8 and each choice, measured in turns; none is compiled after ``limit`` s."""
    begun = time.monotonic()
    model, images = _on(settings, device)
    exported = export_model(model, images)
    calls: dict[str, Callable[[Tensor], Tensor]] = {}
    for name, chosen in ({"static + attention": {}} | dict(choices)).items():
        if time.monotonic() - begun < limit:
            quantized = quantize_exported(copy.deepcopy(exported), chosen_by(chosen), [images[:SMALL_BATCH]])
            calls[name] = _compiled(quantized, {"attention": "off"}, device)
            throughput(calls[name], images, repeats=1)  # compiles
            print(f"{name}: compiled after {time.monotonic() - begun:.0f} s", flush=True)
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(turns):
        for name, call in calls.items():
            found[name].append(throughput(call, images, repeats=50 if device == "cuda" else 1))
    for name, speeds in found.items():
        speed, percent = statistics.median(speeds), added_percent(found, name)
        print(f"{name}: {speed:.0f} images/s, {percent:+.1f} percent of time", flush=True)
    return found


def added_percent(found: Mapping[str, Sequence[float]], name: str) -> float:
    """By how much a choice takes longer than plain static INT8 in the same turn, in the median."""
    plain = found["static + attention"]
    return 100 * (statistics.median(p / s for p, s in zip(plain, found[name], strict=True)) - 1)


def _on(settings: Settings, device: str) -> tuple[nn.Module, Tensor]:
    dtype = torch.float16 if device == "cuda" else torch.float32
    images = torch.randn(settings.batch, 3, settings.size, settings.size, device=device, dtype=dtype)
    return settings.network(trained=False).to(device, dtype), images


def _compiled(model: nn.Module, options: Mapping[str, Any] | None, device: str) -> Callable[[Tensor], Tensor]:
    if device != "cuda":
        return model
    if options is None:
        return torch.compile(model, options=_GRAPHS)
    return torch.compile(model, backend="qframework", options={**options, **_GRAPHS})


def earlier_speeds(path: Path, device: str) -> dict[str, float]:
    """The speeds of a file of ``whole``. Raises FileFormatError for one of another device."""
    document = read(path, "whole")
    if document["machine"]["device"] != device:
        raise FileFormatError(f"{path} must hold speeds of {device}, got those of {document['machine']['device']}")
    return dict(document["images_per_second"])


def main(argv: Sequence[str] | None = None) -> int:
    """One step, or with ``--smoke`` all of them on a tiny model; returns the exit status."""
    parser = argument_parser("pretrained_front", __doc__, "document")
    parser.add_argument("step", nargs="?", choices=("times", "search", "whole", "recipes"), default="times")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--times", type=Path, help="of the step times, for search")
    parser.add_argument("--front", type=Path, help="of the step search, for whole")
    parser.add_argument("--timed", type=Path, help="for whole: a file of an earlier run, whose speeds are kept")
    parser.add_argument("--choices", type=Path, help="for recipes: what recipes chose, by name")
    parser.add_argument("--turns", type=int, default=5, help="for whole, recipes: measurements of each (default: 5)")
    parser.add_argument(
        "--max-drop",
        type=float,
        nargs="+",
        default=[8.0, 15.0, 20.0],
        help="points of correspondences, one search each",
    )
    parser.add_argument("--journal", type=Path, help="for search: resumes what this file holds")
    parser.add_argument(
        "--limit", type=float, default=60.0, help="for whole, recipes: seconds after which no case is begun"
    )
    parser.add_argument("--threads", type=int, default=1, help="for search: float sums depend on it (default: 1)")
    given = parser.parse_args(argv)
    torch.set_num_threads(given.threads)
    step = "search" if given.smoke else given.step
    head = {"schema": SCHEMA, "benchmark": "pretrained_front", "step": step, "smoke": given.smoke}

    def write(found: Mapping[str, Any]) -> None:
        if given.output:
            machine = describe_machine("cpu" if step == "search" else given.device)
            write_json(given.output, {**head, "machine": machine, **found}, indent=1)

    try:
        if given.smoke:
            found = _smoke()
        elif given.step == "times":
            found = times(FULL, given.device)
        elif given.step == "search":
            found = search(FULL, read(given.times, "times"), given.max_drop, given.journal)
        elif given.step == "recipes":
            choices = read(given.choices, "choices")["choices"]
            measured = recipe_speeds(FULL, given.device, choices, given.limit, given.turns)
            found = {"batch": BATCH, "images_per_second": measured}
        else:
            known = {} if given.timed is None else earlier_speeds(given.timed, describe_machine(given.device)["device"])
            wanted = {
                name: each for name, each in wanted_whole(read(given.front, "search")).items() if name not in known
            }
            speeds = whole(
                FULL, given.device, wanted, given.limit, lambda x: write({"images_per_second": known | x}), given.turns
            )
            found = {"images_per_second": known | speeds}
    except QFrameworkError as error:
        print(error, file=sys.stderr)
        return 2
    write(found)
    return 0


def _smoke() -> dict[str, Any]:
    """All steps with a tiny model of random weights on the CPU, where INT8 is pretended to be fast."""
    stored = times(SMOKE, "cpu", repeats=1)
    for choices in stored["milliseconds"].values():
        choices.update({choice: 0.1 + 0.01 * len(choice) for choice in choices}, float=1.0)
    found = search(SMOKE, stored, [1.0, 2.0], None)
    found["images_per_second"] = whole(SMOKE, "cpu", wanted_whole(found), 10.0, turns=1)
    some = {"activations": {"model.blocks.0.mlp.fc2": "float", "model.blocks.1.mlp.fc2": "zero_point + 0.2"}}
    found["recipes"] = recipe_speeds(SMOKE, "cpu", {"some": some}, 10.0, turns=1)
    return found


if __name__ == "__main__":
    sys.exit(main())
