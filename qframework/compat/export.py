"""PyTorch's reader of exported programs, called with values: ``torch.export.load`` reads files, and unpickles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.export import ExportedProgram

from qframework.compat.missing import explained

with explained():
    from torch._export.serde.schema import ExportedProgram as _Schema
    from torch._export.serde.serialize import ExportedProgramDeserializer, _dict_to_dataclass


def program_of(
    document: Mapping[str, Any], weights: dict[str, Tensor], constants: dict[str, Tensor], example_inputs: Any
) -> ExportedProgram:
    """The program that a checked JSON document describes, with its tensors."""
    serialized = _dict_to_dataclass(_Schema, document)
    return ExportedProgramDeserializer().deserialize(serialized, weights, constants, example_inputs)
