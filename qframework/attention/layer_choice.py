"""The variant of one attention layer, and the measurements behind it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

OFF = "off"


@dataclass(frozen=True)
class Measurement:
    """Error of one variant against float attention in one layer; each error is the worst over all calls.

    Args:
        cosine: ``sum(O O') / sqrt(sum(O^2) sum(O'^2))``, where O is the output of float attention and O' the variant's.
        relative_l1: ``sum|O - O'| / sum|O|``.
        rmse: ``sqrt(mean((O - O')^2))``.
        error: why the variant cannot be used in this layer; if not empty, the numbers are meaningless.
        seconds: mean time of the layer's calls on a GPU, None if it was not measured.
    """

    cosine: float = 1.0
    relative_l1: float = 0.0
    rmse: float = 0.0
    error: str = ""
    seconds: float | None = None

    def worse(self, other: Measurement) -> Measurement:
        """The worse of both for every error; the time is this one's."""
        return Measurement(
            min(self.cosine, other.cosine),
            max(self.relative_l1, other.relative_l1),
            max(self.rmse, other.rmse),
            self.error or other.error,
            self.seconds,
        )


@dataclass(frozen=True)
class LayerChoice:
    """The variant of one layer and the measurements it was chosen from.

    Args:
        variant: a name or spec of a variant, ``"auto"``, or ``"off"`` for PyTorch's float attention.
        calls: number of measured calls.
        query: shape of the first call's query.
        keys: number of keys of the first call.
        measurements: by variant, fastest first; with times also of ``"off"``.
    """

    variant: str
    calls: int = 0
    query: tuple[int, ...] = ()
    keys: int = 0
    measurements: Mapping[str, Measurement] = field(default_factory=dict)


def passes(measured: Measurement, criteria: Mapping[str, float]) -> bool:
    """Whether a measurement exceeds the threshold of cosine similarity and meets the optional bounds."""
    if measured.error:
        return False
    bounded = all(getattr(measured, name) <= criteria.get(f"max_{name}", math.inf) for name in ("relative_l1", "rmse"))
    return bounded and measured.cosine > criteria["threshold"]
