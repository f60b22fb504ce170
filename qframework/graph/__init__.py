"""What nodes of a captured graph mean, in every dialect.

For the quantizer, which annotates graphs, and the backend, which lowers them.
"""
