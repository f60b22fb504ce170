"""``qframework benchmark``."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console

from qframework.cli import command
from qframework.cli.output import print_rows
from qframework.cli.targets import (
    compiled,
    device_and_dtype,
    dtype_named,
    dtype_of,
    is_file,
    names,
    open_target,
    random_classifier,
)
from qframework.errors import QFrameworkError

if TYPE_CHECKING:
    from torch import Tensor, nn

EXAMPLES = """\
[bold]Examples[/]

qframework benchmark vit_base_patch16_224 --batch-size 8

qframework benchmark vit_base_patch16_224 --only compiled,static

qframework benchmark vit.pt2 --device cuda --batch-size 256 --json
"""
_SHORT = {"float32": "FP32", "float16": "FP16", "bfloat16": "BF16"}
_GRAPHS = {"triton.cudagraphs": True}


class BenchmarkedModel(NamedTuple):
    """What to measure: ``make`` returns the module, which is not kept while another configuration runs."""

    name: str
    dtype: str
    is_float: bool
    make: Callable[[Tensor], Callable[[Tensor], Any]]


def benchmark(
    target: command.Target,
    checkpoint: command.Checkpoint = None,
    batch_size: command.BatchSize = 8,
    repeats: Annotated[int, typer.Option(min=1, help="Timed calls; the result is their median.")] = 20,
    only: Annotated[
        str | None, typer.Option(help="Measure only configurations whose names contain one of these: static,compiled.")
    ] = None,
    device: command.Device = "auto",
    dtype: command.DType = "auto",
    as_json: command.Json = False,
) -> None:
    """Measure images per second on random images: float and INT8, compiled, and on a GPU also under CUDA graphs.

    Float is FP16 on a GPU, FP32 and BF16 on a CPU, compiled by Inductor. Without --checkpoint the weights are random,
    since speed does not depend on them. A saved model is measured beside the float model that it was made of.
    """
    on, used = device_and_dtype(device, dtype)
    size, found = _saved(target, checkpoint, on) if is_file(target) else _of_model(target, checkpoint, on, used)
    chosen = [each for each in found if only is None or any(part in each.name for part in names(only))]
    if not chosen:
        raise QFrameworkError(
            f"--only must name a part of {', '.join(repr(each.name) for each in found)}, got {only!r}"
        )
    rows, failed = _measure_all(chosen, (batch_size, *size), on, repeats)
    if rows:
        print_rows(f"{target}, batch {batch_size}, {on}", _beside_float(rows), as_json)
    if sentence := _slower_than_float(rows):
        typer.echo(sentence, err=True)
    if failed:
        raise command.failed_check(f"not measured: {'; '.join(failed)}")


def _measure_all(
    chosen: list[BenchmarkedModel], shape: tuple[int, ...], on: Any, repeats: int
) -> tuple[list[dict[str, Any]], list[str]]:
    """A row for each configuration, and why others have none."""
    import torch
    from rich.progress import track

    rows, failed = [], []
    for each in track(chosen, "Measuring", console=Console(stderr=True)):
        images = torch.randn(shape, device=on, dtype=dtype_named(each.dtype))
        try:
            row = _measure(each.make(images), images, repeats)
        except (QFrameworkError, RuntimeError) as error:  # such as a lack of memory; the others may still run
            failed.append(f"{each.name} ({command.one_line(error)[:200]})")
        else:
            rows.append({"configuration": each.name, "is_float": each.is_float, **row})
        torch.compiler.reset()  # else graphs of one module count against Dynamo's limit, and then it runs eagerly
    return rows, failed


def _measure(module: Callable[[Tensor], Any], images: Tensor, repeats: int) -> dict[str, Any]:
    import torch

    from qframework.evaluation import throughput

    start = time.perf_counter()
    with torch.no_grad():
        module(images)
    first = time.perf_counter() - start
    speed = throughput(module, images, repeats=repeats)
    return {
        "images_per_second": speed,
        "milliseconds_per_batch": 1e3 * len(images) / speed,
        "first_call_seconds": first,
    }


def _beside_float(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with their speed as a multiple of the fastest float configuration, where one was measured."""
    fastest = max((row["images_per_second"] for row in rows if row["is_float"]), default=None)
    kept = [{name: value for name, value in row.items() if name != "is_float"} for row in rows]
    return [
        row if fastest is None else {**row, "times_the_fastest_float": row["images_per_second"] / fastest}
        for row in kept
    ]


def _slower_than_float(rows: list[dict[str, Any]]) -> str | None:
    """A sentence if no INT8 configuration reaches the fastest float one."""
    by_kind = [[row for row in rows if row["is_float"] is kind] for kind in (True, False)]
    if not all(by_kind):
        return None
    in_float, in_int8 = (max(kind, key=lambda row: row["images_per_second"]) for kind in by_kind)
    ratio = in_int8["images_per_second"] / in_float["images_per_second"]
    if ratio >= 1:
        return None
    return (
        f"qframework: INT8 is slower than float here: {in_int8['configuration']} reaches {ratio:.2f} times the speed "
        f"of {in_float['configuration']}"
    )


def _saved(target: str, checkpoint: Path | None, on: Any) -> tuple[tuple[int, ...], list[BenchmarkedModel]]:
    from qframework.evaluation.models import input_size

    module, description = open_target(target, checkpoint, pretrained=False)
    module = module.to(on)

    def make(more: dict[str, Any], _: Tensor) -> Any:
        return compiled(module, {"options": {**(description.get("options") or {}), **more}})

    variants: dict[str, dict[str, Any]] = {"saved, compiled": {}}
    if on.type == "cuda":
        variants["saved, CUDA graphs"] = _GRAPHS
    dtype = dtype_of(description)
    saved = [BenchmarkedModel(name, dtype, False, partial(make, more)) for name, more in variants.items()]
    return input_size(description), [*_beside_saved(description, on, dtype), *saved]


def _beside_saved(description: dict[str, Any], on: Any, dtype: str) -> list[BenchmarkedModel]:
    """The float model of a saved one, with random weights; none, with a sentence, where timm has no such model."""
    try:
        model = random_classifier(description["model"], None).model.to(on)
    except QFrameworkError as error:
        typer.echo(f"qframework: nothing to compare with: {command.one_line(error)}", err=True)
        return []
    return list(_float_configurations(model, on, dtype))


def _of_model(
    target: str, checkpoint: Path | None, on: Any, dtype: str
) -> tuple[tuple[int, ...], list[BenchmarkedModel]]:
    from qframework.evaluation.models import input_size

    classifier = random_classifier(target, checkpoint)
    return input_size(classifier.describe()), list(_configurations(classifier.model.to(on), on, dtype))


def _configurations(model: nn.Module, on: Any, dtype: str) -> Iterator[BenchmarkedModel]:
    """Float in ``dtype`` and in those that people use on the device, then INT8 with ``dtype`` around it."""
    from qframework.quantizer import QuantizationConfig, static_attention, static_int8

    yield from _float_configurations(model, on, dtype)
    ways = _ways(on)
    both = QuantizationConfig(linear=static_int8(), attention=static_attention())
    for name, config in {"static INT8": static_int8(), "static INT8 with attention": both}.items():
        for suffix, options in ways.items():
            yield BenchmarkedModel(f"{name}{suffix}", dtype, False, partial(_static, model, config, options))
    for suffix, options in ways.items():
        make = partial(_compiled, model, "qframework", {"linear": "int8_dynamic", **options})
        yield BenchmarkedModel(f"dynamic INT8{suffix}", dtype, False, make)


def _float_configurations(model: nn.Module, on: Any, dtype: str) -> Iterator[BenchmarkedModel]:
    """Float in ``dtype`` and in those that people use on the device."""
    yield BenchmarkedModel(f"{_SHORT[dtype]} eager", dtype, True, partial(_cast, model))
    for kind in dict.fromkeys((dtype, "float16") if on.type == "cuda" else (dtype, "float32", "bfloat16")):
        for suffix, options in _ways(on).items():
            name = f"{_SHORT[kind]} compiled{suffix}"
            yield BenchmarkedModel(name, kind, True, partial(_compiled, model, "inductor", options))


def _ways(on: Any) -> dict[str, dict[str, Any]]:
    """Options of compiled configurations by what is added to their names."""
    return {"": {}, **({", CUDA graphs": _GRAPHS} if on.type == "cuda" else {})}


def _cast(model: nn.Module, images: Tensor) -> nn.Module:
    """A copy of the model in the dtype of ``images``."""
    return copy.deepcopy(model).to(images.dtype)


def _compiled(model: nn.Module, backend: str, options: dict[str, Any], images: Tensor) -> Any:
    import torch

    return torch.compile(_cast(model, images), backend=backend, options=options or None)


def _static(model: nn.Module, config: Any, options: dict[str, Any], images: Tensor) -> Any:
    import torch

    from qframework.conversion import quantize

    converted = quantize(_cast(model, images), images, config, [images], skip=())
    return torch.compile(converted, backend="qframework", options=options or None)
