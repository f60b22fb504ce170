"""Attention whose gradient is computed in 8 bit, for training."""
