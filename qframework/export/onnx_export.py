"""``to_onnx``: writes a converted model to an ONNX file in QDQ form, for ONNX Runtime and TensorRT."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qframework.compat import pytree
from qframework.compat.graphs import input_structure
from qframework.compat.logs import silenced_onnxscript
from qframework.errors import QFrameworkError, UnsupportedError, first_line
from qframework.export.capture import call_of, check_model, own_graph
from qframework.export.constant_biases import fold_biases
from qframework.export.constant_outputs import make_constant_outputs_tensors
from qframework.export.expand_hadamard import expand_hadamard
from qframework.export.expand_int8_linear import expand_int8_linear
from qframework.export.float_attention import write_float_attention
from qframework.export.onnx_attention import write_plain_attention
from qframework.export.onnx_names import given_axis_names, name_axes, name_scales, output_names, remove_private_notes
from qframework.export.onnx_write import int8_products, write
from qframework.export.qdq import Rewritten, write_qdq
from qframework.export.report import OnnxReport
from qframework.fallbacks import Fallbacks
from qframework.graph.export_program import export_program
from qframework.outputs import check_output_file

OPSETS = range(18, 24)
fallbacks = Fallbacks()
"""How often ``to_onnx`` left a quantized layer in float, by reason. Each layer's reason is logged once."""


def to_onnx(
    model: nn.Module,
    path: str | os.PathLike[str],
    example_inputs: Any = None,
    *,
    dynamic_shapes: Any = None,
    opset: int = 18,
) -> OnnxReport:
    """Write a converted model to an ONNX file in QDQ form; an existing file is replaced.

    Linear layers with static INT8 inputs per tensor become MatMul of two DequantizeLinear, symmetric with zero point 0:
    the form that ONNX Runtime runs with INT8 kernels and that TensorRT documents for explicit quantization. Weights are
    int8 initializers ``(K, N)`` with a scale for each column; there is no float copy. Everything else is float in the
    model's dtype, also what QDQ cannot express: dynamic scales, scales per token, INT8 attention. These layers are
    listed in the result, counted in ``qframework.export.fallbacks`` and logged as warnings.

    Activations below ``-127.5 scale`` become -128 where this package has -127: QuantizeLinear has no smaller range.
    Axes that vary have the names of their ``torch.export.Dim``. Without one they are called ``batch`` if they are the
    first of an input and of the same size in the example, else ``{input}_axis_{i}``. Outputs that are numbers become
    tensors without dimensions, in int64, double or bool; None is no output. Needs the extra ``onnx``.

    Args:
        model: the result of ``convert_pt2e``, ``qframework.load`` or ``qframework.quantize``, or a module in eval mode
            that ``qframework.quantize_`` changed and ``torch.export`` can capture.
        path: the file; ``.onnx`` is customary. Weights above 2 GB, the limit of the format, go to ``{path}.data``.
        example_inputs: the model's input, a tuple of inputs, or a mapping of keyword inputs. Default, for exported
            models: inputs as those that it was exported with, and the axes that may vary in it.
        dynamic_shapes: as in ``torch.export.export``: which axes of ``example_inputs`` may vary. Without it the file
            accepts their shapes only.
        opset: version of ONNX's operators, 18 to 23.

    Returns:
        What is INT8 in the file, and what had to be left in float with the reason.

    Raises:
        QFrameworkError: the extra ``onnx`` is not installed, or ``torch.export`` or ``torch.onnx`` cannot express the
            model.
        UnsupportedError: ``model`` has no layer that QDQ expresses, or an output such as a text; or a wrong argument.
        OSError: the file cannot be written.
    """
    check_model(model, "to_onnx")
    return write_onnx(model, path, *call_of(model, example_inputs, dynamic_shapes, "to_onnx"), opset)


def write_onnx(
    model: nn.Module,
    path: str | os.PathLike[str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dynamic_shapes: Any,
    opset: int,
) -> OnnxReport:
    """``to_onnx`` with positional and keyword inputs."""
    _check(opset)
    check_output_file(Path(path), "to_onnx: path")
    gm = own_graph(model, args, kwargs, dynamic_shapes, "to_onnx")
    make_constant_outputs_tensors(gm, "to_onnx")
    expand_int8_linear(gm)
    expand_hadamard(gm)
    in_float = write_float_attention(gm)
    fold_biases(gm)
    rewritten = write_qdq(gm)
    write_plain_attention(gm)
    rewritten.left_in_float = in_float | rewritten.left_in_float
    _check_any_int8(rewritten)
    document = _document(export_program("to_onnx", gm, args, kwargs, dynamic_shapes), opset)
    structure = input_structure(gm)
    inputs, names = [*args, *kwargs.values()], structure.orig_args if structure is not None else []
    name_axes(document, _first_sizes(inputs), given_axis_names(inputs, dynamic_shapes, names))
    _check_products(document, rewritten)
    for layer, reason in rewritten.left_in_float.items():
        fallbacks.note(reason, f"to_onnx: {layer!r} is left in float: {reason}")
    data = write(document, path, rewritten)
    return OnnxReport(Path(path), tuple(dict.fromkeys(rewritten.int8)), rewritten.left_in_float, data)


def _check(opset: object) -> None:
    if opset not in OPSETS or isinstance(opset, bool):
        raise UnsupportedError(f"to_onnx: opset must be {OPSETS[0]} to {OPSETS[-1]}, got {opset!r}")
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if missing:
        raise QFrameworkError(
            f"to_onnx: the packages {' and '.join(missing)} must be installed. Run pip install {' '.join(missing)}"
        )


def _check_any_int8(rewritten: Rewritten) -> None:
    if rewritten.int8:
        return
    found = "none that is quantized"
    if rewritten.left_in_float:
        layer, reason = next(iter(rewritten.left_in_float.items()))
        found = f"{len(rewritten.left_in_float)} others, such as {layer!r}: {reason}"
    raise UnsupportedError(
        f"to_onnx: model must hold linear layers with static INT8 inputs per tensor, got {found}. Quantize it with "
        "static_int8()"
    )


def _document(program: torch.export.ExportedProgram, opset: int) -> Any:
    """The program as an ``onnx_ir.Model`` with readable names."""
    names = output_names(program)
    try:
        with silenced_onnxscript():
            written = torch.onnx.export(program, dynamo=True, opset_version=opset, output_names=names, verbose=False)
    except Exception as error:  # the exporter raises many kinds
        raise QFrameworkError(f"to_onnx: torch.onnx cannot express the model: {first_line(_root(error))}") from error
    assert written is not None
    document = written.model
    name_scales(document)
    remove_private_notes(document)
    return document


def _root(error: BaseException) -> BaseException:
    """The first cause of an error: the exporter's own name only the step that failed."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _first_sizes(inputs: list[Any]) -> list[int | None]:
    """The first size of each input that is a tensor, in the order of the file's inputs."""
    return [(x.shape[0] if x.ndim else None) for x in pytree.tree_leaves(inputs) if isinstance(x, torch.Tensor)]


def _check_products(document: Any, rewritten: Rewritten) -> None:
    written = int8_products(document)
    if written != rewritten.products:
        raise QFrameworkError(
            f"to_onnx: torch.onnx must keep all {rewritten.products} INT8 products, got {written}. Please report this "
            f"with the versions of torch {torch.__version__} and onnxscript"
        )
