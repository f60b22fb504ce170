"""The observer of each static layer, before the search: it takes no time at run time, so that the least noise decides.

Layers that read one tensor, such as the projections of queries, keys and values, get one observer for all, since two
would quantize the tensor twice. Zero points take time, so that each layer keeps a choice with and one without.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from qframework.tuning.assignment import Assignment, Key, Meanings
from qframework.tuning.layer_times import FLOAT, STATIC, kind_of
from qframework.tuning.layers import Layer
from qframework.tuning.search import Costs


def with_best_observers(layers: Iterable[Layer], costs: Costs, meanings: Meanings) -> Costs:
    """``costs`` with the static choices of least noise alone, one for each kernel (``Meanings.kernel``)."""
    groups: dict[object, list[Layer]] = {}
    for layer in layers:
        groups.setdefault(layer.reads or layer.key, []).append(layer)
    best = {layer.key: _best(group, costs, meanings) for group in groups.values() for layer in group}
    return {
        key: {name: cost for name, cost in choices.items() if kind_of(name) != STATIC or name in best[key]}
        for key, choices in costs.items()
    }


def uniform_kernels(layers: Sequence[Layer], best: Costs, meanings: Meanings) -> list[Assignment]:
    """All layers static on the same kernels, with and without zero points, each with the observer of least noise.

    They run as fast as one observer for all layers does. Attention, which has no zero points, runs the same in each.

    Args:
        layers: of the model.
        best: of :func:`with_best_observers`.
        meanings: of the choices.
    """
    found = []
    for kernel in dict.fromkeys(map(meanings.kernel, meanings.statics("linear"))):
        choices: dict[Key, str] = {}
        for layer in layers:
            static = [name for name in best[layer.key] if kind_of(name) == STATIC] if layer.static else []
            same = [name for name in static if meanings.kernel(name) == kernel]
            choices[layer.key] = next(iter(same or static), FLOAT)
        found.append(Assignment(choices))
    return found


def _best(group: Sequence[Layer], costs: Costs, meanings: Meanings) -> set[str]:
    """The static choices of layers that share them; their noises add up."""
    names = [name for name in meanings.statics(group[0].kind) if all(name in costs[layer.key] for layer in group)]
    noise = {name: sum(costs[layer.key][name].noise for layer in group) for name in names}
    found: dict[str, str] = {}
    for name in sorted(names, key=noise.__getitem__):
        found.setdefault(meanings.kernel(name), name)
    return set(found.values())
