"""qframework: quantized transformers for PyTorch, in PyTorch's own workflow."""

__version__ = "0.1.0"
