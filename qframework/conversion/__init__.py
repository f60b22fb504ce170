"""Quantize a model in one call: exported (``quantize``), or in place (``quantize_``)."""

from qframework.conversion.in_place import fallbacks, quantize_
from qframework.conversion.linear_module import QuantizedLinear
from qframework.conversion.one_call import quantize
from qframework.conversion.quantized_model import QuantizedModel

__all__ = ["QuantizedLinear", "QuantizedModel", "fallbacks", "quantize", "quantize_"]
