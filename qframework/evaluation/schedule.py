"""The learning rate schedule of the models trained here."""

from __future__ import annotations

import math


def warmup_cosine(step: int, total: int, warmup: float) -> float:
    """Factor of the learning rate: a linear rise over the first ``warmup`` of all steps, then a cosine to zero."""
    rising = max(1, round(warmup * total))
    if step < rising:
        return (step + 1) / rising
    return (1 + math.cos(math.pi * min(1.0, (step - rising) / max(1, total - rising)))) / 2
