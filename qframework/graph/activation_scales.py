"""Scales and zero points that a converted graph holds as numbers, as a tensor of the model's state dict.

PT2E writes those of whole tensors, which most activations have, into the graph, where ``load_state_dict`` does not
reach them: the loaded weights would run with the scales of other calibration data.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

KEY = "activation_scales"  # in a state dict, behind the prefix of the module


class CarriesScales:
    """A base of modules that are graphs: their state dict holds the scales in the graph, under ``KEY``."""

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]
        destination[prefix + KEY] = scales_of(cast(GraphModule, self))

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """``load_state_dict``: the scales in the graph become those of the loaded tensors too."""
        scales = state_dict.pop(prefix + KEY, None)
        super()._load_from_state_dict(  # type: ignore[misc]
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if scales is None:
            missing_keys.append(prefix + KEY)
        elif wrong := set_scales(cast(GraphModule, self), scales):
            error_msgs.append(wrong)


def scales_of(gm: GraphModule) -> Tensor:
    """Float64, in the order of the graph: the numbers that quantizations and dequantizations have as arguments."""
    return torch.tensor([node.args[place] for node, place in _numbers(gm)], dtype=torch.float64)


def set_scales(gm: GraphModule, scales: Tensor) -> str | None:
    """Write into the graph what ``scales_of`` a model of the same structure returned; what is wrong, if anything."""
    places, values = _numbers(gm), scales.tolist()
    if len(values) != len(places):
        return (
            f"{KEY} must be those of a model that was quantized in the same way, {len(places)} numbers, "
            f"got {len(values)}"
        )
    for (node, place), value in zip(places, values, strict=True):
        before: Any = node.args[place]
        node.update_arg(place, type(before)(value))
    gm.recompile()
    return None


def _numbers(gm: GraphModule) -> list[tuple[Node, int]]:
    """Nodes and the positions of their arguments."""
    nodes = (node for node in gm.graph.nodes if getattr(node.target, "namespace", None) == "quantized_decomposed")
    return [(node, place) for node in nodes for place, value in enumerate(node.args) if type(value) in (int, float)]
