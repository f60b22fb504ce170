"""Attention for Hopper, in Gluon: which calls, plans, launches and kernels."""
