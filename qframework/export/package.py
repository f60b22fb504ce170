"""``to_package``: compiles a model ahead of time to a file that another process runs without compiling."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qframework.backend import Report
from qframework.backend.compile import own_decompositions, run_passes
from qframework.backend.lowering import Lowering
from qframework.backend.options import parse_options
from qframework.compat import pytree
from qframework.errors import FileFormatError, QFrameworkError, UnsupportedError, first_line
from qframework.export.capture import call_of, check_model, own_graph
from qframework.export.constant_outputs import make_constant_outputs_tensors
from qframework.export.package_inputs import checked_call, describe_inputs
from qframework.export.plain_outputs import make_outputs_plain
from qframework.files import open_regular
from qframework.graph.export_program import export_program
from qframework.kernels.linear.int8_linear import PACKAGED
from qframework.kernels.packaged import name_dtypes
from qframework.outputs import check_output_file

_INPUTS = "qframework_inputs"  # in the metadata of a package
_INLINED = 8  # elements


def to_package(
    model: nn.Module,
    path: str | os.PathLike[str],
    example_inputs: Any = None,
    *,
    dynamic_shapes: Any = None,
    options: Mapping[str, Any] | None = None,
) -> Report:
    """Compile a model as ``torch.compile(..., backend="qframework")`` does, and write the result to a package of
    AOTInductor.

    ``load_package`` runs it in a process that has imported qframework, without its Python code and without compiling,
    on the kind of processor or GPU that it was compiled for. Outputs of classes such as transformers' ``ModelOutput``
    become dictionaries. A package is code: load only those that you trust.

    Args:
        model: the result of ``convert_pt2e``, ``qframework.load`` or ``qframework.quantize``, or another module in eval
            mode that ``torch.export`` can capture, such as one changed by ``qframework.quantize_``.
        path: the file, which must end in ``.pt2``; an existing file is replaced.
        example_inputs: the model's input, a tuple of inputs, or a mapping of keyword inputs. Default, for exported
            models: inputs as those that it was exported with, and the axes that may vary in it.
        dynamic_shapes: as in ``torch.export.export``: which axes of ``example_inputs`` may vary. Without it the package
            accepts their shapes only.
        options: as for ``torch.compile(..., backend="qframework")``.

    Returns:
        A report on each layer, as ``explain`` gives.

    Raises:
        UnsupportedError: a wrong argument, or an output that is neither a tensor, a number nor None.
        QFrameworkError: ``torch.export`` cannot trace the model, or AOTInductor cannot compile it: there is no C++
            compiler, for example.
        OSError: the file cannot be written.
    """
    check_model(model, "to_package")
    return write_package(model, path, *call_of(model, example_inputs, dynamic_shapes, "to_package"), options)


def write_package(
    model: nn.Module,
    path: str | os.PathLike[str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dynamic_shapes: Any,
    options: Mapping[str, Any] | None,
) -> Report:
    """``to_package`` with positional and keyword inputs."""
    from qframework.compat.inductor import compile_package

    _check_path(path)
    settings = parse_options(None, options)
    args, kwargs = pytree.tree_map_only(Tensor, _dense, (args, kwargs))
    gm = own_graph(model, args, kwargs, dynamic_shapes, "to_package")
    make_constant_outputs_tensors(gm, "to_package")
    make_outputs_plain(gm)
    lowering = Lowering.of(gm, (), settings)
    with torch.no_grad():
        run_passes(lowering)
        program = export_program("to_package", gm, args, kwargs, dynamic_shapes)
        program = program.run_decompositions({**own_decompositions(), **PACKAGED})
        _check_written_buffers(program)
        name_dtypes(program.graph_module)
        with tempfile.TemporaryDirectory(dir=Path(path).parent, prefix=f".{Path(path).name}.") as folder:
            partial = str(Path(folder) / Path(path).name)
            try:
                compile_package(program, partial, settings.inductor, {_INPUTS: describe_inputs(program)})
            except Exception as error:  # compilers and Inductor raise many kinds
                raise QFrameworkError(
                    f"to_package: AOTInductor cannot compile the model: {first_line(error)}"
                ) from error
            os.replace(partial, path)
    return Report(lowering.reports)


def _check_written_buffers(program: torch.export.ExportedProgram) -> None:
    """Refuse writes to small buffers, which would be lost: Inductor writes the values of these into the code."""
    buffers = dict(program.named_buffers())
    written = program.graph_signature.buffers_to_mutate.values()
    lost = [name for name in written if buffers[name].numel() <= _INLINED]
    if lost:
        raise UnsupportedError(
            f"to_package: model must not change tensors of up to {_INLINED} elements, which a package keeps as "
            f"constants, got the buffers {', '.join(map(repr, lost))}"
        )


def load_package(path: str | os.PathLike[str]) -> Any:
    """The compiled model in a package of ``to_package``: a function of the model's inputs.

    It has no parameters, submodules or other attributes of the model, no gradients, and cannot move to another device.
    It raises UnsupportedError for inputs that the code was not compiled for, and copies those whose memory has another
    layout than the example's. Packages that PyTorch's own function wrote check nothing.

    Raises:
        FileFormatError: the file is not a package, or is for another platform.
        FileNotFoundError: there is no such file.
    """
    from qframework.compat.inductor import load_compiled_package, package_structure

    open_regular(path).close()
    try:
        run = load_compiled_package(os.fspath(path))
    except RuntimeError as error:
        raise FileFormatError(f"{path} is not a package that this machine can run: {first_line(error)}") from error
    description = run.get_metadata().get(_INPUTS)
    return run if description is None else checked_call(run, package_structure(run), description)


def _dense(x: Tensor) -> Tensor:
    """An example in memory of its own, whose layout inputs can be copied to."""
    return x.detach().clone()


def _check_path(path: str | os.PathLike[str]) -> None:
    if Path(path).suffix != ".pt2":
        raise UnsupportedError(f"to_package: path must end in .pt2, got {os.fspath(path)!r}")
    check_output_file(Path(path), "to_package: path")
