"""The product of two operands in blocks: ``qframework::block_linear``."""
