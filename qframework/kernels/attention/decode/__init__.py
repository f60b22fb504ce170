"""Attention of a few queries to a cache in INT8: one step of decoding, and appending to the cache."""
