"""Finds the layers that quantization hurts, and the fastest mixed precision within an accuracy budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qframework.lazy import lazy_names

if TYPE_CHECKING:
    from qframework.tuning.assignment import OBSERVERS, Assignment, Meanings
    from qframework.tuning.journal import Journal
    from qframework.tuning.layer_sensitivity import Sensitivity, sensitivity
    from qframework.tuning.mixed_precision import Tuning, tune
    from qframework.tuning.plan import Plan
    from qframework.tuning.results import LayerSensitivity, Measured, Trial

__all__ = [
    "OBSERVERS",
    "Assignment",
    "Journal",
    "LayerSensitivity",
    "Meanings",
    "Measured",
    "Plan",
    "Sensitivity",
    "Trial",
    "Tuning",
    "sensitivity",
    "tune",
]

_MODULE_OF = {
    "OBSERVERS": "assignment",
    "Assignment": "assignment",
    "Journal": "journal",
    "LayerSensitivity": "results",
    "Meanings": "assignment",
    "Measured": "results",
    "Plan": "plan",
    "Sensitivity": "layer_sensitivity",
    "Trial": "results",
    "Tuning": "mixed_precision",
    "sensitivity": "layer_sensitivity",
    "tune": "mixed_precision",
}

__getattr__ = lazy_names(__name__, _MODULE_OF)
