"""``qframework export-onnx``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qframework.cli import command
from qframework.cli.output import print_result
from qframework.outputs import check_output_file

EXAMPLES = """\
[bold]Examples[/]

qframework export-onnx digits.pt2

qframework export-onnx vit.pt2 --output vit.onnx --opset 21 --json
"""


def export_onnx(
    saved: Annotated[Path, typer.Argument(help="A file of [bold]qframework quantize[/], with static scales.")],
    output: Annotated[Path | None, typer.Option(help="File to write; default: SAVED.onnx.")] = None,
    opset: Annotated[int, typer.Option(min=18, max=23, help="Version of ONNX's operators.")] = 18,
    as_json: command.Json = False,
) -> None:
    """Write a saved INT8 model to an ONNX file, for ONNX Runtime and TensorRT."""
    from qframework.export import to_onnx
    from qframework.serialization import load

    output = output or saved.with_suffix(".onnx")
    check_output_file(output, "--output")
    report = to_onnx(load(saved), output, opset=opset)
    files = [path for path in (report.path, report.data) if path is not None]
    result = {
        "model": str(saved),
        "output": ", ".join(map(str, files)),
        "opset": opset,
        "bytes": sum(path.stat().st_size for path in files),
        "int8_linears": len(report.int8),
        "left_in_float": report.left_in_float if as_json else _lines(report.left_in_float),
    }
    print_result(f"{saved}, as ONNX", result, as_json)


def _lines(left: dict[str, str]) -> str:
    return "\n".join(f"{layer}: {reason}" for layer, reason in left.items()) or "nothing"
