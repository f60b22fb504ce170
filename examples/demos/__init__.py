"""What the examples and benchmarks share: demo models, data makers and training loops. Not in the wheel."""
