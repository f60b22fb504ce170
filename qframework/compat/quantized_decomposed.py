"""Registers ``torch.ops.quantized_decomposed``, PT2E's operators, which importing torch does not register."""

from qframework.compat.missing import explained

with explained():
    import torch.ao.quantization.fx._decomposed  # noqa: F401
