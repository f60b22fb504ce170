"""The memory that a model's weights take."""

from __future__ import annotations

import itertools

from torch import nn


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers: weights, scales, zero points, biases, norms, embeddings.

    Counted by storage, so a tied weight counts once and a small view of a large tensor counts as the large one.
    """
    storages = (tensor.untyped_storage() for tensor in itertools.chain(model.parameters(), model.buffers()))
    return sum({(storage.device, storage.data_ptr()): storage.nbytes() for storage in storages}.values())
