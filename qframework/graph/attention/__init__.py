"""Attention in a captured graph: found in every form that models write it in, its masks, and its replacement."""
