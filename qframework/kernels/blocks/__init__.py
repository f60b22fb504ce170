"""Operators of INT8 training, on tensors in blocks with one scale each."""
