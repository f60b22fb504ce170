"""QuantizedModel: a converted model that saves and explains itself."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from qframework.backend import Report, explain
from qframework.compat import pytree
from qframework.conversion.example_call import accept_float_calls, float_call
from qframework.conversion.recipe_check import RECIPE_NOTE
from qframework.conversion.stand_in import move_devices, record_module, stand_in
from qframework.errors import UnsupportedError
from qframework.export.onnx_export import write_onnx
from qframework.export.package import write_package
from qframework.export.report import OnnxReport
from qframework.graph.activation_scales import CarriesScales
from qframework.graph.none_inputs import check_none_inputs
from qframework.graph.rewrites.detached import detach_outputs
from qframework.graph.rewrites.late_dequantize import dequantize_late
from qframework.graph.source import look_up_once
from qframework.serialization import save


class QuantizedModel(CarriesScales, GraphModule):
    """A quantized model: an ordinary module, for ``torch.compile(..., backend="qframework")``.

    Without compilation it simulates the INT8 model in float, slowly. ``quantize`` makes it. Its outputs carry no
    gradient.

    It can take the place of the float model in another: it has its plain attributes (``stand_in.py``) and takes its
    arguments (``example_call.py``), as far as the example it was exported with allows.
    """

    def __init__(
        self,
        converted: GraphModule,
        call: tuple[Any, Any],
        dynamic_shapes: Any,
        config: Any,
        model: nn.Module,
    ) -> None:
        """``call`` holds the example's positional and keyword arguments; only shapes and dtypes of tensors are kept.

        ``model`` is the float model, of which plain attributes are kept.
        """
        super().__init__(converted, converted.graph, "QuantizedModel")
        inputs = zip(self.graph.find_nodes(op="placeholder"), pytree.tree_leaves(call), strict=True)
        check_none_inputs(self, [node.name for node, value in inputs if value is None])
        dequantize_late(self)
        look_up_once(self)
        detach_outputs(self)
        self.training = False
        self._call = pytree.tree_map_only(Tensor, lambda x: torch.empty_like(x, device="meta"), call)
        self._dynamic_shapes, self._config = dynamic_shapes, config
        self._notes = (converted.meta[RECIPE_NOTE],) if RECIPE_NOTE in converted.meta else ()
        self._original, self._float_call = record_module(model), float_call(model)
        self._take_place()

    def _take_place(self) -> None:
        stand_in(self, self._original)
        self.recompile()

    def recompile(self) -> Any:
        """Generate the code of the graph; ``forward`` then takes the float model's arguments."""
        code = super().recompile()
        call = self.__dict__.get("_float_call")
        if call is not None:
            names = [name for name in inspect.signature(type(self).forward).parameters if name != "self"]
            args, kwargs = self._call
            example = dict(zip(names, [*args, *kwargs.values()], strict=False))
            traced = {node.name: node.meta.get("val") for node in self.graph.find_nodes(op="placeholder")}
            if len(example) == len(names):
                accepting = accept_float_calls(type(self).forward, call, example, traced)
                type(self).forward = accepting or type(self).forward
        return code

    def save(self, path: str | os.PathLike[str], config: Mapping[str, Any] | None = None) -> None:
        """Write the model to one file, which ``qframework.load`` reads without the model's code.

        Args:
            path: any name; ``.pt2`` is customary. Existing files are replaced.
            config: JSON-able description to keep with the model, in addition to how it was quantized.

        Raises:
            QFrameworkError, UnsupportedError, OSError: as ``qframework.save``.
        """
        args, kwargs = self._example()
        program = torch.export.export(self, args, kwargs, dynamic_shapes=self._dynamic_shapes)
        save(program, path, args, config={**self._config, **(config or {})})

    def to_onnx(self, path: str | os.PathLike[str], *, opset: int = 18) -> OnnxReport:
        """Write the model to an ONNX file in QDQ form, for ONNX Runtime and TensorRT; needs the extra ``onnx``.

        The file takes the inputs that the model was quantized for, with the same axes that may vary. See
        ``qframework.export.to_onnx``, whose result, arguments and errors these are.
        """
        return write_onnx(self, path, *self._example(), self._dynamic_shapes, opset)

    def to_package(self, path: str | os.PathLike[str], *, options: Mapping[str, Any] | None = None) -> Report:
        """Compile the model ahead of time to a file that ``qframework.export.load_package`` runs without compiling.

        The package takes the inputs that the model was quantized for, with the same axes that may vary. See
        ``qframework.export.to_package``, whose result, arguments and errors these are.
        """
        return write_package(self, path, *self._example(), self._dynamic_shapes, options)

    def explain(self) -> Report:
        """Report which layers run in INT8 under ``backend="qframework"``, and why the others do not.

        Its ``notes`` say whether a recipe was kept, and the errors with and without it.
        """
        return replace(explain(self, ()), notes=self._notes)

    def train(self, mode: bool = True) -> Self:
        """Only ``eval()``, which changes nothing. Raises UnsupportedError for ``train()``."""
        if mode:
            raise UnsupportedError(
                "QuantizedModel: mode must be False, got True: a quantized model cannot be trained. Train the float "
                "model, or prepare it with prepare_qat_pt2e"
            )
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """``.to()`` and its like. Raises UnsupportedError for another dtype: that of the graph is fixed."""
        for dtype in {tensor.dtype for tensor in [*self.parameters(), *self.buffers()] if tensor.is_floating_point()}:
            if (changed := fn(torch.empty(0, dtype=dtype)).dtype) != dtype:
                raise UnsupportedError(
                    f"QuantizedModel: dtype must stay as the model was quantized, {dtype}, got {changed}. Convert the "
                    "float model before quantize, or run the quantized one under torch.autocast"
                )
        moved = super()._apply(fn, recurse)
        move_devices(self)
        return moved

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedModel:
        copied: Any = super().__deepcopy__(memo)
        copied._call, copied._dynamic_shapes, copied._config = self._call, self._dynamic_shapes, self._config
        copied.training, copied._notes = False, self._notes
        copied._original, copied._float_call = self._original, self._float_call
        copied._take_place()
        return copied

    def __reduce__(self) -> Any:
        """Raises UnsupportedError: ``torch.save`` of a whole model pickles it, and a graph's operators cannot be."""
        raise UnsupportedError(
            "QuantizedModel: a quantized model cannot be pickled, as torch.save(model, ...) and multiprocessing do. "
            "Write it with model.save(path) and read it with qframework.load(path); "
            "torch.save(model.state_dict(), ...) keeps its tensors, for a model that is quantized in the same way"
        )

    def _example(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword inputs with the shapes of the example."""
        return pytree.tree_map_only(Tensor, self._like_an_example, self._call)

    def _like_an_example(self, x: Tensor) -> Tensor:
        """Zeros: only shapes, strides and dtypes matter to an export."""
        device = next((tensor.device for tensor in [*self.parameters(), *self.buffers()]), torch.device("cpu"))
        return torch.zeros_like(x, device=device)
