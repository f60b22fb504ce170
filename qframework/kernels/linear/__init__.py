"""INT8 linear layers: ``qframework::int8_linear`` and the quantization of its weights."""
