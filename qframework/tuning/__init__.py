"""Finds the layers that quantization hurts, and the fastest mixed precision within an accuracy budget."""

from qframework.tuning.assignment import Assignment, Meanings
from qframework.tuning.journal import Journal
from qframework.tuning.layer_sensitivity import Sensitivity, sensitivity
from qframework.tuning.mixed_precision import Tuning, tune
from qframework.tuning.plan import Plan
from qframework.tuning.results import LayerSensitivity, Measured, Trial

__all__ = [
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
