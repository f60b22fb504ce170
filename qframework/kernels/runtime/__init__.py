"""Shared by all operators: Triton, kernel launches, replays, checks."""
