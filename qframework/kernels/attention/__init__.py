"""Quantized attention: Q and K in INT8 or INT4, P and V in 16 bit, INT8 or FP8."""
