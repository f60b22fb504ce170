"""Rewrites of captured graphs that keep what they compute."""
