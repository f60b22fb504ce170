"""AttentionChoice: the variant of each attention layer of a model, with the measurements behind it.

A choice is a mapping from layer names to variant names; ``"off"`` keeps PyTorch's attention. A layer is named after the
innermost module that calls ``F.scaled_dot_product_attention``; a second call in one forward of that module is
``name#1``, and a call outside of any submodule is :data:`ROOT`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.fx import GraphModule

from qframework.attention import choice_table
from qframework.attention.drop_in import checked_spec
from qframework.attention.layer_choice import LayerChoice, Measurement
from qframework.attention.layer_scope import ROOT, LayerScope, rewrite_graph, split_name
from qframework.compat.dynamo import is_compiled
from qframework.errors import FileFormatError, QFrameworkError
from qframework.files import read_json, write_json

if TYPE_CHECKING:
    from rich.table import Table

FORMAT = 2  # 1 had no times


class AttentionChoice(Mapping[str, str]):
    """A variant for each attention layer, in the order of the model; created by ``calibrate_attention`` or by hand.

    It is a mapping from layer to variant, which the backend takes as an option::

        torch.compile(model, backend="qframework", options={"attention": choice})

    ``choice.apply(model)`` makes the model itself use it, compiled or not. ``str(choice)`` is a table.

    Args:
        layers: a :class:`LayerChoice` or just the name of a variant, by layer name.
        criteria: the thresholds of the calibration, for the record.

    Raises:
        UnsupportedError: an unknown variant.
    """

    def __init__(self, layers: Mapping[str, LayerChoice | str], criteria: Mapping[str, float] | None = None) -> None:
        self.layers = {name: LayerChoice(layer) if isinstance(layer, str) else layer for name, layer in layers.items()}
        self.criteria = dict(criteria or {})
        for layer in self.layers.values():
            checked_spec(layer.variant)

    def __getitem__(self, name: str) -> str:
        return self.layers[name].variant

    def __iter__(self) -> Iterator[str]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __repr__(self) -> str:
        return f"AttentionChoice({dict(self)})"

    # Applying ---------------------------------------------------------------------------------------------------------

    def apply(self, model: nn.Module) -> AppliedChoice:
        """Make ``model`` use the choice until ``remove()`` of the result is called or its ``with`` block ends.

        Each attention layer gets two forward hooks: parameters, ``state_dict`` and other models are untouched, it works
        on any device and thread, and ``torch.compile`` and ``torch.export`` trace the operators. In a graph of
        ``torch.export`` the attention nodes are replaced instead, so that ``qframework.save`` keeps them.
        Apply before compiling: a compiled function ignores hooks that are added or removed later.

        Raises:
            QFrameworkError: the model is compiled, or lacks a layer of the choice.
        """
        if is_compiled(model):
            raise QFrameworkError(
                "AttentionChoice.apply: model must not be compiled yet, got a compiled one. Apply the choice to the "
                "original model, then compile it"
            )
        if isinstance(model, GraphModule):
            return AppliedChoice(rewrite_graph(model, self))
        modules = dict(model.named_modules(remove_duplicate=False)) | {ROOT: model}
        by_module: dict[nn.Module, dict[int, str]] = {}
        for name, variant in self.items():
            path, index = split_name(name)
            if path not in modules:
                raise QFrameworkError(
                    f"AttentionChoice.apply: model must have the module {path!r}, got {type(model).__name__} without "
                    "it. Apply the choice to the model it was made for"
                )
            by_module.setdefault(modules[path], {})[index] = variant
        handles = [handle for module, variants in by_module.items() for handle in LayerScope(variants).attach(module)]
        return AppliedChoice(handles)

    # Files ------------------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """The choice as JSON values, e.g. for ``qframework.save(..., config={"attention": choice.to_dict()})``."""
        layers = {name: asdict(layer) for name, layer in self.layers.items()}
        return {"format": FORMAT, "criteria": self.criteria, "layers": layers}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> AttentionChoice:
        """The inverse of :meth:`to_dict`.

        Raises:
            FileFormatError: not the values of a choice, or a newer format.
            UnsupportedError: a variant that this version does not know.
        """
        _check_format(values)
        try:
            layers = {name: _layer_from(layer) for name, layer in values["layers"].items()}
        except (KeyError, TypeError, AttributeError) as error:
            raise FileFormatError(f"not an attention choice: {type(error).__name__}: {error}") from error
        return cls(layers, values.get("criteria"))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the choice to ``path`` as JSON."""
        write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> AttentionChoice:
        """Read a file of :meth:`save`.

        Raises:
            FileFormatError: not a file of :meth:`save`, or one of a newer format.
            FileNotFoundError: there is no such file.
        """
        values = read_json(path, "an attention choice")
        try:
            return cls.from_dict(values)
        except FileFormatError as error:
            raise FileFormatError(f"{path}: {error}") from error

    # Tables -----------------------------------------------------------------------------------------------------------

    def table(self, details: bool = False) -> Table:
        """A rich table: a row for each layer, or with ``details`` one for each layer and variant."""
        table = choice_table.detailed if details else choice_table.compact
        return table(self.layers, self.criteria)

    def __str__(self) -> str:
        return choice_table.text(self.table())


class AppliedChoice:
    """An applied choice, until ``remove()`` or the end of a ``with`` block."""

    def __init__(self, handles: list[Any]) -> None:
        self._handles = handles

    def remove(self) -> None:
        """Restore the model's own attention. Further calls are no-ops."""
        while self._handles:
            self._handles.pop().remove()

    def __enter__(self) -> AppliedChoice:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()


def _check_format(values: Any) -> None:
    if not isinstance(values, Mapping) or not isinstance(values.get("format"), int):
        raise FileFormatError("not an attention choice: it has no format number")
    if values["format"] > FORMAT:
        raise FileFormatError(
            f"attention choice: format must be at most {FORMAT}, got {values['format']}. Upgrade qframework"
        )


def _layer_from(values: Mapping[str, Any]) -> LayerChoice:
    unknown = set(values) - {field.name for field in fields(LayerChoice)}
    if unknown:
        raise FileFormatError(f"not an attention choice: a layer has unknown entries: {', '.join(sorted(unknown))}")
    measurements = {name: Measurement(**measured) for name, measured in values.get("measurements", {}).items()}
    return LayerChoice(**{**values, "query": tuple(values.get("query", ())), "measurements": measurements})
