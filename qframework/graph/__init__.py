"""What nodes of a captured graph mean, in every dialect. The quantizer annotates graphs, the backend lowers them."""
