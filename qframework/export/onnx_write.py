"""Writes an ONNX document to one file, or to two above the 2 GB that one can hold, and counts its INT8 products."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from qframework.export.qdq import Rewritten
from qframework.files import atomic_write

LARGEST = 2**31 - 2**26  # bytes of weights beside which the graph still fits into 2 GB


def int8_products(document: Any) -> int:
    """How many MatMul nodes read two dequantized tensors, the second from an int8 initializer."""
    products = [node for node in document.graph.all_nodes() if node.op_type == "MatMul"]
    return sum(_is_dequantized(node.inputs[0]) and _is_int8_weight(node.inputs[1]) for node in products)


def _is_dequantized(value: Any) -> bool:
    producer = value.producer()
    return producer is not None and producer.op_type == "DequantizeLinear"


def _is_int8_weight(value: Any) -> bool:
    if not _is_dequantized(value):
        return False
    stored = value.producer().inputs[0].const_value
    return stored is not None and stored.dtype.name == "INT8"


def write(document: Any, path: str | os.PathLike[str], rewritten: Rewritten) -> Path | None:
    """Write ``document``; returns the second file with the weights if there is one."""
    import onnx_ir

    import qframework

    document.metadata_props["qframework_version"] = qframework.__version__
    document.metadata_props["qframework_left_in_float"] = json.dumps(rewritten.left_in_float)
    size = sum(value.const_value.nbytes for value in document.graph.initializers.values() if value.const_value)
    if size <= LARGEST:
        with atomic_write(path) as file:
            file.write(onnx_ir.serde.serialize_model(document).SerializeToString())
        return None
    return _write_two(document, Path(path))


def _write_two(document: Any, path: Path) -> Path:
    import onnx_ir

    data = path.with_name(f"{path.name}.data")
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        partial = Path(folder) / path.name
        onnx_ir.save(document, partial, external_data=data.name)
        os.replace(partial.with_name(data.name), data)
        os.replace(partial, path)
    return data
